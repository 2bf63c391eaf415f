"""Chooses what was not given: parallelism, micro-batch and memory fraction, the split of asynchronous runs, and GPUs.

A bounded search over the estimate: each way to train that the model's shape allows, then each way to decode beside it.
What needs more memory than a GPU has, with the error that estimates of memory have, is no choice. Of choices that
take about the same time the simplest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.phases import Phase, phases
from trimtab.plan.estimate.step import SEPARATE_FRACTION, SHARED_FRACTION, RunInputs, step_time
from trimtab.plan.estimate.training import Trainer

SIZES = tuple(sorted({base * 2**power for base in (1, 3) for power in range(13)} - {3, 6, 12}))
"""GPU counts that are tried: 1, 2, 4, 8, 16, 24, 32, 48, ..."""
PARALLEL = (1, 2, 4, 8, 16, 32, 64)
STAGES = (1, 2, 4, 8, 16)
MICRO_BATCHES = (1, 2, 4)
"""Longest sequences in a micro-batch."""
FRACTIONS = (0.4, 0.5, SHARED_FRACTION, 0.7, 0.8)
USABLE = 0.95
"""Of a GPU's memory, for what an engine takes by its fraction."""
UNEVEN = 0.2
"""Work of a model's head over that of a pipeline stage, at most: the other stages wait for the last."""
NEAR = 0.02
"""Choices whose times differ by less are told apart by their simplicity."""


class Freedom(Frozen):
    """What may be chosen; everything else is as given."""

    engine: bool = False
    fraction: bool = False
    trainer: bool = False
    micro_batch: bool = False
    split: bool = False
    backends: tuple[str, ...] = ("fsdp", "megatron")


def choose(run: RunInputs, free: Freedom, offload: str, c: Constants) -> RunInputs | None:
    """The fastest run on its GPUs that fits; None if none does."""
    best: tuple[float, RunInputs] | None = None
    for apart in splits(run) if free.split else (run.rollout_gpus,):
        own = replace(run, rollout_gpus=apart, trainer=replace(run.trainer, gpus=run.gpus - apart))
        trained = _trained(own, free, offload, c)
        found = trained and _decoding(trained, free, offload, c)
        if found:
            seconds = step_time(found, c).seconds
            if best is None or seconds < best[0] * (1 - NEAR):
                best = seconds, found
    return best[1] if best else None


def smallest(run: RunInputs, free: Freedom, offload: str, c: Constants) -> RunInputs | None:
    """The chosen run on the smallest number of GPUs on which one fits."""
    states = run.model.parameters * (2 if run.trainer.lora_rank else 14) / 2**30
    least = max(2.0 if run.rollout_gpus or free.split else 1.0, states / run.gpu.memory_gb)
    chosen = (choose(on(run, size), free, offload, c) for size in SIZES if size >= least)
    return next((found for found in chosen if found is not None), None)


def on(run: RunInputs, gpus: int) -> RunInputs:
    """The run on another number of GPUs, split in the same proportion."""
    apart = max(1, min(gpus - 1, round(run.rollout_gpus * gpus / run.gpus))) if run.rollout_gpus else 0
    return replace(run, gpus=gpus, rollout_gpus=apart, trainer=replace(run.trainer, gpus=gpus - apart))


def fits(run: RunInputs, offload: str, c: Constants) -> bool:
    """Whether each phase fits: training with the error of its estimate, an engine by its fraction."""
    found, _ = phases(run, c, offload)
    return trains(run, found) and all(phase.gb <= USABLE * phase.gpu_gb for phase in found)


def trains(run: RunInputs, found: Sequence[Phase]) -> bool:
    """Whether log-probs and updates fit. What frameworks leave of a critic on the GPU differs: it is counted whole."""
    update = next(phase for phase in found if phase.name == "update")
    states = sum(size for name, size in update.terms if name in ("weights", "gradients", "optimiser"))
    critic = states if "critic" in run.passes else 0.0
    return all(phase.high_gb + critic <= phase.gpu_gb for phase in found if phase.name in ("log-probs", "update"))


def splits(run: RunInputs) -> list[int]:
    """GPUs of rollout alone: eighths, of whole nodes where there are four or more."""
    unit = run.gpu.gpus_per_node if run.gpus >= 4 * run.gpu.gpus_per_node else 1
    parts = {round(run.gpus * share / 8 / unit) * unit for share in range(1, 8)}
    return sorted(part for part in parts if 0 < part < run.gpus)


def whole(run: RunInputs) -> bool:
    """Whether the GPUs of each side are multiples of its parallelism."""
    trainer = run.trainer
    split = math.lcm(trainer.tp * trainer.pp * trainer.cp, trainer.pp * trainer.ep)
    return trainer.gpus % split == 0 and run.decode_gpus % run.engine.tp == 0


def _trained(run: RunInputs, free: Freedom, offload: str, c: Constants) -> RunInputs | None:
    """The run with the fastest training that fits."""
    best: tuple[float, RunInputs] | None = None
    for trainer in _trainers(run, free):
        own = replace(run, trainer=trainer)
        found, _ = phases(own, c, offload)
        if trains(own, found):
            stages = step_time(own, c).stages
            seconds = sum(stage.seconds for stage in stages if not stage.beside and stage.name != "generate")
            if best is None or seconds < best[0] * (1 - NEAR):
                best = seconds, own
    return best[1] if best else None


def _trainers(run: RunInputs, free: Freedom) -> Iterator[Trainer]:
    """Ways to train, the simplest first."""
    base, model = run.trainer, run.model
    micros = [base.micro_tokens * size for size in MICRO_BATCHES] if free.micro_batch else [base.micro_tokens]
    if not free.trainer:
        if whole(replace(run, engine=replace(run.engine, tp=1))):
            yield from (replace(base, micro_tokens=micro) for micro in micros)
        return
    for micro in micros:
        if "fsdp" in free.backends:
            for cp in PARALLEL[:4]:
                if base.gpus % cp == 0 and cp <= run.gpu.gpus_per_node and base.gpus // cp <= run.train_batch:
                    yield replace(base, tp=1, pp=1, ep=1, cp=cp, fsdp=True, recompute_timed=True, micro_tokens=micro)
        if "megatron" not in free.backends:
            continue
        for pp in even_stages(model):
            for tp in PARALLEL[:4]:
                split = tp * pp
                even = base.gpus % split == 0 and model.heads % tp == 0 and tp <= run.gpu.gpus_per_node
                if not even or base.gpus // split > run.train_batch:
                    continue
                for ep in PARALLEL if model.experts else (1,):
                    if ep == 1 or (model.experts % ep == 0 and base.gpus // pp % ep == 0):
                        yield replace(base, tp=tp, pp=pp, ep=ep, cp=1, fsdp=False, recompute_timed=False,
                                      micro_tokens=micro)  # fmt: skip


def even_stages(model: Architecture) -> tuple[int, ...]:
    """Pipeline sizes that divide the layers about evenly; the last stage has the head too."""
    head = model.head or model.embedding
    layer = (model.matmul_parameters - head) / model.layers
    even = tuple(pp for pp in STAGES if model.layers % pp == 0) or (1,)
    stages = even if len(even) > 1 else STAGES  # an odd number of layers is divided by hand
    return tuple(pp for pp in stages if pp == 1 or head / layer * pp <= UNEVEN * model.layers)


def _decoding(run: RunInputs, free: Freedom, offload: str, c: Constants) -> RunInputs | None:
    """The run with the fastest rollout that fits beside its training."""
    gpus, model = run.decode_gpus, run.model
    fractions = (
        (FRACTIONS if not run.rollout_gpus else (SEPARATE_FRACTION,)) if free.fraction else (run.memory_fraction,)
    )
    each = [run.engine.tp] if gpus % run.engine.tp == 0 else []
    if free.engine:
        most = max(run.engine.gpu.gpus_per_node, gpus)
        each = [tp for tp in PARALLEL if gpus % tp == 0 and model.heads % tp == 0 and tp <= most]
    best: tuple[float, RunInputs] | None = None
    for tp in each:
        for fraction in fractions:
            own = replace(run, engine=replace(run.engine, tp=tp), memory_fraction=fraction)
            step = step_time(own, c)
            if step.slots >= 1 and (best is None or step.seconds < best[0] * (1 - NEAR)) and fits(own, offload, c):
                best = step.seconds, own
    return best[1] if best else None
