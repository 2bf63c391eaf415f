"""Who runs now, and who yields: the state machine of pools.

`handle(event, now)` is the one door. It never blocks, looks at no clock and asks nobody; the same events give the same
instructions. A wrong ask raises before anything is changed. What must never happen: more held than a node or a quota
has; an eviction that no rule, switch or person allows; a victim that could be spared; half a gang; a task that waits
without a reason and a deadline. Room that is being made for a task is claimed, so nobody else takes it.

Slots (bundles of placement groups) hold what nodes have; tasks in them use the quota of their pool. The machine says
which node every bundle goes to, so its books are exact; a group that is lost in part is given up whole.
"""

from __future__ import annotations

import heapq
from typing import Any

from trimtab.model.codec import encode
from trimtab.model.errors import InputError
from trimtab.model.pool import (
    ENDED,
    IN_QUEUE,
    Chapter,
    Code,
    Explanation,
    Place,
    Policy,
    PoolSpec,
    Reason,
    State,
    Strategy,
    TaskSpec,
)
from trimtab.model.resources import NOTHING, Resources
from trimtab.pool import events as e
from trimtab.pool import room, telling
from trimtab.pool.books import Books
from trimtab.pool.placing import place
from trimtab.pool.queue import Kind as QueueKind
from trimtab.pool.records import After, Claim, Eviction, Group, Kind, Pool, Stand, Task
from trimtab.pool.room import Spot
from trimtab.pool.victims import Choice

MAKE_GROUP_S = 60.0
REMOVE_GROUP_S = 60.0
START_GRACE_S = 30.0  # beyond its own deadline, until a start counts as lost
STOP_GRACE_S = 60.0  # beyond telling and saving, until a stop is issued again
TURN_S = 300.0
START_TRIES = 3
BACK_OFF_S = 0.25  # doubles with every loss
BACK_OFF_MOST_S = 30.0
ENDED_KEPT = 10_000
CHAPTERS_KEPT = 100
EVICTIONS_KEPT = 1_000


class PoolMachine(Books):
    """Pools, tasks and slots. Events in, instructions out."""

    def __init__(self) -> None:
        super().__init__()
        # Since anything was freed: kinds that found no room, and no way to make any; and why sizes found none.
        self._blocked: set[QueueKind] = set()
        self._no_spot: dict[tuple[object, ...], Reason] = {}
        self._dirty = False
        self._out: list[e.Instruction] = []

    @classmethod
    def load(cls, data: dict[str, Any]) -> PoolMachine:
        """A machine that goes on from a snapshot."""
        machine = cls()
        machine.read(data)
        return machine

    # ---- the door --------------------------------------------------------------------------------------------------

    def handle(self, event: e.Event, now: float) -> list[e.Instruction]:
        """What is to be done about the event. Raises InputError for a wrong ask, with nothing changed."""
        now = max(float(now), self.now)
        self._out = []
        getattr(self, "_on_" + _snake(type(event).__name__))(event, now)
        self.now = now
        if self._dirty:
            self._schedule(now)
        return self._out

    # ---- asks ------------------------------------------------------------------------------------------------------

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
                self._freed()
            return
        self.add_pool(Pool(spec))
        self._freed()

    def _on_pool_drained(self, event: e.PoolDrained, now: float) -> None:
        room.known_pool(self, event.pool).drained = event.on
        self._freed()

    def _on_pool_dropped(self, event: e.PoolDropped, now: float) -> None:
        pool = room.known_pool(self, event.pool)
        pool.dropped = pool.drained = True
        reason = Reason(Code.pool_dropped, f"pool {event.pool} was removed")
        for task in [task for task in self.tasks.values() if task.spec.pool == event.pool]:
            if task.state not in ENDED:
                self._end(task, After.cancelled, reason, now, keep_slot=False)
        for group in list(self.shelves[event.pool].groups.values()):
            if group.idle:
                self._standing_to_removing(group, now)
        self._forget_pool(event.pool)
        self._freed()

    def _on_policy_set(self, event: e.PolicySet, now: float) -> None:
        self.policy = event.policy
        self._freed()

    def _on_submitted(self, event: e.Submitted, now: float) -> None:
        spec = event.spec
        room.check_submission(self, spec)
        self.seq += 1
        before = self.tasks.pop(spec.id, None)
        if before is not None:
            self.ended.remove(spec.id)
        pool = self.pools[spec.pool]
        wait_s = pool.spec.wait_s if spec.wait_s is None else spec.wait_s
        queued = Reason(Code.queued, "just submitted")
        task = Task(spec, self.seq, now, State.waiting, queued, now, now + wait_s, shares=spec.shares)
        # Late news of an earlier task of this id must not be taken for news of this one.
        task.attempt = before.attempt if before is not None else 0
        self.tasks[spec.id] = task
        task.story.append(Chapter(now, task.state.value, queued))
        never = room.never(self, spec)
        if never is not None:
            self._to_ended(task, State.failed, Reason(Code.never_fits, never), now)
            return
        self.timer(task.deadline, "task", spec.id)
        if spec.shares is not None:
            self._join_slots(task, now)
        else:
            self._enqueue(task)

    def _on_complete_asked(self, event: e.CompleteAsked, now: float) -> None:
        task = room.known_task(self, event.task)
        if task.state in ENDED:
            return
        after = After.done if task.holds or task.evictions or task.losses else After.cancelled
        reason = Reason(Code.completed, "said to be complete")
        self._end(task, after, reason, now, keep_slot=event.keep_slot, tell=False)

    def _on_cancel_asked(self, event: e.CancelAsked, now: float) -> None:
        task = room.known_task(self, event.task)
        if task.state in ENDED:
            return
        sentence = "the client that submitted it is gone" if event.code is Code.client_died else "cancelled on request"
        self._end(task, After.cancelled, Reason(event.code, sentence), now, keep_slot=event.keep_slot)

    def _on_evict_asked(self, event: e.EvictAsked, now: float) -> None:
        task = room.known_task(self, event.task)
        if task.state not in (State.running, State.starting, State.parked):
            raise InputError(f"task {event.task} is {task.state.value}", hint="only a task that runs can be evicted")
        self._evict(task, None, Reason(Code.by_hand, "evicted on request"), now)
        self._freed()

    def _on_turn_asked(self, event: e.TurnAsked, now: float) -> None:
        task = room.known_task(self, event.task)
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
        self.ledger.set_node(event.node, event.total, event.outside)
        if known is None:
            self._tell_node(event.node, now, "joined", f"it has {event.total}")
        self._freed()

    def _on_node_cordoned(self, event: e.NodeCordoned, now: float) -> None:
        self._known_node(event.node)
        self.ledger.cordon(event.node, event.on)
        self._tell_node(
            event.node, now, "cordoned" if event.on else "open", "nothing new goes there" if event.on else ""
        )
        self._freed()

    def _on_node_lost(self, event: e.NodeLost, now: float) -> None:
        if event.node not in self.nodes:
            return
        del self.nodes[event.node]
        self.node_epoch += 1
        self.changed_nodes.discard(event.node)
        reason = Reason(Code.node_lost, f"node {room.short(event.node)} was lost")
        hit = [group for group in self.groups.values() if event.node in group.nodes]
        for group in hit:
            self.set_idle(group, False)
        for claim in [claim for claim in self.claims.values() if event.node in claim.nodes]:
            self._drop_claim(claim, now, requeue=True)
        self.ledger.drop_node(event.node)
        for group in hit:
            # A node of that name that comes back owes this group nothing.
            group.nodes = tuple("" if node == event.node else node for node in group.nodes)
            self._break(group, reason, now)
        self._tell_node(event.node, now, "lost", f"{len(hit)} placement groups were on it")
        self._freed()

    def _tell_node(self, node: str, now: float, what: str, sentence: str) -> None:
        story = self.node_stories.setdefault(node, [])
        story.append(Chapter(now, what, Reason(Code.node_lost if what == "lost" else Code.placed, sentence)))
        del story[:-CHAPTERS_KEPT]
        if len(self.node_stories) > ENDED_KEPT:
            del self.node_stories[next(iter(self.node_stories))]

    # ---- news of groups --------------------------------------------------------------------------------------------

    def _on_group_made(self, event: e.GroupMade, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stand is not Stand.making:
            return
        self._making_to_standing(group, now)

    def _making_to_standing(self, group: Group, now: float) -> None:
        group.stand, group.deadline = Stand.standing, None
        self.pools[group.pool].made_count += 1
        if not group.tenants:
            self._idle_or_remove(group, now)
            self._freed()
        elif group.active is not None:
            self._issue_start(self.tasks[group.active], now)

    def _on_group_failed(self, event: e.GroupFailed, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stand is not Stand.making:
            return
        reason = Reason(Code.back_off, f"its placement group could not be made: {event.why}")
        self._gone(group, now)
        pool = self.pools[group.pool]
        if group.kind is Kind.reserved:
            pool.not_before = now + BACK_OFF_S * 4
            self.timer(pool.not_before, "recheck", group.pool)
        self._send_back(group, reason, now)

    def _on_group_gone(self, event: e.GroupGone, now: float) -> None:
        group = self.groups.get(event.group)
        if group is not None and group.stand is Stand.removing:
            self.pools[group.pool].destroyed_count += 1
            self._gone(group, now)

    def _on_group_lost(self, event: e.GroupLost, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stand not in (Stand.making, Stand.standing):
            return
        self.set_idle(group, False)
        self._break(group, Reason(Code.slot_lost, f"its placement group was lost: {event.why}"), now)
        self._freed()

    # ---- news of tasks ---------------------------------------------------------------------------------------------

    def _on_started(self, event: e.Started, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not State.starting or not task.started:
            return
        task.how = event.how
        task.started_at = now
        self._to(task, State.running, task.reason, now, None)
        self.candidate(task)
        group = self.groups[task.places[0].group]
        if group.turns:
            self._next_turn(group, now)

    def _on_start_failed(self, event: e.StartFailed, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (State.starting, State.cancelling) or not task.started:
            return
        if task.state is State.starting:
            reason = Reason(Code.start_failed, event.why)
            self._set_after(task, After.failed if event.fatal else After.again, reason)
        self._stopped(task, now)

    def _on_ended(self, event: e.Ended, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None:
            return
        if event.error is None:
            after, reason = After.done, Reason(Code.completed, "its work is done")
        else:
            after, reason = After.failed, Reason(Code.raised, event.error)
        if task.state in (State.starting, State.running, State.parked):
            self._to_cancelling(task, after, reason, now, tell=False)
        elif task.state is State.cancelling and task.after is After.again:
            self._set_after(task, after, reason)
        # One that was told to leave may return early from its work: that is not its end.

    def _on_died(self, event: e.Died, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (State.starting, State.running, State.parked):
            return
        code = Code.gang_broken if task.spec.gang else Code.process_died
        self._to_cancelling(task, After.again, Reason(code, event.why), now, tell=False)

    def _on_stopped(self, event: e.Stopped, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not State.cancelling:
            return
        task.saved = task.saved or event.saved
        if event.cancel in ("raised", "timed out") or event.note:
            note = f"cancel() {event.cancel}" + (f"; {event.note}" if event.note else "")
            task.story.append(Chapter(now, "stopped", Reason(task.reason.code, note)))
        self._stopped(task, now)

    def _on_parked(self, event: e.Parked, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "parking":
            return
        group = self.groups[task.places[0].group]
        task.moving = None
        self.use(task, task.spec.residual or (NOTHING,) * len(task.spec.bundles))
        self._to(task, State.parked, Reason(Code.turn, "another tenant of its slot has its turn"), now, None)
        group.active = None
        self._next_turn(group, now)
        self._freed()

    def _on_unparked(self, event: e.Unparked, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "unparking":
            return
        task.moving = None
        self._to(task, State.running, Reason(Code.turn, "it has its turn"), now, None)
        self._next_turn(self.groups[task.places[0].group], now)

    def _on_tick(self, event: e.Tick, now: float) -> None:
        due = []
        while self.timers and self.timers[0][0] <= now:
            due.append(heapq.heappop(self.timers))
        if any(kind == "recheck" for _, kind, _ in due):
            # Before anybody is given up, whoever can start does: time may have leapt.
            self._freed()
            self._schedule(now)
        for at, kind, name in due:
            record = self.groups.get(name) if kind == "group" else self.tasks.get(name) if kind == "task" else None
            if record is None or record.deadline != at:
                continue
            if isinstance(record, Group):
                self._group_overdue(record, now)
            else:
                self._task_overdue(record, now)

    # ---- deadlines -------------------------------------------------------------------------------------------------

    def _task_overdue(self, task: Task, now: float) -> None:
        if task.state in IN_QUEUE:
            if task.id in self.claims:
                self._drop_claim(self.claims[task.id], now, requeue=False)
            waited = f"waited {now - task.since:.3g} s, as long as it may; {task.reason.sentence}"
            self._end(task, After.failed, Reason(Code.too_late, waited), now)
        elif task.state is State.starting:
            reason = Reason(Code.start_timeout, f"not started within {task.spec.start_timeout_s:g} s")
            self._to_cancelling(task, After.again, reason, now, tell=False)
        elif task.state is State.cancelling:
            task.tell_s = task.save_s = 0.0
            self._issue_stop(task, now)
        elif task.moving is not None:
            reason = Reason(Code.process_died, f"{task.moving} took more than {TURN_S:g} s")
            self._to_cancelling(task, After.again, reason, now, tell=False)

    def _group_overdue(self, group: Group, now: float) -> None:
        if group.stand is Stand.making:
            reason = Reason(Code.back_off, f"its placement group was not ready within {MAKE_GROUP_S:g} s")
            self._send_back(group, reason, now)
            self._standing_to_removing(group, now)
        elif group.stand is Stand.removing:
            self._issue_remove(group, now)

    # ---- the queue -------------------------------------------------------------------------------------------------

    def _freed(self) -> None:
        """Something may have room now that had none: everybody is looked at again."""
        self._blocked.clear()
        self._no_spot.clear()
        self._dirty = True

    def _enqueue(self, task: Task) -> None:
        self.waiting.add(task, self.may_evict(task))
        self._dirty = True

    def _schedule(self, now: float) -> None:
        """Start whoever can start, in the order of the queue."""
        self._dirty = True
        while self._dirty:  # what is given up on the way (a refused task) may free something
            self._dirty = False
            self._make_reserved(now)
            patient: dict[str, room.Kept] = {}  # by pool: what is kept for its first waiter, while all are looked at
            behind: list[Task] = []
            heap = self.waiting.heads()
            while heap:
                entry, kind = heapq.heappop(heap)
                task = self.tasks[entry[2]]
                following = self.waiting.after(kind, entry)
                if task.not_before <= now and (kind in self._blocked or not self._try(task, now)):
                    if task.spec.wait_s == 0 and task.state is State.waiting:
                        refused = Reason(Code.refused, f"cannot start at once: {task.reason.sentence}")
                        self._end(task, After.failed, refused, now)
                    else:
                        self._blocked.add(kind)
                        following = None
                        self._be_patient(task, patient, now)
                        if patient:
                            behind.append(task)
                if following is not None:
                    heapq.heappush(heap, (following, kind))
            for kept in patient.values():
                room.give_back(self, kept)
            if patient:
                self._blocked.clear()  # some failed for room that was kept only until now
                self._no_spot.clear()
                self._tell_who_is_behind(behind, now)

    def _be_patient(self, task: Task, patient: dict[str, room.Kept], now: float) -> None:
        """One who has waited too long has what is free kept for it, while those behind it are looked at."""
        pool = self.pools[task.spec.pool]
        overdue = now - task.since >= pool.spec.patience_s and task.spec.pool not in patient and not pool.drained
        if overdue and room.would_fit_alone(self, task.spec):
            patient[task.spec.pool] = room.keep_for(self, task)

    def _tell_who_is_behind(self, tasks: list[Task], now: float) -> None:
        for task in tasks:
            if task.id in self.waiting and isinstance(room.spot(self, task), Spot):
                self._wait(task, Reason(Code.behind, "there is room, kept for one who has waited longer"), now)

    def _try(self, task: Task, now: float) -> bool:
        """Start the task, or begin to make room for it. False: it waits, and its reason says why."""
        pool = self.pools[task.spec.pool]
        if pool.drained:
            self._wait(task, Reason(Code.drained, f"pool {pool.spec.name} takes nothing new"), now)
            return False
        alike = room.alike(self, task.spec)
        spot = self._no_spot.get(alike) or room.spot(self, task)
        if isinstance(spot, Spot):
            self.waiting.remove(task.id)
            self._to_starting(task, spot, now)
            return True
        if spot.code is Code.quota and not task.spec.over_quota_waits:
            self._end(task, After.failed, Reason(Code.refused, spot.sentence), now)
            return True
        self._no_spot[alike] = spot
        choice = room.choose(self, task, now)
        if choice.found:
            self._claim(task, choice, now)
            return True
        if choice.again_at is not None:
            self.timer(choice.again_at, "recheck", task.id)
        self._wait(task, spot, now)
        return False

    def _wait(self, task: Task, reason: Reason, now: float) -> None:
        if reason.code is not task.reason.code:
            self._write(task, State.waiting.value, reason, now)
        task.reason = reason

    # ---- claims ----------------------------------------------------------------------------------------------------

    def _claim(self, task: Task, choice: Choice, now: float) -> None:
        """Have the victims leave, and keep what goes free for the task."""
        self.waiting.remove(task.id)
        victims = [self.tasks[name] for name, _ in choice.victims]
        group_id, nodes = choice.group, choice.nodes
        if group_id is None and len(victims) == 1 and not choice.reclaims:
            theirs = self.groups[victims[0].places[0].group]
            size = task.spec.size
            same = theirs.pool == task.spec.pool and theirs.bundles == size and theirs.nodes == nodes
            if same and theirs.kind is Kind.dynamic and theirs.stand is Stand.standing:
                group_id, nodes = theirs.id, ()
        limited = self.pools[task.spec.pool].spec.dynamic_limit is not None
        leaving = [
            group.id
            for group in (self.groups[victim.places[0].group] for victim in victims)
            if group.kind is Kind.dynamic
            and (set(group.nodes) & set(nodes) or (nodes and limited and group.pool == task.spec.pool))
        ]
        claim = Claim(
            task.id,
            nodes,
            group_id,
            [one.id for one in victims],
            [*leaving, *choice.reclaims],
            tuple(one.id for one in victims),
        )
        self.claims[task.id] = claim
        if group_id is not None:
            self.set_idle(self.groups[group_id], False)
            self.groups[group_id].tenants.append(task.id)
        names = ", ".join(victim.id for victim in victims) or "idle slots"
        task.reason = Reason(Code.evicting, f"room is being made: {names} must leave first")
        self._write(task, task.state.value, task.reason, now)
        stop_s = max([self._stop_seconds(victim) for victim in victims], default=0.0)
        task.deadline = max(task.deadline or 0.0, now + stop_s + STOP_GRACE_S + REMOVE_GROUP_S)
        self.timer(task.deadline, "task", task.id)
        self.keep(claim)
        for group in choice.reclaims:
            self._standing_to_removing(self.groups[group], now)
        for victim, (_, code) in zip(victims, choice.victims, strict=True):
            self._evict(victim, task, _eviction_reason(code, victim, task), now)
        if self.claims.get(task.id) is claim:  # victims that had not begun are gone already
            self._claim_if_ready(claim, now)

    def _drop_claim(self, claim: Claim, now: float, *, requeue: bool) -> None:
        """The room cannot be had, or is not wanted any more."""
        self.unkeep(claim)
        del self.claims[claim.task]
        if claim.group is not None and claim.group in self.groups:
            group = self.groups[claim.group]
            group.tenants.remove(claim.task)
            if not group.tenants and group.stand is Stand.standing:
                self._idle_or_remove(group, now)
        if requeue:
            self._enqueue(self.tasks[claim.task])
        self._freed()

    def _claims_hear(
        self, now: float, *, task: Task | None = None, used: tuple[Resources, ...] = (), group: Group | None = None
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
            self.keep_instead(claim, used if same_pool else (), group)
            self._claim_if_ready(claim, now)

    def _claim_if_ready(self, claim: Claim, now: float) -> None:
        if claim.tasks or claim.groups:
            return
        task = self.tasks[claim.task]
        self.unkeep(claim)
        del self.claims[claim.task]
        if claim.group is not None:
            self.groups[claim.group].tenants.remove(task.id)
        if not room.still_there(self, claim):
            # The node shrank or was cordoned meanwhile.
            if claim.group is not None and not self.groups[claim.group].tenants:
                self._idle_or_remove(self.groups[claim.group], now)
            self._enqueue(task)
            self._freed()
            return
        names = ", ".join(claim.victims)
        made = f"{names} left for it" if names else "idle slots were removed for it"
        code = Code.preempted if claim.victims else Code.placed
        self._to_starting(task, Spot(claim.group, claim.nodes, Reason(code, made)), now)

    # ---- evictions -------------------------------------------------------------------------------------------------

    def _evict(self, task: Task, by: Task | None, reason: Reason, now: float) -> None:
        task.evictions += 1
        self.eviction_count += 1
        self.evictions.append(Eviction(now, task.id, task.spec.pool, by.id if by else None, reason))
        del self.evictions[:-EVICTIONS_KEPT]
        counts = self.pools[task.spec.pool].evictions
        counts[reason.code.value] = counts.get(reason.code.value, 0) + 1
        self._to_cancelling(task, After.evicted, reason, now, tell=True, save=True)

    def _stop_seconds(self, task: Task) -> float:
        policy = self.policy or Policy()
        tell = policy.cancel_timeout_s if task.spec.notice_s is None else task.spec.notice_s
        return tell + policy.save_timeout_s

    # ---- the life of a task ----------------------------------------------------------------------------------------

    def _to_starting(self, task: Task, spot: Spot, now: float) -> None:
        """From the queue, or from a claim."""
        spec = task.spec
        pool = self.pools[spec.pool]
        if spot.group is None:
            strategy = room.strategy_of(self, spec)
            group = self._make_group(spec.pool, Kind.dynamic, spec.size, spot.nodes, strategy, now)
        else:
            group = self.groups[spot.group]
            self.set_idle(group, False)
            if group.used:
                pool.reuse_count += 1
        task.attempt += 1
        self._seat(task, group, now)
        owner = spec.priority >= pool.spec.reserved_priority
        task.borrowed = group.kind is Kind.reserved and not owner
        if task.state is State.evicted:
            task.evicted_s += now - task.since
        task.not_before = 0.0
        self._to(task, State.starting, spot.reason, now, now + spec.start_timeout_s + START_GRACE_S)
        self.candidate(task)
        if group.stand is Stand.standing:
            self._issue_start(task, now)
        for other in [other for other in self.tasks.values() if other.shares == task.id] if spec.room else ():
            if other.state in IN_QUEUE and other.id not in group.tenants:
                self._join_slots(other, now)
        # Nothing was freed, but here is one more who might have to leave for others.
        self._blocked.clear()
        self._dirty = True

    def _seat(self, task: Task, group: Group, now: float) -> None:
        """The task is the active tenant of the group."""
        if task.id not in group.tenants:
            group.tenants.append(task.id)
        group.active = task.id
        group.used += 1
        task.places = tuple(Place(group.id, at, node) for at, node in enumerate(group.nodes))
        task.started, task.started_at, task.keep_slot = False, None, True
        self.use(task, task.spec.bundles)

    def _issue_start(self, task: Task, now: float) -> None:
        task.started = True
        deadline = now + task.spec.start_timeout_s
        task.deadline = deadline + START_GRACE_S
        self.timer(task.deadline, "task", task.id)
        self._out.append(e.Start(task.id, task.attempt, task.places, task.saved, deadline))

    def _end(
        self, task: Task, after: After, reason: Reason, now: float, *, keep_slot: bool = True, tell: bool = True
    ) -> None:
        """The task is to end, whatever its state."""
        if task.id in self.claims:
            self._drop_claim(self.claims[task.id], now, requeue=False)
        task.keep_slot = keep_slot
        if task.state in IN_QUEUE:
            self.waiting.remove(task.id)
            self._leave_turns(task, now)
            self._to_ended(task, State(after.value), reason, now)
        elif task.state is State.cancelling:
            self._set_after(task, after, reason)
        else:
            self._to_cancelling(task, after, reason, now, tell=tell)
        task.keep_slot = keep_slot

    def _set_after(self, task: Task, after: After, reason: Reason) -> None:
        task.after, task.after_reason = after, reason

    def _to_cancelling(
        self, task: Task, after: After, reason: Reason, now: float, *, tell: bool, save: bool = False
    ) -> None:
        """From starting, running or parked."""
        self.candidates.drop(task.id)
        self._set_after(task, after, reason)
        task.moving = None
        if not task.started:
            self._stopped(task, now)
            return
        policy = self.policy or Policy()
        # What is not constructed yet has nothing to tell and nothing to save.
        tell = tell and task.state is not State.starting
        notice = tell and after is After.evicted and task.spec.notice_s is not None
        task.notice = notice
        task.tell_s = float(task.spec.notice_s or 0.0) if notice else policy.cancel_timeout_s if tell else 0.0
        task.save_s = policy.save_timeout_s if save and tell else 0.0
        self._to(task, State.cancelling, reason, now, None)
        self._issue_stop(task, now)

    def _issue_stop(self, task: Task, now: float) -> None:
        task.deadline = now + task.tell_s + task.save_s + STOP_GRACE_S
        self.timer(task.deadline, "task", task.id)
        self._out.append(e.Stop(task.id, task.attempt, task.reason, task.tell_s, task.notice, task.save_s))

    def _stopped(self, task: Task, now: float) -> None:
        """Nothing of the task is left on its slots: it leaves them, and goes where it was to go."""
        after, reason = task.after or After.again, task.after_reason or task.reason
        task.after = task.after_reason = None
        self.candidates.drop(task.id)
        used = task.uses
        self.use(task, ())
        group = self.groups[task.places[0].group]
        had_begun = task.started
        task.places = ()
        task.borrowed = task.started = False
        task.started_at = None
        self._leave(task, group, now)
        self._claims_hear(now, task=task, used=used)
        self._freed()
        if after is After.again and not had_begun:
            self._to_queue(task, State.waiting, reason, now)
        elif after is After.again:
            self._after_a_loss(task, reason, now)
        elif after is After.evicted:
            self._to_queue(task, State.evicted, reason, now)
        else:
            self._to_ended(task, State(after.value), reason, now)

    def _after_a_loss(self, task: Task, reason: Reason, now: float) -> None:
        task.losses += 1
        # A start that failed by bad luck has done nothing yet: it is tried again in any case.
        allowed = max(task.spec.restarts, START_TRIES if reason.code is Code.start_failed else 0)
        if task.spec.restarts >= 0 and allowed < task.losses:
            if allowed:
                reason = Reason(Code.restarts_used, f"lost {task.losses} times, the last time: {reason.sentence}")
            self._to_ended(task, State.failed, reason, now)
            return
        back_off = 0.0 if reason.code is Code.node_lost else BACK_OFF_S * 2 ** min(task.losses - 1, 10)
        self._back_off(task, min(BACK_OFF_MOST_S, back_off), now)
        self._to_queue(task, State.waiting, Reason(reason.code, f"will start again: {reason.sentence}"), now)

    def _back_off(self, task: Task, seconds: float, now: float) -> None:
        task.not_before = now + seconds
        if seconds:
            self.timer(task.not_before, "recheck", task.id)

    def _to_queue(self, task: Task, state: State, reason: Reason, now: float) -> None:
        pool = self.pools[task.spec.pool]
        # A task that asked for "at once or not at all" has been accepted once; it waits like others to return.
        wait_s = task.spec.wait_s or pool.spec.wait_s
        task.shares = None
        self._to(task, state, reason, now, now + wait_s)
        self._enqueue(task)

    def _to_ended(self, task: Task, state: State, reason: Reason, now: float) -> None:
        self._to(task, state, reason, now, None)
        self.ended.append(task.id)
        for other in [one for one in self.tasks.values() if one.shares == task.id] if task.spec.room else ():
            if other.state in IN_QUEUE and self._group_shared_by(other) is None:
                other.shares = None
                self._enqueue(other)
        if len(self.ended) > ENDED_KEPT:
            del self.tasks[self.ended.pop(0)]
        if self.pools[task.spec.pool].dropped:
            self._forget_pool(task.spec.pool)

    def _to(self, task: Task, state: State, reason: Reason, now: float, deadline: float | None) -> None:
        task.state, task.reason, task.since, task.deadline = state, reason, now, deadline
        self.timer(deadline, "task", task.id)
        self._write(task, state.value, reason, now)

    def _write(self, task: Task, state: str, reason: Reason, now: float) -> None:
        task.story.append(Chapter(now, state, reason))
        if len(task.story) > CHAPTERS_KEPT:
            del task.story[1]  # the submission stays

    # ---- turns -----------------------------------------------------------------------------------------------------

    def _join_slots(self, task: Task, now: float) -> None:
        """A task that shares slots waits at them for its turn."""
        owner = self.tasks.get(task.shares or "")
        group = self.groups.get(owner.places[0].group) if owner is not None and owner.places else None
        if group is not None and group.stand in (Stand.making, Stand.standing) and task.id not in group.tenants:
            group.tenants.append(task.id)
            for other in group.tenants:
                if self.tasks[other].places:
                    self.candidate(self.tasks[other])
            self._next_turn(group, now)
        if task.state in IN_QUEUE:
            self._wait(task, Reason(Code.turn, f"waits for its turn in the slot of {task.shares}"), now)

    def _group_shared_by(self, task: Task) -> Group | None:
        """The group in which the task takes turns."""
        if task.places:
            return self.groups[task.places[0].group]
        owner = self.tasks.get(task.shares or "")
        candidates = (self.groups[owner.places[0].group],) if owner is not None and owner.places else ()
        for group in candidates or self.shelves[task.spec.pool].groups.values():
            if task.id in group.tenants:
                return group
        return None

    def _leave_turns(self, task: Task, now: float) -> None:
        group = self._group_shared_by(task) if task.shares else None
        if group is not None:
            self._leave(task, group, now)

    def _next_turn(self, group: Group, now: float) -> None:
        """Give the group's devices to whoever asked first; or have its active tenant parked for them."""
        if group.stand is not Stand.standing:
            return
        group.turns = [name for name in group.turns if name in group.tenants and name != group.active]
        if group.active is not None:
            active = self.tasks[group.active]
            wanted = next((name for name in group.turns if self._turn_fits(self.tasks[name], active)), None)
            if wanted is not None and active.state is State.running and active.moving is None:
                active.moving = "parking"
                active.deadline = now + TURN_S
                self.timer(active.deadline, "task", active.id)
                self._out.append(e.Park(active.id, active.attempt, active.deadline))
            return
        for name in [*group.turns, *group.tenants]:
            task = self.tasks[name]
            if name in self.claims or task.state not in (State.parked, *IN_QUEUE) or not self._turn_fits(task, None):
                continue
            if name in group.turns:
                group.turns.remove(name)
            self._give_turn(task, group, now)
            return

    def _turn_fits(self, task: Task, instead_of: Task | None) -> bool:
        """Whether the quota allows it to be active."""
        ledger = self.ledger
        need = ledger.sum_vector(task.spec.bundles) - (ledger.sum_vector(task.uses) if task.uses else 0)
        if instead_of is not None:
            need = need - ledger.sum_vector(instead_of.uses)
            if instead_of.spec.residual:
                need = need + ledger.sum_vector(instead_of.spec.residual)
        return bool((need <= ledger.quota_left(task.spec.pool)).all())

    def _give_turn(self, task: Task, group: Group, now: float) -> None:
        reason = Reason(Code.turn, "it has its turn")
        if task.state is State.parked:
            group.active = task.id
            self.use(task, task.spec.bundles)
            task.moving = "unparking"
            task.deadline = now + TURN_S
            self.timer(task.deadline, "task", task.id)
            self._out.append(e.Unpark(task.id, task.attempt, task.deadline))
            return
        task.attempt += 1
        self._seat(task, group, now)
        self._to(task, State.starting, reason, now, now + task.spec.start_timeout_s + START_GRACE_S)
        self.candidate(task)
        self._issue_start(task, now)

    # ---- the life of a group ---------------------------------------------------------------------------------------

    def _make_reserved(self, now: float) -> None:
        """Make the reserved slots that are not there, as far as there is room."""
        for pool in self.pools.values():
            missing = len(pool.spec.reserved) - len(pool.retired)
            if not missing or pool.dropped or pool.not_before > now:
                continue
            there = {group.spec_index for group in self.shelves[pool.spec.name].reserved.values()}
            for index, size in enumerate(pool.spec.reserved):
                if index in there or index in pool.retired:
                    continue
                ledger = self.ledger
                rows = place(ledger.free, ledger.usable, [ledger.vector(size)], pool.spec.strategy)
                if rows is not None:
                    nodes = (str(ledger.nodes[rows[0]]),)
                    group = self._make_group(pool.spec.name, Kind.reserved, (size,), nodes, pool.spec.strategy, now)
                    group.spec_index = index

    def _make_group(
        self,
        pool: str,
        kind: Kind,
        bundles: tuple[Resources, ...],
        nodes: tuple[str, ...],
        strategy: Strategy,
        now: float,
    ) -> Group:
        self.seq += 1
        group = Group(f"g{self.seq}", pool, kind, bundles, nodes, Stand.making, now + MAKE_GROUP_S)
        self.add_group(group)
        self.timer(group.deadline, "group", group.id)
        self._out.append(e.MakeGroup(group.id, pool, bundles, nodes, strategy, now + MAKE_GROUP_S))
        return group

    def _leave(self, task: Task, group: Group, now: float) -> None:
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
                    self.candidate(self.tasks[name])
            if others:
                self._next_turn(group, now)
            return
        if group.stand is Stand.broken:
            self._standing_to_removing(group, now)
        elif group.stand is Stand.standing:
            self._idle_or_remove(group, now, keep=task.keep_slot)

    def _idle_or_remove(self, group: Group, now: float, keep: bool = True) -> None:
        """Nobody is in the group: keep it for the next, or remove it."""
        pool = self.pools[group.pool]
        wanted = any(group.id in claim.groups for claim in self.claims.values())
        if group.kind is Kind.reserved:
            if keep and not pool.dropped:
                return
            if group.spec_index is not None:
                pool.retired.append(group.spec_index)
            self._standing_to_removing(group, now)
        elif keep and pool.spec.reuse and not pool.dropped and not wanted and self.usable(group):
            self.set_idle(group, True)
        else:
            self._standing_to_removing(group, now)

    def _standing_to_removing(self, group: Group, now: float) -> None:
        self.set_idle(group, False)
        group.stand = Stand.removing
        self._issue_remove(group, now)

    def _issue_remove(self, group: Group, now: float) -> None:
        group.deadline = now + REMOVE_GROUP_S
        self.timer(group.deadline, "group", group.id)
        self._out.append(e.RemoveGroup(group.id))

    def _gone(self, group: Group, now: float) -> None:
        """Nothing of the group is left."""
        self.drop_group(group)
        self._claims_hear(now, group=group)
        self._forget_pool(group.pool)
        self._freed()

    def _break(self, group: Group, reason: Reason, now: float) -> None:
        """Part of the group is lost: whoever is in it stops, and then it is removed."""
        if group.stand is Stand.removing:
            return
        group.stand, group.deadline = Stand.broken, None
        for claim in [claim for claim in self.claims.values() if claim.group == group.id]:
            self._drop_claim(claim, now, requeue=True)
        for name in list(group.tenants):
            task = self.tasks[name]
            if task.state in (State.starting, State.running, State.parked):
                self._to_cancelling(task, After.again, reason, now, tell=False)
            elif task.state in IN_QUEUE:
                group.tenants.remove(name)
                task.shares = None
                self._enqueue(task)
        if not group.tenants and group.stand is Stand.broken:
            self._standing_to_removing(group, now)

    def _send_back(self, group: Group, reason: Reason, now: float) -> None:
        """The group will not stand: its tenants wait again."""
        for name in list(group.tenants):
            task = self.tasks[name]
            group.tenants.remove(name)
            if task.state is State.starting:
                self.candidates.drop(name)
                self.use(task, ())
                task.places, task.borrowed = (), False
                group.active = None
                self._back_off(task, BACK_OFF_S, now)
                self._to_queue(task, State.waiting, reason, now)
            elif task.state in IN_QUEUE:
                task.shares = None
                self._enqueue(task)

    def _forget_pool(self, name: str) -> None:
        """A pool that was dropped is forgotten once nothing of it is left."""
        pool = self.pools[name]
        if not pool.dropped or self.shelves[name].groups:
            return
        if any(task.spec.pool == name and task.state not in ENDED for task in self.tasks.values()):
            return
        del self.pools[name], self.shelves[name]

    # ---- what can be asked -----------------------------------------------------------------------------------------

    def _known_node(self, name: str) -> None:
        if name not in self.nodes:
            raise InputError(f"there is no node {name}", hint="nodes: " + (", ".join(self.nodes) or "none"))

    def _current(self, name: str, attempt: int) -> Task | None:
        """The task, if the news is of the start that is on now."""
        task = self.tasks.get(name)
        return task if task is not None and task.attempt == attempt and task.places else None

    # ---- what can be asked -----------------------------------------------------------------------------------------

    def would_evict(self, spec: TaskSpec, now: float) -> Choice:
        """Who would leave if the task were submitted now: nothing is changed."""
        room.check_submission(self, spec)
        task = Task(spec, self.seq + 1, now, State.waiting, Reason(Code.queued, "asked only"), now, None)
        if room.never(self, spec) is not None or self.pools[spec.pool].drained:
            return Choice()
        spot = room.spot(self, task)
        if isinstance(spot, Spot):
            return Choice(spot.nodes, spot.group)
        return room.choose(self, task, now)

    def explain(self, name: str, now: float) -> Explanation:
        """Why a task is where it is, and what would have to happen."""
        return telling.explain(self, name, now)

    def story(self, name: str) -> tuple[Chapter, ...]:
        """The history of a task or a node."""
        return telling.story(self, name)

    def pool_view(self, name: str) -> telling.PoolView:
        """A pool as people and programs see it."""
        return telling.pool_view(self, name)

    def totals(self) -> telling.Totals:
        """All pools together."""
        return telling.totals(self)

    def queue(self, pool: str | None = None) -> list[str]:
        """Waiting tasks in the order they are looked at."""
        return list(self.waiting.in_order(pool))

    def warm_targets(self) -> dict[str, dict[tuple[str, ...], int]]:
        """How many warm hosts each node is to keep, by what they import ahead."""
        return telling.warm_targets(self)

    def outstanding(self) -> list[e.Instruction]:
        """All that has been instructed and not answered, to be carried out again by a driver that comes back."""
        return telling.outstanding(self, START_GRACE_S)


def _eviction_reason(code: Code, victim: Task, by: Task) -> Reason:
    gap = f"priority {by.spec.priority:g} against {victim.spec.priority:g}"
    why = {
        Code.label_rule: f"a label rule allows it, {gap}",
        Code.priority: f"{gap} in the same pool",
        Code.cross_pool: f"pool {by.spec.pool} may take from pool {victim.spec.pool}, {gap}",
        Code.owner_returned: "it had borrowed a reserved slot",
    }[code]
    return Reason(code, f"makes room for {by.id}: {why}")


def _difference(known: PoolSpec, asked: PoolSpec) -> str:
    fields = [
        name for name in encode(known).keys() | encode(asked).keys() if getattr(known, name) != getattr(asked, name)
    ]
    return ", ".join(
        f"{name} is {_said(getattr(known, name))}, not {_said(getattr(asked, name))}" for name in sorted(fields)
    )


def _said(value: object) -> str:
    return "[" + ", ".join(str(one) for one in value) + "]" if isinstance(value, tuple) else str(value)


_SNAKE: dict[str, str] = {}


def _snake(name: str) -> str:
    known = _SNAKE.get(name)
    if known is None:
        known = _SNAKE[name] = "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
    return known
