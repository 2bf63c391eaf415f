"""Seconds of passes of a trainer: forward for log-probs, forward and backward for an update.

FLOPs of the matrices and of attention at a share of the peak that falls with narrow matrices, collectives of tensor,
expert and data parallelism by link, and pipeline bubbles by the micro-batches of an optimiser step. A micro-batch takes
no less than launching its kernels from Python, where the trainer runs module by module.
"""

from __future__ import annotations

import math

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import GpuKind
from trimtab.plan.estimate.constants import Constants


class Trainer(Frozen):
    """How a model is trained: `fsdp` gathers weights for every micro-batch, otherwise they stay in place."""

    model: Architecture
    gpu: GpuKind
    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    fsdp: bool = False
    recompute: bool = True
    recompute_timed: bool = True
    """False where the fitted share of the peak already has it: public recipes do not state their recompute."""
    lora_rank: int = 0
    precision: str = "bf16"
    micro_tokens: float = 4096.0

    @property
    def replicas(self) -> float:
        return max(1.0, self.gpus / (self.tp * self.pp * self.cp))


class PassTime(Frozen):
    """Seconds of a pass by cause, and its FLOPs."""

    compute: float
    links: float
    bubble: float
    flops: float
    launches: float = 0.0  # that the GPU waits for kernels of small micro-batches

    @property
    def seconds(self) -> float:
        return self.compute + self.links + self.bubble + self.launches

    @property
    def limit(self) -> str:
        busy = "kernel launches" if self.launches else "compute"
        parts = {busy: self.compute + self.launches, "links": self.links, "pipeline bubble": self.bubble}
        return max(parts, key=parts.__getitem__)


def pass_time(
    run: Trainer, tokens: float, length: float, updates: float, c: Constants, *, backward: bool, longest: float = 0.0
) -> PassTime:
    """A pass over so many tokens in sequences of `length`, in so many optimiser steps.

    A step takes as long as its fullest replica, which has the `longest` sequence of a batch at least.
    """
    model, gpu = run.model, run.gpu
    forwards = 1.0
    if backward:
        # LoRA needs no gradients of the frozen matrices: one of the two backward products.
        forwards = (2.0 if run.lora_rank else 3.0) + (1.0 if run.recompute and run.recompute_timed else 0.0)
    experts = 2 * model.moe_layers * model.experts_per_token * model.expert_mlp
    dense = 2 * model.matmul_parameters - experts
    scores = model.attention_flops(length / 2)
    width = model.hidden / run.tp
    # Fast GPUs need wider matrices for the same share of their peak.
    share = c.train_share * width / (width + c.narrow_hidden * gpu.flops(run.precision) / 1e15)
    rate = run.gpus * gpu.flops(run.precision)
    work = dense / share + experts / (share * c.expert_train_share) + scores / (share * c.attention_share)
    uneven = max(1.0, longest / (tokens / updates / run.replicas))
    compute = forwards * tokens * work / rate * uneven
    links = _link_seconds(run, tokens, updates, forwards, c) / c.train_link_share
    micro = max(1.0, tokens / updates / run.replicas / (run.micro_tokens * run.cp))
    bubble = (compute + links) * (run.pp - 1) / micro
    launched = c.launch_ms * 1e-3 * model.layers * forwards * math.ceil(micro) * updates if run.fsdp else 0.0
    flops = forwards * tokens * (dense + experts + scores)
    return PassTime(compute, links, bubble, flops, max(0.0, launched - compute))


def _link_seconds(run: Trainer, tokens: float, updates: float, forwards: float, c: Constants) -> float:
    model, gpu = run.model, run.gpu
    own = tokens / (run.replicas * run.cp) / run.pp  # tokens x layers that cross a GPU's links, per layer
    values = own * model.hidden * 2.0
    seconds = 0.0
    if run.tp > 1:
        seconds += forwards * 2 * model.layers * 2 * (run.tp - 1) / run.tp * values / gpu.link(run.tp)
    if run.ep > 1 and model.experts:
        sent = values * model.experts_per_token / run.tp * (run.ep - 1) / run.ep
        seconds += forwards * 2 * model.moe_layers * sent / gpu.link(run.ep * run.tp)
    if run.cp > 1:
        kv = own * model.kv_per_token_and_layer * 2.0 * (run.cp - 1)
        seconds += forwards * model.attention_layers * kv / gpu.link(run.cp * run.tp)
    if run.gpus > 1:
        group = run.gpus if run.fsdp else int(run.replicas) * run.tp
        held = model.parameters * 2.0 / (1 if run.fsdp else run.tp * run.pp * (run.ep if model.experts else 1))
        micros = tokens / run.gpus / run.micro_tokens if run.fsdp else updates
        times = max(1.0, micros) * (forwards if run.fsdp else 3.0 if forwards > 1 else 0.0)
        if group > 1:
            seconds += times * held / (gpu.ring(group) if run.fsdp else gpu.link(group))
    return seconds
