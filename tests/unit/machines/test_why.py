"""Causes of waits, from made facts: every cause by name, and what must never be said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.resources import Resources
from trimtab.machines.diagnose.findings import UNDER_WAY, Finding, NoteKind, WaitCause
from trimtab.machines.diagnose.fitting import NodeSpace, place
from trimtab.machines.diagnose.snapshot import (
    AbandonedWorkload,
    GcsSnapshot,
    LabelSelector,
    NodeSnapshot,
    NodeType,
    NonRayGpuUser,
    PendingStage,
    PendingWorkload,
    PlacementGroupSnapshot,
    RayJob,
    ResourceRequest,
    WorkloadKind,
    named,
)
from trimtab.machines.diagnose.why import diagnose
from trimtab.model.pool import PlacementStrategy
from why_world import NOW, actor, group, holds, node, obvious, request, snapshot

TWO = (node("n1", gpu=2, cpu=8), node("n2", gpu=2, cpu=8))


def only(seen: GcsSnapshot) -> Finding:
    """The one finding of a survey."""
    (found,) = diagnose(seen).findings
    return found


# ---- it can never start ---------------------------------------------------------------------------------------------


def test_what_asks_more_than_any_node_has_never_starts_and_the_nearest_node_is_named() -> None:
    found = only(snapshot([*TWO, node("small", gpu=1)], [actor("big", gpu=4)]))
    assert (found.cause, found.never) == (WaitCause.too_big, True)
    assert "4 gpu" in found.sentence
    assert "2 gpu" in found.sentence
    first = found.rows[0]
    assert (first.node, str(first.lacks_empty)) == ("n1", "2 gpu")
    assert [row.node for row in found.rows] == ["n1", "n2", "small"]


def test_a_resource_that_no_node_has_is_named_with_what_may_have_been_meant() -> None:
    found = only(snapshot([node("n1", gpu=1, worker_unit=1)], [actor("a", worker_units=1)]))
    assert (found.cause, found.never) == (WaitCause.no_resource, True)
    assert "no node has any worker_units" in found.sentence
    assert found.remedies[0] == "did you mean worker_unit?"


def test_labels_that_no_node_has_are_named_beside_those_that_are_there() -> None:
    nodes = [node("n1", cpu=1, labels={"zone": "a"}), node("n2", cpu=1)]
    found = only(snapshot(nodes, [actor("a", cpu=1, zone="b")]))
    assert (found.cause, found.never) == (WaitCause.no_label, True)
    assert "zone=b" in found.sentence
    assert "zone is a" in found.sentence
    assert {row.node: row.note for row in found.rows} == {"n1": "zone is a", "n2": "no label zone"}


def test_a_node_with_the_labels_that_is_too_small_is_not_called_a_missing_label() -> None:
    nodes = [node("n1", gpu=1, labels={"zone": "a"}), node("n2", gpu=4)]
    found = only(snapshot(nodes, [actor("a", gpu=2, zone="a")]))
    assert (found.cause, found.never) == (WaitCause.too_big, True)
    assert "of those with zone=a" in found.sentence


def test_any_one_of_several_sets_of_labels_will_do() -> None:
    either = ResourceRequest(
        Resources.of(cpu=1), ((LabelSelector("zone", ("b",)),), (LabelSelector("zone", ("a", "c")),))
    )
    nodes = [node("n1", cpu=1, labels={"zone": "c"})]
    assert only(snapshot(nodes, [PendingWorkload("a", WorkloadKind.actor, "a", (either,))])).cause is WaitCause.fits
    other = ResourceRequest(Resources.of(cpu=1), ((LabelSelector("zone", ("c",), negated=True),),))
    assert only(snapshot(nodes, [PendingWorkload("a", WorkloadKind.actor, "a", (other,))])).cause is WaitCause.no_label


def test_strict_spread_over_more_nodes_than_there_are_never_starts() -> None:
    found = only(snapshot(TWO, [group("g", *[request(gpu=1)] * 3, strategy=PlacementStrategy.strict_spread)]))
    assert (found.cause, found.never) == (WaitCause.too_few_nodes, True)
    assert "3 bundles" in found.sentence
    assert "2 nodes" in found.sentence


def test_strict_pack_of_more_than_a_node_has_never_starts() -> None:
    found = only(snapshot(TWO, [group("g", *[request(gpu=1)] * 3, strategy=PlacementStrategy.strict_pack)]))
    assert (found.cause, found.never) == (WaitCause.too_big_together, True)
    assert "lacks 1 gpu even when empty" in found.sentence


def test_bundles_that_ask_more_than_all_nodes_have_never_start() -> None:
    found = only(snapshot(TWO, [group("g", *[request(gpu=1)] * 5)]))
    assert (found.cause, found.never) == (WaitCause.too_big_together, True)
    assert "5 gpu" in found.sentence
    assert found.remedies[0] == "add nodes with 1 gpu"


def test_bundles_that_do_not_go_into_the_nodes_though_the_sum_does_never_start() -> None:
    nodes = [node("n1", gpu=3), node("n2", gpu=3)]
    found = only(snapshot(nodes, [group("g", *[request(gpu=2)] * 3)]))
    assert (found.cause, found.never) == (WaitCause.too_big_together, True)


def test_a_node_that_is_not_there_any_more_is_named() -> None:
    found = only(snapshot(TWO, [actor("a", gpu=1, pinned="feedbeef")]))
    assert (found.cause, found.never) == (WaitCause.no_node, True)
    assert "feedbeef" in found.sentence


def test_an_empty_cluster_never_starts_anything_and_says_so() -> None:
    found = only(snapshot([], [actor("a", cpu=1)]))
    assert (found.cause, found.never) == (WaitCause.no_node, True)


# ---- it waits -------------------------------------------------------------------------------------------------------


def test_enough_in_pieces_is_fragmented_and_who_would_have_to_end_is_named() -> None:
    found = only(snapshot(TWO, [actor("wide", gpu=2)], [holds("x", "n1", gpu=1), holds("y", "n2", gpu=1)]))
    assert (found.cause, found.never) == (WaitCause.fragmented, False)
    assert "in pieces" in found.sentence
    assert found.blockers in {("x",), ("y",)}
    assert found.remedies[0].endswith("ends")


def test_what_is_simply_taken_is_busy_and_the_fewest_holders_are_named() -> None:
    holders = [holds("a", "n1", gpu=1), holds("b", "n1", gpu=1), holds("whole", "n2", gpu=2)]
    found = only(snapshot(TWO, [actor("w", gpu=2)], holders))
    assert (found.cause, found.blockers) == (WaitCause.busy, ("whole",))
    assert "0 of 4 gpu are free on 2 nodes" in found.sentence


def test_a_group_that_nothing_runs_in_is_said_to_be_idle() -> None:
    holders = [holds("pg", "n1", kind=WorkloadKind.group, gpu=2, job="old")]
    found = only(snapshot([TWO[0]], [actor("w", gpu=1)], holders, jobs=(RayJob("old", ended=True),)))
    assert "nothing runs in it" in found.remedies[0]
    assert "of a job that has ended" in found.remedies[0]


def test_a_sibling_that_holds_what_is_asked_is_named_and_that_fewer_of_them_would_do() -> None:
    found = only(snapshot([TWO[0]], [actor("w3", class_name="W", gpu=1)], [holds("w1", "n1", class_name="W", gpu=2)]))
    assert (found.cause, found.blockers) == (WaitCause.busy, ())
    assert found.remedies[0].startswith("actor w1, which holds 2 gpu, ends")
    assert "fewer of them" in found.remedies[0]


def test_another_group_of_the_same_job_is_no_sibling_and_has_to_end() -> None:
    waits = replace(group("eval", request(gpu=2)), class_name="")
    holder = replace(holds("train", "n1", kind=WorkloadKind.group, gpu=2), class_name="")
    found = only(snapshot([TWO[0]], [waits], [holder]))
    assert (found.cause, found.blockers) == (WaitCause.busy, ("train",))
    assert found.remedies[0].startswith("placement group train")
    assert not any("fewer" in one for one in found.remedies)


@pytest.mark.parametrize("bundles", [2, 3])
def test_a_gang_that_waits_beside_a_node_that_goes_is_told_of_it(bundles: int) -> None:
    nodes = [node("n1", gpu=1), node("n2", {"gpu": 1}, gpu=1), node("n3", {"gpu": 1}, gpu=1, drain=40)]
    requests = [request(gpu=1)] * bundles
    found = only(snapshot(nodes, [group("gang", *requests, strategy=PlacementStrategy.strict_spread)]))
    assert "n3, which drains, deadline in 40 s" in found.sentence


def test_a_node_that_goes_and_could_take_nothing_of_it_is_not_named() -> None:
    nodes = [node("n1", {"gpu": 2}, gpu=2), node("n2", cpu=8, drain=40)]
    found = only(snapshot(nodes, [actor("a", gpu=2)]))
    assert "n2" not in found.sentence


def test_two_that_hold_what_the_other_waits_for_are_told_as_one_with_both_names() -> None:
    waiting = [actor("left-1", class_name="Left", gpu=1), actor("right-1", class_name="Right", gpu=1)]
    holders = [holds("left-0", "n1", class_name="Left", gpu=1), holds("right-0", "n1", class_name="Right", gpu=1)]
    found = only(snapshot([TWO[0]], waiting, holders))
    assert (found.cause, found.never, found.count) == (WaitCause.half_held, False, 2)
    assert "left-1" in found.sentence
    assert "right-1" in found.sentence
    assert set(found.blockers) == {"left-0", "right-0"}


def test_groups_of_two_jobs_that_each_hold_one_and_wait_for_another_hold_each_other_up() -> None:
    waiting = [group("a", request(gpu=2), job="one"), group("b", request(gpu=2), job="two")]
    waiting = [replace(each, class_name="") for each in waiting]
    holders = [
        replace(holds("a0", "n1", kind=WorkloadKind.group, job="one", gpu=2), class_name=""),
        replace(holds("b0", "n2", kind=WorkloadKind.group, job="two", gpu=2), class_name=""),
    ]
    found = only(snapshot(TWO, waiting, holders))
    assert (found.cause, found.count) == (WaitCause.half_held, 2)


def test_a_group_that_lost_a_bundle_and_holds_the_rest_blocks_by_that() -> None:
    broken = group("broken", ResourceRequest(Resources.of(gpu=2), node="n1"), request(gpu=4), restarted=True)
    holders = [holds("broken", "n1", kind=WorkloadKind.group, gpu=2)]
    nodes = [node("n1", gpu=2)]
    found = {
        each.workloads[0].id: each for each in diagnose(snapshot(nodes, [broken, actor("w", gpu=2)], holders)).findings
    }
    assert found["w"].cause is WaitCause.half_held
    assert "broken" in found["w"].sentence
    assert found["broken"].never
    assert "still holds 1 of its 2 bundles" in found["broken"].sentence


def test_what_would_fit_on_a_node_that_goes_is_told_its_deadline() -> None:
    nodes = [node("n1", {"gpu": 2}, gpu=2), node("n2", gpu=2, drain=40)]
    found = only(snapshot(nodes, [actor("a", gpu=1)]))
    assert (found.cause, found.never) == (WaitCause.draining, False)
    assert "n2, which drains, deadline in 40 s" in found.sentence


def test_what_only_a_node_that_goes_could_take_never_starts() -> None:
    nodes = [node("n1", gpu=1), node("n2", gpu=2, drain=40)]
    found = only(snapshot(nodes, [actor("a", gpu=2)]))
    assert (found.cause, found.never) == (WaitCause.draining, True)


def test_a_process_outside_ray_on_the_gpu_of_a_starting_actor_is_the_cause() -> None:
    starting = actor("engine", gpu=1, stage=PendingStage.starting, node="n1")
    taken = NonRayGpuUser("n1", 3, 4711, "python train.py", 60 * 2**30, 80 * 2**30, place=0)
    seen = snapshot([TWO[0]], [starting], [holds("engine", "n1", gpu=1, gpus=(0,))], non_ray_gpu_users=(taken,))
    found = only(seen)
    assert (found.cause, found.never) == (WaitCause.gpu_outside, False)
    for word in ("GPU 3", "process 4711", "python train.py", "60 of 80 GiB", "n1"):
        assert word in found.sentence
    other_gpu = replace(taken, place=1)
    assert only(replace(seen, non_ray_gpu_users=(other_gpu,))).cause is WaitCause.starting


def test_a_gpu_held_outside_ray_is_noted_though_nothing_waits() -> None:
    told = diagnose(
        snapshot(
            TWO,
            non_ray_gpu_users=(NonRayGpuUser("n2", 1, 99), NonRayGpuUser(None, 7, 98)),
            holders=[holds("x", "n2", gpu=1)],
        )
    )
    assert told.findings == ()
    assert [one.kind for one in told.notes] == [NoteKind.gpu_outside] * 2
    assert "process 99" in told.notes[0].sentence
    assert "no node of this cluster" in told.notes[1].sentence


def test_a_full_bundle_names_who_is_in_it() -> None:
    seen_group = PlacementGroupSnapshot(
        "pg", "team", (Resources.of(gpu=1),) * 2, (Resources(), Resources.of(gpu=1)), ("n1", "n2")
    )
    inside = holds("first", "n1", gpu=1, group="pg", bundle=0)
    found = only(snapshot(TWO, [actor("a", gpu=1, group="pg", bundle=0)], [inside], groups=(seen_group,)))
    assert (found.cause, found.blockers) == (WaitCause.group_full, ("first",))
    assert "team" in found.sentence
    free = only(snapshot(TWO, [actor("a", gpu=1, group="pg")], [inside], groups=(seen_group,)))
    assert free.cause is WaitCause.fits
    pieces = replace(seen_group, bundles=(Resources.of(gpu=2),) * 2, free=(Resources.of(gpu=1),) * 2)
    halves = only(snapshot(TWO, [actor("a", gpu=2, group="pg")], [inside], groups=(pieces,)))
    assert (halves.cause, halves.never) == (WaitCause.group_full, False)  # no actor lies in two bundles
    big = only(snapshot(TWO, [actor("a", gpu=2, group="pg")], [inside], groups=(seen_group,)))
    assert (big.cause, big.never) == (WaitCause.too_big, True)


def test_actors_of_a_group_that_waits_are_told_behind_it() -> None:
    waiting = [group("pg", request(gpu=4)), actor("a", gpu=1, group="pg"), actor("b", gpu=1, group="pg")]
    told = diagnose(snapshot(TWO, waiting))
    (found,) = told.findings
    assert [one.id for one in found.followers] == ["a", "b"]
    assert (told.waits, told.never) == (3, 3)


def test_a_group_that_is_not_there_is_said_to_be_gone() -> None:
    found = only(snapshot(TWO, [actor("a", gpu=1, group="nowhere")]))
    assert (found.cause, found.never) == (WaitCause.group_gone, True)


def test_arguments_that_are_not_there_are_the_cause_whatever_is_free() -> None:
    assert only(snapshot(TWO, [actor("a", stage=PendingStage.inputs)])).cause is WaitCause.inputs


def test_where_the_autoscaler_can_add_a_node_nothing_is_for_ever() -> None:
    kinds = (NodeType("big", Resources.of(gpu=8, cpu=8), more=2, coming=1),)
    told = diagnose(snapshot(TWO, [actor("a", gpu=8)], node_types=kinds))
    (found,) = told.findings
    assert (found.cause, found.never) == (WaitCause.nodes_coming, False)
    assert "is starting 1 (big)" in found.sentence
    assert [one.kind for one in told.notes] == [NoteKind.nodes_coming]
    assert only(snapshot(TWO, [actor("a", gpu=9)], node_types=kinds)).never
    used_up = (NodeType("big", Resources.of(gpu=8), more=0),)
    assert only(snapshot(TWO, [actor("a", gpu=8)], node_types=used_up)).never


# ---- it is under way, or nothing waits ------------------------------------------------------------------------------


def test_what_fits_is_about_to_start_and_after_long_something_else_is_wrong() -> None:
    soon = only(snapshot(TWO, [actor("a", gpu=1, since=NOW - 1)]))
    assert (soon.cause, soon.remedies) == (WaitCause.fits, ())
    late = only(snapshot(TWO, [actor("a", gpu=1, since=NOW - 600)]))
    assert "should have started" in late.remedies[0]


def test_room_that_is_set_aside_already_is_no_wait_for_room() -> None:
    nodes = [node("n1", {"gpu": 2}, gpu=2)]
    leased = actor("a", gpu=2, node="n1", queued=False)
    assert only(snapshot(nodes, [leased])).cause is WaitCause.starting
    assert only(snapshot(nodes, [replace(leased, queued=True)])).cause is WaitCause.busy
    explained = snapshot([node("n1", gpu=2)], [leased], [holds("x", "n1", gpu=2)])
    assert only(explained).cause is WaitCause.busy


def test_nothing_waits_on_a_quiet_cluster() -> None:
    told = diagnose(snapshot(TWO, (), [holds("x", "n1", gpu=2)]))
    assert (told.findings, told.notes, told.waits, told.never) == ((), (), 0, 0)


def test_what_ray_gave_up_is_noted_and_does_not_count() -> None:
    told = diagnose(
        snapshot(TWO, abandoned=(AbandonedWorkload("a", WorkloadKind.actor, "Lost", "its node is gone", NOW),))
    )
    assert (told.waits, told.notes[0].kind) == (0, NoteKind.given_up)


def test_things_alike_are_told_once_and_counted() -> None:
    waiting = [actor(f"w{i}", class_name="W", gpu=4) for i in range(5)]
    found = only(snapshot(TWO, waiting))
    assert (found.count, len(found.workloads)) == (5, 5)


def test_what_never_ends_comes_first_then_the_oldest() -> None:
    holders = [holds("x", "n1", gpu=2), holds("y", "n2", gpu=2)]
    waiting = [
        actor("young", gpu=1, since=NOW - 5),
        actor("old", gpu=2, since=NOW - 50),
        actor("never", gpu=3, since=NOW - 1),
    ]
    assert [one.workloads[0].id for one in diagnose(snapshot(TWO, waiting, holders)).findings] == [
        "never",
        "old",
        "young",
    ]


def test_nodes_are_named_so_that_they_can_be_told_apart() -> None:
    nodes = [
        NodeSnapshot("a" * 56, "", Resources(), Resources(), address="10.0.0.1"),
        NodeSnapshot("b" * 56, "", Resources(), Resources(), address="10.0.0.2"),
        NodeSnapshot("c" * 56, "", Resources(), Resources(), address="10.0.0.2"),
        NodeSnapshot("d" * 56, "gpu-7", Resources(), Resources(), address="10.0.0.2"),
    ]
    assert [one.name for one in named(nodes)] == ["10.0.0.1", "b" * 12, "c" * 12, "gpu-7"]


# ---- what must never be said ----------------------------------------------------------------------------------------

amounts = st.builds(lambda gpu, cpu: {"gpu": gpu, "cpu": cpu}, st.integers(0, 3), st.integers(0, 3))
zones = st.sampled_from(["a", "b", None])


@st.composite
def nodes_drawn(draw: st.DrawFn) -> list[NodeSnapshot]:
    made = []
    for number in range(draw(st.integers(0, 3))):
        zone = draw(zones)
        drains = draw(st.sampled_from([None, None, 30.0]))
        made.append(
            node(f"n{number}", draw(amounts), drain=drains, labels={"zone": zone} if zone else {}, **draw(amounts))
        )
    return made


@st.composite
def asks_drawn(draw: st.DrawFn) -> tuple[ResourceRequest, ...]:
    few = [request(zone=draw(zones), **draw(amounts)) for _ in range(draw(st.integers(1, 2)))]
    return tuple(draw(st.lists(st.sampled_from(few), min_size=1, max_size=4)))


@given(requests=asks_drawn(), nodes=nodes_drawn(), strategy=st.sampled_from(list(PlacementStrategy)))
@settings(max_examples=400, deadline=None)
def test_a_placement_is_found_exactly_where_there_is_one(
    requests: tuple[ResourceRequest, ...], nodes: list[NodeSnapshot], strategy: PlacementStrategy
) -> None:
    spaces = [NodeSpace(one.id, one.free, one.labels) for one in nodes]
    fit = place(requests, spaces, strategy)
    assert fit.proven
    assert (fit.nodes is not None) == obvious(requests, spaces, strategy)
    if fit.nodes is not None:
        chosen = dict.fromkeys(fit.nodes)
        kept = [request for request in requests if fit.nodes]
        assert obvious(kept, [one for one in spaces if one.node in chosen], strategy)


@given(requests=asks_drawn(), nodes=nodes_drawn(), strategy=st.sampled_from(list(PlacementStrategy)))
@settings(max_examples=400, deadline=None)
def test_never_is_said_exactly_where_the_nodes_that_stay_could_not_take_it_empty(
    requests: tuple[ResourceRequest, ...], nodes: list[NodeSnapshot], strategy: PlacementStrategy
) -> None:
    found = only(snapshot(nodes, [group("g", *requests, strategy=strategy)]))
    staying = [NodeSpace(one.id, one.total, one.labels) for one in nodes if one.drain is None]
    assert found.never == (not obvious(requests, staying, strategy))
    now = [NodeSpace(one.id, one.free, one.labels) for one in nodes if one.drain is None]
    assert (found.cause in UNDER_WAY) == obvious(requests, now, strategy)


@st.composite
def surveys(draw: st.DrawFn) -> GcsSnapshot:
    nodes = draw(nodes_drawn())
    ids = [one.id for one in nodes] or ["gone"]
    waiting: list[PendingWorkload] = []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from([WorkloadKind.actor, WorkloadKind.task, WorkloadKind.group]))
        requests = draw(asks_drawn())
        one = PendingWorkload(
            f"w{number}",
            kind,
            f"w{number}",
            requests if kind is WorkloadKind.group else requests[:1],
            stage=draw(st.sampled_from(list(PendingStage))) if kind is WorkloadKind.actor else PendingStage.resources,
            strategy=draw(st.sampled_from(list(PlacementStrategy)))
            if kind is WorkloadKind.group
            else PlacementStrategy.pack,
            since=draw(st.sampled_from([None, NOW - 100])),
            job=draw(st.sampled_from(["j1", "j2"])),
            class_name=draw(st.sampled_from(["A", "B"])),
            count=draw(st.integers(1, 3)) if kind is WorkloadKind.task else 1,
            pinned=draw(st.sampled_from([None, None, *ids])) if kind is not WorkloadKind.group else None,
            group=draw(st.sampled_from([None, None, "w0", "pg"])) if kind is not WorkloadKind.group else None,
            node=draw(st.sampled_from([None, *ids])),
            queued=draw(st.booleans()),
        )
        waiting.append(one)
    holders = [
        holds(
            f"h{i}",
            draw(st.sampled_from(ids)),
            job=draw(st.sampled_from(["j1", "j2"])),
            class_name="A",
            **draw(amounts),
        )
        for i in range(draw(st.integers(0, 3)))
    ]
    stands = PlacementGroupSnapshot(
        "pg", "pg", (Resources.of(gpu=1),), (Resources.of(gpu=draw(st.integers(0, 1))),), ("n0",)
    )
    return snapshot(
        nodes,
        waiting,
        holders,
        groups=(stands,),
        non_ray_gpu_users=(NonRayGpuUser(draw(st.sampled_from([None, *ids])), 0, 5),),
    )


@given(seen=surveys())
@settings(max_examples=400, deadline=None)
def test_nothing_that_waits_is_ever_passed_over_or_told_twice(seen: GcsSnapshot) -> None:
    told = diagnose(seen)
    ids = [one.id for each in told.findings for one in (*each.workloads, *each.followers)]
    assert sorted(ids) == sorted(one.id for one in seen.waiting)
    assert told.waits == sum(one.count for one in seen.waiting)
    assert all(one.sentence for one in told.findings)


def test_a_search_that_is_given_up_is_not_taken_for_never() -> None:
    sizes = [3, 5, 7, 4, 6, 9, 8, 5, 7, 6]
    spaces = [NodeSpace(f"n{i}", Resources.of(gpu=15, cpu=16)) for i in range(4)]
    requests = [request(gpu=size, cpu=17 - size if size > 8 else 1) for size in sizes]
    fit = place(requests, spaces, effort=3)
    assert (fit.nodes, fit.proven, fit.possible) == (None, False, True)


@pytest.mark.parametrize("bundles", [1, 300])
def test_a_thousand_nodes_are_judged_at_once(bundles: int) -> None:
    nodes = [node(f"n{i}", gpu=8) for i in range(1000)]
    waiting: list[Any] = [
        group("g", *[request(gpu=8)] * bundles, request(gpu=1), strategy=PlacementStrategy.strict_spread)
    ]
    holders = [holds(f"h{i}", f"n{i}", gpu=1) for i in range(1000)]
    assert only(snapshot(nodes, waiting, holders)).cause in (WaitCause.busy, WaitCause.fragmented)
