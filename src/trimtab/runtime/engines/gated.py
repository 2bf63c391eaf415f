"""What all adapters have in common: open streams, the gate, and the order in which memory is released.

The gate is shut before a pause or sleep is sent and opened only after a resume or wake was confirmed, so that no
request can slip in between. `ready` also shuts it when it sees that somebody else paused the engine, and opens it when
that is over. A dialect says how its events are read and which calls its verbs are.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from trimtab.core.errors import InputError, TrimtabError
from trimtab.model.rollout import ReleaseSupport
from trimtab.runtime.engines.engine import (
    EngineBusyError,
    EngineCapability,
    EngineDeadlines,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineLoad,
    EngineMalformedError,
    EnginePausedError,
    EngineRefusedError,
    EngineState,
    EngineWedgedError,
    FinishReason,
    GenerateRequest,
    MemoryTag,
    NotSupportedError,
    PartialOutput,
    PauseMode,
    StreamDelta,
    WeightUpdate,
)

_SETTLE_S = 1.0
"""So long its own figures may lag behind what it has done."""
_POLL_S = 0.02
_EMPTY = "its weights were discarded or half replaced, and no refit has been confirmed since"


class DeltaReader(Protocol):
    """Turns the events of one stream into pieces; raises `MalformedOutput` for what cannot be."""

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        """The pieces of one event."""


class EventStream(Protocol):
    """One open stream of events; its errors are those of `engine.py`."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """Until its end, or an error."""

    def close(self, *, on_purpose: bool = False) -> None:
        """Ends it here and now, which the engine takes as an abort."""

    def close_within(self, seconds: float) -> None:
        """Ends it unless it has ended by itself by then."""

    async def rest(self) -> None:
        """Takes what is left after the last piece."""


class MalformedOutput(Exception):  # noqa: N818 - not raised beyond this folder
    """What an engine said cannot be."""


class OpenStream:
    """One open stream."""

    def __init__(self, request: GenerateRequest, attempt: str) -> None:
        self.request = request
        # What the engine knows it by. No second attempt may meet what is left of the first, whoever made that: SGLang
        # aborts a name once more two seconds after its stream has ended, also if somebody has used it again by then.
        self.key = f"{request.id}.{attempt}"
        self.events: EventStream | None = None
        self.aborting = False
        self.ended = False  # it ended by itself, well or not
        self._stream_pieces: list[StreamDelta] = []

    def add(self, piece: StreamDelta) -> None:
        """Keeps it, in case that this is how far it gets."""
        self._stream_pieces.append(piece)
        self.ended = piece.finish is not None

    def so_far(self) -> PartialOutput:
        """All that came until now."""
        return PartialOutput.of(self._stream_pieces)


class GatedEngine:
    """The shared half of an adapter; see `Engine` for the verbs."""

    kind: ClassVar[str]
    capabilities: frozenset[EngineCapability] = frozenset()

    def __init__(self, name: str, deadlines: EngineDeadlines | None = None) -> None:
        self.name, self.deadlines = name, deadlines or EngineDeadlines()
        self.dialect = ""
        self.release = ReleaseSupport.tried
        # Requests whose streams are open, by id.
        self._open_streams: dict[str, OpenStream] = {}
        self._attempts, self._instance = 0, secrets.token_hex(4)
        # Why nothing may be sent: set before a pause or sleep is sent, empty only when the engine confirmed otherwise.
        self._closed_reason = ""
        self._paused_externally = False  # it was somebody else's pause that shut it
        # How this adapter paused it last; None when it is not paused, or the pause was not confirmed.
        self._paused: PauseMode | None = None
        # Parts of the memory that are released.
        self._asleep: set[MemoryTag] = set()
        # A look that has not begun yet, for all that wait for one.
        self._next_check: asyncio.Task[EngineState] | None = None
        # What is still being told to the engine of requests whose clients went away.
        self._abort_tasks: set[asyncio.Task[None]] = set()
        self._discarded = False  # its weights are gone or unknown until a refit is confirmed, whatever it reports

    # Asking.

    async def ready(self) -> EngineState:
        """Would it serve now? A paused or sleeping engine is not ready, whatever its health page says."""
        try:
            await self._ensure_reachable()
            state = await self._read_state()
            return replace(state, elsewhere=self._paused_externally)
        except TrimtabError as error:
            return EngineState(
                False, error.what, paused=bool(self._paused), asleep=bool(self._asleep), dialect=self.dialect
            )

    async def load(self) -> EngineLoad:
        """What it has to do, by its own counters."""
        await self._ensure_reachable()
        return await self._load()

    async def version(self) -> str | None:
        """Of its weights; None while they are discarded."""
        if self._discarded:
            return None
        await self._ensure_reachable()
        return await self._version()

    # Generating.

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        """Streams one answer; see `Engine.generate`."""
        self._require_open()
        if request.id in self._open_streams:
            raise InputError(f"a request '{request.id}' is already running there", where=f"engine {self.name}")
        self._attempts += 1
        stream = self._open_streams[request.id] = OpenStream(request, f"{self._instance}.{self._attempts}")
        try:
            await self._ensure_reachable()
            self._require_open()
            async with aclosing(self._stream_pieces(stream)) as pieces:
                async for piece in pieces:
                    stream.add(piece)
                    yield piece
        except TrimtabError:
            stream.ended = True
            raise
        finally:
            self._open_streams.pop(request.id, None)
            if stream.events is not None:
                stream.events.close()
            if not stream.ended:
                self._abandoned(stream.key)

    async def _stream_pieces(self, stream: OpenStream) -> AsyncGenerator[StreamDelta, None]:
        reader, stream.events = self._reader(stream.request), self._events(stream)
        if stream.aborting:
            yield StreamDelta(finish=FinishReason.aborted)
            return
        try:
            async for event in stream.events:
                for reply in await self._read(reader, event):
                    piece = self._mark_own_abort(stream, reply)
                    if piece.finish is FinishReason.aborted_elsewhere and (why := await self._shutdown_reason()):
                        yield replace(piece, finish=None)
                        raise EngineGoneError(f"it ended, and the answer with it: {why}", engine=self.name)
                    yield piece
                    if piece.finish is not None:
                        await stream.events.rest()
                        return
            raise EngineGoneError("it ended the stream without finishing the answer", engine=self.name)
        except (EngineError, OSError) as error:
            if stream.aborting:
                yield StreamDelta(finish=FinishReason.aborted)
                return
            raise await self._with_partial(error, stream.so_far()) from None

    async def _read(self, reader: DeltaReader, event: dict[str, Any]) -> list[StreamDelta]:
        try:
            return await reader.take(event)
        except MalformedOutput as error:
            raise EngineMalformedError(str(error), engine=self.name) from None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise EngineMalformedError(
                f"an event that cannot be read ({type(error).__name__}: {error})", engine=self.name
            ) from None

    def _mark_own_abort(self, stream: OpenStream, piece: StreamDelta) -> StreamDelta:
        """An abort that was asked here is told apart from one that others asked for."""
        if piece.finish is FinishReason.aborted_elsewhere and stream.aborting:
            return StreamDelta(
                piece.token_ids, piece.logprobs, piece.best, piece.text, FinishReason.aborted, version=piece.version,
                missing=piece.missing,
            )  # fmt: skip
        return piece

    async def _shutdown_reason(self) -> str:
        """Why it will answer nothing more; empty where it will.

        An engine that is told to end calls that an abort of everything that it has, as a trainer's abort is called; but
        it answers no question afterwards. One look is shared by all requests that ended with the same word.
        """
        if self._next_check is None:
            self._next_check = asyncio.get_running_loop().create_task(self._state_soon())
        state = await asyncio.shield(self._next_check)
        return "" if state.up or state.paused or state.asleep else state.why

    async def _state_soon(self) -> EngineState:
        await asyncio.sleep(0.02)
        self._next_check = None  # who asks from here on asks about a later moment
        return await self.ready()

    async def _with_partial(self, error: Exception, so_far: PartialOutput) -> EngineError:
        """The error with what had been generated; a silence that is a pause of others is called so."""
        if not isinstance(error, EngineError):
            error = EngineGoneError(str(error), engine=self.name)
        if isinstance(error, EngineWedgedError):
            state = await self.ready()
            if state.paused or state.asleep:
                error = EnginePausedError(f"{error.what}, because {state.why}", engine=self.name)
        error.so_far = so_far
        return error

    def _require_open(self) -> None:
        if self._closed_reason:
            raise EnginePausedError(
                f"nothing is sent to it: {self._closed_reason}", engine=self.name, hint="resume or wake it first"
            )

    def _abandoned(self, key: str) -> None:
        """A client went away and its stream was closed; engines that are slow to notice are told besides."""
        task = asyncio.get_running_loop().create_task(self._abort_left(key))
        self._abort_tasks.add(task)
        task.add_done_callback(self._abort_tasks.discard)

    async def _abort_left(self, key: str) -> None:
        """Nothing more to say, for most."""

    # Life cycle.

    async def abort(self, ids: Collection[str] | None = None) -> None:
        """Ends these requests, or all."""
        flights = [stream for key, stream in self._open_streams.items() if ids is None or key in ids]
        if ids is not None and not flights:
            return  # an empty list means everybody's requests to some engines
        for stream in flights:
            stream.aborting = True
        try:
            reply = await self._abort(None if ids is None else [stream.key for stream in flights])
        except (EngineError, EngineRefusedError):
            reply = False
        for stream in flights:
            if stream.events is not None:
                # Where the engine was told, the stream should end by itself, with its last tokens.
                if reply:
                    stream.events.close_within(self.deadlines.abort_s)
                else:
                    stream.events.close(on_purpose=True)

    async def pause(self, mode: PauseMode = PauseMode.abort) -> None:
        """No request is sent from now on; see `PauseMode` for those that run."""
        await self._ensure_reachable()
        self._closed_reason, self._paused_externally, self._paused = (
            f"a pause ({mode.value}) was asked for",
            False,
            None,
        )
        ends = list(self._open_streams.values()) if mode is PauseMode.abort else []
        for stream in ends:
            stream.aborting = True
        await self._pause(mode)
        self._closed_reason, self._paused = f"it is paused ({mode.value})", mode
        for stream in ends:
            if stream.events is not None:
                stream.events.close_within(self.deadlines.abort_s)

    async def resume(self) -> None:
        """The gate opens only when the engine has confirmed."""
        if self._asleep:
            raise EnginePausedError("it is asleep", engine=self.name, hint="wake it first")
        if self._discarded:
            raise EnginePausedError(_EMPTY, engine=self.name, hint="refit it first")
        await self._ensure_reachable()
        await self._resume()
        self._closed_reason, self._paused_externally, self._paused = "", False, None

    async def sleep(self, level: int = 1) -> None:
        """Gives memory back; never with requests running."""
        self._require_capability(EngineCapability.sleep)
        if level not in (1, 2):
            raise InputError(f"there is no sleep of level {level}", hint="1 keeps the weights, 2 discards them")
        await self._ensure_reachable()
        await self._close_when_idle(f"a sleep (level {level}) was asked for")
        if self._paused is None:
            # Somebody else may send between the look and the release; a pause turns that from a crash into an abort.
            await self.pause(PauseMode.abort)
        if level == 2:
            self._discarded = True  # from here on, even if the call fails half-way
        self._asleep = {MemoryTag.weights, MemoryTag.kv_cache}
        self._closed_reason = f"it is asleep (level {level})"
        await self._sleep(level)

    async def wake(self, parts: Collection[MemoryTag] | None = None) -> None:
        """Takes memory again; the gate opens when all of it is back and the weights are there."""
        self._require_capability(EngineCapability.sleep)
        await self._ensure_reachable()
        chosen = set(parts) if parts is not None else {MemoryTag.weights, MemoryTag.kv_cache}
        await self._wake(chosen)
        self._asleep -= chosen
        if self._asleep:
            self._closed_reason = (
                f"only part of it is awake; {', '.join(sorted(part.value for part in self._asleep))} is not"
            )
        elif self._discarded:
            self._closed_reason = _EMPTY
        else:
            await self.resume()

    async def flush(self) -> None:
        """Forgets cached prefixes; an engine that could not is an error."""
        self._require_capability(EngineCapability.flush)
        await self._ensure_reachable()
        await self._flush()

    async def refit(self, refit: WeightUpdate) -> None:
        """New weights; the version counts when the engine confirms it."""
        self._require_capability(EngineCapability.refit)
        if refit.way != "disk":
            raise NotSupportedError(
                f"weights by way of '{refit.way}' are the trainer's to send", where=f"engine {self.name}",
                hint="only 'disk' is done here",
            )  # fmt: skip
        if MemoryTag.weights in self._asleep:
            raise EnginePausedError("its weights are asleep", engine=self.name, hint="wake the weights first")
        await self._ensure_reachable()
        if self._paused is None:
            await self._close_when_idle("it is being refitted")
        # Until the new version is confirmed nobody knows which weights it has: neither the old ones nor the new.
        self._discarded = True
        await self._refit(refit)
        await self.refitted(refit.version)

    async def refitted(self, version: str) -> None:
        """The weights are new, says whoever sent them; believed unless the engine says another version."""
        await self._ensure_reachable()
        confirmed = await self._version()
        if confirmed != version and EngineCapability.version in self.capabilities:
            raise EngineFailedError(
                f"after the refit it says version '{confirmed}' and not '{version}'", engine=self.name,
                hint="whoever sends the weights has to send their version too",
            )  # fmt: skip
        self._discarded = False
        if not self._asleep and self._paused is None and not self._paused_externally:
            self._closed_reason = ""

    async def close(self) -> None:
        """Ends the open streams."""
        for stream in self._open_streams.values():
            stream.aborting = True
            if stream.events is not None:
                stream.events.close(on_purpose=True)
        if self._abort_tasks:
            await asyncio.wait(self._abort_tasks, timeout=self.deadlines.call_s)

    async def _close_when_idle(self, why: str) -> None:
        """Shuts the gate first, so that nothing comes in during the look; a refusal leaves it as it was."""
        before, self._closed_reason = self._closed_reason, why
        try:
            await self._require_idle()
        except TrimtabError:
            self._closed_reason = before
            raise

    async def _require_idle(self) -> None:
        """Refuses while a request runs, or while nobody can say whether one does."""
        if self._paused in (PauseMode.abort, PauseMode.wait):
            return  # the engine itself confirmed that nothing runs any more
        if self._paused is PauseMode.keep:
            await self._require_retracted()
            return
        if self._open_streams:
            raise EngineBusyError(
                f"{len(self._open_streams)} requests run there", engine=self.name, hint="drain or abort them first"
            )
        load = await self._settled_load()
        if not load.fresh:
            raise EngineBusyError(
                "its load is an old figure, so it may be busy", engine=self.name, hint="pause it first"
            )
        if load.running or load.waiting:
            raise EngineBusyError(
                f"it has {load.running} running and {load.waiting} waiting requests of others", engine=self.name,
                hint="drain or abort them first",
            )  # fmt: skip

    async def _settled_load(self) -> EngineLoad:
        """Its load once it has counted the end of what was sent from here, which it does a moment late."""
        deadline = asyncio.get_running_loop().time() + min(_SETTLE_S, self.deadlines.call_s)
        while True:
            load = await self.load()
            if (load.fresh and not load.running and not load.waiting) or self._open_streams:
                return load
            if asyncio.get_running_loop().time() >= deadline:
                return load
            await asyncio.sleep(_POLL_S)

    async def _require_retracted(self) -> None:
        """Requests that stand still still hold memory, unless the dialect knows better."""
        raise EngineBusyError(
            "its paused requests hold their memory", engine=self.name, hint="resume it and drain, or pause with abort"
        )

    def _require_capability(self, verb: EngineCapability) -> None:
        if verb not in self.capabilities:
            raise NotSupportedError(f"{self.kind} has no way to {verb.value}", where=f"engine {self.name}")

    async def _ensure_reachable(self) -> None:
        """What has to be known of the engine before anything is asked of it."""

    def _update_gate(self, paused: bool, asleep: bool, why: str = "") -> None:
        """What a look at the engine showed of pauses that others asked for, or ended."""
        if paused or asleep:
            if not self._closed_reason:
                self._closed_reason = why or f"somebody else {'paused it' if paused else 'put it to sleep'}"
                self._paused_externally = True
        elif self._paused_externally:
            self._closed_reason, self._paused_externally = "", False

    # What a dialect has to say.

    def _events(self, stream: OpenStream) -> EventStream:
        raise NotImplementedError

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        raise NotImplementedError

    async def _read_state(self) -> EngineState:
        raise NotImplementedError

    async def _load(self) -> EngineLoad:
        raise NotImplementedError

    async def _version(self) -> str | None:
        return None

    async def _abort(self, keys: Collection[str] | None) -> bool:
        """Tells the engine, by the keys that it knows; False where only a broken connection tells it."""
        return False

    async def _pause(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def _resume(self) -> None:
        raise NotImplementedError

    async def _sleep(self, level: int) -> None:
        raise NotImplementedError

    async def _wake(self, parts: set[MemoryTag]) -> None:
        raise NotImplementedError

    async def _flush(self) -> None:
        raise NotImplementedError

    async def _refit(self, refit: WeightUpdate) -> None:
        raise NotImplementedError
