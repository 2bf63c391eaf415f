"""A bound to compare with: a scheduler that knows how long every job takes, and for which nothing costs anything.

The most important class first, within it whoever has the least left; anybody may be stopped at any moment and goes on
later where it was. All GPUs are one heap, so nothing is too scattered to be used. No real scheduler reaches it. It is a
strong rule and not a proof: with jobs of several sizes nobody knows the best order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from trimtab.replay.common.agenda import Agenda
from trimtab.replay.common.churn import ChurnEvent
from trimtab.replay.pool.driver import BINS, PoolCurves, PoolOutcome, PoolReality, SimulatedTask
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.pool.workload import WorkloadTask


class Clairvoyant:
    """One run."""

    def __init__(self, workload: Sequence[WorkloadTask], reality: PoolReality) -> None:
        self._tasks = [SimulatedTask(one, (), one.work_s, one.submit_s) for one in workload]
        self._agenda: Agenda[tuple[str, int, int] | ChurnEvent] = Agenda()
        self._gpus = len(reality.nodes) * reality.node_gpus
        self._node_gpus = reality.node_gpus
        self._there = set(reality.nodes)
        self._free = self._gpus
        self._waiting: dict[int, list[tuple[float, float, int]]] = {}  # by size: a heap, the best first
        self._running: list[tuple[float, float, int, int]] = []  # a heap, the worst first; some entries are old
        self._window_s = max((one.submit_s for one in workload), default=0.0)
        self._done = self._events = self._evictions = 0
        self._work = self._capacity = self._since = 0.0
        self._curves, self._next_bin, self._waits = PoolCurves(), 0.0, 0
        for number, one in enumerate(workload):
            self._agenda.put(one.submit_s, ("comes", number, 0))
        for happens in reality.churn:
            self._agenda.put(happens.at_s, happens)

    def run(self) -> PoolOutcome:
        """Until every task has ended."""
        while self._done < len(self._tasks):
            if self._agenda.first() is None:
                raise InvariantError("nothing happens any more, and tasks have not ended")
            what = self._agenda.pop()
            self._events += 1
            self._sample()
            if isinstance(what, ChurnEvent):
                self._node(what)
            else:
                kind, number, attempt = what
                if kind == "comes":
                    self._wait(number)
                elif self._tasks[number].attempt == attempt and self._tasks[number].began_s is not None:
                    self._end(number)
                else:
                    continue
            self._fill()
        self._count_capacity()
        return PoolOutcome(
            self._tasks, self._events, self._evictions, self._agenda.now, self._window_s, self._capacity, self._work,
            self._work, self._curves, self._events, 0,
        )  # fmt: skip

    def _sample(self) -> None:
        now = self._agenda.now
        if self._next_bin <= now <= self._window_s:
            self._curves.at.append(now)
            self._curves.waiting.append(self._waits)
            self._curves.used_gpus.append(self._gpus - self._free)
            self._next_bin = now + self._window_s / BINS

    # ---- nodes ----

    def _node(self, what: ChurnEvent) -> None:
        self._count_capacity()
        if what.what == "joined" and what.node not in self._there:
            self._there.add(what.node)
            self._gpus, self._free = self._gpus + self._node_gpus, self._free + self._node_gpus
        elif what.what != "joined" and what.node in self._there:
            self._there.discard(what.node)
            self._gpus, self._free = self._gpus - self._node_gpus, self._free - self._node_gpus
            while self._free < 0:
                self._stop(self._worst())

    def _count_capacity(self) -> None:
        end = min(self._agenda.now, self._window_s)
        self._capacity += self._gpus * max(0.0, end - min(self._since, self._window_s))
        self._since = self._agenda.now

    # ---- jobs ----

    def _wait(self, number: int) -> None:
        life = self._tasks[number]
        life.queued_at = self._agenda.now
        self._waits += 1
        entry = (-life.work.spec.priority, life.left_s, number)
        heapq.heappush(self._waiting.setdefault(life.work.gpus, []), entry)

    def _fill(self) -> None:
        """Start the best, and stop whoever is worse, until nothing changes."""
        while True:
            heads = sorted((line[0], size) for size, line in self._waiting.items())
            if not any(self._may(entry, size) for entry, size in heads):
                return

    def _may(self, entry: tuple[float, float, int], size: int) -> bool:
        """Start it if there is room, or if there is with those who are worse stopped."""
        if size > self._gpus:
            return False
        level, left_s, number = entry
        leaving: list[int] = []
        room, aside = self._free, []
        while room < size and (worst := self._worst_entry()) is not None:
            priority, minus_end, other, attempt = worst
            if (-priority, -minus_end - self._agenda.now) <= (level, left_s):
                break
            heapq.heappop(self._running)
            aside.append((priority, minus_end, other, attempt))
            leaving.append(other)
            room += self._tasks[other].work.gpus
        for one in aside:
            heapq.heappush(self._running, one)
        if room < size:
            return False
        for other in leaving:
            self._stop(other)
        line = self._waiting[size]
        heapq.heappop(line)
        if not line:
            del self._waiting[size]
        self._start(number)
        return True

    def _worst_entry(self) -> tuple[float, float, int, int] | None:
        while self._running:
            _, _, number, attempt = self._running[0]
            life = self._tasks[number]
            if life.began_s is not None and life.attempt == attempt:
                return self._running[0]
            heapq.heappop(self._running)
        return None

    def _worst(self) -> int:
        entry = self._worst_entry()
        if entry is None:
            raise InvariantError("more GPUs are used than there are, and nobody runs")
        return entry[2]

    def _start(self, number: int) -> None:
        life, now = self._tasks[number], self._agenda.now
        self._free -= life.work.gpus
        self._waits -= 1
        life.waited_s += now - life.queued_at
        life.first_start_s = now if life.first_start_s is None else life.first_start_s
        life.attempt += 1
        life.began_s = now
        end = now + life.left_s
        heapq.heappush(self._running, (life.work.spec.priority, -end, number, life.attempt))
        self._agenda.put(end, ("ends", number, life.attempt))

    def _worked(self, number: int) -> None:
        life, now = self._tasks[number], self._agenda.now
        began = life.began_s if life.began_s is not None else now
        life.left_s = max(0.0, life.left_s - (now - began))
        end = min(now, self._window_s)
        self._work += life.work.gpus * max(0.0, end - min(began, self._window_s))
        life.began_s = None
        self._free += life.work.gpus

    def _stop(self, number: int) -> None:
        self._worked(number)
        self._tasks[number].evictions += 1
        self._evictions += 1
        self._wait(number)

    def _end(self, number: int) -> None:
        self._worked(number)
        self._tasks[number].done_s = self._agenda.now
        self._done += 1
