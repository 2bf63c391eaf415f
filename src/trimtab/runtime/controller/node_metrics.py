"""Figures of nodes and elastic groups for Ray's exporter: how many are wanted, how many there are, what it cost.

Like those of pools (`metrics`): they change nothing, and where they cannot be told they stop and `fault` says why.
`trimtab_desired_workers` is what an outside autoscaler is to read: nodes that would be of use, those there included.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trimtab.core.resources import Resources
from trimtab.model.nodes import THERE, NodeState, NodeView
from trimtab.runtime.controller.client_registry import ClientRegistry
from trimtab.runtime.controller.metrics import MetricRecorder, MetricSpec, in_ray

log = logging.getLogger("trimtab.controller")

NODES = MetricSpec("trimtab_nodes", "gauge", ("state",), "Nodes that are there or were not long ago, by state.")
DESIRED = MetricSpec(
    "trimtab_desired_workers", "gauge", (), "Nodes that would be of use, those that are there included."
)
WANTED = MetricSpec("trimtab_group_members_wanted", "gauge", ("group",), "Members that an elastic group could use.")
SIZE = MetricSpec("trimtab_group_members", "gauge", ("group",), "Members that work together in an elastic group.")
REDONE = MetricSpec("trimtab_group_steps_redone", "counter", ("group",), "Steps that were interrupted and done again.")
RESTARTS = MetricSpec("trimtab_group_restarts", "counter", ("group",), "Members that were lost, unhealthy or hung.")
JOIN_MS = MetricSpec(
    "trimtab_node_join_to_step_ms", "histogram", ("group",), "From the join of a node to the first step with it."
)
LEAD_MS = MetricSpec(
    "trimtab_drain_lead_ms", "histogram", ("group",), "How long before a node's deadline its last member was gone."
)
METRICS = (NODES, DESIRED, WANTED, SIZE, REDONE, RESTARTS, JOIN_MS, LEAD_MS)


class NodeMetrics:
    """Tells figures of nodes and groups. Never raises."""

    def __init__(self, controller: str, make: Callable[[MetricSpec], MetricRecorder] = in_ray) -> None:
        self._controller = {"controller": controller}
        self._counted: dict[tuple[str, str], float] = {}  # by metric and group: what its counter was last said to be
        self._groups: set[str] = set()  # that have a gauge
        self._recorders: dict[str, MetricRecorder] = {}
        self.fault: str | None = None
        try:
            self._recorders = {one.name: make(one) for one in METRICS}
        except Exception as fault:
            self._give_up(fault)

    def observe(self, kind: str, id: str, facts: Mapping[str, Any]) -> None:
        """A group said how it stands."""
        if self.fault is not None or kind != "group":
            return
        try:
            for metric, key in ((REDONE, "redone"), (RESTARTS, "restarts")):
                said = float(facts.get(key) or 0)
                before = self._counted.get((metric.name, id), 0.0)
                self._counted[metric.name, id] = said
                if said > before:
                    self._record(metric, said - before, id)
            for metric, key in ((JOIN_MS, "join_to_step_s"), (LEAD_MS, "drain_lead_s")):
                for seconds in facts.get(key) or ():
                    self._record(metric, seconds * 1e3, id)
        except Exception as fault:
            self._give_up(fault)

    def sample(self, nodes: Sequence[NodeView], desired: int, client_registry: ClientRegistry) -> None:
        """Tell how nodes and groups stand."""
        if self.fault is not None:
            return
        try:
            states = Counter(one.state for one in nodes)
            for state in NodeState:
                self._record(NODES, states[state], state.value)
            self._record(DESIRED, desired)
            groups = {one.id: one.facts for one in client_registry.notices("group")}
            for id in self._groups | set(groups):
                facts = groups.get(id, {})
                self._record(WANTED, float(facts.get("wanted") or 0), id)
                self._record(SIZE, float(facts.get("size") or 0), id)
            self._groups = set(groups)
        except Exception as fault:
            self._give_up(fault)

    def _record(self, metric: MetricSpec, figure: float, *labels: str) -> None:
        tags = {**self._controller, **dict(zip(metric.labels, labels, strict=True))}
        self._recorders[metric.name](max(0.0, float(figure)), tags)

    def _give_up(self, fault: Exception) -> None:
        self.fault = f"metrics of nodes and groups stopped: {type(fault).__name__}: {fault}"
        log.error(self.fault, exc_info=fault)


def desired_workers(nodes: Sequence[NodeView], busy: Collection[str], wanted: Sequence[Mapping[str, float]]) -> int:
    """How many nodes would be of use: enough of the largest kind there is for all that is wanted, and those in use.

    Workers are nodes with GPUs, where any has some; else all but the head. Where nobody says what is wanted, those that
    are there and stay.
    """
    staying = [one for one in nodes if one.state in THERE and one.state is not NodeState.draining]
    with_gpus = [one for one in staying if one.facts.total.get("gpu")]
    staying = with_gpus or [one for one in staying if not one.facts.head]
    if not wanted:
        return len(staying)
    if not staying:
        return 1  # of what kind it will be nobody knows yet; once it is there, the rest is reckoned
    totals = [dict(one.facts.total) for one in staying]
    largest = max(totals, key=lambda amounts: (amounts.get("gpu", 0), amounts.get("cpu", 0)))
    asked: Counter[str] = Counter()
    for bundle in wanted:
        asked.update(dict(Resources.of(bundle, where="what is wanted")))
    shares = [units / largest[name] for name, units in asked.items() if largest.get(name)]
    return max(sum(one.node in busy for one in staying), math.ceil(max(shares, default=0.0)))
