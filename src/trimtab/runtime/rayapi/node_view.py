"""Ray's view of a cluster's nodes: total and free resources, what holds the rest, which are draining.

Reads Ray's tables without becoming a driver, so it starts no job and changes nothing, except `drain`. When a cluster
vanishes, Ray silently ends processes that query it after a minute, so continuous polling runs in a process of its own
(`RayViewProcess`). Mode and token must have been adopted before (`auth.adopt`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from trimtab.core.codec import decode, encode
from trimtab.core.errors import UnreachableError
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.procs.sampler import ChildSampler, print_samples
from trimtab.runtime.rayapi import draining, private
from trimtab.runtime.rayapi.connect import listens
from trimtab.runtime.rayapi.nodes import RayHolder, RayNode

ANSWER_S = 10
FIRST_ANSWER_S = 30.0  # importing Ray takes a second or two, on a busy machine many
Answer = TypeVar("Answer")


class RayView:
    """Queries one cluster. Seen with Ray 2.60."""

    def __init__(self, address: str) -> None:
        if not listens(address, 0.0):
            raise UnreachableError(
                f"no Ray cluster answers at {address}", hint="`trimtab cluster start` starts one; `ray status` checks"
            )
        self.address = address
        self._gcs = self._call(lambda: private.gcs_client(address))
        self._tables = self._call(lambda: private.gcs_tables(address))

    def nodes(self) -> list[RayNode]:
        """All live nodes, the head first."""
        nodes = [node for node in self._nodes() if node.alive]
        free = self._call(lambda: private.free_resources(self._tables))
        going = self._call(lambda: self._gcs.get_draining_nodes(timeout=ANSWER_S))
        holders = self._holders()
        found = [
            replace(
                node,
                name=node.name or node.node_id[:12],
                free=free.get(node.node_id, {}),
                holders=tuple(holders.get(node.node_id, ())),
                draining=node.node_id in going,
                deadline=(going.get(node.node_id) or 0) / 1000 or None,
            )
            for node in nodes
        ]
        return sorted(found, key=lambda node: (not node.head, node.name, node.node_id))

    def drain(self, node_id: str, deadline_s: float, cause: str) -> None:
        """Have Ray place nothing new on a node, which ends in `deadline_s`."""
        draining.drain_node(self._gcs, self._nodes(), node_id, deadline_s, cause)

    def found(self, word: str) -> str:
        """The id of the node that a word names; InputError for the head and for an unknown one."""
        return draining.match(self._nodes(), word)

    def _nodes(self) -> list[RayNode]:
        return [RayNode.of(row) for row in self._call(self._tables.get_node_table)]

    def _holders(self) -> dict[str, list[RayHolder]]:
        """By node: live actors that hold resources, and bundles of placement groups."""
        from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData

        found: dict[str, list[RayHolder]] = {}
        with contextlib.suppress(Exception):  # the nodes are shown even if their holders are unknown
            for actor in map(ActorTableData.FromString, self._tables.get_actor_table(None, "ALIVE")):
                name = actor.name or actor.class_name or actor.actor_id.hex()[:12]
                holder = RayHolder("actor", name, shown(actor.required_resources), actor.pid or None)
                found.setdefault(actor.address.node_id.hex(), []).append(holder)
        with contextlib.suppress(Exception):
            for group in map(PlacementGroupTableData.FromString, self._tables.get_placement_group_table()):
                for bundle in group.bundles if group.state in (2, 4) else ():  # CREATED, RESCHEDULING
                    name = group.name or group.placement_group_id.hex()[:12]
                    holder = RayHolder("group", name, shown(bundle.unit_resources))
                    found.setdefault(bundle.node_id.hex(), []).append(holder)
        return found

    def _call(self, query: Callable[[], Answer]) -> Answer:
        try:
            return query()
        except Exception as fault:
            raise UnreachableError(
                f"the Ray cluster at {self.address} does not answer: {first_line(fault)}",
                hint="`trimtab cluster show` says what is left of it",
            ) from None


class RayViewProcess(ChildSampler[list[RayNode]]):
    """Polls a cluster in a child process; every read has a deadline."""

    def __init__(self, address: str, every_s: float = 0.2) -> None:
        self.address = address
        super().__init__(__name__, address, str(every_s), parse=lambda rows: [decode(RayNode, row) for row in rows])

    def nodes(self, wait_s: float = FIRST_ANSWER_S, stale_s: float = ANSWER_S) -> list[RayNode]:
        """The latest nodes, not older than `stale_s`; waits for them, UnreachableError in the end."""
        deadline = time.monotonic() + wait_s
        while True:
            sample, age_s = self.latest()
            if not isinstance(sample, str) and age_s <= stale_s:
                return sample
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self.is_alive:
                why = sample if isinstance(sample, str) else "it stopped answering"
                raise UnreachableError(
                    f"the Ray cluster at {self.address} does not answer: {why}",
                    hint="`trimtab cluster show` says what is left of it",
                )
            self.wait(min(left_s, 0.2))


def shown(amounts: Mapping[str, float]) -> dict[str, float]:
    """Resources by trimtab names, without those that Ray adds for itself."""
    names = {"CPU": "cpu", "GPU": "gpu"}
    return {
        names.get(name, name): float(amount)
        for name, amount in sorted(amounts.items())
        if not name.startswith(("node:", "bundle_", "accelerator_type:")) and "_group_" not in name
    }


if __name__ == "__main__":
    print_samples(
        lambda: RayView(sys.argv[1]), lambda view: [encode(node) for node in view.nodes()], float(sys.argv[2])
    )
