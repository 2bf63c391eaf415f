"""Adapter of vLLM's HTTP server.

Generation uses `/v1/completions` with the prompt as token ids and `return_token_ids`; the running token count of every
event is checked against the ids. Stop strings end an answer after the token that completed them and are cut from the
text, not from the ids; below `min_tokens` neither end tokens nor stop strings count; a seed holds for one request;
log-probabilities are those of the model before temperature unless the server was started otherwise.

Everything beyond generating needs development mode (VLLM_SERVER_DEV_MODE=1), in which every client that reaches the
server controls it: hence the private address. `/health` says 200 while paused or asleep, so `/is_paused` and
`/is_sleeping` are read. Requests that arrive while paused hang and are in neither gauge; only `/load` counts them.

Releases differ in what development mode has, so the server is asked: no pause before 0.12 and none that keeps running
requests before 0.16; `/collective_rpc` since 0.10.2, with a `reload_weights` that takes a path since 0.16; a weight
version since 0.27. Without one, what was loaded is recorded for the process that `/metrics` shows to be the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trimtab.runtime.engines.engine import (
    MAX_RUNNING,
    ROUTED_EXPERTS,
    DeltaReader,
    EngineCapability,
    EngineError,
    EngineFailedError,
    EngineLoad,
    EngineMalformedError,
    EngineRefusedError,
    EngineState,
    FinishReason,
    ForwardRequest,
    GenerateRequest,
    MalformedOutput,
    MemoryTag,
    NotSupportedError,
    PauseMode,
    PieceSupport,
    StreamDelta,
    TopLogprobs,
    WeightUpdate,
    routed_experts,
    token_ids,
)
from trimtab.runtime.engines.http_engine import HttpEngine, NoSuchPathError, ServedCalls, gauges, served_calls

_FINISHES = {"stop": FinishReason.stop, "length": FinishReason.length, "abort": FinishReason.aborted_elsewhere}
_DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1 on a private interface"
_PATHS = (
    "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc",
    "/weight_info", "/update_weight_version", "/init_weight_transfer_engine", "/update_weights", "/get_world_size",
    "/is_sleeping", "/v1/completions", "/server_info", "/v1/load_lora_adapter",
)  # fmt: skip


class VllmEngine(HttpEngine):
    """A vLLM server."""

    kind = "vllm"
    adapter_call = "/v1/load_lora_adapter"
    adapter_flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    capabilities = frozenset(EngineCapability)

    pieces = PieceSupport(whole=True)
    _model = ""
    _context: int | None = None  # tokens of prompt and answer together
    _salted = False  # it keeps prefix caches of requests apart by a salt
    _reloads_by_path: bool | None = None  # `reload_weights` takes a path; None: not tried yet

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": request.lora or self._model,
            "prompt": request.token_ids,
            "request_id": key,
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "return_token_ids": True,
        }
        if request.piece is not None:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            if request.piece > 1 and self.pieces.interval:
                body["stream_interval"] = request.piece
        if request.cache_key and self._salted:
            body["cache_salt"] = request.cache_key
        if request.stop:
            body["stop"] = list(request.stop)
        if request.stop_ids:
            body["stop_token_ids"] = list(request.stop_ids)
        if request.seed is not None:
            body["seed"] = request.seed
        if request.logprobs is not None:
            body |= {"logprobs": request.logprobs, "return_tokens_as_token_ids": True}
        # Experts are returned by servers that were started so, and not by a field.
        return "/v1/completions", body | {name: request.extra[name] for name in request.extra if name != ROUTED_EXPERTS}

    def _forward_body(self, request: ForwardRequest) -> dict[str, Any]:
        salt = {"cache_salt": request.cache_key} if request.cache_key and self._salted else {}
        return {**salt, **request.body, "model": request.lora or self._model}

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        return _VllmReader(request)

    async def _ensure_reachable(self) -> None:
        await super()._ensure_reachable()
        if not self._model:
            models = await self.wire.get("/v1/models")
            try:
                model = models["data"][0]
                self._model, self.model_path = str(model["id"]), str(model.get("root") or "")
                self._context = int(model["max_model_len"]) if model.get("max_model_len") else None
            except (KeyError, IndexError, TypeError, AttributeError):
                raise EngineMalformedError("/v1/models names no model", engine=self.name) from None
        if self._calls is None:
            self._learn(await served_calls(self.wire, _PATHS))
            if not self.pieces.interval and self.pieces.every == 1 and self._has("/server_info"):
                self.pieces = replace(self.pieces, every=await self._stream_interval())

    def _learn(self, calls: ServedCalls) -> None:
        keeps = calls.takes("/pause", "mode", otherwise=calls.has("/get_world_size"))
        offered = {
            EngineCapability.pause: calls.has("/pause"),
            EngineCapability.keep: keeps,
            EngineCapability.sleep: calls.has("/sleep"),
            EngineCapability.flush: calls.has("/reset_prefix_cache"),
            EngineCapability.refit: calls.has("/collective_rpc"),
            EngineCapability.version: calls.has("/weight_info") and calls.has("/update_weight_version"),
            EngineCapability.load: True,
        }
        self._calls = calls
        self._salted = calls.takes("/v1/completions", "cache_salt", otherwise=False)
        interval = calls.takes("/v1/completions", "stream_interval", otherwise=False)
        self.pieces = replace(
            self.pieces, interval=interval, partial=calls.has("/abort_requests"), context=self._context
        )
        self.capabilities = frozenset(verb for verb, has in offered.items() if has)
        development = calls.has("/reset_prefix_cache") or calls.has("/sleep")
        why = "this release has no such call" if development else _DEVELOPMENT
        self.lacks = {verb: why for verb, has in offered.items() if not has}

    async def _stream_interval(self) -> int:
        """Tokens of an event, by the server's own settings; 1 where it does not say.

        The first such call takes the server some seconds: it also collects facts of its machine.
        """
        try:
            info = await self.wire.get("/server_info", config_format="json")
            scheduler = info["vllm_config"]["scheduler_config"]
            with suppress(KeyError, TypeError, ValueError):
                self.max_running = min(max(1, int(scheduler["max_num_seqs"])), MAX_RUNNING)
            return max(1, int(scheduler["stream_interval"]))
        except (EngineError, EngineRefusedError, KeyError, TypeError, ValueError):
            return 1

    @property
    def refit_ways(self) -> tuple[str, ...]:
        by_transfer = self._has("/init_weight_transfer_engine") and self._has("/update_weights")
        return super().refit_ways + (("collective", "same_gpu") if by_transfer else ())

    def _replaced(self) -> None:
        self._calls, self._reloads_by_path = None, None
        self.pieces = replace(self.pieces, every=1)

    async def _process(self) -> str | None:
        started = (await gauges(self.wire)).get("process_start_time_seconds")
        return None if started is None else f"started at {started:.2f}"

    async def _read_state(self) -> EngineState:
        await self.wire.get("/health")
        if not self.dialect:
            reply = await self._maybe("/version")
            self.dialect = (
                f"vllm {reply['version']}" if isinstance(reply, dict) and "version" in reply else "vllm, unknown"
            )
        paused, asleep = await self._flag("/is_paused", "is_paused"), await self._flag("/is_sleeping", "is_sleeping")
        self._update_gate(paused, asleep)
        return self._state(await self._current_version(), paused or bool(self._paused), asleep)

    async def _flag(self, path: str, key: str) -> bool:
        answer = await self._maybe(path)
        return bool(answer.get(key)) if isinstance(answer, dict) else False

    async def _maybe(self, path: str) -> Any:
        try:
            return await self.wire.get(path)
        except (NoSuchPathError, EngineRefusedError):
            return None

    async def _load(self) -> EngineLoad:
        found = await gauges(self.wire)
        try:
            running, waiting = int(found["vllm:num_requests_running"]), int(found["vllm:num_requests_waiting"])
        except KeyError:
            raise EngineMalformedError("its metrics do not count requests", engine=self.name) from None
        still = await self._flag("/is_paused", "is_paused") or await self._flag("/is_sleeping", "is_sleeping")
        open_requests = await self._maybe("/load")
        if isinstance(open_requests, dict) and isinstance(open_requests.get("server_load"), int):
            waiting = max(waiting, open_requests["server_load"] - running)
        used, tokens = found.get("vllm:kv_cache_usage_perc"), found.get("vllm:generation_tokens_total")
        return EngineLoad(running, waiting, used, time.monotonic(), fresh=not still, progress=tokens)

    async def _version(self) -> str | None:
        reply = await self._maybe("/weight_info")
        version = reply.get("weight_version") if isinstance(reply, dict) else None
        return None if version is None else str(version)

    async def _abort(self, keys: Collection[str] | None) -> bool:
        if not self._has("/abort_requests"):
            return False
        # Its own ids of the requests of a completion; the reported number of aborts means nothing.
        chosen = {} if keys is None else {"request_ids": [f"cmpl-{key}-0" for key in keys]}
        try:
            await self.wire.post("/abort_requests", chosen)
        except EngineRefusedError:
            if keys is not None:
                raise
            # With --tokens-only it wants ids: those of other clients stay.
            mine = [f"cmpl-{stream.key}-0" for stream in self._open_streams.values()]
            await self.wire.post("/abort_requests", {"request_ids": mine})
        return True

    async def _pause(self, mode: PauseMode) -> None:
        if EngineCapability.pause not in self.capabilities and EngineCapability.flush in self.capabilities:
            await self._only_stop_sending(mode)  # before 0.12 there is no pause
            return
        # Before 0.16 there is no mode, but a flag that later ones ignore.
        waits = {"wait_for_inflight_requests": "true"} if mode is PauseMode.wait else {}
        await self._changed("/pause", "paused", mode=mode.value, **waits)

    async def _resume(self) -> None:
        if EngineCapability.pause not in self.capabilities:
            return
        await self._changed("/resume", "resumed")
        if await self._flag("/is_paused", "is_paused"):
            raise EngineFailedError("it confirmed the resume, but is paused", engine=self.name)

    async def _sleep(self, level: int) -> None:
        await self._dev("/sleep", level=level)
        if not await self._flag("/is_sleeping", "is_sleeping"):
            raise EngineFailedError("it confirmed the sleep, but is not asleep", engine=self.name)

    async def _wake(self, tags: set[MemoryTag]) -> None:
        left = self._asleep - tags
        if left:
            await self._dev("/wake_up", tags=[tag.value for tag in sorted(tags)])
            return
        await self._dev("/wake_up")
        if await self._flag("/is_sleeping", "is_sleeping"):
            raise EngineFailedError("it confirmed the wake-up, but is asleep", engine=self.name)

    async def _flush(self) -> None:
        await self._dev("/reset_prefix_cache")

    async def _refit(self, refit: WeightUpdate) -> None:
        await self._reload(refit.path)
        # The cache was computed with the old weights. Held requests are recomputed.
        if self._paused is PauseMode.keep:
            await self._dev("/reset_prefix_cache", reset_running_requests="true")
        else:
            await self._dev("/reset_prefix_cache")
        if EngineCapability.version in self.capabilities:
            await self._dev("/update_weight_version", {"new_version": refit.version})

    async def _reload(self, path: str) -> None:
        """All workers read the weights. Before 0.16 they read those of their model configuration."""
        if self._reloads_by_path is not False:
            try:
                await self._rpc("reload_weights", weights_path=path)
            except NoSuchPathError:
                raise NotSupportedError(
                    f"POST /collective_rpc is unknown there (404), so {self.dialect or 'vllm'} cannot load weights",
                    where=f"engine {self.name}", hint=_DEVELOPMENT,
                ) from None  # fmt: skip
            except EngineFailedError:
                if self._reloads_by_path or not await self._reload_configured(path):
                    raise
                self._reloads_by_path = False
                return
            self._reloads_by_path = True
        elif not await self._reload_configured(path):
            raise EngineFailedError(f"it has not loaded {path}: its log says why", engine=self.name)

    async def _reload_configured(self, path: str) -> bool:
        try:
            await self._rpc("update_config", overrides={"model_config": {"model": path}})
            await self._rpc("reload_weights")
        except (EngineFailedError, EngineRefusedError):
            return False
        return True

    async def _rpc(self, method: str, **arguments: Any) -> None:
        body = {"method": method, "kwargs": arguments}
        await self.wire.post("/collective_rpc", body, within_s=self.deadlines.refit_s, keep_alive=False)

    async def _changed(self, path: str, wanted: str, **query: Any) -> None:
        answer = await self._dev(path, **query)
        if not isinstance(answer, dict) or answer.get("status") != wanted:
            raise EngineFailedError(f"POST {path} answered {str(answer)[:80]!r} and not '{wanted}'", engine=self.name)

    async def _dev(self, path: str, body: Any = None, *, within_s: float | None = None, **query: Any) -> Any:
        try:
            return await self.wire.post(path, body, within_s=within_s or self.deadlines.change_s, **query)
        except NoSuchPathError as error:
            error.hint = _DEVELOPMENT
            raise


class _VllmReader:
    """Reads the events of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request, self._reported = request, 0

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        if not event["choices"]:
            self._count(event)
            return []
        choice = event["choices"][0]
        ids = token_ids(choice.get("token_ids") or ())
        self._reported += len(ids)
        self._count(event)
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _FINISHES:
            raise MalformedOutput(f"unknown finish reason: {reason!r}")
        logprobs, best = self._logprobs(choice.get("logprobs"), len(ids))
        finish = None if reason is None else _FINISHES[reason]
        extra = routed_experts(self._request, finish, choice)
        return [
            StreamDelta(
                ids, logprobs, best, choice.get("text") or None, finish, choice.get("stop_reason"), extra=extra
            )
        ]  # fmt: skip

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if usage and int(usage["completion_tokens"]) != self._reported:
            raise MalformedOutput(f"it counts {usage['completion_tokens']} tokens and has sent {self._reported}")

    def _logprobs(
        self, reply: dict[str, Any] | None, count: int
    ) -> tuple[tuple[float | None, ...] | None, tuple[TopLogprobs, ...] | None]:
        requested = self._request.logprobs
        if requested is None:
            return None, None
        logprobs = tuple(reply["token_logprobs"]) if reply else ()
        if len(logprobs) != count:
            raise MalformedOutput(f"{len(logprobs)} log-probabilities for {count} tokens")
        if not requested or not reply:
            return logprobs, () if requested else None
        best = []
        for place in reply["top_logprobs"]:
            ranked = sorted(((_id(name), float(value)) for name, value in place.items()), key=lambda pair: -pair[1])
            best.append(tuple(ranked[:requested]))
        return logprobs, tuple(best)


def _id(name: str) -> int:
    return int(name.rpartition(":")[2])
