"""Pools, tasks, nodes and elastic groups as text and as data. Sends no requests, except to the metrics exporter."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from trimtab.core.codec import decode
from trimtab.core.reasons import StoryEntry
from trimtab.model.nodes import NodeView
from trimtab.model.pool import IN_QUEUE, PoolSpec, TaskExplanation
from trimtab.render import output
from trimtab.render.html.kit.labels import counted
from trimtab.render.output import Data, out, show, text_table
from trimtab.runtime.procs.background import sentence

if TYPE_CHECKING:
    from trimtab.runtime.controller.rpc import TaskSnapshot
    from trimtab.runtime.rayapi.nodes import RayNode


GONE = ("lost", "left")


# ---- data -----------------------------------------------------------------------------------------------------------


def nodes_data(status: Data, ray_nodes: Sequence[RayNode]) -> list[dict[str, Any]]:
    """All nodes that are alive or left recently."""
    hosts = {node.node_id: node.host or None for node in ray_nodes}
    used = {node["node"] for node in status["nodes"]}
    return [
        {
            "node": view.node,
            "name": view.facts.name or None,
            "host": hosts.get(view.node),
            "state": view.state.value,
            "reason": output.reason_data(view.reason),
            "since": view.since,
            "deadline": view.deadline,
            "unlike": view.unlike,
            "losses": view.losses,
            "used": view.node in used,
            "total": view.facts.total.floats(),
            "outside": view.outside.floats(),
            "warm_hosts": status["warm_hosts"].get(view.node),
        }
        for view in (decode(NodeView, row) for row in status["fleet"])
    ]


def node_data(node: str, story: Sequence[StoryEntry], status: Data, tasks: Iterable[TaskSnapshot]) -> dict[str, Any]:
    """The data of `trimtab why` for a node."""
    known = next((known_node for known_node in nodes_data(status, ()) if known_node["node"] == node), None)
    return {
        "node": node,
        "there": known is not None and known["state"] not in GONE,
        **{key: known[key] if known else None for key in ("state", "reason", "deadline", "total", "outside")},
        "warm_hosts": status["warm_hosts"].get(node),
        "tasks": sorted({task.id for task in tasks for member in task.members if member.node == node}),
        "groups": sorted(
            group["id"]
            for group in status["groups"]
            if any(member["node"] == node for member in group.get("members", ()))
        ),
        "story": output.story_data(story),
        "time": status["time"],
    }


def group_data(group: str, status: Data) -> dict[str, Any] | None:
    """The data of `trimtab why` for an elastic group; None where there is no such group."""
    found = next((row for row in status["groups"] if row["id"] == group), None)
    return None if found is None else {"group": group, **found, "time": status["time"]}


# ---- text -----------------------------------------------------------------------------------------------------------


def nodes_table(nodes: Sequence[Data], now: float) -> Table:
    """A row per node; with the reason unless it is simply ready."""
    rows = []
    for node in nodes:
        warm = node["warm_hosts"] or {}
        rows.append(
            (
                node["node"][:12],
                node["name"] or node["host"] or "-",
                _state(node, now),
                output.amounts(node["total"]),
                output.amounts(node["outside"]) if node["outside"] else "-",
                output.counts(warm, warm) or "-",
                output.reason_text(node["reason"]) if node["state"] != "ready" or node["unlike"] else "",
            )
        )
    return text_table(("node", "host", "state", "has", "held by others", "warm hosts", "why"), rows)


def groups_table(groups: Sequence[Data]) -> Table:
    heads = ("group", "pool", "members", "limits", ">step", ">redone", ">restarts", "why")
    rows = (
        (
            group["id"],
            group.get("pool") or "-",
            f"{group.get('size', 0)} of {group.get('wanted', 0)} wanted",
            _limits(group),
            *(group.get(key, 0) for key in ("step", "redone", "restarts")),
            output.reason_text(group["reason"]) if group.get("reason") else "",
        )
        for group in groups
    )
    return text_table(heads, rows)


def print_node(data: Data) -> None:
    where = "is gone" if not data["there"] else f"is {_state(data, data['time'])}"
    out.print(f"node [bold]{data['node']}[/] {where}")
    if data["reason"]:
        output.facts(("why", output.reason_text(data["reason"])))
    if data["there"]:
        warm = data["warm_hosts"] or {}
        output.facts(
            ("has", output.amounts(data["total"])),
            ("outside", f"{output.amounts(data['outside'])} held outside trimtab"),
            ("tasks", ", ".join(data["tasks"]) or "none"),
            ("groups", ", ".join(data["groups"]) or "none"),
            ("warm hosts", output.counts(warm, warm) or "none"),
        )
    output.print_story(data["story"])


def print_group(data: Data) -> None:
    out.print(f"group [bold]{escape(data['group'])}[/] is {data.get('state', 'there')}")
    reason, deadline = data.get("reason"), data.get("deadline")
    about = [
        ("why", output.reason_text(reason) if reason else "-"),
        ("members", f"{data.get('size', 0)} work, {data.get('wanted', 0)} wanted, limits {_limits(data)}"),
        ("each requests", output.amounts(data.get("unit") or {})),
        ("pool", str(data.get("pool") or "-")),
        ("world", f"number {data.get('epoch', 0)}"),
        ("steps", f"{data.get('step', 0)} complete, {data.get('redone', 0)} redone"),
        ("restarts", str(data.get("restarts", 0))),
    ]
    if deadline is not None:
        about.insert(1, ("times out", f"in {output.span(deadline - data['time'])}"))
    output.facts(*about)
    members = data.get("members") or []
    if members:
        rows = (
            (
                "-" if member["rank"] is None else member["rank"],
                member["member"],
                member["state"],
                (member["node"] or "-")[:12],
                output.reason_text(member["reason"]),
            )
            for member in members
        )
        out.print()
        show(text_table((">rank", "member", "state", "node", "why"), rows))
    if data.get("story"):
        output.print_story(data["story"])


def _state(node: Data, now: float) -> str:
    if node["deadline"] is None:
        return str(node["state"])
    left_s = node["deadline"] - now
    return f"{node['state']}, {output.span(left_s)} left" if left_s > 0 else f"{node['state']}, past its deadline"


def _limits(group: Data) -> str:
    max_size = group.get("most")
    return f"{group.get('least', 1)} to {max_size}" if max_size is not None else f"{group.get('least', 1)} or more"


EXPORTER_S = 2.0
WAITING_SHOWN = 20
TASKS_SHOWN = 50
CHOSEN_BY_RAY = 32768  # ports from here on are ephemeral


# ---- data -----------------------------------------------------------------------------------------------------------


def status_data(status: Data, tasks: Iterable[TaskSnapshot], nodes: Sequence[RayNode], metrics: Data) -> dict[str, Any]:
    """The data of `trimtab pool show`."""
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
    """The data of `trimtab why` for a task. Times are seconds since 1970 on the controller's clock."""
    pool = status["pools"].get(explanation.pool)
    return {
        **output.picked(explanation, "task", "pool"),
        "state": explanation.state.value,
        "reason": output.reason_data(explanation.reason),
        **output.picked(explanation, "priority", "position"),
        "queue_length": len(pool["queue"]) if pool else 0,
        "since": _since(explanation),
        "deadline": explanation.deadline,
        "needs": list(explanation.needs),
        **output.picked(explanation, "evictions", "evicted_s", "attempts", "how"),
        "places": [output.picked(place, "group", "bundle", "node") for place in explanation.places],
        "story": output.story_data(explanation.story),
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
    """The data of `trimtab pool show POOL`."""
    return {
        **view,
        "tasks_by_state": view["tasks"],
        "labels": dict(spec.labels),
        "strategy": spec.strategy.value,
        "reserved": [resources.floats() for resources in spec.reserved],
        **output.picked(spec, "reserved_priority", "dynamic", "dynamic_limit", "reuse", "borrow", "return_preempts"),
        "preload": list(spec.preload),
        **output.picked(spec, "wait_s", "starvation_timeout_s", "starvation_runs"),
        "tasks": [task_data(task) for task in tasks],
    }


def task_data(task: TaskSnapshot) -> dict[str, Any]:
    """The data of `trimtab task show`."""
    return {
        "id": task.id,
        "pool": task.pool,
        "state": task.state.value,
        "reason": output.reason_data(task.reason),
        "priority": task.priority,
        "labels": dict(task.labels),
        **output.picked(task, "attempt", "evictions"),
        "nodes": sorted({member.node for member in task.members}),
        "processes": [output.picked(member, "rank", "node", "pid", "kind", "actor") for member in task.members],
        "how": task.how,
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
        "reason": output.reason_data(task.reason),
    }


# ---- text -----------------------------------------------------------------------------------------------------------


def print_status(data: Data) -> None:
    controller, journal, metrics, evictions = (data[k] for k in ("controller", "journal", "metrics", "evictions"))
    output.facts(
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
        show(_waiting_table(data["waiting"][:WAITING_SHOWN]))
        output.print_more(len(data["waiting"]), WAITING_SHOWN)
    out.print()
    show(nodes_table(data["nodes"], controller["time"]))
    if data["groups"]:
        out.print()
        show(groups_table(data["groups"]))
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
            output.counts(view["slots"], ("taken", "idle", "making", "removing", "wanted")),
            output.counts(view["tasks"], view["tasks"]),
            sum(view["evictions"].values()),
        )
        for name, view in pools.items()
    )
    show(text_table(("pool", "used of its quota", "slots", "tasks", ">evictions"), rows))


def print_pool(data: Data) -> None:
    limit = "no limit" if data["dynamic_limit"] is None else f"at most {data['dynamic_limit']}"
    kept = "kept for reuse" if data["reuse"] else "removed after use"
    reserved = "; ".join(output.amounts(resources) for resources in data["reserved"]) or "none"
    access = f"for priority {data['reserved_priority']:g} and above" + (", others may borrow" if data["borrow"] else "")
    evicted = ", ".join(f"{n} {code}" for code, n in data["evictions"].items()) or "none"
    imports = f" that import {', '.join(data['preload'])}" if data["preload"] else ""
    output.facts(
        ("pool", data["name"] + (" (drained: starts nothing new)" if data["drained"] else "")),
        ("used", _used(data)),
        ("reserved", f"{reserved} ({access})" if data["reserved"] else reserved),
        ("dynamic", f"{limit}, {kept}" if data["dynamic"] else "no dynamic slots"),
        ("slots", output.counts(data["slots"], ("taken", "idle", "making", "removing", "wanted")) or "none"),
        ("counts", f"{data['made_count']} made, {data['reuse_count']} reused, {data['destroyed_count']} destroyed"),
        ("warm hosts", f"{data['target_hosts']} requested{imports}"),
        ("evictions", evicted),
    )
    if data["tasks"]:
        out.print()
        print_tasks(data["tasks"])


def print_tasks(tasks: Sequence[Data]) -> None:
    if not tasks:
        out.print("no tasks")
        return
    rows = (
        (
            task["id"],
            task["state"],
            f"{task['priority']:g}",
            ", ".join(node[:12] for node in task["nodes"]) or "-",
            output.reason_text(task["reason"]),
        )
        for task in tasks[-TASKS_SHOWN:]
    )
    show(text_table(("task", "state", ">priority", "nodes", "why"), rows))
    output.print_more(len(tasks), TASKS_SHOWN)


def print_task(data: Data) -> None:
    out.print(f"[bold]{escape(data['id'])}[/] is {data['state']}; pool {escape(data['pool'])}")
    output.facts(
        ("why", output.reason_text(data["reason"])),
        ("priority", f"{data['priority']:g}"),
        ("labels", ", ".join(f"{key}={value}" for key, value in data["labels"].items()) or "none"),
        ("starts", f"{data['attempt']}, {data['evictions']} evictions"),
        ("runs in", data["how"] or "-"),
    )
    if data["processes"]:
        rows = ([process[key] for key in ("rank", "node", "pid", "kind", "actor")] for process in data["processes"])
        out.print()
        show(text_table((">rank", "node", ">pid", "kind", "actor"), rows))


def print_drained(pool: str, view: Data) -> None:
    running = sum(n for state, n in view["tasks"].items() if state in ("starting", "running", "parked", "cancelling"))
    waiting = sum(view["tasks"].get(state.value, 0) for state in IN_QUEUE)
    does = "starts nothing new" if view["drained"] else "takes tasks again"
    out.print(f"pool {pool} {does}: {running} running, {waiting} waiting", markup=False)


def print_explanation(data: Data) -> None:
    now = data["time"]
    since = f" for {output.span(now - data['since'])}" if data["since"] is not None else ""
    out.print(
        f"[bold]{escape(data['task'])}[/] is {data['state']}{since}; pool {escape(data['pool'])}, "
        f"priority {data['priority']:g}"
    )
    rows = [("why", output.reason_text(data["reason"]))]
    if data["position"] is not None:
        rows.append(("position", f"{data['position']} of {data['queue_length']} in the queue of the pool"))
    if data["needs"]:
        rows.append(("needs", f"{', '.join(data['needs'])} would have to end"))
    if data["deadline"] is not None:
        late = data["deadline"] - now
        rows.append(("deadline", f"in {output.span(late)} ({output.clock(data['deadline'])})" if late > 0 else "now"))
    if data["evictions"]:
        rows.append(("evictions", f"{data['evictions']}; out for {output.span(data['evicted_s'])} in all"))
    if data["how"]:
        rows.append(("runs in", data["how"]))
    if data["places"]:
        nodes = sorted({place["node"][:12] for place in data["places"]})
        rows.append(("places", f"{counted(len(data['places']), 'slot')} on {', '.join(nodes)}"))
    if data["attempts"] > 1:
        rows.append(("starts", str(data["attempts"])))
    output.facts(*rows)
    output.print_story(data["story"])


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
            output.reason_text(task["reason"]),
        )
        for task in waiting
    )
    return text_table(("waits", "pool", ">place", ">priority", "why"), rows)


def _used(view: Data) -> str:
    parts = []
    for name, quota in view["quota"].items():
        unit, size = output.unit_of(name, quota)
        parts.append(f"{view['used'].get(name, 0) / size:.4g}/{quota / size:.4g} {unit}")
    return ", ".join(parts)
