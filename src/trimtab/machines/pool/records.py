"""What the pool machine remembers of each task, placement group and pool.

Only the machine changes these. Everything in them is plain, so that a snapshot can hold all of them; whatever can be
worked out from them (sums, indexes, queues) is not in a snapshot and is made again when one is read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import Resources
from trimtab.model.pool import HOLDS_SLOTS, BundlePlacement, PoolSpec, TaskSpec, TaskState

RUNS_REMEMBERED = 100


class StopOutcome(str, enum.Enum):
    """What becomes of a task once its processes are gone."""

    evicted = "evicted"
    retry = "retry"  # started again after a loss, as often as it may
    done = "done"
    failed = "failed"
    cancelled = "cancelled"


@dataclass
class PoolTask:
    """One task, from its submission until it is forgotten."""

    spec: TaskSpec
    seq: int  # order of submission; breaks every tie
    submitted_at: float
    state: TaskState
    reason: Reason
    since: float  # when it came into this state
    deadline: float | None  # of this state
    attempt: int = 0
    places: tuple[BundlePlacement, ...] = ()  # not empty exactly in the states that hold slots
    uses: tuple[Resources, ...] = ()  # of the quota and its slots, by bundle; its residual while parked
    started: bool = False  # Start was issued for this attempt
    started_at: float | None = None  # of this attempt's work
    borrowed: bool = False  # in a reserved slot of others
    outcome: StopOutcome | None = None  # only while cancelling
    outcome_reason: Reason | None = None
    cancel_grace_s: float = 0.0  # of the stop under way
    notice: bool = False
    checkpoint_timeout_s: float = 0.0
    keep_slot: bool = True
    shares: str | None = None  # whose slots it takes turns in; forgotten when those are gone
    moving: str | None = None  # "parking" or "unparking", only while running or parked
    saved: bool = False
    losses: int = 0  # starts used up by lost processes and nodes
    not_before: float = 0.0  # after a failure, tried again from here on
    evictions: int = 0
    evicted_s: float = 0.0
    how: str = ""  # what it runs in, as the driver says
    story: list[StoryEntry] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Its name."""
        return self.spec.id

    @property
    def came_back(self) -> bool:
        """Whether it ran before: it was accepted, and waits like others to return, however impatient it was."""
        return bool(self.evictions or self.losses)

    @property
    def holds(self) -> bool:
        """Whether it holds slots."""
        return self.state in HOLDS_SLOTS


class PlacementGroupKind(str, enum.Enum):
    """What a placement group is for."""

    reserved = "reserved"
    dynamic = "dynamic"


class PgState(str, enum.Enum):
    """How a placement group stands."""

    creating = "creating"
    ready = "ready"
    removing = "removing"  # nobody is in it; its room counts as taken until it is gone
    broken = "broken"  # part of it is lost; removed as soon as nobody is in it


@dataclass
class PlacementGroup:
    """One placement group: a slot for each bundle."""

    id: str
    pool: str
    kind: PlacementGroupKind
    bundles: tuple[Resources, ...]
    nodes: tuple[str, ...]
    state: PgState
    deadline: float | None
    tenants: list[str] = field(default_factory=list)  # tasks in it, and tasks that wait for their turn in it
    turns: list[str] = field(default_factory=list)  # who asked for a turn, first come first served
    active: str | None = None  # the tenant that has its devices
    spec_index: int | None = None  # which of the pool's reserved slots it is
    used: int = 0  # how many tasks it has had
    seq: int = 0  # order in which groups were made; breaks ties

    @property
    def idle(self) -> bool:
        """Whether it stands and nobody is in it."""
        return self.state is PgState.ready and not self.tenants


@dataclass
class PoolRecord:
    """One pool."""

    spec: PoolSpec
    drained: bool = False
    dropped: bool = False
    lowered: bool = False  # its quota was made less than what it used then
    retired: list[int] = field(default_factory=list)  # reserved slots that were destroyed on request
    reuse_count: int = 0
    made_count: int = 0
    destroyed_count: int = 0
    evictions: dict[str, int] = field(default_factory=dict)  # by reason
    not_before: float = 0.0  # after a reserved slot could not be made
    run_count: int = 0  # of tasks that came to their end
    run_mean_s: float = 0.0  # how long those ran, the latest ones mostly

    def ran(self, seconds: float) -> None:
        """A task came to its end after so long."""
        self.run_count += 1
        self.run_mean_s += (seconds - self.run_mean_s) / min(self.run_count, RUNS_REMEMBERED)

    @property
    def starvation_timeout_s(self) -> float:
        """After so long, room is kept for one who waits: it takes about as long as tasks run until enough is free."""
        return max(self.spec.starvation_timeout_s, self.spec.starvation_runs * self.run_mean_s)


@dataclass
class ResourceClaim:
    """Room that is being made for a task: who gets it is settled, though it is not free yet."""

    task: str
    nodes: tuple[str, ...]  # of the group to be made, by bundle; empty where `group` is given
    group: str | None  # the slot it takes over
    tasks: list[str]  # still stopping for it
    groups: list[str]  # still being removed for it
    victims: tuple[str, ...]  # everybody evicted for it


@dataclass(frozen=True)
class Eviction:
    """One eviction, for the books."""

    at: float
    victim: str
    victim_pool: str
    by: str | None
    reason: Reason
