"""A light link to every node, since Ray takes a quarter of a minute to notice a killed node and a minute a frozen one.

Two connections a node: one to its warden, which sends a beat several times a second, and one to its raylet, which is
held and never used. Either one breaking while nothing listens at the raylet's port any more means that the node is
dead, which is told once the warden's connection has ended too: with its raylet gone it ends all processes of tasks
before itself, so that no task begins anew elsewhere while its old process works. A warden that alone died is made again
by others and linked to anew; silence is told with its length, and what it means is the machine's business. Time in
which this process itself did not run counts for nobody's silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trimtab.machines.nodes.events import ConnectionBroken, HeartbeatMissed, HeartbeatReceived, NodeEvent
from trimtab.runtime.procs.background import Background, RestartPolicy

BEAT_S = 0.2
CHECK_EVERY_S = 0.25  # of silence
CONNECT_S = 2.0
RETRY_S = 0.2
LATE_S = 0.5  # a turn of the loop that came so late tells more of us than of the nodes
FENCE_S = 5.0  # for a warden to end what is left on a node without a raylet
REFUSALS = 2  # in a row, a moment apart, before a raylet counts as dead

RETRY = RestartPolicy(max_failures=None, backoff_s=RETRY_S, max_backoff_s=5.0)

AgentAddress = tuple[str, int]


async def serve_heartbeats(host: str) -> tuple[asyncio.Server, AgentAddress]:
    """The node's end: a server that sends beats to whoever connects and reads nothing. Where it listens."""

    async def beat(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(b".")
                    await writer.drain()
                    await asyncio.sleep(BEAT_S)
        finally:
            writer.close()

    server = await asyncio.start_server(beat, host, 0)
    name = server.sockets[0].getsockname()
    return server, (str(name[0]), int(name[1]))


@dataclass
class _NodeConnection:
    raylet: AgentAddress
    tasks: list[asyncio.Task[None]]
    last_beat_at: float  # when the last beat came, in time that this process was awake
    silent: bool = True  # until the first beat
    not_expected: bool = True  # no beat is to be expected: none came yet, or its warden died and is being made again
    muted: bool = False  # nor ever again: its warden was sent away
    connected: bool = False  # to its warden


class NodeHeartbeats:
    """The links of one controller. `emit` hears of what changed; `address_of` gives the place of a node's warden."""

    def __init__(
        self,
        emit: Callable[[NodeEvent], None],
        address_of: Callable[[str], Awaitable[AgentAddress | None]],
        suspect_s: float,
        background: Background,
    ) -> None:
        self._emit = emit
        self._background = background
        self._address_of = address_of
        self._suspect_s = suspect_s
        self._connections: dict[str, _NodeConnection] = {}
        self._awake_s = 0.0  # seconds that this process ran, as far as it looks
        self._checked_at = time.monotonic()
        self._checker: asyncio.Task[None] | None = None

    def open(self, node: str, raylet: AgentAddress) -> None:
        """Have a link to the node; one that is there stays."""
        if node in self._connections:
            self._connections[node].muted = False
            return
        if self._checker is None:
            self._checker = self._background.start("silence of nodes", self._check_silence, policy=RETRY)
        connection = self._connections[node] = _NodeConnection(raylet, [], self._awake_s)
        connection.tasks = [
            self._background.start(
                f"{name} of node {node[:12]}", functools.partial(work, node, connection), policy=RETRY
            )
            for name, work in (("beats", self._beats), ("raylet", self._hold))
        ]

    def mute(self, node: str) -> None:
        """Expect no beats of the node any more; its end is still noticed."""
        if node in self._connections:
            self._connections[node].muted = True

    def drop(self, node: str) -> None:
        """Forget the node."""
        connection = self._connections.pop(node, None)
        for task in connection.tasks if connection is not None else ():
            task.cancel()

    def close(self) -> None:
        """Forget all nodes."""
        for node in list(self._connections):
            self.drop(node)
        if self._checker is not None:
            self._checker.cancel()
            self._checker = None

    # ---- the two connections

    async def _beats(self, node: str, connection: _NodeConnection) -> None:
        while True:
            place = None
            with contextlib.suppress(Exception):
                place = None if connection.muted else await self._address_of(node)
            if place is not None:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    reader, writer = await asyncio.wait_for(asyncio.open_connection(*place), CONNECT_S)
                    connection.connected = True
                    try:
                        while await reader.read(64):
                            self._beat_received(node, connection)
                        connection.not_expected = True  # ended by the other side: a process died, which is not silence
                    except ConnectionResetError:
                        connection.not_expected = True
                    finally:
                        connection.connected = False
                        writer.close()
                await self._check_raylet(node, connection)
            await asyncio.sleep(RETRY_S)

    async def _hold(self, node: str, connection: _NodeConnection) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                reader, writer = await asyncio.wait_for(asyncio.open_connection(*connection.raylet), CONNECT_S)
                try:
                    while await reader.read(4096):
                        pass
                finally:
                    writer.close()
            await self._check_raylet(node, connection)
            await asyncio.sleep(RETRY_S)

    async def _check_raylet(self, node: str, connection: _NodeConnection) -> None:
        """A connection broke: is the raylet still there?"""
        for _ in range(REFUSALS):
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*connection.raylet), CONNECT_S)
            except ConnectionRefusedError as fault:
                why = fault.strerror or "connection refused"
            except (OSError, asyncio.TimeoutError):
                return  # it may be far away or frozen: that is silence, not the end
            else:
                writer.close()
                return
            await asyncio.sleep(0.02)
        until = time.monotonic() + FENCE_S
        while connection.connected and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if self._connections.get(node) is connection:
            host, port = connection.raylet
            self._emit(ConnectionBroken(node, f"nothing listens at {host}:{port} any more ({why})"))
            self.drop(node)

    # ---- silence

    def _beat_received(self, node: str, connection: _NodeConnection) -> None:
        connection.last_beat_at = self._awake_s + (time.monotonic() - self._checked_at)
        connection.not_expected = False
        if connection.silent:
            self._emit(HeartbeatReceived(node))
            connection.silent = False

    async def _check_silence(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            now = time.monotonic()
            passed, self._checked_at = now - self._checked_at, now
            if passed > LATE_S + CHECK_EVERY_S:
                for connection in self._connections.values():  # we slept: nobody can be blamed for it
                    connection.last_beat_at += passed
            self._awake_s += passed
            for node, connection in list(self._connections.items()):
                silent_s = self._awake_s - connection.last_beat_at
                if not (connection.muted or connection.not_expected) and silent_s >= self._suspect_s:
                    connection.silent = True
                    self._emit(HeartbeatMissed(node, silent_s))
