"""Transitions of group members, and which members are started, replaced or ended.

What must never happen: endless restarts of a member that dies each time (replacements
back off, and stop at a limit until its window has passed); a working member that leaves in the middle of a step when it
could wait for the boundary; an id that is used twice.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from trimtab.core.machine import on
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, record
from trimtab.machines.elastic import events as e
from trimtab.machines.elastic.explain import draining_reason, node_text
from trimtab.machines.elastic.state import (
    LIVE,
    OVER,
    UP,
    ElasticMember,
    ElasticState,
    LeaveCause,
    LostMember,
    member_capacity,
)
from trimtab.machines.nodes.state import display_name
from trimtab.model.nodes import MemberState, NodeState

MAX_STORIES = 200
GRACE_S = 30.0  # beyond a deadline that the runtime enforces itself
STOP_TIMEOUT_S = 60.0  # until an unconfirmed StopMember is issued again
FATAL_WEIGHT = 3  # restarts that a fatal start failure counts for


class GroupMembers:
    """Members of a group."""

    def __init__(self, state: ElasticState, out: list[e.ElasticInstruction]) -> None:
        self.state, self.spec, self._out = state, state.spec, out
        self._capacity = member_capacity(state.nodes, state.spec.unit)

    # ---- size -------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """Target number of members: as requested, or as many as fit, within limits."""
        if self.state.requested is not None:
            return self.state.requested
        room = self._capacity.capacity(self.state.members)
        return max(self.spec.min_members, room if self.spec.max_members is None else min(self.spec.max_members, room))

    def _staying(self) -> list[ElasticMember]:
        return self.state.in_state(MemberState.pending, MemberState.ready, MemberState.working)

    def fill(self) -> None:
        """Start missing members and end surplus ones."""
        group = self.state
        if not group.nodes_known:
            return
        self._request_units()
        self._end_surplus()
        self._recall_leavers()
        missing = self.wanted - len(self._staying())
        del group.unreplaced[max(0, missing) :]  # members lost with their node are not replaced
        more = missing - len(group.unreplaced)
        if more > 0:
            self._start_more(more)
        if group.unreplaced and self._may_replace():
            group.round_open = False
            for lost in group.unreplaced:
                self._start_replacement(lost)
            group.unreplaced.clear()

    def _request_units(self) -> None:
        group = self.state
        want = self.wanted if group.requested is not None or self.spec.max_members is None else self.spec.max_members
        if want != group.want:
            group.want = want
            self._out.append(e.RequestUnits(want))

    def _end_surplus(self) -> None:
        staying = self._staying()
        over = len(staying) - self.wanted
        if over <= 0:
            return
        reason = Reason(ReasonCode.shrink, f"members wanted: {self.wanted}; there or on their way: {len(staying)}")
        pending = [member for member in self.state.in_state(MemberState.pending) if not self._irreplaceable(member)]
        for member in pending[::-1][:over]:
            self._pending_to_gone(member, reason)
        # Members that have their capacity keep it, unless a limit or a request says otherwise.
        limit = self.state.requested if self.state.requested is not None else self.spec.max_members
        staying = self._staying()
        for member in self._last_first(staying)[: max(0, len(staying) - limit) if limit is not None else 0]:
            self._to_leaving(member, reason, None)

    def _recall_leavers(self) -> None:
        """Members that leave only because fewer were wanted stay, as far as more are wanted again."""
        missing = self.wanted - len(self._staying())
        reason = Reason(ReasonCode.grow, f"members wanted again: {self.wanted}")
        surplus = [m for m in self.state.leaving if all(cause.reason.code is ReasonCode.shrink for cause in m.causes)]
        for member in surplus[: max(0, missing)]:
            self._leaving_to_staying(member, ReasonCode.shrink, reason)

    def _last_first(self, members: list[ElasticMember]) -> list[ElasticMember]:
        """Newcomers before working members, then highest rank first; the only holder of the state last."""
        ranks = {name: at for at, name in enumerate(self.state.world.members)} if self.state.world is not None else {}

        def order(member: ElasticMember) -> tuple[bool, bool, int, int]:
            working = member.state is MemberState.working
            return self._irreplaceable(member), working, -ranks.get(member.id, 0), -member.number

        return sorted(members, key=order)

    def _start_more(self, count: int) -> None:
        """First replacements of leavers, then growth."""
        replaced = {member.replaces for member in self.state.members.values()}
        leavers = [leaver for leaver in self.state.leaving if leaver.id not in replaced]
        for leaver in leavers[:count]:
            sentence = f"in place of {leaver.id}, which leaves: {leaver.reason.sentence}"
            self._new_to_pending(Reason(leaver.reason.code, sentence), leaver.id)
        grow = Reason(ReasonCode.grow, f"members wanted: {self.wanted}")
        for _ in range(count - len(leavers)):
            self._new_to_pending(grow, "")

    def _start_replacement(self, lost: LostMember) -> None:
        group = self.state
        reason = Reason(ReasonCode.replaced, f"in place of {lost.member}: {lost.reason.sentence}")
        member = self._new_to_pending(reason, lost.member)
        member.restart_at, member.restart_weight, member.restart_node = group.now, lost.weight, lost.node
        group.restarts += [group.now] * lost.weight
        group.restart_count += 1

    def _may_replace(self) -> bool:
        group = self.state
        if group.fatal and not group.ever_started:
            return False  # either another start succeeds, or the group fails
        group.restarts = [at for at in group.restarts if at + self.spec.restart_window_s > group.now]
        capped = len(group.restarts) >= self.spec.restarts
        if capped and not group.capped:
            sentence = f"members were started again {len(group.restarts)} times within {self.spec.restart_window_s:g} s"
            reason = Reason(ReasonCode.cap, f"{sentence}: no more are tried for now")
            self.record(self.spec.name, "capped", reason)
        group.capped = capped
        return not capped and group.not_before <= group.now

    def replace_due(self) -> float | None:
        """When the next pending replacement may be started."""
        group = self.state
        if not group.unreplaced or (group.fatal and not group.ever_started):
            return None
        if len(group.restarts) < self.spec.restarts:
            return group.not_before
        return group.restarts[-self.spec.restarts] + self.spec.restart_window_s if self.spec.restarts else None

    def back_off(self, times: int) -> float:
        return min(self.spec.max_back_off_s, self.spec.back_off_s * 2.0 ** min(times - 1, 64))

    # ---- transitions -----------------------------------------------------------------------------------------------

    def _new_to_pending(self, reason: Reason, replaces: str) -> ElasticMember:
        group = self.state
        group.created_count += 1
        name = f"{self.spec.name}-{group.created_count:04d}"
        member = ElasticMember(name, group.created_count, MemberState.pending, reason, group.now, replaces=replaces)
        group.members[member.id] = member
        self._to(member, MemberState.pending, reason)
        self._out.append(e.StartMember(member.id, reason))
        return member

    def _pending_to_ready(self, member: ElasticMember, node: str) -> None:
        member.node, member.health_due, self.state.ever_started = node, self._health_due(), True
        sentence = f"it runs on node {node_text(self.state, node)}"
        self._to(member, MemberState.ready, Reason(member.reason.code, sentence))

    def ready_to_gone_with_nodes(self) -> None:
        """A member without a rank does not wait for a boundary when its node drains."""
        draining = self._capacity.draining
        for member in list(self.state.members.values()) if draining else ():
            if member.state is MemberState.ready and member.node in draining:
                self._to_leaving(member, draining_reason(self.state, member.node), None)

    def _back_to_pending(self, member: ElasticMember, reason: Reason) -> None:
        """The pool took its capacity and will give it another: it keeps its state, not its rank."""
        self._left_world(member, reason)
        if self.state.ranked(member.id):
            self.state.without_rank.append(member.id)
        member.node, member.health_due, member.health_by, member.causes = "", None, None, ()
        self._to(member, MemberState.pending, reason)

    def ready_to_working(self, member: ElasticMember) -> None:
        self._to(member, MemberState.working, Reason(member.reason.code, f"it has a rank in world {self.state.epoch}"))

    def _to_leaving(self, member: ElasticMember, reason: Reason, deadline: float | None) -> None:
        """Leave at the next boundary; at once without a rank.

        A member without a rank that holds the only state is left to the pool, which keeps that state.
        """
        if member.state is MemberState.pending:
            self._pending_to_gone(member, reason)
        elif member.state is MemberState.ready and not self._in_next_world(member):
            if not self._irreplaceable(member):
                self.to_gone(member, reason)
        else:
            cause = LeaveCause(reason, None if deadline is None else deadline - self.spec.handover_s)
            codes = [cause.reason.code for cause in member.causes]
            member.health_due = None  # a result that is due stays due
            if reason.code in codes:
                at = codes.index(reason.code)
                member.causes = (*member.causes[:at], cause, *member.causes[at + 1 :])
            else:
                member.causes = (*member.causes, cause)
                self._to(member, MemberState.leaving, reason)

    def leave_unranked(self, member: ElasticMember) -> None:
        """The world in which it was to get a rank was not entered: end it, unless it holds the only state."""
        if self._irreplaceable(member):
            member.causes, member.health_due = (), self._health_due()
            self._to(member, MemberState.ready, member.reason)
        else:
            self.to_gone(member, member.reason)

    def _leaving_to_staying(self, member: ElasticMember, over: ReasonCode, reason: Reason) -> None:
        """A cause is over; with another cause it still leaves."""
        member.causes = tuple(cause for cause in member.causes if cause.reason.code is not over)
        if member.causes:
            self._to(member, MemberState.leaving, member.causes[0].reason)
            return
        member.health_due = self._health_due()
        self._to(member, MemberState.working if self.state.ranked(member.id) else MemberState.ready, reason)

    def _pending_to_gone(self, member: ElasticMember, reason: Reason) -> None:
        self._uncount_restart(member)  # it never ran
        self.to_gone(member, reason)

    def _uncount_restart(self, member: ElasticMember) -> None:
        group = self.state
        if member.restart_at is not None:
            for _ in range(min(member.restart_weight, group.restarts.count(member.restart_at))):
                group.restarts.remove(member.restart_at)
            group.rounds, group.restart_count = max(0, group.rounds - 1), group.restart_count - 1
            member.restart_at = None

    def _forgive_node_losses(self, gone: AbstractSet[str]) -> None:
        """Members lost together with their node do not count as restarts."""
        self.state.unreplaced = [lost for lost in self.state.unreplaced if lost.node not in gone]
        for member in self.state.members.values():
            if member.restart_node in gone:
                self._uncount_restart(member)

    def to_lost(self, member: ElasticMember, reason: Reason, *, end: bool = True, weight: int = 1) -> None:
        """Unplanned loss: replace it, unless it was leaving anyway."""
        group = self.state
        planned, node = member.state is MemberState.leaving, member.node
        self._left_world(member, reason)
        self.to_gone(member, reason, end=end)
        group.retry_at = group.now  # the cause of the failure is known now
        if planned:
            return
        group.unreplaced.append(LostMember(member.id, node, reason, weight))
        if not group.round_open:
            group.round_open = True
            group.rounds += 1
            group.not_before = group.now + (self.back_off(group.rounds - 1) if group.rounds > 1 else 0.0)

    def to_gone(self, member: ElasticMember, reason: Reason, *, end: bool = True) -> None:
        member.health_due, member.health_by, member.causes = None, None, ()
        self._to(member, MemberState.gone, reason)
        if end:
            member.stop_by = self.state.now + STOP_TIMEOUT_S
            self._out.append(e.StopMember(member.id, reason))
        else:
            del self.state.members[member.id]

    def _to(self, member: ElasticMember, state: MemberState, reason: Reason) -> None:
        if state is not member.state:
            member.since = self.state.now
        member.state, member.reason = state, reason
        self.record(member.id, state.value, reason)

    def _left_world(self, member: ElasticMember, reason: Reason) -> None:
        group = self.state
        if (group.world is not None and member.id in group.world.members) or self._in_next_world(member):
            group.departed = [*(entry for entry in group.departed if entry[0] != member.id), (member.id, reason)]

    def _in_next_world(self, member: ElasticMember) -> bool:
        return self.state.next_world is not None and member.id in self.state.next_world.members

    def _irreplaceable(self, member: ElasticMember) -> bool:
        """Whether no other member has its state."""
        others = [other.step for other in self.state.in_state(*LIVE) if other is not member]
        return member.step is not None and all(step is None or step < member.step for step in others)

    # ---- events of nodes and members --------------------------------------------------------------------------------

    @on(e.NodesChanged)
    def _on_nodes_changed(self, event: e.NodesChanged) -> None:
        group = self.state
        before = {node.node: display_name(node.node, node.facts) for node in group.nodes}
        group.nodes, group.nodes_known, group.change = event.nodes, True, max(group.change, event.change)
        self._capacity = member_capacity(event.nodes, self.spec.unit)
        there = {node.node: node for node in event.nodes}
        for member in [member for member in self.state.in_state(*LIVE) if member.node]:
            node = there.get(member.node)
            if node is None and (member.node in before or member.state is not MemberState.ready):
                # Its process may still run unseen: it is stopped as well.
                name = before.get(member.node, display_name(member.node, None))
                self.to_lost(member, Reason(ReasonCode.node_lost, f"node {name} is gone"))
            elif node is not None and node.state is NodeState.draining:
                self._to_leaving(member, draining_reason(group, member.node), node.deadline)
            elif node is not None and any(cause.reason.code is ReasonCode.node_draining for cause in member.causes):
                sentence = f"node {node_text(group, member.node)} stays after all"
                self._leaving_to_staying(member, ReasonCode.node_draining, Reason(ReasonCode.drain_over, sentence))
        self._forgive_node_losses(before.keys() - there.keys())

    @on(e.MemberPending)
    def _on_member_pending(self, event: e.MemberPending) -> None:
        member = next(self.state.live([event.member]), None)
        if member is None:
            return
        if member.state is MemberState.pending:
            if member.reason.code is not event.reason.code:
                self._to(member, MemberState.pending, event.reason)
            member.reason = event.reason
        elif member.state is MemberState.leaving and not self._irreplaceable(member):
            self._left_world(member, event.reason)
            self.to_gone(member, event.reason)
        else:
            self._back_to_pending(member, event.reason)

    @on(e.MemberStarted)
    def _on_member_started(self, event: e.MemberStarted) -> None:
        member = next(self.state.live([event.member]), None)
        if member is None or member.node == event.node:
            return
        if member.state is not MemberState.pending:
            sentence = f"it was started again on node {node_text(self.state, event.node)}"
            self._back_to_pending(member, Reason(ReasonCode.process_died, sentence))
        self._pending_to_ready(member, event.node)

    @on(e.MemberLost)
    def _on_member_lost(self, event: e.MemberLost) -> None:
        member = self.state.members.get(event.member)
        if member is None:
            return
        if member.state is MemberState.gone:
            del self.state.members[event.member]
            return
        if event.fatal:
            self.state.fatal = event.why
            self.to_lost(member, Reason(ReasonCode.start_failed, event.why), end=False, weight=FATAL_WEIGHT)
        else:
            self.to_lost(member, Reason(ReasonCode.process_died, event.why), end=False)

    @on(e.MemberLeft)
    def _on_member_left(self, event: e.MemberLeft) -> None:
        member = self.state.members.get(event.member)
        if member is not None and member.state is MemberState.gone:
            del self.state.members[event.member]
        elif member is not None:
            self.to_lost(member, Reason(ReasonCode.process_died, "it ended without being stopped"), end=False)

    @on(e.MemberPreempted)
    def _on_member_preempted(self, event: e.MemberPreempted) -> None:
        for member in self.state.live([event.member]):
            self._to_leaving(member, event.reason, self.state.now + max(0.0, event.within_s))

    @on(e.HealthChecked)
    def _on_health_checked(self, event: e.HealthChecked) -> None:
        member = next(self.state.live([event.member]), None)
        if member is None or member.state is MemberState.pending:
            return
        if event.fault is not None:
            self.to_lost(member, Reason(ReasonCode.unhealthy, event.fault))
        elif member.health_by is not None:
            member.health_by = None
            member.health_due = self._health_due() if member.state is not MemberState.leaving else None

    # ---- health ----------------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        group = self.state
        for member in list(group.members.values()):
            if member.health_by is not None and member.health_by <= group.now:
                sentence = "no answer to the health call, nor that it timed out"
                self.to_lost(member, Reason(ReasonCode.unhealthy, sentence))
            elif member.health_by is None and member.health_due is not None and member.health_due <= group.now:
                member.health_by = group.now + self.spec.health_timeout_s + GRACE_S
                self._out.append(e.CheckHealth(member.id, self.spec.health_timeout_s))

    def _health_due(self) -> float | None:
        return self.state.now + self.spec.health_every_s if self.spec.health_every_s else None

    def resend_stops(self) -> None:
        for member in self.state.members.values():
            if member.stop_by is not None and member.stop_by <= self.state.now:
                member.stop_by = self.state.now + STOP_TIMEOUT_S
                self._out.append(e.StopMember(member.id, member.reason))

    # ---- stories ---------------------------------------------------------------------------------------------------

    def record(self, subject: str, what: str, reason: Reason) -> None:
        group, entry = self.state, StoryEntry(self.state.now, what, reason)
        record(group.stories, subject, entry, MAX_STORIES + len(group.members), group.members, (self.spec.name,))

    def check(self) -> None:
        """Raises AssertionError where the members contradict each other."""
        group = self.state
        for name, member in group.members.items():
            assert name == member.id == f"{self.spec.name}-{member.number:04d}"
            assert member.number <= group.created_count
            assert member.reason.sentence, f"{name} has no reason"
            assert group.stories[name][-1].state == member.state.value, f"{name}: story"
            assert (member.state is MemberState.gone) == (member.stop_by is not None), f"{name}: gone without an end"
            assert member.node or member.state in (MemberState.pending, MemberState.gone), f"{name} works nowhere"
            assert bool(member.causes) == (member.state is MemberState.leaving), f"{name}: causes"
            assert member.health_by is None or member.node, f"{name}: health"
            assert member.health_due is None or member.state in UP, f"{name}: health"
            in_world = self.state.ranked(name) or self._in_next_world(member)
            assert in_world or member.state not in (MemberState.working, MemberState.leaving), f"{name} has no rank"
        numbers = [member.number for member in group.members.values()]
        assert numbers == sorted(numbers), "members in another order than made"
        if group.phase not in OVER and group.nodes_known:
            missing = self.wanted - len(self._staying())
            # A pending member with the only state stays pending, however few are wanted.
            spared = sum(map(self._irreplaceable, group.in_state(MemberState.pending)))
            known = len(group.unreplaced)
            assert -spared <= missing - known <= 0, f"{missing} are missing, {known} with a reason"
        assert len(group.restarts) <= self.spec.restarts + FATAL_WEIGHT * max(1, group.created_count)
        assert len(group.stories) <= MAX_STORIES + len(group.members) + 2, "stories without end"
