"""Simulations as text and as a page: pools, rollouts and RL jobs.

Everything drawn is in tables too, and every number comes from the runs. Regret is the extra time against the free
oracle under the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.markup import escape as escape_markup
from rich.table import Table

from trimtab.core.frozen import Frozen
from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import capitalised, escape, fit, text_width
from trimtab.render.html.kit.lines import CurveChart, ReportCurve, curves_svg
from trimtab.render.html.kit.page import NARROW_PX, WIDE_PX, Tile
from trimtab.render.html.kit.svg import px, rect, svg_document, text_at
from trimtab.render.html.kit.timeline import COLOURS
from trimtab.render.output import out, show, text_table
from trimtab.replay.common.comparison import (
    ComparedScenario,
    Comparison,
    PolicySummary,
    Recommendation,
    ScenarioKind,
    Spread,
    spread_text,
)
from trimtab.replay.pool.scenario import ALL, POOLS, PoolFigures
from trimtab.replay.replan.baselines import ReplanFigures
from trimtab.replay.replan.scenario import REPLANS, ReplanScenario
from trimtab.replay.rollout.scenario import ROLLOUTS, RolloutFigures, RolloutScenario

WIDTHS = (("wide", WIDE_PX - 60), ("narrow", NARROW_PX))
BAR_PX, GAP_PX = 22.0, 8.0


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
    return text_table(("policy", *(f">{head.lower()}" for head in heads)), ((row.policy, *cells(row)) for row in rows))


def brief(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds:.2f} s"


# ---- pages ----------------------------------------------------------------------------------------------------------


def policy_table(label: str, heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], css: str = "") -> str:
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


class PolicyBar(Frozen):
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


PoolComparison = Comparison[Any, PoolFigures]

CLASS_HEADS = ("Wait", "Median", "p99", "Completion", "p99", "Slowdown", "Evictions")
CLASS_KEYS = ("wait_mean_s", "wait_p50_s", "wait_p99_s", "completion_mean_s", "completion_p99_s")
CLUSTER_HEADS = ("Utilisation", "Held", "Evictions", "Losses", "Work redone", "Last task ended")
LAST_SUBMISSION = "the last submission"


def print_pools(compared: PoolComparison) -> None:
    last = runs_text(compared, f"{compared.total('looks'):,} invariant checks passed")
    heading = f"Waits and completions by class: {compared.over}"
    print_comparison(compared, heading, pool_table(compared), [f"\n{last}"])


def pool_table(compared: PoolComparison) -> Table:
    """A row per class and policy; with the spread where there are several seeds."""
    rows = []
    for name in compared.runs[0].classes:
        for at, row in enumerate(compared.rows):
            wait = spread_text(row.figures[f"{name}.wait_mean_s"], compared.seeds, brief)
            times = (brief(row.mean(f"{name}.{key}")) for key in ("wait_p99_s", "completion_mean_s"))
            whole = (f"{row.mean('evictions'):,.0f}", _share(row, "utilisation", compared.seeds))
            rows.append(["" if at else name, row.policy, wait, *times, *(whole if name == ALL else ("", ""))])
    return text_table(("class", "policy", ">wait", ">p99", ">completion", ">evictions", ">utilisation"), rows)


def pool_page(compared: PoolComparison, command: str, until: str = LAST_SUBMISSION) -> str:
    """The pool_page as HTML. `command` made it; the time series end at `until`."""
    scenario = compared.scenario
    parts = [
        _headline(compared),
        advice_section(compared.advice),
        *(_class(name, compared) for name in compared.runs[0].classes),
        _cluster(compared, until),
        _over_time(compared, until),
        policies_section(scenario),
        _assumed(compared),
    ]
    return page.document(scenario.name, parts, command=command)


def _headline(compared: PoolComparison) -> str:
    first, top = compared.rows[0], next(iter(compared.runs[0].classes))
    seeds = "one seed" if compared.seeds == 1 else f"{compared.seeds} seeds"
    tiles = [
        Tile("Policies", str(len(compared.rows)), f"{seeds} each"),
        Tile("Tasks", f"{compared.runs[0].classes[ALL].tasks:,}", "in every run"),
        Tile(f"Wait, {top}", brief(first.mean(f"{top}.wait_mean_s")), f"mean, {first.policy}"),
        Tile("Utilisation", f"{first.mean('utilisation'):.1%}", first.policy),
        Tile("Checked", f"{compared.total('looks'):,}", "invariant checks passed", "good"),
    ]
    intro = ". ".join(map(capitalised, compared.scenario.assumptions()[:2]))
    return page.header("trimtab simulate", compared.scenario.name, f"{intro}.", tiles)


def _class(name: str, compared: PoolComparison) -> str:
    title = "All tasks" if name == ALL else f"Class {name}"
    seeds, figure = compared.seeds, f"{name}.completion_mean_s"
    bars = [
        PolicyBar(row.policy, row.figures[figure], spread_text(row.figures[figure], seeds, brief))
        for row in compared.rows
    ]
    rows = []
    for row in compared.rows:
        # Only the spread of means: a table with all spreads is too wide.
        cells = [
            spread_text(row.figures[f"{name}.{key}"], seeds if key.endswith("mean_s") else 1, brief)
            for key in CLASS_KEYS
        ]
        cells += [f"{row.mean(f'{name}.slowdown_mean'):,.2f}×", f"{row.mean(f'{name}.evictions'):,.0f}"]
        rows.append((row.policy, cells))
    lede = "Mean completion, from submission to the end of the work."
    below = policy_table(title, CLASS_HEADS, rows)
    return bars_section(f"c-{name}", title, lede, bars, below, drawn=f"{title}: mean completion")


def _cluster(compared: PoolComparison, until: str) -> str:
    seeds = compared.seeds
    bars = [
        PolicyBar(row.policy, row.figures["utilisation"], _share(row, "utilisation", seeds)) for row in compared.rows
    ]
    rows = [
        (
            row.policy,
            (
                _share(row, "utilisation", seeds),
                _share(row, "held", seeds),
                f"{row.mean('evictions'):,.0f}",
                f"{row.mean('losses'):,.0f}",
                f"{row.mean('redone_gpu_h'):,.1f} GPU h",
                brief(row.mean("makespan_s")),
            ),
        )
        for row in compared.rows
    ]
    lede = f"Work that was not redone, as a share of all GPU time until {escape(until)}."
    below = policy_table("Cluster", CLUSTER_HEADS, rows)
    return bars_section("cluster", "Cluster", lede, bars, below, drawn="Utilisation")


def _over_time(compared: PoolComparison, until: str) -> str:
    curves = [(run.policy, run.curves) for run in compared.first_seed]
    waiting = [(name, curve.at, curve.waiting) for name, curve in curves]
    used = [(name, curve.at, curve.used_gpus) for name, curve in curves]
    words = "Until" if compared.seeds == 1 else f"With seed {compared.scenario.seeds[0]}, until"
    cards = [
        page.card(f"<h3>{title}</h3>{policy_curves(title, drawn, key, unit)}")
        for title, drawn, key, unit in (
            ("Waiting tasks", waiting, "waiting", "tasks"),
            ("GPUs in use", used, "used", "GPUs"),
        )
    ]
    return page.section("time", "Over time", f"{words} {escape(until)}.", "\n".join(cards))


def _assumed(compared: PoolComparison) -> str:
    scenario = compared.scenario
    sentences = [
        *scenario.assumptions(),
        f"seeds {', '.join(map(str, scenario.seeds))}: all random draws depend on them alone, the same for "
        "every policy",
        f"{compared.total('events'):,} events; {compared.total('checks')} full checks of the state",
    ]
    return page.list_section("assumed", "What was assumed", sentences)


def _share(row: PolicySummary, name: str, seeds: int) -> str:
    return spread_text(row.figures[name], seeds, "{:.1%}".format)


RolloutComparison = Comparison[RolloutScenario, RolloutFigures]

ROLLOUT_HEADS = (
    *("Step", "Worst step", "Engine-seconds", "Against static", "Above clairvoyant"),
    *("Usable by others", "Wait p99", "Moved", "Scalings"),
)


def print_rollouts(compared: RolloutComparison) -> None:
    heading = f"Means of {compared.seeds} seeds; engine-seconds are of a step with its training, or of a trace"
    last = [runs_text(compared, f"{compared.total('answered'):,} requests, each answered exactly once")]
    bound = compared.facts["clairvoyant_engine_s"]
    if bound is not None:
        least = compared.rows[0].mean("least_engine_s")
        last.insert(
            0,
            f"\nclairvoyant: {bound:,.0f} engine-seconds at the best pace; no policy can do it with "
            f"fewer than {least:,.0f}",
        )
    print_comparison(compared, heading, figures_table(ROLLOUT_HEADS, compared.rows, _rollout_cells), last)


def _rollout_cells(row: PolicySummary) -> Sequence[str]:
    step, deviation = row.figures["step_s"]
    against, regret = row.facts["against_static"], row.facts["regret"]
    return (
        brief(step) + (f" ± {brief(deviation)}" if deviation else ""),
        brief(row.mean("worst_step_s")),
        f"{row.mean('engine_s'):,.0f}",
        f"{against - 1:+.1%}" if isinstance(against, float) else "–",
        f"{regret:+.1%}" if isinstance(regret, float) else "–",
        f"{row.mean('usable_s'):,.0f}",
        brief(row.mean("wait_p99_s")),
        f"{row.mean('moved'):,.0f}",
        f"{row.mean('scalings'):,.0f}",
    )


def rollout_page(compared: RolloutComparison, command: str) -> str:
    """The rollout_page as HTML. `command` made it."""
    scenario, rows, bound = compared.scenario, compared.rows, compared.facts["clairvoyant_engine_s"]
    sentences = [*scenario.assumptions(), *(f"{policy.name}: {policy.text()}" for policy in scenario.policies)]
    engine = [PolicyBar(row.policy, row.figures["engine_s"], f"{row.mean('engine_s'):,.0f}") for row in rows]
    if bound is not None:
        sentences.append(f"clairvoyant: {bound:,.0f} engine-seconds at the best pace, asleep whenever not needed")
        engine.append(PolicyBar("clairvoyant", (bound, 0.0), f"{bound:,.0f}"))
    steps = [PolicyBar(row.policy, row.figures["step_s"], brief(row.mean("step_s"))) for row in rows]
    static = (
        "Against static: engine-seconds over those of the cheapest static fleet with steps as short, within 2 %, "
        "or with waits as short."
    )
    cells = [[escape(row.policy), *_rollout_cells(row)] for row in rows]
    figures = page.table(
        "All figures", ("Policy", *ROLLOUT_HEADS), cells, numeric=range(1, len(ROLLOUT_HEADS) + 1), css="bare"
    )
    parts = [
        page.header("trimtab simulate", scenario.name, f"{scenario.assumptions()[1]}."),
        bars_section("engine", "Engine-seconds", "Of a step with its training, or of the whole trace.", engine),
        bars_section("steps", "Step time", "From the first prompt to the last answer.", steps),
        advice_section(compared.advice),
        page.section("table", "All figures", static, page.card(figures)),
        page.list_section("assumed", "What was assumed", sentences),
    ]
    return page.document(scenario.name, parts, command=command)


ReplanComparison = Comparison[ReplanScenario, ReplanFigures]

REPLAN_HEADS = ("Total", "Against kept", "Above oracle", "Moves", "In moves", "Run again", "Waiting")


def print_replans(compared: ReplanComparison) -> None:
    done = f"{compared.total('decisions'):,} decisions, each with its reason; {_checks(compared)}"
    figures = figures_table(REPLAN_HEADS, compared.rows, lambda row: _replan_cells(row, compared.seeds))
    print_comparison(compared, _replan_heading(compared), figures, [f"\n{runs_text(compared, done)}"])


def _replan_heading(compared: ReplanComparison) -> str:
    return f"Time of {compared.scenario.reality.iterations} iterations: {compared.over}"


def _checks(compared: ReplanComparison) -> str:
    return f"{compared.total('looks'):,} invariant checks passed"


def _replan_cells(row: PolicySummary, seeds: int) -> Sequence[str]:
    words = spread_text(row.figures["total_s"], seeds, brief)
    if row.facts["finished"] != seeds:
        words = f"{row.facts['finished']} of {seeds} finished"
    moves = f"{row.mean('moves'):.3g}"
    if row.mean("rolled_back"):
        moves += f", {row.mean('rolled_back'):.2g} undone"
    return (
        words,
        _against(row, "against_kept", seeds),
        _against(row, "regret", seeds),
        moves,
        brief(row.mean("moving_s")),
        brief(row.mean("void_s")),
        brief(row.mean("waiting_s")),
    )


def _against(row: PolicySummary, name: str, seeds: int) -> str:
    figure = row.facts[name]
    if not isinstance(figure, tuple):
        return "–"
    return f"{figure[0]:+.1%}" + (f" ± {figure[1]:.1%}" if seeds > 1 else "")


def replan_page(compared: ReplanComparison, command: str) -> str:
    """The replan_page as HTML. `command` made it."""
    scenario, rows, seeds = compared.scenario, compared.rows, compared.seeds
    totals = [PolicyBar(row.policy, row.figures["total_s"], _replan_cells(row, seeds)[0]) for row in rows]
    below = policy_table("Time of the run", REPLAN_HEADS, ((row.policy, _replan_cells(row, seeds)) for row in rows))
    lede = f"From the first iteration to the last. {_replan_heading(compared)}."
    advice = [] if compared.advice is None else [compared.advice.sentence]
    checks = (
        f"seeds {', '.join(map(str, scenario.seeds))} decide noise, moves and failures, the same for every policy; "
        + _checks(compared)
    )
    parts = [
        page.header("trimtab simulate", scenario.name, f"{'; '.join(scenario.assumptions()[:2])}."),
        bars_section("total", "Time of the run", lede, totals, below),
        _over_iterations(compared.first_seed),
        _replan_moves(compared.first_seed),
        page.list_section("advice", "What the sweep recommends", advice),
        policies_section(scenario),
        page.list_section("assumed", "What was assumed", [*scenario.assumptions(), checks]),
    ]
    return page.document(scenario.name, parts, command=command)


def _over_iterations(runs: Sequence[ReplanFigures]) -> str:
    title = "Seconds of an iteration"
    curves = [(run.policy, range(1, len(run.walls_s) + 1), run.walls_s) for run in runs if run.walls_s]
    drawn = policy_curves(title, curves, "walls", "s", "iteration")
    return page.section("walls", title, f"Over the iterations, with seed {runs[0].seed}.", page.card(drawn))


def _replan_moves(runs: Sequence[ReplanFigures]) -> str:
    """Every move of the first seed, without the oracle's, which cost nothing."""
    rows = [
        [
            page.keyed(at, escape(run.policy)),
            str(move.after),
            escape(move.code),
            escape(move.plan),
            brief(move.seconds),
            "arrived" if move.arrived else "undone",
        ]
        for at, run in enumerate(runs)
        for move in run.moved
        if move.code != "FREE"
    ]
    if not rows:
        return page.list_section("moves", "Moves", [f"No moves with seed {runs[0].seed}."])
    heads = ("Policy", "After iteration", "Why", "To", "Pause", "Ended")
    lede = f"With seed {runs[0].seed}. The oracle's moves are free and left out."
    return page.section("moves", "Moves", lede, page.card(page.table("Moves", heads, rows, css="bare")))


KINDS: dict[str, tuple[ScenarioKind, Callable[[Any], None], Callable[[Any, str], str]]] = {
    "job": (REPLANS, print_replans, replan_page),
    "rollout": (ROLLOUTS, print_rollouts, rollout_page),
    "tasks": (POOLS, print_pools, pool_page),
}
"""By the section of a scenario that identifies it: the kind of simulation, its text and its page."""
