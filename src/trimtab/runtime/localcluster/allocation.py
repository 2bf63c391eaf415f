"""What may be written into the ledger: a cluster with its first nodes, one more node, and what is left of dead ones.

Whoever asks for a node is given GPUs and ports here, under the ledger's lock, or told why not. Nothing is started or
ended here, except that what is left of a node whose keeper was killed is ended before its GPU is given away.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import time
import uuid
from collections.abc import Mapping

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.runtime.localcluster.gpus import LocalGpus, in_short
from trimtab.runtime.localcluster.ledger import (
    ClusterRecord,
    Ledger,
    LedgerState,
    NodePhase,
    NodeRecord,
    NodeSizes,
    forget_old,
    left_over,
)
from trimtab.runtime.procs import ports
from trimtab.runtime.procs.processes import kill_family, this

HEAD = "head"
START_ONE = "`trimtab cluster start` starts one; --address HOST:PORT names one that runs elsewhere"


def open_cluster(ledger: Ledger, cluster: ClusterRecord, gpus: LocalGpus, workers: int) -> ClusterRecord:
    """Write down a new cluster with its head and workers: all of them, or an error and nothing."""
    if workers < 0:
        raise InputError(f"{workers} workers cannot be started", where="command line: N", hint="0 or more")
    with ledger.change() as books:
        there = books.clusters.get(cluster.address)
        if there is not None and there.standing:
            raise InputError(
                f"a cluster of trimtab runs at {cluster.address} already, with {_of(len(there.standing), 'node')}",
                hint="`trimtab cluster add` adds a node, `trimtab cluster stop` ends it, --port starts another",
            )
        _enough(books, cluster, gpus, workers)
        ports.require_free(cluster.port, "the head", "--port")
        if cluster.dashboard_port is not None:
            ports.require_free(cluster.dashboard_port, "the dashboard", "--dashboard-port")
        books.clusters[cluster.address] = cluster
        for number in range(workers + 1):
            books.clusters[cluster.address] = _with_node(
                ledger, books, books.clusters[cluster.address], gpus, head=number == 0
            )[0]
        opened = books.clusters[cluster.address]
        head = opened.head
        assert head is not None
        opened = dataclasses.replace(opened, client_port=_client_port(cluster.client_port, head))
        books.clusters[cluster.address] = opened
    return opened


def another_node(
    ledger: Ledger, cluster: ClusterRecord, gpus: LocalGpus, sizes: NodeSizes | None = None, gpu: str | None = None
) -> tuple[ClusterRecord, NodeRecord]:
    """Write down one more node, on the next free GPU or on the one asked for."""
    with ledger.change() as books:
        known = books.clusters.get(cluster.address, cluster)
        if known.head_here and not known.standing:
            raise UnreachableError(f"the cluster at {cluster.address} has ended", hint=START_ONE)
        known, node = _with_node(ledger, books, known, gpus, head=False, sizes=sizes, gpu=gpu)
    return known, node


def sweep(ledger: Ledger) -> list[str]:
    """Put the ledger right: end what is left of dead nodes, forget old ones; what was found, for people."""
    notes = []
    for cluster in ledger.read().values():
        dead = [one for one in cluster.nodes if not one.stands and one.phase is not NodePhase.ended]
        for node in dead:
            left = left_over(node)
            kill_family(node.keeper, node.mark)
            ended = f", {_of(len(left), 'process', 'processes')} of it ended" if left else ""
            ledger.update(node.mark, phase=NodePhase.ended, since=time.time(), cause="its keeper was killed")
            notes.append(f"node {node.name} of {cluster.address} had no keeper any more{ended}: its GPU is free again")
        if dead and len(dead) == len(cluster.nodes):
            notes = [f"the cluster at {cluster.address} is one of an earlier run: nothing of it is there; cleaned up"]
    now = time.time()
    with ledger.change() as books:
        for address, cluster in list(books.clusters.items()):
            kept = tuple(one for one in cluster.nodes if not forget_old(one, now))
            if kept:
                books.clusters[address] = dataclasses.replace(cluster, nodes=kept)
            else:
                del books.clusters[address]
    return notes


def chosen(ledger: Ledger, address: str | None, outside: Mapping[str, str]) -> ClusterRecord:
    """The cluster that is meant: by address, by RAY_ADDRESS, or the only one that runs here."""
    clusters = ledger.read()
    named = address or outside.get("RAY_ADDRESS", "")
    if named and named not in ("auto", "local"):
        known = [one for one in clusters.values() if same(named, one)]
        if known:
            return known[0]
        plain = _plain(named)
        where = ledger.place / f"j{plain.rpartition(':')[2]}"
        return ClusterRecord(plain, head_here=False, temp_dir=str(where), sizes=NodeSizes(), started=time.time())
    running = [one for one in clusters.values() if one.standing]
    if len(running) == 1:
        return running[0]
    if running:
        several = ", ".join(sorted(one.address for one in running))
        raise InputError(f"several clusters run here: {several}", hint="--address or RAY_ADDRESS says which is meant")
    last = max(clusters.values(), key=lambda one: one.started, default=None)
    raise UnreachableError(
        "no Ray cluster found: none of trimtab's runs on this machine" + (f"; {how_it_ended(last)}" if last else ""),
        hint=START_ONE,
    )


def same(address: str, cluster: ClusterRecord) -> bool:
    """Whether an address is that of a cluster in the books."""
    host, _, port = _plain(address).rpartition(":")
    theirs = cluster.address.rpartition(":")[0]
    if not port.isdecimal() or int(port) != cluster.port:
        return False
    if host == theirs:
        return True
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return False
    return theirs in found or (cluster.head_here and any(ipaddress.ip_address(one).is_loopback for one in found))


def node_of(cluster: ClusterRecord, word: str) -> NodeRecord | None:
    """The standing node that a name, a GPU (`gpu 2`, `2`) or the beginning of Ray's id stands for."""
    wanted = word.strip().lower()
    for node in cluster.standing:
        if wanted == node.name or (len(wanted) >= 4 and node.node_id.startswith(wanted)):
            return node
    gpu = wanted.removeprefix("gpu").strip(" :-")
    return next((node for node in cluster.standing if gpu and gpu in node.gpus), None)


def how_it_ended(cluster: ClusterRecord) -> str:
    """For people: when and why a cluster ended that is not there any more."""
    head = cluster.head
    if head is None or head.phase is not NodePhase.ended:
        return ""
    return f"the one at {cluster.address} ended {max(0, time.time() - head.since):.0f} s ago: {head.cause}"


def _with_node(
    ledger: Ledger,
    books: LedgerState,
    cluster: ClusterRecord,
    gpus: LocalGpus,
    *,
    head: bool,
    sizes: NodeSizes | None = None,
    gpu: str | None = None,
) -> tuple[ClusterRecord, NodeRecord]:
    sizes = sizes or cluster.sizes
    mine = _gpus_for(books, cluster, gpus, sizes.gpus, gpu)
    given, avoid = books.ports_given(), {cluster.port, cluster.dashboard_port or 0, cluster.client_port or 0}
    slots = {node.slot for node in cluster.holding}
    slot, block = ports.free_block(cluster.ports_from, cluster.worker_ports_from, slots, given | avoid)
    name = HEAD if head else _name(cluster, mine, slot)
    node = NodeRecord(
        name=name,
        mark=uuid.uuid4().hex,
        head=head,
        gpus=mine,
        fake=gpus.fake,
        slot=slot,
        ports=block,
        adder=this(),
        log=str(ledger.place / f"{cluster.port}-{name}.log"),
        sizes=sizes,
        since=time.time(),
    )
    return books.put(cluster, node), node


def _gpus_for(
    books: LedgerState, cluster: ClusterRecord, gpus: LocalGpus, count: int, asked: str | None
) -> tuple[str, ...]:
    given = books.gpus_given(fake=gpus.fake, address=cluster.address)
    free = [one for one in gpus.ids if one not in given]
    if asked is not None:
        if asked not in gpus.ids:
            raise InputError(
                f"GPU {asked} is not there: this machine has {gpus.named()}",
                where="command line: --gpu",
                hint=f"free: {in_short(tuple(free)) or 'none'}",
            )
        if asked in given:
            raise InfeasibleError(f"GPU {asked} is taken: {_who({asked: given[asked]})}", hint=_free_one(free))
        free = [asked, *(one for one in free if one != asked)]
    if count == 0:
        return ()
    if len(free) < count:
        what = "no GPU is left" if not free else f"a node takes {count} GPUs, and only {len(free)} are left"
        raise InfeasibleError(
            f"{what}: this machine has {gpus.named()}; {_who(given) or 'none of them is given to a node'}",
            hint="`trimtab cluster remove NODE` frees one; --address adds a node on another machine to this cluster"
            if gpus.ids
            else "--fake-gpus N does without; --gpus-per-node 0 makes nodes without GPUs",
        )
    return tuple(free[:count])


def _enough(books: LedgerState, cluster: ClusterRecord, gpus: LocalGpus, workers: int) -> None:
    """Before anything is written: whether there are GPUs for all."""
    needed = (workers + 1) * cluster.sizes.gpus
    given = books.gpus_given(fake=gpus.fake, address=cluster.address)
    free = [one for one in gpus.ids if one not in given]
    if needed <= len(free):
        return
    others = f", of which {_who(given)}" if given else ""
    most = len(free) // max(1, cluster.sizes.gpus) - 1
    if not gpus.ids:
        hint = "--fake-gpus N does without; --gpus-per-node 0 makes nodes without GPUs"
    elif most >= 0:
        hint = f"`trimtab cluster start {most}` is the most there is room for"
    else:
        hint = "end the other cluster first, or see `nvidia-smi -L`"
    missing = gpus.ids and len(gpus.ids) <= needed - 1 and gpus.ids[-1].isdecimal()
    first = f"GPU {int(gpus.ids[-1]) + 1} is not available: " if missing and not given else ""
    raise InfeasibleError(
        f"{first}the head and {_of(workers, 'worker')} need {_of(needed, 'GPU')}, and this machine has "
        f"{gpus.named()}{others}",
        hint=hint,
    )


def _client_port(asked: int | None, head: NodeRecord) -> int:
    if asked is not None:
        ports.require_free(asked, "Ray's client server", "--client-port")
        return asked
    usual = 10_001
    return usual if ports.is_free(usual) else head.ports.spare


def _name(cluster: ClusterRecord, gpus: tuple[str, ...], slot: int) -> str:
    wanted = f"gpu-{gpus[0][:12].lower()}" if gpus else f"cpu-{slot}"
    taken = {node.name for node in cluster.holding}
    return wanted if wanted not in taken else f"{wanted}-{slot}"


def _who(given: Mapping[str, NodeRecord]) -> str:
    """`GPU 0 has head, GPU 1 has gpu-1 (starting)`."""
    words = {NodePhase.starting: " (starting)", NodePhase.ending: " (ending)"}
    return ", ".join(f"GPU {gpu} is {node.name}'s{words.get(node.phase, '')}" for gpu, node in sorted(given.items()))


def _free_one(free: list[str]) -> str:
    return f"free: {in_short(tuple(free))}" if free else "`trimtab cluster remove NODE` frees one"


def _plain(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host or "//" in host:
        where = "command line: --address, or RAY_ADDRESS"
        raise InputError(f"{address} is no address of a head", where=where, hint="host:6379, without ray://")
    return f"{host}:{port}"


def _of(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
