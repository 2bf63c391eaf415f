"""`trimtab cluster`: a local Ray cluster of one-GPU nodes that starts, grows, drains, shrinks and ends.

Every node is a real `ray start` with its own supervisor. Only what trimtab started is ever ended; GPUs and ports are
given out under a lock, so several may add at once. What the commands need is imported when they run.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.core.errors import InputError, UnreachableError, nearest
from trimtab.render.output import Format, answer, err, out, warn

if TYPE_CHECKING:
    from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodeRecord, NodeSizes
    from trimtab.runtime.localcluster.ray_status import RayView

app = typer.Typer(help="A Ray cluster of one-GPU nodes that come and go.", no_args_is_help=True)

STOPPED = "stopped by `trimtab cluster stop`"
INTERRUPTED = "its command was interrupted"

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address", "-a", help="The cluster, host:port; else RAY_ADDRESS, else the only one of trimtab's here."
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How the answer is written.")]
FakeOption = Annotated[
    int | None,
    typer.Option("--fake-gpus", envvar="TRIMTAB_FAKE_GPUS", help="Pretend that this machine has so many GPUs."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds that starting may take.")]
NodeArgument = Annotated[str, typer.Argument(help="A node's name, its GPU, or the beginning of Ray's id of it.")]


@app.command()
def start(
    workers: Annotated[int, typer.Argument(metavar="[N]", help="Workers besides the head.")] = 0,
    port: Annotated[int, typer.Option(help="Of the head.")] = 6379,
    dashboard_port: Annotated[int, typer.Option(help="Of Ray's dashboard.")] = 8265,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Do without Ray's dashboard.")] = False,
    client_port: Annotated[int | None, typer.Option(help="Of Ray's client server; else 10001 where free.")] = None,
    ports_from: Annotated[int, typer.Option(help="Node and object managers and agents get ports from here up.")] = 6380,
    worker_ports_from: Annotated[int, typer.Option(help="Workers get ports from here up.")] = 10_002,
    fake_gpus: FakeOption = None,
    gpus_per_node: Annotated[int, typer.Option(min=0)] = 1,
    cpus_per_node: Annotated[int, typer.Option(min=0)] = 1,
    memory: Annotated[str | None, typer.Option(help="Of each node, such as 16GB; else its share.")] = None,
    object_store: Annotated[str | None, typer.Option(help="Of each node's object store; else its share.")] = None,
    ip: Annotated[str | None, typer.Option(help="This machine's address, where it has several.")] = None,
    quick_loss: Annotated[
        bool, typer.Option("--quick-loss", help="Have Ray notice a killed node in 2 s instead of 14 s.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it runs.")] = False,
    timeout: TimeoutOption = 120.0,
    form: FormatOption = Format.text,
) -> None:
    """Start a head and N workers, one GPU each; shows them until Ctrl-C, which ends all of it.

    Examples:

        trimtab cluster start

        trimtab cluster start 2 --fake-gpus 4

        trimtab cluster start 7 --detach --port 6400 --dashboard-port 8300
    """
    from trimtab.render.live import cluster as cluster_live
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation as books
    from trimtab.runtime.localcluster import auth, command, gpus
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodeSizes
    from trimtab.runtime.procs import processes
    from trimtab.runtime.rayapi.connect import import_ray

    ledger = Ledger()
    _say(books.sweep(ledger))
    there = gpus.local_gpus(fake_gpus)
    ip = ip or local.own_address()
    sizes = NodeSizes(gpus_per_node, cpus_per_node, _bytes(memory, "--memory"), _bytes(object_store, "--object-store"))
    nodes_here = len(there.ids) // gpus_per_node if gpus_per_node else workers + 1
    cluster = ClusterRecord(
        address=f"{ip}:{port}",
        head_here=True,
        temp_dir=str(ledger.place / str(port)),
        sizes=command.with_shares(sizes, max(nodes_here, workers + 1)),
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
    cluster = books.open_cluster(ledger, cluster, there, workers)
    with cluster_live.signals_interrupt():
        try:
            with err.status("starting the head"):
                _find_ray(import_ray)
                local.start_all(ledger, cluster, wanted, ip, timeout, _tell_started)
        except KeyboardInterrupt:
            err.print("interrupted; what was started has been ended")
            raise typer.Exit(130) from None
        hints = cluster_text.next_steps(cluster, wanted[auth.MODE] == auth.ON)
        if detach:
            _disown(ledger, cluster)
            data = _looked(ledger, cluster)
            answer(data, form, lambda: _print_detached(data, hints))
            return
        _stay(ledger, cluster, hints)


@app.command()
def add(
    address: AddressOption = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="This GPU, not the next free one.")] = None,
    fake_gpus: FakeOption = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="Else as the cluster's other nodes.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=0)] = None,
    memory: Annotated[str | None, typer.Option(help="Such as 16GB.")] = None,
    object_store: Annotated[str | None, typer.Option(help="Such as 4GB.")] = None,
    ports_from: Annotated[int | None, typer.Option(help="Else as the cluster's other nodes.")] = None,
    worker_ports_from: Annotated[int | None, typer.Option(help="Else as the cluster's other nodes.")] = None,
    ip: Annotated[str | None, typer.Option(help="This machine's address, where it has several.")] = None,
    timeout: TimeoutOption = 120.0,
    form: FormatOption = Format.text,
) -> None:
    """Add one node on the next free GPU of this machine; returns when Ray has it. May be run several times at once.

    Examples:

        trimtab cluster add

        trimtab cluster add --gpu 3

        trimtab cluster add --address 10.0.0.1:6379
    """
    from trimtab.render.live import cluster as cluster_live
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation as books
    from trimtab.runtime.localcluster import command, gpus
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.localcluster.ledger import Ledger

    ledger = Ledger()
    _say(books.sweep(ledger))
    cluster = books.select_cluster(ledger, address, os.environ)
    there = gpus.local_gpus(cluster.fake_gpus if cluster.head_here else fake_gpus)
    sizes = _sizes(cluster.sizes, gpus_per_node, cpus_per_node, memory, object_store)
    sizes = command.with_shares(sizes, len(there.ids) // max(1, sizes.gpus))
    if not cluster.head_here:
        cluster = dataclasses.replace(
            cluster,
            fake_gpus=fake_gpus,
            ports_from=ports_from or cluster.ports_from,
            worker_ports_from=worker_ports_from or cluster.worker_ports_from,
        )
        local.auth_of(cluster)  # says at once where nothing answers
    with cluster_live.signals_interrupt():
        cluster, node = books.allocate_node(ledger, cluster, there, sizes, gpu)
        try:
            with err.status(f"starting {node.name}"):
                wanted = local.auth_of(cluster)
                node = local.start_one(ledger, cluster, node, wanted, timeout, ip)
        except BaseException:
            local.end(ledger, cluster, [node], "it did not start")
            raise
    if not node.gpus:
        warn(f"node {node.name} has no GPU: nothing that asks for one will run there")
    data = cluster_text.node_data(cluster, node)
    answer(data, form, lambda: cluster_text.print_added(data))


@app.command()
def drain(
    node: NodeArgument,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds from now, at which the node goes.")] = 30.0,
    cause: Annotated[str, typer.Option(help="Why, for those who ask.")] = "drained by `trimtab cluster drain`",
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node is gone.")] = False,
    address: AddressOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Have a node go: Ray puts nothing new there, everybody can see it, and it ends when empty or at the deadline.

    Examples:

        trimtab cluster drain gpu-2 --deadline 60

        trimtab cluster drain 4f1c09 --deadline 5 --wait
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.rayapi.draining import checked_deadline

    checked_deadline(deadline)
    ledger, cluster, view = _connected(address)
    ours, node_id, name = _meant(cluster, view, node)
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
        raise UnreachableError(f"node {name} is still there after its deadline", where=ours.log)


@app.command()
def remove(
    node: NodeArgument,
    grace: Annotated[float, typer.Option("--grace", help="Seconds that what runs there has to leave.")] = 10.0,
    address: AddressOption = None,
    form: FormatOption = Format.text,
) -> None:
    """End a node of this machine in order: drain it, give it time, end its processes, and its GPU is free.

    Examples:

        trimtab cluster remove gpu-2

        trimtab cluster remove gpu-2 --grace 60
    """
    from trimtab.runtime.localcluster import nodes as local

    if grace < 0:
        raise InputError(f"{grace:g} s cannot be given", where="command line: --grace", hint="0 or more")
    ledger, cluster, view = _connected(address)
    ours, node_id, name = _meant(cluster, view, node)
    if ours is None:
        raise InputError(
            f"node {name} was not started by trimtab on this machine: it is not ended from here",
            hint="`trimtab cluster remove` on its own machine, or `trimtab cluster drain` from anywhere",
        )
    if grace > 0:
        ledger.update(ours.mark, deadline=time.time() + grace)
        view.drain(node_id, grace, "removed by `trimtab cluster remove`")
        local.wait_ended(ledger, ours, grace)
    _ended(ledger, cluster, [ours], "removed by `trimtab cluster remove`", form)


@app.command()
def status(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """Nodes, GPUs by index, who holds what, and what has ended and why.

    Examples:

        trimtab cluster status

        trimtab cluster status --format json
    """
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import allocation as books
    from trimtab.runtime.localcluster.ledger import Ledger

    ledger = Ledger()
    _say(books.sweep(ledger))
    cluster = books.select_cluster(ledger, address, os.environ)
    if cluster.head_here and not cluster.live_nodes:
        raise UnreachableError(f"no cluster runs at {cluster.address}; {books.end_note(cluster)}", hint=books.START_ONE)
    data = _looked(ledger, cluster)
    answer(data, form, lambda: cluster_text.print_status(data))


@app.command()
def stop(address: AddressOption = None, form: FormatOption = Format.text) -> None:
    """End the nodes that trimtab started on this machine, and nothing else: never `ray stop`.

    Example:

        trimtab cluster stop
    """
    from trimtab.runtime.localcluster import allocation as books
    from trimtab.runtime.localcluster.ledger import Ledger

    ledger = Ledger()
    _say(books.sweep(ledger))
    cluster = books.select_cluster(ledger, address, os.environ)
    if not cluster.live_nodes:
        raise UnreachableError(f"trimtab has no node of the cluster at {cluster.address} here", hint=books.START_ONE)
    _ended(ledger, cluster, cluster.live_nodes, STOPPED, form)


# ---- the parts of commands ----------------------------------------------------------------------------------------


def _stay(ledger: Ledger, cluster: ClusterRecord, hints: list[str]) -> None:
    """Show the cluster until it ends or is interrupted, and clean up in either case."""
    from trimtab.render.live import cluster as cluster_live
    from trimtab.runtime.localcluster import nodes as local

    if not out.is_terminal:
        print(f"Ray cluster at {cluster.address}; in another terminal:", *hints, sep="\n  ", flush=True)
    try:
        with cluster_live.ClusterStatusLoop(ledger, cluster) as look:
            cluster_live.watch(look.status_while_alive, hints)
        cause = _head_cause(ledger, cluster)
    except KeyboardInterrupt:
        cause = ""
    finally:
        with cluster_live.ignore_signals():
            if not _head_cause(ledger, cluster):
                err.print("ending the cluster")
            now = ledger.read().get(cluster.address, cluster)
            left = local.end(ledger, now, now.nodes, INTERRUPTED)
    for node in left:
        warn(f"some process of {node.name} is still there after it was killed")
    if cause and cause != STOPPED:
        raise UnreachableError(
            f"the cluster has ended: {cause}",
            hint="what was left of it has been ended; `ray stop` ends every Ray of the machine, "
            "`trimtab cluster stop` only this one",
        )
    out.print(f"the cluster at {cluster.address} has ended" + (f": {cause}" if cause else "; nothing is left of it"))


def _looked(ledger: Ledger, cluster: ClusterRecord) -> dict[str, Any]:
    """The status of a cluster as it is now."""
    from trimtab.render.live import cluster as cluster_live

    with cluster_live.ClusterStatusLoop(ledger, cluster) as look:
        return look.now()


def _connected(address: str | None) -> tuple[Ledger, ClusterRecord, RayView]:
    from trimtab.runtime.localcluster import allocation as books
    from trimtab.runtime.localcluster import nodes as local
    from trimtab.runtime.localcluster.ledger import Ledger
    from trimtab.runtime.localcluster.ray_status import RayView

    ledger = Ledger()
    _say(books.sweep(ledger))
    cluster = books.select_cluster(ledger, address, os.environ)
    local.auth_of(cluster)
    return ledger, cluster, RayView(cluster.address)


def _meant(cluster: ClusterRecord, view: RayView, word: str) -> tuple[NodeRecord | None, str, str]:
    """The node that a word stands for: ours or any other, its id and name; never the head."""
    from trimtab.runtime.localcluster import allocation as books
    from trimtab.runtime.rayapi.draining import HeadNodeError, UnknownNodeError

    ours = books.node_of(cluster, word)
    if ours is not None and ours.head:
        raise HeadNodeError(
            "the head cannot go: without it there is no cluster", hint="`trimtab cluster stop` ends the whole cluster"
        )
    if ours is not None and ours.node_id:
        return ours, ours.node_id, ours.name
    try:
        node_id = view.found(word)
    except UnknownNodeError as unknown:
        names = [one.name for one in view.nodes() if not one.head]
        near = nearest(word, names)
        unknown.hint = f"did you mean {near}?" if near else f"nodes: {', '.join(names) or 'none but the head'}"
        raise
    return next((one for one in cluster.live_nodes if one.node_id == node_id), None), node_id, word


def _ended(ledger: Ledger, cluster: ClusterRecord, nodes: Any, cause: str, form: Format) -> None:
    from trimtab.render.text import cluster as cluster_text
    from trimtab.runtime.localcluster import nodes as local

    left = local.end(ledger, cluster, nodes, cause)
    if left:
        raise UnreachableError(f"some process of {left[0].name} is still there after it was killed", where=left[0].log)
    now = {one.mark: one for one in ledger.read().get(cluster.address, cluster).nodes}
    ended = [now.get(one.mark, one) for one in nodes]
    data = {
        "cluster": cluster.address,
        "ended": [{"name": one.name, "gpus": list(one.gpus), "cause": one.cause or cause} for one in ended],
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


def _disown(ledger: Ledger, cluster: ClusterRecord) -> None:
    """The cluster lives on without this command."""
    with ledger.change() as books:
        books.clusters[cluster.address] = dataclasses.replace(books.clusters[cluster.address], owner=None)


def _print_detached(data: dict[str, Any], hints: list[str]) -> None:
    from trimtab.render.text import cluster as cluster_text

    out.print(cluster_text.picture(data, [*hints, "trimtab cluster stop                       # ends it"]))


def _tell_started(node: NodeRecord) -> None:
    from trimtab.runtime.localcluster.gpus import ids_text

    gpu = f" on GPU {ids_text(node.gpus)}" if node.gpus else ""
    err.print(f"{node.name} runs{gpu}: {node.node_id[:12]}")


def _sizes(theirs: NodeSizes, gpus: int | None, cpus: int | None, memory: str | None, store: str | None) -> NodeSizes:
    said = {
        "gpus": gpus,
        "cpus": cpus,
        "memory": _bytes(memory, "--memory"),
        "object_store": _bytes(store, "--object-store"),
    }
    return dataclasses.replace(theirs, **{name: value for name, value in said.items() if value is not None})


def _bytes(text: str | None, option: str) -> int | None:
    """A size as people write it: 16GB, 500MB, 4GiB or bytes."""
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
        raise InputError(f"{text} is no size", where=f"command line: {option}", hint="such as 16GB, 500MB or 4GiB")
    return size


def _find_ray(import_ray: Any) -> None:
    """Say early where Ray is missing, without the second that importing it takes."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        import_ray()


def _say(notes: list[str]) -> None:
    for note in notes:
        warn(note)
