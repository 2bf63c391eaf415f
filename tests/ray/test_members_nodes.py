"""Members on several nodes of one machine: groups pinned to nodes, and the loss of one."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

from trimtab.core.resources import Resources
from trimtab.machines.pool.events import CreatePlacementGroup
from trimtab.model.pool import BundlePlacement, PlacementStrategy
from trimtab.runtime.controller.rpc import TaskPayload, TaskStartError, TaskWorker
from trimtab.runtime.workers.placement_groups import PlacementGroupError
from trimtab.runtime.workers.task_workers import TaskWorkerManager
from waiting import until_async

CPU = Resources.of(cpu=1)
WAIT_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


class Here:
    def where(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ["TRIMTAB_RANK"]


def group(name: str, strategy: PlacementStrategy, *nodes: str, wait_s: float = WAIT_S) -> CreatePlacementGroup:
    return CreatePlacementGroup(name, "pool", (CPU,) * len(nodes), nodes, strategy, time.monotonic() + wait_s)


@pytest.mark.long
def test_groups_and_members_are_on_their_nodes_and_a_lost_node_is_noticed(cluster: Cluster) -> None:
    added = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
    a, b = (node.node_id for node in added)
    deaths: list[Any] = []

    async def story() -> None:
        members = TaskWorkerManager(f"c-{uuid.uuid4().hex[:6]}", None, lambda member, why: deaths.append(member))
        for node in ray.nodes():
            if node["Alive"]:
                await members.node_joined(node["NodeID"])
        try:
            await placed_as_said(members)
            await survives_the_loss(members)
        finally:
            await members.close()

    async def placed_as_said(members: TaskWorkerManager) -> None:
        for strategy, nodes in (
            (PlacementStrategy.pack, (b, a)),
            (PlacementStrategy.spread, (a, a)),
            (PlacementStrategy.strict_pack, (b, b)),
            (PlacementStrategy.strict_spread, (a, b)),
        ):
            await members.create_group(group("g", strategy, *nodes), time.monotonic)
            assert (await members.groups())["g"].nodes == nodes
            await members.remove_group("g", "pool")
        with pytest.raises(PlacementGroupError):
            await members.create_group(group("g", PlacementStrategy.pack, "f" * 56, wait_s=0.2), time.monotonic)
        assert await members.groups() == {}

    async def start(members: TaskWorkerManager, task: str, *nodes: str) -> list[TaskWorker]:
        places = [BundlePlacement("pair", index, node) for index, node in enumerate(nodes)]
        payload = TaskPayload(cloudpickle.dumps((Here, (), {})))
        return (await members.start(task, 1, "pool", places, [CPU] * len(nodes), payload, None, WAIT_S))[0]

    async def survives_the_loss(members: TaskWorkerManager) -> None:
        await members.create_group(group("pair", PlacementStrategy.strict_spread, a, b), time.monotonic)
        pair = await start(members, "pair", a, b)
        assert [await members.handle(member).call.remote("where") for member in pair] == [(a, "0"), (b, "1")]
        await asyncio.to_thread(cluster.remove_node, added[1])
        await until_async(lambda: not next(node["Alive"] for node in ray.nodes() if node["NodeID"] == b))
        seen = (await members.groups())["pair"]
        assert (seen.nodes, seen.intact) == ((a, None), False) or (seen.nodes, seen.intact) == ((None, None), False)
        await members.node_lost(b)
        assert (await members.stop(pair[1], 1.0, False, 0.0, None)).note == f"node {b[:12]} is gone"
        with pytest.raises(TaskStartError, match="is gone") as caught:
            await start(members, "late", b)
        assert not caught.value.fatal
        assert [member.node for member in await members.existing()] == [a]
        await members.stop(pair[0], 1.0, False, 0.0, None)
        assert not Path(f"/proc/{pair[0].pid}").exists()
        await members.remove_group("pair", "pool")
        assert await members.groups() == {}

    asyncio.run(asyncio.wait_for(story(), 3 * WAIT_S))
    assert [member for member in deaths if member.node != b] == []
