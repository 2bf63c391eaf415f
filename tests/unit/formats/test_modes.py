"""A framework's other modes are planned with the same costs, each with all that has to be set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dialect_plans import AREAL, DATA, ROLL, TRL, composed, profile_of
from trimtab.formats.estimated_costs import load_estimated
from trimtab.formats.frameworks.common import modes_of
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.load import load
from trimtab.formats.modes import ModePlan, Reading, plan_modes
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

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


def side_by_side(read: Callable[[Sequence[str]], Reading]) -> list[ModePlan]:
    present = read(())
    space, outcome = best_plan(present[0].job, present[0].rules)
    assert outcome.best is not None
    return list(plan_modes(present, to_plan(space, outcome.best), read))


def modes(path: Path, costs: dict[str, dict[int, float]], *more: str) -> dict[str, ModePlan]:
    rows = side_by_side(lambda words: (load(path, (*more, *words), profile_of(costs)), None))
    return {mode.mode: mode for mode in rows[1:]}


def test_slime_generates_ahead_from_its_other_script() -> None:
    found = modes(EXAMPLES / "slime.yaml", COSTS)
    assert [(mode.mode, mode.staleness) for mode in found.values()] == [
        ("partial rollout", 0),
        ("one step off", 1),
        ("fully async", 1),
    ]
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
    assert [mode.mode for mode in found.values()] == ["colocate_async", "separate_async"]
    assert found["colocate_async"].words[0] == "++trainer.v1.trainer_mode=colocate_async"
    mode = found["separate_async"]
    assert mode.staleness == 1
    assert "++trainer.v1.trainer_mode=separate_async" in mode.words
    assert not any("trimtab" in word for word in mode.words)


def test_nemo_rl_and_openrlhf_go_asynchronous(tmp_path: Path) -> None:
    nemo = modes(composed(tmp_path, NEMO).path, {"generation": {16: 60.0}, "policy": {16: 40.0}})
    assert "++grpo.async_grpo.enabled=true" in nemo["asynchronous GRPO"].words
    assert nemo["asynchronous GRPO"].placement == "generation 8 | policy 8"
    assert "++grpo.async_grpo.in_flight_weight_updates=true" in nemo["asynchronous GRPO, weights in flight"].words
    other = modes(composed(tmp_path, OPENRLHF).path, COSTS)
    assert other["async"].needs == ("leave out --vllm.enable_sleep",)
    assert "--train.partial_rollout_enable" in other["async, partial rollout"].words
    assert other["async"].words[0] == "--train.async_enable"
    assert other["async"].staleness == 1


def test_a_mode_that_does_not_fit_says_why(tmp_path: Path) -> None:
    # The batch divides by 16 GPUs' ranks only, and generation needs some of them.
    path = tmp_path / "slime.yaml"
    path.write_text((EXAMPLES / "slime.yaml").read_text() + "rollout_function_path: own.generate\n")

    def read(words: Sequence[str]) -> Reading:
        more = ("++tensor_model_parallel_size=16",) if words else ()
        return load(path, (*words, *more), profile_of(COSTS)), None

    mode = next(mode for mode in side_by_side(read) if mode.mode == "one step off")
    assert mode.seconds is None
    assert "no multiple of its parallel sizes" in mode.reason


def test_areal_roll_and_trl_have_modes_with_all_that_has_to_be_set(tmp_path: Path) -> None:
    areal = modes(composed(tmp_path, AREAL).path, {"rollout": {4: 60.0}, "update_actor": {4: 40.0}})
    assert areal["async"].words[0] == "rollout.max_head_offpolicyness=2"
    assert areal["async"].staleness == 2
    roll = modes(composed(tmp_path, ROLL).path, {"rollout": {8: 60.0}, "update_actor": {8: 40.0}})
    assert "++async_generation_ratio=1" in roll["async"].words
    assert "++actor_train.training_args.gradient_accumulation_steps=16" in roll["async"].words  # as many answers
    assert roll["async"].placement.startswith("rollout 4 | ")
    trl = modes(composed(tmp_path, TRL).path, {"rollout": {8: 60.0}, "update_actor": {8: 40.0}})
    assert [mode.mode for mode in trl.values()] == ["server", "asynchronous GRPO"]
    assert trl["server"].staleness == 0
    assert "--vllm_mode=server" in trl["server"].words
    assert any("trl vllm-serve --tensor_parallel_size" in need for need in trl["server"].needs)
    assert trl["asynchronous GRPO"].staleness == 4


def test_roll_generates_ahead_beside_a_judge_and_with_environments(tmp_path: Path) -> None:
    costs = {"rollout": {8: 60.0}, "ref": {8: 10.0}, "old_log_prob": {8: 10.0}, "update_actor": {8: 40.0}}
    judge = 'rewards: {judge: {device_mapping: "list(range(6,8))"}}\n'
    engines = "device_mapping: list(range(0,{}))\n  strategy_args: {{strategy_name: vllm"
    text = ROLL.replace(engines.format(8), engines.format(6)) + judge
    beside = modes(composed(tmp_path, text).path, costs)
    assert beside["async"].placement.startswith("rollout 2 | ")
    assert not any("7" in word for word in beside["async"].words if "actor_infer" in word)  # the judge's
    environments = "train_env_manager: {num_env_groups: 8, group_size: 8}\n"
    assert modes(composed(tmp_path, ROLL + environments).path, costs)["async"].staleness == 1
    assert modes(composed(tmp_path, ROLL.replace("(0,8)", "(0,1)")).path, costs) == {}  # nothing to divide


def test_every_framework_of_the_table_is_one_that_is_read() -> None:
    for name in FRAMEWORKS:
        for entry in modes_of(name):
            assert {"mode", "set", "source"} <= set(entry), entry


def test_modes_are_estimated_as_a_whole_and_the_fastest_is_proposed() -> None:
    path = EXAMPLES.parent / "quickstart" / "verl.yaml"

    def read(words: Sequence[str]) -> Reading:
        found = load_estimated(path, words, None, {"gpu": "h100", "mean_tokens": 1700.0}, CONSTANTS)
        return found.loaded, found.settings

    own, *others = side_by_side(read)
    assert own.age == own.staleness == 0
    for mode in others:
        assert mode.seconds is not None
        assert mode.memory_gb is not None
        assert mode.gain is not None
        assert mode.seconds.low < mode.seconds.likely < mode.seconds.high
        assert mode.gain.low < mode.gain.likely < mode.gain.high
        assert mode.age is not None
        assert 0 < mode.age <= mode.staleness == 1
    best = min(others, key=lambda mode: mode.seconds.likely if mode.seconds else 0.0)
    assert [mode.mode for mode in others if mode.proposed] == [best.mode]


def test_where_scaling_is_assumed_a_mode_has_a_range(tmp_path: Path) -> None:
    found = modes(composed(tmp_path, NEMO).path, {"generation": {16: 60.0}, "policy": {16: 40.0}})
    seconds = found["asynchronous GRPO"].seconds
    assert seconds is not None
    assert seconds.low < seconds.high  # each was measured on one number of GPUs
