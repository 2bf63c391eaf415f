"""From a config to what `trimtab check` needs: the keys of `data/check_keys.csv`, and what a table cannot say.

A settings file states the same values under trimtab's names (`rollout: {tp: 2}`), for frameworks whose configs are not
read. What the command line gives goes before both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, unknown
from trimtab.formats import catalogue, yaml_text
from trimtab.formats.frameworks import run_inputs
from trimtab.formats.frameworks.hydra_config import ConfigReader
from trimtab.formats.launch.read import is_launch
from trimtab.formats.load import OpenedFile
from trimtab.model.gpus import BITS
from trimtab.plan.check.findings import within
from trimtab.plan.check.gpu_memory import GB, engine_weights
from trimtab.plan.check.options import Exclusion
from trimtab.plan.check.setup import RunSetup

NAMES = {field.name: field for field in fields(RunSetup)}
OBJECTS = ("model", "gpu", "options", "keys", "positions")
SECTIONS = ("rollout", "train")
MOST = 10**9
ROPE: Mapping[str, tuple[str, ...]] = {
    "nemo-rl": (
        "policy.hf_config_overrides.rope_scaling",
        "policy.hf_config_overrides.max_position_embeddings",
        "policy.generation.vllm_kwargs.hf_overrides",
    ),
    "verl": (
        "actor_rollout_ref.model.override_config.rope_scaling",
        "actor_rollout_ref.model.override_config.max_position_embeddings",
        "actor_rollout_ref.model.override_config.model_config",
    ),
}
"""Keys that change a model's context."""
OFFLOADS = ("roll", "slime", "skyrl", "rlinf")
"""Frameworks that move a trainer's states to the host whenever engines share its GPUs."""
FRAMEWORK_NAMES = {"nemo_rl": "nemo-rl", "prime_rl": "prime-rl"}
RENAMED = {"model": "model_name", "samples": "prompts", "train_batch": "mini_batch", "train_tokens": "micro_tokens"}
"""Of estimates' inputs, where a framework has no rows in `data/check_keys.csv`."""
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16", "fp8_e4m3": "fp8"}


@cache
def exclusions() -> tuple[Exclusion, ...]:
    """The rows of `data/exclusive_options.yaml`."""
    text = (resources.files("trimtab.formats") / "data" / "exclusive_options.yaml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = yaml_text.parse(text, "exclusive_options.yaml")
    return tuple(Exclusion(**{**row, "dated": str(row["dated"])}) for row in rows)


def positions(name: str) -> int | None:
    """The longest context of a model of the table."""
    return next((int(row["positions"]) for row in catalogue.table("positions") if row["name"] == name), None)


def read(path: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> RunSetup:
    """A run as its config and the command line state it."""
    if not is_launch(path, overrides):
        data = yaml_text.parse_config(yaml_text.read_text(path), str(path))
        if isinstance(data, Mapping) and is_settings(data):
            return build({**settings(yaml_text.overridden(data, overrides), str(path)), **given}, {}, data, str(path))
    file = OpenedFile(path, overrides)
    composed, framework = file.composed, file.framework
    values = flattened(run_inputs.inputs_of(file))
    for name, own in RENAMED.items():
        if name in values:
            values[own] = values.pop(name)
    if framework is None or composed is None:
        return build({**values, **given}, {}, {}, str(path))
    name = FRAMEWORK_NAMES.get(framework.NAME, framework.NAME)
    stated, keys = from_table(name, composed.reader)
    values = {**values, **stated, "framework": name, "version": str(given.get("version") or "")}
    keys.setdefault("model_name", "model")
    if given.get("model_name"):
        keys.pop("model_name")
    if name in ODD:
        ODD[name](composed.reader, values, keys)
    else:
        moved = name in OFFLOADS and not values.get("rollout_gpus")
        values.update(
            in_part=True, train_uneven_stages=True, train_offload_weights=moved, train_offload_optimizer=moved
        )
    wanted = {key for row in exclusions() if row.framework == name for key in row.when}
    options = {key: _option(composed.reader, key) for key in wanted}
    setup = build({**values, **given}, keys, options, str(path))
    scaled = any(composed.reader.has(key) for key in ROPE.get(name, ()))
    return replace(setup, positions=None) if scaled else setup


def is_settings(data: Mapping[str, Any]) -> bool:
    """Whether a file states a run under trimtab's names."""
    named = [key for key in data if key in (*SECTIONS, *NAMES)]
    return "model" in data and isinstance(data["model"], str) and len(named) == len(data)


def settings(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values of a settings file, checked by name."""
    values = flattened(data)
    for name in values:
        if name not in NAMES or name in ("options", "keys"):
            raise unknown(name, [key for key in NAMES if key not in ("options", "keys")], where=where)
    values["model_name"] = values.pop("model")
    return values


def flattened(data: Mapping[str, Any]) -> dict[str, Any]:
    """`rollout: {tp: 2}` as `rollout_tp: 2`, without what is not stated."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, Mapping):
            found.update({f"{key}_{name}": inner for name, inner in value.items()})
        elif value is not None:
            found[str(key)] = value
    return {key: value for key, value in found.items() if value is not None}


def from_table(framework: str, reader: ConfigReader) -> tuple[dict[str, Any], dict[str, str]]:
    """(values, the keys they stand under) by the rows of a framework and of its training backend."""
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    backend = BACKENDS[framework](reader) if framework in BACKENDS else ""
    for row in catalogue.table("check_keys"):
        if row["framework"] not in (framework, f"{framework}/{backend}"):
            continue
        name, key = row["name"], row["key"]
        keys[name] = key
        found = _option(reader, key)
        if found is None and row["default"]:
            found = catalogue.number_or_word(row["default"])
        if found is not None:
            values[name] = found
        else:
            values.pop(name, None)
    if backend:
        values["train_backend"] = backend
    return values, keys


def _option(reader: ConfigReader, key: str) -> Any:
    """A plain value, None where it is not stated or cannot be resolved."""
    try:
        value = reader.get(key)
    except InputError:
        return None
    return value if isinstance(value, bool | int | float | str) else None


def build(given: Mapping[str, Any], keys: Mapping[str, str], options: Mapping[str, Any], where: str) -> RunSetup:
    """The setup with its model and GPU kind, every value of its type and in its range."""
    values = {name: _typed(name, value, keys.get(name, name), where) for name, value in given.items() if name in NAMES}
    setup = RunSetup(**{**values, "keys": keys, "options": options})
    if setup.model_name:
        setup = _with_model(setup, required="model_name" not in keys)
    if given.get("gpu"):
        gpu = catalogue.gpu(str(given["gpu"]))
        setup = replace(setup, gpu=gpu, host_memory=setup.host_memory or gpu.host_memory_gb)
    setup = replace(setup, shared=not setup.rollout_gpus)
    pinned = given.get("cache_bytes")
    if isinstance(pinned, int) and setup.model and setup.gpu:
        share = (pinned / GB + engine_weights(setup, setup.model) + 2.0) / setup.gpu.memory_gb
        setup = replace(setup, rollout_memory=min(1.0, share))
    return setup


def _with_model(setup: RunSetup, *, required: bool) -> RunSetup:
    try:
        name, model = catalogue.model(setup.model_name)
    except InputError:
        if required:
            raise
        return setup
    return replace(setup, model=model, positions=positions(name))


def _typed(name: str, value: Any, key: str, where: str) -> Any:
    kind = str(NAMES[name].type)
    if kind == "bool":
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif kind.startswith("str"):
        word = PRECISIONS.get(str(value), str(value))
        if name in ("rollout_precision", "rollout_kv"):
            return word if word in BITS else "bf16"
        return word
    elif name in OBJECTS:
        return None
    else:
        least = 0 if name in ("rollout_gpus", "train_lora", "train_zero") or kind.startswith("float") else 1
        whole = kind.startswith("int")
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if number and least <= value < MOST and (not whole or value == int(value)):
            return int(value) if whole else float(value)
        wanted = f"a {'whole ' if whole else ''}number from {least}"
    raise InputError(f"{wanted} is expected, not {value!r:.60}", where=f"{where}: {key}")


ACTOR = "actor_rollout_ref.actor"


# ---- what a table cannot say -----------------------------------------------------------------------------------------


def _verl(reader: ConfigReader, values: dict[str, Any], keys: dict[str, str]) -> None:
    megatron = values["train_backend"] == "megatron"
    group = values.get("group", 1)
    for name in ("prompts", "group", "mini_batch"):
        if isinstance(values.get(name), int) and name == "mini_batch":
            values[name] *= group
    nodes, each = _option(reader, "trainer.nnodes") or 1, _option(reader, "trainer.n_gpus_per_node") or 8
    if isinstance(nodes, int) and isinstance(each, int):
        values["gpus_per_node"] = each
        values["gpus"] = nodes * each + int(values.get("rollout_gpus") or 0)
        own = nodes * each
        keys["gpus"] = "trainer.nnodes"
        sp = values.get("train_sp", 1)
        whole = _option(reader, "actor_rollout_ref.actor.ppo_micro_batch_size")
        if "micro_batch" not in values and isinstance(whole, int) and isinstance(sp, int):
            values["micro_batch"] = max(1, whole // max(1, own // sp))
            keys["micro_batch"] = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
        logprobs = [
            values.get("logprob_batch"),
            _option(reader, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
        ]
        for key in ("actor_rollout_ref.rollout", "actor_rollout_ref.ref"):
            everywhere = _option(reader, f"{key}.log_prob_micro_batch_size")
            logprobs.append(max(1, everywhere // own) if isinstance(everywhere, int) else None)
        stated = [size for size in logprobs if isinstance(size, int)]
        if stated:
            values["logprob_batch"] = max(stated)
    if values.get("train_shards", -1) in (-1, None) or not isinstance(values.get("train_shards"), int):
        values.pop("train_shards", None)
    elif values["train_shards"] < 1:
        values.pop("train_shards")
    nested = _option(reader, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size")
    if values.get("train_sp") == 1 and isinstance(nested, int) and nested > 1:
        values["train_sp"] = nested
    estimator = _option(reader, "algorithm.adv_estimator")
    values["critic"] = estimator == "gae" or (estimator is None and reader.has("critic"))
    saves = _option(reader, "trainer.save_freq")
    values["train_save_copies"] = isinstance(saves, int) and saves > 0 and not megatron
    version = str(values.get("version") or "")
    values["rollout_swap"] = 4.0 if within(version, "", "0.5") else 0.0  # vLLM before its first engine
    swap = _option(reader, "actor_rollout_ref.rollout.swap_space")
    if isinstance(swap, int | float):
        values["rollout_swap"] = float(swap)
    values["rollout_whole_context"] = within(version, "0.7", "")
    # Weights of a sleeping vLLM were kept in host memory (level 1) until 0.6, and are beside adapters.
    backed = within(version, "0.3", "0.6") or bool(values.get("train_lora"))
    values["rollout_backup"] = backed and values.get("rollout_backend") == "vllm"
    early = within(version, "", "0.3.1")
    values.update(rollout_wakes_whole=early, rollout_full_copy=early)
    values["reference"] = bool(
        _option(reader, "actor_rollout_ref.actor.use_kl_loss") or _option(reader, "algorithm.use_kl_in_reward")
    )
    # Other trainers' own sections are not read: what fits may stand there.
    values["in_part"] = _option(reader, f"{ACTOR}.strategy") not in (None, "fsdp", "fsdp2", "megatron")
    if megatron:
        values.update(train_weight_bytes=2.0, train_gradient_bytes=4.0, train_optimizer_bytes=12.0, train_sp=1)
        values["train_logit_bytes"] = 10.0
        recompute = _option(
            reader, "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity"
        )
        values["train_recompute"] = recompute == "full"
        ends = "actor_rollout_ref.actor.megatron.override_transformer_config"
        values["train_uneven_stages"] = any(
            _option(reader, f"{ends}.{name}") is not None
            for name in (
                "num_layers_in_first_pipeline_stage",
                "num_layers_in_last_pipeline_stage",
                "account_for_embedding_in_pipeline_split",
                "pipeline_model_parallel_layout",
            )
        )
        if "train_etp" not in values:
            values["train_etp"] = values.get("train_tp", 1)
    else:
        values["train_cp"] = 1  # estimates call Ulysses' size so
        size = (
            2.0
            if str(_option(reader, "actor_rollout_ref.actor.fsdp_config.model_dtype")) in ("bf16", "bfloat16")
            else 4.0
        )
        values.update(train_weight_bytes=size, train_gradient_bytes=size, train_optimizer_bytes=2 * size)
        if _option(reader, f"{ACTOR}.strategy") == "fsdp2" and _option(reader, f"{ACTOR}.fsdp_config.offload_policy"):
            values.update(train_weight_bytes=0.0, train_gradient_bytes=0.0, train_cpu_optimizer=True)
        entropy = _option(reader, "actor_rollout_ref.actor.entropy_coeff")
        # Releases before 0.4 computed the entropy of every micro-batch, with a softmax and a product beside the logits.
        always = within(values["version"], "", "0.4")
        values["train_logit_bytes"] = 10.0 if entropy or always else 6.0
        values["train_entropy"] = 10.0 if always else 0.0


def _nemo_rl(reader: ConfigReader, values: dict[str, Any], keys: dict[str, str]) -> None:
    section = next((name for name in ("grpo", "ppo") if reader.has(name)), "grpo")
    if section != "grpo":
        for name, key in (("prompts", "num_prompts_per_step"), ("group", "num_generations_per_prompt")):
            values[name], keys[name] = _option(reader, f"{section}.{key}"), f"{section}.{key}"
    gpus_per_node = _option(reader, "cluster.gpus_per_node")
    if isinstance(gpus_per_node, int):
        values["gpus_per_node"], keys["gpus"] = gpus_per_node, "cluster.num_nodes"
    for kind in ("sequence_packing", "dynamic_batching"):
        if _option(reader, f"policy.{kind}.enabled") is True:
            values.update(dynamic=True, packed=True)
            for name, key in (("micro_tokens", "train_mb_tokens"), ("logprob_tokens", "logprob_mb_tokens")):
                tokens = _option(reader, f"policy.{kind}.{key}")
                if isinstance(tokens, int | float):
                    # NeMo RL's limit is for all context-parallel ranks of a sequence together.
                    values[name], keys[name] = (
                        max(1, int(tokens) // int(values.get("train_cp") or 1)),
                        f"policy.{kind}.{key}",
                    )
    values.setdefault("packed", False)
    colocated = _option(reader, "policy.generation.colocated.enabled") is not False
    values.update(train_offload_weights=colocated, train_offload_optimizer=colocated, reference_offload=True)
    values["reference"] = bool(_option(reader, "loss_fn.reference_policy_kl_penalty"))
    values["critic"] = section == "ppo"
    if values["train_backend"] == "megatron":
        fp32 = _option(reader, "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32") is True
        values.update(train_weight_bytes=2.0, train_gradient_bytes=4.0 if fp32 else 2.0, train_optimizer_bytes=12.0)
        deferred = _option(reader, "policy.megatron_cfg.defer_fp32_logits") is True
        peft = "policy.megatron_cfg.peft"
        stages = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        values["train_uneven_stages"] = any(
            _option(reader, f"policy.megatron_cfg.{name}") is not None for name in stages
        )
    else:
        values.update(train_weight_bytes=4.0, train_gradient_bytes=4.0, train_optimizer_bytes=8.0)
        if values.get("train_cpu_optimizer"):
            values.update(train_weight_bytes=0.0, train_gradient_bytes=0.0)
        deferred, peft = True, "policy.dtensor_cfg.lora_cfg"
    chunked = _option(reader, "policy.logprob_chunk_size") is not None and deferred
    values["train_logit_bytes"] = 6.0 if chunked else 12.0
    # Unless it goes in chunks, a pass for log-probs has logits in bf16 and, at once, in fp32, shifted, and normalised.
    parallel = values["train_backend"] == "megatron" or int(values.get("train_tp") or 1) > 1
    values["train_entropy"] = 0.0 if chunked else 14.0 if parallel else 10.0
    if _option(reader, f"{peft}.enabled") is True:
        values["train_lora"], keys["train_lora"] = _option(reader, f"{peft}.dim") or 8, f"{peft}.dim"
    if values.get("rollout_backend") not in ("vllm", "sglang"):
        values.pop("rollout_memory", None)
    values["cache_bytes"] = _option(reader, "policy.generation.vllm_kwargs.kv_cache_memory_bytes")
    values["rollout_ep"] = 1


def _openrlhf(reader: ConfigReader, values: dict[str, Any], keys: dict[str, str]) -> None:
    each = _option(reader, "actor.num_gpus_per_node")
    values["gpus_per_node"], keys["gpus"] = each if isinstance(each, int) else 8, "actor.num_nodes"
    values["train_backend"] = "deepspeed"
    if _option(reader, "train.async_enable") is True:  # engines decode beside training, on GPUs of their own
        apart = int(values.get("engines") or 1) * int(values.get("rollout_tp") or 1)
        nodes = _option(reader, "actor.num_nodes")
        values.update(
            rollout_gpus=apart, gpus=apart + values["gpus_per_node"] * (nodes if isinstance(nodes, int) else 1)
        )
    wide = _option(reader, "ds.grad_accum_dtype") == "fp32" or within(str(values.get("version") or ""), "", "0.5.5")
    values.update(train_weight_bytes=2.0, train_gradient_bytes=4.0 if wide else 2.0, train_optimizer_bytes=12.0)
    values["reference"] = bool(_option(reader, "algo.kl.init_coef") is None or _option(reader, "algo.kl.init_coef"))
    values["critic"] = str(_option(reader, "algo.advantage.estimator") or "gae") == "gae"
    sleeps = _option(reader, "ds.enable_sleep") is True
    values.update(train_offload_weights=sleeps, train_offload_optimizer=sleeps, rollout_backup=True)
    values["train_loads_everywhere"] = int(values.get("train_zero") or 0) < 3
    values["rollout_max_length"] = values.get("max_tokens")
    keys["rollout_max_length"] = "data.max_len"


ODD: Mapping[str, Callable[[ConfigReader, dict[str, Any], dict[str, str]], None]] = {
    "verl": _verl,
    "nemo-rl": _nemo_rl,
    "openrlhf": _openrlhf,
}
BACKENDS: Mapping[str, Callable[[ConfigReader], str]] = {
    "verl": lambda reader: "megatron" if _option(reader, "actor_rollout_ref.actor.strategy") == "megatron" else "fsdp",
    "nemo-rl": lambda reader: "megatron" if _option(reader, "policy.megatron_cfg.enabled") is True else "fsdp",
}
