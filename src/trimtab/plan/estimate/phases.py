"""GB of each phase of a step on each GPU: generation, log-probs, update, and the wake-up with two sets of weights.

The terms are those of `memory`; what shares a GPU adds what stays behind while another component
runs. GB are 2^30 bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import GpuKind
from trimtab.plan.estimate import memory
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.memory import MemorySettings
from trimtab.plan.estimate.serving import EngineReplica, weight_bytes
from trimtab.plan.estimate.step import SEPARATE_FRACTION, RunInputs

GB = 2**30


class Phase(Frozen):
    """GB of a phase on each GPU, term by term, beside what the GPU has."""

    name: str
    terms: tuple[tuple[str, float], ...]
    gpu_gb: float
    spread: float
    residue_gb: float = 0.0
    """That may come on top: left behind by what sleeps on shared GPUs, and of attention without a fused kernel."""

    @property
    def gb(self) -> float:
        return sum(size for _, size in self.terms)

    @property
    def high_gb(self) -> float:
        return self.gb * math.exp(self.spread) + self.residue_gb


def context_gb(gpu: GpuKind, c: Constants) -> float:
    """Of a trainer's process and a sleeping engine's beside it; faster GPUs have larger contexts."""
    return float(c.context_gb * (gpu.bandwidth_gbs / 1000) ** c.context_exponent)


def layer_copies(model: Architecture, c: Constants) -> float:
    """How often the values of a layer exist at the peak of a backward pass; tokens sent to experts add to it."""
    return c.layer_copies + (c.expert_copies if model.experts else 0.0)


def trainer_settings(run: RunInputs, c: Constants, offload: str) -> MemorySettings:
    trainer = run.trainer
    tokens = max(trainer.micro_tokens, run.lengths.longest)
    return MemorySettings(
        gpus=trainer.gpus,
        tp=trainer.tp * trainer.cp,
        pp=trainer.pp,
        ep=trainer.ep,
        zero=3 if trainer.fsdp else 1,
        checkpointing=trainer.recompute,
        sequence_length=round(tokens),
        offload=offload,
        rollout_tp=run.engine.tp,
        lora_rank=trainer.lora_rank,
        layer_copies=layer_copies(run.model, c),
        expert_copies=c.expert_gathers,
        process_gb=context_gb(run.gpu, c),
    )


def _engine_terms(engine: EngineReplica, fraction: float, c: Constants) -> tuple[tuple[str, float], ...]:
    weights = weight_bytes(engine.model, engine.precision) / engine.tp / GB
    cache = max(0.0, engine.gpu.memory_gb * fraction - weights)
    return ("weights", weights), ("KV cache and graphs", cache), ("process", context_gb(engine.gpu, c))


def phases(run: RunInputs, c: Constants, offload: str = "all") -> tuple[tuple[Phase, ...], float]:
    """(phases, GB of host memory on each node)."""
    settings = trainer_settings(run, c, offload)
    trainer, _, inference = memory.estimate(run.model, replace(settings, rollout_tp=1))
    room = run.gpu.memory_gb
    shared = not run.rollout_gpus or run.lend
    parked = ("trainer, parked", trainer.resident_gb - settings.process_gb)
    asleep = ("engine, asleep", 0.0)  # its context is in the process's term
    terms = _engine_terms(run.engine, run.memory_fraction, c)
    weights, context = terms[0][1], terms[2][1]
    residue = c.residue_gb if shared else 0.0
    beside = (parked,) if shared else ()
    found = [Phase("generate", (*terms, *beside), run.engine.gpu.memory_gb, c.engine_memory_error, residue)]
    if run.judge:
        own = _engine_terms(run.judge, SEPARATE_FRACTION, c)
        found.append(Phase("judge", own, run.judge.gpu.memory_gb, c.engine_memory_error))
    longest = run.lengths.longest
    unfused = memory.unfused_gb(run.model, settings.sequence_length / longest, longest) / settings.tp
    for name, need in (("log-probs", inference), ("update", trainer)):
        sizes = tuple((term.name, term.gb) for term in need.active)
        found.append(Phase(name, (*sizes, *((asleep,) if shared else ())), room, c.memory_error, residue + unfused))
    if shared:
        kept = next((term.gb for term in trainer.active if term.name == "weights"), 0.0)
        woken = (("engine's weights", weights), ("trainer's weights", kept), ("process", context), parked)
        found.append(Phase("wake with both weights", woken, room, c.engine_memory_error, residue))
    moved = trainer.host_gb if shared else 0.0
    return tuple(found), moved * min(run.gpus, run.gpu.gpus_per_node)
