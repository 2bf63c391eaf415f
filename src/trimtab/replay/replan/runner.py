"""Runs a policy of a replan scenario with a seed and returns its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

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
    "trimtab": "the replan machine: re-plans when costs or nodes have changed significantly, migrates when that pays",
    "kept": "the first plan, left only when its GPUs go",
    "static": "the best static plan in hindsight; left only when its GPUs go",
    "oracle": "knows the true costs and re-plans at no cost before every iteration",
}
AUTO = ReplanRules(mode=ReplanMode.auto)


@dataclass(frozen=True)
class ReplanFigures:
    """Figures of a run. Seconds are of the run; work voided by a loss is in `void_s`."""

    policy: str
    seed: int
    finished: bool
    iterations: int  # counted
    total_s: float
    iteration_s: float  # median
    moves: int  # completed
    rolled_back: int
    forced: int  # of the completed: the GPUs of the plan before were lost
    moving_s: float  # standing still for migrations
    void_s: float  # iterations run again after a loss
    waiting_s: float  # waiting for nodes
    void: int
    decisions: int
    events: int
    looks: int  # invariant checks
    first_plan: str
    last_plan: str
    walls_s: tuple[float, ...] = ()
    moved: tuple[SimulatedMigration, ...] = ()
    seconds: float = 0.0  # wall time of the simulation

    def record(self) -> dict[str, Any]:
        return asdict(self)


def loop_run(
    truth: TrueCosts,
    rules: ReplanRules,
    *,
    on_event: ReplanListener | None = None,
    progress: Callable[[float], None] | None = None,
) -> ReplanOutcome:
    """Runs with the replan machine that runs live."""
    reality, first = truth.reality, truth.first()
    machine = ReplanMachine(reality.job.workflow, reality.job.cluster, first.plan, rules, reality.allowed)
    return ReplanReplay(machine, truth, rules, on_event=on_event, progress=progress).run()


def run_policy(
    use: str, truth: TrueCosts, rules: ReplanRules = AUTO, progress: Callable[[float], None] | None = None
) -> ReplanOutcome:
    if use == "trimtab":
        return loop_run(truth, rules, progress=progress)
    if use == "oracle":
        return free_oracle(truth)
    return kept(truth, rules) if use == "kept" else best_static(truth, rules)


def figures(outcome: ReplanOutcome, policy: str, seed: int) -> ReplanFigures:
    arrived = [move for move in outcome.moves if move.arrived]
    return ReplanFigures(
        policy,
        seed,
        outcome.finished,
        len(outcome.walls_s),
        outcome.total_s,
        median(outcome.walls_s) if outcome.walls_s else 0.0,
        len(arrived),
        len(outcome.moves) - len(arrived),
        sum(move.forced for move in arrived),
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
