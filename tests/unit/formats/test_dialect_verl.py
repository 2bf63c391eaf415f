"""verl configs and a profile become jobs with verl's pools; plans become its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from dialect_plans import DATA, plan_of, profile_of
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.frameworks import run_inputs
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.frameworks.verl import Verl
from trimtab.formats.load import load as load_file
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.write_back import overrides
from trimtab.plan.placement.planner import plan_placement

SECONDS = {
    "rollout": {16: 60.0},
    "old_log_prob": {16: 10.0},
    "ref": {16: 9.0},
    "update_actor": {16: 40.0},
}
TRAINING = "old_log_prob ref update_actor"
SEPARATE = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1")
REWARD_MODEL = ("reward.reward_model.enable=true",)


def load(*overrides: str, extra: dict[str, dict[int, float]] | None = None) -> LoadedJob:
    return Verl.read(compose(DATA / "verl_sync.yaml", overrides), profile_of({**SECONDS, **(extra or {})}))


def groupings(loaded: LoadedJob) -> list[set[frozenset[str]]]:
    assert loaded.rules is not None
    return [{group.components for group in grouping} for grouping in loaded.rules.groupings]


def test_only_measured_components_are_in_the_workflow_in_verls_order() -> None:
    workflow = load(extra={"values": {16: 5.0}, "update_critic": {16: 12.0}}).job.workflow
    assert workflow.names == ("rollout", "old_log_prob", "ref", "values", "update_critic", "update_actor")
    assert workflow.component("ref").after == ("rollout",)
    assert workflow.component("update_actor").after == ("old_log_prob", "ref", "values")
    assert workflow.weight_sync is not None
    assert (workflow.weight_sync.source, workflow.weight_sync.target) == ("update_actor", "rollout")
    assert workflow.staleness == 0
    assert workflow.batches == 1024


def test_in_sync_mode_everything_shares_one_pool_of_whole_nodes() -> None:
    loaded = load()
    assert groupings(loaded) == [{frozenset(SECONDS)}]
    assert loaded.rules is not None
    assert loaded.rules.even_nodes
    assert loaded.rules.groupings[0][0].sizes == (2, 4, 8, 16)  # rollout by 2, and the batch divides by all GPUs
    assert [mode.name for mode in loaded.modes] == ["colocate_async", "separate_async"]
    settings = loaded.settings(plan_of({f"rollout {TRAINING}": range(8)}, total=16))
    assert settings.values == {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
    assert settings.block == "trainer:\n  nnodes: 1\n  n_gpus_per_node: 8\n"


def test_a_rollout_apart_from_a_sync_config_is_refused_because_it_would_change_the_algorithm() -> None:
    with pytest.raises(InputError, match="verl in sync mode cannot run this plan"):
        load().settings(plan_of({"rollout": range(8), TRAINING: range(8, 16)}, total=16))


def test_in_separate_mode_the_rollout_has_a_pool_and_streams_with_stale_weights() -> None:
    loaded = load(*SEPARATE)
    assert loaded.job.cluster.gpus == 24
    assert groupings(loaded) == [{frozenset(["rollout"]), frozenset(TRAINING.split())}]
    assert loaded.job.workflow.staleness == 1
    assert loaded.job.workflow.component("update_actor").granularity == 256
    settings = loaded.settings(plan_of({TRAINING: range(8), "rollout": range(8, 24)}, total=24))
    assert settings.values == {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 8,
        "actor_rollout_ref.rollout.nnodes": 2,
        "actor_rollout_ref.rollout.n_gpus_per_node": 8,
    }


def test_one_step_off_and_fully_async_use_the_rollout_section() -> None:
    pool = ("+rollout.nnodes=1", "+rollout.n_gpus_per_node=8")
    one_step = load(*pool)
    assert (one_step.job.workflow.staleness, one_step.job.workflow.component("update_actor").granularity) == (1, None)
    fully = load(*pool, "+async_training.staleness_threshold=0.5", "+async_training.require_batches=2")
    assert (fully.job.workflow.staleness, fully.job.workflow.component("update_actor").granularity) == (1, 512)
    values = fully.settings(plan_of({TRAINING: range(16), "rollout": range(16, 24)}, total=24)).values
    assert values["rollout.nnodes"] == 1
    assert values["trainer.nnodes"] == 2


def test_a_reward_without_a_model_runs_on_cpus() -> None:
    assert load(extra={"reward": {16: 3.0}}).job.workflow.component("reward").cpu_seconds == 3.0


def test_a_reward_model_may_share_or_have_its_own_pool() -> None:
    loaded = load(*REWARD_MODEL, extra={"reward": {16: 8.0}})
    everything = frozenset([*SECONDS, "reward"])
    assert groupings(loaded) == [{everything}, {frozenset(SECONDS), frozenset(["reward"])}]
    apart = loaded.settings(plan_of({f"rollout {TRAINING}": range(8), "reward": range(8, 12)}, total=16)).values
    assert apart["reward.reward_model.enable_resource_pool"] is True
    assert (apart["reward.reward_model.nnodes"], apart["reward.reward_model.n_gpus_per_node"]) == (1, 4)
    shared = loaded.settings(plan_of({f"rollout reward {TRAINING}": range(16)}, total=16)).values
    assert shared["reward.reward_model.enable_resource_pool"] is False


def test_beside_a_separate_rollout_a_reward_model_must_be_apart() -> None:
    pool = ("reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1")
    loaded = load(*SEPARATE, *REWARD_MODEL, *pool, extra={"reward": {8: 8.0}})
    assert groupings(loaded) == [{frozenset(["rollout"]), frozenset(TRAINING.split()), frozenset(["reward"])}]


def test_a_teacher_always_has_its_own_pool() -> None:
    loaded = load("distillation.nnodes=1", extra={"teacher": {8: 8.0}})
    assert groupings(loaded) == [{frozenset(SECONDS), frozenset(["teacher"])}]
    values = loaded.settings(plan_of({f"rollout {TRAINING}": range(16), "teacher": range(16, 24)}, total=24)).values
    assert (values["distillation.nnodes"], values["distillation.n_gpus_per_node"]) == (1, 8)


def test_megatron_sizes_follow_its_parallel_sizes() -> None:
    loaded = load(
        "actor_rollout_ref.actor.strategy=megatron", "+actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"
    )
    assert loaded.job.workflow.component("update_actor").variants[0].multiple_of == 4


def test_the_nodes_can_be_stated_where_the_pools_do_not_say() -> None:
    loaded = load(*SEPARATE, "++trimtab.nodes=3", "++trimtab.gpus_per_node=8")
    assert [node.gpus for node in loaded.job.cluster.nodes] == [8, 8, 8]
    with pytest.raises(InputError, match="take GPUs 0-23"):
        load(*SEPARATE, "++trimtab.nodes=1", "++trimtab.gpus_per_node=8")


def test_the_current_pools_follow_one_another() -> None:
    current = load(*SEPARATE).current
    assert current is not None
    assert current.ranks["update_actor"] == tuple(range(16))
    assert current.ranks["rollout"] == tuple(range(16, 24))


def test_a_pool_that_lies_unevenly_on_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="same number on each"):
        load().settings(plan_of({f"rollout {TRAINING}": range(6, 14)}, total=16))


def test_without_a_profile_the_error_says_how_to_make_one() -> None:
    with pytest.raises(InputError, match="has no times") as caught:
        Verl.read(compose(DATA / "verl_sync.yaml"), None)
    assert "trimtab profile logs" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("seconds", "what"),
    [
        ({"rollout": {8: 1.0}}, "no update_actor"),
        ({"update_actor": {8: 1.0}, "rollouts": {8: 1.0}}, "did you mean rollouts"),
    ],
)
def test_a_profile_without_what_verl_needs_is_refused(seconds: dict[str, dict[int, float]], what: str) -> None:
    with pytest.raises(InputError, match=what):
        Verl.read(compose(DATA / "verl_sync.yaml"), profile_of(seconds))


def test_waits_are_refused() -> None:
    with pytest.raises(InputError, match="a wait, not a cost"):
        Verl.read(compose(DATA / "verl_sync.yaml"), profile_of(SECONDS, waits=["rollout"]))


def test_a_batch_that_no_pool_divides_is_infeasible_and_says_what() -> None:
    with pytest.raises(InfeasibleError, match="no number of GPUs suits"):
        load(
            "data.train_batch_size=3",
            "actor_rollout_ref.rollout.n=1",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
        )


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(InputError, match="no trainer mode"):
        load("trainer.v1.trainer_mode=magic")


ONE_STEP_OFF = (
    "+rollout.nnodes=2",
    "+rollout.n_gpus_per_node=2",
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=6",
    "data.train_batch_size=1152",
)
ON_TWO_NODES = ("++trimtab.nodes=2", "++trimtab.gpus_per_node=8")
SIX_AND_TWO = {"rollout": {4: 90.0, 8: 80.0}, "update_actor": {6: 190.0, 8: 180.0, 12: 100.0}}


@pytest.mark.parametrize("nodes", [ON_TWO_NODES, ()])
def test_pools_that_share_nodes_six_and_two_are_planned_as_they_stand(nodes: tuple[str, ...]) -> None:
    loaded = Verl.read(compose(DATA / "verl_sync.yaml", (*ONE_STEP_OFF, *nodes)), profile_of(SIX_AND_TWO))
    answer = plan_placement(loaded.job, loaded.rules, current=loaded.current)
    assert answer.best.iteration_seconds == pytest.approx(100.0)
    assert loaded.settings(answer.best).values == {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 6,
        "rollout.nnodes": 2,
        "rollout.n_gpus_per_node": 2,
    }
    mine = next(a for a in answer.alternatives if a.label == "your placement")
    assert mine.plan is not None
    assert mine.plan.iteration_seconds == pytest.approx(100.0)


def test_pools_of_the_file_lie_on_the_stated_nodes_as_verl_lays_them() -> None:
    current = Verl.read(
        compose(DATA / "verl_sync.yaml", (*ONE_STEP_OFF, *ON_TWO_NODES)), profile_of(SIX_AND_TWO)
    ).current
    assert current is not None
    assert current.ranks["update_actor"] == (*range(6), *range(8, 14))
    assert current.ranks["rollout"] == (6, 7, 14, 15)


FULLY_ASYNC = """\
hydra:
  searchpath: [{searchpath}]
defaults: [ppo_trainer, _self_]
async_training: {{staleness_threshold: 0.1, trigger_parameter_sync_step: 4, require_batches: 4}}
rollout: {{nnodes: 1, n_gpus_per_node: 4, n: 4, total_rollout_steps: 51200}}
data: {{gen_batch_size: 1}}
"""
PARENT = """\
actor_rollout_ref:
  actor: {strategy: fsdp2, ppo_mini_batch_size: 256, use_dynamic_bsz: true}
  rollout: {n: 1, tensor_model_parallel_size: 1}
data: {train_batch_size: 1024}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""
LAUNCH = (
    "data.train_batch_size=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=16",
    "trainer.n_gpus_per_node=4",
)


def checkout(folder: Path, searchpath: str) -> Path:
    """A checkout of verl, and a config deep inside it that names its parents as the real ones do."""
    parents = folder / "verl" / "trainer" / "config"
    parents.mkdir(parents=True)
    (parents / "ppo_trainer.yaml").write_text(PARENT)
    config = folder / "verl" / "experimental" / "fully_async_policy" / "config" / "fully_async_ppo_trainer.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(FULLY_ASYNC.format(searchpath=searchpath))
    return config


@pytest.mark.parametrize("searchpath", ["file://verl/trainer/config", "pkg://verl.trainer.config"])
def test_a_fully_asynchronous_launch_without_a_batch_is_planned(tmp_path: Path, searchpath: str) -> None:
    config = checkout(tmp_path, searchpath)
    loaded = load_file(config, LAUNCH, profile_of({"rollout": {4: 60.0, 8: 35.0}, "update_actor": {2: 50.0, 4: 30.0}}))
    workflow = loaded.job.workflow
    assert workflow.batches == 32 * 4 * 4
    assert workflow.component("update_actor").granularity == 32 * 4
    assert workflow.staleness == 1
    assert any("512 prompts" in said for said in loaded.assumptions)
    plan = plan_placement(loaded.job, loaded.rules, current=loaded.current).best
    values = loaded.settings(plan).values
    assert values["rollout.n_gpus_per_node"] + values["trainer.n_gpus_per_node"] <= 8
    again = load_file(config, [*LAUNCH, *overrides(loaded.settings(plan))], profile_of(SIX_AND_TWO))
    assert again.job.workflow.batches == 512


def test_a_batch_of_nothing_is_refused_in_every_other_mode() -> None:
    with pytest.raises(InputError, match="above 0"):
        load("data.train_batch_size=0")


def test_parents_that_are_nowhere_are_asked_for_by_their_folder(tmp_path: Path) -> None:
    config = tmp_path / "fully_async.yaml"
    config.write_text(FULLY_ASYNC.format(searchpath="pkg://no_such_package.trainer.config"))
    with pytest.raises(InputError, match="ppo_trainer is not there") as caught:
        compose(config)
    assert "hydra.searchpath=[file:///" in str(caught.value.hint)
    parents = tmp_path / "parents"
    parents.mkdir()
    (parents / "ppo_trainer.yaml").write_text(PARENT)
    assert compose(config, [f"hydra.searchpath=[file://{parents}]"]).reader.get("data.train_batch_size") == 1024


def apart(loaded: LoadedJob) -> tuple[str, ...]:
    """The overrides of the mode with GPUs of its own for the rollout."""
    return next(mode.overrides for mode in loaded.modes if mode.name in ("separate_async", "one_step_off"))


NO_V1 = (
    "~trainer.v1",
    "~trainer.use_v1",
    "~actor_rollout_ref.rollout.nnodes",
    "~actor_rollout_ref.rollout.n_gpus_per_node",
)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("version", [(), NO_V1])
def test_the_mode_with_the_rollout_apart_starts_and_so_does_what_it_prints(
    nodes: int, version: tuple[str, ...]
) -> None:
    given = (*version, f"trainer.nnodes={nodes}", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    words = apart(load(*given))
    job = load(*given, *words)
    assert [node.gpus for node in job.job.cluster.nodes] == [8] * nodes
    assert groupings(job) == [{frozenset(["rollout"]), frozenset(TRAINING.split())}]
    plan = plan_placement(job.job, job.rules, current=job.current).best
    settings = job.settings(plan)
    assert settings.advice == ()  # nothing that verl would refuse is left to the reader
    again = load(*given, *words, *overrides(settings))
    assert again.current is not None
    assert {name: len(ranks) for name, ranks in again.current.ranks.items()} == {
        name: len(group.gpus) for group in plan.groups for name in group.components
    }


def test_a_separate_mode_without_a_pool_for_the_rollout_says_which_keys_give_it_one() -> None:
    with pytest.raises(InputError) as caught:
        load("trainer.v1.trainer_mode=separate_async")
    assert "++actor_rollout_ref.rollout.nnodes=N" in str(caught.value.hint)


def test_estimates_read_whether_idle_trainers_decode() -> None:
    lends = "++trainer.v1.separate_async.hybrid_rollout.enable_switch=true"
    assert run_inputs.read(DATA / "verl_sync.yaml", [*SEPARATE, lends])["lend"] is True
    assert "lend" not in run_inputs.read(DATA / "verl_sync.yaml", [lends])


def test_what_verl_refuses_in_separate_mode_is_said_with_the_plan() -> None:
    loaded = load(*SEPARATE, "data.train_batch_size=512", "actor_rollout_ref.rollout.checkpoint_engine.backend=naive")
    advice = " ".join(loaded.settings(plan_of({TRAINING: range(16), "rollout": range(16, 24)}, total=24)).advice)
    assert "nccl" in advice
    assert "data.train_batch_size (512) must be ppo_mini_batch_size (256) x" in advice


def test_the_default_mode_on_all_gpus_is_never_said_to_be_what_verl_cannot_run() -> None:
    loaded = load("trainer.nnodes=3")  # 24 GPUs do not divide the batch, which only some of the components mind
    answer = plan_placement(loaded.job, loaded.rules, current=loaded.current)
    assert answer.unrestricted is None
    assert answer.framework == "verl in sync mode"
