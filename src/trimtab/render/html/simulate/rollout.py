"""Simulated rollouts as text and as a page: step times and engine-seconds."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.render.html.kit import page
from trimtab.render.html.kit.markup import escape
from trimtab.render.html.simulate import common
from trimtab.render.html.simulate.common import PolicyBar, ScenarioKind, brief
from trimtab.render.html.simulate.sweeps import rollout_recommendation, rollout_sweep
from trimtab.replay.common.comparison import Comparison, PolicySummary
from trimtab.replay.rollout.runner import RolloutFigures, compare_rollouts, run_rollout
from trimtab.replay.rollout.scenario import RolloutScenario, read

RolloutComparison = Comparison[RolloutScenario, RolloutFigures]

HEADS = (
    *("Step", "Worst step", "Engine-seconds", "Against static", "Above clairvoyant"),
    *("Usable by others", "Wait p99", "Moved", "Scalings"),
)


def print_text(compared: RolloutComparison) -> None:
    heading = f"Means of {compared.seeds} seeds; engine-seconds are of a step with its training, or of a trace"
    last = [common.runs_text(compared, f"{compared.total('answered'):,} requests, each answered exactly once")]
    bound = compared.facts["clairvoyant_engine_s"]
    if bound is not None:
        least = compared.rows[0].mean("least_engine_s")
        last.insert(
            0,
            f"\nclairvoyant: {bound:,.0f} engine-seconds at the best pace; no policy can do it with "
            f"fewer than {least:,.0f}",
        )
    common.print_comparison(compared, heading, common.figures_table(HEADS, compared.rows, _cells), last)


def _cells(row: PolicySummary) -> Sequence[str]:
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


def report(compared: RolloutComparison, command: str) -> str:
    """The report as HTML. `command` made it."""
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
    cells = [[escape(row.policy), *_cells(row)] for row in rows]
    figures = page.table("All figures", ("Policy", *HEADS), cells, numeric=range(1, len(HEADS) + 1), css="bare")
    parts = [
        page.header("trimtab simulate", scenario.name, f"{scenario.assumptions()[1]}."),
        common.bars_section("engine", "Engine-seconds", "Of a step with its training, or of the whole trace.", engine),
        common.bars_section("steps", "Step time", "From the first prompt to the last answer.", steps),
        common.advice_section(compared.advice),
        page.section("table", "All figures", static, page.card(figures)),
        page.list_section("assumed", "What was assumed", sentences),
    ]
    return page.document(scenario.name, parts, command=command)


ROLLOUTS = ScenarioKind(read, run_rollout, rollout_sweep, rollout_recommendation, compare_rollouts, print_text, report)
