"""The pool state machine: which tasks run, wait or are evicted.

What must never happen: more held than a node or a quota has; an eviction that no rule, switch or user allows; an
eviction that is not needed; half a gang; a task that waits without a reason and a deadline. Capacity that is being
freed for a task is claimed, so no other task takes it.

Slots (bundles of placement groups) occupy nodes; tasks in them use the quota of their pool. The machine chooses the
node of every bundle, so its accounting is exact; a placement group that is lost in part is removed whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.machine import Machine, on
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, record
from trimtab.core.resources import NOTHING
from trimtab.machines.pool import events as e
from trimtab.machines.pool import explain, feasibility
from trimtab.machines.pool.explain import PoolTotals, PoolView
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.preemption import PreemptionPlan
from trimtab.machines.pool.records import (
    Eviction,
    PgState,
    PlacementGroup,
    PlacementGroupKind,
    PoolRecord,
    PoolTask,
    StopOutcome,
)
from trimtab.machines.pool.scheduling import TaskScheduling
from trimtab.machines.pool.state import PoolState
from trimtab.machines.pool.transitions import (
    BACK_OFF_S,
    CREATE_GROUP_TIMEOUT_S,
    MAX_ENDED_TASKS,
    START_GRACE_S,
    TURN_TIMEOUT_S,
    TaskTransitions,
)
from trimtab.model.pool import ENDED, IN_QUEUE, PoolSpec, PreemptionPolicy, TaskExplanation, TaskSpec, TaskState


class PoolMachine(Machine[PoolState, e.PoolEvent, e.PoolInstruction]):
    """Pools, tasks and slots."""

    EVENTS = e.PoolEvent

    def __init__(self, state: PoolState | None = None) -> None:
        state = PoolState() if state is None else state
        out: list[e.PoolInstruction] = []
        self._act = TaskTransitions(state, out)
        self._scheduling = TaskScheduling(state, self._act)
        super().__init__(state, state, out)
        # For drivers, to read.
        self.pools: Mapping[str, PoolRecord] = state.pools
        self.tasks: Mapping[str, PoolTask] = state.tasks
        self.groups: Mapping[str, PlacementGroup] = state.groups
        self.nodes: Mapping[str, e.NodeJoined] = state.nodes
        self.node_stories: Mapping[str, Sequence[StoryEntry]] = state.node_stories
        self.evictions: Sequence[Eviction] = state.evictions  # the latest
        self.cordoned: Set[str] = state.capacity.cordoned

    @classmethod
    def load(cls, data: dict[str, Any]) -> PoolMachine:
        state = PoolState()
        state.read(data)
        return cls(state)

    def dump(self) -> dict[str, Any]:
        return self.state.dump()

    def settle(self) -> None:
        if self.state.scan_due:
            self._scheduling.schedule()
            self._act.give_turns()

    def next_deadline(self) -> float | None:
        return self.state.timers.next()

    def check(self) -> None:
        self.state.check()
        self._scheduling.check()

    # ---- requests ---------------------------------------------------------------------------------------------------

    @on(e.PoolEnsured)
    def _on_pool_ensured(self, event: e.PoolEnsured) -> None:
        spec = event.spec
        known = self.pools.get(spec.name)
        if known is not None:
            if known.dropped:
                raise InputError(f"pool {spec.name} is being removed", hint="ask again once it is gone")
            if known.spec != spec:
                raise InputError(f"pool {spec.name} exists with another configuration: {_difference(known.spec, spec)}")
            if known.retired:
                known.retired.clear()
                self.state.wake_all()
            return
        self.state.add_pool(PoolRecord(spec))
        self.state.wake_all()

    @on(e.QuotaSet)
    def _on_quota_set(self, event: e.QuotaSet) -> None:
        pool = feasibility.known_pool(self.state, event.pool)
        pool.spec = replace(pool.spec, quota=event.quota)  # raises where its reserved slots exceed it
        self.state.capacity.set_quota(event.pool, event.quota)
        pool.lowered = bool((self.state.capacity.quota_left(event.pool) < 0).any())
        self.state.wake_all()

    @on(e.PoolDrained)
    def _on_pool_drained(self, event: e.PoolDrained) -> None:
        feasibility.known_pool(self.state, event.pool).drained = event.on
        self.state.wake_all()

    @on(e.PoolDropped)
    def _on_pool_dropped(self, event: e.PoolDropped) -> None:
        pool = feasibility.known_pool(self.state, event.pool)
        pool.dropped = pool.drained = True
        reason = Reason(ReasonCode.pool_dropped, f"pool {event.pool} was removed")
        for task in [task for task in self.tasks.values() if task.spec.pool == event.pool]:
            if task.state not in ENDED:
                self._act.end(task, StopOutcome.cancelled, reason, keep_slot=False)
        for group in list(self.state.pool_groups[event.pool].groups.values()):
            if group.idle:
                self._act.to_removing(group)
        self._act.forget_pool(event.pool)
        self.state.wake_all()

    @on(e.PolicySet)
    def _on_policy_set(self, event: e.PolicySet) -> None:
        self.state.policy = event.policy
        self.state.wake_all()

    @on(e.TaskSubmitted)
    def _on_task_submitted(self, event: e.TaskSubmitted) -> None:
        state = self.state
        spec = event.spec
        feasibility.check_submission(state, spec)
        state.seq += 1
        before = self.state.tasks.pop(spec.id, None)
        if before is not None:
            state.ended.remove(spec.id)
        pool = self.pools[spec.pool]
        wait_s = pool.spec.wait_s if spec.wait_s is None else spec.wait_s
        queued = Reason(ReasonCode.queued, "just submitted")
        task = PoolTask(
            spec, state.seq, self.now, TaskState.waiting, queued, self.now, self.now + wait_s, shares=spec.shares
        )
        # Late events of an earlier task of this id must not apply to this one.
        task.attempt = before.attempt if before is not None else 0
        self.state.tasks[spec.id] = task
        self._act.record(task, task.state.value, queued)
        never = feasibility.never_fits(state, spec)
        if never is not None:
            self._act.to_ended(task, TaskState.failed, Reason(ReasonCode.never_fits, never))
            return
        state.timers.arm(("task", task.id))
        if spec.shares is not None:
            self._act.join_slots(task)
        else:
            self._act.enqueue(task)

    @on(e.CompleteRequested)
    def _on_complete_requested(self, event: e.CompleteRequested) -> None:
        task = feasibility.known_task(self.state, event.task)
        if task.state in ENDED:
            return
        outcome = StopOutcome.done if task.holds or task.evictions or task.losses else StopOutcome.cancelled
        reason = Reason(ReasonCode.completed, "completed on request")
        self._act.end(task, outcome, reason, keep_slot=event.keep_slot, graceful=False)

    @on(e.CancelRequested)
    def _on_cancel_requested(self, event: e.CancelRequested) -> None:
        task = feasibility.known_task(self.state, event.task)
        if task.state in ENDED:
            return
        gone = event.code is ReasonCode.client_died
        sentence = "the client that submitted it is gone" if gone else "cancelled on request"
        self._act.end(task, StopOutcome.cancelled, Reason(event.code, sentence), keep_slot=event.keep_slot)

    @on(e.EvictRequested)
    def _on_evict_requested(self, event: e.EvictRequested) -> None:
        task = feasibility.known_task(self.state, event.task)
        if task.state not in (TaskState.running, TaskState.starting, TaskState.parked):
            raise InputError(f"task {event.task} is {task.state.value}", hint="only a task that runs can be evicted")
        self._act.evict(task, None, Reason(ReasonCode.by_hand, "evicted on request"))
        self.state.wake_all()

    @on(e.TurnRequested)
    def _on_turn_requested(self, event: e.TurnRequested) -> None:
        task = feasibility.known_task(self.state, event.task)
        group = self._act.group_shared_by(task)
        if group is None:
            raise InputError(f"task {event.task} shares no slot that is there", hint=str(task.reason))
        if group.active == task.id:
            return
        if task.id not in group.turns:
            group.turns.append(task.id)
        self._act.next_turn(group)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    @on(e.NodeJoined)
    def _on_node_joined(self, event: e.NodeJoined) -> None:
        state = self.state
        known = self.nodes.get(event.node)
        if known == event:
            return
        if known is not None:
            state.changed_nodes.add(event.node)
        self.state.nodes[event.node] = event
        state.node_epoch += 1
        state.capacity.set_node(event.node, event.total, event.outside, event.labels)
        if known is None:
            self._record_node(event.node, "joined", f"it has {event.total}")
        state.wake_all()

    @on(e.NodeCordoned)
    def _on_node_cordoned(self, event: e.NodeCordoned) -> None:
        self._known_node(event.node)
        self.state.capacity.cordon(event.node, event.on)
        self._record_node(event.node, "cordoned" if event.on else "open", "nothing new goes there" if event.on else "")
        self.state.wake_all()

    @on(e.NodeDrained)
    def _on_node_drained(self, event: e.NodeDrained) -> None:
        state = self.state
        self._known_node(event.node)
        state.capacity.cordon(event.node, True)
        reason = Reason(ReasonCode.node_draining, f"node {feasibility.short_node_id(event.node)} will go: {event.why}")
        for claim in [claim for claim in state.claims.values() if event.node in claim.nodes]:
            self._act.drop_claim(claim, requeue=True)
        hit = [group for group in self.groups.values() if event.node in group.nodes]
        for group in hit:
            state.set_idle(group, False)
            self._act.break_group(group, reason, evict=True)
        self._record_node(event.node, "emptied", f"{event.why}; {len(hit)} placement groups were on it")
        state.wake_all()

    @on(e.NodeLost)
    def _on_node_lost(self, event: e.NodeLost) -> None:
        state = self.state
        if event.node not in self.nodes:
            return
        del self.state.nodes[event.node]
        state.node_epoch += 1
        state.changed_nodes.discard(event.node)
        sentence = f"node {feasibility.short_node_id(event.node)} was lost{event.why and ': '}{event.why}"
        reason = Reason(ReasonCode.node_lost, sentence)
        hit = [group for group in self.groups.values() if event.node in group.nodes]
        for group in hit:
            state.set_idle(group, False)
        for claim in [claim for claim in state.claims.values() if event.node in claim.nodes]:
            self._act.drop_claim(claim, requeue=True)
        state.capacity.drop_node(event.node)
        for group in hit:
            # A node of that name that comes back holds nothing of this group.
            group.nodes = tuple("" if node == event.node else node for node in group.nodes)
            self._act.break_group(group, reason)
        self._record_node(event.node, "lost", f"{event.why}{event.why and '; '}{len(hit)} placement groups were on it")
        state.wake_all()

    def _record_node(self, node: str, what: str, sentence: str) -> None:
        entry = StoryEntry(self.now, what, Reason(_NODE_CODES[what], sentence or what))
        record(self.state.node_stories, node, entry, MAX_ENDED_TASKS)

    # ---- placement groups -------------------------------------------------------------------------------------------

    @on(e.PlacementGroupReady)
    def _on_placement_group_ready(self, event: e.PlacementGroupReady) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state is not PgState.creating:
            return
        self._act.creating_to_ready(group)

    @on(e.PlacementGroupFailed)
    def _on_placement_group_failed(self, event: e.PlacementGroupFailed) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state is not PgState.creating:
            return
        reason = Reason(ReasonCode.back_off, f"its placement group could not be made: {event.why}")
        self._act.group_removed(group)
        pool = self.pools[group.pool]
        if group.kind is PlacementGroupKind.reserved:
            pool.not_before = self.now + BACK_OFF_S * 4
            self.state.recheck(pool.not_before)
        self._act.requeue_tenants(group, reason)

    @on(e.PlacementGroupRemoved)
    def _on_placement_group_removed(self, event: e.PlacementGroupRemoved) -> None:
        group = self.groups.get(event.group)
        if group is not None and group.state is PgState.removing:
            self.pools[group.pool].destroyed_count += 1
            self._act.group_removed(group)

    @on(e.PlacementGroupLost)
    def _on_placement_group_lost(self, event: e.PlacementGroupLost) -> None:
        group = self.groups.get(event.group)
        if group is None or group.state not in (PgState.creating, PgState.ready):
            return
        self.state.set_idle(group, False)
        self._act.break_group(group, Reason(ReasonCode.slot_lost, f"its placement group was lost: {event.why}"))
        self.state.wake_all()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    @on(e.TaskStarted)
    def _on_task_started(self, event: e.TaskStarted) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not TaskState.starting or not task.started:
            return
        task.how = event.how
        task.started_at = self.now
        self._act.to(task, TaskState.running, task.reason, None)
        self.state.update_candidate(task)
        group = self.groups[task.places[0].group]
        if group.turns:
            self._act.next_turn(group)

    @on(e.TaskStartFailed)
    def _on_task_start_failed(self, event: e.TaskStartFailed) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (TaskState.starting, TaskState.cancelling) or not task.started:
            return
        if task.state is TaskState.starting:
            reason = Reason(ReasonCode.start_timeout if event.timed_out else ReasonCode.start_failed, event.why)
            self._act.set_outcome(task, StopOutcome.failed if event.fatal else StopOutcome.retry, reason)
        self._act.stopped(task)

    @on(e.TaskEnded)
    def _on_task_ended(self, event: e.TaskEnded) -> None:
        task = self._current(event.task, event.attempt)
        if task is None:
            return
        if event.error is None:
            outcome, reason = StopOutcome.done, Reason(ReasonCode.completed, "its work is done")
        else:
            outcome, reason = StopOutcome.failed, Reason(ReasonCode.raised, event.error)
        if task.state in (TaskState.starting, TaskState.running, TaskState.parked):
            self._act.to_cancelling(task, outcome, reason, graceful=False)
        elif task.state is TaskState.cancelling and task.outcome is StopOutcome.retry:
            self._act.set_outcome(task, outcome, reason)
        # A task being evicted may return early from its entry method: that is not its end.

    @on(e.TaskDied)
    def _on_task_died(self, event: e.TaskDied) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (TaskState.starting, TaskState.running, TaskState.parked):
            return
        code = ReasonCode.gang_broken if task.spec.gang else ReasonCode.process_died
        self._act.to_cancelling(task, StopOutcome.retry, Reason(code, event.why), graceful=False)

    @on(e.TaskStopped)
    def _on_task_stopped(self, event: e.TaskStopped) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not TaskState.cancelling:
            return
        task.saved = task.saved or event.saved
        if event.cancel in ("raised", "timed out") or event.note:
            note = f"cancel() {event.cancel}" + (f"; {event.note}" if event.note else "")
            self._act.record(task, "stopped", Reason(task.reason.code, note))
        self._act.stopped(task)

    @on(e.TaskParked)
    def _on_task_parked(self, event: e.TaskParked) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "parking":
            return
        group = self.groups[task.places[0].group]
        task.moving = None
        self.state.use(task, task.spec.residual or (NOTHING,) * len(task.spec.bundles))
        self._act.to(task, TaskState.parked, Reason(ReasonCode.turn, "another tenant of its slot has its turn"), None)
        self.state.update_candidate(task)
        group.active = None
        self._act.next_turn(group)
        self.state.wake_all()

    @on(e.TaskUnparked)
    def _on_task_unparked(self, event: e.TaskUnparked) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "unparking":
            return
        task.moving = None
        self._act.to(task, TaskState.running, Reason(ReasonCode.turn, "it has its turn"), None)
        self.state.update_candidate(task)
        self._act.next_turn(self.groups[task.places[0].group])

    @on(e.StateRecovered)
    def _on_state_recovered(self, event: e.StateRecovered) -> None:
        for spec in event.pools:
            if spec.name not in self.pools:
                self.state.add_pool(PoolRecord(spec))
        for found in event.tasks:
            if feasibility.can_recover(self.state, found):
                self._to_recovered(found)
        self.state.wake_all()

    def _to_recovered(self, found: e.RecoveredTask) -> None:
        """Adopt a running task of which no record exists."""
        state = self.state
        spec = found.spec
        pool = self.pools[spec.pool]
        kind = PlacementGroupKind.dynamic if found.reserved is None else PlacementGroupKind.reserved
        size = spec.size if found.reserved is None else (pool.spec.reserved[found.reserved],)
        # New groups are numbered from here on, so that no name is used twice.
        number = found.group.removeprefix("g")
        state.seq = max(state.seq + 1, int(number) if number.isdecimal() else 0)
        ready = (found.group, spec.pool, kind, size, found.nodes, PgState.ready, None)
        group = PlacementGroup(*ready, spec_index=found.reserved, seq=state.seq)
        state.add_group(group)
        reason = Reason(ReasonCode.found, "it was running when the journal was lost")
        task = PoolTask(
            replace(spec, shares=None),
            state.seq,
            self.now,
            TaskState.running,
            reason,
            self.now,
            None,
            attempt=found.attempt,
        )
        self.state.tasks[spec.id] = task
        self._act.assign(task, group)
        task.started, task.started_at = True, self.now
        self._act.record(task, task.state.value, reason)
        state.update_candidate(task)

    @on(e.PoolTick)
    def _on_pool_tick(self, event: e.PoolTick) -> None:
        state, now, due = self.state, self.now, []
        while (timer := state.timers.pop_due(now)) is not None:
            due.append(timer)
        waiting: list[PoolTask] = []
        for kind, name in due:
            if kind == "recheck":
                state.rechecks.discard(name)
                state.wake_all()
                continue
            record = self.groups.get(name) if kind == "group" else self.tasks.get(name)
            if record is None or record.deadline is None or record.deadline > now:
                continue
            if isinstance(record, PlacementGroup):
                self._group_overdue(record)
            elif record.id in state.waiting:
                waiting.append(record)
            else:
                self._task_overdue(record)
        if state.scan_due:
            # Tasks that can start do so before any waiting task times out: time may have leapt.
            self._scheduling.schedule()
        for task in waiting:
            if task.id in state.waiting and task.deadline is not None and task.deadline <= now:
                self._task_overdue(task)

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _task_overdue(self, task: PoolTask) -> None:
        if task.state in IN_QUEUE:
            if task.id in self.state.claims:
                self._act.drop_claim(self.state.claims[task.id], requeue=False)
            waited = f"waited {self.now - task.since:.3g} s, as long as it may; {task.reason.sentence}"
            self._act.end(task, StopOutcome.failed, Reason(ReasonCode.too_late, waited))
        elif task.state is TaskState.starting:
            reason = Reason(ReasonCode.start_timeout, f"not started within {task.spec.start_timeout_s:g} s")
            self._act.to_cancelling(task, StopOutcome.retry, reason, graceful=False)
        elif task.state is TaskState.cancelling:
            task.cancel_grace_s = task.checkpoint_timeout_s = 0.0
            self._act.issue_stop(task)
        elif task.moving is not None:
            reason = Reason(ReasonCode.process_died, f"{task.moving} took more than {TURN_TIMEOUT_S:g} s")
            self._act.to_cancelling(task, StopOutcome.retry, reason, graceful=False)

    def _group_overdue(self, group: PlacementGroup) -> None:
        if group.state is PgState.creating:
            sentence = f"its placement group was not ready within {CREATE_GROUP_TIMEOUT_S:g} s"
            reason = Reason(ReasonCode.back_off, sentence)
            self._act.requeue_tenants(group, reason)
            self._act.to_removing(group)
        elif group.state is PgState.removing:
            self._act.issue_remove(group)

    def _known_node(self, name: str) -> None:
        if name not in self.nodes:
            raise InputError(f"there is no node {name}", hint="nodes: " + (", ".join(self.nodes) or "none"))

    def _current(self, name: str, attempt: int) -> PoolTask | None:
        task = self.tasks.get(name)
        return task if task is not None and task.attempt == attempt and task.places else None

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def eviction_count(self) -> int:
        return self.state.eviction_count

    @property
    def policy(self) -> PreemptionPolicy | None:
        """None: nothing is evicted."""
        return self.state.policy

    def would_evict(self, spec: TaskSpec, at: float) -> PreemptionPlan:
        """The preemption plan if the task were submitted now. Changes nothing."""
        feasibility.check_submission(self.state, spec)
        task = PoolTask(spec, self.state.seq + 1, at, TaskState.waiting, Reason(ReasonCode.queued, "dry run"), at, None)
        if feasibility.never_fits(self.state, spec) is not None or self.pools[spec.pool].drained:
            return PreemptionPlan()
        assignment = feasibility.find_assignment(self.state, task)
        if isinstance(assignment, Assignment):
            return PreemptionPlan(assignment.nodes, assignment.group)
        return feasibility.plan_preemption(self.state, task, at)

    def explain(self, name: str, at: float) -> TaskExplanation:
        return explain.explain(self.state, name, at)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        return explain.story(self.state, name)

    def pool_view(self, name: str) -> PoolView:
        return explain.pool_view(self.state, name)

    def totals(self) -> PoolTotals:
        return explain.totals(self.state)

    def queue(self, pool: str | None = None) -> list[str]:
        return list(self.state.waiting.in_order(pool))

    def warm_targets(self) -> dict[str, dict[str, int]]:
        return explain.warm_targets(self.state)

    def outstanding(self) -> list[e.PoolInstruction]:
        return explain.outstanding(self.state, START_GRACE_S)


def _difference(known: PoolSpec, requested: PoolSpec) -> str:
    pairs = [(field.name, getattr(known, field.name), getattr(requested, field.name)) for field in fields(known)]
    return ", ".join(
        f"{name} is {_text(was)}, not {_text(asked)}" for name, was, asked in sorted(pairs) if was != asked
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
