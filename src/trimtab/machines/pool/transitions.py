"""Transitions of tasks and placement groups, with the instructions that follow from them.

Keeps the accounting exact through each change; the machine decides when a transition is due and is the only caller. A
task releases its slots only when its processes are gone; capacity that is being freed for a task is claimed until the
task has it; a group that is lost in part is removed whole.
"""

from __future__ import annotations

from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, add_story_entry
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool import feasibility
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.preemption import PreemptionPlan
from trimtab.machines.pool.preemption_candidates import eviction_reason
from trimtab.machines.pool.records import (
    Eviction,
    PgState,
    PlacementGroup,
    PlacementGroupKind,
    PoolTask,
    ResourceClaim,
    StopOutcome,
)
from trimtab.machines.pool.state import PoolState
from trimtab.model.pool import ENDED, IN_QUEUE, BundlePlacement, PlacementStrategy, PreemptionPolicy, TaskState

CREATE_GROUP_TIMEOUT_S = 60.0
REMOVE_GROUP_TIMEOUT_S = 60.0
START_GRACE_S = 30.0  # beyond its deadline, then a start counts as lost
STOP_GRACE_S = 60.0  # beyond cancel and checkpoint, then a stop is issued again
TURN_TIMEOUT_S = 300.0
START_TRIES = 3
BACK_OFF_S = 0.25  # doubles with every loss
MAX_BACK_OFF_S = 30.0
MAX_ENDED_TASKS = 10_000
MAX_EVICTIONS = 1_000


class TaskTransitions:
    """Transitions over the pool state."""

    def __init__(self, state: PoolState, out: list[e.PoolInstruction]) -> None:
        self.state, self._out = state, out

    # ---- queue ------------------------------------------------------------------------------------------------------

    def enqueue(self, task: PoolTask) -> None:
        state = self.state
        queue, first = state.waiting.add(task, state.may_evict(task))
        if first:
            state.unschedulable.pop(queue, None)
        elif queue in state.unschedulable:
            self.wait(task, Reason(ReasonCode.queued, "tasks with the same requirements came first"), task.since)
        state.scan_due = True

    def wait(self, task: PoolTask, reason: Reason, since: float | None = None) -> None:
        if reason.code is not task.reason.code:
            self.record(task, TaskState.waiting.value, reason, since)
        task.reason = reason

    # ---- claims ----------------------------------------------------------------------------------------------------

    def claim(self, task: PoolTask, plan: PreemptionPlan) -> None:
        """Evict the victims and keep the capacity that becomes free for the task."""
        state = self.state
        state.no_preemption.clear()
        state.waiting.remove(task.id)
        victims = [state.tasks[name] for name, _ in plan.victims]
        group_id, nodes = plan.group, plan.nodes
        if group_id is None and len(victims) == 1 and not plan.reclaims:
            theirs = state.groups[victims[0].places[0].group]
            size = task.spec.size
            same = theirs.pool == task.spec.pool and theirs.bundles == size and theirs.nodes == nodes
            if same and theirs.kind is PlacementGroupKind.dynamic and theirs.state is PgState.ready:
                group_id, nodes = theirs.id, ()
        limited = state.pools[task.spec.pool].spec.dynamic_limit is not None
        leaving = [
            group.id
            for group in (state.groups[victim.places[0].group] for victim in victims)
            if group.kind is PlacementGroupKind.dynamic
            and (set(group.nodes) & set(nodes) or (nodes and limited and group.pool == task.spec.pool))
        ]
        ids = [victim.id for victim in victims]
        claim = ResourceClaim(task.id, nodes, group_id, ids, [*leaving, *plan.reclaims, *plan.awaits], tuple(ids))
        state.claims[task.id] = claim
        if group_id is not None:
            state.set_idle(state.groups[group_id], False)
            state.groups[group_id].tenants.append(task.id)
        names = ", ".join(ids) or "idle slots"
        task.reason = Reason(ReasonCode.evicting, f"room is being made: {names} must leave first")
        self.record(task, task.state.value, task.reason)
        stop_s = max([self._stop_seconds(victim) for victim in victims], default=0.0)
        task.deadline = max(task.deadline or 0.0, state.now + stop_s + STOP_GRACE_S + REMOVE_GROUP_TIMEOUT_S)
        state.timers.arm(("task", task.id))
        state.keep(claim)
        for group in plan.reclaims:
            self.to_removing(state.groups[group])
        for victim, (_, code) in zip(victims, plan.victims, strict=True):
            self.evict(victim, task, eviction_reason(code, victim, task))
        if state.claims.get(task.id) is claim:  # victims that had not started are gone already
            self._claim_if_ready(claim)

    def drop_claim(self, claim: ResourceClaim, *, requeue: bool) -> None:
        """The claimed capacity cannot be had, or is not needed any more."""
        state = self.state
        state.stop_keeping(claim)
        del state.claims[claim.task]
        if claim.group is not None and claim.group in state.groups:
            group = state.groups[claim.group]
            group.tenants.remove(claim.task)
            if not group.tenants and group.state is PgState.ready:
                self._idle_or_remove(group)
        if requeue:
            self.enqueue(state.tasks[claim.task])
        state.wake_all()

    def _update_claims(
        self, *, task: PoolTask | None = None, used: tuple[Resources, ...] = (), group: PlacementGroup | None = None
    ) -> None:
        """A task or group that claims wait for is gone."""
        for claim in list(self.state.claims.values()):
            if task is not None and task.id in claim.tasks:
                claim.tasks.remove(task.id)
            elif group is not None and group.id in claim.groups:
                claim.groups.remove(group.id)
            else:
                continue
            same_pool = task is not None and task.spec.pool == self.state.tasks[claim.task].spec.pool
            self.state.keep_released(claim, used if same_pool else (), group)
            self._claim_if_ready(claim)

    def _claim_if_ready(self, claim: ResourceClaim) -> None:
        state = self.state
        if claim.tasks or claim.groups:
            return
        task = state.tasks[claim.task]
        state.stop_keeping(claim)
        del state.claims[claim.task]
        if claim.group is not None:
            state.groups[claim.group].tenants.remove(task.id)
        if not feasibility.claim_fits(state, claim):
            # The node shrank or was cordoned meanwhile.
            if claim.group is not None and not state.groups[claim.group].tenants:
                self._idle_or_remove(state.groups[claim.group])
            self.enqueue(task)
            state.wake_all()
            return
        names = ", ".join(claim.victims)
        made = f"{names} left for it" if names else "idle slots were removed for it"
        code = ReasonCode.preempted if claim.victims else ReasonCode.placed
        self.to_starting(task, Assignment(claim.group, claim.nodes, Reason(code, made)))

    # ---- evictions -------------------------------------------------------------------------------------------------

    def evict(self, task: PoolTask, by: PoolTask | None, reason: Reason) -> None:
        state = self.state
        task.evictions += 1
        state.eviction_count += 1
        state.evictions.append(Eviction(state.now, task.id, task.spec.pool, by.id if by else None, reason))
        del state.evictions[:-MAX_EVICTIONS]
        counts = state.pools[task.spec.pool].evictions
        counts[reason.code.value] = counts.get(reason.code.value, 0) + 1
        self.to_cancelling(task, StopOutcome.evicted, reason, graceful=True, save=True)

    def _stop_seconds(self, task: PoolTask) -> float:
        policy = self.state.policy or PreemptionPolicy()
        graceful = policy.cancel_timeout_s if task.spec.notice_s is None else task.spec.notice_s
        return graceful + policy.save_timeout_s

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def to_starting(self, task: PoolTask, assignment: Assignment) -> None:
        state = self.state
        state.no_preemption.clear()
        spec = task.spec
        pool = state.pools[spec.pool]
        if assignment.group is None:
            strategy = feasibility.strategy_of(state, spec)
            group = self.create_group(spec.pool, PlacementGroupKind.dynamic, spec.size, assignment.nodes, strategy)
        else:
            group = state.groups[assignment.group]
            state.set_idle(group, False)
            if group.used:
                pool.reuse_count += 1
        task.attempt += 1
        self.assign(task, group)
        if task.state is TaskState.evicted:
            task.evicted_s += state.now - task.since
        task.not_before = 0.0
        self.to(task, TaskState.starting, assignment.reason, state.now + spec.start_timeout_s + START_GRACE_S)
        state.update_candidate(task)
        if group.state is PgState.ready:
            self._issue_start(task)
        for other in self._sharers_without_slots(task):
            self.join_slots(other)
        state.scan_due = True  # one more task that may be evicted

    def assign(self, task: PoolTask, group: PlacementGroup) -> None:
        """Make the task the active tenant of the group."""
        if task.id not in group.tenants:
            group.tenants.append(task.id)
        group.active = task.id
        group.used += 1
        task.places = tuple(BundlePlacement(group.id, at, node) for at, node in enumerate(group.nodes))
        task.started, task.started_at, task.keep_slot = False, None, True
        pool = self.state.pools[task.spec.pool].spec
        owner = task.spec.priority >= pool.reserved_priority
        task.borrowed = group.kind is PlacementGroupKind.reserved and not owner and pool.borrow
        self.state.use(task, task.spec.bundles)

    def _issue_start(self, task: PoolTask) -> None:
        task.started = True
        deadline = self.state.now + task.spec.start_timeout_s
        task.deadline = deadline + START_GRACE_S
        self.state.timers.arm(("task", task.id))
        self._out.append(e.StartTask(task.id, task.attempt, task.places, task.saved, deadline))

    def end(
        self, task: PoolTask, outcome: StopOutcome, reason: Reason, *, keep_slot: bool = True, graceful: bool = True
    ) -> None:
        """End the task, whatever its state."""
        state = self.state
        if task.id in state.claims:
            self.drop_claim(state.claims[task.id], requeue=False)
        task.keep_slot = keep_slot
        if task.state in IN_QUEUE:
            state.waiting.remove(task.id)
            if any(kept.task == task.id for kept in state.reserves):
                state.hints.anything()  # its reserve
            self._leave_turns(task)
            self.to_ended(task, TaskState(outcome.value), reason)
        elif task.state is TaskState.cancelling:
            self.set_outcome(task, outcome, reason)
        else:
            self.to_cancelling(task, outcome, reason, graceful=graceful)

    def set_outcome(self, task: PoolTask, outcome: StopOutcome, reason: Reason) -> None:
        task.outcome, task.outcome_reason = outcome, reason

    def to_cancelling(
        self, task: PoolTask, outcome: StopOutcome, reason: Reason, *, graceful: bool, save: bool = False
    ) -> None:
        self.state.candidates.drop(task.id)
        self.set_outcome(task, outcome, reason)
        task.moving = None
        if not task.started:
            self.stopped(task)
            return
        policy = self.state.policy or PreemptionPolicy()
        # A task that is not constructed has nothing to cancel and nothing to checkpoint.
        graceful = graceful and task.state is not TaskState.starting
        notice = graceful and outcome is StopOutcome.evicted and task.spec.notice_s is not None
        task.notice = notice
        task.cancel_grace_s = (
            float(task.spec.notice_s or 0.0) if notice else policy.cancel_timeout_s if graceful else 0.0
        )
        task.checkpoint_timeout_s = policy.save_timeout_s if save and graceful else 0.0
        self.to(task, TaskState.cancelling, reason, None)
        self.issue_stop(task)

    def issue_stop(self, task: PoolTask) -> None:
        task.deadline = self.state.now + task.cancel_grace_s + task.checkpoint_timeout_s + STOP_GRACE_S
        self.state.timers.arm(("task", task.id))
        self._out.append(
            e.StopTask(task.id, task.attempt, task.reason, task.cancel_grace_s, task.notice, task.checkpoint_timeout_s)
        )

    def stopped(self, task: PoolTask) -> None:
        """All processes of the task are gone: release its slots and carry out its stop outcome."""
        state = self.state
        outcome, reason = task.outcome or StopOutcome.retry, task.outcome_reason or task.reason
        task.outcome = task.outcome_reason = None
        state.candidates.drop(task.id)
        used = task.uses
        state.use(task, ())
        group = state.groups[task.places[0].group]
        had_begun = task.started
        if outcome in (StopOutcome.done, StopOutcome.failed) and task.started_at is not None:
            state.pools[task.spec.pool].ran(state.now - task.started_at)
        task.places = ()
        task.borrowed = task.started = False
        task.started_at = None
        self._leave(task, group)
        self._update_claims(task=task, used=used)
        state.wake()
        if outcome is StopOutcome.retry and not had_begun:
            self._to_queue(task, TaskState.waiting, reason)
        elif outcome is StopOutcome.retry:
            self._retry_after_loss(task, reason)
        elif outcome is StopOutcome.evicted:
            self._to_queue(task, TaskState.evicted, reason)
        else:
            self.to_ended(task, TaskState(outcome.value), reason)

    def _retry_after_loss(self, task: PoolTask, reason: Reason) -> None:
        task.losses += 1
        # A start that failed without being fatal has done no work: it is retried in any case.
        allowed = max(task.spec.restarts, START_TRIES if reason.code is ReasonCode.start_failed else 0)
        if task.spec.restarts >= 0 and allowed < task.losses:
            if allowed:
                reason = Reason(ReasonCode.restarts_used, f"lost {task.losses} times, the last time: {reason.sentence}")
            self.to_ended(task, TaskState.failed, reason)
            return
        back_off = 0.0 if reason.code is ReasonCode.node_lost else BACK_OFF_S * 2 ** min(task.losses - 1, 10)
        self._back_off(task, min(MAX_BACK_OFF_S, back_off))
        self._to_queue(task, TaskState.waiting, Reason(reason.code, f"will start again: {reason.sentence}"))

    def _back_off(self, task: PoolTask, seconds: float) -> None:
        task.not_before = self.state.now + seconds
        if seconds:
            self.state.recheck(task.not_before)

    def _to_queue(self, task: PoolTask, state: TaskState, reason: Reason) -> None:
        pool = self.state.pools[task.spec.pool]
        # A task submitted with "at once or not at all" was accepted once; it waits like others to return.
        wait_s = task.spec.wait_s or pool.spec.wait_s
        task.shares = None
        self.to(task, state, reason, self.state.now + wait_s)
        self.enqueue(task)

    def to_ended(self, task: PoolTask, state: TaskState, reason: Reason) -> None:
        self.to(task, state, reason, None)
        self.state.ended.append(task.id)
        for other in self._sharers_without_slots(task):
            other.shares = None
            self.enqueue(other)
        if len(self.state.ended) > MAX_ENDED_TASKS:
            del self.state.tasks[self.state.ended.pop(0)]
        if self.state.pools[task.spec.pool].dropped:
            self.forget_pool(task.spec.pool)

    def to(self, task: PoolTask, state: TaskState, reason: Reason, deadline: float | None) -> None:
        task.state, task.reason, task.since, task.deadline = state, reason, self.state.now, deadline
        if deadline is not None:
            self.state.timers.arm(("task", task.id))
        self.record(task, state.value, reason)

    def record(self, task: PoolTask, what: str, reason: Reason, at: float | None = None) -> None:
        add_story_entry(task.story, StoryEntry(self.state.now if at is None else at, what, reason))

    # ---- turns -----------------------------------------------------------------------------------------------------

    def join_slots(self, task: PoolTask) -> None:
        """A task that shares slots waits there for its turn."""
        state = self.state
        owner = state.tasks.get(task.shares or "")
        group = state.groups.get(owner.places[0].group) if owner is not None and owner.places else None
        if group is not None and any(claim.group == group.id for claim in state.claims.values()):
            group = None  # another task takes it over
        if group is not None and group.state in (PgState.creating, PgState.ready) and task.id not in group.tenants:
            group.tenants.append(task.id)
            for other in group.tenants:
                if state.tasks[other].places:
                    state.update_candidate(state.tasks[other])
            self.next_turn(group)
        if task.state in IN_QUEUE:
            self.wait(task, Reason(ReasonCode.turn, f"waits for its turn in the slot of {task.shares}"))

    def group_shared_by(self, task: PoolTask) -> PlacementGroup | None:
        """The group in which the task takes turns."""
        state = self.state
        if task.places:
            return state.groups[task.places[0].group]
        if task.shares is None:
            return None
        return next(
            (group for group in state.pool_groups[task.spec.pool].groups.values() if task.id in group.tenants), None
        )

    def _sharers_without_slots(self, task: PoolTask) -> list[PoolTask]:
        sharers = [other for other in self.state.tasks.values() if other.shares == task.id] if task.spec.room else []
        return [other for other in sharers if other.state in IN_QUEUE and self.group_shared_by(other) is None]

    def _leave_turns(self, task: PoolTask) -> None:
        group = self.group_shared_by(task) if task.shares else None
        if group is not None:
            self._leave(task, group)

    def next_turn(self, group: PlacementGroup) -> None:
        """Activate the first tenant that requested a turn; or park the active one for it."""
        state = self.state
        if group.state is not PgState.ready:
            return
        group.turns = [name for name in group.turns if name in group.tenants and name != group.active]
        if group.active is not None:
            active = state.tasks[group.active]
            wanted = next((name for name in group.turns if self._turn_fits(state.tasks[name], active)), None)
            if wanted is not None and active.state is TaskState.running and active.moving is None:
                active.moving = "parking"
                active.deadline = state.now + TURN_TIMEOUT_S
                state.timers.arm(("task", active.id))
                self._out.append(e.ParkTask(active.id, active.attempt, active.deadline))
            return
        state.short_of_turn.pop(group.id, None)
        for name in [*group.turns, *group.tenants]:
            task = state.tasks[name]
            if name in state.claims or task.state not in (TaskState.parked, *IN_QUEUE):
                continue
            if not self._turn_fits(task, None):
                state.short_of_turn[group.id] = None
                continue
            if name in group.turns:
                group.turns.remove(name)
            self._give_turn(task, group)
            return

    def give_turns(self) -> None:
        """Turns that were short of quota: it may have become free."""
        for name in sorted(self.state.short_of_turn, key=lambda name: self.state.groups[name].seq):
            self.next_turn(self.state.groups[name])

    def _turn_fits(self, task: PoolTask, instead_of: PoolTask | None) -> bool:
        """Whether the quota allows the task to be active."""
        capacity = self.state.capacity
        need = capacity.sum_vector(task.spec.bundles) - (capacity.sum_vector(task.uses) if task.uses else 0)
        if instead_of is not None:
            need = need - capacity.sum_vector(instead_of.uses)
            if instead_of.spec.residual:
                need = need + capacity.sum_vector(instead_of.spec.residual)
        return bool((need <= capacity.quota_left(task.spec.pool)).all())

    def _give_turn(self, task: PoolTask, group: PlacementGroup) -> None:
        state = self.state
        reason = Reason(ReasonCode.turn, "it has its turn")
        if task.state is TaskState.parked:
            group.active = task.id
            state.use(task, task.spec.bundles)
            task.moving = "unparking"
            task.deadline = state.now + TURN_TIMEOUT_S
            state.timers.arm(("task", task.id))
            self._out.append(e.UnparkTask(task.id, task.attempt, task.deadline))
            return
        task.attempt += 1
        self.assign(task, group)
        self.to(task, TaskState.starting, reason, state.now + task.spec.start_timeout_s + START_GRACE_S)
        state.update_candidate(task)
        self._issue_start(task)

    # ---- placement groups -------------------------------------------------------------------------------------------

    def create_group(
        self,
        pool: str,
        kind: PlacementGroupKind,
        bundles: tuple[Resources, ...],
        nodes: tuple[str, ...],
        strategy: PlacementStrategy,
    ) -> PlacementGroup:
        state = self.state
        state.seq += 1
        name, deadline = f"g{state.seq}", state.now + CREATE_GROUP_TIMEOUT_S
        group = PlacementGroup(name, pool, kind, bundles, nodes, PgState.creating, deadline, seq=state.seq)
        state.add_group(group)
        state.timers.arm(("group", name))
        self._out.append(e.CreatePlacementGroup(name, pool, bundles, nodes, strategy, deadline))
        return group

    def _leave(self, task: PoolTask, group: PlacementGroup) -> None:
        state = self.state
        if task.id in group.tenants:
            group.tenants.remove(task.id)
        if task.id in group.turns:
            group.turns.remove(task.id)
        if group.active == task.id:
            group.active = None
        others = [name for name in group.tenants if name not in state.claims]
        if group.tenants:
            for name in others:
                if state.tasks[name].places:
                    state.update_candidate(state.tasks[name])
            if others:
                self.next_turn(group)
            return
        if group.state is PgState.broken:
            self.to_removing(group)
        elif group.state is PgState.ready:
            self._idle_or_remove(group, keep=task.keep_slot)

    def _idle_or_remove(self, group: PlacementGroup, keep: bool = True) -> None:
        """The group is empty: keep it for reuse, or remove it."""
        state = self.state
        pool = state.pools[group.pool]
        wanted = any(group.id in claim.groups for claim in state.claims.values())
        if group.kind is PlacementGroupKind.reserved:
            if keep and not pool.dropped:
                return
            if group.spec_index is not None:
                pool.retired.append(group.spec_index)
            self.to_removing(group)
        elif keep and pool.spec.reuse and not pool.dropped and not wanted and state.usable(group):
            state.set_idle(group, True)
        else:
            self.to_removing(group)

    def to_removing(self, group: PlacementGroup) -> None:
        self.state.set_idle(group, False)
        group.state = PgState.removing
        self.state.mark_releasing(group)
        self.issue_remove(group)

    def issue_remove(self, group: PlacementGroup) -> None:
        group.deadline = self.state.now + REMOVE_GROUP_TIMEOUT_S
        self.state.timers.arm(("group", group.id))
        self._out.append(e.RemovePlacementGroup(group.id))

    def group_removed(self, group: PlacementGroup) -> None:
        self.state.drop_group(group)
        self._update_claims(group=group)
        self.forget_pool(group.pool)
        self.state.wake()

    def break_group(self, group: PlacementGroup, reason: Reason, *, evict: bool = False) -> None:
        """Part of the group is lost, or will be (`evict`): stop its tasks, then remove it."""
        if group.state is PgState.removing:
            return
        group.state, group.deadline = PgState.broken, None
        self.state.mark_releasing(group)
        for claim in [claim for claim in self.state.claims.values() if claim.group == group.id]:
            self.drop_claim(claim, requeue=True)
        for name in list(group.tenants):
            task = self.state.tasks[name]
            if task.state in (TaskState.starting, TaskState.running, TaskState.parked):
                if evict:
                    self.evict(task, None, reason)
                else:
                    self.to_cancelling(task, StopOutcome.retry, reason, graceful=False)
            elif task.state in IN_QUEUE:
                group.tenants.remove(name)
                task.shares = None
                self.enqueue(task)
        if not group.tenants and group.state is PgState.broken:
            self.to_removing(group)

    def requeue_tenants(self, group: PlacementGroup, reason: Reason) -> None:
        """The group will not become ready: its tenants wait again."""
        for name in list(group.tenants):
            task = self.state.tasks[name]
            group.tenants.remove(name)
            if task.state is TaskState.starting:
                self.state.candidates.drop(name)
                self.state.use(task, ())
                task.places, task.borrowed = (), False
                group.active = None
                self._back_off(task, BACK_OFF_S)
                self._to_queue(task, TaskState.waiting, reason)
            elif task.state in IN_QUEUE:
                task.shares = None
                self.enqueue(task)

    def forget_pool(self, name: str) -> None:
        """Forget a dropped pool once nothing of it is left."""
        state = self.state
        pool = state.pools[name]
        if not pool.dropped or state.pool_groups[name].groups:
            return
        if any(task.spec.pool == name and task.state not in ENDED for task in state.tasks.values()):
            return
        del state.pools[name], state.pool_groups[name]

    def creating_to_ready(self, group: PlacementGroup) -> None:
        group.state, group.deadline = PgState.ready, None
        self.state.pools[group.pool].made_count += 1
        if not group.tenants:
            self._idle_or_remove(group)
            self.state.wake_all()
        elif group.active is not None:
            self._issue_start(self.state.tasks[group.active])
