"""Sweep of a pool setting: the value with the shortest waits that neither delays the first class nor lowers
utilisation.

Values are chosen by the runs of the scenario and evaluated with other seeds. A value is rejected if the first class
waits longer than with the current setting, or less work is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.core.errors import InputError, nearest
from trimtab.render.live.simulate import pool_runs
from trimtab.replay.common.recommend import Recommendation, best, recommend
from trimtab.replay.pool.figures import ALL, PoolFigures, spread
from trimtab.replay.pool.policies import POOL_KEYS, PREEMPTION_KEYS, SWITCHES, PoolPolicy
from trimtab.replay.pool.scenario import PoolScenario

SEED_OFFSET = 1_000  # of evaluation seeds
MAX_WAIT_RATIO, NEGLIGIBLE_WAIT_S = 1.05, 10.0  # of the first class's waits
MIN_UTILISATION_RATIO = 0.99

ByName = dict[str, list[PoolFigures]]


def swept(scenario: PoolScenario, key: str, values: Sequence[float], where: str) -> PoolScenario:
    """The scenario with the current pool settings and with every value of a setting."""
    known = (*PREEMPTION_KEYS, *POOL_KEYS)
    if key not in known:
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
        raise InputError(f"{key} cannot be swept", where=where, hint=hint)
    base = _base(scenario)
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


def _base(scenario: PoolScenario) -> PoolPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), PoolPolicy("trimtab", "trimtab"))


def recommendation(scenario: PoolScenario, runs: Sequence[PoolFigures], jobs: int) -> Recommendation:
    """The recommendation for the swept setting. Runs evaluation seeds."""
    base = _base(scenario)
    tried = [policy for policy in scenario.policies if policy is base or policy.name.startswith(f"{base.name}, ")]
    chosen_by = _by_name(runs, tried)
    allowed = {name: known for name, known in chosen_by.items() if not _rejection(known, chosen_by[base.name])}
    choice = best(base.name, _waits(allowed))
    asked = tuple(policy for policy in tried if policy.name in (base.name, choice))
    seeds = tuple(seed + SEED_OFFSET for seed in scenario.seeds)
    judged_by = _by_name(pool_runs(replace(scenario, policies=asked, seeds=seeds), jobs), asked)
    found = recommend(base.name, _waits(allowed), "the mean wait of all tasks", _waits(judged_by))
    cost = _rejection(judged_by[choice], judged_by[base.name])
    if cost:
        sentence = f"keep {base.name}: with {choice} {cost} in the evaluation runs; {found.sentence}"
        return replace(found, choose=base.name, sentence=sentence)
    return found


def _by_name(runs: Sequence[PoolFigures], policies: Sequence[PoolPolicy]) -> ByName:
    return {policy.name: [run for run in runs if run.policy == policy.name] for policy in policies}


def _waits(known: Mapping[str, Sequence[PoolFigures]]) -> dict[str, dict[int, float]]:
    return {name: {run.seed: run.classes[ALL].wait_mean_s for run in runs} for name, runs in known.items()}


def _rejection(runs: Sequence[PoolFigures], base: Sequence[PoolFigures]) -> str:
    """Why a setting is rejected; empty if it is not."""
    first = next(iter(base[0].classes))
    wait, base_wait = (spread(run.classes[first].wait_mean_s for run in side)[0] for side in (runs, base))
    if wait > max(MAX_WAIT_RATIO * base_wait, NEGLIGIBLE_WAIT_S):
        return f"the class {first} waits longer"
    done, base_done = (spread(run.utilisation for run in side)[0] for side in (runs, base))
    return "less work is done" if done < MIN_UTILISATION_RATIO * base_done else ""
