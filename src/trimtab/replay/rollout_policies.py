"""Policies of rollout to compare: what others do, and two that learn what a step looks like.

`as_documented` is the common rule with thresholds, cooldowns and one worker a step. `ray_serve` is the rule of Ray
Serve: ongoing requests over a target, looked at over a while, with delays up and down. `predictive` learns how steps
come and go: engines that run empty in the tail are let go at once, all of them while the trainer trains, and all are
back before the next step; nobody's answer is slowed down for it. `cost_aware` puts what is left together as capacity
says, and gives an engine up only where it will be free for longer than giving it up and having it back takes.

All are plain functions of a state and a sample, as `trimtab.fleet.scaling` calls them, and remember plain data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trimtab.fleet.load import Decision, LoadSample, PolicyState, workers_text
from trimtab.model.reason import Code, Reason

WAKE_S, SLEEP_S = 10.0, 5.0  # assumed until measured
WEIGHTS_S = 5.0  # to be up so long before a step, so that new weights find them
MARGIN = 1.25  # costs are judged to be so much higher than measured
LEARNED = 0.5  # weight of the latest step in what is known of steps
SERVE_LOOK_BACK_S, SERVE_UP_S, SERVE_DOWN_S = 30.0, 30.0, 600.0  # Ray Serve's defaults


def as_documented(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """One worker more or fewer once the running requests have been beyond a threshold for the stable period."""
    config, now = state.config, sample.now
    kept = _kept(state, up=None, down=None, high=None, low=None)
    ratio = sample.running / max(sample.active * sample.capacity, 1)
    for side, beyond in (("high", ratio > config.scale_up_threshold), ("low", ratio < config.scale_down_threshold)):
        kept[side] = (now if kept[side] is None else kept[side]) if beyond else None
    long = {side: kept[side] is not None and now - kept[side] >= config.min_stable_period for side in ("high", "low")}
    workers = sample.serving
    if long["high"] and workers < sample.most and _past(kept["up"], config.scale_up_cooldown, now):
        workers, kept["up"] = workers + 1, now
    elif long["low"] and workers > sample.least and _past(kept["down"], config.scale_down_cooldown, now):
        workers, kept["down"] = workers - 1, now
    return _decided(state, sample, kept, workers, f"running load {ratio:.2f}")


def ray_serve(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """Ongoing requests of the last 30 s over the target (two thirds of capacity), after 30 s up and 600 s down."""
    now = sample.now
    kept = _kept(state, seen=[], over=None, under=None)
    seen = [one for one in kept["seen"] if one[0] > now - SERVE_LOOK_BACK_S]
    kept["seen"] = [*seen, [now, sample.load]]
    mean = sum(load for _, load in kept["seen"]) / len(kept["seen"])
    wanted = sample.within(math.ceil(mean / (sample.capacity * state.config.fit_share) - 1e-9))
    serving = sample.serving
    for side, beyond in (("over", wanted > serving), ("under", wanted < serving)):
        kept[side] = (now if kept[side] is None else kept[side]) if beyond else None
    workers = serving
    if (kept["over"] is not None and now - kept["over"] >= SERVE_UP_S) or (
        kept["under"] is not None and now - kept["under"] >= SERVE_DOWN_S
    ):
        workers, kept["over"], kept["under"] = wanted, None, None
    return _decided(state, sample, kept, workers, f"{mean:.0f} ongoing requests, {workers_text(wanted)} would be right")


def predictive(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """All for a step's beginning, no idle one in its tail, the least while it trains, and all back in time."""
    kept = _rhythm(state, sample)
    needed = _fits(state, sample)
    if sample.load == 0:
        free_s = _free_s(kept, sample)
        if free_s is None:
            return _decided(state, sample, kept, sample.serving, "how long training takes is not known yet")
        if free_s <= _back_s(sample, state.config.monitoring_interval):
            return _decided(state, sample, kept, sample.most, f"the next step is due in {free_s:.0f} s")
        return _decided(state, sample, kept, sample.least, f"nothing is asked for another {free_s:.0f} s")
    if kept["pause_s"] is None:
        return _decided(state, sample, kept, sample.serving, "no step has been seen to its end yet")
    if sample.queued or sample.load >= sample.serving:
        return _decided(state, sample, kept, max(needed, sample.serving), f"{sample.load} requests, nobody is idle")
    return _decided(state, sample, kept, sample.load, f"{sample.load} requests are left, and more workers than that")


def cost_aware(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """As many as the load needs; fewer only where they will be free for longer than it takes to give them up."""
    kept = _rhythm(state, sample)
    needed = sample.within(_fits(state, sample))
    serving = sample.serving
    if needed >= serving:
        return _decided(state, sample, kept, needed, f"{sample.load} requests need {workers_text(needed)}")
    free_s = _free_s(kept, sample)
    costs = sample.costs
    cost_s = MARGIN * ((costs.sleep_s or SLEEP_S) + (costs.wake_s or WAKE_S) + (costs.drain_s or 0.0))
    if free_s is None:
        return _decided(state, sample, kept, serving, "how long engines would be free is not known yet")
    if sample.load == 0 and free_s <= _back_s(sample, state.config.monitoring_interval):
        return _decided(state, sample, kept, sample.most, f"the next step is due in {free_s:.0f} s")
    if free_s <= cost_s:
        said = f"free for {free_s:.0f} s, and giving up takes {cost_s:.0f} s"
        return _decided(state, sample, kept, serving, said)
    return _decided(state, sample, kept, needed, f"free for {free_s:.0f} s, longer than the {cost_s:.0f} s it takes")


# ---- what is learned of steps -----------------------------------------------------------------------------------


def _rhythm(state: PolicyState, sample: LoadSample) -> dict[str, Any]:
    """When the step began, when it ended, how long its tail and its pause usually are."""
    kept = _kept(state, begun=None, ended=None, peak=0, half=None, tail_s=None, pause_s=None, load=0)
    now, load = sample.now, sample.load
    if load > 0 and kept["load"] == 0:
        if kept["ended"] is not None:
            kept["pause_s"] = _learned(kept["pause_s"], now - kept["ended"])
        kept.update(begun=now, ended=None, peak=load, half=None)
    elif load == 0 and kept["load"] > 0:
        if kept["half"] is not None:
            kept["tail_s"] = _learned(kept["tail_s"], now - kept["half"])
        kept["ended"] = now
    kept["peak"] = max(kept["peak"], load)
    if kept["half"] is None and not sample.queued and 0 < load < kept["peak"] / 2:
        kept["half"] = now
    kept["load"] = load
    return kept


def _free_s(kept: dict[str, Any], sample: LoadSample) -> float | None:
    """Until the next step begins, as far as that is known."""
    if kept["pause_s"] is None:
        return None
    if kept["ended"] is not None:
        return max(0.0, float(kept["ended"] + kept["pause_s"]) - sample.now)
    tail_s = kept["tail_s"]
    if kept["half"] is None or tail_s is None:
        return None
    return max(0.0, float(kept["half"] + tail_s) - sample.now) + float(kept["pause_s"])


def _back_s(sample: LoadSample, look_s: float) -> float:
    """How long before they are needed engines are to be woken."""
    return MARGIN * (sample.costs.wake_s or WAKE_S) + WEIGHTS_S + 2 * look_s


def _fits(state: PolicyState, sample: LoadSample) -> int:
    return math.ceil(sample.load / (sample.capacity * state.config.fit_share) - 1e-9)


def _learned(known: float | None, now: float) -> float:
    return now if known is None else (1 - LEARNED) * known + LEARNED * now


# ---- pieces -----------------------------------------------------------------------------------------------------


def _kept(state: PolicyState, **first: Any) -> dict[str, Any]:
    return {**first, **(state.memory.kept or {})}


def _past(last: float | None, cooldown_s: float, now: float) -> bool:
    return last is None or now - last >= cooldown_s


def _decided(
    state: PolicyState, sample: LoadSample, kept: dict[str, Any], workers: int, said: str
) -> tuple[PolicyState, Decision]:
    workers = sample.within(workers)
    code = (
        Code.load_fits if workers == sample.serving else Code.load_high if workers > sample.serving else Code.load_low
    )
    after = replace(state, memory=replace(state.memory, kept=kept))
    return after, Decision(workers, Reason(code, said), f"{workers_text(workers)} serve")
