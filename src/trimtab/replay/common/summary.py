"""Aggregates runs: for every policy the mean and the spread over seeds. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from trimtab.replay.pool.figures import ClassFigures, PoolFigures, spread

OF_CLASS = tuple(item.name for item in fields(ClassFigures) if item.name != "tasks")
OF_RUN = ("evictions", "losses", "redone_gpu_h", "utilisation", "held", "makespan_s")


@dataclass(frozen=True)
class PolicySummary:
    """A policy over all seeds: (mean, standard deviation) by figure, such as `utilisation` or `high.wait_mean_s`."""

    policy: str
    runs: tuple[PoolFigures, ...]
    figures: dict[str, tuple[float, float]]

    def mean(self, name: str) -> float:
        return self.figures[name][0]


def summary(runs: Sequence[PoolFigures]) -> list[PolicySummary]:
    """One row per policy, in the order of the runs."""
    by_policy: dict[str, list[PoolFigures]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(run)
    return [PolicySummary(policy, tuple(known), _means(known)) for policy, known in by_policy.items()]


def _means(runs: Sequence[PoolFigures]) -> dict[str, tuple[float, float]]:
    found = {name: spread(getattr(run, name) for run in runs) for name in OF_RUN}
    for class_ in runs[0].classes:
        known = [run.classes[class_] for run in runs if class_ in run.classes]
        for name in OF_CLASS:
            found[f"{class_}.{name}"] = spread(getattr(figures, name) for figures in known)
    return found


def data(runs: Sequence[PoolFigures]) -> list[dict[str, Any]]:
    """One flat record per run, for JSON and CSV."""
    return [
        {
            "policy": run.policy,
            "seed": run.seed,
            **{name: getattr(run, name) for name in OF_RUN},
            **{
                f"{class_}.{name}": getattr(known, name)
                for class_, known in run.classes.items()
                for name in ("tasks", *OF_CLASS)
            },
            "events": run.events,
            "looks": run.looks,
            "checks": run.checks,
            "seconds": run.seconds,
        }
        for run in runs
    ]
