"""Many runs in one answer: for every policy the mean over seeds, and the spread. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from trimtab.replay.pool.figures import ClassFigures, PoolFigures, spread

OF_CLASS = tuple(one.name for one in fields(ClassFigures) if one.name != "tasks")
OF_RUN = ("evictions", "losses", "redone_gpu_h", "utilisation", "held", "makespan_s")


@dataclass(frozen=True)
class PolicySummary:
    """One policy over all seeds: mean and standard deviation by figure, as `utilisation` or `high.wait_mean_s`."""

    policy: str
    runs: tuple[PoolFigures, ...]
    figures: dict[str, tuple[float, float]]

    def mean(self, name: str) -> float:
        """The mean over seeds."""
        return self.figures[name][0]


def summary(runs: Sequence[PoolFigures]) -> list[PolicySummary]:
    """A row for each policy, in the order of the runs."""
    by_policy: dict[str, list[PoolFigures]] = {}
    for one in runs:
        by_policy.setdefault(one.policy, []).append(one)
    return [PolicySummary(policy, tuple(known), _means(known)) for policy, known in by_policy.items()]


def _means(runs: Sequence[PoolFigures]) -> dict[str, tuple[float, float]]:
    found = {name: spread(getattr(one, name) for one in runs) for name in OF_RUN}
    for class_ in runs[0].classes:
        known = [one.classes[class_] for one in runs if class_ in one.classes]
        for name in OF_CLASS:
            found[f"{class_}.{name}"] = spread(getattr(one, name) for one in known)
    return found


def data(runs: Sequence[PoolFigures]) -> list[dict[str, Any]]:
    """A flat record for each run, for programs: the same keys as in a table, one line each in CSV."""
    return [
        {
            "policy": one.policy,
            "seed": one.seed,
            **{name: getattr(one, name) for name in OF_RUN},
            **{
                f"{class_}.{name}": getattr(known, name)
                for class_, known in one.classes.items()
                for name in ("tasks", *OF_CLASS)
            },
            "events": one.events,
            "looks": one.looks,
            "checks": one.checks,
            "seconds": one.seconds,
        }
        for one in runs
    ]
