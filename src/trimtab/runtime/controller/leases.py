"""Client leases: what was submitted with `ends_with_me` ends when its client is dead.

A client renews its lease from a thread. After silence of a sixth of the lease, the agent of the client's node checks
its process: dead ends the lease at once; alive keeps it however long the client is busy (a call that holds the GIL); if
unknown (another machine or pid namespace, an unreachable node) the lease runs out. Silence alone must never end a lease
early. `ControllerLoop` runs the checks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.runtime.procs.processes import boot_id, born, pid_namespace

LEASE_S = 60.0  # default
SILENT_FRACTION = 6  # silence of lease_s / 6 triggers a check of the process


@dataclass(frozen=True)
class ClientProcess:
    """Identity of a client process, unique across machines."""

    node: str  # Ray node id
    boot: str  # boot id of the machine: pids are only valid there
    namespace: int  # pid namespace (inode)
    pid: int
    born: float


def this_process(ray: Any) -> ClientProcess | None:
    """This process; None if it cannot be identified."""
    boot, namespace = _here()
    since = born(os.getpid())
    if not boot or since is None:
        return None
    return ClientProcess(ray.get_runtime_context().get_node_id(), boot, namespace, os.getpid(), since)


def is_alive_here(process: ClientProcess) -> bool | None:
    """Whether the process is alive; None if it cannot be seen from here."""
    if _here() != (process.boot, process.namespace):
        return None
    return born(process.pid) == process.born


def _here() -> tuple[str, int]:
    try:
        return boot_id(), pid_namespace()
    except OSError:
        return "", 0


@dataclass
class _Lease:
    heard_at: float  # time of the last call
    lease_s: float = LEASE_S
    process: ClientProcess | None = None
    alive: bool | None = None  # last result of the process check


class ClientLeases:
    """The leases of a controller's clients. Reports which clients are dead; ends nothing itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def touch(self, client: str) -> None:
        """Record a call of a client, creating its lease if needed."""
        self._leases.setdefault(client, _Lease(0.0)).heard_at = self._clock()

    def renew(self, client: str, lease_s: float, process: ClientProcess | None) -> bool:
        """Renew a lease; false if it has ended already."""
        if client not in self._leases:
            return False
        self._leases[client] = _Lease(self._clock(), lease_s, process)
        return True

    def end(self, client: str) -> None:
        self._leases.pop(client, None)

    def silent(self) -> dict[str, ClientProcess | None]:
        """Silent clients, with their processes if known."""
        return {client: lease.process for client, lease in self._leases.items() if self._is_silent(lease)}

    def is_dead(self, client: str, alive: bool | None) -> bool:
        """Whether a client is dead, given whether its process is alive (None: unknown)."""
        lease = self._leases.get(client)
        if lease is None or not self._is_silent(lease):
            return False
        lease.alive = alive
        if alive is None:
            return self._clock() - lease.heard_at > lease.lease_s
        return not alive

    def status(self) -> list[dict[str, Any]]:
        """Silent clients, as plain data."""
        return [
            {
                "client": client,
                "silent_s": self._clock() - lease.heard_at,
                "lease_s": lease.lease_s,
                "pid": lease.process.pid if lease.process else None,
                "alive": lease.alive,
            }
            for client, lease in self._leases.items()
            if self._is_silent(lease)
        ]

    def _is_silent(self, lease: _Lease) -> bool:
        return self._clock() - lease.heard_at > lease.lease_s / SILENT_FRACTION
