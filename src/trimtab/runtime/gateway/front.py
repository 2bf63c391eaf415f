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
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.runtime.gateway import link as m
from trimtab.runtime.gateway.connection import HttpConnections
from trimtab.runtime.gateway.exchange import HttpExchange, Refusal
from trimtab.runtime.gateway.guard import GatewayGuard
from trimtab.runtime.gateway.server import GatewayApp, run_alone
from trimtab.runtime.gateway.serving import CallSink, GenerationCall, GenerationTracker, OpenCall
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.http.listening import BACKLOG
from trimtab.runtime.rollout.sampling import Sample


class PoolLink:
    """Calls and questions under way."""

    def __init__(self) -> None:
        self.setup: asyncio.Future[GatewaySettings] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.state = m.LinkState(0, (), (), False)
        self.runs: dict[int, LinkCallRun] = {}
        self.numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._link = m.Link(m.ToFront, self._received, lambda: os._exit(1))

    async def connect(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=sock)

    def send(self, message: m.LinkMessage) -> None:
        self._link.send(message)

    async def ask(self, kind: Any, *content: Any) -> Any:
        number = next(self.numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(kind(number, *content))
            return await answer
        finally:
            del self._asked[number]

    def _received(self, message: Any) -> None:
        number = message.number
        if isinstance(message, m.LinkChunk):
            if (run := self.runs.pop(number, None) if message.last else self.runs.get(number)) is not None:
                run.sink.chunk(message.prompt, message.chunk, message.last)
        elif isinstance(message, m.LinkAnswers):
            if (run := self.runs.pop(number, None)) is not None:
                run.exchange.aborted = message.aborted
                run.sink.answered(message.completions)
        elif isinstance(message, m.LinkRefusal) and (run := self.runs.pop(number, None)) is not None:
            run.sink.failed(message.refusal())
        elif isinstance(message, (m.LinkReply, m.LinkRefusal)):
            if (answer := self._asked.get(number)) is None or answer.done():
                return
            if isinstance(message, m.LinkReply):
                answer.set_result(message.value)
            else:
                answer.set_exception(message.refusal())
        elif isinstance(message, m.LinkAbort):
            if (run := self.runs.get(number)) is not None:
                run.exchange.abort(message.why)
        elif isinstance(message, m.LinkState):
            self.state = message
        elif isinstance(message, m.LinkSetup):
            self.setup.set_result(message.settings)
        else:
            self.ended.set()


class LinkCallRun:
    """A call that runs in the pool's process."""

    def __init__(self, link: PoolLink, call: GenerationCall, exchange: OpenCall, sink: CallSink) -> None:
        self._link, self._number, self.exchange, self.sink = link, next(link.numbers), exchange, sink
        link.runs[self._number] = self
        link.send(m.LinkCall.of(self._number, call))

    def close(self) -> None:
        if self._link.runs.pop(self._number, None) is not None:
            self._link.send(m.LinkCancel(self._number))


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

    def kinds(self) -> frozenset[str]:
        return frozenset(self._link.state.kinds)

    def enter(self, exchange: OpenCall) -> None:
        exchange.closing |= self._link.state.stopping

    def begin(self, call: GenerationCall, exchange: OpenCall, sink: CallSink) -> Callable[[], None]:
        return LinkCallRun(self._link, call, exchange, sink).close


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
