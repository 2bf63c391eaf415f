"""Figures of a pool run: waits and completions by class, evictions, utilisation. Plain numbers.

Wait: all time in the queue, including after evictions. Completion: from submission to the end of the work. Percentiles
are values of the sorted list, nothing is fitted. Utilisation counts work that was not redone, until the last
submission: after that the cluster only drains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from trimtab.replay.pool.driver import PoolCurves, PoolOutcome, SimulatedTask

ALL = "all"


@dataclass(frozen=True)
class ClassFigures:
    """Figures of a class of tasks, or of all tasks."""

    tasks: int
    wait_mean_s: float
    wait_p50_s: float
    wait_p99_s: float
    completion_mean_s: float
    completion_p99_s: float
    slowdown_mean: float  # completion time over length of work
    evictions: int


@dataclass(frozen=True)
class PoolFigures:
    """Figures of a run."""

    policy: str
    seed: int
    classes: dict[str, ClassFigures]
    evictions: int
    losses: int
    redone_gpu_h: float  # lost work
    utilisation: float  # useful work as a share of capacity
    held: float  # held by processes, as a share of capacity
    makespan_s: float
    events: int
    looks: int  # invariant checks
    checks: int  # full consistency checks of the scheduler
    curves: PoolCurves
    seconds: float = 0.0  # wall time of the simulation


def figures(outcome: PoolOutcome, policy: str, seed: int, classes: Sequence[str]) -> PoolFigures:
    by_class = {name: [task for task in outcome.tasks if task.work.class_ == name] for name in classes}
    found = {name: _class(tasks) for name, tasks in by_class.items() if tasks}
    found[ALL] = _class(outcome.tasks)
    capacity = outcome.capacity_gpu_s or 1.0
    return PoolFigures(
        policy,
        seed,
        found,
        outcome.evictions,
        sum(task.losses for task in outcome.tasks),
        sum(task.redone_s * task.work.gpus for task in outcome.tasks) / 3600.0,
        outcome.work_gpu_s / capacity,
        outcome.held_gpu_s / capacity,
        outcome.end_s,
        outcome.events,
        outcome.looks,
        outcome.checks,
        outcome.curves,
    )


def _class(tasks: Sequence[SimulatedTask]) -> ClassFigures:
    waits = sorted(task.waited_s for task in tasks)
    took = [(math.nan if task.done_s is None else task.done_s) - task.work.submit_s for task in tasks]
    completions = sorted(took)
    return ClassFigures(
        len(tasks),
        fmean(waits),
        percentile(waits, 0.5),
        percentile(waits, 0.99),
        fmean(completions),
        percentile(completions, 0.99),
        fmean(seconds / max(task.work.work_s, 1.0) for seconds, task in zip(took, tasks, strict=True)),
        sum(task.evictions for task in tasks),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a sorted list."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    known = list(values)
    return fmean(known), stdev(known) if len(known) > 1 else 0.0
