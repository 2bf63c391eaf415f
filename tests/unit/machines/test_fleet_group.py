"""Rules of elastic groups, one at a time. What holds whatever happens is in `test_fleet_invariants`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fleet_world import UNIT, node_view
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.core.resources import Resources
from trimtab.machines.elastic.events import (
    CheckHealth,
    ElasticTick,
    EnterWorld,
    FailGroup,
    GroupClosed,
    HealthChecked,
    InterruptStep,
    MemberLeft,
    MemberLost,
    MemberPending,
    MemberPreempted,
    MemberStarted,
    NodesChanged,
    RequestUnits,
    ResizeRequested,
    RunStep,
    StartMember,
    StepBoundary,
    StepDone,
    StepInterrupted,
    StopMember,
    WaitForMembers,
    WorldEntered,
    WorldFailed,
)
from trimtab.machines.elastic.machine import ElasticMachine
from trimtab.model.nodes import ElasticSpec, NodeState

NO_ROOM = Reason(ReasonCode.no_room, "no node has enough free")


class Group:
    """A machine, a clock, and one who does what it says when told to."""

    def __init__(self, **settings) -> None:
        settings = {"min_members": 1, "health_every_s": 0.0, **settings}
        self.machine, self.now = ElasticMachine(ElasticSpec("g", UNIT, **settings)), 100.0
        self.started = 0

    def tell(self, event):
        out = self.machine.handle(event, self.now)
        self.machine.check()
        return [one for one in out if not isinstance(one, RequestUnits)]

    def nodes(self, *names, **draining):
        """These nodes there are; `b=30.0` has b drain until 30 s from now."""
        views = [
            node_view(name, NodeState.draining, deadline=self.now + draining[name])
            if name in draining
            else node_view(name)
            for name in names
        ]
        return self.tell(NodesChanged(tuple(views)))

    def start(self, member, node):
        return self.tell(MemberStarted(f"g-{member:04d}", node))

    def begin(self, *names):
        """A world of one member on each of these nodes, with step 1 under way."""
        self.nodes(*names)
        for at, name in enumerate(names, start=1):
            self.start(at, name)
        (enter,) = self.tell(StepBoundary(0))
        (run,) = self.tell(WorldEntered(1))
        assert (type(enter), type(run)) == (EnterWorld, RunStep)

    def done(self):
        """The step is complete and the next one asked for."""
        out = self.tell(StepDone(self.machine.state.step + 1))
        return out + self.tell(StepBoundary(self.machine.state.step))

    def wait(self, seconds):
        self.now += seconds
        return self.tell(ElasticTick())

    def state(self, member):
        return next(one["state"] for one in self.machine.view()["members"] if one["id"] == f"g-{member:04d}")


def kinds(out):
    return [type(one) for one in out]


# ---- how many ----


def test_a_group_asks_for_a_member_per_unit_of_resources_up_to_its_most():
    group = Group(max_members=3)
    assert group.tell(StepBoundary(0)) != []  # it waits for nodes
    views = (node_view("a", gpus=2), node_view("b", gpus=2), replace(node_view("c"), outside=Resources.of(gpu=1)))
    out = group.tell(NodesChanged(views))
    assert [one.member for one in out if isinstance(one, StartMember)] == ["g-0001", "g-0002", "g-0003"]
    assert {one.reason.code for one in out if isinstance(one, StartMember)} == {ReasonCode.grow}
    assert group.machine.wanted == 3


def test_the_least_is_asked_for_even_where_there_is_no_room():
    group = Group(min_members=2)
    out = group.nodes("a")
    assert kinds(out) == [StartMember, StartMember]
    group.start(1, "a")
    (wait,) = group.tell(StepBoundary(0))
    assert (type(wait), wait.reason.code) == (WaitForMembers, ReasonCode.below_min)
    (wait,) = group.tell(MemberPending("g-0002", NO_ROOM))
    assert "1 of at least 2" in wait.reason.sentence
    assert "no node has enough free" in wait.reason.sentence


def test_draining_held_and_lost_nodes_are_no_room_and_a_silent_one_only_while_it_holds_a_member():
    group = Group()
    group.begin("a", "b")
    views = [node_view("a", NodeState.suspect), node_view("b"), node_view("c", NodeState.held)]
    group.tell(NodesChanged((*views, node_view("d", NodeState.suspect), node_view("e", NodeState.draining))))
    assert group.machine.wanted == 2


def test_members_that_only_wait_are_ended_when_their_room_is_gone():
    group = Group()
    group.nodes("a", "b", "c")
    group.start(1, "a")
    out = group.nodes("a")
    assert [(type(one), one.member, one.reason.code) for one in out] == [
        (StopMember, "g-0003", ReasonCode.shrink),
        (StopMember, "g-0002", ReasonCode.shrink),
    ]


def test_a_person_may_ask_for_fewer_or_more_within_the_limits():
    group = Group(min_members=2, max_members=5)
    group.begin("a", "b", "c")
    assert group.tell(ResizeRequested(2)) == []
    assert group.state(3) == "leaving"
    assert group.tell(ResizeRequested(3)) == []
    assert group.state(3) == "working"
    assert kinds(group.tell(ResizeRequested(5))) == [StartMember, StartMember]
    before = json.dumps(group.machine.dump())
    for size in (1, 6):
        with pytest.raises(InputError, match=f"cannot have {size} members"):
            group.tell(ResizeRequested(size))
    assert json.dumps(group.machine.dump()) == before
    group.tell(ResizeRequested(2))
    enter, *rest = group.done()
    assert enter.world.members == ("g-0001", "g-0002")
    assert enter.leavers == ("g-0003",)
    assert rest == []


def test_autoscalers_hear_what_the_group_could_use():
    group = Group(max_members=4)
    assert RequestUnits(4) in group.machine.handle(NodesChanged((node_view("a"),)), 1.0)
    assert RequestUnits(2) in group.machine.handle(ResizeRequested(2), 2.0)
    assert RequestUnits(2) not in group.machine.handle(ElasticTick(), 3.0)


# ---- worlds ----


def test_the_first_world_waits_for_the_least_and_no_longer():
    group = Group(min_members=2)
    group.nodes("a", "b", "c")
    assert kinds(group.tell(StepBoundary(0))) == [WaitForMembers]
    assert group.start(3, "c") == []
    (enter,) = group.start(1, "a")
    assert enter.world.members == ("g-0001", "g-0003")
    assert enter.world.nodes == ("a", "c")
    assert enter.newcomers == (("g-0001", None), ("g-0003", None))
    assert enter.world.reason.code is ReasonCode.began
    assert group.start(2, "b") == []
    (run,) = group.tell(WorldEntered(1))
    assert (run.step, run.epoch, run.redo) == (1, 1, False)


def test_nothing_changes_between_boundaries_and_nothing_needs_to_at_one():
    group = Group()
    group.begin("a")
    assert kinds(group.nodes("a", "b")) == [StartMember]
    assert group.start(2, "b") == []
    (enter,) = group.done()
    assert enter.world.epoch == 2
    group.tell(WorldEntered(2))
    (run,) = group.done()
    assert (run.step, run.epoch) == (3, 2)


def test_a_newcomer_takes_over_the_state_of_a_member_that_has_committed():
    group = Group()
    group.begin("a")
    group.nodes("a", "b")
    group.start(2, "b")
    (enter,) = group.done()
    assert enter.newcomers == (("g-0002", "g-0001"),)
    assert enter.world.reason.code is ReasonCode.grow


def test_ranks_are_contiguous_and_follow_the_order_of_nodes():
    group = Group()
    views = (node_view("z"), node_view("a", gpus=2))
    group.tell(NodesChanged(views))
    for member, node in ((1, "a"), (2, "z"), (3, "a")):
        group.start(member, node)
    (enter,) = group.tell(StepBoundary(0))
    assert enter.world.members == ("g-0002", "g-0001", "g-0003")
    assert enter.world.nodes == ("z", "a", "a")


def test_a_trickle_of_newcomers_does_not_put_off_the_step():
    group = Group()
    group.nodes("a", "b", "c")
    group.start(1, "a")
    group.tell(StepBoundary(0))
    group.start(2, "b")
    assert kinds(group.tell(WorldEntered(1))) == [RunStep]


def test_a_newcomer_on_a_silent_node_waits_until_it_is_heard():
    group = Group()
    group.begin("a")
    group.nodes("a", "b")
    group.start(2, "b")
    group.tell(NodesChanged((node_view("a"), node_view("b", NodeState.suspect))))
    assert kinds(group.done()) == [RunStep]
    group.nodes("a", "b")
    assert kinds(group.done()) == [EnterWorld]


def test_training_goes_on_where_an_earlier_run_ended():
    group = Group()
    group.nodes("a")
    group.start(1, "a")
    group.tell(StepBoundary(41))
    (run,) = group.tell(WorldEntered(1))
    assert run.step == 42
    group.tell(StepDone(42))
    with pytest.raises(InputError, match="has completed 42 steps, not 7"):
        group.tell(StepBoundary(7))


def test_a_step_that_is_told_done_twice_counts_once():
    group = Group()
    group.begin("a")
    group.tell(StepDone(1))
    assert group.tell(StepDone(1)) == []
    assert group.tell(StepInterrupted(1, "late")) == []
    assert group.machine.state.step == 1


# ---- losses ----


def test_a_step_that_a_loss_interrupts_is_redone_whole_by_those_that_are_left():
    group = Group()
    group.begin("a", "b", "c")
    start, interrupt = group.tell(MemberLost("g-0002", "signal 9"))
    assert (type(start), start.reason.code) == (StartMember, ReasonCode.replaced)
    assert (type(interrupt), interrupt.step) == (InterruptStep, 1)
    assert "signal 9" in interrupt.reason.sentence
    (enter,) = group.tell(StepInterrupted(1, "a call failed"))
    assert enter.world.members == ("g-0001", "g-0003")
    assert enter.world.reason.code is ReasonCode.redone
    (run,) = group.tell(WorldEntered(2))
    assert (run.step, run.redo) == (1, True)
    assert group.machine.view()["redone"] == 1


def test_two_losses_at_once_are_one_redo():
    group = Group()
    group.begin("a", "b", "c")
    group.tell(MemberLost("g-0001", "signal 9"))
    assert kinds(group.tell(MemberLost("g-0003", "signal 9"))) == []  # its replacement backs off
    (enter,) = group.tell(StepInterrupted(1, "two calls failed"))
    assert enter.world.members == ("g-0002",)
    (run,) = group.tell(WorldEntered(2))
    assert run.redo


def test_a_loss_after_the_commit_leaves_the_step_counted():
    group = Group()
    group.begin("a", "b")
    group.tell(MemberLost("g-0002", "died in the commit"))
    group.tell(StepDone(1))
    (enter,) = group.tell(StepBoundary(1))
    assert enter.world.members == ("g-0001",)
    (run,) = group.tell(WorldEntered(2))
    assert (run.step, run.redo) == (2, False)


def test_a_loss_while_the_world_is_entered_leads_to_the_next_world_and_no_step_between():
    group = Group()
    group.nodes("a", "b")
    group.start(1, "a")
    group.start(2, "b")
    group.tell(StepBoundary(0))
    group.tell(MemberLost("g-0001", "signal 9"))
    (enter,) = group.tell(WorldEntered(1))
    assert enter.world.epoch == 2
    assert enter.world.members == ("g-0002",)


def test_a_member_that_was_started_again_gets_its_state_also_where_the_world_was_not_entered():
    one = Group()
    one.begin("a", "b", "c")
    one.tell(MemberPending("g-0002", NO_ROOM))
    one.start(2, "b")
    (enter,) = one.tell(StepInterrupted(1, "a call failed", ()))
    assert dict(enter.newcomers) == {"g-0002": "g-0001"}
    one.tell(ResizeRequested(2))
    one.tell(MemberLost("g-0001", "signal 9"))
    out = one.tell(WorldFailed(enter.world.epoch, ("g-0001",), "no answer"))
    entered = [each for each in out if isinstance(each, EnterWorld)]
    assert entered
    for each in entered:
        assert "g-0002" not in each.world.members or "g-0002" in dict(each.newcomers)


def test_members_that_do_not_enter_are_ended_and_replaced():
    group = Group()
    group.nodes("a", "b")
    group.start(1, "a")
    group.start(2, "b")
    group.tell(StepBoundary(0))
    out = group.tell(WorldFailed(1, ("g-0002",), "no answer"))
    assert kinds(out) == [StopMember, StartMember, EnterWorld]
    assert out[-1].world.members == ("g-0001",)
    assert out[-1].world.epoch == 2


def test_a_world_that_nobody_is_to_blame_for_is_tried_again_and_not_for_ever():
    group = Group()
    group.nodes("a")
    group.start(1, "a")
    out = group.tell(StepBoundary(0))
    tries = 0
    while not any(isinstance(one, FailGroup) for one in out):
        out = group.tell(WorldFailed(group.machine.state.epoch, (), "no idea"))
        tries += 1
        if not out:
            group.now = group.machine.next_deadline()
            out = group.tell(ElasticTick())
    assert 3 <= tries <= 10
    assert out[-1].reason.code is ReasonCode.cap


def test_below_the_least_the_group_says_so_waits_and_goes_on_when_there_are_enough():
    group = Group(min_members=2)
    group.begin("a", "b")
    group.tell(MemberLost("g-0002", "signal 9"))
    (wait,) = group.tell(StepInterrupted(1, "a call failed"))
    assert (type(wait), wait.reason.code) == (WaitForMembers, ReasonCode.below_min)
    assert wait.deadline == group.now + 600
    assert group.machine.view()["waiting"].startswith("BELOW_MIN: 1 of at least 2")
    (enter,) = group.start(3, "b")
    assert enter.newcomers == (("g-0003", "g-0001"),)
    (run,) = group.tell(WorldEntered(2))
    assert (run.step, run.redo) == (1, True)


def test_a_group_that_has_waited_as_long_as_it_may_gives_up():
    group = Group(min_members=2, wait_s=30.0)
    group.nodes("a")
    group.start(1, "a")
    group.tell(StepBoundary(0))
    assert group.machine.next_deadline() == group.now + 30
    (end,) = group.wait(30)
    assert (type(end), end.reason.code) == (FailGroup, ReasonCode.too_late)
    assert group.start(2, "a") == []
    assert group.machine.next_deadline() is None
    assert kinds(group.tell(GroupClosed())) == [StopMember, StopMember]


def test_replacements_back_off_longer_each_time_and_stop_at_the_cap():
    group = Group(restarts=4, restart_window_s=100.0)
    group.begin("a", "b")
    pauses, lost = [], "g-0002"
    for _ in range(4):
        out, pause = group.tell(MemberLost(lost, "signal 9")), 0.0
        while not any(isinstance(one, StartMember) for one in out):
            due = group.machine.next_deadline()
            pause += due - group.now
            out = group.wait(due - group.now)
        lost = next(one.member for one in out if isinstance(one, StartMember))
        pauses.append(pause)
    assert pauses == pytest.approx([0.0, 0.5, 1.0, 2.0])
    assert group.tell(MemberLost(lost, "signal 9")) == []
    assert group.machine.story("g")[-1].reason.code is ReasonCode.cap
    assert [type(one) for one in group.tell(StepInterrupted(1, "a call failed"))] == [EnterWorld]  # it goes on
    began = group.now
    group.now = group.machine.next_deadline()
    assert StartMember in kinds(group.tell(ElasticTick()))  # when its window has passed
    assert group.now - began > 90


def test_a_replacement_that_works_ends_the_back_off():
    group = Group()
    group.begin("a", "b")
    for member in (2, 3, 4):
        group.tell(MemberLost(f"g-{member:04d}", "signal 9"))
        group.tell(StepInterrupted(1 if member == 2 else group.machine.state.step + 1, "a call failed"))
        group.tell(WorldEntered(group.machine.state.epoch))
        group.start(member + 1, "b")  # at once: it was started without a pause
        group.done()
        group.tell(WorldEntered(group.machine.state.epoch))
        group.done()
    assert group.machine.view()["restarts"] == 3


def test_a_member_that_went_with_its_node_is_not_replaced_and_no_restart():
    group = Group()
    group.begin("a", "b")
    assert kinds(group.tell(MemberLost("g-0002", "its node is gone"))) == [StartMember, InterruptStep]
    assert kinds(group.nodes("a")) == [StopMember]  # what was started for it
    assert group.machine.view()["restarts"] == 0
    group.tell(MemberLeft("g-0003"))
    assert kinds(group.nodes("a", "b")) == [StartMember]


def test_members_of_a_node_that_is_not_there_any_more_are_lost_without_further_news():
    group = Group()
    group.begin("a", "b")
    end, interrupt = group.nodes("a")
    assert (type(end), end.reason.code) == (StopMember, ReasonCode.node_lost)
    assert isinstance(interrupt, InterruptStep)
    assert group.tell(MemberLost("g-0002", "late news")) == []


def test_a_constructor_that_raises_for_every_member_ends_the_group_before_it_began():
    group = Group(min_members=2)
    group.nodes("a", "b")
    group.tell(StepBoundary(0))
    assert FailGroup not in kinds(group.tell(MemberLost("g-0001", "ValueError: lr", fatal=True)))
    out = group.tell(MemberLost("g-0002", "ValueError: lr", fatal=True))
    assert out[-1].reason.code is ReasonCode.start_failed
    assert "ValueError: lr" in out[-1].reason.sentence


def test_starts_that_would_fail_again_reach_the_cap_sooner():
    group = Group(restarts=4)
    group.begin("a", "b")
    out, lost, tries = [], "g-0002", 0
    while True:
        out = group.tell(MemberLost(lost, "ValueError: lr", fatal=True))
        if not any(isinstance(one, StartMember) for one in out):
            out = group.wait(40)
        started = [one.member for one in out if isinstance(one, StartMember)]
        if not started:
            break
        lost, tries = started[0], tries + 1
    assert tries == 2


# ---- leaving ----


def test_members_of_a_draining_node_leave_at_the_boundary_and_hand_their_state_over():
    group = Group(max_members=2)
    group.begin("a", "b")
    out = group.nodes("a", "b", "c", b=60.0)
    assert [(type(one), one.reason.code) for one in out] == [(StartMember, ReasonCode.node_draining)]  # ahead
    assert group.state(2) == "leaving"
    group.start(3, "c")
    (enter,) = group.done()
    assert enter.world.members == ("g-0001", "g-0003")
    assert enter.newcomers == (("g-0003", "g-0002"),)
    assert enter.leavers == ("g-0002",)
    end, run = group.tell(WorldEntered(2))
    assert (type(end), end.member, end.reason.code) == (StopMember, "g-0002", ReasonCode.node_draining)
    assert (run.step, run.redo) == (2, False)


def test_a_long_step_is_interrupted_in_time_for_the_handover():
    group = Group(handover_s=5.0)
    group.begin("a", "b")
    group.nodes("a", "b", b=60.0)
    assert group.machine.next_deadline() == group.now + 55
    assert group.wait(54) == []
    (interrupt,) = group.wait(1)
    assert (type(interrupt), interrupt.reason.code) == (InterruptStep, ReasonCode.node_draining)
    assert group.wait(1) == []
    (enter,) = group.tell(StepInterrupted(1, "interrupted"))
    assert enter.leavers == ("g-0002",)
    assert [type(one) for one in group.tell(WorldEntered(2))] == [StopMember, RunStep]


def test_a_leaver_without_which_there_are_too_few_works_on_until_its_time_is_up():
    group = Group(min_members=2, handover_s=5.0)
    group.begin("a", "b")
    group.nodes("a", "b", b=60.0)
    (run,) = group.done()
    assert isinstance(run, RunStep)
    assert kinds(group.wait(55)) == [InterruptStep]
    (wait,) = group.tell(StepInterrupted(2, "interrupted"))
    assert isinstance(wait, WaitForMembers)
    assert group.state(2) == "leaving"  # alive, as a source
    (enter,) = group.nodes("a", "b", "c", b=5.0) + group.start(3, "c")
    assert enter.newcomers == (("g-0003", "g-0002"),)


def test_nobody_has_to_wait_for_the_next_step_to_leave():
    group = Group()
    group.begin("a", "b")
    group.tell(StepDone(1))
    (enter,) = group.nodes("a", "b", b=60.0)
    assert enter.leavers == ("g-0002",)
    assert kinds(group.tell(WorldEntered(2))) == [StopMember]  # no step: none was asked for
    assert kinds(group.tell(StepBoundary(1))) == [RunStep]


def test_a_drain_that_is_over_keeps_its_members():
    group = Group()
    group.begin("a", "b")
    group.nodes("a", "b", b=60.0)
    group.nodes("a", "b")
    assert group.state(2) == "working"
    assert kinds(group.done()) == [RunStep]


def test_a_member_without_a_rank_is_ended_at_once_when_its_node_drains():
    group = Group()
    group.begin("a")
    group.nodes("a", "b")
    group.start(2, "b")
    (end,) = group.nodes("a", "b", b=60.0)
    assert (type(end), end.member) == (StopMember, "g-0002")


def test_a_member_whose_room_is_taken_leaves_and_another_is_asked_for():
    group = Group()
    group.begin("a", "b")
    taken = Reason(ReasonCode.priority, "somebody more important came")
    (start,) = group.tell(MemberPreempted("g-0002", 30.0, taken))
    assert start.reason.code is ReasonCode.priority
    (enter,) = group.done()
    assert enter.leavers == ("g-0002",)


def test_a_member_that_has_two_causes_to_leave_keeps_the_nearer_deadline_however_often_it_is_told():
    group = Group()
    group.begin("a", "b")
    group.tell(MemberPreempted("g-0002", 30.0, Reason(ReasonCode.priority, "somebody more important came")))
    by = group.machine.state.members["g-0002"].leave_by
    for _ in range(3):
        group.nodes("a", "b", b=1000.0)
        assert group.machine.state.members["g-0002"].leave_by == by
    group.nodes("a", "b")  # the node stays after all; its room is still to be given up
    assert group.machine.state.members["g-0002"].leave_by == by
    assert group.machine.state.members["g-0002"].reason.code is ReasonCode.priority


def test_a_member_that_the_pool_took_away_and_gave_back_enters_again():
    group = Group()
    group.begin("a", "b")
    (interrupt,) = group.tell(MemberPending("g-0002", Reason(ReasonCode.priority, "somebody more important came")))
    assert isinstance(interrupt, InterruptStep)
    (enter,) = group.tell(StepInterrupted(1, "a call failed"))
    assert enter.world.members == ("g-0001",)
    group.tell(WorldEntered(2))
    group.start(2, "b")
    (enter,) = group.done()
    assert enter.newcomers == (("g-0002", "g-0001"),)
    assert group.machine.view()["restarts"] == 0


def test_the_only_member_that_has_the_state_is_never_ended_for_a_drain():
    group = Group()
    group.begin("a")
    group.nodes("a", a=20.0)
    group.wait(16)
    group.tell(StepInterrupted(1, "interrupted"))
    end, *_ = group.tell(MemberPending("g-0001", NO_ROOM))  # the pool took it, with its state
    assert end.member == "g-0002"  # which was to replace it, and would know nothing
    assert group.nodes("b") == []
    (enter,) = group.start(1, "b")
    assert enter.newcomers == (("g-0001", None),)
    (run,) = group.tell(WorldEntered(2))
    assert run.redo


# ---- health ----


def test_members_are_asked_for_their_health_when_it_is_due_and_none_twice():
    group = Group(health_every_s=5.0, health_timeout_s=2.0)
    group.begin("a")
    assert group.wait(4.9) == []
    assert group.wait(0.1) == [CheckHealth("g-0001", 2.0)]
    assert group.wait(5) == []
    assert group.tell(HealthChecked("g-0001")) == []
    assert group.wait(5) == [CheckHealth("g-0001", 2.0)]


def test_an_unhealthy_member_is_ended_and_replaced_and_that_is_a_restart():
    group = Group(health_every_s=5.0)
    group.begin("a", "b")
    group.wait(5)
    end, start, interrupt = group.tell(HealthChecked("g-0002", "no answer in 5 s"))
    assert (type(end), end.reason.code) == (StopMember, ReasonCode.unhealthy)
    assert (type(start), type(interrupt)) == (StartMember, InterruptStep)
    assert group.machine.view()["restarts"] == 1


def test_a_health_call_that_nobody_answers_is_a_fault():
    group = Group(health_every_s=5.0)
    group.begin("a")
    group.wait(5)
    group.now = group.machine.next_deadline()
    assert StopMember in kinds(group.tell(ElasticTick()))


def test_a_member_that_hangs_in_a_step_is_replaced_and_the_step_redone():
    group = Group()
    group.begin("a", "b")
    end, start, enter = group.tell(StepInterrupted(1, "not complete after 600 s", hung=("g-0002",)))
    assert (type(end), end.reason.code) == (StopMember, ReasonCode.hung)
    assert isinstance(start, StartMember)
    assert enter.world.members == ("g-0001",)


def test_a_step_that_its_driver_forgot_is_interrupted():
    group = Group(step_timeout_s=60.0)
    group.begin("a")
    group.now = group.machine.next_deadline()
    (interrupt,) = group.tell(ElasticTick())
    assert (type(interrupt), interrupt.reason.code) == (InterruptStep, ReasonCode.hung)
    assert group.now >= 160


# ---- ends, and what is told ----


@pytest.mark.parametrize("when", ["before", "waiting", "entering", "stepping"])
def test_a_group_can_be_closed_at_any_time_and_then_nothing_else_is_done(when):
    group = Group()
    if when != "before":
        group.nodes("a", "b")
        group.tell(StepBoundary(0))
    if when in ("entering", "stepping"):
        group.start(1, "a")
    if when == "stepping":
        group.tell(WorldEntered(1))
    out = group.tell(GroupClosed())
    assert all(isinstance(one, StopMember) for one in out)
    assert len(out) == (0 if when == "before" else 2)
    for event in (
        NodesChanged((node_view("c"),)),
        StepBoundary(0),
        ElasticTick(),
        MemberLost("g-0001", "x"),
        GroupClosed(),
    ):
        assert group.tell(event) == []
    assert group.machine.next_deadline() is None


def test_an_end_that_nobody_confirmed_is_said_again():
    group = Group()
    group.nodes("a", "b")
    (end,) = group.nodes("a")
    group.now = group.machine.next_deadline()
    assert group.tell(ElasticTick()) == [end]
    group.tell(MemberLeft(end.member))
    assert group.machine.next_deadline() is None


def test_late_news_of_members_that_are_gone_change_nothing():
    group = Group()
    group.begin("a", "b")
    group.tell(MemberLost("g-0002", "signal 9"))
    before = json.dumps(group.machine.dump())
    for event in (
        MemberLost("g-0002", "again"),
        MemberStarted("g-0002", "b"),
        MemberLeft("g-0002"),
        MemberPending("g-0002", NO_ROOM),
        MemberPreempted("g-0002", 1.0, NO_ROOM),
        HealthChecked("g-0002", "no answer"),
        WorldEntered(7),
        WorldFailed(7, (), "late"),
    ):
        assert group.tell(event) == []
        assert json.dumps(group.machine.dump()) == before


def test_the_view_says_who_is_where_and_why():
    group = Group(min_members=1, max_members=4)
    group.begin("a", "b")
    group.nodes("a", "b", "c")
    group.tell(MemberPending("g-0003", NO_ROOM))
    view = json.loads(json.dumps(group.machine.view()))
    assert (view["size"], view["wanted"], view["least"], view["most"], view["epoch"]) == (2, 3, 1, 4, 1)
    assert [(one["id"], one["state"], one["node"], one["rank"]) for one in view["members"]] == [
        ("g-0001", "working", "a", 0),
        ("g-0002", "working", "b", 1),
        ("g-0003", "pending", None, None),
    ]
    assert view["members"][2]["reason"] == {"code": "NO_ROOM", "sentence": "no node has enough free"}


def test_stories_say_what_became_of_the_group_and_its_members():
    group = Group()
    group.begin("a", "b")
    group.tell(MemberLost("g-0002", "signal 9"))
    group.tell(StepInterrupted(1, "a call failed"))
    group.tell(WorldEntered(2))
    assert [one.state for one in group.machine.story("g")] == ["world 1 of 2", "interrupted", "world 2 of 1"]
    assert [one.state for one in group.machine.story("g-0002")] == ["pending", "ready", "working", "gone"]
    assert group.machine.story("g-0002")[-1].reason.sentence == "signal 9"


def test_a_group_goes_on_from_its_snapshot():
    group = Group(health_every_s=5.0)
    group.begin("a", "b")
    group.nodes("a", "b", "c", b=60.0)
    again = ElasticMachine.load(json.loads(json.dumps(group.machine.dump())))
    for event in (MemberStarted("g-0003", "c"), StepDone(1), StepBoundary(1), WorldEntered(2), ElasticTick()):
        group.now += 3
        assert again.handle(event, group.now) == group.machine.handle(event, group.now)
    assert again.dump() == group.machine.dump()
