"""What happens to a run (events), and what is to be done about it (instructions).

Events are plain facts, so that a journal can hold them; being told the same twice changes nothing. `BeginMove` opens a
move, each `DoStage` ends in MoveStageDone or MoveStageFailed, `RollBack` in RolledBack or RollBackFailed; whatever has
not ended by its deadline has failed. The other instructions end in nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.core.reasons import Reason
from trimtab.model.plan import Plan
from trimtab.model.run import Iteration, Move, Numbers, Stage
from trimtab.model.workflow import Cluster

# ---- events -----------------------------------------------------------------------------------------------------


class Why(str, enum.Enum):
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
    why: Why
    leaving: tuple[str, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True)
class Asked:
    """Somebody wants to know whether the plan is still right; the answer comes at once."""

    why: str = ""


@dataclass(frozen=True)
class RemainingChanged:
    """So many iterations are still to come (None: not known)."""

    iterations: int | None


@dataclass(frozen=True)
class RangeUsed:
    """The fleet has given an elastic component so many GPUs."""

    component: str
    gpus: int


@dataclass(frozen=True)
class Seated:
    """Where the plan in place was put: (component, ((node, GPUs there), ...)), one of each group that is known.

    A plan says how many GPUs; which node has them may be decided by whoever hands them out.
    """

    where: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True)
class AdviceTaken:
    """Somebody else carried out what was advised last: that plan runs now."""


@dataclass(frozen=True)
class MoveStageDone:
    """A stage of a move is done. `took_s`: how long the run stood still for it."""

    move: int
    stage: Stage
    took_s: float


@dataclass(frozen=True)
class MoveStageFailed:
    """A stage of a move failed."""

    move: int
    stage: Stage
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
class Tick:
    """Time has passed."""


LoopEvent = (
    RunResumed
    | IterationDone
    | ClusterChanged
    | Asked
    | RemainingChanged
    | RangeUsed
    | Seated
    | AdviceTaken
    | MoveStageDone
    | MoveStageFailed
    | RolledBack
    | RollBackFailed
    | Tick
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stay:
    """The plan that runs is kept."""

    reason: Reason
    numbers: Numbers


@dataclass(frozen=True)
class Advise:
    """Another plan is better; it is said and not done."""

    plan: Plan
    reason: Reason
    numbers: Numbers


@dataclass(frozen=True)
class BeginMove:
    """A move begins: nothing else is moved until it has arrived or is rolled back. All of it ends by the deadline."""

    move: Move
    deadline: float


@dataclass(frozen=True)
class DoStage:
    """Do this stage of the move."""

    move: Move
    stage: Stage
    deadline: float


@dataclass(frozen=True)
class RollBack:
    """Stop what is being done for the move and put the old plan in place again, as far as its GPUs are there.

    `done` are the stages that had been done, `at` the one that was not.
    """

    move: Move
    done: tuple[Stage, ...]
    at: Stage
    reason: Reason
    deadline: float


@dataclass(frozen=True)
class SetRange:
    """The fleet may give the component between so many GPUs and so many."""

    component: str
    least: int
    most: int


@dataclass(frozen=True)
class Tell:
    """For people: something that is to be known and asks nothing of anybody."""

    reason: Reason


@dataclass(frozen=True)
class StopRun:
    """The run cannot go on by itself: end it in order; it can be resumed."""

    reason: Reason


LoopInstruction = Stay | Advise | BeginMove | DoStage | RollBack | SetRange | Tell | StopRun
