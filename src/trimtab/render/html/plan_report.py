"""A plan as an HTML page: timeline, numbers, alternatives and reasons.

Readable in dark and light mode, on paper, on a phone and by a screen reader. Everything drawn is also in words and
tables. Decides nothing: every number comes from the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.core.ranks import ranks_text
from trimtab.model.plan import PlacedComponent, PlacementAnswer, Plan, Sensitivity
from trimtab.render.html.kit import timeline
from trimtab.render.html.kit.chart import ChartMark
from trimtab.render.html.kit.labels import duration, escape, escape_block, share
from trimtab.render.html.kit.page import both, list_section, page_foot, page_head, page_header

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
    parts = [
        page_head(title),
        _headline(answer, title, source),
        _chosen(answer.best),
        _scaling(answer),
        _block(block),
        _others(answer),
        _near_ties(answer),
        _sensitivity(answer.sensitivity),
        list_section("assumptions", "What was assumed", answer.assumptions),
        _foot(answer, command, search_seconds),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _headline(answer: PlacementAnswer, title: str, source: str) -> str:
    best = answer.best
    per_hour = 3600 / best.iteration_seconds if best.iteration_seconds > 0 else 0.0
    gap = 1 - answer.lower_bound_seconds / best.iteration_seconds if best.iteration_seconds > 0 else 0.0
    if answer.kept:
        proof = '<dd class="warn">Your placement<small>faster than every plan found: keep it</small></dd>'
    elif answer.scaling is not None and answer.scaling.plan is not None:
        proof = '<dd class="warn">If scaling is perfect<small>which was not measured</small></dd>'
    elif answer.optimal:
        proof = '<dd class="good">Proven<small>no plan under this model is faster</small></dd>'
    else:
        bound = duration(answer.lower_bound_seconds)
        proof = f'<dd class="warn">Within {share(max(gap, 0.0))}<small>nothing can be below {bound}</small></dd>'
    spare = best.total_gpus - best.gpus
    used = "all of them" if spare <= 0 else f"{spare} left free"
    numbers = [
        ("Predicted iteration", f"<dd>{duration(best.iteration_seconds)}<small>{escape(best.mode)}</small></dd>"),
        ("Throughput", f"<dd>{_rate(per_hour)}<small>iterations per hour</small></dd>"),
        ("GPUs idle", f"<dd>{share(best.idle_share)}<small>of the GPU time</small></dd>"),
        ("GPUs used", f"<dd>{best.gpus} of {best.total_gpus}<small>{used}</small></dd>"),
        ("Optimal", proof),
    ]
    return page_header(f"trimtab plan · {source}", title, _in_words(best), numbers)


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
    drawn = _pictures(plan, "If scaling is less than perfect", "scaling", keys=keys, axis_seconds=axis)
    return (
        '<section aria-labelledby="h-scaling">\n<h2 id="h-scaling">If scaling is less than perfect</h2>\n'
        f'<p>{escape(words)}</p>\n<div class="card"><h3>{escape(_in_words(plan))}: '
        f"{duration(plan.iteration_seconds)}</h3><figure>{drawn}</figure></div>\n</section>"
    )


def _rate(per_hour: float) -> str:
    return f"{per_hour:,.0f}" if per_hour >= 100 else f"{per_hour:.3g}"


def _chosen(plan: Plan) -> str:
    chart = _pictures(plan, "The chosen plan", "best")
    rows = "\n".join(_component(plan, index, placed) for index, placed in enumerate(plan.components))
    # The first three columns are text; numbers are aligned to the right.
    heads = ("Component", "GPUs", "Variant", "Seconds", "Start, s", "End, s", "Idle")
    numeric = ' class="number"'
    columns = "".join(f'<th scope="col"{numeric if i > 2 else ""}>{head}</th>' for i, head in enumerate(heads))
    note = '<p class="unseen">Idle: share of the iteration in which the GPUs of the component are idle.</p>'
    return (
        '<section aria-labelledby="h-timeline">\n<h2 id="h-timeline">Timeline</h2>\n'
        f'<div class="card"><figure>{chart}</figure>\n{note}'
        '<div class="scroll" role="region" aria-labelledby="h-timeline" tabindex="0"><table>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div></div>\n</section>"
    )


def _component(plan: Plan, index: int, placed: PlacedComponent) -> str:
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
    numbers = "".join(f'<td class="number">{value:,.1f}</td>' for value in (placed.seconds, placed.start, placed.end))
    return (
        f'<tr><th scope="row"><span class="named"><span class="tt-key key{index % timeline.COLOURS}"></span>'
        f"<span>{escape(placed.name)}{extrapolated}</span></span></th>"
        f"<td>{gpus}</td><td>{escape(placed.variant) or '–'}</td>{numbers}"
        f'<td class="number">{share(placed.idle_share)}</td></tr>'
    )


def _pictures(
    plan: Plan,
    title: str,
    prefix: str,
    *,
    keys: tuple[str, ...] = (),
    axis_seconds: float | None = None,
    mark: ChartMark | None = None,
) -> str:
    chart = timeline.plan_chart(plan, title, keys=keys, axis_seconds=axis_seconds, marks=(mark,) if mark else ())
    compact = axis_seconds is not None
    return both(lambda width, name: timeline.svg(chart, width, standalone=False, compact=compact, prefix=name), prefix)


def _block(block: str) -> str:
    if not block.strip():
        return ""
    return (
        '<section aria-labelledby="h-block">\n<h2 id="h-block">Placement</h2>\n'
        "<p>What to put into the configuration.</p>\n"
        f'<div class="copy"><pre tabindex="0" aria-label="Placement block">{escape_block(block.rstrip())}</pre></div>\n'
        "</section>"
    )


def _others(answer: PlacementAnswer) -> str:
    best = answer.best
    plans = [alternative.plan for alternative in answer.alternatives if alternative.plan]
    plans += [answer.unrestricted] if answer.unrestricted else []
    if not answer.alternatives and not plans:
        return ""
    axis = _common_axis([best.timeline_seconds, *(plan.timeline_seconds for plan in plans)])
    items = list(_alternatives(answer, axis))
    out = ""
    if items:
        chosen = _compared("The chosen plan", "", best, best, "chosen", axis)
        out += (
            '<section aria-labelledby="h-others">\n<h2 id="h-others">Runners-up</h2>\n'
            "<p>All on one time scale. The dashed line marks the end of the chosen plan's iteration.</p>\n"
            f'<ol class="plans">\n{chosen}\n' + "\n".join(items) + "\n</ol>\n</section>"
        )
    if answer.unrestricted:
        saved = best.iteration_seconds - answer.unrestricted.iteration_seconds
        part = saved / best.iteration_seconds if best.iteration_seconds else 0.0
        words = f"It would save {duration(saved)} an iteration ({share(part)})."
        item = _compared("Without your framework's limits", words, answer.unrestricted, best, "unrestricted", axis)
        out += (
            '\n<section aria-labelledby="h-free">\n'
            f'<h2 id="h-free">{escape(_capital(answer.framework or "your framework"))} cannot run this</h2>\n'
            f'<p>The best plan of all, on the same time scale.</p>\n<ul class="plans">\n{item}\n</ul>\n</section>'
        )
    return out


def _common_axis(lengths: list[float]) -> float:
    """Length of the common time axis; the first length is the chosen plan's."""
    comparable = max(length for length in lengths if length <= _LONGEST_OVER_BEST * lengths[0])
    return min(max(lengths), _ROOM_BEYOND * comparable)


def _alternatives(answer: PlacementAnswer, axis: float) -> Iterator[str]:
    for index, alternative in enumerate(answer.alternatives):
        if alternative.plan is None:
            yield (
                f'<li class="card refused"><h3>{escape(_capital(alternative.label))}<span class="time">'
                f"<small>not feasible</small></span></h3><p>{escape(alternative.reason)}</p></li>"
            )
        else:
            label = _capital(alternative.label)
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
    drawn = _pictures(plan, label, prefix, keys=keys, axis_seconds=axis, mark=mark)
    return (
        f'<li class="card"><h3>{escape(label)}<span class="time">{duration(plan.iteration_seconds)}{versus}</span></h3>'
        f"<p>{escape(_in_words(plan))}</p>{f'<p>{escape(reason)}</p>' if reason else ''}<figure>{drawn}</figure></li>"
    )


def _near_ties(answer: PlacementAnswer) -> str:
    if not answer.near_ties:
        return ""
    best = answer.best.iteration_seconds
    rows = "".join(
        f'<tr><th scope="row">{escape(_in_words(plan))}</th><td>{escape(plan.mode)}</td>'
        f'<td class="number">{duration(plan.iteration_seconds)}</td>'
        f'<td class="number">+{share(plan.iteration_seconds / best - 1 if best else 0.0)}</td></tr>'
        for plan in answer.near_ties
    )
    return (
        '<section aria-labelledby="h-ties">\n<h2 id="h-ties">Near ties</h2>\n'
        "<p>As fast within the noise of a measurement: take the simplest.</p>\n"
        '<div class="card"><div class="scroll bare" role="region" aria-labelledby="h-ties" tabindex="0"><table>\n'
        '<thead><tr><th scope="col">Plan</th><th scope="col">Mode</th><th scope="col" class="number">Iteration</th>'
        '<th scope="col" class="number">Longer by</th></tr></thead>\n'
        f"<tbody>{rows}</tbody>\n</table>"
        "</div></div>\n</section>"
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
    return (
        '<section aria-labelledby="h-sensitivity">\n<h2 id="h-sensitivity">How sure the choice is</h2>\n'
        "<p>How far a single cost may be off before another plan is better."
        f"{first}</p>\n"
        f'<dl class="card ranges">\n{rows}\n'
        f'<div class="scale-row" aria-hidden="true"><dt></dt><dd class="scale">{scale}</dd></div>\n</dl>\n</section>'
    )


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


def _foot(answer: PlacementAnswer, command: str | None, search_seconds: float | None) -> str:
    took = f" in {duration(search_seconds)}" if search_seconds is not None else ""
    return page_foot(command, more=f" {answer.plans_considered:,} plans considered{took}.")


def _in_words(plan: Plan) -> str:
    """The grouping as a sentence: components that share GPUs take turns."""
    groups = []
    for group in plan.groups:
        count = f"{len(group.gpus)} GPU{'s' if len(group.gpus) != 1 else ''}"
        *others, last = group.components
        groups.append(f"{', '.join(others)} and {last} take turns on {count}" if others else f"{last} on {count}")
    return "; ".join(groups)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
