"""Sweep of an elastic rollout setting: the value with the fewest engine-seconds that slows nothing down.

Values are chosen by the runs of the scenario and evaluated with other seeds, or on the later half of a trace. A value
is rejected if steps or waits are longer than with the current setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from trimtab.core.errors import InputError, nearest
from trimtab.model.elastic_config import ElasticConfig
from trimtab.render.html.simulate.rollout import SAME_PACE
from trimtab.render.live.simulate import rollout_runs
from trimtab.replay.common.recommend import Recommendation, best, recommend
from trimtab.replay.pool.figures import spread
from trimtab.replay.rollout.runner import NO_WAIT_S, RolloutFigures
from trimtab.replay.rollout.scenario import RolloutPolicy, RolloutScenario

SEED_OFFSET = 1_000  # of evaluation seeds
WINDOWS = 8  # of a trace: the first is warm-up, three choose, four evaluate
KINDS = {field.name: field.type for field in fields(ElasticConfig) if field.type in ("int", "float", "bool")}

ByName = dict[str, list[RolloutFigures]]


def swept(
    scenario: RolloutScenario, key: str, values: Sequence[float], where: str
) -> tuple[RolloutScenario, list[str]]:
    """The scenario with its first policy as it is and with every value; and the values left out, with reasons."""
    base = next((policy for policy in scenario.policies if policy.use != "static"), None)
    if base is None:
        raise InputError("only static policies are given", where=where, hint="another --policy")
    if key not in KINDS or key == "max_workers":
        near = nearest(key, KINDS)
        hint = f"did you mean {near}?" if near else "known: " + ", ".join(KINDS)
        raise InputError(f"{key} cannot be swept", where=where, hint=hint)
    tried, left_out = [], []
    for value in values:
        name = f"{base.name}, {key} {value:g}"
        if value == getattr(base.elastic, key):
            continue  # the current value
        try:
            changed: dict[str, Any] = {key: _of_kind(key, value)}
            tried.append(replace(base, name=name, elastic=replace(base.elastic, **changed)))
        except InputError as error:
            left_out.append(f"{key} {value:g} left out: {error.what}")
    if not tried:
        raise InputError("; ".join(left_out) or f"{key} has these values already", where=where)
    others = tuple(policy for policy in scenario.policies if policy is not base)
    return replace(scenario, policies=(base, *tried, *others)), left_out


def _of_kind(key: str, value: float) -> float | int | bool:
    if KINDS[key] == "float":
        return value
    if value != int(value):
        raise InputError(f"{value:g} is not a whole number")
    return bool(value) if KINDS[key] == "bool" else int(value)


def recommendation(scenario: RolloutScenario, runs: Sequence[RolloutFigures], jobs: int) -> Recommendation:
    """The recommendation for the swept setting. Runs evaluation seeds or windows."""
    base = next(policy for policy in scenario.policies if policy.use != "static")
    tried = [policy for policy in scenario.policies if policy is base or policy.name.startswith(f"{base.name}, ")]
    chosen_by = _windows(scenario, tried, range(1, WINDOWS // 2), jobs) if scenario.trace else _by_name(runs, tried)
    allowed = {name: known for name, known in chosen_by.items() if _no_slower(known, chosen_by[base.name])}
    figures = _engine_s(allowed)
    choice = best(base.name, figures)
    evaluated = [policy for policy in tried if policy.name in (base.name, choice)]
    if scenario.trace:
        judged_by = _windows(scenario, evaluated, range(WINDOWS // 2, WINDOWS), jobs)
    else:
        seeds = tuple(seed + SEED_OFFSET for seed in scenario.seeds)
        judged_by = _by_name(rollout_runs(replace(scenario, policies=tuple(evaluated), seeds=seeds), jobs), evaluated)
    found = recommend(
        base.name,
        figures,
        "the number of engine-seconds",
        _engine_s(judged_by),
        "windows" if scenario.trace else "seeds",
    )
    if not _no_slower(judged_by[choice], judged_by[base.name]):
        sentence = f"keep {base.name}: {choice} slows down in the evaluation runs; {found.sentence}"
        return replace(found, choose=base.name, sentence=sentence)
    return found


def _windows(scenario: RolloutScenario, policies: Sequence[RolloutPolicy], which: range, jobs: int) -> ByName:
    """Runs on parts of the trace; a part takes the place of a seed."""
    found: ByName = {policy.name: [] for policy in policies}
    for at in which:
        part = (at / WINDOWS, (at + 1) / WINDOWS)
        for run in rollout_runs(replace(scenario, policies=tuple(policies), seeds=(at,), part=part), jobs):
            found[run.policy].append(run)
    return found


def _by_name(runs: Sequence[RolloutFigures], policies: Sequence[RolloutPolicy]) -> ByName:
    return {policy.name: [run for run in runs if run.policy == policy.name] for policy in policies}


def _engine_s(known: Mapping[str, Sequence[RolloutFigures]]) -> dict[str, dict[int, float]]:
    return {name: {run.seed: run.engine_s for run in runs} for name, runs in known.items()}


def _no_slower(runs: Sequence[RolloutFigures], base: Sequence[RolloutFigures]) -> bool:
    """Whether steps, within SAME_PACE, and waits are as short."""
    step, base_step = (spread(run.step_s for run in side)[0] for side in (runs, base))
    wait, base_wait = (spread(run.wait_p99_s for run in side)[0] for side in (runs, base))
    return step <= SAME_PACE * base_step and wait <= max(base_wait, NO_WAIT_S)
