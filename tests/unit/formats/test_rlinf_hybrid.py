"""RLinf's hybrid placements: groups that share some of their GPUs are read, predicted, compared and proposed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dialect_plans import composed, plan_of, profile_of
from trimtab.core.errors import InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.frameworks.rlinf import Rlinf
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.logs.follow_costs import RunConfig
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.run import ReplanRules
from trimtab.model.workflow import ANY_KIND, Cluster, Component, Node, PlacementJob, Variant, WeightSync, Workflow
from trimtab.plan.placement.planner import plan_placement
from trimtab.runtime.advise.analysis import AdviceTracker
from trimtab.runtime.advise.replanner import Adviser, placement_now

HYBRID = """\
cluster:
  num_nodes: 1
  num_gpus_per_node: 8
  component_placement:
    actor: 0-7
    env: 0-3
    rollout: 4-7
runner: {{task_type: embodied, val_check_interval: -1}}
algorithm: {{loss_type: actor_critic, group_size: 8}}
env:
  train: {{rollout_epoch: 1, total_num_envs: 256, group_size: 8, max_steps_per_rollout_epoch: 80}}
rollout: {{pipeline_stage_num: {stages}}}
actor:
  training_backend: fsdp
  micro_batch_size: 40
  global_batch_size: 640
  model: {{num_action_chunks: 1}}
"""
SECONDS = {"env": {2: 90.0, 4: 50.0, 8: 48.0}, "rollout": {2: 95.0, 4: 60.0, 8: 55.0}, "actor": {4: 75.0, 8: 40.0}}


def read(folder: Path, stages: int = 2, *overrides: str) -> LoadedJob:
    return Rlinf.read(composed(folder, HYBRID.format(stages=stages), *overrides), profile_of(SECONDS))


def best(loaded: LoadedJob) -> tuple[Plan, Plan]:
    """The best plan, and the file's own."""
    answer = plan_placement(loaded.job, loaded.rules, current=loaded.current)
    own = next(other.plan for other in answer.alternatives if other.label == "your placement")
    assert own is not None
    return answer.best, own


def test_an_actor_over_the_gpus_of_both_others_is_read_and_predicted(tmp_path: Path) -> None:
    loaded = read(tmp_path, stages=1)
    assert loaded.current is not None
    assert {name: len(gpus) for name, gpus in loaded.current.ranks.items()} == {"env": 4, "rollout": 4, "actor": 8}
    _, own = best(loaded)
    assert own.iteration_seconds == pytest.approx(150.0)  # one after another: nothing streams
    assert own.mode == "hybrid"
    assert own.gpus == 8
    assert own.describe() == "env 4 | rollout 4 under actor 8"
    assert own.placed("actor").start == pytest.approx(110.0)
    assert own.placed("env").idle_share == pytest.approx(1 - 90 / 150)  # its GPUs are the actor's too
    assert own.placed("actor").idle_share == pytest.approx(1 - (90 + 100) / 2 / 150)


def test_pipeline_stages_stream_between_environment_and_rollout(tmp_path: Path) -> None:
    loaded = read(tmp_path, stages=2)
    workflow = loaded.job.workflow
    assert workflow.batches == 160
    assert [component.granularity for component in workflow.components] == [None, 1, None]
    _, own = best(loaded)
    assert own.iteration_seconds == pytest.approx(50 / 160 + 60 + 40)


def test_a_hybrid_placement_that_is_best_stays_word_for_word(tmp_path: Path) -> None:
    loaded = read(tmp_path, stages=2)
    plan, own = best(loaded)
    assert plan.iteration_seconds == pytest.approx(own.iteration_seconds)
    assert plan.overlaps
    settings = loaded.settings(plan)
    job = compose(loaded.path)
    assert write_back.apply(loaded.path, settings, job.literal, job.states) is None


def test_a_hybrid_placement_is_proposed_where_all_were_shared(tmp_path: Path) -> None:
    shared = "cluster.component_placement={actor: all, env: all, rollout: all}"
    plan, own = best(read(tmp_path, 2, shared))
    assert own.iteration_seconds > plan.iteration_seconds
    loaded = read(tmp_path, 2, shared)
    written = loaded.settings(plan).values["cluster.component_placement"]
    assert written == {"env": "0-3", "rollout": "4-7", "actor": "all"}


@pytest.mark.parametrize(
    ("placement", "seconds"),
    [
        ("{actor: 0-1, env: 0-3, rollout: 0-1}", 50 + 120 + 160),
        ("{actor: 0-7, env: 4-7, rollout: 4-7}", 50 + 60 + 40),
        ("{actor: 0, env: 0-3, rollout: 0-3}", 50 + 60 + 320),
        ("{actor: 0-3, env: 2-5, rollout: 4-7}", 50 + 60 + 80),
    ],
)
def test_any_overlap_is_predicted(placement: str, seconds: float, tmp_path: Path) -> None:
    scaled = {"env": {4: 50.0}, "rollout": {2: 120.0, 4: 60.0}, "actor": {1: 320.0, 2: 160.0, 4: 80.0, 8: 40.0}}
    text = HYBRID.format(stages=1)
    loaded = Rlinf.read(
        composed(tmp_path, text, f"cluster.component_placement={placement}", "~actor.training_backend"),
        profile_of(scaled),
    )
    _, own = best(loaded)
    assert own.iteration_seconds == pytest.approx(seconds)


def test_an_actor_that_can_use_one_gpu_only_shares_it_with_what_uses_all(tmp_path: Path) -> None:
    one = ("actor.micro_batch_size=640", "cluster.component_placement={actor: 0, env: all, rollout: all}")
    costs = profile_of({**SECONDS, "actor": {1: 40.0}})
    loaded = Rlinf.read(composed(tmp_path, HYBRID.format(stages=1), *one), costs)
    plan, own = best(loaded)
    assert plan.iteration_seconds == pytest.approx(own.iteration_seconds) == pytest.approx(48 + 55 + 40)
    assert loaded.settings(plan).values["cluster.component_placement"] == {"actor": 0, "env": "all", "rollout": "all"}
    shared = Rlinf.read(
        composed(tmp_path, HYBRID.format(stages=1), one[0]), profile_of({**SECONDS, "actor": {1: 40.0}})
    )
    assert shared.settings(plan).values["cluster.component_placement"] == {"env,rollout": "all", "actor": "0"}


def test_counts_that_rlinf_refuses_at_start_are_not_planned(tmp_path: Path) -> None:
    loaded = read(tmp_path)
    allowed = {c.name: c.variants[0].gpus for c in loaded.job.workflow.components}
    assert allowed["env"] == (1, 2, 4, 8)  # 256 environments in 2 stages of groups of 8
    assert allowed["actor"] == (1, 2, 4, 8)  # 640 samples in micro-batches of 40
    with pytest.raises(InputError, match="RLinf cannot run this plan"):
        loaded.settings(plan_of({"env rollout": range(6), "actor": range(2, 8)}))


def test_advice_is_given_for_a_hybrid_placement(tmp_path: Path) -> None:
    loaded = read(tmp_path)
    assert placement_now(loaded).overlaps
    adviser = Adviser(loaded, ReplanRules())
    for step in range(1, 31):
        adviser.take(step, {"env": 50.0, "rollout": 60.0, "actor": 40.0}, 101.0)
    assert adviser.advice is None  # it is the best there is
    assert adviser.seconds_now() == pytest.approx(100.3, abs=0.5)
    assert adviser.at_current_costs(adviser.plan).iteration_seconds == pytest.approx(adviser.seconds_now())


def test_a_run_with_a_hybrid_placement_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(HYBRID.format(stages=1))
    costs = profile_of(SECONDS)
    advising = AdviceTracker(logs.FRAMEWORKS["rlinf"], RunConfig(path), costs, ReplanRules(), 2)
    for step in range(1, 13):
        times = {"rollout/predict": 60.0, "env/env_interact_step": 50.0, "actor_training": 40.0, "step": 151.0}
        advising.take(LoggedStep(step, {f"time/{name}": seconds for name, seconds in times.items()}))
    assert advising.adviser is not None
    assert advising.adviser.plan.overlaps
    assert advising.groups == ((("env", "actor"), (0, 1, 2, 3)), (("rollout", "actor"), (4, 5, 6, 7)))


def test_asynchronous_ppo_is_as_stale_as_its_threshold(tmp_path: Path) -> None:
    stale = ("algorithm.loss_type=decoupled_actor_critic", "+algorithm.staleness_threshold=2")
    assert read(tmp_path, 1, *stale).job.workflow.staleness == 2
    assert read(tmp_path, 1).job.workflow.staleness == 0


@pytest.mark.parametrize("kind", ["sft", "embodied_eval", "reasoning_eval", "offline"])
def test_what_does_not_train_with_rl_is_refused_as_such(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"no RL training: runner.task_type is {kind}"):
        read(tmp_path, 1, f"runner.task_type={kind}")


# ---- the planner by itself -------------------------------------------------------------------------------------------

POINTS = {
    "a": {1: 90.0, 2: 50.0, 3: 41.0, 4: 30.0, 6: 25.0},
    "b": {1: 70.0, 2: 36.0, 4: 20.0, 5: 19.0},
    "c": {2: 60.0, 4: 31.0, 6: 22.0},
}
SPANNING = tuple(AllowedGroup(frozenset([name])) for name in "abc")


def chain(batches: int, staleness: int, sync: float = 0.0) -> PlacementJob:
    def one(name: str, after: tuple[str, ...], granularity: int | None) -> Component:
        points = tuple(sorted(POINTS[name].items()))
        variant = Variant(seconds={ANY_KIND: points}, gpus=tuple(POINTS[name]))
        return Component(name=name, variants=(variant,), after=after, granularity=granularity)

    workflow = Workflow(
        components=(one("a", (), None), one("b", ("a",), 1), one("c", ("b",), None)),
        batches=batches,
        staleness=staleness,
        weight_sync=WeightSync("c", "a", shared_seconds=sync, separate_seconds=sync),
    )
    return PlacementJob(cluster=Cluster((Node(name="n", gpus=6),)), workflow=workflow)


def over_both(a: float, b: float, c: float, batches: int, staleness: int, sync: float) -> float:
    """The time of `a` beside `b` with `c` on the GPUs of both, event by event over many iterations."""
    ends: list[dict[str, float]] = []
    for t in range(60):
        before = ends[-1] if ends else dict.fromkeys("abc", 0.0)
        weights = ends[t - 1 - staleness]["sync"] if t > staleness else 0.0
        if not staleness:
            weights = before.get("sync", 0.0)
        free = max(before["c"], weights)  # `c` had the GPUs of `a` and of `b` last
        a_end, b_end = free, max(before["c"], free if not staleness else 0.0)
        for _ in range(batches):
            a_end += a / batches
            b_end = max(b_end, a_end) + b / batches
        c_end = max(a_end, b_end, before.get("sync", 0.0)) + c
        ends.append({"a": a_end, "b": b_end, "c": c_end, "sync": c_end + sync})
    last = "sync"
    return (ends[-1][last] - ends[19][last]) / 40


def at_most(name: str, gpus: int) -> float:
    return min((seconds for count, seconds in POINTS[name].items() if count <= gpus), default=float("inf"))


@pytest.mark.parametrize(("batches", "staleness", "sync"), [(1, 0, 0.0), (12, 0, 3.0), (12, 1, 3.0), (40, 2, 0.0)])
def test_every_split_below_a_spanning_group_is_tried(batches: int, staleness: int, sync: float) -> None:
    rules = FrameworkRules("here", groupings=(), spanning=(SPANNING,))
    plan = plan_placement(chain(batches, staleness, sync), rules).best
    slow = min(
        over_both(at_most("a", g), at_most("b", 6 - g), at_most("c", 6), batches, staleness, sync) for g in range(1, 6)
    )
    assert plan.iteration_seconds == pytest.approx(slow)
    sizes = {group.components[0]: set(group.gpus) for group in plan.groups}
    assert not sizes["a"] & sizes["b"]
    assert sizes["c"] == set(range(6))


@pytest.mark.parametrize(("batches", "staleness"), [(12, 0), (12, 1)])
def test_a_placement_that_spans_takes_as_long_as_the_plan_that_does(batches: int, staleness: int) -> None:
    job = chain(batches, staleness, 3.0)
    rules = FrameworkRules("here", groupings=(tuple(SPANNING),), spanning=(SPANNING,))
    answer = plan_placement(job, rules)
    ranks = {group.components[0]: group.gpus for group in answer.best.groups}
    again = plan_placement(job, rules, current=CurrentPlacement(ranks, "here", overlap=True))
    own = next(other.plan for other in again.alternatives if other.label == "your placement")
    assert own is not None
    assert own.iteration_seconds == pytest.approx(answer.best.iteration_seconds)
