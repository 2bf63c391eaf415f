"""Snapshot of a Ray cluster: nodes, holders of resources, waiting workloads, pending changes.

Frozen facts, taken by `runtime/rayapi/gcs_snapshot.py` and diagnosed by `why.py`. Not specific to trimtab's pools:
actors, tasks and placement groups of any program. Times are Unix seconds by the cluster's clocks; None where Ray does
not say when a wait began.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.core.resources import NOTHING, Resources, total
from trimtab.model.pool import Labels, PlacementStrategy

SHORT_ID = 12  # digits of an id for display


class WorkloadKind(str, enum.Enum):
    """Kind of a workload."""

    actor = "actor"
    group = "group"  # a placement group
    task = "task"
    plan = "plan"  # the requests of a job that is not started


class PendingStage(str, enum.Enum):
    """How far a pending workload has come."""

    inputs = "inputs"  # its arguments are not ready
    resources = "room"  # it waits for resources
    starting = "starting"  # placed, with a process; the constructor has not ended


class LabelSelector(Frozen):
    """A condition on node labels: the value of `key` is in `values`, or with `negated` is not."""

    key: str
    values: tuple[str, ...]
    negated: bool = False

    def matches(self, labels: Labels) -> bool:
        """A missing label matches no value."""
        return (dict(labels).get(self.key) in self.values) != self.negated

    def __str__(self) -> str:
        several = f"({', '.join(self.values)})" if len(self.values) != 1 else self.values[0]
        if self.negated:
            return f"{self.key} not {several}"
        return f"{self.key}={several}" if len(self.values) == 1 else f"{self.key} in {several}"


LabelSelectors = tuple[LabelSelector, ...]


class ResourceRequest(Frozen):
    """Resources needed on one node, and label selectors: any one of several sets must match (none: any node)."""

    amounts: Resources
    labels: tuple[LabelSelectors, ...] = ()
    node: str | None = None  # already placed: of a group that lost another bundle

    def accepts(self, labels: Labels) -> bool:
        return not self.labels or any(
            all(selector.matches(labels) for selector in selectors) for selectors in self.labels
        )


class DrainNotice(Frozen):
    """A node is draining."""

    deadline: float | None = None
    cause: str = ""


class NodeSnapshot(Frozen):
    """An alive node. `name` is unique for display, see `named`."""

    id: str
    name: str
    total: Resources
    free: Resources
    labels: Labels = ()
    address: str = ""
    head: bool = False
    drain: DrainNotice | None = None


class NodeType(Frozen):
    """A node type of the autoscaler: its resources, how many more, how many are pending."""

    name: str
    total: Resources
    more: int | None = None  # None: without limit
    coming: int = 0


class RayJob(Frozen):
    """A Ray job."""

    id: str
    command: str = ""
    pid: int = 0
    address: str = ""
    ended: bool = False


class ResourceHolder(Frozen):
    """A holder of node resources: an actor, a running task, or the part of a placement group on that node.

    A workload inside a placement group holds resources of the group (`group`, `bundle`), not of the node.
    """

    id: str
    kind: WorkloadKind
    name: str
    node: str
    amounts: Resources
    job: str = ""
    class_name: str = ""  # of an actor; siblings of one job are reported together
    group: str | None = None
    bundle: int | None = None
    gpus: tuple[int, ...] = ()  # indices, if Ray reports them


class PendingWorkload(Frozen):
    """A workload that does not run. A placement group has one request per bundle; all others have one."""

    id: str
    kind: WorkloadKind
    name: str
    requests: tuple[ResourceRequest, ...]
    stage: PendingStage = PendingStage.resources
    strategy: PlacementStrategy = PlacementStrategy.pack
    since: float | None = None
    at_least: bool = False  # `since` is when the wait was first seen; it may be longer
    job: str = ""
    class_name: str = ""
    count: int = 1  # identical workloads that Ray only counts
    pinned: str | None = None  # to this node only
    group: str | None = None  # it runs inside this placement group ...
    bundle: int | None = None  # ... in this bundle of it; None: in any
    node: str | None = None  # of its starting process
    restarted: bool = False  # it ran before
    queued: bool = True  # in Ray's resource demand; else it is placed, or pinned to a node


PendingWorkloads = tuple[PendingWorkload, ...]


class PlacementGroupSnapshot(Frozen):
    """A created placement group: resources, free resources and node of each bundle."""

    id: str
    name: str
    bundles: tuple[Resources, ...]
    free: tuple[Resources, ...]
    nodes: tuple[str | None, ...]
    job: str = ""


class NonRayGpuUser(Frozen):
    """A process that uses a GPU and was not started by Ray."""

    node: str | None  # None: the GPU belongs to no node of this cluster
    gpu: int  # index on its machine
    pid: int
    command: str = ""
    used_bytes: int = 0
    of_bytes: int = 0
    place: int | None = None  # Ray's index of the GPU on that node


class AbandonedWorkload(Frozen):
    """A workload that Ray does not try to place any more."""

    id: str
    kind: WorkloadKind
    name: str
    why: str
    at: float | None = None


class GcsSnapshot(Frozen):
    """State of a cluster at one time."""

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
    faults: tuple[str, ...] = ()  # what could not be read

    def node(self, id: str | None) -> NodeSnapshot | None:
        return next((node for node in self.nodes if node.id == id), None)

    def node_name(self, id: str | None) -> str:
        found = self.node(id)
        return found.name if found else (id or "")[:SHORT_ID] or "an unknown node"

    def job(self, id: str) -> RayJob | None:
        return next((job for job in self.jobs if job.id == id), None)

    def group(self, id: str | None) -> PlacementGroupSnapshot | None:
        return next((group for group in self.groups if group.id == id), None)

    def unexplained(self, node: NodeSnapshot) -> Resources:
        """Resources taken on a node by no known holder: starting processes, short tasks."""
        known = total([holder.amounts for holder in self.holders if holder.node == node.id and holder.group is None])
        return node.total.minus(node.free).minus(known)


def named(nodes: Iterable[NodeSnapshot]) -> tuple[NodeSnapshot, ...]:
    """Unique display names: the given name, else the address, else the beginning of the id."""
    nodes = tuple(nodes)
    names, addresses = Counter(node.name for node in nodes), Counter(node.address for node in nodes)

    def name(node: NodeSnapshot) -> str:
        if node.name and names[node.name] == 1:
            return node.name
        return node.address if node.address and addresses[node.address] == 1 else node.id[:SHORT_ID]

    return tuple(replace(node, name=name(node)) for node in nodes)


def total_requested(requests: Sequence[ResourceRequest]) -> Resources:
    return total([request.amounts for request in requests if request.node is None]) if requests else NOTHING
