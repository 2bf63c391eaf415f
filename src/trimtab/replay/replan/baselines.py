"""Baselines of the replan machine: a plan that is kept, the best static plan in hindsight.

A kept plan is left only when its GPUs go: for the best plan on the remaining GPUs at the profiled costs. Its migrations
go through the same stages in the same reality. The best static plan is the plan with which the whole run, kept like
that, would have been shortest; candidates are the plans that were best at some iteration, for the initial nodes or for
the nodes that are present throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan import events as e
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.migration import MigrationState, MigrationTracker, OngoingMigration
from trimtab.machines.replan.placed_plan import PlacedPlan, changes, gpu_slots, on_current_gpus, without
from trimtab.model.run import DecisionNumbers, Migration, ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster
from trimtab.replay.replan import driver
from trimtab.replay.replan.reality import PlanCache, TrueCosts


class KeptPlanPolicy:
    """Keeps a plan until its GPUs go."""

    def __init__(self, plans: PlanCache, first: PlacedPlan, cluster: Cluster, rules: ReplanRules) -> None:
        self._plans = plans
        self._sited = first
        self._cluster = cluster
        self._leaving: tuple[str, ...] = ()
        self._lost: tuple[str, ...] = ()  # nodes of the plan that are lost, or were since it was placed
        self.now = 0.0
        self._done = 0
        self._out: list[e.ReplanInstruction] = []
        patient = replace(rules, stage_limit_s=1e9, rollback_limit_s=1e9)
        self._migrations = MigrationState(None, 0, [])
        outcomes = (self._arrived, lambda moving: None, lambda moving, reason: None)
        self._moves = MigrationTracker(patient, self._migrations, self, self._out, *outcomes)

    def handle(self, event: e.ReplanEvent, now: float) -> list[e.ReplanInstruction]:
        """Processes an event and returns instructions."""
        self.now = now
        self._out.clear()
        if isinstance(event, e.MigrationStageDone):
            self._moves.stage_done(event)
        elif isinstance(event, e.MigrationStageFailed):
            self._moves.stage_failed(event)
        elif isinstance(event, e.RolledBack):
            self._moves.rolled_back(event)
        elif isinstance(event, e.ReplanTick):
            self._moves.late()
        elif isinstance(event, e.RunResumed):
            self._done = event.iteration
            if self._migrations.moving is not None:
                self._moves.fail("the run was resumed during the migration")
        elif isinstance(event, e.IterationDone):
            self._done = event.iteration.number
            if self._migrations.moving is not None:
                self._out.append(
                    e.KeepPlan(Reason(ReasonCode.moving, f"migration {self._migrations.begun} is under way"), _ANY)
                )
            elif not self._must_go():
                self._out.append(e.KeepPlan(Reason(ReasonCode.no_gain, "the plan is always kept"), _ANY))
        elif isinstance(event, e.ClusterChanged):
            names = {node.name for node in event.cluster.nodes}
            gone = [node.name for node in self._cluster.nodes if node.name not in names]
            self._lost += tuple(name for name in gone if self._sited.uses((name,)))
            self._cluster, self._leaving = event.cluster, event.leaving
            moving = self._migrations.moving
            if moving is not None and (moving.to.on(self._cluster) is None or moving.to.uses(self._leaving)):
                self._moves.fail("GPUs of the new plan are gone or will go")
        if self._migrations.moving is None and self._must_go():
            self._go()
        return list(self._out)

    def _must_go(self) -> bool:
        return bool(self._lost) or self._sited.uses(self._leaving)

    def _go(self) -> None:
        try:
            to = on_current_gpus(self._plans.best(without(self._cluster, self._leaving), {}), self._sited)
        except (InfeasibleError, InputError) as error:
            self._out.append(
                e.Notify(Reason(ReasonCode.no_plan, f"GPUs of the plan are gone or will go; {error.what}"))
            )
            return
        reason = Reason(ReasonCode.plan_gone, f"GPUs of the plan are gone or will go; {to.plan.describe()}")
        alive = frozenset(seat for seat in gpu_slots(self._cluster) if seat[0] not in self._lost)
        numbers = DecisionNumbers(new_iteration_s=to.plan.iteration_seconds)
        changed = changes(self._sited, to, alive)
        move = Migration(self._migrations.begun + 1, self._sited.plan, to.plan, changed, reason, numbers, forced=True)
        self._moves.begin(move, to, {}, 0.0)

    def _arrived(self, moving: OngoingMigration) -> None:
        self._sited, self._lost = moving.to, ()

    def next_deadline(self) -> float | None:
        moving = self._migrations.moving
        return None if moving is None else moving.deadline

    def check(self) -> None:
        """Nothing to check beyond ReplanInvariants."""

    @property
    def placed_plan(self) -> PlacedPlan:
        return self._sited

    @property
    def moving_to(self) -> PlacedPlan | None:
        return None if self._migrations.moving is None else self._migrations.moving.to

    @property
    def iterations(self) -> int:
        return self._done

    @property
    def stopped(self) -> Reason | None:
        """It waits for nodes without limit."""
        return None


_ANY = DecisionNumbers(iteration_s=0.0, horizon=0)


def kept(truth: TrueCosts, rules: ReplanRules, first: PlacedPlan | None = None) -> driver.ReplanOutcome:
    """Runs with a plan that is left only when its GPUs go."""
    begin = truth.first() if first is None else first
    here = begin.on(truth.reality.job.cluster)
    assert here is not None, "a plan for nodes that do not exist at the start"
    decider = KeptPlanPolicy(truth.plans, here, truth.reality.job.cluster, rules)
    return driver.ReplanReplay(decider, truth, rules).run()


def best_static(truth: TrueCosts, rules: ReplanRules) -> driver.ReplanOutcome:
    """Runs with the static plan that is best in hindsight."""
    here, always = truth.reality.job.cluster, throughout(truth, rules)
    found = [truth.first(), *_candidates(truth, here), *(_candidates(truth, always) if always != here else ())]
    # Ranks count from the first node: the same groups on the same cluster are the same GPUs.
    candidates = {(p.cluster, p.plan.describe(), tuple(c.variant for c in p.plan.components)): p for p in found}
    runs = [kept(truth, rules, placed) for placed in candidates.values()]
    return min(runs, key=lambda run: (not run.finished, -len(run.walls_s), run.total_s))


def throughout(truth: TrueCosts, rules: ReplanRules) -> Cluster:
    """Nodes that are present from start to end of a run that keeps its first plan."""
    reality = truth.reality
    end = kept(truth, rules).total_s if any(event.at_s is not None for event in reality.happens) else 0.0
    gone = {
        event.node.name
        for event in reality.happens
        if event.what != "joined" and (event.at_s is None or event.at_s <= end)
        and (event.before is None or event.before <= reality.iterations)
    }  # fmt: skip
    return without(reality.job.cluster, tuple(gone))


def _candidates(truth: TrueCosts, cluster: Cluster) -> list[PlacedPlan]:
    try:
        found = [truth.best(cluster, number) for number in range(1, truth.reality.iterations + 1)]
    except (InfeasibleError, InputError):
        return []
    return found


USES = {
    "trimtab": "the replan machine: re-plans when costs or nodes have changed significantly, migrates when that pays",
    "kept": "the first plan, left only when its GPUs go",
    "static": "the best static plan in hindsight; left only when its GPUs go",
    "oracle": "knows the true costs and re-plans at no cost before every iteration",
}
AUTO = ReplanRules(mode=ReplanMode.auto)


class ReplanFigures(Frozen):
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
    moved: tuple[driver.SimulatedMigration, ...] = ()
    seconds: float = 0.0  # wall time of the simulation

    def record(self) -> dict[str, Any]:
        return asdict(self)


def loop_run(
    truth: TrueCosts,
    rules: ReplanRules,
    *,
    on_event: driver.ReplanListener | None = None,
    progress: Callable[[float], None] | None = None,
) -> driver.ReplanOutcome:
    reality, first = truth.reality, truth.first()
    machine = ReplanMachine(reality.job.workflow, reality.job.cluster, first.plan, rules, reality.allowed)
    return driver.ReplanReplay(machine, truth, rules, on_event=on_event, progress=progress).run()


def run_policy(
    use: str, truth: TrueCosts, rules: ReplanRules = AUTO, progress: Callable[[float], None] | None = None
) -> driver.ReplanOutcome:
    if use == "trimtab":
        return loop_run(truth, rules, progress=progress)
    if use == "oracle":
        return driver.free_oracle(truth)
    return kept(truth, rules) if use == "kept" else best_static(truth, rules)


def figures(outcome: driver.ReplanOutcome, policy: str, seed: int) -> ReplanFigures:
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
        outcome.spent[driver.MOVES],
        outcome.spent[driver.AGAIN],
        outcome.spent[driver.WAITS],
        outcome.void,
        outcome.decisions,
        outcome.events,
        outcome.looks,
        outcome.first,
        outcome.last,
        tuple(outcome.walls_s),
        tuple(outcome.moves),
    )
