"""Starts and ends nodes of this machine: a supervisor for each, every wait with a deadline.

A node counts as started when Ray lists it alive. What did not come up, or was interrupted, is ended before the caller
is told. No other processes are touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from trimtab.core.errors import UnreachableError
from trimtab.runtime.localcluster.ledger import ClusterRecord, Ledger, NodePhase, NodeRecord
from trimtab.runtime.localcluster.node_supervisor import GRACE_S, IP, environment, start_error, temp_dir
from trimtab.runtime.procs.processes import ProcessIdentity, gone, kill_family, send
from trimtab.runtime.rayapi import auth
from trimtab.runtime.rayapi.connect import listens
from trimtab.runtime.rayapi.node_view import RayViewProcess
from trimtab.runtime.rayapi.nodes import RayNode

START_S = 120.0
END_S = GRACE_S + 15.0
POLL_S = 0.1

NodeListener = Callable[[NodeRecord], None]


def own_address() -> str:
    """The address by which others reach this machine; loopback without a network."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect(("8.8.8.8", 53))  # sends nothing: the kernel only chooses a route
            return str(trial.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def launch(ledger: Ledger, cluster: ClusterRecord, node: NodeRecord, wanted: Mapping[str, str], ip: str | None) -> None:
    """Start the supervisor of a node that is in the ledger."""
    shutil.rmtree(temp_dir(cluster, node), ignore_errors=True)  # sessions of earlier runs
    around = environment(cluster, node, wanted, os.environ) | ({IP: ip} if ip else {})
    with open(node.log, "wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "trimtab.runtime.localcluster.node_supervisor", str(ledger.place), node.mark],
            env=around,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def start_all(
    ledger: Ledger,
    cluster: ClusterRecord,
    wanted: Mapping[str, str],
    ip: str,
    timeout_s: float,
    on_started: NodeListener,
) -> None:
    """Start the head and then its workers, several at a time; all or none."""
    head, *workers = cluster.nodes
    deadline = time.monotonic() + timeout_s
    try:
        auth.adopt(wanted)
        launch(ledger, cluster, head, wanted, ip)
        _listening(ledger, cluster, head, deadline)
        settle(ledger, cluster, [head], deadline, on_started)
        for node in workers:  # start permits limit how many start at once
            launch(ledger, cluster, node, wanted, None)
        if workers:
            settle(ledger, cluster, workers, deadline, on_started)
    except BaseException:
        end(ledger, cluster, cluster.nodes, "it did not start")
        raise


def start_one(
    ledger: Ledger,
    cluster: ClusterRecord,
    node: NodeRecord,
    wanted: Mapping[str, str],
    timeout_s: float,
    ip: str | None,
) -> NodeRecord:
    """Start one more node; returns when Ray has it."""
    try:
        launch(ledger, cluster, node, wanted, ip)
        return settle(ledger, cluster, [node], time.monotonic() + timeout_s, lambda _: None)[0]
    except BaseException:
        end(ledger, cluster, [node], "it did not start")
        raise


def settle(
    ledger: Ledger, cluster: ClusterRecord, nodes: Sequence[NodeRecord], deadline: float, on_started: NodeListener
) -> list[NodeRecord]:
    """Wait until Ray lists all of them alive; UnreachableError if one ends or the time is up."""
    waiting = {node.mark: node for node in nodes}
    settled = []
    with contextlib.ExitStack() as views:
        watch = views.enter_context(contextlib.closing(RayViewProcess(cluster.address)))
        while waiting:
            if not watch.is_alive:  # Ray ends a process whose cluster was silent for long
                watch = views.enter_context(contextlib.closing(RayViewProcess(cluster.address)))
            listed = {node.node_id for node in _seen(watch)}
            now = _by_mark(ledger)
            for mark, requested in list(waiting.items()):
                node = now.get(mark)
                if node is None or node.phase in (NodePhase.ending, NodePhase.ended):
                    why = node.cause if node else "it was removed from the ledger"
                    raise UnreachableError(f"node {requested.name} did not start: {why}", where=requested.log)
                if node.node_id and node.node_id in listed:
                    running = ledger.update(mark, phase=NodePhase.running, since=time.time()) or node
                    settled.append(running)
                    on_started(running)
                    del waiting[mark]
            _check_deadline(cluster, deadline, waiting.values())
            if waiting:
                time.sleep(POLL_S)
    return settled


def _seen(watch: RayViewProcess) -> list[RayNode]:
    """Nodes that Ray lists; none while it does not answer."""
    try:
        return watch.nodes(wait_s=POLL_S)
    except UnreachableError:
        return []


def end(ledger: Ledger, cluster: ClusterRecord, nodes: Sequence[NodeRecord], cause: str) -> list[NodeRecord]:
    """End nodes, workers before the head, and wait until their processes are gone; returns those with leftovers."""
    left = []
    for group in ([node for node in nodes if not node.head], [node for node in nodes if node.head]):
        ending = []
        for record in group:
            node = _by_mark(ledger).get(record.mark)
            if node is None or node.phase is NodePhase.ended:
                continue
            if node.phase is not NodePhase.ending:
                node = ledger.update(node.mark, phase=NodePhase.ending, since=time.time(), cause=cause) or node
            if node.supervisor is not None:
                send(node.supervisor, signal.SIGTERM)
            ending.append(node)
        deadline = time.monotonic() + END_S
        for node in ending:
            _wait_supervisor_gone(node.supervisor, deadline)
            if kill_family(None, node.mark):  # a supervisor that is only just starting carries the mark, too
                left.append(node)
            ledger.update(node.mark, phase=NodePhase.ended, since=time.time(), cause=cause)
    return left


def wait_ended(ledger: Ledger, node: NodeRecord, timeout_s: float) -> bool:
    """Wait until a node has ended by itself; returns whether it has."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now = _by_mark(ledger).get(node.mark)
        if now is None or not now.alive:
            return True
        time.sleep(POLL_S)
    return False


def auth_of(cluster: ClusterRecord) -> dict[str, str]:
    """Mode and token of a cluster, adopted by this process: of its own head, or probed."""
    head = cluster.head
    wanted = auth.head_auth(head.supervisor) if head is not None and head.supervisor is not None else {}
    if not wanted:
        if not listens(cluster.address, 2.0):
            raise UnreachableError(
                f"no Ray cluster answers at {cluster.address}",
                hint="`trimtab cluster start` starts one; `ray status` on its head shows whether it runs",
            )
        return auth.cluster_auth(cluster.address, os.environ)
    auth.adopt(wanted)
    return wanted


def _listening(ledger: Ledger, cluster: ClusterRecord, head: NodeRecord, deadline: float) -> None:
    while not listens(cluster.address, 0.5):
        node = _by_mark(ledger).get(head.mark)
        if node is None or node.phase in (NodePhase.ending, NodePhase.ended):
            raise UnreachableError(f"the head did not start: {node.cause if node else 'it is gone'}", where=head.log)
        _check_deadline(cluster, deadline, [head])


def _check_deadline(cluster: ClusterRecord, deadline: float, waiting: Iterable[NodeRecord]) -> None:
    nodes = list(waiting)
    if nodes and time.monotonic() >= deadline:
        raise UnreachableError(
            f"node {nodes[0].name} did not come up in time: {start_error(nodes[0].log, temp_dir(cluster, nodes[0]))}",
            where=nodes[0].log,
            hint="--timeout waits longer; a machine that is busy starts Ray slowly",
        )


def _wait_supervisor_gone(supervisor: ProcessIdentity | None, deadline: float) -> None:
    """Wait until a supervisor has ended its node and itself; kill one that does not."""
    if supervisor is not None and gone([supervisor], max(0.0, deadline - time.monotonic())):
        send(supervisor, signal.SIGKILL)
        gone([supervisor], 5.0)


def _by_mark(ledger: Ledger) -> dict[str, NodeRecord]:
    return {node.mark: node for cluster in ledger.read().values() for node in cluster.nodes}
