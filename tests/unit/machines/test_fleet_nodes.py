"""Rules of nodes that come and go, one at a time. What holds whatever happens is in `test_fleet_invariants`."""

from __future__ import annotations

import json

import pytest

from fleet_world import facts
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import Resources
from trimtab.machines.nodes.events import (
    AnnounceNodeChange,
    ConnectionBroken,
    CordonNode,
    DrainCancelled,
    DrainNode,
    DrainRequested,
    HeartbeatMissed,
    HeartbeatReceived,
    NodeGone,
    NodeSeen,
    NodeTick,
    RemoveNode,
    UseNode,
)
from trimtab.machines.nodes.machine import NodeMachine
from trimtab.machines.nodes.state import evict_after_s
from trimtab.model.nodes import NodePolicy, NodeState
from trimtab.model.pool import PreemptionPolicy

POLICY = NodePolicy()


class Fleet:
    """A machine, a clock, and what was said."""

    def __init__(self, *nodes: str, policy: NodePolicy = POLICY) -> None:
        self.machine, self.now, self.changes = NodeMachine(policy), 100.0, []
        for name in nodes:
            self.tell(NodeSeen(name, facts(head=name == "head")))
        self.wait(1)
        self.changes.clear()

    def tell(self, event):
        out = self.machine.handle(event, self.now)
        self.machine.check()
        self.changes += [one.change for one in out if isinstance(one, AnnounceNodeChange)]
        return [one for one in out if not isinstance(one, AnnounceNodeChange)]

    def wait(self, seconds):
        """Time passes, with every Tick that is due on the way."""
        end, out = self.now + seconds, []
        while (due := self.machine.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            out += self.tell(NodeTick())
        self.now = end
        return out + self.tell(NodeTick())

    def view(self, node):
        return next(one for one in self.machine.views(gone=True) if one.node == node)

    def state(self, node):
        return self.view(node).state

    def order(self):
        return [one.node for one in self.machine.views()]


def test_a_node_that_joins_is_used_at_once_and_told_of_after_a_moment():
    fleet = Fleet()
    (use,) = fleet.tell(NodeSeen("a", facts()))
    assert (use.node, use.reason.code) == ("a", ReasonCode.joined)
    assert fleet.changes == []
    assert not fleet.view("a").announced
    fleet.wait(POLICY.join_window_s)
    (change,) = fleet.changes
    assert (change.number, change.joined, change.reason.code) == (1, ("a",), ReasonCode.joined)
    assert fleet.view("a").announced
    assert fleet.machine.last_change == 1


def test_staggered_joins_are_one_change():
    fleet = Fleet()
    for name in "abcd":
        fleet.tell(NodeSeen(name, facts()))
        fleet.wait(0.05)
    fleet.wait(1)
    assert [change.joined for change in fleet.changes] == [("a", "b", "c", "d")]


def test_two_drains_two_seconds_apart_are_one_change():
    fleet = Fleet("head", "a", "b")
    (empty,) = fleet.tell(DrainRequested("a", fleet.now + 60, "spot"))
    assert (type(empty), empty.deadline) == (DrainNode, fleet.now + 60)
    fleet.wait(2)
    fleet.tell(DrainRequested("b", fleet.now + 60, "spot", by_ray=True))
    fleet.wait(5)
    assert [change.draining for change in fleet.changes] == [("a", "b")]
    assert fleet.changes[0].reason.code is ReasonCode.drain_asked
    assert "a, b" in fleet.changes[0].reason.sentence


def test_a_drain_that_is_near_is_told_at_once_with_whatever_is_pending():
    fleet = Fleet("head", "a", "b")
    fleet.tell(DrainRequested("a", fleet.now + 60, "spot"))
    fleet.tell(DrainRequested("b", fleet.now + 5, "spot"))
    assert [change.draining for change in fleet.changes] == [("a", "b")]


def test_a_drain_that_becomes_near_is_told_at_once():
    fleet = Fleet("head", "a")
    fleet.tell(DrainRequested("a", None, "an operator"))
    assert fleet.view("a").deadline is None
    (empty,) = fleet.tell(DrainRequested("a", fleet.now + 5, "an operator"))
    assert empty.deadline == fleet.now + 5
    assert [change.draining for change in fleet.changes] == [("a",)]


def test_joins_do_not_cut_the_window_of_drains_short():
    fleet = Fleet("head", "a", "b")
    fleet.tell(DrainRequested("a", None, "spot"))
    fleet.tell(NodeSeen("c", facts()))
    fleet.wait(1)
    fleet.tell(DrainRequested("b", None, "spot"))
    fleet.wait(5)
    assert [(change.joined, change.draining) for change in fleet.changes] == [(("c",), ()), ((), ("a", "b"))]


def test_a_deadline_in_the_past_is_now():
    fleet = Fleet("head", "a")
    past = fleet.now - 50
    (empty,) = fleet.tell(DrainRequested("a", past, "spot"))
    assert empty.deadline == fleet.now
    assert fleet.changes[0].draining == ("a",)
    fleet.wait(1)
    assert fleet.tell(DrainRequested("a", past, "spot")) == []


@pytest.mark.parametrize(("node", "says"), [("b", "there is no node b"), ("head", "is the head"), ("x", "is gone")])
def test_who_cannot_be_drained_is_refused_and_nothing_is_touched(node, says):
    fleet = Fleet("head", "a", "x")
    fleet.tell(ConnectionBroken("x", "refused"))
    before = json.dumps(fleet.machine.dump())
    with pytest.raises(InputError, match=says) as fault:
        fleet.machine.handle(DrainRequested(node, None, "an operator"), fleet.now + 1)
    assert fault.value.hint
    assert json.dumps(fleet.machine.dump()) == before


def test_what_ray_repeats_of_our_own_drain_changes_nothing_but_a_nearer_deadline_does():
    fleet = Fleet("head", "a")
    fleet.tell(DrainRequested("a", fleet.now + 60, "an operator"))
    assert fleet.tell(DrainRequested("a", fleet.now + 61, "DRAINING", by_ray=True)) == []
    assert fleet.tell(DrainRequested("a", None, "DRAINING", by_ray=True)) == []
    assert (
        fleet.tell(DrainRequested("a", fleet.now + 59.9, "DRAINING", by_ray=True)) == []
    )  # the same, by another clock
    (empty,) = fleet.tell(DrainRequested("a", fleet.now + 30, "preemption", by_ray=True))
    assert (empty.deadline, empty.reason.code) == (fleet.now + 30, ReasonCode.drain_seen)
    assert fleet.tell(DrainRequested("a", fleet.now + 90, "an operator")) == []  # nobody puts off what Ray said


def test_a_drain_that_is_over_within_its_window_is_never_told():
    fleet = Fleet("head", "a")
    fleet.tell(DrainRequested("a", None, "an operator"))
    (use,) = fleet.tell(DrainCancelled("a"))
    assert (use.node, use.reason.code) == ("a", ReasonCode.drain_over)
    fleet.wait(10)
    assert fleet.changes == []


def test_a_draining_node_that_goes_has_left_and_is_no_further_change():
    fleet = Fleet("head", "a", "b")
    fleet.tell(DrainRequested("a", fleet.now + 60, "spot"))
    fleet.tell(DrainRequested("b", fleet.now + 60, "spot"))
    fleet.wait(5)
    fleet.changes.clear()
    (one,) = fleet.tell(NodeGone("a"))
    (other,) = fleet.tell(ConnectionBroken("b", "refused"))
    assert isinstance(one, RemoveNode)
    assert isinstance(other, RemoveNode)
    assert one.reason.code is other.reason.code is ReasonCode.left
    assert fleet.state("a") is fleet.state("b") is NodeState.left
    assert fleet.view("a").losses == 0
    assert fleet.changes == []


def test_a_node_that_comes_back_after_its_drain_is_not_on_its_way_out():
    fleet = Fleet("head", "a")
    fleet.tell(DrainRequested("a", fleet.now + 60, "spot"))
    fleet.tell(NodeGone("a"))
    (use,) = fleet.tell(NodeSeen("a", facts()))
    assert (use.node, use.reason.code) == ("a", ReasonCode.returned)


def test_a_draining_node_whose_link_was_only_cut_for_a_moment_still_drains():
    fleet = Fleet("head", "a")
    fleet.tell(DrainRequested("a", fleet.now + 60, "spot"))
    fleet.tell(ConnectionBroken("a", "reset"))
    assert fleet.tell(HeartbeatReceived("a")) == []  # the pool has given up what was there
    assert fleet.state("a") is NodeState.draining


def test_a_node_whose_link_breaks_is_lost_at_once():
    fleet = Fleet("head", "a")
    (lose,) = fleet.tell(ConnectionBroken("a", "connection refused"))
    assert (type(lose), lose.reason.code) == (RemoveNode, ReasonCode.link_broken)
    assert "connection refused" in lose.reason.sentence
    assert fleet.changes[0].lost == ("a",)
    assert fleet.order() == ["head"]


def test_a_lost_node_does_not_come_back_because_ray_still_lists_it():
    fleet = Fleet("head", "a")
    fleet.tell(ConnectionBroken("a", "refused"))
    for _ in range(5):
        fleet.wait(10)
        assert fleet.tell(NodeSeen("a", facts())) == []
        assert fleet.tell(NodeSeen("a", facts(), Resources.of(cpu=1))) == []
    assert fleet.state("a") is NodeState.lost
    (use,) = fleet.tell(HeartbeatReceived("a"))
    assert (use.outside, use.reason.code) == (Resources.of(cpu=1), ReasonCode.returned)


def test_a_node_that_ray_dropped_and_has_again_is_back():
    fleet = Fleet("head", "a")
    (lose,) = fleet.tell(NodeGone("a"))
    assert lose.reason.code is ReasonCode.ray_lost
    assert fleet.tell(HeartbeatReceived("a")) == []  # nothing could be placed there
    (use,) = fleet.tell(NodeSeen("a", facts()))
    assert (use.node, use.reason.code) == ("a", ReasonCode.returned)
    fleet.wait(1)
    assert [(change.joined, change.lost) for change in fleet.changes] == [((), ("a",)), (("a",), ())]


def test_a_silent_node_is_spared_then_lost_and_heard_again_it_is_back():
    fleet = Fleet("head", "a")
    assert fleet.tell(HeartbeatMissed("a", 0.5)) == []
    (spare,) = fleet.tell(HeartbeatMissed("a", 1.2))
    assert (type(spare), spare.reason.code) == (CordonNode, ReasonCode.link_silent)
    assert fleet.tell(HeartbeatMissed("a", 2.2)) == []
    (use,) = fleet.tell(HeartbeatReceived("a"))
    assert isinstance(use, UseNode)
    assert fleet.changes == []  # what ran there went on
    fleet.tell(HeartbeatMissed("a", 2.0))
    (lose,) = fleet.tell(HeartbeatMissed("a", 10.0))
    assert isinstance(lose, RemoveNode)
    assert fleet.changes[0].lost == ("a",)
    (use,) = fleet.tell(HeartbeatReceived("a"))
    assert isinstance(use, UseNode)


def test_no_time_that_passes_here_loses_a_node():
    fleet = Fleet("head", "a")
    fleet.tell(HeartbeatMissed("a", 5.0))
    fleet.now += 1e6  # the machine itself slept
    assert fleet.tell(NodeTick()) == []
    assert fleet.state("a") is NodeState.suspect


def test_the_end_in_order_of_a_node_takes_back_that_it_was_lost():
    fleet = Fleet("head", "a")
    fleet.tell(ConnectionBroken("a", "refused"))  # `ray stop`: the link is faster than the news
    fleet.tell(NodeGone("a", expected=True))
    assert fleet.state("a") is NodeState.left
    assert fleet.view("a").losses == 0


def test_a_flapping_node_does_not_cause_a_change_per_flap():
    fleet = Fleet("head", "a")
    for _ in range(60):
        fleet.tell(ConnectionBroken("a", "reset"))
        fleet.wait(0.5)
        fleet.tell(HeartbeatReceived("a"))
        fleet.wait(0.5)
    assert fleet.state("a") is NodeState.held
    assert fleet.view("a").reason.code is ReasonCode.flapping
    assert fleet.view("a").deadline == pytest.approx(fleet.now - 0.5 + POLICY.max_hold_s)
    assert len(fleet.changes) <= 3  # lost, back, lost
    assert fleet.order() == ["head", "a"]


def test_a_held_node_is_used_once_it_has_been_steady():
    fleet = Fleet("head", "a")
    for _ in range(2):
        fleet.tell(ConnectionBroken("a", "reset"))
        fleet.tell(HeartbeatReceived("a"))
    assert fleet.state("a") is NodeState.held
    fleet.wait(4)
    fleet.tell(HeartbeatMissed("a", 2.0))  # not steady: it begins again
    assert fleet.wait(4.9) == []
    (use,) = fleet.wait(0.2)
    assert use.reason.code is ReasonCode.steady
    fleet.wait(1)
    assert fleet.changes[-1].joined == ("a",)


def test_each_hold_is_twice_as_long():
    fleet, holds = Fleet("head", "a"), []
    for _ in range(5):
        fleet.tell(ConnectionBroken("a", "reset"))
        fleet.tell(HeartbeatReceived("a"))
        until = fleet.view("a").deadline
        holds.append(None if until is None else until - fleet.now)
    assert holds == [None, 5.0, 10.0, 20.0, 40.0]


def test_losses_are_forgotten():
    fleet = Fleet("head", "a")
    for _ in range(2):
        fleet.tell(ConnectionBroken("a", "reset"))
        fleet.tell(HeartbeatReceived("a"))
    fleet.wait(POLICY.forget_s)
    assert fleet.view("a").losses == 0
    fleet.tell(ConnectionBroken("a", "reset"))
    (use,) = fleet.tell(HeartbeatReceived("a"))
    assert isinstance(use, UseNode)


def test_a_worker_that_is_started_again_under_another_id_is_known_by_its_name():
    fleet = Fleet("head")
    for at in range(3):
        out = fleet.tell(NodeSeen(f"id{at}", facts(name="worker-1")))
        fleet.wait(1)
        fleet.tell(ConnectionBroken(f"id{at}", "refused"))
        fleet.tell(NodeGone(f"id{at}"))
    assert out == []
    assert fleet.machine.story("id2")[0].reason.code is ReasonCode.flapping


def test_a_node_that_joins_and_is_lost_within_the_window_is_never_told():
    fleet = Fleet("head")
    fleet.tell(NodeSeen("a", facts()))
    fleet.tell(ConnectionBroken("a", "refused"))
    fleet.wait(5)
    assert fleet.changes == []


def test_a_loss_takes_along_what_is_pending():
    fleet = Fleet("head", "a", "b")
    fleet.tell(NodeSeen("c", facts()))
    fleet.tell(DrainRequested("a", None, "spot"))
    fleet.tell(ConnectionBroken("b", "refused"))
    (change,) = fleet.changes
    assert (change.joined, change.draining, change.lost) == (("c",), ("a",), ("b",))


def test_nodes_are_in_the_order_in_which_they_came_and_the_head_is_first():
    fleet = Fleet("b", "head", "c")
    fleet.tell(NodeSeen("a", facts()))
    assert fleet.order() == ["head", "b", "c", "a"]
    fleet.tell(ConnectionBroken("b", "refused"))
    fleet.tell(HeartbeatReceived("b"))
    assert fleet.order() == ["head", "b", "c", "a"]


def test_a_node_with_other_accelerators_than_most_is_unlike():
    fleet = Fleet("head", "a")
    (use,) = fleet.tell(NodeSeen("b", facts(2)))
    assert use.reason.code is ReasonCode.unlike
    assert "2 H100" in use.reason.sentence
    assert "most have 1 H100" in use.reason.sentence
    fleet.tell(NodeSeen("c", facts(kind="A100")))
    assert [fleet.view(name).unlike for name in ("head", "a", "b", "c")] == [False, False, True, True]
    for name in "de":
        fleet.tell(NodeSeen(name, facts(2)))
    assert [fleet.view(name).unlike for name in ("head", "a", "b", "c")] == [True, True, False, True]


def test_a_node_without_gpus_is_used_and_says_so():
    fleet = Fleet("head")
    (use,) = fleet.tell(NodeSeen("a", facts(0)))
    assert "it has no GPU" in use.reason.sentence
    assert not fleet.view("a").unlike


def test_other_figures_are_said_while_the_node_is_used():
    fleet = Fleet("head", "a")
    (use,) = fleet.tell(NodeSeen("a", facts(), Resources.of(gpu=1)))
    assert (use.outside, use.reason.code) == (Resources.of(gpu=1), ReasonCode.changed)
    assert "others hold 1 gpu" in use.reason.sentence
    fleet.tell(HeartbeatMissed("a", 2.0))
    assert fleet.tell(NodeSeen("a", facts())) == []
    (use,) = fleet.tell(HeartbeatReceived("a"))
    assert use.outside == Resources.of()


def test_nodes_that_went_are_forgotten_so_memory_does_not_grow():
    fleet = Fleet("head")
    for at in range(50):
        fleet.tell(NodeSeen(f"n{at}", facts()))
        fleet.tell(NodeGone(f"n{at}"))
        fleet.wait(30)
    assert len(fleet.machine.nodes) <= 1 + POLICY.forget_s / 30 + 1
    fleet.wait(POLICY.forget_s)
    assert list(fleet.machine.nodes) == ["head"]
    assert fleet.machine.next_deadline() is None
    assert fleet.machine.story("n1") == ()


def test_a_lost_node_is_remembered_as_long_as_ray_lists_it():
    fleet = Fleet("head", "a")
    fleet.tell(ConnectionBroken("a", "refused"))
    fleet.wait(10 * POLICY.forget_s)
    assert fleet.tell(NodeSeen("a", facts())) == []
    assert fleet.state("a") is NodeState.lost


def test_the_version_grows_with_every_change_that_can_be_seen_and_with_no_other():
    fleet = Fleet("head", "a")
    before = fleet.machine.version
    for event in (
        NodeSeen("a", facts()),
        HeartbeatReceived("a"),
        HeartbeatMissed("a", 0.1),
        DrainCancelled("a"),
        NodeTick(),
        NodeGone("b"),
    ):
        fleet.tell(event)
    assert fleet.machine.version == before
    for event in (
        HeartbeatMissed("a", 2.0),
        HeartbeatReceived("a"),
        DrainRequested("a", None, "x"),
        ConnectionBroken("a", "x"),
    ):
        fleet.tell(event)
        assert fleet.machine.version > before
        before = fleet.machine.version


def test_the_story_of_a_node_says_what_became_of_it_and_why():
    fleet = Fleet("head", "a")
    fleet.tell(DrainRequested("a", fleet.now + 30, "spot termination"))
    fleet.tell(NodeGone("a"))
    states = [(one.state, one.reason.code) for one in fleet.machine.story("a")]
    assert states == [("ready", ReasonCode.joined), ("draining", ReasonCode.drain_asked), ("left", ReasonCode.left)]
    assert "spot termination" in fleet.machine.story("a")[-1].reason.sentence


def test_a_machine_goes_on_from_its_snapshot():
    fleet = Fleet("head", "a", "b")
    fleet.tell(DrainRequested("a", fleet.now + 60, "spot"))
    fleet.tell(NodeSeen("c", facts(2, name="worker-2")))
    again = NodeMachine.load(json.loads(json.dumps(fleet.machine.dump())))
    assert again.views() == fleet.machine.views()
    assert again.next_deadline() == fleet.machine.next_deadline()
    assert again.handle(NodeTick(), fleet.now + 9) == fleet.machine.handle(NodeTick(), fleet.now + 9)
    assert again.dump() == fleet.machine.dump()


@pytest.mark.parametrize(("left_s", "after_s"), [(None, 30.0), (-1.0, 0.0), (10.0, 5.0), (140.0, 70.0), (200.0, 130.0)])
def test_what_stays_on_a_draining_node_is_evicted_in_time_to_be_saved_and_not_before_half_of_it(left_s, after_s):
    policy = PreemptionPolicy(cancel_timeout_s=5.0, save_timeout_s=60.0)
    assert evict_after_s(left_s, policy) == after_s
