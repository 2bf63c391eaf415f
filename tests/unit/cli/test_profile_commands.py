from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trimtab.cli.profile import app
from trimtab.core.errors import InputError
from trimtab.formats import profile_file, yaml_text

ROOT = Path(__file__).parents[3]
VERL = str(ROOT / "examples/logs/verl.jsonl")
MODEL = str(ROOT / "examples/models/qwen2.5-1.5b")


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_log_becomes_a_table_and_a_file(tmp_path: Path) -> None:
    target = tmp_path / "profile.yaml"
    text = run("logs", VERL, "--gpus", "16", "--output", str(target))
    for word in ("rollout", "update_actor", "weight_sync", "warm-up", "cost per token", str(target)):
        assert word in text
    assert profile_file.read(target).source == "verl"


def test_json_and_yaml_hold_the_file_s_own_form() -> None:
    as_json = json.loads(run("logs", VERL, "--gpus", "16", "--format", "json"))
    as_yaml = yaml_text.parse(run("logs", VERL, "--gpus", "16", "--format", "yaml"), "answer")
    assert as_json["profile"]["components"]["rollout"]["seconds"] == {"16": pytest.approx(62.09, abs=0.01)}
    assert profile_file.from_data(as_json, "json") == profile_file.from_data(as_yaml, "yaml")


def test_dumped_answers_give_the_rollout_its_completion() -> None:
    data = json.loads(
        run("logs", VERL, "--gpus", "16", "--lengths", str(ROOT / "examples/rollouts"), "--format", "json")
    )
    assert data["profile"]["components"]["rollout"]["completion"][-1] == [1.0, 1.0]
    assert "completion" not in data["profile"]["components"]["update_actor"]


def test_profiles_are_merged(tmp_path: Path) -> None:
    for gpus in ("8", "16"):
        run("logs", VERL, "--gpus", gpus, "--output", str(tmp_path / f"{gpus}.yaml"))
    data = json.loads(run("merge", str(tmp_path / "8.yaml"), str(tmp_path / "16.yaml"), "--format", "json"))
    assert list(data["profile"]["components"]["rollout"]["seconds"]) == ["8", "16"]
    assert "16" in run("merge", str(tmp_path / "8.yaml"), str(tmp_path / "16.yaml"))


def test_errors_are_raised_for_the_command_line_to_print() -> None:
    with pytest.raises(InputError, match="number of GPUs"):
        run("logs", VERL)
    with pytest.raises(InputError, match="cannot write"):
        run("logs", VERL, "--gpus", "8", "--output", "/no/such/folder/profile.yaml")


def test_memory_shows_its_terms_and_a_block_to_paste() -> None:
    text = run("memory", "--model", MODEL, "--gpus", "8", "--gpu-memory-gb", "80")
    assert "1,543,714,304 parameters" in text
    for word in ("weights", "optimiser", "KV cache", "logits", "host memory"):
        assert word in text
    block = yaml_text.parse(text[text.index("\ntrainer:\n  memory_gb") :], "answer")
    assert set(block) == {"trainer", "rollout", "inference"}
    assert set(block["trainer"]["memory_gb"]) == {"sharded", "per_gpu", "resident"}


def test_memory_as_json_is_complete() -> None:
    data = json.loads(run("memory", "--model", MODEL, "--format", "json"))
    assert data["parameters"] == 1_543_714_304
    trainer = data["components"]["trainer"]
    assert sum(term["gb"] for term in trainer["terms"]) == pytest.approx(trainer["active_gb"], abs=0.02)


def test_a_model_too_large_for_its_gpu_is_warned_about() -> None:
    result = CliRunner().invoke(app, ["memory", "--model", MODEL, "--gpu-memory-gb", "2"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "trainer needs" in result.output


@pytest.mark.parametrize("command", ["logs", "merge", "memory"])
def test_help_shows_an_example(command: str) -> None:
    assert f"trimtab profile {command}" in run(command, "--help")
