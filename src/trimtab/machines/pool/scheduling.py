"""Which waiting tasks start: scans the queue, preempts, and reserves free capacity for starving tasks.

Scheduling classes whose first task was unschedulable are skipped until a queueing hint says that it could fit now. What
must never happen: a task is skipped that could start.
"""

from __future__ import annotations

import heapq
import math

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.pool import feasibility
from trimtab.machines.pool.capacity import place
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.queue import ClassQueue, Unschedulable
from trimtab.machines.pool.records import PlacementGroupKind, PoolTask, StopOutcome
from trimtab.machines.pool.state import PoolState, StarvationReserve
from trimtab.machines.pool.transitions import TaskTransitions


class TaskScheduling:
    """Scheduling of waiting tasks."""

    def __init__(self, state: PoolState, act: TaskTransitions) -> None:
        self.state, self._act = state, act

    def schedule(self) -> None:
        """Start every task that can start, in queue order."""
        state = self.state
        state.no_assignment.clear()
        state.no_preemption.clear()
        state.scan_due = True
        while state.scan_due:  # ending a refused task may free capacity
            state.scan_due = False
            self._create_reserved()
            if self._settled():
                continue
            seen = state.hints.position
            self._scan()
            if not state.scan_due:
                state.hints.forget(seen)

    def _settled(self) -> bool:
        """Whether no waiting task can start, decided without a scan."""
        for queue in self.state.waiting.queues():
            verdict = self.state.unschedulable.get(queue)
            if verdict is None:
                return False
            hints = self.state.hints.since(verdict.since)
            if hints.room or feasibility.could_help(self.state, queue, verdict, hints):
                return False
        return True

    def _scan(self) -> None:
        """Try the first task of every class, and the next one of a class after each start."""
        state = self.state
        starving: dict[str, StarvationReserve] = {}  # by pool, for its first starving task, during the scan
        waits: list[tuple[PoolTask, Reason]] = []
        passed: list[tuple[PoolTask, ClassQueue, Unschedulable]] = []  # skipped
        before, state.unschedulable = state.unschedulable, {}
        covered = 0  # reserves of the last scan that are reserved again, at least as large
        heap = state.waiting.heads()
        while heap:
            entry, queue = heapq.heappop(heap)
            task = state.tasks[entry[2]]
            verdict = before.get(queue) if task.not_before <= state.now else None
            if verdict is None or verdict.kept > covered or self._could_help(queue, verdict):
                next_entry = state.waiting.after(queue, entry)
                verdict = self._try_class(queue, task, waits) if task.not_before <= state.now else None
                if verdict is None:
                    if next_entry is not None:
                        heapq.heappush(heap, (next_entry, queue))
                    continue
            elif starving and task.reason.code is not ReasonCode.behind:
                passed.append((task, queue, verdict))
            if queue.entries[0] is entry:  # no task that returned meanwhile precedes it
                state.unschedulable[queue] = Unschedulable(
                    state.hints.position, verdict.quota_alone, verdict.timed, len(starving)
                )
            if self._reserve_if_starving(task, starving):
                covered = self._covered(starving)
        for reserve in starving.values():
            state.release_reserve(reserve)
        if starving:
            # Some tasks failed only because of the reserves, which are released now.
            state.no_assignment.clear()
            state.no_preemption.clear()
            waits += [(task, task.reason) for task, queue, verdict in passed if self._could_help(queue, verdict)]
            waits = self._mark_behind(waits)
            state.unschedulable = {
                queue: verdict for queue, verdict in state.unschedulable.items() if not verdict.timed
            }
        state.reserves = list(starving.values())
        for task, reason in waits:
            if task.id in state.waiting:
                self._act.wait(task, reason)

    def _could_help(self, queue: ClassQueue, verdict: Unschedulable) -> bool:
        """Whether the hints since the verdict may make the class schedulable."""
        return feasibility.could_help(self.state, queue, verdict, self.state.hints.since(verdict.since))

    def _try_class(
        self, queue: ClassQueue, task: PoolTask, waits: list[tuple[PoolTask, Reason]]
    ) -> Unschedulable | None:
        """Start a task or free capacity for it (None); or why its class is unschedulable."""
        waits_for = self._try(task)
        if waits_for is None:
            return None
        reason, timed = waits_for
        if task.spec.wait_s == 0 and not task.came_back:
            sentence = f"cannot start at once: {reason.sentence}"
            self._act.end(task, StopOutcome.failed, Reason(ReasonCode.refused, sentence))
            return None
        waits.append((task, reason))
        return Unschedulable(
            0, reason.code is ReasonCode.quota and feasibility.quota_alone(self.state, queue), timed, 0
        )

    def _covered(self, starving: dict[str, StarvationReserve]) -> int:
        """How many reserves of the last scan are covered by those of this one."""
        for at, reserve in enumerate(self.state.reserves):
            if reserve.pool not in starving or not starving[reserve.pool].covers(reserve):
                return at
        return len(self.state.reserves)

    def _reserve_if_starving(self, task: PoolTask, starving: dict[str, StarvationReserve]) -> bool:
        """Reserve free capacity for a task that has waited too long, for the rest of the scan."""
        state = self.state
        pool = state.pools[task.spec.pool]
        overdue = (
            state.now - task.since >= pool.starvation_timeout_s and task.spec.pool not in starving and not pool.drained
        )
        if not overdue or not feasibility.would_fit_alone(state, task.spec):
            return False
        starving[task.spec.pool] = reserve = feasibility.starvation_reserve(state, task)
        state.apply_reserve(reserve)
        return True

    def _mark_behind(self, waits: list[tuple[PoolTask, Reason]]) -> list[tuple[PoolTask, Reason]]:
        """Tasks that would fit without the reserves get that as their reason."""
        behind = Reason(ReasonCode.behind, "there is room, kept for a task that has waited longer")
        found: dict[tuple[object, ...], bool] = {}
        marked = []
        for task, reason in waits:
            key = feasibility.placement_key(self.state, task.spec)
            if key not in found:
                found[key] = isinstance(feasibility.find_assignment(self.state, task), Assignment)
            marked.append((task, behind if found[key] else reason))
        return marked

    def _try(self, task: PoolTask) -> tuple[Reason, bool] | None:
        """Start the task or begin to free capacity for it (None); or why it waits, and whether time may change that."""
        state = self.state
        pool = state.pools[task.spec.pool]
        if pool.drained:
            return Reason(ReasonCode.drained, f"pool {pool.spec.name} takes nothing new"), False
        key = feasibility.placement_key(state, task.spec)
        assignment = state.no_assignment.get(key) or feasibility.find_assignment(state, task)
        if isinstance(assignment, Assignment):
            state.waiting.remove(task.id)
            self._act.to_starting(task, assignment)
            return None
        if assignment.code is ReasonCode.quota and not task.spec.over_quota_waits and not task.came_back:
            self._act.end(task, StopOutcome.failed, Reason(ReasonCode.refused, assignment.sentence))
            return None
        state.no_assignment[key] = assignment
        rest = feasibility.preemption_key(state, task)
        if task.spec.priority <= state.no_preemption.get(rest, -math.inf):
            return assignment, False  # a task that may evict more found no plan
        plan = feasibility.plan_preemption(state, task, state.now)
        if plan.found:
            self._act.claim(task, plan)
            return None
        if plan.retry_at is not None:
            state.recheck(plan.retry_at)
        else:
            state.no_preemption[rest] = max(task.spec.priority, state.no_preemption.get(rest, -math.inf))
        return assignment, plan.retry_at is not None

    def _create_reserved(self) -> None:
        """Create missing reserved slots, as far as there is capacity."""
        state = self.state
        for pool in state.pools.values():
            missing = len(pool.spec.reserved) - len(pool.retired)
            if not missing or pool.dropped or pool.not_before > state.now:
                continue
            there = {group.spec_index for group in state.pool_groups[pool.spec.name].reserved.values()}
            for index, size in enumerate(pool.spec.reserved):
                if index in there or index in pool.retired:
                    continue
                capacity = state.capacity
                rows = place(capacity.free, capacity.usable, [capacity.vector(size)], pool.spec.strategy)
                if rows is not None:
                    nodes = (str(capacity.nodes[rows[0]]),)
                    group = self._act.create_group(
                        pool.spec.name, PlacementGroupKind.reserved, (size,), nodes, pool.spec.strategy
                    )
                    group.spec_index = index

    def check(self) -> None:
        """Raises AssertionError where a skipped task could start."""
        for queue, verdict in self.state.unschedulable.items():
            if not queue.entries or verdict.kept or verdict.timed or self._could_help(queue, verdict):
                continue
            task = self.state.tasks[queue.entries[0][2]]
            starts = not self.state.pools[task.spec.pool].drained and isinstance(
                feasibility.find_assignment(self.state, task), Assignment
            )
            assert not starts, f"{task.id} waits, and there is room for it"
