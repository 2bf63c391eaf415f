"""`trimtab cluster`: starts, grows, drains and stops a local Ray cluster of one-GPU nodes.

Every node is a real `ray start` with its own supervisor process. Only processes started by trimtab are ever stopped;
GPUs and ports are allocated under a lock, so several `add` may run at once. Heavy imports happen inside the functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import FormatOption
from trimtab.core.errors import InputError, UnreachableError, meant
from trimtab.render.output import Format, answer, err, out, warn

if TYPE_CHECKING:
    from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodeRecord, NodeSizes
    from trimtab.runtime.rayapi.node_view import RayView

app = typer.Typer(help="Local Ray cluster of one-GPU nodes.", no_args_is_help=True)

STOPPED = "stopped by `trimtab cluster stop`"
INTERRUPTED = "its command was interrupted"

AddressOption = Annotated[
    str | None,
    Option("--address", "-a", help="Cluster address, host:port.  [default: RAY_ADDRESS, or the only local cluster]"),
]
FakeOption = Annotated[
    int | None, Option("--fake-gpus", envvar="TRIMTAB_FAKE_GPUS", help="Number of fake GPUs of this machine.")
]
TimeoutOption = Annotated[float, Option("--timeout", help="Start timeout in seconds.")]
NodeArgument = Annotated[str, Argument(help="Node name, GPU index, or prefix of the Ray node id.")]


@app.command()
def start(
    workers: Annotated[int, Argument(metavar="[N]", help="Worker nodes besides the head.")] = 0,
    port: Annotated[int, Option(help="Port of the head.")] = 6379,
    dashboard_port: Annotated[int, Option(help="Port of Ray's dashboard.")] = 8265,
    no_dashboard: Annotated[bool, Option("--no-dashboard", help="Do not start Ray's dashboard.")] = False,
    client_port: Annotated[int | None, Option(help="Port of the Ray client server.  [default: 10001 if free]")] = None,
    ports_from: Annotated[int, Option(help="First port of node managers, object managers and agents.")] = 6380,
    worker_ports_from: Annotated[int, Option(help="First port of worker processes.")] = 10_002,
    fake_gpus: FakeOption = None,
    gpus_per_node: Annotated[int, Option(min=0)] = 1,
    cpus_per_node: Annotated[int, Option(min=0)] = 1,
    memory: Annotated[str | None, Option(help="Memory per node, e.g. 16GB.  [default: an equal share]")] = None,
    object_store: Annotated[str | None, Option(help="Object store per node.  [default: an equal share]")] = None,
    ip: Annotated[str | None, Option(help="IP address of this machine.")] = None,
    quick_loss: Annotated[
        bool, Option("--quick-loss", help="Ray detects a killed node in 2 s instead of 14 s.")
    ] = False,
    detach: Annotated[bool, Option("--detach", "-d", help="Return as soon as the cluster runs.")] = False,
    timeout: TimeoutOption = 120.0,
    form: FormatOption = Format.text,
) -> None:
    """Start a head and N workers, one GPU each; show them until Ctrl-C, which stops the cluster.

    Examples:

        trimtab cluster start
        trimtab cluster start 2 --fake-gpus 4
        trimtab cluster start 7 --detach --port 6400 --dashboard-port 8300
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation, node_supervisor
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodeSizes
    from trimtab.runtime.procs import gpus, processes
    from trimtab.runtime.procs.interrupts import signals_interrupt
    from trimtab.runtime.rayapi import auth
    from trimtab.runtime.rayapi.connect import import_ray

    ledger = Ledger()
    _warn_all(allocation.sweep(ledger))
    there = gpus.local_gpus(fake_gpus)
    ip = ip or local.own_address()
    sizes = NodeSizes(gpus_per_node, cpus_per_node, _bytes(memory, "--memory"), _bytes(object_store, "--object-store"))
    nodes_here = len(there.ids) // gpus_per_node if gpus_per_node else workers + 1
    cluster = ClusterRecord(
        address=f"{ip}:{port}",
        head_here=True,
        temp_dir=str(ledger.place / str(port)),
        sizes=node_supervisor.with_shares(sizes, max(nodes_here, workers + 1)),
        fake_gpus=fake_gpus,
        ports_from=ports_from,
        worker_ports_from=worker_ports_from,
        dashboard_port=None if no_dashboard else dashboard_port,
        client_port=client_port,
        quick_loss=quick_loss,
        owner=processes.this(),
        started=time.time(),
    )
    wanted = auth.new_cluster_auth(os.environ)
    cluster = allocation.open_cluster(ledger, cluster, there, workers)
    with signals_interrupt():
        try:
            with err.status("starting the head"):
                if importlib.util.find_spec("ray") is None:  # without the second that importing it takes
                    import_ray()
                local.start_all(ledger, cluster, wanted, ip, timeout, _print_started)
        except KeyboardInterrupt:
            err.print("interrupted; all started processes have ended")
            raise typer.Exit(130) from None
        hints = cluster_text.next_steps(cluster, wanted[auth.MODE] == auth.ON)
        if detach:
            with ledger.change() as state:
                state.clusters[cluster.address] = dataclasses.replace(state.clusters[cluster.address], owner=None)
            data = _status_now(ledger, cluster)
            hints.append("trimtab cluster stop                       # stops it")
            answer(data, form, lambda: out.print(cluster_text.picture(data, hints)))
            return
        _show_until_end(ledger, cluster, hints)


@app.command()
def add(
    address: AddressOption = None,
    gpu: Annotated[str | None, Option(help="GPU index.  [default: the next free GPU]")] = None,
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

        trimtab cluster add
        trimtab cluster add --gpu 3
        trimtab cluster add --address 10.0.0.1:6379
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation, node_supervisor
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.procs import gpus
    from trimtab.runtime.procs.interrupts import signals_interrupt

    ledger, cluster = _selected(address)
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
        cluster, node = allocation.allocate_node(ledger, cluster, there, sizes, gpu)
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
    deadline: Annotated[float, Option(help="Seconds until the node is stopped.")] = 30.0,
    cause: Annotated[str, Option(help="Reason, shown in status.")] = "drained by `trimtab cluster drain`",
    wait: Annotated[bool, Option("--wait", help="Return when the node has stopped.")] = False,
    address: AddressOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Drain a node: Ray schedules no new work there; it stops when empty or at the deadline.

    Examples:

        trimtab cluster drain gpu-2 --deadline 60
        trimtab cluster drain 4f1c09 --deadline 5 --wait
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.rayapi.draining import checked_deadline

    checked_deadline(deadline)
    ledger, cluster, view = _connected(address)
    ours, node_id, name = _resolve_node(cluster, view, node)
    at = time.time() + deadline
    if ours is not None:
        ledger.update(ours.mark, deadline=at)
    try:
        view.drain(node_id, deadline, cause)
    except BaseException:
        if ours is not None:
            ledger.update(ours.mark, deadline=None)
        raise
    data = {"name": name, "node_id": node_id, "deadline": at, "deadline_s": deadline, "ends_here": ours is not None}
    answer(data, form, lambda: cluster_text.print_draining(data))
    if wait and ours is not None and not local.wait_ended(ledger, ours, deadline + local.END_S):
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

        trimtab cluster remove gpu-2
        trimtab cluster remove gpu-2 --grace 60
    """
    from trimtab.runtime.localcluster import nodes as local

    if grace < 0:
        raise InputError(f"--grace cannot be negative: {grace:g}", where="command line: --grace", hint="0 or more")
    ledger, cluster, view = _connected(address)
    ours, node_id, name = _resolve_node(cluster, view, node)
    if ours is None:
        raise InputError(
            f"node {name} was not started by trimtab on this machine: it cannot be stopped from here",
            hint="run `trimtab cluster remove` on its machine, or `trimtab cluster drain` anywhere",
        )
    if grace > 0:
        ledger.update(ours.mark, deadline=time.time() + grace)
        view.drain(node_id, grace, "removed by `trimtab cluster remove`")
        local.wait_ended(ledger, ours, grace)
    _end_nodes(ledger, cluster, [ours], "removed by `trimtab cluster remove`", form)


@app.command()
def status(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """Show nodes, GPUs by index, their users, and which nodes ended and why.

    Examples:

        trimtab cluster status
        trimtab cluster status --format json
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation

    ledger, cluster = _selected(address)
    if cluster.head_here and not cluster.live_nodes:
        raise UnreachableError(
            f"no cluster runs at {cluster.address}; {allocation.end_note(cluster)}", hint=allocation.START_ONE
        )
    data = _status_now(ledger, cluster)
    answer(data, form, lambda: cluster_text.print_status(data))


@app.command()
def stop(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """Stop the nodes that trimtab started on this machine, and nothing else: never `ray stop`.

    Example:

        trimtab cluster stop
    """
    from trimtab.runtime.localcluster import allocation

    ledger, cluster = _selected(address)
    if not cluster.live_nodes:
        raise UnreachableError(
            f"no node of the cluster at {cluster.address} was started by trimtab here", hint=allocation.START_ONE
        )
    _end_nodes(ledger, cluster, cluster.live_nodes, STOPPED, form)


def _show_until_end(ledger: Ledger, cluster: ClusterRecord, hints: list[str]) -> None:
    """Shows the cluster until it ends or is interrupted, then cleans up."""
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.procs.interrupts import signals_ignored

    if not out.is_terminal:
        print(f"Ray cluster at {cluster.address}; in another terminal:", *hints, sep="\n  ", flush=True)
    try:
        with contextlib.closing(cluster_text.ClusterStatusLoop(ledger, cluster)) as look:
            cluster_text.watch(look.status_while_alive, hints)
        cause = _head_cause(ledger, cluster)
    except KeyboardInterrupt:
        cause = ""
    finally:
        with signals_ignored():
            if not _head_cause(ledger, cluster):
                err.print("ending the cluster")
            now = ledger.read().get(cluster.address, cluster)
            left = local.end(ledger, now, now.nodes, INTERRUPTED)
    for node in left:
        warn(f"a process of {node.name} still exists after SIGKILL")
    if cause and cause != STOPPED:
        raise UnreachableError(
            f"the cluster has ended: {cause}",
            hint="its remaining processes have been ended; `ray stop` ends every Ray of the machine, "
            "`trimtab cluster stop` only this cluster",
        )
    out.print(f"the cluster at {cluster.address} has ended" + (f": {cause}" if cause else "; no process is left"))


def _status_now(ledger: Ledger, cluster: ClusterRecord) -> dict[str, Any]:
    from trimtab.render.text import cluster as cluster_text

    with contextlib.closing(cluster_text.ClusterStatusLoop(ledger, cluster)) as look:
        return look.now()


def _selected(address: str | None) -> tuple[Ledger, ClusterRecord]:
    """The ledger without what has ended, and the cluster that is meant."""
    from trimtab.runtime.localcluster import allocation
    from trimtab.runtime.localcluster.ledger import Ledger

    ledger = Ledger()
    _warn_all(allocation.sweep(ledger))
    return ledger, allocation.select_cluster(ledger, address, os.environ)


def _connected(address: str | None) -> tuple[Ledger, ClusterRecord, RayView]:
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.rayapi.node_view import RayView

    ledger, cluster = _selected(address)
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


def _end_nodes(ledger: Ledger, cluster: ClusterRecord, nodes: Any, cause: str, form: Format) -> None:
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local

    left = local.end(ledger, cluster, nodes, cause)
    if left:
        raise UnreachableError(f"a process of {left[0].name} still exists after SIGKILL", where=left[0].log)
    now = {node.mark: node for node in ledger.read().get(cluster.address, cluster).nodes}
    ended = [now.get(node.mark, node) for node in nodes]
    data = {
        "cluster": cluster.address,
        "ended": [{"name": node.name, "gpus": list(node.gpus), "cause": node.cause or cause} for node in ended],
    }
    answer(data, form, lambda: cluster_text.print_ended(data))


def _head_cause(ledger: Ledger, cluster: ClusterRecord) -> str:
    """Why the head has ended or is ending; empty while it runs."""
    from trimtab.runtime.localcluster.ledger import NodePhase

    head = ledger.read().get(cluster.address, cluster).head
    if head is None:
        return "it was removed from the ledger"
    if head.phase in (NodePhase.ending, NodePhase.ended):
        return head.cause
    return "" if head.alive else "its supervisor was killed"


def _print_started(node: NodeRecord) -> None:
    from trimtab.runtime.procs.gpus import ids_text

    gpu = f" on GPU {ids_text(node.gpus)}" if node.gpus else ""
    err.print(f"{node.name} runs{gpu}: {node.node_id[:12]}")


def _sizes(defaults: NodeSizes, gpus: int | None, cpus: int | None, memory: str | None, store: str | None) -> NodeSizes:
    given = {
        "gpus": gpus,
        "cpus": cpus,
        "memory": _bytes(memory, "--memory"),
        "object_store": _bytes(store, "--object-store"),
    }
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _bytes(text: str | None, option: str) -> int | None:
    """Parses a size: 16GB, 500MB, 4GiB or bytes."""
    if text is None:
        return None
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "b": 1}
    number = text.strip().lower().rstrip("bgikm ")
    unit = text.strip().lower()[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise InputError(f"{text} is not a size", where=f"command line: {option}", hint="such as 16GB, 500MB or 4GiB")
    return size


def _warn_all(notes: list[str]) -> None:
    for note in notes:
        warn(note)
