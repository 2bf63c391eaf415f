"""A simulation as text: a table with a line for each policy, and what was assumed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from trimtab.replay.figures import PoolFigures
from trimtab.replay.scenario import Scenario
from trimtab.replay.summary import Row, data, summary
from trimtab.ui.output import out, plain_table
from trimtab.ui.printing import show


def answer_data(scenario: Scenario, runs: Sequence[PoolFigures]) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "scenario": scenario.name,
        "assumptions": scenario.assumptions(),
        "policies": {one.name: one.text() for one in scenario.policies},
        "seeds": list(scenario.seeds),
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
    """A line for each run."""
    rows = data(runs)
    page = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(page, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return page.getvalue()


def as_json(scenario: Scenario, runs: Sequence[PoolFigures]) -> str:
    """As JSON."""
    return json.dumps(answer_data(scenario, runs), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_answer(scenario: Scenario, runs: Sequence[PoolFigures]) -> None:
    """The table for people."""
    rows = summary(runs)
    classes = list(runs[0].classes)
    out.print(f"[bold]{escape(scenario.name)}[/]")
    for sentence in scenario.assumptions():
        out.print(f"  {escape(sentence)}", style="dim")
    out.print()
    several = len(scenario.seeds) > 1
    over = f"mean of {len(scenario.seeds)} seeds, ± their standard deviation" if several else "one seed"
    out.print(f"Waits and completions by class: {over}")
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
    show(table)
    events, looks = sum(one.events for one in runs), sum(one.looks for one in runs)
    seconds = sum(one.seconds for one in runs)
    out.print(
        f"\n{len(runs)} runs, {events:,} events in {seconds:,.1f} s; what must be true was looked at {looks:,} times, "
        "and held",
        style="dim",
    )


def _span(row: Row, name: str, several: bool) -> str:
    mean, deviation = row.figures[name]
    return brief(mean) + (f" ± {brief(deviation)}" if several else "")


def brief(seconds: float) -> str:
    """A time in one unit, three digits."""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.2f} s"
