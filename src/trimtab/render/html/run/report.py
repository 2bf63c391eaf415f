"""The report of a run as an HTML page: timeline, plans, moves, decisions, costs and metrics.

Without scripts the timeline is a still picture; everything drawn is in words and tables too. Every number comes from
the story.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

from trimtab.core.ranks import ranks_text
from trimtab.render.html.kit.labels import counted, duration, escape, share
from trimtab.render.html.kit.page import both, card, code_of, heads, page_foot, page_head, page_header, scroll, section
from trimtab.render.html.run.curves import (
    costs_section,
    figures_section,
    idle_section,
    metrics_section,
    predicted_section,
)
from trimtab.render.html.run.facts import ReportMigration, ReportPlan
from trimtab.render.html.run.figures import (
    ReportCost,
    costs,
    course,
    ends_of,
    errors,
    group_equal,
    idle_shares,
    metric_names,
)
from trimtab.render.html.run.story import RunStory
from trimtab.render.html.run.summary import has_virtual_clock, status_sentence, summary_lines
from trimtab.render.html.run.timeline import RunChart, chart_data, legend, run_chart, static_svg

_MAX_ROWS = 150
_NUMBERS = {
    "iteration_s": "an iteration now", "new_iteration_s": "of the other plan", "gain_s": "gain per iteration",
    "sure_gain_s": "of which certain", "horizon": "iterations considered", "cost_s": "cost of the move",
    "margin": "margin", "dwell_left": "iterations until a move is allowed",
}  # fmt: skip


def run_report(story: RunStory, *, title: str, command: str | None, metrics: Sequence[str] = ()) -> str:
    """The report of a story as HTML. `metrics` names what to draw besides costs; by default rewards."""
    chart = run_chart(story)
    idle = idle_shares(story)
    spent = costs(story, idle)
    names = metric_names(story, metrics)
    parts = [
        page_head(title, scripts=(script(),), style=style()),
        _headline(story, chart, spent, names, title),
        _timeline(story, chart),
        _happened(story),
        _plans(story),
        _moves(story.moves),
        _decisions(story),
        predicted_section(story),
        costs_section(story, spent),
        idle_section(story, idle),
        metrics_section(story, names, metrics),
        figures_section(story, names),
        page_foot(command, more=f" {story.events:,} events.", script=script()),
    ]
    return "\n".join(part for part in parts if part) + "\n"


@cache
def script() -> str:
    """The script of the timeline."""
    return resources.files("trimtab.render.html").joinpath("assets/run_timeline.js").read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style of a run's pictures, besides that of all reports."""
    return resources.files("trimtab.render.html").joinpath("assets/run_report.css").read_text(encoding="utf-8")


def _headline(story: RunStory, chart: RunChart, spent: list[ReportCost], names: list[str], title: str) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary_lines(story, chart, spent, names))
    warned = ""
    if story.unparsed_lines:
        where = ", ".join(map(str, story.unparsed_lines[:5])) + (" …" if len(story.unparsed_lines) > 5 else "")
        count = counted(len(story.unparsed_lines), "line")
        warned = f'<p class="lede warn">{count} of events.jsonl could not be parsed and left out: {where}.</p>\n'
    more = f'<ul class="plain said">{lines}</ul>\n'
    eyebrow, tiles = f"trimtab report · {story.job or 'run'}", _tiles(story, chart, names)
    return page_header(eyebrow, title, status_sentence(story), tiles, notice=warned, more=more)


def _tiles(story: RunStory, chart: RunChart, names: list[str]) -> list[tuple[str, str]]:
    count = len(story.iterations)
    of = f"of {story.wanted}" if story.wanted else "done"
    arrived = sum(move.state == "arrived" for move in story.moves)
    back = sum(move.state == "rolled back" for move in story.moves)
    tiles = [
        ("Iterations", f"<dd>{count}<small>{of}</small></dd>"),
        (
            "Time",
            f"<dd>{duration(story.end_s)}<small>{'of the plan' if has_virtual_clock(story) else 'in all'}</small></dd>",
        ),
        ("Moves", f"<dd>{arrived}<small>{f'{back} rolled back' if back else 'none rolled back'}</small></dd>"),
    ]
    if chart.available_gpu_s > 0:
        part = max(0.0, 1 - chart.used_gpu_s / chart.available_gpu_s)
        tiles.append(("GPUs idle", f"<dd>{share(part)}<small>of the time they were available</small></dd>"))
    off = [abs(error) for _, error in errors(story)]
    if off:
        tiles.append(("Prediction off by", f"<dd>{share(median(off))}<small>at the median</small></dd>"))
    values = [value for name in names[:1] for _, value in course(story.iterations, name)]
    if values:
        first, last = ends_of(values)
        tiles.append((escape(names[0]), f"<dd>{last:.3g}<small>from {first:.3g}</small></dd>"))
    return tiles


# ---- the timeline ----------------------------------------------------------------------------------------------------


def _timeline(story: RunStory, chart: RunChart) -> str:
    if story.end_s <= 0 or not (chart.tracks or chart.marks):
        return ""
    drawn = both(lambda width, name: static_svg(chart, width, name, "The run over time"), "run")
    clock = (
        "Time is that of the plan, as if components ran in parallel"
        if has_virtual_clock(story)
        else "Time is wall-clock time"
    )
    lede = f"{clock}; a row for each GPU. Grey is idle; an empty row means that the node was absent."
    body = (
        f'{legend(chart)}\n<div class="run-timeline" data-run-timeline="run-data">\n'
        f'<figure class="still">{drawn}</figure>\n</div>\n'
        f'<script type="application/json" id="run-data">{_json(chart_data(chart))}</script>'
    )
    return section("timeline", "Timeline", lede, card(body))


def _json(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _happened(story: RunStory) -> str:
    """The marks of the timeline as a table."""
    if not story.timeline_events:
        return ""
    ordered = sorted(
        enumerate(sorted(story.timeline_events, key=lambda event: event.t_s)), key=lambda pair: pair[1].t_s
    )
    rows, saved = [], 0
    for at, event in ordered:
        saved += event.kind == "saved"
        hidden = ' class="minor"' if event.kind == "saved" else ""
        why = escape(event.reason) or "–"
        code = f'<small class="code">{escape(event.code)}</small>' if event.code else ""
        rows.append(
            f'<tr id="e{at}"{hidden}><td>{duration(event.t_s)}</td>'
            f'<th scope="row">{escape(event.title)}</th><td>{why}{code}</td></tr>'
        )
    left = ""
    if len(rows) > 4 * _MAX_ROWS:
        left = f"<p>The first and the last {2 * _MAX_ROWS} of {len(rows):,}.</p>"
        rows = rows[: 2 * _MAX_ROWS] + rows[-2 * _MAX_ROWS :]
    columns = "".join(f'<th scope="col">{words}</th>' for words in ("At", "What", "Why"))
    head = f"<thead><tr>{columns}</tr></thead>"
    body = scroll("What happened", f"{head}\n<tbody>\n{chr(10).join(rows)}\n</tbody>", css="bare tall events")
    lede = f"{counted(len(story.timeline_events), 'event')} besides the iterations, {saved} of them checkpoints."
    return section("events", "What happened", lede, card(left + body))


# ---- plans, moves, decisions -----------------------------------------------------------------------------------------


def _plans(story: RunStory) -> str:
    if not story.plans:
        return ""
    items = "\n".join(_plan(story, plan) for plan in story.plans)
    body = f'<ol class="plans">\n{items}\n</ol>'
    return section("plans", "Plans", "In sequence, with predicted and measured times.", body)


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
    groups = "; ".join(f"{_join(names)} on {_slots_text(gpu_slots)}" for names, gpu_slots in plan.groups if gpu_slots)
    spent = ", ".join(f"{escape(name)} {duration(cost)}" for name, cost in plan.costs_s.items()) if predicted else ""
    more = f"<p>Planned with costs: {spent}.</p>" if spent else ""
    return (
        f'<li class="card"><h3>{escape(plan.words)}<span class="time">{promised}</span></h3>'
        f"<p>From {duration(plan.t_s)}, {escape(why)}: {ran}{result}.</p><p>{escape(groups)}</p>{more}</li>"
    )


def _join(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _slots_text(gpu_slots: tuple[tuple[str, int], ...]) -> str:
    nodes: dict[str, list[int]] = {}
    for node, gpu in gpu_slots:
        nodes.setdefault(node, []).append(gpu)
    listed = [f"{node} {ranks_text(gpus)}".strip() for node, gpus in nodes.items()]
    shown = ", ".join(listed[:6]) + (f" and {len(listed) - 6} more nodes" if len(listed) > 6 else "")
    return f"{counted(len(gpu_slots), 'GPU')} ({shown})"


def _moves(moves: list[ReportMigration]) -> str:
    if not moves:
        return ""
    items = "\n".join(map(_move, moves))
    return section(
        "moves",
        "Moves",
        "Each with its reason, and the time of its stages.",
        f'<ol class="plans">\n{items}\n</ol>',
    )


def _move(move: ReportMigration) -> str:
    css = {"arrived": "good", "rolled back": "warn", "stuck": "warn"}.get(move.state, "")
    forced = ' <span class="badge">forced</span>' if move.forced else ""
    change = f"{escape(move.before or '?')} → {escape(move.after or '?')}"
    why = f"<p>{escape(move.reason)}{code_of(move.code)}</p>" if move.reason or move.code else ""
    outcome = f'<p class="warn">{escape(move.outcome)}</p>' if move.outcome else ""
    stages = "".join(f"<div><dt>{escape(name)}</dt><dd>{duration(took)}</dd></div>" for name, _, took in move.stages)
    if move.rollback_s:
        stages += f"<div><dt>rollback</dt><dd>{duration(move.rollback_s)}</dd></div>"
    changed = "; ".join(
        f"{escape(name)} {escape(how)} ({before} → {after} GPUs)"
        for name, how, before, after in move.changes
        if how != "stays"
    )
    return (
        f'<li class="card" id="move{move.id}"><h3>Move {move.id}: {change}{forced}<span class="time {css}">'
        f"{escape(move.state)}<small> · {duration(move.cost_s)}</small></span></h3>"
        f"<p>At {duration(move.began_s)}, after iteration {move.iteration}.</p>{why}{outcome}"
        f"{f'<p>{changed}.</p>' if changed else ''}"
        f'{_figures(move.numbers)}<dl class="figures stages" aria-label="Stages">{stages}</dl></li>'
    )


def _figures(numbers: Any) -> str:
    shown = []
    for key, words in _NUMBERS.items():
        value = numbers.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (key == "dwell_left" and not value):
            continue
        text = duration(value) if key.endswith("_s") else share(value) if key == "margin" else f"{value:g}"
        if key == "cost_s" and not numbers.get("cost_measured"):
            words = "cost of a move, assumed"
        shown.append(f"<div><dt>{words}</dt><dd>{text}</dd></div>")
    return f'<dl class="figures">{"".join(shown)}</dl>' if shown else ""


def _decisions(story: RunStory) -> str:
    if not story.decisions:
        return ""
    rows = ""
    groups = group_equal(story.decisions)
    for first, last, count in groups[-_MAX_ROWS:]:
        span = str(first.iteration) if first.iteration == last.iteration else f"{first.iteration} to {last.iteration}"
        gain = last.numbers.get("gain_s")
        gain_text = duration(gain) if isinstance(gain, (int, float)) and not isinstance(gain, bool) else "–"
        plan = f"<br>{escape(last.plan)}" if last.plan else ""
        rows += (
            f'<tr><th scope="row">{span}</th><td>{escape(last.what)}{f" × {count}" if count > 1 else ""}</td>'
            f'<td>{escape(last.reason)}{code_of(last.code)}{plan}</td><td class="number">{gain_text}</td></tr>\n'
        )
    stays = sum(decision.what == "stay" for decision in story.decisions)
    left = f"<p>The last {_MAX_ROWS} of {len(groups)}.</p>" if len(groups) > _MAX_ROWS else ""
    table = scroll(
        "Decisions", f"{heads('Iteration', 'Decision', 'Why', 'Expected gain', words=3)}\n<tbody>{rows}</tbody>"
    )
    body = (
        f'<details class="card"><summary>{counted(len(story.decisions), "decision")}, {stays} of them to stay</summary>'
        f"{left}{table}</details>"
    )
    lede = "Each with its reason; consecutive equal decisions are counted."
    return section("decisions", "Decisions", lede, body)
