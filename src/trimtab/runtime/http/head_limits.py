"""Limits on the size and the time of HTTP request heads.

uvicorn's parser accepts heads of any length and waits for them without limit. Here a head that is too large is refused
(431) at once, and one that is incomplete after a time (408); both for every request of a connection. The time of bodies
and responses is not limited here.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
MAX_HEAD_BYTES = 64 * 2**10

_REFUSALS = {
    400: (b"400 Bad Request", b"this is no HTTP request"),
    408: (b"408 Request Timeout", b"the head of the request was not there in time"),
    431: (b"431 Request Header Fields Too Large", b"the head of the request is too large"),
}


def limited(head_s: float = HEAD_S, max_head_bytes: int = MAX_HEAD_BYTES) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits, for `uvicorn.Config(http=...)`."""

    class Limited(HttpToolsProtocol):
        _in_body = False
        _heads = 0  # number of complete heads
        _head_bytes = 0  # of the incomplete head, without its first chunk
        _head_timer: asyncio.TimerHandle | None = None
        _status = 400

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_done()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            in_body, heads = self._in_body, self._heads
            if not in_body:
                self._await_head()
            super().data_received(data)
            if in_body or heads != self._heads or self.transport.is_closing():
                return
            self._head_bytes += len(data)
            if self._head_bytes > max_head_bytes:
                self._refuse(431)

        def on_headers_complete(self) -> None:
            self._heads += 1
            self._head_bytes = 0
            self._in_body = True
            self._head_done()
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > max_head_bytes:
                self._status = 431
                raise ValueError("the head is too large")  # ends the parser; `send_400_response` responds
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(self._status)

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(head_s, self._head_timeout)

        def _head_done(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_timeout(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self._refuse(408)

        def _refuse(self, status: int) -> None:
            line, text = _REFUSALS[status]
            if (
                self.cycle is None or self.cycle.response_complete
            ):  # else a response to an earlier request is in progress
                self.transport.write(
                    b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                    % (line, len(text), text)
                )
            self.transport.close()

    return Limited
