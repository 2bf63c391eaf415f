"""Nodes and elastic groups as text and as data, for `status` and `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from trimtab.core.codec import decode
from trimtab.core.reasons import StoryEntry
from trimtab.model.nodes import NodeView
from trimtab.render.output import out, text_table
from trimtab.render.text import formatting
from trimtab.render.text.formatting import Data

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
            "reason": formatting.reason_data(view.reason),
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
    """The data of `trimtab explain` for a node."""
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
        "story": formatting.story_data(story),
        "time": status["time"],
    }


def group_data(group: str, status: Data) -> dict[str, Any] | None:
    """The data of `trimtab explain` for an elastic group; None where there is no such group."""
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
                formatting.amounts(node["total"]),
                formatting.amounts(node["outside"]) if node["outside"] else "-",
                formatting.counts(warm, warm) or "-",
                formatting.reason_text(node["reason"]) if node["state"] != "ready" or node["unlike"] else "",
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
            formatting.reason_text(group["reason"]) if group.get("reason") else "",
        )
        for group in groups
    )
    return text_table(heads, rows)


def print_node(data: Data) -> None:
    where = "is gone" if not data["there"] else f"is {_state(data, data['time'])}"
    out.print(f"node [bold]{data['node']}[/] {where}")
    if data["reason"]:
        formatting.facts(("why", formatting.reason_text(data["reason"])))
    if data["there"]:
        warm = data["warm_hosts"] or {}
        formatting.facts(
            ("has", formatting.amounts(data["total"])),
            ("outside", f"{formatting.amounts(data['outside'])} held outside trimtab"),
            ("tasks", ", ".join(data["tasks"]) or "none"),
            ("groups", ", ".join(data["groups"]) or "none"),
            ("warm hosts", formatting.counts(warm, warm) or "none"),
        )
    formatting.print_story(data["story"])


def print_group(data: Data) -> None:
    out.print(f"group [bold]{escape(data['group'])}[/] is {data.get('state', 'there')}")
    reason, deadline = data.get("reason"), data.get("deadline")
    about = [
        ("why", formatting.reason_text(reason) if reason else "-"),
        ("members", f"{data.get('size', 0)} work, {data.get('wanted', 0)} wanted, limits {_limits(data)}"),
        ("each requests", formatting.amounts(data.get("unit") or {})),
        ("pool", str(data.get("pool") or "-")),
        ("world", f"number {data.get('epoch', 0)}"),
        ("steps", f"{data.get('step', 0)} complete, {data.get('redone', 0)} redone"),
        ("restarts", str(data.get("restarts", 0))),
    ]
    if deadline is not None:
        about.insert(1, ("times out", f"in {formatting.span(deadline - data['time'])}"))
    formatting.facts(*about)
    members = data.get("members") or []
    if members:
        rows = (
            (
                "-" if member["rank"] is None else member["rank"],
                member["member"],
                member["state"],
                (member["node"] or "-")[:12],
                formatting.reason_text(member["reason"]),
            )
            for member in members
        )
        out.print()
        formatting.show(text_table((">rank", "member", "state", "node", "why"), rows))
    if data.get("story"):
        formatting.print_story(data["story"])


def _state(node: Data, now: float) -> str:
    if node["deadline"] is None:
        return str(node["state"])
    left_s = node["deadline"] - now
    return f"{node['state']}, {formatting.span(left_s)} left" if left_s > 0 else f"{node['state']}, past its deadline"


def _limits(group: Data) -> str:
    max_size = group.get("most")
    return f"{group.get('least', 1)} to {max_size}" if max_size is not None else f"{group.get('least', 1)} or more"
