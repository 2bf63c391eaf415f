"""OpenRLHF's flags and a profile become jobs; plans become flags that its launcher takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dialect_plans import composed, plan_of, profile_of
from framework_rules import openrlhf_accepts
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.frameworks.openrlhf import OpenRlhf
from trimtab.formats.load import load as load_any
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.write_back import nested, overrides, shell_words

SECONDS = {"rollout": {8: 60.0}, "inference": {8: 10.0}, "actor": {8: 40.0}}
SHARED = """\
actor: {num_nodes: 1, num_gpus_per_node: 8}
ref: {num_nodes: 1, num_gpus_per_node: 8}
vllm: {num_engines: 4, tensor_parallel_size: 2, enable_sleep: true}
train: {colocate_all: true}
algo: {advantage: {estimator: group_norm}, kl: {init_coef: 0.01}}
rollout: {batch_size: 128}
"""
APART = """\
actor: {num_nodes: 1, num_gpus_per_node: 4}
vllm: {num_engines: 4}
train: {async_enable: true}
algo: {advantage: {estimator: group_norm}, kl: {init_coef: 0}}
"""
PPO = """\
ref: {num_nodes: 1, num_gpus_per_node: 2}
critic: {num_nodes: 1, num_gpus_per_node: 2}
actor: {num_nodes: 1, num_gpus_per_node: 2}
vllm: {num_engines: 2, tensor_parallel_size: 2}
train: {colocate_actor_ref: true, micro_batch_size: 8, batch_size: 128}
reward: {remote_url: /path/reward_func.py}
rollout: {micro_batch_size: 16, batch_size: 1024}
algo: {kl: {init_coef: 0.01}}
"""


def load(folder: Path, text: str, *more: str) -> LoadedJob:
    return OpenRlhf.read(composed(folder, text, *more), profile_of(SECONDS))


def test_experience_is_made_where_the_actor_is(tmp_path: Path) -> None:
    loaded = load(tmp_path, SHARED)
    assert loaded.job.workflow.names == ("rollout", "inference", "actor")
    assert (loaded.job.workflow.batches, loaded.job.workflow.staleness) == (128, 0)
    assert loaded.rules is not None
    assert [{g.components for g in grouping} for grouping in loaded.rules.groupings] == [
        {frozenset(SECONDS)},
        {frozenset(["rollout"]), frozenset(["inference", "actor"])},
    ]
    assert loaded.current is not None
    assert loaded.current.ranks == dict.fromkeys(SECONDS, tuple(range(8)))


def test_in_an_asynchronous_run_generation_is_apart_and_ahead(tmp_path: Path) -> None:
    loaded = load(tmp_path, APART, "++train.async_queue_size=3")
    assert loaded.job.workflow.staleness == 3
    assert loaded.job.cluster.gpus == 8
    assert loaded.rules is not None
    assert len(loaded.rules.groupings) == 1
    assert loaded.current is not None
    assert loaded.current.ranks["actor"] == (0, 1, 2, 3)
    assert loaded.current.ranks["rollout"] == (4, 5, 6, 7)


def test_plans_become_flags_that_the_launcher_takes(tmp_path: Path) -> None:
    loaded = load(tmp_path, SHARED)
    apart = loaded.settings(plan_of({"inference actor": range(4), "rollout": range(4, 8)}))
    assert openrlhf_accepts(dict(apart.values), 2) == {"actor": 4, "rollout": 4}
    assert apart.advice == ("leave out --train.colocate_all, --vllm.enable_sleep",)
    shared = loaded.settings(plan_of({"rollout inference actor": range(8)}))
    assert openrlhf_accepts(dict(shared.values), 2) == {"actor": 8, "rollout": 8}
    assert shell_words(shared)[0] == "--actor.num_nodes=1"
    assert "--train.colocate_all" in shell_words(shared)
    ahead = load(tmp_path, APART).settings(plan_of({"inference actor": range(2), "rollout": range(2, 8)}))
    assert openrlhf_accepts(dict(ahead.values), 1, is_async=True) == {"actor": 2, "rollout": 6}
    assert shell_words(ahead) == ["--actor.num_nodes=1", "--actor.num_gpus_per_node=2", "--vllm.num_engines=6"]


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    loaded = load(tmp_path, APART)
    settings = loaded.settings(plan_of({"inference actor": range(2), "rollout": range(2, 8)}))
    again = load_any(loaded.path, overrides(settings), profile_of(SECONDS))
    assert again.file_format == "openrlhf"
    assert again.current is not None
    assert {name: len(ranks) for name, ranks in again.current.ranks.items()} == {
        "rollout": 6,
        "inference": 2,
        "actor": 2,
    }


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (SHARED, ["vllm.num_engines=3"], "engines have 6 GPUs and the actor 8"),
        (APART, ["actor.num_gpus_per_node=8"], "do not say on which nodes"),
        (APART, ["++algo.advantage.estimator=gae"], "the run has 16 GPUs, and its flags do not say on which nodes"),
        (APART, ["~algo"], "the run has 24 GPUs"),  # a critic and a reference, each on a node
        (APART, ["++trimtab.gpus_per_node=4"], "the run has 8 GPUs, the cluster 4"),
        (APART, ["vllm.num_engines=none"], "whole number"),
    ],
)
def test_what_cannot_be_planned_is_refused(text: str, more: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        load(tmp_path, text, *more)


def test_without_an_estimator_there_is_a_critic_and_it_keeps_its_gpus(tmp_path: Path) -> None:
    loaded = load(tmp_path, PPO)
    assert loaded.job.cluster.gpus == 6  # of 8
    assert any("critic on 2 GPUs of its own" in said for said in loaded.assumptions)
    assert loaded.current is not None
    assert {name: len(gpus) for name, gpus in loaded.current.ranks.items()} == {
        "rollout": 4,
        "inference": 2,
        "actor": 2,
    }
    on_a_node = load(tmp_path, PPO, "++trimtab.nodes=1", "++trimtab.gpus_per_node=8")
    assert on_a_node.job.cluster.gpus == 6
    with pytest.raises(InputError, match="the run has 8 GPUs, the cluster 6"):
        load(tmp_path, PPO, "++trimtab.nodes=1", "++trimtab.gpus_per_node=6")
    assert loaded.rules is not None
    assert [{g.components for g in grouping} for grouping in loaded.rules.groupings] == [
        {frozenset(["rollout"]), frozenset(["inference", "actor"])}
    ]
    assert load(tmp_path, PPO, "++algo.advantage.estimator=rloo").job.cluster.gpus == 6
    assert not any("critic" in said for said in load(tmp_path, PPO, "++algo.advantage.estimator=rloo").assumptions)


def test_critic_and_reward_model_may_share_their_own_gpus(tmp_path: Path) -> None:
    model = ("~reward.remote_url", "++reward.model_name_or_path=m", "++reward.num_gpus_per_node=2")
    nodes = ("++trimtab.nodes=2", "++trimtab.gpus_per_node=8")
    assert load(tmp_path, PPO, *model, *nodes).job.cluster.gpus == 12
    assert load(tmp_path, PPO, *model, *nodes, "++train.colocate_critic_reward=true").job.cluster.gpus == 14


def test_models_that_share_the_actors_gpus_get_as_many_and_stay_there(tmp_path: Path) -> None:
    loaded = load(tmp_path, SHARED, "algo.advantage.estimator=gae")
    values = nested(dict(loaded.settings(plan_of({"rollout inference actor": range(4)})).values))
    assert values["critic"] == values["ref"] == values["actor"] == {"num_nodes": 1, "num_gpus_per_node": 4}
    assert loaded.rules is not None
    assert len(loaded.rules.groupings) == 1


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ((), [1, 2, 4]),  # 128 samples, one at a time
        (("++train.batch_size=96",), [1, 2, 3, 4, 6]),
        (("++train.batch_size=96", "++train.micro_batch_size=8"), [1, 2, 3, 4, 6]),
        (("++train.batch_size=96", "++train.micro_batch_size=16"), [1, 2, 3, 6]),
        (("++ds.ring_attn_size=2",), [2, 4]),
        (("++rollout.batch_size=2", "++train.batch_size=2"), [1, 2]),
    ],
)
def test_the_training_gpus_divide_the_batch(more: tuple[str, ...], sizes: list[int], tmp_path: Path) -> None:
    rules = load(tmp_path, APART, *more).rules
    assert rules is not None
    (training,) = [group for group in rules.groupings[0] if "actor" in group.components]
    assert [size for size in training.sizes or () if size < 8] == sizes


def test_parallel_sizes_that_fit_no_number_of_gpus_are_infeasible(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError):
        load(tmp_path, APART, "++ds.tensor_parallel_size=16")


def test_on_several_nodes_pools_are_whole_nodes(tmp_path: Path) -> None:
    nodes = ("actor.num_nodes=2", "actor.num_gpus_per_node=8", "vllm.num_engines=16")
    loaded = load(tmp_path, APART, *nodes, "++trimtab.nodes=4", "++trimtab.gpus_per_node=8")
    settings = loaded.settings(plan_of({"inference actor": range(8), "rollout": range(8, 32)}, total=32))
    assert openrlhf_accepts(dict(settings.values), 1, is_async=True) == {"actor": 8, "rollout": 24}
    with pytest.raises(InputError, match="OpenRLHF cannot run this plan"):
        loaded.settings(plan_of({"inference actor": range(12), "rollout": range(12, 32)}, total=32))
