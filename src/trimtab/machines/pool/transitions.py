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
from trimtab.machines.pool.queue import ClassQueue
from trimtab.machines.pool.queueing_hints import Unschedulable
from trimtab.machines.pool.records import (
    Eviction,
    PgState,
    PlacementGroup,
    PlacementGroupKind,
    PoolTask,
    ResourceClaim,
    StopOutcome,
)
from trimtab.machines.pool.state import PoolState, StarvationReserve
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


class TaskTransitions(PoolState):
    """Transitions over the pool state."""

    def __init__(self) -> None:
        super().__init__()
        # Classes that neither fit nor can preempt, as long as no hint says otherwise.
        self._unschedulable: dict[ClassQueue, Unschedulable] = {}
        self._reserves: list[StarvationReserve] = []  # during the scan that found that
        self._timed = False  # whether time alone may make the last tried task schedulable
        self._no_assignment: dict[tuple[object, ...], Reason] = {}  # by placement key, within one event
        # By all that decides it but priority: the highest priority that found no preemption plan.
        self._no_preemption: dict[tuple[object, ...], float] = {}
        self._dirty = False
        self._out: list[e.PoolInstruction] = []

    # ---- queue ------------------------------------------------------------------------------------------------------

    def _wake_all(self) -> None:
        """Any waiting task may be schedulable now: try all classes again."""
        self.hints.anything()
        self._wake()

    def _wake(self) -> None:
        """Try the classes again that recorded hints could help."""
        self._no_assignment.clear()
        self._no_preemption.clear()
        self._dirty = True

    def _enqueue(self, task: PoolTask) -> None:
        queue, first = self.waiting.add(task, self.may_evict(task))
        if first:
            self._unschedulable.pop(queue, None)
        elif queue in self._unschedulable:
            self._wait(task, Reason(ReasonCode.queued, "tasks with the same requirements came first"), task.since)
        self._dirty = True

    def _wait(self, task: PoolTask, reason: Reason, now: float) -> None:
        if reason.code is not task.reason.code:
            self._record(task, TaskState.waiting.value, reason, now)
        task.reason = reason

    # ---- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, task: PoolTask, plan: PreemptionPlan, now: float) -> None:
        """Evict the victims and keep the capacity that becomes free for the task."""
        self._no_preemption.clear()
        self.waiting.remove(task.id)
        victims = [self.tasks[name] for name, _ in plan.victims]
        group_id, nodes = plan.group, plan.nodes
        if group_id is None and len(victims) == 1 and not plan.reclaims:
            theirs = self.groups[victims[0].places[0].group]
            size = task.spec.size
            same = theirs.pool == task.spec.pool and theirs.bundles == size and theirs.nodes == nodes
            if same and theirs.kind is PlacementGroupKind.dynamic and theirs.state is PgState.ready:
                group_id, nodes = theirs.id, ()
        limited = self.pools[task.spec.pool].spec.dynamic_limit is not None
        leaving = [
            group.id
            for group in (self.groups[victim.places[0].group] for victim in victims)
            if group.kind is PlacementGroupKind.dynamic
            and (set(group.nodes) & set(nodes) or (nodes and limited and group.pool == task.spec.pool))
        ]
        claim = ResourceClaim(
            task.id,
            nodes,
            group_id,
            [victim.id for victim in victims],
            [*leaving, *plan.reclaims, *plan.awaits],
            tuple(victim.id for victim in victims),
        )
        self.claims[task.id] = claim
        if group_id is not None:
            self.set_idle(self.groups[group_id], False)
            self.groups[group_id].tenants.append(task.id)
        names = ", ".join(victim.id for victim in victims) or "idle slots"
        task.reason = Reason(ReasonCode.evicting, f"room is being made: {names} must leave first")
        self._record(task, task.state.value, task.reason, now)
        stop_s = max([self._stop_seconds(victim) for victim in victims], default=0.0)
        task.deadline = max(task.deadline or 0.0, now + stop_s + STOP_GRACE_S + REMOVE_GROUP_TIMEOUT_S)
        self.timer(task.deadline, "task", task.id)
        self.keep(claim)
        for group in plan.reclaims:
            self._to_removing(self.groups[group], now)
        for victim, (_, code) in zip(victims, plan.victims, strict=True):
            self._evict(victim, task, eviction_reason(code, victim, task), now)
        if self.claims.get(task.id) is claim:  # victims that had not started are gone already
            self._claim_if_ready(claim, now)

    def _drop_claim(self, claim: ResourceClaim, now: float, *, requeue: bool) -> None:
        """The claimed capacity cannot be had, or is not needed any more."""
        self.stop_keeping(claim)
        del self.claims[claim.task]
        if claim.group is not None and claim.group in self.groups:
            group = self.groups[claim.group]
            group.tenants.remove(claim.task)
            if not group.tenants and group.state is PgState.ready:
                self._idle_or_remove(group, now)
        if requeue:
            self._enqueue(self.tasks[claim.task])
        self._wake_all()

    def _update_claims(
        self,
        now: float,
        *,
        task: PoolTask | None = None,
        used: tuple[Resources, ...] = (),
        group: PlacementGroup | None = None,
    ) -> None:
        """A task or group that claims wait for is gone."""
        for claim in list(self.claims.values()):
            if task is not None and task.id in claim.tasks:
                claim.tasks.remove(task.id)
            elif group is not None and group.id in claim.groups:
                claim.groups.remove(group.id)
            else:
                continue
            same_pool = task is not None and task.spec.pool == self.tasks[claim.task].spec.pool
            self.keep_released(claim, used if same_pool else (), group)
            self._claim_if_ready(claim, now)

    def _claim_if_ready(self, claim: ResourceClaim, now: float) -> None:
        if claim.tasks or claim.groups:
            return
        task = self.tasks[claim.task]
        self.stop_keeping(claim)
        del self.claims[claim.task]
        if claim.group is not None:
            self.groups[claim.group].tenants.remove(task.id)
        if not feasibility.claim_fits(self, claim):
            # The node shrank or was cordoned meanwhile.
            if claim.group is not None and not self.groups[claim.group].tenants:
                self._idle_or_remove(self.groups[claim.group], now)
            self._enqueue(task)
            self._wake_all()
            return
        names = ", ".join(claim.victims)
        made = f"{names} left for it" if names else "idle slots were removed for it"
        code = ReasonCode.preempted if claim.victims else ReasonCode.placed
        self._to_starting(task, Assignment(claim.group, claim.nodes, Reason(code, made)), now)

    # ---- evictions -------------------------------------------------------------------------------------------------

    def _evict(self, task: PoolTask, by: PoolTask | None, reason: Reason, now: float) -> None:
        task.evictions += 1
        self.eviction_count += 1
        self.evictions.append(Eviction(now, task.id, task.spec.pool, by.id if by else None, reason))
        del self.evictions[:-MAX_EVICTIONS]
        counts = self.pools[task.spec.pool].evictions
        counts[reason.code.value] = counts.get(reason.code.value, 0) + 1
        self._to_cancelling(task, StopOutcome.evicted, reason, now, graceful=True, save=True)

    def _stop_seconds(self, task: PoolTask) -> float:
        policy = self.policy or PreemptionPolicy()
        graceful = policy.cancel_timeout_s if task.spec.notice_s is None else task.spec.notice_s
        return graceful + policy.save_timeout_s

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def _to_starting(self, task: PoolTask, assignment: Assignment, now: float) -> None:
        self._no_preemption.clear()
        spec = task.spec
        pool = self.pools[spec.pool]
        if assignment.group is None:
            strategy = feasibility.strategy_of(self, spec)
            group = self._create_group(
                spec.pool, PlacementGroupKind.dynamic, spec.size, assignment.nodes, strategy, now
            )
        else:
            group = self.groups[assignment.group]
            self.set_idle(group, False)
            if group.used:
                pool.reuse_count += 1
        task.attempt += 1
        self._assign(task, group, now)
        if task.state is TaskState.evicted:
            task.evicted_s += now - task.since
        task.not_before = 0.0
        self._to(task, TaskState.starting, assignment.reason, now, now + spec.start_timeout_s + START_GRACE_S)
        self.update_candidate(task)
        if group.state is PgState.ready:
            self._issue_start(task, now)
        for other in [other for other in self.tasks.values() if other.shares == task.id] if spec.room else ():
            if other.state in IN_QUEUE and self._group_shared_by(other) is None:
                self._join_slots(other, now)
        self._dirty = True  # one more task that may be evicted

    def _assign(self, task: PoolTask, group: PlacementGroup, now: float) -> None:
        """Make the task the active tenant of the group."""
        if task.id not in group.tenants:
            group.tenants.append(task.id)
        group.active = task.id
        group.used += 1
        task.places = tuple(BundlePlacement(group.id, at, node) for at, node in enumerate(group.nodes))
        task.started, task.started_at, task.keep_slot = False, None, True
        pool = self.pools[task.spec.pool].spec
        owner = task.spec.priority >= pool.reserved_priority
        task.borrowed = group.kind is PlacementGroupKind.reserved and not owner and pool.borrow
        self.use(task, task.spec.bundles)

    def _issue_start(self, task: PoolTask, now: float) -> None:
        task.started = True
        deadline = now + task.spec.start_timeout_s
        task.deadline = deadline + START_GRACE_S
        self.timer(task.deadline, "task", task.id)
        self._out.append(e.StartTask(task.id, task.attempt, task.places, task.saved, deadline))

    def _end(
        self,
        task: PoolTask,
        outcome: StopOutcome,
        reason: Reason,
        now: float,
        *,
        keep_slot: bool = True,
        graceful: bool = True,
    ) -> None:
        """End the task, whatever its state."""
        if task.id in self.claims:
            self._drop_claim(self.claims[task.id], now, requeue=False)
        task.keep_slot = keep_slot
        if task.state in IN_QUEUE:
            self.waiting.remove(task.id)
            if any(kept.task == task.id for kept in self._reserves):
                self.hints.anything()  # its reserve
            self._leave_turns(task, now)
            self._to_ended(task, TaskState(outcome.value), reason, now)
        elif task.state is TaskState.cancelling:
            self._set_outcome(task, outcome, reason)
        else:
            self._to_cancelling(task, outcome, reason, now, graceful=graceful)

    def _set_outcome(self, task: PoolTask, outcome: StopOutcome, reason: Reason) -> None:
        task.outcome, task.outcome_reason = outcome, reason

    def _to_cancelling(
        self, task: PoolTask, outcome: StopOutcome, reason: Reason, now: float, *, graceful: bool, save: bool = False
    ) -> None:
        self.candidates.drop(task.id)
        self._set_outcome(task, outcome, reason)
        task.moving = None
        if not task.started:
            self._stopped(task, now)
            return
        policy = self.policy or PreemptionPolicy()
        # A task that is not constructed has nothing to cancel and nothing to checkpoint.
        graceful = graceful and task.state is not TaskState.starting
        notice = graceful and outcome is StopOutcome.evicted and task.spec.notice_s is not None
        task.notice = notice
        task.cancel_grace_s = (
            float(task.spec.notice_s or 0.0) if notice else policy.cancel_timeout_s if graceful else 0.0
        )
        task.checkpoint_timeout_s = policy.save_timeout_s if save and graceful else 0.0
        self._to(task, TaskState.cancelling, reason, now, None)
        self._issue_stop(task, now)

    def _issue_stop(self, task: PoolTask, now: float) -> None:
        task.deadline = now + task.cancel_grace_s + task.checkpoint_timeout_s + STOP_GRACE_S
        self.timer(task.deadline, "task", task.id)
        self._out.append(
            e.StopTask(task.id, task.attempt, task.reason, task.cancel_grace_s, task.notice, task.checkpoint_timeout_s)
        )

    def _stopped(self, task: PoolTask, now: float) -> None:
        """All processes of the task are gone: release its slots and carry out its stop outcome."""
        outcome, reason = task.outcome or StopOutcome.retry, task.outcome_reason or task.reason
        task.outcome = task.outcome_reason = None
        self.candidates.drop(task.id)
        used = task.uses
        self.use(task, ())
        group = self.groups[task.places[0].group]
        had_begun = task.started
        if outcome in (StopOutcome.done, StopOutcome.failed) and task.started_at is not None:
            self.pools[task.spec.pool].ran(now - task.started_at)
        task.places = ()
        task.borrowed = task.started = False
        task.started_at = None
        self._leave(task, group, now)
        self._update_claims(now, task=task, used=used)
        self._wake()
        if outcome is StopOutcome.retry and not had_begun:
            self._to_queue(task, TaskState.waiting, reason, now)
        elif outcome is StopOutcome.retry:
            self._retry_after_loss(task, reason, now)
        elif outcome is StopOutcome.evicted:
            self._to_queue(task, TaskState.evicted, reason, now)
        else:
            self._to_ended(task, TaskState(outcome.value), reason, now)

    def _retry_after_loss(self, task: PoolTask, reason: Reason, now: float) -> None:
        task.losses += 1
        # A start that failed without being fatal has done no work: it is retried in any case.
        allowed = max(task.spec.restarts, START_TRIES if reason.code is ReasonCode.start_failed else 0)
        if task.spec.restarts >= 0 and allowed < task.losses:
            if allowed:
                reason = Reason(ReasonCode.restarts_used, f"lost {task.losses} times, the last time: {reason.sentence}")
            self._to_ended(task, TaskState.failed, reason, now)
            return
        back_off = 0.0 if reason.code is ReasonCode.node_lost else BACK_OFF_S * 2 ** min(task.losses - 1, 10)
        self._back_off(task, min(MAX_BACK_OFF_S, back_off), now)
        self._to_queue(task, TaskState.waiting, Reason(reason.code, f"will start again: {reason.sentence}"), now)

    def _back_off(self, task: PoolTask, seconds: float, now: float) -> None:
        task.not_before = now + seconds
        if seconds:
            self.recheck(task.not_before)

    def _to_queue(self, task: PoolTask, state: TaskState, reason: Reason, now: float) -> None:
        pool = self.pools[task.spec.pool]
        # A task submitted with "at once or not at all" was accepted once; it waits like others to return.
        wait_s = task.spec.wait_s or pool.spec.wait_s
        task.shares = None
        self._to(task, state, reason, now, now + wait_s)
        self._enqueue(task)

    def _to_ended(self, task: PoolTask, state: TaskState, reason: Reason, now: float) -> None:
        self._to(task, state, reason, now, None)
        self.ended.append(task.id)
        for other in [other for other in self.tasks.values() if other.shares == task.id] if task.spec.room else ():
            if other.state in IN_QUEUE and self._group_shared_by(other) is None:
                other.shares = None
                self._enqueue(other)
        if len(self.ended) > MAX_ENDED_TASKS:
            del self.tasks[self.ended.pop(0)]
        if self.pools[task.spec.pool].dropped:
            self._forget_pool(task.spec.pool)

    def _to(self, task: PoolTask, state: TaskState, reason: Reason, now: float, deadline: float | None) -> None:
        task.state, task.reason, task.since, task.deadline = state, reason, now, deadline
        self.timer(deadline, "task", task.id)
        self._record(task, state.value, reason, now)

    def _record(self, task: PoolTask, state: str, reason: Reason, now: float) -> None:
        add_story_entry(task.story, StoryEntry(now, state, reason))

    # ---- turns -----------------------------------------------------------------------------------------------------

    def _join_slots(self, task: PoolTask, now: float) -> None:
        """A task that shares slots waits there for its turn."""
        owner = self.tasks.get(task.shares or "")
        group = self.groups.get(owner.places[0].group) if owner is not None and owner.places else None
        if group is not None and any(claim.group == group.id for claim in self.claims.values()):
            group = None  # another task takes it over
        if group is not None and group.state in (PgState.creating, PgState.ready) and task.id not in group.tenants:
            group.tenants.append(task.id)
            for other in group.tenants:
                if self.tasks[other].places:
                    self.update_candidate(self.tasks[other])
            self._next_turn(group, now)
        if task.state in IN_QUEUE:
            self._wait(task, Reason(ReasonCode.turn, f"waits for its turn in the slot of {task.shares}"), now)

    def _group_shared_by(self, task: PoolTask) -> PlacementGroup | None:
        """The group in which the task takes turns."""
        if task.places:
            return self.groups[task.places[0].group]
        if task.shares is None:
            return None
        return next(
            (group for group in self.pool_groups[task.spec.pool].groups.values() if task.id in group.tenants), None
        )

    def _leave_turns(self, task: PoolTask, now: float) -> None:
        group = self._group_shared_by(task) if task.shares else None
        if group is not None:
            self._leave(task, group, now)

    def _next_turn(self, group: PlacementGroup, now: float) -> None:
        """Activate the first tenant that requested a turn; or park the active one for it."""
        if group.state is not PgState.ready:
            return
        group.turns = [name for name in group.turns if name in group.tenants and name != group.active]
        if group.active is not None:
            active = self.tasks[group.active]
            wanted = next((name for name in group.turns if self._turn_fits(self.tasks[name], active)), None)
            if wanted is not None and active.state is TaskState.running and active.moving is None:
                active.moving = "parking"
                active.deadline = now + TURN_TIMEOUT_S
                self.timer(active.deadline, "task", active.id)
                self._out.append(e.ParkTask(active.id, active.attempt, active.deadline))
            return
        for name in [*group.turns, *group.tenants]:
            task = self.tasks[name]
            if (
                name in self.claims
                or task.state not in (TaskState.parked, *IN_QUEUE)
                or not self._turn_fits(task, None)
            ):
                continue
            if name in group.turns:
                group.turns.remove(name)
            self._give_turn(task, group, now)
            return

    def _turn_fits(self, task: PoolTask, instead_of: PoolTask | None) -> bool:
        """Whether the quota allows the task to be active."""
        capacity = self.capacity
        need = capacity.sum_vector(task.spec.bundles) - (capacity.sum_vector(task.uses) if task.uses else 0)
        if instead_of is not None:
            need = need - capacity.sum_vector(instead_of.uses)
            if instead_of.spec.residual:
                need = need + capacity.sum_vector(instead_of.spec.residual)
        return bool((need <= capacity.quota_left(task.spec.pool)).all())

    def _give_turn(self, task: PoolTask, group: PlacementGroup, now: float) -> None:
        reason = Reason(ReasonCode.turn, "it has its turn")
        if task.state is TaskState.parked:
            group.active = task.id
            self.use(task, task.spec.bundles)
            task.moving = "unparking"
            task.deadline = now + TURN_TIMEOUT_S
            self.timer(task.deadline, "task", task.id)
            self._out.append(e.UnparkTask(task.id, task.attempt, task.deadline))
            return
        task.attempt += 1
        self._assign(task, group, now)
        self._to(task, TaskState.starting, reason, now, now + task.spec.start_timeout_s + START_GRACE_S)
        self.update_candidate(task)
        self._issue_start(task, now)

    # ---- placement groups -------------------------------------------------------------------------------------------

    def _create_group(
        self,
        pool: str,
        kind: PlacementGroupKind,
        bundles: tuple[Resources, ...],
        nodes: tuple[str, ...],
        strategy: PlacementStrategy,
        now: float,
    ) -> PlacementGroup:
        self.seq += 1
        group = PlacementGroup(
            f"g{self.seq}", pool, kind, bundles, nodes, PgState.creating, now + CREATE_GROUP_TIMEOUT_S, seq=self.seq
        )
        self.add_group(group)
        self.timer(group.deadline, "group", group.id)
        self._out.append(e.CreatePlacementGroup(group.id, pool, bundles, nodes, strategy, now + CREATE_GROUP_TIMEOUT_S))
        return group

    def _leave(self, task: PoolTask, group: PlacementGroup, now: float) -> None:
        if task.id in group.tenants:
            group.tenants.remove(task.id)
        if task.id in group.turns:
            group.turns.remove(task.id)
        if group.active == task.id:
            group.active = None
        others = [name for name in group.tenants if name not in self.claims]
        if group.tenants:
            for name in others:
                if self.tasks[name].places:
                    self.update_candidate(self.tasks[name])
            if others:
                self._next_turn(group, now)
            return
        if group.state is PgState.broken:
            self._to_removing(group, now)
        elif group.state is PgState.ready:
            self._idle_or_remove(group, now, keep=task.keep_slot)

    def _idle_or_remove(self, group: PlacementGroup, now: float, keep: bool = True) -> None:
        """The group is empty: keep it for reuse, or remove it."""
        pool = self.pools[group.pool]
        wanted = any(group.id in claim.groups for claim in self.claims.values())
        if group.kind is PlacementGroupKind.reserved:
            if keep and not pool.dropped:
                return
            if group.spec_index is not None:
                pool.retired.append(group.spec_index)
            self._to_removing(group, now)
        elif keep and pool.spec.reuse and not pool.dropped and not wanted and self.usable(group):
            self.set_idle(group, True)
        else:
            self._to_removing(group, now)

    def _to_removing(self, group: PlacementGroup, now: float) -> None:
        self.set_idle(group, False)
        group.state = PgState.removing
        self.mark_releasing(group)
        self._issue_remove(group, now)

    def _issue_remove(self, group: PlacementGroup, now: float) -> None:
        group.deadline = now + REMOVE_GROUP_TIMEOUT_S
        self.timer(group.deadline, "group", group.id)
        self._out.append(e.RemovePlacementGroup(group.id))

    def _group_removed(self, group: PlacementGroup, now: float) -> None:
        self.drop_group(group)
        self._update_claims(now, group=group)
        self._forget_pool(group.pool)
        self._wake()

    def _break_group(self, group: PlacementGroup, reason: Reason, now: float, *, evict: bool = False) -> None:
        """Part of the group is lost, or will be (`evict`): stop its tasks, then remove it."""
        if group.state is PgState.removing:
            return
        group.state, group.deadline = PgState.broken, None
        self.mark_releasing(group)
        for claim in [claim for claim in self.claims.values() if claim.group == group.id]:
            self._drop_claim(claim, now, requeue=True)
        for name in list(group.tenants):
            task = self.tasks[name]
            if task.state in (TaskState.starting, TaskState.running, TaskState.parked):
                if evict:
                    self._evict(task, None, reason, now)
                else:
                    self._to_cancelling(task, StopOutcome.retry, reason, now, graceful=False)
            elif task.state in IN_QUEUE:
                group.tenants.remove(name)
                task.shares = None
                self._enqueue(task)
        if not group.tenants and group.state is PgState.broken:
            self._to_removing(group, now)

    def _requeue_tenants(self, group: PlacementGroup, reason: Reason, now: float) -> None:
        """The group will not become ready: its tenants wait again."""
        for name in list(group.tenants):
            task = self.tasks[name]
            group.tenants.remove(name)
            if task.state is TaskState.starting:
                self.candidates.drop(name)
                self.use(task, ())
                task.places, task.borrowed = (), False
                group.active = None
                self._back_off(task, BACK_OFF_S, now)
                self._to_queue(task, TaskState.waiting, reason, now)
            elif task.state in IN_QUEUE:
                task.shares = None
                self._enqueue(task)

    def _forget_pool(self, name: str) -> None:
        """Forget a dropped pool once nothing of it is left."""
        pool = self.pools[name]
        if not pool.dropped or self.pool_groups[name].groups:
            return
        if any(task.spec.pool == name and task.state not in ENDED for task in self.tasks.values()):
            return
        del self.pools[name], self.pool_groups[name]

    def _creating_to_ready(self, group: PlacementGroup, now: float) -> None:
        group.state, group.deadline = PgState.ready, None
        self.pools[group.pool].made_count += 1
        if not group.tenants:
            self._idle_or_remove(group, now)
            self._wake_all()
        elif group.active is not None:
            self._issue_start(self.tasks[group.active], now)
