"""Policies compared by simulation: the figures of every run, and of every policy over all seeds.

The same for pools, rollouts and replanning, and for a replayed journal: a kind of simulation states which figures its
runs have and what else is known of a policy.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, Generic, Protocol, TypeVar

from trimtab.core.errors import InputError
from trimtab.replay.common.recommend import Recommendation

Spread = tuple[float, float]
"""Mean and standard deviation."""


class NamedPolicy(Protocol):
    """A policy that was compared."""

    @property
    def name(self) -> str: ...

    def text(self) -> str: ...


class ComparedScenario(Protocol):
    """What policies were compared in: a scenario or a recorded journal."""

    @property
    def name(self) -> str: ...

    @property
    def seeds(self) -> tuple[int, ...]: ...

    @property
    def policies(self) -> Sequence[NamedPolicy]: ...

    def assumptions(self) -> list[str]:
        """The assumptions; the first two describe the scenario."""


class RunFigures(Protocol):
    """Figures of a run."""

    @property
    def policy(self) -> str: ...

    @property
    def seed(self) -> int: ...

    def record(self) -> dict[str, Any]:
        """All figures as plain data, by name."""


ScenarioT = TypeVar("ScenarioT", bound=ComparedScenario)
FiguresT = TypeVar("FiguresT", bound=RunFigures)


def check_unique(policies: Sequence[NamedPolicy]) -> None:
    """Policies of a scenario must have different names."""
    names = [policy.name for policy in policies]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two policies are named {name}", hint="give one a `name`")


@dataclass(frozen=True)
class PolicySummary:
    """A policy over all seeds: its figures, and what else the kind of simulation knows of it."""

    policy: str
    figures: Mapping[str, Spread]
    facts: Mapping[str, Spread | float | None] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        return self.figures[name][0]


@dataclass(frozen=True)
class Comparison(Generic[ScenarioT, FiguresT]):
    """The result of a simulation; `facts` belong to no policy. `advice` is that of a sweep."""

    scenario: ScenarioT
    runs: Sequence[FiguresT]
    rows: Sequence[PolicySummary]
    facts: Mapping[str, Any] = field(default_factory=dict)
    advice: Recommendation | None = None

    @property
    def seeds(self) -> int:
        return len(self.scenario.seeds)

    @property
    def over(self) -> str:
        """What a figure is, for a heading."""
        return f"mean of {self.seeds} seeds, ± their standard deviation" if self.seeds > 1 else "one seed"

    @property
    def first_seed(self) -> list[FiguresT]:
        return [run for run in self.runs if run.seed == self.scenario.seeds[0]]

    def total(self, name: str) -> Any:
        """Sum of a figure over all runs."""
        return sum(getattr(run, name) for run in self.runs)

    def data(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "scenario": self.scenario.name,
            "assumptions": self.scenario.assumptions(),
            "policies": {policy.name: policy.text() for policy in self.scenario.policies},
            "seeds": list(self.scenario.seeds),
            **self.facts,
            "recommendation": None if self.advice is None else asdict(self.advice),
            "summary": [
                {"policy": row.policy, **{key: _plain(value) for key, value in {**row.facts, **row.figures}.items()}}
                for row in self.rows
            ],
            "runs": [run.record() for run in self.runs],
        }

    def csv(self) -> str:
        """A line for every run, without series."""
        lines = [
            {key: value for key, value in run.record().items() if not isinstance(value, tuple)} for run in self.runs
        ]
        page = io.StringIO()
        names = list(dict.fromkeys(name for line in lines for name in line))
        writer = csv.DictWriter(page, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return page.getvalue()


def by_policy(runs: Iterable[FiguresT]) -> dict[str, list[FiguresT]]:
    found: dict[str, list[FiguresT]] = {}
    for run in runs:
        found.setdefault(run.policy, []).append(run)
    return found


def spreads(runs: Sequence[FiguresT], names: Iterable[str]) -> dict[str, Spread]:
    """Figures over the runs of a policy, by name."""
    return {name: spread(float(getattr(run, name)) for run in runs) for name in names}


def spread(values: Iterable[float]) -> Spread:
    known = list(values)
    return fmean(known), stdev(known) if len(known) > 1 else 0.0


def spread_text(figure: Spread, seeds: int, render: Callable[[float], str]) -> str:
    """The mean; with its deviation where there are several seeds."""
    return render(figure[0]) + (f" ± {render(figure[1])}" if seeds > 1 else "")


def _plain(value: Spread | float | None) -> Any:
    return {"mean": value[0], "deviation": value[1]} if isinstance(value, tuple) else value
