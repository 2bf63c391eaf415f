"""`trimtab check`, among others on configs of public reports of runs that died (tests/data/died), and on their cures.

What the rules cannot tell is listed as missed: it stays in the folder, and stays counted.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.cli.app import run
from trimtab.formats import check_settings, yaml_text
from trimtab.formats.write_back import nested
from trimtab.plan.check.check import check
from trimtab.plan.check.findings import CheckFinding
from trimtab.runtime.rayapi import gcs_snapshot

ROOT = Path(__file__).parents[3]
DIED = sorted((ROOT / "tests" / "data" / "died").glob("*.yaml"))
EXAMPLE = ROOT / "examples" / "check"
MISSED = {
    "easyr1-50": "images; 280 of 478 GB by arithmetic",
    "easyr1-59": "a leak: 7B offloaded needs a quarter of the memory that filled up",
    "gpustack-1800": "images are profiled with the engine's start, and are not counted",
    "ms-swift-3359": "70 % by arithmetic; what this release keeps of logits is not known",
    "nemo-rl-191": "85 % by arithmetic at the share of the day, with the second copy of all weights that it held",
    "nemo-rl-2319": "fragmentation, and tensors that stay between steps",
    "nemo-rl-3278": "by arithmetic the cache holds the batch, at the lengths that are published for the recipe",
    "nemo-rl-3280": "measured: with half of the GPU free the pool could not be mapped again after 15 steps",
    "nemo-rl-456": "90 % by arithmetic, in three copies of logits of 19 GB each; the GPU is not stated",
    "openrlhf-336": "an engine of 2024 took 3 GB more for activations than later ones report",
    "openrlhf-776": "a quarter of a GPU by arithmetic; the thread does not say where it died",
    "openrlhf-911": "a reward script grew to 177 GB",
    "prime-rl-3052": "74 % by arithmetic: what layers of Mamba keep is not counted; it died of 20 MB",
    "slime-1951": "that release had no scheduler that keeps the limit of tokens: twenty times as many came",
    "tinyzero-107": "79 % by arithmetic, 95 % at the wake-up, told as that; the thread does not say where it died",
    "verl-2820": "runs on two GPUs and not on more, unexplained in the thread",
    "verl-2865": "99 % of a GPU beside the engine, told as that; offload and rollout are not stated",
    "verl-3364": "half of a GPU by arithmetic; batches are not stated",
    "verl-3987": "an eighth of a GPU by arithmetic, with the tensor parallelism of 8 of its script",
    "verl-agent-95": "environments take the host's memory",
    "verl-megatron-practice-2": "82 % by arithmetic; 88 GB is another estimator's, and what died is not shown",
}


def _case(file: Path) -> dict[str, Any]:
    case: dict[str, Any] = yaml_text.parse(file.read_text(), file.name)
    return case


def setup_of(case: dict[str, Any], folder: Path, overrides: list[str], **more: Any) -> tuple[CheckFinding, ...]:
    file = folder / "config.yaml"
    file.write_text(yaml_text.dump(nested(case["config"]) if "config" in case else case["settings"]))
    if str(case.get("gpu", "")).endswith(".yaml"):
        case = {**case, "gpu": str(ROOT / case["gpu"])}
    plus = "++" if "config" in case else ""
    given = {key: case[key] for key in ("gpu", "host_memory", "version") if key in case}
    setup = check_settings.read(file, [f"{plus}{override}" for override in overrides], {**given, **more})
    return check(setup, check_settings.exclusions()).findings


@pytest.mark.parametrize("file", DIED, ids=lambda file: file.stem)
def test_a_run_that_died_is_told_with_its_cause_and_its_cure_passes(file: Path, tmp_path: Path) -> None:
    case = _case(file)
    assert "#" in case["source"]
    assert case["what"]
    named = [finding for finding in setup_of(case, tmp_path, []) if finding.cause == case["cause"]]
    if file.stem in MISSED:
        assert not named, "it is told now: take it from the list"
        return
    assert named
    left = setup_of(case, tmp_path, case["cure"], **case.get("cure_given", {}))
    assert not [finding for finding in left if finding.severity == "error"]
    worst = min(finding.severity for finding in named)
    assert not [finding for finding in left if finding.cause == case["cause"] and finding.severity == worst]


def test_enough_of_the_reports_are_told() -> None:
    told = Counter(_case(file)["cause"] for file in DIED if file.stem not in MISSED)
    assert sum(told.values()) >= 60
    assert all(told[cause] >= 5 for cause in ("gpu memory", "sleep and wake", "host memory", "sizes", "kv cache"))
    assert set(MISSED) <= {file.stem for file in DIED}


def test_reports_rebuilt_before_they_were_checked_say_what_came_of_the_first_try() -> None:
    """`first_try` stays as it was: what was mended since is counted among all reports, not among these."""
    tries = [case["first_try"] for case in map(_case, DIED) if "first_try" in case]
    assert len(tries) >= 10
    assert tries.count("told") == 10


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run(["check", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_example_dies_until_its_cures_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    dies, runs = EXAMPLE / "grpo-dies.yaml", EXAMPLE / "grpo-runs.yaml"
    status, out, _ = call(capsys, dies, "--gpu", "a100-80")
    assert status == 3
    assert "does not divide 28 attention heads" in out
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    assert f"cure  {tp}" in out
    status, out, _ = call(capsys, dies, "--gpu", "a100-80", tp, "--format", "json")
    data = json.loads(out)
    assert status == 3
    assert {finding["cause"] for finding in data["findings"]} == {"gpu memory", "sleep and wake"}
    assert data["can_run"] is False
    for finding in data["findings"]:
        assert finding["releases"] == "any framework"
        assert finding["dated"] >= "2025"
        assert "#" in finding["source"] or "/" in finding["source"]
    status, out, _ = call(capsys, runs, "--gpu", "a100-80")
    assert status == 0
    assert "can run" in out


def test_text_yaml_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    dies = EXAMPLE / "grpo-dies.yaml"
    _, dumped, _ = call(capsys, dies, "--gpu", "h100", "--format", "yaml")
    _, printed, _ = call(capsys, dies, "--gpu", "h100", "--format", "json")
    assert yaml_text.parse(dumped, "answer") == json.loads(printed)


def test_without_a_gpu_or_a_known_model_the_rest_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = call(capsys, EXAMPLE / "grpo-runs.yaml", "actor_rollout_ref.model.path=/models/own")
    assert status == 0
    assert "give --gpu" in out
    assert "/models/own is not known" in out
    assert "no error in what could be checked; not checked: heads, layers and memory; GPU and host memory" in out
    assert "can run" not in out
    assert call(capsys, EXAMPLE / "grpo-runs.yaml", "--model", "qwen2.5-7b")[0] == 0


def test_an_address_compares_with_the_nodes_that_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"GPU": 4.0, "memory": 1e12, "object_store_memory": 1e11}
    node = SimpleNamespace(name="left", address="10.0.0.2", resources=resources)
    monkeypatch.setattr(gcs_snapshot, "find", lambda address: address)
    monkeypatch.setattr(gcs_snapshot, "GcsReader", lambda address: SimpleNamespace(alive=lambda: [node]))
    status, out, _ = call(capsys, EXAMPLE / "grpo-runs.yaml", "--gpu", "a100-80", "--address", "10.0.0.1:6379")
    assert status == 3
    assert "the cluster has 4 GPUs, the run asks for 8" in out


def test_sequence_parallelism_of_verl_is_counted_once(tmp_path: Path) -> None:
    sp = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    setup = check_settings.read(EXAMPLE / "grpo-runs.yaml", [f"++{sp}"], {"gpu": "h100"})
    assert (setup.train_sp, setup.train_cp) == (4, 1)


def test_an_unknown_model_of_any_framework_leaves_the_rest_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    skyrl = ROOT / "examples" / "frameworks" / "skyrl.yaml"
    status, out, _ = call(capsys, skyrl, "--gpu", "h100", "trainer.policy.model.path=/models/own")
    assert status == 0
    assert "not checked: memory, in full; heads, layers and memory" in out
    status, out, _ = call(capsys, skyrl, "trainer.policy.model.path=/models/own", "--format", "json")
    assert json.loads(out)["can_run"] is None


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("{model: qwen2.5-7b, gpus: 8, rolout: {tp: 2}}", (), "grpo"),
        ("{model: qwen2.5-7b, gpus: 0}", (), "a whole number from 1 is expected, not 0"),
        ("{model: qwen2.5-7b, gpus: 8, rollout: {tp: x}}", (), "a whole number from 1 is expected, not 'x'"),
        ("{model: qwen2.5-7b, gpus: 8, rollout: {tps: 2}}", (), "did you mean rollout_tp?"),
        ("{model: qwen2.5-77b, gpus: 8}", (), "unknown model qwen2.5-77b"),
        ("{model: qwen2.5-7b, gpus: 8}", ("--gpu", "h1000"), "unknown GPU kind h1000"),
        ("{model: qwen2.5-7b, gpus: 8}", ("--gpus", "0"), "--gpus is 0"),
        ("{model: qwen2.5-7b, gpus: 8}", ("--host-memory-gb", "0"), "--host-memory-gb is 0"),
    ],
)
def test_wrong_input_is_one_clear_error(
    text: str, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    status, _, err = call(capsys, file, *arguments)
    assert status == 2
    if words != "grpo":
        assert words in err
    assert len(err.strip().splitlines()) <= 3
