"""Numbered messages to all clients: the last ones are kept, and each client has a bounded queue.

A client says which message it had last and gets the later ones, if they are still kept and of this server; else the
whole state. A client that does not take its messages is dropped and reconnects by itself: a slow client delays no
other, and memory does not grow with clients. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque

MAX_KEPT = 256
MAX_KEPT_BYTES = 4 * 2**20
MAX_WAITING = 32  # messages for one client
MAX_WAITING_BYTES = 8 * 2**20


class FeedClient:
    """One client's queue. `behind` once it was dropped."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.behind = False
        self.closed = False  # the server ends

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting)

    def end(self) -> None:
        self.closed = True
        self._waiting.clear()
        self._changed.set()

    def put(self, message: bytes) -> None:
        """Queue a message, or drop the client if it has too many."""
        if self.behind or self.closed:
            return
        # One message always fits, however large: else the state of a large run could never be sent.
        if self._waiting and (len(self._waiting) >= MAX_WAITING or self._bytes + len(message) > MAX_WAITING_BYTES):
            self.behind = True
            self._waiting.clear()
        else:
            self._waiting.append(message)
            self._bytes += len(message)
        self._changed.set()

    async def get(self, wait_s: float) -> bytes | None:
        """The next message; None on time-out, or if the client is behind or closed."""
        if not (self._waiting or self.behind or self.closed):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except asyncio.TimeoutError:
                return None
        if self.behind or self.closed:
            return None
        message = self._waiting.popleft()
        self._bytes -= len(message)
        return message


class Feed:
    """The messages and their clients."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)
        self.number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self.clients: set[FeedClient] = set()
        self.closed = False

    def publish(self, data: bytes) -> None:
        """Send a change to all clients, and keep it for those that reconnect."""
        self.number += 1
        message = self.frame("change", data, self.number)
        self._kept.append((self.number, message))
        self._kept_bytes += len(message)
        while len(self._kept) > MAX_KEPT or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        for client in self.clients:
            client.put(message)

    def end(self) -> None:
        """End all streams, also of later clients."""
        self.closed = True
        for client in self.clients:
            client.end()

    def id(self, number: int) -> str:
        """Event id of a message; unique to this server."""
        return f"{self._epoch}-{number}"

    def frame(self, event: str, data: bytes, number: int) -> bytes:
        """A message in server-sent-events format; `data` has no line breaks."""
        return f"event: {event}\nid: {self.id(number)}\ndata: ".encode() + data + b"\n\n"

    def since(self, last: str) -> list[bytes] | None:
        """Messages after `last`; None if they are not kept any more, or `last` is of another server."""
        epoch, _, number = last.partition("-")
        if epoch != self._epoch or not number.isdecimal() or len(number) > 12:
            return None
        had = int(number)
        if had == self.number:
            return []
        if had > self.number or not self._kept or self._kept[0][0] > had + 1:
            return None
        return [message for at, message in self._kept if at > had]
