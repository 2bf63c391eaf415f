"""A simulation as an HTML page: the comparison, each policy's figures, time series and assumptions.

Everything drawn is in tables too, and every number comes from the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimtab.render.html.kit.labels import escape
from trimtab.render.html.kit.page import NARROW_PX, WIDE_PX, list_section, page_foot, page_head, page_header
from trimtab.render.html.kit.page import both as draw_both
from trimtab.render.html.simulate.pictures import PolicyBar, PolicyCurve, bars_svg, curves_svg
from trimtab.render.text.simulate import PolicyComparison, brief
from trimtab.replay.common.recommend import Recommendation
from trimtab.replay.pool.figures import ALL, PolicySummary, PoolFigures, summary

_WIDTHS = (("wide", WIDE_PX - 60), ("narrow", NARROW_PX))
Drawing = Callable[[int, str], str]
_HEADS = ("Wait", "Median", "p99", "Completion", "p99", "Slowdown", "Evictions")


def report(
    scenario: PolicyComparison,
    runs: Sequence[PoolFigures],
    *,
    command: str | None,
    verb: str = "simulate",
    until: str = "the last submission",
    advice: Recommendation | None = None,
) -> str:
    """The report as HTML. `command` made it; the time series end at `until`."""
    rows = summary(runs)
    first = scenario.seeds[0]
    parts = [
        page_head(scenario.name),
        _headline(scenario, rows, runs, verb),
        *([] if advice is None else [recommended(advice)]),
        *(_class(name, rows, len(scenario.seeds)) for name in runs[0].classes),
        _cluster(rows, len(scenario.seeds), until),
        _over_time([run for run in runs if run.seed == first], first if len(scenario.seeds) > 1 else None, until),
        compared(scenario),
        _assumed(scenario, runs),
        page_foot(command),
    ]
    return "\n".join(parts) + "\n"


def recommended(advice: Recommendation) -> str:
    return (
        '<section aria-labelledby="h-advice">\n<h2 id="h-advice">What the sweep recommends</h2>\n'
        f"<p>{escape(advice.sentence[:1].upper() + advice.sentence[1:])}.</p>\n</section>"
    )


def _headline(scenario: PolicyComparison, rows: Sequence[PolicySummary], runs: Sequence[PoolFigures], verb: str) -> str:
    first = rows[0]
    top = next(iter(runs[0].classes))
    tiles = [
        ("Policies", f"<dd>{len(rows)}<small>{_seeds(len(scenario.seeds))} each</small></dd>"),
        ("Tasks", f"<dd>{runs[0].classes[ALL].tasks:,}<small>in every run</small></dd>"),
        (
            f"Wait, {escape(top)}",
            f"<dd>{brief(first.mean(f'{top}.wait_mean_s'))}<small>mean, {escape(first.policy)}</small></dd>",
        ),
        ("Utilisation", f"<dd>{first.mean('utilisation'):.1%}<small>{escape(first.policy)}</small></dd>"),
        (
            "Checked",
            f'<dd class="good">{sum(run.looks for run in runs):,}<small>invariant checks passed</small></dd>',
        ),
    ]
    intro = (sentence[:1].upper() + sentence[1:] for sentence in scenario.assumptions()[:2])
    return page_header(f"trimtab {verb}", scenario.name, ". ".join(intro) + ".", tiles)


def _class(name: str, rows: Sequence[PolicySummary], seeds: int) -> str:
    title = "All tasks" if name == ALL else f"Class {name}"
    bars = [
        PolicyBar(
            row.policy,
            *row.figures[f"{name}.completion_mean_s"],
            _with_spread(row, f"{name}.completion_mean_s", seeds),
        )
        for row in rows
    ]
    pictures = both(lambda width, prefix: bars_svg(f"{title}: mean completion", bars, width, prefix), f"class-{name}")
    keys = ("wait_mean_s", "wait_p50_s", "wait_p99_s", "completion_mean_s", "completion_p99_s")
    body = ""
    for at, row in enumerate(rows):
        # Only the spread of means: a table with all spreads is too wide.
        several = {key: seeds if key.endswith("mean_s") else 1 for key in keys}
        cells = "".join(f'<td class="number">{_with_spread(row, f"{name}.{key}", several[key])}</td>' for key in keys)
        cells += f'<td class="number">{row.mean(f"{name}.slowdown_mean"):,.2f}×</td>'
        cells += f'<td class="number">{row.mean(f"{name}.evictions"):,.0f}</td>'
        body += line(at, row.policy, cells)
    return section(
        f"c-{name}", title, "Mean completion, from submission to the end of the work.", pictures, _HEADS, body
    )


def _seeds(many: int) -> str:
    return "one seed" if many == 1 else f"{many} seeds"


def _cluster(rows: Sequence[PolicySummary], seeds: int, until: str) -> str:
    bars = [
        PolicyBar(row.policy, *row.figures["utilisation"], _share_with_spread(row, "utilisation", seeds))
        for row in rows
    ]
    pictures = both(lambda width, prefix: bars_svg("Utilisation", bars, width, prefix), "utilisation")
    heads = ("Utilisation", "Held", "Evictions", "Losses", "Work redone", "Last task ended")
    body = ""
    for at, row in enumerate(rows):
        words = (
            _share_with_spread(row, "utilisation", seeds),
            _share_with_spread(row, "held", seeds),
            f"{row.mean('evictions'):,.0f}",
            f"{row.mean('losses'):,.0f}",
            f"{row.mean('redone_gpu_h'):,.1f} GPU h",
            brief(row.mean("makespan_s")),
        )
        body += line(at, row.policy, "".join(f'<td class="number">{cell}</td>' for cell in words))
    lede = f"Work that was not redone, as a share of all GPU time until {escape(until)}."
    return section("cluster", "Cluster", lede, pictures, heads, body)


def _across(seconds: float) -> tuple[float, str]:
    """The unit for the time axis in seconds, and its label."""
    units = ((86_400.0, " d"), (3_600.0, " h"), (60.0, " min"))
    return next((unit for unit in units if seconds >= 2 * unit[0]), (1.0, " s"))


def _over_time(runs: Sequence[PoolFigures], seed: int | None, until: str) -> str:
    waiting = [PolicyCurve(run.policy, run.curves.at, run.curves.waiting) for run in runs]
    used = [PolicyCurve(run.policy, run.curves.at, run.curves.used_gpus) for run in runs]
    across = _across(max((run.curves.at[-1] for run in runs if run.curves.at), default=0.0))
    first = both(lambda wide, name: curves_svg("Waiting tasks", waiting, wide, name, "tasks", across), "waiting")
    second = both(lambda wide, name: curves_svg("GPUs in use", used, wide, name, "GPUs", across), "used")
    words = "Until" if seed is None else f"With seed {seed}, until"
    return (
        f'<section aria-labelledby="h-time">\n<h2 id="h-time">Over time</h2>\n<p>{words} {escape(until)}.</p>\n'
        f'<div class="card"><h3>Waiting tasks</h3><figure>{first}</figure></div>\n'
        f'<div class="card"><h3>GPUs in use</h3><figure>{second}</figure></div>\n</section>'
    )


def compared(scenario: PolicyComparison) -> str:
    items = "".join(f"<li><b>{escape(policy.name)}</b>: {escape(policy.text())}</li>" for policy in scenario.policies)
    return (
        '<section aria-labelledby="h-policies">\n<h2 id="h-policies">What was compared</h2>\n'
        f'<ul class="plain">{items}</ul>\n</section>'
    )


def _assumed(scenario: PolicyComparison, runs: Sequence[PoolFigures]) -> str:
    events = sum(run.events for run in runs)
    sentences = [
        *scenario.assumptions(),
        f"seeds {', '.join(map(str, scenario.seeds))}: all random draws depend on them alone, the same for "
        "every policy",
        f"{events:,} events; {sum(run.checks for run in runs)} full checks of the state",
    ]
    return list_section("assumed", "What was assumed", sentences)


# ---- pieces -------------------------------------------------------------------------------------------------------


def both(draw: Drawing, prefix: str) -> str:
    """The same picture for a wide and a narrow page."""
    return draw_both(draw, prefix, _WIDTHS)


def section(key: str, title: str, lede: str, pictures: str, heads: Sequence[str], body: str) -> str:
    """A section with pictures, and a table with a row per policy."""
    columns = "".join(f'<th scope="col" class="number">{head}</th>' for head in heads)
    return (
        f'<section aria-labelledby="h-{escape(key)}">\n<h2 id="h-{escape(key)}">{escape(title)}</h2>\n<p>{lede}</p>\n'
        f'<div class="card"><figure>{pictures}</figure>\n'
        f'<div class="scroll" role="region" aria-labelledby="h-{escape(key)}" tabindex="0"><table>\n'
        f'<thead><tr><th scope="col">Policy</th>{columns}</tr></thead>\n<tbody>{body}</tbody>\n</table></div></div>\n'
        "</section>"
    )


def line(at: int, policy: str, cells: str) -> str:
    """A table row in the colour of its policy."""
    return (
        f'<tr><th scope="row"><span class="named"><span class="tt-key key{at % 8}"></span>'
        f"<span>{escape(policy)}</span></span></th>{cells}</tr>\n"
    )


def _with_spread(row: PolicySummary, name: str, seeds: int) -> str:
    mean, deviation = row.figures[name]
    return brief(mean) + (f" ± {brief(deviation)}" if seeds > 1 else "")


def _share_with_spread(row: PolicySummary, name: str, seeds: int) -> str:
    mean, deviation = row.figures[name]
    return f"{mean:.1%}" + (f" ± {deviation:.1%}" if seeds > 1 else "")
