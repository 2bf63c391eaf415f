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
import math
from dataclasses import replace
from typing import Any

from trimtab.core.codec import encode
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, add_chapter
from trimtab.core.resources import NOTHING
from trimtab.machines.pool import events as e
from trimtab.machines.pool import explain as telling
from trimtab.machines.pool import feasibility as room
from trimtab.machines.pool.feasibility import Assignment
from trimtab.machines.pool.preemption import PreemptionPlan
from trimtab.machines.pool.queue import ClassQueue
from trimtab.machines.pool.queueing_hints import HintLog, Unschedulable
from trimtab.machines.pool.records import PgState, PlacementGroup, PlacementGroupKind, PoolRecord, PoolTask, StopOutcome
from trimtab.machines.pool.state import StarvationReserve
from trimtab.machines.pool.transitions import (
    BACK_OFF_S,
    ENDED_KEPT,
    MAKE_GROUP_S,
    START_GRACE_S,
    TURN_S,
    TaskTransitions,
)
from trimtab.model.pool import ENDED, IN_QUEUE, PoolSpec, TaskExplanation, TaskSpec, TaskState


class PoolMachine(TaskTransitions):
    """Pools, tasks and slots. Events in, instructions out."""

    @classmethod
    def load(cls, data: dict[str, Any]) -> PoolMachine:
        """A machine that goes on from a snapshot."""
        machine = cls()
        machine.read(data)
        if "gains" not in data:  # written before verdicts were: everybody is looked at
            machine._freed()
            return machine
        machine.gains = HintLog(data["gains"])
        machine._kept = [StarvationReserve.of(one) for one in data["kept"]]
        machine._blocked = {machine.waiting.line_of(name): Unschedulable(*verdict) for name, verdict in data["blocked"]}
        return machine

    def dump(self) -> dict[str, Any]:
        """All that is remembered, as plain data: the records, and the verdicts of the last look.

        Verdicts say who is passed over until something is gained, and follow from no record: they are of the moment
        when somebody was looked at. Without them a machine read from this would look at others than the one that goes
        on, and tell other reasons and deadlines; and a controller's snapshots are written by another process that
        replays its journal, while it goes on with its own.
        """
        blocked = [(line, verdict) for line, verdict in self._blocked.items() if line.entries]
        begin = min((verdict.since for _, verdict in blocked), default=self.gains.position)
        return {
            **super().dump(),
            "gains": [list(one) for one in self.gains.entries(begin)],
            "kept": [one.plain() for one in self._kept],
            "blocked": sorted(
                [line.entries[0][2], list(verdict._replace(since=verdict.since - begin))] for line, verdict in blocked
            ),
        }

    def check(self) -> None:
        """Verify every invariant, also that nobody who is passed over could start; raises AssertionError."""
        super().check()
        for line, verdict in self._blocked.items():
            if not line.entries or verdict.kept or verdict.timed or self._helped(line, verdict):
                continue
            task = self.tasks[line.entries[0][2]]
            starts = not self.pools[task.spec.pool].drained and isinstance(room.spot(self, task), Assignment)
            assert not starts, f"{task.id} waits, and there is room for it"

    # ---- the door --------------------------------------------------------------------------------------------------

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
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
        self.add_pool(PoolRecord(spec))
        self._freed()

    def _on_quota_set(self, event: e.QuotaSet, now: float) -> None:
        pool = room.known_pool(self, event.pool)
        pool.spec = replace(pool.spec, quota=event.quota)  # refused where its reserved slots are more than that
        self.ledger.set_quota(event.pool, event.quota)
        pool.lowered = bool((self.ledger.quota_left(event.pool) < 0).any())
        self._freed()

    def _on_pool_drained(self, event: e.PoolDrained, now: float) -> None:
        room.known_pool(self, event.pool).drained = event.on
        self._freed()

    def _on_pool_dropped(self, event: e.PoolDropped, now: float) -> None:
        pool = room.known_pool(self, event.pool)
        pool.dropped = pool.drained = True
        reason = Reason(ReasonCode.pool_dropped, f"pool {event.pool} was removed")
        for task in [task for task in self.tasks.values() if task.spec.pool == event.pool]:
            if task.state not in ENDED:
                self._end(task, StopOutcome.cancelled, reason, now, keep_slot=False)
        for group in list(self.shelves[event.pool].groups.values()):
            if group.idle:
                self._standing_to_removing(group, now)
        self._forget_pool(event.pool)
        self._freed()

    def _on_policy_set(self, event: e.PolicySet, now: float) -> None:
        self.policy = event.policy
        self._freed()

    def _on_task_submitted(self, event: e.TaskSubmitted, now: float) -> None:
        spec = event.spec
        room.check_submission(self, spec)
        self.seq += 1
        before = self.tasks.pop(spec.id, None)
        if before is not None:
            self.ended.remove(spec.id)
        pool = self.pools[spec.pool]
        wait_s = pool.spec.wait_s if spec.wait_s is None else spec.wait_s
        queued = Reason(ReasonCode.queued, "just submitted")
        task = PoolTask(spec, self.seq, now, TaskState.waiting, queued, now, now + wait_s, shares=spec.shares)
        # Late news of an earlier task of this id must not be taken for news of this one.
        task.attempt = before.attempt if before is not None else 0
        self.tasks[spec.id] = task
        self._write(task, task.state.value, queued, now)
        never = room.never(self, spec)
        if never is not None:
            self._to_ended(task, TaskState.failed, Reason(ReasonCode.never_fits, never), now)
            return
        self.timer(task.deadline, "task", spec.id)
        if spec.shares is not None:
            self._join_slots(task, now)
        else:
            self._enqueue(task)

    def _on_complete_requested(self, event: e.CompleteRequested, now: float) -> None:
        task = room.known_task(self, event.task)
        if task.state in ENDED:
            return
        after = StopOutcome.done if task.holds or task.evictions or task.losses else StopOutcome.cancelled
        reason = Reason(ReasonCode.completed, "said to be complete")
        self._end(task, after, reason, now, keep_slot=event.keep_slot, tell=False)

    def _on_cancel_requested(self, event: e.CancelRequested, now: float) -> None:
        task = room.known_task(self, event.task)
        if task.state in ENDED:
            return
        sentence = (
            "the client that submitted it is gone" if event.code is ReasonCode.client_died else "cancelled on request"
        )
        self._end(task, StopOutcome.cancelled, Reason(event.code, sentence), now, keep_slot=event.keep_slot)

    def _on_evict_requested(self, event: e.EvictRequested, now: float) -> None:
        task = room.known_task(self, event.task)
        if task.state not in (TaskState.running, TaskState.starting, TaskState.parked):
            raise InputError(f"task {event.task} is {task.state.value}", hint="only a task that runs can be evicted")
        self._evict(task, None, Reason(ReasonCode.by_hand, "evicted on request"), now)
        self._freed()

    def _on_turn_requested(self, event: e.TurnRequested, now: float) -> None:
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

    def _on_node_drained(self, event: e.NodeDrained, now: float) -> None:
        self._known_node(event.node)
        self.ledger.cordon(event.node, True)
        reason = Reason(ReasonCode.node_draining, f"node {room.short(event.node)} will go: {event.why}")
        for claim in [claim for claim in self.claims.values() if event.node in claim.nodes]:
            self._drop_claim(claim, now, requeue=True)
        hit = [group for group in self.groups.values() if event.node in group.nodes]
        for group in hit:
            self.set_idle(group, False)
            self._break(group, reason, now, evict=True)
        self._tell_node(event.node, now, "emptied", f"{event.why}; {len(hit)} placement groups were on it")
        self._freed()

    def _on_node_lost(self, event: e.NodeLost, now: float) -> None:
        if event.node not in self.nodes:
            return
        del self.nodes[event.node]
        self.node_epoch += 1
        self.changed_nodes.discard(event.node)
        reason = Reason(ReasonCode.node_lost, f"node {room.short(event.node)} was lost{event.why and ': '}{event.why}")
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
        self._tell_node(
            event.node, now, "lost", f"{event.why}{event.why and '; '}{len(hit)} placement groups were on it"
        )
        self._freed()

    def _tell_node(self, node: str, now: float, what: str, sentence: str) -> None:
        story = self.node_stories.setdefault(node, [])
        add_chapter(story, StoryEntry(now, what, Reason(_NODE_CODES[what], sentence or what)))
        if len(self.node_stories) > ENDED_KEPT:
            del self.node_stories[next(iter(self.node_stories))]

    # ---- news of groups --------------------------------------------------------------------------------------------

    def _on_placement_group_ready(self, event: e.PlacementGroupReady, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stand is not PgState.making:
            return
        self._making_to_standing(group, now)

    def _on_placement_group_failed(self, event: e.PlacementGroupFailed, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stand is not PgState.making:
            return
        reason = Reason(ReasonCode.back_off, f"its placement group could not be made: {event.why}")
        self._gone(group, now)
        pool = self.pools[group.pool]
        if group.kind is PlacementGroupKind.reserved:
            pool.not_before = now + BACK_OFF_S * 4
            self.recheck(pool.not_before)
        self._send_back(group, reason, now)

    def _on_placement_group_removed(self, event: e.PlacementGroupRemoved, now: float) -> None:
        group = self.groups.get(event.group)
        if group is not None and group.stand is PgState.removing:
            self.pools[group.pool].destroyed_count += 1
            self._gone(group, now)

    def _on_placement_group_lost(self, event: e.PlacementGroupLost, now: float) -> None:
        group = self.groups.get(event.group)
        if group is None or group.stand not in (PgState.making, PgState.standing):
            return
        self.set_idle(group, False)
        self._break(group, Reason(ReasonCode.slot_lost, f"its placement group was lost: {event.why}"), now)
        self._freed()

    # ---- news of tasks ---------------------------------------------------------------------------------------------

    def _on_task_started(self, event: e.TaskStarted, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not TaskState.starting or not task.started:
            return
        task.how = event.how
        task.started_at = now
        self._to(task, TaskState.running, task.reason, now, None)
        self.candidate(task)
        group = self.groups[task.places[0].group]
        if group.turns:
            self._next_turn(group, now)

    def _on_task_start_failed(self, event: e.TaskStartFailed, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (TaskState.starting, TaskState.cancelling) or not task.started:
            return
        if task.state is TaskState.starting:
            reason = Reason(ReasonCode.start_timeout if event.timed_out else ReasonCode.start_failed, event.why)
            self._set_after(task, StopOutcome.failed if event.fatal else StopOutcome.again, reason)
        self._stopped(task, now)

    def _on_task_ended(self, event: e.TaskEnded, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None:
            return
        if event.error is None:
            after, reason = StopOutcome.done, Reason(ReasonCode.completed, "its work is done")
        else:
            after, reason = StopOutcome.failed, Reason(ReasonCode.raised, event.error)
        if task.state in (TaskState.starting, TaskState.running, TaskState.parked):
            self._to_cancelling(task, after, reason, now, tell=False)
        elif task.state is TaskState.cancelling and task.after is StopOutcome.again:
            self._set_after(task, after, reason)
        # One that was told to leave may return early from its work: that is not its end.

    def _on_task_died(self, event: e.TaskDied, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state not in (TaskState.starting, TaskState.running, TaskState.parked):
            return
        code = ReasonCode.gang_broken if task.spec.gang else ReasonCode.process_died
        self._to_cancelling(task, StopOutcome.again, Reason(code, event.why), now, tell=False)

    def _on_task_stopped(self, event: e.TaskStopped, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.state is not TaskState.cancelling:
            return
        task.saved = task.saved or event.saved
        if event.cancel in ("raised", "timed out") or event.note:
            note = f"cancel() {event.cancel}" + (f"; {event.note}" if event.note else "")
            self._write(task, "stopped", Reason(task.reason.code, note), now)
        self._stopped(task, now)

    def _on_task_parked(self, event: e.TaskParked, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "parking":
            return
        group = self.groups[task.places[0].group]
        task.moving = None
        self.use(task, task.spec.residual or (NOTHING,) * len(task.spec.bundles))
        self._to(task, TaskState.parked, Reason(ReasonCode.turn, "another tenant of its slot has its turn"), now, None)
        self.candidate(task)
        group.active = None
        self._next_turn(group, now)
        self._freed()

    def _on_task_unparked(self, event: e.TaskUnparked, now: float) -> None:
        task = self._current(event.task, event.attempt)
        if task is None or task.moving != "unparking":
            return
        task.moving = None
        self._to(task, TaskState.running, Reason(ReasonCode.turn, "it has its turn"), now, None)
        self.candidate(task)
        self._next_turn(self.groups[task.places[0].group], now)

    def _on_state_recovered(self, event: e.StateRecovered, now: float) -> None:
        for spec in event.pools:
            if spec.name not in self.pools:
                self.add_pool(PoolRecord(spec))
        for found in event.tasks:
            if room.can_be_taken_up(self, found):
                self._to_found(found, now)
        self._freed()

    def _on_pool_tick(self, event: e.PoolTick, now: float) -> None:
        due = []
        while self.timers and self.timers[0][0] <= now:
            due.append(heapq.heappop(self.timers))
        waiting: list[tuple[float, PoolTask]] = []
        for at, kind, name in due:
            if kind == "recheck":
                self.rechecks.discard(at)
                self._freed()
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
            # Before anybody who waits is given up, whoever can start does: time may have leapt.
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
            self._to_cancelling(task, StopOutcome.again, reason, now, tell=False)
        elif task.state is TaskState.cancelling:
            task.tell_s = task.save_s = 0.0
            self._issue_stop(task, now)
        elif task.moving is not None:
            reason = Reason(ReasonCode.process_died, f"{task.moving} took more than {TURN_S:g} s")
            self._to_cancelling(task, StopOutcome.again, reason, now, tell=False)

    def _group_overdue(self, group: PlacementGroup, now: float) -> None:
        if group.stand is PgState.making:
            reason = Reason(ReasonCode.back_off, f"its placement group was not ready within {MAKE_GROUP_S:g} s")
            self._send_back(group, reason, now)
            self._standing_to_removing(group, now)
        elif group.stand is PgState.removing:
            self._issue_remove(group, now)

    # ---- the queue -------------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> None:
        """Start whoever can start, in the order of the queue."""
        self._no_spot.clear()
        self._no_choice.clear()
        self._dirty = True
        while self._dirty:  # what is given up on the way (a refused task) may free something
            self._dirty = False
            self._make_reserved(now)
            if self._settled():
                continue
            seen = self.gains.position
            self._look(now)
            if not self._dirty:
                self.gains.forget(seen)

    def _settled(self) -> bool:
        """Whether nobody who waits could start, without another look."""
        for line in self.waiting.lines():
            verdict = self._blocked.get(line)
            if verdict is None:
                return False
            gains = self.gains.since(verdict.since)
            if gains.room or room.could_help(self, line, verdict, gains):
                return False
        return True

    def _look(self, now: float) -> None:
        """Look once at the first of every line, and at those behind one who starts."""
        patient: dict[
            str, StarvationReserve
        ] = {}  # by pool: what is kept for its first waiter, while all are looked at
        waits: list[tuple[PoolTask, Reason]] = []
        passed: list[tuple[PoolTask, ClassQueue, Unschedulable]] = []  # whom nothing could help beside what was kept
        before, self._blocked = self._blocked, {}
        covered = 0  # of those who were patient at the last look, so many have as much kept for them as then
        heap = self.waiting.heads()
        while heap:
            entry, line = heapq.heappop(heap)
            task = self.tasks[entry[2]]
            verdict = before.get(line) if task.not_before <= now else None
            if verdict is None or verdict.kept > covered or self._helped(line, verdict):
                following = self.waiting.after(line, entry)
                verdict = self._verdict(line, task, waits, now) if task.not_before <= now else None
                if verdict is None:
                    if following is not None:
                        heapq.heappush(heap, (following, line))
                    continue
            elif patient and task.reason.code is not ReasonCode.behind:
                passed.append((task, line, verdict))
            if line.entries[0] is entry:  # nobody who came back meanwhile is before it
                self._blocked[line] = Unschedulable(
                    self.gains.position, verdict.quota_alone, verdict.timed, len(patient)
                )
            if self._be_patient(task, patient, now):
                covered = self._covered(patient)
        for kept in patient.values():
            self.give_back(kept)
        if patient:
            # Some failed for room that was kept only until now.
            self._no_spot.clear()
            self._no_choice.clear()
            waits += [(task, task.reason) for task, line, verdict in passed if self._helped(line, verdict)]
            waits = self._behind(waits)
            self._blocked = {line: verdict for line, verdict in self._blocked.items() if not verdict.timed}
        self._kept = list(patient.values())
        for task, reason in waits:
            if task.id in self.waiting:
                self._wait(task, reason, now)

    def _helped(self, line: ClassQueue, verdict: Unschedulable) -> bool:
        """Whether those of the line might find room with what was gained since none of them did."""
        return room.could_help(self, line, verdict, self.gains.since(verdict.since))

    def _verdict(
        self, line: ClassQueue, task: PoolTask, waits: list[tuple[PoolTask, Reason]], now: float
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
        return Unschedulable(0, reason.code is ReasonCode.quota and room.quota_alone(self, line), self._timed, 0)

    def _covered(self, patient: dict[str, StarvationReserve]) -> int:
        for at, kept in enumerate(self._kept):
            if kept.pool not in patient or not patient[kept.pool].covers(kept):
                return at
        return len(self._kept)

    def _be_patient(self, task: PoolTask, patient: dict[str, StarvationReserve], now: float) -> bool:
        """One who has waited too long has what is free kept for it, while those behind it are looked at."""
        pool = self.pools[task.spec.pool]
        overdue = now - task.since >= pool.patience_s and task.spec.pool not in patient and not pool.drained
        if not overdue or not room.would_fit_alone(self, task.spec):
            return False
        patient[task.spec.pool] = kept = room.to_keep(self, task)
        self.hold_back(kept)
        return True

    def _behind(self, waits: list[tuple[PoolTask, Reason]]) -> list[tuple[PoolTask, Reason]]:
        """With room kept for the patient: whoever would find some otherwise says so."""
        kept = Reason(ReasonCode.behind, "there is room, kept for one who has waited longer")
        found: dict[tuple[object, ...], bool] = {}
        said = []
        for task, reason in waits:
            alike = room.alike(self, task.spec)
            if alike not in found:
                found[alike] = isinstance(room.spot(self, task), Assignment)
            said.append((task, kept if found[alike] else reason))
        return said

    def _try(self, task: PoolTask, now: float) -> Reason | None:
        """Start the task, or begin to make room for it; else why it waits."""
        pool = self.pools[task.spec.pool]
        if pool.drained:
            return Reason(ReasonCode.drained, f"pool {pool.spec.name} takes nothing new")
        alike = room.alike(self, task.spec)
        spot = self._no_spot.get(alike) or room.spot(self, task)
        if isinstance(spot, Assignment):
            self.waiting.remove(task.id)
            self._to_starting(task, spot, now)
            return None
        if spot.code is ReasonCode.quota and not task.spec.over_quota_waits and not task.came_back:
            self._end(task, StopOutcome.failed, Reason(ReasonCode.refused, spot.sentence), now)
            return None
        self._no_spot[alike] = spot
        rest = (*alike[:4], alike[5], task.spec.labels, self.may_evict(task), task.evictions > 0)
        if task.spec.priority <= self._no_choice.get(rest, -math.inf):
            return spot  # one who may have more people leave found nobody
        choice = room.choose(self, task, now)
        if choice.found:
            self._claim(task, choice, now)
            return None
        if choice.again_at is not None:
            self._timed = True
            self.recheck(choice.again_at)
        else:
            self._no_choice[rest] = max(task.spec.priority, self._no_choice.get(rest, -math.inf))
        return spot

    def _known_node(self, name: str) -> None:
        if name not in self.nodes:
            raise InputError(f"there is no node {name}", hint="nodes: " + (", ".join(self.nodes) or "none"))

    def _current(self, name: str, attempt: int) -> PoolTask | None:
        """The task, if the news is of the start that is on now."""
        task = self.tasks.get(name)
        return task if task is not None and task.attempt == attempt and task.places else None

    # ---- what can be asked -----------------------------------------------------------------------------------------

    def would_evict(self, spec: TaskSpec, now: float) -> PreemptionPlan:
        """Who would leave if the task were submitted now: nothing is changed."""
        room.check_submission(self, spec)
        task = PoolTask(spec, self.seq + 1, now, TaskState.waiting, Reason(ReasonCode.queued, "asked only"), now, None)
        if room.never(self, spec) is not None or self.pools[spec.pool].drained:
            return PreemptionPlan()
        spot = room.spot(self, task)
        if isinstance(spot, Assignment):
            return PreemptionPlan(spot.nodes, spot.group)
        return room.choose(self, task, now)

    def explain(self, name: str, now: float) -> TaskExplanation:
        """Why a task is where it is, and what would have to happen."""
        return telling.explain(self, name, now)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """The history of a task or a node."""
        return telling.story(self, name)

    def pool_view(self, name: str) -> telling.PoolView:
        """A pool as people and programs see it."""
        return telling.pool_view(self, name)

    def totals(self) -> telling.PoolTotals:
        """All pools together."""
        return telling.totals(self)

    def queue(self, pool: str | None = None) -> list[str]:
        """Waiting tasks in the order they are looked at."""
        return list(self.waiting.in_order(pool))

    def warm_targets(self) -> dict[str, dict[str, int]]:
        """How many warm hosts each node is to keep, by pool."""
        return telling.warm_targets(self)

    def outstanding(self) -> list[e.PoolInstruction]:
        """All that has been instructed and not answered, to be carried out again by a driver that comes back."""
        return telling.outstanding(self, START_GRACE_S)


def _difference(known: PoolSpec, asked: PoolSpec) -> str:
    fields = [
        name for name in encode(known).keys() | encode(asked).keys() if getattr(known, name) != getattr(asked, name)
    ]
    return ", ".join(
        f"{name} is {_said(getattr(known, name))}, not {_said(getattr(asked, name))}" for name in sorted(fields)
    )


def _said(value: object) -> str:
    return "[" + ", ".join(str(one) for one in value) + "]" if isinstance(value, tuple) else str(value)


_NODE_CODES = {
    "joined": ReasonCode.joined,
    "cordoned": ReasonCode.by_hand,
    "open": ReasonCode.by_hand,
    "emptied": ReasonCode.node_draining,
    "lost": ReasonCode.node_lost,
}
_SNAKE: dict[str, str] = {}


def _snake(name: str) -> str:
    known = _SNAKE.get(name)
    if known is None:
        known = _SNAKE[name] = "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
    return known
