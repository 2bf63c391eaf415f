"""GB of a GPU in each phase of a step: start of the engine, generation, wake-up, log-probs, update.

Terms of activations and logits are those of `estimate.memory`; states follow what each backend keeps. What shares a
GPU adds what stays on it: weights and optimiser that are not offloaded, a reference or a critic, and the contexts and
graphs of a sleeping engine. GB are 2^30 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import GpuKind
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate import memory
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.estimate.phases import Phase, context_gb, layer_copies
from trimtab.plan.estimate.serving import EngineReplica, kv_bytes, weight_bytes

GB = 2**30
USABLE = 0.985
"""Of the memory that a GPU is sold with: an H100-80 shows 79.1 GiB."""
GRAPHS_GB = 1.0
"""CUDA graphs and communication buffers of an engine, outside its share; gone with eager execution."""
ASLEEP_GB = 0.6
"""What a sleeping engine leaves beside its context: graphs, the sampler, buffers of communication."""
PREFILL_GB, ENGINE_OTHER_GB = 0.85, 0.35
"""Activations of a step of 8,192 tokens of Llama-3.1-8B, and what is not PyTorch's, as vLLM reports them."""
NCCL_GB = 0.5
"""Buffers of an engine's collectives, with tensor parallelism."""
BUCKET_GB = 1.0
"""Of a weight sync that sends tensor by tensor."""
LOGIT_BYTES_FORWARD = 6.0


class States(Frozen):
    """GB of a trainer's states on each GPU."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float = 0.0

    @property
    def all(self) -> float:
        return self.weights + self.gradients + self.optimizer


def stage_parameters(run: RunSetup, model: Architecture) -> float:
    """Parameters on one GPU of the largest pipeline stage; experts are divided by ep and their own tp."""
    share = math.ceil(model.layers / run.train_pp) / model.layers
    dense = (model.layer_parameters - model.expert_parameters) * share / run.train_tp
    experts = model.expert_parameters * share / (run.train_ep * max(1, run.train_etp))
    both = model.embedding + model.head
    ends = both if run.train_pp == 1 else max(model.embedding, model.head or model.embedding)
    rest = (ends + model.extra + model.vision) / run.train_tp
    return dense + experts + rest


def states(run: RunSetup, model: Architecture) -> States:
    if run.train_lora:
        adapters = memory.adapter_parameters(model, run.train_lora)
        held = model.parameters * run.train_weight_bytes / _weight_parts(run, model)
        return States(held / GB, 0.0, adapters * memory.ADAPTER_BYTES / run.model_parallel / GB, _gathered(run, model))
    held = model.parameters / _weight_parts(run, model)
    graded = held if run.train_zero >= 3 or run.train_zero < 2 else model.parameters / run.shards
    optimizer = 0.0 if run.train_cpu_optimizer else run.train_optimizer_bytes
    sharded = model.parameters / run.shards if run.train_zero >= 1 else held
    return States(
        held * run.train_weight_bytes / GB,
        graded * run.train_gradient_bytes / GB,
        sharded * optimizer / GB,
        _gathered(run, model),
    )


def _weight_parts(run: RunSetup, model: Architecture) -> float:
    """Parts into which weights are cut: over all GPUs with full sharding, else over the model-parallel ones."""
    if run.train_backend != "megatron" and run.train_zero >= 3:
        return run.shards
    return model.parameters / stage_parameters(run, model)


def _gathered(run: RunSetup, model: Architecture) -> float:
    if run.train_backend == "megatron" or run.train_zero < 3 or run.shards <= run.train_tp:
        return 0.0
    largest = max((model.layer_parameters - model.expert_parameters) / model.layers, model.embedding)
    if model.moe_layers:
        largest = max(largest, model.expert_parameters / model.moe_layers / run.train_ep)
    return 2 * 2 * largest / run.train_tp / GB


def working(run: RunSetup, model: Architecture, tokens: float, *, training: bool) -> list[tuple[str, float]]:
    """Activations and logits of so many tokens on each GPU."""
    settings = memory.MemorySettings(
        gpus=run.train_tp * run.train_pp,
        tp=run.train_tp,
        pp=run.train_pp,
        checkpointing=run.train_recompute,
        sequence_length=max(1, round(tokens)),
        layer_copies=layer_copies(model, CONSTANTS),
        process_gb=0.0,
    )
    trainer, _, inference = memory.estimate(model, settings)
    kept = ("activations", "checkpoints", "one layer")
    need = trainer if training else inference
    found = [(term.name, term.gb) for term in need.active if term.name in kept]
    if run.train_backend == "megatron" and training and not run.train_recompute:
        found = [("activations", _kept_by_megatron(run, model, tokens))]
    forward = run.train_entropy or min(LOGIT_BYTES_FORWARD, run.train_logit_bytes)
    size = run.train_logit_bytes if training else forward
    if not run.train_fused_logits:
        found.append(("logits", size * tokens * model.vocabulary / run.train_tp / GB))
    return found


def _kept_by_megatron(run: RunSetup, model: Architecture, tokens: float) -> float:
    """Fused kernels keep inputs of norms and matrices, queries, keys and values, and the gated MLP's products.

    What is sent to experts and comes back from them is kept once for each expert of a token.
    """
    values = 6 * model.hidden + 2 * model.kv_heads * model.head_size + 3 * model.mlp_width
    values += 2 * model.experts_per_token * model.hidden if model.experts else 0
    depth = math.ceil(model.layers / run.train_pp) * run.train_pp
    return 2 * tokens * depth * values / run.train_tp / GB


def engine_weights(run: RunSetup, model: Architecture) -> float:
    return weight_bytes(model, run.rollout_precision) / run.engine_size / GB


def engine_share(run: RunSetup, gpu: GpuKind) -> float:
    return gpu.memory_gb * (run.rollout_memory or 0.0)


def prefill_gb(run: RunSetup, model: Architecture) -> float:
    """Activations of an engine's largest step, part of its share with vLLM."""
    whole = run.held_tokens or 8192
    tokens = run.rollout_batched_tokens or 8192
    if run.rollout_backend == "vllm" and not run.rollout_chunked:
        tokens = max(tokens, whole)
    size = (model.hidden / 4096 + model.mlp_width / 14336) / 2 / run.rollout_tp
    return PREFILL_GB * tokens / 8192 * size + ENGINE_OTHER_GB + (NCCL_GB if run.rollout_tp > 1 else 0.0)


def cache_gb(run: RunSetup, model: Architecture, gpu: GpuKind) -> float:
    """Room for the cache on each GPU of an engine; below 0 where not even the weights fit."""
    return engine_share(run, gpu) * USABLE - engine_weights(run, model) - prefill_gb(run, model)


def cache_tokens(run: RunSetup, model: Architecture, gpu: GpuKind, length: float) -> float:
    """Tokens that the cache of an engine holds, in sequences of so many tokens."""
    engine = EngineReplica(model, gpu, run.engine_size, run.rollout_dp, kv_precision=run.rollout_kv)
    each = float(kv_bytes(engine, length)) / length / GB
    return max(0.0, cache_gb(run, model, gpu)) * run.rollout_dp * run.rollout_pp / each


def companions(run: RunSetup, model: Architecture) -> tuple[float, float]:
    """(reference, critic) GB that stay on a GPU while others run."""
    bare = model.parameters * 2.0 / _weight_parts(run, model) / GB if run.reference and not run.train_lora else 0.0
    kept = states(run, model)
    idle = (0.0 if run.train_offload_weights else kept.weights) + (
        0.0 if run.train_offload_optimizer else kept.optimizer
    )
    return (0.0 if run.reference_offload else bare), (idle if run.critic else 0.0)


def phases(run: RunSetup) -> Iterator[Phase]:
    """Phases whose values are known."""
    model, gpu = run.model, run.gpu
    if model is None or gpu is None or not run.gpus:
        return
    limit = gpu.memory_gb * USABLE
    spread = CONSTANTS.memory_error
    context = context_gb(gpu, CONSTANTS) * (1.0 if run.shared else 0.6)
    kept = states(run, model)
    reference, critic = companions(run, model)
    # Megatron's buffers of gradients stay where its weights do.
    buffers = kept.gradients if run.train_backend == "megatron" and not run.train_offload_weights else 0.0
    beside = [("reference", reference), ("critic", critic)]
    parked = [
        ("trainer's weights", 0.0 if run.train_offload_weights else kept.weights),
        ("trainer's optimiser", 0.0 if run.train_offload_optimizer else kept.optimizer),
        ("trainer's gradients", buffers),
    ]
    share = engine_share(run, gpu)
    graphs = 0.0 if run.rollout_eager else GRAPHS_GB
    if run.rollout_memory:
        own = [("engine's share", share), ("graphs", graphs)]
        others = [*parked, *beside, ("process", context)] if run.shared else [("process", 0.5)]
        yield Phase("generate", stated([*own, *others]), limit, spread)
    full = 2.0 * model.parameters / GB
    if run.rollout_backend == "hf" and run.train_zero >= 3:
        terms = [("all weights", full), ("weights", kept.weights), ("gradients", kept.gradients), parked[1]]
        yield Phase("generate in the trainer", stated([*terms, *beside, ("process", context)]), limit, spread)
    if run.rollout_memory and run.rollout_full_copy and not run.shared:
        terms = [("engine's share", share), ("graphs", graphs), ("a copy of all weights", full)]
        yield Phase("weight sync", stated(terms), limit, spread)
    asleep: list[tuple[str, float]] = []
    if run.shared and run.rollout_memory:
        asleep = [("engine asleep", ASLEEP_GB if run.rollout_sleeps else share + graphs)]
        woken = share if run.rollout_wakes_whole or not run.rollout_sleeps else engine_weights(run, model)
        loaded = full if run.rollout_full_copy else kept.weights
        yield Phase(
            "wake with both weights",
            stated(
                [
                    ("engine", woken + graphs),
                    ("trainer's weights", loaded),
                    ("bucket", max(BUCKET_GB, 2 * 2.0 * model.embedding / GB if run.train_zero >= 3 else 0.0)),
                    *parked[1:],
                    *beside,
                    ("process", context),
                ]
            ),
            limit,
            spread,
        )
    fixed = [*beside, *asleep, ("process", context)]
    tokens = run.forward_tokens
    if tokens:
        terms = [("weights", kept.weights), ("gathered layers", kept.gathered), *parked[1:]]
        yield Phase("log-probs", stated([*terms, *working(run, model, tokens, training=False), *fixed]), limit, spread)
    tokens = run.update_tokens
    if tokens:
        terms = [
            ("weights", kept.weights),
            ("gradients", kept.gradients),
            ("optimiser", kept.optimizer),
            ("gathered layers", kept.gathered),
        ]
        yield Phase("update", stated([*terms, *working(run, model, tokens, training=True), *fixed]), limit, spread)


def stated(terms: list[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    return tuple((name, size) for name, size in terms if size)
