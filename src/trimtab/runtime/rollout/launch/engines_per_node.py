"""Adjusts the number of startable workers to the nodes of a cluster, within limits.

A joining node adds workers, which are started on demand; a draining or lost node removes as many, its own first. How
many of them serve is decided by the pool. What must never happen: a worker that serves on a staying node is removed
while a worker without a node could be removed instead.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.resources import Resources
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.rollout import WorkerSpec
from trimtab.runtime.rollout.launch.slots import SlotLauncher

log = logging.getLogger("trimtab.rollout")

MakeSpec = Callable[[str], WorkerSpec]


def slot_worker(worker: str, **settings: object) -> WorkerSpec:
    """A worker on a slot: stopped instead of put to sleep, because a sleeping engine would keep its slot."""
    return WorkerSpec(worker, startable=True, can_sleep=False, **settings)  # type: ignore[arg-type]


def engines_that_fit(node: NodeView, unit: Resources, per_node: int | None = None) -> int:
    """Number of engines, or parts of engines, that fit on a node, beside what is used outside trimtab."""
    if node.state not in (NodeState.ready, NodeState.suspect) or not node.announced:
        return 0  # a suspect node keeps its workers
    free = node.facts.total.minus(node.outside)
    fit = min((free.get(name) // units for name, units in unit), default=0)
    return fit if per_node is None else min(fit, per_node)


def engines_over(parts: Sequence[int], nodes: int) -> int:
    """Number of engines that have a part on each of `nodes` nodes, if so many parts fit on each node there is."""
    engines = sum(parts) // nodes
    while sum(min(fit, engines) for fit in parts) < engines * nodes:
        engines -= 1
    return engines


class EnginesPerNode:
    """As many workers as engines fit on the nodes, within `min_workers` and `max_workers`."""

    def __init__(
        self,
        launcher: SlotLauncher,
        *,
        min_workers: int = 0,
        max_workers: int = 64,
        per_node: int | None = None,
        name: str = "engine",
        spec: MakeSpec = slot_worker,
    ) -> None:
        if not 0 <= min_workers <= max_workers or (per_node is not None and per_node < 1):
            raise InputError(
                f"min_workers {min_workers}, max_workers {max_workers}, per_node {per_node}", where="engines per node",
                hint="0 <= min_workers <= max_workers, and per_node at least 1",
            )  # fmt: skip
        self._launcher = launcher
        self._min_workers, self._max_workers, self._per_node = min_workers, max_workers, per_node
        self._name, self._spec = name, spec
        self._numbers = itertools.count(1)
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self.workers: list[str] = []

    def update(self, nodes: Iterable[NodeView]) -> None:
        """Adds or removes workers for these nodes."""
        by_name = {node.node: node for node in nodes}
        parts = [engines_that_fit(node, self._launcher.unit, self._per_node) for node in by_name.values()]
        fit = engines_over(parts, self._launcher.nodes)
        wanted = max(self._min_workers, min(self._max_workers, fit))
        while len(self.workers) < wanted:
            worker = f"{self._name}-{next(self._numbers)}"
            self._launcher.pool.add_startable(self._spec(worker), self._launcher)
            self.workers.append(worker)
        surplus = len(self.workers) - wanted
        if surplus > 0:
            for worker in sorted(self.workers, key=lambda worker: self._removal_rank(worker, by_name))[:surplus]:
                self._remove(worker)

    def _removal_rank(self, worker: str, nodes: dict[str, NodeView]) -> int:
        """Removed first: workers of which a node leaves or is gone, then those without a node."""
        slot = self._launcher.worker_slots.get(worker)
        if slot is None or not slot.nodes:
            return 1
        ready = all(name in nodes and nodes[name].state is NodeState.ready for name in slot.nodes)
        return 2 if ready and not slot.node_leaving else 0

    def _remove(self, worker: str) -> None:
        self.workers.remove(worker)

        async def go() -> None:
            try:
                await self._launcher.pool.remove(worker, why="there are fewer nodes")
            except TrimtabError as fault:
                log.warning("%s was not removed: %s", worker, fault.what)
            finally:
                del self._leaving[worker]

        self._leaving[worker] = self._launcher.background.once(f"remove {worker}", go())
