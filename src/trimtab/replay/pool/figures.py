"""What a run of a pool comes to: waits and completions by class, evictions, utilisation. Plain numbers.

A wait is all the time that a task spent in the queue, also after evictions; a completion is from submission to the end
of its work. Percentiles are those of a sorted list, nothing is fitted. Utilisation counts work that did not have to be
done again, until the last submission: afterwards a cluster only runs empty.
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
    """One class of tasks, or all of them."""

    tasks: int
    wait_mean_s: float
    wait_p50_s: float
    wait_p99_s: float
    completion_mean_s: float
    completion_p99_s: float
    slowdown_mean: float  # completion over the length of its work
    evictions: int


@dataclass(frozen=True)
class PoolFigures:
    """One run of one policy."""

    policy: str
    seed: int
    classes: dict[str, ClassFigures]
    evictions: int
    losses: int
    redone_gpu_h: float  # work that was lost
    utilisation: float  # work, of what there was
    held: float  # by processes, of what there was
    makespan_s: float
    events: int
    looks: int
    checks: int
    curves: PoolCurves
    seconds: float = 0.0  # that the simulation took


def figures(outcome: PoolOutcome, policy: str, seed: int, classes: Sequence[str]) -> PoolFigures:
    """Sum a run up."""
    by_class = {name: [one for one in outcome.tasks if one.work.class_ == name] for name in classes}
    found = {name: _class(tasks) for name, tasks in by_class.items() if tasks}
    found[ALL] = _class(outcome.tasks)
    capacity = outcome.capacity_gpu_s or 1.0
    return PoolFigures(
        policy,
        seed,
        found,
        outcome.evictions,
        sum(one.losses for one in outcome.tasks),
        sum(one.redone_s * one.work.gpus for one in outcome.tasks) / 3600.0,
        outcome.work_gpu_s / capacity,
        outcome.held_gpu_s / capacity,
        outcome.end_s,
        outcome.events,
        outcome.looks,
        outcome.checks,
        outcome.curves,
    )


def _class(tasks: Sequence[SimulatedTask]) -> ClassFigures:
    waits = sorted(one.waited_s for one in tasks)
    took = [(math.nan if one.done_s is None else one.done_s) - one.work.submit_s for one in tasks]
    completions = sorted(took)
    return ClassFigures(
        len(tasks),
        fmean(waits),
        percentile(waits, 0.5),
        percentile(waits, 0.99),
        fmean(completions),
        percentile(completions, 0.99),
        fmean(each / max(one.work.work_s, 1.0) for each, one in zip(took, tasks, strict=True)),
        sum(one.evictions for one in tasks),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of a sorted list: the first value that so many are not above."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard deviation of runs with different seeds."""
    known = list(values)
    return fmean(known), stdev(known) if len(known) > 1 else 0.0
