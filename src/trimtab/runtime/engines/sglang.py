"""Adapter of SGLang's HTTP server.

Generation uses `/generate` with `input_ids`. Depending on how the server was started, an event has all ids so far or
only the new ones; the count in `meta_info` tells which, and anything else is malformed. Stop strings end an answer
after the token that completed them and are cut from the text, not from the ids; `min_new_tokens` suppresses end tokens
and stop ids; a seed has an effect only with deterministic inference. Weight versions are reported per span of tokens.

`/health` runs a real request, which takes a second at best and twenty while paused, after which the server counts
itself as unhealthy; so it is never called here. `/ready` answers at once, with 503 from the moment of any pause. Loads
freeze while paused, except after a pause by abort: a reading whose timestamp does not move is stale. Releasing memory
with requests running kills the server; `GatedEngine.sleep` prevents that. Releasing the weights discards them: the
version is None until a refit, whatever the server reports.

Releases differ, so the server is asked: a pause since 0.4.9, which aborts whatever it is told before 0.5.6; tags for
memory since 0.4.9, without which a release discards the weights; a weight version since 0.5.1; `/v1/loads` since 0.5.8,
`/get_load` with requests from 0.5.3 and with tokens only from 0.4.7 on. Without a weight version, the path that the
server names in its model information shows which of the recorded weights it has.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from trimtab.core.errors import TrimtabError
from trimtab.runtime.engines.engine import (
    MAX_RUNNING,
    ROUTED_EXPERTS,
    DeltaReader,
    EngineCapability,
    EngineDeadlines,
    EngineFailedError,
    EngineLoad,
    EngineMalformedError,
    EngineRefusedError,
    EngineState,
    EngineWedgedError,
    FinishReason,
    ForwardRequest,
    GenerateRequest,
    MalformedOutput,
    MemoryTag,
    NotSupportedError,
    PauseMode,
    PieceSupport,
    RawAnswer,
    StreamDelta,
    WeightUpdate,
    routed_experts,
    sglang_logprobs,
    token_ids,
)
from trimtab.runtime.engines.http_engine import HttpEngine, NoSuchPathError, ServedCalls, gauges, served_calls
from trimtab.runtime.engines.http_stream import parsed

_FINISHES = {"stop": FinishReason.stop, "length": FinishReason.length, "abort": FinishReason.aborted_elsewhere}
_MODES = {PauseMode.abort: "abort", PauseMode.wait: "abort", PauseMode.keep: "retract"}
_NOT_READY = "another client paused it, or it is starting or ending: /ready says no"
_PATHS = (
    "/ready", "/server_info", "/v1/loads", "/get_load", "/metrics", "/pause_generation", "/continue_generation",
    "/abort_request", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
    "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
    "/update_weights_from_ipc", "/init_weights_update_group", "/load_lora_adapter",
)  # fmt: skip
_STALE_S = 5.0
"""A load older than this that has not moved since the last reading is stale."""


class SglangEngine(HttpEngine):
    """An SGLang server."""

    kind = "sglang"
    adapter_call = "/load_lora_adapter"
    adapter_flags = "--enable-lora"
    capabilities = frozenset(EngineCapability)

    _tags = True  # memory is released in parts
    # Path of the recorded weights. None: the one that is read next; empty: it proves nothing, because weights came
    # without a path, or several versions had this one.
    _path_of_record: str | None = None
    _path_loaded = ""  # by the refit in progress

    def __init__(self, name: str, url: str, session: Any, deadlines: EngineDeadlines | None = None) -> None:
        super().__init__(name, url, session, deadlines)
        self._version_of: dict[str, str] = {}  # first version that was loaded from a path

    pieces = PieceSupport(whole=True, interval=True, repeats=True)
    _intervals_seen = False  # this engine takes them
    _load_stamps: Any = None  # the engine's timestamp of its last loads
    _loads_read = False  # loads were read before

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": request.min_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
        }
        if request.stop:
            sampling["stop"] = list(request.stop)
        if request.stop_ids:
            sampling["stop_token_ids"] = list(request.stop_ids)
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        if request.piece is not None and request.piece > 1:
            sampling["stream_interval"] = request.piece
        extra = dict(request.extra)
        experts = {ROUTED_EXPERTS: extra.pop(ROUTED_EXPERTS)} if ROUTED_EXPERTS in extra else {}
        body: dict[str, Any] = {
            "rid": key,
            "input_ids": request.token_ids,
            "sampling_params": sampling | extra,
            "stream": request.piece is not None,
            **experts,
        }
        if request.lora:
            body["lora_path"] = request.lora
        if request.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": request.logprobs}
        return "/generate", body

    def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        asks = request.piece is not None and request.piece > 1
        unsure = asks and self.pieces.interval and not self._intervals_seen
        return self._with_interval(request) if unsure else super().generate(request)

    async def _with_interval(self, request: GenerateRequest) -> AsyncGenerator[StreamDelta, None]:
        try:
            async with aclosing(super().generate(request)) as pieces:
                async for piece in pieces:
                    self._intervals_seen = True
                    yield piece
        except (EngineRefusedError, EngineFailedError) as error:
            if "stream_interval" not in error.what:
                raise
            # An older release: its own interval may be a single token, and every event repeats all of them.
            self.pieces = replace(self.pieces, interval=False)
            async with aclosing(super().generate(replace(request, piece=None))) as pieces:
                async for piece in pieces:
                    yield piece

    def _forward_body(self, request: ForwardRequest) -> dict[str, Any]:
        model = {"model": self.model_path or "default"} if request.path.startswith("/v1/") else {}
        return {**request.body, **model, **({"lora_path": request.lora} if request.lora else {})}

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        return _SglangReader(request, self.name, self._abandoned)

    async def _ensure_reachable(self) -> None:
        await super()._ensure_reachable()
        if self._calls is None:
            info = await self._info()
            calls = await served_calls(self.wire, _PATHS)
            # The metrics page is no route of the server, so it is on no list.
            counted = calls.has("/v1/loads") or calls.has("/get_load") or await self._counts_by_metrics()
            self.max_running = _max_running(await self._server_info())
            self._learn(calls, "weight_version" in info if isinstance(info, dict) else False, counted)
            if isinstance(info, dict) and not self.model_path:
                self.model_path = str(info.get("model_path") or "")

    def _learn(self, calls: ServedCalls, has_version: bool, counted: bool) -> None:
        pauses = calls.has("/pause_generation")
        offered = {
            EngineCapability.pause: pauses,
            EngineCapability.keep: calls.takes("/pause_generation", "mode", otherwise=calls.has("/server_info")),
            # Memory released under requests of other clients kills it: they must be seen, or be stopped.
            EngineCapability.sleep: calls.has("/release_memory_occupation") and (counted or pauses),
            EngineCapability.flush: calls.has("/flush_cache"),
            EngineCapability.refit: calls.has("/update_weights_from_disk"),
            EngineCapability.version: has_version,
            EngineCapability.load: counted,
        }
        self._calls = calls
        self.pieces = replace(self.pieces, partial=calls.has("/abort_request"))
        self._tags = calls.takes("/release_memory_occupation", "tags", otherwise=pauses)
        self.capabilities = frozenset(verb for verb, has in offered.items() if has)
        self.lacks = {verb: "this release has no such call" for verb, has in offered.items() if not has}
        if not counted:
            self.lacks[EngineCapability.load] = "start it with --enable-metrics"

    async def _counts_by_metrics(self) -> bool:
        try:
            return "sglang:num_running_reqs" in await gauges(self.wire)
        except (NoSuchPathError, EngineRefusedError):
            return False

    @property
    def sleep_levels(self) -> frozenset[int]:
        return super().sleep_levels if self._tags else super().sleep_levels - {1}

    @property
    def refit_ways(self) -> tuple[str, ...]:
        ways = list(super().refit_ways)
        if self._has("/init_weights_update_group") and self._has("/update_weights_from_distributed"):
            ways.append("collective")
        if self._has("/update_weights_from_tensor") or self._has("/update_weights_from_ipc"):
            ways.append("same_gpu")
        return tuple(ways)

    def _replaced(self) -> None:
        self._calls, self._path_of_record, self._intervals_seen = None, None, False

    def vouched(self, version: str) -> None:
        self._path_of_record, self._process_seen = None, None
        super().vouched(version)

    async def refitted(self, version: str) -> None:
        path, self._path_loaded = self._path_loaded, ""
        only = path and self._version_of.setdefault(path, version) == version
        self._path_of_record, self._process_seen = path if only else "", None
        await super().refitted(version)

    def _unproven(self) -> str:
        if self._path_of_record == "":
            return "it reports only their path, which proves nothing if there is none, or several versions share it"
        return super()._unproven()

    async def _process(self) -> str | None:
        """Not shown; but the path of its weights is, and a new process has the path that it was started with."""
        info = await self._info()
        path = str(info.get("model_path") or "") if isinstance(info, dict) else ""
        if self._path_of_record is None:
            self._path_of_record = path
        return f"with the weights of {path}" if path and path == self._path_of_record else None

    async def _read_state(self) -> EngineState:
        info = await self._info()
        if not self.dialect:
            self.dialect = f"sglang {await self._release()}"
        if not self._closed_reason or self._paused_externally:
            self._update_gate(await self._not_serving(), asleep=False, why=_NOT_READY)
        version = _version_in(info) if EngineCapability.version in self.capabilities else await self._current_version()
        return self._state(version, self._paused is not None or self._paused_externally, bool(self._asleep))

    async def _not_serving(self) -> bool:
        """Whether it accepts no requests: they would hang until it is resumed."""
        if EngineCapability.load not in self.capabilities:
            return False
        try:
            await self.wire.get("/ready")
        except NoSuchPathError:
            # Older releases have no such page; frozen loads are the only sign.
            return not (await self._load()).fresh and not await self._generates_token()
        except EngineFailedError:
            return True
        # /ready is answered by the HTTP front: the scheduler may be stuck all the same.
        if not (await self._load()).fresh and not await self._generates_token():
            raise EngineWedgedError("/ready says yes, but it does not generate", engine=self.name)
        return False

    async def _generates_token(self) -> bool:
        """Generates one token, with a deadline: loads are also frozen on an idle server."""
        key = f"trimtab-probe-{time.monotonic_ns()}"
        body = {"rid": key, "input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            await self.wire.post("/generate", body)
        except EngineWedgedError:
            await self._abort_left(key)
            return False
        return True

    async def _info(self) -> Any:
        try:
            return await self.wire.get("/model_info")
        except NoSuchPathError:
            return await self.wire.get("/get_model_info")

    async def _release(self) -> str:
        return str((await self._server_info()).get("version") or "of unknown release")

    async def _server_info(self) -> Mapping[str, Any]:
        for path in ("/server_info", "/get_server_info"):
            with suppress(TrimtabError):
                reply = await self.wire.get(path)
                if isinstance(reply, dict):
                    return reply
        return {}

    async def _load(self) -> EngineLoad:
        if EngineCapability.load not in self.capabilities:
            raise NotSupportedError(
                f"{self.dialect or 'sglang'} does not say how many requests it has", where=f"engine {self.name}",
                hint=self.lacks[EngineCapability.load],
            )  # fmt: skip
        if self._has("/v1/loads"):
            return await self._load_v1()
        return await (self._load_old() if self._has("/get_load") else self._load_metrics())

    async def _load_old(self) -> EngineLoad:
        """`/get_load`: a list with requests of each rank, or before 0.5.3 only the tokens that they hold."""
        reply = await self.wire.get("/get_load")
        try:
            if isinstance(reply, dict):
                running, waiting = int(int(reply["load"]) > 0), 0
            else:
                waiting = sum(int(rank["num_waiting_reqs"]) for rank in reply)
                running = sum(int(rank["num_reqs"]) for rank in reply) - waiting
                # Requests that it has not begun to count hold memory already.
                running = max(running, int(sum(int(rank["num_tokens"]) for rank in reply) > 0 and not waiting))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineMalformedError(f"/get_load cannot be read: {error!r}", engine=self.name) from None
        return EngineLoad(running, waiting, None, time.monotonic(), fresh=self._paused is None)

    async def _load_metrics(self) -> EngineLoad:
        found = await gauges(self.wire)
        try:
            running, waiting = int(found["sglang:num_running_reqs"]), int(found["sglang:num_queue_reqs"])
        except KeyError:
            raise EngineMalformedError("its metrics do not count requests", engine=self.name) from None
        used = found.get("sglang:token_usage")
        return EngineLoad(running, waiting, used, time.monotonic(), fresh=self._paused is None)

    async def _load_v1(self) -> EngineLoad:
        reply = await self.wire.get("/v1/loads", include="core")
        try:
            loads = reply["loads"]
            running = sum(int(load["num_running_reqs"]) for load in loads)
            waiting = sum(int(load["num_waiting_reqs"]) for load in loads)
            used = max(float(load["token_usage"]) for load in loads)
            used_tokens = sum(int(load.get("num_used_tokens") or 0) for load in loads)
            stamps = [load.get("timestamp", reply.get("timestamp")) for load in loads]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineMalformedError(f"/v1/loads cannot be read: {error!r}", engine=self.name) from None
        if used_tokens and not running + waiting:
            # Its counters lag around a prefill; but running requests hold memory.
            running = 1
        moved, self._load_stamps = stamps != self._load_stamps, stamps
        newest = max((_seconds(stamp) for stamp in stamps), default=0.0)
        # The first reading has nothing to compare with, so its age decides.
        recent = abs(time.time() - newest) < _STALE_S
        fresh = self._paused is None and (recent or (moved and self._loads_read))
        self._loads_read = True
        return EngineLoad(running, waiting, used, time.monotonic(), fresh, float(used_tokens) if used_tokens else None)

    async def _version(self) -> str | None:
        return _version_in(await self._info())

    async def _abort(self, keys: Collection[str] | None) -> bool:
        if not self._has("/abort_request"):
            return False
        if keys is None:
            try:
                await self.wire.post("/abort_request", {"abort_all": True})
            except EngineRefusedError:  # before 0.4.9 it wants an id: requests of other clients stay
                keys = [stream.key for stream in self._open_streams.values()]
        for key in keys or ():
            await self.wire.post("/abort_request", {"rid": key})
        return True

    async def _abort_left(self, key: str) -> None:
        """It takes two seconds to notice a closed connection: wasted forward passes."""
        if self._has("/abort_request"):
            with suppress(TrimtabError):
                await self.wire.post("/abort_request", {"rid": key})

    async def _pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.wait:  # the server has no waiting pause
            await self._wait_drained(self._is_busy if EngineCapability.load in self.capabilities else None)
        if EngineCapability.pause not in self.capabilities:
            await self._only_stop_sending(mode)  # before 0.4.9 there is no pause
            return
        await self._post("/pause_generation", {"mode": _MODES[mode]})

    async def _is_busy(self) -> bool:
        load = await self._load()
        return load.running + load.waiting > 0

    async def _require_retracted(self) -> None:
        """`retract` has released the memory of every request; they are recomputed afterwards."""

    async def _resume(self) -> None:
        if EngineCapability.pause in self.capabilities:
            await self._post("/continue_generation", {})

    async def _sleep(self, level: int) -> None:
        # The cache refers to memory that is about to be released.
        await self._flush()
        tags = [MemoryTag.kv_cache.value, *([MemoryTag.weights.value] if level == 2 else [])]
        await self._post("/release_memory_occupation", {"tags": tags} if self._tags else {})
        if level == 1:
            self._asleep = {MemoryTag.kv_cache}

    async def _wake(self, tags: set[MemoryTag]) -> None:
        wanted = sorted(tag.value for tag in tags & self._asleep)
        if wanted and not self._tags:
            await self._post("/resume_memory_occupation", {})
            self._asleep = set()  # all of it is awake, whatever was asked for
        elif wanted:
            await self._post("/resume_memory_occupation", {"tags": wanted})

    async def _flush(self) -> None:
        await self._post("/flush_cache", None)

    async def _refit(self, refit: WeightUpdate) -> None:
        await self.wire.post(
            "/update_weights_from_disk",
            {"model_path": refit.path, "weight_version": refit.version, "abort_all_requests": False},
            within_s=self.deadlines.refit_s,
        )
        self._path_loaded = refit.path

    async def _post(self, path: str, body: Any) -> Any:
        return await self.wire.post(path, body, within_s=self.deadlines.change_s)


class _RawEvent(msgspec.Struct):
    output_ids: msgspec.Raw
    meta_info: dict[str, msgspec.Raw]
    text: msgspec.Raw = msgspec.Raw(b"")
    error: Any = None


_read_raw, _read = msgspec.json.Decoder(_RawEvent).decode, msgspec.json.decode
_Version = msgspec.defstruct("_Version", [("weight_version", Any, None)])
_read_version: Any = msgspec.json.Decoder(msgspec.defstruct("_Event", [("meta_info", _Version)])).decode


class _SglangReader:
    """Reads the events of one request."""

    def __init__(self, request: GenerateRequest, engine: str, leave: Callable[[str], None]) -> None:
        self._request, self._engine, self._reported, self._text = request, engine, 0, ""
        self._whole = True  # events are cumulative
        self._leave = leave  # aborts a request at the engine
        # ignore_eos also disables stop ids at the server, so they are checked here.
        self._watched = frozenset(request.stop_ids if request.extra.get("ignore_eos") else ())
        self._raw = request.raw and not self._watched and ROUTED_EXPERTS not in request.extra
        self._before: StreamDelta | None = None  # the last raw one

    def parsed(self, payload: bytes) -> Any:
        """An event; one with all tokens so far, of one version, as a delta whose tokens are not read."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            if self._raw and (raw := self._unread(_read_raw(payload))) is not None:
                return raw
        return parsed(payload)

    def _unread(self, event: _RawEvent) -> StreamDelta | None:
        meta = {name: bytes(value) for name, value in event.meta_info.items()}
        ids, text = bytes(event.output_ids), bytes(event.text)
        names = ("completion_tokens", "finish_reason", "weight_version", "weight_versions")
        count, reason, version, spans = (_read(meta.get(name, b"null")) for name in names)
        finish = None if reason is None else _FINISHES[reason["type"]]
        matched = reason.get("matched") if reason else None
        whole = type(count) is int and count == ids.count(b",") + 1 and ids.translate(None, b"0123456789, ") == b"[]"
        if self._request.logprobs is not None:
            whole &= meta["output_token_logprobs"].count(b"[") == count + 1
        if spans:
            whole &= [(span["start"], span["end"], span["version"]) for span in spans] == [(0, count, version)]
        if finish is FinishReason.stop:
            whole &= matched is not None
        whole &= finish is not FinishReason.aborted_elsewhere and bool(ids[1:-1].strip())
        if not whole or event.error or len(text) < 3:
            return None
        version, raw = None if version is None else str(version), RawAnswer(count, text, ids, meta)
        return StreamDelta(finish=finish, stopped_by=matched, version=version, raw=raw)

    def covers(self, first: bytes, last: Any) -> bool:
        """Whether the last of several events has all tokens, made by the weights of the first."""
        try:
            since = _read_version(first).meta_info.weight_version
            if isinstance(last, StreamDelta):
                return last.raw is not None and last.version == str(since)
            meta = last["meta_info"]
            parts = [last["output_ids"]]
            if self._request.logprobs is not None:
                parts.append(meta["output_token_logprobs"])
            if self._request.logprobs:
                parts.append(meta["output_top_logprobs"])
            same = bool(meta.get("weight_versions")) or since == meta.get("weight_version")
            return same and all(len(part) == meta["completion_tokens"] for part in parts)
        except (KeyError, TypeError, ValueError, AttributeError):
            return False

    async def take(self, event: dict[str, Any] | StreamDelta) -> list[StreamDelta]:
        before = self._before
        if isinstance(event, StreamDelta):
            assert event.raw is not None
            if self._raw and (before is None or before.version == event.version):
                self._before, self._reported = event, event.raw.tokens
                return [event]
            event = event.raw.event()
        if before is not None and before.raw is not None:
            self._text, self._before = _read(before.raw.text), None
        self._raw = False
        meta = event["meta_info"]
        ids = token_ids(self._new(event.get("output_ids") or [], int(meta["completion_tokens"])))
        reason = meta.get("finish_reason")
        finish = None
        if reason is not None:
            finish = _FINISHES.get(reason["type"])
            if finish is None:
                raise MalformedOutput(f"unknown finish reason: {reason!r}")
            if finish is FinishReason.aborted_elsewhere and reason.get("status_code"):
                raise self._no_abort(int(reason["status_code"]), str(reason.get("message")))
        logprobs, best = sglang_logprobs(meta, self._request.logprobs, len(ids))
        matched = reason.get("matched") if reason else None
        extra = routed_experts(self._request, finish, meta)
        version = meta.get("weight_version")
        version = None if version is None else str(version)
        whole = StreamDelta(ids, logprobs, best, self._more(event.get("text")), finish, matched, version, extra=extra)
        start, self._reported = self._reported, self._reported + len(ids)
        stop = None
        if self._watched:
            stop = next((at for at, token in enumerate(ids) if self._stops(token, start + at + 1)), None)
        if stop is None:
            return _by_version(whole, start, meta)
        self._leave(str(meta["id"]))
        ended = replace(
            _part(whole, 0, stop + 1, version, last=False), finish=FinishReason.stop, stopped_by=ids[stop], extra=extra
        )
        return _by_version(ended, start, meta)

    def _stops(self, token: int, count: int) -> bool:
        return token in self._watched and count >= self._request.min_tokens

    def _no_abort(self, status: int, message: str) -> EngineRefusedError | EngineFailedError:
        """A finish reason "abort" with a status: the request or the engine failed, nothing was aborted."""
        if status < 500:
            return EngineRefusedError(f"it was refused ({status}): {message}", where=f"engine {self._engine}")
        return EngineFailedError(f"it gave up ({status}): {message}", engine=self._engine)

    def _new(self, ids: list[Any], counted: int) -> list[Any]:
        if len(ids) == counted:
            return ids[self._reported :]
        if self._reported + len(ids) == counted:
            self._whole = False
            return ids
        raise MalformedOutput(f"it counts {counted} tokens; {self._reported} were sent before, and {len(ids)} now")

    def _more(self, text: str | None) -> str | None:
        if not text or not self._whole:
            return text or None
        if not text.startswith(self._text):
            return None  # a stop string was cut off the end
        new, self._text = text[len(self._text) :], text
        return new or None


def _by_version(piece: StreamDelta, start: int, meta: dict[str, Any]) -> list[StreamDelta]:
    spans = meta.get("weight_versions")
    if not spans:
        return [piece]
    end = start + len(piece.token_ids)
    cuts = [
        (max(int(span["start"]), start) - start, min(int(span["end"]), end) - start, str(span["version"]))
        for span in spans
        if int(span["start"]) < end and int(span["end"]) > start
    ]
    if not piece.token_ids or sum(to - since for since, to, _ in cuts) != len(piece.token_ids):
        return [piece]
    return [_part(piece, since, to, version, last=to == cuts[-1][1]) for since, to, version in cuts]


def _part(piece: StreamDelta, since: int, to: int | None, version: str | None, *, last: bool) -> StreamDelta:
    cut = slice(since, to)
    return StreamDelta(
        piece.token_ids[cut],
        None if piece.logprobs is None else piece.logprobs[cut],
        None if piece.best is None else piece.best[cut],
        piece.text if last else None,
        piece.finish if last else None,
        piece.stopped_by if last else None,
        version,
        extra=piece.extra if last else None,
    )


def _max_running(info: Mapping[str, Any]) -> int | None:
    """Requests that all data-parallel ranks run at once: what their schedulers use, else the server's argument."""
    states = info.get("internal_states")
    ranks = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    counts = [rank.get("effective_max_running_requests_per_dp") for rank in ranks] or [info.get("max_running_requests")]
    whole = [count for count in counts if type(count) is int and 0 < count <= MAX_RUNNING]
    return sum(whole) if len(whole) == len(counts) else None


def _version_in(info: Any) -> str | None:
    version = info.get("weight_version") if isinstance(info, dict) else None
    return None if version is None else str(version)


def _seconds(stamp: Any) -> float:
    """An engine's timestamp as seconds since 1970; 0 if the format is unknown."""
    if isinstance(stamp, (int, float)):
        return float(stamp)
    if isinstance(stamp, str):
        with suppress(ValueError):
            return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    return 0.0
