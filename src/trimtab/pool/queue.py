"""The order in which waiting tasks are looked at.

Tasks age: a point of priority for every minute they wait. So the order of two tasks never changes while both wait, an
old one passes any newcomer in the end, and nothing has to be sorted again. Ageing orders the queue and counts for
nothing else. Tasks that ask alike in every respect are of one kind: where the first of a kind finds no room, none does.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trimtab.model.pool import Labels, Strategy
from trimtab.model.resources import Resources
from trimtab.pool.records import Task

AGEING_S_PER_POINT = 60.0


class Kind(NamedTuple):
    """All that decides where a task could go and whom it could have leave."""

    pool: str
    bundles: tuple[Resources, ...]
    room: tuple[Resources, ...]
    strategy: Strategy | None
    priority: float
    labels: Labels
    may_evict: bool
    evictable: bool
    over_quota_waits: bool
    at_once: bool
    came_back: bool


Entry = tuple[float, int, str]


class Queue:
    """Waiting tasks by kind."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, list[Entry]] = {}
        self._kind_of: dict[str, tuple[Kind, Entry]] = {}

    def __len__(self) -> int:
        return len(self._kind_of)

    def __contains__(self, task: str) -> bool:
        return task in self._kind_of

    def add(self, task: Task, may_evict: bool) -> tuple[Kind, bool]:
        """The task waits; its kind, and whether it is the only one of it."""
        spec = task.spec
        kind = Kind(
            spec.pool,
            spec.bundles,
            spec.room,
            spec.strategy,
            spec.priority,
            spec.labels,
            may_evict,
            spec.evictable,
            spec.over_quota_waits,
            spec.wait_s == 0,
            task.came_back,
        )
        entry = (age_key(task), task.seq, task.id)
        line = self._kinds.setdefault(kind, [])
        bisect.insort(line, entry)
        self._kind_of[task.id] = (kind, entry)
        return kind, len(line) == 1

    def kind_of(self, task: str) -> Kind:
        """The kind of a waiting task."""
        return self._kind_of[task][0]

    def firsts(self, kinds: Iterable[Kind]) -> list[str]:
        """The first of each kind that somebody waits of."""
        return [self._kinds[kind][0][2] for kind in kinds if kind in self._kinds]

    def remove(self, task: str) -> None:
        """The task waits no longer."""
        found = self._kind_of.pop(task, None)
        if found is None:
            return
        kind, entry = found
        line = self._kinds[kind]
        del line[bisect.bisect_left(line, entry)]
        if not line:
            del self._kinds[kind]

    def heads(self) -> list[tuple[Entry, Kind]]:
        """The first of every kind, as a heap."""
        heap = [(line[0], kind) for kind, line in self._kinds.items()]
        # Entries differ in their second part at the latest, so kinds are never compared.
        heapq.heapify(heap)
        return heap

    def after(self, kind: Kind, entry: Entry) -> Entry | None:
        """The next of the kind behind the entry."""
        line = self._kinds.get(kind)
        if not line:
            return None
        at = bisect.bisect_right(line, entry)
        return line[at] if at < len(line) else None

    def in_order(self, pool: str | None = None) -> Iterator[str]:
        """All of them, or those of one pool, in the order they are looked at."""
        lines = [line for kind, line in self._kinds.items() if pool is None or kind.pool == pool]
        for _, _, task in heapq.merge(*lines):
            yield task


def age_key(task: Task) -> float:
    """Lower is earlier."""
    return task.submitted_at / AGEING_S_PER_POINT - task.spec.priority
