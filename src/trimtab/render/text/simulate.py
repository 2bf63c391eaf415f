"""A simulation as text and as data: a row per policy, and the assumptions."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rich.markup import escape
from rich.table import Table

from trimtab.render.output import out, plain_table
from trimtab.render.text.formatting import show
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.pool.figures import PolicySummary, PoolFigures, data, summary


class NamedPolicy(Protocol):
    """A policy that was compared."""

    @property
    def name(self) -> str: ...

    def text(self) -> str: ...


class PolicyComparison(Protocol):
    """What policies were compared in: a scenario or a recorded journal."""

    @property
    def name(self) -> str: ...

    @property
    def seeds(self) -> tuple[int, ...]: ...

    @property
    def policies(self) -> Sequence[NamedPolicy]: ...

    def assumptions(self) -> list[str]:
        """The assumptions; the first two describe the scenario."""


def answer_data(
    scenario: PolicyComparison, runs: Sequence[PoolFigures], advice: Recommendation | None = None
) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "assumptions": scenario.assumptions(),
        "policies": {policy.name: policy.text() for policy in scenario.policies},
        "seeds": list(scenario.seeds),
        "recommendation": None if advice is None else asdict(advice),
        "summary": [
            {
                "policy": row.policy,
                **{name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in row.figures.items()},
            }
            for row in summary(runs)
        ],
        "runs": data(runs),
    }


def as_csv(runs: Sequence[PoolFigures]) -> str:
    rows = data(runs)
    page = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(page, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return page.getvalue()


def as_json(scenario: PolicyComparison, runs: Sequence[PoolFigures], advice: Recommendation | None = None) -> str:
    return json.dumps(answer_data(scenario, runs, advice), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_answer(scenario: PolicyComparison, runs: Sequence[PoolFigures], advice: Recommendation | None = None) -> None:
    out.print(f"[bold]{escape(scenario.name)}[/]")
    for sentence in scenario.assumptions():
        out.print(f"  {escape(sentence)}", style="dim")
    out.print()
    several = len(scenario.seeds) > 1
    over = f"mean of {len(scenario.seeds)} seeds, ± their standard deviation" if several else "one seed"
    out.print(f"Waits and completions by class: {over}")
    show(figures_table(runs, several))
    if advice is not None:
        out.print(f"\n{escape(advice.sentence)}")
    events, looks = sum(run.events for run in runs), sum(run.looks for run in runs)
    seconds = sum(run.seconds for run in runs)
    out.print(
        f"\n{len(runs)} runs, {events:,} events in {seconds:,.1f} s; {looks:,} invariant checks passed",
        style="dim",
    )


def figures_table(runs: Sequence[PoolFigures], several: bool) -> Table:
    """A row per policy; with the spread where there are several seeds."""
    rows = summary(runs)
    classes = list(runs[0].classes)
    table = plain_table()
    table.add_column("policy")
    for name in classes:
        table.add_column(f"{name}: wait", justify="right")
        table.add_column("p99", justify="right")
        table.add_column("completion", justify="right")
    for heading in ("evictions", "utilisation"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row.policy]
        for name in classes:
            cells += [
                _span(row, f"{name}.wait_mean_s", several),
                _span(row, f"{name}.wait_p99_s", False),
                _span(row, f"{name}.completion_mean_s", False),
            ]
        mean, deviation = row.figures["utilisation"]
        share = f"{mean:.1%}" + (f" ± {deviation:.1%}" if several else "")
        table.add_row(*map(escape, cells), f"{row.mean('evictions'):,.0f}", share)
    return table


def _span(row: PolicySummary, name: str, several: bool) -> str:
    mean, deviation = row.figures[name]
    return brief(mean) + (f" ± {brief(deviation)}" if several else "")


def brief(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.2f} s"
