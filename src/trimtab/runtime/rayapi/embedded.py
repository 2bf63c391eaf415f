"""The Ray cluster of a job: a local one started for it, or an existing one with enough GPUs.

A local one has the nodes of the job's cluster section, with logical GPUs only, so that any job can be tried on any
machine. All its processes end with it, also after Ctrl-C and when this process is killed; other children of this
process are never touched. An existing cluster is left running.
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
from trimtab.runtime.procs import processes
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.procs.interrupts import interrupts_deferred, signals_ignored
from trimtab.runtime.rayapi.connect import import_ray, init, set_defaults
from trimtab.runtime.rayapi.nodes import live_nodes
from trimtab.runtime.rayapi.private import mute_ray_messages

MAX_NODES = 8  # on one machine; each has its own processes
CPUS_EACH = 4  # logical CPUs of a node, if the job states none
MIN_STORE_BYTES, MAX_STORE_BYTES = 100 * 2**20, 2 * 2**30  # of a node's object store
GONE_S = 15.0  # for processes to exit


class EmbeddedRay:
    """A local multi-node Ray as a context manager; this process is connected to it. Seen with Ray 2.60."""

    def __init__(self, cluster: Cluster, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called between the steps of the start, and may raise."""
        if len(cluster.nodes) > MAX_NODES:
            raise InfeasibleError(
                f"the job has {len(cluster.nodes)} nodes, and a Ray on this machine has {MAX_NODES} at the most",
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

        set_defaults()
        # Ray ends idle workers beyond the number of CPUs, which are few here, and starting one takes a second. On a
        # busy machine the start of a node may take longer than Ray's default of 30 s, and that of its agent than 15 s.
        os.environ.setdefault("RAY_num_workers_soft_limit", "24")
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
        with quiet():
            self._cluster = RayNodes()
            try:
                for node in self._nodes or (Node("node0", 0),):
                    self._check()
                    self.add(node)
                self._check()
                self.address = str(self._cluster.address)
                init(self._ray, address=self.address)
                self._cluster.wait_for_nodes(timeout=60)
                self._check()
            except BaseException as fault:
                with signals_ignored():
                    self._end()
                self._check()  # an interrupt takes precedence over the error
                if not isinstance(fault, Exception) or isinstance(fault, InputError):
                    raise
                raise UnreachableError(
                    f"no Ray could be started on this machine: {first_line(fault)[:200]}",
                    hint="--local runs the job without Ray",
                ) from fault
        mute_ray_messages()
        self._record_processes()
        return self

    def __exit__(self, *_: object) -> None:
        with signals_ignored():
            self._end()

    def add(self, node: Node) -> None:
        """Add a node."""
        # Ray sets signal handlers with a node, which only the main thread may do.
        self._cluster._shutdown_at_exit = threading.current_thread() is threading.main_thread()
        before = set(processes.descendants(os.getpid()))
        try:
            with quiet():
                self._started[node.name] = self._cluster.add_node(
                    node_name=node.name,
                    wait=False,
                    num_cpus=CPUS_EACH if node.cpus is None else node.cpus,
                    num_gpus=node.gpus,
                    object_store_memory=_store_bytes(len(self._nodes)),
                    include_dashboard=False,
                )
        except BaseException:
            self._seen.update(set(processes.descendants(os.getpid())) - before)  # of a partly started node
            raise

    def node_id(self, name: str) -> str:
        return str(self._started[name].node_id)

    def kill(self, name: str, moment: Callable[[], None] = lambda: None) -> None:
        """Kill all processes of a node at once, when `moment` returns. Not the first node, which is the head."""
        self._record_processes()
        node = self._started.pop(name)
        raylets = [info.process.pid for info in node.all_processes["raylet"]]
        below = [process.pid for process in processes.descendants(*raylets)]
        moment()
        for pid in (*raylets, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with quiet():
            self._cluster.remove_node(node, allow_graceful=False)

    def remove(self, name: str) -> None:
        """Remove a node gracefully. Not the first node, which is the head."""
        self._record_processes()
        node = self._started.pop(name)
        with quiet():
            self._cluster.remove_node(node, allow_graceful=True)

    def _record_processes(self) -> None:
        """Record the processes of all nodes, and their descendants."""
        pids = [
            info.process.pid
            for node in list(self._started.values())
            for infos in node.all_processes.values()
            for info in infos
        ]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._seen.add(processes.process(pid))
        self._seen.update(processes.descendants(*pids))

    def _end(self) -> None:
        """Shut Ray down, and kill what is left of it."""
        self._record_processes()
        with quiet():
            with contextlib.suppress(Exception):
                self._ray.shutdown()
            with contextlib.suppress(Exception):
                self._cluster.shutdown()
        for process in processes.gone(self._seen, GONE_S):
            processes.send(process, signal.SIGKILL)


@contextlib.contextmanager
def session_for(cluster: Cluster, address: str | None) -> Iterator[tuple[Session, str]]:
    """A session on the Ray cluster of a job, and a sentence on which one it is.

    A cluster at `address` or RAY_ADDRESS must have the GPUs of the job. Otherwise ("local" counts as no address),
    unless this process is connected to a Ray, a local one is started, and ends with this context.
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
    """InfeasibleError if the connected Ray has less than the job's cluster section states."""
    present = sorted((node.gpus for node in live_nodes(import_ray())), reverse=True)
    wanted = sorted((node.gpus for node in cluster.nodes), reverse=True)
    has = f"Ray has {sum(present):g} on {len(present)} node{'s' * (len(present) != 1)}"
    if cluster.gpus > sum(present):
        raise InfeasibleError(
            f"the job asks for {cluster.gpus} GPUs, and {has}",
            where="cluster",
            hint="state what there is in the job's cluster section, or add nodes",
        )
    for has_gpus, gpus in zip([*present, *([0.0] * len(wanted))], wanted, strict=False):
        if gpus > has_gpus:
            raise InfeasibleError(
                f"the job asks for {_nodes_text(wanted)} GPUs, and {has}: {_nodes_text(present)}",
                where="cluster.nodes",
                hint="state the nodes as they are in the job's cluster section",
            )


def _nodes_text(gpus: list[Any]) -> str:
    shown = ", ".join(f"{count:g}" for count in gpus[:8])
    return f"nodes of {shown}{' ...' * (len(gpus) > 8)}"


def _store_bytes(nodes: int) -> int:
    """Object store size per node: all together use at most a third of the free shared memory."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return MIN_STORE_BYTES
    share = room.f_bavail * room.f_frsize // (3 * max(1, nodes))
    return min(MAX_STORE_BYTES, max(MIN_STORE_BYTES, share))


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Suppress the messages of these loggers, Ray's by default, and stdout: while Ray starts, stops or loses nodes."""
    loggers = [logging.getLogger(name) for name in names or ("ray",)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
