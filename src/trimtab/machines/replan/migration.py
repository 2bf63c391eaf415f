"""Tracks a migration: its stages one after another, each with a deadline, and the rollback.

At most one migration at a time. The transition that must not exist is from rolling back to anything but the old plan:
news of a stage after its migration has failed is late and changes nothing. A migration is done only when its last stage
is; until then the old plan is in place. Whether to migrate is not decided here; outcomes are reported by callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.core.machine import MachineClock, on
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


@dataclass
class MigrationState:
    """At most one migration in progress, and the costs of past ones."""

    moving: OngoingMigration | None
    begun: int  # total; also the id of the newest
    costs: list[MigrationCost]  # of completed migrations, newest last


class MigrationTracker:
    """Runs the stages of a migration."""

    def __init__(
        self,
        rules: ReplanRules,
        state: MigrationState,
        clock: MachineClock,
        out: list[e.ReplanInstruction],
        on_arrived: Callable[[OngoingMigration], None],
        on_back: Callable[[OngoingMigration], None],
        on_stuck: Callable[[OngoingMigration, Reason], None],
    ) -> None:
        self._rules, self._state, self._clock, self._out = rules, state, clock, out
        self._on_arrived, self._on_back, self._on_stuck = on_arrived, on_back, on_stuck

    @property
    def moving(self) -> OngoingMigration | None:
        return self._state.moving

    # ---- events ----------------------------------------------------------------------------------------------

    def begin(self, move: Migration, to: PlacedPlan, levels: dict[str, float], ends_s: float) -> None:
        """Begin; the current iteration ends first, usually within `ends_s`, at most twice that."""
        assert self.moving is None, "two moves at once"
        now = self._clock.now
        drain_s = self._rules.stage_limit_s + 2 * ends_s
        end = now + drain_s + (len(STAGES) - 1) * self._rules.stage_limit_s
        self._state.begun = move.id
        self._state.moving = OngoingMigration(move, to, levels, STAGES[0], now + drain_s, end)
        self._out.append(e.BeginMigration(move, end))
        self._out.append(e.RunMigrationStage(move, STAGES[0], now + drain_s))

    @on(e.MigrationStageDone)
    def stage_done(self, event: e.MigrationStageDone) -> None:
        moving = self._current(event.move, event.stage)
        if moving is None:
            return
        moving.took.append((event.stage, max(0.0, event.took_s)))
        if event.stage is STAGES[-1]:
            self._moving_to_arrived(moving)
            return
        moving.stage = STAGES[STAGES.index(event.stage) + 1]
        if self._clock.now >= moving.end:  # the stage before ended late, and no tick came in between
            self.fail("no time is left for it")
            return
        moving.deadline = min(moving.end, self._clock.now + self._rules.stage_limit_s)
        self._out.append(e.RunMigrationStage(moving.move, moving.stage, moving.deadline))

    @on(e.MigrationStageFailed)
    def stage_failed(self, event: e.MigrationStageFailed) -> None:
        if self._current(event.move, event.stage) is not None:
            self.fail(event.why or "no cause was given")

    @on(e.RolledBack)
    def rolled_back(self, event: e.RolledBack) -> None:
        moving = self.moving
        if moving is not None and moving.failed is not None and moving.move.id == event.move:
            self._state.moving = None
            self._on_back(moving)

    @on(e.RollBackFailed)
    def roll_back_failed(self, event: e.RollBackFailed) -> None:
        moving = self.moving
        if moving is not None and moving.failed is not None and moving.move.id == event.move:
            self._rolling_to_stuck(moving, event.why)

    def fail(self, why: str) -> None:
        moving = self.moving
        assert moving is not None
        if moving.failed is not None:
            return
        moving.failed = Reason(ReasonCode.stage_failed, f"{moving.stage.value}: {why}")
        self.roll_back()

    def roll_back(self) -> None:
        """Instruct the rollback; repeated after a resume."""
        moving = self.moving
        assert moving is not None
        assert moving.failed is not None
        # Before the first stage is done, the current iteration ends first.
        now = self._clock.now
        begins = now if moving.took else max(now, moving.deadline)
        moving.deadline = begins + self._rules.rollback_limit_s
        done = tuple(stage for stage, _ in moving.took)
        self._out.append(e.RollBackMigration(moving.move, done, moving.stage, moving.failed, moving.deadline))

    def late(self) -> None:
        """Fail what has not ended by its deadline."""
        moving = self.moving
        if moving is None or self._clock.now < moving.deadline:
            return
        if moving.failed is None:
            self.fail("it took longer than it may")
        else:
            self._rolling_to_stuck(moving, "the way back took longer than it may")

    # ---- helpers ----------------------------------------------------------------------------------------

    def _current(self, move: int, stage: MigrationStage) -> OngoingMigration | None:
        moving = self.moving
        if moving is None or moving.failed is not None or (moving.move.id, moving.stage) != (move, stage):
            return None
        return moving

    def _moving_to_arrived(self, moving: OngoingMigration) -> None:
        self._state.moving = None
        self._state.costs.append(MigrationCost(moving.move.id, moving.move.touched, tuple(moving.took)))
        del self._state.costs[:-COSTS_KEPT]
        self._on_arrived(moving)

    def _rolling_to_stuck(self, moving: OngoingMigration, why: str) -> None:
        self._state.moving = None
        assert moving.failed is not None
        sentence = f"move {moving.move.id} failed ({moving.failed.sentence}), and {why}"
        self._on_stuck(moving, Reason(ReasonCode.stuck, sentence))
