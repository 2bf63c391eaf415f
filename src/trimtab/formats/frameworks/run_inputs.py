"""What a framework's config or a job file says about a run's size: model, GPUs, samples, lengths, parallelism.

A key that a config does not have, or has as a placeholder, is left out: the command line may give it, or a default is
chosen and said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.formats import job
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.hydra_config import ConfigReader
from trimtab.formats.frameworks.nemo_rl import NemoRl, gpus_of
from trimtab.formats.frameworks.openrlhf import OpenRlhf
from trimtab.formats.frameworks.rlinf import Rlinf
from trimtab.formats.frameworks.verl import Verl, mode_of
from trimtab.formats.load import OpenedFile

Inputs = dict[str, Any]
LENDS = "trainer.v1.separate_async.hybrid_rollout.enable_switch"


def read(path: Path, overrides: Sequence[str] = ()) -> Inputs:
    """Inputs by the names of the command line's options, underscores for dashes; `rollout` and `train` are mappings."""
    return inputs_of(OpenedFile(path, overrides))


def inputs_of(file: OpenedFile) -> Inputs:
    """The inputs that an opened file states."""
    if file.composed is None or file.framework is None:
        cluster = job.cluster_of(file.data or {}, file.path)
        kinds = [kind for kind in cluster.kinds if kind]
        return {"gpus": cluster.gpus, **({"gpu": kinds[0]} if len(kinds) == 1 else {})}
    return _stated(READERS.get(file.framework, file.framework.inputs)(file.composed.reader))


def _stated(inputs: Inputs) -> Inputs:
    return {
        key: _stated(value) if isinstance(value, dict) else value
        for key, value in inputs.items()
        if value is not None and value != {}
    }


def _int(reader: ConfigReader, *keys: str) -> int | None:
    """The first of these keys that is a whole number above 0."""
    for key in keys:
        value = reader.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _product(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return math.prod(known) if len(known) == len(values) else None


def _sum(a: int | None, b: int | None) -> int | None:
    return a + b if a is not None and b is not None else None


def _number(reader: ConfigReader, key: str) -> float | None:
    value = reader.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _megatron(reader: ConfigReader, section: str) -> Inputs:
    """Parallel sizes under Megatron's names."""
    return {
        "tp": _int(reader, f"{section}.tensor_model_parallel_size", f"{section}.tensor_parallel_size"),
        "pp": _int(reader, f"{section}.pipeline_model_parallel_size"),
        "cp": _int(reader, f"{section}.context_parallel_size"),
        "ep": _int(reader, f"{section}.expert_model_parallel_size"),
    }


def _verl(reader: ConfigReader) -> Inputs:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    n = _int(reader, f"{rollout}.n") or 1
    megatron = reader.text(f"{actor}.strategy", "fsdp") == "megatron"
    ulysses = {"cp": _int(reader, f"{actor}.ulysses_sequence_parallel_size")}
    train = _megatron(reader, f"{actor}.megatron") if megatron else ulysses
    train["lora"] = _int(reader, "actor_rollout_ref.model.lora_rank")
    adv = reader.text("algorithm.adv_estimator", "gae")
    mode = mode_of(reader)
    pool = rollout if mode == "separate_async" else "rollout"
    apart = _product(_int(reader, f"{pool}.nnodes"), _int(reader, f"{pool}.n_gpus_per_node"))
    own = _product(_int(reader, "trainer.nnodes"), _int(reader, "trainer.n_gpus_per_node"))
    return {
        "framework": "verl",
        "model": reader.get("actor_rollout_ref.model.path"),
        "gpus": _sum(own, apart) if apart else own,
        "rollout_gpus": apart,
        "mode": {"sync": None, "colocate_async": "colocate-async"}.get(mode, "async"),
        "partial": True if mode == "separate_async" else reader.get("async_training.partial_rollout"),
        "lend": reader.get(LENDS) if mode == "separate_async" else None,
        "staleness": _number(reader, "async_training.staleness_threshold"),
        "old_log_probs": False if mode == "fully_async" else None,  # by default it takes the engines'
        "algorithm": "ppo" if adv == "gae" else adv,
        "samples": _product(_prompts(reader, mode), n),
        "train_batch": _product(_int(reader, f"{actor}.ppo_mini_batch_size"), n),
        "max_prompt_tokens": _int(reader, "data.max_prompt_length"),
        "max_tokens": _sum(_int(reader, "data.max_prompt_length"), _int(reader, "data.max_response_length")),
        "rollout": {
            "tp": _int(reader, f"{rollout}.tensor_model_parallel_size"),
            "memory": _number(reader, f"{rollout}.gpu_memory_utilization"),
            "sequences": _int(reader, f"{rollout}.max_num_seqs"),
            "backend": reader.get(f"{rollout}.name"),
        },
        "train": {**train, "backend": "megatron" if megatron else "fsdp"},
    }


def _prompts(reader: ConfigReader, mode: str) -> int | None:
    """Prompts of a step: what a fully asynchronous trainer, which has no batch, takes between two weight syncs."""
    if mode != "fully_async":
        return _int(reader, "data.train_batch_size", "data.gen_batch_size")
    section, mini = "async_training", _int(reader, "actor_rollout_ref.actor.ppo_mini_batch_size")
    batches = _int(reader, f"{section}.require_batches") or 1
    return _product(mini, batches, _int(reader, f"{section}.trigger_parameter_sync_step") or 4)


def _nemo_rl(reader: ConfigReader) -> Inputs:
    gpus = gpus_of(reader)
    section = next((name for name in ("grpo", "ppo") if reader.has(name)), "grpo")
    megatron = reader.boolean("policy.megatron_cfg.enabled", False)
    key = "policy.megatron_cfg" if megatron else "policy.dtensor_cfg"
    ahead = reader.boolean(f"{section}.async_{section}.enabled", False)
    return {
        "framework": "nemo-rl",
        "model": reader.get("policy.model_name"),
        "gpus": gpus.policy if gpus.colocated else gpus.policy + gpus.generation,
        "rollout_gpus": None if gpus.colocated else gpus.generation,
        "mode": "async" if ahead else None,
        "staleness": _number(reader, f"{section}.async_{section}.max_trajectory_age_steps") if ahead else None,
        "partial": reader.get(f"{section}.async_{section}.in_flight_weight_updates") if ahead else None,
        "algorithm": section,
        "samples": _product(
            _int(reader, f"{section}.num_prompts_per_step"), _int(reader, f"{section}.num_generations_per_prompt")
        ),
        "train_batch": _int(reader, "policy.train_global_batch_size"),
        "max_tokens": _int(reader, "policy.max_total_sequence_length"),
        "rollout": {
            "tp": _int(reader, "policy.generation.vllm_cfg.tensor_parallel_size"),
            "memory": _number(reader, "policy.generation.vllm_cfg.gpu_memory_utilization"),
        },
        "train": {**_megatron(reader, key), "backend": "megatron" if megatron else "fsdp"},
    }


def _openrlhf(reader: ConfigReader) -> Inputs:
    tp = _int(reader, "vllm.tensor_parallel_size") or 1
    engines = _int(reader, "vllm.num_engines") or 1
    actor = (_int(reader, "actor.num_nodes") or 1) * (_int(reader, "actor.num_gpus_per_node") or 8)
    shared = reader.boolean("train.colocate_all", False)
    return {
        "framework": "openrlhf",
        "model": reader.get("actor.model_name_or_path", reader.get("pretrain")),
        "gpus": actor if shared else actor + tp * engines,
        "rollout_gpus": None if shared else tp * engines,
        "mode": "async" if reader.boolean("train.async_enable", False) else None,
        "staleness": _number(reader, "train.async_queue_size"),
        "partial": reader.get("train.partial_rollout_enable"),
        "samples": _product(_int(reader, "rollout.batch_size"), _int(reader, "rollout.n_samples_per_prompt")),
        "train_batch": _int(reader, "train.batch_size"),
        "rollout": {"tp": tp, "memory": _number(reader, "vllm.gpu_memory_utilization")},
        "train": {"backend": "fsdp"},
    }


def _rlinf(reader: ConfigReader) -> Inputs:
    group = _int(reader, "algorithm.group_size") or 1
    samples = _product(_int(reader, "data.rollout_batch_size"), group)
    batches = _int(reader, "algorithm.n_minibatches")
    return {
        "framework": "rlinf",
        "model": reader.get("rollout.model.model_path", reader.get("rollout.model_dir")),
        "gpus": _product(_int(reader, "cluster.num_nodes"), _int(reader, "cluster.num_gpus_per_node")),
        "algorithm": reader.get("algorithm.adv_type"),
        "samples": samples,
        "train_batch": samples // batches if samples and batches else None,
        "max_tokens": _int(reader, "runner.seq_length"),
        "rollout": {
            "tp": _int(reader, "rollout.tensor_parallel_size"),
            "memory": _number(reader, "rollout.gpu_memory_utilization"),
            "sequences": _int(reader, "rollout.max_running_requests"),
        },
        "train": _megatron(reader, "actor.model"),
    }


READERS: Mapping[type[FrameworkConfig] | None, Callable[[ConfigReader], Inputs]] = {
    Rlinf: _rlinf,
    Verl: _verl,
    NemoRl: _nemo_rl,
    OpenRlhf: _openrlhf,
}
