"""A framework's other modes are planned with the same costs, each with all that has to be set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dialect_plans import DATA, composed, profile_of
from trimtab.formats.load import load
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.modes import ModePlan, plan_modes

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"
COSTS = {"rollout": {8: 60.0}, "inference": {8: 10.0}, "actor": {8: 40.0}, "policy": {8: 40.0}, "trainer": {8: 40.0}}
NEMO = """\
cluster: {num_nodes: 2, gpus_per_node: 8}
grpo: {num_prompts_per_step: 32, async_grpo: {enabled: false}}
policy:
  generation: {backend: vllm, colocated: {enabled: true}, vllm_cfg: {tensor_parallel_size: 1}}
  dtensor_cfg: {tensor_parallel_size: 1}
"""
OPENRLHF = """\
actor: {num_nodes: 1, num_gpus_per_node: 8}
ref: {num_nodes: 1, num_gpus_per_node: 8}
vllm: {num_engines: 8, enable_sleep: true}
train: {colocate_all: true}
algo: {advantage: {estimator: group_norm}}
"""
VERL = {"rollout": {16: 60.0}, "old_log_prob": {16: 10.0}, "update_actor": {16: 40.0}}


def modes(path: Path, costs: dict[str, dict[int, float]], *more: str) -> dict[str, ModePlan]:
    def read(words: Sequence[str]) -> LoadedJob:
        return load(path, (*more, *words), profile_of(costs))

    return {mode.mode: mode for mode in plan_modes(read(()), read)}


def test_slime_generates_ahead_from_its_other_script() -> None:
    found = modes(EXAMPLES / "slime.yaml", COSTS)
    assert [(mode.mode, mode.staleness) for mode in found.values()] == [("one step off", 1), ("fully async", 1)]
    assert found["one step off"].needs == ("start train_async.py instead of train.py", "leave out --colocate")
    assert found["one step off"].words[-1].startswith("--rollout-num-gpus=")
    assert found["one step off"].seconds is not None


def test_skyrl_has_an_example_and_a_trainer_that_generate_ahead() -> None:
    found = modes(EXAMPLES / "skyrl.yaml", COSTS)
    assert [mode.staleness for mode in found.values()] == [1, 4]
    assert "trainer.fully_async.enabled=true" in found["fully async"].words
    assert "trainer.placement.colocate_all=false" in found["one step off"].words


def test_prime_rl_that_waits_may_go_on() -> None:
    assert modes(EXAMPLES / "prime_rl.toml", COSTS) == {}  # asynchronous as it is
    found = modes(EXAMPLES / "prime_rl.toml", COSTS, "++orchestrator.max_off_policy_steps=0")
    assert found["async"].words[:2] == ("--orchestrator.max-off-policy-steps", "8")
    assert found["async"].staleness == 1


def test_verl_separates_the_rollout() -> None:
    found = modes(DATA / "verl_sync.yaml", VERL, "data.train_batch_size=256")
    (mode,) = found.values()
    assert mode.mode == "separate_async"
    assert mode.staleness == 1
    assert "++trainer.v1.trainer_mode=separate_async" in mode.words
    assert not any("trimtab" in word for word in mode.words)


def test_nemo_rl_and_openrlhf_go_asynchronous(tmp_path: Path) -> None:
    nemo = modes(composed(tmp_path, NEMO).path, {"generation": {16: 60.0}, "policy": {16: 40.0}})
    assert "++grpo.async_grpo.enabled=true" in nemo["asynchronous GRPO"].words
    assert nemo["asynchronous GRPO"].placement == "generation 8 | policy 8"
    other = modes(composed(tmp_path, OPENRLHF).path, COSTS)
    assert other["async"].needs == ("leave out --vllm.enable_sleep",)
    assert other["async"].words[0] == "--train.async_enable"
    assert other["async"].staleness == 1


def test_a_mode_that_does_not_fit_says_why(tmp_path: Path) -> None:
    # The batch divides by 16 GPUs' ranks only, and generation needs some of them.
    path = tmp_path / "slime.yaml"
    path.write_text((EXAMPLES / "slime.yaml").read_text() + "rollout_function_path: own.generate\n")
    job = load(path, (), profile_of(COSTS))

    def refused(words: Sequence[str]) -> LoadedJob:
        return load(path, (*words, "++tensor_model_parallel_size=16"), profile_of(COSTS))

    (mode,) = plan_modes(job, refused)
    assert mode.seconds is None
    assert "no multiple of its parallel sizes" in mode.reason
