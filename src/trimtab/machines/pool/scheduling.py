"""Which waiting tasks start: scans the queue, preempts, and reserves free capacity for starving tasks.

Scheduling classes whose first task was unschedulable are skipped until a queueing hint says that it could fit now. What
must never happen: a task is skipped that could start.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.pool import feasibility
from trimtab.machines.pool.binpack import place
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.queue import ClassQueue
from trimtab.machines.pool.queueing_hints import HintLog, Unschedulable
from trimtab.machines.pool.records import PlacementGroupKind, PoolTask, StopOutcome
from trimtab.machines.pool.state import StarvationReserve
from trimtab.machines.pool.transitions import TaskTransitions


class TaskScheduling(TaskTransitions):
    """Scheduling of waiting tasks."""

    def _schedule(self, now: float) -> None:
        """Start every task that can start, in queue order."""
        self._no_assignment.clear()
        self._no_preemption.clear()
        self._dirty = True
        while self._dirty:  # ending a refused task may free capacity
            self._dirty = False
            self._create_reserved(now)
            if self._settled():
                continue
            seen = self.hints.position
            self._scan(now)
            if not self._dirty:
                self.hints.forget(seen)

    def _settled(self) -> bool:
        """Whether no waiting task can start, decided without a scan."""
        for queue in self.waiting.queues():
            verdict = self._unschedulable.get(queue)
            if verdict is None:
                return False
            hints = self.hints.since(verdict.since)
            if hints.room or feasibility.could_help(self, queue, verdict, hints):
                return False
        return True

    def _scan(self, now: float) -> None:
        """Try the first task of every class, and the next one of a class after each start."""
        starving: dict[str, StarvationReserve] = {}  # by pool, for its first starving task, during the scan
        waits: list[tuple[PoolTask, Reason]] = []
        passed: list[tuple[PoolTask, ClassQueue, Unschedulable]] = []  # skipped
        before, self._unschedulable = self._unschedulable, {}
        covered = 0  # reserves of the last scan that are reserved again, at least as large
        heap = self.waiting.heads()
        while heap:
            entry, queue = heapq.heappop(heap)
            task = self.tasks[entry[2]]
            verdict = before.get(queue) if task.not_before <= now else None
            if verdict is None or verdict.kept > covered or self._could_help(queue, verdict):
                next_entry = self.waiting.after(queue, entry)
                verdict = self._try_class(queue, task, waits, now) if task.not_before <= now else None
                if verdict is None:
                    if next_entry is not None:
                        heapq.heappush(heap, (next_entry, queue))
                    continue
            elif starving and task.reason.code is not ReasonCode.behind:
                passed.append((task, queue, verdict))
            if queue.entries[0] is entry:  # no task that returned meanwhile precedes it
                self._unschedulable[queue] = Unschedulable(
                    self.hints.position, verdict.quota_alone, verdict.timed, len(starving)
                )
            if self._reserve_if_starving(task, starving, now):
                covered = self._covered(starving)
        for reserve in starving.values():
            self.release_reserve(reserve)
        if starving:
            # Some tasks failed only because of the reserves, which are released now.
            self._no_assignment.clear()
            self._no_preemption.clear()
            waits += [(task, task.reason) for task, queue, verdict in passed if self._could_help(queue, verdict)]
            waits = self._mark_behind(waits)
            self._unschedulable = {
                queue: verdict for queue, verdict in self._unschedulable.items() if not verdict.timed
            }
        self._reserves = list(starving.values())
        for task, reason in waits:
            if task.id in self.waiting:
                self._wait(task, reason, now)

    def _could_help(self, queue: ClassQueue, verdict: Unschedulable) -> bool:
        """Whether the hints since the verdict may make the class schedulable."""
        return feasibility.could_help(self, queue, verdict, self.hints.since(verdict.since))

    def _try_class(
        self, queue: ClassQueue, task: PoolTask, waits: list[tuple[PoolTask, Reason]], now: float
    ) -> Unschedulable | None:
        """Start a task or free capacity for it (None); or why its class is unschedulable."""
        self._timed = False
        reason = self._try(task, now)
        if reason is None:
            return None
        if task.spec.wait_s == 0 and not task.came_back:
            self._end(
                task, StopOutcome.failed, Reason(ReasonCode.refused, f"cannot start at once: {reason.sentence}"), now
            )
            return None
        waits.append((task, reason))
        return Unschedulable(
            0, reason.code is ReasonCode.quota and feasibility.quota_alone(self, queue), self._timed, 0
        )

    def _covered(self, starving: dict[str, StarvationReserve]) -> int:
        """How many reserves of the last scan are covered by those of this one."""
        for at, reserve in enumerate(self._reserves):
            if reserve.pool not in starving or not starving[reserve.pool].covers(reserve):
                return at
        return len(self._reserves)

    def _reserve_if_starving(self, task: PoolTask, starving: dict[str, StarvationReserve], now: float) -> bool:
        """Reserve free capacity for a task that has waited too long, for the rest of the scan."""
        pool = self.pools[task.spec.pool]
        overdue = now - task.since >= pool.starvation_timeout_s and task.spec.pool not in starving and not pool.drained
        if not overdue or not feasibility.would_fit_alone(self, task.spec):
            return False
        starving[task.spec.pool] = reserve = feasibility.starvation_reserve(self, task)
        self.apply_reserve(reserve)
        return True

    def _mark_behind(self, waits: list[tuple[PoolTask, Reason]]) -> list[tuple[PoolTask, Reason]]:
        """Tasks that would fit without the reserves get that as their reason."""
        behind = Reason(ReasonCode.behind, "there is room, kept for a task that has waited longer")
        found: dict[tuple[object, ...], bool] = {}
        marked = []
        for task, reason in waits:
            key = feasibility.placement_key(self, task.spec)
            if key not in found:
                found[key] = isinstance(feasibility.find_assignment(self, task), Assignment)
            marked.append((task, behind if found[key] else reason))
        return marked

    def _try(self, task: PoolTask, now: float) -> Reason | None:
        """Start the task or begin to free capacity for it (None); or why it waits."""
        pool = self.pools[task.spec.pool]
        if pool.drained:
            return Reason(ReasonCode.drained, f"pool {pool.spec.name} takes nothing new")
        key = feasibility.placement_key(self, task.spec)
        assignment = self._no_assignment.get(key) or feasibility.find_assignment(self, task)
        if isinstance(assignment, Assignment):
            self.waiting.remove(task.id)
            self._to_starting(task, assignment, now)
            return None
        if assignment.code is ReasonCode.quota and not task.spec.over_quota_waits and not task.came_back:
            self._end(task, StopOutcome.failed, Reason(ReasonCode.refused, assignment.sentence), now)
            return None
        self._no_assignment[key] = assignment
        rest = (*key[:4], key[5], task.spec.labels, self.may_evict(task), task.evictions > 0)
        if task.spec.priority <= self._no_preemption.get(rest, -math.inf):
            return assignment  # a task that may evict more found no plan
        plan = feasibility.plan_preemption(self, task, now)
        if plan.found:
            self._claim(task, plan, now)
            return None
        if plan.retry_at is not None:
            self._timed = True
            self.recheck(plan.retry_at)
        else:
            self._no_preemption[rest] = max(task.spec.priority, self._no_preemption.get(rest, -math.inf))
        return assignment

    def _create_reserved(self, now: float) -> None:
        """Create missing reserved slots, as far as there is capacity."""
        for pool in self.pools.values():
            missing = len(pool.spec.reserved) - len(pool.retired)
            if not missing or pool.dropped or pool.not_before > now:
                continue
            there = {group.spec_index for group in self.pool_groups[pool.spec.name].reserved.values()}
            for index, size in enumerate(pool.spec.reserved):
                if index in there or index in pool.retired:
                    continue
                capacity = self.capacity
                rows = place(capacity.free, capacity.usable, [capacity.vector(size)], pool.spec.strategy)
                if rows is not None:
                    nodes = (str(capacity.nodes[rows[0]]),)
                    group = self._create_group(
                        pool.spec.name, PlacementGroupKind.reserved, (size,), nodes, pool.spec.strategy, now
                    )
                    group.spec_index = index

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def read(self, data: dict[str, Any]) -> None:
        super().read(data)
        if "gains" not in data:  # of an older version: every class is tried
            self._wake_all()
            return
        self.hints = HintLog(data["gains"])
        self._reserves = [StarvationReserve.of(reserve) for reserve in data["kept"]]
        self._unschedulable = {
            self.waiting.queue_of(name): Unschedulable(*verdict) for name, verdict in data["blocked"]
        }

    def dump(self) -> dict[str, Any]:
        """State and unschedulable verdicts as plain data.

        The verdicts depend on the moment of the scan and cannot be derived from the records. Without them a loaded
        machine would try other tasks, and give other reasons and deadlines, than the machine that runs on; and a
        controller's snapshots are written by another process that replays its journal.
        """
        blocked = [(queue, verdict) for queue, verdict in self._unschedulable.items() if queue.entries]
        begin = min((verdict.since for _, verdict in blocked), default=self.hints.position)
        return {
            **super().dump(),
            "gains": [list(entry) for entry in self.hints.entries(begin)],
            "kept": [reserve.plain() for reserve in self._reserves],
            "blocked": sorted(
                [queue.entries[0][2], list(verdict._replace(since=verdict.since - begin))] for queue, verdict in blocked
            ),
        }

    def check(self) -> None:
        """Verify every invariant, also that no skipped task could start; raises AssertionError."""
        super().check()
        for queue, verdict in self._unschedulable.items():
            if not queue.entries or verdict.kept or verdict.timed or self._could_help(queue, verdict):
                continue
            task = self.tasks[queue.entries[0][2]]
            starts = not self.pools[task.spec.pool].drained and isinstance(
                feasibility.find_assignment(self, task), Assignment
            )
            assert not starts, f"{task.id} waits, and there is room for it"
