"""Runs a policy of a rollout scenario with a seed and returns its figures, beside lower bounds.

The clairvoyant bound: for steps, the engine-seconds in which a static fleet of the best pace had any work, which is
what a policy needs that knows the future and sleeps and wakes at no cost. For a trace, the fewest engines that serve
the load in every second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from trimtab.machines.rollout.policies.stream import on
from trimtab.replay.common.comparison import Comparison, PolicySummary, Spread, by_policy, spread, spreads
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.pool.figures import percentile
from trimtab.replay.rollout.driver import RolloutOutcome, RolloutReplay
from trimtab.replay.rollout.engine_model import least_engine_s
from trimtab.replay.rollout.scenario import RolloutPolicy, RolloutScenario


@dataclass(frozen=True)
class RolloutFigures:
    """Figures of a run."""

    policy: str
    seed: int
    step_s: float  # mean, from the first prompt to the last answer; for a trace: its whole length
    worst_step_s: float
    engine_s: float  # awake engine-seconds; per step including training, or of the whole trace
    usable_s: float  # engine-seconds that other tasks could use
    wait_p99_s: float  # from arrival to the first engine
    busy_s: float  # of the engine-seconds: with at least one request
    least_engine_s: float  # lower bound for any policy
    moved: float
    scalings: int
    events: int
    checks: int
    answered: int
    loads: tuple[int, ...] = ()  # for a trace, by counted second: unanswered requests
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "loads"}


SAME_PACE = 1.02  # steps within this ratio count as equally fast
NO_WAIT_S = 1.0  # queue waits below this count as none
FIGURES = (
    "step_s",
    "worst_step_s",
    "engine_s",
    "usable_s",
    "wait_p99_s",
    "busy_s",
    "least_engine_s",
    "moved",
    "scalings",
)


def run_rollout(
    scenario: RolloutScenario, policy: RolloutPolicy, seed: int, progress: Callable[[float], None] | None = None
) -> RolloutFigures:
    replay = RolloutReplay(policy.elastic, scenario.fleet)
    if scenario.profile is not None:
        profile = scenario.profile
        batches = profile.lengths(scenario.steps, scenario.prompts, scenario.samples, seed)
        outcome = replay.closed(profile, batches, seed)
        answers = [(profile.prompt_tokens, tokens) for batch in batches for tokens in batch.values()]
        prompts = scenario.steps * scenario.prompts * profile.prompt_tokens
        return _figures(scenario, policy, seed, outcome, answers, prompts)
    begin_s, end_s = scenario.counted_s
    rows = [row for row in scenario.rows if row.arrival_s / scenario.rate <= end_s]
    outcome = replay.open(rows, scenario.rate, begin_s)
    outcome.steps_s = [outcome.total_s]
    answers = [
        (row.input_tokens, max(row.output_tokens, 1)) for row in rows if row.arrival_s / scenario.rate >= begin_s
    ]
    found = _figures(scenario, policy, seed, outcome, answers, 0)
    return replace(found, loads=_by_second(outcome.loads, begin_s, begin_s + outcome.total_s))


def _by_second(loads: dict[int, int], begin_s: float, end_s: float) -> tuple[int, ...]:
    """Load by second; seconds without arrivals keep the last value."""
    last, found = 0, []
    for at in range(int(end_s)):
        last = loads.get(at, last)
        found.append(last)
    return tuple(found[int(begin_s) :])


def _figures(
    scenario: RolloutScenario,
    policy: RolloutPolicy,
    seed: int,
    outcome: RolloutOutcome,
    answers: list[tuple[int, int]],
    prompts: int,
) -> RolloutFigures:
    fleet, steps = scenario.fleet, len(outcome.steps_s)
    engines = min(policy.elastic.max_workers, fleet.engines)
    waits = sorted(outcome.waits_s)
    return RolloutFigures(
        policy.name,
        seed,
        fmean(outcome.steps_s),
        max(outcome.steps_s),
        (engines * outcome.total_s - outcome.asleep_s) / steps,
        # Engines that a smaller static fleet does not have are usable all the time.
        (outcome.usable_s + (fleet.engines - engines) * outcome.total_s) / steps,
        percentile(waits, 0.99) if waits else math.nan,
        outcome.busy_s / steps,
        least_engine_s(fleet.speed, fleet.limit, answers, prompts) / steps,
        outcome.moved / steps,
        outcome.scalings,
        outcome.events,
        outcome.checks,
        outcome.answered,
    )


def clairvoyant_engine_s(static: Sequence[tuple[int, RolloutFigures]], limit: int) -> float | None:
    """Engine-seconds of a policy that knows the trace and sleeps and wakes engines at no cost.

    In every second it has the fewest engines that hold the load, as full as possible. The load is that of the smallest
    static fleet without long waits; fewer engines are slower each, so the load grows. Never below the lower bound. A
    strong heuristic, not a proven optimum. None: requests wait with every static fleet.
    """
    known = [(engines, run) for engines, run in static if run.loads and run.wait_p99_s <= NO_WAIT_S]
    if not known:
        return None
    engines, run = min(known, key=lambda pair: pair[0])
    total, most = 0, max(number for number, _ in static)
    for load in run.loads:
        fewest = 1
        while fewest < most and on(limit, load, engines, fewest) > fewest * limit:
            fewest += 1
        total += fewest
    return max(float(total), run.least_engine_s)


# ---- comparison ---------------------------------------------------------------------------------------------------


def compare_rollouts(
    scenario: RolloutScenario, runs: Sequence[RolloutFigures], advice: Recommendation | None = None
) -> Comparison[RolloutScenario, RolloutFigures]:
    """Facts of a policy, in engine-seconds: `against_static`, relative to the cheapest static fleet as fast (None:
    none is); `regret`, relative to the clairvoyant bound, minus 1.
    """
    known = by_policy(runs)
    found = {policy.name: spreads(known[policy.name], FIGURES) for policy in scenario.policies}
    static = [found[policy.name] for policy in scenario.policies if policy.use == "static"]
    bound = clairvoyant_s(scenario, runs)
    rows = []
    for name, figures in found.items():
        rivals = [fleet["engine_s"][0] for fleet in static if _as_fast(scenario, fleet, figures)]
        engine_s = figures["engine_s"][0]
        facts = {
            "against_static": engine_s / min(rivals) if rivals else None,
            "regret": None if bound is None else engine_s / bound - 1,
        }
        rows.append(PolicySummary(name, figures, facts))
    return Comparison(scenario, runs, rows, {"clairvoyant_engine_s": bound}, advice)


def _as_fast(scenario: RolloutScenario, figures: Mapping[str, Spread], other: Mapping[str, Spread]) -> bool:
    """Whether steps, or waits for an engine, are no longer than those of `other`."""
    if scenario.trace is None:
        return figures["step_s"][0] <= SAME_PACE * other["step_s"][0]
    return figures["wait_p99_s"][0] <= max(other["wait_p99_s"][0], NO_WAIT_S)


def clairvoyant_s(scenario: RolloutScenario, runs: Sequence[RolloutFigures]) -> float | None:
    """The clairvoyant bound in engine-seconds; None without a static policy."""
    numbers = {policy.name: policy.elastic.max_workers for policy in scenario.policies if policy.use == "static"}
    if not numbers:
        return None
    if scenario.trace is not None:
        first = [(numbers[run.policy], run) for run in runs if run.policy in numbers and run.seed == scenario.seeds[0]]
        return clairvoyant_engine_s(first, scenario.fleet.limit)
    known = {name: [run for run in runs if run.policy == name] for name in numbers}
    pace_s = min(spread(run.step_s for run in fleet_runs)[0] for fleet_runs in known.values())
    return min(
        spread(run.busy_s for run in fleet_runs)[0]
        for fleet_runs in known.values()
        if spread(run.step_s for run in fleet_runs)[0] <= SAME_PACE * pace_s
    )
