"""The elastic group machine: group size, ranks, and when a step runs, is interrupted, redone or waited for.

`handle(event, now)` is the only entry point; it reads no clock, and the same events give the same instructions.

The transition that must not exist is stepping to entering: a world never changes during a step. Ranks, the split of a
batch and the reduction belong to the world that a step started with; otherwise a step would be half of one world and
half of another, and would count once, twice or not at all. So newcomers and leavers wait for the boundary. Where that
is impossible (a loss, or a drain whose deadline comes first) the step is interrupted, and redone whole in the next
world.

What must never happen besides: a step below the minimum number of members (the group reports that it waits, and until
when); a wait without a deadline; a leaver ended before another member has its state, if any member can take it.

A leaver goes at the first boundary that leaves enough members. Otherwise it works on until its node's deadline minus
the handover time; after that no step starts with it, and a running one is interrupted. If there are still too few
members, the group waits with the leaver alive, as the source of the state for newcomers.
"""

from __future__ import annotations

from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.dispatch import handlers_of
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.elastic import events as e
from trimtab.machines.elastic.members import FATAL_WEIGHT, GRACE_S, MemberTransitions
from trimtab.machines.elastic.state import LIVE, OVER, ElasticMember, ElasticPhase, group_view
from trimtab.machines.nodes.state import display_name
from trimtab.model.nodes import MemberState, NodeState, World

INTERRUPT_TIMEOUT_S = 30.0  # until an unconfirmed InterruptStep is issued again
MAX_FAILED_ATTEMPTS = 6  # in a row, without a known cause


class ElasticMachine(MemberTransitions):
    """An elastic group. Events in, instructions out."""

    # ---- entry point ------------------------------------------------------------------------------------------------

    def handle(self, event: e.ElasticEvent, now: float) -> list[e.ElasticInstruction]:
        """The instructions that follow. Raises InputError for an invalid request, with nothing changed."""
        now = max(float(now), self.now)
        self._out = []
        _HANDLERS[type(event)](self, event, now)
        self.now = now
        if self.phase not in OVER:
            self._settle(now)
        return self._out if self.phase is not ElasticPhase.closed or isinstance(event, e.GroupClosed) else []

    def _settle(self, now: float) -> None:
        """What follows from the current state, whatever the event was."""
        self._ready_to_gone_with_nodes(now)
        self._fill(now)
        if self.fatal and not self.ever_started and not any(member.stop_by is None for member in self.members.values()):
            self._give_up(Reason(ReasonCode.start_failed, f"no member could be started: {self.fatal}"), now)
        elif self.phase is ElasticPhase.stepping:
            self._interrupt_if_needed(now)
        elif self.phase is ElasticPhase.waiting or (self.phase is ElasticPhase.idle and self._leaving()):
            # Between two steps leavers do not wait for the next one.
            self._advance(now)

    def next_deadline(self) -> float | None:
        """When an ElasticTick is due at the latest."""
        if self.phase in OVER:
            return None
        dues = [self._replace_due()]
        if self.deadline is not None:
            dues.append(self.deadline + (GRACE_S if self.interrupting is None else 0.0))
        if self.phase is ElasticPhase.waiting:
            dues.append(self.wait_deadline)
        if self.retry_at > self.now:
            dues.append(self.retry_at)
        for member in self.members.values():
            dues += [member.health_due if member.health_by is None else member.health_by, member.stop_by]
            dues.append(member.leave_by if member.leave_by is not None and member.leave_by > self.now else None)
        return min((due for due in dues if due is not None), default=None)

    # ---- events of nodes and members --------------------------------------------------------------------------------

    def _on_nodes_changed(self, event: e.NodesChanged, now: float) -> None:
        before = {node.node: display_name(node.node, node.facts) for node in self.nodes}
        self.nodes, self.nodes_known, self.change = event.nodes, True, max(self.change, event.change)
        there = {node.node: node for node in event.nodes}
        for member in [member for member in self._in_state(*LIVE) if member.node]:
            node = there.get(member.node)
            if node is None and (member.node in before or member.state is not MemberState.ready):
                # Its process may still run unseen: it is stopped as well.
                name = before.get(member.node, display_name(member.node, None))
                self._to_lost(member, Reason(ReasonCode.node_lost, f"node {name} is gone"), now, end=True)
            elif node is not None and node.state is NodeState.draining:
                self._to_leaving(member, self._draining(member.node), node.deadline, now)
            elif node is not None and any(cause.reason.code is ReasonCode.node_draining for cause in member.causes):
                sentence = f"node {self._node_name(member.node)} stays after all"
                self._leaving_to_staying(member, ReasonCode.node_draining, Reason(ReasonCode.drain_over, sentence), now)
        self._forgive_node_losses(before.keys() - there.keys())

    def _on_member_pending(self, event: e.MemberPending, now: float) -> None:
        member = self._live_member(event.member)
        if member is None:
            return
        if member.state is MemberState.pending:
            if member.reason.code is not event.reason.code:
                self._to(member, MemberState.pending, event.reason, now)
            member.reason = event.reason
        elif member.state is MemberState.leaving and not self._irreplaceable(member):
            self._left_world(member, event.reason)
            self._to_gone(member, event.reason, now, end=True)
        else:
            self._back_to_pending(member, event.reason, now)

    def _on_member_started(self, event: e.MemberStarted, now: float) -> None:
        member = self._live_member(event.member)
        if member is None or member.node == event.node:
            return
        if member.state is not MemberState.pending:
            sentence = f"it was started again on node {self._node_name(event.node)}"
            self._back_to_pending(member, Reason(ReasonCode.process_died, sentence), now)
        self._pending_to_ready(member, event.node, now)

    def _on_member_lost(self, event: e.MemberLost, now: float) -> None:
        member = self.members.get(event.member)
        if member is None:
            return
        if member.state is MemberState.gone:
            self._gone_to_forgotten(member)
            return
        if event.fatal:
            self.fatal = event.why
        code = ReasonCode.start_failed if event.fatal else ReasonCode.process_died
        weight = FATAL_WEIGHT if event.fatal else 1
        self._to_lost(member, Reason(code, event.why), now, end=False, weight=weight)

    def _on_member_left(self, event: e.MemberLeft, now: float) -> None:
        member = self.members.get(event.member)
        if member is not None and member.state is MemberState.gone:
            self._gone_to_forgotten(member)
        elif member is not None:
            self._to_lost(member, Reason(ReasonCode.process_died, "it ended without being stopped"), now, end=False)

    def _on_member_preempted(self, event: e.MemberPreempted, now: float) -> None:
        member = self._live_member(event.member)
        if member is not None:
            self._to_leaving(member, event.reason, now + max(0.0, event.within_s), now)

    def _on_health_checked(self, event: e.HealthChecked, now: float) -> None:
        member = self._live_member(event.member)
        if member is None or member.state is MemberState.pending:
            return
        if event.fault is not None:
            self._unhealthy(member, event.fault, now)
        elif member.health_by is not None:
            member.health_by = None
            member.health_due = now + self.spec.health_every_s if member.state is not MemberState.leaving else None

    def _live_member(self, name: str) -> ElasticMember | None:
        """The member unless it is gone: late events of gone members change nothing."""
        member = self.members.get(name)
        return member if member is not None and member.state is not MemberState.gone else None

    # ---- events of steps --------------------------------------------------------------------------------------------

    def _on_step_boundary(self, event: e.StepBoundary, now: float) -> None:
        if not event.wanted:
            self._withdraw()
            return
        if self.phase is ElasticPhase.stepping or self.phase in OVER:
            return
        if self.epoch == 0 and not self.wants_step:
            self.step = event.step  # training continues where an earlier run ended
        elif event.step != self.step:
            raise InputError(f"group {self.spec.name} has completed {self.step} steps, not {event.step}")
        self.wants_step = True
        if self.phase is ElasticPhase.idle:
            self.phase = ElasticPhase.waiting

    def _withdraw(self) -> None:
        """The requested step is not wanted any more; no member has committed it."""
        if self.phase in OVER:
            return
        self.wants_step = self.redo = False
        if self.phase is ElasticPhase.stepping:
            self._stepping_to(ElasticPhase.idle)
        elif self.phase is ElasticPhase.waiting:
            self.phase = ElasticPhase.idle
        self._clear_wait()

    def _on_world_entered(self, event: e.WorldEntered, now: float) -> None:
        if self.next_world is None or event.epoch != self.epoch:
            return
        world, leavers = self.next_world, self.leavers
        self.world, self.departed = world, [entry for entry in self.departed if entry[0] in world.members]
        self._entering_to(ElasticPhase.waiting if self.wants_step else ElasticPhase.idle)
        self._clear_wait()
        for name in world.members:
            member = self._live_member(name)
            if member is not None and member.state is MemberState.ready:
                self._ready_to_working(member, now)
            if member is not None and member.state is not MemberState.pending:
                member.step = self.step
        for name in leavers:
            member = self._live_member(name)
            if member is not None:
                self._leaving_to_gone(member, now)
        self._record(self.spec.name, f"world {world.epoch} of {world.size}", world.reason, now)
        if self.wants_step and not self._broken() and not self._overdue_leavers(now):
            # Later newcomers enter at the next boundary: a trickle of them must not delay every step.
            self._waiting_to_stepping(now)

    def _on_world_failed(self, event: e.WorldFailed, now: float) -> None:
        if self.next_world is None or event.epoch != self.epoch:
            return
        self._world_failed(event.members, event.why, now)

    def _world_failed(self, blamed: tuple[str, ...], why: str, now: float) -> None:
        assert self.next_world is not None
        known = any(self._live_member(name) is None or name in blamed for name in self.next_world.members)
        for name in blamed:
            member = self._live_member(name)
            if member is not None:
                self._to_lost(
                    member, Reason(ReasonCode.hung, f"world {self.epoch} was not entered: {why}"), now, end=True
                )
        self._entering_to(ElasticPhase.waiting if self.wants_step else ElasticPhase.idle)
        for member in self._leaving():
            if not self._ranked(member.id):  # it was about to get a rank, and to leave again
                self._leaving_to_gone(member, now)
        if not known:
            self._failed_attempt(f"world {self.epoch} could not be entered: {why}", now)

    def _entering_to(self, phase: ElasticPhase) -> None:
        self.phase, self.deadline, self.next_world, self.leavers = phase, None, None, ()

    def _on_step_done(self, event: e.StepDone, now: float) -> None:
        if self.phase is not ElasticPhase.stepping or event.step != self.step + 1:
            return
        assert self.world is not None
        self.step += 1
        self.failed_attempts = 0
        self.redo = self.wants_step = False
        self._stepping_to(ElasticPhase.idle)
        for name in self.world.members:
            member = self._live_member(name)
            if member is None or member.state is MemberState.pending:
                continue
            if member.restart_at is not None and not member.proven:
                self.rounds = 0
            member.proven, member.step = True, self.step

    def _on_step_interrupted(self, event: e.StepInterrupted, now: float) -> None:
        if self.phase is not ElasticPhase.stepping or event.step != self.step + 1:
            return
        known = self.interrupting is not None or self._broken()
        for name in event.hung:
            member = self._live_member(name)
            if member is not None:
                known = True
                self._to_lost(member, Reason(ReasonCode.hung, f"step {event.step}: {event.why}"), now, end=True)
        self.redo = True
        self._stepping_to(ElasticPhase.waiting)
        self._record(self.spec.name, "interrupted", Reason(ReasonCode.redone, f"step {event.step}: {event.why}"), now)
        if not known:
            self._failed_attempt(f"step {event.step} was interrupted: {event.why}", now)

    def _stepping_to(self, phase: ElasticPhase) -> None:
        self.phase, self.deadline, self.interrupting = phase, None, None

    def _failed_attempt(self, sentence: str, now: float) -> None:
        """A failure without a known cause: often a loss that is not reported yet."""
        self.failed_attempts += 1
        self.retry_at = now + self._back_off(self.failed_attempts)
        if self.failed_attempts >= MAX_FAILED_ATTEMPTS:
            sentence = f"{sentence}; {self.failed_attempts} times in a row, with no member at fault"
            self._give_up(Reason(ReasonCode.cap, sentence), now)

    # ---- requests, and time -----------------------------------------------------------------------------------------

    def _on_resize_requested(self, event: e.ResizeRequested, now: float) -> None:
        least, most = self.spec.min_members, self.spec.max_members
        if event.size is not None and (event.size < least or (most is not None and event.size > most)):
            limits = f"at least {least}" + (f" and at most {most}" if most is not None else "")
            raise InputError(f"group {self.spec.name} cannot have {event.size} members", hint=f"it has {limits}")
        self.requested = event.size

    def _on_group_closed(self, event: e.GroupClosed, now: float) -> None:
        reason = Reason(ReasonCode.completed, "the group ends")
        for member in self._in_state(*LIVE):
            self._to_gone(member, reason, now, end=True)
        self._over(ElasticPhase.closed, reason, now)

    def _on_elastic_tick(self, event: e.ElasticTick, now: float) -> None:
        if self.phase in OVER:
            return
        self._resend_stops(now)
        self._check_health(now)
        if self.deadline is None:
            return
        if self.phase is ElasticPhase.stepping and self.interrupting is not None and self.deadline <= now:
            self._interrupt(self.interrupting, now)
        elif self.phase is ElasticPhase.stepping and self.deadline + GRACE_S <= now:
            self._interrupt(Reason(ReasonCode.hung, f"not complete after {self.spec.step_timeout_s:g} s"), now)
        elif self.phase is ElasticPhase.entering and self.deadline + GRACE_S <= now and self.next_world is not None:
            fresh = tuple(name for name in self.next_world.members if not self._ranked(name))
            self._world_failed(fresh, f"not entered after {self.spec.step_timeout_s:g} s", now)

    # ---- progress ---------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """The next step in the same world, or the next world first, or a wait."""
        if now < self.retry_at:
            return
        stay, drop = self._next_members(now)
        if len(stay) < self.spec.min_members:
            if self.wants_step:
                self._wait(len(stay), now)
            return
        names = tuple(member.id for member in stay)
        if self.world is None or self.world.members != names or self._broken():
            self._to_entering(stay, drop, now)
        elif self.wants_step:
            self._waiting_to_stepping(now)

    def _next_members(self, now: float) -> tuple[list[ElasticMember], list[ElasticMember]]:
        """Members of the next world in rank order, and those that leave."""
        order = {node.node: at for at, node in enumerate(self.nodes)}
        usable = {node.node for node in self.nodes if node.state is NodeState.ready}
        stay = [
            member
            for member in self.members.values()
            if member.state is MemberState.working or (member.state is MemberState.ready and member.node in usable)
        ]
        leaving = self._leaving()
        can_wait = [member for member in leaving if member.leave_by is None or member.leave_by > now]
        can_wait.sort(key=lambda member: (member.leave_by is not None, -(member.leave_by or 0.0), member.number))
        stay += can_wait[: max(0, self.spec.min_members - len(stay))]
        stay.sort(key=lambda member: (order[member.node], member.number))
        return stay, [member for member in leaving if member not in stay]

    def _to_entering(self, stay: list[ElasticMember], drop: list[ElasticMember], now: float) -> None:
        newcomers = [member for member in stay if member.state is MemberState.ready]
        reason = self._world_reason(newcomers, drop)
        self.epoch += 1
        names, nodes = tuple(member.id for member in stay), tuple(member.node for member in stay)
        self.next_world = World(self.epoch, names, nodes, reason)
        self.leavers = tuple(member.id for member in drop)
        self.phase, self.deadline = ElasticPhase.entering, now + self.spec.step_timeout_s
        sources = self._sources(newcomers, stay, drop)
        self._out.append(e.EnterWorld(self.next_world, sources, self.leavers, self.deadline))

    def _sources(
        self, newcomers: list[ElasticMember], stay: list[ElasticMember], drop: list[ElasticMember]
    ) -> tuple[tuple[str, str | None], ...]:
        """The state source of each newcomer: its leaver, or the member that completed most steps.

        A member that the pool evicted and restarted has its own state; without another source it keeps it (None).
        """
        ranked = [member for member in (*stay, *drop) if member.step is not None and member not in newcomers]
        others = ranked or [member for member in self.members.values() if member.step is not None and member.node]
        best = max(others, key=lambda member: (member.step or 0, -others.index(member)), default=None)
        leavers = {member.id for member in drop if best is not None and member.step == best.step}
        sources = []
        for member in newcomers:
            source = member.replaces if member.replaces in leavers else (best.id if best is not None else None)
            sources.append((member.id, source if source != member.id else None))
        return tuple(sources)

    def _world_reason(self, newcomers: list[ElasticMember], drop: list[ElasticMember]) -> Reason:
        parts = [f"{name} is gone ({reason.sentence})" for name, reason in self.departed]
        parts += [f"{member.id} leaves ({member.reason.sentence})" for member in drop]
        parts += [f"{member.id} is new on node {self._node_name(member.node)}" for member in newcomers]
        if self.world is None:
            code = ReasonCode.began
        elif self.departed:
            code = ReasonCode.redone if self.redo else self.departed[0][1].code
        elif drop:
            code = drop[0].reason.code
        else:
            code = (
                ReasonCode.replaced if any(member.restart_at is not None for member in newcomers) else ReasonCode.grow
            )
        return Reason(code, "; ".join(parts) or "ranks follow the order of nodes")

    def _waiting_to_stepping(self, now: float) -> None:
        assert self.world is not None
        self.phase, self.deadline = ElasticPhase.stepping, now + self.spec.step_timeout_s
        self.redone_count += self.redo
        self._clear_wait()
        self._out.append(e.RunStep(self.step + 1, self.world.epoch, self.redo))

    # ---- interruptions ---------------------------------------------------------------------------------------------

    def _broken(self) -> bool:
        """Whether a member with a rank is gone."""
        if self.world is None:
            return False
        ranked = (MemberState.working, MemberState.leaving)
        return any(
            (member := self.members.get(name)) is None or member.state not in ranked for name in self.world.members
        )

    def _overdue_leavers(self, now: float) -> list[ElasticMember]:
        return [member for member in self.members.values() if member.leave_by is not None and member.leave_by <= now]

    def _interrupt_if_needed(self, now: float) -> None:
        if self.interrupting is not None:
            return
        overdue = self._overdue_leavers(now)
        if self._broken():
            name, why = (
                self.departed[-1] if self.departed else ("a member", Reason(ReasonCode.process_died, "it is gone"))
            )
            self._interrupt(Reason(why.code, f"{name} is gone: {why.sentence}"), now)
        elif overdue:
            self._interrupt(Reason(overdue[0].reason.code, f"{overdue[0].id} has to leave first"), now)

    def _interrupt(self, reason: Reason, now: float) -> None:
        self.interrupting, self.deadline = reason, now + INTERRUPT_TIMEOUT_S
        self._out.append(e.InterruptStep(self.step + 1, reason))

    # ---- waiting, and the end ---------------------------------------------------------------------------------------

    def _wait(self, there: int, now: float) -> None:
        cause = self._why_too_few(now)
        reason = Reason(
            ReasonCode.below_min, f"{there} of at least {self.spec.min_members} members are there; {cause.sentence}"
        )
        if self.wait_deadline is None:
            self.wait_deadline = now + self.spec.wait_s
        self.wait_reason = reason
        if self.wait_deadline <= now:
            waited = Reason(ReasonCode.too_late, f"waited {self.spec.wait_s:g} s, as long as it may: {reason.sentence}")
            self._give_up(waited, now)
        elif self.wait_key != cause.code.value:
            self.wait_key = cause.code.value
            self._record(self.spec.name, "waiting", reason, now)
            self._out.append(e.WaitForMembers(reason, self.wait_deadline))

    def _clear_wait(self) -> None:
        self.wait_deadline = self.wait_reason = None
        self.wait_key = ""

    def _why_too_few(self, now: float) -> Reason:
        if self.fatal and not self.ever_started:
            return Reason(ReasonCode.start_failed, self.fatal)
        if self.unreplaced and self.capped:
            return Reason(ReasonCode.cap, f"started again {len(self.restarts)} times: no more are tried for now")
        if self.unreplaced:
            return Reason(
                ReasonCode.back_off,
                f"{self.unreplaced[0].member} is replaced in {self.not_before - now:.3g} s",
            )
        pending = [member for member in self.members.values() if member.state is MemberState.pending]
        if pending:
            return Reason(pending[0].reason.code, f"{pending[0].id} is on its way ({pending[0].reason})")
        return Reason(ReasonCode.no_node, "those that run are on nodes that cannot be used now")

    def _give_up(self, reason: Reason, now: float) -> None:
        """Members stay up, so that state can still be saved; `GroupClosed` ends them."""
        if self.phase not in OVER:
            self._over(ElasticPhase.given_up, reason, now)
            self._out.append(e.FailGroup(reason))

    def _over(self, phase: ElasticPhase, reason: Reason, now: float) -> None:
        self._entering_to(phase)
        self._stepping_to(phase)
        self.wants_step = False
        self.end_reason = self.end_reason or reason
        self._record(self.spec.name, phase.value, reason, now)

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Members that have a rank and are up."""
        return sum(member.state in (MemberState.working, MemberState.leaving) for member in self.members.values())

    def view(self) -> dict[str, object]:
        return group_view(self, self.size, self.wanted)

    def dump(self) -> dict[str, Any]:
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def load(cls, data: dict[str, Any]) -> ElasticMachine:
        return decode(cls, data)

    def check(self) -> None:
        """Raise AssertionError where the machine contradicts itself."""
        self.check_members()
        in_flight = self.phase in (ElasticPhase.entering, ElasticPhase.stepping)
        assert (self.deadline is not None) == in_flight, f"{self.phase} with deadline {self.deadline}"
        assert (self.next_world is not None) == (self.phase is ElasticPhase.entering)
        assert self.interrupting is None or self.phase is ElasticPhase.stepping
        assert self.wants_step or self.phase not in (ElasticPhase.waiting, ElasticPhase.stepping)
        if self.phase is ElasticPhase.waiting:
            assert self.wait_deadline is not None or self.retry_at > self.now, "waits without a deadline"
        if self.phase is ElasticPhase.stepping:
            assert self.interrupting is not None or not self._broken(), "a step that cannot complete"
        for world in (self.world, self.next_world):
            assert world is None or world.size >= self.spec.min_members, "a world that is too small"
            assert world is None or len(set(world.members)) == world.size, "a member with two ranks"


_HANDLERS = handlers_of(ElasticMachine, e.ElasticEvent)
