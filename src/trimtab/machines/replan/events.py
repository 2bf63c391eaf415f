"""Events of a run, and the instructions that answer them.

Events are plain facts, so that a journal can hold them, and idempotent. `BeginMigration` opens a migration, each
`RunMigrationStage` ends in MigrationStageDone or MigrationStageFailed, `RollBackMigration` in RolledBack or
RollBackFailed; what has not ended by its deadline has failed. The other instructions need no answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.core.reasons import Reason
from trimtab.model.plan import Plan
from trimtab.model.run import DecisionNumbers, Iteration, Migration, MigrationStage
from trimtab.model.workflow import Cluster

# ---- events -----------------------------------------------------------------------------------------------------


class ClusterChangeCause(str, enum.Enum):
    """Why the cluster changed."""

    joined = "joined"
    draining = "draining"
    lost = "lost"
    quota = "quota"


class ReplanEvent:
    """An event of the replan machine."""


@dataclass(frozen=True)
class RunResumed(ReplanEvent):
    """The run begins (iteration 0), or continues after so many completed iterations.

    Nothing is in progress any more: a migration that had begun is rolled back.
    """

    iteration: int = 0
    remaining: int | None = None  # iterations still to come; None: unknown


@dataclass(frozen=True)
class IterationDone(ReplanEvent):
    """An iteration is over. Idempotent by its number."""

    iteration: Iteration


@dataclass(frozen=True)
class ClusterChanged(ReplanEvent):
    """The current cluster. `leaving`: nodes that are still there and go at the deadline."""

    cluster: Cluster
    why: ClusterChangeCause
    leaving: tuple[str, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True)
class ReplanRequested(ReplanEvent):
    """Asks whether the plan is still the best; answered at once."""

    why: str = ""


@dataclass(frozen=True)
class RemainingChanged(ReplanEvent):
    """Iterations still to come (None: unknown)."""

    iterations: int | None


@dataclass(frozen=True)
class GpuRangeUsed(ReplanEvent):
    """GPUs that an elastic component has now."""

    component: str
    gpus: int


@dataclass(frozen=True)
class PlanPlaced(ReplanEvent):
    """Nodes of the plan in place: (component, ((node, GPUs there), ...)), one component of each known group.

    A plan says how many GPUs; the placement may choose the nodes.
    """

    where: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True)
class AdviceTaken(ReplanEvent):
    """The advised plan was applied by the user: it runs now."""


@dataclass(frozen=True)
class MigrationStageDone(ReplanEvent):
    """A stage is done. `took_s`: how long the run was paused for it."""

    move: int
    stage: MigrationStage
    took_s: float


@dataclass(frozen=True)
class MigrationStageFailed(ReplanEvent):
    """A stage failed."""

    move: int
    stage: MigrationStage
    why: str


@dataclass(frozen=True)
class RolledBack(ReplanEvent):
    """The old plan is in place again."""

    move: int
    took_s: float


@dataclass(frozen=True)
class RollBackFailed(ReplanEvent):
    """The old plan could not be restored."""

    move: int
    why: str


@dataclass(frozen=True)
class ReplanTick(ReplanEvent):
    """Time has passed."""


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepPlan:
    """Keep the running plan."""

    reason: Reason
    numbers: DecisionNumbers


@dataclass(frozen=True)
class AdvisePlan:
    """Another plan is better; advice only."""

    plan: Plan
    reason: Reason
    numbers: DecisionNumbers


@dataclass(frozen=True)
class BeginMigration:
    """Begin a migration; at most one at a time. All of it ends by the deadline."""

    move: Migration
    deadline: float


@dataclass(frozen=True)
class RunMigrationStage:
    """Run this stage."""

    move: Migration
    stage: MigrationStage
    deadline: float


@dataclass(frozen=True)
class RollBackMigration:
    """Stop the migration and restore the old plan, as far as its GPUs exist.

    `done` are the completed stages, `at` the one that was not.
    """

    move: Migration
    done: tuple[MigrationStage, ...]
    at: MigrationStage
    reason: Reason
    deadline: float


@dataclass(frozen=True)
class SetGpuRange:
    """Range of GPUs that an elastic component may have."""

    component: str
    min_gpus: int
    max_gpus: int


@dataclass(frozen=True)
class MoveJudged:
    """What a migration gained, as shares of an iteration under the plan before it, at the present costs."""

    move: int
    promised: float
    realised: float


@dataclass(frozen=True)
class Notify:
    """Information for the user; needs no action."""

    reason: Reason


@dataclass(frozen=True)
class StopRun:
    """The run cannot continue by itself: end it in order; it can be resumed."""

    reason: Reason


ReplanInstruction = (
    KeepPlan
    | AdvisePlan
    | BeginMigration
    | RunMigrationStage
    | RollBackMigration
    | SetGpuRange
    | MoveJudged
    | Notify
    | StopRun
)
