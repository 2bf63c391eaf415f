"""RL jobs in replay: the loop machine that runs live, policies to compare with, and what must be true of every run."""

from __future__ import annotations

import csv
import gzip
import json
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from run_moves import AUTO, cluster, events, workflow
from trimtab.cli.app import run
from trimtab.core.codec import decode
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan import events as e
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.run import DecisionNumbers, Iteration, MigrationStage, ReplanRules
from trimtab.model.workflow import Cluster, Node, PlacementJob
from trimtab.replay.common.comparison import recommend
from trimtab.replay.common.timing import Churn, Distribution
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.replan import scenario as loop_scenario
from trimtab.replay.replan.baselines import KeptPlanPolicy, loop_run, run_policy
from trimtab.replay.replan.driver import ReplanOutcome, ReplanReplay
from trimtab.replay.replan.invariants import ReplanInvariants
from trimtab.replay.replan.reality import (
    DrawnNoise,
    Drift,
    Factors,
    MigrationTimes,
    PeriodicWork,
    ReplanReality,
    ScheduledNodeEvent,
    SyntheticNoise,
    TraceNoise,
    TrueCosts,
    minibatches,
)
from trimtab.replay.replan.scenario import ReplanScenario, compare_replans, read, run_replan
from trimtab.runtime.run.emulated import Disturbance, VirtualClock
from trimtab.runtime.run.job import ComponentCode, RunJob
from trimtab.runtime.run.local_executor import LocalExecutor
from trimtab.runtime.run.run import Run

ROOT = Path(__file__).parents[3]
NOTHING = Distribution(0.0)
FREE = MigrationTimes(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)
QUIET = SyntheticNoise(0.0, 0.0, 0.0)
GROWS = {"rollout": Drift(3.0, 40)}


def job(*gpus: int, staleness: int = 0) -> PlacementJob:
    return PlacementJob(cluster(*(gpus or (4, 4))), replace(workflow(), staleness=staleness))


def truth(*gpus: int, iterations: int = 50, **more: Any) -> TrueCosts:
    drift, noise = more.pop("drift", GROWS), more.pop("noise", QUIET)
    return TrueCosts(ReplanReality(job(*gpus), iterations, drift, noise, **more))


# ---- live and in replay -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Factors as they are."""

    by: Factors

    def factors(self, names: Any, iterations: int, seed: int) -> Factors:
        return self.by


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlacementJob, Factors, list[float]]:
    """The folder of an emulated run in one process, its job and noise, and what its iterations took."""
    asked = job(8, staleness=1)
    factors = SyntheticNoise().factors(asked.workflow.names, 60, 3)
    parts = {
        name: ComponentCode(
            disturbance=Disturbance(
                factors=tuple(float(one) for one in factors[name][1:]),
                in_order=True,
                drift_to=3.0 if name == "rollout" else 1.0,
                drift_over=40,
            )
        )
        for name in asked.workflow.names
    }
    folder = tmp_path_factory.mktemp("lived") / "run"
    end = Run(
        RunJob(asked, parts, iterations=60, save_every=10, rules=AUTO), folder, LocalExecutor(VirtualClock())
    ).run()
    assert end.state == "done"
    return folder, asked, factors, [one.wall_s for one in end.iterations]


def decided(folder: Path) -> list[dict[str, Any]]:
    """What a live run was told, as its folder has it."""
    told = events(folder, "decided", "move")
    return [one for one in told if one["event"] == "decided" or one["state"] in ("begun", "arrived")]


def test_the_same_events_give_the_same_instructions_live_and_in_replay(
    lived: tuple[Path, PlacementJob, Factors, list[float]],
) -> None:
    folder, asked, _, _ = lived
    first = TrueCosts(ReplanReality(asked, 60)).first()
    machine = ReplanMachine(asked.workflow, asked.cluster, first.plan, AUTO)
    said: list[dict[str, Any]] = []

    def tell(event: e.ReplanEvent, now: float) -> None:
        for one in machine.handle(event, now):
            if isinstance(one, e.KeepPlan):
                said.append(facts("stay", one.reason, one.numbers))
            elif isinstance(one, e.BeginMigration):
                said.append({**facts("begun", one.move.reason, one.move.numbers), "plan": one.move.after.describe()})
        if isinstance(event, e.MigrationStageDone) and event.stage is MigrationStage.resume:
            said.append({"what": "arrived", "plan": machine.plan.describe()})

    tell(e.RunResumed(0, 60), 0.0)
    for one in events(folder, "iteration", "move"):
        if one["event"] == "iteration":
            tell(e.IterationDone(decode(Iteration, one["iteration"])), one["t_s"])
        elif one["state"] == "stage":
            tell(e.MigrationStageDone(one["move"], MigrationStage(one["stage"]), one["took_s"]), one["t_s"])
    live = [
        {"what": "arrived", "plan": one["reason"]}
        if one.get("state") == "arrived"
        else {
            "what": one.get("what", one.get("state")),
            "code": one["code"],
            "reason": one["reason"],
            "numbers": plain(one["numbers"]),
            **({"plan": one["plan"]["plan"]} if one["event"] == "move" else {}),
        }
        for one in decided(folder)
    ]
    assert len(live) >= 60
    assert [one for one in live if one["what"] == "begun"]
    assert said == live


def facts(what: str, reason: Reason, numbers: DecisionNumbers) -> dict[str, Any]:
    return {"what": what, "code": reason.code.value, "reason": reason.sentence, "numbers": plain(vars(numbers))}


def plain(numbers: dict[str, Any]) -> dict[str, float]:
    """As a folder has them: what the stages of a move took is written with four digits."""
    return {name: round(value, 6) for name, value in numbers.items() if value is not None}


def told_live(folder: Path) -> list[tuple[int, str, str]]:
    """Decisions of a live run: after which iteration, to stay or the plan, and why."""
    return [
        (one["iteration"], one.get("what") or one["plan"]["plan"], one["code"])
        for one in decided(folder)
        if one.get("state") != "arrived"
    ]


def decisions_of(world: TrueCosts, rules: ReplanRules) -> tuple[list[tuple[int, str, str]], ReplanOutcome]:
    """The same of a simulated one, and what became of it."""
    said: list[tuple[int, str, str]] = []

    def told(event: e.ReplanEvent, now: float, out: list[e.ReplanInstruction]) -> None:
        if isinstance(event, e.IterationDone):
            for one in out:
                if isinstance(one, e.KeepPlan):
                    said.append((event.iteration.number, "stay", one.reason.code.value))
                elif isinstance(one, e.BeginMigration):
                    said.append((event.iteration.number, one.move.after.describe(), one.move.reason.code.value))

    outcome = loop_run(world, rules, on_event=told)
    return said, outcome


def test_a_simulated_run_decides_what_the_live_one_decided_after_the_same_iterations_and_takes_as_long(
    lived: tuple[Path, PlacementJob, Factors, list[float]],
) -> None:
    folder, asked, factors, walls = lived
    reality = ReplanReality(asked, 60, {"rollout": Drift(3.0, 40, after=1)}, Given(factors), FREE)  # type: ignore[arg-type]
    said, outcome = decisions_of(TrueCosts(reality), AUTO)
    assert said == told_live(folder)
    assert outcome.total_s == pytest.approx(sum(walls), rel=0.02)


def test_a_run_that_saves_after_every_iteration_is_watched_all_the_same(tmp_path: Path) -> None:
    asked = job(8, staleness=1)
    grows = {"rollout": ComponentCode(disturbance=Disturbance(drift_to=3.0, drift_over=10)), "trainer": ComponentCode()}
    saving = RunJob(asked, grows, iterations=20, save_every=1, rules=AUTO)
    end = Run(saving, tmp_path / "run", LocalExecutor(VirtualClock())).run()
    live = [one["iteration"] for one in events(tmp_path / "run", "move") if one["state"] == "begun"]
    reality = ReplanReality(asked, 20, {"rollout": Drift(3.0, 10, after=1)}, QUIET, FREE, save_every=1)
    outcome = loop_run(TrueCosts(reality), AUTO)
    assert live
    assert [one.after - 1 for one in outcome.moves] == live
    assert outcome.total_s == pytest.approx(sum(one.wall_s for one in end.iterations), rel=0.02)


PAST = """
cluster: {nodes: 1, gpus_per_node: 8}
workflow:
  batches: 4
  staleness: 1
  components:
    rollout: {seconds: {1: 12.5, 2: 6.5, 4: 3.5, 8: 2.0}, floor_seconds: 0.4, switch_seconds: 2, engine: rollout}
    trainer: {seconds: {1: 12.5, 2: 6.5, 4: 3.5, 8: 2.0}, floor_seconds: 0.4, switch_seconds: 2, engine: trainer,
              after: rollout}
  weight_sync: {from: trainer, to: rollout, shared_seconds: 0.1, separate_seconds: 0.1}
run: {iterations: 60, loop: {mode: auto, assumed_move_s: 1.0, least_iterations: 4, dwell_iterations: 4}}
"""


def test_the_folder_of_a_run_is_a_job_and_in_replay_the_loop_moves_as_it_did_then(
    lived: tuple[Path, PlacementJob, Factors, list[float]], tmp_path: Path
) -> None:
    folder, _, _, walls = lived
    (folder / "job.yaml").write_text(PAST, encoding="utf-8")
    path = tmp_path / "again.yaml"
    path.write_text(f"job: {folder}\nseeds: [1]\n", encoding="utf-8")
    asked = read(path)
    runs = {one.use: run_replan(asked, one, 1) for one in asked.policies}
    live = [(one["iteration"], one["plan"]["plan"]) for one in events(folder, "move") if one["state"] == "begun"]
    # With staleness an iteration that has begun ends first.
    assert [(one.after - 1, one.plan) for one in runs["trimtab"].moved] == live
    assert runs["trimtab"].total_s == pytest.approx(sum(walls), rel=0.03)
    assert runs["oracle"].total_s < runs["trimtab"].total_s < runs["kept"].total_s
    for said, why in (
        ("iterations: 61", "the run has 60 iterations"),
        ("drift: {rollout: {to: 2}}", "drift comes from the measured run"),
    ):
        path.write_text(f"job: {folder}\n{said}\n", encoding="utf-8")
        with pytest.raises(InputError, match=why):
            read(path)


ON_RAY = """
cluster: {nodes: 2, gpus_per_node: 8}
workflow:
  batches: 6
  components:
    rollout: {seconds: {2: 6.6, 16: 1.6}, switch_seconds: 0.5, engine: a, emulate: {drift: {to: 3.0, over: 8}}}
    reference: {seconds: {2: 1.7, 16: 0.35}, after: rollout, switch_seconds: 0.25, engine: b, emulate: true}
    trainer: {seconds: {2: 6.5, 16: 1.3}, after: reference, switch_seconds: 0.5, engine: b, emulate: true}
run: {iterations: 16, loop: {mode: auto, assumed_move_s: 2.0, least_iterations: 4}}
"""


@pytest.mark.long
def test_a_run_on_a_real_ray_and_its_replay_decide_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(ON_RAY, encoding="utf-8")
    assert run(["run", str(tmp_path / "job.yaml"), "--quiet", "--folder", str(tmp_path / "run")]) == 0
    (tmp_path / "again.yaml").write_text("job: run\n", encoding="utf-8")
    asked = read(tmp_path / "again.yaml")
    said = decisions_of(asked.truth(1), asked.policies[0].rules)[0]
    assert said == told_live(tmp_path / "run")
    assert [one for one in said if one[1] != "stay"], "nothing moved"


def test_a_folder_of_a_run_that_is_damaged_or_too_short_is_refused(
    lived: tuple[Path, PlacementJob, Factors, list[float]], tmp_path: Path
) -> None:
    lines = (lived[0] / "events.jsonl").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "again.yaml"
    path.write_text("job: run\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="there is no file"):
        read(path)
    (tmp_path / "run" / "job.yaml").write_text(PAST, encoding="utf-8")
    for kept, why in (
        (lines[:6], "iterations with costs"),
        ([*lines[:9], lines[9][:40], *lines[10:]], "the line cannot be parsed"),
    ):
        (tmp_path / "run" / "events.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
        with pytest.raises(InputError, match=why):
            read(path)


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["trimtab", "kept", "static", "oracle"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(use: str) -> None:
    first, again, other = (run_policy(use, truth(noise=SyntheticNoise(), seed=seed), AUTO) for seed in (1, 1, 2))
    assert first == again
    assert first.total_s != other.total_s


def test_with_costs_that_drift_the_loop_is_between_the_oracle_and_the_plan_that_is_kept() -> None:
    world = truth(moves=FREE)
    took = {use: run_policy(use, world, AUTO).total_s for use in ("oracle", "trimtab", "static", "kept")}
    assert took["oracle"] < took["trimtab"] < took["kept"]
    assert took["oracle"] < took["static"] < took["kept"]


def test_without_drift_or_noise_everybody_takes_the_same() -> None:
    world = truth(drift={})
    totals = {run_policy(use, world, AUTO).total_s for use in ("trimtab", "kept", "static", "oracle")}
    assert len(totals) == 1


def test_time_in_moves_is_time_of_the_run_and_not_of_iterations() -> None:
    slow = replace(FREE, place_s=Distribution(7.0))
    outcome = loop_run(truth(moves=slow), AUTO)
    assert outcome.moves
    assert outcome.spent["moves"] == pytest.approx(7.0 * len(outcome.moves))
    assert outcome.total_s == pytest.approx(sum(outcome.walls_s) + outcome.spent["moves"])


def test_a_node_lost_under_the_plan_takes_what_was_not_saved_and_every_iteration_counts_once() -> None:
    node = cluster(4, 4).nodes[1]
    happens = (ScheduledNodeEvent(node, "lost", before=18),)
    for use in ("trimtab", "kept"):
        outcome = run_policy(use, truth(drift={}, happens=happens, save_every=5, moves=FREE), AUTO)
        assert (outcome.finished, len(outcome.walls_s), outcome.void) == (True, 50, 2)
        assert outcome.moves[0].forced
        assert outcome.spent["void"] > 0


def test_an_iteration_under_way_goes_with_its_node() -> None:
    world = truth(drift={}, save_every=0, moves=FREE)
    walls = run_policy("kept", world, AUTO).walls_s
    midway = sum(walls[:9]) + walls[9] / 2
    lost = truth(
        drift={}, save_every=0, moves=FREE, happens=(ScheduledNodeEvent(cluster(4, 4).nodes[1], "lost", at_s=midway),)
    )
    outcome = run_policy("kept", lost, AUTO)
    assert outcome.spent["void"] == pytest.approx(walls[9] / 2)
    assert outcome.void == 0  # it had not ended


def test_a_node_that_drains_is_left_in_time_and_nothing_is_lost() -> None:
    node = cluster(4, 4).nodes[1]
    happens = (ScheduledNodeEvent(node, "draining", at_s=30.0, notice_s=120.0),)
    outcome = loop_run(truth(drift={}, happens=happens), AUTO)
    assert [one.code for one in outcome.moves] == ["PLAN_GONE"]
    assert outcome.spent["void"] == 0


@pytest.mark.parametrize("use", ["trimtab", "kept", "oracle"])
def test_a_run_that_has_no_node_waits_for_one_and_goes_on_or_ends_unfinished(use: str) -> None:
    node = cluster(8).nodes[0]
    gone = ScheduledNodeEvent(node, "lost", at_s=20.0)
    back = ScheduledNodeEvent(node, "joined", at_s=20.0 + 4 * AUTO.wait_s)  # the loop has told the run to stop by then
    outcome = run_policy(use, truth(8, drift={}, happens=(gone, back)), AUTO)
    assert (outcome.finished, len(outcome.walls_s)) == (True, 50)
    assert outcome.spent["waiting"] == pytest.approx(4 * AUTO.wait_s, rel=0.02)
    never = run_policy(use, truth(8, drift={}, happens=(gone,)), AUTO)
    assert not never.finished
    assert len(never.walls_s) < 50


@pytest.mark.parametrize("staleness", [0, 2])
def test_iterations_that_last_far_longer_than_a_stage_may_neither_fail_a_move_nor_stop_the_run(staleness: int) -> None:
    hasty = replace(AUTO, stage_limit_s=0.01, rollback_limit_s=0.01)  # iterations take seconds
    node, new = cluster(4, 4).nodes[1], Node("node2", 8)
    drains = (ScheduledNodeEvent(node, "draining", at_s=1.0, notice_s=100.0),)
    world = TrueCosts(ReplanReality(job(4, 4, staleness=staleness), 20, {}, QUIET, FREE, drains))
    outcome = loop_run(world, hasty)
    assert [(one.code, one.arrived) for one in outcome.moves] == [("PLAN_GONE", True)]
    assert (outcome.finished, outcome.void) == (True, 0)
    at_s = sum(outcome.walls_s[:5])
    comes_and_goes = (
        ScheduledNodeEvent(new, "joined", at_s=at_s + 1.0),
        ScheduledNodeEvent(new, "lost", at_s=at_s + 1.1),
    )
    world = TrueCosts(ReplanReality(job(4, 4, staleness=staleness), 20, {}, QUIET, FREE, comes_and_goes))
    outcome = loop_run(world, hasty)
    assert [one.arrived for one in outcome.moves] == [False]
    assert (outcome.finished, outcome.void) == (True, 0)


def test_a_move_that_fails_is_undone_and_the_run_goes_on() -> None:
    outcome = loop_run(truth(moves=replace(FREE, fails=0.5), seed=4), AUTO)
    assert outcome.finished
    assert {one.arrived for one in outcome.moves} == {True, False}


def test_periodic_work_moves_nothing() -> None:
    for announced in (False, True):
        periodic = PeriodicWork(5, "rollout", 0.6, announced)
        assert not loop_run(truth(drift={}, noise=SyntheticNoise(), periodic=periodic), AUTO).moves


def test_what_must_be_true_holds_through_losses_drains_returns_and_moves_that_fail() -> None:
    seen: dict[str, float] = {}
    for seed in range(6):
        source = random.Random(seed)
        churn = Churn(source.uniform(0.0005, 0.02), Distribution(60.0), 0.5, 20.0)
        nodes = cluster(4, 4, 2).nodes
        by_name = {node.name: node for node in nodes}
        happens = tuple(
            ScheduledNodeEvent(by_name[one.node], one.what, one.at_s, None, one.notice_s)
            for one in churn.events(list(by_name), 3_000.0, seed)
        )
        more = {"happens": happens, "moves": MigrationTimes(fails=0.3), "save_every": 4, "iterations": 25, "seed": seed}
        world = truth(4, 4, 2, noise=SyntheticNoise(), **more)
        for use in ("trimtab", "kept", "static", "oracle"):
            outcome = run_policy(use, world, AUTO)
            assert outcome.finished
            assert len(outcome.walls_s) == 25
            for name, value in outcome.spent.items():
                seen[name] = seen.get(name, 0.0) + value
            seen["undone"] = seen.get("undone", 0) + sum(not one.arrived for one in outcome.moves)
    assert all(seen.values()), seen


# ---- lies ---------------------------------------------------------------------------------------------------------


class Liar(KeptPlanPolicy):
    """Keeps its plan, and does one thing that must not be."""

    lie: Callable[[Liar, e.ReplanEvent, list[e.ReplanInstruction]], None]

    def handle(self, event: e.ReplanEvent, now: float) -> list[e.ReplanInstruction]:
        said = super().handle(event, now)
        if isinstance(event, e.IterationDone) and event.iteration.number == 3:
            Liar.lie(self, event, said)
        return said


def _counts_twice(liar: Liar, event: e.ReplanEvent, said: list[e.ReplanInstruction]) -> None:
    liar._done += 1


def _says_nothing(liar: Liar, event: e.ReplanEvent, said: list[e.ReplanInstruction]) -> None:
    said.clear()


def _no_reason(liar: Liar, event: e.ReplanEvent, said: list[e.ReplanInstruction]) -> None:
    said.append(e.KeepPlan(Reason(ReasonCode.no_gain, " "), DecisionNumbers(iteration_s=1.0, horizon=1)))


def _no_numbers(liar: Liar, event: e.ReplanEvent, said: list[e.ReplanInstruction]) -> None:
    said.append(e.KeepPlan(Reason(ReasonCode.no_gain, "it is so"), DecisionNumbers()))


def _is_elsewhere(liar: Liar, event: e.ReplanEvent, said: list[e.ReplanInstruction]) -> None:
    plan = liar._sited.plan
    other = {group.components: group.gpus for group in plan.groups}
    a, b = plan.groups
    groups = tuple(replace(one, gpus=other[(b if one is a else a).components]) for one in plan.groups)
    ranks = {name: group.gpus for group in groups for name in group.components}
    placed = tuple(replace(one, gpus=ranks[one.name]) for one in plan.components)
    liar._sited = PlacedPlan(replace(plan, groups=groups, components=placed), liar._sited.cluster)


def _moves_for_nothing(liar: Liar, event: e.ReplanEvent, said: list[e.ReplanInstruction]) -> None:
    liar._lost = ("node0",)
    liar._go()
    (begin,) = [one for one in liar._out if isinstance(one, e.BeginMigration)]
    numbers = DecisionNumbers(gain_s=1.0, sure_gain_s=1.0, horizon=10, cost_s=60.0, margin=0.5)
    said.append(e.BeginMigration(replace(begin.move, forced=False, numbers=numbers), begin.deadline))


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (_counts_twice, "the policy counts 4 iterations, but 3 were run"),
        (_says_nothing, "nothing was decided after iteration 3"),
        (_no_reason, "a decision without a reason"),
        (_no_numbers, "a decision without numbers"),
        (_is_elsewhere, "on other GPUs, but no migration has ended"),
        (_moves_for_nothing, "migration 1 does not pay"),
    ],
)
def test_a_policy_that_does_what_must_never_be_done_is_found_out(
    lie: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Liar, "lie", lie, raising=False)
    world = truth()
    liar = Liar(world.plans, world.first(), world.reality.job.cluster, AUTO)
    with pytest.raises(InvariantError, match=said):
        ReplanReplay(liar, world, AUTO).run()


def test_two_groups_on_one_gpu_and_gpus_that_are_not_there_are_found_out() -> None:
    first = truth().first()
    here = first.cluster
    ReplanInvariants.of(first, AUTO).iteration_begins(1, here)
    a, b = (group.components[0] for group in first.plan.groups)
    doubled = ReplanInvariants.of(first, AUTO)
    doubled.seats[b] = doubled.seats[a]
    with pytest.raises(InvariantError, match="two groups are on GPU"):
        doubled.iteration_begins(1, here)
    with pytest.raises(InvariantError, match="which does not exist"):
        ReplanInvariants.of(first, AUTO).iteration_begins(1, Cluster(here.nodes[:1]))
    with pytest.raises(InvariantError, match="iteration 2 is run after 0"):
        ReplanInvariants.of(first, AUTO).iteration_begins(2, here)


def test_time_and_iterations_that_do_not_add_up_are_found_out() -> None:
    books = ReplanInvariants.of(truth().first(), AUTO)
    books.iteration_done(1)
    books.spend(3.0, "iterations")
    books.check_totals(3.0, 1, True)
    with pytest.raises(InvariantError, match="3 s are accounted for, and 4 s have passed"):
        books.check_totals(4.0, 1, True)
    with pytest.raises(InvariantError, match="1 of 2 iterations are counted"):
        books.check_totals(3.0, 2, True)


# ---- drift and noise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drift", "levels"),
    [
        (Drift(3.0, 60), {1: 1 + 2 / 60, 30: 2.0, 60: 3.0, 90: 3.0}),
        (Drift(2.0, after=20, shape="jump"), {20: 1.0, 21: 2.0}),
        (Drift(4.0, 10, 10, "exponential"), {10: 1.0, 15: 2.0, 20: 4.0}),
        (Drift(3.0, 10, shape="wave"), {5: 2.0, 10: 3.0, 20: 1.0}),
        (Drift(points=((10, 1.0), (20, 3.0))), {1: 1.0, 15: 2.0, 40: 3.0}),
    ],
)
def test_a_drift_has_the_level_that_its_shape_says(drift: Drift, levels: dict[int, float]) -> None:
    assert {at: drift.level(at) for at in levels} == pytest.approx(levels)


def test_an_early_drift_is_ahead_of_a_steady_one_and_ends_with_it() -> None:
    early, steady = Drift(3.0, 40, shape="early"), Drift(3.0, 40)
    assert early.level(10) > steady.level(10)
    assert early.level(40) == pytest.approx(steady.level(40))


def a_trace(folder: Path, text: str | None = None) -> Path:
    path = folder / "steps.csv"
    if text is None:
        source = random.Random(1)
        lines = [f"{worker},{at},{source.uniform(700, 800):.0f}" for at in range(1, 31) for worker in range(2)]
        text = "worker,iteration,batch_time_norm\n" + "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


def test_noise_of_a_trace_is_around_one_and_goes_back_and_forth_where_the_trace_is_short(tmp_path: Path) -> None:
    noise = TraceNoise((a_trace(tmp_path),))
    found = noise.factors(("a", "b", "c"), 100, 1)
    assert {len(one) for one in found.values()} == {101}
    assert all(0.9 < one.mean() < 1.1 for one in found.values())
    assert noise.factors(("a", "b", "c"), 100, 1)["b"].tolist() == found["b"].tolist()
    drawn = DrawnNoise(Distribution(values=(0.5, 2.0))).factors(("a",), 50, 1)["a"]
    assert set(drawn.tolist()) == {0.5, 2.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker,iteration,batch_time_norm\n0,2,700\n0,1,700\n", "iteration 1 of worker 0 is after iteration 2"),
        ("worker,iteration,batch_time_norm\n0,1,0\n", "a step with a time of 0"),
        ("worker,iteration,batch_time_norm\n0,1\n", "3 columns are expected"),
        ("worker,iteration,batch_time_norm\n", "has no rows"),
        ("worker,iteration,batch_time\n0,1,5\n", "column batch_time_norm is missing"),
        ("worker,iteration,batch_time_norm,mood\n0,1,5,x\n", "unknown column mood"),
    ],
)
def test_a_trace_of_steps_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        minibatches(a_trace(tmp_path, text))


def test_a_trace_of_steps_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(a_trace(tmp_path).read_bytes())
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut short"):
        minibatches(tmp_path / "cut.csv.gz")


# ---- scenarios ----------------------------------------------------------------------------------------------------

TINY = """
name: tiny & drifting
job:
  workflow:
    batches: 4
    components:
      rollout: {seconds: {1: 12.5, 8: 2.0}, switch_seconds: 2, engine: a}
      trainer: {seconds: {1: 12.5, 8: 2.0}, after: rollout, switch_seconds: 2, engine: b}
cluster: {nodes: 2, gpus: 4, events: [{at_iteration: 12, node: 2, what: joined}]}
iterations: 30
drift: {rollout: {to: 3.0, over: 20}}
moves: {save_s: 1, load_s: {median: 1, p99: 2}, place_s: 1}
loop: {assumed_move_s: 2, least_iterations: 4}
policies: [trimtab, kept, static, oracle, {use: trimtab, name: slow, loop: {dwell_iterations: 15}}]
seeds: [1, 2]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def test_a_scenario_says_settings_of_each_loop_and_nodes_that_join_are_like_the_first(tiny: Path) -> None:
    asked = read(tiny)
    assert [one.name for one in asked.policies] == ["trimtab", "kept", "static", "oracle", "slow"]
    slow = asked.policies[-1].rules
    assert (slow.dwell_iterations, slow.least_iterations, slow.mode.value) == (15, 4, "auto")
    assert asked.reality.happens[0].node == Node("node2", 4)
    assert asked.reality.save_every == 10


def test_a_job_file_says_what_the_scenario_leaves_out(tmp_path: Path) -> None:
    flow = "workflow: {components: {a: {seconds: {8: 4}}, b: {seconds: {8: 4}, after: a}}}\n"
    text = "cluster: {nodes: 1, gpus_per_node: 8}\n" + flow
    run_section = "run: {iterations: 7, save_every: 3, loop: {mode: advise, margin: 0.25}}\n"
    (tmp_path / "job.yaml").write_text(text + run_section, encoding="utf-8")
    (tmp_path / "some.yaml").write_text("job: job.yaml\n", encoding="utf-8")
    asked = read(tmp_path / "some.yaml")
    known = asked.reality
    assert (known.iterations, known.save_every, known.job.cluster.gpus) == (7, 3, 8)
    assert (asked.policies[0].rules.margin, asked.policies[0].rules.mode.value) == (0.25, "auto")
    (tmp_path / "some.yaml").write_text("job: job.yaml\ncluster: {nodes: 3}\niterations: 9\n", encoding="utf-8")
    asked = read(tmp_path / "some.yaml")
    assert (asked.reality.iterations, asked.reality.job.cluster.gpus) == (9, 24)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("iterations: 30", "iterationz: 30", "did you mean iterations"),
        ("iterations: 30\n", "", "the number of iterations is missing"),
        ("iterations: 30", "iterations: 0", "a whole number of 1 or more"),
        ("to: 3.0", "too: 3.0", "did you mean to"),
        ("to: 3.0", "to: -1", "a number of 1e-06 or more"),
        ("over: 20", "over: 20, shape: stedy", "steady"),
        ("over: 20", "over: 20, points: {1: 1.0}", "points cannot be combined"),
        ("{rollout: {to", "{rolout: {to", "did you mean rollout"),
        ("save_s: 1", "sav_s: 1", "did you mean save_s"),
        ("save_s: 1", "save_s: soon", "a number of 0 or more"),
        ("save_s: 1", "fails: 2", "a number of 0 or more, up to 1"),
        ("at_iteration: 12", "at_iteration: 12, at_s: 5", "either a time or an iteration"),
        ("what: joined", "what: lost", "there is no node 2, and none joins"),
        ("what: joined", "wat: joined", "did you mean what"),
        ("nodes: 2,", "nodes: 2, spare: 1,", "unknown key spare"),
        ("dwell_iterations: 15", "dwel_iterations: 15", "did you mean dwell_iterations"),
        ("dwell_iterations: 15", "dwell_iterations: -1", "whole number of 0 or more"),
        ("assumed_move_s: 2", "mode: advise", "unknown key mode"),
        ("use: trimtab, name: slow", "use: kept, name: slow", "kept has no loop"),
        ("use: trimtab, name: slow", "use: trimtab, name: kept", "two policies are named kept"),
        ("[trimtab, kept", "[trimtab, kep", "did you mean kept"),
        ("seconds: {1: 12.5, 8: 2.0}, switch", "secs: {1: 12.5}, switch", "did you mean seconds"),
        ("seeds: [1, 2]", "noise: {trace: none.csv}", "none.csv"),
        ("seeds: [1, 2]", "noise: {spread: 0.1, factor: 1}", "a trace, a distribution, or synthetic"),
        ("seeds: [1, 2]", "noise: {factor: {median: 1, p98: 2}}", "did you mean p99"),
        ("seeds: [1, 2]", "periodic: {every: 5, component: critic, adds: 0.5}", "unknown component critic"),
        ("seeds: [1, 2]", "seeds: []", "at least 1 item"),
    ],
)
def test_a_scenario_that_is_wrong_is_refused_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "wrong.yaml"
    assert old in TINY
    path.write_text(TINY.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=said) as found:
        read(path)
    assert "wrong.yaml" in str(found.value.where) or "none.csv" in found.value.what


def test_a_job_that_does_not_fit_its_cluster_is_said_with_status_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(TINY.replace("engine: b}", "engine: b, gpus: [64]}"), encoding="utf-8")
    assert run(["simulate", str(path)]) == 3
    assert "trainer" in capsys.readouterr().err


# ---- the command --------------------------------------------------------------------------------------------------


def test_the_answer_is_a_table_with_every_policy_and_what_was_assumed(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(tiny)]) == 0
    shown = capsys.readouterr().out
    firsts = [one.split()[0] for one in shown.splitlines() if one.split()]
    assert [one for one in firsts if one in ("kept", "static", "oracle", "slow")] == [
        "kept",
        "static",
        "oracle",
        "slow",
    ]
    assert "rollout drifts to 3 times its profile" in shown
    assert "migration, save: 1 s" in shown
    assert "invariant checks passed" in shown


def test_programs_read_json_and_csv_and_one_process_or_two_say_the_same(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["simulate", str(tiny), "--format", "json", "--jobs", "2", "--policy", "trimtab", "--policy", "oracle"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["summary"]] == ["trimtab", "oracle"]
    assert found["summary"][0]["regret"]["mean"] > found["summary"][1]["regret"]["mean"] == 0.0
    assert found["summary"][0]["against_kept"] is None  # it did not run
    assert len(found["runs"][0]["walls_s"]) == 30
    assert (
        run(
            ["simulate", str(tiny), "--csv", str(tiny.with_suffix(".csv")), "--policy", "trimtab", "--policy", "oracle"]
        )
        == 0
    )
    lines = list(csv.DictReader(tiny.with_suffix(".csv").read_text().splitlines()))
    assert len(lines) == len(found["runs"]) == 4
    for line, other in zip(lines, found["runs"], strict=True):
        assert all(line[key] == str(other[key]) for key in line if key != "seconds")


def test_the_report_is_one_page_that_loads_nothing(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run(["simulate", str(tiny), "--seed", "1", "--report", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "tiny &amp; drifting" in text
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    begin = drawn = 0
    while (begin := text.find("<svg", begin)) >= 0:
        end = text.index("</svg>", begin) + len("</svg>")
        ElementTree.fromstring(text[begin:end])
        begin, drawn = end, drawn + 1
    assert drawn == 2 * 2  # bars and curves; wide and narrow
    assert "DRIFTED" in text


def test_a_sweep_tries_settings_of_the_loop_and_recommends_with_evidence(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["simulate", str(tiny), "--policy", "trimtab", "--policy", "oracle", "--sweep"]
    assert run([*asked, "dwell_iterations=0,5,25", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["summary"]] == [
        "trimtab",
        "trimtab, dwell_iterations 0",
        "trimtab, dwell_iterations 25",
        "oracle",
    ]
    assert found["recommendation"]["seeds"] == 2
    assert "standard error over 2 seeds that did not choose it" in found["recommendation"]["sentence"]
    for said, why in (
        ("dwell_iteration=1", "did you mean dwell_iterations"),
        ("mode=1", "cannot be swept"),
        ("margin", "no values"),
        ("dwell_iterations=0.5", "a whole number"),
        ("margin=-1", "0 or more"),
        ("dwell_iterations=5", "has these values already"),
    ):
        assert run([*asked, said]) == 2
        assert why in capsys.readouterr().err


def test_a_recommendation_needs_more_than_chance() -> None:
    now = {seed: 100.0 + seed for seed in range(5)}
    better = {seed: value * 0.9 for seed, value in now.items()}
    lucky = {seed: value * (0.8 if seed == 0 else 1.01) for seed, value in now.items()}
    assert recommend("now", {"now": now, "better": better}, "time").choose == "better"
    unsure = recommend("now", {"now": now, "lucky": lucky}, "time")
    assert unsure.choose == "now"
    assert "chance may explain" in unsure.sentence
    few = {name: {0: one[0], 1: one[1]} for name, one in (("now", now), ("better", better))}
    assert "too few seeds" in recommend("now", few, "time").sentence
    worse = recommend("now", {"now": now, "worse": {seed: 2 * value for seed, value in now.items()}}, "time")
    assert (worse.choose, worse.gain) == ("now", pytest.approx(-1.0))
    assert recommend("now", {"now": now}, "time").choose == "now"


def test_the_example_shows_the_loop_ahead_of_every_plan_that_is_kept() -> None:
    asked: ReplanScenario = loop_scenario.read(ROOT / "examples" / "simulate" / "loop.yaml")
    asked = replace(asked, seeds=(1,))
    runs = [run_replan(asked, one, 1) for one in asked.policies]
    by_name = {one.policy: one for one in compare_replans(asked, runs).rows}
    assert by_name["trimtab"].mean("total_s") < by_name["static"].mean("total_s") < by_name["kept"].mean("total_s")
    regret = by_name["trimtab"].facts["regret"]
    assert isinstance(regret, tuple)
    assert 0 < regret[0] < 0.1
