"""What happens to an elastic group (events), and what is to be done about it (instructions).

Whoever drives the machine submits members as tasks of a pool, calls them, and feeds what came of it. A step has two
halves: every member computes, then every member commits what was combined; a loss before the commit has begun has the
step redone whole, a loss during the commit is made good from a member that has committed, so a step counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.reasons import Reason
from trimtab.model.nodes import NodeView, World

# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodesChanged:
    """These nodes there are now: all that are there, in node order (the order of ranks)."""

    nodes: tuple[NodeView, ...]
    change: int = 0  # number of the last Change that this includes


@dataclass(frozen=True)
class MemberPending:
    """The member's task waits in its pool (or was evicted), and why."""

    member: str
    reason: Reason


@dataclass(frozen=True)
class MemberStarted:
    """The member is constructed, on this node."""

    member: str
    node: str


@dataclass(frozen=True)
class MemberLost:
    """The member's process is gone, unasked, or its task failed. `fatal`: another start would fail the same way."""

    member: str
    why: str
    fatal: bool = False


@dataclass(frozen=True)
class MemberLeft:
    """The member ended as it was told to."""

    member: str


@dataclass(frozen=True)
class MemberPreempted:
    """The pool wants the member's room: it has to go within so many seconds (eviction with notice)."""

    member: str
    within_s: float
    reason: Reason


@dataclass(frozen=True)
class HealthChecked:
    """A member's health call returned, or `fault` says what was wrong (raised, no answer in time)."""

    member: str
    fault: str | None = None


@dataclass(frozen=True)
class StepBoundary:
    """No step is under way: the world may change. `step`: the number of steps that are complete.

    `wanted`: the next step is to run. False takes back one that was asked for, begun or not, while nobody has committed
    it (its code raised, or the caller was interrupted).
    """

    step: int
    wanted: bool = True


@dataclass(frozen=True)
class WorldEntered:
    """Every member of the world of this epoch has been told of it, and newcomers have their state."""

    epoch: int


@dataclass(frozen=True)
class WorldFailed:
    """The world could not be entered: these members did not answer (they are ended by the driver)."""

    epoch: int
    members: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class StepDone:
    """Every member of the world has committed the step."""

    step: int


@dataclass(frozen=True)
class StepInterrupted:
    """The step could not be completed. `hung`: members that did not end it in time (ended by the driver)."""

    step: int
    why: str
    hung: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResizeRequested:
    """A person wants so many members (None: no longer)."""

    size: int | None


@dataclass(frozen=True)
class GroupClosed:
    """The group ends."""


@dataclass(frozen=True)
class ElasticTick:
    """Time has passed."""


ElasticEvent = (
    NodesChanged
    | MemberPending
    | MemberStarted
    | MemberLost
    | MemberLeft
    | MemberPreempted
    | HealthChecked
    | StepBoundary
    | WorldEntered
    | WorldFailed
    | StepDone
    | StepInterrupted
    | ResizeRequested
    | GroupClosed
    | ElasticTick
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartMember:
    """Submit a member's task. Ends in MemberStarted or MemberLost; MemberPending may come before."""

    member: str
    reason: Reason


@dataclass(frozen=True)
class StopMember:
    """Have the member's task end. Ends in MemberLeft."""

    member: str
    reason: Reason


@dataclass(frozen=True)
class EnterWorld:
    """Tell all members of the world. Ends in WorldEntered or WorldFailed.

    Leavers are saved first (`leavers`, still alive); each newcomer loads the state of its source: a leaver that it
    replaces, or a member that was there before; None: there is no state yet. Leavers are ended afterwards by
    StopMember.
    """

    world: World
    newcomers: tuple[tuple[str, str | None], ...]  # member, whose state it takes over
    leavers: tuple[str, ...]
    deadline: float


@dataclass(frozen=True)
class RunStep:
    """Run this step with the world as it is. Ends in StepDone or StepInterrupted."""

    step: int
    epoch: int
    redo: bool  # it was begun before, and not one member committed it


@dataclass(frozen=True)
class InterruptStep:
    """Give the step up unless its commit has begun: it cannot be completed, or a member has to go before it would be.

    Ends in StepInterrupted, or in StepDone where the commit had begun. Said again if nobody answers.
    """

    step: int
    reason: Reason


@dataclass(frozen=True)
class CheckHealth:
    """Call the member's health. Ends in HealthChecked."""

    member: str
    timeout_s: float


@dataclass(frozen=True)
class RequestUnits:
    """The group could use so many units in all: for autoscalers."""

    units: int


@dataclass(frozen=True)
class WaitForMembers:
    """The group is below its least and waits, until the deadline; the reason says for what."""

    reason: Reason
    deadline: float


@dataclass(frozen=True)
class FailGroup:
    """The group cannot go on; nothing more is started."""

    reason: Reason


ElasticInstruction = (
    StartMember
    | StopMember
    | EnterWorld
    | RunStep
    | InterruptStep
    | CheckHealth
    | RequestUnits
    | WaitForMembers
    | FailGroup
)
