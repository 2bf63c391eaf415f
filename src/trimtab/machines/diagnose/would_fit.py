"""Checks whether a plan fits on a cluster: now, and on empty nodes.

Takes a plan and a snapshot, and reports which group does not fit and by how much. Changes nothing, and plans nothing.
GPUs of one model copy must be on one node; beyond that a group may lie on any nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from trimtab.core.frozen import Frozen
from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.diagnose.findings import Finding
from trimtab.machines.diagnose.fitting import NodeSpace, place
from trimtab.machines.diagnose.snapshot import (
    GcsSnapshot,
    LabelSelector,
    LabelSelectors,
    PendingWorkload,
    ResourceRequest,
    WorkloadKind,
)
from trimtab.machines.diagnose.why import judge
from trimtab.model.plan import Plan
from trimtab.model.workflow import PlacementJob

KIND_LABEL = "ray.io/accelerator-type"
MAX_CPU_REQUESTS = 64


class PlannedGroup(Frozen):
    """Components that share GPUs (or a CPU component), and their resource requests."""

    name: str
    gpus: int
    block: int  # GPUs that must be on one node
    requests: tuple[ResourceRequest, ...]


class GroupFit(Frozen):
    """Whether a group fits once those before it are placed, and what it lacks."""

    group: PlannedGroup
    now: bool
    ever: bool
    nodes: tuple[str, ...] = ()  # where it would run now
    lacks_now: Resources = NOTHING
    lacks_ever: Resources = NOTHING


class WouldFit(Frozen):
    """The answer. `finding` is the cause where it does not fit now."""

    groups: tuple[GroupFit, ...]
    finding: Finding | None
    notes: tuple[str, ...] = ()

    @property
    def now(self) -> bool:
        return all(group.now for group in self.groups)

    @property
    def ever(self) -> bool:
        """Whether all of it could start on empty nodes."""
        return all(group.ever for group in self.groups)


def would_fit(name: str, job: PlacementJob, plan: Plan, snapshot: GcsSnapshot) -> WouldFit:
    """Whether the groups of a plan fit together."""
    notes: list[str] = []
    groups = planned(job, plan, snapshot, notes)
    staying = [node for node in snapshot.nodes if node.drain is None]
    now = _one_by_one(groups, [NodeSpace(node.id, node.free, node.labels) for node in staying])
    ever = _one_by_one(groups, [NodeSpace(node.id, node.total, node.labels) for node in staying])
    fits = tuple(
        GroupFit(
            group, not a.lacks, not b.lacks, tuple(dict.fromkeys(map(snapshot.node_name, a.nodes))), a.lacks, b.lacks
        )
        for group, a, b in zip(groups, now, ever, strict=True)
    )
    requests = tuple(request for group in groups for request in group.requests)
    fine = all(fit.now for fit in fits)
    return WouldFit(
        fits,
        None if fine else judge(snapshot, PendingWorkload(name, WorkloadKind.plan, name, requests)),
        tuple(dict.fromkeys(notes)),
    )


def planned(job: PlacementJob, plan: Plan, snapshot: GcsSnapshot, notes: list[str]) -> tuple[PlannedGroup, ...]:
    """Resource requests of each group of a plan."""
    kinds = {dict(node.labels).get(KIND_LABEL) for node in snapshot.nodes if node.total.get("gpu")} - {None}
    widest = max((node.gpus for node in job.cluster.nodes), default=1) or 1
    groups = []
    for group in plan.groups:
        labels: tuple[LabelSelectors, ...] = ()
        if group.kind and kinds:
            labels = ((LabelSelector(KIND_LABEL, (group.kind,)),),)
        elif group.kind:
            notes.append(f"no node has the label {KIND_LABEL}: whether its GPUs are {group.kind} was not checked")
        block = _block(job, plan, group.components, widest)
        whole, rest = divmod(len(group.gpus), block)
        sizes = [block] * whole + ([rest] if rest else [])
        requests = tuple(ResourceRequest(Resources.of(gpu=size), labels) for size in sizes)
        groups.append(PlannedGroup(", ".join(group.components), len(group.gpus), block, requests))
    for component in job.workflow.components:
        if component.on_cpu and component.cpus:
            size = math.ceil(component.cpus / MAX_CPU_REQUESTS)
            full = int(component.cpus // size)
            left = component.cpus - full * size
            cpus = [float(size)] * full + ([left] if left else [])
            groups.append(
                PlannedGroup(component.name, 0, 0, tuple(ResourceRequest(Resources.of(cpu=size)) for size in cpus))
            )
    return tuple(groups)


def _block(job: PlacementJob, plan: Plan, components: Sequence[str], widest: int) -> int:
    """GPUs that must be on one node: the largest model-parallel size of the members, capped by the node size."""
    sizes = [1]
    for name in components:
        chosen = plan.placed(name).variant
        variants = job.workflow.component(name).variants
        sizes += [variant.multiple_of for variant in variants if variant.name == chosen]
    return min(max(sizes), widest)


class _PlacedGroup(Frozen):
    nodes: tuple[str, ...]
    lacks: Resources


def _one_by_one(groups: Sequence[PlannedGroup], spaces: Sequence[NodeSpace]) -> list[_PlacedGroup]:
    """Each group after those before it: its nodes, and what it lacks."""
    before: list[ResourceRequest] = []
    placed = []
    for group in groups:
        count = _fitting_count(before, group.requests, spaces)
        fit = place([*before, *group.requests[:count]], spaces)
        nodes = (fit.nodes or ())[len(before) :] if count == len(group.requests) else ()
        placed.append(_PlacedGroup(nodes, total([request.amounts for request in group.requests[count:]])))
        before += group.requests[:count]
    return placed


def _fitting_count(
    before: Sequence[ResourceRequest], requests: Sequence[ResourceRequest], spaces: Sequence[NodeSpace]
) -> int:
    """How many of the requests fit after those before them; monotonic, so bisected."""

    def lacks(count: int) -> bool:
        return place([*before, *requests[:count]], spaces).nodes is None

    counts = range(1, len(requests) + 1)
    return bisect_left(counts, True, key=lacks) if lacks(len(requests)) else len(requests)
