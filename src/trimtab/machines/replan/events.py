"""What happens to a run (events), and what is to be done about it (instructions).

Events are plain facts, so that a journal can hold them; being told the same twice changes nothing. `BeginMigration`
opens a move, each `RunMigrationStage` ends in MigrationStageDone or MigrationStageFailed, `RollBackMigration` in
RolledBack or RollBackFailed; whatever has not ended by its deadline has failed. The other instructions end in nothing.
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
    """Why a cluster is another than before."""

    joined = "joined"
    draining = "draining"
    lost = "lost"
    quota = "quota"


@dataclass(frozen=True)
class RunResumed:
    """The run begins (iteration 0), or goes on after so many iterations that are done and kept.

    Whatever was under way is not any more: a move that was begun is rolled back.
    """

    iteration: int = 0
    remaining: int | None = None  # iterations still to come; None: not known


@dataclass(frozen=True)
class IterationDone:
    """An iteration is over. One that was counted already is not counted again."""

    iteration: Iteration


@dataclass(frozen=True)
class ClusterChanged:
    """What there is now. `leaving` are nodes that are still there and will go at the deadline."""

    cluster: Cluster
    why: ClusterChangeCause
    leaving: tuple[str, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True)
class ReplanRequested:
    """Somebody wants to know whether the plan is still right; the answer comes at once."""

    why: str = ""


@dataclass(frozen=True)
class RemainingChanged:
    """So many iterations are still to come (None: not known)."""

    iterations: int | None


@dataclass(frozen=True)
class GpuRangeUsed:
    """The fleet has given an elastic component so many GPUs."""

    component: str
    gpus: int


@dataclass(frozen=True)
class PlanPlaced:
    """Where the plan in place was put: (component, ((node, GPUs there), ...)), one of each group that is known.

    A plan says how many GPUs; which node has them may be decided by whoever hands them out.
    """

    where: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True)
class AdviceTaken:
    """Somebody else carried out what was advised last: that plan runs now."""


@dataclass(frozen=True)
class MigrationStageDone:
    """A stage of a move is done. `took_s`: how long the run stood still for it."""

    move: int
    stage: MigrationStage
    took_s: float


@dataclass(frozen=True)
class MigrationStageFailed:
    """A stage of a move failed."""

    move: int
    stage: MigrationStage
    why: str


@dataclass(frozen=True)
class RolledBack:
    """The old plan is in place again."""

    move: int
    took_s: float


@dataclass(frozen=True)
class RollBackFailed:
    """The old plan could not be put in place again."""

    move: int
    why: str


@dataclass(frozen=True)
class ReplanTick:
    """Time has passed."""


ReplanEvent = (
    RunResumed
    | IterationDone
    | ClusterChanged
    | ReplanRequested
    | RemainingChanged
    | GpuRangeUsed
    | PlanPlaced
    | AdviceTaken
    | MigrationStageDone
    | MigrationStageFailed
    | RolledBack
    | RollBackFailed
    | ReplanTick
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepPlan:
    """The plan that runs is kept."""

    reason: Reason
    numbers: DecisionNumbers


@dataclass(frozen=True)
class AdvisePlan:
    """Another plan is better; it is said and not done."""

    plan: Plan
    reason: Reason
    numbers: DecisionNumbers


@dataclass(frozen=True)
class BeginMigration:
    """A move begins: nothing else is moved until it has arrived or is rolled back. All of it ends by the deadline."""

    move: Migration
    deadline: float


@dataclass(frozen=True)
class RunMigrationStage:
    """Do this stage of the move."""

    move: Migration
    stage: MigrationStage
    deadline: float


@dataclass(frozen=True)
class RollBackMigration:
    """Stop what is being done for the move and put the old plan in place again, as far as its GPUs are there.

    `done` are the stages that had been done, `at` the one that was not.
    """

    move: Migration
    done: tuple[MigrationStage, ...]
    at: MigrationStage
    reason: Reason
    deadline: float


@dataclass(frozen=True)
class SetGpuRange:
    """The fleet may give the component between so many GPUs and so many."""

    component: str
    min_gpus: int
    max_gpus: int


@dataclass(frozen=True)
class Notify:
    """For people: something that is to be known and asks nothing of anybody."""

    reason: Reason


@dataclass(frozen=True)
class StopRun:
    """The run cannot go on by itself: end it in order; it can be resumed."""

    reason: Reason


ReplanInstruction = (
    KeepPlan | AdvisePlan | BeginMigration | RunMigrationStage | RollBackMigration | SetGpuRange | Notify | StopRun
)
