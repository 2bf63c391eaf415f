"""The output of `trimtab cluster`: ledger, Ray's view and GPUs combined as data, that data as text, the live display.

`status_data` is the documented form (docs/guides/local-cluster.md); all text is made from it. Only reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from trimtab.core.errors import UnreachableError
from trimtab.render.live import LiveView
from trimtab.render.output import clock, out, picked, show, text_table
from trimtab.runtime.localcluster import nodes as local
from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodePhase, NodeRecord
from trimtab.runtime.procs import gpus
from trimtab.runtime.procs.gpus import LocalGpus, ids_text
from trimtab.runtime.rayapi.node_view import FIRST_ANSWER_S, RayViewProcess, shown
from trimtab.runtime.rayapi.nodes import RayNode

Data = Mapping[str, Any]
COLOURS = {"running": "green", "starting": "cyan", "draining": "yellow", "ending": "yellow", "not in Ray": "red"}


def status_data(
    cluster: ClusterRecord,
    seen: Sequence[RayNode] | None,
    gpus: LocalGpus,
    users: Mapping[str, Sequence[int]],
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The cluster as data. `seen` None: Ray does not answer."""
    by_id = {node.node_id: node for node in seen or ()}
    in_order = sorted(cluster.live_nodes, key=lambda node: (not node.head, node.slot))
    ours = [_our_node(node, by_id.get(node.node_id), seen is not None) for node in in_order]
    known = {node.node_id for node in cluster.nodes}
    others = [_other_node(node) for node in seen or () if node.node_id not in known]
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
    return {"cluster": cluster.address, **_our_node(node, None, False)}


def print_status(data: Data) -> None:
    out.print(picture(data))


def picture(data: Data, hints: Sequence[str] = ()) -> RenderableType:
    """The cluster as a renderable: its nodes, ended nodes, next commands."""
    parts: list[RenderableType] = [_headline(data), "", _nodes(data["nodes"])]
    if data["gpus"]:
        parts += ["", _gpu_line(data["gpus"])]
    if data["ended"]:
        parts += ["", *(Text(_ended_words(node), style="yellow") for node in data["ended"][-5:])]
    parts += [Text.from_markup(f"[yellow]{escape(note)}[/]") for note in data["notes"]]
    if hints:
        parts += ["", *(Text(line, style="dim") for line in hints)]
    return Group(*parts)


def print_nodes(nodes: Sequence[Data]) -> None:
    show(_nodes(nodes))


def cluster_data(cluster: ClusterRecord) -> dict[str, Any]:
    return {
        "address": cluster.address,
        "head_here": cluster.head_here,
        "nodes": [node.name for node in cluster.live_nodes],
        "gpus": sorted(gpu for node in cluster.live_nodes for gpu in node.gpus),
        "started": cluster.started,
    }


def print_clusters(clusters: Sequence[Data]) -> None:
    if not clusters:
        out.print("no cluster of trimtab on this machine")
        return
    rows = (
        (
            cluster["address"],
            ", ".join(cluster["nodes"]) or "none runs",
            ids_text(tuple(cluster["gpus"])) or "-",
            clock(cluster["started"]),
        )
        for cluster in clusters
    )
    show(text_table(("cluster", "nodes here", "GPUs", "since"), rows))


def print_added(data: Data) -> None:
    what = f"GPU {ids_text(tuple(data['gpus']))}" if data["gpus"] else "no GPU"
    out.print(f"node {data['name']} runs on {what}: {data['node_id'][:12]} of the cluster at {data['cluster']}")


def print_draining(data: Data) -> None:
    when = time.strftime("%H:%M:%S", time.localtime(data["deadline"]))
    out.print(
        f"node {data['name']} ({data['node_id'][:12]}) drains: it leaves when it is idle, "
        f"at the latest at {when}, in {data['deadline_s']:g} s"
    )
    if not data["ends_here"]:
        out.print("trimtab did not start it on this machine: stop it there at the deadline")


def print_ended(data: Data) -> None:
    for node in data["ended"]:
        freed = f"; GPU {ids_text(tuple(node['gpus']))} is free" if node["gpus"] else ""
        out.print(f"node {node['name']} has ended: {escape(node['cause'])}{freed}")


def next_steps(cluster: ClusterRecord, token: bool) -> list[str]:
    """Commands to type next, in another terminal; the line that it needs first of all is the last."""
    return [
        "python training_loop_with_autoscaling.py   # in examples/auto_scaling: trains on every node that joins",
        "trimtab node add                           # one more node, on the next free GPU",
        "trimtab why                                # why anything waits",
        "trimtab cluster stop                       # stops it",
        env_line(cluster, token),
    ]


def env_line(cluster: ClusterRecord, token: bool) -> str:
    """What makes a shell's `ray status`, drivers and trimtab mean this cluster."""
    return f"export RAY_ADDRESS={cluster.address}" + (" RAY_AUTH_MODE=token" if token else "")


def change_lines(before: Data | None, now: Data) -> list[str]:
    """The changes, a line each, for output that is not a terminal."""
    clock = time.strftime("%H:%M:%S")
    old = {node["name"]: node["state"] for node in before["nodes"]} if before else {}
    lines = [
        f"{clock} {node['name']} {node['state']}" + (f" (GPU {ids_text(tuple(node['gpus']))})" if node["gpus"] else "")
        for node in now["nodes"]
        if old.get(node["name"]) != node["state"]
    ]
    known = {(node["name"], node["at"]) for node in before["ended"]} if before else set()
    lines += [f"{clock} {_ended_words(node)}" for node in now["ended"] if (node["name"], node["at"]) not in known]
    if before and before["cluster"]["answers"] != now["cluster"]["answers"]:
        lines.append(f"{clock} Ray {'answers again' if now['cluster']['answers'] else 'does not answer'}")
    return lines


def _our_node(node: NodeRecord, seen: RayNode | None, has_ray_view: bool) -> dict[str, Any]:
    state = node.phase.value
    if node.phase is NodePhase.running and has_ray_view:
        state = "not in Ray" if seen is None else "draining" if seen.draining else "running"
    return {
        **picked(node, "name", "node_id"),
        "state": state,
        "head": node.head,
        "ours": True,
        "gpus": list(node.gpus),
        "address": seen.address if seen else None,
        "node_manager_port": node.ports.node_manager,
        "pid": node.supervisor.pid if node.supervisor else None,
        "since": node.since,
        "deadline": node.deadline or (seen.deadline if seen else None),
        "cause": node.cause or None,
        "log": node.log,
        **_held(seen),
    }


def _other_node(seen: RayNode) -> dict[str, Any]:
    return {
        **picked(seen, "name", "node_id"),
        "state": "draining" if seen.draining else "running",
        "head": seen.head,
        "ours": False,
        "gpus": [],
        "address": seen.address,
        "node_manager_port": seen.port,
        **dict.fromkeys(("pid", "since")),
        "deadline": seen.deadline,
        **dict.fromkeys(("cause", "log")),
        **_held(seen),
    }


def _held(seen: RayNode | None) -> dict[str, Any]:
    if seen is None:
        return {"total": {}, "free": {}, "holders": []}
    return {
        "total": shown(seen.resources),
        "free": shown(seen.free),
        "holders": [
            {"kind": holder.kind, "name": holder.name, "holds": holder.holds, "pid": holder.pid}
            for holder in sorted(seen.holders, key=lambda holder: (-holder.holds.get("gpu", 0.0), holder.name))
        ],
    }


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
    rows = []
    for node in nodes:
        until = f", {_left(node['deadline'])}" if node["deadline"] and node["state"] == "draining" else ""
        own = f"{node['total'].get('gpu', 0):g} of its own" if not node["ours"] else "-"
        holders = ", ".join(_holder(holder) for holder in node["holders"][:4])
        rows.append(
            (
                node["name"],
                ids_text(tuple(node["gpus"])) or own,
                Text(node["state"] + until, COLOURS.get(node["state"], "")),
                node["node_id"][:12] or "-",
                _amounts_held(node),
                holders + (" ..." if len(node["holders"]) > 4 else "") or "-",
            )
        )
    heads = [Column(head, overflow="fold") for head in ("node", "GPU", "state", "id", "held", "by")]
    return text_table(heads, rows)


def _holder(holder: Data) -> str:
    gpus = holder["holds"].get("gpu")
    return f"{holder['name']}" + (f" ({gpus:g} gpu)" if gpus else "")


def _amounts_held(node: Data) -> str:
    shown = []
    for name in ("gpu", "cpu", "worker_unit"):
        whole = node["total"].get(name)
        if whole:
            shown.append(f"{whole - node['free'].get(name, 0.0):g}/{whole:g} {name}")
    return ", ".join(shown) or "-"


def _gpu_line(gpus: Sequence[Data]) -> Text:
    free = tuple(gpu["gpu"] for gpu in gpus if gpu["node"] is None)
    busy = [f"GPU {gpu['gpu']}: process {gpu['processes'][0]}" for gpu in gpus if not gpu["node"] and gpu["processes"]]
    what = "faked GPUs" if gpus[0]["fake"] else "GPUs"
    text = f"{len(gpus)} {what}, free: {ids_text(free) or 'none'}"
    return Text(text + (f"  (used by other processes: {', '.join(busy)})" if busy else ""))


def _ended_words(node: Data) -> str:
    gpu = f" (GPU {ids_text(tuple(node['gpus']))})" if node["gpus"] else ""
    return f"{node['name']}{gpu} ended {time.strftime('%H:%M:%S', time.localtime(node['at']))}: {node['cause']}"


def _left(deadline: float) -> str:
    left_s = deadline - time.time()
    return f"{left_s:.0f} s left" if left_s > 0 else "deadline passed"


REFRESH_EVERY_S = 1.0
GPUS_EVERY_S = 10.0
LIVE_ANSWER_S = 3.0  # timeout for Ray per refresh; after it the status is shown without Ray's part


class ClusterStatusLoop:
    """Collects the status of a cluster repeatedly; a separate process queries Ray."""

    def __init__(self, ledger: Ledger, cluster: ClusterRecord) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._ray_view: RayViewProcess | None = None
        self._gpus: Any = None
        self._gpus_at = -math.inf

    def now(self, timeout_s: float = FIRST_ANSWER_S) -> dict[str, Any]:
        """The status; without Ray's part where Ray does not answer in time."""
        cluster = self._ledger.read().get(self._cluster.address, self._cluster)
        ray_nodes, notes = None, []
        try:
            if self._ray_view is None:
                local.auth_of(cluster)
                self._ray_view = RayViewProcess(cluster.address, REFRESH_EVERY_S)
            ray_nodes = self._ray_view.nodes(timeout_s)
        except UnreachableError as fault:
            if self._ray_view is not None and not self._ray_view.is_alive:
                self.close()
            if not cluster.live_nodes:
                raise
            notes.append(fault.what)
        local_gpus, gpu_processes = self._gpus_now(cluster)
        return status_data(cluster, ray_nodes, local_gpus, gpu_processes, notes)

    def status_while_alive(self) -> dict[str, Any] | None:
        """The status; None when the head process has ended."""
        cluster = self._ledger.read().get(self._cluster.address, self._cluster)
        if cluster.head is None or not cluster.head.alive:
            return None
        try:
            return self.now(timeout_s=LIVE_ANSWER_S)
        except UnreachableError:  # it has just ended
            return None

    def _gpus_now(self, cluster: ClusterRecord) -> Any:
        """GPUs and the processes on them, cached for GPUS_EVERY_S: querying the driver is slow."""
        if time.monotonic() - self._gpus_at > GPUS_EVERY_S:
            is_local = cluster.head_here or cluster.nodes
            local_gpus = gpus.local_gpus(cluster.fake_gpus) if is_local else gpus.LocalGpus(())
            self._gpus = local_gpus, {} if local_gpus.fake else gpus.pids_by_gpu()
            self._gpus_at = time.monotonic()
        return self._gpus

    def close(self) -> None:
        if self._ray_view is not None:
            self._ray_view.close()
            self._ray_view = None


def watch(read_status: Callable[[], dict[str, Any] | None], hints: Sequence[str]) -> None:
    """Show the cluster until `read_status` returns None: it has ended."""
    below = [*hints, "", "Ctrl-C ends the cluster"]
    with LiveView(lambda data: picture(data, below), change_lines, stays=True) as view:
        while (data := read_status()) is not None:
            view.show(data)
            time.sleep(REFRESH_EVERY_S)
