"""The curves of a run's report, each with its heading and what it says in a sentence, and the table behind them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from trimtab.ui.lettering import duration, escape, share
from trimtab.ui.report import NARROW_PX, WIDE_PX
from trimtab.ui.run_pictures_lines import Curve, Curves, curves_svg
from trimtab.ui.run_report_facts import counted
from trimtab.ui.run_report_figures import Cost, all_metrics, course, ends_of, errors, expected
from trimtab.ui.run_report_markup import card, heads, scroll, section
from trimtab.ui.run_report_story import Story
from trimtab.ui.timeline import COLOURS

_WIDTHS = (("wide", WIDE_PX), ("narrow", NARROW_PX))
_MOST_ROWS = 300
_MOST_METRICS = 8


def _drawn(chart: Curves, prefix: str, key: str = "") -> str:
    pictures = "".join(
        curves_svg(chart, width, f"{prefix}-{name}").replace('class="tt"', f'class="tt {name}"', 1)
        for name, width in _WIDTHS
    )
    return f"{key}<figure>{pictures}</figure>"


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><span class="tt-key {css}"></span>{escape(words)}</li>' for css, words in entries)
    return f'<ul class="legend">{items}</ul>'


def _changes(story: Story) -> tuple[tuple[float, str], ...]:
    return tuple((float(plan.iteration), plan.words) for plan in story.plans if plan.number)


def predicted_section(story: Story) -> str:
    """Iteration times beside what plans promised."""
    done = story.iterations
    if not done:
        return ""
    measured = tuple((float(one.iteration.number), one.iteration.wall_s) for one in done)
    notes = tuple(", ".join(one.iteration.extra) for one in done)
    steps = []
    for plan in story.plans:
        promised = story.prediction(plan.number)
        steps.append((float(plan.iteration), promised if promised is not None else float("nan")))
    known = any(value == value for _, value in steps)
    curves = [Curve("measured", measured, None, notes=notes)]
    if known:
        curves.append(Curve("predicted", tuple(steps), 0, dashed=True))
    current = tuple((float(number), value) for number, value in expected(story))
    if current:
        curves.append(Curve("expected by costs as measured then", current, 1))
    off = [error for _, error in errors(story)]
    said = (
        f"Off by {share(median(abs(e) for e in off))} at the median, {share(max(abs(e) for e in off))} at worst."
        if off
        else ""
    )
    chart = Curves("Iteration time, predicted and measured", tuple(curves), "seconds", said, _changes(story))
    key = _key(
        [
            ("line-ink", "measured"),
            *([("line-0", "predicted")] if known else []),
            *([("line-1", "expected by costs as measured then")] if current else []),
        ]
    )
    lede = f"{said} Dashed: what the plan promised. Upright: another plan." if known else "Nothing was predicted."
    return section("predicted", "Predicted against measured", lede, card(_drawn(chart, "predicted", key)))


def costs_section(story: Story, spent: list[Cost]) -> str:
    """What each component cost, as curves and as a table."""
    if not story.iterations:
        return ""
    curves = []
    for at, name in enumerate(story.components):
        points = tuple(
            (float(one.iteration.number), m.busy_s)
            for one in story.iterations
            for m in one.iteration.components
            if m.component == name
        )
        curves.append(Curve(name, points, at % COLOURS))
    chart = Curves(
        "Cost of components", tuple(curves), "seconds", "Each component's own time per iteration.", _changes(story)
    )
    rows = "".join(_cost(at, cost) for at, cost in enumerate(spent))
    columns = heads("Component", "GPUs", "Predicted", "Measured", "Waited", "Switch", "GPUs idle", "Drift", words=2)
    table = scroll("Cost of components", f"{columns}\n<tbody>{rows}</tbody>")
    key = _key([(f"key{at % COLOURS}", name) for at, name in enumerate(story.components)])
    lede = (
        "A component's own time for its batches in an iteration, without waiting. In the table: medians under the plan "
        "that ran last; drift is the end against the beginning, on as many GPUs."
    )
    return section("costs", "Cost of components", lede, card(_drawn(chart, "costs", key) + table))


def _cost(at: int, cost: Cost) -> str:
    def cell(value: float | None) -> str:
        return f'<td class="number">{duration(value) if value is not None else "–"}</td>'

    gpus = ", ".join(str(count) if count else "CPU" for count in cost.gpus[-8:]) or "–"
    idle = share(cost.idle) if cost.idle is not None else "–"
    drift = f"× {cost.drift:.2f}" if cost.drift is not None else "–"
    return (
        f'<tr><th scope="row"><span class="named"><span class="tt-key key{at % COLOURS}"></span>'
        f"<span>{escape(cost.component)}</span></span></th><td>{gpus}</td>{cell(cost.predicted_s)}{cell(cost.busy_s)}"
        f'{cell(cost.wait_s)}{cell(cost.switch_s)}<td class="number">{idle}</td><td class="number">{drift}</td></tr>\n'
    )


def idle_section(story: Story, idle: dict[str, list[tuple[int, float]]]) -> str:
    """The share of time in which GPUs did nothing."""
    curves = tuple(
        Curve(name, tuple((float(number), value) for number, value in idle[name]), at % COLOURS)
        for at, name in enumerate(story.components)
        if idle.get(name)
    )
    if not curves:
        return ""
    chart = Curves("Idle share", curves, "share", "Share of each iteration in which GPUs did nothing.", _changes(story))
    key = _key([(f"key{curve.colour}", curve.name) for curve in curves])
    lede = "The share of each iteration in which the GPUs of a component did nothing at all; on CPUs, the component."
    return section("idle", "Idle share", lede, card(_drawn(chart, "idle", key)))


def metrics_section(story: Story, names: list[str], wanted: Sequence[str]) -> str:
    """What the run learned: rewards, or the metrics asked for."""
    if not names:
        there = ", ".join(all_metrics(story)[:20])
        if wanted and there:
            return section("metrics", "Metrics", f"None of those asked for is there; there are: {escape(there)}.", "")
        return ""
    cards = ""
    for at, name in enumerate(names[:_MOST_METRICS]):
        points = tuple((float(number), value) for number, value in course(story.iterations, name))
        if not points:
            continue
        first, last = ends_of([value for _, value in points])
        said = f"{name}: from {first:.3g} to {last:.3g}."
        chart = Curves(name, (Curve(name, points, 2),), "number", said, _changes(story))
        cards += card(f"<h3>{escape(name)}</h3>{_drawn(chart, f'metric{at}')}")
    title = "Reward" if not wanted else "Metrics"
    return section("metrics", title, "Means over the batches of an iteration.", cards) if cards else ""


def figures_section(story: Story, names: list[str]) -> str:
    """The curves as a table."""
    done = story.iterations
    if not done:
        return ""
    every = -(-len(done) // _MOST_ROWS)
    columns = ("Iteration", "Ended at", "Took", "Predicted", *map(escape, (*story.components, *names)))
    by_number = {name: dict(course(done, name)) for name in names}
    rows = ""
    for one in done[::every]:
        number = one.iteration.number
        busy = {m.component: m.busy_s for m in one.iteration.components}
        predicted = story.prediction(one.plan) if one.plan >= 0 else None
        cells = [duration(one.end_s), duration(one.iteration.wall_s), duration(predicted) if predicted else "–"]
        cells += [duration(busy[name]) if name in busy else "–" for name in story.components]
        cells += [f"{by_number[name][number]:.4g}" if number in by_number[name] else "–" for name in names]
        extra = f" <small>{escape(', '.join(one.iteration.extra))}</small>" if one.iteration.extra else ""
        rows += (
            f'<tr><th scope="row">{number}{extra}</th>'
            + "".join(f'<td class="number">{c}</td>' for c in cells)
            + "</tr>\n"
        )
    some = f", one in {every}" if every > 1 else ""
    table = scroll("Iterations", f"{heads(*columns, words=1)}\n<tbody>{rows}</tbody>", css="tall")
    body = (
        f'<details class="card"><summary>{counted(len(done), "iteration")} in figures{some}</summary>{table}</details>'
    )
    return section("figures", "Figures", "What the curves are drawn from.", body)
