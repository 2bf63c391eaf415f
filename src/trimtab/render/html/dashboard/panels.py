"""The dashboard's panels: tables and curves, each as its own markup.

Pure. Pictures are drawn by the report's code. Text from outside is escaped here. A name with a story is a button:
`data-kind` and `data-name` identify it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from trimtab.core.ranks import ranks_text
from trimtab.render.html.dashboard.board import RECENT, RunBoard, SubjectStatus
from trimtab.render.html.dashboard.timeline import LiveTimeline
from trimtab.render.html.kit.labels import counted, duration, escape, share
from trimtab.render.html.kit.page import code_of, heads, scroll
from trimtab.render.html.kit.timeline import COLOURS
from trimtab.render.html.run.curves import metric_curve, predicted_curves
from trimtab.render.html.run.figures import course, ends_of, metric_names
from trimtab.render.html.run.story import RunStory

Panels = dict[str, str]

WIDTHS = (("wide", 600), ("narrow", 360))  # of curves, in pixels
MAX_ROWS = 100
MAX_METRICS = 4
ROOM = "makes room for"  # in the pool's reason of an eviction; workers are also taken for other reasons
_NONE = '<p class="none">None yet.</p>'


def run_panels(board: RunBoard, line: LiveTimeline) -> Panels:
    story = board.story
    names = metric_names(story)
    return {
        "standing": escape(board.status_sentence),
        "tiles": _tiles(story, line, names),
        "legend": line.legend,
        "components": _components(board),
        "predicted": _predicted(story),
        "reward": _rewards(story, names),
        "nodes": _nodes(board),
        "workers": workers_panel(board),
        "tasks": _tasks(board),
        "moves": _moves(story),
        "events": _events(story),
    }


def named(kind: str, name: str, words: str = "") -> str:
    return (
        f'<button type="button" class="rt-at" data-kind="{kind}" data-name="{escape(name)}">'
        f"{escape(words or name or '–')}</button>"
    )


def table(label: str, columns: str, rows: Sequence[str], *, limit: int = MAX_ROWS) -> str:
    """A table with the last `limit` rows, or a note that it is empty."""
    if not rows:
        return _NONE
    left = f"<p>The last {limit} of {len(rows):,}.</p>" if len(rows) > limit else ""
    return left + scroll(label, f"{columns}\n<tbody>{''.join(rows[-limit:])}</tbody>", css="bare tall")


def _row(first: str, *cells: str) -> str:
    return f'<tr><th scope="row">{first}</th>{"".join(cells)}</tr>\n'


def _cell(words: str) -> str:
    return f"<td>{words}</td>"


def _figure(value: float | None, render: Callable[[float], str] = duration) -> str:
    return f'<td class="number">{render(value) if value is not None else "–"}</td>'


def _why(code: str, reason: str) -> str:
    return f"{escape(reason) or '–'}{code_of(code)}"


def _tiles(story: RunStory, line: LiveTimeline, names: Sequence[str]) -> str:
    done = story.iterations
    walls = [record.iteration.wall_s for record in done[-20:]]
    promised = story.prediction(len(story.plans) - 1) if story.plans else None
    tiles = [
        ("Iterations", str(len(done)), f"of {story.wanted}" if story.wanted else "done"),
        ("Time", duration(story.end_s), story.state or "running"),
        (
            "An iteration",
            duration(median(walls)) if walls else "–",
            f"{duration(promised)} predicted" if promised is not None else "no prediction",
        ),
    ]
    if (available_gpu_s := line.available_gpu_s) > 0:
        idle = max(0.0, 1 - line.used_gpu_s / available_gpu_s)
        tiles.append(("GPUs idle", share(idle), f"of {counted(story.gpus, 'GPU')}"))
    arrived = sum(move.state == "arrived" for move in story.moves)
    back = sum(move.state == "rolled back" for move in story.moves)
    # An evicted worker appears as a worker, as a task, or as both.
    evicted = max(
        sum(event.lane == "tasks" and event.kind == "evicted" for event in story.timeline_events),
        sum(event.code == "TAKEN" and event.kind == "left" and ROOM in event.reason for event in story.timeline_events),
    )
    tiles.append(("Moves", str(arrived), f"{back} rolled back, {evicted} evicted"))
    values = [value for name in names[:1] for _, value in course(done, name)]
    if values:
        first, last = ends_of(values)
        tiles.append((names[0], f"{last:.3g}", f"from {first:.3g}"))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )


def _components(board: RunBoard) -> str:
    rows = []
    plan = board.story.plans[-1] if board.story.plans else None
    for at, cost in enumerate(board.costs):
        gpu_slots = plan.gpu_slots(cost.component) if plan is not None else ()
        key = f'<span class="named"><span class="tt-key key{at % COLOURS}"></span>'
        rows.append(
            _row(
                f"{key}{named('component', cost.component)}</span>",
                _cell(str(len(gpu_slots)) if gpu_slots else "CPU"),
                _figure(cost.predicted_s),
                _figure(cost.busy_s),
                _figure(cost.wait_s),
                _figure(cost.idle, share),
            )
        )
    columns = heads("Component", "GPUs", "Planned", "Own time", "Waits", "GPUs idle", words=2)
    note = f"<p>Medians of the last {RECENT} iterations.</p>" if len(board.story.done) > RECENT else ""
    return note + table("Components", columns, rows)


def _nodes(board: RunBoard) -> str:
    rows = []
    for node in board.story.nodes:
        here = board.is_present(node)
        state = "draining" if node.name in board.leaving else "present" if here else "gone"
        css = ' class="warn"' if state != "present" else ""
        runs = "; ".join(
            f"{escape(component)} {ranks_text(gpus)}" for component, gpus in board.on_node(node.name).items()
        )
        has = f"{node.gpus} × {escape(node.kind)}" if node.kind else counted(node.gpus, "GPU")
        name = named("node", node.name, node.name or "GPUs without a node name")
        rows.append(_row(name, _cell(f"<span{css}>{state}</span>"), _cell(has), _cell(runs if here and runs else "–")))
    return table("Nodes", heads("Node", "State", "Has", "Runs", words=4), rows, limit=300)


def _status_row(kind: str, status: SubjectStatus, *cells: str) -> str:
    css = ' class="minor"' if status.is_over else ""
    return (
        f'<tr{css}><th scope="row">{named(kind, status.name)}</th>{_cell(escape(status.state))}'
        f"{''.join(cells)}{_cell(_why(status.code, status.reason))}</tr>\n"
    )


def workers_panel(board: RunBoard) -> str:
    rows = [
        _status_row("worker", worker, _cell(escape(worker.group)), f'<td class="number">{worker.load or "–"}</td>')
        for worker in sorted(board.workers.values(), key=lambda worker: (worker.group, worker.is_over, worker.name))
    ]
    columns = '<thead><tr><th scope="col">Worker</th><th scope="col">State</th><th scope="col">Component</th>'
    columns += '<th scope="col" class="number">Requests</th><th scope="col">Why</th></tr></thead>'
    return table("Rollout workers", columns, rows)


def _tasks(board: RunBoard) -> str:
    ordered = sorted(board.tasks.values(), key=lambda task: (not task.is_over, task.since_s))
    rows = [_status_row("task", task, _cell(escape(task.group))) for task in ordered]
    return table("Tasks", heads("Task", "State", "Pool", "Why", words=4), rows)


def _moves(story: RunStory) -> str:
    rows = []
    for move in story.moves:
        css = {"arrived": "good", "rolled back": "warn", "stuck": "warn"}.get(move.state, "")
        rows.append(
            _row(
                named("move", str(move.id), f"Move\u00a0{move.id}"),
                f'<td class="{css}">{escape(move.state)}</td>',
                _cell(f"{escape(move.before or '?')} → {escape(move.after or '?')}"),
                _figure(move.cost_s),
                _cell(_why(move.code, move.outcome or move.reason)),
            )
        )
    last = story.decisions[-1] if story.decisions else None
    text = ""
    if last is not None:
        text = f"<p>After iteration {last.iteration}: {escape(last.what)}. {_why(last.code, last.reason)}</p>"
    columns = '<thead><tr><th scope="col">Move</th><th scope="col">State</th><th scope="col">From and to</th>'
    columns += '<th scope="col" class="number">Took</th><th scope="col">Why</th></tr></thead>'
    return text + table("Moves", columns, rows)


def _events(story: RunStory) -> str:
    """Events, newest first, without checkpoints and what moves repeat."""
    shown = [
        (at, event)
        for at, event in enumerate(story.timeline_events)
        if event.kind != "saved" and (event.lane or event.kind != "told")
    ]
    newest = sorted(shown, key=lambda pair: pair[1].t_s, reverse=True)
    rows = [
        f'<tr><td><button type="button" class="rt-at" data-kind="mark" data-name="{at}">{duration(event.t_s)}</button>'
        f'</td><th scope="row">{escape(event.title)}</th>{_cell(_why(event.code, event.reason))}</tr>\n'
        for at, event in newest[:MAX_ROWS]
    ]
    if not rows:
        return _NONE
    left = f"<p>The newest {MAX_ROWS} of {len(shown):,}.</p>" if len(shown) > MAX_ROWS else ""
    columns = heads("At", "What", "Why", words=3)
    body = f"{columns}\n<tbody>{''.join(rows)}</tbody>"
    return left + scroll("What happened", body, css="bare tall events")


def _predicted(story: RunStory) -> str:
    if not story.iterations:
        return _NONE
    lede, drawn = predicted_curves(story, WIDTHS)
    return f"<p>{lede}</p>{drawn}"


def _rewards(story: RunStory, names: Sequence[str]) -> str:
    drawn = [metric_curve(story, name, f"reward{at}", WIDTHS) for at, name in enumerate(names[:MAX_METRICS])]
    return "".join(f"<p>{escape(curve[0])}</p>{curve[1]}" for curve in drawn if curve) or _NONE


# ---- controller -----------------------------------------------------------------------------------------------------


def controller_panels(data: Mapping[str, Any]) -> Panels:
    """Panels of a cluster's controller; `data` is that of `trimtab status`."""
    return {
        "pools": _pools(data["pools"]),
        "queue": _queue(data["waiting"]),
        "fleet": fleet_panel(data["nodes"]),
        "evictions": _evictions(data["evictions"]),
    }


def _amounts(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in resources.items() if name in ("gpu", "cpu")]
    return escape(", ".join(shown) or "nothing")


def _pools(pools: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, view in pools.items():
        tasks = ", ".join(f"{count} {escape(state)}" for state, count in view.get("tasks", {}).items() if count)
        used, quota = view.get("used") or {}, view.get("quota") or {}
        state = "drained" if view.get("drained") else "open"
        rows.append(
            _row(
                named("pool", name),
                _cell(f"{_amounts(used)} of {_amounts(quota)}"),
                _cell(tasks or "none"),
                _cell(state),
            )
        )
    return table("Pools", heads("Pool", "Used", "Tasks", "State", words=4), rows)


def _queue(waiting: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        _row(
            named("task", task["id"]),
            _cell(escape(str(task["pool"]))),
            _cell(str(task["position"] or "–")),
            _cell(f"{task['priority']:g}"),
            _cell(_why(task["reason"]["code"], task["reason"]["sentence"])),
        )
        for task in waiting
    ]
    columns = heads("Task", "Pool", "Place", "Priority", "Why it waits", words=5)
    return table("Queue", columns, rows[:MAX_ROWS]) if rows else '<p class="none">No tasks are waiting.</p>'


def fleet_panel(nodes: Iterable[Mapping[str, Any]], without: Sequence[str] = ()) -> str:
    """The nodes of a cluster without those that a run on the same page shows; empty without any."""
    rows = []
    for node in nodes:
        why = _why(node["reason"]["code"], node["reason"]["sentence"]) if node.get("reason") else "–"
        name = node["name"] or node["host"] or node["node"][:12]
        if name in without or node["node"][:8] in without:
            continue
        rows.append(
            _row(
                named("node", node["node"], name),
                _cell(escape(node["state"])),
                _cell(_amounts(node["total"])),
                _cell(why),
            )
        )
    return table("Nodes of the cluster", heads("Node", "State", "Has", "Why", words=4), rows, limit=300) if rows else ""


def _evictions(data: Mapping[str, Any]) -> str:
    text = f"<p>{data['evictions']} in all, {data['cross_pool']} of them across pools.</p>"
    rows = [
        _row(
            named("task", eviction["victim"]),
            _cell(escape(str(eviction["victim_pool"]))),
            _cell(named("task", eviction["by"]) if eviction.get("by") else "–"),
            _cell(_why(eviction["reason"]["code"], eviction["reason"]["sentence"])),
        )
        for eviction in reversed(data.get("latest", ())[-MAX_ROWS:])
    ]
    return text + (table("Evictions", heads("Task", "Pool", "For", "Why", words=4), rows) if rows else "")
