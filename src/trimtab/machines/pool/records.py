"""Records of tasks, placement groups and pools, written to snapshots.

Only the machine changes them. Sums, indexes and queues are derived from them and rebuilt when a snapshot is loaded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import Resources
from trimtab.model.pool import HOLDS_SLOTS, BundlePlacement, PoolSpec, TaskSpec, TaskState

RUNS_REMEMBERED = 100


class StopOutcome(str, enum.Enum):
    """What happens to a task once its processes are gone."""

    evicted = "evicted"
    retry = "retry"  # after a loss, within its restarts
    done = "done"
    failed = "failed"
    cancelled = "cancelled"


@dataclass
class PoolTask:
    """A task, from its submission until it is forgotten."""

    spec: TaskSpec
    seq: int  # order of submission; breaks every tie
    submitted_at: float
    state: TaskState
    reason: Reason
    since: float  # when it entered this state
    deadline: float | None  # of this state
    attempt: int = 0
    places: tuple[BundlePlacement, ...] = ()  # not empty exactly in the states that hold slots
    uses: tuple[Resources, ...] = ()  # of the quota and its slots, by bundle; its residual while parked
    started: bool = False  # StartTask was issued for this attempt
    started_at: float | None = None  # of this attempt
    borrowed: bool = False  # it occupies a reserved slot of others
    outcome: StopOutcome | None = None  # only while cancelling
    outcome_reason: Reason | None = None
    cancel_grace_s: float = 0.0  # of the current stop
    notice: bool = False
    checkpoint_timeout_s: float = 0.0
    keep_slot: bool = True
    shares: str | None = None  # the task whose slots it takes turns in; reset when those are gone
    moving: str | None = None  # "parking" or "unparking", only while running or parked
    saved: bool = False
    losses: int = 0  # starts lost with processes and nodes
    not_before: float = 0.0  # back-off after a failure
    evictions: int = 0
    evicted_s: float = 0.0
    how: str = ""  # the kind of process, as reported by the executor
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def came_back(self) -> bool:
        """Whether it ran before: then it waits to return, even if submitted with "at once or not at all"."""
        return bool(self.evictions or self.losses)

    @property
    def holds(self) -> bool:
        return self.state in HOLDS_SLOTS


class PlacementGroupKind(str, enum.Enum):
    """Purpose of a placement group."""

    reserved = "reserved"
    dynamic = "dynamic"


class PgState(str, enum.Enum):
    """State of a placement group."""

    creating = "creating"
    ready = "ready"
    removing = "removing"  # empty; holds its capacity until it is gone
    broken = "broken"  # part of it is lost; removed as soon as it is empty


@dataclass
class PlacementGroup:
    """A placement group: a slot for each bundle."""

    id: str
    pool: str
    kind: PlacementGroupKind
    bundles: tuple[Resources, ...]
    nodes: tuple[str, ...]
    state: PgState
    deadline: float | None
    tenants: list[str] = field(default_factory=list)  # tasks in it, and tasks that wait there for their turn
    turns: list[str] = field(default_factory=list)  # requested turns, first come first served
    active: str | None = None  # the tenant that uses its devices
    spec_index: int | None = None  # which of the pool's reserved slots it is
    used: int = 0  # by how many tasks
    seq: int = 0  # order of creation; breaks ties

    @property
    def idle(self) -> bool:
        return self.state is PgState.ready and not self.tenants


@dataclass
class PoolRecord:
    """One pool."""

    spec: PoolSpec
    drained: bool = False
    dropped: bool = False
    lowered: bool = False  # its quota was set below its use
    retired: list[int] = field(default_factory=list)  # reserved slots that were destroyed on request
    reuse_count: int = 0
    made_count: int = 0
    destroyed_count: int = 0
    evictions: dict[str, int] = field(default_factory=dict)  # by reason
    not_before: float = 0.0  # back-off after a reserved slot could not be created
    run_count: int = 0  # of tasks that ended
    run_mean_s: float = 0.0  # moving average of their run times

    def ran(self, seconds: float) -> None:
        self.run_count += 1
        self.run_mean_s += (seconds - self.run_mean_s) / min(self.run_count, RUNS_REMEMBERED)

    @property
    def starvation_timeout_s(self) -> float:
        """After this wait capacity is reserved for a task. Scaled by run times: enough becomes free about as fast as
        tasks end.
        """
        return max(self.spec.starvation_timeout_s, self.spec.starvation_runs * self.run_mean_s)


@dataclass
class ResourceClaim:
    """Capacity that is being freed for a task: assigned, though not free yet."""

    task: str
    nodes: tuple[str, ...]  # of the group to create, by bundle; empty where `group` is set
    group: str | None  # the slot it takes over
    tasks: list[str]  # still stopping for it
    groups: list[str]  # still being removed for it
    victims: tuple[str, ...]  # all tasks evicted for it


class Eviction(Frozen):
    """One eviction, for the record."""

    at: float
    victim: str
    victim_pool: str
    by: str | None
    reason: Reason
