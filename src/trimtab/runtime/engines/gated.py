"""Base of all adapters: open streams, the gate, and the order in which memory is released.

The gate is closed before a pause or sleep is sent and opened only after a resume or wake was confirmed, so no request
can slip in between. `ready` also closes it when it sees that another client paused the engine, and opens it when that
is over. Subclasses implement reading of events and the calls for each capability.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

from trimtab.core.errors import InputError, TrimtabError
from trimtab.model.rollout import ReleaseSupport
from trimtab.runtime.engines.engine import (
    STREAMS,
    DeltaReader,
    EngineBusyError,
    EngineCall,
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
    EventStream,
    FinishReason,
    ForwardReader,
    ForwardRequest,
    GenerateRequest,
    MalformedOutput,
    MemoryTag,
    NotSupportedError,
    OpenStream,
    PartialOutput,
    PauseMode,
    PieceSupport,
    StreamDelta,
    WeightRecord,
    WeightUpdate,
)

_POLL_S = 0.02
LAUNCHED = "started by trimtab, which sees its process end"
_EMPTY = "its weights were discarded or half replaced, and no refit has been confirmed since"


class GatedEngine:
    """Common half of an adapter; see `Engine` for the calls."""

    kind: ClassVar[str]
    capabilities: frozenset[EngineCapability] = frozenset()
    pieces: PieceSupport = STREAMS

    def __init__(self, name: str, deadlines: EngineDeadlines | None = None) -> None:
        self.name, self.deadlines = name, deadlines or EngineDeadlines()
        self.dialect = ""
        self.release, self.release_note = ReleaseSupport.tried, ""
        # By request id.
        self._open_streams: dict[str, OpenStream] = {}
        self._attempts, self._instance = 0, secrets.token_hex(4)
        # Why the gate is closed. Set before a pause or sleep is sent, cleared only when the engine has confirmed.
        self._closed_reason = ""
        self._paused_externally = False
        # Confirmed pause of this adapter.
        self._paused: PauseMode | None = None
        # Released memory.
        self._asleep: set[MemoryTag] = set()
        # A state check that has not begun yet, shared by its waiters.
        self._next_check: asyncio.Task[EngineState] | None = None
        # Aborts being sent for requests whose clients have disconnected.
        self._abort_tasks: set[asyncio.Task[None]] = set()
        # What an engine that cannot say its weight version was last given, and in which process.
        self._record: WeightRecord | None = None
        self._process_seen: str | None = None
        self._boots = 0
        self.launched = False  # its launcher reports the end of its process, and makes a new adapter for the next
        self.max_running: int | None = None  # requests that it runs at once, if it says so
        self.model_path = ""  # of the weights that it was started with, if it says so
        self.lacks: dict[EngineCapability, str] = {}  # what this engine cannot do, and what would change that
        self.progress_at: float | None = None  # when it was last seen to make tokens, on the loop's clock
        self._progress: float | None = None
        self._discarded = False  # weights are gone or unknown until a refit is confirmed, whatever the engine reports
        self.adapters: set[str] = set()  # names of LoRA adapters that its process has
        self._spoiled: set[str] = set()  # and of those whose weights were discarded

    # State.

    async def ready(self) -> EngineState:
        """A paused or sleeping engine is not ready, whatever its health page says."""
        try:
            await self._ensure_reachable()
            return replace(await self._read_state(), elsewhere=self._paused_externally)
        except TrimtabError as error:
            return EngineState(
                False, error.what, paused=bool(self._paused), asleep=bool(self._asleep), dialect=self.dialect,
                boots=self._boots,
            )  # fmt: skip

    async def load(self) -> EngineLoad:
        await self._ensure_reachable()
        load = await self._load()
        if load.progress is not None and load.progress != self._progress:
            self._progress, self.progress_at = load.progress, asyncio.get_running_loop().time()
        return load

    async def version(self) -> str | None:
        if self._discarded:
            return None
        await self._ensure_reachable()
        return await self._current_version()

    async def discover(self) -> None:
        """Asks the engine what it can do; `capabilities` is right afterwards."""
        await self._ensure_reachable()

    @property
    def sleep_levels(self) -> frozenset[int]:
        """Levels of `sleep` that it has: 1 keeps the weights, 2 discards them."""
        return frozenset({1, 2} if EngineCapability.sleep in self.capabilities else ())

    @property
    def refit_ways(self) -> tuple[str, ...]:
        """Ways in which new weights can reach it."""
        return ("disk",) if EngineCapability.refit in self.capabilities else ()

    # Generating.

    def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        return self._deltas(request)

    async def _deltas(self, request: EngineCall) -> AsyncGenerator[StreamDelta, None]:
        self._require_open()
        if request.id in self._open_streams:
            raise InputError(f"a request '{request.id}' is already running there", where=f"engine {self.name}")
        self._attempts += 1
        stream = self._open_streams[request.id] = OpenStream(request, f"{self._instance}.{self._attempts}")
        try:
            await self._ensure_reachable()
            self._require_open()
            reader = stream.reader = ForwardReader() if isinstance(request, ForwardRequest) else self._reader(request)
            events = stream.events = self._events(stream)
            if stream.aborting:
                yield stream.add(StreamDelta(finish=FinishReason.aborted))
                return
            try:
                async for event in events:
                    for reply in await self._read(reader, event):
                        piece = self._mark_own_abort(stream, reply)
                        if piece.finish is FinishReason.aborted_elsewhere and (why := await self._shutdown_reason()):
                            yield stream.add(replace(piece, finish=None))
                            raise EngineGoneError(f"it ended, and the answer with it: {why}", engine=self.name)
                        yield stream.add(piece)
                        if piece.finish is not None:
                            await events.rest()
                            return
                raise EngineGoneError("it ended the stream without finishing the answer", engine=self.name)
            except (EngineError, OSError) as error:
                if not stream.aborting:
                    raise await self._with_partial(error, stream.so_far()) from None
                yield stream.add(StreamDelta(finish=FinishReason.aborted))
        except TrimtabError:
            stream.ended = True
            raise
        finally:
            self._open_streams.pop(request.id, None)
            if stream.events is not None:
                stream.events.close()
            if not stream.ended:
                self._abandoned(stream.key)

    async def _read(self, reader: DeltaReader, event: dict[str, Any]) -> list[StreamDelta]:
        try:
            return await reader.take(event)
        except MalformedOutput as error:
            raise EngineMalformedError(str(error), engine=self.name) from None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise EngineMalformedError(
                f"an event that cannot be read ({type(error).__name__}: {error})", engine=self.name
            ) from None

    def _mark_own_abort(self, stream: OpenStream, piece: StreamDelta) -> StreamDelta:
        """Distinguishes aborts of this adapter from those of other clients."""
        if piece.finish is FinishReason.aborted_elsewhere and stream.aborting:
            return StreamDelta(
                piece.token_ids, piece.logprobs, piece.best, piece.text, FinishReason.aborted, version=piece.version,
                missing=piece.missing,
            )  # fmt: skip
        return piece

    async def _shutdown_reason(self) -> str:
        """Why the engine will not answer any more; empty if it will.

        An engine that shuts down reports an abort of all its requests, as after a trainer's abort, but then answers
        nothing. One state check is shared by all requests that ended this way.
        """
        if self._next_check is None:
            self._next_check = asyncio.get_running_loop().create_task(self._state_soon())
        state = await asyncio.shield(self._next_check)
        return "" if state.up or state.paused or state.asleep else state.why

    async def _state_soon(self) -> EngineState:
        await asyncio.sleep(0.02)
        self._next_check = None  # later callers need a later check
        return await self.ready()

    async def _with_partial(self, error: Exception, so_far: PartialOutput) -> EngineError:
        """Adds the partial output; silence caused by a pause of another client becomes `EnginePausedError`."""
        if not isinstance(error, EngineError):
            error = EngineGoneError(str(error), engine=self.name)
        if isinstance(error, EngineWedgedError):
            state = await self.ready()
            if state.paused or state.asleep:
                error = EnginePausedError(f"{error.what}, because {state.why}", engine=self.name)
        error.so_far = so_far
        return error

    @property
    def shut(self) -> bool:
        """Whether nothing is sent to it: it is paused or asleep."""
        return bool(self._closed_reason)

    def _require_open(self) -> None:
        if self._closed_reason:
            raise EnginePausedError(
                f"nothing is sent to it: {self._closed_reason}", engine=self.name, hint="resume or wake it first"
            )

    def _abandoned(self, key: str) -> None:
        """Called for a stream that was closed early; some engines need an explicit abort besides."""
        task = asyncio.get_running_loop().create_task(self._abort_left(key))
        self._abort_tasks.add(task)
        task.add_done_callback(self._abort_tasks.discard)

    async def _abort_left(self, key: str) -> None:
        """Most engines abort when the connection closes."""

    # Lifecycle.

    async def abort(self, ids: Collection[str] | None = None) -> None:
        flights = [stream for key, stream in self._open_streams.items() if ids is None or key in ids]
        if ids is not None and not flights:
            return  # some engines take an empty list as all requests
        for stream in flights:
            stream.aborting = True
        # The engine's id of a forwarded request is not known; closing its connection aborts it.
        keys = [stream.key for stream in flights if not isinstance(stream.request, ForwardRequest)]
        try:
            sent = (ids is None or bool(keys)) and await self._abort(None if ids is None else keys)
        except (EngineError, EngineRefusedError):
            sent = False
        for stream in flights:
            if stream.events is not None:
                # After an explicit abort the stream should end by itself, with its last tokens.
                if sent and not isinstance(stream.request, ForwardRequest):
                    stream.events.close_within(self.deadlines.abort_s)
                else:
                    stream.events.close(on_purpose=True)

    async def pause(self, mode: PauseMode = PauseMode.abort) -> None:
        await self._ensure_reachable()
        if mode is PauseMode.keep and EngineCapability.keep not in self.capabilities:
            why = self.lacks.get(EngineCapability.keep, "")
            raise NotSupportedError(
                f"{self.dialect or self.kind} cannot hold running requests{why and f': {why}'}",
                where=f"engine {self.name}", hint="abort or wait",
            )  # fmt: skip
        self._closed_reason, self._paused_externally = f"a pause ({mode.value}) was requested", False
        self._paused = None
        ends = list(self._open_streams.values()) if mode is PauseMode.abort else []
        for stream in ends:
            stream.aborting = True
        await self._pause(mode)
        self._closed_reason, self._paused = f"it is paused ({mode.value})", mode
        for stream in ends:
            if stream.events is not None:
                stream.events.close_within(self.deadlines.abort_s)

    async def resume(self) -> None:
        if self._asleep:
            raise EnginePausedError("it is asleep", engine=self.name, hint="wake it first")
        if self._discarded:
            raise EnginePausedError(_EMPTY, engine=self.name, hint="refit it first")
        await self._ensure_reachable()
        await self._resume()
        self._closed_reason, self._paused_externally, self._paused = "", False, None

    async def sleep(self, level: int = 1) -> None:
        if level not in (1, 2):
            raise InputError(f"there is no sleep of level {level}", hint="1 keeps the weights, 2 discards them")
        await self._require_capability(EngineCapability.sleep)
        if level not in self.sleep_levels:
            raise NotSupportedError(
                f"{self.dialect or self.kind} cannot release memory and keep its weights", where=f"engine {self.name}",
                hint="sleep with level 2, and refit it after waking",
            )  # fmt: skip
        await self._close_when_idle(f"a sleep (level {level}) was requested")
        if self._paused is None and EngineCapability.pause in self.capabilities:
            # Another client may send between the check and the release; a pause turns that crash into an abort.
            await self.pause(PauseMode.abort)
        if level == 2:
            self._discarded = True  # even if the call fails halfway
            self._spoiled, self.adapters = self._spoiled | self.adapters, set()
        self._asleep = {MemoryTag.weights, MemoryTag.kv_cache}
        self._closed_reason = f"it is asleep (level {level})"
        await self._sleep(level)

    async def wake(self, tags: Collection[MemoryTag] | None = None) -> None:
        await self._require_capability(EngineCapability.sleep)
        chosen = set(tags) if tags is not None else {MemoryTag.weights, MemoryTag.kv_cache}
        await self._wake(chosen)
        self._asleep -= chosen
        if self._asleep:
            rest = ", ".join(sorted(tag.value for tag in self._asleep))
            self._closed_reason = f"only part of it is awake; {rest} is not"
        elif self._discarded:
            self._closed_reason = _EMPTY
        else:
            await self.resume()

    async def flush(self) -> None:
        await self._require_capability(EngineCapability.flush)
        await self._flush()

    async def refit(self, refit: WeightUpdate) -> None:
        if refit.way != "disk":
            raise NotSupportedError(
                f"weights by '{refit.way}' are sent by the trainer", where=f"engine {self.name}",
                hint="only 'disk' is supported here",
            )  # fmt: skip
        if MemoryTag.weights in self._asleep:
            raise EnginePausedError("its weights are asleep", engine=self.name, hint="wake the weights first")
        await self._require_capability(EngineCapability.refit)
        reason, discarded = self._closed_reason, self._discarded
        if self._paused is None:
            await self._close_when_idle("it is being refitted")
        # Until the new version is confirmed its weights are unknown: neither the old nor the new.
        self._discarded = True
        try:
            await self._refit(refit)
        except NotSupportedError:  # refused before anything was loaded
            self._closed_reason, self._discarded = reason, discarded
            raise
        await self.refitted(refit.version)

    async def refitted(self, version: str) -> None:
        """The trainer has sent new weights; accepted unless the engine reports another version.

        For an engine that reports none, the version is recorded with its process.
        """
        await self._ensure_reachable()
        if EngineCapability.version in self.capabilities:
            confirmed = await self._version()
            if confirmed != version:
                raise EngineFailedError(
                    f"after the refit it reports version '{confirmed}' and not '{version}'", engine=self.name,
                    hint="send the weight version together with the weights",
                )  # fmt: skip
            self._has_weights()
            return
        boots, process = self._boots, await self._see_process()
        if self._boots != boots:
            raise EngineFailedError("its process was replaced during the refit", engine=self.name)
        self._has_weights()
        if process is None:
            raise EngineFailedError(
                f"it has the weights, but a restart would not be seen: {self._unproven()}; "
                f"call pool.vouch({self.name!r}) if nothing restarts it",
                engine=self.name,
            )
        self._record = WeightRecord(version, process)

    @property
    def discarded(self) -> bool:
        """Its weights are gone or unknown until a refit."""
        return self._discarded

    @property
    def weights_known_by(self) -> str:
        """What says which weights it has: the engine, the record made here, or nothing."""
        if EngineCapability.version in self.capabilities:
            return "engine"
        return "record" if self.launched or self._process_seen is not None else "nothing"

    def vouched(self, version: str) -> None:
        """The caller knows which weights it has, for example after a restart."""
        self._record = WeightRecord(version, None)
        self._has_weights()

    def _has_weights(self) -> None:
        self._discarded = False
        if not self._asleep and self._paused is None and not self._paused_externally:
            self._closed_reason = ""

    async def _current_version(self) -> str | None:
        """As the engine reports it or, where it cannot, as recorded for the process that answers now."""
        if EngineCapability.version in self.capabilities:
            return await self._version()
        process = await self._see_process()
        if self._record is not None and self._record.process is None:
            self._record = WeightRecord(self._record.version, process)
        return None if self._record is None or process is None else self._record.version

    async def _see_process(self) -> str | None:
        """Identifies the engine's process; another than before counts as a boot, and what was recorded is void."""
        process = LAUNCHED if self.launched else await self._process()
        if self._process_seen is not None and process != self._process_seen:
            self._boots += 1
            self._record = None
            self.adapters, self._spoiled = set(), set()
            self._replaced()
        self._process_seen = process
        return process

    def _unproven(self) -> str:
        """Why nothing shows that its process is the same."""
        return "it reports neither their version nor when its process started"

    def _replaced(self) -> None:
        """Forgets what was found out about the process before."""

    async def close(self) -> None:
        for stream in self._open_streams.values():
            stream.aborting = True
            if stream.events is not None:
                stream.events.close(on_purpose=True)
        if self._abort_tasks:
            await asyncio.wait(self._abort_tasks, timeout=self.deadlines.call_s)

    async def _close_when_idle(self, why: str) -> None:
        """Closes the gate before the check, so nothing is sent meanwhile; reopens it if busy."""
        before, self._closed_reason = self._closed_reason, why
        try:
            await self._require_idle()
        except TrimtabError:
            self._closed_reason = before
            raise

    async def _require_idle(self) -> None:
        """Refuses while a request runs, or may be running."""
        if self._paused in (PauseMode.abort, PauseMode.wait):
            return  # the engine has confirmed that nothing runs
        if self._asleep and (await self.ready()).asleep:
            return  # some of its memory is released, so nothing runs; its load figures are of before
        if self._paused is PauseMode.keep:
            await self._require_retracted()
            return
        if self._open_streams:
            raise EngineBusyError(
                f"{len(self._open_streams)} requests run there", engine=self.name, hint="drain or abort them first"
            )
        if EngineCapability.load in self.lacks:
            return  # nothing else is known
        load = await self._settled_load()
        if not load.fresh:
            raise EngineBusyError(
                "its load figures are stale, so it may be busy", engine=self.name, hint="pause it first"
            )
        if load.running or load.waiting:
            raise EngineBusyError(
                f"it has {load.running} running and {load.waiting} waiting requests of other clients", engine=self.name,
                hint="drain or abort them first",
            )  # fmt: skip

    async def _only_stop_sending(self, mode: PauseMode, running: Callable[[], Awaitable[bool]] | None = None) -> None:
        """The pause of an engine that has none: the gate is closed, and requests of other clients go on."""
        if mode is PauseMode.abort:
            await self.abort()
        await self._wait_drained(running)

    async def _wait_drained(self, running: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Waits until no request runs, for engines without a waiting pause."""
        deadline = asyncio.get_running_loop().time() + self.deadlines.change_s
        while self._open_streams or (running is not None and await running()):
            if asyncio.get_running_loop().time() > deadline:
                raise EngineWedgedError(
                    f"requests still ran {self.deadlines.change_s:g} s after the pause", engine=self.name
                )
            await asyncio.sleep(_POLL_S)

    def _state(self, version: str | None, paused: bool, asleep: bool) -> EngineState:
        """State of an engine that answers: it is up if the gate is open."""
        return EngineState(
            not self._closed_reason, self._closed_reason or "it answers", None if self._discarded else version, paused,
            asleep, self.dialect, boots=self._boots,
        )  # fmt: skip

    async def _settled_load(self) -> EngineLoad:
        """Load after the engine has counted the end of this adapter's requests, which it does late."""
        deadline = asyncio.get_running_loop().time() + min(self.deadlines.settle_s, self.deadlines.call_s)
        while True:
            load = await self.load()
            if (load.fresh and not load.running and not load.waiting) or self._open_streams:
                return load
            if asyncio.get_running_loop().time() >= deadline:
                return load
            await asyncio.sleep(_POLL_S)

    async def _require_retracted(self) -> None:
        """Held requests keep their memory, unless the engine retracts them."""
        raise EngineBusyError(
            "its paused requests hold their memory", engine=self.name, hint="resume it and drain, or pause with abort"
        )

    async def _require_capability(self, verb: EngineCapability) -> None:
        await self._ensure_reachable()
        if verb not in self.capabilities:
            why = self.lacks.get(verb, "")
            raise NotSupportedError(
                f"{self.dialect or self.kind} has no way to {verb.value}{why and f': {why}'}",
                where=f"engine {self.name}",
            )

    async def _ensure_reachable(self) -> None:
        """Checks and facts needed before the first call."""

    def _update_gate(self, paused: bool, asleep: bool, why: str = "") -> None:
        """Follows pauses and resumes of other clients."""
        if paused or asleep:
            if not self._closed_reason:
                self._closed_reason = why or f"another client {'paused it' if paused else 'put it to sleep'}"
                self._paused_externally = True
        elif self._paused_externally:
            self._closed_reason, self._paused_externally = "", False

    # Implemented by each adapter.

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

    async def _process(self) -> str | None:
        """What identifies the engine's process, for example its start time; None: it does not show it."""
        return self.kind

    async def _abort(self, keys: Collection[str] | None) -> bool:
        """Aborts by engine request ids; False if the engine only reacts to a closed connection."""
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
