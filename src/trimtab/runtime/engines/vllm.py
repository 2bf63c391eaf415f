"""Adapter of vLLM's HTTP server.

Generation uses `/v1/completions` with the prompt as token ids and `return_token_ids`; the running token count of every
event is checked against the ids. Stop strings end an answer after the token that completed them and are cut from the
text, not from the ids; below `min_tokens` neither end tokens nor stop strings count; a seed holds for one request;
log-probabilities are those of the model before temperature unless the server was started otherwise.

Everything beyond generating needs development mode (VLLM_SERVER_DEV_MODE=1), in which every client that reaches the
server controls it: hence the private address. `/health` says 200 while paused or asleep, so `/is_paused` and
`/is_sleeping` are read. Requests that arrive while paused hang and are in neither gauge; only `/load` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from trimtab.runtime.engines.engine import (
    EngineCapability,
    EngineFailedError,
    EngineLoad,
    EngineMalformedError,
    EngineRefusedError,
    EngineState,
    FinishReason,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    StreamDelta,
    TopLogprobs,
    WeightUpdate,
)
from trimtab.runtime.engines.gated import DeltaReader, MalformedOutput
from trimtab.runtime.engines.http_engine import HttpEngine, gauges
from trimtab.runtime.engines.wire import NoSuchPathError

_FINISHES = {"stop": FinishReason.stop, "length": FinishReason.length, "abort": FinishReason.aborted_elsewhere}
_DEVELOPMENT = "start it with VLLM_SERVER_DEV_MODE=1 on a private interface"


class VllmEngine(HttpEngine):
    """A vLLM server."""

    kind = "vllm"
    capabilities = frozenset(
        {
            EngineCapability.pause,
            EngineCapability.sleep,
            EngineCapability.flush,
            EngineCapability.refit,
            EngineCapability.version,
        }
    )

    _model = ""

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.token_ids),
            "request_id": key,
            "max_tokens": request.max_tokens,
            "min_tokens": request.min_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        if request.stop:
            body["stop"] = list(request.stop)
        if request.stop_ids:
            body["stop_token_ids"] = list(request.stop_ids)
        if request.seed is not None:
            body["seed"] = request.seed
        if request.logprobs is not None:
            body |= {"logprobs": request.logprobs, "return_tokens_as_token_ids": True}
        return "/v1/completions", body | dict(request.extra)

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        return _VllmReader(request)

    async def _ensure_reachable(self) -> None:
        await super()._ensure_reachable()
        if not self._model:
            models = await self.wire.get("/v1/models")
            try:
                self._model = str(models["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise EngineMalformedError("/v1/models names no model", engine=self.name) from None

    async def _read_state(self) -> EngineState:
        await self.wire.get("/health")
        if not self.dialect:
            reply = await self._maybe("/version")
            self.dialect = (
                f"vllm {reply['version']}" if isinstance(reply, dict) and "version" in reply else "vllm, unknown"
            )
        paused, asleep = await self._flag("/is_paused", "is_paused"), await self._flag("/is_sleeping", "is_sleeping")
        self._update_gate(paused, asleep)
        version = None if self._discarded else await self._version()
        why = self._closed_reason or "it answers"
        return EngineState(not self._closed_reason, why, version, paused or bool(self._paused), asleep, self.dialect)

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
        return EngineLoad(running, waiting, found.get("vllm:kv_cache_usage_perc"), time.monotonic(), fresh=not still)

    async def _version(self) -> str | None:
        reply = await self._maybe("/weight_info")
        version = reply.get("weight_version") if isinstance(reply, dict) else None
        return None if version is None else str(version)

    async def _abort(self, keys: Collection[str] | None) -> bool:
        # Its own ids of the requests of a completion; the reported number of aborts means nothing.
        chosen = {} if keys is None else {"request_ids": [f"cmpl-{key}-0" for key in keys]}
        await self.wire.post("/abort_requests", chosen)
        return True

    async def _pause(self, mode: PauseMode) -> None:
        await self._changed("/pause", "paused", mode=mode.value)

    async def _resume(self) -> None:
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
        await self._dev(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": refit.path}},
            within_s=self.deadlines.refit_s,
        )
        # The cache was computed with the old weights. Held requests are recomputed.
        if self._paused is PauseMode.keep:
            await self._dev("/reset_prefix_cache", reset_running_requests="true")
        else:
            await self._dev("/reset_prefix_cache")
        await self._dev("/update_weight_version", {"new_version": refit.version})

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
        ids = tuple(int(token) for token in choice.get("token_ids") or ())
        self._reported += len(ids)
        self._count(event)
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _FINISHES:
            raise MalformedOutput(f"unknown finish reason: {reason!r}")
        logprobs, best = self._logprobs(choice.get("logprobs"), len(ids))
        return [
            StreamDelta(
                ids, logprobs, best, choice.get("text") or None, None if reason is None else _FINISHES[reason],
                choice.get("stop_reason"),
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
    """Id of `token_id:17`."""
    return int(name.rpartition(":")[2])
