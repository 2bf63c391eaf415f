"""Sweeps of a setting: which value to use, for pools, elastic rollout and replanning.

Values are chosen by the runs of the scenario and evaluated by runs that had no part in the choice: other seeds, or the
later half of a trace. A value that makes something else worse than the current setting is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

from trimtab.core.errors import InputError, check_known
from trimtab.model.elastic_config import ElasticConfig
from trimtab.render.live.simulate import run_all
from trimtab.replay.common.comparison import NamedPolicy, by_policy, spread
from trimtab.replay.common.recommend import Recommendation, best, recommend
from trimtab.replay.pool.figures import ALL, PoolFigures
from trimtab.replay.pool.policies import POOL_KEYS, PREEMPTION_KEYS, SWITCHES, PoolPolicy
from trimtab.replay.pool.scenario import PoolScenario, run_pool
from trimtab.replay.replan.runner import ReplanFigures
from trimtab.replay.replan.scenario import ReplanPolicy, ReplanScenario, run_replan, with_rule
from trimtab.replay.rollout.runner import NO_WAIT_S, SAME_PACE, RolloutFigures, run_rollout
from trimtab.replay.rollout.scenario import RolloutScenario

SEED_OFFSET = 1_000  # of evaluation seeds
MAX_WAIT_RATIO, NEGLIGIBLE_WAIT_S = 1.05, 10.0  # of the first class's waits
MIN_UTILISATION_RATIO = 0.99
WINDOWS = 8  # of a trace: the first is warm-up, three choose, four evaluate
KINDS = {field.name: field.type for field in fields(ElasticConfig) if field.type in ("int", "float", "bool")}

Figures = TypeVar("Figures", PoolFigures, RolloutFigures, ReplanFigures)
ByPolicy = Mapping[str, Sequence[Figures]]


@dataclass(frozen=True)
class SweepRules(Generic[Figures]):
    """Which value is best: the lowest figure, unless it is rejected in comparison with the current setting."""

    figure: Callable[[Figures], float]
    what: str  # the figure, in words
    rejection: Callable[[str, Sequence[Figures], Sequence[Figures]], str]  # why a setting is; empty if it is not

    def recommendation(
        self,
        base: str,
        chosen_by: ByPolicy[Figures],
        judge: Callable[[set[str]], ByPolicy[Figures]],
        runs: str = "seeds",
    ) -> Recommendation:
        """`chosen_by` are the runs that choose; `judge` runs settings with seeds that had no part in the choice."""
        allowed = {
            name: known
            for name, known in chosen_by.items()
            if name == base or not self.rejection(name, known, chosen_by[base])
        }
        figures = self._by_seed(allowed)
        choice = best(base, figures)
        judged_by = judge({base, choice})
        found = recommend(base, figures, self.what, self._by_seed(judged_by), runs)
        why = self.rejection(choice, judged_by[choice], judged_by[base])
        if not why or choice == base:
            return found
        return replace(found, choose=base, sentence=f"keep {base}: {why} in the evaluation runs; {found.sentence}")

    def _by_seed(self, known: ByPolicy[Figures]) -> dict[str, dict[int, float]]:
        return {name: {run.seed: self.figure(run) for run in runs} for name, runs in known.items()}


def _tried(runs: Sequence[Figures], base: NamedPolicy) -> dict[str, list[Figures]]:
    """The runs of a setting and of its variants."""
    return {name: known for name, known in by_policy(runs).items() if f"{name}, ".startswith(f"{base.name}, ")}


def _judge(scenario: Any, run: Any, jobs: int, names: set[str]) -> dict[str, list[Any]]:
    """Runs policies with other seeds."""
    policies = tuple(policy for policy in scenario.policies if policy.name in names)
    seeds = tuple(seed + SEED_OFFSET for seed in scenario.seeds)
    return by_policy(run_all(replace(scenario, policies=policies, seeds=seeds), run, jobs))


# ---- pools ----------------------------------------------------------------------------------------------------------


def pool_sweep(scenario: PoolScenario, key: str, values: Sequence[float], where: str) -> tuple[PoolScenario, list[str]]:
    """The scenario with the current pool settings and with every value of a setting."""
    check_known([key], (*PREEMPTION_KEYS, *POOL_KEYS), where, "{} cannot be swept")
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
    return replace(scenario, policies=(*tried, *others)), []


def _pool_base(scenario: PoolScenario) -> PoolPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), PoolPolicy("trimtab", "trimtab"))


def pool_recommendation(scenario: PoolScenario, runs: Sequence[PoolFigures], jobs: int) -> Recommendation:
    """The value with the shortest waits. Runs evaluation seeds.

    Rejected: values with which the first class waits longer, or less work is done.
    """
    base = _pool_base(scenario)
    rules = SweepRules(lambda run: run.classes[ALL].wait_mean_s, "the mean wait of all tasks", _pool_rejection)
    return rules.recommendation(base.name, _tried(runs, base), partial(_judge, scenario, run_pool, jobs))


def _pool_rejection(name: str, runs: Sequence[PoolFigures], base: Sequence[PoolFigures]) -> str:
    first = next(iter(base[0].classes))
    wait, base_wait = (spread(run.classes[first].wait_mean_s for run in side)[0] for side in (runs, base))
    if wait > max(MAX_WAIT_RATIO * base_wait, NEGLIGIBLE_WAIT_S):
        return f"with {name} the class {first} waits longer"
    done, base_done = (spread(run.utilisation for run in side)[0] for side in (runs, base))
    return f"with {name} less work is done" if done < MIN_UTILISATION_RATIO * base_done else ""


# ---- rollout --------------------------------------------------------------------------------------------------------


def rollout_sweep(
    scenario: RolloutScenario, key: str, values: Sequence[float], where: str
) -> tuple[RolloutScenario, list[str]]:
    """The scenario with its first policy as it is and with every value; and the values left out, with reasons."""
    base = next((policy for policy in scenario.policies if policy.use != "static"), None)
    if base is None:
        raise InputError("only static policies are given", where=where, hint="another --policy")
    if key == "max_workers":
        raise InputError("max_workers cannot be swept", where=where, hint="known: " + ", ".join(KINDS))
    check_known([key], KINDS, where, "{} cannot be swept")
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
    rules = SweepRules(lambda run: run.engine_s, "the number of engine-seconds", _rollout_rejection)
    chosen_by = _tried(runs, base)
    if not scenario.trace:
        return rules.recommendation(base.name, chosen_by, partial(_judge, scenario, run_rollout, jobs))
    first, second = range(1, WINDOWS // 2), range(WINDOWS // 2, WINDOWS)
    chosen_by = _windows(scenario, first, jobs, set(chosen_by))
    return rules.recommendation(base.name, chosen_by, partial(_windows, scenario, second, jobs), "windows")


def _windows(scenario: RolloutScenario, which: range, jobs: int, names: set[str]) -> dict[str, list[RolloutFigures]]:
    """Runs on parts of the trace; a part takes the place of a seed."""
    policies = tuple(policy for policy in scenario.policies if policy.name in names)
    parts = [replace(scenario, policies=policies, seeds=(at,), part=(at / WINDOWS, (at + 1) / WINDOWS)) for at in which]
    return by_policy(run for part in parts for run in run_all(part, run_rollout, jobs))


def _rollout_rejection(name: str, runs: Sequence[RolloutFigures], base: Sequence[RolloutFigures]) -> str:
    """Steps, within SAME_PACE, and waits must be as short."""
    step, base_step = (spread(run.step_s for run in side)[0] for side in (runs, base))
    wait, base_wait = (spread(run.wait_p99_s for run in side)[0] for side in (runs, base))
    is_as_fast = step <= SAME_PACE * base_step and wait <= max(base_wait, NO_WAIT_S)
    return "" if is_as_fast else f"{name} slows down"


# ---- replanning -----------------------------------------------------------------------------------------------------


def replan_sweep(
    scenario: ReplanScenario, key: str, values: Sequence[float], where: str
) -> tuple[ReplanScenario, list[str]]:
    """The scenario with the current rules and with every other value of a setting."""
    base = _replan_base(scenario)
    tried = [with_rule(base, key, value, where) for value in values]
    tried = [policy for policy in tried if policy.rules != base.rules]
    if not tried:
        raise InputError(f"{key} has these values already", where=where)
    others = tuple(policy for policy in scenario.policies if policy is not base)
    return replace(scenario, policies=(base, *tried, *others)), []


def _replan_base(scenario: ReplanScenario) -> ReplanPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), ReplanPolicy("trimtab", "trimtab"))


def replan_recommendation(scenario: ReplanScenario, runs: Sequence[ReplanFigures], jobs: int) -> Recommendation:
    """The value with the shortest run. Runs evaluation seeds.

    Rejected: values with which a run did not finish.
    """
    base = _replan_base(scenario)
    rules = SweepRules(lambda run: run.total_s, "the time of the run", _replan_rejection)
    return rules.recommendation(base.name, _tried(runs, base), partial(_judge, scenario, run_replan, jobs))


def _replan_rejection(name: str, runs: Sequence[ReplanFigures], base: Sequence[ReplanFigures]) -> str:
    return "" if all(run.finished for run in runs) else f"with {name} the run does not finish"
