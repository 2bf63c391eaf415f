"""Fits the constants of the estimates: the least mean error of logarithms, one constant after another, in three stages.

Serving points give the constants of decoding; weight syncs those of refits; trainers' micro-batches and steps, with
decoding fixed, the others. Each constant is held near its start by a weak prior, so that few rows cannot carry it away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.estimate_gpu import predicted
from bench.truth import rows
from trimtab.plan.estimate import memory
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.memory import MemorySettings
from trimtab.plan.estimate.phases import GB, context_gb, layer_copies
from trimtab.plan.estimate.serving import Work
from trimtab.plan.estimate.step import refit_seconds, step_time
from trimtab.plan.estimate.training import Trainer, pass_time

START = Constants(
    weight_share=0.75, expert_share=0.6, cache_share=0.6, compute_share=0.5, overlap=0.5, layer_us=8.0,
    moe_layer_us=8.0, step_ms=2.0, sequence_us=10.0, hop_us=12.0, link_share=0.5, quiet_step_ms=0.5,
    quiet_sequence_us=3.0, prefill_share=0.75, prefill_narrow=500.0, prefill_layer_us=500.0, launch_ms=1.0,
    train_share=0.55,
    narrow_hidden=500.0, expert_train_share=0.4, attention_share=0.7, train_link_share=0.6, broadcast_s=1.0,
    broadcast_s_per_gb=0.3, packed_s=2.0, packed_s_per_gb=0.02, ipc_s=2.0, ipc_s_per_gb=0.05, delta_s=0.5,
    delta_s_per_gb=2.0, rollout_factor=1.2, async_steady=0.5, forward_factor=1.3, update_s=0.5, host_share=0.3,
    fixed_s=5.0, sample_ms=4.0, token_us=2.0, layer_copies=1.8, expert_copies=3.0, context_gb=1.5,
    context_exponent=0.2, expert_gathers=2.0, releases=(),
)  # fmt: skip
"""Round numbers before any fit: what these rates and overheads usually are."""
SERVING = (
    *("weight_share", "expert_share", "cache_share", "compute_share", "overlap", "layer_us", "moe_layer_us"),
    *("step_ms", "sequence_us", "hop_us", "link_share"),
)
SYNCS = (
    "broadcast_s",
    "broadcast_s_per_gb",
    "packed_s",
    "packed_s_per_gb",
    "ipc_s",
    "ipc_s_per_gb",
    "delta_s",
    "delta_s_per_gb",
)
QUIET = ("quiet_step_ms", "quiet_sequence_us", "prefill_share", "prefill_narrow", "prefill_layer_us")
TRAINING = ("train_share", "narrow_hidden", "expert_train_share", "attention_share", "train_link_share", "launch_ms")
STEPS = (
    "rollout_factor",
    "async_steady",
    "forward_factor",
    "update_s",
    "host_share",
    "fixed_s",
    "sample_ms",
    "token_us",
)
MOST = {"overlap": 1.0, "async_steady": 1.0, **dict.fromkeys(("rollout_factor",), 3.0)}
SHARE = 0.92
CAP = 1.0
"""Errors of logarithms count up to here: a row that is off by a factor of e is no reason to bend the rest."""
BATCHED = 2**17
"""Tokens of the largest prefill that an engine keeps room for."""
PRIOR = 0.01
"""Weight of a constant's distance from its start, in squared logarithms, against the mean error."""

Errors = NDArray[np.float64]


def search(
    start: Constants, names: Sequence[str], error: Callable[[Constants], Errors], rounds: int, prior: float = 0.0
) -> Constants:
    """Move one constant after another while that lowers the mean absolute error."""

    def loss(c: Constants) -> float:
        away = sum(np.log(getattr(c, name) / getattr(start, name)) ** 2 for name in names)
        return float(np.mean(np.minimum(np.abs(error(c)), CAP)) + prior * away)

    best, least = start, loss(start)
    steps = dict.fromkeys(names, 0.4)
    for _ in range(rounds):
        for name in names:
            for sign in (1, -1):
                value = float(getattr(best, name) * np.exp(sign * steps[name]))
                value = min(value, MOST.get(name, SHARE if name.endswith("share") else np.inf))
                moved = replace(best, **{name: value})
                now = loss(moved)
                if now < least - 1e-7:
                    best, least = moved, now
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.6
        if max(steps.values()) < 0.01:
            break
    return best


def train_gb(point: rows.MemoryPoint, c: Constants) -> float:
    """GB at the peak of training adapters beside a sleeping engine."""
    settings = MemorySettings(
        gpus=1,
        precision=point.precision,
        micro_batch=point.sequences,
        sequence_length=point.length,
        lora_rank=point.rank,
        lora_attention_only=point.attention_only,
        fused_logits=True,
        layer_copies=layer_copies(point.model, c),
        process_gb=context_gb(point.gpu, c),
    )
    return memory.estimate(point.model, settings)[0].active_gb


def memory_gb(point: rows.MemoryPoint, c: Constants) -> float:
    """GB at a measured peak: an engine fills its share of the GPU, its process comes on top.

    The room that it keeps for the activations of a full prefill stays free while it decodes.
    """
    if point.phase == "training":
        return train_gb(point, c)
    kept = min(point.batched, BATCHED) * (4 * point.model.mlp_width + 8 * point.model.hidden) / GB
    return point.fraction * point.device_gb + context_gb(point.gpu, c) / 2 - kept


def margin_gb(point: rows.MemoryPoint, c: Constants) -> float:
    """What may come on top: left by the sleeping side, and of attention without a fused kernel."""
    unfused = memory.unfused_gb(point.model, point.sequences, point.length) if point.phase == "training" else 0.0
    return c.residue_gb + unfused


def peak_gb(trainer: Trainer, row: Mapping[str, str], c: Constants) -> float:
    """GB that a sharded trainer allocates at its peak; the process is not part of it."""
    supervised = row["type"].startswith("SFT")
    settings = MemorySettings(
        gpus=trainer.gpus,
        precision="fp32",
        master_weights=False,
        sequence_length=round(trainer.micro_tokens),
        lora_rank=trainer.lora_rank,
        fused_logits=not supervised,
        layer_copies=layer_copies(trainer.model, c),
        expert_copies=c.expert_gathers,
        process_gb=0.0,
    )
    needed = memory.estimate(trainer.model, settings)[0]
    kept = [term.gb for term in needed.active if not (row["activations"] == "Offload" and term.name == "checkpoints")]
    return sum(kept)


def fit_memory(without: str | None, start: Constants) -> Constants:
    kept = [point for point in rows.memory_points() if point.point.family != without and point.phase == "training"]
    measured = np.array([point.point.value for point in kept])

    def error(c: Constants) -> Errors:
        return np.log(np.array([train_gb(point, c) for point in kept]) / measured)

    names = ["layer_copies", "context_gb", "context_exponent"]
    if any(point.model.experts for point in kept):
        names.append("expert_copies")
    found = search(start, names, error, rounds=15, prior=PRIOR / 5)
    table = zip(rows.trainer_points(), rows.read("prime_rl_trainer"), strict=True)
    sparse = [(e, row) for e, row in table if e[1].model.experts and rows.family(e[0].family) != without]

    def peaks(c: Constants) -> Errors:
        return np.log(np.array([peak_gb(trainer, row, c) / peak for (_, trainer, _, peak), row in sparse]))

    return search(found, ["expert_gathers"], peaks, rounds=15, prior=PRIOR / 5)


def serving_errors(c: Constants, work: Work, measured: Errors) -> Errors:
    return np.asarray(np.log(work.seconds(c) / measured))


def fit(without: str | None = None, start: Constants = START, *, serving: Constants | None = None) -> Constants:
    """All constants, fitted without the rows of one family of models."""
    found = fit_quiet(without, serving or fit_serving(without, start))
    return fit_steps(without, fit_memory(without, fit_syncs(without, found)))


def fit_serving(without: str | None, start: Constants) -> Constants:
    points, work = rows.serving_points()
    kept = np.array([point.family != without for point in points])
    measured = np.array([point.value for point in points])[kept]
    own = Work(*(getattr(work, name)[kept] for name in Work.__dataclass_fields__))
    return search(start, SERVING, lambda c: serving_errors(c, own, measured), rounds=100)


def gpu_errors(c: Constants, without: str | None, parts: Sequence[str], *, only: str | None = None) -> list[float]:
    """Logarithms of what is predicted over what `python -m bench.estimate_gpu` measured."""
    return [
        float(np.log(predicted(part, model, gpu, sequences, length, c) / point.value))
        for point, part, model, gpu, sequences, length in rows.gpu_points()
        if part in parts and point.family != without and only in (None, point.family)
    ]


def fit_quiet(without: str | None, start: Constants) -> Constants:
    return search(
        start, QUIET, lambda c: np.array(gpu_errors(c, without, ("decode", "prefill"))), rounds=60, prior=PRIOR / 5
    )


def fit_syncs(without: str | None, start: Constants) -> Constants:
    kept = [(point, how, run) for point, how, run in rows.sync_points() if rows.family(point.family) != without]

    def error(c: Constants) -> Errors:
        took = [
            refit_seconds(run.model, run.engine, how, c, shared=False, trainers=run.trainer.gpus)
            for _, how, run in kept
        ]
        return np.log(np.array(took) / np.array([point.value for point, _, _ in kept]))

    return search(start, SYNCS, error, rounds=60, prior=PRIOR)


def fit_steps(without: str | None, start: Constants) -> Constants:
    steps = [row for row in rows.step_rows()[0] if row.family != without]
    trainers = [entry for entry in rows.trainer_points() if entry[0].family != without and "B200" not in entry[0].label]
    releases = sorted({row.run.release for row in steps})

    def error(c: Constants) -> Errors:
        of_steps = [np.log(step_time(row.run, c).seconds / row.seconds) for row in steps]
        of_trainers = [
            np.log(pass_time(trainer, tokens, trainer.micro_tokens, 1.0, c, backward=True).seconds / point.value)
            for point, trainer, tokens, _ in trainers
        ]
        of_trainers += gpu_errors(c, without, ("train",))
        return np.array([*of_steps, *(0.3 * value for value in of_trainers)])

    found = search(
        start,
        (*TRAINING, *STEPS, "packed_s", "packed_s_per_gb", "ipc_s", "ipc_s_per_gb"),
        error,
        rounds=25,
        prior=PRIOR,
    )
    factors = []
    for release in releases:
        own = [np.log(row.seconds / step_time(row.run, found).seconds) for row in steps if row.run.release == release]
        # Shrunk towards 1: as if four more rows agreed with the model.
        factors.append((release, float(np.exp(np.median(own) * len(own) / (len(own) + 4)))))
    return replace(found, releases=tuple(factors))
