"""slime's flags and a profile become jobs; plans become flags that its start-up checks take."""

from __future__ import annotations

from pathlib import Path

import pytest

from dialect_plans import composed, plan_of, profile_of
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.frameworks import run_inputs
from trimtab.formats.frameworks.slime import LOG, Slime
from trimtab.formats.launch.launch import Launch, unknown
from trimtab.formats.load import load as load_any
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs.reader import read as read_log
from trimtab.formats.write_back import overrides, shell_words

SECONDS = {"rollout": {8: 60.0}, "inference": {8: 10.0}, "actor": {8: 40.0}}
SHARED = """\
actor_num_nodes: 2
actor_num_gpus_per_node: 8
colocate: true
rollout_num_gpus_per_engine: 2
rollout_batch_size: 32
n_samples_per_prompt: 8
global_batch_size: 256
tensor_model_parallel_size: 4
"""
APART = """\
actor_num_nodes: 1
actor_num_gpus_per_node: 4
rollout_num_gpus: 4
rollout_batch_size: 16
num_steps_per_rollout: 2
n_samples_per_prompt: 4
trimtab: {script: train_async.py}
"""


def load(folder: Path, text: str, *more: str) -> LoadedJob:
    return Slime.read(composed(folder, text, *more), profile_of(SECONDS))


def sizes(loaded: LoadedJob) -> list[dict[str, list[int]]]:
    assert loaded.rules is not None
    return [
        {" ".join(sorted(pool.components)): list(pool.sizes or ()) for pool in grouping}
        for grouping in loaded.rules.groupings
    ]


def test_engines_share_the_actors_gpus_or_follow_them(tmp_path: Path) -> None:
    shared, apart = load(tmp_path, SHARED), load(tmp_path, APART)
    assert [node.gpus for node in shared.job.cluster.nodes] == [8, 8]
    assert (shared.job.workflow.batches, shared.job.workflow.staleness) == (32, 0)
    assert (apart.job.workflow.batches, apart.job.workflow.staleness) == (16, 1)
    assert shared.current is not None
    assert shared.current.ranks == dict.fromkeys(SECONDS, tuple(range(16)))
    assert apart.current is not None
    assert apart.current.ranks == {"rollout": (4, 5, 6, 7), "inference": (0, 1, 2, 3), "actor": (0, 1, 2, 3)}


def test_sizes_are_multiples_of_parallel_sizes_and_divide_the_batch(tmp_path: Path) -> None:
    assert sizes(load(tmp_path, SHARED)) == [
        {"actor inference rollout": [4, 8, 16]},  # 12 GPUs are one node and a half
        {"rollout": [2, 4, 6, 8, 10, 12, 14, 16], "actor inference": [4, 8, 16]},
    ]
    # 16 x 4 / 2 = 32 answers of an optimiser step.
    assert sizes(load(tmp_path, APART)) == [{"rollout": list(range(1, 9)), "actor inference": [1, 2, 4, 8]}]


def test_experts_are_divided_in_a_way_of_their_own(tmp_path: Path) -> None:
    experts = ["++expert_model_parallel_size=8", "++expert_tensor_parallel_size=1", "++pipeline_model_parallel_size=2"]
    assert sizes(load(tmp_path, SHARED, *experts))[0] == {"actor inference rollout": [16]}
    with pytest.raises(InputError, match="8 GPUs of the actor are no multiple of its parallel sizes, 16"):
        load(tmp_path, SHARED, *experts, "actor_num_nodes=1")


def test_plans_become_flags(tmp_path: Path) -> None:
    loaded = load(tmp_path, SHARED)
    apart = loaded.settings(plan_of({"inference actor": range(8), "rollout": range(8, 16)}, 16))
    assert shell_words(apart) == ["--actor-num-nodes=1", "--actor-num-gpus-per-node=8", "--rollout-num-gpus=8"]
    assert apart.advice == ("leave out --colocate",)
    assert "~colocate" in overrides(apart)
    small = loaded.settings(plan_of({"rollout inference actor": range(4)}, 16))
    assert shell_words(small)[-2:] == ["--colocate", "--num-gpus-per-node=4"]


@pytest.mark.parametrize("text", [SHARED, APART])
def test_a_plan_is_read_back_as_it_was_written(text: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, text)
    settings = loaded.settings(plan_of({"inference actor": range(4), "rollout": range(4, 8)}))
    again = load_any(loaded.path, overrides(settings), profile_of(SECONDS))
    assert again.file_format == "slime"
    assert again.current is not None
    assert {n: len(gpus) for n, gpus in again.current.ranks.items()} == {"rollout": 4, "inference": 4, "actor": 4}


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (APART, ["++colocate=true"], "does not share GPUs"),
        (APART, ["~rollout_num_gpus"], "rollout_num_gpus is missing"),
        (APART, ["rollout_num_gpus=0"], "at least one GPU to generate on"),
        (APART, ["++trimtab.gpus_per_node=4"], "the run has 8 GPUs, the cluster 4"),
        (SHARED, ["~rollout_batch_size"], "rollout_batch_size is missing"),
    ],
)
def test_what_slime_cannot_start_is_refused(text: str, more: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(tmp_path, text, *more)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("++loss_type=sft_loss", "supervised fine-tuning"),
        ("++rollout_external_engine_addrs=[a]", "started elsewhere"),
        ("++debug_train_only=true", "saved rollouts"),
        ("++debug_rollout_only=true", "generation without training"),
    ],
)
def test_runs_without_both_sides_are_no_rl_jobs(override: str, said: str, tmp_path: Path) -> None:
    path = composed(tmp_path, SHARED).path
    with pytest.raises(InputError, match=said):
        load_any(path, [override], profile_of(SECONDS))


def test_a_batch_that_no_size_divides_is_infeasible(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="no number of GPUs suits"):
        load(tmp_path, SHARED, "global_batch_size=7", "++micro_batch_size=2")


def test_deltas_and_groups_of_engines_leave_the_placement_as_it_is(tmp_path: Path) -> None:
    delta = load(tmp_path, APART, "trimtab.script=train.py", "++update_weight_mode=delta")
    assert [sorted(grouping) for grouping in sizes(delta)] == [["actor inference", "rollout"]]
    groups = load(tmp_path, APART, "++trimtab.engine_groups=2")
    assert sizes(groups)[0]["rollout"] == [4]


def test_engines_behind_the_actor_stay_inside_their_nodes(tmp_path: Path) -> None:
    loaded = load(tmp_path, APART, "rollout_num_gpus=12", "++rollout_num_gpus_per_engine=4")
    assert sizes(loaded)[0]["actor inference"] == [4, 8, 16]


def launch(*words: str, program: str = "train.py") -> Launch:
    return Launch(("python3", program), words)


def test_a_launch_is_read_with_its_flags_and_its_script() -> None:
    words = ["--actor-num-nodes", "2", "--colocate", "--rollout-batch-size", "32", "--eval-prompt-data", "aime", "/a"]
    found = Slime.launched(launch(*words, program="/root/slime/train_async.py"))
    assert found is not None
    assert found.config == {
        "actor_num_nodes": 2,
        "colocate": True,
        "rollout_batch_size": 32,
        "eval_prompt_data": ["aime", "/a"],
        "trimtab": {"script": "train_async.py"},
    }
    assert Slime.launched(launch("--lr", "1e-6")) is None
    assert Slime.launched(launch(*words, program="main.py")) is None


def test_an_unknown_word_stays_in_the_config() -> None:
    marked = unknown("nvidia-smi -L")
    found = Slime.launched(launch("--actor-num-gpus-per-node", marked))
    assert found is not None
    assert isinstance(found.config, dict)
    assert found.config["actor_num_gpus_per_node"] == marked


def test_files_that_flags_name_are_read_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("rollout_batch_size: 64\n")
    (tmp_path / "engines.yaml").write_text("sglang: [{name: a, server_groups: [{num_gpus: 4}, {num_gpus: 4}]}]\n")
    words = ("--rollout-batch-size", "32", "--custom-config-path", "own.yaml", "--sglang-config", "engines.yaml")
    found = Slime.launched(Launch(("python3", "train.py"), words, folder=tmp_path))
    assert found is not None
    assert isinstance(found.config, dict)
    assert found.config["rollout_batch_size"] == 64
    assert found.config["trimtab"] == {"engine_groups": 2, "script": "train.py"}
    missing = Slime.launched(Launch(("python3", "train.py"), words))
    assert missing is not None
    assert missing.assumptions[0].startswith("own.yaml, which is not here")


def test_estimates_get_the_run_from_the_flags(tmp_path: Path) -> None:
    more = "hf_checkpoint: /root/Qwen3-4B\nrollout_max_response_len: 8192\nsglang_mem_fraction_static: 0.7\n"
    inputs = run_inputs.read(composed(tmp_path, SHARED + more).path)
    assert (inputs["model"], inputs["gpus"], inputs["algorithm"]) == ("Qwen3-4B", 16, "gspo")
    assert (inputs["samples"], inputs["train_batch"]) == (256, 256)
    assert inputs["max_tokens"] == 8192
    assert inputs["train"] == {"tp": 4, "backend": "megatron"}
    assert inputs["rollout"] == {"tp": 2, "memory": 0.7, "backend": "sglang"}
    ahead = run_inputs.read(composed(tmp_path, APART).path)
    assert (ahead["mode"], ahead["gpus"], ahead["rollout_gpus"], ahead["train_batch"]) == ("async", 8, 4, 32)
    seldom = run_inputs.read(composed(tmp_path, APART + "update_weights_interval: 2\n").path)
    assert (seldom["sync_every"], "sync_every" in ahead) == (2, False)


def test_costs_come_from_two_lines_for_each_step(tmp_path: Path) -> None:
    steps = []
    for step in range(6):
        steps += [
            f"(RolloutManager pid=7) [2026-01-01 00:00:00] rollout_metrics.py:268 - perf {step}: "
            f"{{'perf/rollout_time': {60 + step / 10}, 'perf/tokens_per_gpu_per_sec': 900.5}}",
            f"[2026-01-01 00:00:00] train_metric_utils.py:401 - perf {step}: {{'perf/train_wait_time': 61.0, "
            "'perf/data_preprocess_time': 1.0, 'perf/log_probs_time': 8.0, 'perf/actor_train_time': 39.0, "
            "'perf/train_time': 48.0, 'perf/update_weights_time': 2.5, 'perf/step_time': 109.0}",
        ]
    log = tmp_path / "run.log"
    log.write_text("\n".join(steps) + "\n")
    profile = read_log([log], config=composed(tmp_path, SHARED).path, warmup=1)
    found = {c.name: c.seconds for c in profile.components}
    assert found["actor"] == ((16, 40.0),)
    assert found["inference"] == ((16, 8.0),)
    assert found["weight_sync"] == ((16, 2.5),)
    assert found["rollout"][0][1] == pytest.approx(60.3)
    assert LOG.waiting(frozenset({"rollout/fully_async"})).keys() == {"rollout"}
