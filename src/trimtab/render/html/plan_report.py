"""A plan as an HTML page: timeline, numbers, alternatives and reasons.

Readable in dark and light mode, on paper, on a phone and by a screen reader. Everything drawn is also in words and
tables. Decides nothing: every number comes from the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.core.ranks import ranks_text
from trimtab.model.plan import PlacedComponent, PlacementAnswer, Plan, Sensitivity
from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import capitalised, counted, duration, escape, listed, share
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.kit.timeline import ChartMark, plan_chart

# A runner-up many times slower must not compress the other charts: its chart is cut a little beyond theirs.
_LONGEST_OVER_BEST = 2.5
_ROOM_BEYOND = 1.15
_MIN_FACTOR, _MAX_FACTOR = 0.5, 2.0


def plan_report(
    answer: PlacementAnswer, *, title: str, source: str, block: str, command: str | None, search_seconds: float | None
) -> str:
    """The report of an answer as HTML.

    `source` is the job file's name, `block` the placement in its own keys, `command` the command that made the report.
    """
    took = f" in {duration(search_seconds)}" if search_seconds is not None else ""
    parts = [
        _headline(answer, title, source),
        _chosen(answer.best),
        _scaling(answer),
        _block(block),
        _others(answer),
        _near_ties(answer),
        _sensitivity(answer.sensitivity),
        page.list_section("assumptions", "What was assumed", answer.assumptions),
    ]
    return page.document(title, parts, command=command, more=f" {answer.plans_considered:,} plans considered{took}.")


def _headline(answer: PlacementAnswer, title: str, source: str) -> str:
    best = answer.best
    per_hour = 3600 / best.iteration_seconds if best.iteration_seconds > 0 else 0.0
    gap = 1 - answer.lower_bound_seconds / best.iteration_seconds if best.iteration_seconds > 0 else 0.0
    if answer.kept:
        optimal = Tile("Optimal", "Your placement", "faster than every plan found: keep it", "warn")
    elif answer.scaling is not None and answer.scaling.plan is not None:
        optimal = Tile("Optimal", "If scaling is perfect", "which was not measured", "warn")
    elif answer.optimal:
        optimal = Tile("Optimal", "Proven", "no plan under this model is faster", "good")
    else:
        bound = duration(answer.lower_bound_seconds)
        optimal = Tile("Optimal", f"Within {share(max(gap, 0.0))}", f"nothing can be below {bound}", "warn")
    spare = best.total_gpus - best.gpus
    tiles = [
        Tile("Predicted iteration", duration(best.iteration_seconds), best.mode),
        Tile("Throughput", f"{per_hour:,.0f}" if per_hour >= 100 else f"{per_hour:.3g}", "iterations per hour"),
        Tile("GPUs idle", share(best.idle_share), "of the GPU time"),
        Tile("GPUs used", f"{best.gpus} of {best.total_gpus}", "all of them" if spare <= 0 else f"{spare} left free"),
        optimal,
    ]
    return page.header(f"trimtab plan · {source}", title, _in_words(best), tiles)


def _scaling(answer: PlacementAnswer) -> str:
    """The plan for less than perfect scaling beside the chosen plan, where it is another."""
    scaling = answer.scaling
    if scaling is None or scaling.plan is None:
        return ""
    plan = scaling.plan
    decides = f" Measure {scaling.measure[0]} on {scaling.measure[1]} GPUs: that decides." if scaling.measure else ""
    were = "were each" if len(scaling.components) > 1 else "was"
    words = (
        f"{', '.join(scaling.components)} {were} measured on one number of GPUs only. The plan above is best if "
        "scaling is perfect. "
        f"If each doubling of GPUs gives {scaling.doubling:.0%} of a perfect speed-up it takes "
        f"{duration(scaling.chosen_seconds)}, and the plan below is best.{decides}"
    )
    axis = max(plan.timeline_seconds, answer.best.timeline_seconds)
    keys = tuple(component.name for component in answer.best.components)
    title = "If scaling is less than perfect"
    drawn = page.chart_picture(plan_chart(plan, title, keys=keys, axis_seconds=axis), "scaling", compact=True)
    head = f"<h3>{escape(_in_words(plan))}: {duration(plan.iteration_seconds)}</h3>"
    return page.section("scaling", title, escape(words), page.card(head + drawn))


def _chosen(plan: Plan) -> str:
    drawn = page.chart_picture(plan_chart(plan, "The chosen plan"), "best")
    heads = ("Component", "GPUs", "Variant", "Seconds", "Start, s", "End, s", "Idle")
    rows = [_component(plan, index, placed) for index, placed in enumerate(plan.components)]
    note = '<p class="unseen">Idle: share of the iteration in which the GPUs of the component are idle.</p>'
    figures = page.table("Timeline", heads, rows, numeric=range(3, 7))
    return page.section("timeline", "Timeline", "", page.card(f"{drawn}\n{note}{figures}"))


def _component(plan: Plan, index: int, placed: PlacedComponent) -> list[str]:
    group = next((group for group in plan.groups if placed.name in group.components), None)
    if group is None:
        gpus = "CPU"
    else:
        count = len(placed.gpus)
        of = f" of {len(group.gpus)}" if count != len(group.gpus) else ""
        which = ranks_text(placed.gpus, ", ")
        # A few ranks stay on one line with their count; a long list may wrap.
        css = ' class="count"' if len(which) < 20 else ""
        gpus = f"<span{css}>{count}{of} <small>{which}</small></span>"
    extrapolated = ' <span class="badge warn">extrapolated</span>' if placed.extrapolated else ""
    times = (f"{value:,.1f}" for value in (placed.seconds, placed.start, placed.end))
    name = page.keyed(index, escape(placed.name) + extrapolated)
    return [name, gpus, escape(placed.variant) or "–", *times, share(placed.idle_share)]


def _block(block: str) -> str:
    lede = "What to put into the configuration."
    return page.copy_section("block", "Placement", lede, "Placement block", block.rstrip()) if block.strip() else ""


def _others(answer: PlacementAnswer) -> str:
    best = answer.best
    plans = [alternative.plan for alternative in answer.alternatives if alternative.plan]
    plans += [answer.unrestricted] if answer.unrestricted else []
    if not answer.alternatives and not plans:
        return ""
    lengths = [best.timeline_seconds, *(plan.timeline_seconds for plan in plans)]
    comparable = max(length for length in lengths if length <= _LONGEST_OVER_BEST * lengths[0])
    axis = min(max(lengths), _ROOM_BEYOND * comparable)
    items = list(_alternatives(answer, axis))
    out = ""
    if items:
        chosen = _compared("The chosen plan", "", best, best, "chosen", axis)
        lede = "All on one time scale. The dashed line marks the end of the chosen plan's iteration."
        out += page.section("others", "Runners-up", lede, page.cards([chosen, *items]))
    if answer.unrestricted:
        saved = best.iteration_seconds - answer.unrestricted.iteration_seconds
        part = saved / best.iteration_seconds if best.iteration_seconds else 0.0
        words = f"It would save {duration(saved)} an iteration ({share(part)})."
        item = _compared("Without your framework's limits", words, answer.unrestricted, best, "unrestricted", axis)
        title = f"{escape(capitalised(answer.framework or 'your framework'))} cannot run this"
        lede = "The best plan of all, on the same time scale."
        out += "\n" + page.section("free", title, lede, page.cards([item], ordered=False))
    return out


def _alternatives(answer: PlacementAnswer, axis: float) -> Iterator[str]:
    for index, alternative in enumerate(answer.alternatives):
        if alternative.plan is None:
            reason = f"<p>{escape(alternative.reason)}</p>"
            title, time = escape(capitalised(alternative.label)), "<small>not feasible</small>"
            yield page.card_item(title, time, reason, attributes=' class="card refused"')
        else:
            label = capitalised(alternative.label)
            yield _compared(label, alternative.reason, alternative.plan, answer.best, f"other{index}", axis)


def _compared(label: str, reason: str, plan: Plan, best: Plan, prefix: str, axis: float) -> str:
    if plan is best:
        versus, mark = "", None
    else:
        times = plan.iteration_seconds / best.iteration_seconds if best.iteration_seconds > 0 else 1.0
        slower = (
            f"{times:.2f}× as long" if times >= 1.005 else f"{share(1 - times)} faster" if times < 0.995 else "equal"
        )
        versus, mark = f" <small>{slower}</small>", ChartMark(best.iteration_seconds, "chosen plan")
    keys = tuple(component.name for component in best.components)
    chart = plan_chart(plan, label, keys=keys, axis_seconds=axis, marks=(mark,) if mark else ())
    why = f"<p>{escape(reason)}</p>" if reason else ""
    body = f"<p>{escape(_in_words(plan))}</p>{why}{page.chart_picture(chart, prefix, compact=True)}"
    return page.card_item(escape(label), f"{duration(plan.iteration_seconds)}{versus}", body)


def _near_ties(answer: PlacementAnswer) -> str:
    if not answer.near_ties:
        return ""
    best = answer.best.iteration_seconds
    rows = [
        [
            escape(_in_words(plan)),
            escape(plan.mode),
            duration(plan.iteration_seconds),
            f"+{share(plan.iteration_seconds / best - 1 if best else 0.0)}",
        ]
        for plan in answer.near_ties
    ]
    heads = ("Plan", "Mode", "Iteration", "Longer by")
    lede = "As fast within the noise of a measurement: take the simplest."
    return page.section(
        "ties", "Near ties", lede, page.card(page.table("Near ties", heads, rows, numeric=(2, 3), css="bare"))
    )


def _sensitivity(ranges: tuple[Sensitivity, ...]) -> str:
    if not ranges:
        return ""
    scale = "".join(
        f'<span style="left:{_position(factor):.2f}%">{words}</span>'
        for factor, words in ((0.5, "half"), (1.0, "as stated"), (2.0, "double"))
    )
    rows = "\n".join(map(_range, ranges))
    factors = [(f, s.component) for s in ranges for f in (s.lower_factor, s.upper_factor) if f is not None and f > 0]
    nearest = min(factors, key=lambda found: abs(math.log(found[0])), default=None)
    first = f" The tightest is {escape(nearest[1])}: {share(abs(nearest[0] - 1))}." if nearest else ""
    lede = f"How far a single cost may be off before another plan is better.{first}"
    body = (
        f'<dl class="card ranges">\n{rows}\n'
        f'<div class="scale-row" aria-hidden="true"><dt></dt><dd class="scale">{scale}</dd></div>\n</dl>'
    )
    return page.section("sensitivity", "How sure the choice is", lede, body)


def _position(factor: float) -> float:
    """Position of a factor between half and double in per cent, on a log scale."""
    span = math.log(_MAX_FACTOR / _MIN_FACTOR)
    return 100 * min(max(math.log(max(factor, 1e-9) / _MIN_FACTOR) / span, 0.0), 1.0)


def _range(found: Sensitivity) -> str:
    low, high = found.lower_factor, found.upper_factor
    left = _position(_MIN_FACTOR if low is None else low)
    right = _position(_MAX_FACTOR if high is None else high)
    css = ("open-left " if low is None else "") + ("open-right" if high is None else "")
    edges = "".join(
        f'<i class="edge" style="left:{at:.2f}%"></i>'
        for at, factor in ((left, low), (right, high))
        if factor is not None
    )
    if low is None and high is None:
        words = "<span>Holds from half to double its cost.</span>"
    else:
        words = _beyond(low, found.lower_becomes, "less", "Holds down to half.")
        words += _beyond(high, found.upper_becomes, "more", "Holds up to double.")
    return (
        f'<div><dt>{escape(found.component)}</dt><dd class="range" aria-hidden="true"><span class="{css.strip()}" '
        f'style="left:{left:.2f}%;width:{right - left:.2f}%"></span>{edges}'
        f'<i style="left:{_position(1.0):.2f}%"></i></dd><dd>{words}</dd></div>'
    )


def _beyond(factor: float | None, becomes: str | None, direction: str, holds: str) -> str:
    if factor is None:
        return f"<span>{holds}</span>"
    then = escape(becomes) if becomes else "another plan"
    return f"<span><b>{share(abs(factor - 1))} {direction}</b>: {then}</span>"


def _in_words(plan: Plan) -> str:
    """The grouping as a sentence: components that share GPUs take turns."""
    return "; ".join(
        f"{listed(group.components)}{' take turns' if len(group.components) > 1 else ''} on "
        f"{counted(len(group.gpus), 'GPU')}"
        for group in plan.groups
    )
