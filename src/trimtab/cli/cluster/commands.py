"""`trimtab cluster`: starts, shows and stops a local Ray cluster of one-GPU nodes.

Every node is a real `ray start` with its own supervisor process. Only processes started by trimtab are ever stopped.
Heavy imports happen inside the functions.
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

from trimtab.cli.cluster import export as outside
from trimtab.cli.options import AddressOption, FormatOption
from trimtab.core.errors import InputError, UnreachableError
from trimtab.render.output import Format, answer, err, out, warn

if TYPE_CHECKING:
    from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodeRecord

app = typer.Typer(help="Ray clusters on this machine; exports for KubeRay and Slurm.", no_args_is_help=True)
app.command("hook")(outside.hook)
app.add_typer(outside.export, name="export")

STOPPED = "stopped by `trimtab cluster stop`"
INTERRUPTED = "its command was interrupted"

FakeOption = Annotated[
    int | None, Option("--fake-gpus", envvar="TRIMTAB_FAKE_GPUS", help="Number of fake GPUs of this machine.")
]
TimeoutOption = Annotated[float, Option("--timeout", help="Start timeout in seconds.")]


@app.command()
def start(
    workers: Annotated[int, Argument(metavar="[N]", help="Worker nodes besides the head.")] = 0,
    port: Annotated[int, Option(help="Port of the head.")] = 6379,
    dashboard_port: Annotated[int, Option(min=0, max=65_535, help="Port of Ray's dashboard; 0: none.")] = 8265,
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
    sizes = NodeSizes(
        gpus_per_node, cpus_per_node, bytes_of(memory, "--memory"), bytes_of(object_store, "--object-store")
    )
    nodes_here = len(there.ids) // gpus_per_node if gpus_per_node else workers + 1
    cluster = ClusterRecord(
        address=f"{ip}:{port}",
        head_here=True,
        temp_dir=str(ledger.place / str(port)),
        sizes=node_supervisor.with_shares(sizes, max(nodes_here, workers + 1)),
        fake_gpus=fake_gpus,
        ports_from=ports_from,
        worker_ports_from=worker_ports_from,
        dashboard_port=dashboard_port or None,
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
            data = status_now(ledger, cluster)
            answer(data, form, lambda: out.print(cluster_text.picture(data, hints)))
            return
        _show_until_end(ledger, cluster, hints)


@app.command("list")
def list_clusters(form: FormatOption = Format.text) -> None:
    """List the clusters that trimtab has started on this machine, or that nodes of this machine have joined.

    Example:

        trimtab cluster list
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation
    from trimtab.runtime.localcluster.ledger import Ledger

    ledger = Ledger()
    _warn_all(allocation.sweep(ledger))
    data = {"clusters": [cluster_text.cluster_data(cluster) for cluster in ledger.read().values()]}
    answer(data, form, lambda: cluster_text.print_clusters(data["clusters"]))


@app.command()
def show(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """Show nodes, GPUs by index, their users, and which nodes ended and why.

    Examples:

        trimtab cluster show
        trimtab cluster show --format json
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation

    ledger, cluster = selected(address)
    if cluster.head_here and not cluster.live_nodes:
        raise UnreachableError(
            f"no cluster runs at {cluster.address}; {allocation.end_note(cluster)}", hint=allocation.START_ONE
        )
    data = status_now(ledger, cluster)
    answer(data, form, lambda: cluster_text.print_status(data))


@app.command()
def env(address: AddressOption = None) -> None:
    """Print the line for a shell that is to use the cluster: `export RAY_ADDRESS=...`.

    Example:

        eval "$(trimtab cluster env)" && ray status
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.rayapi import auth

    _, cluster = selected(address)
    print(cluster_text.env_line(cluster, local.auth_of(cluster).get(auth.MODE) == auth.ON))


@app.command()
def stop(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """Stop the nodes that trimtab started on this machine, and nothing else: never `ray stop`.

    Example:

        trimtab cluster stop
    """
    from trimtab.runtime.localcluster import allocation

    ledger, cluster = selected(address)
    if not cluster.live_nodes:
        raise UnreachableError(
            f"no node of the cluster at {cluster.address} was started by trimtab here", hint=allocation.START_ONE
        )
    end_nodes(ledger, cluster, cluster.live_nodes, STOPPED, form)


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


def status_now(ledger: Ledger, cluster: ClusterRecord) -> dict[str, Any]:
    from trimtab.render.text import cluster as cluster_text

    with contextlib.closing(cluster_text.ClusterStatusLoop(ledger, cluster)) as look:
        return look.now()


def selected(address: str | None) -> tuple[Ledger, ClusterRecord]:
    """The ledger without what has ended, and the cluster that is meant."""
    from trimtab.runtime.localcluster import allocation
    from trimtab.runtime.localcluster.ledger import Ledger

    ledger = Ledger()
    _warn_all(allocation.sweep(ledger))
    return ledger, allocation.select_cluster(ledger, address, os.environ)


def end_nodes(ledger: Ledger, cluster: ClusterRecord, nodes: Any, cause: str, form: Format) -> None:
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


def bytes_of(text: str | None, option: str) -> int | None:
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
