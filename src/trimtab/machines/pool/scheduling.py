"""x"""

from __future__ import annotations

import heapq
import math
from typing import Any, Self

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
    """x"""

    def _schedule(self, now: float) -> None:
        """Start whoever can start, in the order of the queue."""
        self._no_assignment.clear()
        self._no_preemption.clear()
        self._dirty = True
        while self._dirty:  # what is given up on the way (a refused task) may free something
            self._dirty = False
            self._create_reserved(now)
            if self._settled():
                continue
            seen = self.hints.position
            self._scan(now)
            if not self._dirty:
                self.hints.forget(seen)

    def _settled(self) -> bool:
        """Whether nobody who waits could start, without another look."""
        for queue in self.waiting.queues():
            verdict = self._unschedulable.get(queue)
            if verdict is None:
                return False
            hints = self.hints.since(verdict.since)
            if hints.room or feasibility.could_help(self, queue, verdict, hints):
                return False
        return True

    def _scan(self, now: float) -> None:
        """Look once at the first of every line, and at those behind one who starts."""
        starving: dict[
            str, StarvationReserve
        ] = {}  # by pool: what is kept for its first waiter, while all are looked at
        waits: list[tuple[PoolTask, Reason]] = []
        passed: list[tuple[PoolTask, ClassQueue, Unschedulable]] = []  # whom nothing could help beside what was kept
        before, self._unschedulable = self._unschedulable, {}
        covered = 0  # of those who were patient at the last look, so many have as much kept for them as then
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
            if queue.entries[0] is entry:  # nobody who came back meanwhile is before it
                self._unschedulable[queue] = Unschedulable(
                    self.hints.position, verdict.quota_alone, verdict.timed, len(starving)
                )
            if self._reserve_if_starving(task, starving, now):
                covered = self._covered(starving)
        for kept in starving.values():
            self.release_reserve(kept)
        if starving:
            # Some failed for room that was kept only until now.
            self._no_assignment.clear()
            self._no_preemption.clear()
            waits += [(task, task.reason) for task, queue, verdict in passed if self._could_help(queue, verdict)]
            waits = self._mark_behind(waits)
            self._unschedulable = {queue: verdict for queue, verdict in self._unschedulable.items() if not verdict.timed}
        self._reserves = list(starving.values())
        for task, reason in waits:
            if task.id in self.waiting:
                self._wait(task, reason, now)

    def _could_help(self, queue: ClassQueue, verdict: Unschedulable) -> bool:
        """Whether those of the line might find room with what was gained since none of them did."""
        return feasibility.could_help(self, queue, verdict, self.hints.since(verdict.since))

    def _try_class(
        self, queue: ClassQueue, task: PoolTask, waits: list[tuple[PoolTask, Reason]], now: float
    ) -> Unschedulable | None:
        """Have a task of the line start or make room for it; or why nobody of the line can."""
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
        return Unschedulable(0, reason.code is ReasonCode.quota and feasibility.quota_alone(self, queue), self._timed, 0)

    def _covered(self, starving: dict[str, StarvationReserve]) -> int:
        for at, kept in enumerate(self._reserves):
            if kept.pool not in starving or not starving[kept.pool].covers(kept):
                return at
        return len(self._reserves)

    def _reserve_if_starving(self, task: PoolTask, starving: dict[str, StarvationReserve], now: float) -> bool:
        """One who has waited too long has what is free kept for it, while those behind it are looked at."""
        pool = self.pools[task.spec.pool]
        overdue = now - task.since >= pool.starvation_timeout_s and task.spec.pool not in starving and not pool.drained
        if not overdue or not feasibility.would_fit_alone(self, task.spec):
            return False
        starving[task.spec.pool] = kept = feasibility.starvation_reserve(self, task)
        self.apply_reserve(kept)
        return True

    def _mark_behind(self, waits: list[tuple[PoolTask, Reason]]) -> list[tuple[PoolTask, Reason]]:
        """With room kept for the patient: whoever would find some otherwise says so."""
        kept = Reason(ReasonCode.behind, "there is room, kept for one who has waited longer")
        found: dict[tuple[object, ...], bool] = {}
        said = []
        for task, reason in waits:
            key = feasibility.placement_key(self, task.spec)
            if key not in found:
                found[key] = isinstance(feasibility.find_assignment(self, task), Assignment)
            said.append((task, kept if found[key] else reason))
        return said

    def _try(self, task: PoolTask, now: float) -> Reason | None:
        """Start the task, or begin to make room for it; else why it waits."""
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
            return assignment  # one who may have more people leave found nobody
        choice = feasibility.plan_preemption(self, task, now)
        if choice.found:
            self._claim(task, choice, now)
            return None
        if choice.retry_at is not None:
            self._timed = True
            self.recheck(choice.retry_at)
        else:
            self._no_preemption[rest] = max(task.spec.priority, self._no_preemption.get(rest, -math.inf))
        return assignment

    def _create_reserved(self, now: float) -> None:
        """Make the reserved slots that are not there, as far as there is room."""
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

    @classmethod
    def load(cls, data: dict[str, Any]) -> Self:
        """A machine that goes on from a snapshot."""
        machine = cls()
        machine.read(data)
        if "gains" not in data:  # written before verdicts were: everybody is looked at
            machine._wake_all()
            return machine
        machine.hints = HintLog(data["gains"])
        machine._reserves = [StarvationReserve.of(one) for one in data["kept"]]
        machine._unschedulable = {
            machine.waiting.queue_of(name): Unschedulable(*verdict) for name, verdict in data["blocked"]
        }
        return machine

    def dump(self) -> dict[str, Any]:
        """All that is remembered, as plain data: the records, and the verdicts of the last look.

        Verdicts say who is passed over until something is gained, and follow from no record: they are of the moment
        when somebody was looked at. Without them a machine read from this would look at others than the one that goes
        on, and tell other reasons and deadlines; and a controller's snapshots are written by another process that
        replays its journal, while it goes on with its own.
        """
        blocked = [(queue, verdict) for queue, verdict in self._unschedulable.items() if queue.entries]
        begin = min((verdict.since for _, verdict in blocked), default=self.hints.position)
        return {
            **super().dump(),
            "gains": [list(one) for one in self.hints.entries(begin)],
            "kept": [one.plain() for one in self._reserves],
            "blocked": sorted(
                [queue.entries[0][2], list(verdict._replace(since=verdict.since - begin))] for queue, verdict in blocked
            ),
        }

    def check(self) -> None:
        """Verify every invariant, also that nobody who is passed over could start; raises AssertionError."""
        super().check()
        for queue, verdict in self._unschedulable.items():
            if not queue.entries or verdict.kept or verdict.timed or self._could_help(queue, verdict):
                continue
            task = self.tasks[queue.entries[0][2]]
            starts = not self.pools[task.spec.pool].drained and isinstance(
                feasibility.find_assignment(self, task), Assignment
            )
            assert not starts, f"{task.id} waits, and there is room for it"
