"""Which nodes Ray has, what they have, and what others than trimtab hold of them.

Looks twice a second and tells the machine what changed. What others hold is what Ray calls taken less what our groups
hold; Ray's figures lag behind its own deeds, so a change counts only when it is seen twice while no group of ours on
that node is being made or removed, or when a group could not be made there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.model.pool import Labels
from trimtab.model.resources import GRAIN, NOTHING, Resources, total
from trimtab.pool.events import Event, NodeJoined, NodeLost
from trimtab.pool.machine import PoolMachine
from trimtab.pool.records import Stand
from trimtab.runtime.ray.members import Members

log = logging.getLogger("trimtab.controller")

LOOK_EVERY_S = 0.5
ANSWER_S = 30.0
OUR_NAMES = {"CPU": "cpu", "GPU": "gpu"}


@dataclass(frozen=True)
class NodeSeen:
    """A living node, in Ray's figures."""

    node: str
    total: Resources
    available: Resources
    labels: Labels
    head: bool = False


@dataclass(frozen=True)
class Held:
    """Our groups on one node, and what they hold of it."""

    groups: tuple[tuple[str, Stand], ...]
    amounts: Resources

    def outside(self, seen: NodeSeen) -> Resources:
        """What others hold of the node."""
        return seen.total.minus(seen.available).minus(self.amounts)


_NOTHING_HELD = Held((), NOTHING)


class World(Protocol):
    """What the watch needs of the controller."""

    machine: PoolMachine

    def feed(self, event: Event) -> None:
        """Tell the machine; never raises."""


class NodeWatch:
    """Follows Ray's nodes. `known` are those that the machine was told of."""

    def __init__(
        self,
        world: World,
        members: Members,
        look: Callable[[], list[NodeSeen]],
        on_lost: Callable[[str], None],
    ) -> None:
        self._world = world
        self._members = members
        self._look = look
        self._on_lost = on_lost
        self.known: dict[str, NodeJoined] = {}
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._before: dict[str, Resources] = {}  # what others held by the last look
        self._groups: dict[str, tuple[tuple[str, Stand], ...]] = {}  # of ours, by the last look
        self.fault: str | None = None

    async def watch(self) -> None:
        """Look, again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.step()
            except Exception:
                log.exception("looking at nodes")

    async def step(self, *, wait: bool = False) -> None:
        """Look once. With `wait`, newcomers are joined on return."""
        try:
            seen = {one.node: one for one in await asyncio.wait_for(asyncio.to_thread(self._look), ANSWER_S)}
            self.fault = None
        except Exception as fault:
            self.fault = f"Ray does not say which nodes there are: {fault or type(fault).__name__}"
            log.warning(self.fault)
            return
        for node in [one for one in self.known if one not in seen]:
            await self._lost(node)
        held = self._held()
        for node, one in seen.items():
            if node in self.known:
                self._compare(one, held.get(node, _NOTHING_HELD))
            elif node not in self._joining:
                self._joining[node] = asyncio.get_running_loop().create_task(self._join(one))
        if wait and self._joining:
            await asyncio.wait(self._joining.values(), timeout=ANSWER_S)

    async def look_again(self, nodes: Collection[str], without: str) -> None:
        """A group could not be made on these nodes: tell the machine at once what others hold there."""
        seen = await asyncio.wait_for(asyncio.to_thread(self._look), ANSWER_S)
        held = self._held(without)
        for one in seen:
            if one.node in nodes and one.node in self.known:
                self._tell(one, held.get(one.node, _NOTHING_HELD).outside(one))

    def adopt(self, known: Mapping[str, NodeJoined]) -> None:
        """Nodes that the machine knows from before."""
        self.known.update(known)

    def close(self) -> None:
        """Stop joining nodes."""
        for task in self._joining.values():
            task.cancel()

    async def _join(self, one: NodeSeen) -> None:
        try:
            await self._members.node_joined(one.node)  # a warden first: nothing runs where nobody can end it
        except Exception as fault:
            log.warning("node %s is not used yet: %s", one.node[:12], fault)
            return
        finally:
            self._joining.pop(one.node, None)
        self._tell(one, self._held().get(one.node, _NOTHING_HELD).outside(one))

    async def _lost(self, node: str) -> None:
        del self.known[node]
        self._before.pop(node, None)
        self._groups.pop(node, None)
        self._world.feed(NodeLost(node))
        self._on_lost(node)
        try:
            await self._members.node_lost(node)
        except Exception:
            log.exception("node %s could not be forgotten", node[:12])

    def _compare(self, one: NodeSeen, held: Held) -> None:
        told = self.known[one.node]
        settled = held.groups == self._groups.get(one.node) and all(stand is Stand.standing for _, stand in held.groups)
        outside = held.outside(one)
        seen_twice = settled and self._before.get(one.node) == outside
        self._groups[one.node] = held.groups
        self._before[one.node] = outside
        if (one.total, one.labels) != (told.total, told.labels):
            self._tell(one, told.outside)
        elif seen_twice and outside != told.outside:
            self._tell(one, outside)

    def _tell(self, one: NodeSeen, outside: Resources) -> None:
        joined = NodeJoined(one.node, one.total, outside, one.labels)
        if self.known.get(one.node) != joined:
            self.known[one.node] = joined
            self._world.feed(joined)

    def _held(self, without: str | None = None) -> dict[str, Held]:
        """By node, what our groups hold, other than one that could not be made."""
        groups: dict[str, list[tuple[str, Stand]]] = {}
        bundles: dict[str, list[Resources]] = {}
        for group in self._world.machine.groups.values():
            if group.id != without:
                for bundle, node in zip(group.bundles, group.nodes, strict=True):
                    groups.setdefault(node, []).append((group.id, group.stand))
                    bundles.setdefault(node, []).append(bundle)
        return {node: Held(tuple(groups[node]), total(bundles[node])) for node in groups}


def look(ray: Any) -> list[NodeSeen]:
    """Ray's living nodes, now. Blocks; not for the loop."""
    from ray._private import state  # Ray has no public call for what is available on each node

    available = state.available_resources_per_node()
    seen = []
    for node in ray.nodes():
        if not node.get("Alive"):
            continue
        amounts = node.get("Resources", {})
        labels = tuple(sorted((str(key), str(value)) for key, value in (node.get("Labels") or {}).items()))
        everything = amounts_of(amounts)
        free = amounts_of(available[node["NodeID"]]) if node["NodeID"] in available else everything
        head = "node:__internal_head__" in amounts
        seen.append(NodeSeen(node["NodeID"], everything, _among(free, everything), labels, head))
    return seen


def amounts_of(amounts: Mapping[str, float]) -> Resources:
    """Ray's amounts in our words, without what Ray keeps for itself."""
    ours = {OUR_NAMES.get(name, name): amount for name, amount in amounts.items() if _is_ours(name)}
    units = [(name, math.floor(amount * GRAIN + 0.5)) for name, amount in sorted(ours.items())]
    return Resources(tuple((name, amount) for name, amount in units if amount > 0))


def _is_ours(name: str) -> bool:
    kept_by_ray = name.startswith(("node:", "bundle_")) or "_group_" in name
    return not kept_by_ray and name != "object_store_memory"


def _among(amounts: Resources, known: Resources) -> Resources:
    names = {name for name, _ in known}
    return Resources(tuple((name, units) for name, units in amounts if name in names)) if amounts else NOTHING
