"""Runs a policy of a rollout scenario with a seed and returns its figures, beside lower bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from trimtab.machines.rollout.policies.stream import on
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


def run_rollout(scenario: RolloutScenario, policy: RolloutPolicy, seed: int) -> RolloutFigures:
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
