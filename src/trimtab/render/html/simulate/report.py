"""A simulation as a page to look at: what was compared, how policies did, what happened over time, what was assumed.

The page is whole by itself: it loads and sends nothing. What is drawn stands in tables too, and every number comes from
the runs: nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimtab import __version__
from trimtab.render.html.kit.labels import escape
from trimtab.render.html.plan_report import COPY_SCRIPT, NARROW_PX, WIDE_PX, page_head
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
    """The report as HTML. `command` is what made it; `until`: what is shown over time ends there."""
    rows = summary(runs)
    first = scenario.seeds[0]
    parts = [
        page_head(scenario.name),
        _headline(scenario, rows, runs, verb),
        *([] if advice is None else [recommended(advice)]),
        *(_class(name, rows, len(scenario.seeds)) for name in runs[0].classes),
        _cluster(rows, len(scenario.seeds), until),
        _over_time([one for one in runs if one.seed == first], first if len(scenario.seeds) > 1 else None, until),
        compared(scenario),
        _assumed(scenario, runs),
        foot(command),
    ]
    return "\n".join(parts) + "\n"


def recommended(advice: Recommendation) -> str:
    """What a sweep recommends, as a section of a page."""
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
            f'<dd class="good">{sum(one.looks for one in runs):,}<small>looks at what must be true</small></dd>',
        ),
    ]
    drawn = "".join(f"<div><dt>{name}</dt>{value}</div>" for name, value in tiles)
    return (
        f'<header>\n<p class="eyebrow">trimtab {verb}</p>\n<h1>{escape(scenario.name)}</h1>\n'
        f'<p class="lede">{escape(". ".join(one[:1].upper() + one[1:] for one in scenario.assumptions()[:2]))}.</p>\n'
        f'<dl class="numbers">{drawn}</dl>\n</header>'
    )


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
        # The spread of means alone: a table of spreads is too wide to be read.
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
        body += line(at, row.policy, "".join(f'<td class="number">{one}</td>' for one in words))
    said = f"Work that did not have to be done again, as a share of all GPU time until {escape(until)}."
    return section("cluster", "Cluster", said, pictures, heads, body)


def _across(seconds: float) -> tuple[float, str]:
    """The unit in which so long a time is drawn, and its word."""
    units = ((86_400.0, " d"), (3_600.0, " h"), (60.0, " min"))
    return next((one for one in units if seconds >= 2 * one[0]), (1.0, " s"))


def _over_time(runs: Sequence[PoolFigures], seed: int | None, until: str) -> str:
    waiting = [PolicyCurve(one.policy, one.curves.at, one.curves.waiting) for one in runs]
    used = [PolicyCurve(one.policy, one.curves.at, one.curves.used_gpus) for one in runs]
    across = _across(max((one.curves.at[-1] for one in runs if one.curves.at), default=0.0))
    first = both(lambda wide, name: curves_svg("Tasks that wait", waiting, wide, name, "tasks", across), "waiting")
    second = both(lambda wide, name: curves_svg("GPUs in use", used, wide, name, "GPUs", across), "used")
    words = "Until" if seed is None else f"With seed {seed}, until"
    return (
        f'<section aria-labelledby="h-time">\n<h2 id="h-time">Over time</h2>\n<p>{words} {escape(until)}.</p>\n'
        f'<div class="card"><h3>Tasks that wait</h3><figure>{first}</figure></div>\n'
        f'<div class="card"><h3>GPUs in use</h3><figure>{second}</figure></div>\n</section>'
    )


def compared(scenario: PolicyComparison) -> str:
    """What the policies are."""
    items = "".join(f"<li><b>{escape(one.name)}</b>: {escape(one.text())}</li>" for one in scenario.policies)
    return (
        '<section aria-labelledby="h-policies">\n<h2 id="h-policies">What was compared</h2>\n'
        f'<ul class="plain">{items}</ul>\n</section>'
    )


def _assumed(scenario: PolicyComparison, runs: Sequence[PoolFigures]) -> str:
    events = sum(one.events for one in runs)
    said = [
        *scenario.assumptions(),
        f"seeds {', '.join(map(str, scenario.seeds))}: what is drawn by chance depends on them alone, the same for "
        "every policy",
        f"{events:,} events; full checks of all books: {sum(one.checks for one in runs)}",
    ]
    items = "".join(f"<li>{escape(one)}</li>" for one in said)
    return (
        '<section aria-labelledby="h-assumed">\n<h2 id="h-assumed">What was assumed</h2>\n'
        f'<ul class="plain">{items}</ul>\n</section>'
    )


# ---- pieces -------------------------------------------------------------------------------------------------------


def both(draw: Drawing, prefix: str) -> str:
    """The same picture for a wide and for a narrow page; the style sheet shows one of them."""
    return "".join(
        draw(width, f"{prefix}-{name}").replace('class="tt"', f'class="tt {name}"', 1) for name, width in _WIDTHS
    )


def section(key: str, title: str, said: str, pictures: str, heads: Sequence[str], body: str) -> str:
    """A part of the page: pictures, and a table with a line for each policy."""
    columns = "".join(f'<th scope="col" class="number">{head}</th>' for head in heads)
    return (
        f'<section aria-labelledby="h-{escape(key)}">\n<h2 id="h-{escape(key)}">{escape(title)}</h2>\n<p>{said}</p>\n'
        f'<div class="card"><figure>{pictures}</figure>\n'
        f'<div class="scroll" role="region" aria-labelledby="h-{escape(key)}" tabindex="0"><table>\n'
        f'<thead><tr><th scope="col">Policy</th>{columns}</tr></thead>\n<tbody>{body}</tbody>\n</table></div></div>\n'
        "</section>"
    )


def line(at: int, policy: str, cells: str) -> str:
    """A line of a table, in the colour of its policy."""
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


def foot(command: str | None) -> str:
    """The end of the page. `command` is what made it."""
    made = f" Made by <code>{escape(command)}</code>." if command else ""
    return (
        f"</main>\n<footer><p>trimtab {escape(__version__)}.{made}</p></footer>\n"
        f"<script>{COPY_SCRIPT}</script>\n</body>\n</html>"
    )
