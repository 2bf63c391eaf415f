"""Sweeps of a setting: which value to use, for pools, elastic rollout and replanning.

Values are chosen by the runs of the scenario and evaluated by runs that had no part in the choice: other seeds, or the
later half of a trace. A value that makes something else worse than the current setting is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from trimtab.core.errors import InputError, nearest
from trimtab.model.elastic_config import ElasticConfig
from trimtab.render.html.simulate.rollout import SAME_PACE
from trimtab.render.live.simulate import loop_runs, pool_runs, rollout_runs
from trimtab.render.text.simulate import NamedPolicy
from trimtab.replay.common.recommend import Recommendation, best, recommend
from trimtab.replay.pool.figures import ALL, PoolFigures, spread
from trimtab.replay.pool.policies import POOL_KEYS, PREEMPTION_KEYS, SWITCHES, PoolPolicy
from trimtab.replay.pool.scenario import PoolScenario
from trimtab.replay.replan.runner import ReplanFigures
from trimtab.replay.replan.scenario import ReplanPolicy, ReplanScenario, with_rule
from trimtab.replay.rollout.runner import NO_WAIT_S, RolloutFigures
from trimtab.replay.rollout.scenario import RolloutPolicy, RolloutScenario

SEED_OFFSET = 1_000  # of evaluation seeds
MAX_WAIT_RATIO, NEGLIGIBLE_WAIT_S = 1.05, 10.0  # of the first class's waits
MIN_UTILISATION_RATIO = 0.99
WINDOWS = 8  # of a trace: the first is warm-up, three choose, four evaluate
KINDS = {field.name: field.type for field in fields(ElasticConfig) if field.type in ("int", "float", "bool")}

Figures = TypeVar("Figures", PoolFigures, RolloutFigures, ReplanFigures)


Policy = TypeVar("Policy", bound=NamedPolicy)


def _variants(policies: Sequence[Policy], base: Policy) -> list[Policy]:
    return [policy for policy in policies if policy is base or policy.name.startswith(f"{base.name}, ")]


def _evaluation_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    return tuple(seed + SEED_OFFSET for seed in seeds)


def _by_name(runs: Sequence[Figures], policies: Sequence[NamedPolicy]) -> dict[str, list[Figures]]:
    return {policy.name: [run for run in runs if run.policy == policy.name] for policy in policies}


def _by_seed(known: Mapping[str, Sequence[Figures]], value: Callable[[Figures], float]) -> dict[str, dict[int, float]]:
    return {name: {run.seed: value(run) for run in runs} for name, runs in known.items()}


def _unknown(key: str, known: Sequence[str], where: str) -> InputError:
    near = nearest(key, known)
    hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
    return InputError(f"{key} cannot be swept", where=where, hint=hint)


# ---- pools ----------------------------------------------------------------------------------------------------------


def pool_sweep(scenario: PoolScenario, key: str, values: Sequence[float], where: str) -> PoolScenario:
    """The scenario with the current pool settings and with every value of a setting."""
    known = (*PREEMPTION_KEYS, *POOL_KEYS)
    if key not in known:
        raise _unknown(key, known, where)
    base = _pool_base(scenario)
    tried = [base]
    for value in values:
        setting = {key: bool(value) if key in SWITCHES else value}
        changed = replace(base, name=f"{base.name}, {key} {value:g}")
        if key in PREEMPTION_KEYS:
            tried.append(replace(changed, preemption={**base.preemption, **setting}))
        else:
            tried.append(replace(changed, pool={**base.pool, **setting}))
    others = [policy for policy in scenario.policies if policy is not base]
    return replace(scenario, policies=(*tried, *others))


def _pool_base(scenario: PoolScenario) -> PoolPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), PoolPolicy("trimtab", "trimtab"))


def pool_recommendation(scenario: PoolScenario, runs: Sequence[PoolFigures], jobs: int) -> Recommendation:
    """The value with the shortest waits. Runs evaluation seeds.

    Rejected: values with which the first class waits longer, or less work is done.
    """
    base = _pool_base(scenario)
    tried = _variants(scenario.policies, base)
    chosen_by = _by_name(runs, tried)
    allowed = {name: known for name, known in chosen_by.items() if not _rejection(known, chosen_by[base.name])}
    waits = _by_seed(allowed, _mean_wait_s)
    choice = best(base.name, waits)
    evaluated = tuple(policy for policy in tried if policy.name in (base.name, choice))
    seeds = _evaluation_seeds(scenario.seeds)
    judged_by = _by_name(pool_runs(replace(scenario, policies=evaluated, seeds=seeds), jobs), evaluated)
    found = recommend(base.name, waits, "the mean wait of all tasks", _by_seed(judged_by, _mean_wait_s))
    cost = _rejection(judged_by[choice], judged_by[base.name])
    if cost:
        sentence = f"keep {base.name}: with {choice} {cost} in the evaluation runs; {found.sentence}"
        return replace(found, choose=base.name, sentence=sentence)
    return found


def _mean_wait_s(run: PoolFigures) -> float:
    return run.classes[ALL].wait_mean_s


def _rejection(runs: Sequence[PoolFigures], base: Sequence[PoolFigures]) -> str:
    """Why a setting is rejected; empty if it is not."""
    first = next(iter(base[0].classes))
    wait, base_wait = (spread(run.classes[first].wait_mean_s for run in side)[0] for side in (runs, base))
    if wait > max(MAX_WAIT_RATIO * base_wait, NEGLIGIBLE_WAIT_S):
        return f"the class {first} waits longer"
    done, base_done = (spread(run.utilisation for run in side)[0] for side in (runs, base))
    return "less work is done" if done < MIN_UTILISATION_RATIO * base_done else ""


# ---- rollout --------------------------------------------------------------------------------------------------------


def rollout_sweep(
    scenario: RolloutScenario, key: str, values: Sequence[float], where: str
) -> tuple[RolloutScenario, list[str]]:
    """The scenario with its first policy as it is and with every value; and the values left out, with reasons."""
    base = next((policy for policy in scenario.policies if policy.use != "static"), None)
    if base is None:
        raise InputError("only static policies are given", where=where, hint="another --policy")
    if key not in KINDS or key == "max_workers":
        raise _unknown(key, tuple(KINDS), where)
    tried, left_out = [], []
    for value in values:
        name = f"{base.name}, {key} {value:g}"
        if value == getattr(base.elastic, key):
            continue  # the current value
        try:
            changed: dict[str, Any] = {key: _of_kind(key, value)}
            tried.append(replace(base, name=name, elastic=replace(base.elastic, **changed)))
        except InputError as error:
            left_out.append(f"{key} {value:g} is left out: {error.what}")
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


def rollout_recommendation(scenario: RolloutScenario, runs: Sequence[RolloutFigures], jobs: int) -> Recommendation:
    """The value with the fewest engine-seconds. Runs evaluation seeds, or windows of the trace.

    Rejected: values with longer steps or waits.
    """
    base = next(policy for policy in scenario.policies if policy.use != "static")
    tried = _variants(scenario.policies, base)
    chosen_by = _windows(scenario, tried, range(1, WINDOWS // 2), jobs) if scenario.trace else _by_name(runs, tried)
    allowed = {name: known for name, known in chosen_by.items() if _no_slower(known, chosen_by[base.name])}
    figures = _by_seed(allowed, _engine_s)
    choice = best(base.name, figures)
    evaluated = [policy for policy in tried if policy.name in (base.name, choice)]
    if scenario.trace:
        judged_by = _windows(scenario, evaluated, range(WINDOWS // 2, WINDOWS), jobs)
    else:
        seeds = _evaluation_seeds(scenario.seeds)
        judged_by = _by_name(rollout_runs(replace(scenario, policies=tuple(evaluated), seeds=seeds), jobs), evaluated)
    found = recommend(
        base.name,
        figures,
        "the number of engine-seconds",
        _by_seed(judged_by, _engine_s),
        "windows" if scenario.trace else "seeds",
    )
    if not _no_slower(judged_by[choice], judged_by[base.name]):
        sentence = f"keep {base.name}: {choice} slows down in the evaluation runs; {found.sentence}"
        return replace(found, choose=base.name, sentence=sentence)
    return found


def _windows(
    scenario: RolloutScenario, policies: Sequence[RolloutPolicy], which: range, jobs: int
) -> dict[str, list[RolloutFigures]]:
    """Runs on parts of the trace; a part takes the place of a seed."""
    found: dict[str, list[RolloutFigures]] = {policy.name: [] for policy in policies}
    for at in which:
        part = (at / WINDOWS, (at + 1) / WINDOWS)
        for run in rollout_runs(replace(scenario, policies=tuple(policies), seeds=(at,), part=part), jobs):
            found[run.policy].append(run)
    return found


def _engine_s(run: RolloutFigures) -> float:
    return run.engine_s


def _no_slower(runs: Sequence[RolloutFigures], base: Sequence[RolloutFigures]) -> bool:
    """Whether steps, within SAME_PACE, and waits are as short."""
    step, base_step = (spread(run.step_s for run in side)[0] for side in (runs, base))
    wait, base_wait = (spread(run.wait_p99_s for run in side)[0] for side in (runs, base))
    return step <= SAME_PACE * base_step and wait <= max(base_wait, NO_WAIT_S)


# ---- replanning -----------------------------------------------------------------------------------------------------


def replan_sweep(scenario: ReplanScenario, key: str, values: Sequence[float], where: str) -> ReplanScenario:
    """The scenario with the current rules and with every other value of a setting."""
    base = _replan_base(scenario)
    tried = [with_rule(base, key, value, where) for value in values]
    tried = [policy for policy in tried if policy.rules != base.rules]
    if not tried:
        raise InputError(f"{key} has these values already", where=where)
    others = tuple(policy for policy in scenario.policies if policy is not base)
    return replace(scenario, policies=(base, *tried, *others))


def _replan_base(scenario: ReplanScenario) -> ReplanPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), ReplanPolicy("trimtab", "trimtab"))


def replan_recommendation(scenario: ReplanScenario, runs: Sequence[ReplanFigures], jobs: int) -> Recommendation:
    """The value with the shortest run. Runs evaluation seeds.

    Rejected: values with which a run did not finish.
    """
    base = _replan_base(scenario)
    tried = _variants(scenario.policies, base)
    chosen_by = _by_name(runs, tried)
    allowed = {
        name: known for name, known in chosen_by.items() if name == base.name or all(run.finished for run in known)
    }
    figures = _by_seed(allowed, _total_s)
    choice = best(base.name, figures)
    evaluated = tuple(policy for policy in tried if policy.name in (base.name, choice))
    seeds = _evaluation_seeds(scenario.seeds)
    judged_by = _by_name(loop_runs(replace(scenario, policies=evaluated, seeds=seeds), jobs), evaluated)
    return recommend(base.name, figures, "the time of the run", _by_seed(judged_by, _total_s))


def _total_s(run: ReplanFigures) -> float:
    return run.total_s
