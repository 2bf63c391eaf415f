"""What `trimtab cluster` shows: the ledger, Ray's view and the GPUs put together as data, and that data as text.

`status_data` is the documented form (docs/cluster.md); everything printed is made from it. Nothing here asks or changes
anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trimtab.render.output import out, plain_table
from trimtab.runtime.localcluster.gpus import LocalGpus, ids_text
from trimtab.runtime.localcluster.ledger import ClusterRecord, NodePhase, NodeRecord
from trimtab.runtime.localcluster.ray_status import RayHolder, RayNode

Data = Mapping[str, Any]
COLOURS = {"running": "green", "starting": "cyan", "draining": "yellow", "ending": "yellow", "not in Ray": "red"}


def status_data(
    cluster: ClusterRecord,
    seen: Sequence[RayNode] | None,
    gpus: LocalGpus,
    users: Mapping[str, Sequence[int]],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The cluster as plain data. `seen` None: Ray does not answer."""
    by_id = {one.node_id: one for one in seen or ()}
    ours = [_our_node(node, by_id.get(node.node_id), seen is not None) for node in _in_order(cluster.live_nodes)]
    known = {node.node_id for node in cluster.nodes}
    others = [_other_node(one) for one in seen or () if one.node_id not in known]
    given = {gpu: node for node in cluster.live_nodes for gpu in node.gpus}
    return {
        "cluster": {
            "address": cluster.address,
            "here": cluster.head_here,
            "answers": seen is not None,
            "dashboard": f"http://127.0.0.1:{cluster.dashboard_port}" if cluster.dashboard_port else None,
            "client": f"ray://{cluster.address.rpartition(':')[0]}:{cluster.client_port}"
            if cluster.client_port
            else None,
            "detached": cluster.owner is None,
            "started": cluster.started,
        },
        "gpus": [
            {
                "gpu": gpu,
                "fake": gpus.fake,
                "node": given[gpu].name if gpu in given else None,
                "processes": list(users.get(gpu, ())),
            }
            for gpu in gpus.ids
        ],
        "nodes": [*ours, *others],
        "ended": [
            {"name": node.name, "gpus": list(node.gpus), "cause": node.cause, "at": node.since}
            for node in cluster.nodes
            if node.phase is NodePhase.ended
        ],
        "notes": list(notes),
    }


def node_data(cluster: ClusterRecord, node: NodeRecord) -> dict[str, Any]:
    """One node that has just been started or ended."""
    return {"cluster": cluster.address, **_our_node(node, None, False)}


def print_status(data: Data) -> None:
    """The whole picture."""
    out.print(picture(data))


def picture(data: Data, hints: Sequence[str] = ()) -> RenderableType:
    """The cluster, for the terminal: what it is, its nodes, what ended, what to type next."""
    parts: list[RenderableType] = [_headline(data), "", _nodes(data["nodes"])]
    if data["gpus"]:
        parts += ["", _gpu_line(data["gpus"])]
    if data["ended"]:
        parts += ["", *(_ended_line(one) for one in data["ended"][-5:])]
    parts += [Text.from_markup(f"[yellow]{escape(note)}[/]") for note in data["notes"]]
    if hints:
        parts += ["", *(Text(line, style="dim") for line in hints)]
    return Group(*parts)


def print_added(data: Data) -> None:
    """A node that runs."""
    what = f"GPU {ids_text(tuple(data['gpus']))}" if data["gpus"] else "no GPU"
    out.print(f"node {data['name']} runs on {what}: {data['node_id'][:12]} of the cluster at {data['cluster']}")


def print_draining(data: Data) -> None:
    """A node that will go."""
    when = time.strftime("%H:%M:%S", time.localtime(data["deadline"]))
    out.print(
        f"node {data['name']} ({data['node_id'][:12]}) drains: it goes when nothing is left on it, "
        f"at the latest at {when}, in {data['deadline_s']:g} s"
    )
    if not data["ends_here"]:
        out.print("trimtab did not start it on this machine: whoever did ends it at the deadline")


def print_ended(data: Data) -> None:
    """Nodes that were ended."""
    for one in data["ended"]:
        freed = f"; GPU {ids_text(tuple(one['gpus']))} is free" if one["gpus"] else ""
        out.print(f"node {one['name']} has ended: {escape(one['cause'])}{freed}")


def next_steps(cluster: ClusterRecord, token: bool) -> list[str]:
    """What one may type now, in another terminal."""
    auth = " RAY_AUTH_MODE=token" if token else ""
    return [
        f"export RAY_ADDRESS={cluster.address}{auth}",
        "python training_loop_with_autoscaling.py   # in examples/auto_scaling: trains on every node that joins",
        "trimtab cluster add                        # one more node, on the next free GPU",
        "trimtab why                                # why anything waits",
    ]


def change_lines(before: Data | None, now: Data) -> list[str]:
    """What became different, a line each: for where there is no screen to redraw."""
    clock = time.strftime("%H:%M:%S")
    old = {one["name"]: one["state"] for one in before["nodes"]} if before else {}
    lines = [
        f"{clock} {one['name']} {one['state']}" + (f" (GPU {ids_text(tuple(one['gpus']))})" if one["gpus"] else "")
        for one in now["nodes"]
        if old.get(one["name"]) != one["state"]
    ]
    told = {(one["name"], one["at"]) for one in before["ended"]} if before else set()
    lines += [f"{clock} {_ended_words(one)}" for one in now["ended"] if (one["name"], one["at"]) not in told]
    if before and before["cluster"]["answers"] != now["cluster"]["answers"]:
        lines.append(f"{clock} Ray {'answers again' if now['cluster']['answers'] else 'does not answer'}")
    return lines


def _our_node(node: NodeRecord, seen: RayNode | None, looked: bool) -> dict[str, Any]:
    state = node.phase.value
    if node.phase is NodePhase.running and looked:
        state = "not in Ray" if seen is None else "draining" if seen.draining else "running"
    deadline = node.deadline or (seen.deadline if seen else None)
    return {
        "name": node.name,
        "node_id": node.node_id,
        "state": state,
        "head": node.head,
        "ours": True,
        "gpus": list(node.gpus),
        "address": seen.address if seen else None,
        "node_manager_port": node.ports.node_manager,
        "pid": node.supervisor.pid if node.supervisor else None,
        "since": node.since,
        "deadline": deadline,
        "cause": node.cause or None,
        "log": node.log,
        **_held(seen),
    }


def _other_node(seen: RayNode) -> dict[str, Any]:
    return {
        "name": seen.name,
        "node_id": seen.node_id,
        "state": "draining" if seen.draining else "running",
        "head": seen.head,
        "ours": False,
        "gpus": [],
        "address": seen.address,
        "node_manager_port": seen.port,
        "pid": None,
        "since": None,
        "deadline": seen.deadline,
        "cause": None,
        "log": None,
        **_held(seen),
    }


def _held(seen: RayNode | None) -> dict[str, Any]:
    if seen is None:
        return {"total": {}, "free": {}, "holders": []}
    return {
        "total": dict(seen.total),
        "free": dict(seen.free),
        "holders": [
            {"kind": one.kind, "name": one.name, "holds": dict(one.holds), "pid": one.pid}
            for one in _worth_showing(seen.holders)
        ],
    }


def _worth_showing(holders: Iterable[RayHolder]) -> list[RayHolder]:
    return sorted(holders, key=lambda one: (-dict(one.holds).get("gpu", 0.0), one.name))


def _in_order(nodes: Iterable[NodeRecord]) -> list[NodeRecord]:
    return sorted(nodes, key=lambda one: (not one.head, one.slot))


def _headline(data: Data) -> Text:
    facts = data["cluster"]
    words = [f"[bold]{escape(facts['address'])}[/]"]
    words.append(f"{len(data['nodes'])} nodes" if len(data["nodes"]) != 1 else "1 node")
    if facts["dashboard"]:
        words.append(f"dashboard {facts['dashboard']}")
    if not facts["answers"]:
        words.append("[red]Ray does not answer[/]")
    return Text.from_markup("Ray cluster " + "   ".join(words))


def _nodes(nodes: Sequence[Data]) -> Table:
    table = plain_table()
    for heading in ("node", "GPU", "state", "id", "held", "by"):
        table.add_column(heading, overflow="fold")
    for one in nodes:
        colour = COLOURS.get(one["state"], "")
        state = one["state"] + (f", {_left(one['deadline'])}" if one["deadline"] and one["state"] == "draining" else "")
        gpu = ids_text(tuple(one["gpus"])) or (f"{one['total'].get('gpu', 0):g} of its own" if not one["ours"] else "-")
        table.add_row(
            escape(one["name"]),
            gpu,
            f"[{colour}]{escape(state)}[/]" if colour else escape(state),
            one["node_id"][:12] or "-",
            _amounts_held(one),
            escape(
                ", ".join(_holder(each) for each in one["holders"][:4]) + (" ..." if len(one["holders"]) > 4 else "")
            )
            or "-",
        )
    return table


def _holder(one: Data) -> str:
    gpus = one["holds"].get("gpu")
    return f"{one['name']}" + (f" ({gpus:g} gpu)" if gpus else "")


def _amounts_held(one: Data) -> str:
    shown = []
    for name in ("gpu", "cpu", "worker_unit"):
        whole = one["total"].get(name)
        if whole:
            shown.append(f"{whole - one['free'].get(name, 0.0):g}/{whole:g} {name}")
    return ", ".join(shown) or "-"


def _gpu_line(gpus: Sequence[Data]) -> Text:
    free = tuple(one["gpu"] for one in gpus if one["node"] is None)
    busy = [f"GPU {one['gpu']}: process {one['processes'][0]}" for one in gpus if not one["node"] and one["processes"]]
    what = "faked GPUs" if gpus[0]["fake"] else "GPUs"
    text = f"{len(gpus)} {what}, free: {ids_text(free) or 'none'}"
    return Text(text + (f"  (in use by others: {', '.join(busy)})" if busy else ""))


def _ended_line(one: Data) -> Text:
    return Text(_ended_words(one), style="yellow")


def _ended_words(one: Data) -> str:
    gpu = f" (GPU {ids_text(tuple(one['gpus']))})" if one["gpus"] else ""
    return f"{one['name']}{gpu} ended {time.strftime('%H:%M:%S', time.localtime(one['at']))}: {one['cause']}"


def _left(deadline: float) -> str:
    left_s = deadline - time.time()
    return f"{left_s:.0f} s left" if left_s > 0 else "deadline passed"
