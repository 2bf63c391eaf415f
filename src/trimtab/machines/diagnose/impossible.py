"""Explains why a workload can never start on the nodes that are here: the first condition that rules it out.

Called by `why.py` once it is proven that no placement exists on empty nodes. Checks bundles one by one first, since
"this bundle is too big" helps more than "all together are".
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.core.errors import nearest
from trimtab.core.resources import Resources, amount_text, total
from trimtab.machines.diagnose.findings import Finding, WaitCause
from trimtab.machines.diagnose.fitting import NodeSpace, size_of
from trimtab.machines.diagnose.snapshot import (
    NodeSnapshot,
    PendingWorkloads,
    ResourceRequest,
    WorkloadKind,
    total_requested,
)
from trimtab.model.pool import PlacementStrategy


def impossible(workloads: PendingWorkloads, nodes: Sequence[NodeSnapshot]) -> Finding:
    """The cause, where nothing fits even on empty nodes."""
    first = workloads[0]
    if not nodes:
        sentence = "no node can run workloads"
        remedies = ("start a node: `ray start --address=...`",)
        return Finding(WaitCause.no_node, workloads, sentence, True, remedies=remedies)
    for number, request in enumerate(first.requests):
        if request.node is None:
            found = _alone(workloads, request, f"bundle {number}" if len(first.requests) > 1 else "it", nodes)
            if found is not None:
                return found
    return _together(workloads, nodes)


def _alone(
    workloads: PendingWorkloads, request: ResourceRequest, name: str, nodes: Sequence[NodeSnapshot]
) -> Finding | None:
    for resource, units in request.amounts:
        if not any(node.total.get(resource) for node in nodes):
            return _no_node_has(workloads, name, resource, units, nodes)
    able = [node for node in nodes if request.accepts(node.labels)]
    if not able:
        return _no_label(workloads, request, name, nodes)
    if any(request.amounts.within(node.total) for node in able):
        return None
    near = min(able, key=lambda node: size_of(request.amounts.minus(node.total)))
    of = f" of those with {_labels(request)}" if len(able) < len(nodes) else ""
    lacks = request.amounts.minus(near.total)
    has = ", ".join(amount_text(resource, near.total.get(resource)) for resource, _ in lacks)
    where = f"the only node, {near.name}," if len(able) == 1 and not of else f"the largest node{of}, {near.name},"
    requests = ", ".join(amount_text(resource, request.amounts.get(resource)) for resource, _ in lacks)
    sentence = f"{name} asks {requests} on one node, and {where} has {has} even when empty"
    remedies = (f"ask less: at most {has} on one node", f"add a node with {request.amounts}")
    return Finding(WaitCause.too_big, workloads, sentence, True, remedies=remedies)


def _no_node_has(
    workloads: PendingWorkloads, name: str, resource: str, units: int, nodes: Sequence[NodeSnapshot]
) -> Finding:
    known = {
        resource_name for node in nodes for resource_name, _ in node.total if not resource_name.startswith("node:")
    }
    near = nearest(resource, known - {resource})
    sentence = f"{name} asks {amount_text(resource, units)}, and no node has any {resource}"
    start = "--num-gpus" if resource == "gpu" else f"""--resources='{{"{resource}": {units / 10_000:g}}}'"""
    remedies = (*([f"did you mean {near}?"] if near else []), f"start a node with `ray start ... {start}`")
    return Finding(WaitCause.no_resource, workloads, sentence, True, remedies=remedies)


def _no_label(
    workloads: PendingWorkloads, request: ResourceRequest, name: str, nodes: Sequence[NodeSnapshot]
) -> Finding:
    keys = sorted({selector.key for selectors in request.labels for selector in selectors})
    there = []
    for key in keys:
        values = sorted({dict(node.labels)[key] for node in nodes if key in dict(node.labels)})
        there.append(f"{key} is {' or '.join(values[:5])}" if values else f"no node has a label {key}")
    sentence = f"{name} asks for a node with {_labels(request)}, and there is none: {'; '.join(there)}"
    remedies = ("ask for a label that is there", f"start a node with `ray start ... --labels {keys[0]}=...`")
    return Finding(WaitCause.no_label, workloads, sentence, True, remedies=remedies)


def _together(workloads: PendingWorkloads, nodes: Sequence[NodeSnapshot]) -> Finding:
    first = workloads[0]
    todo = [request for request in first.requests if request.node is None]
    asked = total_requested(first.requests)
    parts = f"{len(first.requests)} {'bundles' if first.kind is WorkloadKind.group else 'parts'}"
    if first.strategy is PlacementStrategy.strict_spread:
        able = sum(
            1 for node in nodes if any(NodeSpace(node.id, node.total, node.labels).takes(request) for request in todo)
        )
        sentence = (
            f"STRICT_SPREAD asks a node for each of its {len(first.requests)} bundles, and {_of(able)} could take one"
        )
        remedies = ("SPREAD in place of STRICT_SPREAD", f"{max(1, len(first.requests) - able)} more nodes")
        return Finding(WaitCause.too_few_nodes, workloads, sentence, True, remedies=remedies)
    if first.strategy is PlacementStrategy.strict_pack:
        near = min(nodes, key=lambda node: size_of(asked.minus(node.total)))
        lacks = asked.minus(near.total)
        has = f"{near.name} comes nearest and lacks {lacks} even when empty" if lacks else "labels rule the others out"
        sentence = f"STRICT_PACK asks all {len(first.requests)} bundles, {asked}, on one node; {has}"
        remedies = ("PACK in place of STRICT_PACK", f"a node with {asked}")
        return Finding(WaitCause.too_big_together, workloads, sentence, True, remedies=remedies)
    whole = total([node.total for node in nodes])
    lacks = asked.minus(whole)
    if lacks:
        has = ", ".join(amount_text(resource, whole.get(resource)) for resource, _ in lacks)
        requests = ", ".join(amount_text(resource, asked.get(resource)) for resource, _ in lacks)
        sentence = f"its {parts} ask {requests} together, and all nodes have {has}, were they empty"
        return Finding(
            WaitCause.too_big_together, workloads, sentence, True, remedies=(f"add nodes with {lacks}", "ask less")
        )
    sentence = f"its {parts}, {asked} together, do not go into the nodes, were they empty"
    remedies = ("smaller bundles", f"a node with {_largest(todo)}")
    return Finding(WaitCause.too_big_together, workloads, sentence, True, remedies=remedies)


def _largest(requests: Sequence[ResourceRequest]) -> Resources:
    return max((request.amounts for request in requests), key=size_of)


def _labels(request: ResourceRequest) -> str:
    return " or ".join(
        " and ".join(str(selector) for selector in selectors) or "any labels" for selectors in request.labels
    )


def _of(count: int) -> str:
    return f"only {count} node" if count == 1 else f"{count} nodes"
