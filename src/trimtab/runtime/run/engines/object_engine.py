"""Engine objects on a thread with its own event loop, here or in another process, their adapter, and a launcher.

The engine is any class with the methods of an actor engine (`runtime/engines/actor.py`): async ones run on the loop,
others on threads. Calls and streams share one channel: an exchange hands in pending messages (orders, calls, ends) and
takes back all replies so far, for any number of requests, so an engine in another process costs a message now and then
instead of one per token. While a reply is awaited one exchange follows another; an idle engine causes no traffic. A
failed exchange ends all pending calls and streams with an error. What must never happen: an order without an end
(chunks and an end, or an error), a generator that goes on after it was ended, a thread that outlives `close`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError, meant
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
from trimtab.runtime.run.component import Place, error_text, find_class

GATHER_S = 0.02  # replies are batched for this long, unless a call was answered or nothing runs any more
MAX_THREADS = 64  # of an engine with synchronous methods
WAIT_S = 0.05  # of one exchange: later messages wait for its end
HERE_GATHER_S = 0.002  # between threads an exchange costs next to nothing
NEEDED = ("ready", "generate")
METHODS = (*NEEDED, "load", "abort", "pause", "resume", "sleep", "wake", "flush", "version", "refit")

EngineMessage = tuple[Literal["order", "call", "end"], str, Any]
"""To the engine, each with its key: an order, a call as (method, arguments), or the end of either."""

ReplyKind = Literal["piece", "over", "value", "raised"]
EngineReply = tuple[ReplyKind, str, Any]
"""From the engine, each with its key: a chunk, the end of a stream, the value of a call, or an error."""

ExchangeCall = Callable[[list[EngineMessage], float], Awaitable[list[EngineReply]]]
WeightsAt = Callable[[str], Any]
"""The trainer's weights, by the path that stands for them."""

T = TypeVar("T")
_END = object()


def engine_class(use: str, settings: Mapping[str, Any], near: Path | None, where: str) -> Callable[..., Any]:
    """The class of an engine, checked: it can generate and accepts these settings."""
    kind = find_class(use, near, where)
    for method in NEEDED:
        if not callable(getattr(kind, method, None)):
            names = [name for name in dir(kind) if not name.startswith("_")]
            hint = meant(method, names, "an engine has ready() and generate(order)")
            raise InputError(f"{use} has no {method}", where=where, hint=hint)
    try:
        inspect.signature(kind).bind(**settings, **place_for(kind, Place("engine")))
    except TypeError as error:
        raise InputError(f"{use} cannot be made with these settings: {error}", where=where) from None
    except ValueError:  # some C classes have no signature
        pass
    return kind


def place_for(kind: Callable[..., Any], place: Place) -> dict[str, Place]:
    """Its place, if the constructor takes one."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(kind).parameters.values()
        if any(parameter.name == "place" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return {"place": place}
    return {}


class LoopThread:
    """An event loop on a thread of its own, with threads beside it for what blocks."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._executor = ThreadPoolExecutor(max_threads, thread_name_prefix=name)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def wait(
        self, work: Coroutine[Any, Any, T], within_s: float | None, late: str = "the rollout pool did not answer"
    ) -> T:
        """Run a coroutine on the loop, from another thread; UnreachableError (`late`) if it takes longer."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise UnreachableError(f"{late} within {within_s:g} s") from None

    def stop(self, within_s: float) -> None:
        """Stop the loop; its thread is left behind only if it hangs in user code."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(within_s)
        self._executor.shutdown(wait=False, cancel_futures=True)


class EngineThread(LoopThread):
    """One engine, its thread, and the messages on their way.

    It must be constructed `within_s`, and has `stop_s` to end. `unwrap` resolves the weights in a refit, if they came
    as a reference.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
        place: Place,
        *,
        within_s: float,
        stop_s: float,
        gather_s: float = GATHER_S,
        unwrap: Callable[[Any], Any] | None = None,
    ) -> None:
        self._gather_s, self._stop_s = gather_s, stop_s
        self._unwrap = unwrap
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pending: list[EngineReply] = []  # replies of this turn of the loop
        self._pending_urgent = False  # a caller waits for one of them
        self._condition = threading.Condition()
        self._outbox: list[EngineReply] = []
        self._first_at = 0.0  # when the oldest reply came
        self._urgent = False  # do not batch any longer
        self._engine: Any = None
        super().__init__(f"trimtab-engine-{place.component}", MAX_THREADS)

        async def make() -> Any:
            return kind(**settings, **place_for(kind, place))

        try:
            self._engine = self.wait(make(), within_s, "the engine was not constructed")
        except BaseException:
            self.close()
            raise

    # ---- from one other thread -----------------------------------------------------------------------------------

    def exchange(self, messages: list[EngineMessage], wait_s: float) -> list[EngineReply]:
        """Send messages; returns pending replies, or those that come within `wait_s`."""
        if not self._thread.is_alive():
            raise UnreachableError("the engine's thread has ended")
        if messages:
            self._loop.call_soon_threadsafe(self._submit, messages)
        end = time.monotonic() + wait_s
        with self._condition:
            while not self._urgent:
                now = time.monotonic()
                until = min(end, self._first_at + self._gather_s) if self._outbox else end
                if now >= until:
                    break
                self._condition.wait(until - now)
            replies, self._outbox, self._urgent = self._outbox, [], False
        return replies

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self.wait(self._end(), self._stop_s)
            self.stop(self._stop_s)

    # ---- on the loop ---------------------------------------------------------------------------------------------

    def _submit(self, messages: list[EngineMessage]) -> None:
        for verb, key, content in messages:
            if verb == "end":
                task = self._tasks.get(key)
                if task is not None:
                    task.cancel()
                continue
            self._tasks[key] = self._loop.create_task(self._answer(verb, key, content))

    async def _answer(self, verb: str, key: str, content: Any) -> None:
        """Execute an order or a call; its end is a reply, unless it was ended from outside."""
        urgent = verb == "call"  # a caller waits
        try:
            value = await (self._call(*content) if urgent else self._generate(key, content))
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._reply("raised", key, error_text(error), urgent=urgent)
        else:
            self._reply("value" if urgent else "over", key, value, urgent=urgent)
        finally:
            self._tasks.pop(key, None)

    async def _generate(self, key: str, order: dict[str, Any]) -> None:
        pieces = self._engine.generate(order)
        if inspect.isawaitable(pieces):
            pieces = await pieces
        if hasattr(pieces, "__aiter__"):
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    self._reply("piece", key, piece)
            return
        pieces = iter(pieces)  # synchronous: on a thread
        while (piece := await asyncio.to_thread(next, pieces, _END)) is not _END:
            self._reply("piece", key, piece)

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "refit" and self._unwrap is not None:
            refit = arguments[0]
            arguments = ({**refit, "weights": await asyncio.to_thread(self._unwrap, refit["weights"])},)
        function = getattr(self._engine, method)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        value = await asyncio.to_thread(function, *arguments)
        return await value if inspect.isawaitable(value) else value

    def _reply(self, verb: ReplyKind, key: str, content: Any, *, urgent: bool = False) -> None:
        """Replies of one turn of the loop are flushed together."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append((verb, key, content))
        self._pending_urgent = self._pending_urgent or urgent

    def _flush(self) -> None:
        fresh, self._pending = self._pending, []
        urgent, self._pending_urgent = self._pending_urgent or not self._tasks, False
        with self._condition:
            if not self._outbox:
                self._first_at = time.monotonic()
            self._outbox += fresh
            self._urgent = self._urgent or urgent
            self._condition.notify_all()

    async def _end(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=self._stop_s / 2)
        close = getattr(self._engine, "close", None)
        if callable(close):
            value = close()
            if inspect.isawaitable(value):
                await value
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not mine:
                task.cancel()


@dataclasses.dataclass(frozen=True)
class EngineObjectSpec:
    """How an engine object is created."""

    use: str
    place: Place
    settings: Mapping[str, Any]
    near: Path | None
    start_s: float
    stop_s: float

    def thread(self, place: Place, **options: Any) -> EngineThread:
        kind = engine_class(self.use, self.settings, self.near, "engine")
        return EngineThread(kind, self.settings, place, within_s=self.start_s, stop_s=self.stop_s, **options)


class ThreadedEngine(ActorEngine):
    """An engine object on an EngineThread, here or in another process."""

    def __init__(self, name: str, methods: frozenset[str], exchange: ExchangeCall, weights_at: WeightsAt) -> None:
        super().__init__(name, SimpleNamespace(**dict.fromkeys(methods, True)))  # in place of an actor's handle
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
        self, spec: EngineObjectSpec, methods: frozenset[str], place_of: Callable[[str], Place], weights_at: WeightsAt
    ) -> None:
        self._spec, self._methods, self._place_of, self._weights_at = spec, methods, place_of, weights_at
        self._threads: dict[str, EngineThread] = {}
        self._start_lock = asyncio.Lock()  # one at a time: seeds and devices are process-wide

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        await self.stop(worker)
        try:
            async with self._start_lock:
                place = self._place_of(worker)
                thread = await asyncio.to_thread(self._spec.thread, place, gather_s=HERE_GATHER_S)
        except Exception as error:
            raise UnreachableError(f"the engine of {worker} could not be created: {error}") from error
        self._threads[worker] = thread

        async def exchange(what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
            return await asyncio.to_thread(thread.exchange, what, wait_s)

        return await started(ThreadedEngine(worker, self._methods, exchange, self._weights_at), path)

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Only for engines without refit, which this launcher refuses."""
        raise no_refit_error(worker)

    async def stop(self, worker: str) -> None:
        thread = self._threads.pop(worker, None)
        if thread is not None:
            await asyncio.to_thread(thread.close)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(worker) for worker in list(self._threads)))
