"""The nouns of pools: pools, tasks, their states, and the policy of preemption.

Frozen facts, checked where they are made. Who runs now and who yields is decided in `trimtab.pool`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core.errors import InputError, nearest
from trimtab.core.numbers import check_number, check_whole
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import Resources, total

Labels = tuple[tuple[str, str], ...]  # sorted by label

MAX_PRIORITY = 1e6  # gaps of tenths are told apart among priorities of up to so much
MAX_WARM_PROCESSES = 10_000  # warm ones of a pool


class TaskState(str, enum.Enum):
    """Where a task is."""

    waiting = "waiting"  # in the queue, with a Reason
    starting = "starting"  # has its slots; the process is being made
    running = "running"  # constructed, and at work or ready to be called
    parked = "parked"  # constructed, but another tenant of its slot has its turn
    cancelling = "cancelling"  # told to stop; holds its slots until its process is gone
    evicted = "evicted"  # stopped for somebody else; in the queue, and will run again
    done = "done"  # ended as it should
    failed = "failed"  # ended with a Reason, and will not run again
    cancelled = "cancelled"  # ended because somebody asked for it


IN_QUEUE = (TaskState.waiting, TaskState.evicted)
HOLDS_SLOTS = (TaskState.starting, TaskState.running, TaskState.parked, TaskState.cancelling)
ENDED = (TaskState.done, TaskState.failed, TaskState.cancelled)


class PlacementStrategy(str, enum.Enum):
    """How the bundles of a gang lie on nodes; Ray's words."""

    pack = "PACK"
    spread = "SPREAD"
    strict_pack = "STRICT_PACK"
    strict_spread = "STRICT_SPREAD"


@dataclass(frozen=True)
class PoolSpec:
    """A named quota, and the slots that it holds.

    The quota binds what tasks use; slots (reserved ones, and dynamic ones kept for reuse) bind what nodes have. A slot
    takes nothing from the quota until a task is in it.
    """

    name: str
    quota: Resources
    labels: Labels = ()
    strategy: PlacementStrategy = PlacementStrategy.strict_pack  # of gangs that do not say theirs
    reserved: tuple[Resources, ...] = ()  # one slot each, for tasks of `reserved_priority` and above
    reserved_priority: float = 8.0
    dynamic: bool = True  # slots are also made for tasks that find none
    dynamic_limit: int | None = None  # bundles; None: as many as fit
    reuse: bool = True  # an idle dynamic slot is kept until somebody needs its room
    borrow: bool = False  # idle reserved slots may be used by others, who leave first
    return_preempts: bool = False  # an evicted task that returns may evict others of lower priority
    target_hosts: int = 0  # warm processes kept ready, on all nodes together
    hosts_each: int = 0  # and on every node besides
    preload: tuple[str, ...] = ()  # modules that warm hosts import ahead
    wait_s: float = 3600.0  # how long a task waits at most, where it does not say
    starvation_timeout_s: float = 60.0  # after so long at the least, a waiter's room is kept for it
    starvation_runs: float = (
        20.0  # and so many times as long as tasks of the pool run on average; 0: `starvation_timeout_s` alone
    )
    client: str | None = None  # ends with this client

    def __post_init__(self) -> None:
        where = f"pool {self.name}"
        if not self.name or not isinstance(self.name, str):
            raise InputError("a pool needs a name")
        if any(character in self.name for character in "/\\\n\0") or self.name in (".", ".."):
            raise InputError(f"{self.name!r} cannot be the name of a pool", hint="letters, digits, - and _")
        for name in ("reserved_priority", "wait_s", "starvation_timeout_s", "starvation_runs"):
            check_number(name, getattr(self, name), where, -MAX_PRIORITY if name == "reserved_priority" else 0.0)
        check_whole("max_dynamic_pgs", self.dynamic_limit or 0, where)
        check_whole("target_agents", self.target_hosts, where, maximum=MAX_WARM_PROCESSES)
        check_whole("warm_each", self.hosts_each, where, maximum=MAX_WARM_PROCESSES)
        if any(not spec for spec in self.reserved):
            raise InputError("a reserved slot must hold something", where=where)
        together = total(self.reserved)
        if not together.within(self.quota):
            raise InputError(
                f"its reserved slots hold {together}, more than its quota of {self.quota}",
                where=where,
                hint="raise the quota or reserve less: a reserved slot beyond the quota could never be used",
            )


@dataclass(frozen=True)
class TaskSpec:
    """Something to run in a pool: an actor, or a gang of actors that starts whole or not at all."""

    id: str
    pool: str
    bundles: tuple[Resources, ...]
    priority: float = 5.0
    labels: Labels = ()
    estimate_s: float = 0.0  # 0: unknown
    preemptible: bool | None = None  # None: single actors are, gangs are not
    strategy: PlacementStrategy | None = None  # None: the pool's
    wait_s: float | None = None  # deadline of every wait; None: the pool's; 0: at once or not at all
    restarts: int = 0  # how often it is started again after its process or node was lost; -1: always
    saves: bool = False  # its state can be saved, so an eviction loses no work
    notice_s: float | None = None  # told so long before an eviction, instead of the cancel time-out
    awaits_node: bool = False  # waits where no node is large enough, for one may join; else that fails it at once
    may_evict: bool = True  # whether it may have others evicted, as far as the policy allows
    over_quota_waits: bool = True  # False: refused where the quota is short, whatever could be evicted
    shares: str | None = None  # takes turns in the slots of this task
    residual: tuple[Resources, ...] = ()  # what it keeps in its slots while parked
    room: tuple[Resources, ...] = ()  # larger slots than it asks, for those who will share them
    start_timeout_s: float = 600.0
    client: str | None = None  # ends with this client
    one_process: bool = False  # in the first bundle; the others are for actors that it makes

    def __post_init__(self) -> None:
        where = f"task {self.id}"
        if not isinstance(self.id, str) or not self.id or any(character in self.id for character in "/\\\n\0"):
            raise InputError(f"{self.id!r} cannot be the id of a task", hint="letters, digits, - . and _")
        check_number("priority", self.priority, where, -MAX_PRIORITY, MAX_PRIORITY)
        check_number("estimated_duration", self.estimate_s, where)
        check_number("start_timeout_s", self.start_timeout_s, where)
        check_number("wait_s", self.wait_s or 0, where)
        check_number("notice_s", self.notice_s or 0, where)
        check_whole("restarts", self.restarts, where, -1)
        if not self.bundles:
            raise InputError("a task needs at least one bundle of resources", where=where)
        if any(not bundle for bundle in self.bundles):
            raise InputError("a task must ask for something", where=where, hint="a share of a CPU is enough: cpu 0.01")
        for name, bundles in (("residual", self.residual), ("room", self.room)):
            if bundles and len(bundles) != len(self.bundles):
                raise InputError(
                    f"{name} has {len(bundles)} bundles where the task has {len(self.bundles)}", where=where
                )
        if any(not ask.within(room) for ask, room in zip(self.bundles, self.room, strict=False)):
            raise InputError("its room is smaller than what it asks", where=where)
        if any(not rest.within(ask) for rest, ask in zip(self.residual, self.bundles, strict=False)):
            raise InputError("its residual is larger than what it asks", where=where)

    @property
    def size(self) -> tuple[Resources, ...]:
        """The slots it is given: what it asks, or more where others will share them."""
        return self.room or self.bundles

    @property
    def processes(self) -> int:
        """How many members it has: one for each bundle, unless the bundles are for one together."""
        return 1 if self.one_process else len(self.bundles)

    @property
    def gang(self) -> bool:
        """Whether it has several members."""
        return self.processes > 1

    @property
    def evictable(self) -> bool:
        """Whether it may be evicted at all."""
        return self.preemptible if self.preemptible is not None else not self.gang


class Aggressiveness(str, enum.Enum):
    """How large a gap in priority an eviction needs: by label rule, and in the same pool without one."""

    low = "low"
    medium = "medium"
    high = "high"

    @property
    def label_gap(self) -> float:
        """The gap where a label rule allows it."""
        return {"low": 1.0, "medium": 0.5, "high": 0.1}[self.value]

    @property
    def same_pool_gap(self) -> float:
        """The gap in the same pool without a rule."""
        return {"low": 3.0, "medium": 1.0, "high": 0.5}[self.value]


@dataclass(frozen=True)
class PreemptionPolicy:
    """Who may evict whom. Until one is set, nobody is evicted."""

    same_pool: bool = True
    same_pool_gap: float = 1.0
    label_rules: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = ()
    label_gap: float = 0.5
    cross_pool: bool = False
    cross_pool_gap: float = 5.0
    protected_pools: tuple[str, ...] = ()
    cancel_timeout_s: float = 5.0
    save_timeout_s: float = 60.0
    min_runtime_s: float = 0.0
    budget: int | None = None  # evictions in any window; None: no limit
    budget_window_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "same_pool_gap",
            "label_gap",
            "cross_pool_gap",
            "cancel_timeout_s",
            "save_timeout_s",
            "min_runtime_s",
            "budget_window_s",
        ):
            check_number(name, getattr(self, name), "the preemption policy")
        check_whole("the eviction budget", self.budget or 0, "the preemption policy")


@dataclass(frozen=True)
class BundlePlacement:
    """A slot as a task sees it: a bundle of a placement group, on a node."""

    group: str
    bundle: int
    node: str


@dataclass(frozen=True)
class TaskExplanation:
    """Why a task is where it is."""

    task: str
    pool: str
    state: TaskState
    reason: Reason
    priority: float
    places: tuple[BundlePlacement, ...] = ()
    position: int | None = None  # 1: next in the pool's queue
    waiting_since: float | None = None
    deadline: float | None = None  # of the wait, or of what is being done
    needs: tuple[str, ...] = ()  # what would have to end for it to start
    evictions: int = 0
    evicted_s: float = 0.0  # how long it was out in all
    attempts: int = 0
    how: str = ""  # what it runs in, and why
    story: tuple[StoryEntry, ...] = field(default=())
    estimate_s: float = 0.0  # how long it will run, as it was submitted; 0: it did not say


def labels_of(labels: Mapping[str, str] | None, where: str) -> Labels:
    """Labels from a mapping, checked and sorted."""
    for key, value in (labels or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InputError(f"labels are words, not {key!r}: {value!r}", where=where)
    return tuple(sorted((labels or {}).items()))


def rules_of(
    rules: Mapping[str, Mapping[str, Sequence[str]]] | None,
) -> tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]:
    """Label rules from {label: {value: [values it may evict]}}."""
    where = "label_preemption_rules"
    found = []
    for label, by_value in sorted((rules or {}).items()):
        if not isinstance(by_value, Mapping):
            raise InputError(f"{label} must map values to lists of values", where=where)
        entries = []
        for value, victims in sorted(by_value.items()):
            if isinstance(victims, str) or not all(isinstance(victim, str) for victim in victims):
                raise InputError(f"{label}: {value} must be a list of values", where=where)
            entries.append((value, tuple(victims)))
        found.append((label, tuple(entries)))
    return tuple(found)


def strategy_of(word: str, where: str) -> PlacementStrategy:
    """A placement strategy by Ray's word."""
    try:
        return PlacementStrategy(word.upper())
    except ValueError:
        near = nearest(word.upper(), [one.value for one in PlacementStrategy])
        raise InputError(
            f"{word} is no placement strategy",
            where=where,
            hint=f"did you mean {near}?" if near else "one of " + ", ".join(one.value for one in PlacementStrategy),
        ) from None
