"""Heartbeats of nodes, since Ray takes about 15 s to notice a killed node and about 60 s a frozen one.

Two TCP connections per node: to its agent, which sends a beat several times a second, and an idle one to its raylet. If
either breaks and nothing listens on the raylet's port any more, the node is dead. That is reported once the agent's
connection has closed too: without a raylet the agent ends all task processes before itself, so a task never restarts
elsewhere while its old process still runs. If only the agent died, it is created again by others and reconnected to.
Silence is reported with its duration; the node machine decides what it means. Time in which this process itself did not
run counts as silence of no node.
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
LATE_S = 0.5  # delay of our own event loop above which silence is not counted
FENCE_S = 5.0  # for an agent to end the processes of a node without a raylet
REFUSALS = 2  # in a row, a moment apart, before a raylet counts as dead

RETRY = RestartPolicy(max_failures=None, backoff_s=RETRY_S, max_backoff_s=5.0)

AgentAddress = tuple[str, int]


async def serve_heartbeats(host: str) -> tuple[asyncio.Server, AgentAddress]:
    """Agent side: a server that sends beats on every connection and reads nothing. Returns its address."""

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
    last_beat_at: float  # of the last beat, in seconds that this process was awake
    silent: bool = True  # until the first beat
    not_expected: bool = True  # no beat came yet, or the agent died and is being created again
    muted: bool = False  # the agent was ended; no beats follow
    connected: bool = False  # to the agent


class NodeHeartbeats:
    """Heartbeat connections of a controller. `emit` gets events; `address_of` returns the address of a node's agent."""

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
        self._awake_s = 0.0  # seconds that this process ran
        self._checked_at = time.monotonic()
        self._checker: asyncio.Task[None] | None = None

    def open(self, node: str, raylet: AgentAddress) -> None:
        """Connect to the node, if not connected."""
        if node in self._connections:
            self._connections[node].muted = False
            return
        if self._checker is None:
            self._checker = self._background.start("check heartbeats", self._check_silence, policy=RETRY)
        connection = self._connections[node] = _NodeConnection(raylet, [], self._awake_s)
        connection.tasks = [
            self._background.start(
                f"{name} of node {node[:12]}", functools.partial(work, node, connection), policy=RETRY
            )
            for name, work in (("heartbeats", self._receive_beats), ("raylet connection", self._hold_raylet))
        ]

    def mute(self, node: str) -> None:
        """Expect no more beats from the node; its death is still noticed."""
        if node in self._connections:
            self._connections[node].muted = True

    def drop(self, node: str) -> None:
        connection = self._connections.pop(node, None)
        for task in connection.tasks if connection is not None else ():
            task.cancel()

    def close(self) -> None:
        for node in list(self._connections):
            self.drop(node)
        if self._checker is not None:
            self._checker.cancel()
            self._checker = None

    # ---- connections

    async def _receive_beats(self, node: str, connection: _NodeConnection) -> None:
        while True:
            address = None
            with contextlib.suppress(Exception):
                address = None if connection.muted else await self._address_of(node)
            if address is not None:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), CONNECT_S)
                    connection.connected = True
                    try:
                        while await reader.read(64):
                            self._beat_received(node, connection)
                        connection.not_expected = True  # closed by the agent: a process died, which is not silence
                    except ConnectionResetError:
                        connection.not_expected = True
                    finally:
                        connection.connected = False
                        writer.close()
                await self._check_raylet(node, connection)
            await asyncio.sleep(RETRY_S)

    async def _hold_raylet(self, node: str, connection: _NodeConnection) -> None:
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
        """A connection broke: report the node as dead if its raylet refuses connections."""
        for _ in range(REFUSALS):
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*connection.raylet), CONNECT_S)
            except ConnectionRefusedError as fault:
                why = fault.strerror or "connection refused"
            except (OSError, asyncio.TimeoutError):
                return  # a slow network or a frozen node: silence, not death
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
                for connection in self._connections.values():  # this process was suspended
                    connection.last_beat_at += passed
            self._awake_s += passed
            for node, connection in list(self._connections.items()):
                silent_s = self._awake_s - connection.last_beat_at
                if not (connection.muted or connection.not_expected) and silent_s >= self._suspect_s:
                    connection.silent = True
                    self._emit(HeartbeatMissed(node, silent_s))
