"""The policy `threshold`: keeps the load between two shares of capacity, with as few steps as possible.

What must never happen: a worker is released on a stale or missing sample, or while its load would not fit the others;
workers move back and forth under a constant load.

The step that must not exist is down to a number from which the same load would ask for a step up. So both directions
aim at one number, the fewest workers whose load stays at the middle of the two thresholds: after a step the load is
neither above the upper threshold nor does it fit one worker fewer.

Down is judged by the peak load of the last `min_stable_period`, observed without a gap. Up is judged by an overload
that began that long ago and has not ended; a lull ends it only if the mean of that period is below the threshold too,
so overload in bursts counts and a single spike does not.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout.policies.load import (
    Decision,
    ExpectedEffect,
    LoadSample,
    LoadSpan,
    PolicyMemory,
    PolicyState,
)
from trimtab.model.elastic_config import ElasticConfig

SPANS_KEPT = 32  # of load history: older ones are merged, so that it stays bounded
GAP_INTERVALS = 2.5  # evaluations further apart than this many intervals leave a gap
SPIKE_CAP = 2.0  # in a mean, a load counts for at most this multiple of the threshold
ASSUMED_SWITCH_S = 60.0  # sleep plus wake, until they have been measured
ROUNDING = 1e-9


def threshold(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """As many workers as keep the load between the two thresholds, with as few steps as possible."""
    memory = _look(state, sample)
    memory, checked, came_true = _check(memory, sample)
    workers, reason = _decide(state.config, memory, sample)
    step = workers - sample.serving
    if step:
        memory, checked, came_true, reason = _stepped(memory, sample, checked, came_true, reason)
    # The expectation of a step is kept until checked.
    expected = memory.expected or _expectation(state.config, sample, workers)
    memory = replace(memory, expected=expected)
    return replace(state, memory=memory), Decision(workers, reason, _expects(expected), checked, came_true)


def _decide(config: ElasticConfig, memory: PolicyMemory, sample: LoadSample) -> tuple[int, Reason]:
    """Worker count and reason. Limits come first, then unknown load, then the load."""
    serving, inside = sample.serving, sample.inside
    if inside != serving:
        limit = f"at least {sample.min_workers}" if inside > serving else f"at most {sample.max_workers}"
        return inside, Reason(ReasonCode.limits, f"{counted(serving, 'worker')} serve, {limit} must: {inside}")
    if not config.enable_elastic:
        return serving, Reason(ReasonCode.switched_off, f"enable_elastic is off: {counted(serving, 'worker')} stay")
    if not sample.fresh:
        reason = Reason(
            ReasonCode.load_unknown, f"the load is not known: {counted(serving, 'worker')} stay until it is"
        )
        return serving, reason
    if sample.ratio > config.scale_up_threshold:
        return _up(config, memory, sample)
    if sample.ratio < config.scale_down_threshold:
        return _down(config, memory, sample)
    sentence = f"{_load(sample)} is between {config.scale_down_threshold:g} and {config.scale_up_threshold:g}"
    return serving, Reason(ReasonCode.load_fits, sentence)


def _up(config: ElasticConfig, memory: PolicyMemory, sample: LoadSample) -> tuple[int, Reason]:
    serving, now = sample.serving, sample.now
    window = _window(memory.spans, now - config.min_stable_period)
    needed = _needed(config, sample, max(float(sample.load), _mean(window, math.inf)))
    workers = max(sample.within(needed), serving)
    above = f"{_load(sample)} is above {config.scale_up_threshold:g}"
    if workers == serving:
        sentence = f"{above}, {counted(needed, 'worker')} are needed, but at most {sample.max_workers} are allowed"
        return serving, Reason(ReasonCode.limits, sentence)
    if serving == 0:  # requests wait and no worker serves: no stability period needed
        return workers, Reason(ReasonCode.load_high, f"{_load(sample)}: 0 to {counted(workers, 'worker')}")
    since = now if memory.over_since is None else memory.over_since
    if now - since < config.min_stable_period - ROUNDING:
        sentence = f"{above} for {now - since:.3g} s; it must be so for {config.min_stable_period:g} s"
        return serving, Reason(ReasonCode.not_yet, sentence)
    left_s = _left_s(memory.last_up, config.scale_up_cooldown, now)
    if left_s > 0:
        reason = Reason(ReasonCode.not_yet, f"{above}; cooldown after the last step up, the next in {left_s:.3g} s")
        return serving, reason
    short = "" if workers == needed else f" ({needed} are needed)"
    back = min(sample.draining_workers, workers - serving)
    called = f", {back} of them called back from draining" if back else ""
    return workers, Reason(ReasonCode.load_high, f"{above}: {serving} to {counted(workers, 'worker')}{short}{called}")


def _down(config: ElasticConfig, memory: PolicyMemory, sample: LoadSample) -> tuple[int, Reason]:
    serving, now = sample.serving, sample.now
    window = _window(memory.spans, now - config.min_stable_period)
    peak = max([float(sample.load), *(span.peak for span in window)])
    needed = sample.within(_needed(config, sample, peak))
    below = f"{_load(sample)} is below {config.scale_down_threshold:g}"
    if serving <= sample.min_workers:
        return serving, Reason(ReasonCode.limits, f"{below}, but at least {sample.min_workers} must serve")
    if sample.within(_needed(config, sample, sample.load)) >= serving:
        reason = Reason(ReasonCode.load_fits, f"{below}, but would be above {config.fit_share:.3g} on one worker fewer")
        return serving, reason
    known_s = 0.0 if memory.known_since is None else now - memory.known_since
    if known_s < config.min_stable_period - ROUNDING or needed >= serving:
        was = f"known for {known_s:.3g} s" if needed < serving else f"but the peak was {peak:g} requests"
        return serving, Reason(ReasonCode.not_yet, f"{below}, {was}; it must be so for {config.min_stable_period:g} s")
    left_s = max(
        _left_s(memory.last_down, config.scale_down_cooldown, now),
        _left_s(memory.last_up, config.scale_down_cooldown, now),
    )
    if left_s > 0:
        reason = Reason(ReasonCode.not_yet, f"{below}; cooldown after the last step, the next down in {left_s:.3g} s")
        return serving, reason
    if config.scale_down_requires_demand:
        return for_takers(sample, needed, below)
    return needed, Reason(ReasonCode.load_low, f"{below}: {serving} to {counted(needed, 'worker')}")


def for_takers(sample: LoadSample, needed: int, below: str) -> tuple[int, Reason]:
    """Release no more workers than takers can use for longer than a release and return takes."""
    sleep_s, wake_s = sample.costs.sleep_s, sample.costs.wake_s
    measured = sleep_s is not None and wake_s is not None
    switch_s = (sleep_s or 0.0) + (wake_s or 0.0) if measured else ASSUMED_SWITCH_S
    takes = f"sleep and wake take {switch_s:.3g} s" + ("" if measured else " (assumed: not measured yet)")
    wanting = [taker for taker in sample.takers if taker.workers > 0 and taker.use_s > switch_s]
    if not wanting:
        listed = ", ".join(f"{taker.name} only for {taker.use_s:.3g} s" for taker in sample.takers if taker.workers > 0)
        return sample.serving, Reason(ReasonCode.no_taker, f"{below}, but no taker needs a worker ({listed or takes})")
    spare = min(sample.serving - needed, sum(taker.workers for taker in wanting))
    given = spare if measured else min(spare, 1)  # one is enough to measure it
    names = ", ".join(
        f"{taker.name} ({taker.use_s:.3g} s)" for taker in sorted(wanting, key=lambda taker: -taker.use_s)
    )
    workers = sample.serving - given
    sentence = f"{below}: {sample.serving} to {counted(workers, 'worker')}, for {names}; {takes}"
    reason = Reason(ReasonCode.load_low, sentence)
    return workers, reason


def _needed(config: ElasticConfig, sample: LoadSample, load: float) -> int:
    """The fewest workers on which the load is at most the target share of capacity."""
    return math.ceil(load / (sample.capacity * config.fit_share) - ROUNDING)


def _left_s(last: float | None, cooldown_s: float, now: float) -> float:
    left = 0.0 if last is None else last + cooldown_s - now
    return left if left > ROUNDING else 0.0


# ---- memory --------------------------------------------------------------------------------------------


def _look(state: PolicyState, sample: LoadSample) -> PolicyMemory:
    memory, config, now = state.memory, state.config, sample.now
    if not sample.fresh:
        # The evidence of low load restarts; an overload may go on, if the next evaluation is in time.
        return replace(memory, known_since=None)
    gap_s = math.inf if memory.last_at is None else now - memory.last_at
    late = not 0 <= gap_s <= GAP_INTERVALS * config.monitoring_interval
    spans = _window(memory.spans, now - config.min_stable_period)
    if memory.last_at is not None and memory.known_since is not None and not late:
        span = LoadSpan(memory.last_at, now, memory.last_load, memory.last_load)
        spans = _joined((*spans, span), config.min_stable_period)
        known_since = memory.known_since
    else:
        known_since = now
    over_since = None if late else memory.over_since
    return replace(
        memory,
        spans=spans,
        last_at=now,
        last_load=float(sample.load),
        known_since=known_since,
        over_since=_over_since(config, over_since, spans, sample),
    )


def _over_since(
    config: ElasticConfig, over_since: float | None, spans: tuple[LoadSpan, ...], sample: LoadSample
) -> float | None:
    """Start of the current overload; None: there is none."""
    if sample.ratio > config.scale_up_threshold:
        return sample.now if over_since is None else over_since
    limit = config.scale_up_threshold * sample.serving * sample.capacity
    mean = _mean(_window(spans, sample.now - config.min_stable_period), SPIKE_CAP * limit)
    return over_since if mean > limit else None


def _window(spans: tuple[LoadSpan, ...], start: float) -> tuple[LoadSpan, ...]:
    return tuple(replace(span, start=max(span.start, start)) for span in spans if span.end > start)


def _joined(spans: tuple[LoadSpan, ...], period_s: float) -> tuple[LoadSpan, ...]:
    """Bounds the number of spans: merges the last two while both are short."""
    if len(spans) < 2:
        return spans
    before, last = spans[-2], spans[-1]
    if before.end != last.start or last.end - before.start > period_s / SPANS_KEPT:
        return spans
    whole = last.end - before.start
    share = (last.end - last.start) / whole if whole > 0 else 0.0
    mean = before.mean * (1 - share) + last.mean * share
    return (*spans[:-2], LoadSpan(before.start, last.end, mean, max(before.peak, last.peak)))


def _mean(spans: tuple[LoadSpan, ...], cap: float) -> float:
    """Mean load over time, each load capped."""
    whole = sum(span.end - span.start for span in spans)
    if whole <= 0:
        return 0.0
    return sum(min(span.mean, cap) * (span.end - span.start) for span in spans) / whole


# ---- expectations ----------------------------------------------------------------------------------------------


def _stepped(
    memory: PolicyMemory, sample: LoadSample, checked: str, came_true: bool | None, reason: Reason
) -> tuple[PolicyMemory, str, bool | None, Reason]:
    """Memory after a step, and the reason with the outcome of the step before."""
    if memory.expected is not None and memory.expected.step:
        came_true, checked = _outcome(memory.expected, sample)
        memory = replace(memory, outcome=checked)
    if memory.outcome:
        reason = Reason(reason.code, f"{reason.sentence}; {memory.outcome}")
    memory = replace(memory, expected=None, outcome="", over_since=None)
    if reason.code is ReasonCode.load_high:  # a step for the limits does not start a cooldown
        memory = replace(memory, last_up=sample.now)
    elif reason.code is ReasonCode.load_low:
        memory = replace(memory, last_down=sample.now)
    return memory, checked, came_true, reason


def _expectation(config: ElasticConfig, sample: LoadSample, workers: int) -> ExpectedEffect:
    max_ratio = max(
        _share(sample, workers), config.fit_share if workers != sample.serving else config.scale_up_threshold
    )
    return ExpectedEffect(sample.now, workers, max_ratio, workers - sample.serving)


def _share(sample: LoadSample, workers: int) -> float:
    return sample.load / (max(workers, 1) * sample.capacity)


def _expects(expected: ExpectedEffect) -> str:
    return f"{counted(expected.workers, 'worker')} serve, load at most {expected.ratio:.2f} of capacity"


def _check(memory: PolicyMemory, sample: LoadSample) -> tuple[PolicyMemory, str, bool | None]:
    """Outcome of the last decision, once its workers have come or gone."""
    expected = memory.expected
    if expected is None or not sample.fresh:
        return memory, "", None
    if expected.step > 0 and sample.starting and sample.serving >= expected.workers:
        return memory, "", None
    if expected.step < 0 and sample.draining_workers and sample.serving <= expected.workers:
        return memory, "", None
    came_true, text = _outcome(expected, sample)
    return replace(memory, expected=None, outcome=text if expected.step else memory.outcome), text, came_true


def _outcome(expected: ExpectedEffect, sample: LoadSample) -> tuple[bool, str]:
    share = _share(sample, sample.serving)
    true = sample.serving == expected.workers and share <= expected.ratio + ROUNDING
    what = "the last step" if expected.step else "what was expected"
    seen = f"{counted(sample.serving, 'worker')}, load {share:.2f}"
    if true:
        return True, f"{what} came true ({seen})"
    return False, f"{what} did not come true ({expected.workers} and at most {expected.ratio:.2f} expected; {seen})"


def _load(sample: LoadSample) -> str:
    counts = ((sample.queued, "queued"), (sample.running, "running"), (sample.draining, "draining"))
    parts = [f"{count} {word}" for count, word in counts if count]
    return f"load {sample.ratio:.2f} ({', '.join(parts) or 'no requests'})"
