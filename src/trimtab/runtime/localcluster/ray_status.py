"""Ray's view of a cluster's nodes: total and free resources, what holds the rest, which are draining.

Reads Ray's tables without becoming a driver, so it starts no job and changes nothing, except `drain`. When a cluster
vanishes, Ray silently ends processes that query it after a minute, so continuous polling runs in a process of its own
(`RayViewProcess`). Mode and token must have been adopted before (`auth.adopt`).
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.errors import UnreachableError
from trimtab.runtime.procs.sampler import ChildSampler, print_samples

ANSWER_S = 10
FIRST_ANSWER_S = 30.0  # importing Ray takes a second or two, on a busy machine many


@dataclass(frozen=True)
class RayHolder:
    """An actor or a placement group that holds resources of a node."""

    kind: str
    name: str
    holds: tuple[tuple[str, float], ...]
    pid: int | None = None


@dataclass(frozen=True)
class RayNode:
    """A live node as Ray reports it."""

    node_id: str
    name: str
    address: str
    port: int  # of its node manager
    head: bool
    total: tuple[tuple[str, float], ...]
    free: tuple[tuple[str, float], ...]
    holders: tuple[RayHolder, ...] = ()
    draining: bool = False
    deadline: float | None = None  # epoch seconds


def answers(address: str, wait_s: float) -> bool:
    """Whether the address accepts connections, within the time."""
    deadline = time.monotonic() + wait_s
    while not _connects(address):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, OverflowError, UnicodeError):
        return False
    return True


class _RayShim:
    """The parts of the ray module that draining needs, for a process that is no driver."""

    def __init__(self, state: Any, gcs: Any) -> None:
        self._private = SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(gcs_client=gcs)))
        self.nodes = state.node_table
        self.is_initialized = lambda: True


class RayView:
    """Queries one cluster."""

    def __init__(self, address: str) -> None:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClient, GcsClientOptions

        if not answers(address, 0.0):
            raise UnreachableError(
                f"no Ray cluster answers at {address}", hint="`trimtab cluster start` starts one; `ray status` checks"
            )
        self.address = address
        self._gcs = self._call(lambda: GcsClient(address=address))
        self._state = GlobalState()
        self._state._initialize_global_state(
            GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )

    def nodes(self) -> list[RayNode]:
        """All live nodes, the head first."""
        rows = [row for row in self._call(self._state.node_table) if row.get("Alive")]
        free = self._call(self._state.available_resources_per_node)
        going = self._call(lambda: self._gcs.get_draining_nodes(timeout=ANSWER_S))
        holders = self._holders()
        found = [
            RayNode(
                node_id=row["NodeID"],
                name=row.get("NodeName") or row["NodeID"][:12],
                address=row["NodeManagerAddress"],
                port=row["NodeManagerPort"],
                head="node:__internal_head__" in row["Resources"],
                total=_ours(row["Resources"]),
                free=_ours(free.get(row["NodeID"], {})),
                holders=tuple(holders.get(row["NodeID"], ())),
                draining=row["NodeID"] in going,
                deadline=(going.get(row["NodeID"]) or 0) / 1000 or None,
            )
            for row in rows
        ]
        return sorted(found, key=lambda node: (not node.head, node.name, node.node_id))

    def drain(self, node_id: str, deadline_s: float, cause: str) -> None:
        """Have Ray place nothing new on a node, which ends in `deadline_s`."""
        from trimtab.runtime.rayapi.draining import drain

        drain(_RayShim(self._state, self._gcs), node_id, deadline_s, cause)

    def found(self, word: str) -> str:
        """The id of the node that a word names; InputError for the head and for an unknown one."""
        from trimtab.runtime.rayapi.draining import found

        return found(_RayShim(self._state, self._gcs), word)

    def _holders(self) -> dict[str, list[RayHolder]]:
        """By node: actors that hold resources, and bundles of placement groups."""
        found: dict[str, list[RayHolder]] = {}
        with contextlib.suppress(Exception):  # the nodes are shown even if their holders are unknown
            for actor in self._actors():
                holds = _ours(actor.required_resources)
                name = actor.name or actor.class_name or actor.actor_id.hex()[:12]
                node = actor.address.node_id.hex()
                found.setdefault(node, []).append(RayHolder("actor", name, holds, actor.pid or None))
        with contextlib.suppress(Exception):
            for group in self._state.placement_group_table().values():
                for bundle, node in (group.get("bundles_to_node_id") or {}).items():
                    if node and group.get("state") in ("CREATED", "RESCHEDULING"):
                        name = group.get("name") or group["placement_group_id"][:12]
                        found.setdefault(node, []).append(RayHolder("group", name, _ours(group["bundles"][bundle])))
        return found

    def _actors(self) -> list[Any]:
        """Live actors with their resource requests, which Ray's own tables leave out."""
        from ray.core.generated.gcs_pb2 import ActorTableData

        accessor = self._state._connect_and_get_accessor()
        return [ActorTableData.FromString(row) for row in accessor.get_actor_table(None, "ALIVE")]

    def _call(self, query: Any) -> Any:
        try:
            return query()
        except Exception as fault:
            lines = str(fault).strip().splitlines()
            raise UnreachableError(
                f"the Ray cluster at {self.address} does not answer: {lines[0] if lines else type(fault).__name__}",
                hint="`trimtab cluster status` says what is left of it",
            ) from None


class RayViewProcess(ChildSampler[list[RayNode]]):
    """Polls a cluster in a child process; every read has a deadline."""

    def __init__(self, address: str, every_s: float = 0.2) -> None:
        self.address = address
        super().__init__("trimtab.runtime.localcluster.ray_status", address, str(every_s), parse=_nodes)

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
                    hint="`trimtab cluster status` says what is left of it",
                )
            self.wait(min(left_s, 0.2))


def _nodes(sample: Any) -> list[RayNode]:
    return [decode(RayNode, row) for row in sample]


def _ours(amounts: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Without the resources that Ray adds for itself."""
    names = {"CPU": "cpu", "GPU": "gpu"}
    kept = (
        (names.get(name, name), float(amount))
        for name, amount in amounts.items()
        if not name.startswith(("node:", "bundle_", "accelerator_type:")) and "_group_" not in name
    )
    return tuple(sorted(kept))


if __name__ == "__main__":
    print_samples(
        lambda: RayView(sys.argv[1]), lambda view: [encode(node) for node in view.nodes()], float(sys.argv[2])
    )
