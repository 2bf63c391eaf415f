"""What happens to pools (events), and what is to be done about it (instructions).

Whoever drives the machine turns the world into events and instructions into deeds. Every instruction ends in one of
the events named beside it, also when it fails or takes too long. An `attempt` numbers the starts of one task, so that
late news of an earlier start changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import NOTHING, Resources
from trimtab.model.pool import BundlePlacement, Labels, PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec

# ---- events: what users ask -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolEnsured:
    """A pool is asked for; one that exists with the same spec stays as it is, another spec is refused."""

    spec: PoolSpec


@dataclass(frozen=True)
class QuotaSet:
    """The pool may use so much from now on. What runs over less goes on; nothing new starts until it fits."""

    pool: str
    quota: Resources


@dataclass(frozen=True)
class PoolDrained:
    """The pool takes nothing new (or, with `on` false, takes again)."""

    pool: str
    on: bool = True


@dataclass(frozen=True)
class PoolDropped:
    """The pool ends: its tasks are cancelled, its slots removed."""

    pool: str


@dataclass(frozen=True)
class PolicySet:
    """From now on this decides who may evict whom."""

    policy: PreemptionPolicy


@dataclass(frozen=True)
class TaskSubmitted:
    """A task is to run. A duplicate id, an unknown pool or bad shares are refused before anything is touched."""

    spec: TaskSpec


@dataclass(frozen=True)
class CompleteRequested:
    """The task has done its work: it is stopped and counts as done. `keep_slot` false: its slot is removed, too."""

    task: str
    keep_slot: bool = True


@dataclass(frozen=True)
class CancelRequested:
    """The task is to end; it counts as cancelled."""

    task: str
    keep_slot: bool = True
    code: ReasonCode = ReasonCode.by_hand


@dataclass(frozen=True)
class EvictRequested:
    """The task is to stop now and return later; needs no policy, for a person asked."""

    task: str


@dataclass(frozen=True)
class TurnRequested:
    """The task wants to be the active tenant of its slots; those active now are parked."""

    task: str


# ---- events: nodes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeJoined:
    """A node is there; `outside` is what others than trimtab hold of it. Also says that its figures changed."""

    node: str
    total: Resources
    outside: Resources = NOTHING
    labels: Labels = ()


@dataclass(frozen=True)
class NodeCordoned:
    """Nothing new goes to the node (or, with `on` false, may go there again)."""

    node: str
    on: bool = True


@dataclass(frozen=True)
class NodeDrained:
    """The node will go soon: whatever is on it leaves now and returns elsewhere, and nothing new goes there.

    No rule is asked, for nobody can stay. NodeCordoned with `on` false opens the node again.
    """

    node: str
    why: str = "it drains"


@dataclass(frozen=True)
class NodeLost:
    """The node is gone, with all that was on it."""

    node: str
    why: str = ""


# ---- events: news of what was instructed ------------------------------------------------------------------------


@dataclass(frozen=True)
class PlacementGroupReady:
    """The placement group stands, every bundle on the node it was meant for."""

    group: str


@dataclass(frozen=True)
class PlacementGroupFailed:
    """The placement group could not be made, and nothing of it is left."""

    group: str
    why: str


@dataclass(frozen=True)
class PlacementGroupRemoved:
    """The placement group is removed."""

    group: str


@dataclass(frozen=True)
class PlacementGroupLost:
    """The placement group vanished, or Ray re-placed a bundle of it; it is not to be trusted any more."""

    group: str
    why: str


@dataclass(frozen=True)
class TaskStarted:
    """All members are constructed. `how` says in what (a warm host, a plain actor) and why."""

    task: str
    attempt: int
    how: str = ""


@dataclass(frozen=True)
class TaskStartFailed:
    """The start failed, and nothing of it is left. `fatal`: trying again would fail the same way."""

    task: str
    attempt: int
    why: str
    fatal: bool = True
    timed_out: bool = False  # its `start_timeout_s` passed: that counts as a loss, and `restarts` says how often


@dataclass(frozen=True)
class TaskEnded:
    """The entry method returned (or raised `error`) in every member; the processes are still there."""

    task: str
    attempt: int
    error: str | None = None


@dataclass(frozen=True)
class TaskDied:
    """A process of the task is gone, unasked; members that still live are to be stopped."""

    task: str
    attempt: int
    why: str


@dataclass(frozen=True)
class TaskStopped:
    """Every process of the task is gone. `cancel`: returned, raised, timed out, or was not called."""

    task: str
    attempt: int
    cancel: str = "not called"
    saved: bool = False
    note: str = ""


@dataclass(frozen=True)
class TaskParked:
    """The task gave its devices up, as far as its residual."""

    task: str
    attempt: int


@dataclass(frozen=True)
class TaskUnparked:
    """The task has its devices again."""

    task: str
    attempt: int


@dataclass(frozen=True)
class RecoveredTask:
    """A task that runs though nothing is remembered of it; `reserved`: which of its pool's reserved slots it is in."""

    spec: TaskSpec
    attempt: int
    group: str
    nodes: tuple[str, ...]
    reserved: int | None = None


@dataclass(frozen=True)
class StateRecovered:
    """The journal was lost, and these pools and tasks are there. What cannot be taken up is left to be ended."""

    pools: tuple[PoolSpec, ...]
    tasks: tuple[RecoveredTask, ...]


@dataclass(frozen=True)
class PoolTick:
    """Time has passed: deadlines are looked at."""


PoolEvent = (
    PoolEnsured
    | QuotaSet
    | PoolDrained
    | PoolDropped
    | PolicySet
    | TaskSubmitted
    | CompleteRequested
    | CancelRequested
    | EvictRequested
    | TurnRequested
    | NodeJoined
    | NodeCordoned
    | NodeDrained
    | NodeLost
    | PlacementGroupReady
    | PlacementGroupFailed
    | PlacementGroupRemoved
    | PlacementGroupLost
    | TaskStarted
    | TaskStartFailed
    | TaskEnded
    | TaskDied
    | TaskStopped
    | TaskParked
    | TaskUnparked
    | StateRecovered
    | PoolTick
)


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CreatePlacementGroup:
    """Make a placement group, each bundle on its node. Ends in PlacementGroupReady or PlacementGroupFailed."""

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
    """Start the task, a member in each place. Ends in Started or TaskStartFailed; later Ended or Died may follow."""

    task: str
    attempt: int
    places: tuple[BundlePlacement, ...]
    restore: bool  # it was saved before
    deadline: float


@dataclass(frozen=True)
class StopTask:
    """Stop every process of the task: tell it, save it, then end it for certain. Ends in Stopped."""

    task: str
    attempt: int
    reason: Reason
    cancel_grace_s: float  # how long `cancel()` (or, with notice, `drain()`) may take; 0: not called
    notice: bool = False
    checkpoint_timeout_s: float = 0.0  # how long saving may take; 0: not saved


@dataclass(frozen=True)
class ParkTask:
    """Have the task give up its devices. Ends in Parked, or in Died."""

    task: str
    attempt: int
    deadline: float


@dataclass(frozen=True)
class UnparkTask:
    """Have the task take its devices again. Ends in Unparked, or in Died."""

    task: str
    attempt: int
    deadline: float


PoolInstruction = CreatePlacementGroup | RemovePlacementGroup | StartTask | StopTask | ParkTask | UnparkTask
