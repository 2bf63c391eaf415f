"""A front process: reads HTTP from the shared port, and asks the process that has the pool.

    python -m trimtab.runtime.gateway.front LISTENER LINK        # numbers of inherited file descriptors

It ends with the link. What must never happen: a call that stays in the pool after its client has left; a wait for a
pool that is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from trimtab.runtime.gateway import link as m
from trimtab.runtime.gateway.connection import HttpConnections
from trimtab.runtime.gateway.exchange import HttpExchange, Refusal
from trimtab.runtime.gateway.guard import GatewayGuard
from trimtab.runtime.gateway.server import GatewayApp, run_alone
from trimtab.runtime.gateway.serving import GenerationCall, GenerationTracker
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.http.listening import BACKLOG
from trimtab.runtime.rollout.sampling import Chunk, Completion, Sample


class PoolLink:
    """Calls and questions under way."""

    def __init__(self) -> None:
        self.setup: asyncio.Future[GatewaySettings] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.state = m.LinkState(0, (), (), False)
        self.exchanges: dict[int, HttpExchange] = {}  # of streams
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[Any]] = {}
        self._link = m.Link(m.ToFront, self._received, lambda: os._exit(1))

    async def connect(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=sock)

    def begin(self) -> tuple[int, asyncio.Queue[Any]]:
        number = next(self._numbers)
        answers = self._answers[number] = asyncio.Queue()
        return number, answers

    def end(self, number: int) -> None:
        self._answers.pop(number, None)
        self.exchanges.pop(number, None)

    def send(self, message: m.LinkMessage) -> None:
        self._link.send(message)

    async def ask(self, kind: Any, *content: Any) -> Any:
        number, answers = self.begin()
        try:
            self.send(kind(number, *content))
            return taken(await answers.get())
        finally:
            self.end(number)

    def _received(self, message: Any) -> None:
        if isinstance(message, m.LinkSetup):
            self.setup.set_result(message.settings)
        elif isinstance(message, m.LinkState):
            self.state = message
        elif isinstance(message, m.LinkAbort):
            exchange = self.exchanges.get(message.number)
            if exchange is not None:
                exchange.abort(message.why)
        elif isinstance(message, (m.LinkChunk, m.LinkAnswers, m.LinkReply, m.LinkRefusal)):
            answers = self._answers.get(message.number)
            if answers is not None:
                answers.put_nowait(message)
        else:
            self.ended.set()


def taken(message: Any) -> Any:
    """Content of an answer; raises a refusal."""
    if isinstance(message, m.LinkRefusal):
        raise message.refusal()
    return message.value if isinstance(message, m.LinkReply) else message


class LinkTokenizer(PoolTokenizer):
    """The pool's tokenizer."""

    def __init__(self, link: PoolLink, vocabulary: int | None) -> None:
        super().__init__(None, 0.0, vocabulary)
        self._link = link

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        found = await self._link.ask(m.LinkTexts, method, list(arguments), options)
        return tuple(found) if isinstance(found, list) else found


class LinkMetrics:
    """Counts in the process that has the pool."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        self._link.send(m.LinkCounted(0, endpoint, status, seconds))

    def made(self, samples: Sequence[Sample]) -> None:
        """They were counted there."""


class LinkTracker(GenerationTracker):
    """Calls of this process; limits are those of the pool's process."""

    def __init__(self, link: PoolLink, settings: GatewaySettings) -> None:
        super().__init__(None, settings, LinkMetrics(link))
        self._link = link
        self._of: dict[HttpExchange, int] = {}

    def kinds(self) -> frozenset[str]:
        return frozenset(self._link.state.kinds)

    def enter(self, exchange: HttpExchange) -> None:
        exchange.closing |= self._link.state.stopping

    def leave(self, exchange: HttpExchange) -> None:
        exchange.uncancellable()

    async def completions(self, exchange: HttpExchange, call: GenerationCall) -> list[Completion]:
        number, answers = self._link.begin()
        try:
            self._link.send(m.LinkCall(number, call))
            message = taken(await answers.get())
            exchange.aborted = message.aborted
            found: list[Completion] = message.completions
            return found
        except asyncio.CancelledError:
            self._link.send(m.LinkCancel(number))
            raise
        finally:
            self._link.end(number)

    async def chunks(
        self, call: GenerationCall, exchange: HttpExchange | None = None
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        number, answers = self._link.begin()
        if exchange is not None:
            self._link.exchanges[number] = exchange
        self._link.send(m.LinkCall(number, call))
        ended = False
        try:
            while True:
                message = await answers.get()
                ended = isinstance(message, m.LinkRefusal) or message.chunk is None
                taken(message)
                if ended:
                    return
                yield message.prompt, message.chunk
        finally:
            if not ended:
                self._link.send(m.LinkCancel(number))
            self._link.end(number)


class FrontApp(GatewayApp):
    """The routes, with the pool behind the link."""

    def __init__(self, link: PoolLink, settings: GatewaySettings) -> None:
        self._link, self.settings = link, settings
        self.guard = GatewayGuard(settings)
        self.tokenizer = LinkTokenizer(link, settings.vocabulary)
        self.serving = LinkTracker(link, settings)
        self.add_routes(lambda: link.state.adapters)

    async def answer_route(self, access: Any, name: str, status: int, exchange: HttpExchange) -> None:
        headers = list(exchange.headers.items())
        within_s = self.settings.change_s + self.settings.body_s + 1.0
        asked = self._link.ask(m.LinkRoute, exchange.method, exchange.path, exchange.query, headers, exchange.body)
        try:
            code, fields, body, closing = await asyncio.wait_for(asked, within_s)
        except (Refusal, asyncio.TimeoutError):
            await exchange.refuse(Refusal(504, "the pool's process does not answer", code="timeout"))
            return
        exchange.closing |= closing
        await exchange.raw(body, code, [(bytes(name), bytes(value)) for name, value in fields])


async def serve(listener: int, link: int) -> None:
    """Until the process that has the pool stops it."""
    loop, pool = asyncio.get_running_loop(), PoolLink()
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)  # the pool's process decides when to stop
    await pool.connect(socket.socket(fileno=link))
    settings = await pool.setup
    app = FrontApp(pool, settings)
    connections = HttpConnections(settings, app.admit, app.answer)
    server = await loop.create_server(connections, sock=socket.socket(fileno=listener), backlog=BACKLOG)
    pool.send(m.LinkUp(0))
    await pool.ended.wait()
    server.close()
    await connections.close(settings.abort_s)


if __name__ == "__main__":
    run_alone(serve(int(sys.argv[1]), int(sys.argv[2])))
