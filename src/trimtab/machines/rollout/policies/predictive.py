"""The policy `predictive`: learns the load pattern, and has workers ready before they are needed.

Two load patterns are told apart. In steps, all prompts arrive at once, and the next ones arrive after the training
step: workers that run empty in the tail of a step are released, all but the minimum while it trains, and all are back
before the next step. A stream has no end (`trimtab.machines.rollout.policies.stream`): as many workers as its last
minutes needed.

What must never happen: an answer of a step is slowed down by packing it with others; prompts of a step find workers
asleep because of a pause length that was never observed (but for the one that measures, once, how long waking takes); a
worker is released on a stale or missing sample.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from statistics import fmean
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout.policies import stream
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState
from trimtab.machines.rollout.policies.stream import StreamMemory
from trimtab.machines.rollout.policies.threshold import for_takers

WAKE_S, SLEEP_S = 10.0, 5.0  # assumed until measured
WEIGHTS_S = 5.0  # lead time before a step, for the weight sync
MARGIN = 1.25  # safety factor on measured wake times
BEGIN_S = 10.0  # the prompts of a step arrive within this time, or within two evaluations
KEPT = 8  # steps and pauses
SPREAD = 0.1  # relative spread of pauses: the prior, with the weight of one observation
SURE = 3.0  # standard deviations: a shorter pause than expected costs far more than early workers
RISES = 5  # rises of the load after a begin that make it a stream ...
LONG = 3.0  # ... if it lasts this many times as long as observed steps
BURSTS, UNLIKE = 4, 2.0  # this many loads, the largest so many times the smallest, with short pauses: a stream too


class LoadPattern(Frozen):
    """Observed steps and pauses. Times are those of evaluations; None: never observed."""

    load: int = 0  # at the last evaluation
    begun: float | None = None  # of the current load
    ended: float | None = None  # of the last step
    first: int = 0  # the peak while prompts arrived
    rises: int = 0
    late: bool = False  # more arrived after the begin of a step
    steps: tuple[float, ...] = ()  # durations, the latest last
    pauses: tuple[float, ...] = ()  # between steps, the latest last
    peaks: tuple[int, ...] = ()  # requests of the last loads, the latest last
    probed: bool = False  # a worker was put to sleep to measure it
    idle: tuple[tuple[float, int], ...] = ()  # time, idle workers
    rose: bool = False  # the current load looks like a stream
    streams: bool = False  # the load before did

    def look(self, sample: LoadSample, interval_s: float, rent_s: float) -> LoadPattern:
        now, load = sample.now, sample.load
        idle = (*(entry for entry in self.idle if entry[0] >= now - rent_s - interval_s), (now, sample.idle))
        known = replace(self, load=load, idle=idle)
        if load > 0 and self.load == 0:
            pauses = self.pauses
            if self.ended is not None:
                pauses = (*pauses, now - self.ended)[-KEPT:]
            return replace(known, begun=now, ended=None, first=load, rises=0, late=False, pauses=pauses, rose=False)
        if load > 0 and self.begun is not None:
            return known._goes_on(self.load, now, max(BEGIN_S, 2 * interval_s))
        if self.load > 0 and self.begun is not None:  # it is over
            known = replace(known, begun=None, peaks=(*self.peaks, self.first)[-KEPT:])
            if self.rose:
                return replace(known, ended=None, pauses=(), steps=(), streams=True)
            steps = (*self.steps, now - self.begun)[-KEPT:]
            return replace(known, ended=now, steps=steps, streams=known._bursts(rent_s))
        return known

    def _bursts(self, rent_s: float) -> bool:
        """Loads of unlike sizes, with pauses in which no worker could sleep: a stream that touches zero, and no steps.

        Steps of a training have like numbers of prompts.
        """
        unlike = len(self.peaks) >= BURSTS and max(self.peaks) >= UNLIKE * min(self.peaks)
        return unlike and bool(self.pauses) and fmean(self.pauses) < rent_s

    def _goes_on(self, before: int, now: float, begin_s: float) -> LoadPattern:
        begun = self.begun if self.begun is not None else now
        if now - begun <= begin_s:
            return replace(self, first=max(self.first, self.load))
        rises = self.rises + (self.load > before)
        if self.pauses and self.steps:
            rose = rises >= RISES and now - begun > LONG * max(self.steps) + begin_s
        else:
            rose = rises >= RISES or self.load > self.first
        return replace(self, rises=rises, late=self.late or rises > 0, rose=self.rose or rose)

    @property
    def stream(self) -> bool:
        return self.rose or self.streams

    def pause_s(self) -> float:
        """Lower bound of the next pause, from the observed ones."""
        mean = fmean(self.pauses)
        squares = sum((pause_s - mean) ** 2 for pause_s in self.pauses) + (SPREAD * mean) ** 2
        return max(0.0, min(min(self.pauses), mean - SURE * math.sqrt(squares / len(self.pauses))))

    def spare(self, now: float, rent_s: float, interval_s: float) -> int:
        """Workers that were idle for at least as long as a release and return takes."""
        seen = [idle for at, idle in self.idle if at >= now - rent_s - interval_s]
        whole = self.idle and self.idle[0][0] <= now - rent_s
        return min(seen) if seen and whole else 0

    def gave(self, count: int) -> LoadPattern:
        return replace(self, idle=tuple((at, max(idle - count, 0)) for at, idle in self.idle))


class PredictiveMemory(Frozen):
    """What the policy remembers between evaluations."""

    pattern: LoadPattern = LoadPattern()
    stream: StreamMemory = field(default_factory=StreamMemory)


def predictive(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """All workers at the begin of a step, no idle one in its tail, the minimum while it trains, all back in time."""
    config, memory, workers = state.config, _known(state.memory.kept), sample.serving
    if sample.inside != sample.serving:
        workers, code, text = sample.inside, ReasonCode.limits, "the limits require another number"
    elif not config.enable_elastic:
        code, text = ReasonCode.switched_off, "enable_elastic is off"
    elif not sample.fresh:
        code, text = ReasonCode.load_unknown, "the load is not known"
    else:
        memory, workers, code, text = _by_load(state, memory, sample)
    after = replace(state, memory=replace(state.memory, kept=encode(memory)))
    return after, Decision(workers, Reason(code, text), f"{counted(workers, 'worker')} serve")


def _by_load(
    state: PolicyState, memory: PredictiveMemory, sample: LoadSample
) -> tuple[PredictiveMemory, int, ReasonCode, str]:
    config, interval_s = state.config, state.config.monitoring_interval
    pattern, stream_memory = memory.pattern.look(sample, interval_s, _rent_s(sample)), memory.stream.look(sample)
    if pattern.stream:
        workers, text = _in_stream(state, sample, stream_memory)
    elif sample.costs.wake_s is None:
        workers, text = _probe(pattern, sample)
        pattern = replace(pattern, probed=pattern.probed or workers < sample.serving)
    elif sample.load == 0:
        workers, text = _between(pattern, sample, interval_s)
    else:
        workers, text = _in_step(pattern, sample, interval_s)
    workers = sample.within(workers)
    code = ReasonCode.load_fits if workers == sample.serving else ReasonCode.load_high
    if workers < sample.serving:
        code = ReasonCode.load_low
        if config.scale_down_requires_demand:
            workers, reason = for_takers(sample, workers, text)
            code, text = reason.code, reason.sentence
    if workers != sample.serving:
        pattern = pattern.gave(max(sample.serving - workers, 0))
        stream_memory = stream_memory.stepped(sample, workers) if pattern.stream else stream_memory
        text = f"{text}: {sample.serving} to {counted(workers, 'worker')}"
    return PredictiveMemory(pattern, stream_memory), workers, code, text


def _in_stream(state: PolicyState, sample: LoadSample, stream_memory: StreamMemory) -> tuple[int, str]:
    needed = stream.up(
        stream_memory, sample, MARGIN * (sample.costs.wake_s or WAKE_S) + state.config.monitoring_interval
    )
    if needed > sample.serving:
        return needed, f"{sample.load} requests, {sample.queued} of them wait, and it rises"
    fewest = stream.down(stream_memory, sample)
    if fewest < sample.serving and not sample.queued and stream_memory.may_down(sample.now, state.config):
        return fewest, f"the load of the last {stream.REMEMBERED_S:g} s would fit"
    return sample.serving, f"{sample.load} requests, as many as the last minutes needed"


def _probe(pattern: LoadPattern, sample: LoadSample) -> tuple[int, str]:
    """Measure instead of guess: an idle worker of a tail, or of the first pause, sleeps and is woken at once."""
    if sample.draining_workers or (pattern.probed and sample.serving >= sample.max_workers):
        return sample.serving, "how long waking takes is not known yet"
    if sample.serving < sample.max_workers:
        return sample.max_workers, "a sleeping worker is needed"
    if not sample.idle or sample.queued or (not sample.load and pattern.ended is None):
        return sample.serving, "how long waking takes is not known yet"
    return sample.serving - 1, "an idle worker sleeps and wakes once to measure how long that takes"


def _between(pattern: LoadPattern, sample: LoadSample, interval_s: float) -> tuple[int, str]:
    if pattern.ended is None:
        return sample.serving, "no request has arrived yet"
    if not pattern.pauses:
        return sample.max_workers, "how long it is until the next step is not known yet"
    left_s = max(0.0, pattern.ended + pattern.pause_s() - sample.now)
    free_s = left_s - _back_s(sample, interval_s)
    if free_s <= 0:
        return sample.max_workers, f"the next step is due in {left_s:.0f} s"
    if free_s <= _sleep_s(sample):
        return sample.serving, f"the next step is due in {left_s:.0f} s, too soon to release a worker"
    return sample.min_workers, f"no request is expected for {left_s:.0f} s"


def _in_step(pattern: LoadPattern, sample: LoadSample, interval_s: float) -> tuple[int, str]:
    if sample.queued:
        return sample.max_workers, f"{sample.queued} requests of a step wait"
    left = f"{sample.load} requests of a step are left"
    if not sample.idle:
        return sample.serving, f"{left}, and no worker is idle"
    if not pattern.pauses:
        return sample.serving, f"{left}, and how long it is until the next one is not known yet"
    if pattern.late and pattern.spare(sample.now, _rent_s(sample), interval_s) < sample.idle:
        return sample.serving, f"{left}, and more may come"
    # The step may end at any moment; released workers must be back when the next one begins.
    pause_s = pattern.pause_s() - _back_s(sample, interval_s)
    if pause_s <= 0:
        return sample.serving, f"{left}, and the next one comes too soon to release a worker"
    return sample.serving - sample.idle, f"{left}, {counted(sample.idle, 'worker')} idle"


def _rent_s(sample: LoadSample) -> float:
    return MARGIN * (_sleep_s(sample) + (sample.costs.wake_s or WAKE_S))


def _sleep_s(sample: LoadSample) -> float:
    return sample.costs.sleep_s or SLEEP_S


def _back_s(sample: LoadSample, interval_s: float) -> float:
    """How long before they are needed workers are woken."""
    return MARGIN * (sample.costs.wake_s or WAKE_S) + WEIGHTS_S + 2 * interval_s


def _known(kept: Any) -> PredictiveMemory:
    """The memory; that of another policy or version is ignored."""
    try:
        return decode(PredictiveMemory, kept)
    except (TypeError, KeyError, ValueError, AttributeError):
        return PredictiveMemory()
