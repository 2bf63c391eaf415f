"""`trimtab plan` where nothing is measured: estimated seconds, and whether the choice holds over their interval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.app import run
from trimtab.core.errors import InputError
from trimtab.formats.estimated_costs import counts, load_estimated, with_estimates
from trimtab.formats.frameworks import hydra_config
from trimtab.formats.load import OpenedFile
from trimtab.model.workflow import ComponentProfile, Profile
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.placement.planner import best_plan, explain, plan_placement

ROOT = Path(__file__).parents[3]
JOB = """
cluster: {nodes: 2, gpus_per_node: 8, gpu: H100}
workflow:
  batches: 64
  components:
    rollout: {}
    reward: {after: [rollout], device: cpu, seconds: 3.0}
    inference: {after: [rollout], seconds: {8: 40.0, 16: 20.0}}
    trainer: {after: [inference, reward], granularity: 16}
  weight_sync: {from: trainer, to: rollout}
"""
VERL = """
data: {train_batch_size: 128, max_prompt_length: 1024, max_response_length: 3072}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor: {strategy: fsdp, ppo_mini_batch_size: 32, use_kl_loss: true}
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.5}
algorithm: {adv_estimator: grpo}
trainer: {nnodes: 2, n_gpus_per_node: 8}
"""
NEMO = """
cluster: {num_nodes: 4, gpus_per_node: 8}
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: 512
  max_total_sequence_length: 4096
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, expert_model_parallel_size: 8}
  generation:
    backend: vllm
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.7}
    colocated: {enabled: true}
"""
PROFILE = "profile: {source: x, components: {rollout: {seconds: {16: 90.0}}}}"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    status = run(["plan", *map(str, arguments), "--format", "json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out else None, printed.err


def job_file(tmp_path: Path, text: str = JOB) -> Path:
    (tmp_path / "job.yaml").write_text(text)
    return tmp_path / "job.yaml"


def test_components_without_seconds_are_estimated_and_stated_ones_stay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, data, _ = call(capsys, job_file(tmp_path), "--model", "qwen2.5-7b", "--mean-tokens", 2000)
    assert status == 0
    assert any("estimated, not measured: rollout, trainer;" in note for note in data["assumptions"])
    gpus = len(data["components"]["inference"]["gpus"])
    assert data["components"]["inference"]["seconds"] == pytest.approx(320 / gpus, rel=0.2)
    assert data["sync_seconds"] > 0
    assert set(data["interval"]) == {"holds", "loss", "factors", "becomes"}


def test_a_profile_wins_over_an_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    options = ("--model", "qwen2.5-7b", "--profile", tmp_path / "profile.yaml")
    _, data, _ = call(capsys, job_file(tmp_path), *options)
    assert any("estimated, not measured: trainer;" in note for note in data["assumptions"])


@pytest.mark.parametrize(
    ("text", "components"),
    [(VERL, {"rollout", "old_log_prob", "ref", "update_actor"}), (NEMO, {"generation", "logprobs", "policy"})],
)
def test_framework_configs_need_a_gpu_kind_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, components: set[str]
) -> None:
    status, data, _ = call(capsys, job_file(tmp_path, text), "--gpu", "h100")
    assert status == 0
    assert set(data["components"]) == components
    assert data["iteration_seconds"] > 0


def test_rlinf_configs_without_costs_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "examples/math/config/qwen2.5-1.5b-grpo-megatron.yaml"
    status, data, _ = call(capsys, config, "--model", "qwen2.5-1.5b", "--gpu", "h100")
    assert status == 0
    assert set(data["components"]) == {"rollout", "inference", "actor"}


def test_without_a_gpu_kind_the_cure_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = call(capsys, job_file(tmp_path, VERL))
    assert status == 2
    assert "--gpu" in err
    status, _, err = call(capsys, job_file(tmp_path, JOB.replace(", gpu: H100", "")), "--model", "qwen2.5-7b")
    assert status == 2
    assert "no GPU kind is given" in err


def test_a_model_that_does_not_fit_is_infeasible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = call(capsys, job_file(tmp_path), "--model", "llama-3.1-405b", "--gpu", "h100")
    assert status == 3
    assert "memory" in err or "fit" in err


def test_the_worst_corner_of_the_interval_is_the_one_that_a_new_plan_shows(tmp_path: Path) -> None:
    given = {"model": "qwen2.5-7b", "mean_tokens": 2000, "max_tokens": 8192, "rollout": "", "train": ""}
    estimated = load_estimated(job_file(tmp_path), (), None, given, CONSTANTS)
    space, outcome = best_plan(estimated.loaded.job)
    check = explain(space, outcome, estimated=estimated.widths).interval
    assert check is not None
    if check.becomes is None:
        assert check.loss == 0
        return
    job = estimated.loaded.job
    workflow = job.workflow
    for name, factor in check.factors.items():
        workflow = workflow.scaled(name, factor)
    best = plan_placement(type(job)(job.cluster, workflow)).best
    assert best.describe() == check.becomes
    assert check.holds is (check.loss <= 0.05)
    certain = explain(space, outcome, estimated=[dict.fromkeys(group, 1.0) for group in estimated.widths]).interval
    assert certain is not None
    assert certain.holds


def test_counts_are_multiples_that_reach_the_limit() -> None:
    assert counts(4, 40) == [4, 8, 12, 16, 24, 32, 40]
    assert counts(16, 8) == []


def test_a_wrong_word_names_its_option(tmp_path: Path) -> None:
    given = {"model": "qwen2.5-7b", "rollout": "tb=2", "train": ""}
    with pytest.raises(InputError, match="unknown key tb"):
        load_estimated(job_file(tmp_path), (), None, given, CONSTANTS)


def test_a_config_is_composed_once_however_often_it_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []
    monkeypatch.setattr(
        hydra_config, "compose", lambda *asked, own=hydra_config.compose: composed.append(1) or own(*asked)
    )
    file = OpenedFile(Path(__file__).parents[3] / "examples" / "frameworks" / "slime.yaml")
    seconds = [
        [
            part.variants[0].points("")
            for part in with_estimates(file, None, given, CONSTANTS).loaded.job.workflow.components
        ]
        for given in ({"gpu": "h100"}, {"gpu": "h200"}, {"gpu": "h100"})
    ]
    assert seconds[0] == seconds[2] != seconds[1]
    assert len(composed) == 1


def test_one_measured_cost_each_stays_as_it_is_and_scales_as_the_estimate_does() -> None:
    config = Path(__file__).parents[3] / "examples" / "math" / "config" / "qwen2.5-1.5b-grpo-megatron.yaml"
    given = {"model": "qwen2.5-1.5b", "gpu": "h100", "mean_tokens": 2000}
    estimated = load_estimated(config, (), None, given, CONSTANTS)
    points = {part.name: dict(part.variants[0].points("")) for part in estimated.loaded.job.workflow.components}
    assert {name: seconds[8] for name, seconds in points.items()} == {
        "rollout": 59.9, "inference": 30.8, "actor": 95.7,
    }  # fmt: skip
    # A long answer takes as long on more engines: half of them take less than twice as long.
    assert 59.9 < points["rollout"][4] < 1.95 * 59.9
    assert all(seconds[4] > seconds[8] for seconds in points.values())
    assert [set(group) for group in estimated.widths] == [{"rollout", "inference", "actor"}]  # on other counts
    [note] = estimated.notes
    assert note == "scaling between GPU counts is estimated, the level is measured: rollout, actor, inference"


def test_a_profile_of_one_gpu_count_scales_as_the_estimate_does_and_one_of_several_stays(tmp_path: Path) -> None:
    once = ComponentProfile("rollout", ((8, 100.0),))
    several = ComponentProfile("trainer", ((4, 90.0), (8, 50.0)))
    profile = Profile("a log", (once, several), ())
    given = {"model": "qwen2.5-7b", "gpu": "h100", "mean_tokens": 1700}
    job = load_estimated(job_file(tmp_path), (), profile, given, CONSTANTS).loaded.job
    points = {part.name: dict(part.variants[0].points("")) for part in job.workflow.components if part.variants}
    assert points["rollout"][8] == 100.0
    assert 100.0 < points["rollout"][4] < 200.0
    assert points["trainer"] == {4: 90.0, 8: 50.0}


def test_one_stated_point_of_a_job_file_scales_as_the_estimate_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path, JOB.replace("rollout: {}", "rollout: {seconds: {16: 90.0}}"))
    status, data, _ = call(capsys, path, "--model", "qwen2.5-7b", "--mean-tokens", 2000)
    assert status == 0
    assert any("the level is measured: rollout" in note for note in data["assumptions"])
    found = load_estimated(path, (), None, {"model": "qwen2.5-7b", "mean_tokens": 2000.0}, CONSTANTS)
    points = dict(found.loaded.job.workflow.component("rollout").variants[0].points(""))
    assert points[16] == 90.0
    assert 90.0 < points[8] < 180.0  # the longest answers take as long on half of the GPUs
    assert any("rollout" in group for group in found.widths)


def test_without_a_model_the_range_of_assumed_scaling_stands_beside_the_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = JOB.replace("rollout: {}", "rollout: {seconds: {16: 90.0}}").replace(
        "trainer: {", "trainer: {seconds: {4: 90.0}, "
    )
    assert run(["plan", str(job_file(tmp_path, text)), "--no-sensitivity"]) == 0
    assert "Its scaling is assumed, not measured: " in capsys.readouterr().out
