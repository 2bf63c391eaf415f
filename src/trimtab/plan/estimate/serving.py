"""Work and seconds of a rollout engine: a decode step, prefill, and a batch of answers with its tail.

A decode step reads the weights that its tokens touch and the cache of its sequences, multiplies, and crosses the links
twice per layer with tensor parallelism. Reading and multiplying overlap: the larger counts, and a share of the smaller.
An engine that streams spends more on each step and sequence than one that is asked for whole answers, as in RL.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import BITS, GpuKind
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.lengths import Lengths

CHUNK = 8192  # tokens of a prefill's step, as engines have it by default


class EngineReplica(Frozen):
    """One replica of a rollout engine: `tp` GPUs, over which attention may be divided by requests (`attention_dp`)."""

    model: Architecture
    gpu: GpuKind
    tp: int = 1
    attention_dp: int = 1
    precision: str = "bf16"
    kv_precision: str = "bf16"
    backend: str = "vllm"
    draft_tokens: float = 0.0
    """Drafted by a layer of the model for each step, then verified together."""
    accepted: float = 0.0
    """Share of the drafted tokens that the model accepts."""
    streams: bool = False
    """Each token goes to a client by itself."""

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + self.draft_tokens * self.accepted


class Work(Frozen):
    """What a step asks of a GPU, in seconds at the peak rates; numbers or arrays of steps."""

    weights: Any
    experts: Any
    cache: Any
    compute: Any
    link: Any
    hops: Any
    layers: Any
    moe_layers: Any
    sequences: Any
    lean: Any
    """1 for an engine without Python between steps (TensorRT-LLM)."""
    streams: Any
    """1 for an engine that sends each token by itself."""

    def seconds(self, c: Constants) -> Any:
        read = self.weights / c.weight_share + self.experts / c.expert_share
        multiply = self.compute / c.compute_share
        # Beside decoding, a stream of new prompts multiplies while the cache is read; else only the weights are.
        beside = read + self.streams * self.cache / c.cache_share
        hidden = np.maximum(beside, multiply) + self.streams * c.overlap * np.minimum(beside, multiply)
        hidden = hidden + (1 - self.streams) * self.cache / c.cache_share
        crossed = self.link / c.link_share + self.hops * c.hop_us * 1e-6
        launched = (self.layers * c.layer_us + self.moe_layers * c.moe_layer_us) * 1e-6
        own = self.streams * c.step_ms + (1 - self.streams) * c.quiet_step_ms
        launched = launched + (1 - self.lean) * own * 1e-3
        each = self.streams * c.sequence_us + (1 - self.streams) * c.quiet_sequence_us
        return hidden + crossed + launched + self.sequences * each * 1e-6

    @classmethod
    def stack(cls, works: list[Work]) -> Work:
        return cls(*(np.array([getattr(work, field.name) for work in works]) for field in fields(cls)))


def weight_bytes(model: Architecture, precision: str) -> float:
    """Bytes of the weights; embeddings and the head stay in bf16 where the rest is smaller."""
    ends = model.embedding + model.head + model.extra + model.vision
    return (model.parameters - ends) * BITS[precision] / 8 + ends * max(2.0, BITS[precision] / 8)


def kv_bytes(engine: EngineReplica, context: Any) -> Any:
    """Bytes of a sequence's cache on each GPU that holds it."""
    model = engine.model
    full = model.attention_layers - model.window_layers
    kept = full * context + model.window_layers * np.minimum(context, model.window)
    values = kept * model.kv_per_token_and_layer + model.linear_layers * model.linear_state
    return values * BITS[engine.kv_precision] / 8 / min(engine.tp // engine.attention_dp, model.kv_shards)


def decode_work(engine: EngineReplica, batch: Any, context: Any, prefill: Any = 0.0, prompt: Any = 0.0) -> Work:
    """One step of so many sequences with so many tokens before each, and of so many prompt tokens beside them."""
    model, gpu, tp = engine.model, engine.gpu, engine.tp
    size = BITS[engine.precision] / 8
    shards = tp // engine.attention_dp
    own = batch / engine.attention_dp
    mixers = model.attention_layers * model.attention_per_layer + model.linear_layers * model.linear_mixer
    dense = (model.layer_parameters - model.expert_parameters - mixers) * size / tp + mixers * size / shards
    dense += (model.head or model.embedding) * 2 / tp
    tokens = batch + prefill
    touched = 1 - (1 - model.experts_per_token / model.experts) ** tokens if model.experts else 0.0
    scores = 2 * model.heads * model.score_size * model.attention_layers / tp
    flops = tokens * 2 * model.matmul_parameters / tp + scores * (batch * context + prefill * prompt / 2)
    hops = 2 * model.layers * _hops(gpu, tp)
    return Work(
        weights=dense / gpu.bandwidth + 0 * batch,
        experts=model.expert_parameters * touched * size / tp / gpu.bandwidth + 0 * batch,
        cache=own * kv_bytes(engine, context) / gpu.bandwidth,
        compute=flops / gpu.flops(engine.precision),
        link=2 * model.layers * all_reduce_seconds(gpu, tp, tokens * model.hidden * 2) + 0 * batch,
        hops=hops + 0 * batch,
        layers=model.layers + 0 * batch,
        moe_layers=model.moe_layers + 0 * batch,
        sequences=batch,
        lean=(1.0 if engine.backend == "trtllm" else 0.0) + 0 * batch,
        streams=float(engine.streams) + 0 * batch,
    )


def prefill_seconds(engine: EngineReplica, c: Constants, sequences: float, prompt: float) -> float:
    """Prompts with nothing beside them: only last tokens need the head, and no graph saves launching the kernels."""
    model, gpu, tp = engine.model, engine.gpu, engine.tp
    tokens, head = sequences * prompt, model.head or model.embedding
    scores = 2 * model.heads * model.score_size * model.attention_layers * prompt / 2
    flops = (tokens * (2 * (model.matmul_parameters - head) + scores) + sequences * 2 * head) / tp
    peak, width = gpu.flops(engine.precision), model.hidden / tp
    share = c.prefill_share * width / (width + c.prefill_narrow * peak / 1e15)
    launched = math.ceil(tokens / CHUNK) * model.layers * c.prefill_layer_us * 1e-6
    link = 2 * model.layers * float(all_reduce_seconds(gpu, tp, tokens * model.hidden * 2))
    return max(flops / peak / share, launched) + link / c.link_share


def step_seconds(
    engine: EngineReplica, c: Constants, batch: Any, context: Any, prefill: Any = 0.0, prompt: Any = 0.0
) -> Any:
    """Seconds of a decode step, with the drafts and their verification where the engine speculates."""
    if not engine.draft_tokens:
        return decode_work(engine, batch, context, prefill, prompt).seconds(c)
    drafted = engine.draft_tokens * batch
    # Drafted tokens attend to all tokens before them; those of a prompt to half of it.
    own = drafted + prefill
    work = decode_work(engine, batch, context, own, (2 * context * drafted + prompt * prefill) / own)
    # Each drafted token is sampled, and accepted or not, as one of a sequence of its own is.
    return work.seconds(c) + drafted * c.sequence_us * 1e-6 + engine.draft_tokens * _draft_seconds(engine, c, batch)


def _draft_seconds(engine: EngineReplica, c: Constants, batch: Any) -> Any:
    """One layer and the head for each sequence."""
    model, gpu = engine.model, engine.gpu
    head = model.head or model.embedding
    layer = (model.matmul_parameters - head) / model.layers
    read = (layer * BITS[engine.precision] / 8 + head * 2) / engine.tp / gpu.bandwidth
    multiply = 2 * batch * (layer + head) / engine.tp / gpu.flops(engine.precision)
    return read / c.weight_share + multiply / c.compute_share + c.layer_us * 1e-6


def all_reduce_seconds(gpu: GpuKind, gpus: int, size: Any) -> Any:
    """An all-reduce of so many bytes at the link's peak rate."""
    return 0.0 * size if gpus == 1 else 2 * (gpus - 1) / gpus * size / gpu.link(gpus)


def _hops(gpu: GpuKind, gpus: int) -> float:
    """Latency of a small all-reduce, in units of one within a node."""
    if gpus == 1:
        return 0.0
    return 1.0 if gpus <= gpu.gpus_per_node else 1.0 + math.log2(max(1.0, gpu.intra_node_gbs / gpu.inter_node_gbs))


def rollout_seconds(
    engine: EngineReplica,
    engines: float,
    samples: float,
    lengths: Lengths,
    slots: float,
    c: Constants,
    *,
    steady: float = 0.0,
) -> float:
    """Seconds until so many samples are decoded by so many engines of so many slots each.

    Samples beyond the slots wait for free ones; then the batch drains, down to the longest answer. With `steady` 1
    other samples take the freed slots, as in asynchronous training: only throughput counts.
    """
    each = samples / engines
    slots = max(1.0, min(slots, each))
    widths, middles, alive = lengths.grid(samples)
    batch = np.maximum(1.0, slots * alive)
    drain = float(np.sum(widths * step_seconds(engine, c, batch, lengths.prompt + middles))) / engine.tokens_per_step
    # Prompt tokens beside each full step.
    prompt = slots * lengths.prompt / lengths.mean_answer * engine.tokens_per_step
    full = float(step_seconds(engine, c, slots, lengths.mean, prompt, lengths.prompt)) / engine.tokens_per_step
    waves = (each - slots) * lengths.mean_answer / slots * full
    throughput = each * lengths.mean_answer / slots * full
    sync = waves + drain + prefill_seconds(engine, c, slots, lengths.prompt)
    return steady * throughput + (1 - steady) * sync


def slots_of(
    engine: EngineReplica, lengths: Lengths, fraction: float, most: float, reserve_gb: float
) -> tuple[float, str]:
    """(sequences that an engine decodes at once, what limits them)."""
    free = engine.gpu.memory_gb * fraction - reserve_gb
    free -= weight_bytes(engine.model, engine.precision) / engine.tp / 2**30
    kept = float(kv_bytes(engine, lengths.prompt + lengths.mean_answer * 0.6)) / 2**30
    room = engine.attention_dp * free / kept if free > 0 else 0.0
    return (room, "KV cache") if room < most else (most, "max sequences")
