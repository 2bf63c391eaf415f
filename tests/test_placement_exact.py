"""The search against a slow, obvious planner that shares no code with it."""

from __future__ import annotations

import random

import pytest

import obvious
from random_jobs import random_job
from trimtab.plan.compare import plan_times
from trimtab.plan.search import search
from trimtab.plan.space import Space
from trimtab.plan.timeline import to_plan

CHUNKS = 24
PER_CHUNK = 100


def compare(job) -> bool:
    """Check one job; whether it had a plan at all."""
    want = obvious.best(job)
    space = Space(job)
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
