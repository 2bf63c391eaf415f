"""Runs an engine object on a thread with its own event loop; callers exchange batches of messages with it.

One exchange hands in pending messages (orders, calls, ends) and takes back all replies so far, for any number of
requests, so an engine in another process costs a message now and then instead of one per token. The engine is any class
with the methods of an actor engine (`runtime/engines/actor.py`): async ones run on the loop, others on threads. What
must never happen: an order without an end (chunks and an end, or an error), a generator that goes on after it was
ended, a thread that outlives `close`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from trimtab.core.errors import InputError, UnreachableError, meant
from trimtab.runtime.run.component import Place, error_text, find_class

GATHER_S = 0.02  # replies are batched for this long, unless a call was answered or nothing runs any more
CLOSE_S = 10.0
MAX_THREADS = 64  # of an engine with synchronous methods
NEEDED = ("ready", "generate")
METHODS = (*NEEDED, "load", "abort", "pause", "resume", "sleep", "wake", "flush", "version", "refit")

EngineMessage = tuple[Literal["order", "call", "end"], str, Any]
"""To the engine, each with its key: an order, a call as (method, arguments), or the end of either."""

ReplyKind = Literal["piece", "over", "value", "raised"]
EngineReply = tuple[ReplyKind, str, Any]
"""From the engine, each with its key: a chunk, the end of a stream, the value of a call, or an error."""


def engine_class(use: str, settings: Mapping[str, Any], near: Path | None, where: str) -> Callable[..., Any]:
    """The class of an engine, checked: it can generate and accepts these settings."""
    kind = find_class(use, near, where)
    for method in NEEDED:
        if not callable(getattr(kind, method, None)):
            names = [name for name in dir(kind) if not name.startswith("_")]
            hint = meant(method, names, "an engine has ready() and generate(order)")
            raise InputError(f"{use} has no {method}", where=where, hint=hint)
    try:
        inspect.signature(kind).bind(**settings, **_place(kind, Place("engine")))
    except TypeError as error:
        raise InputError(f"{use} cannot be made with these settings: {error}", where=where) from None
    except ValueError:  # some C classes have no signature
        pass
    return kind


def methods_of(kind: Any) -> frozenset[str]:
    """Which of the engine methods a class has."""
    return frozenset(method for method in METHODS if callable(getattr(kind, method, None)))


def _place(kind: Callable[..., Any], place: Place) -> dict[str, Place]:
    """Its place, if the constructor takes one."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(kind).parameters.values()
        if any(parameter.name == "place" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return {"place": place}
    return {}


class EngineThread:
    """One engine, its thread, and the messages on their way.

    It must be constructed `within_s`. `unwrap` resolves the weights in a refit, if they came as a reference.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
        place: Place,
        *,
        within_s: float = 600.0,
        gather_s: float = GATHER_S,
        unwrap: Callable[[Any], Any] | None = None,
    ) -> None:
        self._gather_s = gather_s
        self._unwrap = unwrap
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pending: list[EngineReply] = []  # replies of this turn of the loop
        self._pending_urgent = False  # a caller waits for one of them
        self._condition = threading.Condition()
        self._outbox: list[EngineReply] = []
        self._first_at = 0.0  # when the oldest reply came
        self._urgent = False  # do not batch any longer
        self._engine: Any = None
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"trimtab-engine-{place.component}")
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self._run, name=f"trimtab-engine-{place.component}", daemon=True)
        self._thread.start()

        async def make() -> Any:
            return kind(**settings, **_place(kind, place))

        try:
            self._engine = asyncio.run_coroutine_threadsafe(make(), self._loop).result(within_s)
        except concurrent.futures.TimeoutError:
            self.close()
            raise UnreachableError(f"the engine was not constructed within {within_s:g} s") from None
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
        """Stop the engine and its thread, which is left behind only if it hangs in user code."""
        if not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(Exception):
            ending.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ---- on the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

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
            await asyncio.wait(list(self._tasks.values()), timeout=CLOSE_S / 2)
        close = getattr(self._engine, "close", None)
        if callable(close):
            value = close()
            if inspect.isawaitable(value):
                await value
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not mine:
                task.cancel()


_END = object()
