"""Engines that are Ray actors: any actor with a few methods, for example a trainer's own engine.

Required: `generate(request)`, a generator of dictionaries with the fields of `StreamDelta`, and `ready()`, a dictionary
with the fields of `EngineState`, or a bool. Optional: `load`, `abort`, `pause`, `resume`, `sleep`, `wake`, `flush`,
`version`, `refit`; capabilities follow from what exists. Requests and weight updates are passed as dictionaries, modes
and memory tags as strings, so the actor imports nothing of trimtab.

`generate` and `abort` must be able to run concurrently: an async actor, or a threaded one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from typing import Any

from trimtab.core.errors import InputError
from trimtab.runtime.engines.engine import (
    DeltaReader,
    EngineCapability,
    EngineDeadlines,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineLoad,
    EngineMalformedError,
    EngineState,
    EngineWedgedError,
    EventStream,
    FinishReason,
    GenerateRequest,
    MalformedOutput,
    MemoryTag,
    OpenStream,
    PauseMode,
    StreamDelta,
    WeightUpdate,
)
from trimtab.runtime.engines.gated import GatedEngine

_NEEDS = {
    EngineCapability.pause: ("pause", "resume"),
    EngineCapability.keep: ("pause", "resume"),
    EngineCapability.sleep: ("sleep", "wake"),
    EngineCapability.flush: ("flush",),
    EngineCapability.refit: ("refit", "version"),
    EngineCapability.version: ("version",),
    EngineCapability.load: ("load",),
}


class ActorEngine(GatedEngine):
    """Adapter of an actor that generates."""

    kind = "actor"

    def __init__(self, name: str, handle: Any, deadlines: EngineDeadlines | None = None) -> None:
        super().__init__(name, deadlines)
        self._handle = handle
        for method in ("generate", "ready"):
            if not self._has(method):
                raise InputError(f"the actor of engine {name} has no method '{method}'")
        self.capabilities = frozenset(verb for verb, needed in _NEEDS.items() if all(map(self._has, needed)))

    def _has(self, method: str) -> bool:
        return getattr(self._handle, method, None) is not None

    def _events(self, stream: OpenStream) -> EventStream:
        assert isinstance(stream.request, GenerateRequest)  # actors take no others
        request = stream.request.fields() | {"id": stream.key}
        return _Generator(self.name, self._handle, request, self.deadlines)

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        return _DictReader()

    async def _read_state(self) -> EngineState:
        reply = await self._call("ready", within_s=self.deadlines.call_s)
        reply = dict(reply) if isinstance(reply, dict) else {"up": bool(reply)}
        paused, asleep = bool(reply.get("paused")), bool(reply.get("asleep"))
        self._update_gate(paused, asleep)
        version = None if self._discarded or reply.get("version") is None else str(reply["version"])
        up = bool(reply.get("up")) and not self._closed_reason
        why = self._closed_reason or str(reply.get("why") or ("it answers" if up else "ready() says no"))
        return EngineState(up, why, version, paused or self._paused is not None, asleep, "actor")

    async def _load(self) -> EngineLoad:
        if not self._has("load"):
            # Without `load`, the open streams of this adapter are taken as its whole load.
            return EngineLoad(len(self._open_streams), 0, None, time.monotonic(), fresh=True)
        reply = await self._call("load", within_s=self.deadlines.call_s)
        try:
            used = reply.get("kv_used_share")
            return EngineLoad(
                int(reply["running"]), int(reply.get("waiting", 0)), None if used is None else float(used),
                time.monotonic(), fresh=bool(reply.get("fresh", self._paused is None)),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineMalformedError(f"its load cannot be read: {error!r}", engine=self.name) from None

    async def _version(self) -> str | None:
        if not self._has("version"):
            return None
        reply = await self._call("version", within_s=self.deadlines.call_s)
        return None if reply is None else str(reply)

    async def _abort(self, keys: Collection[str] | None) -> bool:
        if not self._has("abort"):
            return False
        await self._call("abort", None if keys is None else list(keys), within_s=self.deadlines.call_s)
        return True

    async def _pause(self, mode: PauseMode) -> None:
        if EngineCapability.pause in self.capabilities:
            await self._call("pause", mode.value)
        else:
            await self._only_stop_sending(mode)

    async def _resume(self) -> None:
        if EngineCapability.pause in self.capabilities:
            await self._call("resume")

    async def _sleep(self, level: int) -> None:
        await self._call("sleep", level)

    async def _wake(self, tags: set[MemoryTag]) -> None:
        await self._call("wake", sorted(tag.value for tag in tags))

    async def _flush(self) -> None:
        await self._call("flush")

    async def _refit(self, refit: WeightUpdate) -> None:
        await self._call("refit", dataclasses.asdict(refit), within_s=self.deadlines.refit_s)

    async def _call(self, method: str, *args: Any, within_s: float | None = None) -> Any:
        seconds = self.deadlines.change_s if within_s is None else within_s
        try:
            answer = await asyncio.wait_for(_await_ref(getattr(self._handle, method).remote(*args)), seconds)
        except Exception as error:
            raise _engine_error(error, f"{method}()", self.name, seconds) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineFailedError(f"{method}() said success: false: {answer}", engine=self.name)
        return answer


class _Generator:
    """A running generator of an actor as a stream of events."""

    def __init__(self, name: str, handle: Any, request: dict[str, Any], deadlines: EngineDeadlines) -> None:
        self._name, self._handle, self._request, self._deadlines = name, handle, request, deadlines
        self._running: Any = None
        self._ended = asyncio.Event()  # closed by this adapter
        self._timer: asyncio.TimerHandle | None = None

    def close(self, *, on_purpose: bool = False) -> None:
        self._ended.set()
        if self._timer:
            self._timer.cancel()
        if self._running is not None:
            import ray

            with suppress(Exception):  # the generator has ended, or the actor is gone
                ray.cancel(self._running)
            self._running = None

    def close_within(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, lambda: self.close(on_purpose=True))

    async def rest(self) -> None:
        """Nothing follows the last item of an actor's generator."""

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        running = self._handle.generate.options(num_returns="streaming").remote(self._request)
        self._running = running
        seconds = self._deadlines.first_bytes_s
        while True:
            reply = await self._next(running, seconds)
            if reply is _OVER:
                return
            if not isinstance(reply, dict):
                raise EngineMalformedError(f"it gave a {type(reply).__name__} and no dictionary", engine=self._name)
            yield reply
            seconds = self._deadlines.silence_s

    async def _next(self, running: Any, seconds: float) -> Any:
        reading = asyncio.ensure_future(_next_item(running))
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((reading, ending), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if ending.done():
                raise EngineGoneError("its generator was closed", engine=self._name)
            raise EngineWedgedError(f"generate() gave nothing for {seconds:g} s", engine=self._name)
        except EngineError:
            raise
        except Exception as error:
            raise _engine_error(error, "generate()", self._name, seconds) from None
        finally:
            ending.cancel()
            reading.cancel()


_OVER = object()


async def _next_item(running: Any) -> Any:
    try:
        return await (await running.__anext__())
    except StopAsyncIteration:
        return _OVER


async def _await_ref(reference: Any) -> Any:
    return await reference


def _engine_error(error: Exception, call: str, name: str, seconds: float) -> EngineError:
    from ray.exceptions import RayActorError, RayTaskError

    if isinstance(error, asyncio.TimeoutError):
        return EngineWedgedError(f"{call} had no answer in {seconds:g} s", engine=name)
    if isinstance(error, RayActorError):
        return EngineGoneError(f"{call}: its actor is gone", engine=name)
    if isinstance(error, RayTaskError):
        cause = error.cause if error.cause is not None else error
        return EngineFailedError(f"{call} raised {type(cause).__name__}: {str(cause)[:200]}", engine=name)
    return EngineGoneError(f"{call}: {type(error).__name__}: {str(error)[:200]}", engine=name)


class _DictReader:
    """Converts an actor's dictionaries to deltas."""

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        unknown = sorted(set(event) - _FIELDS)
        if unknown:
            raise MalformedOutput(f"unknown fields: {', '.join(unknown)}")
        finish = event.get("finish")
        if finish is not None:
            finish = FinishReason.aborted_elsewhere if finish == FinishReason.aborted.value else FinishReason(finish)
        logprobs, text = event.get("logprobs"), event.get("text")
        ids = tuple(int(token) for token in event.get("token_ids") or ())
        if logprobs is not None and len(logprobs) != len(ids):
            raise MalformedOutput(f"{len(logprobs)} log-probabilities for {len(ids)} tokens")
        version = event.get("version")
        return [
            StreamDelta(
                ids, None if logprobs is None else tuple(logprobs), event.get("best"), text, finish,
                event.get("stopped_by"), None if version is None else str(version), int(event.get("missing") or 0),
                event.get("extra"),
            )
        ]  # fmt: skip


_FIELDS = {field.name for field in dataclasses.fields(StreamDelta)}
