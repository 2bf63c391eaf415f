"""The rules of pools, one by one. The world around the machine asserts what must always be true besides."""

from __future__ import annotations

import contextlib
import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from obvious_pool import dominated, may_evict, sufficient_sets
from pool_world import World, gang, gpus, policy, pool, task
from trimtab.core.errors import InputError
from trimtab.core.reasons import STORY_KEPT, ReasonCode
from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.pool import events as news
from trimtab.machines.pool import feasibility as room
from trimtab.machines.pool.events import (
    CreatePlacementGroup,
    ParkTask,
    RemovePlacementGroup,
    StartTask,
    StopTask,
    UnparkTask,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import Aggressiveness, PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec, TaskState


def world(*nodes: float, spec: PoolSpec | None = None, rules: PreemptionPolicy | None = None) -> World:
    """Nodes of so many GPUs, one pool, and a policy if any."""
    made = World()
    for at, count in enumerate(nodes):
        made.node(f"n{at}", count)
    made.tell(news.PoolEnsured(spec or pool()))
    if rules is not None:
        made.tell(news.PolicySet(rules))
    made.carry_all()
    return made


# ---- pools, slots and the ledger --------------------------------------------------------------------------------


def test_a_task_gets_a_slot_and_then_a_process():
    one = world(8)
    (make,) = one.submit(task("a", 2))
    assert isinstance(make, CreatePlacementGroup)
    assert (make.pool, make.bundles, make.nodes) == ("p", (gpus(2),), ("n0",))
    (start,) = one.carry(make)
    assert isinstance(start, StartTask)
    assert (start.task, start.attempt, start.restore) == ("a", 1, False)
    assert one.state("a") is TaskState.starting
    one.carry(start)
    assert one.state("a") is TaskState.running


def test_a_task_may_use_any_resource_that_has_a_name():
    one = World()
    one.tell(news.NodeJoined("n", Resources.of(cpu=4, memory=2**35, licence=1)))
    one.tell(news.PoolEnsured(pool(quota=Resources.of(cpu=4, memory=2**35, licence=2))))
    one.run(task("a", Resources.of(cpu=1, licence=1)), task("b", Resources.of(cpu=1, memory=2**34, licence=1)))
    assert one.states("a", "b") == ["running", "waiting"]
    assert one.why("b") is ReasonCode.no_room


def test_the_quota_binds_what_tasks_use():
    one = world(8, spec=pool(quota=gpus(3)))
    one.run(task("a", 2), task("b", 2))
    assert one.states("a", "b") == ["running", "waiting"]
    assert one.why("b") is ReasonCode.quota


def test_tenths_of_a_gpu_add_up_exactly():
    one = world(1, spec=pool(quota=gpus(1)))
    one.run(*[task(f"t{at}", 0.1) for at in range(11)])
    assert len(one.running()) == 10
    assert one.state("t10") is TaskState.waiting


def test_what_others_hold_of_a_node_is_left_alone():
    one = World()
    one.node("n", 8, outside=gpus(6))
    one.tell(news.PoolEnsured(pool()))
    one.run(task("a", 2), task("b", 1))
    assert one.states("a", "b") == ["running", "waiting"]
    one.node("n", 8, outside=gpus(5))
    one.carry_all()
    assert one.state("b") is TaskState.running


def test_a_node_whose_figures_shrink_keeps_what_runs_and_takes_nothing_new():
    one = world(8)
    one.run(task("a", 4))
    one.node("n0", 8, outside=gpus(6))
    one.run(task("b", 1))
    assert one.states("a", "b") == ["running", "waiting"]


def test_a_reserved_slot_is_made_with_the_pool_and_goes_to_high_priority():
    one = world(8, spec=pool(reserved=(gpus(4),)))
    assert len(one.groups) == 1
    one.submit(task("low", 4, priority=7.9))
    one.carry_all()
    one.submit(task("high", 4, priority=8.0))
    assert [type(x) for x in one.pending] == [StartTask]
    one.carry_all()
    assert one.states("low", "high") == ["running", "running"]
    assert one.machine.tasks["high"].places != one.machine.tasks["low"].places
    reserved = [c.reason.code for c in one.machine.story("high") if c.state == "starting"]
    assert reserved == [ReasonCode.reserved]


def test_a_reserved_slot_is_no_room_for_low_priority():
    one = world(4, spec=pool(reserved=(gpus(4),)))
    one.run(task("low", 1, priority=5))
    assert one.state("low") is TaskState.waiting


def test_a_reserved_slot_takes_nothing_from_the_quota_until_somebody_is_in_it():
    one = world(8, spec=pool(quota=gpus(4), reserved=(gpus(4),)))
    one.run(task("low", 4, priority=5), task("high", 4, priority=9))
    assert one.states("low", "high") == ["running", "waiting"]
    assert one.why("high") is ReasonCode.quota


def test_a_reserved_slot_waits_for_a_node_that_can_hold_it():
    one = world(2, spec=pool(reserved=(gpus(4),)))
    assert not one.groups
    one.node("big", 8)
    one.carry_all()
    assert [group.made.nodes for group in one.groups.values()] == [("big",)]


def test_a_reserved_slot_on_a_lost_node_is_made_again_elsewhere():
    one = world(4, 4, spec=pool(reserved=(gpus(4),)))
    (group,) = one.groups.values()
    (lost,) = group.made.nodes
    one.tell(news.NodeLost(lost))
    one.carry_all()
    one.run(task("high", 4, priority=9))
    assert one.state("high") is TaskState.running
    assert one.machine.tasks["high"].places[0].node != lost


def test_dynamic_slots_have_a_limit():
    one = world(8, spec=pool(dynamic_limit=2))
    one.run(task("a"), task("b"), task("c"))
    assert one.states("a", "b", "c") == ["running", "running", "waiting"]
    assert one.why("c") is ReasonCode.slot_limit
    one.end("a")
    assert one.state("c") is TaskState.running


def test_an_idle_slot_at_the_limit_makes_way_for_one_of_another_size():
    one = world(8, spec=pool(dynamic_limit=1))
    one.run(task("a", 1))
    one.end("a")
    one.run(task("b", 2))
    assert one.state("b") is TaskState.running


def test_an_idle_slot_is_used_again():
    one = world(8)
    one.run(task("a", 2))
    place = one.machine.tasks["a"].places
    one.end("a")
    assert len(one.groups) == 1
    (start,) = one.submit(task("b", 2))
    assert isinstance(start, StartTask)
    assert start.places == place


def test_an_idle_slot_is_used_again_also_where_others_took_more_than_the_node_has():
    one = world(2)
    one.tell(news.PoolEnsured(pool("q")))
    one.run(task("a", 1), task("b", 1, pool="q"), task("c", 1))
    one.node("n0", 2, outside=gpus(2))
    assert one.states("a", "b", "c") == ["running", "running", "waiting"]
    one.end("a")
    assert one.state("c") is TaskState.running
    assert one.why("c") is ReasonCode.reused


def test_without_reuse_a_slot_ends_with_its_task():
    one = world(8, spec=pool(reuse=False))
    one.run(task("a", 2))
    one.end("a")
    assert not one.groups


def test_an_idle_slot_makes_way_for_whoever_needs_its_room():
    one = world(8)
    one.tell(news.PoolEnsured(pool("q")))
    one.run(task("a", 2))
    one.end("a")
    one.run(task("b", 8, pool="q"))
    assert one.state("b") is TaskState.running
    assert len(one.groups) == 1


def test_an_idle_slot_is_not_removed_where_room_is_free():
    one = world(8)
    one.run(task("a", 2))
    one.end("a")
    one.run(task("b", 4))
    assert len(one.groups) == 2


def test_the_slot_goes_too_where_that_is_asked():
    one = world(8)
    one.run(task("a", 2), task("b", 2))
    one.tell(news.CompleteRequested("a", keep_slot=False))
    one.carry_all()
    assert one.state("a") is TaskState.done
    assert len(one.groups) == 1


def test_complete_frees_the_slot_and_the_quota():
    one = world(2, spec=pool(quota=gpus(2)))
    one.run(task("a", 2), task("b", 2))
    (stop,) = one.tell(news.CompleteRequested("a"))
    assert isinstance(stop, StopTask)
    assert one.state("b") is TaskState.waiting  # its process is still there
    one.carry_all()
    assert one.states("a", "b") == ["done", "running"]


def test_nothing_new_goes_to_a_cordoned_node():
    one = world(8)
    one.tell(news.NodeCordoned("n0"))
    one.run(task("a"))
    assert one.state("a") is TaskState.waiting
    one.tell(news.NodeCordoned("n0", False))
    one.carry_all()
    assert one.state("a") is TaskState.running


def test_an_idle_slot_on_a_cordoned_node_is_not_used_again():
    one = world(8, 8)
    one.run(task("a", 2))
    node = one.machine.tasks["a"].places[0].node
    one.end("a")
    one.tell(news.NodeCordoned(node))
    one.run(task("b", 2))
    assert one.machine.tasks["b"].places[0].node != node


def test_what_is_on_a_node_that_will_go_is_saved_and_returns_elsewhere():
    one = world(8, 8)
    one.run(task("a", 2, saves=True), task("b", 2, preemptible=False), gang("g", 2, 2))
    homes = {name: {place.node for place in one.machine.tasks[name].places} for name in ("a", "b", "g")}
    (node,) = homes["a"]
    stops = [each for each in one.tell(news.NodeDrained(node, "spot")) if isinstance(each, StopTask)]
    assert {stop.task for stop in stops} == {name for name, home in homes.items() if node in home}
    assert all(stop.reason.code is ReasonCode.node_draining and "spot" in stop.reason.sentence for stop in stops)
    assert all(stop.checkpoint_timeout_s > 0 for stop in stops)
    one.carry_all()
    moved = [name for name in homes if one.state(name) is TaskState.running]
    assert "a" in moved
    assert all(node not in {place.node for place in one.machine.tasks[name].places} for name in moved)
    assert all(one.state(name) is TaskState.evicted for name in homes if name not in moved)
    assert not any(node in group.nodes for group in one.machine.groups.values())


def test_a_node_that_was_emptied_stays_so_until_it_is_opened():
    one = world(8)
    one.run(task("a", 2))
    one.tell(news.NodeDrained("n0"))
    one.carry_all()
    one.run(task("b", 2))
    assert one.states("a", "b") == ["evicted", "waiting"]
    one.tell(news.NodeCordoned("n0", False))
    one.carry_all()
    assert one.states("a", "b") == ["running", "running"]


def test_a_reserved_slot_moves_from_a_node_that_will_go():
    one = world(8, 8, spec=pool(reserved=(gpus(4),)))
    one.carry_all()
    (group,) = one.machine.groups.values()
    one.tell(news.NodeDrained(group.nodes[0]))
    one.carry_all()
    (moved,) = one.machine.groups.values()
    assert moved.nodes != group.nodes


def test_a_tenant_that_waits_for_its_turn_on_a_node_that_will_go_waits_in_the_queue_instead():
    one = world(8, 8)
    one.run(task("a", 4, room=(gpus(4),)), task("b", 4, shares="a"))
    home = one.machine.tasks["a"].places[0].node
    one.tell(news.NodeDrained(home))
    one.carry_all()
    assert one.states("a", "b") == ["running", "running"]
    assert all(one.machine.tasks[name].places[0].node != home for name in "ab")


def test_a_task_that_awaits_a_node_waits_where_none_is_large_enough():
    one = world(2)
    one.run(task("a", 8, awaits_node=True), task("b", 8))
    assert one.states("a", "b") == ["waiting", "failed"]
    assert one.why("a") is ReasonCode.no_node
    one.node("n1", 8)
    one.carry_all()
    assert one.state("a") is TaskState.running


def labelled(**labels):
    return tuple(sorted(labels.items()))


def test_a_task_goes_to_a_node_with_the_label_that_it_asks_for():
    one = world(8)
    one.node("h200", 4, labels=labelled(gpu="h200", zone="b"))
    one.node("a100", 4, labels=labelled(gpu="a100", zone="b"))
    one.run(
        task("value", 2, label_selector=(("gpu", "h200"),)),
        task("not", 2, label_selector=(("gpu", "!h200"), ("zone", "b"))),
        task("any", 2, label_selector=(("gpu", "in(a100, h200)"),)),
        task("none", 2, label_selector=(("gpu", "!in(a100, h200)"),)),
        task("plain", 2),
    )
    at = {name: found.places[0].node for name, found in one.machine.tasks.items()}
    assert (at["value"], at["not"], at["none"]) == ("h200", "a100", "n0")
    assert at["any"] in ("h200", "a100")
    one.run(task("more", 4, label_selector=(("gpu", "h200"),)))
    assert one.state("more") is TaskState.waiting
    assert one.why("more") is ReasonCode.no_room
    one.reload()
    one.end("value")
    if at["any"] == "h200":
        one.end("any")
    one.carry_all()
    assert one.machine.tasks["more"].places[0].node == "h200"


def test_a_label_that_no_node_has_is_said_and_a_node_that_joins_with_it_is_used():
    one = world(8)
    asked = {"label_selector": (("gpu", "b200"),)}
    one.run(task("fails", 1, **asked), task("waits", 1, awaits_node=True, **asked))
    assert one.states("fails", "waits") == ["failed", "waiting"]
    assert "no node has label gpu=b200" in one.machine.tasks["waits"].reason.sentence
    one.node("n9", 8, labels=labelled(gpu="b200"))
    one.carry_all()
    assert one.machine.tasks["waits"].places[0].node == "n9"


def test_tasks_are_evicted_only_on_nodes_with_the_label():
    one = world(2)
    one.node("far", 2, labels=labelled(gpu="h200"))
    one.tell(news.PolicySet(policy(same_pool_gap=1.0)))
    one.run(task("a", 2, priority=1.0), task("b", 2, priority=1.0, label_selector=(("gpu", "h200"),)))
    one.run(task("urgent", 2, priority=9.0, label_selector=(("gpu", "h200"),)))
    assert one.states("a", "b", "urgent") == ["running", "evicted", "running"]


def test_a_reserved_slot_on_a_node_without_the_label_is_not_taken_over():
    one = world(2, spec=pool(reserved=(gpus(2),)), rules=policy(same_pool_gap=0.5))
    one.run(task("a", 1, priority=9.0, label_selector=(("gpu", "h200"),), awaits_node=True))
    assert one.why("a") is ReasonCode.no_node


def test_a_task_that_waits_for_a_label_starts_after_a_restart_of_the_controller():
    one = world(4)
    one.run(task("runs", 4), task("waits", 1, label_selector=(("gpu", "!h200"),)))
    one.machine = PoolMachine.load(one.machine.dump())
    one.end("runs")
    assert one.states("runs", "waits") == ["done", "running"]


@pytest.mark.parametrize("selector", [(("", "x"),), (("a=b", "x"),), (("a", "! "),)])
def test_a_selector_that_selects_nothing_is_refused(selector):
    with pytest.raises(InputError, match="selects no node"):
        task("a", 1, label_selector=selector)
    with pytest.raises(InputError, match="not its choice"):
        task("a", 1, label_selector=(("a", "x"),), shares="b")


def test_nobody_joins_a_slot_that_somebody_else_takes_over():
    one = world(4)
    one.tell(news.PolicySet(policy(same_pool_gap=1.0)))
    one.run(task("owner", 2, room=(gpus(4),), priority=1.0))
    one.tell(news.TaskSubmitted(task("new", 4, priority=9.0)))
    assert one.state("owner") is TaskState.cancelling
    one.tell(news.TaskSubmitted(task("sharer", 2, shares="owner", priority=5.0)))
    one.carry_all()
    assert one.states("new", "owner", "sharer") == ["running", "evicted", "waiting"]
    one.end("new")
    one.carry_all()
    assert one.state("owner") is TaskState.running


def test_nobody_is_evicted_for_room_that_is_being_made_free_anyway():
    one = world(8, spec=pool(reuse=False, return_preempts=True))
    one.tell(news.PolicySet(policy(same_pool_gap=0.5)))
    one.run(task("low", 1, priority=1.0), task("back", 2, priority=2.0), task("first", 2, priority=12.0))
    one.tell(news.EvictRequested("back"))
    one.tell(news.TaskSubmitted(task("second", 2, priority=12.0)))
    one.carry_all(CreatePlacementGroup, StartTask)
    one.carry_all(StopTask)  # it is gone, and its slot is being removed: 1 GPU is free now, 3 in a moment
    assert one.states("low", "back") == ["running", "evicted"]
    assert one.why("back") is ReasonCode.evicting
    one.carry_all()
    assert one.states("low", "back") == ["running", "running"]


def test_a_quota_can_be_changed_and_what_runs_over_a_smaller_one_goes_on():
    one = world(8, spec=pool(quota=gpus(4, cpu=100)))
    one.run(task("a", gpus(2)), task("b", gpus(2)), task("c", gpus(2)))
    assert one.states("a", "b", "c") == ["running", "running", "waiting"]
    assert one.why("c") is ReasonCode.quota
    one.tell(news.QuotaSet("p", Resources.of(gpu=6, cpu=100)))
    one.carry_all()
    assert one.state("c") is TaskState.running
    one.tell(news.CompleteRequested("c"))
    one.carry_all()
    one.tell(news.QuotaSet("p", Resources.of(gpu=4, cpu=100)))
    one.run(task("d", gpus(2)))
    assert (one.state("d"), one.why("d")) == (TaskState.waiting, ReasonCode.quota)
    with pytest.raises(InputError, match="nowhere"):
        one.tell(news.QuotaSet("nowhere", Resources.of(gpu=1)))


def test_a_drained_pool_takes_nothing_new_and_says_so():
    one = world(8)
    one.run(task("a"))
    one.tell(news.PoolDrained("p"))
    one.run(task("b"))
    assert one.states("a", "b") == ["running", "waiting"]
    assert one.why("b") is ReasonCode.drained
    one.tell(news.PoolDrained("p", on=False))
    one.carry_all()
    assert one.state("b") is TaskState.running


def test_a_dropped_pool_leaves_nothing_behind():
    one = world(8, spec=pool(reserved=(gpus(1),)))
    one.run(task("a"), task("b", 8, wait_s=100))
    one.tell(news.PoolDropped("p"))
    one.carry_all()
    assert not one.groups
    assert not one.runs
    assert one.states("a", "b") == ["cancelled", "cancelled"]
    assert one.why("a") is ReasonCode.pool_dropped


def test_a_slot_is_given_on_only_after_the_process_is_gone():
    one = world(2)
    one.run(task("a", 2), task("b", 2))
    one.tell(news.CancelRequested("a"))
    assert not [x for x in one.pending if isinstance(x, StartTask | CreatePlacementGroup | RemovePlacementGroup)]
    one.carry_all()
    assert one.states("a", "b") == ["cancelled", "running"]


# ---- gangs ------------------------------------------------------------------------------------------------------


def test_a_gang_starts_whole_or_not_at_all():
    one = world(4, 4)
    one.run(gang("g", 4, 2, strategy=PlacementStrategy.spread), gang("h", 2, 1))
    assert one.states("g", "h") == ["running", "waiting"]
    assert len(one.machine.tasks["g"].places) == 4


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        (PlacementStrategy.strict_pack, 1),
        (PlacementStrategy.pack, 1),
        (PlacementStrategy.spread, 2),
        (PlacementStrategy.strict_spread, 2),
    ],
)
def test_a_gang_lies_as_its_strategy_says(strategy: PlacementStrategy, nodes: int):
    one = world(4, 4)
    one.run(gang("g", 2, 1, strategy=strategy))
    assert len({place.node for place in one.machine.tasks["g"].places}) == nodes


def test_a_gang_without_a_strategy_has_its_pools():
    one = world(4, 4, spec=pool(strategy=PlacementStrategy.strict_spread))
    one.run(gang("g", 2, 1))
    assert {place.node for place in one.machine.tasks["g"].places} == {"n0", "n1"}


def test_a_pack_gang_goes_over_several_nodes_where_it_must():
    one = world(2, 2)
    one.run(gang("g", 4, 1, strategy=PlacementStrategy.pack))
    assert one.state("g") is TaskState.running


def test_a_gang_counts_every_bundle_against_the_limit():
    one = world(8, spec=pool(dynamic_limit=3))
    one.run(task("a"), gang("g", 3, 1), gang("h", 2, 1))
    assert one.states("a", "g", "h") == ["running", "waiting", "running"]


def test_a_gang_that_loses_a_member_stops_whole():
    one = world(2, 2)
    one.run(gang("g", 2, 2, strategy=PlacementStrategy.spread, restarts=1))
    (stop,) = one.tell(news.TaskDied("g", 1, "killed"))
    assert isinstance(stop, StopTask)
    assert stop.reason.code in (ReasonCode.gang_broken, ReasonCode.process_died)
    one.carry_all()
    one.tick(60)
    one.carry_all()
    assert one.state("g") is TaskState.running
    assert one.machine.tasks["g"].attempt == 2


def test_two_half_placed_gangs_after_a_node_loss_do_not_hold_each_other():
    # Both lie over n0 and n1; when n1 is gone each could keep its half of n0 and wait for the other's half for ever.
    one = world(4, 4)
    spread = {"strategy": PlacementStrategy.strict_spread, "restarts": -1}
    one.run(gang("g", 2, 2, **spread), gang("h", 2, 2, **spread))
    one.tell(news.NodeLost("n1"))
    one.carry_all()
    assert not one.groups, "halves of gangs are held"
    one.node("n2", 2)
    one.tick(120)
    one.carry_all()
    assert sorted(one.states("g", "h")) == ["running", "waiting"]
    (first,) = one.running()
    one.end(first)
    one.tick(120)
    one.carry_all()
    assert sorted(one.states("g", "h")) == ["done", "running"]


@pytest.mark.parametrize("runs", [0, 20])
def test_a_big_gang_is_not_starved_by_small_tasks_for_ever(runs: float):
    one = world(8, spec=pool(starvation_timeout_s=60, starvation_runs=runs))
    one.run(*[task(f"t{at}", 2) for at in range(4)], gang("g", 4, 2))
    number = itertools.count(4)
    for _ in range(40 + 10 * runs):
        # There is always a small task that would fit, and each runs for a while.
        one.submit(task(f"t{next(number)}", 2))
        one.carry_all()
        one.tick(10)
        ready = sorted(one.running() - {"g"}, key=lambda name: int(name[1:]))
        if one.state("g") is TaskState.running:
            break
        one.end(ready[0])
    assert one.state("g") is TaskState.running
    told = [chapter.reason.code for name in one.specs if name != "g" for chapter in one.machine.story(name)]
    assert ReasonCode.behind in told


def test_no_room_is_kept_for_one_who_would_not_fit_even_if_all_others_ended():
    one = world(2, 2, spec=pool(reserved=(gpus(2),), starvation_timeout_s=0.0, strategy=PlacementStrategy.pack))
    one.run(gang("big", 3, 1), gang("small", 2, 1))
    assert one.state("small") is TaskState.running


def test_a_gang_that_waits_beside_a_draining_node_is_told_of_it():
    one = world(2, 2, 2)
    one.run(task("a", 2))
    on = one.machine.tasks["a"].places[0].node
    free = [name for name in ("n0", "n1", "n2") if name != on]
    one.tell(news.NodeDrained(free[0], "spot termination"))
    one.tell(news.NodeCordoned(on, True))
    one.submit(gang("g", 2, 2, strategy=PlacementStrategy.strict_spread))
    said = one.machine.explain("g", one.now).reason
    assert said.code is ReasonCode.no_room
    assert "need a node each, and 1 of 1 have room" in said.sentence
    assert f"{free[0]} is draining" in said.sentence
    assert f"{on} is cordoned" in said.sentence
    one.submit(task("big", 2, priority=1), task("more", 2, priority=1))
    assert f"{free[0]} is draining" in one.machine.explain("more", one.now).reason.sentence


def test_before_patience_runs_out_small_tasks_pass_a_big_one():
    one = world(8, spec=pool(starvation_timeout_s=60))
    one.run(task("a", 4), task("big", 8), task("b", 2))
    assert one.states("a", "big", "b") == ["running", "waiting", "running"]


def test_looking_for_what_is_to_be_kept_changes_nothing():
    one = world(4, 4, spec=pool(dynamic_limit=6))
    one.run(task("a", 3), task("b", 3))
    one.submit(gang("big", 2, 4))
    books = one.machine.state
    books.apply_reserve(room.starvation_reserve(books, books.tasks["big"]))  # so that every sum has something in it

    def said() -> list[object]:
        ledger, shelf = books.capacity, books.pool_groups["p"]
        sums = (ledger.kept, ledger.idle, ledger.free, ledger.held, ledger.quota_kept["p"])
        return [one.tolist() for one in sums] + [shelf.claimed_bundles, shelf.idle_bundles, one.dumped()]

    before = said()
    waits = books.tasks["big"]
    kept = room.starvation_reserve(books, waits)
    (
        room.find_assignment(books, waits),
        room.assign_after_release(books, waits),
        room.plan_preemption(books, waits, one.now, ignore_policy=True),
    )
    room.would_fit_alone(books, waits.spec), room.never_fits(books, waits.spec), room.shortage(books, waits.spec)
    assert said() == before
    books.apply_reserve(kept)
    assert said() != before
    books.release_reserve(kept)
    assert said() == before


def test_what_is_kept_and_given_back_leaves_the_books_as_they_were():
    one = world(4, spec=pool())
    one.run(task("a", 3), task("small", 1))
    one.end("small")  # its slot is idle now, and can be kept as well
    one.submit(task("big", 4))
    books = one.machine.state
    before, position = one.dumped(), books.hints.position
    kept = room.starvation_reserve(books, books.tasks["big"])
    assert kept.groups
    books.apply_reserve(kept)
    books.release_reserve(kept)
    assert (one.dumped(), books.hints.position) == (before, position)
    books.check()


# ---- equals -----------------------------------------------------------------------------------------------------

MUTUAL = {"role": {"a": ["b"], "b": ["a"]}}
IN_A_RING = {"role": {"a": ["b"], "b": ["c"], "c": ["a"]}}


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (policy(MUTUAL, label_gap=0.0), "ab"),
        (policy(IN_A_RING, label_gap=0.0), "cba"),
        (policy(same_pool_gap=0.0), "abc"),
    ],
)
def test_tasks_that_may_evict_each_other_do_so_once_and_then_run(rules: PreemptionPolicy, names: str):
    one = world(1, spec=pool(return_preempts=True), rules=rules)
    for name in names:
        one.run(task(name, 1, labels={"role": name}))  # each is carried out until nothing is left to do
    for _ in range(10):
        one.tick(100)
        one.carry_all()
    assert one.states(*names).count("running") == 1
    assert one.machine.state.eviction_count == len(names) - 1
    one.replay()


def test_a_task_that_was_evicted_says_that_it_does_not_evict_its_equals():
    one = world(1, spec=pool(return_preempts=True), rules=policy(MUTUAL, label_gap=0.0))
    one.run(task("first", 1, labels={"role": "a"}), task("second", 1, labels={"role": "b"}))
    assert one.states("first", "second") == ["evicted", "running"]
    told = one.machine.explain("first", one.now)
    assert told.needs == ("second",)
    assert "it was evicted itself" in told.reason.sentence
    assert "that of second is not" in told.reason.sentence
    one.end("second")
    assert one.state("first") is TaskState.running


def test_an_evicted_task_evicts_those_of_lower_priority_whatever_the_gap():
    one = world(2, spec=pool(return_preempts=True), rules=policy(MUTUAL, label_gap=0.0, same_pool=False))
    one.run(task("low", 1, priority=4.9, labels={"role": "b"}, preemptible=False))
    one.run(task("first", 1, priority=5.0, labels={"role": "a"}), task("second", 1, priority=5.0, labels={"role": "b"}))
    assert one.states("first", "second") == ["evicted", "running"]
    one.end("low")
    one.run(task("lower", 1, priority=4.0, labels={"role": "b"}))
    assert one.states("first", "lower") == ["running", "waiting"]


def test_one_that_is_new_may_evict_its_equal_where_one_that_was_evicted_may_not():
    one = world(1, spec=pool(return_preempts=True), rules=policy(MUTUAL, label_gap=0.0))
    one.run(task("first", 1, labels={"role": "a"}), task("second", 1, labels={"role": "b"}))
    one.run(task("third", 1, labels={"role": "a"}))
    assert one.states("first", "second", "third") == ["evicted", "evicted", "running"]


# ---- taking turns -----------------------------------------------------------------------------------------------


def sharing() -> World:
    one = world(8)
    one.run(task("first", 4, residual=(gpus(1),), room=(gpus(5),)))
    one.submit(task("second", 4, shares="first", residual=(gpus(1),)))
    one.tell(news.TurnRequested("second"))
    one.carry_all()
    return one


def test_tenants_of_a_slot_take_turns():
    one = sharing()
    for _ in range(3):
        parked = next(name for name in ("first", "second") if one.state(name) is TaskState.parked)
        other = {"first": "second", "second": "first"}[parked]
        (park,) = one.tell(news.TurnRequested(parked))
        assert isinstance(park, ParkTask)
        assert park.task == other
        (unpark,) = one.carry(park)
        assert isinstance(unpark, UnparkTask)
        one.carry(unpark)
        assert one.state(parked) is TaskState.running
        assert one.state(other) is TaskState.parked


def test_a_sharer_waits_for_its_turn_and_says_so():
    one = world(8)
    one.run(task("first", 4, room=(gpus(4),)), task("second", 4, shares="first"))
    assert one.states("first", "second") == ["running", "waiting"]
    assert one.why("second") is ReasonCode.turn


def test_a_sharer_starts_in_the_slots_of_the_other_after_that_one_is_parked():
    one = sharing()
    assert sorted(one.states("first", "second")) == ["parked", "running"]
    assert one.machine.tasks["first"].places == one.machine.tasks["second"].places
    assert len(one.groups) == 1


def test_a_parked_task_keeps_its_residual_in_the_quota():
    one = world(8, spec=pool(quota=gpus(6)))
    one.run(task("first", 4, residual=(gpus(1),), room=(gpus(5),)))
    one.submit(task("second", 4, shares="first"))
    one.carry_all()
    one.tell(news.TurnRequested("second"))
    one.carry_all()
    assert one.states("first", "second") == ["parked", "running"]
    one.run(task("c", 2))
    assert one.state("c") is TaskState.waiting  # 4 and 1 of 6 are in use
    assert one.why("c") is ReasonCode.quota
    one.run(task("d", 1))
    assert one.state("d") is TaskState.running


def test_the_next_tenant_has_its_turn_when_the_active_one_ends():
    one = sharing()
    active = one.running().pop()
    other = {"first": "second", "second": "first"}[active]
    one.end(active)
    one.tell(news.TurnRequested(other))
    one.carry_all()
    assert one.states(active, other) == ["done", "running"]


def test_a_sharer_stays_at_the_slots_it_waits_at_when_their_owner_starts_again_elsewhere():
    one = world(8)
    one.run(task("owner", 1, room=(gpus(2),), restarts=1))
    one.submit(task("waits", 1, shares="owner"), task("active", 1, shares="owner"))
    (park,) = one.tell(news.TurnRequested("active"))
    one.carry(park, "badly")
    one.carry_all()
    one.tick(1.0)
    one.carry_all()
    assert one.states("owner", "active") == ["running", "running"]
    one.end("active")
    one.tell(news.TurnRequested("waits"))
    one.carry_all()
    assert one.state("waits") is TaskState.running


@pytest.mark.parametrize("reloaded", [False, True])
def test_a_turn_that_was_short_of_quota_is_given_once_there_is_some(reloaded: bool):
    one = world(8, spec=pool(quota=gpus(3)))
    one.run(task("owner", 1, room=(gpus(2),)))
    one.submit(task("waits", 2, shares="owner"))
    one.run(task("other", 2))
    one.end("owner")
    assert one.states("waits", "other") == ["waiting", "running"]
    if reloaded:
        one.reload()
    one.end("other")
    assert one.state("waits") is TaskState.running


def test_on_a_node_that_shrank_a_slot_is_taken_over_before_more_is_evicted():
    one = world(4, spec=pool(quota=gpus(4)), rules=policy(same_pool_gap=0.5))
    one.run(task("large", 2, priority=1.0), task("a", 1, priority=2.0), task("b", 1, priority=2.0))
    one.node("n0", 2)
    one.run(task("urgent", 1, priority=12.0))
    assert one.states("large", "urgent") == ["running", "running"]
    assert sorted(one.states("a", "b")) == ["evicted", "running"]


def test_a_sharer_of_an_unknown_task_is_refused():
    one = world(8)
    one.refused(news.TaskSubmitted(task("b", 1, shares="nobody")))


def test_a_sharer_that_is_larger_than_the_slot_is_refused():
    one = world(8)
    one.run(task("a", 2))
    one.refused(news.TaskSubmitted(task("b", 4, shares="a")))


def test_a_tenant_that_dies_in_its_turn_gives_the_slot_to_the_other():
    one = sharing()
    active = one.running().pop()
    other = {"first": "second", "second": "first"}[active]
    one.tell(news.TaskDied(active, 1, "killed"))
    one.carry_all()
    one.tell(news.TurnRequested(other))
    one.carry_all()
    assert one.states(active, other) == ["failed", "running"]


# ---- who may evict whom -----------------------------------------------------------------------------------------


def test_nobody_is_evicted_until_a_policy_is_set():
    one = world(2)
    one.run(task("low", 2, priority=1), task("high", 2, priority=100))
    assert one.states("low", "high") == ["running", "waiting"]
    one.tell(news.PolicySet(policy()))
    assert one.stops() == {"low": ReasonCode.priority}


@pytest.mark.parametrize("level", list(Aggressiveness))
def test_the_gap_in_the_same_pool_is_what_the_aggressiveness_says(level: Aggressiveness):
    rules = policy(same_pool_gap=level.same_pool_gap, label_gap=level.label_gap)
    for above, expected in ((level.same_pool_gap, {"low": ReasonCode.priority}), (level.same_pool_gap - 0.01, {})):
        one = world(2, rules=rules)
        one.run(task("low", 2, priority=5))
        one.submit(task("high", 2, priority=5 + above))
        assert one.stops() == expected


@pytest.mark.parametrize("level", list(Aggressiveness))
def test_a_label_rule_needs_a_smaller_gap(level: Aggressiveness):
    rules = policy(
        {"role": {"train": ["rollout"]}}, same_pool_gap=level.same_pool_gap, label_gap=level.label_gap, same_pool=False
    )
    for above, expected in ((level.label_gap, {"low": ReasonCode.label_rule}), (level.label_gap - 0.01, {})):
        one = world(2, rules=rules)
        one.run(task("low", 2, priority=5, labels={"role": "rollout"}))
        one.submit(task("high", 2, priority=5 + above, labels={"role": "train"}))
        assert one.stops() == expected


def test_gaps_of_decimals_are_not_lost_to_rounding():
    one = world(2, rules=policy(same_pool_gap=0.1))
    one.run(task("low", 2, priority=0.7))
    one.submit(task("high", 2, priority=0.8))
    assert one.stops() == {"low": ReasonCode.priority}


def test_a_label_rule_goes_one_way_only():
    one = world(2, rules=policy({"role": {"train": ["rollout"]}}, same_pool=False))
    one.run(task("low", 2, priority=5, labels={"role": "train"}))
    one.submit(task("high", 2, priority=9, labels={"role": "rollout"}))
    assert not one.stops()


def test_a_rule_about_labels_that_nobody_has_changes_nothing():
    one = world(2, rules=policy({"colour": {"red": ["blue"]}}, same_pool=False))
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    assert not one.stops()


def two_pools(rules: PreemptionPolicy, **labels: dict[str, str]) -> World:
    one = world(4, rules=rules)
    one.tell(news.PoolEnsured(pool("q")))
    one.run(task("low", 4, priority=1, labels=labels.get("low")))
    return one


def test_across_pools_nobody_is_evicted_unless_switched_on():
    one = two_pools(policy())
    one.submit(task("high", 4, pool="q", priority=9))
    assert not one.stops()


def test_label_rules_do_not_bypass_the_cross_pool_switch():
    one = two_pools(policy({"role": {"train": ["rollout"]}}), low={"role": "rollout"})
    one.submit(task("high", 4, pool="q", priority=9, labels={"role": "train"}))
    assert not one.stops()


def test_label_rules_do_not_make_the_cross_pool_gap_smaller():
    one = two_pools(policy({"role": {"train": ["rollout"]}}, cross_pool=True), low={"role": "rollout"})
    one.submit(task("high", 4, pool="q", priority=5.9, labels={"role": "train"}))
    assert not one.stops()
    one.submit(task("higher", 4, pool="q", priority=6, labels={"role": "train"}))
    assert one.stops() == {"low": ReasonCode.cross_pool}


def test_label_rules_do_not_reach_into_protected_pools():
    rules = policy({"role": {"train": ["rollout"]}}, cross_pool=True, protected_pools=("p",))
    one = two_pools(rules, low={"role": "rollout"})
    one.submit(task("high", 4, pool="q", priority=9, labels={"role": "train"}))
    assert not one.stops()


def test_a_protected_pool_may_still_evict_in_itself():
    one = world(4, rules=policy(cross_pool=True, protected_pools=("p",)))
    one.run(task("low", 4, priority=1))
    one.submit(task("high", 4, priority=9))
    assert one.stops() == {"low": ReasonCode.priority}


def test_cross_pool_preemption_ends_with_the_newcomer_running():
    one = two_pools(policy(cross_pool=True))
    one.run(task("high", 4, pool="q", priority=9))
    assert one.states("low", "high") == ["evicted", "running"]
    starting = [c.reason.code for c in one.machine.story("high") if c.state == "starting"]
    assert starting == [ReasonCode.preempted]


def test_evicting_in_another_pool_frees_no_quota_of_ones_own():
    one = World()
    one.node("n", 8)
    one.tell(news.PoolEnsured(pool("p", gpus(4))))
    one.tell(news.PoolEnsured(pool("q", gpus(4))))
    one.tell(news.PolicySet(policy(cross_pool=True)))
    one.run(task("mine", 4, priority=9, preemptible=False), task("theirs", 4, pool="q", priority=1))
    one.submit(task("high", 4, priority=10))
    assert not one.stops()
    assert one.why("high") is ReasonCode.quota


def test_whoever_is_not_preemptible_stays():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1, preemptible=False))
    one.submit(task("high", 2, priority=9))
    assert not one.stops()


def test_a_gang_stays_unless_it_says_that_it_may_be_evicted():
    for said, expected in ((None, {}), (True, {"g": ReasonCode.priority})):
        one = world(2, rules=policy())
        one.run(gang("g", 2, 1, priority=1, preemptible=said))
        one.submit(task("high", 2, priority=9))
        assert one.stops() == expected


def test_whoever_may_not_evict_waits():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9, may_evict=False))
    assert not one.stops()
    assert one.state("high") is TaskState.waiting


def test_ageing_never_counts_towards_an_eviction():
    one = world(2, rules=policy(same_pool_gap=1.0))
    one.run(task("low", 2, priority=5))
    one.submit(task("high", 2, priority=5.9, wait_s=1e9))
    for _ in range(50):
        one.tick(1000)
    assert not one.stops()
    assert one.state("low") is TaskState.running


def test_a_young_task_is_protected_for_its_minimum_runtime():
    one = world(2, rules=policy(min_runtime_s=30))
    one.run(task("low", 2, priority=1))
    one.tick(10)
    one.submit(task("high", 2, priority=9))
    assert not one.stops()
    due = one.machine.next_deadline()
    assert due is not None
    assert due <= 30
    one.tick(30.5 - one.now)
    assert one.stops() == {"low": ReasonCode.priority}


def test_an_eviction_budget_stops_thrashing():
    one = world(4, rules=policy(budget=2, budget_window_s=100))
    one.run(*[task(f"low{at}", 1, priority=1) for at in range(4)])
    one.run(*[task(f"high{at}", 1, priority=9) for at in range(3)])
    assert one.states("high0", "high1", "high2") == ["running", "running", "waiting"]
    one.tick(101)
    one.carry_all()
    assert one.state("high2") is TaskState.running


def test_a_choice_larger_than_the_budget_evicts_nobody():
    one = world(4, rules=policy(budget=2, budget_window_s=100))
    one.run(*[task(f"low{at}", 1, priority=1) for at in range(4)])
    one.run(task("high", 4, priority=9))
    assert not one.stops()
    assert len(one.running()) == 4


def test_an_evicted_task_that_returns_does_not_preempt():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1), task("mid", 2, priority=5), task("high", 2, priority=9))
    assert one.states("low", "mid", "high") == ["evicted", "evicted", "running"]
    one.run(task("lowest", 0.5, priority=0.5))
    one.end("high")
    assert one.state("mid") is TaskState.running
    one.tell(news.EvictRequested("mid"))
    one.carry_all()
    assert {one.state("low"), one.state("mid")} <= {TaskState.evicted, TaskState.running}
    assert not one.stops()


@pytest.mark.parametrize("may", [False, True])
def test_an_evicted_task_preempts_on_its_return_only_where_its_pool_says_so(may: bool):
    one = world(2, spec=pool(return_preempts=may), rules=policy())
    one.run(task("mid", 2, priority=5), task("high", 2, priority=9, wait_s=1e6))
    assert one.states("mid", "high") == ["evicted", "running"]
    one.tell(news.NodeCordoned("n0"))
    one.end("high")
    one.node("n1", 2)
    one.tell(news.PolicySet(policy(same_pool_gap=100.0)))
    one.tell(news.CancelRequested("mid"))
    one.carry_all()
    one.run(task("victim", 2, priority=1), task("mid2", 2, priority=5))
    assert one.states("victim", "mid2") == ["running", "waiting"]
    one.tell(news.PolicySet(policy()))
    one.carry_all()
    assert one.states("victim", "mid2") == ["evicted", "running"]
    one.tell(news.EvictRequested("mid2"))
    one.carry_all()
    # Whoever is first in the queue is back. The other may take its place only where its pool says so.
    running = one.running()
    assert running == {"mid2"}
    one.end("mid2")
    assert one.running() == {"victim"}


def test_a_returning_task_waits_for_room_unless_its_pool_lets_it_preempt():
    for may in (False, True):
        one = world(2, spec=pool(return_preempts=may), rules=policy())
        one.run(task("mid", 2, priority=5), task("high", 2, priority=9))
        one.tell(news.PoolDrained("p"))  # so that nobody starts while the field is laid out
        one.end("high")
        one.tell(news.PoolDrained("p", on=False))
        one.carry_all()
        assert one.running() == {"mid"}
        one.tell(news.PolicySet(policy(cross_pool=True, cross_pool_gap=0.5)))
        one.tell(news.PoolEnsured(pool("q")))
        one.run(task("theirs", 2, pool="q", priority=6))
        assert one.states("mid", "theirs") == ["evicted", "running"]
        one.tell(news.PolicySet(policy(cross_pool=True, cross_pool_gap=0.5)))
        one.end("theirs")
        assert one.running() == {"mid"}


def test_an_eviction_tells_then_saves_with_time_outs_apart():
    one = world(2, rules=policy(cancel_timeout_s=3.0, save_timeout_s=120.0))
    one.run(task("low", 2, priority=1, saves=True))
    one.submit(task("high", 2, priority=9))
    (stop,) = [x for x in one.pending if isinstance(x, StopTask)]
    assert (stop.cancel_grace_s, stop.checkpoint_timeout_s, stop.notice) == (3.0, 120.0, False)


def test_notice_replaces_the_cancel_time_out():
    one = world(2, rules=policy(cancel_timeout_s=3.0))
    one.run(task("low", 2, priority=1, notice_s=45.0))
    one.submit(task("high", 2, priority=9))
    (stop,) = [x for x in one.pending if isinstance(x, StopTask)]
    assert (stop.cancel_grace_s, stop.notice) == (45.0, True)


def test_an_eviction_by_hand_needs_no_policy_and_tells_the_task():
    one = world(2)
    one.run(task("a", 2))
    (stop,) = one.tell(news.EvictRequested("a"))
    assert stop.reason.code is ReasonCode.by_hand
    assert stop.cancel_grace_s > 0
    one.carry(stop)
    one.carry_all()
    assert one.machine.tasks["a"].evictions == 1
    assert one.state("a") is TaskState.running
    assert one.machine.tasks["a"].attempt == 2


# ---- victims ----------------------------------------------------------------------------------------------------


def test_free_capacity_is_used_before_anybody_is_evicted():
    one = world(4, 4, rules=policy())
    one.run(task("low", 4, priority=1))
    one.run(task("high", 4, priority=9))
    assert one.states("low", "high") == ["running", "running"]


def test_an_idle_slot_goes_before_anybody_is_evicted():
    one = world(4, rules=policy())
    one.run(task("idle", 2), task("low", 2, priority=1))
    one.end("idle")
    one.run(task("high", 1, priority=9))
    assert one.states("low", "high") == ["running", "running"]


def test_room_that_is_becoming_free_is_not_made_a_second_time():
    one = world(4, rules=policy())
    one.run(task("low", 4, priority=1))
    one.submit(task("high", 4, priority=9))
    assert one.stops() == {"low": ReasonCode.priority}
    one.tick(1)
    one.tick(1)
    assert len([x for x in one.pending if isinstance(x, StopTask)]) == 1


def test_a_part_of_what_is_asked_may_be_free_already():
    one = world(8, rules=policy())
    one.run(task("a", 4, priority=1), task("b", 2, priority=1))
    one.run(task("high", 4, priority=9))
    assert one.states("a", "b", "high") == ["running", "evicted", "running"]


def test_several_victims_cover_together_what_none_covers_alone():
    one = world(4, rules=policy())
    one.run(*[task(f"t{at}", 1, priority=1) for at in range(4)])
    one.run(task("high", 3, priority=9))
    assert one.state("high") is TaskState.running
    assert sorted(one.states("t0", "t1", "t2", "t3")) == ["evicted", "evicted", "evicted", "running"]


def test_the_lowest_priority_that_suffices_leaves():
    one = world(4, rules=policy())
    one.run(task("seven", 2, priority=7), task("one", 2, priority=1))
    one.run(task("nine", 2, priority=9))
    assert one.states("seven", "one") == ["running", "evicted"]


def test_fewer_evictions_go_before_lower_priority():
    one = world(4, 4, rules=policy())
    one.run(task("big", 4, priority=5), *[task(f"t{at}", 1, priority=1) for at in range(4)])
    one.run(task("high", 4, priority=9))
    assert one.state("big") is TaskState.evicted
    assert one.states("t0", "t1", "t2", "t3") == ["running"] * 4


def test_of_equal_priority_the_one_that_saves_its_state_leaves():
    for saver in ("a", "b"):
        one = world(2, rules=policy())
        one.run(*[task(name, 1, priority=1, saves=name == saver) for name in "ab"])
        one.tick(100)
        one.run(task("high", 1, priority=9))
        assert one.state(saver) is TaskState.evicted


def test_of_equal_priority_the_one_that_has_done_the_least_leaves():
    for order in ("ab", "ba"):
        one = world(2, rules=policy())
        for name in order:
            one.run(task(name, 1, priority=1, estimate_s=1000))
            one.tick(100)
        one.run(task("high", 1, priority=9))
        assert one.state(order[1]) is TaskState.evicted


def test_whoever_is_nearly_done_is_spared():
    one = world(2, rules=policy())
    one.run(task("done_soon", 1, priority=1, estimate_s=110), task("just_begun", 1, priority=1, estimate_s=10_000))
    one.tick(100)
    one.run(task("high", 1, priority=9))
    assert one.states("done_soon", "just_begun") == ["running", "evicted"]


def test_victims_leave_one_node_and_not_pieces_of_several():
    one = world(2, 2, rules=policy())
    one.run(*[task(f"t{at}", 1, priority=1) for at in range(4)])
    one.run(task("high", 2, priority=9))
    evicted = [name for name in ("t0", "t1", "t2", "t3") if one.state(name) is TaskState.evicted]
    assert len(evicted) == 2
    assert one.state("high") is TaskState.running


def test_where_the_quota_decides_a_victim_of_the_pool_leaves_and_no_node_is_cleared():
    one = world(8, spec=pool(quota=gpus(4)), rules=policy())
    one.run(task("a", 2, priority=1), task("b", 2, priority=2))
    one.run(task("high", 2, priority=9))
    assert one.states("a", "b", "high") == ["evicted", "running", "running"]


def test_where_the_limit_of_slots_decides_a_victim_of_the_pool_leaves():
    one = world(8, spec=pool(dynamic_limit=2), rules=policy())
    one.run(task("a", 1, priority=1), task("b", 1, priority=2))
    one.run(task("high", 1, priority=9))
    assert one.states("a", "b", "high") == ["evicted", "running", "running"]


def test_nobody_is_evicted_where_that_would_not_make_room():
    one = world(4, rules=policy())
    one.run(task("low", 2, priority=1), task("equal", 2, priority=9))
    one.submit(task("high", 4, priority=9))
    assert not one.stops()


def test_reserved_slots_of_others_are_untouched():
    one = World()
    one.node("n", 4)
    one.tell(news.PoolEnsured(pool("p", reserved=(gpus(4),))))
    one.tell(news.PoolEnsured(pool("q")))
    one.tell(news.PolicySet(policy(cross_pool=True, cross_pool_gap=0.0)))
    one.carry_all()
    before = dict(one.groups)
    one.run(task("high", 4, pool="q", priority=100))
    assert one.groups == before
    assert one.state("high") is TaskState.waiting


def test_a_gang_evicts_nobody_who_could_be_spared():
    one = world(4, 4, 4, rules=policy())
    one.run(*[task(f"t{at}", 2, priority=1) for at in range(5)])  # one half of a node stays free
    one.run(gang("g", 2, 4, priority=9, strategy=PlacementStrategy.spread))
    evicted = [name for name in one.machine.tasks if one.state(name) is TaskState.evicted]
    assert one.state("g") is TaskState.running
    assert len(evicted) == 3


def test_a_duplicate_id_is_refused_and_evicts_nobody():
    one = world(2, rules=policy())
    one.run(task("innocent", 2, priority=1))
    one.refused(news.TaskSubmitted(task("innocent", 2, priority=9)))
    assert one.state("innocent") is TaskState.running
    assert not one.pending


def test_late_news_of_an_ended_task_does_not_reach_a_new_one_of_the_same_id():
    one = world(2)
    one.run(task("a"))
    one.end("a")
    one.run(task("a", priority=7))
    assert one.state("a") is TaskState.running
    one.echo(news.TaskDied("a", 1, "killed"))
    assert one.state("a") is TaskState.running


def test_a_dry_run_names_the_victims_and_changes_nothing():
    one = world(4, rules=policy())
    one.run(task("low", 2, priority=1), task("mid", 2, priority=5))
    before = one.dumped()
    choice = one.machine.would_evict(task("high", 2, priority=9), one.now)
    assert [name for name, _ in choice.victims] == ["low"]
    assert choice.found
    assert one.dumped() == before
    one.run(task("high", 2, priority=9))
    assert one.states("low", "mid", "high") == ["evicted", "running", "running"]


def test_a_dry_run_says_when_nothing_helps():
    one = world(4, rules=policy())
    one.run(task("equal", 4, priority=9))
    assert not one.machine.would_evict(task("high", 4, priority=9), one.now).found


PRIORITIES = st.sampled_from([1.0, 2.0, 3.0, 4.5, 5.0])


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[int], list[TaskSpec], TaskSpec, dict[str, object], int]:
    nodes = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3))
    sizes = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])
    specs = [
        task(
            f"t{at}",
            Resources.of(gpu=draw(sizes), cpu=draw(st.sampled_from([0, 0, 20, 40]))),
            priority=draw(PRIORITIES),
            preemptible=draw(st.sampled_from([None, None, None, False])),
        )
        for at in range(draw(st.integers(2, 8)))
    ]
    ask = Resources.of(gpu=draw(st.sampled_from([1, 2, 3, 4])), cpu=draw(st.sampled_from([0, 0, 30, 50])))
    newcomer = task("new", ask, priority=draw(st.sampled_from([3.0, 5.0, 6.0, 9.0])))
    binds = draw(st.sampled_from(["node", "node", "quota", "limit"]))
    more: dict[str, object] = {}
    if binds == "quota":
        more["quota"] = Resources.of(gpu=draw(st.integers(4, 6)), cpu=1000)
    if binds == "limit":
        more["dynamic_limit"] = draw(st.integers(1, 4))
    return nodes, specs, newcomer, more, draw(st.integers(0, 2))


@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(crowded())
def test_victims_are_the_fewest_and_then_the_lowest(case):
    nodes, specs, newcomer, more, ended = case
    one = world(*nodes, spec=pool(**more), rules=policy())
    one.run(*specs)
    for name in sorted(one.running())[:ended]:
        one.end(name)
    for name, state in [(name, x.state) for name, x in one.machine.tasks.items()]:
        if state is TaskState.waiting:
            one.tell(news.CancelRequested(name))
    one.carry_all()
    if not one.could_fit(newcomer):
        return
    facts = one._facts()
    facts.specs["new"] = newcomer
    candidates = [name for name in sorted(one.running()) if may_evict(newcomer, one.specs[name], one.policy)]
    best = sufficient_sets(facts, newcomer, candidates)
    dry = {name for name, _ in one.machine.would_evict(newcomer, one.now).victims}
    one.submit(newcomer)
    chosen = set(one.stops())
    assert dry == chosen
    if not best:
        assert not chosen
        assert one.state("new") is TaskState.waiting
        return
    assert len(chosen) == len(best[0]), f"{chosen} where {best[:3]} suffice"
    if chosen:
        assert tuple(sorted(chosen)) in {tuple(sorted(x)) for x in best}
        mine = [one.specs[name].priority for name in chosen]
        better = [x for x in best if dominated(mine, [one.specs[name].priority for name in x])]
        assert not better, f"{chosen} ({mine}) where {better[:3]} are lower"
    one.carry_all()
    assert one.state("new") is TaskState.running


# ---- borrowing --------------------------------------------------------------------------------------------------


def test_an_idle_reserved_slot_is_lent_only_where_the_pool_says_so():
    for may, expected in ((False, TaskState.waiting), (True, TaskState.running)):
        one = world(4, spec=pool(reserved=(gpus(4),), borrow=may))
        one.run(task("low", 4, priority=1))
        assert one.state("low") is expected


def test_a_borrower_leaves_when_the_owner_comes_whatever_the_policy():
    one = world(4, spec=pool(reserved=(gpus(4),), borrow=True))
    one.run(task("low", 4, priority=7.9))
    assert [c.reason.code for c in one.machine.story("low") if c.state == "starting"] == [ReasonCode.borrowed]
    one.submit(task("high", 4, priority=8))
    assert one.stops() == {"low": ReasonCode.owner_returned}
    one.carry_all()
    assert one.states("low", "high") == ["evicted", "running"]
    one.end("high")
    assert one.state("low") is TaskState.running


def test_free_room_goes_before_borrowing():
    one = world(8, spec=pool(reserved=(gpus(4),), borrow=True))
    one.run(task("low", 4, priority=1), task("high", 4, priority=9))
    assert one.states("low", "high") == ["running", "running"]
    assert one.machine.tasks["low"].evictions == 0


def test_a_task_that_may_not_be_evicted_does_not_borrow():
    one = world(4, spec=pool(reserved=(gpus(4),), borrow=True))
    one.run(task("low", 4, priority=1, preemptible=False))
    assert one.state("low") is TaskState.waiting


def test_borrowers_are_the_first_to_leave():
    one = world(4, spec=pool(reserved=(gpus(2),), borrow=True), rules=policy())
    one.run(task("cheap", 2, priority=1), task("borrower", 2, priority=5))
    assert [c.reason.code for c in one.machine.story("borrower") if c.state == "starting"] == [ReasonCode.borrowed]
    one.run(task("high", 2, priority=9))
    assert one.states("cheap", "borrower", "high") == ["running", "evicted", "running"]


def test_an_owner_who_does_not_fit_the_slot_drives_no_borrower_out_without_a_policy():
    one = world(8, spec=pool(quota=gpus(6), reserved=(gpus(2),), borrow=True))
    one.run(task("filler", 6, priority=5, preemptible=False))
    one.end("filler")
    one.run(task("a", 4, priority=5), task("b", 2, priority=5))
    borrowed = [n for n in "ab" if any(c.reason.code is ReasonCode.borrowed for c in one.machine.story(n))]
    one.submit(task("high", 3, priority=9))
    assert not one.stops(), borrowed


# ---- waiting, and ending it -------------------------------------------------------------------------------------


def test_a_task_that_asks_more_than_the_quota_says_so_at_once():
    one = world(8, spec=pool(quota=gpus(4)))
    assert one.submit(task("a", 5)) == []
    assert one.state("a") is TaskState.failed
    assert one.why("a") is ReasonCode.never_fits


def test_a_task_that_asks_more_than_any_node_has_says_so_at_once():
    one = world(4, 4)
    one.submit(task("a", 5))
    one.submit(gang("g", 2, 3))  # together on one node
    one.submit(gang("h", 3, 1, strategy=PlacementStrategy.strict_spread))
    assert [one.why(name) for name in "agh"] == [ReasonCode.never_fits] * 3
    assert one.states("a", "g", "h") == ["failed"] * 3


def test_a_task_that_asks_more_slots_than_the_pool_may_have_says_so_at_once():
    one = world(8, spec=pool(dynamic_limit=2))
    one.submit(gang("g", 3, 1))
    assert one.why("g") is ReasonCode.never_fits
    two = world(8, spec=pool(dynamic=False, reserved=(gpus(2),)))
    two.submit(task("low", 1, priority=1))
    assert two.why("low") is ReasonCode.never_fits


def test_a_task_in_a_cluster_without_nodes_waits_for_one():
    one = world()
    one.submit(task("a"))
    assert one.state("a") is TaskState.waiting
    one.node("n", 8)
    one.carry_all()
    assert one.state("a") is TaskState.running


def test_a_wait_ends_at_its_deadline():
    one = world(1)
    one.run(task("a"), task("b", wait_s=30.0), task("c"))
    assert one.machine.explain("b", one.now).deadline == 30.0
    assert one.machine.explain("c", one.now).deadline == 3600.0
    one.tick(29.9)
    assert one.state("b") is TaskState.waiting
    one.tick(0.1)
    assert one.state("b") is TaskState.failed
    assert one.why("b") is ReasonCode.too_late
    assert one.state("c") is TaskState.waiting


def test_the_machine_says_when_it_wants_to_be_called():
    one = world(1)
    one.run(task("a"), task("b", wait_s=30.0))
    due = one.machine.next_deadline()
    assert due is not None
    assert due <= 30.0


def test_at_once_or_not_at_all_is_refused_where_there_is_no_room():
    one = world(1)
    one.run(task("a"))
    one.submit(task("b", wait_s=0.0))
    assert one.state("b") is TaskState.failed
    assert one.why("b") is ReasonCode.refused


def test_at_once_or_not_at_all_starts_where_there_is_room():
    one = world(2)
    one.run(task("a"), task("b", wait_s=0.0))
    assert one.state("b") is TaskState.running


def test_whoever_does_not_wait_for_quota_is_refused_whatever_could_be_evicted():
    one = world(8, spec=pool(quota=gpus(2)), rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9, over_quota_waits=False))
    assert not one.stops()
    assert one.state("high") is TaskState.failed
    assert one.why("high") in (ReasonCode.refused, ReasonCode.quota)


def test_whoever_does_not_wait_for_quota_still_waits_for_room():
    one = world(2)
    one.run(task("low", 2))
    one.submit(task("high", 2, over_quota_waits=False))
    assert one.state("high") is TaskState.waiting


def test_the_queue_is_in_order_of_priority_and_then_of_arrival():
    one = world(1)
    one.run(task("now"), task("low", priority=1), task("late", priority=7), task("high", priority=7.5))
    one.run(task("later", priority=7))
    assert [one.machine.explain(x, one.now).position for x in ("high", "late", "later", "low")] == [1, 2, 3, 4]
    order = []
    for _ in range(5):
        (name,) = one.running()
        order.append(name)
        one.end(name)
    assert order == ["now", "high", "late", "later", "low"]


def test_an_old_waiters_turn_comes():
    one = world(1)
    one.run(task("t0", priority=9), task("old", priority=5, wait_s=1e6))
    for at in range(1, 2000):
        one.submit(task(f"t{at}", priority=5.5))
        one.tick(30)
        (name,) = one.running()
        if name == "old":
            break
        one.end(name)
    assert one.state("old") is TaskState.running


def test_freed_capacity_is_not_taken_by_a_third():
    one = world(4, rules=policy())
    one.run(task("low", 4, priority=1))
    one.submit(task("high", 4, priority=9))
    one.submit(task("third", 2, priority=8.9))
    one.carry_all()
    assert one.states("high", "third") == ["running", "waiting"]


def test_room_made_piece_by_piece_is_kept_until_it_is_whole():
    one = world(4, rules=policy())
    one.run(*[task(f"t{at}", 1, priority=1) for at in range(4)])
    one.submit(task("high", 4, priority=9))
    one.submit(task("sly", 1, priority=8))
    stops = [x for x in one.pending if isinstance(x, StopTask)]
    assert len(stops) == 4
    for stop in stops:
        one.carry(stop)
        assert one.state("sly") is TaskState.waiting
    one.carry_all()
    assert one.states("high", "sly") == ["running", "waiting"]


def test_whoever_withdraws_leaves_the_room_that_was_made_to_others():
    one = world(4, rules=policy())
    one.run(task("low", 4, priority=1))
    one.submit(task("high", 4, priority=9))
    one.tell(news.CancelRequested("high"))
    one.carry_all()
    assert one.states("high", "low") == ["cancelled", "running"]


def test_a_waiting_task_can_be_cancelled():
    one = world(1)
    one.run(task("a"), task("b"))
    assert one.tell(news.CancelRequested("b")) == []
    assert one.state("b") is TaskState.cancelled
    assert one.why("b") is ReasonCode.by_hand


def test_a_task_whose_slot_is_being_made_can_be_cancelled():
    one = world(1)
    one.submit(task("a"))
    one.tell(news.CancelRequested("a"))
    one.carry_all()
    assert one.state("a") is TaskState.cancelled
    one.run(task("b"))
    assert one.state("b") is TaskState.running


# ---- evicted work comes back ------------------------------------------------------------------------------------


def test_evicted_tasks_return_in_order_of_priority():
    one = world(4, rules=policy())
    one.run(*[task(name, 1, priority=p) for name, p in zip("abcd", (2, 4, 1, 3), strict=True)])
    one.run(task("high", 4, priority=9))
    assert one.states("a", "b", "c", "d") == ["evicted"] * 4
    one.tell(news.TaskEnded("high", 1))
    one.carry_all(StopTask, RemovePlacementGroup)
    order = []
    while one.pending:
        order += [wanted.task for wanted in one.carry(one.ready()[0]) if isinstance(wanted, StartTask)]
    assert order[0] == "b"
    assert sorted(order) == list("abcd")


def test_state_that_was_saved_is_restored():
    for saved in (True, False):
        one = world(2, rules=policy())
        one.run(task("low", 2, priority=1, saves=True))
        one.submit(task("high", 2, priority=9))
        (stop,) = [x for x in one.pending if isinstance(x, StopTask)]
        one.pending.remove(stop)
        one.tell(news.TaskStopped("low", 1, "returned", saved=saved))
        one.carry_all()
        one.tell(news.TaskEnded("high", 1))
        one.carry_all(StopTask, RemovePlacementGroup, CreatePlacementGroup)
        (start,) = [x for x in one.pending if isinstance(x, StartTask)]
        assert (start.task, start.attempt, start.restore) == ("low", 2, saved)


def test_it_is_counted_how_often_and_how_long_a_task_was_out():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1), task("high", 2, priority=9))
    one.tick(50)
    one.end("high")
    told = one.machine.explain("low", one.now)
    assert told.evictions == 1
    assert told.evicted_s == pytest.approx(50)
    assert told.attempts == 2


def test_every_wait_of_an_evicted_task_has_a_deadline():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1, wait_s=100), task("high", 2, priority=9))
    one.tick(50)
    deadline = one.machine.explain("low", one.now).deadline
    assert deadline is not None
    one.tick(deadline - one.now)
    assert one.state("low") is TaskState.failed
    assert one.why("low") is ReasonCode.too_late


def test_a_cancel_that_times_out_gives_the_slot_on_all_the_same():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    (stop,) = [x for x in one.pending if isinstance(x, StopTask)]
    one.carry(stop, "badly")
    one.carry_all()
    assert one.states("low", "high") == ["evicted", "running"]


def test_a_task_that_is_completed_while_it_is_evicted_is_done():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    one.tell(news.CompleteRequested("low"))
    one.carry_all()
    assert one.states("low", "high") == ["done", "running"]
    one.end("high")
    assert one.state("low") is TaskState.done


def test_a_task_that_is_cancelled_while_it_is_evicted_does_not_return():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    one.tell(news.CancelRequested("low"))
    one.carry_all()
    one.end("high")
    assert one.state("low") is TaskState.cancelled


# ---- faults -----------------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_started_again_as_often_as_it_may():
    one = world(2)
    one.run(task("a", restarts=2))
    for attempt in (1, 2):
        one.tell(news.TaskDied("a", attempt, "killed"))
        one.carry_all()
        one.tick(600)
        one.carry_all()
        assert one.state("a") is TaskState.running
        assert one.machine.tasks["a"].attempt == attempt + 1
    one.tell(news.TaskDied("a", 3, "killed"))
    one.carry_all()
    assert one.state("a") is TaskState.failed
    assert one.why("a") in (ReasonCode.restarts_used, ReasonCode.process_died)


def test_without_restarts_a_process_that_dies_is_the_end_of_its_task():
    one = world(2)
    one.run(task("a"), task("b", 2))
    one.tell(news.TaskDied("a", 1, "signal 9"))
    one.carry_all()
    assert one.states("a", "b") == ["failed", "running"]
    assert "signal 9" in one.machine.tasks["a"].reason.sentence


def test_a_constructor_that_raises_is_a_failure_and_frees_everything():
    one = world(2)
    one.submit(task("a", 2, restarts=5))
    one.carry_all(CreatePlacementGroup)
    (start,) = one.pending
    one.carry(start, "fatal")
    assert one.state("a") is TaskState.failed
    assert one.why("a") is ReasonCode.start_failed
    one.run(task("b", 2))
    assert one.state("b") is TaskState.running


def test_a_start_that_failed_by_bad_luck_is_tried_again():
    one = world(2)
    one.submit(task("a", 2))
    one.carry_all(CreatePlacementGroup)
    (start,) = one.pending
    one.carry(start, "badly")
    for _ in range(5):
        one.tick(60)
        one.carry_all()
    assert one.state("a") is TaskState.running


def test_a_start_that_never_answers_is_stopped_at_its_deadline():
    one = world(2)
    one.submit(task("a", 2, start_timeout_s=30))
    one.carry_all(CreatePlacementGroup)
    (start,) = one.pending
    assert start.deadline == 30
    assert not one.tick(30)  # whoever starts it has a moment to say so
    said = one.tick(60)
    assert [x.reason.code for x in said if isinstance(x, StopTask)] == [ReasonCode.start_timeout]
    one.carry_all(StopTask)
    assert one.state("a") is TaskState.failed
    assert one.why("a") is ReasonCode.start_timeout


def test_an_entry_method_that_raises_is_a_failure():
    one = world(2)
    one.run(task("a"))
    one.end("a", "ValueError: no")
    assert one.state("a") is TaskState.failed
    assert one.why("a") is ReasonCode.raised
    assert "ValueError: no" in one.machine.tasks["a"].reason.sentence


def test_a_group_that_cannot_be_made_is_tried_again_and_blocks_nobody():
    one = world(4, 4)
    (make,) = one.submit(task("a", 4))
    one.submit(task("b", 4))
    one.carry(make, "badly")
    assert one.state("a") is TaskState.waiting
    one.carry_all()
    assert one.state("b") is TaskState.running
    for _ in range(5):
        one.tick(60)
        one.carry_all()
    assert one.state("a") is TaskState.running


def test_a_lost_node_takes_its_tasks_and_they_start_elsewhere():
    one = world(2, 2)
    one.run(task("a", 2, restarts=1), task("b", 2))
    node = one.machine.tasks["a"].places[0].node
    other = one.machine.tasks["b"].places[0].node
    one.end("b")
    one.tell(news.NodeLost(node))
    one.tick(600)
    one.carry_all()
    assert one.state("a") is TaskState.running
    assert one.machine.tasks["a"].places[0].node == other


def test_a_task_whose_slot_is_lost_before_it_started_has_lost_nothing():
    one = world(2)
    one.submit(task("a", 2))
    one.tell(news.NodeLost("n0"))
    one.carry_all()
    one.node("n9", 2)
    one.tick(10)
    one.carry_all()
    assert one.state("a") is TaskState.running
    assert one.machine.tasks["a"].spec.restarts == 0


def test_a_lost_node_fails_tasks_that_may_not_be_started_again():
    one = world(2, 2)
    one.run(task("a", 2))
    one.tell(news.NodeLost(one.machine.tasks["a"].places[0].node))
    one.carry_all()
    assert one.state("a") is TaskState.failed
    assert one.why("a") in (ReasonCode.node_lost, ReasonCode.restarts_used)


def test_a_slot_that_was_lost_is_never_trusted_again():
    one = world(4)
    one.run(task("a", 2, restarts=1))
    group = one.machine.tasks["a"].places[0].group
    one.tell(news.PlacementGroupLost(group, "Ray placed a bundle elsewhere"))
    one.carry_all()
    one.tick(600)
    one.carry_all()
    assert one.state("a") is TaskState.running
    assert one.machine.tasks["a"].places[0].group != group


def test_an_idle_slot_that_was_lost_is_forgotten():
    one = world(4)
    one.run(task("a", 4))
    one.end("a")
    (group,) = one.groups
    one.tell(news.PlacementGroupLost(group, "vanished"))
    one.carry_all()
    one.run(task("b", 4))
    assert one.state("b") is TaskState.running
    assert one.machine.tasks["b"].places[0].group != group


def test_late_news_of_an_earlier_start_changes_nothing():
    one = world(2)
    one.run(task("a", restarts=1))
    one.tell(news.TaskDied("a", 1, "killed"))
    one.carry_all()
    one.tick(600)
    one.carry_all()
    assert one.machine.tasks["a"].attempt == 2
    for late in (
        news.TaskDied("a", 1, "killed"),
        news.TaskEnded("a", 1),
        news.TaskEnded("a", 1, "raised"),
        news.TaskStopped("a", 1),
        news.TaskStarted("a", 1),
        news.TaskStartFailed("a", 1, "no"),
        news.TaskParked("a", 1),
        news.TaskUnparked("a", 1),
    ):
        one.echo(late)


def test_news_of_unknown_things_changes_nothing():
    one = world(2)
    one.run(task("a"))
    for late in (
        news.TaskDied("nobody", 1, "killed"),
        news.TaskStopped("nobody", 1),
        news.TaskStarted("nobody", 3),
        news.PlacementGroupReady("nothing"),
        news.PlacementGroupRemoved("nothing"),
        news.PlacementGroupFailed("nothing", "no"),
        news.PlacementGroupLost("nothing", "no"),
        news.NodeLost("nowhere"),
    ):
        one.echo(late)


def test_a_task_that_returns_while_it_is_evicted_is_not_lost():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    one.tell(news.TaskEnded("low", 1))
    one.carry_all()
    assert one.state("high") is TaskState.running
    one.end("high")
    assert one.state("low") in (TaskState.running, TaskState.done)


def test_an_evicted_task_that_dies_while_it_stops_comes_back_all_the_same():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    one.tell(news.TaskDied("low", 1, "killed"))
    one.carry_all()
    assert one.state("high") is TaskState.running
    one.end("high")
    assert one.state("low") is TaskState.running


def test_a_node_that_shrinks_while_a_victim_stops_is_not_filled_beyond_what_it_has():
    one = world(4, rules=policy())
    one.run(task("low", 3, priority=1), task("other", 1, priority=9))
    one.submit(task("high", 2, priority=9))
    one.node("n0", 4, outside=gpus(2))
    one.carry_all()
    assert one.states("low", "high", "other") == ["evicted", "waiting", "running"]


def test_a_victim_that_has_no_process_yet_makes_room_at_once():
    one = world(2, rules=policy())
    one.submit(task("low", 2, priority=1), task("high", 2, priority=9))
    one.carry_all()
    assert one.states("low", "high") == ["evicted", "running"]


def test_the_node_of_a_victim_is_lost_while_it_stops():
    one = world(2, 2, rules=policy())
    one.run(task("low", 2, priority=1), task("other", 2, priority=9))
    one.submit(task("high", 2, priority=9))
    one.tell(news.NodeLost(one.machine.tasks["low"].places[0].node))
    one.carry_all()
    assert one.states("low", "high") == ["evicted", "waiting"]
    assert one.why("high") is not ReasonCode.evicting
    one.node("n9", 2)
    one.carry_all()
    assert one.state("high") is TaskState.running


# ---- reasons and stories ----------------------------------------------------------------------------------------


def test_a_story_tells_every_turn_with_its_reason():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1), task("high", 2, priority=9))
    one.end("high")
    one.end("low")
    story = one.machine.story("low")
    assert [chapter.state for chapter in story if chapter.state != "waiting"] == [
        "starting",
        "running",
        "cancelling",
        "evicted",
        "starting",
        "running",
        "cancelling",
        "done",
    ]
    assert all(chapter.reason.sentence for chapter in story)
    evicted = next(chapter for chapter in story if chapter.state == "evicted")
    assert "high" in evicted.reason.sentence
    assert evicted.reason.code is ReasonCode.priority


def test_explain_says_what_would_have_to_end():
    one = world(2)
    one.run(task("a", 2), task("b", 2, wait_s=60))
    told = one.machine.explain("b", one.now)
    assert told.state is TaskState.waiting
    assert told.reason.code is ReasonCode.no_room
    assert told.position == 1
    assert told.deadline == 60
    assert told.waiting_since == 0
    assert any("a" in need for need in told.needs)


def test_explain_of_an_unknown_task_is_an_input_error():
    one = world(2)
    with pytest.raises(InputError):
        one.machine.explain("nobody", 0.0)


def test_explain_changes_nothing():
    one = world(2, rules=policy())
    one.run(task("a", 2), task("b", 2, wait_s=60))
    before = one.dumped()
    one.machine.explain("b", 10.0)
    one.machine.story("b")
    assert one.dumped() == before


def test_whoever_waits_for_room_that_is_being_made_says_so():
    one = world(2, rules=policy())
    one.run(task("low", 2, priority=1))
    one.submit(task("high", 2, priority=9))
    assert one.why("high") is ReasonCode.evicting
    assert "low" in one.machine.tasks["high"].reason.sentence


# ---- bad input --------------------------------------------------------------------------------------------------


def test_an_unknown_pool_is_refused():
    one = world(2)
    error = one.refused(news.TaskSubmitted(task("a", pool="q")))
    assert "q" in str(error)


def test_an_existing_pool_asked_for_with_another_configuration_is_refused():
    one = world(2, spec=pool(quota=gpus(2)))
    one.tell(news.PoolEnsured(pool(quota=gpus(2))))
    error = one.refused(news.PoolEnsured(pool(quota=gpus(3))))
    assert "quota" in str(error)


def test_reserved_slots_beyond_the_quota_are_refused_at_creation():
    with pytest.raises(InputError, match="quota"):
        pool(quota=gpus(3), reserved=(gpus(2), gpus(2)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "9", True])
def test_a_priority_that_is_no_number_is_refused(bad: object):
    with pytest.raises(InputError, match="priority"):
        task("a", priority=bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, "1", None, True])
def test_resources_that_are_no_amounts_are_refused(bad: object):
    with pytest.raises(InputError, match="gpu"):
        Resources.of({"gpu": bad})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "event",
    [
        news.CompleteRequested("nobody"),
        news.CancelRequested("nobody"),
        news.EvictRequested("nobody"),
        news.TurnRequested("nobody"),
        news.PoolDrained("nowhere"),
        news.PoolDropped("nowhere"),
    ],
)
def test_asking_about_what_is_not_there_is_refused(event):
    one = world(2)
    one.run(task("a"))
    one.refused(event)


def test_a_task_that_has_ended_is_not_evicted_or_given_a_turn():
    one = world(2)
    one.run(task("a"))
    one.end("a")
    before = one.state("a")
    for event in (news.EvictRequested("a"), news.TurnRequested("a")):
        with contextlib.suppress(InputError):
            assert one.tell(event) == []
    assert one.state("a") is before


def test_a_task_that_asks_for_nothing_is_refused():
    with pytest.raises(InputError, match="ask for something"):
        task("a", NOTHING)


# ---- the journal ------------------------------------------------------------------------------------------------


def test_a_snapshot_holds_plain_data_only():
    one = world(4, spec=pool(reserved=(gpus(1),)), rules=policy({"role": {"train": ["rollout"]}}))
    one.run(task("low", 3, priority=1, labels={"role": "rollout"}))
    one.submit(task("high", 3, priority=9, labels={"role": "train"}))
    assert json.loads(json.dumps(one.machine.dump())) == one.machine.dump()


def test_a_machine_read_from_its_snapshot_goes_on_as_before():
    one = world(4, rules=policy())
    one.run(task("low", 4, priority=1))
    one.submit(task("high", 4, priority=9))
    one.reload()
    one.carry_all()
    assert one.states("low", "high") == ["evicted", "running"]
    one.replay()


def test_a_machine_read_from_its_snapshot_looks_at_nobody_whom_the_other_passes_over():
    """Why verdicts are in a snapshot: without them others are looked at, and told other reasons."""
    one = world(8, spec=pool(quota=gpus(4)))
    one.run(task("a", 1), task("b", 3), task("c", 3))
    said = one.machine.tasks["c"].reason
    one.machine.handle(news.TaskEnded("a", 1, None), one.now)
    records = {key: value for key, value in one.dumped().items() if key not in ("gains", "kept", "blocked")}
    alike, otherwise = PoolMachine.load(one.dumped()), PoolMachine.load(records)
    for machine in (one.machine, alike, otherwise):
        machine.handle(news.TaskStopped("a", 1, "not called", False), one.now)
    assert alike.dump() == one.machine.dump()
    assert alike.tasks["c"].reason == said
    assert otherwise.tasks["c"].reason != said


def test_a_story_is_cut_in_its_middle_however_it_grows():
    one = world(1, rules=policy())
    one.run(task("a", 1))
    first = one.machine.story("a")[0]
    for _ in range(300):
        (stop,) = one.tell(news.EvictRequested("a"))
        one.carry(stop, "badly")
        one.carry_all()
    story = one.machine.story("a")
    assert len(story) <= STORY_KEPT
    assert story[0] == first


def test_the_story_of_a_node_keeps_how_it_began():
    one = world(1)
    for at in range(200):
        one.tell(news.NodeCordoned("n0", at % 2 == 0))
    story = one.machine.story("n0")
    assert len(story) <= STORY_KEPT
    assert story[0].state == "joined"


def test_a_snapshot_from_before_verdicts_were_written_is_read():
    one = world(2)
    one.run(task("a", 2), task("b", 2), task("c", 1))
    data = json.loads(json.dumps(one.machine.dump()))
    assert data["blocked"]
    data = {key: value for key, value in data.items() if key not in ("gains", "kept")} | {"blocked": ["b", "c"]}
    again = PoolMachine.load(data)
    again.check()
    again.handle(news.CancelRequested("a"), one.now)
    again.handle(news.TaskStopped("a", 1, "not called", False), one.now)
    assert again.tasks["b"].state is TaskState.starting


def test_a_machine_read_from_its_snapshot_picks_the_same_idle_slot():
    one = world(4)
    one.run(task("a", 1), task("b", 1))
    one.end("b")
    one.end("a")
    one.reload()
    one.run(task("c", 1))
    one.replay()


def test_what_is_in_flight_can_be_asked_for_again():
    one = world(4, rules=policy())
    one.run(task("low", 4, priority=1))
    one.submit(task("high", 4, priority=9))
    assert one.machine.outstanding() == one.pending
    one.reload()
    assert one.machine.outstanding() == one.pending
    one.carry(one.pending[0])
    while one.pending:
        assert one.machine.outstanding() == one.pending
        one.carry(one.pending[0])
    assert one.machine.outstanding() == []


def test_warm_hosts_are_wanted_where_the_pool_may_run():
    one = world(4, 4, spec=pool(target_hosts=2, preload=("json",)))
    targets = one.machine.warm_targets()
    assert sum(count for by_pool in targets.values() for count in by_pool.values()) >= 2
    assert {name for by_pool in targets.values() for name in by_pool} == {pool().name}


def test_a_tenant_that_was_parked_and_has_its_turn_again_may_be_evicted_again():
    one = world(4)
    one.tell(news.PolicySet(policy(same_pool_gap=1.0)))
    one.run(task("owner", 2, room=(gpus(4),), priority=1.0), task("sharer", 2, shares="owner", priority=1.0))
    one.tell(news.TurnRequested("sharer"))
    one.carry_all()
    assert one.states("owner", "sharer") == ["parked", "running"]
    one.tell(news.TurnRequested("owner"))
    one.carry_all()
    assert one.states("owner", "sharer") == ["running", "parked"]
    one.end("sharer")
    one.run(task("new", 4, priority=9.0))
    assert one.states("new", "owner") == ["running", "evicted"]
