"""The dashboard's page, its static files, and its panels: tables and curves, each as its own markup.

The page is the same for every run: the server pushes its content (`source`). Timeline (`timeline.mjs`) and style are
the report's. Without scripts it says that it needs them. Pure. Text from outside is escaped here. A name with a story
is a button: `data-kind` and `data-name` identify it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any

from trimtab import __version__
from trimtab.core.ranks import ranks_text
from trimtab.render.html.dashboard.board import RECENT, LiveTimeline, RunBoard, SubjectStatus
from trimtab.render.html.kit import page
from trimtab.render.html.kit.assets import asset, script
from trimtab.render.html.kit.labels import counted, duration, escape, gpus_words, known, ledger_text, share
from trimtab.render.html.kit.page import Row, Tile, table_row, why_of
from trimtab.render.html.run.figures import current_prediction, ledger, metric_names
from trimtab.render.html.run.report import MOVE_LOOKS, change_of, metric_curve, predicted_curves, reward_tiles
from trimtab.render.html.run.story import RunStory

STYLES = ("report.css", "timeline.css", "run_report.css", "dashboard.css")
COLUMNS = (
    {
        "advice": "Advice",
        "components": "Components",
        "moves": "Moves",
        "events": "What happened",
        "tasks": "Tasks in the run's slots",
        "queue": "Queue",
        "evictions": "Evictions",
    },
    {
        "predicted": "Predicted against measured",
        "reward": "Reward",
        "workers": "Rollout workers",
        "around": "Engines and GPUs",
        "nodes": "Nodes",
        "pools": "Pools",
        "fleet": "Nodes of the cluster",
    },
)
"""Panels and their titles. Each stays in its column, so that none moves when another grows."""


@cache
def files() -> Mapping[str, tuple[str, bytes]]:
    """Static files by path."""
    found = {"/": ("text/html; charset=utf-8", _page().encode())}
    for name in STYLES:
        found[f"/{name}"] = ("text/css; charset=utf-8", asset(name).encode())
    found["/dashboard.js"] = ("text/javascript; charset=utf-8", script("dashboard").encode())
    return found


def _page() -> str:
    styles = "".join(f'<link rel="stylesheet" href="/{name}">\n' for name in STYLES)
    scripts = '<script src="/dashboard.js" defer></script>\n'
    panel = (
        '<section class="panel card" id="p-{0}" aria-labelledby="h-{0}" hidden>'
        '<h2 id="h-{0}">{1}</h2><div class="body" data-panel="{0}"></div></section>'
    )
    drawn = ("".join(panel.format(name, title) for name, title in column.items()) for column in COLUMNS)
    panels = "\n".join(f'<div class="column">{column}</div>' for column in drawn)
    return asset("dashboard.html").format(version=escape(__version__), styles=styles, scripts=scripts, panels=panels)


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


def _table(
    label: str, heads: Sequence[str], rows: Sequence[Row], numeric: Container[int] = range(0), limit: int = MAX_ROWS
) -> str:
    """A table with the last `limit` rows, or a note that it is empty."""
    if not rows:
        return _NONE
    left = f"<p>The last {limit} of {len(rows):,}.</p>" if len(rows) > limit else ""
    return left + page.table(label, heads, rows[-limit:], numeric=numeric, css="bare tall")


def _tiles(story: RunStory, line: LiveTimeline, names: Sequence[str]) -> str:
    done = story.iterations
    walls = [record.iteration.wall_s for record in done[-20:]]
    promised = current_prediction(story)
    tiles = [
        Tile("Iterations", str(len(done)), f"of {story.wanted}" if story.wanted else "done"),
        Tile("Time", duration(story.end_s), story.state or "running"),
        Tile(
            "An iteration",
            known(median(walls) if walls else None),
            f"{duration(promised)} predicted" if promised is not None else "no prediction",
        ),
    ]
    if (available_gpu_s := line.available_gpu_s) > 0:
        idle = max(0.0, 1 - line.used_gpu_s / available_gpu_s)
        tiles.append(Tile("GPUs idle", share(idle), f"of {counted(story.gpus, 'GPU')}"))
    arrived = sum(move.state == "arrived" for move in story.moves)
    back = sum(move.state == "rolled back" for move in story.moves)
    # An evicted worker appears as a worker, as a task, or as both.
    evicted = max(
        sum(event.lane == "tasks" and event.kind == "evicted" for event in story.timeline_events),
        sum(event.code == "TAKEN" and event.kind == "left" and ROOM in event.reason for event in story.timeline_events),
    )
    tiles.append(Tile("Moves", str(arrived), f"{back} rolled back, {evicted} evicted"))
    return "".join(tile.markup() for tile in (*tiles, *reward_tiles(story, names)))


def _components(board: RunBoard) -> str:
    rows = []
    plan = board.story.plans[-1] if board.story.plans else None
    for at, cost in enumerate(board.costs):
        gpu_slots = plan.gpu_slots(cost.component) if plan is not None else ()
        rows.append(
            [
                page.keyed(at, named("component", cost.component), wrapped=False),
                str(len(gpu_slots)) if gpu_slots else "CPU",
                known(cost.predicted_s),
                known(cost.busy_s),
                known(cost.wait_s),
                known(cost.idle, share),
            ]
        )
    note = f"<p>Medians of the last {RECENT} iterations.</p>" if len(board.story.done) > RECENT else ""
    if (spent := ledger(board.story, RECENT)) is not None:
        css = ' class="warn"' if spent.warns else ""
        note += f"<p{css}>An iteration's time: {ledger_text(spent)}.</p>"
    heads = ("Component", "GPUs", "Planned", "Own time", "Waits", "GPUs idle")
    return note + _table("Components", heads, rows, range(2, 6))


def _nodes(board: RunBoard) -> str:
    rows = []
    for node in board.story.nodes:
        here = board.is_present(node)
        state = "draining" if node.name in board.leaving else "present" if here else "gone"
        css = ' class="warn"' if state != "present" else ""
        runs = "; ".join(
            f"{escape(component)} {ranks_text(gpus)}" for component, gpus in board.on_node(node.name).items()
        )
        name = named("node", node.name, node.name or "GPUs without a node name")
        has = escape(gpus_words(node.gpus, node.kind))
        rows.append([name, f"<span{css}>{state}</span>", has, runs if here and runs else "–"])
    return _table("Nodes", ("Node", "State", "Has", "Runs"), rows, limit=300)


def _status_row(kind: str, status: SubjectStatus, *cells: str, numeric: Container[int] = range(0)) -> str:
    css = ' class="minor"' if status.is_over else ""
    why = why_of(status.code, status.reason)
    return table_row([named(kind, status.name), escape(status.state), *cells, why], numeric, css)


def workers_panel(board: RunBoard) -> str:
    rows = [
        _status_row("worker", worker, escape(worker.group), worker.load or "–", numeric=(3,))
        for worker in sorted(board.workers.values(), key=lambda worker: (worker.group, worker.is_over, worker.name))
    ]
    return _table("Rollout workers", ("Worker", "State", "Component", "Requests", "Why"), rows, (3,))


def _tasks(board: RunBoard) -> str:
    ordered = sorted(board.tasks.values(), key=lambda task: (not task.is_over, task.since_s))
    rows = [_status_row("task", task, escape(task.group)) for task in ordered]
    return _table("Tasks", ("Task", "State", "Pool", "Why"), rows)


def _moves(story: RunStory) -> str:
    rows = [
        [
            named("move", str(move.id), f"Move\u00a0{move.id}"),
            f'<span class="{MOVE_LOOKS.get(move.state, "")}">{escape(move.state)}</span>',
            change_of(move),
            duration(move.cost_s),
            why_of(move.code, move.outcome or move.reason),
        ]
        for move in story.moves
    ]
    last = story.decisions[-1] if story.decisions else None
    text = ""
    if last is not None:
        text = f"<p>After iteration {last.iteration}: {escape(last.what)}. {why_of(last.code, last.reason)}</p>"
    return text + _table("Moves", ("Move", "State", "From and to", "Took", "Why"), rows, (3,))


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
        f'</td><th scope="row">{escape(event.title)}</th><td>{why_of(event.code, event.reason)}</td></tr>\n'
        for at, event in newest[:MAX_ROWS]
    ]
    if not rows:
        return _NONE
    left = f"<p>The newest {MAX_ROWS} of {len(shown):,}.</p>" if len(shown) > MAX_ROWS else ""
    return left + page.table("What happened", ("At", "What", "Why"), rows, css="bare tall events")


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
    """Panels of a cluster's controller; `data` is that of `trimtab pool show`."""
    return {
        "pools": _pools(data["pools"]),
        "queue": _queue(data["waiting"]),
        "fleet": fleet_panel(data["nodes"]),
        "evictions": _evictions(data["evictions"]),
    }


def _amounts(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in resources.items() if name in ("gpu", "cpu")]
    return escape(", ".join(shown) or "nothing")


def _reason(data: Mapping[str, Any]) -> str:
    return why_of(data["code"], data["sentence"])


def _pools(pools: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, view in pools.items():
        tasks = ", ".join(f"{count} {escape(state)}" for state, count in view.get("tasks", {}).items() if count)
        used = f"{_amounts(view.get('used') or {})} of {_amounts(view.get('quota') or {})}"
        rows.append([named("pool", name), used, tasks or "none", "drained" if view.get("drained") else "open"])
    return _table("Pools", ("Pool", "Used", "Tasks", "State"), rows)


def _queue(waiting: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            named("task", task["id"]),
            escape(str(task["pool"])),
            str(task["position"] or "–"),
            f"{task['priority']:g}",
            _reason(task["reason"]),
        ]
        for task in waiting
    ]
    heads = ("Task", "Pool", "Place", "Priority", "Why it waits")
    return _table("Queue", heads, rows[:MAX_ROWS]) if rows else '<p class="none">No tasks are waiting.</p>'


def fleet_panel(nodes: Iterable[Mapping[str, Any]], without: Sequence[str] = ()) -> str:
    """The nodes of a cluster without those that a run on the same page shows; empty without any."""
    rows = []
    for node in nodes:
        why = _reason(node["reason"]) if node.get("reason") else "–"
        name = node["name"] or node["host"] or node["node"][:12]
        if name not in without and node["node"][:8] not in without:
            rows.append([named("node", node["node"], name), escape(node["state"]), _amounts(node["total"]), why])
    return _table("Nodes of the cluster", ("Node", "State", "Has", "Why"), rows, limit=300) if rows else ""


def _evictions(data: Mapping[str, Any]) -> str:
    text = f"<p>{data['evictions']} in all, {data['cross_pool']} of them across pools.</p>"
    rows = [
        [
            named("task", eviction["victim"]),
            escape(str(eviction["victim_pool"])),
            named("task", eviction["by"]) if eviction.get("by") else "–",
            _reason(eviction["reason"]),
        ]
        for eviction in reversed(data.get("latest", ())[-MAX_ROWS:])
    ]
    return text + (_table("Evictions", ("Task", "Pool", "For", "Why"), rows) if rows else "")
