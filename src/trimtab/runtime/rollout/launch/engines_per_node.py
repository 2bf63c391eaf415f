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


def on_slots(worker: str, **settings: object) -> WorkerSpec:
    """A worker on a slot: stopped rather than put to sleep, for asleep it would keep its slot."""
    return WorkerSpec(worker, startable=True, can_sleep=False, **settings)  # type: ignore[arg-type]


def places_on(node: NodeView, unit: Resources, per_node: int | None = None) -> int:
    """Engines that a node has room for: what others than trimtab hold of it is left out."""
    if node.state not in (NodeState.ready, NodeState.suspect) or not node.announced:
        return 0  # one that is silent for a moment keeps what it has
    free = node.facts.total.minus(node.outside)
    fit = min((free.get(name) // units for name, units in unit), default=0)
    return fit if per_node is None else min(fit, per_node)


class EnginesPerNode:
    """As many workers as there are places, at least `least` and at most `most`."""

    def __init__(
        self,
        launcher: SlotLauncher,
        *,
        least: int = 0,
        most: int = 64,
        per_node: int | None = None,
        name: str = "engine",
        spec: MakeSpec = on_slots,
    ) -> None:
        if not 0 <= least <= most or (per_node is not None and per_node < 1):
            raise InputError(
                f"least {least}, most {most}, per_node {per_node}", where="engines that follow nodes",
                hint="0 <= least <= most, and at least 1 for each node",
            )  # fmt: skip
        self._launcher = launcher
        self._least, self._most, self._per_node = least, most, per_node
        self._name, self._spec = name, spec
        self._numbers = itertools.count(1)
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self.workers: list[str] = []

    def hear(self, nodes: Iterable[NodeView]) -> None:
        """The nodes are these: add or remove workers."""
        there = {one.node: one for one in nodes}
        places = sum(places_on(one, self._launcher.unit, self._per_node) for one in there.values())
        wanted = max(self._least, min(self._most, places))
        while len(self.workers) < wanted:
            worker = f"{self._name}-{next(self._numbers)}"
            self._launcher.pool.add_startable(self._spec(worker), self._launcher)
            self.workers.append(worker)
        surplus = len(self.workers) - wanted
        if surplus > 0:
            for worker in sorted(self.workers, key=lambda one: self._worth(one, there))[:surplus]:
                self._remove(worker)

    def _worth(self, worker: str, there: dict[str, NodeView]) -> int:
        """Who goes first: those whose node goes or is gone, then those without one."""
        place = self._launcher.places.get(worker)
        if place is None or not place.line.there:
            return 1
        node = there.get(place.line.node)
        return 0 if place.node_goes or node is None or node.state is not NodeState.ready else 2

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
