"""The search against a slow, obvious planner that shares no code with it."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections import Counter
from dataclasses import replace

import pytest

import obvious
from jobs import component
from random_jobs import random_job, random_variant
from trimtab.model.plan import AllowedGroup, FrameworkRules
from trimtab.model.workflow import Cluster, Node, PlacementJob, Workflow
from trimtab.plan.placement.compare import plan_times
from trimtab.plan.placement.search import search
from trimtab.plan.placement.space import PlanSpace
from trimtab.plan.placement.timeline import to_plan

CHUNKS = 24
PER_CHUNK = 100


def compare(job: PlacementJob, rules: FrameworkRules | None = None) -> bool:
    """Check one job; whether it had a plan at all."""
    want = obvious.best(job, rules)
    space = PlanSpace(job, rules)
    outcome = search(space)
    if want is None:
        assert outcome.best is None
        return False
    found = outcome.best
    assert found is not None
    seconds, groups, gpus = want
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert outcome.optimal
    assert outcome.lower_bound == pytest.approx(seconds, rel=1e-9)
    # Among plans as fast: fewest groups, then fewest GPUs.
    assert (len(found.sizes), sum(found.sizes)) == (groups, gpus)
    # The claimed time is what the obvious simulator gives for the claimed plan.
    times = plan_times(space, found)
    group_of = {i: number for number, members in enumerate(found.grouping.groups) for i in members}
    choices = {c.name: obvious.Choice(group_of.get(i), float(times[i])) for i, c in enumerate(space.order)}
    assert found.seconds == pytest.approx(obvious.plan_seconds(job, choices), rel=1e-9)
    if not job.workflow.staleness:
        plan = to_plan(space, found)
        (spans,) = obvious.iteration(job, choices)
        for component in plan.components:
            assert (component.start, component.end) == pytest.approx(spans[component.name], rel=1e-9, abs=1e-9)
    if rules is not None and rules.even_nodes:
        edges = list(itertools.accumulate(node.gpus for node in job.cluster.nodes))
        for group in to_plan(space, found).groups:
            on_each = Counter(bisect_right(edges, rank) for rank in group.gpus)
            assert len(set(on_each.values())) == 1
    return True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_search_equals_brute_force_on_random_workflows(chunk: int) -> None:
    feasible = 0
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        rng = random.Random(seed)
        components = rng.choice([2, 2, 3, 3, 3, 4, 5])
        feasible += compare(random_job(rng, components, rng.randint(1, 8), rng.randint(1, 16)))
    assert feasible > PER_CHUNK // 2


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_steady_period_equals_a_long_simulation(staleness: int) -> None:
    feasible = 0
    for seed in range(40):
        rng = random.Random(1000 * staleness + seed)
        job = random_job(rng, rng.choice([2, 3]), rng.randint(2, 3), rng.randint(1, 6), staleness)
        feasible += compare(job)
    assert feasible > 20


def test_the_search_equals_brute_force_where_each_doubling_gives_less_than_a_perfect_speed_up() -> None:
    feasible = 0
    for seed in range(60):
        rng = random.Random(seed)
        job = random_job(rng, rng.choice([2, 3]), rng.randint(1, 8), rng.randint(1, 8))
        lesser = tuple(
            replace(c, variants=tuple(replace(v, doubling=rng.choice([0.6, 0.8])) for v in c.variants))
            for c in job.workflow.components
        )
        feasible += compare(replace(job, workflow=replace(job.workflow, components=lesser)))
    assert feasible > 30


@pytest.mark.parametrize("seed", range(4))
def test_groups_that_lie_evenly_on_nodes_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    feasible = 0
    for _ in range(40):
        nodes = rng.choice([(8, 8), (6, 6, 2, 2), (3, 3, 3), (4, 4, 4), (2, 2, 3), (1, 4, 4), (5, 2), (4, 3, 2, 1)])
        job = random_job(rng, rng.choice([2, 2, 3]), 1, rng.randint(1, 4), rng.choice([0, 0, 0, 1]))
        if any(c.on_cpu for c in job.workflow.components):
            continue
        cluster = Cluster(tuple(Node(f"n{i}", gpus, "") for i, gpus in enumerate(nodes)))
        workflow = replace(
            job.workflow,
            components=tuple(
                replace(c, variants=(random_variant(rng, sum(nodes), ["", ""], "v"),)) for c in job.workflow.components
            ),
        )
        parts = rng.sample(list(obvious.partitions(list(workflow.names))), k=rng.choice([1, 2]))
        sizes = rng.choice([None, tuple(sorted(rng.sample(range(1, sum(nodes) + 1), k=min(6, sum(nodes)))))])
        groupings = tuple(tuple(AllowedGroup(frozenset(g), sizes) for g in part) for part in parts)
        rules = FrameworkRules("toy", groupings, even_nodes=True)
        feasible += compare(PlacementJob(cluster, workflow), rules)
    assert feasible > 20


def test_a_pool_of_twelve_gpus_lies_as_six_and_six_beside_two_and_two() -> None:
    job = PlacementJob(
        Cluster((Node("a", 8), Node("b", 8))),
        Workflow(
            (
                component("rollout", {4: 50.0}, gpus=(4,), granularity=None),
                component("trainer", {12: 100.0}, ("rollout",), gpus=(12,), granularity=None),
            ),
            batches=1,
        ),
    )
    apart = (AllowedGroup(frozenset({"rollout"})), AllowedGroup(frozenset({"trainer"})))
    space = PlanSpace(job, FrameworkRules("toy", (apart,), even_nodes=True))
    found = search(space).best
    assert found is not None
    groups = {group.components: group.gpus for group in to_plan(space, found).groups}
    assert groups["trainer",] == (2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15)
    assert groups["rollout",] == (0, 1, 8, 9)
