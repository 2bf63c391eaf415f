"""Front processes of a gateway: started, supervised, and served by the process that has the pool.

They share one listening socket, so requests wait in its queue while one of them is started again. Everything that is
decided is decided here: a front process that dies takes its connections with it, and nothing else. Its requests are
cancelled, but those with an Idempotency-Key go on, and their answers are kept for the client that asks again.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import UnreachableError
from trimtab.runtime.gateway import link as m
from trimtab.runtime.gateway.exchange import HttpExchange, Refusal, refusal_for_error
from trimtab.runtime.gateway.serving import samples_of
from trimtab.runtime.procs.background import NEVER_GIVE_UP
from trimtab.runtime.rollout.sampling import Chunk, Completion

if TYPE_CHECKING:
    from trimtab.runtime.gateway.server import GatewayApp

START_S = 60.0
STATE_S = 0.25
EXIT_S = 2.0


class RelayedExchange(HttpExchange):
    """A request that a front process has read; its answer goes back there."""

    answer: tuple[int, list[tuple[bytes, bytes]], bytes] = (503, [], b"")

    def __init__(self, route: m.LinkRoute) -> None:
        super().__init__(None, route.method, route.path, route.query, dict(route.headers), True, False)
        self.body = route.body

    async def raw(self, body: bytes, status: int, headers: Any) -> None:
        self.status, self.complete, self.answer = status, True, (status, list(headers), body)


class RelayedCall:
    """A call of a client that is connected to a front process: what comes of it goes there."""

    closing = aborted = False

    def __init__(self, app: GatewayApp, link: m.Link, calls: dict[int, RelayedCall], message: m.LinkCall) -> None:
        self._app, self._link, self._calls = app, link, calls
        self._number = message.number
        self._close: Callable[[], None] | None = None
        call = message.call()
        self.keyed = bool(call.terms.options.key)
        calls[message.number] = self
        try:
            app.serving.enter(self)
            self._close = app.serving.begin(call, self, self)
        except Exception as error:
            self.failed(error)

    def chunk(self, prompt: int, chunk: Chunk, last: bool) -> None:
        if chunk.sample is not None:
            self._app.metrics.made((chunk.sample,))
        self._send(m.LinkChunk(self._number, prompt, chunk, last), last)

    def answered(self, completions: list[Completion]) -> None:
        self._app.metrics.made(samples_of(completions))
        self._send(m.LinkAnswers(self._number, completions, self.aborted))

    def failed(self, error: BaseException) -> None:
        self._send(m.LinkRefusal.of(self._number, refusal_for_error(error)))

    def _send(self, message: m.LinkMessage, last: bool = True) -> None:
        self._link.send(message)
        if last:
            self._close = None  # it refers to this
            self._app.serving.leave(self)
            self._calls.pop(self._number, None)

    def left(self) -> None:
        """The client has left."""
        self._calls.pop(self._number, None)
        self._app.serving.leave(self)
        if self._close is not None:
            self._close()

    def abort(self, why: str) -> None:
        self._link.send(m.LinkAbort(self._number, why))


class FrontProcess:
    """One front process and its calls."""

    link: m.Link

    def __init__(self, app: GatewayApp, listener: socket.socket) -> None:
        self._app, self._listener = app, listener
        self.calls: dict[int, RelayedCall] = {}  # of this process
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()
        self._stopping = False
        self.up = asyncio.Event()  # it has accepted connections once
        self.pid = 0

    async def run(self) -> None:
        """Runs one process until it ends; raises unless it was stopped."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._lost.clear()
        self.calls = {}
        with theirs:
            ours.setblocking(False)
            self.link = m.Link(m.ToPool, self._received, self._lost.set)
            await loop.create_unix_connection(lambda: self.link, sock=ours)
            files = (self._listener.fileno(), theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trimtab.runtime.gateway.front", *map(str, files), pass_fds=files,
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        self.pid = process.pid
        try:
            self.link.send(m.LinkSetup(0, self._app.settings))
            while not self._lost.is_set():
                self.send_state()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), STATE_S)
        finally:
            self.link.close()
            for call in list(self.calls.values()):
                if not call.keyed:
                    call.left()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), EXIT_S)
            if process.returncode is None:
                process.kill()
                await process.wait()
        if not self._stopping:
            raise UnreachableError(f"a front process of the gateway ended with {process.returncode}")

    def send_state(self) -> None:
        serving = self._app.serving
        if self.pid:
            self.link.send(m.LinkState(0, tuple(serving.kinds()), tuple(self._app.pool.adapters), serving.stopping))

    def stop(self) -> None:
        self._stopping = True
        if self.pid:
            self.link.send(m.LinkStop(0))

    # ---- what it asks ----------------------------------------------------------------------------------------------

    def _received(self, message: m.ToPool) -> None:
        if isinstance(message, m.LinkCall):
            RelayedCall(self._app, self.link, self.calls, message)
        elif isinstance(message, m.LinkCancel):
            if (found := self.calls.get(message.number)) is not None:
                found.left()
        elif isinstance(message, m.LinkCounted):
            self._app.metrics.count(message.endpoint, message.status, message.seconds)
        elif isinstance(message, m.LinkUp):
            self.up.set()
        elif isinstance(message, m.LinkTexts):
            self._spawn(self._reply(message.number, self._texts, message))
        else:
            self._spawn(self._reply(message.number, self._route, message))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reply(self, number: int, ask: Callable[[Any], Awaitable[Any]], message: Any) -> None:
        link = self.link
        try:
            link.send(m.LinkReply(number, await ask(message)))
        except Refusal as refusal:
            link.send(m.LinkRefusal.of(number, refusal))

    async def _texts(self, message: m.LinkTexts) -> Any:
        return await self._app.tokenizer.call(message.method, *message.arguments, **message.options)

    async def _route(self, message: m.LinkRoute) -> Any:
        exchange = RelayedExchange(message)
        try:
            self._app.admit(exchange)
        except Refusal as refusal:
            exchange.refusal = refusal
        await self._app.answer(exchange)
        return (*exchange.answer, exchange.closing)


class FrontProcesses:
    """All front processes of a gateway."""

    def __init__(self, app: GatewayApp, listener: socket.socket, count: int) -> None:
        self.all = [FrontProcess(app, listener) for _ in range(count)]
        background = app.pool.background
        self._jobs = [
            background.start(f"gateway front {number}", front.run, policy=NEVER_GIVE_UP)
            for number, front in enumerate(self.all)
        ]

    async def until_up(self) -> None:
        """Raises UnreachableError if that takes too long."""
        try:
            await asyncio.wait_for(asyncio.gather(*(front.up.wait() for front in self.all)), START_S)
        except asyncio.TimeoutError:
            raise UnreachableError(f"the gateway's front processes did not start within {START_S:g} s") from None

    def send_state(self) -> None:
        for front in self.all:
            front.send_state()

    async def stop(self, within_s: float) -> None:
        for front in self.all:
            front.stop()
        await asyncio.wait(self._jobs, timeout=within_s + EXIT_S)
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
