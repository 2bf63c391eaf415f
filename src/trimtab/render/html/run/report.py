"""The report of a run as an HTML page: timeline, plans, moves, decisions, costs and metrics.

Without scripts the timeline is a still picture; everything drawn is in words and tables too. Every number comes from
the story.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from trimtab.core.ranks import ranks_text
from trimtab.model.ledger import BUCKETS
from trimtab.render.html.kit import page
from trimtab.render.html.kit.assets import asset
from trimtab.render.html.kit.labels import counted, duration, escape, known, listed, share
from trimtab.render.html.kit.lines import CurveChart, Point, ReportCurve, curves_svg, thinned
from trimtab.render.html.kit.page import WIDTHS, Tile, code_of
from trimtab.render.html.kit.timeline import COLOURS
from trimtab.render.html.run import figures
from trimtab.render.html.run.story import ReportMigration, ReportPlan, RunStory, finite
from trimtab.render.html.run.timeline import RunChart, chart_data, legend, run_chart, static_svg

SCRIPT, STYLE = "run_report", "run_report.css"
MOVE_LOOKS = {"arrived": "good", "rolled back": "warn", "stuck": "warn"}
"""Style of the state of a move."""

_MAX_ROWS = 150
_UNBOOKED = "unbooked"
_NUMBERS = {
    "iteration_s": "an iteration now", "new_iteration_s": "of the other plan", "gain_s": "gain per iteration",
    "sure_gain_s": "of which certain", "horizon": "iterations considered", "cost_s": "cost of the move",
    "margin": "margin", "dwell_left": "iterations until a move is allowed",
}  # fmt: skip


def run_report(story: RunStory, *, title: str, command: str | None, metrics: Sequence[str] = ()) -> str:
    """The report of a story as HTML. `metrics` names what to draw besides costs; by default rewards."""
    chart = run_chart(story)
    idle = figures.idle_shares(story)
    spent = figures.costs(story, idle)
    names = figures.metric_names(story, metrics)
    parts = [
        _headline(story, chart, spent, names, title),
        _timeline(story, chart),
        _happened(story),
        page.cards_section(
            "plans",
            "Plans",
            "In sequence, with predicted and measured times.",
            [_plan(story, plan) for plan in story.plans],
        ),
        page.cards_section(
            "moves", "Moves", "Each with its reason, and the time of its stages.", [_move(move) for move in story.moves]
        ),
        _decisions(story),
        predicted_section(story),
        ledger_section(story),
        costs_section(story, spent),
        idle_section(story, idle),
        metrics_section(story, names, metrics),
        figures_section(story, names),
    ]
    more = f" {story.events:,} events."
    return page.document(title, parts, command=command, more=more, script=SCRIPT, style=asset(STYLE))


def _headline(story: RunStory, chart: RunChart, spent: list[figures.ReportCost], names: list[str], title: str) -> str:
    lines = page.plain_list(map(escape, figures.summary_lines(story, chart, spent, names)), "said")
    warned = ""
    if story.unparsed_lines:
        where = ", ".join(map(str, story.unparsed_lines[:5])) + (" …" if len(story.unparsed_lines) > 5 else "")
        count = counted(len(story.unparsed_lines), "line")
        warned = f'<p class="lede warn">{count} of events.jsonl could not be parsed and left out: {where}.</p>\n'
    eyebrow, tiles = f"trimtab: run · {story.job or 'run'}", _tiles(story, chart, names)
    return page.header(eyebrow, title, figures.status_sentence(story), tiles, notice=warned, more=f"{lines}\n")


def _tiles(story: RunStory, chart: RunChart, names: list[str]) -> list[Tile]:
    arrived = sum(move.state == "arrived" for move in story.moves)
    back = sum(move.state == "rolled back" for move in story.moves)
    tiles = [
        Tile("Iterations", str(len(story.iterations)), f"of {story.wanted}" if story.wanted else "done"),
        Tile("Time", duration(story.end_s), "of the plan" if figures.has_virtual_clock(story) else "in all"),
        Tile("Moves", str(arrived), f"{back or 'none'} rolled back"),
    ]
    if chart.available_gpu_s > 0:
        part = max(0.0, 1 - chart.used_gpu_s / chart.available_gpu_s)
        tiles.append(Tile("GPUs idle", share(part), "of the time they were available"))
    if off := [abs(error) for error in figures.expected_errors(story)]:
        tiles.append(Tile("Prediction off by", share(median(off)), "by the present costs, median"))
    if promises := [abs(error) for _, error in figures.promise_errors(story)]:
        tiles.append(Tile("Promises off by", share(median(promises)), "of plans, in their first iterations"))
    return tiles + reward_tiles(story, names)


def reward_tiles(story: RunStory, names: Sequence[str]) -> list[Tile]:
    """The first metric: its value at the end, and at the beginning."""
    values = [value for name in names[:1] for _, value in figures.course(story.iterations, name)]
    if not values:
        return []
    first, last = figures.ends_of(values)
    return [Tile(names[0], f"{last:.3g}", f"from {first:.3g}")]


# ---- the timeline ----------------------------------------------------------------------------------------------------


def _timeline(story: RunStory, chart: RunChart) -> str:
    if story.end_s <= 0 or not (chart.tracks or chart.marks):
        return ""
    drawn = page.picture(lambda width, name: static_svg(chart, width, name, "The run over time"), "run", css="still")
    clock = (
        "Time is that of the plan, as if components ran in parallel"
        if figures.has_virtual_clock(story)
        else "Time is wall-clock time"
    )
    lede = f"{clock}; a row for each GPU. Grey is idle; an empty row means that the node was absent."
    body = (
        f'{legend(chart)}\n<div class="run-timeline" data-run-timeline="run-data">\n'
        f"{drawn}\n</div>\n"
        f'<script type="application/json" id="run-data">{_json(chart_data(chart))}</script>'
    )
    return page.section("timeline", "Timeline", lede, page.card(body))


def _json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _happened(story: RunStory) -> str:
    """The marks of the timeline as a table."""
    if not story.timeline_events:
        return ""
    rows, saved = [], 0
    for at, event in enumerate(sorted(story.timeline_events, key=lambda event: event.t_s)):
        saved += event.kind == "saved"
        hidden = ' class="minor"' if event.kind == "saved" else ""
        why = escape(event.reason) or "–"
        code = f'<small class="code">{escape(event.code)}</small>' if event.code else ""
        rows.append(
            f'<tr id="e{at}"{hidden}><td>{duration(event.t_s)}</td>'
            f'<th scope="row">{escape(event.title)}</th><td>{why}{code}</td></tr>\n'
        )
    left = ""
    if len(rows) > 4 * _MAX_ROWS:
        left = f"<p>The first and the last {2 * _MAX_ROWS} of {len(rows):,}.</p>"
        rows = rows[: 2 * _MAX_ROWS] + rows[-2 * _MAX_ROWS :]
    body = page.table("What happened", ("At", "What", "Why"), rows, css="bare tall events")
    lede = f"{counted(len(story.timeline_events), 'event')} besides the iterations, {saved} of them checkpoints."
    return page.section("events", "What happened", lede, page.card(left + body))


# ---- plans, moves, decisions -----------------------------------------------------------------------------------------


def _plan(story: RunStory, plan: ReportPlan) -> str:
    under = [record for record in story.iterations if record.plan == plan.number]
    measured = [record.iteration.wall_s for record in under if not record.iteration.extra] or [
        record.iteration.wall_s for record in under
    ]
    predicted = story.prediction(plan.number)
    why = {
        "first": "at the beginning", "measured": "with measured costs", "move": "by a move", "lost": "after a loss",
    }.get(plan.why, plan.why)  # fmt: skip
    if under:
        first, last = under[0].iteration.number, under[-1].iteration.number
        ran = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    else:
        ran = "no iteration finished"
    promised = (
        f"{duration(predicted)}<small> predicted</small>" if predicted is not None else "<small>no prediction</small>"
    )
    result = ""
    if measured:
        middle = median(measured)
        off = f" ({middle / predicted - 1:+.1%})".replace("%", " %") if predicted else ""
        result = f", {duration(middle)} measured median{off}"
    groups = "; ".join(f"{listed(names)} on {_slots_text(gpu_slots)}" for names, gpu_slots in plan.groups if gpu_slots)
    spent = ", ".join(f"{escape(name)} {duration(cost)}" for name, cost in plan.costs_s.items()) if predicted else ""
    more = f"<p>Planned with costs: {spent}.</p>" if spent else ""
    body = f"<p>From {duration(plan.t_s)}, {escape(why)}: {ran}{result}.</p><p>{escape(groups)}</p>{more}"
    return page.card_item(escape(plan.words), promised, body)


def _slots_text(gpu_slots: tuple[tuple[str, int], ...]) -> str:
    nodes: dict[str, list[int]] = {}
    for node, gpu in gpu_slots:
        nodes.setdefault(node, []).append(gpu)
    listed = [f"{node} {ranks_text(gpus)}".strip() for node, gpus in nodes.items()]
    shown = ", ".join(listed[:6]) + (f" and {len(listed) - 6} more nodes" if len(listed) > 6 else "")
    return f"{counted(len(gpu_slots), 'GPU')} ({shown})"


def _move(move: ReportMigration) -> str:
    forced = ' <span class="badge">forced</span>' if move.forced else ""
    why = f"<p>{escape(move.reason)}{code_of(move.code)}</p>" if move.reason or move.code else ""
    outcome = f'<p class="warn">{escape(move.outcome)}</p>' if move.outcome else ""
    gains = [("gain promised", move.promised), ("gain realised, at the present costs", move.realised)]
    judged = [(words, share(part)) for words, part in gains if part is not None]
    stages = [(escape(name), duration(took)) for name, _, took in move.stages]
    stages += [("rollback", duration(move.rollback_s))] if move.rollback_s else []
    changed = "; ".join(
        f"{escape(name)} {escape(how)} ({before} → {after} GPUs)"
        for name, how, before, after in move.changes
        if how != "stays"
    )
    return page.card_item(
        f"Move {move.id}: {change_of(move)}{forced}",
        f"{escape(move.state)}<small> · {duration(move.cost_s)}</small>",
        f"<p>At {duration(move.began_s)}, after iteration {move.iteration}.</p>{why}{outcome}"
        f"{f'<p>{changed}.</p>' if changed else ''}{page.facts_list([*_figures(move.numbers), *judged])}"
        + page.facts_list(stages, 'class="figures stages" aria-label="Stages"'),
        attributes=f' class="card" id="move{move.id}"',
        css=MOVE_LOOKS.get(move.state, ""),
    )


def change_of(move: ReportMigration) -> str:
    """The plans before and after a move, as markup."""
    return f"{escape(move.before or '?')} → {escape(move.after or '?')}"


def _figures(numbers: Any) -> Iterator[tuple[str, str]]:
    for key, words in _NUMBERS.items():
        value = finite(numbers.get(key))
        if value is None or (key == "dwell_left" and not value):
            continue
        if key == "cost_s" and not numbers.get("cost_measured"):
            words = "cost of a move, assumed"
        yield words, duration(value) if key.endswith("_s") else share(value) if key == "margin" else f"{value:g}"


def _decisions(story: RunStory) -> str:
    if not story.decisions:
        return ""
    rows = []
    groups = figures.group_equal(story.decisions)
    for first, last, count in groups[-_MAX_ROWS:]:
        span = str(first.iteration) if first.iteration == last.iteration else f"{first.iteration} to {last.iteration}"
        plan = f"<br>{escape(last.plan)}" if last.plan else ""
        rows.append(
            [
                span,
                f"{escape(last.what)}{f' × {count}' if count > 1 else ''}",
                f"{escape(last.reason)}{code_of(last.code)}{plan}",
                known(finite(last.numbers.get("gain_s"))),
            ]
        )
    stays = sum(decision.what == "stay" for decision in story.decisions)
    left = f"<p>The last {_MAX_ROWS} of {len(groups)}.</p>" if len(groups) > _MAX_ROWS else ""
    heads = ("Iteration", "Decision", "Why", "Expected gain")
    summary = f"{counted(len(story.decisions), 'decision')}, {stays} of them to stay"
    body = page.folded(summary, left + page.table("Decisions", heads, rows, numeric=(3,)))
    lede = "Each with its reason; consecutive equal decisions are counted."
    return page.section("decisions", "Decisions", lede, body)


Widths = Sequence[tuple[str, int]]

_MAX_FIGURES = 300
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
        curves.append(ReportCurve("promised by the plan", steps, 0, dashed=True))
        key.append(("line-0", "promised by the plan"))
    if current := _few(figures.expected(story), widths):
        curves.append(ReportCurve("predicted by the costs measured just before", current, 1))
        key.append(("line-1", curves[-1].name))
    off = [abs(error) for error in figures.expected_errors(story)]
    sentence = f"Prediction error {share(median(off))} (median), {share(max(off))} (maximum)." if off else ""
    chart = CurveChart("Iteration time, predicted and measured", tuple(curves), "seconds", sentence, _changes(story))
    lede = f"{sentence} Dashed: promised by the plan. Vertical: the plan changed." if known else "No prediction."
    return lede.strip(), _drawn(chart, "predicted", _key(key), widths)


def metric_curve(story: RunStory, name: str, prefix: str, widths: Widths = WIDTHS) -> tuple[str, str] | None:
    """A metric over the iterations: a sentence, and the picture. None where it has no values."""
    points = figures.course(story.iterations, name)
    if not points:
        return None
    first, last = figures.ends_of([value for _, value in points])
    sentence = f"{name}: from {first:.3g} to {last:.3g}."
    chart = CurveChart(name, (ReportCurve(name, _few(points, widths), 2),), "number", sentence, _changes(story))
    return sentence, _drawn(chart, prefix, widths=widths)


def predicted_section(story: RunStory) -> str:
    if not story.iterations:
        return ""
    lede, drawn = predicted_curves(story)
    return page.section("predicted", "Predicted against measured", lede, page.card(drawn))


def ledger_section(story: RunStory) -> str:
    """What the wall time of iterations was spent on."""
    ledger = figures.ledger(story)
    if ledger is None:
        return ""
    rows = [[label, share(ledger.shares[bucket])] for bucket, label in BUCKETS.items() if bucket in ledger.shares]
    rows.append([f'<span class="warn">{_UNBOOKED}</span>' if ledger.warns else _UNBOOKED, share(ledger.unbooked)])
    lede = "Median shares of an iteration's wall time. What runs beside a component's step counts as compute."
    table = page.table("Where the time went", ("Bucket", "Share"), rows, numeric=(1,))
    return page.section("ledger", "Where the time went", lede, page.card(table))


def costs_section(story: RunStory, spent: list[figures.ReportCost]) -> str:
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


def _cost(at: int, cost: figures.ReportCost) -> list[str]:
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
        available = ", ".join(figures.all_metrics(story)[:20])
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
    every = -(-len(done) // _MAX_FIGURES)
    heads = ("Iteration", "Ended at", "Took", "Predicted", *map(escape, (*story.components, *names)))
    by_number = {name: dict(figures.course(done, name)) for name in names}
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
