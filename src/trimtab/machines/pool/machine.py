"""The pool state machine: which tasks run, wait or are evicted.

`handle(event, now)` is the only entry point. It never blocks and reads no clock; the same events give the same
instructions. An invalid request raises before anything is changed. What must never happen: more held than a node or a
quota has; an eviction that no rule, switch or user allows; an eviction that is not needed; half a gang; a task that
waits without a reason and a deadline. Capacity that is being freed for a task is claimed, so no other task takes it.

Slots (bundles of placement groups) occupy nodes; tasks in them use the quota of their pool. The machine chooses the
node of every bundle, so its accounting is exact; a placement group that is lost in part is removed whole.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

from trimtab.core.codec import encode
from trimtab.core.dispatch import handlers_of
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, add_story_entry
from trimtab.core.resources import NOTHING
from trimtab.machines.pool import events as e
from trimtab.machines.pool import explain, feasibility
from trimtab.machines.pool.explain import PoolTotals, PoolView
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.preemption import PreemptionPlan
from trimtab.machines.pool.records import PgState, PlacementGroup, PlacementGroupKind, PoolRecord, PoolTask, StopOutcome
from trimtab.machines.pool.scheduling import TaskScheduling
from trimtab.machines.pool.transitions import (
    BACK_OFF_S,
    CREATE_GROUP_TIMEOUT_S,
    MAX_ENDED_TASKS,
    START_GRACE_S,
    TURN_TIMEOUT_S,
)
from trimtab.model.pool import ENDED, IN_QUEUE, PoolSpec, TaskExplanation, TaskSpec, TaskState


class PoolMachine(TaskScheduling):
    """Pools, tasks and slots. Events in, instructions out."""

    @classmethod
    def load(cls, data: dict[str, Any]) -> PoolMachine:
        machine = cls()
        machine.read(data)
        return machine

    # ---- entry point ------------------------------------------------------------------------------------------------

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        """The instructions that follow. Raises InputError for an invalid request, with nothing changed."""
        now = max(float(now), self.now)
        self._out = []
        _HANDLERS[type(event)](self, event, now)
        self.now = now
        if self._dirty:
            self._schedule(now)
        return self._out

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _on_pool_ensured(self, event: e.PoolEnsured, now: float) -> None:
        spec = event.spec
        known = self.pools.get(spec.name)
        if known is not None:
            if known.dropped:
                raise InputError(f"pool {spec.name} is being removed", hint="ask again once it is gone")
            if known.spec != spec:
                raise InputError(f"pool {spec.name} exists with another configuration: {_difference(known.spec, spec)}")
            if known.retired:
                known.retired.clear()
                self._wake_all()
            return
        self.add_pool(PoolRecord(spec))
        self._wake_all()

    def _on_quota_set(self, event: e.QuotaSet, now: float) -> None:
        pool = feasibility.known_pool(self, event.pool)
        pool.spec = replace(pool.spec, quota=event.quota)  # raises where its reserved slots exceed it
        self.capacity.set_quota(event.pool, event.quota)
        pool.lowered = bool((self.capacity.quota_left(event.pool) < 0).any())
        self._wake_all()

    def _on_pool_drained(self, event: e.PoolDrained, now: float) -> None:
        feasibility.known_pool(self, event.pool).drained = event.on
        self._wake_all()

    def _on_pool_dropped(self, event: e.PoolDropped, now: float) -> None:
        pool = feasibility.known_pool(self, event.pool)
        pool.dropped = pool.drained = True
        reason = Reason(ReasonCode.pool_dropped, f"pool {event.pool} was removed")
        for task in [task for task in self.tasks.values() if task.spec.pool == event.pool]:
            if task.state not in ENDED:
                self._end(task, StopOutcome.cancelled, reason, now, keep_slot=False)
        for group in list(self.pool_groups[event.pool].groups.values()):
            if group.idle:
                self._to_removing(group, now)
        self._forget_pool(event.pool)
        self._wake_all()

    def _on_policy_set(self, event: e.PolicySet, now: float) -> None:
        self.policy = event.policy
        self._wake_all()

    def _on_task_submitted(self, event: e.TaskSubmitted, now: float) -> None:
        spec = event.spec
        feasibility.check_submission(self, spec)
        self.seq += 1
        before = self.tasks.pop(spec.id, None)
        if before is not None:
            self.ended.remove(spec.id)
        pool = self.pools[spec.pool]
        wait_s = pool.spec.wait_s if spec.wait_s is None else spec.wait_s
        queued = Reason(ReasonCode.queued, "just submitted")
        task = PoolTask(spec, self.seq, now, TaskState.waiting, queued, now, now + wait_s, shares=spec.shares)
        # Late events of an earlier task of this id must not apply to this one.
        task.attempt = before.attempt if before is not None else 0
        self.tasks[spec.id] = task
        self._record(task, task.state.value, queued, now)
        never = feasibility.never_fits(self, spec)
        if never is not None:
            self._to_ended(task, TaskState.failed, Reason(ReasonCode.never_fits, never), now)
            return
        self.timer(task.deadline, "task", spec.id)
        if spec.shares is not None:
            self._join_slots(task, now)
        else:
            self._enqueue(task)

    def _on_complete_requested(self, event: e.CompleteRequested, now: float) -> None:
        task = feasibility.known_task(self, event.task)
        if task.state in ENDED:
            return
        outcome = StopOutcome.done if task.holds or task.evictions or task.losses else StopOutcome.cancelled
        reason = Reason(ReasonCode.completed, "completed on request")
        self._end(task, outcome, reason, now, keep_slot=event.keep_slot, graceful=False)

    def _on_cancel_requested(self, event: e.CancelRequested, now: float) -> None:
        task = feasibility.known_task(self, event.task)
        if task.state in ENDED:
            return
        sentence = (
            "the client that submitted it is gone" if event.code is ReasonCode.client_died else "cancelled on request"
        )
        self._end(task, StopOutcome.cancelled, Reason(event.code, sentence), now, keep_slot=event.keep_slot)

    def _on_evict_requested(self, event: e.EvictRequested, now: float) -> None:
        task = feasibility.known_task(self, event.task)
        if task.state not in (TaskState.running, TaskState.starting, TaskState.parked):
            raise InputError(f"task {event.task} is {task.state.value}", hint="only a task that runs can be evicted")
        self._evict(task, None, Reason(ReasonCode.by_hand, "evicted on request"), now)
        self._wake_all()

    def _on_turn_requested(self, event: e.TurnRequested, now: float) -> None:
        task = feasibility.known_task(self, event.task)
        group = self._group_shared_by(task)
        if group is None:
            raise InputError(f"task {event.task} shares no slot that is there", hint=str(task.reason))
        if group.active == task.id:
            return
        if task.id not in group.turns:
            group.turns.append(task.id)
        self._next_turn(group, now)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _on_node_joined(self, event: e.NodeJoined, now: float) -> None:
        known = self.nodes.get(event.node)
        if known == event:
            return
        if known is not None:
            self.changed_nodes.add(event.node)
        self.nodes[event.node] = event
        self.node_epoch += 1
        self.capacity.set_node(event.node, event.total, event.outside)
        if known is None:
            self._record_node(event.node, now, "joined", f"it has {event.total}")
        self._wake_all()

    def _on_node_cordoned(self, event: e.NodeCordoned, now: float) -> None:
        self._known_node(event.node)
        self.capacity.cordon(event.node, event.on)
        self._record_node(
            event.node, now, "cordoned" if event.on else "open", "nothing new goes there" if event.on else ""
        )
        self._wake_all()

    def _on_node_drained(self, event: e.NodeDrained, now: float) -> None:
        self._known_node(event.node)
        self.capacity.cordon(event.node, True)
        reason = Reason(ReasonCode.node_draining, f"node {feasibility.short_node_id(event.node)} will go: {event.why}")
        for claim in [claim for claim in self.claims.values() if event.node in claim.nodes]:
            self._drop_claim(claim, now, requeue=True)
        hit = [group for group in self.groups.values() if event.node in group.nodes]
        for group in hit:
            self.set_idle(group, False)
            self._break_group(group, reason, now, evict=True)
        self._record_node(event.node, now, "emptied", f"{event.why}; {len(hit)} placement groups were on it")
        self._wake_all()

    def _on_node_lost(self, event: e.NodeLost, now: float) -> None:
        if event.node not in self.nodes:
            return
        del self.nodes[event.node]
        self.node_epoch += 1
        self.changed_nodes.discard(event.node)
        reason = Reason(
            ReasonCode.node_lost,
            f"node {feasibility.short_node_id(event.node)} was lost{event.why and ': '}{event.why}",
        )
        hit = [group for group in self.groups.values() if event.node in group.nodes]
        for group in hit:
            self.set_idle(group, False)
        for claim in [claim for claim in self.claims.values() if event.node in claim.nodes]:
            self._drop_claim(claim, now, requeue=True)
        self.capacity.drop_node(event.node)
        for group in hit:
            # A node of that name that comes back holds nothing of this group.
            group.nodes = tuple("" if node == event.node else node for node in group.nodes)
            self._break_group(group, reason, now)
        self._record_node(
            event.node, now, "lost", f"{event.why}{event.why and '; '}{len(hit)} placement groups were on it"
        )
        self._wake_all()

    def _record_node(self, node: str, now: float, what: str, sentence: str) -> None:
        story = self.node_stories.setdefault(node, [])
        add_story_entry(story, StoryEntry(now, what, Reason(_NODE_CODES[what], sentence or what)))
        if len(self.node_stories) > MAX_ENDED_TASKS:
            del self.node_stories[next(iter(self.node_stories))]

    # ---- placement groups -------------------------------------------------------------------------------------------

    def _on_placement_group_ready(self, event: e.PlacementGroupReady, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state is not PgState.creating:
            return
        self._creating_to_ready(group, now)

    def _on_placement_group_failed(self, event: e.PlacementGroupFailed, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state is not PgState.creating:
            return
        reason = Reason(ReasonCode.back_off, f"its placement group could not be made: {event.why}")
        self._group_removed(group, now)
        pool = self.pools[group.pool]
        if group.kind is PlacementGroupKind.reserved:
            pool.not_before = now + BACK_OFF_S * 4
            self.recheck(pool.not_before)
        self._requeue_tenants(group, reason, now)

    def _on_placement_group_removed(self, event: e.PlacementGroupRemoved, now: float) -> None:
        group = self.groups.get(event.group)
        if group is not None and group.state is PgState.removing:
            self.pools[group.pool].destroyed_count += 1
            self._group_removed(group, now)

    def _on_placement_group_lost(self, event: e.PlacementGroupLost, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state not in (PgState.creating, PgState.ready):
            return
        self.set_idle(group, False)
        self._break_group(group, Reason(ReasonCode.slot_lost, f"its placement group was lost: {event.why}"), now)
        self._wake_all()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def _on_task_started(self, event: e.TaskStarted, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not TaskState.starting or not task.started:
            return
        task.how = event.how
        task.started_at = now
        self._to(task, TaskState.running, task.reason, now, None)
        self.update_candidate(task)
        group = self.groups[task.places[0].group]
        if group.turns:
            self._next_turn(group, now)

    def _on_task_start_failed(self, event: e.TaskStartFailed, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (TaskState.starting, TaskState.cancelling) or not task.started:
            return
        if task.state is TaskState.starting:
            reason = Reason(ReasonCode.start_timeout if event.timed_out else ReasonCode.start_failed, event.why)
            self._set_outcome(task, StopOutcome.failed if event.fatal else StopOutcome.retry, reason)
        self._stopped(task, now)

    def _on_task_ended(self, event: e.TaskEnded, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None:
            return
        if event.error is None:
            outcome, reason = StopOutcome.done, Reason(ReasonCode.completed, "its work is done")
        else:
            outcome, reason = StopOutcome.failed, Reason(ReasonCode.raised, event.error)
        if task.state in (TaskState.starting, TaskState.running, TaskState.parked):
            self._to_cancelling(task, outcome, reason, now, graceful=False)
        elif task.state is TaskState.cancelling and task.outcome is StopOutcome.retry:
            self._set_outcome(task, outcome, reason)
        # A task being evicted may return early from its entry method: that is not its end.

    def _on_task_died(self, event: e.TaskDied, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (TaskState.starting, TaskState.running, TaskState.parked):
            return
        code = ReasonCode.gang_broken if task.spec.gang else ReasonCode.process_died
        self._to_cancelling(task, StopOutcome.retry, Reason(code, event.why), now, graceful=False)

    def _on_task_stopped(self, event: e.TaskStopped, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not TaskState.cancelling:
            return
        task.saved = task.saved or event.saved
        if event.cancel in ("raised", "timed out") or event.note:
            note = f"cancel() {event.cancel}" + (f"; {event.note}" if event.note else "")
            self._record(task, "stopped", Reason(task.reason.code, note), now)
        self._stopped(task, now)

    def _on_task_parked(self, event: e.TaskParked, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "parking":
            return
        group = self.groups[task.places[0].group]
        task.moving = None
        self.use(task, task.spec.residual or (NOTHING,) * len(task.spec.bundles))
        self._to(task, TaskState.parked, Reason(ReasonCode.turn, "another tenant of its slot has its turn"), now, None)
        self.update_candidate(task)
        group.active = None
        self._next_turn(group, now)
        self._wake_all()

    def _on_task_unparked(self, event: e.TaskUnparked, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "unparking":
            return
        task.moving = None
        self._to(task, TaskState.running, Reason(ReasonCode.turn, "it has its turn"), now, None)
        self.update_candidate(task)
        self._next_turn(self.groups[task.places[0].group], now)

    def _on_state_recovered(self, event: e.StateRecovered, now: float) -> None:
        for spec in event.pools:
            if spec.name not in self.pools:
                self.add_pool(PoolRecord(spec))
        for found in event.tasks:
            if feasibility.can_recover(self, found):
                self._to_recovered(found, now)
        self._wake_all()

    def _to_recovered(self, found: e.RecoveredTask, now: float) -> None:
        """Adopt a running task of which no record exists."""
        spec = found.spec
        pool = self.pools[spec.pool]
        kind = PlacementGroupKind.dynamic if found.reserved is None else PlacementGroupKind.reserved
        size = spec.size if found.reserved is None else (pool.spec.reserved[found.reserved],)
        # New groups are numbered from here on, so that no name is used twice.
        number = found.group.removeprefix("g")
        self.seq = max(self.seq + 1, int(number) if number.isdecimal() else 0)
        group = PlacementGroup(
            found.group,
            spec.pool,
            kind,
            size,
            found.nodes,
            PgState.ready,
            None,
            spec_index=found.reserved,
            seq=self.seq,
        )
        self.add_group(group)
        reason = Reason(ReasonCode.found, "it was running when the journal was lost")
        task = PoolTask(
            replace(spec, shares=None), self.seq, now, TaskState.running, reason, now, None, attempt=found.attempt
        )
        self.tasks[spec.id] = task
        self._assign(task, group, now)
        task.started, task.started_at = True, now
        self._record(task, task.state.value, reason, now)
        self.update_candidate(task)

    def _on_pool_tick(self, event: e.PoolTick, now: float) -> None:
        due = []
        while self.timers and self.timers[0][0] <= now:
            due.append(heapq.heappop(self.timers))
        waiting: list[tuple[float, PoolTask]] = []
        for at, kind, name in due:
            if kind == "recheck":
                self.rechecks.discard(at)
                self._wake_all()
                continue
            record = self.groups.get(name) if kind == "group" else self.tasks.get(name)
            if record is None or record.deadline != at:
                continue
            if isinstance(record, PlacementGroup):
                self._group_overdue(record, now)
            elif record.id in self.waiting:
                waiting.append((at, record))
            else:
                self._task_overdue(record, now)
        if self._dirty:
            # Tasks that can start do so before any waiting task times out: time may have leapt.
            self._schedule(now)
        for at, task in waiting:
            if task.id in self.waiting and task.deadline == at:
                self._task_overdue(task, now)

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _task_overdue(self, task: PoolTask, now: float) -> None:
        if task.state in IN_QUEUE:
            if task.id in self.claims:
                self._drop_claim(self.claims[task.id], now, requeue=False)
            waited = f"waited {now - task.since:.3g} s, as long as it may; {task.reason.sentence}"
            self._end(task, StopOutcome.failed, Reason(ReasonCode.too_late, waited), now)
        elif task.state is TaskState.starting:
            reason = Reason(ReasonCode.start_timeout, f"not started within {task.spec.start_timeout_s:g} s")
            self._to_cancelling(task, StopOutcome.retry, reason, now, graceful=False)
        elif task.state is TaskState.cancelling:
            task.cancel_grace_s = task.checkpoint_timeout_s = 0.0
            self._issue_stop(task, now)
        elif task.moving is not None:
            reason = Reason(ReasonCode.process_died, f"{task.moving} took more than {TURN_TIMEOUT_S:g} s")
            self._to_cancelling(task, StopOutcome.retry, reason, now, graceful=False)

    def _group_overdue(self, group: PlacementGroup, now: float) -> None:
        if group.state is PgState.creating:
            reason = Reason(
                ReasonCode.back_off, f"its placement group was not ready within {CREATE_GROUP_TIMEOUT_S:g} s"
            )
            self._requeue_tenants(group, reason, now)
            self._to_removing(group, now)
        elif group.state is PgState.removing:
            self._issue_remove(group, now)

    def _known_node(self, name: str) -> None:
        if name not in self.nodes:
            raise InputError(f"there is no node {name}", hint="nodes: " + (", ".join(self.nodes) or "none"))

    def _current(self, name: str, attempt: int) -> PoolTask | None:
        """The task, if the event is about its current attempt."""
        task = self.tasks.get(name)
        return task if task is not None and task.attempt == attempt and task.places else None

    # ---- queries ----------------------------------------------------------------------------------------------------

    def would_evict(self, spec: TaskSpec, now: float) -> PreemptionPlan:
        """The preemption plan if the task were submitted now. Changes nothing."""
        feasibility.check_submission(self, spec)
        task = PoolTask(spec, self.seq + 1, now, TaskState.waiting, Reason(ReasonCode.queued, "dry run"), now, None)
        if feasibility.never_fits(self, spec) is not None or self.pools[spec.pool].drained:
            return PreemptionPlan()
        assignment = feasibility.find_assignment(self, task)
        if isinstance(assignment, Assignment):
            return PreemptionPlan(assignment.nodes, assignment.group)
        return feasibility.plan_preemption(self, task, now)

    def explain(self, name: str, now: float) -> TaskExplanation:
        return explain.explain(self, name, now)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        return explain.story(self, name)

    def pool_view(self, name: str) -> PoolView:
        return explain.pool_view(self, name)

    def totals(self) -> PoolTotals:
        return explain.totals(self)

    def queue(self, pool: str | None = None) -> list[str]:
        """Waiting tasks in scheduling order."""
        return list(self.waiting.in_order(pool))

    def warm_targets(self) -> dict[str, dict[str, int]]:
        return explain.warm_targets(self)

    def outstanding(self) -> list[e.PoolInstruction]:
        return explain.outstanding(self, START_GRACE_S)


def _difference(known: PoolSpec, requested: PoolSpec) -> str:
    fields = [
        name
        for name in encode(known).keys() | encode(requested).keys()
        if getattr(known, name) != getattr(requested, name)
    ]
    return ", ".join(
        f"{name} is {_text(getattr(known, name))}, not {_text(getattr(requested, name))}" for name in sorted(fields)
    )


def _text(value: object) -> str:
    return "[" + ", ".join(str(item) for item in value) + "]" if isinstance(value, tuple) else str(value)


_NODE_CODES = {
    "joined": ReasonCode.joined,
    "cordoned": ReasonCode.by_hand,
    "open": ReasonCode.by_hand,
    "emptied": ReasonCode.node_draining,
    "lost": ReasonCode.node_lost,
}
_HANDLERS = handlers_of(PoolMachine, e.PoolEvent)
