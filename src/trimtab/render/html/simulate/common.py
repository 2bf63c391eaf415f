"""What the pages and texts of all kinds of simulations share.

Everything drawn is in tables too, and every number comes from the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape as escape_markup
from rich.table import Table

from trimtab.render.html.kit import page
from trimtab.render.html.kit.lines import CurveChart, ReportCurve, curves_svg
from trimtab.render.html.kit.markup import capitalised, escape, fit, px, rect, svg_document, text_at, text_width
from trimtab.render.html.kit.page import NARROW_PX, WIDE_PX
from trimtab.render.html.kit.timeline import COLOURS
from trimtab.render.output import out, show, text_table
from trimtab.replay.common.comparison import ComparedScenario, Comparison, PolicySummary, Spread
from trimtab.replay.common.recommend import Recommendation

WIDTHS = (("wide", WIDE_PX - 60), ("narrow", NARROW_PX))
BAR_PX, GAP_PX = 22.0, 8.0


@dataclass(frozen=True)
class ScenarioKind:
    """A kind of simulation: how its scenarios are read, run, swept, compared and shown."""

    read: Callable[[Path], Any]
    run: Callable[[Any, Any, int, Callable[[float], None] | None], Any]  # scenario, policy, seed, progress
    sweep: Callable[[Any, str, list[float], str], tuple[Any, list[str]]]  # also what was skipped, and why
    recommend: Callable[[Any, Sequence[Any], int], Recommendation]
    compare: Callable[[Any, Sequence[Any], Recommendation | None], Comparison[Any, Any]]
    print_text: Callable[[Comparison[Any, Any]], None]
    page: Callable[[Comparison[Any, Any], str], str]  # and the command that made it


# ---- text -----------------------------------------------------------------------------------------------------------


def print_comparison(compared: Comparison[Any, Any], heading: str, figures: Table, last: Iterable[str]) -> None:
    out.print(f"[bold]{escape_markup(compared.scenario.name)}[/]")
    for sentence in compared.scenario.assumptions():
        out.print(f"  {escape_markup(sentence)}", style="dim")
    out.print(f"\n{heading}")
    show(figures)
    if compared.advice is not None:
        out.print(f"\n{escape_markup(compared.advice.sentence)}")
    for sentence in last:
        out.print(sentence, style="dim")


def runs_text(compared: Comparison[Any, Any], what: str) -> str:
    return (
        f"{len(compared.runs)} runs, {compared.total('events'):,} events in {compared.total('seconds'):,.1f} s; {what}"
    )


def figures_table(heads: Sequence[str], rows: Sequence[PolicySummary], cells: Callable[..., Sequence[str]]) -> Table:
    """A row per policy."""
    return text_table(("policy", *(f">{head.lower()}" for head in heads)), ((row.policy, *cells(row)) for row in rows))


def brief(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.2f} s"


# ---- pages ----------------------------------------------------------------------------------------------------------


def policy_table(label: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], css: str = "") -> str:
    """A row per policy, in its colour."""
    drawn = ([page.keyed(at, escape(name)), *cells] for at, (name, cells) in enumerate(rows))
    return page.table(label, ("Policy", *heads), drawn, numeric=range(1, len(heads) + 1), css=css)


def bars_section(
    name: str, title: str, lede: str, bars: Sequence[PolicyBar], below: str = "", *, drawn: str = ""
) -> str:
    """A section that compares policies by bars, with a table below; `drawn` is the picture's title."""
    name = escape(name)
    pictures = page.picture(lambda width, prefix: bars_svg(drawn or title, bars, width, prefix), name, WIDTHS)
    return page.section(name, escape(title), lede, page.card(pictures + (f"\n{below}" if below else "")))


def advice_section(advice: Recommendation | None) -> str:
    if advice is None:
        return ""
    return page.section("advice", "What the sweep recommends", f"{escape(capitalised(advice.sentence))}.", "")


def policies_section(scenario: ComparedScenario) -> str:
    items = (f"<b>{escape(policy.name)}</b>: {escape(policy.text())}" for policy in scenario.policies)
    return page.section("policies", "What was compared", "", page.plain_list(items))


@dataclass(frozen=True)
class PolicyBar:
    """A policy: a value with its spread, and both as text."""

    name: str
    value: Spread
    words: str


def bars_svg(title: str, bars: Sequence[PolicyBar], width: int, prefix: str) -> str:
    """Horizontal bars, each with its number; the thin line at its end is the spread."""
    names_px = min(max(text_width(bar.name, 13) for bar in bars) + 14, width * 0.36)
    words_px = max(text_width(bar.words, 12) for bar in bars) + 12
    scale = max(width - names_px - words_px, 40.0) / max([sum(bar.value) for bar in bars] + [1e-12])
    drawn: list[str] = []
    for number, bar in enumerate(bars):
        y = 4 + number * (BAR_PX + GAP_PX)
        value, deviation = bar.value
        drawn.append(text_at(0, y + 15, fit(bar.name, names_px - 8, 13), "small", tip=bar.name))
        tip, css = f"{bar.name}: {bar.words}", f"bar k{number % COLOURS}"
        drawn.append(rect(names_px, y, max(scale * value, 1.0), BAR_PX, css, tip, rx=3))
        end = names_px + scale * (value + deviation)
        if deviation > 0:
            begin = max(names_px + scale * (value - deviation), names_px)
            drawn.append(f'<path class="end" fill="none" d="M{px(begin)} {px(y + BAR_PX / 2)}H{px(end)}"/>')
        drawn.append(text_at(end + 8, y + 15, bar.words, "quiet"))
    description = "; ".join(f"{bar.name} {bar.words}" for bar in bars)
    return svg_document("".join(drawn), width, 4 + len(bars) * (BAR_PX + GAP_PX), prefix, title, description)


def policy_curves(
    title: str, curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], key: str, unit: str, across: str = ""
) -> str:
    """A line per policy (name, positions, values), with a legend; over time unless `across` names what is counted."""
    lines = tuple(
        ReportCurve(name, tuple(zip(at, values, strict=True)), number % COLOURS)
        for number, (name, at, values) in enumerate(curves)
    )
    peaks = "; ".join(f"{name}: at most {max(values):,.0f} {unit}" for name, _, values in curves if values)
    chart = CurveChart(title, lines, "seconds" if unit == "s" else "number", peaks, across=across)
    drawn = page.picture(lambda width, prefix: curves_svg(chart, width, prefix), key, WIDTHS)
    return page.legend((page.key_of(at), name) for at, (name, _, _) in enumerate(curves)) + drawn
