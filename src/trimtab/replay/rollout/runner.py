"""Runs one policy of a rollout scenario with one seed, and says what it came to, beside bounds nobody can pass."""

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
    """One run of one policy."""

    policy: str
    seed: int
    step_s: float  # mean, from the first prompt to the last answer; of a trace: from its begin to its end
    worst_step_s: float
    engine_s: float  # engines awake, times seconds; of a step with its training, or of the whole trace
    usable_s: float  # engine-seconds that somebody else could use
    wait_p99_s: float  # from arrival to the first engine
    busy_s: float  # of the engine-seconds: at least one request was there
    least_engine_s: float  # nobody can do it with fewer, whatever it knows
    moved: float
    scalings: int
    events: int
    checks: int
    answered: int
    loads: tuple[int, ...] = ()  # of a trace, by second of what is counted: requests that were not answered
    seconds: float = 0.0


NO_WAIT_S = 1.0  # in the queue: waits below it are not told apart
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
    """One policy, one seed."""
    replay = RolloutReplay(policy.elastic, scenario.fleet)
    if scenario.profile is not None:
        profile = scenario.profile
        batches = profile.lengths(scenario.steps, scenario.prompts, scenario.samples, seed)
        outcome = replay.closed(profile, batches, seed)
        answers = [(profile.prompt_tokens, tokens) for batch in batches for tokens in batch.values()]
        prompts = scenario.steps * scenario.prompts * profile.prompt_tokens
        return _figures(scenario, policy, seed, outcome, answers, prompts)
    begin_s, end_s = scenario.counted_s
    rows = [one for one in scenario.rows if one.arrival_s / scenario.rate <= end_s]
    outcome = replay.open(rows, scenario.rate, begin_s)
    outcome.steps_s = [outcome.total_s]
    answers = [
        (one.input_tokens, max(one.output_tokens, 1)) for one in rows if one.arrival_s / scenario.rate >= begin_s
    ]
    found = _figures(scenario, policy, seed, outcome, answers, 0)
    return replace(found, loads=_by_second(outcome.loads, begin_s, begin_s + outcome.total_s))


def _by_second(loads: dict[int, int], begin_s: float, end_s: float) -> tuple[int, ...]:
    """Where nobody came, as many as when somebody did last."""
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
        # What a smaller static fleet leaves over is somebody else's all the time.
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
    """Engine-seconds of one who knows a trace, and sleeps and wakes engines for nothing.

    It has in every second the fewest engines that take the load there was, as full as they can be. The load is that of
    the smallest number of engines with which nobody waits for long; with fewer, each is slower, and the load greater.
    Never less than anybody needs at least. A strong rule and not a proof. None: with every number somebody waits.
    """
    known = [(engines, one) for engines, one in static if one.loads and one.wait_p99_s <= NO_WAIT_S]
    if not known:
        return None
    engines, one = min(known, key=lambda pair: pair[0])
    total, most = 0, max(number for number, _ in static)
    for load in one.loads:
        fewest = 1
        while fewest < most and on(limit, load, engines, fewest) > fewest * limit:
            fewest += 1
        total += fewest
    return max(float(total), one.least_engine_s)
