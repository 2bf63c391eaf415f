"""Base of adapters for engines over HTTP, on private addresses only."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import aiohttp

from trimtab.runtime.engines.engine import EngineDeadlines, GenerateRequest
from trimtab.runtime.engines.gated import GatedEngine
from trimtab.runtime.engines.open_stream import EventStream, OpenStream
from trimtab.runtime.engines.wire import EngineHttpClient, require_private


class HttpEngine(GatedEngine):
    """Common half of the HTTP adapters; the session belongs to the caller and outlives them."""

    keeps_alive: ClassVar[bool] = True

    def __init__(
        self, name: str, url: str, session: aiohttp.ClientSession, deadlines: EngineDeadlines | None = None
    ) -> None:
        super().__init__(name, deadlines)
        self.url = url
        self.wire = EngineHttpClient(name, url, session, self.deadlines, keep_alive=self.keeps_alive)
        self._private = False

    async def _ensure_reachable(self) -> None:
        if not self._private:
            await require_private(self.url)
            self._private = True

    def _events(self, stream: OpenStream) -> EventStream:
        path, body = self._generate_call(stream.request, stream.key)
        # Between two pieces there are no bytes: it is alive as long as it makes tokens.
        alive_at = None if stream.request.piece == 1 else lambda: self.progress_at
        return self.wire.events(path, body, whole=stream.request.piece is None, alive_at=alive_at)

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        """Path and body of a generate call."""
        raise NotImplementedError


async def gauges(wire: EngineHttpClient, path: str = "/metrics") -> dict[str, float]:
    """Reads a Prometheus page; labels are dropped and values of the same name added up."""
    found: dict[str, float] = {}
    for line in str(await wire.get(path)).splitlines():
        if line and not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            with suppress(ValueError):
                name = head.split("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found
