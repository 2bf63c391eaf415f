"""Faults that tests put into live parts: counted by kind and shown as a table, and what makes the cheap ones.

Every fault is real: a process gets SIGKILL or SIGSTOP, a connection is reset or held by a proxy, a write is refused by
the kernel. What came of them is checked by the tests, against counts of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

CONNECTION_FAULTS = {"cut": 5, "closed": 5, "refused": 3, "held": 3, "silent": 1}  # and how likely they are
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset instead of what is left


class Faults:
    """How many faults of each kind one test has put in."""

    everywhere: ClassVar[list[Faults]] = []  # of all tests of this process

    def __init__(self, where: str) -> None:
        self.where = where
        self.counts: Counter[str] = Counter()
        Faults.everywhere.append(self)

    def put(self, kind: str, times: int = 1) -> None:
        self.counts[kind] += times

    def take(self, counts: Mapping[str, int]) -> None:
        self.counts.update(counts)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        rows = [*sorted(self.counts.items()), ("all", self.total)]
        return "\n".join([f"faults put into {self.where}:", *(f"  {count:>7,}  {kind}" for kind, count in rows)])


class Proxy:
    """A TCP proxy before a server, which hurts connections that carry the given request, by chance.

    `cut`: reset in the midst of the answer; `closed`: ended in order, but early; `refused`: ended before the answer;
    `held`: nothing passes for a while, then all of it; `silent`: nothing passes any more until the client leaves.
    """

    def __init__(
        self,
        target: str,
        faults: Faults,
        chance: random.Random,
        request: bytes,
        share: float,
        *,
        breaks_within: int = 3_000,  # bytes of an answer
    ) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._faults, self._chance, self._request, self._share = faults, chance, request, share
        self._breaks_within = breaks_within
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        to_server = None
        try:
            server, to_server = await asyncio.open_connection(*self._target)
            fault: list[str] = []
            up = asyncio.create_task(self._up(client, to_server, fault))
            try:
                await self._down(server, to_client, fault, up)
            finally:
                up.cancel()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for writer in (to_client, to_server):
                if writer is not None:
                    writer.close()

    async def _up(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, fault: list[str]) -> None:
        with contextlib.suppress(OSError):
            while data := await client.read(65536):
                if data.startswith(self._request):
                    fault[:] = [self._kind()]
                to_server.write(data)
                await to_server.drain()

    def _kind(self) -> str:
        if self._chance.random() >= self._share:
            return ""
        return self._chance.choices(list(CONNECTION_FAULTS), list(CONNECTION_FAULTS.values()))[0]

    async def _down(
        self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter, fault: list[str], up: asyncio.Task[None]
    ) -> None:
        """Pass the answer on, up to where it is hurt, or until either side is gone."""
        passed, breaks_at = 0, 0
        while True:
            reading = asyncio.ensure_future(server.read(4096))
            await asyncio.wait({reading, up}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            data = reading.result()
            if not data:
                return
            kind = fault[0] if fault else ""
            if kind and passed == 0:
                breaks_at = 0 if kind == "refused" else self._chance.randrange(1, self._breaks_within)
            if kind and passed + len(data) >= breaks_at:
                fault.clear()
                self._faults.put(f"connection {kind}")
                if kind == "held":
                    await asyncio.sleep(self._chance.uniform(0.02, 0.3))
                else:
                    to_client.write(data[: max(0, breaks_at - passed)])
                    if kind == "silent":
                        await asyncio.wait({up})
                    elif kind == "cut":
                        own: socket.socket = to_client.get_extra_info("socket")
                        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        to_client.transport.abort()
                    return
            passed = passed + len(data) if fault else 0
            to_client.write(data)
            await to_client.drain()
