"""Pools, tasks, their states, and the preemption policy; validated on construction.

What runs and what is evicted is decided in `trimtab.machines.pool`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import ClassVar

from trimtab.core.errors import InputError, unknown
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import COUNT, LONGEST_S, MAX_COUNT, SECONDS, Ranges, check_fields
from trimtab.core.reasons import Reason, StoryEntry
from trimtab.core.resources import LABEL, Resources, total

Labels = tuple[tuple[str, str], ...]  # sorted by label

MAX_PRIORITY = 1e6  # up to this, gaps of 0.1 are exact enough
MAX_WARM_PROCESSES = 10_000  # of a pool


class TaskState(str, enum.Enum):
    """State of a task."""

    waiting = "waiting"  # in the queue, with a Reason
    starting = "starting"  # has its slots; its processes are being created
    running = "running"  # constructed, and working or ready to be called
    parked = "parked"  # constructed, but another tenant of its slot has its turn
    cancelling = "cancelling"  # stopping; holds its slots until its processes are gone
    evicted = "evicted"  # stopped for another task; in the queue, will run again
    done = "done"  # ended normally
    failed = "failed"  # ended with a Reason, and will not run again
    cancelled = "cancelled"  # ended on request


IN_QUEUE = (TaskState.waiting, TaskState.evicted)
HOLDS_SLOTS = (TaskState.starting, TaskState.running, TaskState.parked, TaskState.cancelling)
ENDED = (TaskState.done, TaskState.failed, TaskState.cancelled)


class PlacementStrategy(str, enum.Enum):
    """How the bundles of a gang are placed on nodes; Ray's words."""

    pack = "PACK"
    spread = "SPREAD"
    strict_pack = "STRICT_PACK"
    strict_spread = "STRICT_SPREAD"


class PoolSpec(Frozen):
    """A named quota, and the slots that it holds.

    The quota limits what tasks use; slots (reserved ones, and dynamic ones kept for reuse) occupy nodes. An empty slot
    takes nothing from the quota.
    """

    name: str
    quota: Resources
    labels: Labels = ()
    strategy: PlacementStrategy = PlacementStrategy.strict_pack  # of gangs that state none
    reserved: tuple[Resources, ...] = ()  # one slot each, for tasks of at least `reserved_priority`
    reserved_priority: float = 8.0
    dynamic: bool = True  # slots are created for tasks that find none
    dynamic_limit: int | None = None  # bundles; None: no limit
    reuse: bool = True  # an idle dynamic slot is kept until its capacity is needed
    borrow: bool = False  # idle reserved slots may be used by others, which are evicted first
    return_preempts: bool = False  # an evicted task may evict others of lower priority to return
    target_hosts: int = 0  # warm processes on all nodes together
    hosts_each: int = 0  # and on every node in addition
    preload: tuple[str, ...] = ()  # modules that warm processes import ahead
    wait_s: float = 3600.0  # maximum wait of a task that states none
    starvation_timeout_s: float = 60.0  # after waiting this long, free capacity is reserved for a task ...
    starvation_runs: float = 20.0  # ... and at least this multiple of the average run time; 0: the time-out alone
    client: str | None = None  # ends with this client

    RANGES: ClassVar[Ranges] = {
        "reserved_priority": (-MAX_PRIORITY, LONGEST_S),
        "starvation_runs": SECONDS,
        "dynamic_limit": (*COUNT, "max_dynamic_pgs"),
        "target_hosts": (0, MAX_WARM_PROCESSES, "target_agents"),
        "hosts_each": (0, MAX_WARM_PROCESSES, "warm_each"),
    }

    def __post_init__(self) -> None:
        where = f"pool {self.name}"
        if not self.name or not isinstance(self.name, str):
            raise InputError("a pool needs a name")
        if any(character in self.name for character in "/\\\n\0") or self.name in (".", ".."):
            raise InputError(f"{self.name!r} cannot be the name of a pool", hint="letters, digits, - and _")
        check_fields(self, where)
        if any(not spec for spec in self.reserved):
            raise InputError("a reserved slot must hold something", where=where)
        together = total(self.reserved)
        if not together.within(self.quota):
            raise InputError(
                f"its reserved slots hold {together}, more than its quota of {self.quota}",
                where=where,
                hint="raise the quota or reserve less: a reserved slot beyond the quota could never be used",
            )


class TaskSpec(Frozen):
    """An actor to run in a pool, or a gang of actors that starts whole or not at all."""

    id: str
    pool: str
    bundles: tuple[Resources, ...]
    priority: float = 5.0
    labels: Labels = ()
    label_selector: Labels = ()  # of nodes, as in Ray: `value`, `!value`, `in(a, b)` or `!in(a, b)` for each key
    estimate_s: float = 0.0  # 0: unknown
    preemptible: bool | None = None  # None: single actors are, gangs are not
    strategy: PlacementStrategy | None = None  # None: the pool's
    wait_s: float | None = None  # of every wait; None: the pool's; 0: starts at once or not at all
    restarts: int = 0  # after its process or node was lost; -1: unlimited
    saves: bool = False  # it checkpoints, so an eviction loses no work
    notice_s: float | None = None  # notice before an eviction, instead of the cancel time-out
    awaits_node: bool = False  # wait for a node large enough to join, instead of failing at once
    may_evict: bool = True  # may evict others, as far as the policy allows
    over_quota_waits: bool = True  # False: refused where the quota is short
    shares: str | None = None  # takes turns in the slots of this task
    residual: tuple[Resources, ...] = ()  # what it keeps in its slots while parked
    room: tuple[Resources, ...] = ()  # slots larger than its bundles, for tasks that will share them
    start_timeout_s: float = 600.0
    client: str | None = None  # ends with this client
    one_process: bool = False  # in the first bundle; the others are for actors that it creates

    RANGES: ClassVar[Ranges] = {
        "priority": (-MAX_PRIORITY, MAX_PRIORITY),
        "estimate_s": (*SECONDS, "estimated_duration"),
        "restarts": (-1, MAX_COUNT),
    }

    def __post_init__(self) -> None:
        where = f"task {self.id}"
        if not isinstance(self.id, str) or not self.id or any(character in self.id for character in "/\\\n\0"):
            raise InputError(f"{self.id!r} cannot be the id of a task", hint="letters, digits, - . and _")
        check_fields(self, where)
        if not self.bundles:
            raise InputError("a task needs at least one bundle of resources", where=where)
        if any(not bundle for bundle in self.bundles):
            raise InputError("a task must ask for something", where=where, hint="a share of a CPU is enough: cpu 0.01")
        for name, bundles in (("residual", self.residual), ("room", self.room)):
            if bundles and len(bundles) != len(self.bundles):
                raise InputError(
                    f"{name} has {len(bundles)} bundles where the task has {len(self.bundles)}", where=where
                )
        for key, wanted in self.label_selector:
            if not key or "=" in key or not wanted.strip("! "):
                raise InputError(
                    f"label_selector {key!r}: {wanted!r} selects no node",
                    where=where, hint="{label: value}, or !value, in(a, b), !in(a, b)",
                )  # fmt: skip
        if self.label_selector and self.shares is not None:
            raise InputError("it shares a slot, whose node is not its choice", where=where, hint="no label_selector")
        if any(not ask.within(room) for ask, room in zip(self.bundles, self.room, strict=False)):
            raise InputError("its room is smaller than what it asks", where=where)
        if any(not rest.within(ask) for rest, ask in zip(self.residual, self.bundles, strict=False)):
            raise InputError("its residual is larger than what it asks", where=where)

    @property
    def size(self) -> tuple[Resources, ...]:
        """The slots it gets: its bundles, or `room` where other tasks will share them; with labels of nodes."""
        size = self.room or self.bundles
        if not self.label_selector:
            return size
        labels = Resources(tuple((f"{LABEL}{key}={value}", 1) for key, value in self.label_selector))
        return tuple(bundle.plus(labels) for bundle in size)

    @property
    def processes(self) -> int:
        return 1 if self.one_process else len(self.bundles)

    @property
    def gang(self) -> bool:
        return self.processes > 1

    @property
    def evictable(self) -> bool:
        return self.preemptible if self.preemptible is not None else not self.gang


class Aggressiveness(str, enum.Enum):
    """The priority gap that an eviction needs: with a label rule, and in the same pool without one."""

    low = "low"
    medium = "medium"
    high = "high"

    @property
    def label_gap(self) -> float:
        return {"low": 1.0, "medium": 0.5, "high": 0.1}[self.value]

    @property
    def same_pool_gap(self) -> float:
        return {"low": 3.0, "medium": 1.0, "high": 0.5}[self.value]


class PreemptionPolicy(Frozen):
    """Which tasks may evict which. Without a policy nothing is evicted."""

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

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("same_pool_gap", "label_gap", "cross_pool_gap"), SECONDS),
        "budget": (*COUNT, "the eviction budget"),
    }

    def __post_init__(self) -> None:
        check_fields(self, "the preemption policy")


class BundlePlacement(Frozen):
    """A slot of a task: a bundle of a placement group, on a node."""

    group: str
    bundle: int
    node: str


class TaskExplanation(Frozen):
    """Why a task is in its state."""

    task: str
    pool: str
    state: TaskState
    reason: Reason
    priority: float
    places: tuple[BundlePlacement, ...] = ()
    position: int | None = None  # 1: next in the pool's queue
    waiting_since: float | None = None
    deadline: float | None = None  # of its state
    needs: tuple[str, ...] = ()  # tasks that would have to end for it to start
    evictions: int = 0
    evicted_s: float = 0.0  # total time evicted
    attempts: int = 0
    how: str = ""  # the kind of process it runs in, and why
    story: tuple[StoryEntry, ...] = field(default=())
    estimate_s: float = 0.0  # as submitted; 0: unknown


def labels_of(labels: Mapping[str, str] | None, where: str) -> Labels:
    """Labels from a mapping, checked and sorted."""
    for key, value in (labels or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InputError(f"labels are words, not {key!r}: {value!r}", where=where)
    return tuple(sorted((labels or {}).items()))


def label_matches(labels: Mapping[str, str], key: str, wanted: str) -> bool:
    """Whether a node with these labels is selected: by `value`, `in(a, b)`, or `!` before either."""
    plain = wanted.removeprefix("!").strip()
    values = plain[3:-1].split(",") if plain.startswith("in(") and plain.endswith(")") else [plain]
    return (labels.get(key) in [value.strip() for value in values]) != wanted.startswith("!")


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
        known = [strategy.value for strategy in PlacementStrategy]
        raise unknown(word.upper(), known, where, "unknown placement strategy {}") from None
