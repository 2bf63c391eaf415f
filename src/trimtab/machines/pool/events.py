"""Events and instructions of the pool machine.

The runtime turns what happens into events and executes the instructions. Every instruction ends in one of the events
named beside it, also when it fails or times out. An `attempt` numbers the starts of a task, so that late events of an
earlier start change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.pool import BundlePlacement, Labels, PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec


class PoolEvent:
    """An event of the pool machine."""


# ---- events: requests -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolEnsured(PoolEvent):
    """Create a pool; an existing one with the same spec stays, another spec is refused."""

    spec: PoolSpec


@dataclass(frozen=True)
class QuotaSet(PoolEvent):
    """Set the quota. Tasks over a lowered quota run on; nothing new starts until it fits."""

    pool: str
    quota: Resources


@dataclass(frozen=True)
class PoolDrained(PoolEvent):
    """The pool accepts no new tasks (or, with `on` false, accepts them again)."""

    pool: str
    on: bool = True


@dataclass(frozen=True)
class PoolDropped(PoolEvent):
    """Remove the pool: its tasks are cancelled, its slots removed."""

    pool: str


@dataclass(frozen=True)
class PolicySet(PoolEvent):
    """Set the preemption policy."""

    policy: PreemptionPolicy


@dataclass(frozen=True)
class TaskSubmitted(PoolEvent):
    """Submit a task. A duplicate id, an unknown pool or invalid sharing is refused with nothing changed."""

    spec: TaskSpec


@dataclass(frozen=True)
class CompleteRequested(PoolEvent):
    """Stop the task as done. `keep_slot` false: its slot is removed, too."""

    task: str
    keep_slot: bool = True


@dataclass(frozen=True)
class CancelRequested(PoolEvent):
    """Stop the task as cancelled."""

    task: str
    keep_slot: bool = True
    code: ReasonCode = ReasonCode.by_hand


@dataclass(frozen=True)
class EvictRequested(PoolEvent):
    """Stop the task now, to return later; requested by a user, so no policy is needed."""

    task: str


@dataclass(frozen=True)
class TurnRequested(PoolEvent):
    """Make the task the active tenant of its slots; the active one is parked."""

    task: str


# ---- events: nodes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeJoined(PoolEvent):
    """A node is up, or its resources changed; `outside` is held by other users of Ray."""

    node: str
    total: Resources
    outside: Resources = NOTHING
    labels: Labels = ()


@dataclass(frozen=True)
class NodeCordoned(PoolEvent):
    """Nothing new is placed on the node (or, with `on` false, is again)."""

    node: str
    on: bool = True


@dataclass(frozen=True)
class NodeDrained(PoolEvent):
    """The node will go soon: its tasks are evicted and return elsewhere, nothing new is placed there.

    Needs no policy, for no task can stay. NodeCordoned with `on` false uncordons the node.
    """

    node: str
    why: str = "it drains"


@dataclass(frozen=True)
class NodeLost(PoolEvent):
    """The node is gone, with all tasks on it."""

    node: str
    why: str = ""


# ---- events: outcomes of instructions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacementGroupReady(PoolEvent):
    """The placement group is ready, every bundle on its node."""

    group: str


@dataclass(frozen=True)
class PlacementGroupFailed(PoolEvent):
    """The placement group could not be created, and nothing of it is left."""

    group: str
    why: str


@dataclass(frozen=True)
class PlacementGroupRemoved(PoolEvent):
    """The placement group is removed."""

    group: str


@dataclass(frozen=True)
class PlacementGroupLost(PoolEvent):
    """The placement group vanished, or Ray re-placed a bundle of it."""

    group: str
    why: str


@dataclass(frozen=True)
class TaskStarted(PoolEvent):
    """All members are constructed. `how`: in which kind of process (warm process, actor) and why."""

    task: str
    attempt: int
    how: str = ""


@dataclass(frozen=True)
class TaskStartFailed(PoolEvent):
    """The start failed, and nothing of it is left. `fatal`: a retry would fail the same way."""

    task: str
    attempt: int
    why: str
    fatal: bool = True
    timed_out: bool = False  # its `start_timeout_s` passed: counts as a loss, limited by `restarts`


@dataclass(frozen=True)
class TaskEnded(PoolEvent):
    """The entry method returned (or raised `error`) in every member; the processes still exist."""

    task: str
    attempt: int
    error: str | None = None


@dataclass(frozen=True)
class TaskDied(PoolEvent):
    """A process of the task died unexpectedly; the remaining members are to be stopped."""

    task: str
    attempt: int
    why: str


@dataclass(frozen=True)
class TaskStopped(PoolEvent):
    """Every process of the task is gone. `cancel`: returned, raised, timed out, or was not called."""

    task: str
    attempt: int
    cancel: str = "not called"
    saved: bool = False
    note: str = ""


@dataclass(frozen=True)
class TaskParked(PoolEvent):
    """The task released its devices, down to its residual."""

    task: str
    attempt: int


@dataclass(frozen=True)
class TaskUnparked(PoolEvent):
    """The task has its devices again."""

    task: str
    attempt: int


@dataclass(frozen=True)
class RecoveredTask:
    """A running task without a record; `reserved`: which of its pool's reserved slots it is in."""

    spec: TaskSpec
    attempt: int
    group: str
    nodes: tuple[str, ...]
    reserved: int | None = None


@dataclass(frozen=True)
class StateRecovered(PoolEvent):
    """The journal was lost, and these pools and tasks exist. What cannot be recovered is ended."""

    pools: tuple[PoolSpec, ...]
    tasks: tuple[RecoveredTask, ...]


@dataclass(frozen=True)
class PoolTick(PoolEvent):
    """Time has passed: deadlines are checked."""


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CreatePlacementGroup:
    """Create a placement group, each bundle on its node. Ends in PlacementGroupReady or PlacementGroupFailed."""

    group: str
    pool: str
    bundles: tuple[Resources, ...]
    nodes: tuple[str, ...]
    strategy: PlacementStrategy
    deadline: float


@dataclass(frozen=True)
class RemovePlacementGroup:
    """Remove the placement group. Ends in PlacementGroupRemoved."""

    group: str


@dataclass(frozen=True)
class StartTask:
    """Start the task, a member in each place. Ends in TaskStarted or TaskStartFailed; then TaskEnded or TaskDied may
    follow.
    """

    task: str
    attempt: int
    places: tuple[BundlePlacement, ...]
    restore: bool  # from its checkpoint
    deadline: float


@dataclass(frozen=True)
class StopTask:
    """Stop every process of the task: cancel, checkpoint, then kill. Ends in TaskStopped."""

    task: str
    attempt: int
    reason: Reason
    cancel_grace_s: float  # how long `cancel()` (or, with notice, `drain()`) may take; 0: not called
    notice: bool = False
    checkpoint_timeout_s: float = 0.0  # how long saving may take; 0: not saved


@dataclass(frozen=True)
class ParkTask:
    """Release the devices of the task. Ends in TaskParked or TaskDied."""

    task: str
    attempt: int
    deadline: float


@dataclass(frozen=True)
class UnparkTask:
    """Give the task its devices again. Ends in TaskUnparked or TaskDied."""

    task: str
    attempt: int
    deadline: float


PoolInstruction = CreatePlacementGroup | RemovePlacementGroup | StartTask | StopTask | ParkTask | UnparkTask
