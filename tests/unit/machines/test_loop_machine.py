"""The rules of the loop, one by one: when it stays, when it advises, when it moves, and what becomes of a move."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_loop_estimates import noise

from jobs import component
from loop_world import LoopWorld, first_plan, nodes, workflow
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.replan import events as e
from trimtab.machines.replan.decision import cost_of
from trimtab.machines.replan.estimates import sure_level
from trimtab.machines.replan.explain import costs_text
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.placed_plan import PlacedPlan, changes
from trimtab.model.run import (
    STAGES,
    ChangeKind,
    ComponentTiming,
    CostEstimate,
    Iteration,
    MigrationCost,
    MigrationStage,
    ReplanMode,
    ReplanRules,
)
from trimtab.model.workflow import PlacementJob, WeightSync, Workflow

AUTO = ReplanRules(mode=ReplanMode.auto, assumed_move_s=10.0)


def trained(world: LoopWorld, times: int, **noises: float) -> list[e.ReplanInstruction]:
    """What is said of the last of so many iterations."""
    out: list[e.ReplanInstruction] = []
    for _ in range(times):
        out = world.train(noises)
    return out


def drifted(rules: ReplanRules = AUTO, **more: object) -> LoopWorld:
    """A run whose rollout has grown to 2.5 times, up to what the loop does about it."""
    world = LoopWorld(rules, **more)  # type: ignore[arg-type]
    trained(world, 8)
    world.drift("rollout", 2.5)
    for _ in range(6):
        if world.move is None:
            world.train({})
    return world


def codes(out: list[e.ReplanInstruction]) -> list[ReasonCode]:
    return [one.reason.code for one in out if isinstance(one, (e.KeepPlan, e.AdvisePlan, e.Notify, e.StopRun))]


# ---- staying ----


def test_the_first_plan_of_these_tests_is_not_all_shared() -> None:
    assert len(LoopWorld(AUTO).plan.groups) > 1


def test_nothing_is_decided_before_enough_is_measured() -> None:
    assert codes(trained(LoopWorld(AUTO), 3)) == [ReasonCode.too_few]


def test_a_run_whose_costs_are_as_planned_stays_and_says_so() -> None:
    (stay,) = trained(LoopWorld(AUTO), 8)
    assert stay.reason.code is ReasonCode.costs_steady
    assert stay.numbers.iteration_s > 0
    assert stay.numbers.horizon == AUTO.horizon_iterations


def test_a_drift_that_is_no_noise_and_too_small_to_matter_is_said_to_be_that() -> None:
    flow = workflow()
    tiny = component("reward", {2: 0.05, 8: 0.02}, ("rollout",))
    flow = replace(flow, components=(flow.components[0], tiny, *flow.components[1:]))
    world = LoopWorld(AUTO, flow=flow)
    trained(world, 8)
    world.drift("reward", 1.207)
    (stay,) = trained(world, 20)
    assert stay.reason.code is ReasonCode.costs_steady
    assert "reward is furthest" in stay.reason.sentence
    assert "+20.7%, more than its noise of 6.0%, but it is too short a part" in stay.reason.sentence


@given(
    levels=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=2),
    width=st.floats(0.01, 0.3),
    reference=st.floats(0.5, 2.0),
)
def test_what_is_said_to_be_within_noise_is_within_it(levels: list[float], width: float, reference: float) -> None:
    one = CostEstimate(level=levels[0], middle=levels[1], width=width)
    told = sure_level(one, reference) != reference
    said = costs_text({"a": one}, {"a": reference}, ["a"] if told else [])
    assert ("more than its noise" in said) == told
    figure = re.findall(r"([+-][\d.]+)%", said)[-1]
    within = 1 / (1 + width) - 1e-3 <= 1 + float(figure) / 100 <= (1 + width) + 1e-3
    assert within or "within its noise" not in said, said


@pytest.mark.parametrize("seed", range(4))
def test_no_move_on_pure_noise(seed: int) -> None:
    world = LoopWorld(AUTO)
    series = {name: noise(10 * seed + at, 60) for at, name in enumerate(world.flow.names)}
    for at in range(60):
        world.train({name: one[at] for name, one in series.items()})
    assert world.counts["moves"] == 0


def test_no_move_on_work_that_comes_every_fifth_time() -> None:
    world = LoopWorld(AUTO)
    rng = random.Random(7)
    for at in range(1, 41):
        world.train({"rollout": rng.gauss(1.0, 0.02) * (1.6 if at % 5 == 0 else 1.0)})
    assert world.counts["moves"] == 0


def test_a_slow_beginning_is_no_drift() -> None:
    world = LoopWorld(AUTO)
    for factor in (1.28, 1.28, 1.26, 1.26, 1.05, 1.04, 1.04, 1.03, 1.03, 1.05, 1.05, 1.03):
        world.train({"reference": factor, "rollout": factor})
    assert world.counts["moves"] == 0


def test_a_move_that_does_not_pay_in_what_remains_is_not_made() -> None:
    world = LoopWorld(replace(AUTO, assumed_move_s=60.0))
    world.remaining = 16
    world.tell(e.RemainingChanged(16))
    trained(world, 8)
    world.drift("rollout", 2.5)
    (stay,) = trained(world, 7)
    assert stay.reason.code is ReasonCode.not_worth
    assert stay.numbers.horizon == 1
    assert stay.numbers.gain_s > 0
    assert (stay.numbers.cost_s, stay.numbers.cost_measured) == (60.0, False)


def test_a_model_that_does_not_predict_the_present_moves_nothing() -> None:
    machine = ReplanMachine(workflow(), nodes(4, 4), first_plan(PlacementJob(nodes(4, 4), workflow())), AUTO)
    out: list[e.ReplanInstruction] = []
    for number in range(1, 12):
        parts = tuple(
            ComponentTiming(one.name, one.seconds * (2.5 if one.name == "rollout" else 1.0), len(one.gpus))
            for one in machine.plan.components
        )
        out = machine.handle(e.IterationDone(Iteration(number, 1_000.0, parts)), float(number))
    assert codes(out) == [ReasonCode.model_off]


# ---- going ----


def test_a_drift_that_pays_moves_the_run_at_once_when_it_is_sure() -> None:
    world = drifted()
    assert world.move is not None
    assert world.move.reason.code is ReasonCode.drifted
    assert "rollout takes 2.5" in world.move.reason.sentence
    numbers = world.move.numbers
    assert numbers.sure_gain_s * numbers.horizon > numbers.cost_s * (1 + AUTO.margin)
    grown = next(one for one in world.move.changes if one.component == "rollout")
    assert len(grown.after) > len(grown.before)


def test_the_new_plan_is_the_exact_best_for_what_is_measured() -> None:
    world = drifted()
    world.carry_all()
    best = first_plan(PlacementJob(world.cluster, world.flow.scaled("rollout", 2.5)))
    assert world.plan.describe() == best.describe()
    assert world.plan.iteration_seconds == pytest.approx(best.iteration_seconds, rel=1e-6)


def test_in_advise_mode_it_says_what_it_would_do_and_does_nothing() -> None:
    world = LoopWorld(replace(AUTO, mode=ReplanMode.advise))
    trained(world, 8)
    world.drift("rollout", 2.5)
    (advice,) = trained(world, 6)
    assert isinstance(advice, e.AdvisePlan)
    assert advice.numbers.gain_s > 0
    assert world.move is None


def test_advice_that_somebody_took_is_the_plan() -> None:
    machine = ReplanMachine(
        workflow(),
        nodes(4, 4),
        first_plan(PlacementJob(nodes(4, 4), workflow())),
        replace(AUTO, mode=ReplanMode.advise),
    )
    with pytest.raises(InputError):
        machine.handle(e.AdviceTaken(), 0.0)
    (advice,) = machine.handle(e.ClusterChanged(nodes(4, 4, 4, 4), e.ClusterChangeCause.joined), 0.0)
    assert isinstance(advice, e.AdvisePlan)
    machine.handle(e.AdviceTaken(), 1.0)
    machine.check()
    assert machine.plan.describe() == advice.plan.describe()
    assert machine.story()[-1].reason.code is ReasonCode.arrived


def test_nodes_that_join_are_used_if_that_pays() -> None:
    world = LoopWorld(AUTO)
    trained(world, 8)
    world.change(nodes(4, 4, 4, 4), e.ClusterChangeCause.joined)
    assert world.move is not None
    assert world.move.reason.code is ReasonCode.room_changed
    world.carry_all()
    assert world.plan.gpus > 8


def test_nodes_that_the_plan_does_not_use_may_go() -> None:
    world = LoopWorld(replace(AUTO, assumed_move_s=1e6))
    world.change(nodes(4, 4, 4), e.ClusterChangeCause.joined)
    world.change(nodes(4, 4), e.ClusterChangeCause.lost)
    assert world.counts["losses"] == 0
    assert world.move is None


def test_a_question_is_answered_at_once() -> None:
    world = LoopWorld(AUTO)
    assert codes(world.tell(e.ReplanRequested("is it still right?"))) == [ReasonCode.costs_steady]


# ---- the dwell time ----


def test_no_second_move_within_the_dwell_time() -> None:
    world = drifted(replace(AUTO, dwell_iterations=9))
    world.carry_all()
    arrived = world.done
    world.drift("rollout", 0.3)
    said = []
    while world.move is None:
        said += codes(world.train({}))
    assert ReasonCode.dwell in said
    assert world.done - arrived >= 9


def test_a_question_within_the_dwell_time_is_answered_with_advice() -> None:
    world = drifted(replace(AUTO, dwell_iterations=50))
    world.carry_all()
    world.drift("rollout", 0.3)
    trained(world, 6)
    (advice,) = world.tell(e.ReplanRequested())
    assert isinstance(advice, e.AdvisePlan)
    assert advice.numbers.dwell_left > 0


def test_a_move_that_failed_doubles_the_dwell_time() -> None:
    world = drifted()
    world.carry_stage("badly")
    world.carry_back()
    failed = world.done
    while world.move is None:
        world.train({})
    assert world.done - failed == 2 * AUTO.dwell_iterations


def test_a_move_that_gained_less_than_promised_doubles_the_dwell_time() -> None:
    world = drifted()
    world.carry_all()
    out: list[e.ReplanInstruction] = []
    for _ in range(AUTO.least_iterations):
        one = world.measured(world.done + 1, {})
        world.done += 1
        out = world.tell(e.IterationDone(replace(one, wall_s=3 * one.wall_s)))
    assert ReasonCode.fell_short in codes(out)
    assert world.machine.drift.dwell() == 2 * AUTO.dwell_iterations


def test_every_move_is_judged_by_what_came_and_the_next_one_counts_on_as_much() -> None:
    world = drifted()
    world.carry_all()
    out = trained(world, AUTO.least_iterations)
    (judged,) = [one for one in out if isinstance(one, e.MoveJudged)]
    assert judged.realised == pytest.approx(judged.promised, abs=0.05)
    assert world.machine.state.run.kept == pytest.approx(1.0, abs=0.1)
    short = drifted()
    short.carry_all()
    for _ in range(AUTO.least_iterations):
        one = short.measured(short.done + 1, {})
        short.done += 1
        short.tell(e.IterationDone(replace(one, wall_s=3 * one.wall_s)))
    assert short.machine.state.run.kept == 0.5


# ---- what is predicted ----


def test_the_next_iteration_is_predicted_by_the_present_costs() -> None:
    world = LoopWorld(AUTO)
    assert world.machine.expected_s is None
    trained(world, 8)
    assert world.machine.expected_s == pytest.approx(world.machine.plan.iteration_seconds, rel=0.02)
    slower = replace(world.measured(9, {}), wall_s=1.2 * world.plan.iteration_seconds)
    for number in range(9, 9 + AUTO.window):
        world.done += 1
        world.tell(e.IterationDone(replace(slower, number=number)))
    assert world.machine.expected_s == pytest.approx(1.2 * world.machine.plan.iteration_seconds, rel=0.02)


def test_measured_switches_and_syncs_count_for_plans_that_have_not_run() -> None:
    flow = replace(workflow(), weight_sync=WeightSync("trainer", "rollout", 0.0, 0.0))
    world = LoopWorld(AUTO, flow=flow)
    before_s = world.machine.drift.planner.seconds(world.plan, {})
    for _ in range(6):
        one = world.measured(world.done + 1, {})
        world.done += 1
        world.tell(e.IterationDone(replace(one, sync_s=5.0, wall_s=one.wall_s + 5.0)))
    assert world.machine.drift.planner.seconds(world.plan, {}) == pytest.approx(before_s + 5.0)
    again = ReplanMachine.load(world.machine.dump(), flow, AUTO)
    assert again.drift.planner.seconds(world.plan, {}) == pytest.approx(before_s + 5.0)


def test_what_staying_would_have_taken_is_computed_from_the_same_costs() -> None:
    world = drifted()
    first = world.machine.placed_plan
    assert world.machine.staying_s(world.measured(world.done + 1, {})) is None
    world.carry_all()
    iteration = world.measured(world.done + 1, {})
    staying_s = world.machine.staying_s(iteration)
    assert staying_s == pytest.approx(world.machine.drift.planner.seconds(first.plan, {"rollout": 2.5}), rel=0.02)
    assert staying_s > iteration.wall_s


# ---- what a move costs ----


def test_a_move_costs_what_was_measured_once_one_was() -> None:
    world = drifted()
    world.carry_all()
    (cost,) = world.machine.state.costs
    assert cost.seconds == 2.0 * len(STAGES)
    assert all(vars(cost).values()), f"a figure of {cost} is never measured"
    assert cost_of(cost.touched, [cost], AUTO, 0.0) == (14.0, True)


def test_moves_of_others_tell_that_it_is_no_cheaper_than_the_dearest() -> None:
    known = [
        MigrationCost(1, ("a",), ((MigrationStage.load, 5.0),)),
        MigrationCost(2, ("a", "b"), ((MigrationStage.load, 9.0),)),
    ]
    assert cost_of(("c",), known, AUTO, 3.0) == (9.0, True)
    assert cost_of(("a",), known, AUTO, 3.0) == (5.0, True)
    assert cost_of(("a",), [], AUTO, 3.0) == (13.0, False)


# ---- stages ----


def test_a_move_goes_through_its_stages_in_order_and_then_is_the_plan() -> None:
    world = drifted()
    seen = []
    while world.stage is not None:
        seen.append(world.stage.stage)
        assert world.machine.plan.describe() == world.plan.describe()
        world.carry_stage()
    assert tuple(seen) == STAGES
    assert [chapter.state for chapter in world.machine.story("move 1")] == ["begun", "arrived"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["badly", "late"])
def test_a_failure_of_any_stage_ends_in_the_old_plan(stage: MigrationStage, how: str) -> None:
    world = drifted()
    before = world.plan
    while world.stage is not None and world.stage.stage is not stage:
        world.carry_stage()
    world.carry_stage(how)
    assert world.back is not None
    assert world.back.at is stage
    world.carry_back()
    assert world.machine.plan == before
    assert world.machine.story("move 1")[-1].reason.code is ReasonCode.rolled_back
    assert trained(world, 1), "the run does not go on"


def test_a_node_of_the_new_plan_that_goes_during_the_move_ends_in_the_old_plan() -> None:
    world = LoopWorld(AUTO)
    trained(world, 8)
    world.change(nodes(4, 4, 4, 4), e.ClusterChangeCause.joined)
    world.carry_stage()
    world.change(nodes(4, 4), e.ClusterChangeCause.lost)
    assert world.back is not None
    world.carry_back()
    assert world.machine.plan.gpus <= 8
    assert not world.lost


@pytest.mark.parametrize("how", ["badly", "late"])
def test_without_a_way_back_the_run_stops_and_can_be_resumed(how: str) -> None:
    world = drifted()
    world.carry_stage("badly")
    world.carry_back(how)
    assert world.machine.stopped is not None
    assert world.machine.stopped.code is ReasonCode.stuck
    world.resume(0, None)
    assert trained(world, 1)


def test_a_run_resumed_in_the_midst_of_a_move_goes_back() -> None:
    world = drifted()
    world.carry_stage()
    world.resume(1, None)
    assert world.back is not None
    world.carry_back()


def test_during_a_move_nothing_is_decided() -> None:
    world = drifted()
    assert codes(world.train({})) == [ReasonCode.moving]
    assert codes(world.tell(e.ReplanRequested())) == [ReasonCode.moving]


# ---- a plan whose GPUs go ----


def test_a_plan_whose_node_is_lost_moves_whatever_it_costs() -> None:
    world = LoopWorld(replace(AUTO, assumed_move_s=1e6))
    world.change(nodes(4), e.ClusterChangeCause.lost)
    assert world.move is not None
    assert world.move.forced
    assert world.move.reason.code is ReasonCode.plan_gone
    assert ChangeKind.replaced in {one.how for one in world.move.changes}
    world.carry_all()
    assert world.machine.plan.total_gpus == 4


def test_a_plan_on_a_node_that_will_go_moves_before_it_does() -> None:
    world = LoopWorld(AUTO)
    world.change(world.cluster, e.ClusterChangeCause.draining, ("n1",))
    assert world.move is not None
    assert world.move.forced
    world.carry_all()
    assert {seat[0] for mine in world.place.values() for seat in mine} == {"n0"}


def test_a_run_for_which_nothing_fits_waits_for_nodes_until_its_deadline() -> None:
    world = LoopWorld(AUTO)
    world.change(nodes(0), e.ClusterChangeCause.lost)
    assert world.machine.next_deadline() == world.now + AUTO.wait_s
    world.tick(AUTO.wait_s)
    assert world.stopped


def test_a_run_for_which_nothing_fitted_goes_on_when_nodes_come() -> None:
    world = LoopWorld(AUTO)
    world.change(nodes(0), e.ClusterChangeCause.lost)
    world.change(nodes(4), e.ClusterChangeCause.joined)
    world.carry_all()
    assert world.machine.plan.total_gpus == 4


def test_a_move_that_has_to_be_is_tried_again_and_not_for_ever() -> None:
    world = LoopWorld(AUTO)
    world.change(nodes(4), e.ClusterChangeCause.lost)
    for tries in range(1, AUTO.tries + 1):
        world.carry_stage("badly")
        world.carry_back()
        assert world.stopped == (tries == AUTO.tries)
        if not world.stopped:
            world.now = world.machine.next_deadline() or 0.0
            world.tell(e.ReplanTick())
    assert world.machine.stopped.code is ReasonCode.stuck


# ---- counting ----


def test_an_iteration_is_counted_once_however_often_it_is_told() -> None:
    world = LoopWorld(AUTO)
    trained(world, 2)
    assert world.tell(e.IterationDone(world.measured(2, {}))) == []
    assert world.machine.iterations == 2
    assert world.machine.estimates()["rollout"].measured == 2


def test_an_iteration_out_of_turn_is_refused() -> None:
    with pytest.raises(InputError, match="follows 0: iterations are missing"):
        LoopWorld(AUTO).machine.handle(e.IterationDone(Iteration(2, 1.0)), 0.0)


def test_an_iteration_with_an_unknown_component_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="rolout") as refused:
        LoopWorld(AUTO).machine.handle(e.IterationDone(Iteration(1, 1.0, (ComponentTiming("rolout", 1.0, 1),))), 0.0)
    assert refused.value.hint == "did you mean rollout?"


# ---- ranges for the fleet ----


def test_the_plan_sets_the_range_of_an_elastic_component() -> None:
    world = LoopWorld(replace(AUTO, elastic=("rollout",), range_slack=0.2))
    (told,) = world.machine.drift.ranges()
    assert told.max_gpus == len(world.plan.placed("rollout").gpus)
    assert 1 <= told.min_gpus < told.max_gpus
    assert world.tell(e.GpuRangeUsed("rollout", told.min_gpus)) == []
    assert world.tell(e.GpuRangeUsed("rollout", told.max_gpus + 1)) == [told]


def test_a_move_says_the_new_range() -> None:
    world = drifted(replace(AUTO, elastic=("rollout",)))
    world.carry_all()
    told = [one for _, _, out in world.journal for one in out if isinstance(one, e.SetGpuRange)]
    assert told[-1].max_gpus == len(world.plan.placed("rollout").gpus)


# ---- seats ----


def test_a_plan_keeps_its_seats_when_ranks_change() -> None:
    world = LoopWorld(AUTO, nodes(4, 4))
    before = PlacedPlan(world.plan, nodes(4, 4))
    other = replace(nodes(4, 4), nodes=(replace(nodes(2).nodes[0], name="new"), *nodes(4, 4).nodes))
    after = before.on(other)
    assert after is not None
    assert all(after.slots_of(name) == before.slots_of(name) for name in world.flow.names)
    assert after.same_as(before)
    assert {one.how for one in changes(before, after)} == {ChangeKind.stays}


def test_a_node_of_the_same_name_with_other_gpus_is_another_node() -> None:
    world = LoopWorld(AUTO, nodes(4, 4))
    other = replace(nodes(4, 4), nodes=tuple(replace(node, gpu="H100") for node in nodes(4, 4).nodes))
    assert PlacedPlan(world.plan, nodes(4, 4)).on(other) is None


# ---- other workflows ----


def test_stale_iterations_and_cpu_components_are_watched_too() -> None:
    flow = Workflow(
        (
            component("rollout", {2: 46.0, 8: 16.0}, switch_seconds=8.0),
            component("reward", 3.0, ("rollout",), cpus=2),
            component("trainer", {2: 40.0, 8: 14.0}, ("reward",), switch_seconds=8.0, granularity=2),
        ),
        batches=8,
        staleness=1,
        weight_sync=WeightSync("trainer", "rollout", 1.0, 2.0),
    )
    plan = first_plan(PlacementJob(nodes(4, 4), flow))
    machine = ReplanMachine(flow, nodes(4, 4), plan, AUTO)
    out: list[e.ReplanInstruction] = []
    for number in range(1, 12):
        grown = {"rollout": 2.5, "reward": 1.1, "trainer": 1.0}
        parts = {c.name: c.seconds * grown[c.name] for c in plan.components}
        wall = machine.drift.planner.with_times(plan, parts)
        measured = tuple(ComponentTiming(n, s, len(plan.placed(n).gpus)) for n, s in parts.items())
        out = machine.handle(e.IterationDone(Iteration(number, wall, measured)), float(number))
        if machine.moving is not None:
            break
    assert isinstance(out[0], e.BeginMigration)
    machine.check()


def test_a_stage_that_ends_after_the_time_of_the_whole_move_begins_no_other() -> None:
    world = drifted()
    assert world.stage is not None
    world.now = world.move_end = world.machine.state.moving.end  # type: ignore[union-attr]
    out = world.tell(e.MigrationStageDone(world.stage.move.id, world.stage.stage, 1.0))
    assert not [each for each in out if isinstance(each, e.RunMigrationStage)]
    assert world.back is not None
    world.carry_back()
    assert trained(world, 1), "the run does not go on"
