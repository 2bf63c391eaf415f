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
TELL_EVERY_S = 0.25  # of silence
CONNECT_S = 2.0
TRY_AGAIN_S = 0.2
LATE_S = 0.5  # a turn of the loop that came so late tells more of us than of the nodes
FENCE_S = 5.0  # for a warden to end what is left on a node without a raylet
REFUSALS = 2  # in a row, a moment apart, before a raylet counts as dead

AGAIN = RestartPolicy(max_failures=None, backoff_s=TRY_AGAIN_S, max_backoff_s=5.0)

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
    heard: float  # when the last beat came, in time that this process was awake
    silent: bool = True  # until the first beat
    excused: bool = True  # no beat is to be expected: none came yet, or its warden died and is being made again
    quiet: bool = False  # nor ever again: its warden was sent away
    connected: bool = False  # to its warden


class NodeHeartbeats:
    """The links of one controller. `tell` hears of what changed; `where` gives the place of a node's warden."""

    def __init__(
        self,
        tell: Callable[[NodeEvent], None],
        where: Callable[[str], Awaitable[AgentAddress | None]],
        suspect_s: float,
        background: Background,
    ) -> None:
        self._tell = tell
        self._background = background
        self._where = where
        self._suspect_s = suspect_s
        self._links: dict[str, _NodeConnection] = {}
        self._awake = 0.0  # seconds that this process ran, as far as it looks
        self._looked = time.monotonic()
        self._look: asyncio.Task[None] | None = None

    def open(self, node: str, raylet: AgentAddress) -> None:
        """Have a link to the node; one that is there stays."""
        if node in self._links:
            self._links[node].quiet = False
            return
        if self._look is None:
            self._look = self._background.start("silence of nodes", self._look_forever, policy=AGAIN)
        link = self._links[node] = _NodeConnection(raylet, [], self._awake)
        link.tasks = [
            self._background.start(f"{name} of node {node[:12]}", functools.partial(work, node, link), policy=AGAIN)
            for name, work in (("beats", self._beats), ("raylet", self._hold))
        ]

    def quiet(self, node: str) -> None:
        """Expect no beats of the node any more; its end is still noticed."""
        if node in self._links:
            self._links[node].quiet = True

    def shut(self, node: str) -> None:
        """Forget the node."""
        link = self._links.pop(node, None)
        for task in link.tasks if link is not None else ():
            task.cancel()

    def close(self) -> None:
        """Forget all nodes."""
        for node in list(self._links):
            self.shut(node)
        if self._look is not None:
            self._look.cancel()
            self._look = None

    # ---- the two connections

    async def _beats(self, node: str, link: _NodeConnection) -> None:
        while True:
            place = None
            with contextlib.suppress(Exception):
                place = None if link.quiet else await self._where(node)
            if place is not None:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    reader, writer = await asyncio.wait_for(asyncio.open_connection(*place), CONNECT_S)
                    link.connected = True
                    try:
                        while await reader.read(64):
                            self._heard(node, link)
                        link.excused = True  # ended by the other side: a process died, which is not silence
                    except ConnectionResetError:
                        link.excused = True
                    finally:
                        link.connected = False
                        writer.close()
                await self._look_at_raylet(node, link)
            await asyncio.sleep(TRY_AGAIN_S)

    async def _hold(self, node: str, link: _NodeConnection) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                reader, writer = await asyncio.wait_for(asyncio.open_connection(*link.raylet), CONNECT_S)
                try:
                    while await reader.read(4096):
                        pass
                finally:
                    writer.close()
            await self._look_at_raylet(node, link)
            await asyncio.sleep(TRY_AGAIN_S)

    async def _look_at_raylet(self, node: str, link: _NodeConnection) -> None:
        """A connection broke: is the raylet still there?"""
        for _ in range(REFUSALS):
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*link.raylet), CONNECT_S)
            except ConnectionRefusedError as fault:
                why = fault.strerror or "connection refused"
            except (OSError, asyncio.TimeoutError):
                return  # it may be far away or frozen: that is silence, not the end
            else:
                writer.close()
                return
            await asyncio.sleep(0.02)
        until = time.monotonic() + FENCE_S
        while link.connected and time.monotonic() < until:
            await asyncio.sleep(0.01)
        if self._links.get(node) is link:
            host, port = link.raylet
            self._tell(ConnectionBroken(node, f"nothing listens at {host}:{port} any more ({why})"))
            self.shut(node)

    # ---- silence

    def _heard(self, node: str, link: _NodeConnection) -> None:
        link.heard = self._awake + (time.monotonic() - self._looked)
        link.excused = False
        if link.silent:
            self._tell(HeartbeatReceived(node))
            link.silent = False

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            now = time.monotonic()
            passed, self._looked = now - self._looked, now
            if passed > LATE_S + TELL_EVERY_S:
                for link in self._links.values():  # we slept: nobody can be blamed for it
                    link.heard += passed
            self._awake += passed
            for node, link in list(self._links.items()):
                silent_s = self._awake - link.heard
                if not (link.quiet or link.excused) and silent_s >= self._suspect_s:
                    link.silent = True
                    self._tell(HeartbeatMissed(node, silent_s))
