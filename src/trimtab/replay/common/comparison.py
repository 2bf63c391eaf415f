"""Policies compared by simulation: figures of every run, of every policy over all seeds, and what a sweep recommends.

The same for pools, rollouts and replanning, and for a replayed journal: a kind of simulation states which figures its
runs have and what else is known of a policy. Every setting of a sweep ran on the same reality under a seed, so settings
are compared seed by seed: the mean difference to the current setting, and its standard error. The best of many tried is
partly luck: runs that had no part in the choice decide (other seeds, the later half of a trace), and a value that makes
something else worse than the current setting is rejected. Must never happen: recommending a difference that chance
alone explains.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, field, replace
from math import ceil, nan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Generic, Protocol, TypeVar

from pydantic import Field

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.sections import Made, Seed, Shorthand

MIN_STANDARD_ERRORS = 2.0  # standard errors that a gain must exceed
MIN_GAIN = 0.002  # share of the figure: smaller differences count as equal
MIN_SEEDS = 3  # seeds
SEED_OFFSET = 1_000  # of evaluation seeds

# Of scenario files.
SEEDS = (1, 2, 3, 4, 5)
Seeds = Annotated[
    tuple[int, ...], Made(Annotated[list[Seed], Field(min_length=1)], lambda seeds: tuple(dict.fromkeys(seeds)))
]
BY_USE = Shorthand(lambda value: {"use": value} if isinstance(value, str) else value)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a sorted list."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else nan


class Recommendation(Frozen):
    """The recommended setting: the current one unless another is significantly better."""

    choose: str
    sentence: str
    gain: float  # of the best setting tried, as a share of the current figure; below 0: all are worse
    error: float  # its standard error
    seeds: int


def best(now: str, tried: Mapping[str, Mapping[int, float]]) -> str:
    """The setting other than `now` with the lowest mean; `now` if nothing else was tried."""
    others = {name: fmean(by_seed.values()) for name, by_seed in tried.items() if name != now}
    return min(others, key=others.__getitem__) if others else now


def recommend(
    now: str,
    tried: Mapping[str, Mapping[int, float]],
    what: str,
    held_out: Mapping[str, Mapping[int, float]] | None = None,
    runs: str = "seeds",
) -> Recommendation:
    """Compares settings. `tried`: figure by setting and seed, lower is better; `now`: the current setting, one of them.

    `what` names the figure. `held_out`: the same for seeds not used for the choice, at least of `now` and the best;
    `runs` names them.
    """
    choice = best(now, tried)
    if choice == now:
        return Recommendation(now, f"keep {now}: no other setting was tried", 0.0, 0.0, len(tried[now]))
    judged = tried if held_out is None else held_out
    base, its = judged[now], judged[choice]
    gains = [1 - its[seed] / base[seed] for seed in base if base[seed]]
    gain, seeds = fmean(gains) if gains else 0.0, len(gains)
    error = stdev(gains) / sqrt(seeds) if seeds > 1 else 0.0
    over = f"{seeds} {runs}" if held_out is None else f"{seeds} {runs} that did not choose it"
    found = (
        f"{what} is {abs(gain):.1%} {'lower' if gain >= 0 else 'higher'} with {choice} than with {now} "
        f"(± {error:.1%}, standard error over {over}; lower with {sum(gain > 0 for gain in gains)} of them)"
    )
    if gain <= MIN_GAIN:
        return Recommendation(now, f"keep {now}: {found}", gain, error, seeds)
    if seeds < MIN_SEEDS:
        return Recommendation(now, f"keep {now} for now: {found}, and that is too few {runs}", gain, error, seeds)
    if gain <= MIN_STANDARD_ERRORS * error:
        return Recommendation(
            now, f"keep {now}: {found}, which chance may explain: no difference above the spread", gain, error, seeds
        )
    return Recommendation(choice, f"choose {choice}: {found}", gain, error, seeds)


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


class PolicySummary(Frozen):
    """A policy over all seeds: its figures, and what else the kind of simulation knows of it."""

    policy: str
    figures: Mapping[str, Spread]
    facts: Mapping[str, Spread | float | None] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        return self.figures[name][0]


class Comparison(Frozen, Generic[ScenarioT, FiguresT]):
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
        return f"mean of {self.seeds} seeds, ± their standard deviation" if self.seeds > 1 else "one seed"

    @property
    def first_seed(self) -> list[FiguresT]:
        return [run for run in self.runs if run.seed == self.scenario.seeds[0]]

    def total(self, name: str) -> Any:
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


class SweepRules(Frozen, Generic[FiguresT]):
    """How a kind of simulation sweeps a setting; the value with the lowest figure is best unless it is rejected."""

    base: Callable[[Any], Any]  # the policy of a scenario whose setting is swept
    vary: Callable[[Any, str, float, str], Any]  # it with a value of a setting, stated somewhere; None: it has it
    figure: Callable[[FiguresT], float]
    what: str  # the figure, in words
    rejection: Callable[[str, Sequence[FiguresT], Sequence[FiguresT]], str]  # of a setting beside the base; or empty
    leaves_out: bool = False  # invalid values are left out, and that is said; otherwise the sweep is refused
    parts: Callable[[Any], tuple[list[Any], list[Any]] | None] = lambda scenario: None  # that choose, that evaluate

    def sweep(self, scenario: Any, key: str, values: Sequence[float], where: str) -> tuple[Any, list[str]]:
        """The scenario with the current setting and with every other value; and the values left out, with reasons."""
        base = self.base(scenario)
        tried, left_out = [], []
        for value in values:
            try:
                tried.append(self.vary(base, key, value, where))
            except InputError as error:  # noqa: PERF203
                if not self.leaves_out or error.where == where:
                    raise
                left_out.append(f"{key} {value:g} is left out: {error.what}")
        tried = [policy for policy in tried if policy is not None]
        if not tried:
            raise InputError("; ".join(left_out) or f"{key} has these values already", where=where)
        others = (policy for policy in scenario.policies if policy is not base)
        return replace(scenario, policies=(base, *tried, *others)), left_out

    def recommend(
        self, scenario: Any, runs: Sequence[FiguresT], run_all: Callable[[Any], Iterable[FiguresT]]
    ) -> Recommendation:
        """`runs` choose a value, or the first parts of the scenario; `run_all` runs what evaluates it."""

        def by_name(scenarios: Iterable[Any], names: Iterable[str]) -> dict[str, list[FiguresT]]:
            policies = tuple(policy for policy in scenario.policies if policy.name in names)
            return by_policy(run for part in scenarios for run in run_all(replace(part, policies=policies)))

        base = self.base(scenario).name
        chosen_by = {name: known for name, known in by_policy(runs).items() if f"{name}, ".startswith(f"{base}, ")}
        judges, word = [replace(scenario, seeds=tuple(seed + SEED_OFFSET for seed in scenario.seeds))], "seeds"
        if (parts := self.parts(scenario)) is not None:
            chosen_by, judges, word = by_name(parts[0], chosen_by), parts[1], "windows"
        allowed = {
            name: known
            for name, known in chosen_by.items()
            if name == base or not self.rejection(name, known, chosen_by[base])
        }
        choice = best(base, self._by_seed(allowed))
        judged_by = by_name(judges, {base, choice})
        found = recommend(base, self._by_seed(allowed), self.what, self._by_seed(judged_by), word)
        why = self.rejection(choice, judged_by[choice], judged_by[base])
        if not why or choice == base:
            return found
        return replace(found, choose=base, sentence=f"keep {base}: {why} in the evaluation runs; {found.sentence}")

    def _by_seed(self, known: Mapping[str, Sequence[FiguresT]]) -> dict[str, dict[int, float]]:
        return {name: {run.seed: self.figure(run) for run in runs} for name, runs in known.items()}


class ScenarioKind(Frozen):
    """A kind of simulation: how its scenarios are read, run, swept and compared."""

    read: Callable[[Path], Any]
    run: Callable[[Any, Any, int, Callable[[float], None] | None], Any]  # scenario, policy, seed, progress
    sweep: SweepRules[Any]
    compare: Callable[[Any, Sequence[Any], Recommendation | None], Comparison[Any, Any]]
