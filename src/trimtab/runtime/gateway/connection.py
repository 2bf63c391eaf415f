"""HTTP/1.1 connections of a gateway, on httptools: requests in, one at a time, each with its body.

What must never happen: a connection that is held without a deadline while a head or a body is missing; a body that is
read for a client that is refused by its head; two answers to one request. A head that is too large is refused (431) at
once, and one that is incomplete after a time (408), for every request of a connection. A client that disconnects has
its answering task cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast
from urllib.parse import unquote

import httptools

from trimtab.runtime.gateway.exchange import HttpExchange, Refusal
from trimtab.runtime.gateway.settings import GatewaySettings

Admit = Callable[[HttpExchange], None]
"""Chooses the handler and the format of a request by its head; raises a Refusal."""

Answer = Callable[[HttpExchange], Awaitable[None]]

LINGER_S = 1.0
_HEAD, _BODY, _IDLE = "head", "body", "idle"
_REFUSALS = {
    400: (b"400 Bad Request", b"this is no HTTP request"),
    408: (b"408 Request Timeout", b"the head of the request was not there in time"),
    431: (b"431 Request Header Fields Too Large", b"the head of the request is too large"),
}


class HttpConnections:
    """Open connections of one gateway."""

    def __init__(self, settings: GatewaySettings, admit: Admit, answer: Answer) -> None:
        self.settings, self.admit, self.answer = settings, admit, answer
        self.open: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    def __call__(self) -> HttpConnection:
        return HttpConnection(self)

    async def close(self, within_s: float) -> None:
        """Idle connections at once, the others after their answers or this time."""
        self.closing = True
        for connection in list(self.open):
            connection.close_if_idle()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=within_s)
        for task in list(self.tasks):
            task.cancel()
        for connection in list(self.open):
            connection.transport.close()
        await asyncio.sleep(0)


class HttpConnection(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(self, server: HttpConnections) -> None:
        self.server, self._settings = server, server.settings
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._exchange: HttpExchange | None = None  # whose head or body arrives
        self._answering: HttpExchange | None = None
        self._waiting: deque[HttpExchange] = deque()  # sent before the answer to the one before
        self._heads = self._head_bytes = 0  # complete heads; bytes of the incomplete one
        self._parts: list[bytes] = []
        self._size = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._missing = _HEAD
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._status = 400
        self._ended = False  # nothing more is read
        self._resumed: asyncio.Future[None] | None = None  # set while the client does not read

    # ---- transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.open.add(self)
        self._await(_HEAD, self._settings.head_s)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self.server.open.discard(self)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        if self._answering is not None:
            self._answering.left()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        heads = self._heads
        if self._missing is _IDLE:
            self._await(_HEAD, self._settings.head_s)
        in_head = self._missing is _HEAD
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ended = True  # it stays HTTP; what follows is not read
        except httptools.HttpParserError:
            self._refuse(self._status)
            return
        if in_head and heads == self._heads:
            self._head_bytes += len(data)
            if self._head_bytes > self._settings.max_head_bytes:
                self._refuse(431)

    def pause_writing(self) -> None:
        self._resumed = self._resumed or self._loop.create_future()

    def resume_writing(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    @property
    def is_held(self) -> bool:
        """The client does not read what was written."""
        return self._resumed is not None

    async def drained(self) -> None:
        """Waits for a client that does not read; then it counts as gone."""
        if self._resumed is not None:
            await asyncio.wait({self._resumed}, timeout=self._settings.write_s)
            if self._resumed is not None:
                self.transport.abort()
                await asyncio.sleep(0)  # `connection_lost` cancels

    # ---- deadlines: one timer, which is set anew only for an earlier one -------------------------------------------

    def _await(self, what: str, seconds: float) -> None:
        self._missing = what
        due = self._deadline = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check)
        elif self._missing is _IDLE:
            self.transport.close()
        elif self._missing is _HEAD:
            self._refuse(408)
        else:
            assert self._exchange is not None
            message = f"the body did not arrive within {self._settings.body_s:g} s"
            self._refuse_body(self._exchange, Refusal(408, message, code="timeout"))

    # ---- called by the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers, self._parts, self._size, self._exchange = b"", {}, [], 0, None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        self._size += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        self._heads += 1
        self._head_bytes = 0
        if self._size + len(self._url) > self._settings.max_head_bytes:
            self._status = 431
            raise ValueError("the head is too large")  # ends the parser
        self._size = 0
        path, _, query = self._url.partition(b"?")
        headers, parser = self._headers, self._parser
        exchange = self._exchange = HttpExchange(
            self, parser.get_method().decode("latin-1"), unquote(path.decode("latin-1")), query.decode("latin-1"),
            headers, parser.get_http_version() != "1.0", not parser.should_keep_alive() or self.server.closing,
        )  # fmt: skip
        length = headers.get(b"content-length", b"0")
        has_body = length != b"0" or b"transfer-encoding" in headers
        try:
            self.server.admit(exchange)
            if length.isdigit() and (len(length) > 18 or int(length) > self._settings.max_body_bytes):
                raise self._too_large()
        except Refusal as refusal:
            if has_body:  # which is not read, so the connection cannot be used again
                self._refuse_body(exchange, refusal)
            else:
                exchange.refusal = refusal
            return
        if has_body:
            self._await(_BODY, self._settings.body_s)
            if headers.get(b"expect", b"").lower() == b"100-continue" and self._answering is None:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._ended or self._exchange is None:
            return
        self._size += len(body)
        if self._size > self._settings.max_body_bytes:
            self._refuse_body(self._exchange, self._too_large())
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None or self._ended:
            return
        self._deadline, self._missing = None, _IDLE
        exchange.body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self._queue(exchange)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _queue(self, exchange: HttpExchange) -> None:
        if self._answering is not None:
            self._waiting.append(exchange)
            self.transport.pause_reading()
            return
        self._answering = exchange
        task = self._loop.create_task(self._answer(exchange))
        exchange.task = task
        self.server.tasks.add(task)
        task.add_done_callback(self.server.tasks.discard)

    async def _answer(self, exchange: HttpExchange) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self.server.answer(exchange)
        self._answering = None
        if exchange.closing or not exchange.complete or self.server.closing:
            self._close(unread=exchange.refusal is not None)
        elif self._waiting:
            self.transport.resume_reading()
            self._queue(self._waiting.popleft())
        elif self._missing is _IDLE:
            self._await(_IDLE, self._settings.keep_alive_s)

    def close_if_idle(self) -> None:
        if self._answering is None and self._missing is _IDLE:
            self.transport.close()

    def _too_large(self) -> Refusal:
        return Refusal(413, f"a body has at most {self._settings.max_body_bytes} bytes", code="too_large")

    def _refuse_body(self, exchange: HttpExchange, refusal: Refusal) -> None:
        """Answers without the body, or the rest of it."""
        self._ended, self._exchange, self._deadline = True, None, None
        exchange.closing, exchange.refusal = True, refusal
        self._queue(exchange)

    def _refuse(self, status: int) -> None:
        """Answers what is no request; not within an answer to an earlier one."""
        self._ended = True
        if self._answering is None:
            line, text = _REFUSALS[status]
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (line, len(text), text)
            )
        self._close(unread=self._answering is None)

    def _close(self, *, unread: bool) -> None:
        """Closes after what was written. Where the client still sends, a close at once would take the answer from it:
        that is not read for a moment more.
        """
        self._ended, self._deadline = True, None
        if self._timer is not None:
            self._timer.cancel()
        if unread and not self.transport.is_closing() and self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self._loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()
