"""Engine adapter for engine objects on a thread, here or in another process, and a launcher for this process.

Like the actor adapter, but calls and streams share one channel: what is sent in one turn of the loop goes out together,
and while a reply is awaited one exchange follows another. An idle engine causes no traffic. A failed exchange ends all
pending calls and streams with an error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from trimtab.core.errors import InfeasibleError, TrimtabError, UnreachableError
from trimtab.runtime.engines.actor import ActorEngine
from trimtab.runtime.engines.engine import (
    EngineCapability,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineMalformedError,
    EngineWedgedError,
    EventStream,
    GenerateRequest,
    OpenStream,
    WeightUpdate,
)
from trimtab.runtime.rollout.launch.launcher import Started
from trimtab.runtime.run.component import Place
from trimtab.runtime.run.engines.engine_thread import EngineMessage, EngineReply, EngineThread

log = logging.getLogger("trimtab.rollout")

WAIT_S = 0.05  # of one exchange: later messages wait for its end
HERE_GATHER_S = 0.002  # between threads an exchange costs next to nothing

ExchangeCall = Callable[[list[EngineMessage], float], Awaitable[list[EngineReply]]]
WeightsAt = Callable[[str], Any]
"""The trainer's weights, by the path that stands for them."""


class ThreadedEngine(ActorEngine):
    """An engine object on an EngineThread, here or in another process."""

    def __init__(
        self,
        name: str,
        methods: frozenset[str],
        exchange: ExchangeCall,
        weights_at: WeightsAt,
    ) -> None:
        super().__init__(name, _Methods(methods))
        self._exchange = exchange
        self._weights_at = weights_at
        self._keys = itertools.count(1)
        self._unsent: list[EngineMessage] = []
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._streams: dict[str, _Stream] = {}
        self._exchange_task: asyncio.Task[None] | None = None

    # ---- calls and streams ---------------------------------------------------------------------------------------

    async def _call(self, method: str, *given: Any, within_s: float | None = None) -> Any:
        seconds = self.deadlines.change_s if within_s is None else within_s
        key = f"c{next(self._keys)}"
        answer = self._calls[key] = asyncio.get_running_loop().create_future()
        self.send(("call", key, (method, given)))
        try:
            value = await asyncio.wait_for(answer, seconds)
        except asyncio.TimeoutError:
            self.send(("end", key, None))
            raise EngineWedgedError(f"{method}() had no answer in {seconds:g} s", engine=self.name) from None
        finally:
            self._calls.pop(key, None)
        if isinstance(value, dict) and value.get("success") is False:
            raise EngineFailedError(f"{method}() said success: false: {value}", engine=self.name)
        return value

    async def _refit(self, refit: WeightUpdate) -> None:
        payload = {**dataclasses.asdict(refit), "weights": self._weights_at(refit.path)}
        await self._call("refit", payload, within_s=self.deadlines.refit_s)

    def _events(self, stream: OpenStream) -> EventStream:
        assert isinstance(stream.request, GenerateRequest)  # engine objects take no others
        order = {**stream.request.fields(), "id": stream.key, "token_ids": list(stream.request.token_ids)}
        return _Stream(self, stream.key, order)

    def open_stream(self, key: str, order: dict[str, Any], stream: _Stream) -> None:
        self._streams[key] = stream
        self.send(("order", key, order))

    def close_stream(self, key: str) -> None:
        if self._streams.pop(key, None) is not None:
            self.send(("end", key, None))

    async def close(self) -> None:
        await super().close()
        if self._exchange_task is not None:
            self._exchange_task.cancel()
            await asyncio.wait({self._exchange_task}, timeout=self.deadlines.call_s)

    # ---- exchanges -----------------------------------------------------------------------------------------------

    def send(self, what: EngineMessage) -> None:
        """Send with the next exchange."""
        self._unsent.append(what)
        if self._exchange_task is None or self._exchange_task.done():
            self._exchange_task = asyncio.get_running_loop().create_task(
                self._exchange_loop(), name=f"rollout-talk-{self.name}"
            )

    async def _exchange_loop(self) -> None:
        try:
            await asyncio.sleep(0)  # messages sent in this turn of the loop go along
            while self._unsent or self._calls or self._streams:
                what, self._unsent = self._unsent, []
                for item in await self._exchange(what, WAIT_S if self._calls or self._streams else 0.0):
                    self._on_reply(*item)
        except asyncio.CancelledError:
            self._fail_all(EngineGoneError("its adapter was closed", engine=self.name))
            raise
        except Exception as error:
            what_happened = error.what if isinstance(error, TrimtabError) else f"{type(error).__name__}: {error}"
            self._fail_all(EngineGoneError(what_happened, engine=self.name))

    def _on_reply(self, verb: str, key: str, content: Any) -> None:
        # An answered call is removed at once: else the next exchange would wait for it.
        stream, call = self._streams.get(key), self._calls.pop(key, None)
        if stream is not None:
            if verb == "raised":
                content = EngineFailedError(f"generate() raised {content}", engine=self.name)
            stream.put(_END if verb == "over" else content)
            if verb != "piece":
                del self._streams[key]
        elif call is not None and not call.done():
            if verb == "raised":
                call.set_exception(EngineFailedError(f"it raised {content}", engine=self.name))
            else:
                call.set_result(content)

    def _fail_all(self, error: EngineError) -> None:
        self._unsent = []
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()


class _Methods:
    """Stands for an actor handle, of which only the method names are read."""

    def __init__(self, names: frozenset[str]) -> None:
        for name in names:
            setattr(self, name, name)


class _Stream:
    """Chunks of one order as an event stream. There are many, so each costs at most a future and a timer."""

    def __init__(self, engine: ThreadedEngine, key: str, order: dict[str, Any]) -> None:
        self._engine, self._key, self._order = engine, key, order
        self._items: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._seconds = engine.deadlines.first_bytes_s
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def close(self, *, on_purpose: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._engine.close_stream(self._key)
        self.put(EngineGoneError("its stream was closed", engine=self._engine.name))  # ends a pending read

    def close_within(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, lambda: self.close(on_purpose=True))

    async def rest(self) -> None:
        """Nothing comes after the last chunk."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        name = self._engine.name
        if not self._begun:
            self._begun = True
            self._engine.open_stream(self._key, self._order, self)
        if not self._items:
            await self._wait()
        if not self._items:
            raise EngineWedgedError(f"generate() gave nothing for {self._seconds:g} s", engine=name)
        item = self._items.popleft()
        if item is _END:
            raise StopAsyncIteration
        if isinstance(item, EngineError):
            raise item
        if not isinstance(item, dict):
            raise EngineMalformedError(f"it gave a {type(item).__name__} and no dictionary", engine=name)
        self._seconds = self._engine.deadlines.silence_s
        return item

    async def _wait(self) -> None:
        """Until an item comes or the time is up."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        late = loop.call_later(self._seconds, lambda: None if waiting.done() else waiting.set_result(None))
        try:
            await waiting
        finally:
            late.cancel()


_END = object()


async def started(engine: ThreadedEngine, path: str | None, node: str = "") -> Started:
    """A new engine, once it is ready. Its own weights count only if the trainer has given none yet.

    Otherwise the pool sees that it is behind and refits it before it serves.
    """
    state = await engine.ready()
    if not state.up:
        raise UnreachableError(f"the engine of {engine.name} is not ready: {state.why}")
    if path is not None and EngineCapability.refit not in engine.capabilities:
        raise no_refit_error(engine.name)
    return Started(engine, 0 if path is None else None, "", node)


def no_refit_error(worker: str) -> InfeasibleError:
    """For an engine without `refit` while the job has weights for it."""
    return InfeasibleError(
        "the engine takes no weights, and the job has some for it", where=f"worker {worker}",
        hint="give its class refit(refit), with refit['weights'] and refit['version'], and version()",
    )  # fmt: skip


class ObjectLauncher:
    """Engine objects in this process, each on its own thread: no Ray, no other process."""

    def __init__(
        self,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
        methods: frozenset[str],
        place_of: Callable[[str], Place],
        weights_at: WeightsAt,
        start_s: float,
    ) -> None:
        self._start_s = start_s
        self._kind, self._settings, self._methods = kind, settings, methods
        self._place_of, self._weights_at = place_of, weights_at
        self._threads: dict[str, EngineThread] = {}
        self._start_lock = asyncio.Lock()  # one at a time: seeds and devices are process-wide

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        await self.stop(worker)
        try:
            async with self._start_lock:
                thread = await asyncio.to_thread(self._make_thread, worker)
        except Exception as error:
            raise UnreachableError(f"the engine of {worker} could not be created: {error}") from error
        self._threads[worker] = thread

        async def exchange(what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
            return await asyncio.to_thread(thread.exchange, what, wait_s)

        return await started(ThreadedEngine(worker, self._methods, exchange, self._weights_at), path)

    def _make_thread(self, worker: str) -> EngineThread:
        place = self._place_of(worker)
        return EngineThread(self._kind, self._settings, place, within_s=self._start_s, gather_s=HERE_GATHER_S)

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Only for engines without refit, which this launcher refuses."""
        raise no_refit_error(worker)

    async def stop(self, worker: str) -> None:
        thread = self._threads.pop(worker, None)
        if thread is not None:
            await asyncio.to_thread(thread.close)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(worker) for worker in list(self._threads)))
