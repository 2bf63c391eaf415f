"""Figures of a pool run: waits and completions by class, evictions, utilisation. Plain numbers.

Wait: all time in the queue, including after evictions. Completion: from submission to the end of the work. Percentiles
are values of the sorted list, nothing is fitted. Utilisation counts work that was not redone, until the last
submission: after that the cluster only drains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from trimtab.replay.common.comparison import PolicySummary, Spread, by_policy, spread, spreads
from trimtab.replay.pool.driver import PoolCurves, PoolOutcome, SimulatedTask

ALL = "all"
OF_RUN = ("evictions", "losses", "redone_gpu_h", "utilisation", "held", "makespan_s")


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


OF_CLASS = tuple(item.name for item in fields(ClassFigures) if item.name != "tasks")


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

    def record(self) -> dict[str, Any]:
        """One flat record, for JSON and CSV."""
        by_class = {
            f"{class_}.{name}": getattr(known, name)
            for class_, known in self.classes.items()
            for name in ("tasks", *OF_CLASS)
        }
        before, after = ("policy", "seed", *OF_RUN), ("events", "looks", "checks", "seconds")
        return {name: getattr(self, name) for name in before} | by_class | {name: getattr(self, name) for name in after}


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


def summary(runs: Sequence[PoolFigures]) -> list[PolicySummary]:
    """One row per policy, in the order of the runs; figures of a class are named `high.wait_mean_s`."""
    return [PolicySummary(policy, _means(known)) for policy, known in by_policy(runs).items()]


def _means(runs: Sequence[PoolFigures]) -> dict[str, Spread]:
    found = spreads(runs, OF_RUN)
    for class_ in runs[0].classes:
        known = [run.classes[class_] for run in runs if class_ in run.classes]
        for name in OF_CLASS:
            found[f"{class_}.{name}"] = spread(getattr(figures, name) for figures in known)
    return found
