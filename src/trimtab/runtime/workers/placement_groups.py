"""Placement groups with every bundle pinned to its node: they hold a task's resources in Ray.

A group is created completely, on the requested nodes, or not at all. One whose bundles are elsewhere must never be
used. The GPU ids of a bundle are read once, at creation. `TaskWorkerManager` uses it; placement is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.core.resources import Resources
from trimtab.machines.pool.events import CreatePlacementGroup
from trimtab.model.pool import BundlePlacement
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rayapi.nodes import live_nodes
from trimtab.runtime.rayapi.slot_view import BundleSlot

_RAY_NAMES = {"cpu": "CPU", "gpu": "GPU"}
_REMOVE_WAIT_S = 30.0
_READ_WAIT_S = 60.0  # for a process that reads a bundle's GPU ids after a recovery


class FoundPlacementGroup(Frozen):
    """An existing placement group; `intact`: every bundle is on an alive node."""

    group: str
    pool: str
    bundles: tuple[Resources, ...]
    nodes: tuple[str | None, ...]  # None: not placed now
    intact: bool


class PlacementGroupError(Exception):
    """A placement group could not be created; nothing of it is left."""


class PlacementGroups:
    """The placement groups of one controller."""

    def __init__(self, controller: str, all_gpus: Callable[[str], tuple[str, ...]] = lambda node: ()) -> None:
        self._all_gpus = all_gpus  # by node; empty if unknown
        self._prefix = f"trimtab:{controller}:"
        self._groups: dict[str, Any] = {}  # by group: Ray handle
        self._devices: dict[tuple[str, int], tuple[str, ...]] = {}

    async def create(self, wanted: CreatePlacementGroup, timeout_s: float) -> None:
        """Create the group, each bundle on its node; PlacementGroupError if not, with nothing left."""
        try:
            await asyncio.wait_for(self._create(wanted), max(timeout_s, 0.001))
        except asyncio.TimeoutError:
            await self.remove(wanted.group, wanted.pool)
            raise PlacementGroupError(f"its resources were not free on its nodes within {timeout_s:.3g} s") from None
        except BaseException:
            await asyncio.shield(self.remove(wanted.group, wanted.pool))
            raise

    async def remove(self, group: str, pool: str) -> None:
        """Remove the group and what runs in it, if it exists."""
        import ray
        from ray.util.placement_group import placement_group_table, remove_placement_group

        for key in [key for key in self._devices if key[0] == group]:
            del self._devices[key]
        handle = self._groups.pop(group, None) or await asyncio.to_thread(self._find, group, pool)
        if handle is None:
            return
        await asyncio.to_thread(remove_placement_group, handle)
        deadline = time.monotonic() + _REMOVE_WAIT_S
        while time.monotonic() < deadline and ray.is_initialized():
            table = await asyncio.to_thread(placement_group_table, handle)
            if table.get("state", "REMOVED") == "REMOVED":
                return
            await asyncio.sleep(0.005)

    async def existing(self) -> dict[str, FoundPlacementGroup]:
        return await asyncio.to_thread(self._existing)

    async def strategy(self, place: BundlePlacement, pool: str, capture: bool) -> Any:
        """Ray scheduling strategy for this bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(
            placement_group=await self._handle(place.group, pool),
            placement_group_bundle_index=place.bundle,
            placement_group_capture_child_tasks=capture,
        )

    async def view(
        self, place: BundlePlacement, pool: str, held: Resources, world: int, capture: bool
    ) -> BundleSlot | None:
        """The bundle as shown to user code in a worker; None if the group does not exist."""
        try:
            handle = await self._handle(place.group, pool)
        except PlacementGroupError:
            return None
        return BundleSlot(handle.id.hex(), place.bundle if world > 1 else -1, ray_resources(held), capture)

    async def devices(self, place: BundlePlacement, pool: str, held: Resources) -> tuple[str, ...]:
        """GPU ids of a bundle."""
        if not held.get("gpu"):
            return ()
        key = (place.group, place.bundle)
        if key not in self._devices:  # after a recovery
            handle = await self._handle(place.group, pool)
            whole = handle.bundle_specs[place.bundle].get("GPU", 0)
            reading = self._read_devices(handle, place.bundle, whole, place.node)
            self._devices[key] = await asyncio.wait_for(reading, _READ_WAIT_S)
        return self._devices[key]

    async def _create(self, wanted: CreatePlacementGroup) -> None:
        from ray.util.placement_group import placement_group, placement_group_table

        creating = asyncio.ensure_future(
            asyncio.to_thread(
                placement_group,
                [ray_resources(bundle) for bundle in wanted.bundles],
                strategy=wanted.strategy.value,
                name=self._name(wanted.group, wanted.pool),
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node} for node in wanted.nodes],
            )
        )
        try:
            handle = self._groups[wanted.group] = await asyncio.shield(creating)
            await handle.ready()
            table = await asyncio.to_thread(placement_group_table, handle)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # wait for it, so that it can be removed
                self._groups[wanted.group] = await creating
            raise
        except Exception as fault:
            raise PlacementGroupError(f"Ray refused it: {describe(fault)}") from fault
        nodes = tuple(table["bundles_to_node_id"].get(index) for index in range(len(wanted.nodes)))
        if nodes != wanted.nodes:
            raise PlacementGroupError(f"Ray put it on {_short(nodes)} instead of {_short(wanted.nodes)}")
        counts = {index: bundle.floats()["gpu"] for index, bundle in enumerate(wanted.bundles) if bundle.get("gpu")}
        reading = (self._read_devices(handle, index, gpus, wanted.nodes[index]) for index, gpus in counts.items())
        for index, devices in zip(counts, await asyncio.gather(*reading), strict=True):
            self._devices[wanted.group, index] = devices

    async def _read_devices(self, handle: Any, bundle: int, gpus: float, node: str) -> tuple[str, ...]:
        """GPU ids of a bundle. If it has all GPUs of the node, no process (which takes a second) is needed."""
        everything = self._all_gpus(node)
        if everything and gpus == len(everything):
            return everything
        return await _read_devices(handle, bundle, gpus)

    async def _handle(self, group: str, pool: str) -> Any:
        if group not in self._groups:
            handle = await asyncio.to_thread(self._find, group, pool)
            if handle is None:
                raise PlacementGroupError(f"placement group {self._name(group, pool)} does not exist")
            self._groups[group] = handle
        return self._groups[group]

    def _find(self, group: str, pool: str) -> Any:
        """Handle of a group by name, also from a driver in another Ray namespace; None if it does not exist."""
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group_table

        name = self._name(group, pool)
        with contextlib.suppress(ValueError):
            return get_placement_group(name)
        for id, table in placement_group_table().items():
            if table["name"] == name and table["state"] != "REMOVED":
                return PlacementGroup(PlacementGroupID(bytes.fromhex(id)))
        return None

    def _existing(self) -> dict[str, FoundPlacementGroup]:
        import ray
        from ray.util.placement_group import placement_group_table

        alive = {node.node_id for node in live_nodes(ray)}
        found = {}
        for table in placement_group_table().values():
            name = table["name"]
            if not name.startswith(self._prefix) or table["state"] == "REMOVED":
                continue
            pool, _, group = name.removeprefix(self._prefix).rpartition(":")
            placed = table["bundles_to_node_id"] if table["state"] == "CREATED" else {}
            nodes = tuple(
                node if (node := placed.get(index)) in alive else None for index in range(len(table["bundles"]))
            )
            bundles = tuple(own_resources(table["bundles"][index]) for index in range(len(nodes)))
            found[group] = FoundPlacementGroup(group, pool, bundles, nodes, None not in nodes)
        return found

    def _name(self, group: str, pool: str) -> str:
        return f"{self._prefix}{pool}:{group}"


def ray_resources(resources: Resources) -> dict[str, float]:
    return {_RAY_NAMES.get(name, name): amount for name, amount in resources.floats().items()}


def own_resources(amounts: dict[str, float]) -> Resources:
    own = {theirs: ours for ours, theirs in _RAY_NAMES.items()}
    return Resources.of({own.get(name, name): amount for name, amount in amounts.items()})


async def _read_devices(handle: Any, bundle: int, gpus: float) -> tuple[str, ...]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    reader = ray.remote(_own_devices).options(
        num_cpus=0,
        num_gpus=gpus,
        name="trimtab.devices",
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=handle, placement_group_bundle_index=bundle
        ),
    )
    return tuple(await reader.remote())


def _own_devices() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _short(nodes: Sequence[str | None]) -> str:
    return ", ".join(node[:12] if node else "no node" for node in nodes)
