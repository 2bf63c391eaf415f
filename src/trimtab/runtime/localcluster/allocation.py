"""Allocates nodes in the ledger: a cluster with its first nodes, one more node, and the cleanup of dead ones.

GPUs and ports are allocated here, under the ledger's lock, or refused with a reason. Nothing is started or ended here,
except that leftover processes of a node whose supervisor was killed are ended before its GPU is free again.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import time
import uuid
from collections.abc import Mapping

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.runtime.localcluster.ledger import (
    ClusterRecord,
    Ledger,
    LedgerState,
    NodePhase,
    NodeRecord,
    NodeSizes,
    is_expired,
    leftover_processes,
)
from trimtab.runtime.procs import ports
from trimtab.runtime.procs.gpus import LocalGpus, ids_text
from trimtab.runtime.procs.processes import kill_family, this

HEAD = "head"
START_ONE = "`trimtab cluster start` starts one; --address HOST:PORT names one that runs elsewhere"


def open_cluster(ledger: Ledger, cluster: ClusterRecord, gpus: LocalGpus, workers: int) -> ClusterRecord:
    """Record a new cluster with its head and workers: all of them, or an error and nothing."""
    if workers < 0:
        raise InputError(f"{workers} workers cannot be started", where="command line: N", hint="0 or more")
    with ledger.change() as state:
        known = state.clusters.get(cluster.address)
        if known is not None and known.live_nodes:
            raise InputError(
                f"a cluster of trimtab runs at {cluster.address} already, with {_count(len(known.live_nodes), 'node')}",
                hint="`trimtab node add` adds a node, `trimtab cluster stop` ends it, --port starts another",
            )
        _check_gpus(state, cluster, gpus, workers)
        ports.require_free(cluster.port, "the head", "--port")
        if cluster.dashboard_port is not None:
            ports.require_free(cluster.dashboard_port, "the dashboard", "--dashboard-port")
        state.clusters[cluster.address] = cluster
        for number in range(workers + 1):
            state.clusters[cluster.address] = _with_node(
                ledger, state, state.clusters[cluster.address], gpus, head=number == 0
            )[0]
        opened = state.clusters[cluster.address]
        head = opened.head
        assert head is not None
        opened = dataclasses.replace(opened, client_port=_client_port(cluster.client_port, head))
        state.clusters[cluster.address] = opened
    return opened


def allocate_node(
    ledger: Ledger, cluster: ClusterRecord, gpus: LocalGpus, sizes: NodeSizes | None = None, gpu: str | None = None
) -> tuple[ClusterRecord, NodeRecord]:
    """Record one more node, on the next free GPU or on the requested one."""
    with ledger.change() as state:
        known = state.clusters.get(cluster.address, cluster)
        if known.head_here and not known.live_nodes:
            raise UnreachableError(f"the cluster at {cluster.address} has ended", hint=START_ONE)
        known, node = _with_node(ledger, state, known, gpus, head=False, sizes=sizes, gpu=gpu)
    return known, node


def sweep(ledger: Ledger) -> list[str]:
    """Clean up the ledger: end leftovers of dead nodes, forget old ones; returns notes for the user."""
    notes = []
    for cluster in ledger.read().values():
        dead = [node for node in cluster.nodes if not node.alive and node.phase is not NodePhase.ended]
        for node in dead:
            left = leftover_processes(node)
            kill_family(node.supervisor, node.mark)
            ended = f", {_count(len(left), 'process', 'processes')} of it ended" if left else ""
            ledger.update(node.mark, phase=NodePhase.ended, since=time.time(), cause="its supervisor was killed")
            notes.append(f"node {node.name} of {cluster.address} had lost its supervisor{ended}: its GPU is free again")
        if dead and len(dead) == len(cluster.nodes):
            notes = [f"the cluster at {cluster.address} is left over from an earlier run: cleaned up"]
    now = time.time()
    with ledger.change() as state:
        for address, cluster in list(state.clusters.items()):
            kept = tuple(node for node in cluster.nodes if not is_expired(node, now))
            if kept:
                state.clusters[address] = dataclasses.replace(cluster, nodes=kept)
            else:
                del state.clusters[address]
    return notes


def select_cluster(ledger: Ledger, address: str | None, env: Mapping[str, str]) -> ClusterRecord:
    """The cluster by address, by RAY_ADDRESS, or the only one that runs here."""
    clusters = ledger.read()
    named = address or env.get("RAY_ADDRESS", "")
    if named and named not in ("auto", "local"):
        known = [cluster for cluster in clusters.values() if same(named, cluster)]
        if known:
            return known[0]
        plain = _plain_address(named)
        where = ledger.place / f"j{plain.rpartition(':')[2]}"
        return ClusterRecord(plain, head_here=False, temp_dir=str(where), sizes=NodeSizes(), started=time.time())
    running = [cluster for cluster in clusters.values() if cluster.live_nodes]
    if len(running) == 1:
        return running[0]
    if running:
        several = ", ".join(sorted(cluster.address for cluster in running))
        raise InputError(f"several clusters run here: {several}", hint="--address or RAY_ADDRESS says which is meant")
    last = max(clusters.values(), key=lambda cluster: cluster.started, default=None)
    raise UnreachableError(
        "no Ray cluster found: none of trimtab's runs on this machine" + (f"; {end_note(last)}" if last else ""),
        hint=START_ONE,
    )


def same(address: str, cluster: ClusterRecord) -> bool:
    """Whether an address is that of a cluster in the ledger."""
    host, _, port = _plain_address(address).rpartition(":")
    theirs = cluster.address.rpartition(":")[0]
    if not port.isdecimal() or int(port) != cluster.port:
        return False
    if host == theirs:
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return False
    return theirs in found or (cluster.head_here and any(ipaddress.ip_address(ip).is_loopback for ip in found))


def node_of(cluster: ClusterRecord, word: str) -> NodeRecord | None:
    """The live node that a name, a GPU (`gpu 2`, `2`) or a prefix of Ray's id names."""
    wanted = word.strip().lower()
    for node in cluster.live_nodes:
        if wanted == node.name or (len(wanted) >= 4 and node.node_id.startswith(wanted)):
            return node
    gpu = wanted.removeprefix("gpu").strip(" :-")
    return next((node for node in cluster.live_nodes if gpu and gpu in node.gpus), None)


def end_note(cluster: ClusterRecord) -> str:
    """When and why a cluster ended."""
    head = cluster.head
    if head is None or head.phase is not NodePhase.ended:
        return ""
    return f"the one at {cluster.address} ended {max(0, time.time() - head.since):.0f} s ago: {head.cause}"


def _with_node(
    ledger: Ledger,
    state: LedgerState,
    cluster: ClusterRecord,
    gpus: LocalGpus,
    *,
    head: bool,
    sizes: NodeSizes | None = None,
    gpu: str | None = None,
) -> tuple[ClusterRecord, NodeRecord]:
    sizes = sizes or cluster.sizes
    mine = _gpus_for(state, cluster, gpus, sizes.gpus, gpu)
    given, avoid = state.ports_given(), {cluster.port, cluster.dashboard_port or 0, cluster.client_port or 0}
    slots = {node.slot for node in cluster.allocated_nodes}
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
    return state.put(cluster, node), node


def _gpus_for(
    state: LedgerState, cluster: ClusterRecord, gpus: LocalGpus, count: int, requested: str | None
) -> tuple[str, ...]:
    given = state.gpus_given(fake=gpus.fake, address=cluster.address)
    free = [gpu for gpu in gpus.ids if gpu not in given]
    if requested is not None:
        if requested not in gpus.ids:
            raise InputError(
                f"GPU {requested} is not there: this machine has {gpus.named()}",
                where="command line: --gpu",
                hint=f"free: {ids_text(tuple(free)) or 'none'}",
            )
        if requested in given:
            raise InfeasibleError(
                f"GPU {requested} is taken: {_holders_text({requested: given[requested]})}",
                hint=f"free: {ids_text(tuple(free))}" if free else "`trimtab node remove NODE` frees one",
            )
        free = [requested, *(gpu for gpu in free if gpu != requested)]
    if count == 0:
        return ()
    if len(free) < count:
        what = "no GPU is left" if not free else f"a node takes {count} GPUs, and only {len(free)} are left"
        raise InfeasibleError(
            f"{what}: this machine has {gpus.named()}; {_holders_text(given) or 'none of them is given to a node'}",
            hint="`trimtab node remove NODE` frees one; --address adds a node on another machine to this cluster"
            if gpus.ids
            else "--fake-gpus N does without; --gpus-per-node 0 makes nodes without GPUs",
        )
    return tuple(free[:count])


def _check_gpus(state: LedgerState, cluster: ClusterRecord, gpus: LocalGpus, workers: int) -> None:
    """Whether there are GPUs for all nodes, before anything is written."""
    needed = (workers + 1) * cluster.sizes.gpus
    given = state.gpus_given(fake=gpus.fake, address=cluster.address)
    free = [gpu for gpu in gpus.ids if gpu not in given]
    if needed <= len(free):
        return
    others = f", of which {_holders_text(given)}" if given else ""
    max_workers = len(free) // max(1, cluster.sizes.gpus) - 1
    if not gpus.ids:
        hint = "--fake-gpus N does without; --gpus-per-node 0 makes nodes without GPUs"
    elif max_workers >= 0:
        hint = f"`trimtab cluster start {max_workers}` is the largest that fits"
    else:
        hint = "end the other cluster first, or see `nvidia-smi -L`"
    missing = gpus.ids and len(gpus.ids) <= needed - 1 and gpus.ids[-1].isdecimal()
    first = f"GPU {int(gpus.ids[-1]) + 1} is not available: " if missing and not given else ""
    raise InfeasibleError(
        f"{first}the head and {_count(workers, 'worker')} need {_count(needed, 'GPU')}, and this machine has "
        f"{gpus.named()}{others}",
        hint=hint,
    )


def _client_port(requested: int | None, head: NodeRecord) -> int:
    if requested is not None:
        ports.require_free(requested, "Ray's client server", "--client-port")
        return requested
    usual = 10_001
    return usual if ports.is_free(usual) else head.ports.spare


def _name(cluster: ClusterRecord, gpus: tuple[str, ...], slot: int) -> str:
    wanted = f"gpu-{gpus[0][:12].lower()}" if gpus else f"cpu-{slot}"
    taken = {node.name for node in cluster.allocated_nodes}
    return wanted if wanted not in taken else f"{wanted}-{slot}"


def _holders_text(given: Mapping[str, NodeRecord]) -> str:
    """`GPU 0 is head's, GPU 1 is gpu-1's (starting)`."""
    words = {NodePhase.starting: " (starting)", NodePhase.ending: " (ending)"}
    return ", ".join(f"GPU {gpu} is {node.name}'s{words.get(node.phase, '')}" for gpu, node in sorted(given.items()))


def _plain_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host or "//" in host:
        where = "command line: --address, or RAY_ADDRESS"
        raise InputError(f"{address} is no address of a head", where=where, hint="host:6379, without ray://")
    return f"{host}:{port}"


def _count(count: int, singular: str, many: str | None = None) -> str:
    return f"{count} {singular if count == 1 else many or singular + 's'}"
