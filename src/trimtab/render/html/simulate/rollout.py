"""A simulation of rollouts as text, data and a page: step times and engine-seconds.

Every number comes from the runs. The clairvoyant bound: for steps, the engine-seconds in which a static fleet of the
best pace had any work, which is what a policy needs that knows the future and sleeps and wakes at no cost. For a trace,
the fewest engines that serve the load in every second.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape

from trimtab.render.html.kit.labels import escape as escape_html
from trimtab.render.html.kit.page import card, list_section, page_foot, page_head, page_header, section
from trimtab.render.html.simulate.pictures import PolicyBar, bars_svg
from trimtab.render.html.simulate.report import both, recommended
from trimtab.render.output import out, plain_table
from trimtab.render.text.formatting import show
from trimtab.render.text.simulate import brief
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.pool.figures import spread
from trimtab.replay.rollout.runner import FIGURES, NO_WAIT_S, RolloutFigures, clairvoyant_engine_s
from trimtab.replay.rollout.scenario import RolloutScenario

SAME_PACE = 1.02  # steps within this ratio count as equally fast
HEADS = (
    "Step",
    "Worst step",
    "Engine-seconds",
    "Against static",
    "Above clairvoyant",
    "Usable by others",
    "Wait p99",
    "Moved",
    "Scalings",
)


@dataclass(frozen=True)
class RolloutRow:
    """A policy over all seeds."""

    policy: str
    figures: dict[str, tuple[float, float]]
    against: float | None  # engine-seconds relative to the cheapest static fleet as fast; None: none is
    regret: float | None  # engine-seconds relative to the clairvoyant bound, minus 1

    def mean(self, name: str) -> float:
        return self.figures[name][0]


def rows(scenario: RolloutScenario, runs: Sequence[RolloutFigures]) -> list[RolloutRow]:
    found = {}
    for policy in scenario.policies:
        known = [run for run in runs if run.policy == policy.name]
        found[policy.name] = {name: spread(getattr(run, name) for run in known) for name in FIGURES}
    static = [found[policy.name] for policy in scenario.policies if policy.use == "static"]
    bound = clairvoyant_s(scenario, runs)
    made = []
    for name, figures in found.items():
        rivals = [fleet["engine_s"][0] for fleet in static if _as_fast(scenario, fleet, figures)]
        engine_s = figures["engine_s"][0]
        against = engine_s / min(rivals) if rivals else None
        made.append(RolloutRow(name, figures, against, None if bound is None else engine_s / bound - 1))
    return made


Means = Mapping[str, tuple[float, float]]


def _as_fast(scenario: RolloutScenario, figures: Means, other: Means) -> bool:
    """Whether steps, or waits for an engine, are no longer than those of `other`."""
    if scenario.trace is None:
        return figures["step_s"][0] <= SAME_PACE * other["step_s"][0]
    return figures["wait_p99_s"][0] <= max(other["wait_p99_s"][0], NO_WAIT_S)


def clairvoyant_s(scenario: RolloutScenario, runs: Sequence[RolloutFigures]) -> float | None:
    """The clairvoyant bound in engine-seconds; None without a static policy."""
    numbers = {policy.name: policy.elastic.max_workers for policy in scenario.policies if policy.use == "static"}
    if not numbers:
        return None
    if scenario.trace is not None:
        first = [(numbers[run.policy], run) for run in runs if run.policy in numbers and run.seed == scenario.seeds[0]]
        return clairvoyant_engine_s(first, scenario.fleet.limit)
    known = {name: [run for run in runs if run.policy == name] for name in numbers}
    pace_s = min(spread(run.step_s for run in fleet_runs)[0] for fleet_runs in known.values())
    return min(
        spread(run.busy_s for run in fleet_runs)[0]
        for fleet_runs in known.values()
        if spread(run.step_s for run in fleet_runs)[0] <= SAME_PACE * pace_s
    )


def as_csv(runs: Sequence[RolloutFigures]) -> str:
    page = io.StringIO()
    lines = [_plain(run) for run in runs]
    writer = csv.DictWriter(page, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return page.getvalue()


def _plain(run: RolloutFigures) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name != "loads"}


def as_json(scenario: RolloutScenario, runs: Sequence[RolloutFigures], advice: Recommendation | None = None) -> str:
    made = rows(scenario, runs)
    data: dict[str, Any] = {
        "scenario": scenario.name,
        "assumptions": scenario.assumptions(),
        "policies": {policy.name: policy.text() for policy in scenario.policies},
        "seeds": list(scenario.seeds),
        "clairvoyant_engine_s": clairvoyant_s(scenario, runs),
        "recommendation": None if advice is None else asdict(advice),
        "summary": [
            {
                "policy": row.policy,
                "against_static": row.against,
                "regret": row.regret,
                **{name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in row.figures.items()},
            }
            for row in made
        ],
        "runs": [_plain(run) for run in runs],
    }
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_answer(
    scenario: RolloutScenario, runs: Sequence[RolloutFigures], advice: Recommendation | None = None
) -> None:
    made = rows(scenario, runs)
    out.print(f"[bold]{escape(scenario.name)}[/]")
    for sentence in scenario.assumptions():
        out.print(f"  {escape(sentence)}", style="dim")
    out.print(f"\nMeans of {len(scenario.seeds)} seeds; engine-seconds are of a step with its training, or of a trace")
    table = plain_table()
    table.add_column("policy")
    for head in HEADS:
        table.add_column(head.lower(), justify="right")
    for row in made:
        table.add_row(escape(row.policy), *_cells(row))
    show(table)
    if advice is not None:
        out.print(f"\n{escape(advice.sentence)}")
    bound = clairvoyant_s(scenario, runs)
    if bound is not None:
        out.print(
            f"\nclairvoyant: {bound:,.0f} engine-seconds at the best pace; no policy can do it with "
            f"fewer than {made[0].mean('least_engine_s'):,.0f}",
            style="dim",
        )
    events, seconds = sum(run.events for run in runs), sum(run.seconds for run in runs)
    answered = sum(run.answered for run in runs)
    out.print(
        f"{len(runs)} runs, {events:,} events in {seconds:,.1f} s; {answered:,} requests, each answered exactly once",
        style="dim",
    )


def _cells(row: RolloutRow) -> tuple[str, ...]:
    step, deviation = row.figures["step_s"]
    return (
        brief(step) + (f" ± {brief(deviation)}" if deviation else ""),
        brief(row.mean("worst_step_s")),
        f"{row.mean('engine_s'):,.0f}",
        "–" if row.against is None else f"{row.against - 1:+.1%}",
        "–" if row.regret is None else f"{row.regret:+.1%}",
        f"{row.mean('usable_s'):,.0f}",
        brief(row.mean("wait_p99_s")),
        f"{row.mean('moved'):,.0f}",
        f"{row.mean('scalings'):,.0f}",
    )


# ---- the page ---------------------------------------------------------------------------------------------------


def report(
    scenario: RolloutScenario,
    runs: Sequence[RolloutFigures],
    *,
    command: str | None,
    advice: Recommendation | None = None,
) -> str:
    """The report as HTML. `command` made it."""
    made = rows(scenario, runs)
    bound = clairvoyant_s(scenario, runs)
    sentences = [*scenario.assumptions(), *(f"{policy.name}: {policy.text()}" for policy in scenario.policies)]
    if bound is not None:
        sentences.append(f"clairvoyant: {bound:,.0f} engine-seconds at the best pace, asleep whenever not needed")
    engine = [PolicyBar(row.policy, *row.figures["engine_s"], f"{row.mean('engine_s'):,.0f}") for row in made]
    if bound is not None:
        engine.append(PolicyBar("clairvoyant", bound, 0.0, f"{bound:,.0f}"))
    steps = [PolicyBar(row.policy, *row.figures["step_s"], brief(row.mean("step_s"))) for row in made]
    columns = "".join(f'<th scope="col" class="number">{head}</th>' for head in HEADS)
    body = "".join(
        f'<tr><th scope="row">{escape_html(row.policy)}</th>'
        + "".join(f'<td class="number">{cell}</td>' for cell in _cells(row))
        + "</tr>\n"
        for row in made
    )
    static = (
        "Against static: engine-seconds over those of the cheapest static fleet with steps as short, within 2 %, "
        "or with waits as short."
    )
    parts = [
        page_head(scenario.name),
        page_header("trimtab simulate", scenario.name, f"{scenario.assumptions()[1]}."),
        _figure("engine", "Engine-seconds", "Of a step with its training, or of the whole trace.", engine),
        _figure("steps", "Step time", "From the first prompt to the last answer.", steps),
        *([] if advice is None else [recommended(advice)]),
        section(
            "table",
            "All figures",
            static,
            card(
                f'<div class="scroll bare" role="region" aria-labelledby="h-table" tabindex="0"><table>\n'
                f'<thead><tr><th scope="col">Policy</th>{columns}</tr></thead>\n<tbody>{body}</tbody></table></div>'
            ),
        ),
        list_section("assumed", "What was assumed", sentences),
        page_foot(command),
    ]
    return "\n".join(parts) + "\n"


def _figure(key: str, title: str, lede: str, bars: Sequence[PolicyBar]) -> str:
    drawn = both(lambda width, prefix: bars_svg(title, bars, width, prefix), key)
    return section(key, title, lede, card(f"<figure>{drawn}</figure>"))
