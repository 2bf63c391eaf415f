"""NeMo RL configs and a profile become jobs; plans become the keys that its setup checks."""

from __future__ import annotations

import pytest

from dialect_plans import DATA, plan_of, profile_of
from framework_rules import nemo_rl_accepts
from trimtab.core.errors import InputError
from trimtab.formats.frameworks.hydra_config import compose
from trimtab.formats.frameworks.nemo_rl import NemoRl
from trimtab.formats.loaded import LoadedJob

SECONDS = {"generation": {8: 60.0}, "logprobs": {8: 10.0}, "policy": {8: 40.0}}
APART = ("policy.generation.colocated.enabled=false",)
ASYNC = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2")


def load(*overrides: str, file: str = "base", extra: dict[str, dict[int, float]] | None = None) -> LoadedJob:
    return NemoRl.read(compose(DATA / "nemo" / f"{file}.yaml", overrides), profile_of({**SECONDS, **(extra or {})}))


def test_the_workflow_has_log_probs_and_training_together() -> None:
    loaded = load()
    assert loaded.job.workflow.names == ("generation", "logprobs", "policy")
    assert loaded.job.workflow.batches == 64
    assert loaded.rules is not None
    assert [{g.components for g in grouping} for grouping in loaded.rules.groupings] == [
        {frozenset(SECONDS)},
        {frozenset(["generation"]), frozenset(["logprobs", "policy"])},
    ]
    assert all(c.granularity is None for c in loaded.job.workflow.components)


@pytest.mark.parametrize(
    ("file", "groups", "expected"),
    [
        ("base", {"generation logprobs policy": range(8)}, {"policy": 8, "generation": 8}),
        ("base", {"generation logprobs policy": range(4)}, {"policy": 4, "generation": 4}),
        ("base", {"generation": range(6), "logprobs policy": (6, 7)}, {"policy": 2, "generation": 6}),
        ("base", {"generation": (0, 1), "logprobs policy": (2, 3)}, {"policy": 2, "generation": 2}),
        ("child", {"generation logprobs policy": range(32)}, {"policy": 32, "generation": 32}),
        ("child", {"generation": range(16), "logprobs policy": range(16, 32)}, {"policy": 16, "generation": 16}),
        ("child", {"generation": range(8), "logprobs policy": range(8, 24)}, {"policy": 16, "generation": 8}),
    ],
)
def test_what_is_written_passes_the_checks_and_gives_the_planned_gpus(
    file: str, groups: dict[str, range], expected: dict[str, int]
) -> None:
    values = dict(load(file=file).settings(plan_of(groups, total=32)).values)
    assert nemo_rl_accepts(values) == expected


def test_off_one_node_generation_takes_whole_nodes() -> None:
    with pytest.raises(InputError, match="cannot have 4 GPUs"):
        load(file="child").settings(plan_of({"generation": range(4), "logprobs policy": range(8, 16)}, total=32))


def test_log_probs_are_never_apart_from_training() -> None:
    with pytest.raises(InputError, match="NeMo RL cannot run this plan"):
        load().settings(plan_of({"generation logprobs": range(4), "policy": range(4, 8)}))


def test_a_reward_model_has_gpus_of_its_own_and_any_other_reward_none() -> None:
    assert load(extra={"reward": {8: 2.0}}).job.workflow.component("reward").cpu_seconds == 2.0
    model = ("+env.reward_model.resources={gpus_per_node: 2, num_nodes: 1}",)
    loaded = load(*model, extra={"reward": {2: 2.0}})
    values = dict(loaded.settings(plan_of({"generation logprobs policy": range(4), "reward": (4, 5)})).values)
    assert nemo_rl_accepts(values, reward_model=True) == {"policy": 4, "generation": 4}
    assert loaded.current is not None
    assert loaded.current.ranks["reward"] == (6, 7)
    assert loaded.current.ranks["policy"] == tuple(range(6))


def test_asynchronous_training_is_stale_and_always_apart() -> None:
    with pytest.raises(InputError, match="GPUs of its own"):
        load(*ASYNC)
    loaded = load(*ASYNC, *APART, "policy.generation.colocated.resources.gpus_per_node=4")
    assert loaded.job.workflow.staleness == 2
    assert loaded.rules is not None
    assert len(loaded.rules.groupings) == 1
    assert any("asynchronous" in a for a in loaded.assumptions)


SINGLE = ("grpo.async_grpo=null", *APART, "policy.generation.colocated.resources.gpus_per_node=4")


@pytest.mark.parametrize(
    ("sampler", "staleness"),
    [
        ("{name: in_order, max_lookahead_versions: 1}", 1),
        ("{name: in_order, max_lookahead_versions: 0}", 0),
        ("{name: windowed, max_staleness_versions: 3}", 3),
        ("{name: ready_first}", 1),
    ],
)
def test_the_single_controller_is_as_stale_as_its_sampler_lets_it_be(sampler: str, staleness: int) -> None:
    loaded = load(*SINGLE, f"+async_rl={{sampler: {sampler}, min_groups_for_streaming_train: 64}}")
    assert loaded.job.workflow.staleness == staleness
    assert loaded.current is not None
    assert len(loaded.current.ranks["generation"]) == len(loaded.current.ranks["policy"]) == 4
    assert all(c.granularity is None for c in loaded.job.workflow.components)
    assert loaded.rules is not None
    # On-policy it may as well share; what trains beside generation may not.
    assert len(loaded.rules.groupings) == (1 if staleness else 2)


def test_the_single_controller_trains_on_the_prompts_that_are_ready() -> None:
    loaded = load(*SINGLE, "+async_rl={min_groups_for_streaming_train: 16}")
    assert [c.granularity for c in loaded.job.workflow.components] == [None, 16, 16]
    assert any("16 prompts at a time" in said for said in loaded.assumptions)


def test_megatron_generates_asynchronously_on_the_training_gpus() -> None:
    loaded = load(*ASYNC, "policy.generation.backend=megatron", "+policy.megatron_cfg.tensor_model_parallel_size=2")
    assert loaded.job.workflow.staleness == 2
    assert loaded.current is not None
    assert loaded.current.ranks["generation"] == loaded.current.ranks["policy"] == tuple(range(8))
    assert loaded.rules is not None
    assert frozenset(SECONDS) in {g.components for grouping in loaded.rules.groupings for g in grouping}


def test_batches_computed_by_the_frameworks_arithmetic_are_read() -> None:
    product = "policy.train_global_batch_size='${mul:${grpo.num_prompts_per_step}, 3}'"
    loaded = load(product)
    (variant,) = loaded.job.workflow.component("policy").variants
    assert not variant.allows(5)
    assert variant.allows(6)


@pytest.mark.parametrize("algorithm", ["ppo", "distillation"])
def test_prompts_of_a_step_are_read_from_the_section_of_the_algorithm(algorithm: str) -> None:
    loaded = load("~grpo", f"+{algorithm}={{num_prompts_per_step: 48, async_ppo: {{enabled: false}}}}")
    assert loaded.job.workflow.batches == 48


def test_asynchronous_ppo_has_a_section_of_its_own() -> None:
    ppo = "+ppo={num_prompts_per_step: 48, async_ppo: {enabled: true, max_trajectory_age_steps: 2}}"
    loaded = load("~grpo", ppo, *APART, "policy.generation.colocated.resources.gpus_per_node=4")
    assert loaded.job.workflow.staleness == 2


def test_teachers_keep_their_nodes_and_are_written_back_beside_the_plan() -> None:
    teachers = (
        "+on_policy_distillation={enabled: true, teacher_model_by_agent_name: {one: a, two: a, three: b},"
        "non_colocated_teachers: {enabled: true, default_teacher_cfg: {num_nodes: 1}}}"
    )
    loaded = load(teachers, *APART, "policy.generation.colocated.resources.num_nodes=1", file="child")
    assert loaded.job.cluster.gpus == 16  # of 32
    assert loaded.current is not None
    assert {name: len(gpus) for name, gpus in loaded.current.ranks.items()} == {
        "generation": 8,
        "logprobs": 8,
        "policy": 8,
    }
    assert any("teachers keep their 2 nodes" in said for said in loaded.assumptions)
    values = loaded.settings(plan_of({"generation": range(8), "logprobs policy": range(8, 16)}, total=16)).values
    assert values["cluster.num_nodes"] == 4
    assert values["cluster.gpus_per_node"] == 8


def test_a_reward_model_without_a_cost_keeps_its_gpus() -> None:
    loaded = load("+env.reward_model.resources={gpus_per_node: 2, num_nodes: 1}")
    assert loaded.current is not None
    assert loaded.current.ranks["policy"] == tuple(range(6))
    values = loaded.settings(plan_of({"generation logprobs policy": range(4)}, total=6)).values
    assert values["cluster.gpus_per_node"] == 6


def test_generation_is_not_put_apart_where_its_engine_cannot_be() -> None:
    for backend, groupings in (("vllm", 2), ("sglang", 1)):
        rules = load(f"policy.generation.backend={backend}").rules
        assert rules is not None
        assert len(rules.groupings) == groupings


def test_the_current_placement_follows_the_resources() -> None:
    one_node = load(*APART, "policy.generation.colocated.resources.gpus_per_node=6").current
    assert one_node is not None
    assert one_node.ranks["generation"] == tuple(range(6))
    assert one_node.ranks["policy"] == (6, 7)
    nodes = load(*APART, "policy.generation.colocated.resources.num_nodes=1", file="child").current
    assert nodes is not None
    assert len(nodes.ranks["policy"]) == 24


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ((*APART, "policy.generation.colocated.resources.gpus_per_node=8"), "none is left"),
        (APART, "gpus_per_node is missing"),
        (("~cluster.gpus_per_node",), "gpus_per_node is missing"),
        (("cluster.num_nodes=-2",), "above 0"),
    ],
)
def test_invalid_sizes_are_errors(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError, match=what):
        load(*overrides)


def test_without_a_profile_the_error_says_how_to_make_one() -> None:
    with pytest.raises(InputError, match="has no times"):
        NemoRl.read(compose(DATA / "nemo" / "base.yaml"), None)


def test_sizes_follow_parallel_sizes_and_the_batch() -> None:
    workflow = load("policy.train_global_batch_size=6").job.workflow
    assert workflow.component("generation").variants[0].multiple_of == 2
    assert workflow.component("policy").variants[0].gpus == (2, 4, 6)  # data-parallel 1, 2, 3 divide 6
