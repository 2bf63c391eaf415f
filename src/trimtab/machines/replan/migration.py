"""Tracks a migration: its stages one after another, each with a deadline, and the rollback.

At most one migration at a time. The transition that must not exist is from rolling back to anything but the old plan:
news of a stage after its migration has failed is late and changes nothing. A migration is done only when its last stage
is; until then the old plan is in place. Whether to migrate is not decided here; outcomes are reported by callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan import events as e
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.run import STAGES, Migration, MigrationCost, MigrationStage, ReplanRules

COSTS_KEPT = 50


@dataclass
class OngoingMigration:
    """A migration in progress. `failed`: why it is being rolled back."""

    move: Migration
    to: PlacedPlan
    levels: dict[str, float]  # for which the new plan was made
    stage: MigrationStage
    deadline: float  # of the stage, or of the rollback
    end: float  # of the whole migration
    took: list[tuple[MigrationStage, float]] = field(default_factory=list)  # stages done, in order
    failed: Reason | None = None


class MigrationTracker:
    """At most one migration in progress, and the costs of past ones."""

    def __init__(
        self, rules: ReplanRules, costs: list[MigrationCost], emit: Callable[[e.ReplanInstruction], None]
    ) -> None:
        self._rules = rules
        self._emit = emit
        self.moving: OngoingMigration | None = None
        self.begun = 0  # total; also the id of the newest
        self.costs = costs  # of completed migrations, newest last
        self.on_arrived: Callable[[OngoingMigration], None] = lambda moving: None
        self.on_back: Callable[[OngoingMigration], None] = lambda moving: None
        self.on_stuck: Callable[[OngoingMigration, Reason], None] = lambda moving, reason: None

    # ---- events ----------------------------------------------------------------------------------------------

    def begin(self, move: Migration, to: PlacedPlan, levels: dict[str, float], ends_s: float, now: float) -> None:
        """Begin; the current iteration ends first, usually within `ends_s`, at most twice that."""
        assert self.moving is None, "two moves at once"
        self.begun = move.id
        drain_s = self._rules.stage_limit_s + 2 * ends_s
        end = now + drain_s + (len(STAGES) - 1) * self._rules.stage_limit_s
        self.moving = OngoingMigration(move, to, levels, STAGES[0], now + drain_s, end)
        self._emit(e.BeginMigration(move, end))
        self._emit(e.RunMigrationStage(move, STAGES[0], self.moving.deadline))

    def stage_done(self, event: e.MigrationStageDone, now: float) -> None:
        moving = self._current(event.move, event.stage)
        if moving is None:
            return
        moving.took.append((event.stage, max(0.0, event.took_s)))
        if event.stage is STAGES[-1]:
            self._moving_to_arrived(moving)
            return
        moving.stage = STAGES[STAGES.index(event.stage) + 1]
        moving.deadline = min(moving.end, now + self._rules.stage_limit_s)
        self._emit(e.RunMigrationStage(moving.move, moving.stage, moving.deadline))

    def stage_failed(self, event: e.MigrationStageFailed, now: float) -> None:
        if self._current(event.move, event.stage) is not None:
            self.fail(event.why or "no cause was given", now)

    def rolled_back(self, event: e.RolledBack, now: float) -> None:
        moving = self.moving
        if moving is not None and moving.failed is not None and moving.move.id == event.move:
            self.moving = None
            self.on_back(moving)

    def roll_back_failed(self, event: e.RollBackFailed, now: float) -> None:
        moving = self.moving
        if moving is not None and moving.failed is not None and moving.move.id == event.move:
            self._rolling_to_stuck(moving, event.why)

    def fail(self, why: str, now: float) -> None:
        moving = self.moving
        assert moving is not None
        if moving.failed is not None:
            return
        moving.failed = Reason(ReasonCode.stage_failed, f"{moving.stage.value}: {why}")
        self.roll_back(now)

    def roll_back(self, now: float) -> None:
        """Instruct the rollback; repeated after a resume."""
        moving = self.moving
        assert moving is not None
        assert moving.failed is not None
        # Before the first stage is done, the current iteration ends first.
        begins = now if moving.took else max(now, moving.deadline)
        moving.deadline = begins + self._rules.rollback_limit_s
        done = tuple(stage for stage, _ in moving.took)
        self._emit(e.RollBackMigration(moving.move, done, moving.stage, moving.failed, moving.deadline))

    def late(self, now: float) -> None:
        """Fail what has not ended by its deadline."""
        moving = self.moving
        if moving is None or now < moving.deadline:
            return
        if moving.failed is None:
            self.fail("it took longer than it may", now)
        else:
            self._rolling_to_stuck(moving, "the way back took longer than it may")

    # ---- helpers ----------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Deadline of the current stage or rollback."""
        return None if self.moving is None else self.moving.deadline

    def _current(self, move: int, stage: MigrationStage) -> OngoingMigration | None:
        moving = self.moving
        if moving is None or moving.failed is not None or (moving.move.id, moving.stage) != (move, stage):
            return None
        return moving

    def _moving_to_arrived(self, moving: OngoingMigration) -> None:
        self.moving = None
        self.costs.append(MigrationCost(moving.move.id, moving.move.touched, tuple(moving.took)))
        del self.costs[:-COSTS_KEPT]
        self.on_arrived(moving)

    def _rolling_to_stuck(self, moving: OngoingMigration, why: str) -> None:
        self.moving = None
        assert moving.failed is not None
        self.on_stuck(
            moving, Reason(ReasonCode.stuck, f"move {moving.move.id} failed ({moving.failed.sentence}), and {why}")
        )
