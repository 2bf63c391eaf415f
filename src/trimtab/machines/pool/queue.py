"""The order in which waiting tasks are scheduled.

Tasks age: one point of priority for every minute they wait. So the order of two waiting tasks never changes, an old
task passes any newcomer in the end, and nothing is re-sorted. Ageing affects the queue order only. Tasks with equal
requirements form a scheduling class: where the first of a class does not fit, none does.

A class that could not be scheduled is tried again when capacity was gained that could help it. A gain that is not
logged would keep a task waiting that could start, which must never happen; a superfluous entry only costs time.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trimtab.core.resources import Resources
from trimtab.machines.pool.records import PoolTask
from trimtab.model.pool import Labels, PlacementStrategy

AGEING_S_PER_POINT = 60.0
MAX_ENTRIES = 256  # more are replaced by "anything"


class SchedulingClass(NamedTuple):
    """Everything that decides where a task could go and what it could evict."""

    pool: str
    bundles: tuple[Resources, ...]
    size: tuple[Resources, ...]
    strategy: PlacementStrategy | None
    priority: float
    labels: Labels
    may_evict: bool
    evictable: bool
    over_quota_waits: bool
    at_once: bool
    came_back: bool
    was_evicted: bool


QueueEntry = tuple[float, int, str]


class ClassQueue:
    """Waiting tasks of one class, in order. Exists as long as a task waits in it."""

    __slots__ = ("entries", "kind", "size", "uniform", "wanted")

    def __init__(self, kind: SchedulingClass) -> None:
        self.kind = kind
        self.entries: list[QueueEntry] = []
        self.size = kind.size
        self.uniform = all(bundle == self.size[0] for bundle in self.size)
        self.wanted: list[tuple[int, int]] | None = (
            None  # of a bundle, by column of ClusterCapacity; computed on demand
        )


class PendingQueue:
    """Waiting tasks by class."""

    def __init__(self) -> None:
        self._queues: dict[SchedulingClass, ClassQueue] = {}
        self._queue_of: dict[str, tuple[ClassQueue, QueueEntry]] = {}

    def __len__(self) -> int:
        return len(self._queue_of)

    def queues(self) -> Iterable[ClassQueue]:
        return self._queues.values()

    def __contains__(self, task: str) -> bool:
        return task in self._queue_of

    def add(self, task: PoolTask, may_evict: bool) -> tuple[ClassQueue, bool]:
        """Enqueue the task; its queue, and whether it is the first there."""
        spec = task.spec
        kind = SchedulingClass(
            spec.pool,
            spec.bundles,
            spec.size,
            spec.strategy,
            spec.priority,
            spec.labels,
            may_evict,
            spec.evictable,
            spec.over_quota_waits,
            spec.wait_s == 0,
            task.came_back,
            task.evictions > 0,
        )
        entry = (task.submitted_at / AGEING_S_PER_POINT - task.spec.priority, task.seq, task.id)
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = ClassQueue(kind)
        bisect.insort(queue.entries, entry)
        self._queue_of[task.id] = (queue, entry)
        return queue, queue.entries[0] is entry

    def queue_of(self, task: str) -> ClassQueue:
        return self._queue_of[task][0]

    def remove(self, task: str) -> None:
        found = self._queue_of.pop(task, None)
        if found is None:
            return
        queue, entry = found
        del queue.entries[bisect.bisect_left(queue.entries, entry)]
        if not queue.entries:
            del self._queues[queue.kind]

    def heads(self) -> list[tuple[QueueEntry, ClassQueue]]:
        """The first entry of every queue, as a heap."""
        heap = [(queue.entries[0], queue) for queue in self._queues.values()]
        # Entries differ in their second part at the latest, so queues are never compared.
        heapq.heapify(heap)
        return heap

    @staticmethod
    def after(queue: ClassQueue, entry: QueueEntry) -> QueueEntry | None:
        at = bisect.bisect_right(queue.entries, entry)
        return queue.entries[at] if at < len(queue.entries) else None

    def in_order(self, pool: str | None = None) -> Iterator[str]:
        """All waiting tasks, or those of one pool, in scheduling order."""
        queues = [queue.entries for kind, queue in self._queues.items() if pool is None or kind.pool == pool]
        for _, _, task in heapq.merge(*queues):
            yield task


# ---- capacity gained since a class was unschedulable ---------------------------------------------------------------


class QueueingHints(NamedTuple):
    """All gains since a position."""

    rows: frozenset[int]  # capacity is free or idle there, or will be soon
    evictable_rows: frozenset[int]  # with a task that became evictable
    pools: frozenset[str]  # that use less of their quota
    anything: bool

    @property
    def room(self) -> bool:
        return self.anything or bool(self.rows or self.pools)


class Unschedulable(NamedTuple):
    """No task of a class could start, or evict others to start."""

    since: int  # position in the log
    quota_alone: bool  # its quota is short, but nodes might fit it
    timed: bool  # time alone may change it
    kept: int  # starvation reserves that were applied when it was tried


class HintLog:
    """Gains in order. Positions only grow."""

    def __init__(self, entries: Iterable[tuple[str, int | str]] = ()) -> None:
        self._entries: list[tuple[str, int | str]] = [(what, where) for what, where in entries]
        self._begin = 0
        self._summed: tuple[int, int, QueueingHints] | None = None

    @property
    def position(self) -> int:
        return self._begin + len(self._entries)

    def row(self, row: int) -> None:
        self._add("row", row)

    def evictable(self, row: int) -> None:
        self._add("evictable", row)

    def pool(self, pool: str) -> None:
        self._add("pool", pool)

    def anything(self) -> None:
        self._add("anything", "")

    def _add(self, what: str, where: int | str) -> None:
        self._entries.append((what, where))
        if len(self._entries) > MAX_ENTRIES:
            self._begin += len(self._entries) - 1
            self._entries = [("anything", "")]

    def since(self, position: int) -> QueueingHints:
        if self._summed is None or self._summed[:2] != (position, self.position):
            self._summed = (position, self.position, _sum(self.entries(position)))
        return self._summed[2]

    def entries(self, position: int) -> list[tuple[str, int | str]]:
        at = position - self._begin
        return [("anything", "")] if at < 0 else self._entries[at:]

    def take_back(self, position: int) -> None:
        """Drop what was logged since the position: it was no gain."""
        del self._entries[max(0, position - self._begin) :]
        self._summed = None

    def forget(self, position: int) -> None:
        """Drop entries before the position: they are not read any more."""
        at = max(0, position - self._begin)
        del self._entries[:at]
        self._begin += at


def _sum(entries: Iterable[tuple[str, int | str]]) -> QueueingHints:
    by_what: dict[str, set[int | str]] = {}
    for what, where in entries:
        by_what.setdefault(what, set()).add(where)
    nothing: set[int | str] = set()
    return QueueingHints(
        frozenset(int(where) for where in by_what.get("row", nothing)),
        frozenset(int(where) for where in by_what.get("evictable", nothing)),
        frozenset(str(where) for where in by_what.get("pool", nothing)),
        "anything" in by_what,
    )
