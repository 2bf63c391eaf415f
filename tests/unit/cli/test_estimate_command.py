from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.cli.app import run
from trimtab.formats import yaml_text

ROOT = Path(__file__).parents[3]
QWEN = ("--model", "qwen3-32b", "--gpu", "h100", "--gpus", "32", "--framework", "nemo-rl", "--algorithm", "grpo",
        "--samples", "2048", "--train-batch", "512", "--mean-tokens", "3206", "--max-tokens", "4096", "--mode", "sync",
        "--rollout", "tp=4", "--train", "tp=4,pp=4", "--steps", "300", "--price", "2.5")  # fmt: skip
VERL = """
data: {train_batch_size: 128, max_prompt_length: 1024, max_response_length: 3072}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor: {strategy: fsdp, ppo_mini_batch_size: 32}
  rollout: {name: vllm, n: 8, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.5}
algorithm: {adv_estimator: grpo}
trainer: {nnodes: 2, n_gpus_per_node: 8}
"""
NEMO = """
cluster: {num_nodes: 4, gpus_per_node: 8}
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32, async_grpo: {enabled: true}}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: 512
  max_total_sequence_length: 4096
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, expert_model_parallel_size: 8}
  generation:
    backend: vllm
    vllm_cfg: {tensor_parallel_size: 2, gpu_memory_utilization: 0.7}
    colocated: {enabled: false, resources: {num_nodes: 2, gpus_per_node: 8}}
"""


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = run(["estimate", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_answer_has_seconds_memory_cost_and_public_steps_near_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, *QWEN, "--format", "json")
    data = json.loads(out)
    assert status == 0
    assert data["step_seconds"]["low"] < 393 < data["step_seconds"]["high"]
    assert set(data["stages"]) >= {"generate", "old log-probs", "reference log-probs", "update", "refit"}
    assert data["memory_gb"]["update"]["gpu"] == 80
    assert data["cost"]["likely"] == pytest.approx(data["gpu_hours"]["likely"] * 2.5, rel=1e-3)
    assert {row["model"] for row in data["near"]} >= {"Qwen3-32B"}
    assert any("sharded" in note for note in data["warnings"])


def test_text_and_yaml_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, *QWEN)
    assert status == 0
    for words in ("qwen3-32b (32.8B parameters) on 32 h100", "limited by", "GPU-hours", "Assumed", "Public steps near"):
        assert words in out
    _, dumped, _ = call(capsys, *QWEN, "--format", "yaml")
    _, printed, _ = call(capsys, *QWEN, "--format", "json")
    assert yaml_text.parse(dumped, "answer") == json.loads(printed)


def test_what_is_not_given_is_chosen_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--model", "qwen2.5-7b", "--gpu", "a800", "--format", "json")
    data = json.loads(out)
    assert status == 0
    assert {"mode: sync", "prompt: 200 tokens"} <= set(data["assumed"])
    assert any("the smallest number on which a run fits" in note for note in data["assumed"])
    assert [size["gpus"] for size in data["sizes"]] == [data["gpus"] * times for times in (1, 2, 4)]
    assert any("never compared" in note for note in data["warnings"])


def test_an_assumed_prompt_is_not_longer_than_the_config_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "verl.yaml"
    config.write_text(VERL.replace("max_prompt_length: 1024", "max_prompt_length: 64"))
    _, out, _ = call(capsys, config, "--gpu", "h100", "--format", "json")
    assert "prompt: 64 tokens" in json.loads(out)["assumed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "qwen3-33b", "--gpu", "h100"), ("unknown model qwen3-33b", "did you mean qwen3-32b?")),
        (("--model", "qwen3-8b", "--gpu", "h1000"), ("unknown GPU kind h1000", "did you mean h100?")),
        (("--gpu", "h100"), ("no model is given", "--model")),
        (("--model", "qwen3-8b"), ("no GPU kind is given", "--gpu")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--mode", "asinc"), ("unknown mode asinc", "did you mean async?")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--train", "tb=2"), ("unknown key tb", "known: tp")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--train", "tp=3"), ("do not make dp x tp", "--train")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--train", "tp=two"), ("tp is 'two'", "--train tp=4")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--train", "tp=2,dp=3"), ("do not make dp x tp", "--train")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--rollout", "tp=-1"), ("tp is -1", "count")),
        (("--model", "qwen3-30b-a3b", "--gpu", "h100", "--rollout", "ep=4"), ("unknown key ep", "--rollout")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--gpus", "0"), ("--gpus is 0", "count")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--judge", "qwen3-33b:4"), ("unknown model qwen3-33b", "qwen3-32b?")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--judge", "qwen3-32b:x"), ("GPUs of --judge is 'x'", "count")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--rollout", "memory=2"), ("share of memory", "--rollout")),
        (("--model", "qwen3-8b", "--gpu", "h100", "--mean-tokens", "9000"), ("does not lie between", "--max-tokens")),
    ],
)
def test_a_mistake_is_told_in_a_line_with_the_cure(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, str]
) -> None:
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert all(word in err for word in words)
    assert len(err.splitlines()) <= 3


def test_what_is_given_is_kept_and_the_rest_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    run_of = ("--model", "qwen3-8b", "--gpu", "h100", "--gpus", 16, "--mean-tokens", 2000, "--format", "json")
    _, out, _ = call(capsys, *run_of, "--train", "tp=2,pp=2", "--rollout", "memory=0.5")
    chosen = [note for note in json.loads(out)["assumed"] if "fastest that fits" in note]
    assert len(chosen) == 2
    assert chosen[0].startswith("rollout: tp=")
    assert "memory" not in chosen[0]
    assert chosen[1].startswith("training: tokens=")
    _, out, _ = call(capsys, *run_of, "--train", "backend=megatron,tokens=4096", "--mode", "async")
    notes = json.loads(out)["assumed"]
    assert any(note.startswith("GPUs of rollout alone: ") for note in notes)
    assert any(note.startswith("training: backend=megatron") and "tokens" not in note for note in notes)


def test_dynamic_sampling_decodes_more_than_it_trains_on(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*more: object) -> dict[str, float]:
        data = json.loads(call(capsys, *QWEN, *more, "--format", "json")[1])
        return {name: stage["likely"] for name, stage in data["stages"].items()}

    once, thrice = seconds(), seconds("--oversample", 3)
    assert thrice["generate"] > 2 * once["generate"]
    assert thrice["update"] == once["update"]
    assert call(capsys, *QWEN, "--oversample", 0)[0] == 2


def test_a_run_that_does_not_fit_is_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "--model", "llama-3.1-70b", "--gpu", "l4", "--gpus", "8", "--format", "json")
    assert status == 3
    assert json.loads(out)["fits"] is False
    assert "error:" in err


def test_a_model_may_be_a_folder_and_lengths_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("tokens,count\n500,90\n4000,10\n")
    status, out, _ = call(
        capsys, "--model", ROOT / "examples/models/qwen2.5-1.5b", "--gpu", "h200", "--gpus", 8,
        "--lengths", tmp_path / "lengths.csv", "--format", "json",
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["parameters"] == 1_543_714_304


def test_a_verl_config_gives_the_run_and_options_override_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(VERL)
    status, out, _ = call(capsys, file, "--gpu", "h100", "--mean-tokens", 1500, "--format", "json")
    data = json.loads(out)
    assert status == 0
    assert (data["model"], data["gpus"]) == ("qwen2.5-7b", 16)
    assert not any("longest" in note or "samples" in note for note in data["assumed"])
    _, out, _ = call(capsys, file, "trainer.nnodes=4", "--gpu", "h100", "--model", "qwen2.5-3b", "--format", "json")
    assert (json.loads(out)["model"], json.loads(out)["gpus"]) == ("qwen2.5-3b", 32)


def test_an_asynchronous_nemo_rl_config_is_read_with_its_split(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "nemo.yaml"
    file.write_text(NEMO)
    status, out, _ = call(capsys, file, "--gpu", "h100", "--mean-tokens", 3201, "--format", "json")
    data = json.loads(out)
    assert status == 0
    assert (data["mode"], data["gpus"], data["rollout_gpus"]) == ("async", 32, 16)
    assert data["staleness"]["greatest"] == 1


def test_other_configs_and_job_files_give_what_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    rlinf = ROOT / "examples/math/config/qwen2.5-1.5b-grpo-megatron.yaml"
    status, out, _ = call(capsys, rlinf, "--model", "qwen2.5-1.5b", "--gpu", "h100", "--format", "json")
    assert (status, json.loads(out)["gpus"]) == (0, 8)
    job = ROOT / "src/trimtab/examples/grpo.yaml"
    status, out, _ = call(capsys, job, "--model", "qwen2.5-7b", "--gpu", "h100", "--format", "json")
    assert (status, json.loads(out)["gpus"]) == (0, 32)


PROFILE = """
profile:
  source: nemo_rl
  components:
    generation: {seconds: {32: 170.0}, spread: 0.03}
    logprobs: {seconds: {32: 70.0}}
    policy: {seconds: {16: 200.0}}
"""


def test_measured_seconds_replace_the_guess_and_narrow_the_interval(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    _, guessed, _ = call(capsys, *QWEN, "--format", "json")
    status, out, _ = call(capsys, *QWEN, "--measured", tmp_path / "profile.yaml", "--format", "json")
    before, data = json.loads(guessed), json.loads(out)
    assert status == 0
    assert data["stages"]["generate"]["likely"] == pytest.approx(170, rel=1e-3)
    assert data["stages"]["old log-probs"]["likely"] == pytest.approx(35, rel=1e-3)
    assert [name for name, stage in data["stages"].items() if not stage["measured"]] == ["refit", "rest", "switch"]

    def width(answer: dict[str, dict[str, float]], key: str) -> float:
        return answer[key]["high"] / answer[key]["low"]

    assert width(data, "step_seconds") < 0.7 * width(before, "step_seconds")
    here, elsewhere = (width(data["stages"], name) for name in ("generate", "update"))
    assert here < elsewhere < width(before["stages"], "update")  # the update was measured on other GPUs
    _, text, _ = call(capsys, *QWEN, "--measured", tmp_path / "profile.yaml")
    assert "generation took 170 s on 32 GPUs" in text


def test_what_a_run_measured_scales_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        """
cluster: {nodes: 1, gpus_per_node: 4}
workflow:
  components:
    rollout: {seconds: {4: 0.02}, emulate: true}
    trainer: {seconds: {4: 0.01}, after: [rollout], emulate: true}
run: {iterations: 2}
"""
    )
    assert run(["run", str(job), "--local", "--folder", str(tmp_path / "run"), "--quiet"]) == 0
    capsys.readouterr()
    status, out, _ = call(
        capsys, "--model", "qwen2.5-0.5b", "--gpu", "h100", "--gpus", 4, "--rollout", "tp=1", "--train", "tp=1",
        "--measured", tmp_path / "run", "--format", "json",
    )  # fmt: skip
    data = json.loads(out)
    assert status == 0
    assert {name for name, stage in data["stages"].items() if stage["measured"]} == {"generate", "update"}
    assert data["stages"]["generate"]["likely"] < 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profile: {source: x, components: {env: {seconds: {8: 1.0}}}}", "no component in it is a stage"),
        ("profile: {source: x, components: {rollout: {seconds: {8: 1.0}, waits: true}}}", "no component in it"),
        ("seconds: 3", "holds no profile"),
    ],
)
def test_a_profile_that_says_nothing_of_the_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "profile.yaml").write_text(text)
    status, _, err = call(capsys, *QWEN, "--measured", tmp_path / "profile.yaml")
    assert status == 2
    assert words in err


def test_switches_say_their_gain_their_condition_and_their_public_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fp8-rollout,spec-decode:0.77,async:1:16,async+partial,delta-sync,lora:32,no-reference,no-recompute"
    status, out, _ = call(capsys, *QWEN, "--what-if", words, "--format", "json")
    data = json.loads(out)
    assert status == 0
    found = {each["switch"]: each for each in data["what_if"]}
    assert list(found) == words.split(",")
    assert found["spec-decode:0.77"]["speedup"] > 1
    assert found["no-reference"]["speedup"] > 1
    assert found["delta-sync"]["speedup"] == 1  # engines on the trainer's GPUs copy within them
    assert found["async:1:16"]["rollout_gpus"] == 16
    assert all(each["conditions"] for each in found.values())
    evidence = found["spec-decode:0.77"]["evidence"]
    assert {row["gpu"] for row in evidence} >= {"h100", "h20"}
    assert all(row["date"] and row["source"] for row in evidence)
    _, text, _ = call(capsys, *QWEN, "--what-if", words)
    assert "When it pays" in text


def test_unfinished_answers_that_go_on_make_a_synchronous_run_asynchronous(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, *QWEN, "--what-if", "partial,async+partial,partial+async", "--format", "json")
    alone, *both = json.loads(out)["what_if"]
    assert alone["rollout_gpus"]
    assert all(each["speedup"] == alone["speedup"] for each in both)


def test_a_judge_has_gpus_memory_and_time_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    without, few, many = (
        json.loads(call(capsys, *QWEN, *judge, "--format", "json")[1])
        for judge in ((), ("--judge", "qwen2.5-72b:4:500"), ("--judge", "qwen2.5-72b:16:500"))
    )
    assert few["stages"]["judge"]["likely"] > many["stages"]["judge"]["likely"] > 0
    assert few["step_seconds"]["likely"] > many["step_seconds"]["likely"] > without["step_seconds"]["likely"]
    assert few["memory_gb"]["judge"]["terms"]["weights"] > 30  # over four GPUs
    assert many["gpus"] == without["gpus"]
    hours = many["hours"]["likely"] * (many["gpus"] + 16)
    assert many["gpu_hours"]["likely"] == pytest.approx(hours, rel=1e-3)
    assert "never compared: a judge" in many["warnings"]


def test_rollout_on_another_gpu_kind_is_said_to_be_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, *QWEN, "--mode", "separate", "--rollout-gpu", "h20", "--format", "json")
    notes = json.loads(out)["warnings"]
    assert "never compared: rollout on another GPU kind than training" in notes
    assert "never compared: a synchronous run with GPUs of rollout alone" in notes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fp8-rolout", "did you mean fp8-rollout?"),
        ("spec-decode:2", "acceptance of spec-decode is 2"),
        ("spec-decode:x", "acceptance of spec-decode is x"),
        ("lora:8:9", "takes 1 numbers"),
    ],
)
def test_a_switch_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    status, _, err = call(capsys, *QWEN, "--what-if", words)
    assert status == 2
    assert message in err
    assert len(err.splitlines()) <= 3
