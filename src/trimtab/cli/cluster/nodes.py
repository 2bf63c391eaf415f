"""`trimtab node`: nodes of a Ray cluster, and those of this machine: add, drain, remove.

Only processes started by trimtab are ever stopped; GPUs and ports are allocated under a lock, so several `add` may run
at once. Heavy imports happen inside the functions.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from trimtab.cli.cluster.commands import FakeOption, TimeoutOption, bytes_of, end_nodes, selected, status_now
from trimtab.cli.options import AddressOption, DeadlineOption, FormatOption, ReasonOption, seconds_of
from trimtab.core.errors import InputError, UnreachableError, meant
from trimtab.render.output import Format, answer, err, warn

if TYPE_CHECKING:
    from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodeRecord, NodeSizes
    from trimtab.runtime.rayapi.node_view import RayView

app = typer.Typer(help="Nodes of a Ray cluster; those of this machine come and go.", no_args_is_help=True)

NodeArgument = Annotated[str, Argument(help="Node name, GPU index, or prefix of the Ray node id.")]


@app.command("list")
def list_nodes(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """List the nodes of a cluster: GPUs, state, what is held and by which workers.

    Example:

        trimtab node list --address 10.0.0.1:6379
    """
    from trimtab.render.text import cluster as cluster_text

    data = {"nodes": status_now(*selected(address))["nodes"]}
    answer(data, form, lambda: cluster_text.print_nodes(data["nodes"]))


@app.command()
def show(node: NodeArgument, address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """Show a node: GPUs, state, resources and what holds them. `trimtab why NODE` has its story.

    Example:

        trimtab node show gpu-2
    """
    from trimtab.render.text import cluster as cluster_text

    nodes = status_now(*selected(address))["nodes"]
    names = [one["name"] for one in nodes]
    found = [one for one in nodes if node == one["name"] or (one["node_id"] and one["node_id"].startswith(node))]
    if len(found) != 1:
        raise InputError(f"there is no node {node}", hint=meant(node, names, f"nodes: {', '.join(names) or 'none'}"))
    answer(found[0], form, lambda: cluster_text.print_nodes(found))


@app.command()
def add(
    address: AddressOption = None,
    gpu_index: Annotated[str | None, Option(help="GPU of this machine.  [default: the next free GPU]")] = None,
    fake_gpus: FakeOption = None,
    gpus_per_node: Annotated[int | None, Option(min=0, help="Default: as the other nodes.")] = None,
    cpus_per_node: Annotated[int | None, Option(min=0)] = None,
    memory: Annotated[str | None, Option(help="E.g. 16GB.")] = None,
    object_store: Annotated[str | None, Option(help="E.g. 4GB.")] = None,
    ports_from: Annotated[int | None, Option(help="Default: as the other nodes.")] = None,
    worker_ports_from: Annotated[int | None, Option(help="Default: as the other nodes.")] = None,
    ip: Annotated[str | None, Option(help="IP address of this machine.")] = None,
    timeout: TimeoutOption = 120.0,
    form: FormatOption = Format.text,
) -> None:
    """Add a node on the next free GPU of this machine; return when Ray knows it. Safe to run concurrently.

    Examples:

        trimtab node add
        trimtab node add --gpu-index 3
        trimtab node add --address 10.0.0.1:6379
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation, node_supervisor
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.procs import gpus
    from trimtab.runtime.procs.interrupts import signals_interrupt

    ledger, cluster = selected(address)
    there = gpus.local_gpus(cluster.fake_gpus if cluster.head_here else fake_gpus)
    sizes = _sizes(cluster.sizes, gpus_per_node, cpus_per_node, memory, object_store)
    sizes = node_supervisor.with_shares(sizes, len(there.ids) // max(1, sizes.gpus))
    if not cluster.head_here:
        cluster = dataclasses.replace(
            cluster,
            fake_gpus=fake_gpus,
            ports_from=ports_from or cluster.ports_from,
            worker_ports_from=worker_ports_from or cluster.worker_ports_from,
        )
        local.auth_of(cluster)  # fails early if the cluster does not answer
    with signals_interrupt():
        cluster, node = allocation.allocate_node(ledger, cluster, there, sizes, gpu_index)
        try:
            with err.status(f"starting {node.name}"):
                wanted = local.auth_of(cluster)
                node = local.start_one(ledger, cluster, node, wanted, timeout, ip)
        except BaseException:
            local.end(ledger, cluster, [node], "it did not start")
            raise
    if not node.gpus:
        warn(f"node {node.name} has no GPU: tasks that ask for a GPU will not run there")
    data = cluster_text.node_data(cluster, node)
    answer(data, form, lambda: cluster_text.print_added(data))


@app.command()
def drain(
    node: NodeArgument,
    deadline: DeadlineOption = "30",
    reason: ReasonOption = "drained by `trimtab node drain`",
    wait: Annotated[bool, Option("--wait", help="Return when the node has stopped.")] = False,
    address: AddressOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Drain a node: Ray schedules no new work there; it stops when empty or at the deadline.

    Examples:

        trimtab node drain gpu-2 --deadline 60
        trimtab node drain 4f1c09 --deadline 5 --wait
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.rayapi.draining import checked_deadline

    deadline_s = seconds_of(deadline or "30", "--deadline")
    checked_deadline(deadline_s)
    ledger, cluster, view = _connected(address)
    ours, node_id, name = _resolve_node(cluster, view, node)
    at = time.time() + deadline_s
    if ours is not None:
        ledger.update(ours.mark, deadline=at)
    try:
        view.drain(node_id, deadline_s, reason)
    except BaseException:
        if ours is not None:
            ledger.update(ours.mark, deadline=None)
        raise
    data = {"name": name, "node_id": node_id, "deadline": at, "deadline_s": deadline_s, "ends_here": ours is not None}
    answer(data, form, lambda: cluster_text.print_draining(data))
    if wait and ours is not None and not local.wait_ended(ledger, ours, deadline_s + local.END_S):
        raise UnreachableError(f"node {name} still runs after its deadline", where=ours.log)


@app.command()
def remove(
    node: NodeArgument,
    grace: Annotated[float, Option(help="Seconds for running work to leave.")] = 10.0,
    address: AddressOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Stop a node of this machine: drain it, wait for the grace period, end its processes, free its GPU.

    Examples:

        trimtab node remove gpu-2
        trimtab node remove gpu-2 --grace 60
    """
    from trimtab.runtime.localcluster import nodes as local

    if grace < 0:
        raise InputError(f"--grace cannot be negative: {grace:g}", where="command line: --grace", hint="0 or more")
    ledger, cluster, view = _connected(address)
    ours, node_id, name = _resolve_node(cluster, view, node)
    if ours is None:
        raise InputError(
            f"node {name} was not started by trimtab on this machine: it cannot be stopped from here",
            hint="run `trimtab node remove` on its machine, or `trimtab node drain` anywhere",
        )
    if grace > 0:
        ledger.update(ours.mark, deadline=time.time() + grace)
        view.drain(node_id, grace, "removed by `trimtab node remove`")
        local.wait_ended(ledger, ours, grace)
    end_nodes(ledger, cluster, [ours], "removed by `trimtab node remove`", form)


def _connected(address: str | None) -> tuple[Ledger, ClusterRecord, RayView]:
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.rayapi.node_view import RayView

    ledger, cluster = selected(address)
    local.auth_of(cluster)
    return ledger, cluster, RayView(cluster.address)


def _resolve_node(cluster: ClusterRecord, view: RayView, word: str) -> tuple[NodeRecord | None, str, str]:
    """The node that a word names (its local record if started here, id, name); never the head."""
    from trimtab.runtime.localcluster import allocation
    from trimtab.runtime.rayapi.draining import HeadNodeError, UnknownNodeError

    ours = allocation.node_of(cluster, word)
    if ours is not None and ours.head:
        raise HeadNodeError(
            "the head cannot be removed: the cluster needs it", hint="`trimtab cluster stop` stops the whole cluster"
        )
    if ours is not None and ours.node_id:
        return ours, ours.node_id, ours.name
    try:
        node_id = view.found(word)
    except UnknownNodeError as unknown:
        names = [node.name for node in view.nodes() if not node.head]
        unknown.hint = meant(word, names, f"nodes: {', '.join(names) or 'none but the head'}")
        raise
    return next((node for node in cluster.live_nodes if node.node_id == node_id), None), node_id, word


def _sizes(defaults: NodeSizes, gpus: int | None, cpus: int | None, memory: str | None, store: str | None) -> NodeSizes:
    given = {
        "gpus": gpus,
        "cpus": cpus,
        "memory": bytes_of(memory, "--memory"),
        "object_store": bytes_of(store, "--object-store"),
    }
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})
