"""The elastic group machine: group size, ranks, and when a step runs, is interrupted, redone or waited for.

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

from trimtab.core.codec import decode
from trimtab.core.errors import InputError
from trimtab.core.machine import Machine, earliest, on
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry
from trimtab.machines.elastic import events as e
from trimtab.machines.elastic.explain import group_view, too_few_reason, world_reason
from trimtab.machines.elastic.members import GRACE_S, GroupMembers
from trimtab.machines.elastic.state import LIVE, OVER, ElasticMember, ElasticPhase, ElasticState
from trimtab.model.nodes import ElasticSpec, MemberState, NodeState, World

INTERRUPT_TIMEOUT_S = 30.0  # until an unconfirmed InterruptStep is issued again
MAX_FAILED_ATTEMPTS = 6  # in a row, without a known cause


class ElasticMachine(Machine[ElasticState, e.ElasticEvent, e.ElasticInstruction]):
    """An elastic group."""

    EVENTS = e.ElasticEvent

    def __init__(self, spec: ElasticSpec, state: ElasticState | None = None) -> None:
        """`state` is that of a dump."""
        state = ElasticState(spec) if state is None else state
        out: list[e.ElasticInstruction] = []
        self.spec = spec
        self._members = GroupMembers(state, out)
        super().__init__(state, state, out, self._members)

    @classmethod
    def load(cls, data: dict[str, Any]) -> ElasticMachine:
        state = decode(ElasticState, data)
        return cls(state.spec, state)

    def handle(self, event: e.ElasticEvent, now: float) -> list[e.ElasticInstruction]:
        """Instructions for the event; none once the group is closed. Raises InputError, with nothing changed."""
        out = super().handle(event, now)
        return out if self.state.phase is not ElasticPhase.closed or isinstance(event, e.GroupClosed) else []

    def settle(self) -> None:
        group = self.state
        if group.phase in OVER:
            return
        self._members.ready_to_gone_with_nodes()
        self._members.fill()
        if group.fatal and not group.ever_started and not group.in_state(*LIVE):
            self._give_up(Reason(ReasonCode.start_failed, f"no member could be started: {group.fatal}"))
        elif group.phase is ElasticPhase.stepping:
            self._interrupt_if_needed()
        elif group.phase is ElasticPhase.waiting or (group.phase is ElasticPhase.idle and group.leaving):
            # Between two steps leavers do not wait for the next one.
            self._advance()

    def next_deadline(self) -> float | None:
        group = self.state
        if group.phase in OVER:
            return None
        dues = [self._members.replace_due()]
        if group.deadline is not None:
            dues.append(group.deadline + (GRACE_S if group.interrupting is None else 0.0))
        if group.phase is ElasticPhase.waiting:
            dues.append(group.wait_deadline)
        if group.retry_at > group.now:
            dues.append(group.retry_at)
        for member in group.members.values():
            dues += [member.health_due if member.health_by is None else member.health_by, member.stop_by]
            dues.append(member.leave_by if member.leave_by is not None and member.leave_by > group.now else None)
        return earliest(*dues)

    # ---- events of steps --------------------------------------------------------------------------------------------

    @on(e.StepBoundary)
    def _on_step_boundary(self, event: e.StepBoundary) -> None:
        group = self.state
        if not event.wanted:
            self._withdraw()
            return
        if group.phase is ElasticPhase.stepping or group.phase in OVER:
            return
        if group.epoch == 0 and not group.wants_step:
            group.step = event.step  # training continues where an earlier run ended
        elif event.step != group.step:
            raise InputError(f"group {self.spec.name} has completed {group.step} steps, not {event.step}")
        group.wants_step = True
        if group.phase is ElasticPhase.idle:
            group.phase = ElasticPhase.waiting

    def _withdraw(self) -> None:
        """The requested step is not wanted any more; no member has committed it."""
        group = self.state
        if group.phase in OVER:
            return
        group.wants_step = group.redo = False
        if group.phase is ElasticPhase.stepping:
            self._stepping_to(ElasticPhase.idle)
        elif group.phase is ElasticPhase.waiting:
            group.phase = ElasticPhase.idle
        self._clear_wait()

    @on(e.WorldEntered)
    def _on_world_entered(self, event: e.WorldEntered) -> None:
        group = self.state
        if group.next_world is None or event.epoch != group.epoch:
            return
        world, leavers = group.next_world, group.leavers
        group.world, group.departed = world, [entry for entry in group.departed if entry[0] in world.members]
        self._entering_to(ElasticPhase.waiting if group.wants_step else ElasticPhase.idle)
        self._clear_wait()
        for member in group.live(world.members):
            if member.state is MemberState.ready:
                self._members.ready_to_working(member)
            if member.state is not MemberState.pending:
                member.step = group.step
        group.without_rank = [member.id for member in group.in_state(MemberState.pending) if group.ranked(member.id)]
        for member in group.live(leavers):
            self._members.to_gone(member, member.reason)
        self._members.record(self.spec.name, f"world {world.epoch} of {world.size}", world.reason)
        if group.wants_step and not self._broken() and not self._overdue_leavers():
            # Later newcomers enter at the next boundary: a trickle of them must not delay every step.
            self._waiting_to_stepping()

    @on(e.WorldFailed)
    def _on_world_failed(self, event: e.WorldFailed) -> None:
        if self.state.next_world is not None and event.epoch == self.state.epoch:
            self._world_failed(event.members, event.why)

    def _world_failed(self, blamed: tuple[str, ...], why: str) -> None:
        group = self.state
        assert group.next_world is not None
        members = group.next_world.members
        known = len(list(group.live(members))) < len(members) or bool(set(blamed) & set(members))
        reason = Reason(ReasonCode.hung, f"world {group.epoch} was not entered: {why}")
        for member in group.live(blamed):
            self._members.to_lost(member, reason)
        self._entering_to(ElasticPhase.waiting if group.wants_step else ElasticPhase.idle)
        for member in self.state.leaving:
            if not group.ranked(member.id):  # it was about to get a rank, and to leave again
                self._members.leave_unranked(member)
        if not known:
            self._failed_attempt(f"world {group.epoch} could not be entered: {why}")

    def _entering_to(self, phase: ElasticPhase) -> None:
        group = self.state
        group.phase, group.deadline, group.next_world, group.leavers = phase, None, None, ()

    @on(e.StepDone)
    def _on_step_done(self, event: e.StepDone) -> None:
        group = self.state
        if group.phase is not ElasticPhase.stepping or event.step != group.step + 1:
            return
        assert group.world is not None
        group.step += 1
        group.failed_attempts = 0
        group.redo = group.wants_step = False
        self._stepping_to(ElasticPhase.idle)
        for member in group.live(group.world.members):
            if member.state is MemberState.pending:
                continue
            if member.restart_at is not None and not member.proven:
                group.rounds = 0
            member.proven, member.step = True, group.step

    @on(e.StepInterrupted)
    def _on_step_interrupted(self, event: e.StepInterrupted) -> None:
        group = self.state
        if group.phase is not ElasticPhase.stepping or event.step != group.step + 1:
            return
        known = group.interrupting is not None or self._broken()
        sentence = f"step {event.step}: {event.why}"
        for member in group.live(event.hung):
            known = True
            self._members.to_lost(member, Reason(ReasonCode.hung, sentence))
        group.redo = True
        self._stepping_to(ElasticPhase.waiting)
        self._members.record(self.spec.name, "interrupted", Reason(ReasonCode.redone, sentence))
        if not known:
            self._failed_attempt(f"step {event.step} was interrupted: {event.why}")

    def _stepping_to(self, phase: ElasticPhase) -> None:
        self.state.phase, self.state.deadline, self.state.interrupting = phase, None, None

    def _failed_attempt(self, sentence: str) -> None:
        """A failure without a known cause: often a loss that is not reported yet."""
        group = self.state
        group.failed_attempts += 1
        group.retry_at = group.now + self._members.back_off(group.failed_attempts)
        if group.failed_attempts >= MAX_FAILED_ATTEMPTS:
            sentence = f"{sentence}; {group.failed_attempts} times in a row, with no member at fault"
            self._give_up(Reason(ReasonCode.cap, sentence))

    # ---- requests, and time -----------------------------------------------------------------------------------------

    @on(e.ResizeRequested)
    def _on_resize_requested(self, event: e.ResizeRequested) -> None:
        least, most = self.spec.min_members, self.spec.max_members
        if event.size is not None and (event.size < least or (most is not None and event.size > most)):
            limits = f"at least {least}" + (f" and at most {most}" if most is not None else "")
            raise InputError(f"group {self.spec.name} cannot have {event.size} members", hint=f"it has {limits}")
        self.state.requested = event.size

    @on(e.GroupClosed)
    def _on_group_closed(self, event: e.GroupClosed) -> None:
        reason = Reason(ReasonCode.completed, "the group ends")
        for member in self.state.in_state(*LIVE):
            self._members.to_gone(member, reason)
        self._over(ElasticPhase.closed, reason)

    @on(e.ElasticTick)
    def _on_elastic_tick(self, event: e.ElasticTick) -> None:
        group = self.state
        if group.phase in OVER:
            return
        self._members.resend_stops()
        self._members.check_health()
        if group.deadline is None:
            return
        if group.phase is ElasticPhase.stepping and group.interrupting is not None and group.deadline <= group.now:
            self._interrupt(group.interrupting)
        elif group.phase is ElasticPhase.stepping and group.deadline + GRACE_S <= group.now:
            self._interrupt(Reason(ReasonCode.hung, f"not complete after {self.spec.step_timeout_s:g} s"))
        elif group.next_world is not None and group.deadline + GRACE_S <= group.now:
            fresh = tuple(name for name in group.next_world.members if not group.ranked(name))
            self._world_failed(fresh, f"not entered after {self.spec.step_timeout_s:g} s")

    # ---- progress ---------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """The next step in the same world, or the next world first, or a wait."""
        group = self.state
        if group.now < group.retry_at:
            return
        stay, drop = self._next_members()
        if len(stay) < self.spec.min_members:
            if group.wants_step:
                self._wait(len(stay))
            return
        names = tuple(member.id for member in stay)
        if group.world is None or group.world.members != names or self._broken():
            self._to_entering(stay, drop)
        elif group.wants_step:
            self._waiting_to_stepping()

    def _next_members(self) -> tuple[list[ElasticMember], list[ElasticMember]]:
        """Members of the next world in rank order, and those that leave."""
        order = {node.node: at for at, node in enumerate(self.state.nodes)}
        usable = {node.node for node in self.state.nodes if node.state is NodeState.ready}
        stay = [
            member
            for member in self.state.members.values()
            if member.state is MemberState.working or (member.state is MemberState.ready and member.node in usable)
        ]
        leaving = self.state.leaving
        can_wait = [member for member in leaving if member.leave_by is None or member.leave_by > self.now]
        can_wait.sort(key=lambda member: (member.leave_by is not None, -(member.leave_by or 0.0), member.number))
        stay += can_wait[: max(0, self.spec.min_members - len(stay))]
        stay.sort(key=lambda member: (order[member.node], member.number))
        return stay, [member for member in leaving if member not in stay]

    def _to_entering(self, stay: list[ElasticMember], drop: list[ElasticMember]) -> None:
        group = self.state
        newcomers = [member for member in stay if member.state is MemberState.ready]
        reason = world_reason(group, newcomers, drop)
        group.epoch += 1
        names, nodes = tuple(member.id for member in stay), tuple(member.node for member in stay)
        group.next_world = World(group.epoch, names, nodes, reason)
        group.leavers = tuple(member.id for member in drop)
        group.phase, group.deadline = ElasticPhase.entering, group.now + self.spec.step_timeout_s
        sources = self._sources(newcomers, stay, drop)
        self._out.append(e.EnterWorld(group.next_world, sources, group.leavers, group.deadline))

    def _sources(
        self, newcomers: list[ElasticMember], stay: list[ElasticMember], drop: list[ElasticMember]
    ) -> tuple[tuple[str, str | None], ...]:
        """The state source of each newcomer: its leaver, or the member that completed most steps.

        A member that the pool evicted and restarted has its own state; without another source it keeps it (None).
        """
        ranked = [member for member in (*stay, *drop) if member.step is not None and member not in newcomers]
        others = ranked or [member for member in self.state.members.values() if member.step is not None and member.node]
        best = max(others, key=lambda member: (member.step or 0, -others.index(member)), default=None)
        leavers = {member.id for member in drop if best is not None and member.step == best.step}
        sources = []
        for member in newcomers:
            source = member.replaces if member.replaces in leavers else (best.id if best is not None else None)
            sources.append((member.id, source if source != member.id else None))
        return tuple(sources)

    def _waiting_to_stepping(self) -> None:
        group = self.state
        assert group.world is not None
        group.phase, group.deadline = ElasticPhase.stepping, group.now + self.spec.step_timeout_s
        group.redone_count += group.redo
        self._clear_wait()
        self._out.append(e.RunStep(group.step + 1, group.world.epoch, group.redo))

    # ---- interruptions ---------------------------------------------------------------------------------------------

    def _broken(self) -> bool:
        """Whether a member with a rank is gone."""
        group = self.state
        if group.world is None:
            return False
        ranked = (MemberState.working, MemberState.leaving)
        live = group.live(group.world.members)
        return sum(member.state in ranked and group.ranked(member.id) for member in live) < group.world.size

    def _overdue_leavers(self) -> list[ElasticMember]:
        leaving = self.state.leaving
        return [member for member in leaving if member.leave_by is not None and member.leave_by <= self.now]

    def _interrupt_if_needed(self) -> None:
        group = self.state
        if group.interrupting is not None:
            return
        overdue = self._overdue_leavers()
        if self._broken():
            unknown = ("a member", Reason(ReasonCode.process_died, "it is gone"))
            name, why = group.departed[-1] if group.departed else unknown
            self._interrupt(Reason(why.code, f"{name} is gone: {why.sentence}"))
        elif overdue:
            self._interrupt(Reason(overdue[0].reason.code, f"{overdue[0].id} has to leave first"))

    def _interrupt(self, reason: Reason) -> None:
        self.state.interrupting, self.state.deadline = reason, self.now + INTERRUPT_TIMEOUT_S
        self._out.append(e.InterruptStep(self.state.step + 1, reason))

    # ---- waiting, and the end ---------------------------------------------------------------------------------------

    def _wait(self, there: int) -> None:
        group = self.state
        cause = too_few_reason(group)
        sentence = f"{there} of at least {self.spec.min_members} members are there; {cause.sentence}"
        reason = Reason(ReasonCode.below_min, sentence)
        if group.wait_deadline is None:
            group.wait_deadline = group.now + self.spec.wait_s
        group.wait_reason = reason
        if group.wait_deadline <= group.now:
            waited = f"waited {self.spec.wait_s:g} s, as long as it may: {sentence}"
            self._give_up(Reason(ReasonCode.too_late, waited))
        elif group.wait_key != cause.code.value:
            group.wait_key = cause.code.value
            self._members.record(self.spec.name, "waiting", reason)
            self._out.append(e.WaitForMembers(reason, group.wait_deadline))

    def _clear_wait(self) -> None:
        self.state.wait_deadline = self.state.wait_reason = None
        self.state.wait_key = ""

    def _give_up(self, reason: Reason) -> None:
        """Members stay up, so that state can still be saved; `GroupClosed` ends them."""
        if self.state.phase not in OVER:
            self._over(ElasticPhase.given_up, reason)
            self._out.append(e.FailGroup(reason))

    def _over(self, phase: ElasticPhase, reason: Reason) -> None:
        self._entering_to(phase)
        self._stepping_to(phase)
        self.state.wants_step = False
        self.state.end_reason = self.state.end_reason or reason
        self._members.record(self.spec.name, phase.value, reason)

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Members that have a rank and are up."""
        return len(self.state.in_state(MemberState.working, MemberState.leaving))

    @property
    def wanted(self) -> int:
        return self._members.wanted

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """Story of the group (by its name) or of a member, as long as it is remembered."""
        return tuple(self.state.stories.get(name, ()))

    def view(self) -> dict[str, object]:
        return group_view(self.state, self.size, self.wanted)

    def check(self) -> None:
        group = self.state
        self._members.check()
        in_flight = group.phase in (ElasticPhase.entering, ElasticPhase.stepping)
        assert (group.deadline is not None) == in_flight, f"{group.phase} with deadline {group.deadline}"
        assert (group.next_world is not None) == (group.phase is ElasticPhase.entering)
        assert group.interrupting is None or group.phase is ElasticPhase.stepping
        assert group.wants_step or group.phase not in (ElasticPhase.waiting, ElasticPhase.stepping)
        if group.phase is ElasticPhase.waiting:
            assert group.wait_deadline is not None or group.retry_at > group.now, "waits without a deadline"
        if group.phase is ElasticPhase.stepping:
            assert group.interrupting is not None or not self._broken(), "a step that cannot complete"
        for world in (group.world, group.next_world):
            assert world is None or world.size >= self.spec.min_members, "a world that is too small"
            assert world is None or len(set(world.members)) == world.size, "a member with two ranks"
