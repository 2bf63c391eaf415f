"""What Ray says of a cluster's nodes: which are there, what is free on them, who holds the rest, which are going.

Reads Ray's tables without becoming a driver, so looking starts no job and changes nothing; only `drain` does. Mode and
token of the cluster have been adopted (`auth.adopt`) by whoever makes a view.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trimtab.model.errors import UnreachableError

ANSWER_S = 10


@dataclass(frozen=True)
class Holder:
    """What holds something on a node: an actor or a placement group."""

    kind: str
    name: str
    holds: tuple[tuple[str, float], ...]
    pid: int | None = None


@dataclass(frozen=True)
class RayNode:
    """A living node, in Ray's words."""

    node_id: str
    name: str
    address: str
    port: int  # of its node manager
    head: bool
    total: tuple[tuple[str, float], ...]
    free: tuple[tuple[str, float], ...]
    holders: tuple[Holder, ...] = ()
    draining: bool = False
    deadline: float | None = None  # epoch seconds


def answers(address: str, wait_s: float) -> bool:
    """Whether something listens at the address, within the time."""
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


class _AsRay:
    """What draining needs of the ray module, for a process that is no driver."""

    def __init__(self, state: Any, gcs: Any) -> None:
        self._private = SimpleNamespace(worker=SimpleNamespace(global_worker=SimpleNamespace(gcs_client=gcs)))
        self.nodes = state.node_table
        self.is_initialized = lambda: True


class RayView:
    """Looks at one cluster."""

    def __init__(self, address: str) -> None:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClient, GcsClientOptions

        if not answers(address, 0.0):
            raise UnreachableError(
                f"no Ray cluster answers at {address}", hint="`trimtab cluster start` starts one; `ray status` looks"
            )
        self.address = address
        self._gcs = self._asked(lambda: GcsClient(address=address))
        self._state = GlobalState()
        self._state._initialize_global_state(
            GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )

    def ids(self) -> set[str]:
        """Of the nodes that Ray has alive."""
        nodes = self._asked(lambda: self._gcs.get_all_node_info(timeout=ANSWER_S))
        return {key.hex() for key, info in nodes.items() if _alive(info)}

    def nodes(self) -> list[RayNode]:
        """All living nodes, the head first."""
        rows = [one for one in self._asked(self._state.node_table) if one.get("Alive")]
        free = self._asked(self._state.available_resources_per_node)
        going = self._asked(lambda: self._gcs.get_draining_nodes(timeout=ANSWER_S))
        holders = self._holders()
        found = [
            RayNode(
                node_id=one["NodeID"],
                name=one.get("NodeName") or one["NodeID"][:12],
                address=one["NodeManagerAddress"],
                port=one["NodeManagerPort"],
                head="node:__internal_head__" in one["Resources"],
                total=_ours(one["Resources"]),
                free=_ours(free.get(one["NodeID"], {})),
                holders=tuple(holders.get(one["NodeID"], ())),
                draining=one["NodeID"] in going,
                deadline=(going.get(one["NodeID"]) or 0) / 1000 or None,
            )
            for one in rows
        ]
        return sorted(found, key=lambda one: (not one.head, one.name, one.node_id))

    def drain(self, node_id: str, deadline_s: float, cause: str) -> None:
        """Have Ray put nothing new on a node, which goes in so many seconds."""
        from trimtab.runtime.ray.draining import drain

        drain(_AsRay(self._state, self._gcs), node_id, deadline_s, cause)

    def found(self, word: str) -> str:
        """The id of the node that a word stands for; raises InputError for the head and for an unknown one."""
        from trimtab.runtime.ray.draining import found

        return found(_AsRay(self._state, self._gcs), word)

    def _holders(self) -> dict[str, list[Holder]]:
        """By node: actors that hold resources, and bundles of placement groups."""
        found: dict[str, list[Holder]] = {}
        with contextlib.suppress(Exception):  # not to know who holds is no reason to show nothing
            for actor in self._actors():
                holds = _ours(actor.required_resources)
                name = actor.name or actor.class_name or actor.actor_id.hex()[:12]
                node = actor.address.node_id.hex()
                found.setdefault(node, []).append(Holder("actor", name, holds, actor.pid or None))
        with contextlib.suppress(Exception):
            for group in self._state.placement_group_table().values():
                for bundle, node in (group.get("bundles_to_node_id") or {}).items():
                    if node and group.get("state") in ("CREATED", "RESCHEDULING"):
                        name = group.get("name") or group["placement_group_id"][:12]
                        found.setdefault(node, []).append(Holder("group", name, _ours(group["bundles"][bundle])))
        return found

    def _actors(self) -> list[Any]:
        """Living actors with what they asked for, which Ray's own tables leave out."""
        from ray.core.generated.gcs_pb2 import ActorTableData

        accessor = self._state._connect_and_get_accessor()
        return [ActorTableData.FromString(one) for one in accessor.get_actor_table(None, "ALIVE")]

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except Exception as fault:
            lines = str(fault).strip().splitlines()
            raise UnreachableError(
                f"the Ray cluster at {self.address} does not answer: {lines[0] if lines else type(fault).__name__}",
                hint="`trimtab cluster status` says what is left of it",
            ) from None


def _ours(amounts: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Without what Ray adds for itself."""
    names = {"CPU": "cpu", "GPU": "gpu"}
    kept = (
        (names.get(name, name), float(amount))
        for name, amount in amounts.items()
        if not name.startswith(("node:", "bundle_", "accelerator_type:")) and "_group_" not in name
    )
    return tuple(sorted(kept))


def _alive(info: Any) -> bool:
    return int(info.state) == 0  # GcsNodeInfo.ALIVE
