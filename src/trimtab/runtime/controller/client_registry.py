"""What clients publish (elastic groups) and the resources they want from outside autoscalers.

Kept for the lifetime of the client's lease; shown by `status` and `explain`, counted by metrics, used by no decision.
The sum of what all clients want is requested from Ray's autoscaler, and again after a change or a failed request.
Runs on the controller's event loop, which also waits here for changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.runtime.procs.background import NEVER_GIVE_UP, Background, describe

Bundle = Mapping[str, float]
RAY_NAMES = {"cpu": "CPU", "gpu": "GPU"}


@dataclass(frozen=True)
class ClientNotice:
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
        """Notices of a kind, sorted by id."""
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
        """Wake all waiters."""
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
