"""Adapter of llama.cpp's HTTP server.

`/completion` takes token ids and streams them back, but leaves out ids whose text is not yet whole UTF-8; only the
counter `tokens_predicted` of the next event shows the gap. A gap is filled from the bytes of that event if the
vocabulary has exactly one way to write them in that number of tokens; a greedy request may be repeated without
streaming for just the missing ids. Otherwise the delta reports how many are missing: ids are never guessed.

A whole answer has all its ids, but goes on at the server when its client has left: answers are streamed unless
`pieces` is set to say otherwise.

The server has no pause, sleep, flush or weight update; a pause only stops sending. It has no min_tokens, stop ids or
abort: stop ids are checked here, and a closed connection is an abort. Its sampling defaults (top_k 40, min_p 0.05)
differ from those of `GenerateRequest`, so all parameters are sent. Log-probabilities are those of the model before
temperature and sampling limits.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError
from trimtab.runtime.engines.engine import (
    DeltaReader,
    EngineError,
    EngineFailedError,
    EngineLoad,
    EngineRefusedError,
    EngineState,
    FinishReason,
    GenerateRequest,
    MalformedOutput,
    PauseMode,
    StreamDelta,
    TopLogprobs,
)
from trimtab.runtime.engines.http_engine import HttpEngine, gauges

_REPLACED = "\ufffd"
"""Replacement character for invalid UTF-8; a text with it does not identify its bytes."""


class LlamaCppEngine(HttpEngine):
    """A llama.cpp server."""

    kind = "llamacpp"
    keeps_alive = False  # it closes keep-alive connections
    forwards = False

    _tokens_seen = 0.0  # token counter at the last check; a new process starts at 0
    _vocabulary: Vocabulary | None = None
    _vocabulary_lock: asyncio.Lock | None = None

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        if 0 < request.min_tokens < request.max_tokens:
            raise InputError(
                "llama.cpp has no min_tokens", where=f"request {request.id}",
                hint="leave min_tokens out, or make it equal to max_tokens",
            )  # fmt: skip
        body = completion(request) | dict(request.extra)
        if "samplers" not in request.extra:
            body["samplers"] = samplers(request.extra)
        return "/completion", body

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        return _LlamaCppReader(self, request)

    async def _read_state(self) -> EngineState:
        """Reads metrics too: they come from the compute loop and expose a wedged server, which `/health` does not."""
        await self.wire.get("/health")
        if not self.dialect:
            props = await self.wire.get("/props")
            self.dialect = f"llama.cpp {props.get('build_info', 'of unknown build') if isinstance(props, dict) else ''}"
        await self._load()
        return self._state(None, bool(self._closed_reason), asleep=False)

    async def _load(self) -> EngineLoad:
        try:
            found = await gauges(self.wire)
            running, waiting = found["llamacpp:requests_processing"], found["llamacpp:requests_deferred"]
            tokens_seen = found.get("llamacpp:tokens_predicted_total", 0.0) + found.get(
                "llamacpp:prompt_tokens_total", 0.0
            )
            self._boots += tokens_seen < self._tokens_seen
            self._tokens_seen = tokens_seen
        except (KeyError, EngineFailedError):  # started without metrics
            slots = await self.wire.get("/slots")
            if not isinstance(slots, list):
                raise EngineFailedError(
                    "it reports neither metrics nor slots", engine=self.name, hint="start it with --metrics"
                ) from None
            running, waiting = sum(bool(slot.get("is_processing")) for slot in slots), 0
        return EngineLoad(int(running), int(waiting), None, time.monotonic(), fresh=True)

    async def _pause(self, mode: PauseMode) -> None:
        await self._only_stop_sending(mode, self._is_running)

    async def _is_running(self) -> bool:
        return (await self._load()).running > 0

    async def _resume(self) -> None:
        await self.wire.get("/health")

    # Ids that streams leave out.

    async def vocabulary(self) -> Vocabulary:
        """Bytes of every id: read once, as the log-probabilities of all ids at one position."""
        self._vocabulary_lock = self._vocabulary_lock or asyncio.Lock()
        async with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = await self._load_vocabulary()
            return self._vocabulary

    async def _load_vocabulary(self) -> Vocabulary:
        models = await self.wire.get("/v1/models")
        size = int(models["data"][0]["meta"]["n_vocab"])
        for tokens in (1, 4, 16):  # a token that is half a character has no probabilities
            answer = await self.wire.post(
                "/completion",
                {"prompt": [0], "n_predict": tokens, "n_probs": size, "temperature": 0, "cache_prompt": False},
                within_s=self.deadlines.change_s,
            )
            for place in answer.get("completion_probabilities") or ():
                if len(place["top_logprobs"]) == size:
                    return Vocabulary({int(entry["id"]): bytes(entry["bytes"]) for entry in place["top_logprobs"]})
        raise EngineFailedError("it does not report its vocabulary", engine=self.name)

    async def regenerate(self, request: GenerateRequest, known: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Next ids of a greedy request after the known ones; complete, because not streamed."""
        body = completion(request) | dict(request.extra)
        body |= {"prompt": [*request.token_ids, *known], "n_predict": tokens, "stream": False, "n_probs": 0, "stop": []}
        answer = await self.wire.post("/completion", body, within_s=self.deadlines.change_s)
        return tuple(int(token) for token in answer["tokens"])


def samplers(extra: Mapping[str, Any]) -> list[str]:
    """Samplers to list: the server ignores the fields of those that are not listed."""
    return [name for name, fields in _SAMPLERS if not fields or any(field in extra for field in fields)]


_SAMPLERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("penalties", ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")),
    ("dry", ("dry_multiplier", "dry_base", "dry_allowed_length")),
    ("top_n_sigma", ("top_n_sigma",)),
    ("temperature", ()),  # before the limits, as in GenerateRequest
    ("top_k", ()),
    ("typ_p", ("typical_p",)),
    ("top_p", ()),
    ("min_p", ("min_p",)),
    ("xtc", ("xtc_probability", "xtc_threshold")),
)


def completion(request: GenerateRequest) -> dict[str, Any]:
    """Body of `/completion`."""
    return {
        "prompt": list(request.token_ids),
        "n_predict": request.max_tokens,
        "ignore_eos": request.min_tokens == request.max_tokens,
        "stop": list(request.stop),
        "samplers": ["temperature", "top_k", "top_p"],
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": 0.0,
        "seed": -1 if request.seed is None else request.seed,
        "n_probs": 0 if request.logprobs is None else max(request.logprobs, 1),
        "stream": request.piece is not None,
        "return_tokens": True,
        # A cached prompt gives the same answer only up to rounding; prefix affinity is worth more.
        "cache_prompt": True,
    }


class _LlamaCppReader:
    """Reads the events of one request."""

    def __init__(self, engine: LlamaCppEngine, request: GenerateRequest) -> None:
        self._engine, self._request = engine, request
        self._known: list[int] = []  # all ids so far, including filled gaps
        self._missing = 0  # ids of gaps that could not be filled
        self._unwritten: list[int] = []  # ids whose text the server holds back as a possible stop string

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        counted = int(event["tokens_predicted"])
        ids = tuple(int(token) for token in event["tokens"])
        gap = counted - len(self._known) - self._missing - len(ids)
        if gap < 0:
            raise MalformedOutput(f"it counts {counted} tokens and has sent {counted - gap}")
        filled = await self._fill(gap, ids, event) if gap else ()
        missing = gap - len(filled)
        all_ids = filled + ids
        self._known.extend(all_ids)
        self._missing += missing
        text = str(event.get("content") or "")
        self._unwritten = [] if text else [*self._unwritten, *all_ids]
        logprobs, best = self._logprobs(event, len(filled), ids)
        by: str | int | None
        finish, by = self._ended(event)
        for place, token in enumerate(ids):
            if token in self._request.stop_ids and finish is None and len(self._known) >= self._request.min_tokens:
                finish, by = FinishReason.stop, token
                if place + 1 < len(ids):
                    raise MalformedOutput("several ids in one event, though a stop id is among them")
        return [StreamDelta(all_ids, logprobs, best, text or None, finish, by, missing=missing)]

    def _logprobs(
        self, event: dict[str, Any], hidden: int, ids: tuple[int, ...]
    ) -> tuple[tuple[float | None, ...] | None, tuple[TopLogprobs, ...] | None]:
        requested = self._request.logprobs
        if requested is None:
            return None, None
        places = (event.get("completion_probabilities") or [])[-len(ids) :] if ids else []
        if len(places) != len(ids) or any(int(place["id"]) != token for place, token in zip(places, ids, strict=True)):
            raise MalformedOutput("log-probabilities of other tokens than those sent")
        logprobs = (None,) * hidden + tuple(float(place["logprob"]) for place in places)
        if not requested:
            return logprobs, None
        best = tuple(
            tuple((int(top["id"]), float(top["logprob"])) for top in place["top_logprobs"][:requested])
            for place in places
        )
        return logprobs, ((),) * hidden + best

    def _ended(self, event: dict[str, Any]) -> tuple[FinishReason | None, str | None]:
        if not event.get("stop"):
            return None, None
        how = event.get("stop_type")
        if how == "eos":
            return FinishReason.stop, None
        if how == "word":
            return FinishReason.stop, str(event.get("stopping_word", ""))
        if how == "limit":
            whole = int(event["tokens_predicted"]) >= self._request.max_tokens
            return (FinishReason.length if whole else FinishReason.full), None
        return FinishReason.aborted_elsewhere, None

    async def _fill(self, gap: int, ids: tuple[int, ...], event: dict[str, Any]) -> tuple[int, ...]:
        """Ids of a gap; empty if they cannot be determined."""
        if self._missing:
            return ()  # earlier ids are unknown, so the request cannot be repeated
        written = _bytes_of(event)
        try:
            if ids and written is not None:
                found = (await self._engine.vocabulary()).between(self._unwritten, written, ids, gap)
                if found is not None:
                    return found
            if self._request.greedy:
                regenerate = await self._engine.regenerate(self._request, self._known, gap + len(ids))
                if len(regenerate) == gap + len(ids) and regenerate[gap:] == ids:
                    return regenerate[:gap]
        except (EngineError, EngineRefusedError, KeyError, TypeError, ValueError, IndexError):
            return ()  # generation continues; these ids stay unknown
        return ()


def _bytes_of(event: dict[str, Any]) -> bytes | None:
    """Bytes that an event wrote, if known exactly."""
    places = event.get("completion_probabilities") or ()
    if places:
        return b"".join(bytes(place["bytes"]) for place in places)
    text = str(event.get("content") or "")
    return None if _REPLACED in text or not text else text.encode()


class Vocabulary:
    """Maps ids to bytes and back.

    Tokens that write nothing are ignored: control tokens within a character are not supported, and end tokens are
    always streamed.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = dict(pieces)
        self._writers: dict[bytes, list[int]] = defaultdict(list)
        for token, piece in self._pieces.items():
            if piece:
                self._writers[piece].append(token)
        self._longest = max(map(len, self._writers), default=0)

    def between(
        self, before: Sequence[int], written: bytes, after: Sequence[int], tokens: int
    ) -> tuple[int, ...] | None:
        """The ids between two known runs that together wrote these bytes; None unless there is exactly one way."""
        head = b"".join(self._pieces.get(token, b"") for token in before)
        tail = b"".join(self._pieces.get(token, b"") for token in after)
        if not (written.startswith(head) and written.endswith(tail)) or len(written) < len(head) + len(tail):
            return None
        ways = self._ways(written[len(head) : len(written) - len(tail)], tokens)
        return ways[0] if len(ways) == 1 else None

    def _ways(self, rest: bytes, tokens: int) -> list[tuple[int, ...]]:
        """Up to two ways to write these bytes in this number of tokens; more are not needed."""
        if tokens == 0:
            return [] if rest else [()]
        found: list[tuple[int, ...]] = []
        for cut in range(1, min(len(rest) - tokens + 1, self._longest) + 1):
            writers = self._writers.get(rest[:cut])
            if not writers:
                continue
            for way in self._ways(rest[cut:], tokens - 1):
                found.extend((token, *way) for token in writers)
                if len(found) > 1:
                    return found[:2]
        return found
