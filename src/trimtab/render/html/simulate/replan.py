"""Simulated RL jobs as text and as a page: run times, and what moves cost and gained.

Regret is the extra time against the free oracle under the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.render.html.kit import page
from trimtab.render.html.kit.markup import escape
from trimtab.render.html.simulate import common
from trimtab.render.html.simulate.common import PolicyBar, ScenarioKind, brief
from trimtab.render.html.simulate.sweeps import replan_recommendation, replan_sweep
from trimtab.replay.common.comparison import Comparison, PolicySummary, spread_text
from trimtab.replay.replan.runner import ReplanFigures
from trimtab.replay.replan.scenario import ReplanScenario, compare_replans, read, run_replan

ReplanComparison = Comparison[ReplanScenario, ReplanFigures]

HEADS = ("Total", "Against kept", "Above oracle", "Moves", "In moves", "Run again", "Waiting")


def print_text(compared: ReplanComparison) -> None:
    done = f"{compared.total('decisions'):,} decisions, each with its reason; {_checks(compared)}"
    figures = common.figures_table(HEADS, compared.rows, lambda row: _cells(row, compared.seeds))
    common.print_comparison(compared, _over(compared), figures, [f"\n{common.runs_text(compared, done)}"])


def _over(compared: ReplanComparison) -> str:
    return f"Time of {compared.scenario.iterations} iterations: {compared.over}"


def _checks(compared: ReplanComparison) -> str:
    return f"{compared.total('looks'):,} invariant checks passed"


def _cells(row: PolicySummary, seeds: int) -> Sequence[str]:
    words = spread_text(row.figures["total_s"], seeds, brief)
    if row.facts["finished"] != seeds:
        words = f"{row.facts['finished']} of {seeds} finished"
    moves = f"{row.mean('moves'):.3g}"
    if row.mean("rolled_back"):
        moves += f", {row.mean('rolled_back'):.2g} undone"
    return (
        words,
        _share(row, "against_kept", seeds),
        _share(row, "regret", seeds),
        moves,
        brief(row.mean("moving_s")),
        brief(row.mean("void_s")),
        brief(row.mean("waiting_s")),
    )


def _share(row: PolicySummary, name: str, seeds: int) -> str:
    figure = row.facts[name]
    if not isinstance(figure, tuple):
        return "–"
    return f"{figure[0]:+.1%}" + (f" ± {figure[1]:.1%}" if seeds > 1 else "")


def report(compared: ReplanComparison, command: str) -> str:
    """The report as HTML. `command` made it."""
    scenario, rows, seeds = compared.scenario, compared.rows, compared.seeds
    totals = [PolicyBar(row.policy, row.figures["total_s"], _cells(row, seeds)[0]) for row in rows]
    below = common.policy_table("Time of the run", HEADS, ((row.policy, _cells(row, seeds)) for row in rows))
    lede = f"From the first iteration to the last. {_over(compared)}."
    advice = [] if compared.advice is None else [compared.advice.sentence]
    checks = (
        f"seeds {', '.join(map(str, scenario.seeds))} decide noise, moves and failures, the same for every policy; "
        + _checks(compared)
    )
    parts = [
        page.header("trimtab simulate", scenario.name, f"{'; '.join(scenario.assumptions()[:2])}."),
        common.bars_section("total", "Time of the run", lede, totals, below),
        _over_iterations(compared.first_seed),
        _moves(compared.first_seed),
        page.list_section("advice", "What the sweep recommends", advice),
        common.policies_section(scenario),
        page.list_section("assumed", "What was assumed", [*scenario.assumptions(), checks]),
    ]
    return page.document(scenario.name, parts, command=command)


def _over_iterations(runs: Sequence[ReplanFigures]) -> str:
    title = "Seconds of an iteration"
    curves = [(run.policy, range(1, len(run.walls_s) + 1), run.walls_s) for run in runs if run.walls_s]
    drawn = common.policy_curves(title, curves, "walls", "s", "iteration")
    return page.section("walls", title, f"Over the iterations, with seed {runs[0].seed}.", page.card(drawn))


def _moves(runs: Sequence[ReplanFigures]) -> str:
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


REPLANS = ScenarioKind(read, run_replan, replan_sweep, replan_recommendation, compare_replans, print_text, report)
