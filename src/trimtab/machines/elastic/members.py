"""Transitions of group members, and which members are started, replaced or ended.

Called by the group machine only. What must never happen: endless restarts of a member that dies each time (replacements
back off, and stop at a limit until its window has passed); a working member that leaves in the middle of a step when it
could wait for the boundary; an id that is used twice.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, add_story_entry
from trimtab.machines.elastic import events as e
from trimtab.machines.elastic.state import (
    OVER,
    ElasticMember,
    ElasticPhase,
    ElasticState,
    LeaveCause,
    LostMember,
    MemberCapacity,
    member_capacity,
)
from trimtab.machines.nodes.state import display_name
from trimtab.model.nodes import MemberState, NodeView

MAX_STORIES = 200
GRACE_S = 30.0  # beyond a deadline that the runtime enforces itself
STOP_TIMEOUT_S = 60.0  # until an unconfirmed StopMember is issued again
FATAL_WEIGHT = 3  # restarts that a fatal start failure counts for


class MemberTransitions(ElasticState):
    """Transitions of members."""

    _out: list[e.ElasticInstruction]  # of the current event
    _capacity_of: tuple[tuple[NodeView, ...], MemberCapacity] | None = None  # with the nodes it was computed for

    # ---- size -------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """Target number of members: as requested, or as many as fit, within limits."""
        if self.requested is not None:
            return self.requested
        room = self._capacity().capacity(self.members)
        return max(self.spec.min_members, room if self.spec.max_members is None else min(self.spec.max_members, room))

    def _capacity(self) -> MemberCapacity:
        if self._capacity_of is None or self._capacity_of[0] is not self.nodes:
            self._capacity_of = (self.nodes, member_capacity(self.nodes, self.spec.unit))
        return self._capacity_of[1]

    def _staying(self) -> list[ElasticMember]:
        """Members that are up or pending, and are to stay."""
        return self._in_state(MemberState.pending, MemberState.ready, MemberState.working)

    def _leaving(self) -> list[ElasticMember]:
        return self._in_state(MemberState.leaving)

    def _in_state(self, *states: MemberState) -> list[ElasticMember]:
        return [member for member in self.members.values() if member.state in states]

    def _fill(self, now: float) -> None:
        """Start missing members and end surplus ones."""
        if not self.nodes_known:
            return
        self._request_units()
        self._end_surplus(now)
        self._recall_leavers(now)
        missing = self.wanted - len(self._staying())
        del self.unreplaced[max(0, missing) :]  # members lost with their node are not replaced
        more = missing - len(self.unreplaced)
        if more > 0:
            self._start_more(more, now)
        if self.unreplaced and self._may_replace(now):
            self.round_open = False
            for lost in self.unreplaced:
                self._start_replacement(lost, now)
            self.unreplaced.clear()

    def _request_units(self) -> None:
        want = self.wanted if self.requested is not None or self.spec.max_members is None else self.spec.max_members
        if want != self.want:
            self.want = want
            self._out.append(e.RequestUnits(want))

    def _end_surplus(self, now: float) -> None:
        staying = self._staying()
        over = len(staying) - self.wanted
        if over <= 0:
            return
        reason = Reason(ReasonCode.shrink, f"members wanted: {self.wanted}; there or on their way: {len(staying)}")
        pending = [member for member in self._in_state(MemberState.pending) if not self._irreplaceable(member)]
        for member in pending[::-1][:over]:
            self._pending_to_gone(member, reason, now)
        # Members that have their capacity keep it, unless a limit or a request says otherwise.
        limit = self.requested if self.requested is not None else self.spec.max_members
        staying = self._staying()
        for member in self._last_first(staying)[: max(0, len(staying) - limit) if limit is not None else 0]:
            self._to_leaving(member, reason, None, now)

    def _recall_leavers(self, now: float) -> None:
        """Members that leave only because fewer were wanted stay, as far as more are wanted again."""
        missing = self.wanted - len(self._staying())
        reason = Reason(ReasonCode.grow, f"members wanted again: {self.wanted}")
        surplus = [m for m in self._leaving() if all(cause.reason.code is ReasonCode.shrink for cause in m.causes)]
        for member in surplus[: max(0, missing)]:
            self._leaving_to_staying(member, ReasonCode.shrink, reason, now)

    def _last_first(self, members: list[ElasticMember]) -> list[ElasticMember]:
        """Newcomers before working members, then highest rank first; the only holder of the state last."""
        ranks = {name: at for at, name in enumerate(self.world.members)} if self.world is not None else {}

        def order(member: ElasticMember) -> tuple[bool, bool, int, int]:
            working = member.state is MemberState.working
            return self._irreplaceable(member), working, -ranks.get(member.id, 0), -member.number

        return sorted(members, key=order)

    def _start_more(self, count: int, now: float) -> None:
        """First replacements of leavers, then growth."""
        replaced = {member.replaces for member in self.members.values()}
        leavers = [leaver for leaver in self._leaving() if leaver.id not in replaced]
        for leaver in leavers[:count]:
            sentence = f"in place of {leaver.id}, which leaves: {leaver.reason.sentence}"
            self._new_to_pending(Reason(leaver.reason.code, sentence), leaver.id, now)
        grow = Reason(ReasonCode.grow, f"members wanted: {self.wanted}")
        for _ in range(count - len(leavers)):
            self._new_to_pending(grow, "", now)

    def _start_replacement(self, lost: LostMember, now: float) -> None:
        reason = Reason(ReasonCode.replaced, f"in place of {lost.member}: {lost.reason.sentence}")
        member = self._new_to_pending(reason, lost.member, now)
        member.restart_at, member.restart_weight, member.restart_node = now, lost.weight, lost.node
        self.restarts += [now] * lost.weight
        self.restart_count += 1

    def _may_replace(self, now: float) -> bool:
        if self.fatal and not self.ever_started:
            return False  # either another start succeeds, or the group fails
        self.restarts = [at for at in self.restarts if at + self.spec.restart_window_s > now]
        capped = len(self.restarts) >= self.spec.restarts
        if capped and not self.capped:
            sentence = f"members were started again {len(self.restarts)} times within {self.spec.restart_window_s:g} s"
            reason = Reason(ReasonCode.cap, f"{sentence}: no more are tried for now")
            self._record(self.spec.name, "capped", reason, now)
        self.capped = capped
        return not capped and self.not_before <= now

    def _replace_due(self) -> float | None:
        """When the next pending replacement may be started."""
        if not self.unreplaced or (self.fatal and not self.ever_started):
            return None
        if len(self.restarts) < self.spec.restarts:
            return self.not_before
        return self.restarts[-self.spec.restarts] + self.spec.restart_window_s if self.spec.restarts else None

    def _back_off(self, times: int) -> float:
        return min(self.spec.max_back_off_s, self.spec.back_off_s * 2.0 ** min(times - 1, 64))

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _new_to_pending(self, reason: Reason, replaces: str, now: float) -> ElasticMember:
        self.created_count += 1
        name = f"{self.spec.name}-{self.created_count:04d}"
        member = ElasticMember(name, self.created_count, MemberState.pending, reason, now, replaces=replaces)
        self.members[member.id] = member
        self._to(member, MemberState.pending, reason, now)
        self._out.append(e.StartMember(member.id, reason))
        return member

    def _pending_to_ready(self, member: ElasticMember, node: str, now: float) -> None:
        member.node = node
        member.health_due = now + self.spec.health_every_s if self.spec.health_every_s else None
        self.ever_started = True
        self._to(member, MemberState.ready, Reason(member.reason.code, f"it runs on node {self._node_name(node)}"), now)

    def _ready_to_gone_with_nodes(self, now: float) -> None:
        """A member without a rank does not wait for a boundary when its node drains."""
        draining = self._capacity().draining
        for member in list(self.members.values()) if draining else ():
            if member.state is MemberState.ready and member.node in draining:
                self._to_leaving(member, self._draining(member.node), None, now)

    def _back_to_pending(self, member: ElasticMember, reason: Reason, now: float) -> None:
        """The pool took its capacity and will give it another: it keeps its state, not its rank."""
        self._left_world(member, reason)
        member.node, member.health_due, member.health_by, member.causes = "", None, None, ()
        self._to(member, MemberState.pending, reason, now)

    def _ready_to_working(self, member: ElasticMember, now: float) -> None:
        self._to(member, MemberState.working, Reason(member.reason.code, f"it has a rank in world {self.epoch}"), now)

    def _to_leaving(self, member: ElasticMember, reason: Reason, deadline: float | None, now: float) -> None:
        """Leave at the next boundary; at once without a rank.

        A member without a rank that holds the only state is left to the pool, which keeps that state.
        """
        if member.state is MemberState.pending:
            self._pending_to_gone(member, reason, now)
        elif member.state is MemberState.ready and not self._in_next_world(member):
            if not self._irreplaceable(member):
                self._to_gone(member, reason, now, end=True)
        else:
            cause = LeaveCause(reason, None if deadline is None else deadline - self.spec.handover_s)
            codes = [cause.reason.code for cause in member.causes]
            member.health_due = None  # a result that is due stays due
            if reason.code in codes:
                at = codes.index(reason.code)
                member.causes = (*member.causes[:at], cause, *member.causes[at + 1 :])
            else:
                member.causes = (*member.causes, cause)
                self._to(member, MemberState.leaving, reason, now)

    def _leaving_to_staying(self, member: ElasticMember, over: ReasonCode, reason: Reason, now: float) -> None:
        """A cause is over; with another cause it still leaves."""
        member.causes = tuple(cause for cause in member.causes if cause.reason.code is not over)
        if member.causes:
            self._to(member, MemberState.leaving, member.causes[0].reason, now)
            return
        member.health_due = now + self.spec.health_every_s if self.spec.health_every_s else None
        ranked = self.world is not None and member.id in self.world.members
        self._to(member, MemberState.working if ranked else MemberState.ready, reason, now)

    def _leaving_to_gone(self, member: ElasticMember, now: float) -> None:
        self._to_gone(member, member.reason, now, end=True)

    def _pending_to_gone(self, member: ElasticMember, reason: Reason, now: float) -> None:
        self._uncount_restart(member)  # it never ran
        self._to_gone(member, reason, now, end=True)

    def _uncount_restart(self, member: ElasticMember) -> None:
        if member.restart_at is not None:
            for _ in range(min(member.restart_weight, self.restarts.count(member.restart_at))):
                self.restarts.remove(member.restart_at)
            self.rounds, self.restart_count = max(0, self.rounds - 1), self.restart_count - 1
            member.restart_at = None

    def _forgive_node_losses(self, gone: AbstractSet[str]) -> None:
        """Members lost together with their node do not count as restarts."""
        self.unreplaced = [lost for lost in self.unreplaced if lost.node not in gone]
        for member in self.members.values():
            if member.restart_node in gone:
                self._uncount_restart(member)

    def _to_lost(self, member: ElasticMember, reason: Reason, now: float, *, end: bool, weight: int = 1) -> None:
        """Unplanned loss: replace it, unless it was leaving anyway."""
        planned, node = member.state is MemberState.leaving, member.node
        self._left_world(member, reason)
        self._to_gone(member, reason, now, end=end)
        self.retry_at = now  # the cause of the failure is known now
        if planned:
            return
        self.unreplaced.append(LostMember(member.id, node, reason, weight))
        if not self.round_open:
            self.round_open = True
            self.rounds += 1
            self.not_before = now + (self._back_off(self.rounds - 1) if self.rounds > 1 else 0.0)

    def _to_gone(self, member: ElasticMember, reason: Reason, now: float, *, end: bool) -> None:
        member.health_due, member.health_by, member.causes = None, None, ()
        self._to(member, MemberState.gone, reason, now)
        if end:
            member.stop_by = now + STOP_TIMEOUT_S
            self._out.append(e.StopMember(member.id, reason))
        else:
            del self.members[member.id]

    def _gone_to_forgotten(self, member: ElasticMember) -> None:
        del self.members[member.id]

    def _to(self, member: ElasticMember, state: MemberState, reason: Reason, now: float) -> None:
        if state is not member.state:
            member.since = now
        member.state, member.reason = state, reason
        self._record(member.id, state.value, reason, now)

    def _left_world(self, member: ElasticMember, reason: Reason) -> None:
        if self._ranked(member.id) or self._in_next_world(member):
            self.departed = [*(entry for entry in self.departed if entry[0] != member.id), (member.id, reason)]

    def _ranked(self, name: str) -> bool:
        return self.world is not None and name in self.world.members

    def _in_next_world(self, member: ElasticMember) -> bool:
        return self.next_world is not None and member.id in self.next_world.members

    def _irreplaceable(self, member: ElasticMember) -> bool:
        """Whether no other member has its state."""
        others = [
            other.step for other in self.members.values() if other is not member and other.state is not MemberState.gone
        ]
        return member.step is not None and all(step is None or step < member.step for step in others)

    def _node_name(self, node: str) -> str:
        return display_name(node, next((view.facts for view in self.nodes if view.node == node), None))

    def _draining(self, node: str) -> Reason:
        why = next((f": {view.reason.sentence}" for view in self.nodes if view.node == node), "")
        return Reason(ReasonCode.node_draining, f"node {self._node_name(node)} will go{why}")

    # ---- health ----------------------------------------------------------------------------------------------------

    def _check_health(self, now: float) -> None:
        for member in list(self.members.values()):
            if member.health_by is not None and member.health_by <= now:
                self._unhealthy(member, "no answer to the health call, nor that it timed out", now)
            elif member.health_by is None and member.health_due is not None and member.health_due <= now:
                member.health_by = now + self.spec.health_timeout_s + GRACE_S
                self._out.append(e.CheckHealth(member.id, self.spec.health_timeout_s))

    def _unhealthy(self, member: ElasticMember, fault: str, now: float) -> None:
        self._to_lost(member, Reason(ReasonCode.unhealthy, fault), now, end=True)

    def _resend_stops(self, now: float) -> None:
        for member in self.members.values():
            if member.stop_by is not None and member.stop_by <= now:
                member.stop_by = now + STOP_TIMEOUT_S
                self._out.append(e.StopMember(member.id, member.reason))

    # ---- stories ---------------------------------------------------------------------------------------------------

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """Story of the group (by its name) or of a member, as long as it is remembered."""
        return tuple(self.stories.get(name, ()))

    def _record(self, name: str, state: str, reason: Reason, now: float) -> None:
        story = self.stories.setdefault(name, [])
        add_story_entry(story, StoryEntry(now, state, reason))
        if len(self.stories) > MAX_STORIES + len(self.members):
            kept = self.members.keys() | {self.spec.name, name}
            del self.stories[next(known for known in self.stories if known not in kept)]

    def check_members(self) -> None:
        """Raise AssertionError where the members contradict each other."""
        for name, member in self.members.items():
            assert name == member.id == f"{self.spec.name}-{member.number:04d}"
            assert member.number <= self.created_count
            assert member.reason.sentence, f"{name} has no reason"
            assert self.stories[name][-1].state == member.state.value, f"{name}: story"
            assert (member.state is MemberState.gone) == (member.stop_by is not None), f"{name}: gone without an end"
            assert member.node or member.state in (MemberState.pending, MemberState.gone), f"{name} works nowhere"
            assert bool(member.causes) == (member.state is MemberState.leaving), (
                f"{name}: leaves without a cause, or stays"
            )
            assert member.health_by is None or member.node, f"{name}: health"
            assert member.health_due is None or member.state in (MemberState.ready, MemberState.working), (
                f"{name}: health"
            )
            in_world = self._ranked(name) or self._in_next_world(member)
            assert in_world or member.state not in (MemberState.working, MemberState.leaving), f"{name} has no rank"
        numbers = [member.number for member in self.members.values()]
        assert numbers == sorted(numbers), "members in another order than made"
        if self.phase not in OVER and self.nodes_known:
            missing = self.wanted - len(self._staying())
            # A pending member with the only state stays pending, however few are wanted.
            spared = sum(
                member.state is MemberState.pending and self._irreplaceable(member) for member in self._staying()
            )
            assert -spared <= missing - len(self.unreplaced) <= 0, (
                f"{missing} are missing, {len(self.unreplaced)} with a reason"
            )
            assert self.phase is not ElasticPhase.entering or self.next_world is not None
        assert len(self.restarts) <= self.spec.restarts + FATAL_WEIGHT * max(1, self.created_count)
        assert len(self.stories) <= MAX_STORIES + len(self.members) + 2, "stories without end"
