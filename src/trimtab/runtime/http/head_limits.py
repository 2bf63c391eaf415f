"""Limits of what a connection may cost before anything is known of its request: the size of a head, and its time.

uvicorn's parser takes heads of any length and waits for their ends for ever. Here a head that is too large is refused
(431) as soon as it is, and one that is not complete in time is refused (408), the first of a connection and each later
one. The time of a body, and of an answer, is not counted here.
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
        _heads = 0  # that were complete
        _head_bytes = 0  # of the one that is not, without the chunk that it began in
        _head_timer: asyncio.TimerHandle | None = None
        _status = 400

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_there()
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
            self._head_is_there()
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > max_head_bytes:
                self._status = 431
                raise ValueError("the head is too large")  # the parser ends, and `send_400_response` answers
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(self._status)

        def _await_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(head_s, self._too_late)

        def _head_is_there(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _too_late(self) -> None:
            self._head_timer = None
            if not self.transport.is_closing():
                self._refuse(408)

        def _refuse(self, status: int) -> None:
            line, said = _REFUSALS[status]
            if self.cycle is None or self.cycle.response_complete:  # else an answer to an earlier request is under way
                self.transport.write(
                    b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                    % (line, len(said), said)
                )
            self.transport.close()

    return Limited
