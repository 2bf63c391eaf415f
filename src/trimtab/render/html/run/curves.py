"""The curves of a run with heading and summary sentence, and the table behind them.

Sections of the report; the dashboard shows predictions and metrics as panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import counted, duration, escape, known, share
from trimtab.render.html.kit.lines import CurveChart, Point, ReportCurve, curves_svg, thinned
from trimtab.render.html.kit.page import WIDTHS
from trimtab.render.html.kit.timeline import COLOURS
from trimtab.render.html.run.figures import ReportCost, all_metrics, course, ends_of, errors, expected
from trimtab.render.html.run.story import RunStory

Widths = Sequence[tuple[str, int]]

_MAX_ROWS = 300
_MAX_METRICS = 8
_MAX_POINTS = 600


def _drawn(chart: CurveChart, prefix: str, key: str = "", widths: Widths = WIDTHS) -> str:
    return key + page.picture(lambda width, name: curves_svg(chart, width, name), prefix, widths)


def _key(entries: Sequence[tuple[str, str]]) -> str:
    return page.legend((f'<span class="tt-key {css}"></span>', words) for css, words in entries)


def _changes(story: RunStory) -> tuple[tuple[float, str], ...]:
    return tuple((float(plan.iteration), plan.words) for plan in story.plans if plan.number)


def _few(points: Sequence[tuple[int, float]], widths: Widths) -> tuple[Point, ...]:
    """Points of a long run thinned per pixel: first, lowest, highest and last."""
    if len(points) <= _MAX_POINTS:
        return tuple((float(number), value) for number, value in points)
    first, last = points[0][0], points[-1][0]
    scale = max(width for _, width in widths) / (last - first)
    return tuple((round(first + x / scale), y) for x, y in thinned([((x - first) * scale, y) for x, y in points]))


def predicted_curves(story: RunStory, widths: Widths = WIDTHS) -> tuple[str, str]:
    """Measured and predicted iteration times: a sentence, and the picture with its key."""
    done = story.iterations
    notes = tuple(", ".join(record.iteration.extra) for record in done) if len(done) <= _MAX_POINTS else ()
    measured = _few([(record.iteration.number, record.iteration.wall_s) for record in done], widths)
    curves, key = [ReportCurve("measured", measured, None, notes=notes)], [("line-ink", "measured")]
    promised = [(float(plan.iteration), story.prediction(plan.number)) for plan in story.plans]
    known = any(value is not None for _, value in promised)
    if known:
        steps = tuple((at, float("nan") if value is None else value) for at, value in promised)
        curves.append(ReportCurve("predicted", steps, 0, dashed=True))
        key.append(("line-0", "predicted"))
    if current := _few(expected(story), widths):
        curves.append(ReportCurve("expected by the costs measured so far", current, 1))
        key.append(("line-1", curves[-1].name))
    off = [abs(error) for _, error in errors(story)]
    sentence = f"Prediction error {share(median(off))} (median), {share(max(off))} (maximum)." if off else ""
    chart = CurveChart("Iteration time, predicted and measured", tuple(curves), "seconds", sentence, _changes(story))
    lede = f"{sentence} Dashed: predicted. Vertical: the plan changed." if known else "No prediction."
    return lede.strip(), _drawn(chart, "predicted", _key(key), widths)


def metric_curve(story: RunStory, name: str, prefix: str, widths: Widths = WIDTHS) -> tuple[str, str] | None:
    """A metric over the iterations: a sentence, and the picture. None where it has no values."""
    points = course(story.iterations, name)
    if not points:
        return None
    first, last = ends_of([value for _, value in points])
    sentence = f"{name}: from {first:.3g} to {last:.3g}."
    chart = CurveChart(name, (ReportCurve(name, _few(points, widths), 2),), "number", sentence, _changes(story))
    return sentence, _drawn(chart, prefix, widths=widths)


def predicted_section(story: RunStory) -> str:
    if not story.iterations:
        return ""
    lede, drawn = predicted_curves(story)
    return page.section("predicted", "Predicted against measured", lede, page.card(drawn))


def costs_section(story: RunStory, spent: list[ReportCost]) -> str:
    """Cost of each component, as curves and as a table."""
    if not story.iterations:
        return ""
    curves = []
    for at, name in enumerate(story.components):
        points = tuple(
            (float(record.iteration.number), m.busy_s)
            for record in story.iterations
            for m in record.iteration.components
            if m.component == name
        )
        curves.append(ReportCurve(name, points, at % COLOURS))
    chart = CurveChart(
        "Cost of components", tuple(curves), "seconds", "Each component's own time per iteration.", _changes(story)
    )
    heads = ("Component", "GPUs", "Predicted", "Measured", "Waited", "Switch", "GPUs idle", "Drift")
    table = page.table("Cost of components", heads, map(_cost, range(len(spent)), spent), numeric=range(2, 8))
    key = _key([(f"key{at % COLOURS}", name) for at, name in enumerate(story.components)])
    lede = (
        "A component's own time per iteration, without waiting. In the table: medians under the last plan; "
        "drift is the end relative to the start, on the same GPUs."
    )
    return page.section("costs", "Cost of components", lede, page.card(_drawn(chart, "costs", key) + table))


def _cost(at: int, cost: ReportCost) -> list[str]:
    return [
        page.keyed(at, escape(cost.component)),
        ", ".join(str(count) if count else "CPU" for count in cost.gpus[-8:]) or "–",
        *(known(value) for value in (cost.predicted_s, cost.busy_s, cost.wait_s, cost.switch_s)),
        known(cost.idle, share),
        known(cost.drift, "× {:.2f}".format),
    ]


def idle_section(story: RunStory, idle: dict[str, list[tuple[int, float]]]) -> str:
    curves = tuple(
        ReportCurve(name, tuple((float(number), value) for number, value in idle[name]), at % COLOURS)
        for at, name in enumerate(story.components)
        if idle.get(name)
    )
    if not curves:
        return ""
    chart = CurveChart(
        "Idle share", curves, "share", "Share of each iteration in which GPUs were idle.", _changes(story)
    )
    key = _key([(f"key{curve.colour}", curve.name) for curve in curves])
    lede = "The share of each iteration in which the GPUs of a component were idle; for CPU components, the component."
    return page.section("idle", "Idle share", lede, page.card(_drawn(chart, "idle", key)))


def metrics_section(story: RunStory, names: list[str], wanted: Sequence[str]) -> str:
    """Rewards, or the requested metrics."""
    if not names:
        available = ", ".join(all_metrics(story)[:20])
        if wanted and available:
            lede = f"None of the requested metrics exists; available: {escape(available)}."
            return page.section("metrics", "Metrics", lede, "")
        return ""
    cards = ""
    for at, name in enumerate(names[:_MAX_METRICS]):
        if drawn := metric_curve(story, name, f"metric{at}"):
            cards += page.card(f"<h3>{escape(name)}</h3>{drawn[1]}")
    title = "Reward" if not wanted else "Metrics"
    return page.section("metrics", title, "Means over the batches of an iteration.", cards) if cards else ""


def figures_section(story: RunStory, names: list[str]) -> str:
    """The curves as a table."""
    done = story.iterations
    if not done:
        return ""
    every = -(-len(done) // _MAX_ROWS)
    heads = ("Iteration", "Ended at", "Took", "Predicted", *map(escape, (*story.components, *names)))
    by_number = {name: dict(course(done, name)) for name in names}
    rows = []
    for record in done[::every]:
        number = record.iteration.number
        busy = {m.component: m.busy_s for m in record.iteration.components}
        predicted = story.prediction(record.plan) if record.plan >= 0 else None
        extra = f" <small>{escape(', '.join(record.iteration.extra))}</small>" if record.iteration.extra else ""
        rows.append(
            [
                f"{number}{extra}",
                duration(record.end_s),
                duration(record.iteration.wall_s),
                known(predicted or None),
                *(known(busy.get(name)) for name in story.components),
                *(known(by_number[name].get(number), "{:.4g}".format) for name in names),
            ]
        )
    sampled = f", one in {every}" if every > 1 else ""
    table = page.table("Iterations", heads, rows, numeric=range(1, len(heads)), css="tall")
    body = page.folded(f"{counted(len(done), 'iteration')} in figures{sampled}", table)
    return page.section("figures", "Figures", "What the curves are drawn from.", body)
