"""What clients let the controller know of what they run (elastic groups), and what they want of outside autoscalers.

Kept as long as the client lives, shown by `status` and `explain`, counted by metrics, and decided on by nobody. What
all clients want together is asked of Ray's autoscaler, and again when that changes or could not be asked. On the
controller's loop; whoever waits for news of any kind waits here.
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
    """What a client says of something that it runs."""

    kind: str
    id: str
    client: str
    facts: Mapping[str, Any]


class ClientRegistry:
    """Notices and wants of living clients, and those who wait for news."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._notices: dict[tuple[str, str], ClientNotice] = {}
        self._wants: dict[str, list[dict[str, float]]] = {}  # by client
        self._waiting: set[asyncio.Future[None]] = set()
        self._requesting: asyncio.Task[None] | None = None
        self._requested: list[dict[str, float]] = []
        self.fault: str | None = None  # why the autoscaler was not asked

    # ---- notices

    def put(self, kind: str, id: str, facts: Mapping[str, Any], client: str) -> None:
        """Take or replace a notice."""
        self._notices[kind, id] = ClientNotice(kind, id, client, dict(facts))

    def remove(self, kind: str, id: str) -> None:
        """The thing is not there any more."""
        self._notices.pop((kind, id), None)

    def notices(self, kind: str) -> list[ClientNotice]:
        """All of a kind, by id."""
        return [self._notices[key] for key in sorted(self._notices) if key[0] == kind]

    def forget(self, client: str) -> None:
        """The client is gone."""
        for key in [key for key, one in self._notices.items() if one.client == client]:
            del self._notices[key]
        if self._wants.pop(client, None) is not None:
            self._request()

    # ---- wants

    @property
    def wanted(self) -> list[dict[str, float]]:
        """All that clients want together, in our words."""
        return [bundle for client in sorted(self._wants) for bundle in self._wants[client]]

    def want(self, client: str, bundles: Sequence[Bundle]) -> None:
        """The client could use all of these at once; none: nothing beyond what it has."""
        if bundles:
            self._wants[client] = [dict(bundle) for bundle in bundles]
        else:
            self._wants.pop(client, None)
        self._request()

    def _request(self) -> None:
        if self._requesting is None or self._requesting.done():
            self._requesting = self._background.start(
                "ask the autoscaler", self._request_from_autoscaler, policy=NEVER_GIVE_UP
            )

    async def _request_from_autoscaler(self) -> None:
        from ray.autoscaler.sdk import request_resources

        while self.wanted != self._requested:
            wanted = self.wanted
            bundles = [{RAY_NAMES.get(name, name): amount for name, amount in one.items()} for one in wanted]
            try:
                await asyncio.wait_for(asyncio.to_thread(request_resources, bundles=bundles), 10.0)
            except Exception as fault:
                self.fault = f"the autoscaler could not be asked: {describe(fault)}"
                raise
            self.fault = None
            self._requested = wanted

    # ---- news

    def notify(self) -> None:
        """Something changed: whoever waits looks again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return when something changed, or after so long."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=max(0.0, timeout_s))
        finally:
            self._waiting.discard(future)

    async def close(self) -> None:
        """Want nothing any more."""
        self._wants.clear()
        self._request()
        if self._requesting is not None:
            await asyncio.wait([self._requesting], timeout=5.0)
        self.notify()
