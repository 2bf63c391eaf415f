"""A lower bound for comparison: a scheduler that knows every job's length and preempts at no cost.

Highest class first, within it shortest remaining time first; any job may be stopped at any time and resumes later where
it was. All GPUs are one pool without fragmentation. No real scheduler reaches it. It is a strong heuristic, not a
proven optimum: for jobs of several sizes the optimal order is unknown.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from trimtab.replay.common.timing import Agenda, ChurnEvent
from trimtab.replay.pool.driver import BINS, PoolCurves, PoolOutcome, PoolReality, SimulatedTask, WorkloadTask
from trimtab.replay.pool.invariants import InvariantError


class Clairvoyant:
    """A run of the clairvoyant scheduler."""

    def __init__(self, workload: Sequence[WorkloadTask], reality: PoolReality) -> None:
        self._tasks = [SimulatedTask(task, (), task.work_s, task.submit_s) for task in workload]
        self._agenda: Agenda[tuple[str, int, int] | ChurnEvent] = Agenda()
        self._gpus = len(reality.nodes) * reality.node_gpus
        self._node_gpus = reality.node_gpus
        self._nodes = set(reality.nodes)
        self._free = self._gpus
        self._waiting: dict[int, list[tuple[float, float, int]]] = {}  # by size: a heap, best first
        self._running: list[tuple[float, float, int, int]] = []  # a heap, worst first; entries may be stale
        self._window_s = max((task.submit_s for task in workload), default=0.0)
        self._done = self._events = self._evictions = 0
        self._work = self._capacity = self._since = 0.0
        self._curves, self._next_bin, self._waits = PoolCurves(), 0.0, 0
        for number, task in enumerate(workload):
            self._agenda.put(task.submit_s, ("submit", number, 0))
        for event in reality.churn:
            self._agenda.put(event.at_s, event)

    def run(self) -> PoolOutcome:
        """Runs until every task has ended."""
        while self._done < len(self._tasks):
            if self._agenda.next_time() is None:
                raise InvariantError("no event is left, but some tasks have not ended")
            what = self._agenda.pop()
            self._events += 1
            self._sample()
            if isinstance(what, ChurnEvent):
                self._node(what)
            else:
                kind, number, attempt = what
                if kind == "submit":
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
            self._curves.add(now, self._waits, self._gpus - self._free)
            self._next_bin = now + self._window_s / BINS

    def _node(self, what: ChurnEvent) -> None:
        self._count_capacity()
        if what.what == "joined" and what.node not in self._nodes:
            self._nodes.add(what.node)
            self._gpus, self._free = self._gpus + self._node_gpus, self._free + self._node_gpus
        elif what.what != "joined" and what.node in self._nodes:
            self._nodes.discard(what.node)
            self._gpus, self._free = self._gpus - self._node_gpus, self._free - self._node_gpus
            while self._free < 0:
                self._stop(self._worst())

    def _count_capacity(self) -> None:
        end = min(self._agenda.now, self._window_s)
        self._capacity += self._gpus * max(0.0, end - min(self._since, self._window_s))
        self._since = self._agenda.now

    def _wait(self, number: int) -> None:
        task = self._tasks[number]
        task.queued_at = self._agenda.now
        self._waits += 1
        entry = (-task.work.spec.priority, task.left_s, number)
        heapq.heappush(self._waiting.setdefault(task.work.gpus, []), entry)

    def _fill(self) -> None:
        """Starts the best jobs and preempts worse ones until nothing changes."""
        while True:
            heads = sorted((line[0], size) for size, line in self._waiting.items())
            if not any(self._start_if_possible(entry, size) for entry, size in heads):
                return

    def _start_if_possible(self, waiting: tuple[float, float, int], size: int) -> bool:
        """Starts the job if it fits, also by preempting worse jobs."""
        if size > self._gpus:
            return False
        level, left_s, number = waiting
        leaving: list[int] = []
        room, aside = self._free, []
        while room < size and (running := self._worst_entry()) is not None:
            priority, minus_end, other, attempt = running
            if (-priority, -minus_end - self._agenda.now) <= (level, left_s):
                break
            heapq.heappop(self._running)
            aside.append((priority, minus_end, other, attempt))
            leaving.append(other)
            room += self._tasks[other].work.gpus
        for entry in aside:
            heapq.heappush(self._running, entry)
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
            task = self._tasks[number]
            if task.began_s is not None and task.attempt == attempt:
                return self._running[0]
            heapq.heappop(self._running)
        return None

    def _worst(self) -> int:
        entry = self._worst_entry()
        if entry is None:
            raise InvariantError("more GPUs are in use than exist, but no task runs")
        return entry[2]

    def _start(self, number: int) -> None:
        task, now = self._tasks[number], self._agenda.now
        self._free -= task.work.gpus
        self._waits -= 1
        task.waited_s += now - task.queued_at
        task.first_start_s = now if task.first_start_s is None else task.first_start_s
        task.attempt += 1
        task.began_s = now
        end = now + task.left_s
        heapq.heappush(self._running, (task.work.spec.priority, -end, number, task.attempt))
        self._agenda.put(end, ("end", number, task.attempt))

    def _worked(self, number: int) -> None:
        task, now = self._tasks[number], self._agenda.now
        began = task.began_s if task.began_s is not None else now
        task.left_s = max(0.0, task.left_s - (now - began))
        end = min(now, self._window_s)
        self._work += task.work.gpus * max(0.0, end - min(began, self._window_s))
        task.began_s = None
        self._free += task.work.gpus

    def _stop(self, number: int) -> None:
        self._worked(number)
        self._tasks[number].evictions += 1
        self._evictions += 1
        self._wait(number)

    def _end(self, number: int) -> None:
        self._worked(number)
        self._tasks[number].done_s = self._agenda.now
        self._done += 1
