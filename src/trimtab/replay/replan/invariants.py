"""What must be true of a simulated RL run, looked at with every event; it believes nothing that a policy says.

It keeps books of its own: where every component sits, iterations, the move under way, time. What must never happen: an
iteration counted twice or not at all; a component on a GPU that is not there; two groups on one GPU; another plan in
place without all stages of a move; two moves at once; a decision without its reason and numbers; a move within the
dwell time, or one that by its own numbers does not pay (but of a plan whose GPUs go).
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
    """Whoever decides in a simulated run: the loop machine, or a policy to compare with."""

    def handle(self, event: e.ReplanEvent, now: float) -> list[e.ReplanInstruction]:
        """What is to be done about an event."""

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""

    def check(self) -> None:
        """Raise AssertionError where its own books are untrue."""

    @property
    def placed_plan(self) -> PlacedPlan:
        """The plan in place."""

    @property
    def moving_to(self) -> PlacedPlan | None:
        """Where the move under way goes."""

    @property
    def iterations(self) -> int:
        """Iterations counted."""

    @property
    def stopped(self) -> Reason | None:
        """Why the run was told to stop, if it was."""


@dataclass
class ReplanInvariants:
    """The books of a simulated run."""

    rules: ReplanRules
    seats: dict[str, tuple[GpuSlot, ...]]  # of every component
    company: dict[str, tuple[str, ...]]  # who shares its GPUs
    counted: int = 0
    iterations: int = 0  # ever run
    void: int = 0  # of those, run again after a loss
    moving: Migration | None = None
    stages: int = 0  # of that move, done
    moved_at: int | None = None
    decisions: int = 0
    looks: int = 0
    spent: dict[str, float] = field(default_factory=dict)  # seconds, by what the run did in them

    @classmethod
    def of(cls, placed_plan: PlacedPlan, rules: ReplanRules) -> ReplanInvariants:
        """The books of a run that begins."""
        names = [one.name for one in placed_plan.plan.components]
        return cls(rules, {n: placed_plan.slots_of(n) for n in names}, {n: placed_plan.group_of(n) for n in names})

    # ---- what happens ----

    def iterates(self, number: int, cluster: Cluster) -> None:
        """An iteration begins: everybody sits on GPUs that are there, and no two groups on one."""
        self.looks += 1
        if number != self.counted + 1:
            raise InvariantError(f"iteration {number} is run after {self.counted}")
        if self.moving is not None and self.stages:
            raise InvariantError(f"iteration {number} is run in the midst of move {self.moving.id}")
        gpus = {node.name: node.gpus for node in cluster.nodes}
        whose: dict[GpuSlot, tuple[str, ...]] = {}
        for name, seats in self.seats.items():
            for seat in seats:
                if not 0 <= seat[1] < gpus.get(seat[0], 0):
                    raise InvariantError(f"{name} computes on GPU {seat[1]} of {seat[0]}, which is not there")
                if whose.setdefault(seat, self.company[name]) != self.company[name]:
                    raise InvariantError(f"two groups are on GPU {seat[1]} of {seat[0]}: {name} is in one of them")

    def done(self, number: int) -> None:
        """An iteration is over, and counts."""
        if number != self.counted + 1:
            raise InvariantError(f"iteration {number} ends after {self.counted}")
        self.counted = number
        self.iterations += 1

    def back_to(self, saved: int) -> None:
        """A loss has made the iterations after a saved one void."""
        if saved > self.counted:
            raise InvariantError(f"a state after iteration {saved} of {self.counted}")
        self.void += self.counted - saved
        self.counted = saved
        if self.moved_at is not None:
            self.moved_at = min(self.moved_at, saved)

    def stage_done(self, move: Migration) -> bool:
        """A stage of the move is done; True where it was the last one, so that the new plan is in place."""
        if self.moving is None or self.moving.id != move.id:
            raise InvariantError(f"a stage of move {move.id} is done, which is not under way")
        self.stages += 1
        if self.stages < len(STAGES):
            return False
        for change in move.changes:
            self.seats[change.component] = change.after
        self.company = {
            name: next((group.components for group in move.after.groups if name in group.components), ())
            for name in self.seats
        }
        self._over()
        return True

    def rolled_back(self) -> None:
        """The old plan is in place again."""
        if self.moving is None:
            raise InvariantError("a move is undone, and none is under way")
        self._over()

    def _over(self) -> None:
        self.moving, self.stages, self.moved_at = None, 0, self.counted

    def passed(self, seconds: float, doing: str) -> None:
        """So much time of the run was spent in a way."""
        if seconds < 0:
            raise InvariantError(f"{doing} took {seconds:g} s")
        self.spent[doing] = self.spent.get(doing, 0.0) + seconds

    # ---- what is said ----

    def heard(self, event: e.ReplanEvent, said: Sequence[e.ReplanInstruction], decider: ReplanDecider) -> None:
        """All that was said of an event; then what is in place is what the books say."""
        self.looks += 1
        for one in said:
            self._heard(one)
        decided = decider.stopped is not None or any(isinstance(one, (*DECISIONS, e.Notify)) for one in said)
        if isinstance(event, e.IterationDone) and not decided:
            raise InvariantError(f"nothing was decided after iteration {event.iteration.number}")
        if decider.iterations != self.counted:
            raise InvariantError(f"{decider.iterations} iterations are counted, and {self.counted} were run")
        placed_plan = decider.placed_plan
        for name, seats in self.seats.items():
            if placed_plan.slots_of(name) != seats or placed_plan.group_of(name) != self.company[name]:
                raise InvariantError(f"{name} is said to be elsewhere than it is, and no move has arrived")

    def _heard(self, said: e.ReplanInstruction) -> None:
        if isinstance(said, (e.Notify, e.StopRun)):
            _sound(said.reason, DecisionNumbers())
        elif isinstance(said, (e.KeepPlan, e.AdvisePlan)):
            self.decisions += 1
            _sound(said.reason, said.numbers)
            if said.reason.code in WEIGHED and None in (said.numbers.iteration_s, said.numbers.horizon):
                raise InvariantError(f"a decision without its numbers: {said.reason.sentence}")
        elif isinstance(said, e.BeginMigration):
            self.decisions += 1
            self._begins(said.move)
        elif isinstance(said, e.RunMigrationStage) and (
            self.moving is None or said.move.id != self.moving.id or said.stage is not STAGES[self.stages]
        ):
            raise InvariantError(f"stage {said.stage.value} of move {said.move.id} is not the next one")

    def _begins(self, move: Migration) -> None:
        if self.moving is not None:
            raise InvariantError(f"move {move.id} begins while move {self.moving.id} is under way")
        _sound(move.reason, move.numbers)
        for change in move.changes:
            if self.seats[change.component] != change.before:
                raise InvariantError(f"move {move.id} has {change.component} elsewhere than it is")
        if not move.forced:
            self._pays(move)
        self.moving, self.stages = move, 0

    def _pays(self, move: Migration) -> None:
        known = move.numbers
        needed = (known.gain_s, known.sure_gain_s, known.horizon, known.cost_s, known.margin)
        if any(one is None for one in needed):
            raise InvariantError(f"move {move.id} begins without its numbers")
        gain, sure, horizon, cost, margin = (float(one or 0.0) for one in needed)
        if min(gain, sure) * horizon <= cost * (1 + margin) - ROUNDING:
            raise InvariantError(f"move {move.id} does not pay: {move.reason.sentence}")
        if self.moved_at is not None and self.counted - self.moved_at < self.rules.dwell_iterations:
            raise InvariantError(f"move {move.id} begins {self.counted - self.moved_at} iterations after the last one")

    # ---- at the end ----

    def whole(self, now: float, iterations: int, finished: bool) -> None:
        """Every iteration was counted once, and every second is accounted for."""
        if finished != (self.counted == iterations):
            raise InvariantError(f"{self.counted} of {iterations} iterations are counted")
        if self.iterations != self.counted + self.void:
            raise InvariantError(f"{self.iterations} were run, {self.counted} count and {self.void} are void")
        total = sum(self.spent.values())
        if abs(total - now) > ROUNDING * max(1.0, now):
            raise InvariantError(f"{total:g} s are accounted for, and {now:g} s have passed")


def _sound(reason: Reason, numbers: DecisionNumbers) -> None:
    if not reason.sentence.strip():
        raise InvariantError(f"a decision without a reason: {reason.code.value}")
    for name, value in asdict(numbers).items():
        if value is not None and not math.isfinite(value):
            raise InvariantError(f"{name} of a decision is {value}: {reason.sentence}")
