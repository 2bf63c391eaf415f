"""Runs one policy of a scenario of RL jobs with one seed, and says what it came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from trimtab.machines.replan.machine import ReplanMachine
from trimtab.model.run import ReplanMode, ReplanRules
from trimtab.replay.replan.baselines import best_static, kept
from trimtab.replay.replan.driver import (
    AGAIN,
    MOVES,
    WAITS,
    ReplanListener,
    ReplanOutcome,
    ReplanReplay,
    SimulatedMigration,
    free_oracle,
)
from trimtab.replay.replan.reality import TrueCosts

USES = {
    "trimtab": "the loop machine: re-plans when costs or nodes have really changed, and moves when that pays",
    "kept": "the first plan, left only when its GPUs go",
    "static": "the plan that was best to keep, as is known in hindsight; left only when its GPUs go",
    "oracle": "knows the true costs and re-plans for nothing before every iteration",
}
AUTO = ReplanRules(mode=ReplanMode.auto)


@dataclass(frozen=True)
class ReplanFigures:
    """One run of one policy. Seconds are of the run; what a loss made void is in `void_s`."""

    policy: str
    seed: int
    finished: bool
    iterations: int  # that count
    total_s: float
    iteration_s: float  # the median
    moves: int  # that arrived
    rolled_back: int
    forced: int  # of those that arrived: the plan before had lost its GPUs
    moving_s: float  # the run stood still for moves
    void_s: float  # iterations that were run again after a loss
    waiting_s: float  # for nodes
    void: int
    decisions: int
    events: int
    looks: int  # at what must be true
    first_plan: str
    last_plan: str
    walls_s: tuple[float, ...] = ()
    moved: tuple[SimulatedMigration, ...] = ()
    seconds: float = 0.0  # that the simulation took


def loop_run(
    truth: TrueCosts,
    rules: ReplanRules,
    *,
    on_event: ReplanListener | None = None,
    progress: Callable[[float], None] | None = None,
) -> ReplanOutcome:
    """The run with the loop machine that runs live."""
    reality, first = truth.reality, truth.first()
    machine = ReplanMachine(reality.job.workflow, reality.job.cluster, first.plan, rules, reality.allowed)
    return ReplanReplay(machine, truth, rules, on_event=on_event, progress=progress).run()


def run_policy(
    use: str, truth: TrueCosts, rules: ReplanRules = AUTO, progress: Callable[[float], None] | None = None
) -> ReplanOutcome:
    """One of the known policies."""
    if use == "trimtab":
        return loop_run(truth, rules, progress=progress)
    if use == "oracle":
        return free_oracle(truth)
    return kept(truth, rules) if use == "kept" else best_static(truth, rules)


def figures(outcome: ReplanOutcome, policy: str, seed: int) -> ReplanFigures:
    """Sum a run up."""
    arrived = [one for one in outcome.moves if one.arrived]
    return ReplanFigures(
        policy,
        seed,
        outcome.finished,
        len(outcome.walls_s),
        outcome.total_s,
        median(outcome.walls_s) if outcome.walls_s else 0.0,
        len(arrived),
        len(outcome.moves) - len(arrived),
        sum(one.forced for one in arrived),
        outcome.spent[MOVES],
        outcome.spent[AGAIN],
        outcome.spent[WAITS],
        outcome.void,
        outcome.decisions,
        outcome.events,
        outcome.looks,
        outcome.first,
        outcome.last,
        tuple(outcome.walls_s),
        tuple(outcome.moves),
    )
