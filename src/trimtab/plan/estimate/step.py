"""Seconds of an RL step and of its stages, from what is known before a launch.

Synchronous training adds its stages up. Asynchronous training decodes on GPUs of its own beside training: the longer
side counts, then the weights are sent. Every stage says what limits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.model.architecture import Architecture
from trimtab.model.gpus import GpuKind
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.lengths import Lengths
from trimtab.plan.estimate.serving import EngineReplica, rollout_seconds, slots_of, weight_bytes
from trimtab.plan.estimate.training import Trainer, pass_time

ENGINE_RESERVE_GB = 4.0
"""Of an engine beside weights and cache: CUDA context, graphs, the activations of a prefill."""

SHARED_FRACTION, SEPARATE_FRACTION = 0.6, 0.85
"""Of a GPU's memory for the engine, beside a trainer and alone."""

ALONE = ("refit", "switch")
"""Stages in which neither side works."""

PASSES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("old", "reference"),
    "dapo": ("old",),
    "rloo": ("old", "reference"),
    "reinforce++": ("old", "reference"),
    "gspo": ("old",),
    "ppo": ("old", "reference", "critic"),
    "direct": (),
}
"""Passes of an algorithm beside the update: log-probs of the old policy and of a reference, values of a critic.

`direct` is any that trains on the engines' own log-probs.
"""

DYNAMIC_SAMPLING = 3.0
"""`batch_multiplier` of NeMo RL's DAPO recipes, and generation batch over training batch in verl's."""


class RunInputs(Frozen):
    """One step's inputs. `rollout_gpus` 0 means that rollout and training share all GPUs.

    Asynchronous on shared GPUs, a batch is trained on once it is complete: answers that are not go on after the update.
    """

    model: Architecture
    gpu: GpuKind
    gpus: int
    samples: int
    train_batch: int
    lengths: Lengths
    engine: EngineReplica
    trainer: Trainer
    rollout_gpus: int = 0
    mode: str = "sync"
    staleness: float = 1.0
    partial: bool = False
    lend: bool = False
    """Trainer GPUs that have nothing to train on decode too, where both sides have one GPU kind."""
    sync_every: float = 1.0
    """Steps from one weight sync to the next."""
    passes: tuple[str, ...] = ("old", "reference")
    epochs: int = 1
    memory_fraction: float = SHARED_FRACTION
    max_sequences: int = 1024
    transport: str = "packed"
    release: str = ""
    turns: int = 1
    tool_seconds: float = 0.0
    image_tokens: float = 0.0
    judge_seconds: float = 0.0
    judge: EngineReplica | None = None
    """A model that judges answers, on `judge_gpus` of its own, with a verdict of `judge_tokens`."""
    judge_gpus: int = 0
    judge_tokens: float = 1.0
    oversample: float = 1.0
    """Answers decoded for each that is trained on: dynamic sampling drops groups without a signal."""

    @property
    def decode_gpus(self) -> int:
        return self.rollout_gpus or self.gpus

    @property
    def decoded(self) -> float:
        return self.samples * self.oversample


class Stage(Frozen):
    """Seconds of a stage, what limits it, and whether it runs beside the others."""

    name: str
    seconds: float
    limit: str
    beside: bool = False
    waits: float = 0.0
    """The part of what runs beside training that training waits for: samples that may not be of older weights."""


class StepTime(Frozen):
    """A step and its stages; `flops` are those of the model, without recompute."""

    seconds: float
    stages: tuple[Stage, ...]
    flops: float
    slots: float
    concurrent: float
    notes: tuple[str, ...] = ()

    def stage(self, name: str) -> float:
        return sum(stage.seconds for stage in self.stages if stage.name == name)


def step_time(run: RunInputs, c: Constants) -> StepTime:
    """Seconds of one step."""
    factor = c.release(run.release)
    generate, slots, concurrent = _generate(run, c)
    passes = _passes(run, c)
    shared = not run.rollout_gpus
    sent = refit_seconds(run.model, run.engine, run.transport, c, shared=shared, trainers=run.trainer.gpus)
    refit = Stage("refit", sent / run.sync_every, "link")
    tokens = run.samples * run.lengths.mean
    rest = Stage("rest", c.fixed_s + run.decoded * c.sample_ms * 1e-3 + tokens * c.token_us * 1e-6, "host")
    beside = bool(run.rollout_gpus) and run.mode != "sync"
    waits = 0.0 if run.partial or not beside else max(0.0, 1.0 - run.staleness)
    judged = [replace(_judge(run, run.judge, generate.seconds, c), beside=beside, waits=waits)] if run.judge else []
    if beside and run.lend and run.engine.gpu == run.gpu:
        generate = _lent(run, generate, waits, sum(stage.seconds for stage in (*passes, rest)), c)
    stages = [replace(generate, beside=beside, waits=waits), *judged, *passes, refit, rest]
    if not run.rollout_gpus:
        stages.append(Stage("switch", _switch_seconds(run, c), "host link"))
    length = run.lengths.squares
    flops = 3 * run.epochs * tokens * run.model.forward_flops(length)
    scaled = tuple(replace(stage, seconds=stage.seconds * factor) for stage in stages)
    return StepTime(combined(scaled), scaled, flops, slots, concurrent)


def combined(stages: Iterable[Stage]) -> float:
    """Seconds of a step of these stages: what runs beside training counts where it lasts longer, or is waited for."""
    aside = training = after = 0.0
    for stage in stages:
        if stage.beside:
            aside += stage.seconds
            training += stage.waits * stage.seconds
        elif stage.name in ALONE:
            after += stage.seconds
        else:
            training += stage.seconds
    return max(aside, training) + after


def _generate(run: RunInputs, c: Constants) -> tuple[Stage, float, float]:
    engines = run.decode_gpus / run.engine.tp
    slots, limit = slots_of(run.engine, run.lengths, run.memory_fraction, run.max_sequences, ENGINE_RESERVE_GB)
    concurrent = min(slots, run.decoded / engines)
    steady = 0.0
    if run.mode != "sync" and (run.rollout_gpus or run.partial):
        steady = 1.0 if run.partial or run.staleness > 1 else c.async_steady
    seconds = rollout_seconds(run.engine, engines, run.decoded, run.lengths, slots, c, steady=steady)
    seconds *= c.rollout_factor
    tools = run.turns * run.tool_seconds
    if steady == 1.0:
        tools = tools * run.decoded / (engines * max(1.0, concurrent))
    limited = "bandwidth and the longest answers" if slots >= run.decoded / engines else limit
    return Stage("generate", seconds + tools + run.judge_seconds, limited), slots, concurrent


def _switch_seconds(run: RunInputs, c: Constants) -> float:
    """From training to decoding on the trainer's GPUs, and back: bf16 weights, fp32 copy and two moments are moved.

    Frozen weights have the first only.
    """
    held = weight_bytes(run.model, "bf16") * (1 if run.trainer.lora_rank else 7) / run.trainer.gpus
    return 2 * held / (run.gpu.host_gbs * 1e9 * c.host_share)


def _lent(run: RunInputs, alone: Stage, waits: float, trains: float, c: Constants) -> Stage:
    """Generation with the trainer's GPUs, which decode from the end of training, less the switch, to the next batch.

    In x seconds the trainer has nothing to do for x - trains, or for waits * x where it waits for samples of the new
    weights. Decoding is at the rate of its own GPUs, and in that time, less the switch, of all: x is solved for.
    """
    everywhere = _generate(replace(run, rollout_gpus=run.gpus), c)[0].seconds
    there = refit_seconds(run.model, run.engine, run.transport, c, shared=True) + _switch_seconds(run, c)
    more = 1 / everywhere - 1 / alone.seconds  # the share of a batch that lent GPUs decode in a second
    if more <= 0:
        return alone
    lent = min(everywhere * (1 + (trains + there) * more), (1 + there * more) / (1 / alone.seconds + waits * more))
    if lent >= alone.seconds:
        return alone
    return replace(alone, seconds=lent, limit=f"{alone.limit}, with lent GPUs")


def _judge(run: RunInputs, engine: EngineReplica, generate: float, c: Constants) -> Stage:
    """What a judge adds: answers are judged as they end, so that what lasts beyond the rollout counts."""
    lengths = Lengths(run.lengths.mean, ((max(1.0, run.judge_tokens), 1.0),))
    slots, limit = slots_of(engine, lengths, SEPARATE_FRACTION, run.max_sequences, ENGINE_RESERVE_GB)
    engines = run.judge_gpus / engine.tp
    took = rollout_seconds(engine, engines, run.decoded, lengths, slots, c, steady=1.0) * c.rollout_factor - generate
    last = rollout_seconds(engine, 1, 1, lengths, 1, c)
    return Stage("judge", max(took, last), limit if took > last else "the last answers")


def _passes(run: RunInputs, c: Constants) -> list[Stage]:
    tokens, length = run.samples * (run.lengths.mean + run.image_tokens), run.lengths.squares
    updates = max(1.0, run.samples / run.train_batch) * run.epochs
    of_all, of_batch = (run.lengths.longest_of(each) for each in (run.samples, min(run.train_batch, run.samples)))
    forward = pass_time(run.trainer, tokens, length, 1.0, c, backward=False, longest=of_all)
    update = pass_time(run.trainer, tokens * run.epochs, length, updates, c, backward=True, longest=of_batch)
    stages = []
    for name in run.passes:
        if name == "critic":
            stages.append(Stage("values", forward.seconds * c.forward_factor, forward.limit))
            stages.append(Stage("critic update", update.seconds, update.limit))
        else:
            stages.append(Stage(f"{name} log-probs", forward.seconds * c.forward_factor, forward.limit))
    return [*stages, Stage("update", update.seconds + updates * c.update_s, update.limit)]


def refit_seconds(
    model: Architecture, engine: EngineReplica, transport: str, c: Constants, *, shared: bool, trainers: int = 8
) -> float:
    """Seconds of a weight sync by transport; engines that share the trainer's GPUs copy within each GPU.

    What changed since the last sync is found by each of the trainer's GPUs in its own share of the weights.
    """
    size = weight_bytes(model, engine.precision) / 1e9
    if shared:
        transport = "ipc"
    fixed, per_gb = {
        "broadcast": (c.broadcast_s, c.broadcast_s_per_gb),
        "packed": (c.packed_s, c.packed_s_per_gb),
        "ipc": (c.ipc_s, c.ipc_s_per_gb),
        "delta": (c.delta_s, c.delta_s_per_gb / trainers),
    }[transport]
    return fixed + size * per_gb
