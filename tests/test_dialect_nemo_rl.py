"""NeMo RL configs and a profile become jobs; plans become the keys that its setup checks."""

from __future__ import annotations

from typing import Any

import pytest

from dialect_plans import DATA, plan_of, profile_of
from trimtab.formats import nemo_rl
from trimtab.formats.dialect import Loaded
from trimtab.formats.hydra_config import compose
from trimtab.formats.write_back import nested
from trimtab.model.errors import InputError

SECONDS = {"generation": {8: 60.0}, "logprobs": {8: 10.0}, "policy": {8: 40.0}}
APART = ("policy.generation.colocated.enabled=false",)
ASYNC = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=2")


def load(*overrides: str, file: str = "base", extra: dict[str, dict[int, float]] | None = None) -> Loaded:
    return nemo_rl.read(compose(DATA / "nemo" / f"{file}.yaml", overrides), profile_of({**SECONDS, **(extra or {})}))


def accept(values: dict[str, Any], reward_model: bool = False) -> dict[str, int]:
    """The rules that NeMo RL's setup checks on sizes; gives the GPUs of training, generation and reward."""
    tree = nested(values)
    cluster, generation = tree["cluster"], tree["policy"]["generation"]["colocated"]
    nodes, per_node = cluster["num_nodes"], cluster["gpus_per_node"]
    reward = tree["env"]["reward_model"]["resources"] if reward_model else {"num_nodes": 0, "gpus_per_node": 0}
    policy_nodes = nodes if nodes == 1 else nodes - reward["num_nodes"]
    assert policy_nodes > 0
    if generation["enabled"]:
        gpus = per_node - reward["gpus_per_node"] if nodes == 1 else per_node
        assert gpus > 0
        return {"policy": gpus * policy_nodes, "generation": gpus * policy_nodes}
    mine = generation["resources"]
    if policy_nodes == 1:
        assert mine["gpus_per_node"] > 0
        assert mine["num_nodes"] in (None, 1)
        training = per_node - mine["gpus_per_node"] - (reward["gpus_per_node"] if nodes == 1 else 0)
        assert training > 0
        return {"policy": training, "generation": mine["gpus_per_node"]}
    assert mine["num_nodes"] > 0
    assert mine["gpus_per_node"] == per_node
    assert policy_nodes - mine["num_nodes"] > 0
    return {"policy": (policy_nodes - mine["num_nodes"]) * per_node, "generation": mine["num_nodes"] * per_node}


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
    assert accept(values) == expected


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
    assert accept(values, reward_model=True) == {"policy": 4, "generation": 4}
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
    with pytest.raises(InputError, match="holds no times"):
        nemo_rl.read(compose(DATA / "nemo" / "base.yaml"), None)


def test_sizes_follow_parallel_sizes_and_the_batch() -> None:
    workflow = load("policy.train_global_batch_size=6").job.workflow
    assert workflow.component("generation").variants[0].multiple_of == 2
    assert workflow.component("policy").variants[0].gpus == (2, 4, 6)  # data-parallel 1, 2, 3 divide 6
