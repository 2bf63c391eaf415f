"""The order in which waiting tasks are looked at.

Tasks age: a point of priority for every minute they wait. So the order of two tasks never changes while both wait, an
old one passes any newcomer in the end, and nothing has to be sorted again. Ageing orders the queue and counts for
nothing else. Tasks that ask alike in every respect are of one kind: where the first of a kind finds no room, none does.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from trimtab.pool.records import Task

AGEING_S_PER_POINT = 60.0

Kind = tuple[object, ...]
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

    def add(self, task: Task, may_evict: bool) -> None:
        """The task waits."""
        spec = task.spec
        kind = (
            spec.pool,
            spec.bundles,
            spec.room,
            spec.priority,
            spec.labels,
            spec.strategy,
            may_evict,
            spec.evictable,
            spec.over_quota_waits,
            spec.wait_s == 0,
            task.came_back,
        )
        entry = (age_key(task), task.seq, task.id)
        bisect.insort(self._kinds.setdefault(kind, []), entry)
        self._kind_of[task.id] = (kind, entry)

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
        lines = [line for kind, line in self._kinds.items() if pool is None or kind[0] == pool]
        for _, _, task in heapq.merge(*lines):
            yield task


def age_key(task: Task) -> float:
    """Lower is earlier."""
    return task.submitted_at / AGEING_S_PER_POINT - task.spec.priority
