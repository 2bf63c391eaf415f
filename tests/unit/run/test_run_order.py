"""What may run next, against the planner's simulation: the same order, the same times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jobs import cluster, component, seed_job
from random_jobs import random_job
from run_plans import any_plan, any_separate
from trimtab.model.plan import Plan
from trimtab.model.workflow import PlacementJob, WeightSync, Workflow
from trimtab.plan.placement.order import (
    BatchStep,
    ExecutionOrder,
    GpuTurn,
    PlanAction,
    PlayedAction,
    WeightSyncStep,
    batch_seconds,
    play,
)
from trimtab.plan.placement.planner import plan_placement

UNLIMITED = 10**9


def planned_seconds(workflow: Workflow, plan: Plan) -> Callable[[PlanAction], float]:
    """Seconds of every action by the plan's own figures."""
    switches = {placed.name: placed.switch_seconds for placed in plan.components}
    steps = {
        placed.name: batch_seconds(workflow.component(placed.name), workflow.batches, placed.seconds)
        for placed in plan.components
    }

    def seconds(action: PlanAction) -> float:
        if isinstance(action, WeightSyncStep):
            return plan.sync_seconds
        return switches[action.component] if isinstance(action, GpuTurn) else steps[action.component][action.batch]

    return seconds


def played(
    workflow: Workflow, plan: Plan, iterations: int, max_open_iterations: int | None = UNLIMITED
) -> list[PlayedAction]:
    seconds = planned_seconds(workflow, plan)
    order = ExecutionOrder(workflow, plan, last=iterations, max_open_iterations=max_open_iterations)

    def perform(act: PlanAction, now: float) -> float:
        order.check()
        return seconds(act)

    acts = list(play(order, perform))
    order.check()
    assert order.over
    assert order.finished == iterations
    return acts


def step_ends(acts: list[PlayedAction], name: str, iteration: int) -> list[float]:
    return [
        p.end_s
        for p in acts
        if isinstance(p.action, BatchStep) and (p.action.component, p.action.iteration) == (name, iteration)
    ]


@pytest.mark.parametrize("chunk", range(4))
def test_every_batch_ends_when_the_simulation_says_under_any_plan(chunk: int) -> None:
    compared = 0
    for seed in range(chunk * 30, chunk * 30 + 30):
        rng = random.Random(seed)
        job = random_job(rng, rng.choice([2, 3, 3, 4, 5]), rng.randint(1, 6), rng.randint(1, 12), seed % 3)
        made = any_plan(rng, job)
        if made is None:
            continue
        space, _, plan = made
        iterations = 3 if job.workflow.staleness else 1
        acts = played(job.workflow, plan, iterations)
        times = np.array([plan.placed(c.name).seconds for c in space.order])
        runs = space.simulator.trace(times, space.shape(made[1].grouping), iterations)
        unit = job.workflow.batches // space.simulator.units
        for t, run in enumerate(runs, 1):
            for i, one in enumerate(space.order):
                ends = step_ends(acts, one.name, t)[unit - 1 :: unit]
                assert ends == pytest.approx(list(run[i]), rel=1e-9, abs=1e-9)
        compared += 1
    assert compared > 18


def test_an_on_policy_iteration_takes_exactly_what_the_plan_predicts() -> None:
    compared = 0
    for seed in range(1000, 1080):
        rng = random.Random(seed)
        job = random_job(rng, rng.choice([2, 3, 4]), rng.randint(1, 6), rng.randint(1, 12))
        made = any_plan(rng, job)
        if made is None:
            continue
        plan = made[2]
        acts = played(job.workflow, plan, 4)
        assert max(p.end_s for p in acts) == pytest.approx(4 * plan.iteration_seconds, rel=1e-9)
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_limit_of_open_iterations_does_not_change_the_period(staleness: int) -> None:
    compared = 0
    for seed in range(2000, 2030):
        rng = random.Random(seed)
        job = random_job(rng, rng.choice([2, 3, 4]), rng.randint(1, 6), rng.randint(1, 6), staleness)
        made = any_plan(rng, job) if job.workflow.staleness else None
        if made is None:
            continue
        plan, source = made[2], job.workflow.weight_sync.source
        acts = played(job.workflow, plan, 100, max_open_iterations=None)
        ends = [p.end_s for p in acts if isinstance(p.action, BatchStep) and p.action.component == source]
        ends = ends[job.workflow.batches - 1 :: job.workflow.batches]
        # It repeats with some whole number of iterations: over a common multiple of the small ones the mean is exact.
        assert (ends[99] - ends[39]) / 60 == pytest.approx(plan.iteration_seconds, rel=1e-6)
        compared += 1
    assert compared > 15


def test_a_source_that_receives_no_weights_does_not_run_ahead_for_ever() -> None:
    chain = (
        component("env", {1: 0.001}),
        component("rollout", {1: 1.0}, ("env",)),
        component("trainer", {1: 10.0}, ("rollout",)),
    )
    job = PlacementJob(cluster(3), Workflow(chain, 2, 1, WeightSync("trainer", "rollout")))
    plan = plan_placement(job).best
    order = ExecutionOrder(job.workflow, plan, last=50)
    seconds = planned_seconds(job.workflow, plan)
    ahead = [p.action.iteration - order.finished for p in play(order, lambda act, now: seconds(act))]
    assert max(ahead) <= order.max_open_iterations


def test_components_of_one_group_take_turns_and_leave_the_gpus_first() -> None:
    job = seed_job()
    workflow = replace(job.workflow, batches=2)
    plan = plan_placement(replace(job, workflow=workflow)).best
    assert plan.mode == "collocated"
    acts = [p.action for p in played(workflow, plan, 2)]
    turns = [act for act in acts if isinstance(act, GpuTurn)]
    assert turns == [
        GpuTurn("rollout", 1, ()),
        GpuTurn("inference", 1, ("rollout",)),
        GpuTurn("trainer", 1, ("inference",)),
        GpuTurn("rollout", 2, ("trainer",)),
        GpuTurn("inference", 2, ("rollout",)),
        GpuTurn("trainer", 2, ("inference",)),
    ]
    assert acts.index(GpuTurn("inference", 1, ("rollout",))) > acts.index(BatchStep("rollout", 1, 1))


def test_neighbours_of_one_engine_stay_together_and_leave_together() -> None:
    chain = (
        component("rollout", {1: 1.0}, engine="vllm"),
        component("reference", {1: 1.0}, ("rollout",), engine="megatron"),
        component("trainer", {1: 1.0}, ("reference",), engine="megatron"),
    )
    job = PlacementJob(cluster(1), Workflow(chain))
    turns = [p.action for p in played(job.workflow, plan_placement(job).best, 2) if isinstance(p.action, GpuTurn)]
    assert turns[:4] == [
        GpuTurn("rollout", 1, ()),
        GpuTurn("reference", 1, ("rollout",)),
        GpuTurn("trainer", 1, ()),
        GpuTurn("rollout", 2, ("reference", "trainer")),
    ]


def test_weights_go_once_an_iteration_and_as_late_as_staleness_says() -> None:
    chain = (component("rollout", {1: 3.0}), component("trainer", {1: 1.0}, ("rollout",), granularity=None))
    sync = WeightSync("trainer", "rollout", 0.5, 0.5)
    for staleness in (0, 1, 2):
        job = PlacementJob(cluster(2), Workflow(chain, 3, staleness, sync))
        acts = played(job.workflow, any_separate(job), 5)
        syncs = [p for p in acts if isinstance(p.action, WeightSyncStep)]
        assert [p.action.iteration for p in syncs] == [1, 2, 3, 4, 5]
        for p in acts:
            if isinstance(p.action, BatchStep) and p.action.component == "rollout":
                arrived = sum(s.end_s <= p.start_s for s in syncs)
                assert arrived >= p.action.iteration - 1 - staleness


@pytest.mark.parametrize("seed", range(20))
def test_asked_to_stop_at_any_moment_everybody_comes_to_the_same_iteration(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        job = random_job(rng, 3, 4, 4, staleness=seed % 3)
        made = any_plan(rng, job)
        if made is not None:
            break
    plan = made[2]
    seconds = planned_seconds(job.workflow, plan)
    order = ExecutionOrder(job.workflow, plan)
    stop_at, last = rng.randint(1, 60), 0
    for number, _ in enumerate(play(order, lambda act, now: seconds(act))):
        order.check()
        if number == stop_at:
            last = order.stop_after(order.finished)
    assert order.over
    assert order.finished == last
    assert {order.ended_by(name) for name in job.workflow.names} == {last}


def test_an_order_begins_where_it_is_told_to() -> None:
    job = seed_job()
    order = ExecutionOrder(job.workflow, plan_placement(job).best, first=7, last=8)
    assert order.finished == 6
    assert order.ready() == (GpuTurn("rollout", 7),)


def test_an_act_that_may_not_begin_or_has_not_begun_is_refused() -> None:
    job = seed_job()
    order = ExecutionOrder(job.workflow, plan_placement(job).best)
    with pytest.raises(ValueError, match="may not begin"):
        order.begin(BatchStep("trainer", 1, 0))
    with pytest.raises(ValueError, match="had not begun"):
        order.end(BatchStep("trainer", 1, 0))
    with pytest.raises(ValueError, match="had not begun"):
        order.end(GpuTurn("rollout", 1))
    with pytest.raises(ValueError, match="had not begun"):
        order.end(WeightSyncStep("trainer", "rollout", 1))
