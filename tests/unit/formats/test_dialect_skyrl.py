"""SkyRL's configs and a profile become jobs; plans become the words that its start-up checks take."""

from __future__ import annotations

from pathlib import Path

import pytest

from dialect_plans import composed, plan_of, profile_of
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.frameworks import run_inputs
from trimtab.formats.frameworks.skyrl import SkyRl
from trimtab.formats.launch.launch import Launch
from trimtab.formats.load import load as load_any
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs.reader import read as read_log
from trimtab.formats.write_back import overrides, shell_words

SECONDS = {"rollout": {8: 60.0}, "inference": {8: 10.0}, "policy": {8: 40.0}}
SHARED = """\
trainer:
  placement: {colocate_all: true, policy_num_gpus_per_node: 8, ref_num_gpus_per_node: 8}
  train_batch_size: 128
  policy_mini_batch_size: 64
  micro_train_batch_size_per_gpu: 4
generator:
  inference_engine: {num_engines: 4, tensor_parallel_size: 2}
  n_samples_per_prompt: 4
"""
APART = """\
trainer:
  placement: {colocate_all: false, policy_num_gpus_per_node: 2, ref_num_gpus_per_node: 2}
  fully_async: {enabled: true, max_staleness_steps: 3}
  train_batch_size: 64
  policy_mini_batch_size: 64
generator:
  inference_engine: {num_engines: 6}
"""
FIRST = """\
trainer: {placement: {colocate_all: true}, train_batch_size: 64, policy_mini_batch_size: 64}
generator: {num_inference_engines: 2, inference_engine_tensor_parallel_size: 2, n_samples_per_prompt: 5}
"""


def load(folder: Path, text: str, *more: str) -> LoadedJob:
    return SkyRl.read(composed(folder, text, *more), profile_of(SECONDS))


def sizes(loaded: LoadedJob) -> list[dict[str, list[int]]]:
    assert loaded.rules is not None
    return [
        {" ".join(sorted(pool.components)): list(pool.sizes or ()) for pool in grouping}
        for grouping in loaded.rules.groupings
    ]


def test_engines_share_the_policys_gpus_or_follow_them(tmp_path: Path) -> None:
    shared, apart = load(tmp_path, SHARED), load(tmp_path, APART)
    assert shared.job.cluster.gpus == apart.job.cluster.gpus == 8
    assert (shared.job.workflow.batches, shared.job.workflow.staleness) == (128, 0)
    assert (apart.job.workflow.batches, apart.job.workflow.staleness) == (64, 3)
    assert shared.current is not None
    assert shared.current.ranks == dict.fromkeys(SECONDS, tuple(range(8)))
    assert apart.current is not None
    assert apart.current.ranks == {"rollout": (2, 3, 4, 5, 6, 7), "inference": (0, 1), "policy": (0, 1)}


def test_sizes_pass_the_checks_of_batch_sizes(tmp_path: Path) -> None:
    assert sizes(load(tmp_path, SHARED)) == [
        {"inference policy rollout": [2, 4, 8]},
        {"rollout": [2, 4, 6, 8], "inference policy": [1, 2, 4, 8]},
    ]
    megatron = [
        "++trainer.strategy=megatron",
        "++trainer.policy.megatron_config={tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}",
    ]
    assert sizes(load(tmp_path, SHARED, *megatron))[0] == {"inference policy rollout": [4, 8]}
    with pytest.raises(InfeasibleError, match="no number of GPUs suits"):
        load(tmp_path, SHARED, "trainer.micro_train_batch_size_per_gpu=512")


def test_the_first_package_has_other_names_and_defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path, FIRST)
    assert loaded.job.cluster.gpus == 4
    settings = loaded.settings(plan_of({"rollout": range(2), "inference policy": range(2, 4)}, 4))
    assert settings.values["generator.num_inference_engines"] == 1
    assert run_inputs.read(loaded.path)["rollout"] == {"tp": 2}


def test_plans_become_words_without_a_plus(tmp_path: Path) -> None:
    loaded = load(tmp_path, SHARED)
    settings = loaded.settings(plan_of({"inference policy": range(4), "rollout": range(4, 8)}))
    assert shell_words(settings) == [
        "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_nodes=1",
        "trainer.placement.policy_num_gpus_per_node=4",
        "trainer.placement.ref_num_nodes=1",
        "trainer.placement.ref_num_gpus_per_node=4",
        "generator.inference_engine.num_engines=2",
    ]
    again = load_any(loaded.path, overrides(settings), profile_of(SECONDS))
    assert again.file_format == "skyrl"
    assert again.current is not None
    assert {n: len(gpus) for n, gpus in again.current.ranks.items()} == {"rollout": 4, "inference": 4, "policy": 4}


def test_models_with_gpus_of_their_own_keep_them(tmp_path: Path) -> None:
    more = [
        "++trainer.placement.colocate_policy_ref=false",
        "++trainer.critic.model.path=x",
        "++trainer.placement.critic_num_gpus_per_node=2",
        "generator.inference_engine.num_engines=2",
    ]
    loaded = load(tmp_path, APART, *more)
    assert loaded.job.cluster.gpus == 4  # of 8
    assert any("critic on 2 GPUs of its own" in said for said in loaded.assumptions)
    assert any("ref on 2 GPUs of its own" in said for said in loaded.assumptions)
    # Together with the policy there is no way apart for a critic: its time would change.
    critic = ["++trainer.critic.model.path=x", "++trainer.placement.critic_num_gpus_per_node=8"]
    together = load(tmp_path, SHARED, *critic, "++trainer.critic_mini_batch_size=64")
    assert [sorted(grouping) for grouping in sizes(together)] == [["inference policy rollout"]]


def test_one_step_ahead_is_the_async_example(tmp_path: Path) -> None:
    loaded = load(tmp_path, APART, "trainer.fully_async.enabled=false", "++trimtab.script=main_async")
    assert loaded.job.workflow.staleness == 1
    assert len(sizes(loaded)) == 1


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (SHARED, ["generator.inference_engine.num_engines=3"], "the policy has 8 GPUs and the engines 6"),
        (SHARED, ["trainer.placement.ref_num_gpus_per_node=4"], "the ref has 4 GPUs and the policy 8"),
        (SHARED, ["++trainer.fully_async.enabled=true"], "needs generation on GPUs of its own"),
        (SHARED, ["generator.inference_engine.num_engines=none"], "whole number"),
    ],
)
def test_what_skyrl_cannot_start_is_refused(text: str, more: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(tmp_path, text, *more)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("++generator.inference_engine.external_proxy_url=http://x", "started elsewhere"),
        ("++generator.inference_engine.run_engines_locally=false", "started elsewhere"),
        ("++trainer.override_entrypoint=other.main", "a run of other.main"),
        ("++trainer.fully_async.simulate_training=true", "simulation"),
        ("++trimtab.script=main_generate", "generation without training"),
    ],
)
def test_runs_without_both_sides_are_no_rl_jobs(override: str, said: str, tmp_path: Path) -> None:
    path = composed(tmp_path, APART).path
    with pytest.raises(InputError, match=said):
        load_any(path, [override], profile_of(SECONDS))


def test_a_launch_is_read_with_its_words_and_its_module() -> None:
    words = ("trainer.placement.colocate_all=false", "+trainer.epochs=2", "generator.n_samples_per_prompt=5", "x")
    found = SkyRl.launched(Launch(("python3", "-m", "examples.train.async.main_async"), words))
    assert found is not None
    assert found.config == {
        "trainer": {"placement": {"colocate_all": False}, "epochs": 2},
        "generator": {"n_samples_per_prompt": 5},
        "trimtab": {"script": "main_async"},
    }
    first = SkyRl.launched(Launch(("python3", "-m", "skyrl_train.entrypoints.main_base"), ()))
    assert first is not None
    assert first.config == {"trimtab": {"script": "main_base", "package": "skyrl_train"}}
    for other in ("skyrl.train.entrypoints.serve", "skyrl.train.main_sft", "skyrl.tinker.api"):
        assert SkyRl.launched(Launch(("python3", "-m", other), words)) is None
    assert SkyRl.launched(Launch(("python3", "-m", "verl.trainer.main_ppo"), ("trainer.nnodes=1",))) is None


def test_estimates_get_the_run_from_the_config(tmp_path: Path) -> None:
    inputs = run_inputs.read(composed(tmp_path, SHARED).path, ["++trainer.policy.model.path=Qwen/Qwen3-4B"])
    assert (inputs["gpus"], inputs["samples"], inputs["train_batch"], inputs["max_tokens"]) == (8, 512, 256, 1536)
    ahead = run_inputs.read(composed(tmp_path, APART).path)
    assert (ahead["mode"], ahead["staleness"], ahead["gpus"], ahead["rollout_gpus"]) == ("async", 3, 8, 6)
    assert ahead["samples"] == 64 * 5


def test_costs_come_from_the_timers_of_a_step(tmp_path: Path) -> None:
    timers = {
        "generate": 60.5,
        "convert_to_training_input": 1.0,
        "fwd_logprobs_values_reward": 10.0,
        "compute_advantages_and_returns": 0.5,
        "policy_train": 38.0,
        "train_critic_and_policy": 38.5,
        "sync_weights": 3.0,
        "step": 115.0,
    }
    lines = [
        f"(skyrl_entrypoint pid=9) 2026-01-01 00:00:00.000 | m:f:1 - Finished: '{name}', time cost: {seconds:.2f}s"
        for _ in range(5)
        for name, seconds in timers.items()
    ]
    log = tmp_path / "run.log"
    log.write_text("\n".join(lines) + "\n")
    profile = read_log([log], config=composed(tmp_path, SHARED).path, warmup=1)
    found = {c.name: c.seconds for c in profile.components}
    assert found["rollout"] == ((8, 60.5),)
    assert found["inference"] == ((8, 10.0),)
    assert found["policy"] == ((8, 40.0),)
    assert found["weight_sync"] == ((8, 3.0),)
