"""What trimtab has started on this machine: clusters, nodes, their GPUs and ports; one file, changed under one lock.

A GPU or a block of ports is given by writing a node into the ledger while the lock is held, before anything is started;
so two who add at once cannot be given the same. What is written is believed only as long as a process stands behind it:
whoever is starting the node, then its keeper, then whatever is left of its family. The lock is held for moments, never
while something starts. Kept per user and machine, not per cluster: two clusters must not share a GPU either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.procs.ports import NodePorts
from trimtab.runtime.procs.processes import ProcessIdentity, family

PLACE = "TRIMTAB_CLUSTER_DIR"
LONGEST_PLACE = 30  # Ray's sockets lie below it, and the path of a socket has 107 letters
REMEMBER_S = 3600.0  # nodes that ended are shown for so long
_LOCK_S = 30.0


class NodePhase(str, enum.Enum):
    """Where a node of ours is."""

    starting = "starting"
    running = "running"
    ending = "ending"
    ended = "ended"  # kept for a while, to say why


@dataclass(frozen=True)
class NodeSizes:
    """What each node of a cluster gets."""

    gpus: int = 1
    cpus: int = 1
    memory: int | None = None  # bytes; None: its share of the machine's
    object_store: int | None = None  # bytes; None: its share
    units: int = 1  # of the resource `worker_unit`


@dataclass(frozen=True)
class NodeRecord:
    """A node that was started here."""

    name: str
    mark: str  # in the environment of all its processes
    head: bool
    gpus: tuple[str, ...]
    fake: bool
    slot: int
    ports: NodePorts
    adder: ProcessIdentity  # who is starting it
    log: str
    sizes: NodeSizes = field(default_factory=NodeSizes)
    keeper: ProcessIdentity | None = None
    raylet: ProcessIdentity | None = None
    node_id: str = ""  # Ray's
    phase: NodePhase = NodePhase.starting
    since: float = 0.0  # epoch seconds, of the phase
    deadline: float | None = None  # epoch seconds: it goes then
    cause: str = ""  # of ending

    @property
    def stands(self) -> bool:
        """Whether somebody is behind what is written."""
        if self.phase is NodePhase.ended:
            return False
        if self.keeper is not None:
            return self.keeper.alive
        return self.adder.alive


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster that has nodes of ours."""

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
    owner: ProcessIdentity | None = None  # the command it lives as long as; None: detached
    started: float = 0.0
    nodes: tuple[NodeRecord, ...] = ()

    @property
    def head(self) -> NodeRecord | None:
        """Its head, where that is one of ours."""
        return next((one for one in self.nodes if one.head), None)

    @property
    def standing(self) -> tuple[NodeRecord, ...]:
        """Nodes that are there or on their way."""
        return tuple(one for one in self.nodes if one.stands)

    @property
    def holding(self) -> tuple[NodeRecord, ...]:
        """Nodes whose GPUs and ports are not free: also those of a dead one until what is left of it has been ended."""
        return tuple(one for one in self.nodes if one.phase is not NodePhase.ended)

    @property
    def port(self) -> int:
        """Of its head."""
        return int(self.address.rpartition(":")[2])


@dataclass
class LedgerState:
    """The ledger while the lock is held; what is changed here is written when it is let go."""

    clusters: dict[str, ClusterRecord]

    def put(self, cluster: ClusterRecord, node: NodeRecord) -> ClusterRecord:
        """Write a node down, in place of an earlier one of its name."""
        others = [one for one in cluster.nodes if one.name != node.name or one.phase is not NodePhase.ended]
        changed = dataclasses.replace(cluster, nodes=(*others, node))
        self.clusters[cluster.address] = changed
        return changed

    def find(self, mark: str) -> tuple[ClusterRecord, NodeRecord] | None:
        """The node of a mark, and its cluster."""
        for cluster in self.clusters.values():
            for node in cluster.nodes:
                if node.mark == mark:
                    return cluster, node
        return None

    def gpus_given(self, *, fake: bool, address: str) -> dict[str, NodeRecord]:
        """Who has which GPU. Real ones count whatever the cluster; faked ones are each cluster's own."""
        return {
            gpu: node
            for cluster in self.clusters.values()
            for node in cluster.holding
            if node.fake == fake and (not fake or cluster.address == address)
            for gpu in node.gpus
        }

    def ports_given(self) -> set[int]:
        """Ports that nodes of all clusters have."""
        return {port for one in self.clusters.values() for node in one.holding for port in node.ports.fixed}


class Ledger:
    """The file and its lock."""

    def __init__(self, place: Path | None = None) -> None:
        self.place = place or default_place()
        self._file = self.place / "ledger.json"

    def read(self) -> dict[str, ClusterRecord]:
        """What is written, by address; it may be changing."""
        try:
            data = json.loads(self._file.read_text())
            return {one["address"]: decode(ClusterRecord, one) for one in data["clusters"]}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as fault:
            raise UnreachableError(
                f"the list of what runs here cannot be read: {fault}",
                where=str(self._file),
                hint="another version of trimtab wrote it: end its cluster with that version, then delete the file",
            ) from None

    def changed(self) -> int:
        """A number that changes when what is written does."""
        try:
            return self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def change(self) -> Iterator[LedgerState]:
        """Hold the lock; what is in the books afterwards is written. A fault leaves everything as it was."""
        self._make_place()
        descriptor = os.open(self.place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _take(descriptor, self.place)
            before = self.read()
            books = LedgerState(dict(before))
            yield books
            if books.clusters != before:
                self._write(books.clusters)
        finally:
            os.close(descriptor)

    def update(self, mark: str, **facts: object) -> NodeRecord | None:
        """Change facts of one node; None where it is not in the books any more."""
        with self.change() as books:
            found = books.find(mark)
            if found is None:
                return None
            cluster, node = found
            changed = dataclasses.replace(node, **facts)  # type: ignore[arg-type]
            nodes = tuple(changed if one.mark == mark else one for one in cluster.nodes)
            books.clusters[cluster.address] = dataclasses.replace(cluster, nodes=nodes)
            return changed

    def _write(self, clusters: dict[str, ClusterRecord]) -> None:
        text = json.dumps({"clusters": [encode(one) for one in clusters.values()]}, indent=1)
        fresh = self._file.with_suffix(f".{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(self._file)

    def _make_place(self) -> None:
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.place.stat().st_uid != os.getuid():
            raise InputError(f"{self.place} belongs to another user", hint=f"{PLACE} names another directory")


def default_place() -> Path:
    """Where the ledger of this user and machine lies. Containers that share /tmp know processes by other numbers."""
    named = os.environ.get(PLACE)
    if named:
        if len(named) > LONGEST_PLACE:
            raise InputError(
                f"{PLACE} is longer than {LONGEST_PLACE} letters: Ray's sockets below it would have too long a path",
                where="environment",
            )
        return Path(named)
    return Path(f"/tmp/trimtab-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino:x}")


def left_over(node: NodeRecord) -> list[ProcessIdentity]:
    """Processes of a node behind whose record nobody stands any more."""
    return [] if node.stands else family(node.keeper, node.mark)


def forget_old(node: NodeRecord, now: float) -> bool:
    """Whether a node that ended need not be shown any more."""
    return node.phase is NodePhase.ended and now - node.since > REMEMBER_S


def _take(descriptor: int, place: Path) -> None:
    deadline = time.monotonic() + _LOCK_S
    while not _locked(descriptor):
        if time.monotonic() >= deadline:
            raise UnreachableError(
                f"another trimtab has held the list of what runs here for {_LOCK_S:g} s", where=str(place / "lock")
            )
        time.sleep(0.01)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
