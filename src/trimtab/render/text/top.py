"""A run or a cluster on one terminal screen, from the dashboard's source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from trimtab.render.html.dashboard.board import RunBoard
from trimtab.render.html.kit.labels import duration, known, ledger_text, reason_text, share
from trimtab.render.html.run.figures import course, current_prediction, ends_of, ledger, metric_names
from trimtab.render.output import amounts, show, text_table

if TYPE_CHECKING:
    from trimtab.render.html.dashboard.source import DashboardSource

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK = 40
_TALL = 10_000
_table = partial(text_table, no_wrap=True)


def picture(source: DashboardSource, height: int) -> RenderableType:
    return Group(*_parts(source, height))


def print_once(source: DashboardSource) -> None:
    for part in _parts(source, _TALL):
        show(part)


def _parts(source: DashboardSource, height: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if source.board is not None:
        parts += run_parts(source.board, height)
    if source.advised is not None and source.advised.lines:
        parts += ["", *map(escape, source.advised.lines)]
    if source.status is not None:
        parts += _cluster_parts(source.status)
    if source.fault:
        parts += ["", f"[yellow]{escape(source.fault)}[/]"]
    return parts


def _cluster_parts(status: Mapping[str, Any]) -> list[RenderableType]:
    pools = [
        [name, ", ".join(f"{count} {state}" for state, count in view["tasks"].items() if count) or "no tasks"]
        for name, view in status["pools"].items()
    ]
    waiting = [
        [
            task["id"],
            task["pool"],
            task["position"] or "-",
            reason_text(task["reason"]["code"], task["reason"]["sentence"]),
        ]
        for task in status["waiting"][:20]
    ]
    nodes = [
        [node["name"] or node["host"] or node["node"][:12], node["state"], amounts(node["total"])]
        for node in status["nodes"][:20]
    ]
    parts: list[RenderableType] = []
    for heads, rows in (
        (("pool", "tasks"), pools),
        (("waits", "pool", "place", "why"), waiting),
        (("node", "state", "has"), nodes),
    ):
        if rows:
            parts += ["", _table(heads, rows)]
    return parts


def run_parts(board: RunBoard, height: int) -> list[RenderableType]:
    """A run: its head, components, workers, tasks, nodes, and the newest events in the remaining lines."""
    story = board.story
    parts: list[RenderableType] = [_head(board)]
    if story.plans:
        parts.append(escape(f"plan: {story.plans[-1].words}"))
    spent = board.costs
    if spent:
        rows = []
        for cost in spent:
            gpu_slots = story.plans[-1].gpu_slots(cost.component) if story.plans else ()
            rows.append(
                [
                    cost.component,
                    str(len(gpu_slots)) if gpu_slots else "CPU",
                    *(known(value, otherwise="-") for value in (cost.predicted_s, cost.busy_s, cost.wait_s)),
                    known(cost.idle, share, "-"),
                ]
            )
        parts += ["", _table(("component", ">GPUs", ">planned", ">own time", ">waits", ">GPUs idle"), rows)]
    workers = [worker for worker in board.workers.values() if not worker.is_over]
    if workers:
        states: dict[str, int] = {}
        for worker in workers:
            states[worker.state] = states.get(worker.state, 0) + 1
        busy = sum(worker.running or 0 for worker in workers)
        words = ", ".join(f"{count} {state}" for state, count in states.items())
        parts += ["", escape(f"workers: {words}; {busy} request{'s' * (busy != 1)} running")]
    tasks = [task for task in board.tasks.values() if not task.is_over]
    if tasks:
        rows = [[task.name, task.state, task.group, reason_text(task.code, task.reason)] for task in tasks[-8:]]
        parts += ["", _table(("task", "state", "pool", "why"), rows)]
    nodes = [node for node in story.nodes if board.is_present(node)]
    if nodes:
        gpus = sum(node.gpus for node in nodes)
        going = f", {len(board.leaving)} draining" if board.leaving else ""
        parts += ["", f"nodes: {len(nodes)} with {gpus} GPUs{going}"]
    used = 4 + len(spent) + len(tasks) + 8
    newest = [event for event in story.timeline_events if event.kind != "saved"][-max(3, min(20, height - used)) :]
    if newest:
        rows = [[duration(event.t_s), event.title, reason_text(event.code, event.reason)] for event in newest]
        parts += ["", _table(("at", "what", "why"), rows)]
    return parts


def _head(board: RunBoard) -> Table:
    story = board.story
    done = story.iterations
    walls = [record.iteration.wall_s for record in done[-20:]]
    promised = current_prediction(story)
    count = f"{len(done)} of {story.wanted}" if story.wanted else str(len(done))
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_row(f"[bold]{escape(story.job or 'run')}[/]", escape(board.status_sentence))
    times = f"{duration(median(walls)) if walls else '-'} each"
    times += f", {duration(promised)} predicted" if promised is not None else ""
    grid.add_row(f"{count} iterations", f"{duration(story.end_s)}; {times}")
    if (spent := ledger(story, 20)) is not None:
        text = escape(ledger_text(spent))
        grid.add_row("an iteration's time", f"[yellow]{text}[/]" if spent.warns else text)
    for name in metric_names(story)[:1]:
        values = [value for _, value in course(done, name)]
        if values:
            first, last = ends_of(values)
            grid.add_row(escape(name), f"{spark(values)}  {first:.3g} to {last:.3g}")
    return grid


def spark(values: Sequence[float]) -> str:
    """A series as block characters, at most _SPARK of them; each is the mean of its part."""
    size = max(1, -(-len(values) // _SPARK))
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    if high <= low:
        return _BLOCKS[0] * len(means)
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / (high - low)))] for value in means)
