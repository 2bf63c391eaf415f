"""One HTTP request and its response, with disconnect detection.

A disconnect is noticed whether the response streams or not, and the answering task is cancelled. The watch begins
after a delay, so that fast responses do not pay for it. A client that stops reading counts as disconnected after a
while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from trimtab.runtime.gateway.guard import Headers, Receive, Scope
from trimtab.runtime.gateway.response_format import to_json

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
WATCH_AFTER_S = 0.25
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]  # fmt: skip


class HttpExchange:
    """One request; `client_gone`: it has disconnected, `abort_reason`: the response must end early."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, write_s: float) -> None:
        self.headers: Headers = dict(scope["headers"])
        self.receive = receive
        self.status = 0  # of the response, once it has begun
        self.client_gone = False
        self.abort_reason = ""
        self.closing = False  # the connection ends with this response
        self._send, self._write_s = send, write_s
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._writing_since: float | None = None

    # ---- disconnects -----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Cancels the answering task on disconnect. Call it after the body was read."""
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watched())
        self._timer = loop.call_later(self._write_s, self._look)

    async def _watched(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self._gone()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._writing_since is not None and loop.time() - self._writing_since > self._write_s:
            self._gone()
        else:
            self._timer = loop.call_later(self._write_s, self._look)

    def _gone(self) -> None:
        self.client_gone = True
        if self._task is not None:
            self._task.cancel()

    def abort(self, why: str) -> None:
        """Ends the response now, with what there is."""
        if not self.abort_reason and self._task is not None:
            self.abort_reason = why
            self._task.cancel()

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        self._task = None

    # ---- responses -------------------------------------------------------------------------------------------------

    async def json(self, answer: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Response in one piece."""
        body = to_json(answer).encode()
        await self.raw(body, status, [_JSON, *headers])

    async def raw(self, body: bytes, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Response in one piece, of any type."""
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.write(body, more=False)

    async def events(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Begins a stream of events."""
        await self._start(200, [*_EVENTS, *headers])

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        if self.closing:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        self._writing_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._writing_since = None
