"""The controller's clients: their leases, what they publish, and the resources they want.

A client renews its lease from a thread. What was submitted with `ends_with_me` ends when its client is dead. After
silence of a sixth of the lease, the agent of the client's node checks its process: dead ends the lease at once; alive
keeps it however long the client is busy (a call that holds the GIL); if unknown (another machine or pid namespace, an
unreachable node) the lease runs out. Silence alone must never end a lease early. `ControllerLoop` runs the checks.

What a client publishes (elastic groups) is kept for the lifetime of its lease; shown by `status` and `explain`, counted
by metrics, used by no decision. The sum of what all clients want is requested from Ray's autoscaler, and again after a
change or a failed request. The registry runs on the controller's event loop, which also waits here for changes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, describe
from trimtab.runtime.procs.processes import boot_id, born, pid_namespace

LEASE_S = 60.0  # default
SILENT_FRACTION = 6  # silence of lease_s / 6 triggers a check of the process


class ClientProcess(Frozen):
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


Bundle = Mapping[str, float]
RAY_NAMES = {"cpu": "CPU", "gpu": "GPU"}


class ClientNotice(Frozen):
    """Published facts about an object that a client runs."""

    kind: str
    id: str
    client: str
    facts: Mapping[str, Any]


class ClientRegistry:
    """Notices and wanted resources of live clients, and the waiters for changes."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._notices: dict[tuple[str, str], ClientNotice] = {}
        self._wants: dict[str, list[dict[str, float]]] = {}  # by client
        self._waiting: set[asyncio.Future[None]] = set()
        self._requesting: asyncio.Task[None] | None = None
        self._requested: list[dict[str, float]] = []
        self.fault: str | None = None  # why the last request failed

    # ---- notices

    def put(self, kind: str, id: str, facts: Mapping[str, Any], client: str) -> None:
        self._notices[kind, id] = ClientNotice(kind, id, client, dict(facts))

    def remove(self, kind: str, id: str) -> None:
        self._notices.pop((kind, id), None)

    def notices(self, kind: str) -> list[ClientNotice]:
        return [self._notices[key] for key in sorted(self._notices) if key[0] == kind]

    def forget(self, client: str) -> None:
        for key in [key for key, notice in self._notices.items() if notice.client == client]:
            del self._notices[key]
        if self._wants.pop(client, None) is not None:
            self._request()

    # ---- wants

    @property
    def wanted(self) -> list[dict[str, float]]:
        """Wanted bundles of all clients, in trimtab's resource names."""
        return [bundle for client in sorted(self._wants) for bundle in self._wants[client]]

    def want(self, client: str, bundles: Sequence[Bundle]) -> None:
        """Set the bundles that the client could use beyond what it has; none clears them."""
        if bundles:
            self._wants[client] = [dict(bundle) for bundle in bundles]
        else:
            self._wants.pop(client, None)
        self._request()

    def _request(self) -> None:
        if self._requesting is None or self._requesting.done():
            self._requesting = self._background.start(
                "autoscaler request", self._request_from_autoscaler, policy=NEVER_GIVE_UP
            )

    async def _request_from_autoscaler(self) -> None:
        from ray.autoscaler.sdk import request_resources

        while self.wanted != self._requested:
            wanted = self.wanted
            bundles = [{RAY_NAMES.get(name, name): amount for name, amount in bundle.items()} for bundle in wanted]
            try:
                await asyncio.wait_for(asyncio.to_thread(request_resources, bundles=bundles), 10.0)
            except Exception as fault:
                self.fault = f"the autoscaler request failed: {describe(fault)}"
                raise
            self.fault = None
            self._requested = wanted

    # ---- changes

    def notify(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next change, or the timeout."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=max(0.0, timeout_s))
        finally:
            self._waiting.discard(future)

    async def close(self) -> None:
        self._wants.clear()
        self._request()
        if self._requesting is not None:
            await asyncio.wait([self._requesting], timeout=5.0)
        self.notify()
