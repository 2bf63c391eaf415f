"""What one look at a Ray cluster gives: nodes, who holds what, who waits, and what is about to change.

Plain frozen facts, taken by `runtime/rayapi/gcs_snapshot.py` and judged by `why.py`. Nothing here decides anything,
and nothing here is specific to trimtab's own pools: any program's actors, tasks and placement groups look like this.
Times are seconds since 1970 by the cluster's clocks; where Ray does not say when something began to wait, it is None.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.resources import NOTHING, Resources, total
from trimtab.model.pool import Labels, PlacementStrategy

SHORT_ID = 12  # digits of an id that people are shown


class WorkloadKind(str, enum.Enum):
    """What sort of thing waits or holds."""

    actor = "actor"
    group = "group"  # a placement group
    task = "task"
    plan = "plan"  # what a job would ask, if it were started


class PendingStage(str, enum.Enum):
    """How far something that does not run yet has come."""

    inputs = "inputs"  # its arguments are not there yet
    room = "room"  # it waits for a place
    starting = "starting"  # it has its place and a process; the constructor has not ended


@dataclass(frozen=True)
class LabelSelector:
    """One condition on a node's labels: the value of `key` is one of `values`, or with `negated` none of them."""

    key: str
    values: tuple[str, ...]
    negated: bool = False

    def matches(self, labels: Labels) -> bool:
        """Whether a node with these labels will do. A label that is missing is none of the values."""
        return (dict(labels).get(self.key) in self.values) != self.negated

    def __str__(self) -> str:
        several = f"({', '.join(self.values)})" if len(self.values) != 1 else self.values[0]
        if self.negated:
            return f"{self.key} not {several}"
        return f"{self.key}={several}" if len(self.values) == 1 else f"{self.key} in {several}"


LabelSelectors = tuple[LabelSelector, ...]


@dataclass(frozen=True)
class ResourceRequest:
    """What has to be found on one node: amounts, and labels by any one of several sets of conditions (none: any)."""

    amounts: Resources
    labels: tuple[LabelSelectors, ...] = ()
    node: str | None = None  # this one has its place already: of a group that lost another bundle

    def accepts(self, labels: Labels) -> bool:
        """Whether the labels of a node will do."""
        return not self.labels or any(
            all(selector.matches(labels) for selector in selectors) for selectors in self.labels
        )


@dataclass(frozen=True)
class DrainNotice:
    """A node will go."""

    deadline: float | None = None
    cause: str = ""


@dataclass(frozen=True)
class NodeSnapshot:
    """A living node. `name` is what people are shown: unique, see `named`."""

    id: str
    name: str
    total: Resources
    free: Resources
    labels: Labels = ()
    address: str = ""
    head: bool = False
    drain: DrainNotice | None = None


@dataclass(frozen=True)
class NodeType:
    """A kind of node that the autoscaler may add: what it has, how many more, how many are on their way."""

    name: str
    total: Resources
    more: int | None = None  # None: without limit
    coming: int = 0


@dataclass(frozen=True)
class RayJob:
    """Whoever submitted something."""

    id: str
    command: str = ""
    pid: int = 0
    address: str = ""
    ended: bool = False


@dataclass(frozen=True)
class ResourceHolder:
    """Somebody who holds amounts on a node: an actor, a running task, or the part of a placement group that is there.

    Whoever runs inside a placement group holds of the group (`group`, `bundle`), not of the node.
    """

    id: str
    kind: WorkloadKind
    name: str
    node: str
    amounts: Resources
    job: str = ""
    class_name: str = ""  # actors: their class; siblings of one job are told together
    group: str | None = None
    bundle: int | None = None
    gpus: tuple[int, ...] = ()  # by index, where Ray says


@dataclass(frozen=True)
class PendingWorkload:
    """Something that does not run. A placement group has one ask for each bundle; everything else has one ask."""

    id: str
    kind: WorkloadKind
    name: str
    requests: tuple[ResourceRequest, ...]
    stage: PendingStage = PendingStage.room
    strategy: PlacementStrategy = PlacementStrategy.pack
    since: float | None = None
    at_least: bool = False  # it may have waited for longer: `since` is when it was first seen to
    job: str = ""
    class_name: str = ""
    count: int = 1  # so many alike, of which Ray gives no more than the number
    pinned: str | None = None  # to this node alone
    group: str | None = None  # it runs inside this placement group ...
    bundle: int | None = None  # ... in this bundle of it; None: in any
    node: str | None = None  # where its process starts
    restarted: bool = False  # it ran before, and is started again
    queued: bool = True  # Ray counts it among what waits for room; else it has room, or may use one node alone


@dataclass(frozen=True)
class PlacementGroupSnapshot:
    """A placement group that stands: bundle by bundle what it has, what of that nobody uses, and where it is."""

    id: str
    name: str
    bundles: tuple[Resources, ...]
    free: tuple[Resources, ...]
    nodes: tuple[str | None, ...]
    job: str = ""


@dataclass(frozen=True)
class NonRayGpuUser:
    """A process that holds a GPU and was not started by Ray."""

    node: str | None  # the node whose GPU it is; None: no node of this cluster has it
    gpu: int  # by index on its machine
    pid: int
    command: str = ""
    used_bytes: int = 0
    of_bytes: int = 0
    place: int | None = None  # the GPU by Ray's index on that node


@dataclass(frozen=True)
class AbandonedWorkload:
    """Something that Ray does not try to place any more."""

    id: str
    kind: WorkloadKind
    name: str
    why: str
    at: float | None = None


@dataclass(frozen=True)
class GcsSnapshot:
    """One look at a cluster."""

    at: float
    nodes: tuple[NodeSnapshot, ...]
    waiting: tuple[PendingWorkload, ...] = ()
    holders: tuple[ResourceHolder, ...] = ()
    groups: tuple[PlacementGroupSnapshot, ...] = ()
    jobs: tuple[RayJob, ...] = ()
    non_ray_gpu_users: tuple[NonRayGpuUser, ...] = ()
    node_types: tuple[NodeType, ...] = ()
    abandoned: tuple[AbandonedWorkload, ...] = ()
    address: str = ""
    faults: tuple[str, ...] = ()  # what could not be looked at

    def node(self, id: str | None) -> NodeSnapshot | None:
        """The node of that id, if it lives."""
        return next((node for node in self.nodes if node.id == id), None)

    def node_name(self, id: str | None) -> str:
        """What people call a node, also one that is gone."""
        found = self.node(id)
        return found.name if found else (id or "")[:SHORT_ID] or "somewhere"

    def job(self, id: str) -> RayJob | None:
        """The job of that id."""
        return next((job for job in self.jobs if job.id == id), None)

    def group(self, id: str | None) -> PlacementGroupSnapshot | None:
        """The placement group of that id, if it stands."""
        return next((group for group in self.groups if group.id == id), None)

    def unexplained(self, node: NodeSnapshot) -> Resources:
        """What is taken on a node by nobody that Ray names: processes that are being started, short tasks."""
        known = total([holder.amounts for holder in self.holders if holder.node == node.id and holder.group is None])
        return node.total.minus(node.free).minus(known)


def named(nodes: Iterable[NodeSnapshot]) -> tuple[NodeSnapshot, ...]:
    """Nodes with names that tell them apart: the given name, else the address, else the beginning of the id."""
    nodes = tuple(nodes)
    names, addresses = Counter(node.name for node in nodes), Counter(node.address for node in nodes)

    def name(node: NodeSnapshot) -> str:
        if node.name and names[node.name] == 1:
            return node.name
        return node.address if node.address and addresses[node.address] == 1 else node.id[:SHORT_ID]

    return tuple(replace(node, name=name(node)) for node in nodes)


def total_requested(requests: Sequence[ResourceRequest]) -> Resources:
    """What asks come to together, without those that have their place."""
    return total([request.amounts for request in requests if request.node is None]) if requests else NOTHING
