"""Leases of clients: what was submitted with `ends_with_me` ends when its client is dead.

A client renews its lease from a thread. One that was not heard of for a sixth of its lease is looked for on its node:
dead there ends the lease at once, alive there keeps it however long the client is busy (a call that holds the GIL), and
where that cannot be known (another machine or pid namespace, a node that does not answer) the lease runs out. A client
is never declared dead on silence alone before that. The controller's driver asks, the node's agent looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.runtime.workers.worker_process import born

LEASE_S = 60.0  # of a client that does not say
SILENT_FRACTION = 6  # silence of so small a part of the lease is looked into


@dataclass(frozen=True)
class ClientProcess:
    """One process, told from every other on any machine."""

    node: str  # Ray's id of the node that it is on
    boot: str  # of the machine: pids and namespaces mean nothing on another
    namespace: int  # of its pid
    pid: int
    born: float


def this_process(ray: Any) -> ClientProcess | None:
    """The process that this is; None where that cannot be said."""
    boot, namespace = _here()
    since = born(os.getpid())
    if not boot or since is None:
        return None
    return ClientProcess(ray.get_runtime_context().get_node_id(), boot, namespace, os.getpid(), since)


def is_alive_here(process: ClientProcess) -> bool | None:
    """Whether the process is alive; None where it cannot be seen from here."""
    if _here() != (process.boot, process.namespace):
        return None
    return born(process.pid) == process.born


def _here() -> tuple[str, int]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return "", 0


@dataclass
class _Lease:
    touch: float  # when, by the clock
    lease_s: float = LEASE_S
    process: ClientProcess | None = None
    alive: bool | None = None  # what its node said last


class ClientLeases:
    """The leases of a controller's clients. Decides who is dead; ends nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def touch(self, client: str) -> None:
        """A client asked for something that ends with it."""
        self._leases.setdefault(client, _Lease(0.0)).touch = self._clock()

    def renew(self, client: str, lease_s: float, process: ClientProcess | None) -> bool:
        """A client says that it is alive; false where it was given up already."""
        if client not in self._leases:
            return False
        self._leases[client] = _Lease(self._clock(), lease_s, process)
        return True

    def end(self, client: str) -> None:
        """The client is gone."""
        self._leases.pop(client, None)

    def silent(self) -> dict[str, ClientProcess | None]:
        """Clients to be looked for, and what is known of their processes."""
        return {client: lease.process for client, lease in self._leases.items() if self._is_silent(lease)}

    def is_dead(self, client: str, alive: bool | None) -> bool:
        """Whether a client is dead, after its node has said whether its process is alive (None: not known)."""
        lease = self._leases.get(client)
        if lease is None or not self._is_silent(lease):
            return False
        lease.alive = alive
        if alive is None:
            return self._clock() - lease.touch > lease.lease_s
        return not alive

    def status(self) -> list[dict[str, Any]]:
        """Clients that are silent, as plain data."""
        return [
            {
                "client": client,
                "silent_s": self._clock() - lease.touch,
                "lease_s": lease.lease_s,
                "pid": lease.process.pid if lease.process else None,
                "alive": lease.alive,
            }
            for client, lease in self._leases.items()
            if self._is_silent(lease)
        ]

    def _is_silent(self, lease: _Lease) -> bool:
        return self._clock() - lease.touch > lease.lease_s / SILENT_FRACTION
