"""Rules of GPU memory: each phase of a step, and the wake-up of an engine beside a trainer."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.plan.check import cures, gpu_memory
from trimtab.plan.check.cures import Change
from trimtab.plan.check.findings import CheckFinding, CheckRule
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.phases import Phase

CLOSE = 0.93
"""Of a GPU's memory: estimates are not better than that."""


def _states_gb(run: RunSetup) -> float:
    assert run.model is not None
    return gpu_memory.states(run, run.model).all


def _offloaded(run: RunSetup) -> str:
    return cures.moved_seconds(run, _states_gb(run))


LESS_SHARE = Change(cures.less_share, cures.free("fewer answers at a time: see the KV cache"))
OFFLOAD_OPTIMIZER = Change(cures.flag("train_offload_optimizer"), _offloaded)
OFFLOAD_WEIGHTS = Change(cures.flag("train_offload_weights"), _offloaded)
OFFLOAD_REFERENCE = Change(
    cures.flag("reference_offload"), cures.free("the reference is fetched for each of its passes")
)
ENGINE = (
    Change(cures.flag("rollout_sleeps"), cures.free("a second or two to sleep and wake each step")),
    LESS_SHARE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_WEIGHTS,
    OFFLOAD_REFERENCE,
    Change(cures.wider_engine, cures.free("collectives in each decode step, fewer engines")),
    Change(cures.flag("rollout_eager"), cures.free("decoding without CUDA graphs, slower for small batches")),
    Change(cures.more_gpus, cures.free("twice the GPUs")),
)
SPLIT = (
    Change(cures.more_sequence_parallel, cures.free("collectives in each layer, half the replicas")),
    Change(cures.wider_training, cures.free("collectives in each layer, half the replicas")),
    Change(cures.deeper_training, cures.free("pipeline bubbles")),
    OFFLOAD_REFERENCE,
    Change(cures.flag("train_cpu_optimizer"), cures.free("the optimiser steps on the CPU: seconds to minutes a step")),
    Change(cures.more_gpus, cures.free("twice the GPUs")),
)
FORWARD = (
    Change(cures.smaller_batch("logprob_batch"), cures.free("nothing while a micro-batch has some thousand tokens")),
    Change(cures.fewer_tokens("logprob_tokens"), cures.free("nothing while a micro-batch has some thousand tokens")),
    Change(cures.flag("rollout_sleeps"), cures.free("a second or two to sleep and wake each step")),
    OFFLOAD_OPTIMIZER,
    *SPLIT,
)
UPDATE = (
    Change(cures.smaller_batch("micro_batch"), cures.free("nothing while a micro-batch has some thousand tokens")),
    Change(cures.fewer_tokens("micro_tokens"), cures.free("nothing while a micro-batch has some thousand tokens")),
    Change(cures.flag("rollout_sleeps"), cures.free("a second or two to sleep and wake each step")),
    Change(cures.flag("train_recompute"), cures.recompute_cost),
    *SPLIT,
)
CHANGES = {
    "generate": ENGINE,
    "wake with both weights": ENGINE,
    "weight sync": ENGINE,
    "log-probs": FORWARD,
    "update": UPDATE,
}
NAMES = {
    "generate": ("rollout_memory", "train_offload_weights", "train_offload_optimizer"),
    "wake with both weights": ("rollout_memory", "rollout_tp", "train_offload_optimizer"),
    "weight sync": ("rollout_memory",),
    "log-probs": ("logprob_batch", "logprob_tokens"),
    "update": ("micro_batch", "micro_tokens"),
}


def found(name: str, run: RunSetup) -> Iterator[CheckFinding]:
    phase = next((phase for phase in gpu_memory.phases(run) if phase.name == name), None)
    own = name == "generate" and not run.shared  # nothing else is on the GPU, and an engine measures what it may take
    if phase is None or phase.gb <= (1.0 if own else CLOSE) * phase.gpu_gb:
        return
    changes = CHANGES[name]
    if run.dynamic:
        names = tuple(key for key in NAMES[name] if key not in ("micro_batch", "logprob_batch"))
    else:
        names = tuple(key for key in NAMES[name] if key not in ("micro_tokens", "logprob_tokens"))
    over = phase.gb > phase.gpu_gb

    def fits(changed: RunSetup) -> bool:
        return all(other.gb <= CLOSE * other.gpu_gb for other in gpu_memory.phases(changed) if other.name == name)

    yield CheckFinding(
        f"{'out of GPU memory' if over else 'close to the end of GPU memory'}: {_title(name)} takes "
        f"{phase.gb:.0f} of {phase.gpu_gb:.0f} GB",
        _terms(phase),
        names,
        cures.tried(run, changes, fits),
        "error" if over else "warning",
    )


def generate(run: RunSetup) -> Iterator[CheckFinding]:
    yield from found("generate", run)


def wake(run: RunSetup) -> Iterator[CheckFinding]:
    yield from found("wake with both weights", run)


def sync(run: RunSetup) -> Iterator[CheckFinding]:
    yield from found("weight sync", run)


def logprobs(run: RunSetup) -> Iterator[CheckFinding]:
    yield from found("log-probs", run)


def update(run: RunSetup) -> Iterator[CheckFinding]:
    yield from found("update", run)


def _title(name: str) -> str:
    return {
        "generate": "an engine beside what the trainer keeps",
        "wake with both weights": "the wake-up with both sets of weights",
        "weight sync": "a weight sync into an engine that holds its share",
        "log-probs": "the pass for log-probs",
        "update": "the update",
    }[name]


def _terms(phase: Phase) -> str:
    ordered = sorted(phase.terms, key=lambda pair: -pair[1])
    return ", ".join(f"{name} {size:.1f}" for name, size in ordered if size >= 0.05)


RULES = (
    CheckRule("gpu-update", "gpu memory", update, "verl-project/verl#328", "2026-11"),
    CheckRule("gpu-logprobs", "gpu memory", logprobs, "THUDM/slime#381", "2026-11"),
    CheckRule(
        "engine-beside-trainer", "sleep and wake", generate, "vllm-project/vllm v1/worker/gpu_worker.py", "2026-11"
    ),
    CheckRule("wake-up", "sleep and wake", wake, "vllm-project/vllm#15254", "2026-11"),
    CheckRule("weight-sync", "sleep and wake", sync, "huggingface/trl#2927", "2026-11"),
)
