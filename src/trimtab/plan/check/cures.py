"""Cures by trial: values that are changed one after another, the cheapest first, until a finding is gone.

A cure alone comes before two together. Its cost is what the change adds to a step, by the same arithmetic as estimates:
bytes over links, FLOPs at a usual share of the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.plan.check.findings import Remedy
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.constants import CONSTANTS

USUAL_MFU = 0.35
MOST = 3
GB = 1e9


class Change(Frozen):
    """A change of some values, None where it cannot be made, and its cost for a run."""

    make: Callable[[RunSetup], Mapping[str, Any] | None]
    cost: Callable[[RunSetup], str]


def tried(run: RunSetup, changes: tuple[Change, ...], good: Callable[[RunSetup], bool]) -> tuple[Remedy, ...]:
    """Up to three changes that cure alone; else as many of them in order as are needed together."""
    alone = [
        Remedy(values, change.cost(run))
        for change in changes
        for values in _steps(run, change)
        if good(replace(run, **values))
    ]
    if alone:
        return tuple(_one_of_each(alone)[:MOST])
    changed, values, costs = run, {}, []
    for change in changes:
        steps = list(_steps(changed, change))
        if not steps:
            continue
        values.update(steps[-1])
        costs.append(change.cost(changed))
        changed = replace(changed, **steps[-1])
        if good(changed):
            return (Remedy(values, "; ".join(dict.fromkeys(costs))),)
    return ()


def _steps(run: RunSetup, change: Change) -> Iterator[dict[str, Any]]:
    """A change made once, twice, ...: halves of halves."""
    values: dict[str, Any] = {}
    for _ in range(8):
        made = change.make(replace(run, **values))
        if not made or all(values.get(name) == value for name, value in made.items()):
            return
        values = {**values, **made}
        yield dict(values)


def _one_of_each(cures: list[Remedy]) -> list[Remedy]:
    found: dict[tuple[str, ...], Remedy] = {}
    for cure in cures:
        found.setdefault(tuple(cure.values), cure)
    return list(found.values())


def flag(name: str, value: Any = True) -> Callable[[RunSetup], Mapping[str, Any] | None]:
    """Sets a value, if it is another one."""
    return lambda run: None if getattr(run, name) == value else {name: value}


def less_share(run: RunSetup) -> Mapping[str, Any] | None:
    memory = run.rollout_memory
    return {"rollout_memory": round(memory - 0.1, 2)} if memory and memory > 0.25 else None


def more_share(run: RunSetup) -> Mapping[str, Any] | None:
    memory = run.rollout_memory
    return {"rollout_memory": round(memory + 0.05, 2)} if memory and memory <= 0.9 else None


def wider_engine(run: RunSetup) -> Mapping[str, Any] | None:
    """Twice the tensor-parallel size, where the heads and the node allow it."""
    tp = 2 * run.rollout_tp
    heads = run.model.heads if run.model else tp
    if heads % tp or tp > run.node_gpus or run.engine_gpus % (tp * run.rollout_dp):
        return None
    return {"rollout_tp": tp}


def smaller_batch(name: str) -> Callable[[RunSetup], Mapping[str, Any] | None]:
    """Half of a micro-batch of sequences."""

    def make(run: RunSetup) -> Mapping[str, Any] | None:
        size = getattr(run, name) if not run.dynamic else None
        return {name: size // 2} if size and size > 1 else None

    return make


def fewer_tokens(name: str) -> Callable[[RunSetup], Mapping[str, Any] | None]:
    """Half of a micro-batch of tokens, down to one sequence."""

    def make(run: RunSetup) -> Mapping[str, Any] | None:
        size = getattr(run, name) if run.dynamic else None
        least = (run.longest or 1) / (run.train_cp * run.train_sp)
        return {name: max(size // 2, round(least))} if size and size > least else None

    return make


def more_sequence_parallel(run: RunSetup) -> Mapping[str, Any] | None:
    """Twice the GPUs for a sequence: Ulysses with FSDP, context parallelism with Megatron."""
    name = "train_sp" if run.train_backend == "fsdp" and run.framework == "verl" else "train_cp"
    size = 2 * getattr(run, name)
    heads = run.model.heads if run.model else size
    if run.train_gpus % (2 * run.model_parallel) or heads % size or size > 8 or run.framework == "trl":
        return None
    return {name: size}


def wider_training(run: RunSetup) -> Mapping[str, Any] | None:
    tp = 2 * run.train_tp
    heads = run.model.kv_heads if run.model else tp
    if run.train_backend != "megatron" or heads % tp or run.train_gpus % (2 * run.model_parallel) or tp > run.node_gpus:
        return None
    return {"train_tp": tp, **({"train_etp": 1} if run.train_ep > 1 else {})}


def deeper_training(run: RunSetup) -> Mapping[str, Any] | None:
    pp = 2 * run.train_pp
    layers = run.model.layers if run.model else pp
    if run.train_backend != "megatron" or layers % pp or run.train_gpus % (2 * run.model_parallel):
        return None
    return {"train_pp": pp}


def more_gpus(run: RunSetup) -> Mapping[str, Any] | None:
    """Twice the GPUs, as whole nodes."""
    if not run.gpus or run.gpus > 4096 or run.rollout_gpus or run.train_shards not in (None, run.gpus):
        return None
    doubled = {"gpus": 2 * run.gpus}
    return {**doubled, "train_shards": 2 * run.gpus} if run.train_shards else doubled


def moved_seconds(run: RunSetup, gigabytes: float) -> str:
    """To host memory and back once a step."""
    if run.gpu is None:
        return "moves states over the host link each step"
    seconds = 2 * gigabytes / (run.gpu.host_gbs * CONSTANTS.host_share)
    return f"about {_figure(seconds)} s a step to move {gigabytes:.0f} GB there and back on each GPU"


def pass_seconds(run: RunSetup, factor: float) -> float | None:
    """Seconds of a pass of so many FLOPs per parameter and token over a step's samples."""
    if run.model is None or run.gpu is None or not run.samples or not run.mean:
        return None
    flops = factor * run.model.active_parameters * run.samples * run.mean
    return flops / (run.train_gpus * run.gpu.flops("bf16") * USUAL_MFU)


def recompute_cost(run: RunSetup) -> str:
    seconds = pass_seconds(run, 2.0)
    return "a third more FLOPs in updates" + (f", about {_figure(seconds)} s a step" if seconds else "")


def free(words: str) -> Callable[[RunSetup], str]:
    return lambda run: words


def _figure(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"
