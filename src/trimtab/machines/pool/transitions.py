"""The lives of tasks and groups: every transition, named after its edge, with what follows from it.

Keeps the books true through each change and says what is to be done; when a change is due is decided by the machine,
which is the only one to call it. A task leaves its slots only when its processes are gone; room that is being made for
a task is claimed until it has it; a group that is lost in part is given up whole.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, add_story_entry
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool import feasibility
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.preemption import PreemptionPlan
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
START_GRACE_S = 30.0  # beyond its own deadline, until a start counts as lost
STOP_GRACE_S = 60.0  # beyond telling and saving, until a stop is issued again
TURN_TIMEOUT_S = 300.0
START_TRIES = 3
BACK_OFF_S = 0.25  # doubles with every loss
MAX_BACK_OFF_S = 30.0
MAX_ENDED_TASKS = 10_000
MAX_EVICTIONS = 1_000


class TaskTransitions(PoolState):
    """Transitions over the books."""

    def __init__(self) -> None:
        super().__init__()
        # Lines in which nobody found room or a way to make any; as long as nothing is gained that could help.
        self._unschedulable: dict[ClassQueue, Unschedulable] = {}
        self._reserves: list[StarvationReserve] = []  # what was kept for the patient when that was found
        self._timed = False  # whether time alone may change that the one looked at last finds no room
        self._no_assignment: dict[tuple[object, ...], Reason] = {}  # why sizes found none, while one event is handled
        # By all that decides it but priority: the highest that found nobody to leave, since anything changed.
        self._no_preemption: dict[tuple[object, ...], float] = {}
        self._dirty = False
        self._out: list[e.PoolInstruction] = []

    # ---- the queue -------------------------------------------------------------------------------------------------

    def _wake_all(self) -> None:
        """Anybody may have room now who had none: everybody is looked at again."""
        self.hints.anything()
        self._wake()

    def _wake(self) -> None:
        """Something was gained: those whom it could help are looked at again."""
        self._no_assignment.clear()
        self._no_preemption.clear()
        self._dirty = True

    def _enqueue(self, task: PoolTask) -> None:
        queue, first = self.waiting.add(task, self.may_evict(task))
        if first:
            self._unschedulable.pop(queue, None)
        elif queue in self._unschedulable:
            self._wait(task, Reason(ReasonCode.queued, "others that ask the same came first"), task.since)
        self._dirty = True

    def _wait(self, task: PoolTask, reason: Reason, now: float) -> None:
        if reason.code is not task.reason.code:
            self._record(task, TaskState.waiting.value, reason, now)
        task.reason = reason

    # ---- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, task: PoolTask, choice: PreemptionPlan, now: float) -> None:
        """Have the victims leave, and keep what goes free for the task."""
        self._no_preemption.clear()
        self.waiting.remove(task.id)
        victims = [self.tasks[name] for name, _ in choice.victims]
        group_id, nodes = choice.group, choice.nodes
        if group_id is None and len(victims) == 1 and not choice.reclaims:
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
            [one.id for one in victims],
            [*leaving, *choice.reclaims, *choice.awaits],
            tuple(one.id for one in victims),
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
        for group in choice.reclaims:
            self._to_removing(self.groups[group], now)
        for victim, (_, code) in zip(victims, choice.victims, strict=True):
            self._evict(victim, task, _eviction_reason(code, victim, task), now)
        if self.claims.get(task.id) is claim:  # victims that had not begun are gone already
            self._claim_if_ready(claim, now)

    def _drop_claim(self, claim: ResourceClaim, now: float, *, requeue: bool) -> None:
        """The room cannot be had, or is not wanted any more."""
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
        """Somebody whom claims wait for is gone."""
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

    # ---- the life of a task ----------------------------------------------------------------------------------------

    def _to_starting(self, task: PoolTask, assignment: Assignment, now: float) -> None:
        """From the queue, or from a claim."""
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
        self._dirty = True  # here is one more who might have to leave for others

    def _to_recovered(self, found: e.RecoveredTask, now: float) -> None:
        """A task that nobody remembers runs: from now on it is remembered."""
        spec = found.spec
        pool = self.pools[spec.pool]
        kind = PlacementGroupKind.dynamic if found.reserved is None else PlacementGroupKind.reserved
        size = spec.size if found.reserved is None else (pool.spec.reserved[found.reserved],)
        # New groups are numbered on from here, so that no name is used twice.
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

    def _assign(self, task: PoolTask, group: PlacementGroup, now: float) -> None:
        """The task is the active tenant of the group."""
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
        """The task is to end, whatever its state."""
        if task.id in self.claims:
            self._drop_claim(self.claims[task.id], now, requeue=False)
        task.keep_slot = keep_slot
        if task.state in IN_QUEUE:
            self.waiting.remove(task.id)
            if any(kept.task == task.id for kept in self._reserves):
                self.hints.anything()  # what was kept for it
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
        """From starting, running or parked."""
        self.candidates.drop(task.id)
        self._set_outcome(task, outcome, reason)
        task.moving = None
        if not task.started:
            self._stopped(task, now)
            return
        policy = self.policy or PreemptionPolicy()
        # What is not constructed yet has nothing to tell and nothing to save.
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
        """Nothing of the task is left on its slots: it leaves them, and goes where it was to go."""
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
        # A start that failed by bad luck has done nothing yet: it is tried again in any case.
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
        # A task that asked for "at once or not at all" has been accepted once; it waits like others to return.
        wait_s = task.spec.wait_s or pool.spec.wait_s
        task.shares = None
        self._to(task, state, reason, now, now + wait_s)
        self._enqueue(task)

    def _to_ended(self, task: PoolTask, state: TaskState, reason: Reason, now: float) -> None:
        self._to(task, state, reason, now, None)
        self.ended.append(task.id)
        for other in [one for one in self.tasks.values() if one.shares == task.id] if task.spec.room else ():
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
        """A task that shares slots waits at them for its turn."""
        owner = self.tasks.get(task.shares or "")
        group = self.groups.get(owner.places[0].group) if owner is not None and owner.places else None
        if group is not None and any(claim.group == group.id for claim in self.claims.values()):
            group = None  # somebody else takes it over
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
        """Give the group's devices to whoever asked first; or have its active tenant parked for them."""
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
        """Whether the quota allows it to be active."""
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

    # ---- the life of a group ---------------------------------------------------------------------------------------

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
        """The task is not in the group any more."""
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
        """Nobody is in the group: keep it for the next, or remove it."""
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
        """Nothing of the group is left."""
        self.drop_group(group)
        self._update_claims(now, group=group)
        self._forget_pool(group.pool)
        self._wake()

    def _break_group(self, group: PlacementGroup, reason: Reason, now: float, *, evict: bool = False) -> None:
        """Part of the group is lost, or will be (`evict`): whoever is in it stops, and then it is removed."""
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
        """The group will not stand: its tenants wait again."""
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
        """A pool that was dropped is forgotten once nothing of it is left."""
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


def _eviction_reason(code: ReasonCode, victim: PoolTask, by: PoolTask) -> Reason:
    gap = f"priority {by.spec.priority:g} against {victim.spec.priority:g}"
    why = {
        ReasonCode.label_rule: f"a label rule allows it, {gap}",
        ReasonCode.priority: f"{gap} in the same pool",
        ReasonCode.cross_pool: f"pool {by.spec.pool} may take from pool {victim.spec.pool}, {gap}",
        ReasonCode.owner_returned: "it had borrowed a reserved slot",
    }[code]
    return Reason(code, f"makes room for {by.id}: {why}")
