"""Why something can never start on the nodes that are here: the first condition that rules it out.

Called by `why.py` once it is proven that no placement exists on empty nodes. Looks at bundles one by one first, since
"this bundle is too big" helps more than "all together are".
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.core.errors import nearest
from trimtab.core.resources import Resources, amount_text, total
from trimtab.machines.diagnose.findings import Finding, WaitCause
from trimtab.machines.diagnose.fitting import NodeSpace
from trimtab.machines.diagnose.snapshot import (
    NodeSnapshot,
    PendingWorkload,
    ResourceRequest,
    WorkloadKind,
    asked_in_all,
)
from trimtab.model.pool import PlacementStrategy


def impossible(who: tuple[PendingWorkload, ...], nodes: Sequence[NodeSnapshot]) -> Finding:
    """The cause, where nothing fits even on empty nodes."""
    first = who[0]
    if not nodes:
        sentence = "there is no node that could take anything"
        return Finding(WaitCause.no_node, who, sentence, True, frees=("start a node: `ray start --address=...`",))
    for number, ask in enumerate(first.asks):
        if ask.node is None:
            found = _alone(who, ask, f"bundle {number}" if len(first.asks) > 1 else "it", nodes)
            if found is not None:
                return found
    return _together(who, nodes)


def _alone(
    who: tuple[PendingWorkload, ...], ask: ResourceRequest, name: str, nodes: Sequence[NodeSnapshot]
) -> Finding | None:
    for resource, units in ask.amounts:
        if not any(one.total.get(resource) for one in nodes):
            return _nobody_has(who, name, resource, units, nodes)
    able = [one for one in nodes if ask.accepts(one.labels)]
    if not able:
        return _no_label(who, ask, name, nodes)
    if any(ask.amounts.within(one.total) for one in able):
        return None
    near = min(able, key=lambda one: _size(ask.amounts.minus(one.total)))
    of = f" of those with {_labels(ask)}" if len(able) < len(nodes) else ""
    lacks = ask.amounts.minus(near.total)
    has = ", ".join(amount_text(resource, near.total.get(resource)) for resource, _ in lacks)
    where = f"the only node, {near.name}," if len(able) == 1 and not of else f"the largest node{of}, {near.name},"
    asks = ", ".join(amount_text(resource, ask.amounts.get(resource)) for resource, _ in lacks)
    sentence = f"{name} asks {asks} on one node, and {where} has {has} even when empty"
    frees = (f"ask less: at most {has} on one node", f"add a node with {ask.amounts}")
    return Finding(WaitCause.too_big, who, sentence, True, frees=frees)


def _nobody_has(
    who: tuple[PendingWorkload, ...], name: str, resource: str, units: int, nodes: Sequence[NodeSnapshot]
) -> Finding:
    known = {one for node in nodes for one, _ in node.total if not one.startswith("node:")}
    near = nearest(resource, known - {resource})
    sentence = f"{name} asks {amount_text(resource, units)}, and no node has any {resource}"
    start = "--num-gpus" if resource == "gpu" else f"""--resources='{{"{resource}": {units / 10_000:g}}}'"""
    frees = (*([f"did you mean {near}?"] if near else []), f"start a node with `ray start ... {start}`")
    return Finding(WaitCause.no_resource, who, sentence, True, frees=frees)


def _no_label(
    who: tuple[PendingWorkload, ...], ask: ResourceRequest, name: str, nodes: Sequence[NodeSnapshot]
) -> Finding:
    keys = sorted({one.key for each in ask.labels for one in each})
    there = []
    for key in keys:
        values = sorted({dict(one.labels)[key] for one in nodes if key in dict(one.labels)})
        there.append(f"{key} is {' or '.join(values[:5])}" if values else f"no node has a label {key}")
    sentence = f"{name} asks for a node with {_labels(ask)}, and there is none: {'; '.join(there)}"
    frees = ("ask for a label that is there", f"start a node with `ray start ... --labels {keys[0]}=...`")
    return Finding(WaitCause.no_label, who, sentence, True, frees=frees)


def _together(who: tuple[PendingWorkload, ...], nodes: Sequence[NodeSnapshot]) -> Finding:
    first = who[0]
    todo = [ask for ask in first.asks if ask.node is None]
    asked = asked_in_all(first.asks)
    parts = f"{len(first.asks)} {'bundles' if first.kind is WorkloadKind.group else 'parts'}"
    if first.strategy is PlacementStrategy.strict_spread:
        able = sum(1 for one in nodes if any(NodeSpace(one.id, one.total, one.labels).takes(ask) for ask in todo))
        sentence = (
            f"STRICT_SPREAD asks a node for each of its {len(first.asks)} bundles, and {_of(able)} could take one"
        )
        frees = ("SPREAD in place of STRICT_SPREAD", f"{max(1, len(first.asks) - able)} more nodes")
        return Finding(WaitCause.too_few_nodes, who, sentence, True, frees=frees)
    if first.strategy is PlacementStrategy.strict_pack:
        near = min(nodes, key=lambda one: _size(asked.minus(one.total)))
        lacks = asked.minus(near.total)
        has = f"{near.name} comes nearest and lacks {lacks} even when empty" if lacks else "labels rule the others out"
        sentence = f"STRICT_PACK asks all {len(first.asks)} bundles, {asked}, on one node; {has}"
        frees = ("PACK in place of STRICT_PACK", f"a node with {asked}")
        return Finding(WaitCause.too_big_together, who, sentence, True, frees=frees)
    whole = total([one.total for one in nodes])
    lacks = asked.minus(whole)
    if lacks:
        has = ", ".join(amount_text(resource, whole.get(resource)) for resource, _ in lacks)
        asks = ", ".join(amount_text(resource, asked.get(resource)) for resource, _ in lacks)
        sentence = f"its {parts} ask {asks} together, and all nodes have {has}, were they empty"
        return Finding(WaitCause.too_big_together, who, sentence, True, frees=(f"add nodes with {lacks}", "ask less"))
    sentence = f"its {parts}, {asked} together, do not go into the nodes, were they empty"
    frees = ("smaller bundles", f"a node with {_largest(todo)}")
    return Finding(WaitCause.too_big_together, who, sentence, True, frees=frees)


def _largest(asks: Sequence[ResourceRequest]) -> Resources:
    return max((ask.amounts for ask in asks), key=_size)


def _labels(ask: ResourceRequest) -> str:
    return " or ".join(" and ".join(str(one) for one in each) or "any labels" for each in ask.labels)


def _of(count: int) -> str:
    return f"only {count} node" if count == 1 else f"{count} nodes"


def _size(amounts: Resources) -> tuple[int, int]:
    return len(amounts.units), sum(units for _, units in amounts)
