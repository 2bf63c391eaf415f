import json
from pathlib import Path

import pytest

from trimtab.cli.app import run

SCRIPT = str(Path(__file__).parents[3] / "examples" / "launch" / "run_grpo.sh")
ESTIMATED = ["--gpu", "h100", "--mean-tokens", "2000", "--no-sensitivity", "--format", "json"]


def test_a_script_is_planned_like_a_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NNODES", "GPUS_PER_NODE", "MODEL"):
        monkeypatch.delenv(name, raising=False)
    assert run(["plan", SCRIPT, "NNODES=4", *ESTIMATED]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["trainer.nnodes"] == 4


def test_a_command_line_is_planned_like_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *ESTIMATED, "--", "bash", SCRIPT, "trainer.nnodes=1"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["trainer.nnodes"] == 1


def test_several_trainers_are_listed_and_one_is_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "two.sh"
    script.write_text("".join(f"python3 -m verl.trainer.main_ppo trainer.nnodes={n}\n" for n in (1, 2)))
    assert run(["estimate", str(script), "--gpu", "h100", "--model", "qwen2.5-7b"]) == 2
    assert "--launch" in capsys.readouterr().err
    call = ["estimate", str(script), "--gpu", "h100", "--model", "qwen2.5-7b", "--launch", "2", "--format", "json"]
    assert run(call) in (0, 3)
    assert "16" in capsys.readouterr().out


def test_a_script_without_a_trainer_is_refused_in_three_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve model\npython3 prepare.py\n")
    assert run(["plan", str(script), "--gpu", "h100"]) == 2
    shown = capsys.readouterr().err
    assert "python3 prepare.py (line 2)" in " ".join(shown.split())


def test_a_script_that_ends_without_a_variable_asks_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    test = '[ -z "${MODELS_OF_A_TEST}" ] && { echo "set MODELS_OF_A_TEST first"; exit 1; }'
    script.write_text(
        f"ray stop\n{test}\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODELS_OF_A_TEST\n"
    )
    call = ["estimate", str(script), "--gpu", "h100", "--model", "qwen2.5-7b"]
    assert run(call) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "status 1: set MODELS_OF_A_TEST first" in shown
    assert "give it as MODELS_OF_A_TEST=VALUE" in shown
    assert run([*call, "MODELS_OF_A_TEST=/models"]) == 0


def test_other_modes_are_those_of_the_script_and_not_of_the_config_that_it_starts_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "verl" / "trainer" / "config" / "ppo_trainer.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(
        "data: {train_batch_size: 256, max_prompt_length: 512, max_response_length: 4096}\n"
        "actor_rollout_ref:\n  hybrid_engine: true\n  model: {path: no/such-model}\n"
        "  actor: {ppo_mini_batch_size: 64}\n"
        "  rollout: {name: vllm, n: 4, tensor_model_parallel_size: 1, nnodes: 0}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 8, v1: {trainer_mode: sync}}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct\n")
    assert run(["plan", str(script), *ESTIMATED]) == 0
    modes = {mode["mode"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}
    assert set(modes) >= {"as planned", "colocate_async"}
    assert all(mode["seconds"] and not mode["reason"] for mode in modes.values())
