"""What Ray says of a cluster's nodes: which are there, what is free on them, who holds the rest, which are going.

Reads Ray's tables without becoming a driver, so looking starts no job and changes nothing; only `drain` does. A cluster
that vanishes takes the processes along that are looking at it, by Ray's own will and after a silent minute; so whoever
goes on looking does it through a process of its own (`RayViewProcess`). Mode and token of the cluster have been adopted
(`auth.adopt`) by whoever looks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trimtab.core.codec import decode, encode
from trimtab.core.errors import UnreachableError

ANSWER_S = 10
FIRST_ANSWER_S = 30.0  # importing Ray takes a second or two, on a busy machine many


@dataclass(frozen=True)
class RayHolder:
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
    holders: tuple[RayHolder, ...] = ()
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


class _RayShim:
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
        from trimtab.runtime.rayapi.draining import drain

        drain(_RayShim(self._state, self._gcs), node_id, deadline_s, cause)

    def found(self, word: str) -> str:
        """The id of the node that a word stands for; raises InputError for the head and for an unknown one."""
        from trimtab.runtime.rayapi.draining import found

        return found(_RayShim(self._state, self._gcs), word)

    def _holders(self) -> dict[str, list[RayHolder]]:
        """By node: actors that hold resources, and bundles of placement groups."""
        found: dict[str, list[RayHolder]] = {}
        with contextlib.suppress(Exception):  # not to know who holds is no reason to show nothing
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


class RayViewProcess:
    """Has another process look again and again; every question to it has a deadline."""

    def __init__(self, address: str, every_s: float = 0.2) -> None:
        self.address = address
        self._child = subprocess.Popen(
            [sys.executable, "-m", "trimtab.runtime.localcluster.ray_status", address, str(every_s)],
            stdin=subprocess.PIPE,  # its end is the child's
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        self._news = threading.Condition()
        self._latest: list[RayNode] | str = "it has not answered yet"
        self._at = -math.inf
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> RayViewProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def nodes(self, wait_s: float = FIRST_ANSWER_S, stale_s: float = ANSWER_S) -> list[RayNode]:
        """What it saw last, not older than `stale_s`; waits for it, and raises UnreachableError in the end."""
        deadline = time.monotonic() + wait_s
        with self._news:
            while isinstance(self._latest, str) or time.monotonic() - self._at > stale_s:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self.alive:
                    why = self._latest if isinstance(self._latest, str) else "it has fallen silent"
                    raise UnreachableError(
                        f"the Ray cluster at {self.address} does not answer: {why}",
                        hint="`trimtab cluster status` says what is left of it",
                    )
                self._news.wait(min(left_s, 0.2))
            return self._latest

    @property
    def alive(self) -> bool:
        """Whether the other process is there."""
        return self._child.poll() is None

    def close(self) -> None:
        """Look no more."""
        self._child.kill()
        self._child.wait()
        self._reader.join(5)
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            told = json.loads(line)
            seen = told if isinstance(told, str) else [decode(RayNode, one) for one in told]
            with self._news:
                self._latest, self._at = seen, time.monotonic()
                self._news.notify_all()


def _ours(amounts: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Without what Ray adds for itself."""
    names = {"CPU": "cpu", "GPU": "gpu"}
    kept = (
        (names.get(name, name), float(amount))
        for name, amount in amounts.items()
        if not name.startswith(("node:", "bundle_", "accelerator_type:")) and "_group_" not in name
    )
    return tuple(sorted(kept))


def main() -> None:
    """Print what is seen, a line each time, until whoever asked is gone."""
    address, every_s = sys.argv[1], float(sys.argv[2])

    def leave() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    view: RayView | None = None
    while True:
        try:
            view = view or RayView(address)
            told: Any = [encode(one) for one in view.nodes()]
        except UnreachableError as fault:
            view, told = None, fault.what
        print(json.dumps(told), flush=True)
        time.sleep(every_s)


if __name__ == "__main__":
    main()
