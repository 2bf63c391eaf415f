"""Events of a run, and the instructions that answer them.

Events are plain facts, so that a journal can hold them, and idempotent. `BeginMigration` opens a migration, each
`RunMigrationStage` ends in MigrationStageDone or MigrationStageFailed, `RollBackMigration` in RolledBack or
RollBackFailed; what has not ended by its deadline has failed. The other instructions need no answer.
"""

from __future__ import annotations

import enum

from trimtab.core.frozen import Frozen
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


class ReplanEvent(Frozen):
    """An event of the replan machine."""


class RunResumed(ReplanEvent):
    """The run begins (iteration 0), or continues after so many completed iterations.

    Nothing is in progress any more: a migration that had begun is rolled back.
    """

    iteration: int = 0
    remaining: int | None = None  # iterations still to come; None: unknown


class IterationDone(ReplanEvent):
    """An iteration is over. Idempotent by its number."""

    iteration: Iteration


class ClusterChanged(ReplanEvent):
    """The current cluster. `leaving`: nodes that are still there and go at the deadline."""

    cluster: Cluster
    why: ClusterChangeCause
    leaving: tuple[str, ...] = ()
    deadline: float | None = None


class ReplanRequested(ReplanEvent):
    """Asks whether the plan is still the best; answered at once."""

    why: str = ""


class RemainingChanged(ReplanEvent):
    """Iterations still to come (None: unknown)."""

    iterations: int | None


class GpuRangeUsed(ReplanEvent):
    """GPUs that an elastic component has now."""

    component: str
    gpus: int


class PlanPlaced(ReplanEvent):
    """Nodes of the plan in place: (component, ((node, GPUs there), ...)), one component of each known group.

    A plan says how many GPUs; the placement may choose the nodes.
    """

    where: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


class AdviceTaken(ReplanEvent):
    """The advised plan was applied by the user: it runs now."""


class MigrationStageDone(ReplanEvent):
    """A stage is done. `took_s`: how long the run was paused for it."""

    move: int
    stage: MigrationStage
    took_s: float


class MigrationStageFailed(ReplanEvent):
    """A stage failed."""

    move: int
    stage: MigrationStage
    why: str


class RolledBack(ReplanEvent):
    """The old plan is in place again."""

    move: int
    took_s: float


class RollBackFailed(ReplanEvent):
    """The old plan could not be restored."""

    move: int
    why: str


class ReplanTick(ReplanEvent):
    """Time has passed."""


# ---- instructions -----------------------------------------------------------------------------------------------


class KeepPlan(Frozen):
    """Keep the running plan."""

    reason: Reason
    numbers: DecisionNumbers


class AdvisePlan(Frozen):
    """Another plan is better; advice only."""

    plan: Plan
    reason: Reason
    numbers: DecisionNumbers


class BeginMigration(Frozen):
    """Begin a migration; at most one at a time. All of it ends by the deadline."""

    move: Migration
    deadline: float


class RunMigrationStage(Frozen):
    """Run this stage."""

    move: Migration
    stage: MigrationStage
    deadline: float


class RollBackMigration(Frozen):
    """Stop the migration and restore the old plan, as far as its GPUs exist.

    `done` are the completed stages, `at` the one that was not.
    """

    move: Migration
    done: tuple[MigrationStage, ...]
    at: MigrationStage
    reason: Reason
    deadline: float


class SetGpuRange(Frozen):
    """Range of GPUs that an elastic component may have."""

    component: str
    min_gpus: int
    max_gpus: int


class MoveJudged(Frozen):
    """What a migration gained, as shares of an iteration under the plan before it, at the present costs."""

    move: int
    promised: float
    realised: float


class Notify(Frozen):
    """Information for the user; needs no action."""

    reason: Reason


class StopRun(Frozen):
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
