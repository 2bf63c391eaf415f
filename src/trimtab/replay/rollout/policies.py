"""Policies of rollout to compare with: what others do.

`as_documented` is the common rule with thresholds, cooldowns and one worker a step. `ray_serve` is the rule of Ray
Serve: ongoing requests over a target, looked at over a while, with delays up and down. Both are plain functions of a
state and a sample, as `trimtab.machines.rollout.policies.policy` calls them, and remember plain data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState, workers_text

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
    if long["high"] and workers < sample.max_workers and _past(kept["up"], config.scale_up_cooldown, now):
        workers, kept["up"] = workers + 1, now
    elif long["low"] and workers > sample.min_workers and _past(kept["down"], config.scale_down_cooldown, now):
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
        ReasonCode.load_fits
        if workers == sample.serving
        else ReasonCode.load_high
        if workers > sample.serving
        else ReasonCode.load_low
    )
    after = replace(state, memory=replace(state.memory, kept=kept))
    return after, Decision(workers, Reason(code, said), f"{workers_text(workers)} serve")
