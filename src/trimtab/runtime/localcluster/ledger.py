"""What trimtab has started on this machine: clusters, nodes, their GPUs and ports; one file, changed under one lock.

A GPU or a block of ports is allocated by writing a node into the ledger under the lock, before anything is started, so
two concurrent commands never get the same. A record is valid only while a process backs it: the one that starts the
node, then its supervisor, then leftovers of its processes. The lock is held briefly, never while something starts. One
ledger per user and machine, not per cluster: two clusters must not share a GPU either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.runtime.procs.locks import FileLock
from trimtab.runtime.procs.ports import NodePorts
from trimtab.runtime.procs.processes import ProcessIdentity, family, pid_namespace
from trimtab.runtime.store.files import write_file

DIRECTORY_ENV = "TRIMTAB_CLUSTER_DIR"
MAX_LENGTH = 30  # Ray's sockets are below it, and a socket path has at most 107 characters
KEEP_ENDED_S = 3600.0  # ended nodes are shown for this long
_LOCK_S = 30.0


class NodePhase(str, enum.Enum):
    """Phase of a node."""

    starting = "starting"
    running = "running"
    ending = "ending"
    ended = "ended"  # kept for a while, to show the cause


class NodeSizes(Frozen):
    """Resources of each node of a cluster."""

    gpus: int = 1
    cpus: int = 1
    memory: int | None = None  # bytes; None: its share of the machine
    object_store: int | None = None  # bytes; None: its share
    units: int = 1  # of the resource `worker_unit`


class NodeRecord(Frozen):
    """A node that was started here."""

    name: str
    mark: str  # in the environment of all its processes
    head: bool
    gpus: tuple[str, ...]
    fake: bool
    slot: int
    ports: NodePorts
    adder: ProcessIdentity  # the process that starts it
    log: str
    sizes: NodeSizes = field(default_factory=NodeSizes)
    supervisor: ProcessIdentity | None = None
    raylet: ProcessIdentity | None = None
    node_id: str = ""  # Ray's
    phase: NodePhase = NodePhase.starting
    since: float = 0.0  # epoch seconds, of the phase
    deadline: float | None = None  # epoch seconds: it ends then
    cause: str = ""  # of ending

    @property
    def alive(self) -> bool:
        """Whether a process backs the record."""
        if self.phase is NodePhase.ended:
            return False
        if self.supervisor is not None:
            return self.supervisor.alive
        return self.adder.alive


class ClusterRecord(Frozen):
    """A cluster with nodes on this machine."""

    address: str  # host:port of its head, as Ray knows it
    head_here: bool
    temp_dir: str
    sizes: NodeSizes
    fake_gpus: int | None = None
    ports_from: int = 6380
    worker_ports_from: int = 10_002
    dashboard_port: int | None = None
    client_port: int | None = None
    quick_loss: bool = False
    owner: ProcessIdentity | None = None  # the command whose end ends it; None: detached
    started: float = 0.0
    nodes: tuple[NodeRecord, ...] = ()

    @property
    def head(self) -> NodeRecord | None:
        """Its head, if that is on this machine."""
        return next((node for node in self.nodes if node.head), None)

    @property
    def live_nodes(self) -> tuple[NodeRecord, ...]:
        """Running and starting nodes."""
        return tuple(node for node in self.nodes if node.alive)

    @property
    def allocated_nodes(self) -> tuple[NodeRecord, ...]:
        """Nodes whose GPUs and ports are not free: also dead ones until their leftovers are ended."""
        return tuple(node for node in self.nodes if node.phase is not NodePhase.ended)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@dataclass
class LedgerState:
    """The ledger while the lock is held; changes are written when it is released."""

    clusters: dict[str, ClusterRecord]

    def put(self, cluster: ClusterRecord, node: NodeRecord) -> ClusterRecord:
        """Add a node, replacing an ended one of the same name."""
        others = [other for other in cluster.nodes if other.name != node.name or other.phase is not NodePhase.ended]
        changed = dataclasses.replace(cluster, nodes=(*others, node))
        self.clusters[cluster.address] = changed
        return changed

    def find(self, mark: str) -> tuple[ClusterRecord, NodeRecord] | None:
        for cluster in self.clusters.values():
            for node in cluster.nodes:
                if node.mark == mark:
                    return cluster, node
        return None

    def gpus_given(self, *, fake: bool, address: str) -> dict[str, NodeRecord]:
        """Which node has which GPU. Real ones count across clusters; fake ones belong to their cluster."""
        return {
            gpu: node
            for cluster in self.clusters.values()
            for node in cluster.allocated_nodes
            if node.fake == fake and (not fake or cluster.address == address)
            for gpu in node.gpus
        }

    def ports_given(self) -> set[int]:
        return {
            port for cluster in self.clusters.values() for node in cluster.allocated_nodes for port in node.ports.fixed
        }


class Ledger:
    """The file and its lock."""

    def __init__(self, place: Path | None = None) -> None:
        self.place = place or default_directory()
        self._file = self.place / "ledger.json"

    def read(self) -> dict[str, ClusterRecord]:
        """The clusters by address, without the lock."""
        try:
            data = json.loads(self._file.read_text())
            return {row["address"]: decode(ClusterRecord, row) for row in data["clusters"]}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as fault:
            raise UnreachableError(
                f"the list of what runs here cannot be read: {fault}",
                where=str(self._file),
                hint="another version of trimtab wrote it: end its cluster with that version, then delete the file",
            ) from None

    def changed(self) -> int:
        """A number that changes with the file."""
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def change(self) -> Iterator[LedgerState]:
        """Hold the lock; the state is written on exit, unless an exception is raised."""
        self._make_directory()
        lock, deadline = FileLock(self.place / "lock"), time.monotonic() + _LOCK_S
        while not lock.take():
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"another trimtab has held the list of what runs here for {_LOCK_S:g} s",
                    where=str(self.place / "lock"),
                )
            time.sleep(0.01)
        try:
            before = self.read()
            state = LedgerState(dict(before))
            yield state
            if state.clusters != before:
                self._write(state.clusters)
        finally:
            lock.release()

    def update(self, mark: str, **facts: object) -> NodeRecord | None:
        """Change fields of one node; None if it is not in the ledger any more."""
        with self.change() as state:
            found = state.find(mark)
            if found is None:
                return None
            cluster, node = found
            changed = dataclasses.replace(node, **facts)  # type: ignore[arg-type]
            nodes = tuple(changed if other.mark == mark else other for other in cluster.nodes)
            state.clusters[cluster.address] = dataclasses.replace(cluster, nodes=nodes)
            return changed

    def _write(self, clusters: dict[str, ClusterRecord]) -> None:
        text = json.dumps({"clusters": [encode(cluster) for cluster in clusters.values()]}, indent=1)
        write_file(self._file, text.encode())

    def _make_directory(self) -> None:
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.place.stat().st_uid != os.getuid():
            raise InputError(f"{self.place} belongs to another user", hint=f"{DIRECTORY_ENV} names another directory")


def default_directory() -> Path:
    """Ledger directory of this user and machine. Containers that share /tmp have other process ids."""
    named = os.environ.get(DIRECTORY_ENV)
    if named:
        if len(named) > MAX_LENGTH:
            raise InputError(
                f"{DIRECTORY_ENV} is longer than {MAX_LENGTH} letters: the paths of Ray's sockets would be too long",
                where="environment",
            )
        return Path(named)
    return Path(f"/tmp/trimtab-{os.getuid()}-{pid_namespace():x}")


def leftover_processes(node: NodeRecord) -> list[ProcessIdentity]:
    """Processes of a node whose record is not alive any more."""
    return [] if node.alive else family(node.supervisor, node.mark)


def is_expired(node: NodeRecord, now: float) -> bool:
    return node.phase is NodePhase.ended and now - node.since > KEEP_ENDED_S
