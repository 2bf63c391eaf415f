"""Invariants of a simulated RL run, checked on every event, independent of the policy's own state.

Keeps its own state: GPUs of every component, iterations, the current migration, time. Must never happen: an iteration
counted twice or not at all; a component on a GPU that does not exist; two groups on one GPU; a new plan without all
stages of a migration; two migrations at once; a decision without reason and numbers; a migration within the dwell time,
or one that does not pay by its own numbers (unless the GPUs of the plan go).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan import events as e
from trimtab.machines.replan.placed_plan import GpuSlot, PlacedPlan
from trimtab.model.run import STAGES, DecisionNumbers, Migration, ReplanRules
from trimtab.model.workflow import Cluster
from trimtab.replay.pool.invariants import InvariantError

WEIGHED = (
    ReasonCode.no_gain,
    ReasonCode.costs_steady,
    ReasonCode.within_noise,
    ReasonCode.not_worth,
    ReasonCode.dwell,
    ReasonCode.model_off,
)
DECISIONS = (e.KeepPlan, e.AdvisePlan, e.BeginMigration, e.StopRun)
ROUNDING = 1e-6


class ReplanDecider(Protocol):
    """The policy of a simulated run: the replan machine or a baseline."""

    def handle(self, event: e.ReplanEvent, now: float) -> list[e.ReplanInstruction]:
        """Processes an event and returns instructions."""

    def next_deadline(self) -> float | None:
        """Time of the next ReplanTick."""

    def check(self) -> None:
        """Raises AssertionError if its state is inconsistent."""

    @property
    def placed_plan(self) -> PlacedPlan:
        """The current plan."""

    @property
    def moving_to(self) -> PlacedPlan | None:
        """The plan that the current migration goes to."""

    @property
    def iterations(self) -> int:
        """Iterations counted."""

    @property
    def stopped(self) -> Reason | None:
        """Why the run was stopped, if it was."""


@dataclass
class ReplanInvariants:
    """The observed state of a simulated run."""

    rules: ReplanRules
    seats: dict[str, tuple[GpuSlot, ...]]  # by component
    company: dict[str, tuple[str, ...]]  # components that share its GPUs
    counted: int = 0
    iterations: int = 0  # including those run again
    void: int = 0  # of those, run again after a loss
    moving: Migration | None = None
    stages: int = 0  # stages of that migration that are done
    moved_at: int | None = None
    decisions: int = 0
    looks: int = 0  # checks made
    spent: dict[str, float] = field(default_factory=dict)  # seconds, by activity

    @classmethod
    def of(cls, placed_plan: PlacedPlan, rules: ReplanRules) -> ReplanInvariants:
        names = [component.name for component in placed_plan.plan.components]
        return cls(rules, {n: placed_plan.slots_of(n) for n in names}, {n: placed_plan.group_of(n) for n in names})

    def iteration_begins(self, number: int, cluster: Cluster) -> None:
        """An iteration begins: every component is on existing GPUs, and no two groups share a GPU."""
        self.looks += 1
        if number != self.counted + 1:
            raise InvariantError(f"iteration {number} is run after {self.counted}")
        if self.moving is not None and self.stages:
            raise InvariantError(f"iteration {number} is run during migration {self.moving.id}")
        gpus = {node.name: node.gpus for node in cluster.nodes}
        whose: dict[GpuSlot, tuple[str, ...]] = {}
        for name, seats in self.seats.items():
            for seat in seats:
                if not 0 <= seat[1] < gpus.get(seat[0], 0):
                    raise InvariantError(f"{name} runs on GPU {seat[1]} of {seat[0]}, which does not exist")
                if whose.setdefault(seat, self.company[name]) != self.company[name]:
                    raise InvariantError(f"two groups are on GPU {seat[1]} of {seat[0]}: {name} is in one of them")

    def iteration_done(self, number: int) -> None:
        if number != self.counted + 1:
            raise InvariantError(f"iteration {number} ends after {self.counted}")
        self.counted = number
        self.iterations += 1

    def rolled_back_to(self, saved: int) -> None:
        """Voids the iterations after a checkpoint."""
        if saved > self.counted:
            raise InvariantError(f"a checkpoint of iteration {saved} after {self.counted}")
        self.void += self.counted - saved
        self.counted = saved
        if self.moved_at is not None:
            self.moved_at = min(self.moved_at, saved)

    def stage_done(self, move: Migration) -> bool:
        """A stage of the migration is done; True after the last stage, when the new plan is in place."""
        if self.moving is None or self.moving.id != move.id:
            raise InvariantError(f"a stage of migration {move.id} is done, but it is not under way")
        self.stages += 1
        if self.stages < len(STAGES):
            return False
        for change in move.changes:
            self.seats[change.component] = change.after
        self.company = {
            name: next((group.components for group in move.after.groups if name in group.components), ())
            for name in self.seats
        }
        self._migration_over()
        return True

    def rolled_back(self) -> None:
        if self.moving is None:
            raise InvariantError("a migration is rolled back, but none is under way")
        self._migration_over()

    def _migration_over(self) -> None:
        self.moving, self.stages, self.moved_at = None, 0, self.counted

    def spend(self, seconds: float, doing: str) -> None:
        if seconds < 0:
            raise InvariantError(f"{doing} took {seconds:g} s")
        self.spent[doing] = self.spent.get(doing, 0.0) + seconds

    def check_instructions(
        self, event: e.ReplanEvent, instructions: Sequence[e.ReplanInstruction], decider: ReplanDecider
    ) -> None:
        """Checks the instructions for an event, and that the policy's state equals the observed one."""
        self.looks += 1
        for instruction in instructions:
            self._check_instruction(instruction)
        decided = decider.stopped is not None or any(isinstance(item, (*DECISIONS, e.Notify)) for item in instructions)
        if isinstance(event, e.IterationDone) and not decided:
            raise InvariantError(f"nothing was decided after iteration {event.iteration.number}")
        if decider.iterations != self.counted:
            raise InvariantError(f"the policy counts {decider.iterations} iterations, but {self.counted} were run")
        placed_plan = decider.placed_plan
        for name, seats in self.seats.items():
            if placed_plan.slots_of(name) != seats or placed_plan.group_of(name) != self.company[name]:
                raise InvariantError(f"the policy has {name} on other GPUs, but no migration has ended")

    def _check_instruction(self, instructions: e.ReplanInstruction) -> None:
        if isinstance(instructions, (e.Notify, e.StopRun)):
            _check_reason(instructions.reason, DecisionNumbers())
        elif isinstance(instructions, (e.KeepPlan, e.AdvisePlan)):
            self.decisions += 1
            _check_reason(instructions.reason, instructions.numbers)
            if instructions.reason.code in WEIGHED and None in (
                instructions.numbers.iteration_s,
                instructions.numbers.horizon,
            ):
                raise InvariantError(f"a decision without numbers: {instructions.reason.sentence}")
        elif isinstance(instructions, e.BeginMigration):
            self.decisions += 1
            self._check_migration(instructions.move)
        elif isinstance(instructions, e.RunMigrationStage) and (
            self.moving is None
            or instructions.move.id != self.moving.id
            or instructions.stage is not STAGES[self.stages]
        ):
            raise InvariantError(
                f"stage {instructions.stage.value} of migration {instructions.move.id} is out of order"
            )

    def _check_migration(self, move: Migration) -> None:
        if self.moving is not None:
            raise InvariantError(f"migration {move.id} begins while migration {self.moving.id} is under way")
        _check_reason(move.reason, move.numbers)
        for change in move.changes:
            if self.seats[change.component] != change.before:
                raise InvariantError(f"migration {move.id} has {change.component} on other GPUs")
        if not move.forced:
            self._check_gain(move)
        self.moving, self.stages = move, 0

    def _check_gain(self, move: Migration) -> None:
        known = move.numbers
        needed = (known.gain_s, known.sure_gain_s, known.horizon, known.cost_s, known.margin)
        if any(number is None for number in needed):
            raise InvariantError(f"migration {move.id} begins without numbers")
        gain, sure, horizon, cost, margin = (float(number or 0.0) for number in needed)
        if min(gain, sure) * horizon <= cost * (1 + margin) - ROUNDING:
            raise InvariantError(f"migration {move.id} does not pay: {move.reason.sentence}")
        if self.moved_at is not None and self.counted - self.moved_at < self.rules.dwell_iterations:
            raise InvariantError(f"migration {move.id} begins {self.counted - self.moved_at} iterations after the last")

    def check_totals(self, now: float, iterations: int, finished: bool) -> None:
        """Every iteration was counted once, and all time is accounted for."""
        if finished != (self.counted == iterations):
            raise InvariantError(f"{self.counted} of {iterations} iterations are counted")
        if self.iterations != self.counted + self.void:
            raise InvariantError(f"{self.iterations} were run, {self.counted} count and {self.void} are void")
        total = sum(self.spent.values())
        if abs(total - now) > ROUNDING * max(1.0, now):
            raise InvariantError(f"{total:g} s are accounted for, and {now:g} s have passed")


def _check_reason(reason: Reason, numbers: DecisionNumbers) -> None:
    if not reason.sentence.strip():
        raise InvariantError(f"a decision without a reason: {reason.code.value}")
    for name, value in asdict(numbers).items():
        if value is not None and not math.isfinite(value):
            raise InvariantError(f"{name} of a decision is {value}: {reason.sentence}")
