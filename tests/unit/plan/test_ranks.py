"""Ranks of groups: contiguous, and blocks inside nodes where that can be had."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import cluster, component
from trimtab.core.ranks import ranks_text
from trimtab.model.workflow import PlacementJob, Workflow
from trimtab.plan.placement.planner import plan_placement
from trimtab.plan.placement.timeline import RankStrip, lay_out, straddles


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(0, 4),
)
def test_no_order_of_the_groups_straddles_fewer_nodes(groups: list[tuple[int, int]], spare: int) -> None:
    strips = tuple(RankStrip(block * count, ((block, block * count),)) for block, count in groups)
    total = sum(strip.size for strip in strips)
    nodes = (4,) * -(-(total + spare) // 4)
    edges = [0, *itertools.accumulate(nodes)]
    starts = lay_out(strips, nodes)
    taken = [rank for strip, start in zip(strips, starts, strict=True) for rank in range(start, start + strip.size)]
    assert len(taken) == len(set(taken)) == total
    assert min(taken) >= 0
    assert max(taken) < sum(nodes)
    torn = sum(straddles(strip, start, edges) for strip, start in zip(strips, starts, strict=True))
    for order in itertools.permutations(range(len(strips))):
        position, other = 0, 0
        for i in order:
            other += straddles(strips[i], position, edges)
            position += strips[i].size
        assert torn <= other


def test_an_idle_gpu_keeps_a_block_inside_its_node() -> None:
    strips = (RankStrip(3, ((1, 3),)), RankStrip(4, ((4, 4),)))
    first, second = lay_out(strips, (4, 4))
    assert second % 4 == 0
    assert first in (0, 4)


def test_model_parallel_blocks_of_a_plan_stay_inside_nodes() -> None:
    job = PlacementJob(
        cluster(16),
        Workflow(
            (
                component("a", {3: 40.0}, gpus=(3,)),
                component("b", {8: 40.0}, ("a",), gpus=(8,), multiple_of=8),
                component("c", {4: 40.0}, ("b",), gpus=(4,), multiple_of=4),
            ),
            batches=32,
        ),
    )
    for group in plan_placement(job).best.groups:
        if group.components != ("a",):
            assert len({rank // 8 for rank in group.gpus}) == 1


def test_ranks_read_as_people_write_them() -> None:
    assert ranks_text((0, 1, 2, 5, 8, 9)) == "0-2,5,8-9"
    assert ranks_text(()) == ""
