"""Which role a node that joins or leaves is for: the three examples, staying, unlike nodes, and random clusters."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import obvious
from jobs import cluster, component
from random_jobs import random_job
from trimtab.cli.app import run
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.reasons import ReasonCode
from trimtab.formats.load import load
from trimtab.machines.nodes.roles import PlanningContext, RoleAdvice, advise, as_planned, with_joined, without
from trimtab.model.plan import CurrentPlacement
from trimtab.model.workflow import Cluster, Node, PlacementJob, WeightSync, Workflow

ROOT = Path(__file__).parents[2]
ROLES = ROOT / "examples" / "roles"


def asked(job: PlacementJob, after: Cluster, current: CurrentPlacement | None = None, **settings: Any) -> RoleAdvice:
    return advise(PlanningContext(job, current=current), PlanningContext(replace(job, cluster=after)), **settings)


def codes(advice: RoleAdvice) -> dict[str, ReasonCode]:
    return {one.component: one.reason.code for one in advice.changes}


def ahead(total: int, trainer: dict[int, float], generation: dict[int, float], **more: Any) -> PlacementJob:
    """Generation one iteration ahead of the trainer."""
    chain = (
        component("generation", generation, switch_seconds=5.0, engine="vllm"),
        component("trainer", trainer, ("generation",), granularity=None, engine="megatron", **more),
    )
    sync = WeightSync("trainer", "generation", 1.0, 1.0)
    return PlacementJob(cluster(total), Workflow(chain, batches=64, staleness=1, weight_sync=sync))


# ---- the three roles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["trainer", "generation", "environment"])
def test_a_node_that_joins_goes_to_the_role_that_the_iteration_waits_for(role: str) -> None:
    loaded = load(ROLES / f"{role}.yaml")
    before = PlanningContext(loaded.job, loaded.rules, loaded.current)
    advice = advise(before, PlanningContext(replace(loaded.job, cluster=with_joined(loaded.job.cluster, 1))))
    assert advice.reason.code is ReasonCode.grow
    assert {name for name, code in codes(advice).items() if code is ReasonCode.grow} == {role}
    assert {code for name, code in codes(advice).items() if name != role} == {ReasonCode.stay}
    [change] = [one for one in advice.changes if one.component == role]
    assert change.gpus_after == change.gpus_before + 8
    assert "held up the iteration" in change.reason.sentence
    assert advice.before is not None
    assert advice.after.iteration_seconds < 0.7 * advice.before.iteration_seconds


@pytest.mark.parametrize("role", ["trainer", "generation", "environment"])
def test_a_node_that_leaves_takes_its_gpus_and_the_advice_fits_what_is_left(role: str) -> None:
    loaded = load(ROLES / f"{role}.yaml")
    left = without(loaded.job.cluster, "node1")
    advice = advise(
        PlanningContext(loaded.job, loaded.rules, loaded.current), PlanningContext(replace(loaded.job, cluster=left))
    )
    assert advice.reason.code is ReasonCode.shrink
    assert "does not fit any more" in advice.reason.sentence
    assert not advice.can_stay
    assert advice.after.gpus <= 8


def test_what_is_not_to_change_keeps_its_gpus() -> None:
    loaded = load(ROLES / "trainer.yaml")
    before = PlanningContext(loaded.job, current=loaded.current)
    advice = advise(before, PlanningContext(replace(loaded.job, cluster=with_joined(loaded.job.cluster, 1))))
    ranks = {group.components: group.gpus for group in advice.after.groups}
    assert ranks == {("generation",): tuple(range(8, 16)), ("trainer",): (*range(8), *range(16, 24))}


# ---- staying ------------------------------------------------------------------------------------------------------


def test_a_gain_that_real_runs_do_not_show_is_no_reason_to_move() -> None:
    job = ahead(16, {8: 100.0, 16: 99.0}, {8: 60.0, 16: 59.0})
    placed = CurrentPlacement({"generation": tuple(range(8)), "trainer": tuple(range(8, 16))}, "here")
    advice = asked(job, with_joined(job.cluster, 2), placed)
    assert advice.stay
    assert advice.after is advice.before
    assert set(codes(advice).values()) == {ReasonCode.stay}
    assert "real runs do not show" in advice.reason.sentence
    assert not asked(job, with_joined(job.cluster, 2), placed, noise=0.001).stay


def test_a_node_that_nothing_used_may_leave() -> None:
    job = ahead(24, {8: 100.0}, {8: 60.0}, gpus=(8,))
    advice = asked(job, without(job.cluster, 1))
    assert advice.stay
    assert advice.can_stay
    assert "no plan of the new cluster is faster" in advice.reason.sentence


def test_groups_stay_together_where_sizes_alone_come_near_enough() -> None:
    job = ahead(16, {4: 92.0, 8: 47.0, 16: 27.0}, {2: 480.0, 4: 250.0, 8: 132.0, 16: 74.0}, multiple_of=4)
    placed = CurrentPlacement({"generation": tuple(range(8)), "trainer": tuple(range(8, 16))}, "here")
    advice = asked(job, with_joined(job.cluster, 1, 4), placed)
    assert advice.best.describe() != advice.after.describe()
    assert advice.best.iteration_seconds <= advice.after.iteration_seconds <= 1.05 * advice.best.iteration_seconds
    assert [group.components for group in advice.after.groups] == [("generation",), ("trainer",)]


# ---- what fits and what does not ----------------------------------------------------------------------------------


def test_a_job_that_did_not_fit_can_run_when_enough_has_joined() -> None:
    job = ahead(8, {16: 50.0}, {8: 20.0}, gpus=(16,))
    advice = asked(job, with_joined(job.cluster, 2))
    assert advice.before is None
    assert advice.reason.code is ReasonCode.grow
    assert "nothing fitted before" in advice.reason.sentence
    assert set(codes(advice).values()) == {ReasonCode.grow}


def test_a_job_that_does_not_fit_any_more_is_infeasible() -> None:
    job = ahead(16, {16: 50.0}, {8: 20.0}, gpus=(16,))
    with pytest.raises(InfeasibleError):
        asked(job, without(job.cluster, 1))


def test_a_placement_that_cannot_be_is_said_and_the_best_plan_taken() -> None:
    job = ahead(16, {8: 100.0}, {8: 60.0})
    advice = asked(job, with_joined(job.cluster, 1), CurrentPlacement({"trainer": tuple(range(8))}, "placement"))
    assert advice.before is not None
    assert any("does not say where generation goes" in note for note in advice.notes)


# ---- unlike nodes -------------------------------------------------------------------------------------------------


def test_gpus_on_which_nothing_was_measured_stay_idle_and_that_is_said() -> None:
    loaded = load(ROLES / "trainer.yaml")
    workflow = replace(loaded.job.workflow, components=tuple(
        replace(c, variants=tuple(replace(v, seconds={"H100": v.points("")}) for v in c.variants))
        for c in loaded.job.workflow.components
    ))  # fmt: skip
    job = replace(loaded.job, workflow=workflow)
    advice = asked(job, with_joined(job.cluster, 1, 8, "H20"), loaded.current)
    assert advice.stay
    assert "nothing was measured on H20: those GPUs stay idle; state `seconds: {H20: ...}`" in advice.notes


def test_a_cost_of_no_kind_is_taken_to_hold_for_all_and_that_is_said() -> None:
    loaded = load(ROLES / "trainer.yaml")
    advice = asked(loaded.job, with_joined(loaded.job.cluster, 1, 8, "H20"), loaded.current)
    assert "not measured on H20, and taken to be as fast there as elsewhere: generation, trainer" in advice.notes


def test_nodes_without_gpus_change_no_prediction() -> None:
    loaded = load(ROLES / "trainer.yaml")
    advice = asked(loaded.job, with_joined(loaded.job.cluster, 1, 0), loaded.current)
    assert advice.stay
    assert any("have no GPUs" in note for note in advice.notes)


def test_newcomers_are_like_most_nodes_but_for_what_is_said() -> None:
    few = Cluster((Node("a", 8, "H100", 80.0, 800.0), Node("b", 8, "H100", 80.0, 800.0), Node("c", 4, "L4", 24.0)))
    assert with_joined(few, 1).nodes[-1] == Node("new0", 8, "H100", 80.0, 800.0)
    assert with_joined(few, 1, 4).nodes[-1] == Node("new0", 4, "H100", 80.0, 400.0)
    assert with_joined(few, 1, kind="L4").nodes[-1] == Node("new0", 4, "L4", 24.0)
    assert with_joined(few, 2, kind="T4").nodes[-2:] == tuple(
        Node(name, 8, "T4", None, 800.0) for name in ("new0", "new1")
    )


def test_living_nodes_take_what_they_do_not_say_from_the_job_file() -> None:
    planned = cluster(16, gpu="H100", gpu_memory_gb=80.0)
    seen, notes = as_planned([Node("x", 8), Node("y", 4, "H100"), Node("head", 0)], planned)
    assert notes == ()
    assert seen.nodes[:2] == (Node("x", 8, "H100", 80.0), Node("y", 4, "H100", 80.0))
    _, notes = as_planned([Node("z", 8, "T4")], planned)
    assert notes == ("z has T4, which the job file does not name (H100)",)
    two = Cluster((Node("a", 8, "H100"), Node("b", 8, "L4")))
    assert as_planned([Node("z", 8)], two)[1] == (
        "not said of which kind the GPUs are, and the job file has several: z",
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda few: without(few, "node7"), "no node node7"),
        (lambda few: without(few, 3), "3 of 2 nodes"),
        (lambda few: without(few, 0), "0 of 2 nodes"),
        (lambda few: with_joined(few, 0), "0 nodes cannot join"),
    ],
)
def test_nodes_that_cannot_join_or_leave_are_said(call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call(cluster(16))


def test_the_last_gpus_cannot_leave() -> None:
    with pytest.raises(InfeasibleError, match="no GPU would be left"):
        without(cluster(16), 2)


# ---- random clusters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_advice_is_within_the_noise_of_the_best_that_an_obvious_planner_finds(seed: int) -> None:
    rng = random.Random(seed)
    advised = 0
    for _ in range(12):
        job = random_job(rng, rng.randint(2, 3), rng.randint(2, 4), rng.choice([1, 4]), rng.choice([0, 0, 1]))
        after = with_joined(job.cluster, 1, rng.randint(1, 2))
        if rng.random() < 0.4 and len(job.cluster.nodes) > 1:
            after = without(job.cluster, 1)
        want = obvious.best(replace(job, cluster=after))
        if want is None:
            with pytest.raises(InfeasibleError):
                asked(job, after)
            continue
        advice = asked(job, after)
        advised += 1
        assert advice.best.iteration_seconds == pytest.approx(want[0], rel=1e-9)
        assert advice.after.iteration_seconds <= want[0] * 1.05 * (1 + 1e-9)
        ranks = [rank for group in advice.after.groups for rank in group.gpus]
        assert len(ranks) == len(set(ranks))
        if not advice.stay:
            for group in advice.after.groups:
                assert set(group.gpus) <= set(after.ranks(group.kind))
            assert any(one.changed for one in advice.changes)
        for one in advice.changes:
            assert (one.gpus_after > one.gpus_before) == (one.reason.code is ReasonCode.grow) or advice.before is None
    assert advised > 3


# ---- the command --------------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["plan", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_says_what_changes_and_the_placement_that_follows(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, str(ROLES / "trainer.yaml"), "--join", "1")
    assert (status, err) == (0, "")
    assert out.startswith("GROW trainer gets the GPUs: an iteration takes 62.0 s instead of 101.0 s (39% less)\n")
    assert "2 nodes with 16 H100 before, 3 nodes with 24 H100 after" in out
    assert out.endswith("placement:\n  generation: 8-15\n  trainer: 0-7,16-23\n")


def test_the_command_answers_programs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, str(ROLES / "environment.yaml"), "--join", "1x4", "--format", "json")
    said = json.loads(out)
    assert status == 0
    assert (said["advice"], said["stay"]) == ("GROW", False)
    assert said["components"]["environment"]["gpus"] == {"before": 10, "after": 14}
    assert said["components"]["trainer"]["code"] == "STAY"
    assert said["settings"]["placement"]["environment"] == "2-11,16-19"
    assert said["cluster"]["after"]["gpus"] == 20


def test_a_framework_file_is_read_again_for_its_new_number_of_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = str(ROOT / "examples" / "math" / "config" / "qwen2.5-1.5b-grpo-megatron.yaml")
    status, out, _ = call(capsys, config, "--join", "1", "--format", "json")
    said = json.loads(out)
    assert status == 0
    assert said["cluster"]["after"]["nodes"] == 2
    assert said["settings"] == {"cluster.component_placement": {"rollout,trainer": "all"}}
    assert said["after"]["iteration_seconds"] == pytest.approx(186.4 / 2)
    assert call(capsys, config, "--join", "1x4")[0] == 2
    embodied = str(ROOT / "tests" / "data" / "rlinf_embodied.yaml")
    status, out, err = call(capsys, embodied, "--join", "1", "--format", "json")
    assert status == 0, err  # profile_data.gpus says on how many GPUs the actor's one cost was measured
    assert json.loads(out)["after"]["iteration_seconds"] < json.loads(out)["before"]["iteration_seconds"]
    points = tmp_path / "points.yaml"
    points.write_text(Path(config).read_text().replace("rollout_cost: 59.9", "rollout_cost: {4: 100, 8: 59.9}"))
    status, out, err = call(capsys, str(points), "--join", "1", "--format", "json")
    assert status == 0, err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--join", "many"], 2, "not a number of nodes"),
        (["--join", "1", "--leave", "node9"], 2, "did you mean node"),
        (["--join", "1", "--gpu", "H100"], 2, "--gpu does not go with --join"),
        (["--leave", "2"], 3, "no GPU would be left"),
        (["--address", "127.0.0.1:1"], 4, "nothing answers at 127.0.0.1:1"),
    ],
)
def test_a_wrong_call_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str) -> None:
    answered, out, err = call(capsys, str(ROLES / "trainer.yaml"), *arguments)
    assert (answered, out) == (status, "")
    assert said in err


@pytest.fixture(scope="module")
def living() -> Iterator[Any]:
    """A Ray of one node that says it has sixteen H100 and four GPUs more."""
    import ray

    ray.init(
        address="local", num_cpus=1, num_gpus=20, resources={"accelerator_type:H100": 1}, include_dashboard=False,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    yield ray
    ray.shutdown()


def test_without_join_and_leave_the_living_cluster_is_compared_with_the_file(
    capsys: pytest.CaptureFixture[str], living: Any
) -> None:
    status, out, err = call(capsys, str(ROLES / "environment.yaml"), "--address", "auto", "--format", "json")
    assert (status, err) == (0, "")
    said = json.loads(out)
    assert said["cluster"]["before"] == {"nodes": 2, "gpus": 16, "gpus_by_kind": {"L40S": 16}}
    assert said["cluster"]["after"] == {"nodes": 1, "gpus": 20, "gpus_by_kind": {"H100": 20}}
    assert any("has H100, which the job file does not name (L40S)" in note for note in said["notes"])
    status, out, _ = call(capsys, str(ROLES / "trainer.yaml"), "--address", "auto")
    assert status == 0
    assert out.startswith("GROW trainer gets the GPUs")
