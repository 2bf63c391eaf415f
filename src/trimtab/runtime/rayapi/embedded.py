"""The Ray that a job runs on: one of its own on this machine, or a cluster that is there and has room for it.

A Ray of its own has the nodes of the job's cluster section, each with so many logical GPUs: nothing but numbers, so any
job can be tried on any machine. Every process of it ends with it, also after Ctrl-C, and when this process is killed;
what else this process has started is never touched. A cluster that was there before is left as it was.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trimtab.core.errors import InfeasibleError, InputError, UnreachableError
from trimtab.model.workflow import Cluster, Node
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.controller.rpc import NAMESPACE
from trimtab.runtime.procs import processes
from trimtab.runtime.procs.interrupts import interrupts_deferred, signals_ignored
from trimtab.runtime.rayapi.connect import import_ray

MOST_NODES = 8  # of a Ray on one machine: each has processes of its own
CPUS_EACH = 4  # logical ones of a node, where the job does not state them
MIN_STORE_BYTES, MAX_STORE_BYTES = 100 * 2**20, 2 * 2**30  # of a node's object store
GONE_S = 15.0  # for processes that are to end


class EmbeddedRay:
    """A Ray on this machine, from `with` to its end; this process is connected to it."""

    def __init__(self, cluster: Cluster, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called between the steps of the start, and may raise."""
        if len(cluster.nodes) > MOST_NODES:
            raise InfeasibleError(
                f"the job has {len(cluster.nodes)} nodes, and a Ray on this machine has {MOST_NODES} at the most",
                where="cluster.nodes",
                hint="state fewer nodes with more GPUs each; or --local; or --address of a cluster",
            )
        self._nodes = cluster.nodes
        self._check = check
        self._started: dict[str, Any] = {}
        self._seen: set[processes.ProcessIdentity] = set()

    def __enter__(self) -> EmbeddedRay:
        self._ray = import_ray()
        if self._ray.is_initialized():
            raise InputError("this process is connected to a Ray already", hint="leave it first: ray.shutdown()")
        from ray.cluster_utils import Cluster as RayNodes

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Nodes here have few CPUs, and Ray ends idle workers beyond that number: each one that is needed again costs a
        # second. A busy machine may take longer to start a node than Ray's half a minute.
        os.environ.setdefault("RAY_num_workers_soft_limit", "24")
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        with _quiet():
            self._cluster = RayNodes()
            try:
                for node in self._nodes or (Node("node0", 0),):
                    self._check()
                    self.add(node)
                self._check()
                self.address = str(self._cluster.address)
                self._ray.init(
                    address=self.address, log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE
                )
                self._cluster.wait_for_nodes(timeout=60)
                self._check()
            except BaseException as fault:
                with signals_ignored():
                    self._end()
                self._check()  # whoever wants it to end need not hear why it could not start
                if not isinstance(fault, Exception) or isinstance(fault, InputError):
                    raise
                lines = str(fault).strip().splitlines() or [type(fault).__name__]
                raise UnreachableError(
                    f"no Ray could be started on this machine: {lines[0][:200]}",
                    hint="--local runs the job without Ray",
                ) from fault
        mute_ray_messages()
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        with signals_ignored():
            self._end()

    def add(self, node: Node) -> None:
        """Another node joins."""
        # Ray sets handlers for signals with a node, which only the main thread may; the others do without them.
        self._cluster._shutdown_at_exit = threading.current_thread() is threading.main_thread()
        before = set(processes.descendants(os.getpid()))
        try:
            with _quiet():
                self._started[node.name] = self._cluster.add_node(
                    node_name=node.name,
                    wait=False,
                    num_cpus=CPUS_EACH if node.cpus is None else node.cpus,
                    num_gpus=node.gpus,
                    object_store_memory=_store_bytes(len(self._nodes)),
                    include_dashboard=False,
                )
        except BaseException:
            self._seen.update(
                set(processes.descendants(os.getpid())) - before
            )  # half of a node, which nobody else knows of
            raise

    def node_id(self, name: str) -> str:
        """What Ray calls a node."""
        return str(self._started[name].node_id)

    def kill(self, name: str) -> None:
        """Lose a node as a machine is lost: all its processes at once. Not the first one, which is the head."""
        self._look()
        node = self._started.pop(name)
        raylets = [info.process.pid for info in node.all_processes["raylet"]]
        for raylet in raylets:
            for pid in (raylet, *(one.pid for one in processes.descendants(raylet))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with _quiet():
            self._cluster.remove_node(node, allow_graceful=False)

    def remove(self, name: str) -> None:
        """A node goes in order. Not the first one, which is the head."""
        self._look()
        node = self._started.pop(name)
        with _quiet():
            self._cluster.remove_node(node, allow_graceful=True)

    def _look(self) -> None:
        """Remember the processes of all nodes, and whatever these have started."""
        pids = [
            one.process.pid
            for node in list(self._started.values())
            for some in node.all_processes.values()
            for one in some
        ]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._seen.add(processes.process(pid))
        self._seen.update(processes.descendants(*pids))

    def _end(self) -> None:
        """End it, and whatever came of it."""
        self._look()
        with _quiet():
            with contextlib.suppress(Exception):
                self._ray.shutdown()
            with contextlib.suppress(Exception):
                self._cluster.shutdown()
        for one in processes.gone(self._seen, GONE_S):
            processes.send(one, signal.SIGKILL)


@contextlib.contextmanager
def session_for(cluster: Cluster, address: str | None) -> Iterator[tuple[Session, str]]:
    """A session on the Ray that a job runs on, and a sentence on which one that is.

    The one at an address, or named by RAY_ADDRESS, must have what the job asks for. Without one ("local" is none), and
    where this process is not connected to any, a Ray of the job's own is started, and ends with this.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address == "local":
        address = None
    with interrupts_deferred() as interrupts:
        if address is not None or import_ray().is_initialized():
            session = connect(address)
            try:
                interrupts.release()
                check_cluster_gpus(cluster)
                yield session, session.how
            finally:
                with signals_ignored():
                    session.close()
            return
        with EmbeddedRay(cluster, interrupts.check):
            session = connect()
            try:
                interrupts.release()
                nodes = len(cluster.nodes)
                yield session, f"a Ray of its own here: {cluster.gpus} logical GPUs on {nodes} node{'s' * (nodes != 1)}"
            finally:
                with signals_ignored():
                    session.shutdown(timeout=30.0)


def check_cluster_gpus(cluster: Cluster) -> None:
    """Raise InfeasibleError where the Ray of this process has less than the job's cluster section states."""
    there = sorted(
        (float(node["Resources"].get("GPU", 0.0)) for node in import_ray().nodes() if node["Alive"]),
        reverse=True,
    )
    asked = sorted((node.gpus for node in cluster.nodes), reverse=True)
    has = f"Ray has {sum(there):g} on {len(there)} node{'s' * (len(there) != 1)}"
    if cluster.gpus > sum(there):
        raise InfeasibleError(
            f"the job asks for {cluster.gpus} GPUs, and {has}",
            where="cluster",
            hint="state what there is in the job's cluster section, or add nodes",
        )
    for one, gpus in zip([*there, *([0.0] * len(asked))], asked, strict=False):
        if gpus > one:
            raise InfeasibleError(
                f"the job asks for {_nodes_text(asked)} GPUs, and {has}: {_nodes_text(there)}",
                where="cluster.nodes",
                hint="state the nodes as they are in the job's cluster section",
            )


def _nodes_text(gpus: list[Any]) -> str:
    shown = ", ".join(f"{count:g}" for count in gpus[:8])
    return f"nodes of {shown}{' ...' * (len(gpus) > 8)}"


def _store_bytes(nodes: int) -> int:
    """Of each node's object store: pages are taken when they are used, and a third of the memory is left in peace."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return MIN_STORE_BYTES
    share = room.f_bavail * room.f_frsize // (3 * max(1, nodes))
    return min(MAX_STORE_BYTES, max(MIN_STORE_BYTES, share))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What Ray notes while it starts and ends is not part of what a run says."""
    log = logging.getLogger("ray")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        log.setLevel(before)


def mute_ray_messages() -> None:
    """Ray prints a paragraph for every process that ends by a signal; a run says by itself whom it has lost."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
