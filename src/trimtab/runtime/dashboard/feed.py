"""Messages to everybody who looks: numbered, kept for a while, and never more of them waiting than a client is allowed.

A client says which message it had last and gets what came since, if that is still kept and of this server; else the
whole of how things stand. A client that does not take its messages is dropped and comes back by itself: nobody's
slowness holds up another, and memory does not grow with clients. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

KEPT = 256
KEPT_BYTES = 4 * 2**20
WAITING = 32  # messages for one client
WAITING_BYTES = 8 * 2**20


class FeedClient:
    """Whoever looks: what is still to be sent. `behind` once it was dropped."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self.behind = False
        self.is_over = False  # the server ends

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._waiting)

    def end(self) -> None:
        """Nothing more is sent."""
        self.is_over = True
        self._waiting.clear()
        self._news.set()

    def put(self, message: bytes) -> None:
        """One more to be sent, or the end of it where there are too many."""
        if self.behind or self.is_over:
            return
        # One message always fits, however large: else the whole of a large run could never be sent.
        if self._waiting and (len(self._waiting) >= WAITING or self._bytes + len(message) > WAITING_BYTES):
            self.behind = True
            self._waiting.clear()
        else:
            self._waiting.append(message)
            self._bytes += len(message)
        self._news.set()

    async def get(self, wait_s: float) -> bytes | None:
        """The next one; None if none comes in time, the client is behind, or it is over."""
        if not (self._waiting or self.behind or self.is_over):
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), wait_s)
            except asyncio.TimeoutError:
                return None
        if self.behind or self.is_over:
            return None
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message


class Feed:
    """The messages, and those who get them."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self.number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self.clients: set[FeedClient] = set()
        self.is_over = False

    def publish(self, data: bytes) -> None:
        """Send a change to everybody, and keep it for those who come back."""
        self.number += 1
        message = self.framed("change", data, self.number)
        self._kept.append((self.number, message))
        self._kept_bytes += len(message)
        while len(self._kept) > KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        for client in self.clients:
            client.put(message)

    def end(self) -> None:
        """End everybody's stream: whoever comes later is not let in either."""
        self.is_over = True
        for client in self.clients:
            client.end()

    def id(self, number: int) -> str:
        """How a message is called; tells servers apart."""
        return f"{self._epoch}-{number}"

    def framed(self, event: str, data: bytes, number: int) -> bytes:
        """A message as server-sent events have it; `data` has no line breaks."""
        return f"event: {event}\nid: {self.id(number)}\ndata: ".encode() + data + b"\n\n"

    def since(self, last: str) -> list[bytes] | None:
        """What came after a message; None where that cannot be told any more, or was another server's."""
        epoch, _, number = last.partition("-")
        if epoch != self._epoch or not number.isdecimal() or len(number) > 12:
            return None
        had = int(number)
        if had == self.number:
            return []
        if had > self.number or not self._kept or self._kept[0][0] > had + 1:
            return None
        return [message for at, message in self._kept if at > had]
