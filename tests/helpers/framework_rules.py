"""The rules on sizes that NeMo RL and OpenRLHF check when they start."""

from __future__ import annotations

from typing import Any

from trimtab.formats.write_back import nested


def nemo_rl_accepts(values: dict[str, Any], reward_model: bool = False) -> dict[str, int]:
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


def openrlhf_accepts(values: dict[str, Any], tensor_parallel: int, *, is_async: bool = False) -> dict[str, int]:
    """The rules that its launcher checks; gives the GPUs of training and of the engines."""
    tree = nested(values)
    actor = tree["actor"]["num_nodes"] * tree["actor"]["num_gpus_per_node"]
    engines = tree["vllm"]["num_engines"] * tensor_parallel
    assert engines > 0
    if "ref" in tree:
        assert tree["ref"] == tree["actor"]
        assert tree["train"]["colocate_actor_ref"]
    if not is_async:
        assert tree["vllm"]["enable_sleep"] is tree["train"]["colocate_all"]
        assert engines == actor or not tree["train"]["colocate_all"]
    return {"actor": actor, "rollout": engines}
