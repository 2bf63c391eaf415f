import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.frameworks import run_inputs
from trimtab.formats.launch.read import CHOICE, LaunchChoice, composed_launch
from trimtab.formats.load import load
from trimtab.formats.loaded import PlanSettings
from trimtab.formats.write_back import apply_to_script
from trimtab.model.workflow import ComponentProfile, Profile
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

PROFILE = Profile(
    "test", tuple(ComponentProfile(name, ((1, 100.0), (64, 4.0))) for name in ("rollout", "update_actor"))
)
SCRIPT = """#!/bin/bash
set -xeuo pipefail
NNODES=${NNODES:-2}   # nodes
ROLLOUT_NODES=1
GPUS=8
TP=2
python3 -m verl.experimental.one_step_off_policy.main_ppo \\
    data.train_batch_size=512 actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=${TP} \\
    trainer.nnodes="${NNODES}" trainer.n_gpus_per_node=$GPUS \\
    rollout.nnodes=$ROLLOUT_NODES \\
    rollout.n_gpus_per_node=8 "$@"
"""


@pytest.fixture(autouse=True)
def _choice() -> Iterator[None]:
    token = CHOICE.set(None)
    yield
    CHOICE.reset(token)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("NNODES", "GPUS", "TP"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_read_with_the_frameworks_defaults(script: Path) -> None:
    reader = composed_launch(script).reader
    assert reader.get("trainer.nnodes") == 2
    assert reader.get("actor_rollout_ref.rollout.tensor_model_parallel_size") == 2
    assert reader.get("actor_rollout_ref.actor.ppo_mini_batch_size") == 256  # verl's
    assert any("defaults are those of verl" in note for note in composed_launch(script).assumptions)


def test_variables_and_overrides_of_the_command_line_count(script: Path) -> None:
    reader = composed_launch(script, ["NNODES=4", "actor_rollout_ref.rollout.n=16"]).reader
    assert (reader.get("trainer.nnodes"), reader.get("actor_rollout_ref.rollout.n")) == (4, 16)
    reader = composed_launch(Path("bash"), ["run.sh", "trainer.nnodes=3"]).reader
    assert reader.get("trainer.nnodes") == 3
    with pytest.raises(InputError, match="no variable of this script"):
        composed_launch(script, ["NODES=4"])


def test_an_unknown_value_is_asked_for_only_where_it_is_read(script: Path) -> None:
    script.write_text(SCRIPT.replace("GPUS=8", "GPUS=$(nvidia-smi -L | wc -l)").replace("TP=2", "TP=$(hostname)"))
    with pytest.raises(InputError, match="nvidia-smi") as refused:
        load(script, (), PROFILE)
    assert "trainer.n_gpus_per_node=VALUE" in str(refused.value.hint)
    assert len(refused.value.lines()) <= 3
    loaded = load(script, ["GPUS=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"], PROFILE)
    assert loaded.job.cluster.gpus == 2 * 4 + 8
    assert run_inputs.read(script, ["GPUS=4", "TP=1"])["gpus"] == 16


def test_of_several_trainers_one_is_chosen(script: Path) -> None:
    script.write_text(
        "python3 -m verl.trainer.main_ppo trainer.nnodes=1 data.train_batch_size=8\n"
        "python3 prepare.py; python3 -m verl.trainer.sft_trainer model.path=x\n"
        "python3 -m verl.trainer.main_ppo trainer.nnodes=2\n"
    )
    with pytest.raises(InputError, match=r"starts 2 trainers: 1: line 1: .* 2: line 3: ") as refused:
        composed_launch(script)
    assert "--launch" in str(refused.value.hint)
    CHOICE.set(LaunchChoice(2))
    assert composed_launch(script).reader.get("trainer.nnodes") == 2
    CHOICE.set(LaunchChoice(3))
    with pytest.raises(InputError, match="no launch 3"):
        composed_launch(script)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("python3 train.py\n", "it starts python3 train.py .line 1."),
        ("x=1\n", "it starts no program"),
        ("bash missing/other.sh\n", "missing/other.sh"),
        ("python3 -m verl.trainer.main_ppo $(cat args.txt)\n", "arguments depend on"),
        ("python3 -m verl.trainer.main_ppo --config-name=nowhere a.b=1\n", "config nowhere.yaml"),
        ("python3 main_grpo.py --config-name $1\n", "--config-name has no value.*bash SCRIPT NAME"),
        ("if\n", "cannot be parsed"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(text: str, what: str, script: Path) -> None:
    script.write_text(text)
    with pytest.raises(InputError) as refused:
        composed_launch(script)
    assert re.search(what, " ".join(refused.value.lines()))
    assert len(refused.value.lines()) <= 3


def test_keys_that_a_plain_config_here_does_not_have_are_added_and_the_answer_says_so(script: Path) -> None:
    script.with_name("own.yaml").write_text("experiment_name: a\ntrial_name: b\nactor: {path: c}\n")
    script.write_text("python3 train.py --config own.yaml actor.newer=128 actor.path=d\n")
    config = composed_launch(script)
    assert config.reader.get("actor") == {"path": "d", "newer": 128}
    assert any("of another version" in note and "actor.newer" in note for note in config.assumptions)


def test_the_entry_point_of_a_ray_job_is_a_launch(script: Path) -> None:
    job = script.with_name("job.yaml")
    job.write_text(
        "apiVersion: ray.io/v1\nkind: RayJob\nspec:\n  entrypoint: |\n"
        "    python3 -m verl.trainer.main_ppo trainer.nnodes=5\n"
    )
    assert composed_launch(job).reader.get("trainer.nnodes") == 5


def test_flags_of_openrlhf_are_its_config(script: Path) -> None:
    script.write_text(
        "#SBATCH --nodes=4\nN=8\npython3 -m openrlhf.cli.train_ppo_ray --vllm.num_engines $N --actor.num_nodes 2 "
        "--train.async_enable --actor.adam.lr 5e-7 --ckpt.path $(whoami)/x\n"
    )
    config = composed_launch(script).reader
    assert config.get("vllm.num_engines") == 8
    assert config.get("train.async_enable") is True
    assert config.get("trimtab.nodes") == 4


def test_a_plan_is_written_into_variables_and_words_and_nothing_else(script: Path) -> None:
    loaded = load(script, (), PROFILE)
    assert loaded.script is not None
    space, outcome = best_plan(loaded.job, loaded.rules)
    plans = [loaded.settings(to_plan(space, candidate)) for candidate in [outcome.best] if candidate is not None]
    (settings,) = plans
    changed = loaded.script.rewritten(settings)
    again = script.with_name("again.sh")
    again.write_text(changed)
    reader = composed_launch(again).reader
    assert {key: reader.get(key) for key in settings.values} == dict(settings.values)
    same = [line for line in SCRIPT.splitlines() if line not in changed.splitlines()]
    assert all(any(name in line for name in ("NNODES=", "GPUS=", "_NODES=", "nnodes", "n_gpus")) for line in same)
    assert len(changed.splitlines()) == len(SCRIPT.splitlines())
    backup = apply_to_script(loaded.script, settings)
    assert script.read_text() == changed
    assert backup is None or backup.read_text() == SCRIPT


def test_a_variable_that_something_else_needs_is_not_changed(script: Path) -> None:
    script.write_text(SCRIPT.replace("rollout.nnodes=$ROLLOUT_NODES", "rollout.nnodes=$NNODES"))
    loaded = load(script, (), PROFILE)
    assert loaded.script is not None
    changed = loaded.script.rewritten(PlanSettings({"trainer.nnodes": 3}, ""))
    assert "NNODES=${NNODES:-2}   # nodes" in changed
    assert "trainer.nnodes=3 trainer.n_gpus_per_node=$GPUS" in changed
    assert "rollout.nnodes=$NNODES" in changed
    with pytest.raises(InputError, match="not written"):
        loaded.script.rewritten(PlanSettings({"trainer.x": {"a": 1}}, ""))


def test_a_missing_key_is_added_beside_the_others(script: Path) -> None:
    loaded = load(script, (), PROFILE)
    assert loaded.script is not None
    changed = loaded.script.rewritten(PlanSettings({"actor_rollout_ref.hybrid_engine": False}, ""))
    assert changed.replace(" ++actor_rollout_ref.hybrid_engine=false", "") == SCRIPT


def test_a_variable_that_only_a_run_could_tell_is_asked_for_by_its_name(script: Path) -> None:
    detected = "if command -v nvidia-smi; then NNODES=$(nvidia-smi -L | wc -l); fi"
    script.write_text(SCRIPT.replace("NNODES=${NNODES:-2}   # nodes", detected))
    with pytest.raises(InputError, match=r"give NNODES=VALUE, or the key: trainer\.nnodes=VALUE"):
        composed_launch(script).reader.get("trainer.nnodes")


def test_an_override_that_was_given_is_written_too(script: Path) -> None:
    loaded = load(script, ("trainer.nnodes=3",), PROFILE)
    assert loaded.script is not None
    changed = loaded.script.rewritten(PlanSettings({"trainer.nnodes": 3}, ""))
    assert changed == SCRIPT.replace("NNODES=${NNODES:-2}", "NNODES=${NNODES:-3}")


def test_the_same_program_on_other_gpus_is_another_launch(script: Path) -> None:
    words = "--use_vllm true --num_generations 8 --per_device_train_batch_size 8"
    script.write_text(f"for n in 4 8; do\naccelerate launch --num_processes $n train_grpo.py {words}\ndone\n")
    with pytest.raises(InputError, match="starts 2 trainers"):
        composed_launch(script)
    CHOICE.set(LaunchChoice(2))
    assert composed_launch(script).reader.get("num_processes") == 8
