"""Scaling policies to compare with.

`as_documented` is the common rule with thresholds, cooldowns and one worker per step. `ray_serve` is the rule of Ray
Serve: ongoing requests over a target, averaged over a window, with delays up and down. Both are functions of a state
and a sample, with the interface of `trimtab.machines.rollout.policies.policy`, and keep plain data as memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trimtab.core.reasons import Reason, ReasonCode, counted
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyState

SERVE_LOOK_BACK_S, SERVE_UP_S, SERVE_DOWN_S = 30.0, 30.0, 600.0  # Ray Serve's defaults


def as_documented(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """One worker more or less after the running requests were beyond a threshold for the stable period."""
    config, now = state.config, sample.now
    kept = _memory(state, up=None, down=None, high=None, low=None)
    ratio = sample.running / max(sample.active * sample.capacity, 1)
    for side, beyond in (("high", ratio > config.scale_up_threshold), ("low", ratio < config.scale_down_threshold)):
        kept[side] = (now if kept[side] is None else kept[side]) if beyond else None
    long = {side: kept[side] is not None and now - kept[side] >= config.min_stable_period for side in ("high", "low")}
    workers = sample.serving
    if long["high"] and workers < sample.max_workers and _cooled_down(kept["up"], config.scale_up_cooldown, now):
        workers, kept["up"] = workers + 1, now
    elif long["low"] and workers > sample.min_workers and _cooled_down(kept["down"], config.scale_down_cooldown, now):
        workers, kept["down"] = workers - 1, now
    return _decided(state, sample, kept, workers, f"running load {ratio:.2f}")


def ray_serve(state: PolicyState, sample: LoadSample) -> tuple[PolicyState, Decision]:
    """Mean ongoing requests of 30 s over the target (fit_share of capacity), after 30 s up and 600 s down."""
    now = sample.now
    kept = _memory(state, seen=[], over=None, under=None)
    seen = [entry for entry in kept["seen"] if entry[0] > now - SERVE_LOOK_BACK_S]
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
    return _decided(state, sample, kept, workers, f"{mean:.0f} ongoing requests, {counted(wanted, 'worker')} wanted")


def _memory(state: PolicyState, **first: Any) -> dict[str, Any]:
    return {**first, **(state.memory.kept or {})}


def _cooled_down(last: float | None, cooldown_s: float, now: float) -> bool:
    return last is None or now - last >= cooldown_s


def _decided(
    state: PolicyState, sample: LoadSample, kept: dict[str, Any], workers: int, sentence: str
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
    return after, Decision(workers, Reason(code, sentence), f"{counted(workers, 'worker')} serve")
