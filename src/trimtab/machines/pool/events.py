"""Events and instructions of the pool machine.

The runtime turns what happens into events and executes the instructions. Every instruction ends in one of the events
named beside it, also when it fails or times out. An `attempt` numbers the starts of a task, so that late events of an
earlier start change nothing.
"""

from __future__ import annotations

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.pool import BundlePlacement, Labels, PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec


class PoolEvent(Frozen):
    """An event of the pool machine."""


# ---- events: requests -------------------------------------------------------------------------------------------


class PoolEnsured(PoolEvent):
    """Create a pool; an existing one with the same spec stays, another spec is refused."""

    spec: PoolSpec


class QuotaSet(PoolEvent):
    """Set the quota. Tasks over a lowered quota run on; nothing new starts until it fits."""

    pool: str
    quota: Resources


class PoolDrained(PoolEvent):
    """The pool accepts no new tasks (or, with `on` false, accepts them again)."""

    pool: str
    on: bool = True


class PoolDropped(PoolEvent):
    """Remove the pool: its tasks are cancelled, its slots removed."""

    pool: str


class PolicySet(PoolEvent):
    """Set the preemption policy."""

    policy: PreemptionPolicy


class TaskSubmitted(PoolEvent):
    """Submit a task. A duplicate id, an unknown pool or invalid sharing is refused with nothing changed."""

    spec: TaskSpec


class CompleteRequested(PoolEvent):
    """Stop the task as done. `keep_slot` false: its slot is removed, too."""

    task: str
    keep_slot: bool = True


class CancelRequested(PoolEvent):
    """Stop the task as cancelled."""

    task: str
    keep_slot: bool = True
    code: ReasonCode = ReasonCode.by_hand


class EvictRequested(PoolEvent):
    """Stop the task now, to return later; requested by a user, so no policy is needed."""

    task: str


class TurnRequested(PoolEvent):
    """Make the task the active tenant of its slots; the active one is parked."""

    task: str


# ---- events: nodes ----------------------------------------------------------------------------------------------


class NodeJoined(PoolEvent):
    """A node is up, or its resources changed; `outside` is held by other users of Ray."""

    node: str
    total: Resources
    outside: Resources = NOTHING
    labels: Labels = ()


class NodeCordoned(PoolEvent):
    """Nothing new is placed on the node (or, with `on` false, is again)."""

    node: str
    on: bool = True


class NodeDrained(PoolEvent):
    """The node will go soon: its tasks are evicted and return elsewhere, nothing new is placed there.

    Needs no policy, for no task can stay. NodeCordoned with `on` false uncordons the node.
    """

    node: str
    why: str = "it drains"


class NodeLost(PoolEvent):
    """The node is gone, with all tasks on it."""

    node: str
    why: str = ""


# ---- events: outcomes of instructions ---------------------------------------------------------------------------


class PlacementGroupReady(PoolEvent):
    """The placement group is ready, every bundle on its node."""

    group: str


class PlacementGroupFailed(PoolEvent):
    """The placement group could not be created, and nothing of it is left."""

    group: str
    why: str


class PlacementGroupRemoved(PoolEvent):
    """The placement group is removed."""

    group: str


class PlacementGroupLost(PoolEvent):
    """The placement group vanished, or Ray re-placed a bundle of it."""

    group: str
    why: str


class TaskStarted(PoolEvent):
    """All members are constructed. `how`: in which kind of process (warm process, actor) and why."""

    task: str
    attempt: int
    how: str = ""


class TaskStartFailed(PoolEvent):
    """The start failed, and nothing of it is left. `fatal`: a retry would fail the same way."""

    task: str
    attempt: int
    why: str
    fatal: bool = True
    timed_out: bool = False  # its `start_timeout_s` passed: counts as a loss, limited by `restarts`


class TaskEnded(PoolEvent):
    """The entry method returned (or raised `error`) in every member; the processes still exist."""

    task: str
    attempt: int
    error: str | None = None


class TaskDied(PoolEvent):
    """A process of the task died unexpectedly; the remaining members are to be stopped."""

    task: str
    attempt: int
    why: str


class TaskStopped(PoolEvent):
    """Every process of the task is gone. `cancel`: returned, raised, timed out, or was not called."""

    task: str
    attempt: int
    cancel: str = "not called"
    saved: bool = False
    note: str = ""


class TaskParked(PoolEvent):
    """The task released its devices, down to its residual."""

    task: str
    attempt: int


class TaskUnparked(PoolEvent):
    """The task has its devices again."""

    task: str
    attempt: int


class RecoveredTask(Frozen):
    """A running task without a record; `reserved`: which of its pool's reserved slots it is in."""

    spec: TaskSpec
    attempt: int
    group: str
    nodes: tuple[str, ...]
    reserved: int | None = None


class StateRecovered(PoolEvent):
    """The journal was lost, and these pools and tasks exist. What cannot be recovered is ended."""

    pools: tuple[PoolSpec, ...]
    tasks: tuple[RecoveredTask, ...]


class PoolTick(PoolEvent):
    """Time has passed: deadlines are checked."""


# ---- instructions -----------------------------------------------------------------------------------------------


class CreatePlacementGroup(Frozen):
    """Create a placement group, each bundle on its node. Ends in PlacementGroupReady or PlacementGroupFailed."""

    group: str
    pool: str
    bundles: tuple[Resources, ...]
    nodes: tuple[str, ...]
    strategy: PlacementStrategy
    deadline: float


class RemovePlacementGroup(Frozen):
    """Remove the placement group. Ends in PlacementGroupRemoved."""

    group: str


class StartTask(Frozen):
    """Start the task, a member in each place. Ends in TaskStarted or TaskStartFailed; then TaskEnded or TaskDied may
    follow.
    """

    task: str
    attempt: int
    places: tuple[BundlePlacement, ...]
    restore: bool  # from its checkpoint
    deadline: float


class StopTask(Frozen):
    """Stop every process of the task: cancel, checkpoint, then kill. Ends in TaskStopped."""

    task: str
    attempt: int
    reason: Reason
    cancel_grace_s: float  # how long `cancel()` (or, with notice, `drain()`) may take; 0: not called
    notice: bool = False
    checkpoint_timeout_s: float = 0.0  # how long saving may take; 0: not saved


class ParkTask(Frozen):
    """Release the devices of the task. Ends in TaskParked or TaskDied."""

    task: str
    attempt: int
    deadline: float


class UnparkTask(Frozen):
    """Give the task its devices again. Ends in TaskUnparked or TaskDied."""

    task: str
    attempt: int
    deadline: float


PoolInstruction = CreatePlacementGroup | RemovePlacementGroup | StartTask | StopTask | ParkTask | UnparkTask
