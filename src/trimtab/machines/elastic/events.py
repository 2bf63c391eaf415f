"""Events and instructions of an elastic group.

The runtime submits members as tasks of a pool, calls them, and reports the outcomes. A step has two phases: every
member computes, then every member commits the combined result. A loss before the commit redoes the whole step; a loss
during the commit is recovered from a member that has committed, so a step counts once.
"""

from __future__ import annotations

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason
from trimtab.model.nodes import NodeView, World


class ElasticEvent(Frozen):
    """An event of an elastic group."""


# ---- events -----------------------------------------------------------------------------------------------------


class NodesChanged(ElasticEvent):
    """All nodes that are up, in node order (the order of ranks)."""

    nodes: tuple[NodeView, ...]
    change: int = 0  # number of the last NodeChange that this includes


class MemberPending(ElasticEvent):
    """The member's task waits in its pool (or was evicted), and why."""

    member: str
    reason: Reason


class MemberStarted(ElasticEvent):
    """The member is constructed on this node."""

    member: str
    node: str


class MemberLost(ElasticEvent):
    """The member's process died unexpectedly, or its task failed. `fatal`: a retry would fail the same way."""

    member: str
    why: str
    fatal: bool = False


class MemberLeft(ElasticEvent):
    """The member ended as instructed."""

    member: str


class MemberPreempted(ElasticEvent):
    """The pool needs the member's capacity: it has to leave within `within_s` (eviction with notice)."""

    member: str
    within_s: float
    reason: Reason


class HealthChecked(ElasticEvent):
    """A member's health check returned; `fault`: it raised or timed out."""

    member: str
    fault: str | None = None


class StepBoundary(ElasticEvent):
    """No step is running: the world may change. `step`: the number of completed steps.

    `wanted`: run the next step. False withdraws a requested step, started or not, that no member has committed (its
    code raised, or the caller was interrupted).
    """

    step: int
    wanted: bool = True


class WorldEntered(ElasticEvent):
    """Every member of the world of this epoch has entered it, and newcomers have their state."""

    epoch: int


class WorldFailed(ElasticEvent):
    """The world could not be entered: these members did not respond (the runtime ends them)."""

    epoch: int
    members: tuple[str, ...]
    why: str


class StepDone(ElasticEvent):
    """Every member of the world has committed the step."""

    step: int


class StepInterrupted(ElasticEvent):
    """The step could not be completed. `hung`: members that timed out (the runtime ends them)."""

    step: int
    why: str
    hung: tuple[str, ...] = ()


class ResizeRequested(ElasticEvent):
    """A user requests this many members (None: withdraws the request)."""

    size: int | None


class GroupClosed(ElasticEvent):
    """The group ends."""


class ElasticTick(ElasticEvent):
    """Time has passed."""


# ---- instructions -----------------------------------------------------------------------------------------------


class StartMember(Frozen):
    """Submit a member's task. Ends in MemberStarted or MemberLost; MemberPending may come before."""

    member: str
    reason: Reason


class StopMember(Frozen):
    """End the member's task. Ends in MemberLeft."""

    member: str
    reason: Reason


class EnterWorld(Frozen):
    """Make all members enter the world. Ends in WorldEntered or WorldFailed.

    Leavers are saved first (`leavers`, still alive); each newcomer loads the state of its source: a leaver that it
    replaces, or an older member; None: there is no state yet. StopMember ends the leavers afterwards.
    """

    world: World
    newcomers: tuple[tuple[str, str | None], ...]  # member, source of its state
    leavers: tuple[str, ...]
    deadline: float


class RunStep(Frozen):
    """Run this step with the current world. Ends in StepDone or StepInterrupted."""

    step: int
    epoch: int
    redo: bool  # it was started before, and no member committed it


class InterruptStep(Frozen):
    """Abort the step unless its commit has begun: it cannot complete, or a member has to leave before it would.

    Ends in StepInterrupted, or in StepDone where the commit had begun. Issued again without an outcome.
    """

    step: int
    reason: Reason


class CheckHealth(Frozen):
    """Call the health check of the member. Ends in HealthChecked."""

    member: str
    timeout_s: float


class RequestUnits(Frozen):
    """The group could use this many units in all: for autoscalers."""

    units: int


class WaitForMembers(Frozen):
    """The group is below its minimum and waits until the deadline; the reason says for what."""

    reason: Reason
    deadline: float


class FailGroup(Frozen):
    """The group cannot continue; nothing more is started."""

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
