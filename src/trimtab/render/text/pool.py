"""Pools, tasks and nodes as text and as data. Sends no requests, except to the metrics exporter."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from trimtab.model.pool import IN_QUEUE, PoolSpec, TaskExplanation
from trimtab.render.html.kit.labels import counted
from trimtab.render.output import out, text_table
from trimtab.render.text import formatting
from trimtab.render.text.formatting import Data
from trimtab.render.text.nodes import groups_table, nodes_data, nodes_table
from trimtab.runtime.procs.background import sentence

if TYPE_CHECKING:
    from trimtab.runtime.controller.rpc import TaskSnapshot
    from trimtab.runtime.rayapi.nodes import RayNode

EXPORTER_S = 2.0
WAITING_SHOWN = 20
TASKS_SHOWN = 50
CHOSEN_BY_RAY = 32768  # ports from here on are ephemeral


# ---- data -----------------------------------------------------------------------------------------------------------


def status_data(status: Data, tasks: Iterable[TaskSnapshot], nodes: Sequence[RayNode], metrics: Data) -> dict[str, Any]:
    """The data of `trimtab status`."""
    queues = {pool: list(view["queue"]) for pool, view in status["pools"].items()}
    totals = status["totals"]
    return {
        "ray": {"how": status["how"], "fault": status["ray"]},
        "controller": {key: status[key] for key in ("pid", "time", "clients")} | {"name": status["controller"]},
        "pools": status["pools"],
        "tasks": status["tasks"],
        "waiting": sorted(
            (
                _waiting_data(task, queues[task.pool])
                for task in tasks
                if task.state in IN_QUEUE and task.pool in queues
            ),
            key=lambda task: (task["pool"], task["position"] is None, task["position"] or 0),
        ),
        "nodes": nodes_data(status, nodes),
        "groups": status["groups"],
        "autoscaler": {key: status[key] for key in ("wanted", "desired_workers")} | {"fault": status["autoscaler"]},
        "evictions": {key: totals[key] for key in ("evictions", "same_pool", "cross_pool")}
        | {"latest": totals.get("latest", [])},
        "journal": status["journal"],
        "faults": status["faults"],
        "background": [row for row in status["background"] if row["failures"]],
        "redone": status["redone"],
        "silent_clients": status["silent_clients"],
        "metrics": metrics,
    }


def explanation_data(explanation: TaskExplanation, status: Data) -> dict[str, Any]:
    """The data of `trimtab explain` for a task. Times are seconds since 1970 on the controller's clock."""
    pool = status["pools"].get(explanation.pool)
    return {
        **formatting.picked(explanation, "task", "pool"),
        "state": explanation.state.value,
        "reason": formatting.reason_data(explanation.reason),
        **formatting.picked(explanation, "priority", "position"),
        "queue_length": len(pool["queue"]) if pool else 0,
        "since": _since(explanation),
        "deadline": explanation.deadline,
        "needs": list(explanation.needs),
        **formatting.picked(explanation, "evictions", "evicted_s", "attempts", "how"),
        "places": [formatting.picked(place, "group", "bundle", "node") for place in explanation.places],
        "story": formatting.story_data(explanation.story),
        "time": status["time"],
    }


def _since(explanation: TaskExplanation) -> float | None:
    """When it entered its state; its reason may have changed since."""
    since = explanation.waiting_since
    if since is None:
        for chapter in reversed(explanation.story):
            if chapter.state != explanation.state.value:
                break
            since = chapter.at
    return since


def pool_data(spec: PoolSpec, view: Data, tasks: Iterable[TaskSnapshot]) -> dict[str, Any]:
    """The data of `trimtab pool show`."""
    return {
        **view,
        "tasks_by_state": view["tasks"],
        "labels": dict(spec.labels),
        "strategy": spec.strategy.value,
        "reserved": [resources.floats() for resources in spec.reserved],
        **formatting.picked(
            spec, "reserved_priority", "dynamic", "dynamic_limit", "reuse", "borrow", "return_preempts"
        ),
        "preload": list(spec.preload),
        **formatting.picked(spec, "wait_s", "starvation_timeout_s", "starvation_runs"),
        "tasks": [
            {
                "id": task.id,
                "state": task.state.value,
                "reason": formatting.reason_data(task.reason),
                "priority": task.priority,
                "labels": dict(task.labels),
                **formatting.picked(task, "attempt", "evictions"),
                "nodes": sorted({member.node for member in task.members}),
                "how": task.how,
            }
            for task in tasks
        ],
    }


def exporter(nodes: Sequence[RayNode], fault: str | None) -> dict[str, Any]:
    """The metrics endpoint of the controller, or why there is none. `fault` is the controller's own."""
    head = next((node for node in nodes if node.alive and node.head), None)
    url = head.metrics_url if head else None
    if head is None or url is None:
        missing = "Ray's exporter does not run: it comes with `pip install 'ray[default]'` on the head node"
        return {"url": None, "series": 0, "why": missing}
    series, why = _scraped(url)
    if fault is not None:
        why = fault
    elif head.metrics_port >= CHOSEN_BY_RAY and why is None:
        why = "no port seems to be set, so it changes with every start: `ray start --metrics-export-port=8080` sets one"
    return {"url": url, "series": series, "why": why}


def _scraped(url: str) -> tuple[int, str | None]:
    """Number of trimtab's series at the endpoint, and why there are none."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=EXPORTER_S) as page:
            text = page.read().decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as fault:
        return 0, f"the exporter does not answer here: {getattr(fault, 'reason', None) or fault}"
    series = sum(1 for line in text.splitlines() if line.startswith("ray_trimtab_"))
    late = "no series of trimtab yet: Ray reports every 10 s (RAY_metrics_report_interval_ms)"
    return series, None if series else late


def _waiting_data(task: TaskSnapshot, queue: list[str]) -> dict[str, Any]:
    return {
        "id": task.id,
        "pool": task.pool,
        "state": task.state.value,
        "position": queue.index(task.id) + 1 if task.id in queue else None,
        "priority": task.priority,
        "reason": formatting.reason_data(task.reason),
    }


# ---- text -----------------------------------------------------------------------------------------------------------


def print_status(data: Data) -> None:
    controller, journal, metrics, evictions = (data[k] for k in ("controller", "journal", "metrics", "evictions"))
    formatting.facts(
        ("Ray", data["ray"]["how"] + (f"; {data['ray']['fault']}" if data["ray"]["fault"] else "")),
        ("controller", f"{controller['name']}, process {controller['pid']}"),
        ("journal", "; ".join([journal["dir"], *([journal["fault"]] if journal["fault"] else []), *journal["notes"]])),
        ("metrics", _metrics_line(metrics)),
        ("tasks", ", ".join(f"{n} {state}" for state, n in data["tasks"].items()) or "none"),
        ("evictions", f"{evictions['evictions']}, {evictions['cross_pool']} of them across pools"),
    )
    out.print()
    print_pools(data["pools"])
    if data["waiting"]:
        out.print()
        formatting.show(_waiting_table(data["waiting"][:WAITING_SHOWN]))
        formatting.print_more(len(data["waiting"]), WAITING_SHOWN)
    out.print()
    formatting.show(nodes_table(data["nodes"], controller["time"]))
    if data["groups"]:
        out.print()
        formatting.show(groups_table(data["groups"]))
    if data["faults"]:
        out.print("\n[bold]Controller faults[/]; see its log")
        for fault in data["faults"]:
            out.print(f"  {escape(fault)}")
    if data["background"] or data["redone"]:
        out.print("\n[bold]Failed background tasks[/]; see the controller's log")
        for row in data["background"]:
            out.print(f"  {escape(sentence(row))}")
        if data["redone"]:
            out.print(f"  instructions that were lost and re-executed: {data['redone']}")


def print_pools(pools: Mapping[str, Data]) -> None:
    if not pools:
        out.print("no pools yet")
        return
    rows = (
        (
            name + (" (drained)" if view["drained"] else ""),
            _used(view),
            formatting.counts(view["slots"], ("taken", "idle", "making", "removing", "wanted")),
            formatting.counts(view["tasks"], view["tasks"]),
            sum(view["evictions"].values()),
        )
        for name, view in pools.items()
    )
    formatting.show(text_table(("pool", "used of its quota", "slots", "tasks", ">evictions"), rows))


def print_pool(data: Data) -> None:
    limit = "no limit" if data["dynamic_limit"] is None else f"at most {data['dynamic_limit']}"
    kept = "kept for reuse" if data["reuse"] else "removed after use"
    reserved = "; ".join(formatting.amounts(resources) for resources in data["reserved"]) or "none"
    access = f"for priority {data['reserved_priority']:g} and above" + (", others may borrow" if data["borrow"] else "")
    evicted = ", ".join(f"{n} {code}" for code, n in data["evictions"].items()) or "none"
    formatting.facts(
        ("pool", data["name"] + (" (drained: starts nothing new)" if data["drained"] else "")),
        ("used", _used(data)),
        ("reserved", f"{reserved} ({access})" if data["reserved"] else reserved),
        ("dynamic", f"{limit}, {kept}" if data["dynamic"] else "no dynamic slots"),
        ("slots", formatting.counts(data["slots"], ("taken", "idle", "making", "removing", "wanted")) or "none"),
        ("counts", f"{data['made_count']} made, {data['reuse_count']} reused, {data['destroyed_count']} destroyed"),
        ("warm hosts", f"{data['target_hosts']} requested" + _with(" that import ", data["preload"])),
        ("evictions", evicted),
    )
    if data["tasks"]:
        rows = (
            (
                task["id"],
                task["state"],
                f"{task['priority']:g}",
                ", ".join(node[:12] for node in task["nodes"]) or "-",
                formatting.reason_text(task["reason"]),
            )
            for task in data["tasks"][-TASKS_SHOWN:]
        )
        out.print()
        formatting.show(text_table(("task", "state", ">priority", "nodes", "why"), rows))
        formatting.print_more(len(data["tasks"]), TASKS_SHOWN)


def print_drained(pool: str, view: Data) -> None:
    running = sum(n for state, n in view["tasks"].items() if state in ("starting", "running", "parked", "cancelling"))
    waiting = sum(view["tasks"].get(state.value, 0) for state in IN_QUEUE)
    does = "starts nothing new" if view["drained"] else "takes tasks again"
    out.print(f"pool {pool} {does}: {running} running, {waiting} waiting", markup=False)


def print_explanation(data: Data) -> None:
    now = data["time"]
    since = f" for {formatting.span(now - data['since'])}" if data["since"] is not None else ""
    out.print(
        f"[bold]{escape(data['task'])}[/] is {data['state']}{since}; pool {escape(data['pool'])}, "
        f"priority {data['priority']:g}"
    )
    rows = [("why", formatting.reason_text(data["reason"]))]
    if data["position"] is not None:
        rows.append(("position", f"{data['position']} of {data['queue_length']} in the queue of the pool"))
    if data["needs"]:
        rows.append(("needs", f"{', '.join(data['needs'])} would have to end"))
    if data["deadline"] is not None:
        late = data["deadline"] - now
        rows.append(
            ("deadline", f"in {formatting.span(late)} ({formatting.clock(data['deadline'])})" if late > 0 else "now")
        )
    if data["evictions"]:
        rows.append(("evictions", f"{data['evictions']}; out for {formatting.span(data['evicted_s'])} in all"))
    if data["how"]:
        rows.append(("runs in", data["how"]))
    if data["places"]:
        nodes = sorted({place["node"][:12] for place in data["places"]})
        rows.append(("places", f"{counted(len(data['places']), 'slot')} on {', '.join(nodes)}"))
    if data["attempts"] > 1:
        rows.append(("starts", str(data["attempts"])))
    formatting.facts(*rows)
    formatting.print_story(data["story"])


def _metrics_line(metrics: Data) -> str:
    if metrics["url"] is None:
        return f"none: {metrics['why']}"
    line = f"{metrics['url']}, {counted(metrics['series'], 'line')} of trimtab"
    return line + (f"; {metrics['why']}" if metrics["why"] else "")


def _waiting_table(waiting: Sequence[Data]) -> Table:
    rows = (
        (
            task["id"] + (" (evicted)" if task["state"] == "evicted" else ""),
            task["pool"],
            task["position"] or "-",
            f"{task['priority']:g}",
            formatting.reason_text(task["reason"]),
        )
        for task in waiting
    )
    return text_table(("waits", "pool", ">place", ">priority", "why"), rows)


def _used(view: Data) -> str:
    parts = []
    for name, quota in view["quota"].items():
        unit, size = formatting.unit_of(name, quota)
        parts.append(f"{view['used'].get(name, 0) / size:.4g}/{quota / size:.4g} {unit}")
    return ", ".join(parts)


def _with(words: str, names: Sequence[str]) -> str:
    return words + ", ".join(names) if names else ""
