"""The placement planner: the rules that its answers keep."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import cluster, component, ppo_job, seed_job
from random_jobs import random_job
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import Cluster, GpuCurve, Memory, Node, PlacementJob, Variant, WeightSync, Workflow
from trimtab.plan.placement.planner import best_plan, plan_placement
from trimtab.plan.placement.search import search
from trimtab.plan.placement.space import PlanSpace, is_extrapolated, seconds_at


def seconds(job: PlacementJob) -> float:
    return best_plan(job)[1].best.seconds


def test_the_seed_case_shares_everything_at_the_sum_of_its_costs() -> None:
    answer = plan_placement(seed_job(8, granularity=None))
    assert answer.best.mode == "collocated"
    assert answer.best.iteration_seconds == pytest.approx(186.4)
    assert answer.optimal
    assert answer.best.groups[0].gpus == tuple(range(8))


@pytest.mark.parametrize("gpus", [6, 12, 24, 48])
@pytest.mark.parametrize("granularity", [1, 64, None])
def test_no_plan_is_worse_than_sharing_on_sizes_that_are_no_powers_of_two(gpus: int, granularity: int | None) -> None:
    job = seed_job(gpus, measured_on=8, granularity=granularity)
    assert seconds(job) <= 186.4 * 8 / gpus * (1 + 1e-9)


def test_an_all_separate_chain_takes_the_fill_plus_the_slowest() -> None:
    job = PlacementJob(
        cluster(3),
        Workflow(
            (
                component("a", {1: 10.0}, gpus=(1,)),
                component("b", {1: 20.0}, ("a",), gpus=(1,)),
                component("c", {1: 15.0}, ("b",), gpus=(1,)),
            ),
            batches=10,
        ),
    )
    assert seconds(job) == pytest.approx(1 + 2 + 1.5 + 9 * 2)


def test_a_workflow_with_a_critic_and_a_reward_model_plans() -> None:
    answer = plan_placement(ppo_job())
    assert answer.optimal
    assert {name for group in answer.best.groups for name in group.components} == set(ppo_job().workflow.names)


def test_eight_components_on_sixty_four_gpus_plan() -> None:
    rng = random.Random(3)
    chain = tuple(
        component(
            f"c{i}",
            {8: rng.uniform(50, 200), 64: rng.uniform(10, 40)},
            (f"c{rng.randrange(i)}",) if i else (),
            granularity=rng.choice([1, 16, None]),
        )
        for i in range(8)
    )
    space, outcome = best_plan(PlacementJob(cluster(64), Workflow(chain, batches=64)))
    assert outcome.optimal
    shared = search(space, [g for g in space.groupings() if len(g.tables) == 1]).best
    assert outcome.best.seconds <= shared.seconds


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 7), st.integers(1, 12), st.integers(1, 4))
def test_more_gpus_never_make_the_predicted_time_worse(seed: int, n: int, gpus: int, batches: int, more: int) -> None:
    job = random_job(random.Random(seed), n, gpus, batches)
    kind = job.cluster.nodes[0].gpu
    node = replace(job.cluster.nodes[0], name="extra", gpus=more, gpu=kind)
    if node.host_memory_gb is not None:
        # As much host memory for each GPU as before: more GPUs, not a poorer host.
        first = job.cluster.nodes[0]
        node = replace(node, host_memory_gb=first.host_memory_gb / first.gpus * more)
    larger = replace(job, cluster=Cluster((*job.cluster.nodes, node)))
    before, after = search(PlanSpace(job)).best, search(PlanSpace(larger)).best
    if before is not None:
        assert after is not None
        assert after.seconds <= before.seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 8))
def test_a_plan_keeps_its_promises(seed: int, n: int, gpus: int) -> None:
    job = random_job(random.Random(seed), n, gpus, 8)
    try:
        answer = plan_placement(job)
    except InfeasibleError:
        return
    for plan in (answer.best, *(a.plan for a in answer.alternatives if a.plan), *answer.near_ties):
        check_plan(job, plan)
        assert plan.iteration_seconds >= answer.best.iteration_seconds * (1 - 1e-9)
    assert all(tie.iteration_seconds <= answer.best.iteration_seconds * 1.05 for tie in answer.near_ties)
    assert plan_placement(job) == answer  # deterministic


def check_plan(job: PlacementJob, plan: Plan) -> None:
    taken = [rank for group in plan.groups for rank in group.gpus]
    assert len(taken) == len(set(taken)), "groups have disjoint GPUs"
    for group in plan.groups:
        line = job.cluster.ranks(group.kind)
        positions = [line.index(rank) for rank in group.gpus]
        assert positions == list(range(positions[0], positions[0] + len(positions))), "ranks are contiguous"
        for name in group.components:
            placed = plan.placed(name)
            assert set(placed.gpus) <= set(group.gpus)
            variants = {v.name: v for v in job.workflow.component(name).variants}
            assert variants[placed.variant].allows(len(placed.gpus))
    assert 0 <= plan.idle_share <= 1
    assert all(0 <= bar.start <= bar.end <= plan.timeline_seconds * (1 + 1e-9) for bar in plan.timeline)
    on_gpu = {c.name: group for group in plan.groups for c in plan.components if c.name in group.components}
    for group in plan.groups:
        bars = sorted(
            (bar.start, bar.end) for bar in plan.timeline if on_gpu.get(bar.component) is group and bar.doing == "run"
        )
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(bars)), "one at a time on shared GPUs"


def test_memory_that_does_not_fit_together_keeps_components_apart() -> None:
    big = Memory(active=GpuCurve(per_gpu=70.0), resident=GpuCurve(per_gpu=30.0))
    job = PlacementJob(
        cluster(4, gpu_memory_gb=80.0),
        Workflow((component("a", {4: 10.0}, memory=big), component("b", {4: 10.0}, ("a",), memory=big)), batches=1),
    )
    answer = plan_placement(job)
    assert answer.best.mode == "disaggregated"
    shared = next(a for a in answer.alternatives if a.label == "all shared")
    assert shared.plan is None
    assert "memory" in shared.reason


def test_a_slower_variant_is_chosen_and_named_where_memory_asks_for_it() -> None:
    fast = Variant(
        "tp1", {"": ((2, 10.0),)}, memory=Memory(active=GpuCurve(per_gpu=70.0), resident=GpuCurve(per_gpu=40.0))
    )
    lean = Variant(
        "tp2", {"": ((2, 12.0),)}, memory=Memory(active=GpuCurve(per_gpu=30.0), resident=GpuCurve(per_gpu=5.0))
    )
    other = component("a", {2: 10.0}, memory=Memory(active=GpuCurve(per_gpu=60.0)))
    trainer = replace(component("b", {2: 1.0}, ("a",), granularity=None), variants=(fast, lean))
    job = PlacementJob(cluster(2, gpu_memory_gb=80.0), Workflow((other, trainer), batches=4))
    plan = plan_placement(job).best
    assert plan.mode == "collocated"
    assert plan.placed("b").variant == "tp2"


def test_host_memory_of_parked_components_forbids_sharing() -> None:
    job = PlacementJob(
        Cluster((Node("n", 2, host_memory_gb=40.0),)),
        Workflow(
            (component("a", {2: 10.0}, host_memory_gb=30.0), component("b", {2: 10.0}, ("a",), host_memory_gb=30.0))
        ),
    )
    assert plan_placement(job).best.mode == "disaggregated"


def test_a_model_that_fits_nowhere_is_named() -> None:
    big = Memory(active=GpuCurve(per_gpu=99.0))
    job = PlacementJob(
        cluster(4, gpu_memory_gb=80.0),
        Workflow((component("a", {4: 10.0}), component("b", {4: 10.0}, ("a",), memory=big))),
    )
    with pytest.raises(InfeasibleError, match="b fits nowhere: it needs 99 GB"):
        plan_placement(job)


def test_no_allowed_count_is_named() -> None:
    job = PlacementJob(
        cluster(4), Workflow((component("a", {8: 10.0}, multiple_of=8), component("b", {4: 10.0}, ("a",))))
    )
    with pytest.raises(InfeasibleError, match="no GPU count is allowed for a: it asks for a multiple of 8"):
        plan_placement(job)


def test_too_few_gpus_to_be_apart_and_no_memory_to_share_is_said() -> None:
    big = Memory(active=GpuCurve(per_gpu=50.0), resident=GpuCurve(per_gpu=50.0))
    job = PlacementJob(
        cluster(2, gpu_memory_gb=80.0),
        Workflow(tuple(component(n, {1: 10.0}, memory=big) for n in ("a", "b", "c"))),
    )
    with pytest.raises(InfeasibleError) as error:
        plan_placement(job)
    assert "at least 3 GPUs" in str(error.value)
    assert "memory" in str(error.value)


def test_a_profile_of_another_kind_of_gpu_is_refused_by_name() -> None:
    a = replace(component("a", {1: 1.0}), variants=(Variant(seconds={"H20": ((4, 9.0),)}),))
    job = PlacementJob(Cluster((Node("n", 4, "H100"),)), Workflow((a, component("b", {4: 1.0}, ("a",)))))
    with pytest.raises(InfeasibleError, match="a was measured on H20, and the cluster has H100"):
        plan_placement(job)


def test_a_group_uses_one_kind_of_gpu_and_the_better_one_goes_where_it_pays() -> None:
    fast_on_b = replace(component("a", {1: 1.0}), variants=(Variant(seconds={"A": ((2, 100.0),), "B": ((2, 10.0),)}),))
    job = PlacementJob(
        Cluster((Node("n0", 2, "A"), Node("n1", 2, "B"))),
        Workflow((fast_on_b, component("b", {2: 20.0}, ("a",))), batches=8),
    )
    plan = plan_placement(job).best
    kinds = {name: group.kind for group in plan.groups for name in group.components}
    assert kinds["a"] == "B"
    assert set(plan.placed("a").gpus) <= {2, 3}


def test_switches_are_paid_once_around_the_clock_and_not_within_an_engine() -> None:
    def job(engines: tuple[str | None, ...]) -> PlacementJob:
        parts = tuple(
            component(n, {1: 10.0}, after, engine=e, switch_seconds=3.0, granularity=None)
            for (n, after), e in zip((("a", ()), ("b", ("a",)), ("c", ("b",))), engines, strict=True)
        )
        return PlacementJob(cluster(1), Workflow(parts))

    assert seconds(job((None, None, None))) == pytest.approx(39)
    assert seconds(job(("x", "x", "x"))) == pytest.approx(30)
    assert seconds(job(("v", "m", "m"))) == pytest.approx(36)  # m after v, v after m around the clock


def test_the_sync_costs_what_the_grouping_says() -> None:
    parts = (component("a", {1: 10.0}), component("b", {1: 10.0}, ("a",), granularity=None))
    sync = WeightSync("b", "a", shared_seconds=1.0, separate_seconds=5.0)
    assert seconds(PlacementJob(cluster(1), Workflow(parts, weight_sync=sync))) == pytest.approx(21)


def test_staleness_overlaps_iterations() -> None:
    parts = (component("a", {4: 30.0}), component("b", {4: 30.0}, ("a",), granularity=None))
    sync = WeightSync("b", "a", 0.0, 0.0)
    on_policy = seconds(PlacementJob(cluster(8), Workflow(parts, batches=8, weight_sync=sync)))
    one_off = seconds(PlacementJob(cluster(8), Workflow(parts, batches=8, weight_sync=sync, staleness=1)))
    assert on_policy == pytest.approx(30.0)  # shared on eight
    assert one_off == pytest.approx(30.0)
    slow = (component("a", {4: 30.0}, gpus=(4,)), component("b", {4: 30.0}, ("a",), granularity=None, gpus=(4,)))
    assert seconds(PlacementJob(cluster(8), Workflow(slow, 8, 0, sync))) == pytest.approx(60.0)
    assert seconds(PlacementJob(cluster(8), Workflow(slow, 8, 1, sync))) == pytest.approx(30.0)


def test_rules_of_a_framework_keep_the_search_inside_and_the_price_is_said() -> None:
    job = PlacementJob(
        cluster(8),
        Workflow(
            (
                component("rollout", {4: 40.0, 8: 38.0}),
                component("trainer", {4: 40.0, 8: 38.0}, ("rollout",)),
            ),
            batches=64,
        ),
    )
    shared = FrameworkRules("toy", ((AllowedGroup(frozenset({"rollout", "trainer"}), (8,)),),))
    answer = plan_placement(job, shared)
    assert answer.best.mode == "collocated"
    assert answer.unrestricted is not None
    assert answer.unrestricted.iteration_seconds < answer.best.iteration_seconds


def test_even_node_rules_give_a_group_as_many_gpus_on_each_of_its_nodes() -> None:
    names = ("rollout", "trainer", "reward")
    job = PlacementJob(
        cluster(16),
        Workflow(
            (
                component("rollout", {8: 50.0, 16: 40.0}),
                component("trainer", {4: 90.0, 8: 50.0}, ("rollout",)),
                component("reward", {2: 40.0, 4: 21.0}, ("rollout",)),
            ),
            batches=64,
        ),
    )
    separate = FrameworkRules("toy", (tuple(AllowedGroup(frozenset({n})) for n in names),), even_nodes=True)
    plan = plan_placement(job, separate).best
    for group in plan.groups:
        on_each = Counter(rank // 8 for rank in group.gpus)
        assert len(set(on_each.values())) == 1


def test_the_users_placement_is_checked_and_compared() -> None:
    job = seed_job(8)
    everyone = dict.fromkeys(("rollout", "inference", "trainer"), tuple(range(8)))
    answer = plan_placement(job, current=CurrentPlacement(everyone, "job.yaml: placement"))
    mine = next(a for a in answer.alternatives if a.label == "your placement")
    assert mine.plan.iteration_seconds == pytest.approx(186.4)
    overlapping = {"rollout": (0, 1, 2, 3), "inference": (4, 5), "trainer": (3, 6, 7)}
    with pytest.raises(InputError, match="rollout and trainer overlap on GPUs 3"):
        plan_placement(job, current=CurrentPlacement(overlapping, "here"))
    with pytest.raises(InputError, match=r"GPUs that do not exist: 8, 9; the cluster has 0 to 7"):
        plan_placement(job, current=CurrentPlacement({**everyone, "rollout": (8, 9)}, "here"))


def test_costs_follow_the_measured_points() -> None:
    points = ((4, 300.0), (8, 160.0), (16, 95.7))
    assert [seconds_at(points, 0, g) for g, _ in points] == [300.0, 160.0, 95.7]
    middle = seconds_at(points, 0, 12)
    assert 95.7 < middle < 160
    assert middle == pytest.approx(160 + (95.7 - 160) * (1 / 12 - 1 / 8) / (1 / 16 - 1 / 8))
    assert seconds_at(points, 0, 2) == pytest.approx(600.0)
    assert seconds_at(points, 100.0, 2) == pytest.approx(100 + 200 * 2)
    assert seconds_at(points, 0, 32) >= 95.7 / 2  # never better than perfect scaling
    assert seconds_at(((8, 10.0),), 4.0, 16) == pytest.approx(7.0)
    assert is_extrapolated(points, 2)
    assert is_extrapolated(points, 17)
    assert not is_extrapolated(points, 12)


def test_a_count_that_is_worse_than_a_smaller_one_uses_the_smaller() -> None:
    job = PlacementJob(
        cluster(8), Workflow((component("a", {4: 10.0, 8: 30.0}), component("b", {8: 5.0}, ("a",))), batches=1)
    )
    plan = best_plan(job)[1].best
    assert plan.seconds <= 15.0


def test_an_early_stop_says_how_far_it_is_from_the_optimum() -> None:
    job = ppo_job()
    space = PlanSpace(job)
    stopped = search(space, limit=1, settle_ties=False)
    exact = search(PlanSpace(job))
    assert stopped.best is not None
    assert stopped.lower_bound <= exact.best.seconds * (1 + 1e-9)
    assert stopped.best.seconds >= exact.best.seconds * (1 - 1e-9)


def test_sensitivity_tells_when_another_plan_would_be_better() -> None:
    job = PlacementJob(
        cluster(16),
        Workflow(
            (
                component("rollout", {4: 60.0, 8: 50.0, 16: 45.0}),
                component("trainer", {4: 60.0, 8: 50.0, 16: 45.0}, ("rollout",)),
            ),
            batches=64,
        ),
    )
    answer = plan_placement(job)
    assert answer.best.mode == "disaggregated"
    for row in answer.sensitivity:
        for factor, becomes in ((row.lower_factor, row.lower_becomes), (row.upper_factor, row.upper_becomes)):
            assert (factor is None) == (becomes is None)
            if factor is not None:
                changed = replace(job, workflow=job.workflow.scaled(row.component, factor))
                assert seconds(changed) < answer.best.iteration_seconds * max(factor, 1)


def test_too_many_configurations_leave_a_bound_instead_of_a_false_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(name: str) -> tuple[Variant, ...]:
        return tuple(
            Variant(
                f"{name}{k}",
                {"": ((2, 10.0 + k),)},
                gpus=(2,),
                memory=Memory(active=GpuCurve(per_gpu=30.0), resident=GpuCurve(per_gpu=30.0 - 5 * k)),
            )
            for k in range(5)
        )

    parts = tuple(
        replace(component(n, {2: 1.0}, after, granularity=None), variants=ways(n))
        for n, after in (("a", ()), ("b", ("a",)), ("c", ("b",)))
    )
    job = PlacementJob(cluster(2, gpu_memory_gb=75.0), Workflow(parts))
    exact = search(PlanSpace(job))
    assert exact.optimal
    monkeypatch.setattr("trimtab.plan.placement.space.MAX_CONFIGURATIONS", 6)
    cut = search(PlanSpace(job))
    assert not cut.optimal
    assert cut.lower_bound <= exact.best.seconds <= cut.best.seconds * (1 + 1e-9)


def test_very_many_batches_stay_within_the_effort() -> None:
    job = seed_job(64)
    job = replace(job, workflow=replace(job.workflow, batches=65_536))
    space, outcome = best_plan(job)
    assert outcome.best is not None
    assert space.simulator.units == 65_536


def test_a_plan_slower_than_the_placement_in_the_file_is_never_the_answer() -> None:
    chain = (component("rollout", {4: 60.0, 8: 50.0}), component("trainer", {4: 60.0, 8: 50.0}, ("rollout",)))
    job = PlacementJob(cluster(8), Workflow(chain, batches=64))
    shared = FrameworkRules("toy", ((AllowedGroup(frozenset({"rollout", "trainer"}), (8,)),),))
    apart = CurrentPlacement({"rollout": (0, 1, 2, 3), "trainer": (4, 5, 6, 7)}, "job.yaml: placement")
    answer = plan_placement(job, shared, current=apart)
    assert answer.kept
    assert not answer.optimal
    assert answer.best.iteration_seconds < 62
    assert [group.gpus for group in answer.best.groups] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    (other,) = answer.alternatives
    assert other.plan is not None
    assert other.plan.iteration_seconds == pytest.approx(100.0)


def one_point_each() -> PlacementJob:
    chain = (component("rollout", {16: 60.0}), component("trainer", {16: 60.0}, ("rollout",)))
    return PlacementJob(cluster(16), Workflow(chain, batches=512))


def test_with_one_measured_point_the_plan_is_made_for_perfect_and_for_lesser_scaling() -> None:
    answer = plan_placement(one_point_each())
    assert answer.best.mode == "collocated"
    assert answer.best.iteration_seconds == pytest.approx(120.0)
    assert not answer.optimal
    scaling = answer.scaling
    assert scaling is not None
    assert scaling.components == ("rollout", "trainer")
    assert scaling.plan is not None
    assert scaling.plan.describe() == "rollout 8 | trainer 8"
    assert scaling.plan.iteration_seconds == pytest.approx(96.0 * (1 + 1 / 512))  # 60 s, and 60 / 1.6 of it on half
    assert scaling.chosen_seconds == pytest.approx(120.0)
    assert scaling.measure in (("rollout", 8), ("trainer", 8))
    assert answer.assumptions[0].startswith("perfect scaling: rollout, trainer")
    assert "measure" in answer.assumptions[0]


def test_where_both_scalings_give_the_same_plan_it_is_proven_and_said() -> None:
    chain = (component("rollout", {16: 60.0}, granularity=None), component("trainer", {16: 60.0}, ("rollout",)))
    whole = tuple(replace(c, granularity=None) for c in chain)
    answer = plan_placement(PlacementJob(cluster(16), Workflow(whole, batches=512)))
    assert answer.optimal
    assert answer.scaling is not None
    assert answer.scaling.plan is None
    assert "the plan is the same" in answer.assumptions[0]


def test_two_measured_points_or_a_stated_floor_make_scaling_known() -> None:
    measured = (component("rollout", {8: 100.0, 16: 60.0}), component("trainer", {16: 60.0}, ("rollout",)))
    assert plan_placement(PlacementJob(cluster(16), Workflow(measured, batches=8))).scaling.components == ("trainer",)
    known = (measured[0], component("trainer", {16: 60.0}, ("rollout",), floor_seconds=10.0))
    assert plan_placement(PlacementJob(cluster(16), Workflow(known, batches=8))).scaling is None


def test_the_component_whose_scaling_tells_the_plans_apart_is_the_one_to_measure() -> None:
    chain = (component("rollout", {16: 10.0}), component("trainer", {16: 110.0}, ("rollout",)))
    scaling = plan_placement(PlacementJob(cluster(16), Workflow(chain, batches=512))).scaling
    assert scaling is not None
    assert scaling.plan is not None
    name, gpus = scaling.measure
    assert gpus == len(scaling.plan.placed(name).gpus) != 16
