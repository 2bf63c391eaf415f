"""A simulation of RL jobs as text, data and a page: run times, and what moves cost and gained.

Every number comes from the runs. Regret is the extra time against the free oracle under the same seed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape

from trimtab.render.html.kit.labels import escape as escape_html
from trimtab.render.html.kit.page import list_section, page_foot, page_head, page_header
from trimtab.render.html.simulate.pictures import PolicyBar, PolicyCurve, bars_svg, curves_svg
from trimtab.render.html.simulate.report import both, compared, line, section
from trimtab.render.output import out, plain_table
from trimtab.render.text.formatting import show
from trimtab.render.text.simulate import brief
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.pool.figures import spread
from trimtab.replay.replan.runner import ReplanFigures
from trimtab.replay.replan.scenario import ReplanScenario

FIGURES = (
    "total_s",
    "iteration_s",
    "moves",
    "rolled_back",
    "forced",
    "moving_s",
    "void_s",
    "waiting_s",
    "void",
    "decisions",
)
LONG = ("walls_s", "moved")  # not in tables
HEADS = ("Total", "Against kept", "Above oracle", "Moves", "In moves", "Run again", "Waiting")
ITERATIONS = (1.0, "")


@dataclass(frozen=True)
class ReplanRow:
    """A policy over all seeds. Shares are against another policy under the same seed; None: it did not run."""

    policy: str
    figures: dict[str, tuple[float, float]]
    finished: int  # runs that did all iterations
    runs: int
    regret: tuple[float, float] | None
    against_kept: tuple[float, float] | None

    def mean(self, name: str) -> float:
        return self.figures[name][0]


def rows(scenario: ReplanScenario, runs: Sequence[ReplanFigures]) -> list[ReplanRow]:
    oracle, kept = (_totals(scenario, runs, use) for use in ("oracle", "kept"))
    made = []
    for policy in scenario.policies:
        known = [run for run in runs if run.policy == policy.name]
        made.append(
            ReplanRow(
                policy.name,
                {name: spread(float(getattr(run, name)) for run in known) for name in FIGURES},
                sum(run.finished for run in known),
                len(known),
                _beside(known, oracle),
                _beside(known, kept),
            )
        )
    return made


def _totals(scenario: ReplanScenario, runs: Sequence[ReplanFigures], use: str) -> dict[int, float]:
    name = next((policy.name for policy in scenario.policies if policy.use == use), None)
    return {run.seed: run.total_s for run in runs if run.policy == name and run.finished}


def _beside(known: Sequence[ReplanFigures], other: dict[int, float]) -> tuple[float, float] | None:
    shares = [run.total_s / other[run.seed] - 1 for run in known if run.finished and other.get(run.seed)]
    return spread(shares) if shares else None


# ---- text and data ----------------------------------------------------------------------------------------------


def as_csv(runs: Sequence[ReplanFigures]) -> str:
    page = io.StringIO()
    lines = [{name: value for name, value in asdict(run).items() if name not in LONG} for run in runs]
    writer = csv.DictWriter(page, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return page.getvalue()


def as_json(scenario: ReplanScenario, runs: Sequence[ReplanFigures], advice: Recommendation | None = None) -> str:
    data: dict[str, Any] = {
        "scenario": scenario.name,
        "assumptions": scenario.assumptions(),
        "policies": {policy.name: policy.text() for policy in scenario.policies},
        "seeds": list(scenario.seeds),
        "recommendation": None if advice is None else asdict(advice),
        "summary": [
            {
                "policy": row.policy,
                "finished": row.finished,
                "regret": _data(row.regret),
                "against_kept": _data(row.against_kept),
                **{name: _data(value) for name, value in row.figures.items()},
            }
            for row in rows(scenario, runs)
        ],
        "runs": [asdict(run) for run in runs],
    }
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _data(figure: tuple[float, float] | None) -> dict[str, float] | None:
    return None if figure is None else {"mean": figure[0], "deviation": figure[1]}


def print_answer(scenario: ReplanScenario, runs: Sequence[ReplanFigures], advice: Recommendation | None = None) -> None:
    out.print(f"[bold]{escape(scenario.name)}[/]")
    for sentence in scenario.assumptions():
        out.print(f"  {escape(sentence)}", style="dim")
    out.print(f"\n{_over(scenario)}")
    table = plain_table()
    table.add_column("policy")
    for head in HEADS:
        table.add_column(head.lower(), justify="right")
    for row in rows(scenario, runs):
        table.add_row(escape(row.policy), *_cells(row, len(scenario.seeds)))
    show(table)
    if advice is not None:
        out.print(f"\n{escape(advice.sentence)}")
    events, seconds = sum(run.events for run in runs), sum(run.seconds for run in runs)
    decisions, looks = sum(run.decisions for run in runs), sum(run.looks for run in runs)
    out.print(
        f"\n{len(runs)} runs, {events:,} events in {seconds:,.1f} s; {decisions:,} decisions, each with its reason; "
        f"{looks:,} invariant checks passed",
        style="dim",
    )


def _over(scenario: ReplanScenario) -> str:
    seeds = len(scenario.seeds)
    over = f"mean of {seeds} seeds, ± their standard deviation" if seeds > 1 else "one seed"
    return f"Time of {scenario.iterations} iterations: {over}"


def _cells(row: ReplanRow, seeds: int) -> tuple[str, ...]:
    total, deviation = row.figures["total_s"]
    words = brief(total) + (f" ± {brief(deviation)}" if seeds > 1 else "")
    if row.finished < row.runs:
        words = f"{row.finished} of {row.runs} finished"
    moves = f"{row.mean('moves'):.3g}"
    if row.mean("rolled_back"):
        moves += f", {row.mean('rolled_back'):.2g} undone"
    return (
        words,
        _share(row.against_kept, seeds),
        _share(row.regret, seeds),
        moves,
        brief(row.mean("moving_s")),
        brief(row.mean("void_s")),
        brief(row.mean("waiting_s")),
    )


def _share(figure: tuple[float, float] | None, seeds: int) -> str:
    if figure is None:
        return "–"
    return f"{figure[0]:+.1%}" + (f" ± {figure[1]:.1%}" if seeds > 1 else "")


# ---- the page ---------------------------------------------------------------------------------------------------


def report(
    scenario: ReplanScenario,
    runs: Sequence[ReplanFigures],
    *,
    command: str | None,
    advice: Recommendation | None = None,
) -> str:
    """The report as HTML. `command` made it."""
    made, seeds = rows(scenario, runs), len(scenario.seeds)
    first = [run for run in runs if run.seed == scenario.seeds[0]]
    totals = [PolicyBar(row.policy, *row.figures["total_s"], _cells(row, seeds)[0]) for row in made]
    body = "".join(
        line(at, row.policy, "".join(f'<td class="number">{cell}</td>' for cell in _cells(row, seeds)))
        for at, row in enumerate(made)
    )
    lede = f"From the first iteration to the last. {_over(scenario)}."
    parts = [
        page_head(scenario.name),
        page_header("trimtab simulate", scenario.name, f"{'; '.join(scenario.assumptions()[:2])}."),
        section(
            "total", "Time of the run", lede, both(lambda w, p: bars_svg("Time of the run", totals, w, p), "total"),
            HEADS, body,
        ),
        _over_iterations(first),
        _moves(first),
        *([] if advice is None else [list_section("advice", "What the sweep recommends", [advice.sentence])]),
        compared(scenario),
        list_section("assumed", "What was assumed", [*scenario.assumptions(), _checks(scenario, runs)]),
        page_foot(command),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _over_iterations(runs: Sequence[ReplanFigures]) -> str:
    curves = [PolicyCurve(run.policy, range(1, len(run.walls_s) + 1), run.walls_s) for run in runs if run.walls_s]
    drawn = both(lambda w, p: curves_svg("Seconds of an iteration", curves, w, p, "s", ITERATIONS), "walls")
    return (
        '<section aria-labelledby="h-walls">\n<h2 id="h-walls">Seconds of an iteration</h2>\n'
        f"<p>Over the iterations, with seed {runs[0].seed}.</p>\n"
        f'<div class="card"><figure>{drawn}</figure></div>\n</section>'
    )


def _moves(runs: Sequence[ReplanFigures]) -> str:
    """Every move of the first seed, without the oracle's, which cost nothing."""
    heads = ("After iteration", "Why", "To", "Pause", "Ended")
    body = ""
    for at, run in enumerate(runs):
        for move in run.moved:
            if move.code == "FREE":
                continue
            cells = (
                str(move.after),
                move.code,
                move.plan,
                brief(move.seconds),
                "arrived" if move.arrived else "undone",
            )
            body += line(at, run.policy, "".join(f"<td>{escape_html(cell)}</td>" for cell in cells))
    if not body:
        return list_section("moves", "Moves", [f"No moves with seed {runs[0].seed}."])
    columns = "".join(f'<th scope="col">{head}</th>' for head in ("Policy", *heads))
    return (
        '<section aria-labelledby="h-moves">\n<h2 id="h-moves">Moves</h2>\n'
        f"<p>With seed {runs[0].seed}. The oracle's moves are free and left out.</p>\n"
        '<div class="card"><div class="scroll bare" role="region" aria-labelledby="h-moves" tabindex="0"><table>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody></table></div></div>\n</section>"
    )


def _checks(scenario: ReplanScenario, runs: Sequence[ReplanFigures]) -> str:
    seeds = ", ".join(map(str, scenario.seeds))
    looks = sum(run.looks for run in runs)
    return (
        f"seeds {seeds} decide noise, moves and failures, the same for every policy; {looks:,} invariant checks passed"
    )
