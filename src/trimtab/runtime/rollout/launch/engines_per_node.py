"""Engines that follow nodes: one startable worker for every place that the nodes of a cluster have, within limits.

A node that joins brings workers, which are started when they are needed and there is room; one that drains or is lost
takes as many away, its own first. How many of them serve at a time is decided elsewhere. What must never happen: a
worker removed that serves on a node that stays, while one that has no node is there to be removed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.resources import Resources
from trimtab.model.nodes import NodeState, NodeView
from trimtab.model.rollout import WorkerSpec
from trimtab.runtime.rollout.launch.slots import SlotLauncher

log = logging.getLogger("trimtab.rollout")

MakeSpec = Callable[[str], WorkerSpec]


def slot_worker(worker: str, **settings: object) -> WorkerSpec:
    """A worker on a slot: stopped rather than put to sleep, for asleep it would keep its slot."""
    return WorkerSpec(worker, startable=True, can_sleep=False, **settings)  # type: ignore[arg-type]


def engines_that_fit(node: NodeView, unit: Resources, per_node: int | None = None) -> int:
    """Engines that a node has room for: what others than trimtab hold of it is left out."""
    if node.state not in (NodeState.ready, NodeState.suspect) or not node.told:
        return 0  # one that is silent for a moment keeps what it has
    free = node.facts.total.minus(node.outside)
    fit = min((free.get(name) // units for name, units in unit), default=0)
    return fit if per_node is None else min(fit, per_node)


class EnginesPerNode:
    """As many workers as there are places, at least `min_workers` and at most `max_workers`."""

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
                f"least {min_workers}, most {max_workers}, per_node {per_node}", where="engines that follow nodes",
                hint="0 <= least <= most, and at least 1 for each node",
            )  # fmt: skip
        self._launcher = launcher
        self._min_workers, self._max_workers, self._per_node = min_workers, max_workers, per_node
        self._name, self._spec = name, spec
        self._numbers = itertools.count(1)
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self.workers: list[str] = []

    def update(self, nodes: Iterable[NodeView]) -> None:
        """The nodes are these: add or remove workers."""
        there = {one.node: one for one in nodes}
        worker_slots = sum(engines_that_fit(one, self._launcher.unit, self._per_node) for one in there.values())
        wanted = max(self._min_workers, min(self._max_workers, worker_slots))
        while len(self.workers) < wanted:
            worker = f"{self._name}-{next(self._numbers)}"
            self._launcher.pool.add_startable(self._spec(worker), self._launcher)
            self.workers.append(worker)
        surplus = len(self.workers) - wanted
        if surplus > 0:
            for worker in sorted(self.workers, key=lambda one: self._removal_rank(one, there))[:surplus]:
                self._remove(worker)

    def _removal_rank(self, worker: str, there: dict[str, NodeView]) -> int:
        """Who goes first: those whose node goes or is gone, then those without one."""
        slot = self._launcher.worker_slots.get(worker)
        if slot is None or not slot.member.there:
            return 1
        node = there.get(slot.member.node)
        return 0 if slot.node_leaving or node is None or node.state is not NodeState.ready else 2

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
