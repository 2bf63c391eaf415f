"""Metrics of nodes and elastic groups for Ray's exporter.

Like those of pools (`metrics`): they change nothing; after a failure they stop and `fault` says why. An outside
autoscaler reads `trimtab_desired_workers`: nodes that could be used, including the present ones.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trimtab.core.resources import Resources
from trimtab.model.nodes import THERE, NodeState, NodeView
from trimtab.runtime.controller.clients import ClientRegistry
from trimtab.runtime.controller.metrics import MetricRecorder, MetricSpec, in_ray

log = logging.getLogger("trimtab.controller")

NODES = MetricSpec("trimtab_nodes", "gauge", ("state",), "Present and recently lost nodes, by state.")
DESIRED = MetricSpec("trimtab_desired_workers", "gauge", (), "Nodes that could be used, present ones included.")
WANTED = MetricSpec("trimtab_group_members_wanted", "gauge", ("group",), "Members that an elastic group could use.")
SIZE = MetricSpec("trimtab_group_members", "gauge", ("group",), "Members of an elastic group.")
REDONE = MetricSpec("trimtab_group_steps_redone", "counter", ("group",), "Steps that were interrupted and repeated.")
RESTARTS = MetricSpec("trimtab_group_restarts", "counter", ("group",), "Members that were lost, unhealthy or hung.")
JOIN_MS = MetricSpec(
    "trimtab_node_join_to_step_ms", "histogram", ("group",), "From the join of a node to the first step with it."
)
LEAD_MS = MetricSpec(
    "trimtab_drain_lead_ms", "histogram", ("group",), "How long before a node's deadline its last member was gone."
)
METRICS = (NODES, DESIRED, WANTED, SIZE, REDONE, RESTARTS, JOIN_MS, LEAD_MS)


class NodeMetrics:
    """Reports nodes and elastic groups. Never raises."""

    def __init__(self, controller: str, make: Callable[[MetricSpec], MetricRecorder] = in_ray) -> None:
        self._controller = {"controller": controller}
        self._counted: dict[tuple[str, str], float] = {}  # by metric and group: last value reported by the group
        self._groups: set[str] = set()  # with gauges
        self._recorders: dict[str, MetricRecorder] = {}
        self.fault: str | None = None
        try:
            self._recorders = {metric.name: make(metric) for metric in METRICS}
        except Exception as fault:
            self._disable(fault)

    def observe(self, kind: str, id: str, facts: Mapping[str, Any]) -> None:
        """Record facts that a group published."""
        if self.fault is not None or kind != "group":
            return
        try:
            for metric, key in ((REDONE, "redone"), (RESTARTS, "restarts")):
                value = float(facts.get(key) or 0)
                before = self._counted.get((metric.name, id), 0.0)
                self._counted[metric.name, id] = value
                if value > before:
                    self._record(metric, value - before, id)
            for metric, key in ((JOIN_MS, "join_to_step_s"), (LEAD_MS, "drain_lead_s")):
                for seconds in facts.get(key) or ():
                    self._record(metric, seconds * 1e3, id)
        except Exception as fault:
            self._disable(fault)

    def sample(self, nodes: Sequence[NodeView], desired: int, client_registry: ClientRegistry) -> None:
        """Update the gauges."""
        if self.fault is not None:
            return
        try:
            states = Counter(node.state for node in nodes)
            for state in NodeState:
                self._record(NODES, states[state], state.value)
            self._record(DESIRED, desired)
            groups = {notice.id: notice.facts for notice in client_registry.notices("group")}
            for id in self._groups | set(groups):
                facts = groups.get(id, {})
                self._record(WANTED, float(facts.get("wanted") or 0), id)
                self._record(SIZE, float(facts.get("size") or 0), id)
            self._groups = set(groups)
        except Exception as fault:
            self._disable(fault)

    def _record(self, metric: MetricSpec, figure: float, *labels: str) -> None:
        tags = {**self._controller, **dict(zip(metric.labels, labels, strict=True))}
        self._recorders[metric.name](max(0.0, float(figure)), tags)

    def _disable(self, fault: Exception) -> None:
        self.fault = f"metrics of nodes and groups stopped: {type(fault).__name__}: {fault}"
        log.error(self.fault, exc_info=fault)


def desired_workers(nodes: Sequence[NodeView], busy: Collection[str], wanted: Sequence[Mapping[str, float]]) -> int:
    """Number of worker nodes that could be used: enough of the largest present type for all wanted bundles, at least
    those in use.

    Workers are the nodes with GPUs, or all but the head if no node has one. If nothing is wanted: the present nodes
    that are not draining.
    """
    staying = [node for node in nodes if node.state in THERE and node.state is not NodeState.draining]
    with_gpus = [node for node in staying if node.facts.total.get("gpu")]
    staying = with_gpus or [node for node in staying if not node.facts.head]
    if not wanted:
        return len(staying)
    if not staying:
        return 1  # its type is not known yet; once it has joined, the rest is computed
    totals = [dict(node.facts.total) for node in staying]
    largest = max(totals, key=lambda amounts: (amounts.get("gpu", 0), amounts.get("cpu", 0)))
    wanted_units: Counter[str] = Counter()
    for bundle in wanted:
        wanted_units.update(dict(Resources.of(bundle, where="what is wanted")))
    shares = [units / largest[name] for name, units in wanted_units.items() if largest.get(name)]
    return max(sum(node.node in busy for node in staying), math.ceil(max(shares, default=0.0)))
