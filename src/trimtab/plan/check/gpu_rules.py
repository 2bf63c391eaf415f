"""Rules of GPU memory: each phase of a step, and the wake-up of an engine beside a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from trimtab.plan.check import cures, gpu_memory
from trimtab.plan.check.cures import Change
from trimtab.plan.check.findings import Cause, CheckFinding, CheckRule
from trimtab.plan.check.setup import RunSetup

GPU: Cause = "gpu memory"
WAKE: Cause = "sleep and wake"
CLOSE = 0.93
"""Of a GPU's memory: estimates are not better than that."""


def _offloaded(run: RunSetup) -> str:
    return cures.moved_seconds(run, gpu_memory.states(run, run.model).all if run.model else 0.0)


SLEEP = Change(cures.flag("rollout_sleeps"), cures.free("a second or two to sleep and wake each step"))
LESS_SHARE = Change(cures.less_share, cures.free("fewer answers at a time: see the KV cache"))
OFFLOAD_OPTIMIZER = Change(cures.flag("train_offload_optimizer"), _offloaded)
OFFLOAD_WEIGHTS = Change(cures.flag("train_offload_weights"), _offloaded)
OFFLOAD_REFERENCE = Change(
    cures.flag("reference_offload"), cures.free("the reference is fetched for each of its passes")
)
ENGINE = (
    SLEEP,
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
    SLEEP,
    OFFLOAD_OPTIMIZER,
    *SPLIT,
)
UPDATE = (
    Change(cures.smaller_batch("micro_batch"), cures.free("nothing while a micro-batch has some thousand tokens")),
    Change(cures.fewer_tokens("micro_tokens"), cures.free("nothing while a micro-batch has some thousand tokens")),
    SLEEP,
    Change(cures.flag("train_recompute"), cures.recompute_cost),
    *SPLIT,
)
PHASES: Mapping[str, tuple[str, tuple[Change, ...], tuple[str, ...]]] = {
    "generate": (
        "an engine beside what the trainer keeps",
        ENGINE,
        ("rollout_memory", "train_offload_weights", "train_offload_optimizer"),
    ),
    "wake with both weights": (
        "the wake-up with both sets of weights",
        ENGINE,
        ("rollout_memory", "rollout_tp", "train_offload_optimizer"),
    ),
    "weight sync": ("a weight sync into an engine that holds its share", ENGINE, ("rollout_memory",)),
    "generate in the trainer": (
        "generation by the trainer, which gathers all weights on each GPU,",
        (Change(cures.flag("rollout_backend", "vllm"), cures.free("an engine's share of memory")), *SPLIT),
        ("rollout_backend",),
    ),
    "log-probs": ("the pass for log-probs", FORWARD, ("logprob_batch", "logprob_tokens")),
    "update": ("the update", UPDATE, ("micro_batch", "micro_tokens")),
}
"""What a phase is called, what may cure it, and the values it is about."""


def found(name: str, run: RunSetup) -> Iterator[CheckFinding]:
    phase = next((phase for phase in gpu_memory.phases(run) if phase.name == name), None)
    own = name == "generate" and not run.shared  # nothing else is on the GPU, and an engine measures what it may take
    if phase is None or phase.gb <= (1.0 if own else CLOSE) * phase.gpu_gb:
        return
    title, changes, names = PHASES[name]
    other = ("micro_batch", "logprob_batch") if run.dynamic else ("micro_tokens", "logprob_tokens")
    over, ordered = phase.gb > phase.gpu_gb, sorted(phase.terms, key=lambda pair: -pair[1])

    def fits(changed: RunSetup) -> bool:
        return all(each.gb <= CLOSE * each.gpu_gb for each in gpu_memory.phases(changed) if each.name == name)

    yield CheckFinding(
        f"{'out of GPU memory' if over else 'close to the end of GPU memory'}: {title} takes "
        f"{phase.gb:.0f} of {phase.gpu_gb:.0f} GB",
        ", ".join(f"{term} {size:.1f}" for term, size in ordered if size >= 0.05),
        tuple(key for key in names if key not in other),
        cures.tried(run, changes, fits),
        "error" if over else "warning",
    )


RULES = tuple(
    CheckRule(name, cause, partial(found, phase), source, "2026-11")
    for name, cause, phase, source in (
        ("gpu-update", GPU, "update", "verl-project/verl#328"),
        ("gpu-logprobs", GPU, "log-probs", "THUDM/slime#381"),
        ("trainer-generates", GPU, "generate in the trainer", "modelscope/ms-swift#3871"),
        ("engine-beside-trainer", WAKE, "generate", "vllm-project/vllm v1/worker/gpu_worker.py"),
        ("wake-up", WAKE, "wake with both weights", "vllm-project/vllm#15254"),
        ("weight-sync", WAKE, "weight sync", "huggingface/trl#2927"),
    )
)
