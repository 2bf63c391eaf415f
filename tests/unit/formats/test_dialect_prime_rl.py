"""prime-rl's TOML files and a profile become jobs; plans become flags that its start-up checks take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dialect_plans import plan_of, profile_of
from trimtab.core.errors import InputError
from trimtab.formats.frameworks import run_inputs
from trimtab.formats.frameworks.prime_rl import PrimeRl
from trimtab.formats.launch.launch import Launch
from trimtab.formats.load import load as load_any
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs.reader import read as read_log
from trimtab.formats.write_back import overrides, shell_words

SECONDS = {"rollout": {8: 60.0}, "trainer": {8: 40.0}}
ONE = """\
seq_len = 4096
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[model]
name = "Qwen/Qwen3-4B"
[orchestrator]
batch_size = 512
group_size = 16
[inference.vllm]
tensor_parallel_size = 2
data_parallel_size = 3
[trainer.model.lora]
rank = 8
"""
MANY = """\
[deployment]
type = "multi_node"
num_train_nodes = 4
num_infer_replicas = 2
[slurm]
job_name = "x"
[inference.deployment]
type = "disaggregated"
prefill_nodes_per_replica = 1
num_decode_replicas = 2
[orchestrator]
batch_size = 256
max_off_policy_steps = 16
[trainer.model]
cp = 2
"""
LISTED = """\
inference_gpu_ids = [0, 1, 2, 3, 4, 5]
trainer_gpu_ids = [6, 7]
max_async_level = 2
[orchestrator]
rollouts_per_example = 16
[inference.parallel]
dp = 6
[trainer.model.ac]
"""


def load(folder: Path, text: str, *more: str) -> LoadedJob:
    path = folder / "rl.toml"
    path.write_text(text)
    return load_any(path, more, profile_of(SECONDS))


def gpus(loaded: LoadedJob) -> dict[str, int]:
    assert loaded.current is not None
    return {name: len(ranks) for name, ranks in loaded.current.ranks.items()}


def test_gpus_of_a_node_whole_nodes_and_lists_of_gpus_are_read(tmp_path: Path) -> None:
    one, many, listed = (load(tmp_path, text) for text in (ONE, MANY, LISTED))
    assert one.file_format == "prime_rl"
    assert gpus(one) == {"rollout": 6, "trainer": 2}
    assert gpus(many) == {"rollout": 2 * 3 * 8, "trainer": 32}
    assert gpus(listed) == {"rollout": 6, "trainer": 2}
    assert [j.job.workflow.batches for j in (one, many, listed)] == [32, 256, 8]
    assert [j.job.workflow.staleness for j in (one, many, listed)] == [1, 1, 2]


def test_nothing_shares_gpus_and_sizes_are_those_of_engines(tmp_path: Path) -> None:
    for text, engines, trainer in ((ONE, [2, 4, 6, 8], list(range(1, 9))), (MANY, [24, 48, 72], range(8, 81, 8))):
        rules = load(tmp_path, text).rules
        assert rules is not None
        (grouping,) = rules.groupings
        assert {tuple(pool.components): list(pool.sizes or ()) for pool in grouping} == {
            ("rollout",): engines,
            ("trainer",): list(trainer),
        }


@pytest.mark.parametrize(
    ("text", "plan", "words"),
    [
        (
            ONE,
            {"rollout": 4, "trainer": 4},
            "--deployment.num-train-gpus 4 --deployment.num-infer-gpus 4 --inference.vllm.data-parallel-size 2",
        ),
        (
            MANY,
            {"rollout": 24, "trainer": 56},
            "--deployment.num-train-nodes 7 --deployment.num-infer-replicas 1",
        ),
        (
            LISTED,
            {"rollout": 4, "trainer": 4},
            "--inference-gpu-ids '[0, 1, 2, 3]' --trainer-gpu-ids '[4, 5, 6, 7]' --inference.parallel.dp 4",
        ),
    ],
)
def test_plans_become_flags_and_are_read_back(text: str, plan: dict[str, int], words: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, text)
    total = sum(plan.values())
    settings = loaded.settings(plan_of({"trainer": range(plan["trainer"]), "rollout": range(plan["trainer"], total)}))
    assert " ".join(shell_words(settings)) == words
    assert gpus(load_any(loaded.path, overrides(settings), profile_of(SECONDS))) == plan
    assert not any(loaded.literal(key) for key in settings.values)  # TOML files are not edited


def test_nodes_of_plain_engines_are_counted_and_those_of_replicas_multiplied(tmp_path: Path) -> None:
    text = MANY.replace('[inference.deployment]\ntype = "disaggregated"\n', "[inference.vllm]\n")
    loaded = load(tmp_path, text.replace("num_infer_replicas = 2", "num_infer_nodes = 4"))
    settings = loaded.settings(plan_of({"trainer": range(40), "rollout": range(40, 64)}, 64))
    assert settings.values == {"deployment.num_train_nodes": 5, "deployment.num_infer_nodes": 3}


def test_earlier_releases_count_nodes_under_slurm(tmp_path: Path) -> None:
    text = "[slurm]\nnum_train_nodes = 2\nnum_infer_nodes = 1\n[orchestrator]\n[inference]\n"
    assert gpus(load(tmp_path, text)) == {"rollout": 8, "trainer": 16}


def test_without_old_answers_generation_waits(tmp_path: Path) -> None:
    loaded = load(tmp_path, ONE, "++orchestrator.max_off_policy_steps=0")
    assert loaded.job.workflow.staleness == 0
    assert any("synchronous" in said for said in loaded.assumptions)


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (ONE, ["deployment.num_train_gpus=4"], "more than the node's 8"),
        (ONE, ["deployment.num_train_gpus=many"], "whole number"),
        (MANY, ["~deployment.num_train_nodes"], "deployment.num_train_nodes is missing"),
        (LISTED, ["trainer_gpu_ids=[a]"], "a list of GPUs is expected"),
        (ONE, ["~inference"], "started elsewhere"),
        (ONE, ["++trainer.data.fake={}"], "made-up data"),
    ],
)
def test_what_cannot_be_planned_is_refused(text: str, more: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(tmp_path, text, *more)


def test_toml_that_is_none_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not valid TOML"):
        load(tmp_path, "[orchestrator\n")


def test_a_launch_merges_files_and_flags_from_left_to_right(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(ONE)
    (tmp_path / "more.toml").write_text("max_steps = 5\n[deployment]\nnum_train_gpus = 1\n")
    (tmp_path / "train.toml").write_text("[model]\nseq_len = 2048\n")
    words = "@ rl.toml @ more.toml --trainer @ train.toml --deployment.num-infer-gpus 4 --ckpt --no-clean --x [1,2] 3"
    for program in (("uv", "rl"), ("python3", "-m", "prime_rl.entrypoints.rl")):
        found = PrimeRl.launched(Launch(program, tuple(words.split()), folder=tmp_path))
        assert found is not None
        assert isinstance(found.config, dict)
        assert found.config["deployment"] == {"num_train_gpus": 1, "num_infer_gpus": 4}
        assert found.config["trainer"]["model"] == {"lora": {"rank": 8}, "seq_len": 2048}
        assert (found.config["ckpt"], found.config["clean"], found.config["max_steps"]) == (True, False, 5)
    assert PrimeRl.launched(Launch(("uv", "sft"), ("@", "sft.toml"), folder=tmp_path)) is None
    with pytest.raises(InputError, match=r"there is no config gone\.toml"):
        PrimeRl.launched(Launch(("rl",), ("@", "gone.toml"), folder=tmp_path))


def test_estimates_get_the_run_from_the_config(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(ONE)
    assert run_inputs.read(path) == {
        "framework": "prime-rl",
        "model": "Qwen/Qwen3-4B",
        "gpus": 8,
        "rollout_gpus": 6,
        "mode": "async",
        "staleness": 8,
        "partial": True,
        "algorithm": "direct",
        "samples": 512,
        "train_batch": 512,
        "max_tokens": 4096,
        "rollout": {"tp": 2, "backend": "vllm"},
        "train": {"lora": 8, "backend": "fsdp"},
    }


def test_costs_come_from_both_sides_and_waits_are_taken_off(tmp_path: Path) -> None:
    rows = []
    for step in range(1, 7):
        rows.append({"step": step, "time": 1.0, "time/step": 61.0, "time/wait_for_policy": 20.0, "time/pack": 1.0})
        rows.append(
            {
                "step": step,
                "time": 2.0,
                "time/step": 61.0,
                "time/wait_for_batch": 18.0,
                "time/load_data": 1.0,
                "time/forward_backward": 39.0,
                "time/broadcast_weights": 2.0,
                "time/save_ckpt": 0,
            }
        )
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl.toml").write_text(ONE)
    profile = read_log([log], config=tmp_path / "rl.toml", warmup=1)
    found = {c.name: c.seconds for c in profile.components}
    assert found["rollout"] == ((6, 40.0),)
    assert found["trainer"] == ((2, 40.0),)
    assert found["weight_sync"] == ((6, 2.0),)
