"""A rollout engine that is an object: it lives at a desk, on a thread with an event loop of its own, and is spoken to
in exchanges.

One exchange hands in whatever there is to say (orders, calls, ends) and takes back whatever was made meanwhile, for any
number of requests at once: so an engine in another process costs a message now and then, and not one for each token.
The engine itself is any class with the methods of an actor engine (`runtime/engines/actor.py`), asynchronous ones on
the loop, others on threads beside it. What must never happen: an order without an end (pieces and a last word, or why
there will be none), a generator that goes on after its end was asked for, a thread that outlives `close`.
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

from trimtab.core.errors import InputError, UnreachableError, nearest
from trimtab.runtime.run.component import Place, find_class, error_text

GATHER_S = 0.02  # pieces are gathered for so long, unless a call was answered or nothing runs any more
CLOSE_S = 10.0
MOST_THREADS = 64  # of an engine whose methods are not asynchronous
NEEDED = ("ready", "generate")
METHODS = (*NEEDED, "load", "abort", "pause", "resume", "sleep", "wake", "flush", "version", "refit")

EngineMessage = tuple[Literal["order", "call", "end"], str, Any]
"""To the engine, each with its key: an order, a call as (method, arguments), or that it is not wanted any more."""

ReplyKind = Literal["piece", "over", "value", "raised"]
EngineReply = tuple[ReplyKind, str, Any]
"""From the engine: a piece, the end of a stream, what a call gave, or what either raised; each with its key."""


def engine_class(use: str, settings: Mapping[str, Any], near: Path | None, where: str) -> Callable[..., Any]:
    """The class of an engine, checked: it can generate, and be made with these settings."""
    kind = find_class(use, near, where)
    for method in NEEDED:
        if not callable(getattr(kind, method, None)):
            near_word = nearest(method, [one for one in dir(kind) if not one.startswith("_")])
            raise InputError(
                f"{use} has no {method}",
                where=where,
                hint=f"did you mean {near_word}?" if near_word else "an engine has ready() and generate(order)",
            )
    try:
        inspect.signature(kind).bind(**settings, **_place(kind, Place("engine")))
    except TypeError as error:
        raise InputError(f"{use} cannot be made with these settings: {error}", where=where) from None
    except ValueError:  # some classes of C say nothing of themselves
        pass
    return kind


def methods_of(kind: Any) -> frozenset[str]:
    """What of an engine's methods it has."""
    return frozenset(one for one in METHODS if callable(getattr(kind, one, None)))


def _place(kind: Callable[..., Any], place: Place) -> dict[str, Place]:
    """Its place, where its constructor asks for one."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(kind).parameters.values()
        if any(one.name == "place" or one.kind is one.VAR_KEYWORD for one in parameters):
            return {"place": place}
    return {}


class EngineThread:
    """One engine, its thread, and what is on its way to it and from it.

    It has to be made `within_s`. `unwrapped` makes of the weights in a refit what the engine is to have, where they
    came by some other way.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
        place: Place,
        *,
        within_s: float = 600.0,
        gather_s: float = GATHER_S,
        unwrapped: Callable[[Any], Any] | None = None,
    ) -> None:
        self._gather_s = gather_s
        self._unwrapped = unwrapped
        self._doing: dict[str, asyncio.Task[None]] = {}
        self._fresh: list[EngineReply] = []  # said in this turn of the loop
        self._hurry = False  # somebody waits for something in it
        self._news = threading.Condition()
        self._out: list[EngineReply] = []
        self._first_at = 0.0  # when the oldest of it came
        self._urgent = False  # it is not gathered any longer
        self._engine: Any = None
        self._beside = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix=f"trimtab-engine-{place.component}")
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._beside)
        self._thread = threading.Thread(target=self._run, name=f"trimtab-engine-{place.component}", daemon=True)
        self._thread.start()

        async def make() -> Any:
            return kind(**settings, **_place(kind, place))

        try:
            self._engine = asyncio.run_coroutine_threadsafe(make(), self._loop).result(within_s)
        except concurrent.futures.TimeoutError:
            self.close()
            raise UnreachableError(f"it was not made within {within_s:g} s") from None
        except BaseException:
            self.close()
            raise

    # ---- from outside, one at a time -------------------------------------------------------------------------------

    def exchange(self, what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
        """Say this, and hear what there is, or what comes within so long."""
        if not self._thread.is_alive():
            raise UnreachableError("the engine's thread has ended")
        if what:
            self._loop.call_soon_threadsafe(self._hear, what)
        end = time.monotonic() + wait_s
        with self._news:
            while not self._urgent:
                now = time.monotonic()
                until = min(end, self._first_at + self._gather_s) if self._out else end
                if now >= until:
                    break
                self._news.wait(until - now)
            told, self._out, self._urgent = self._out, [], False
        return told

    def close(self) -> None:
        """The engine ends, with whatever it does; its thread is gone afterwards, unless it hangs in the user's code."""
        if not self._thread.is_alive():
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(Exception):
            ending.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._beside.shutdown(wait=False, cancel_futures=True)

    # ---- on the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _hear(self, what: list[EngineMessage]) -> None:
        for verb, key, content in what:
            if verb == "end":
                task = self._doing.get(key)
                if task is not None:
                    task.cancel()
                continue
            work = self._generate(key, content) if verb == "order" else self._call(key, *content)
            self._doing[key] = self._loop.create_task(work)

    async def _generate(self, key: str, order: dict[str, Any]) -> None:
        try:
            pieces = self._engine.generate(order)
            if inspect.isawaitable(pieces):
                pieces = await pieces
            if hasattr(pieces, "__aiter__"):
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        self._tell("piece", key, piece)
            else:
                await self._iterated(key, iter(pieces))
        except asyncio.CancelledError:
            self._over(key)
        except Exception as error:
            self._over(key)
            self._tell("raised", key, error_text(error))
        else:
            self._over(key)
            self._tell("over", key, None)

    async def _iterated(self, key: str, pieces: Any) -> None:
        """A generator that is not asynchronous is asked on a thread."""
        while (piece := await asyncio.to_thread(next, pieces, _OVER)) is not _OVER:
            self._tell("piece", key, piece)

    async def _call(self, key: str, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            if method == "refit" and self._unwrapped is not None:
                refit = arguments[0]
                arguments = ({**refit, "weights": await asyncio.to_thread(self._unwrapped, refit["weights"])},)
            function = getattr(self._engine, method)
            if inspect.iscoroutinefunction(function):
                value = await function(*arguments)
            else:
                value = await asyncio.to_thread(function, *arguments)
                if inspect.isawaitable(value):
                    value = await value
        except asyncio.CancelledError:
            self._over(key)
        except Exception as error:
            self._over(key)
            self._tell("raised", key, error_text(error), urgent=True)
        else:
            self._over(key)
            self._tell("value", key, value, urgent=True)

    def _over(self, key: str) -> None:
        self._doing.pop(key, None)

    def _tell(self, verb: ReplyKind, key: str, content: Any, *, urgent: bool = False) -> None:
        """Once this turn of the loop is through: what came in one turn goes out together."""
        if not self._fresh:
            self._loop.call_soon(self._pass_on)
        self._fresh.append((verb, key, content))
        self._hurry = self._hurry or urgent

    def _pass_on(self) -> None:
        fresh, self._fresh = self._fresh, []
        urgent, self._hurry = self._hurry or not self._doing, False
        with self._news:
            if not self._out:
                self._first_at = time.monotonic()
            self._out += fresh
            self._urgent = self._urgent or urgent
            self._news.notify_all()

    async def _end(self) -> None:
        for task in list(self._doing.values()):
            task.cancel()
        if self._doing:
            await asyncio.wait(list(self._doing.values()), timeout=CLOSE_S / 2)
        close = getattr(self._engine, "close", None)
        if callable(close):
            value = close()
            if inspect.isawaitable(value):
                await value
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not mine:
                task.cancel()


_OVER = object()
