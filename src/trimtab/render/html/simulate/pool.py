"""Simulated pools as text and as a page: waits and completions by class, utilisation, time series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from trimtab.render.html.kit import page
from trimtab.render.html.kit.markup import capitalised, escape
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.simulate import common
from trimtab.render.html.simulate.common import PolicyBar, ScenarioKind, brief
from trimtab.render.html.simulate.sweeps import pool_recommendation, pool_sweep
from trimtab.render.output import text_table
from trimtab.replay.common.comparison import Comparison, PolicySummary, spread_text
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.pool.figures import ALL, PoolFigures, summary
from trimtab.replay.pool.scenario import read, run_pool

PoolComparison = Comparison[Any, PoolFigures]

CLASS_HEADS = ("Wait", "Median", "p99", "Completion", "p99", "Slowdown", "Evictions")
CLASS_KEYS = ("wait_mean_s", "wait_p50_s", "wait_p99_s", "completion_mean_s", "completion_p99_s")
CLUSTER_HEADS = ("Utilisation", "Held", "Evictions", "Losses", "Work redone", "Last task ended")
LAST_SUBMISSION = "the last submission"


def compare_pools(scenario: Any, runs: Sequence[PoolFigures], advice: Recommendation | None = None) -> PoolComparison:
    return Comparison(scenario, runs, summary(runs), advice=advice)


def print_text(compared: PoolComparison) -> None:
    last = common.runs_text(compared, f"{compared.total('looks'):,} invariant checks passed")
    heading = f"Waits and completions by class: {compared.over}"
    common.print_comparison(compared, heading, figures_table(compared), [f"\n{last}"])


def figures_table(compared: PoolComparison) -> Table:
    """A row per policy; with the spread where there are several seeds."""
    classes, seeds = list(compared.runs[0].classes), compared.seeds
    heads = [head for name in classes for head in (f">{name}: wait", ">p99", ">completion")]
    rows = []
    for row in compared.rows:
        cells = [row.policy]
        for name in classes:
            cells.append(spread_text(row.figures[f"{name}.wait_mean_s"], seeds, brief))
            cells += [brief(row.mean(f"{name}.{key}")) for key in ("wait_p99_s", "completion_mean_s")]
        rows.append([*cells, f"{row.mean('evictions'):,.0f}", _share(row, "utilisation", seeds)])
    return text_table(("policy", *heads, ">evictions", ">utilisation"), rows)


def report(compared: PoolComparison, command: str, verb: str = "simulate", until: str = LAST_SUBMISSION) -> str:
    """The report as HTML. `command` made it; the time series end at `until`."""
    scenario = compared.scenario
    parts = [
        _headline(compared, verb),
        common.advice_section(compared.advice),
        *(_class(name, compared) for name in compared.runs[0].classes),
        _cluster(compared, until),
        _over_time(compared, until),
        common.policies_section(scenario),
        _assumed(compared),
    ]
    return page.document(scenario.name, parts, command=command)


def _headline(compared: PoolComparison, verb: str) -> str:
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
    return page.header(f"trimtab {verb}", compared.scenario.name, f"{intro}.", tiles)


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
    below = common.policy_table(title, CLASS_HEADS, rows)
    return common.bars_section(f"c-{name}", title, lede, bars, below, drawn=f"{title}: mean completion")


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
    below = common.policy_table("Cluster", CLUSTER_HEADS, rows)
    return common.bars_section("cluster", "Cluster", lede, bars, below, drawn="Utilisation")


def _over_time(compared: PoolComparison, until: str) -> str:
    curves = [(run.policy, run.curves) for run in compared.first_seed]
    waiting = [(name, curve.at, curve.waiting) for name, curve in curves]
    used = [(name, curve.at, curve.used_gpus) for name, curve in curves]
    words = "Until" if compared.seeds == 1 else f"With seed {compared.scenario.seeds[0]}, until"
    cards = [
        page.card(f"<h3>{title}</h3>{common.policy_curves(title, drawn, key, unit)}")
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


POOLS = ScenarioKind(read, run_pool, pool_sweep, pool_recommendation, compare_pools, print_text, report)
