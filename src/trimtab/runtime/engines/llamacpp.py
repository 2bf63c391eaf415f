"""Engines of llama.cpp's HTTP server.

Its `/completion` takes token ids and streams them back, but an id whose text is not yet whole UTF-8 is left out of the
stream: the counter `tokens_predicted` of the next event is the only sign of it. Such a gap is filled from the bytes
that came with that event, where the vocabulary has exactly one way to write them in so many tokens; a greedy request
may be asked again, without a stream, for just the ids of the gap. Where neither names them, the piece says how many
are missing: ids are never guessed.

It has no pause, sleep, flush or weights; a pause here means that nothing is sent. It has no least number of tokens, no
stop ids and no abort: stop ids are watched for here, and a broken connection is what it takes as an abort. Its own
defaults for sampling (top_k 40, min_p 0.05) are not what an order means that says nothing, so all are sent. Log-
probabilities are those of the model before temperature and sampling limits.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError
from trimtab.runtime.engines.engine import (
    EngineError,
    EngineFailedError,
    EngineLoad,
    EngineRefusedError,
    EngineState,
    EngineWedgedError,
    FinishReason,
    GenerateRequest,
    PauseMode,
    StreamDelta,
    TopLogprobs,
)
from trimtab.runtime.engines.gated import DeltaReader, MalformedOutput
from trimtab.runtime.engines.http_engine import HttpEngine, gauges

_REPLACED = "\ufffd"
"""Stands in a text for bytes that are no UTF-8; such a text does not tell its bytes."""


class LlamaCppEngine(HttpEngine):
    """A llama.cpp server."""

    kind = "llamacpp"
    keeps_alive = False  # it closes connections that it said it would keep

    _boots = 0
    _tokens_seen = 0.0  # tokens that it had counted when it was last looked at; a process counts up from 0
    _vocabulary: Vocabulary | None = None
    _vocabulary_lock: asyncio.Lock | None = None

    def _generate_call(self, request: GenerateRequest, key: str) -> tuple[str, dict[str, Any]]:
        if 0 < request.min_tokens < request.max_tokens:
            raise InputError(
                "llama.cpp knows no least number of tokens", where=f"request {request.id}",
                hint="leave min_tokens out, or make it equal to max_tokens",
            )  # fmt: skip
        body = completion(request) | dict(request.extra)
        if "samplers" not in request.extra:
            body["samplers"] = samplers(request.extra)
        return "/completion", body

    def _reader(self, request: GenerateRequest) -> DeltaReader:
        return _LlamaCppReader(self, request)

    async def _read_state(self) -> EngineState:
        """The metrics come from the loop that computes, so they show what `/health` hides: a server that is wedged."""
        await self.wire.get("/health")
        if not self.dialect:
            props = await self.wire.get("/props")
            self.dialect = f"llama.cpp {props.get('build_info', 'of unknown build') if isinstance(props, dict) else ''}"
        await self._load()
        paused = bool(self._closed_reason)
        said = self._closed_reason or "it answers"
        return EngineState(not paused, said, paused=paused, dialect=self.dialect, boots=self._boots)

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
                    "it tells neither metrics nor slots", engine=self.name, hint="start it with --metrics"
                ) from None
            running, waiting = sum(bool(slot.get("is_processing")) for slot in slots), 0
        return EngineLoad(int(running), int(waiting), None, time.monotonic(), fresh=True)

    async def _pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.abort:
            await self.abort()
        elif mode is PauseMode.keep:
            raise InputError("llama.cpp cannot hold requests still", where=f"engine {self.name}", hint="abort or wait")
        deadline = time.monotonic() + self.deadlines.change_s
        while self._open_streams or (await self._load()).running:
            if time.monotonic() > deadline:
                raise EngineWedgedError(
                    f"requests still ran {self.deadlines.change_s:g} s after the pause", engine=self.name
                )
            await asyncio.sleep(0.02)

    async def _resume(self) -> None:
        await self.wire.get("/health")

    # Ids that its streams leave out.

    async def vocabulary(self) -> Vocabulary:
        """What its ids write, in bytes: asked once, as the log-probabilities of all of them at one place."""
        self._vocabulary_lock = self._vocabulary_lock or asyncio.Lock()
        async with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = await self._load_vocabulary()
            return self._vocabulary

    async def _load_vocabulary(self) -> Vocabulary:
        models = await self.wire.get("/v1/models")
        size = int(models["data"][0]["meta"]["n_vocab"])
        for tokens in (1, 4, 16):  # a token that is half a character tells nothing
            answer = await self.wire.post(
                "/completion",
                {"prompt": [0], "n_predict": tokens, "n_probs": size, "temperature": 0, "cache_prompt": False},
                within_s=self.deadlines.change_s,
            )
            for place in answer.get("completion_probabilities") or ():
                if len(place["top_logprobs"]) == size:
                    return Vocabulary({int(one["id"]): bytes(one["bytes"]) for one in place["top_logprobs"]})
        raise EngineFailedError("it does not tell its vocabulary", engine=self.name)

    async def regenerate(self, request: GenerateRequest, known: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The next ids after the known ones, of a greedy request, told whole because they are not streamed."""
        body = completion(request) | dict(request.extra)
        body |= {"prompt": [*request.token_ids, *known], "n_predict": tokens, "stream": False, "n_probs": 0, "stop": []}
        answer = await self.wire.post("/completion", body, within_s=self.deadlines.change_s)
        return tuple(int(one) for one in answer["tokens"])


def samplers(extra: Mapping[str, Any]) -> list[str]:
    """Of those that an order cannot say only what `extra` has something for: the server ignores what is not listed."""
    return [name for name, fields in _SAMPLERS if not fields or any(field in extra for field in fields)]


_SAMPLERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("penalties", ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")),
    ("dry", ("dry_multiplier", "dry_base", "dry_allowed_length")),
    ("top_n_sigma", ("top_n_sigma",)),
    ("temperature", ()),  # before the limits, as an order means it
    ("top_k", ()),
    ("typ_p", ("typical_p",)),
    ("top_p", ()),
    ("min_p", ("min_p",)),
    ("xtc", ("xtc_probability", "xtc_threshold")),
)


def completion(request: GenerateRequest) -> dict[str, Any]:
    """The body of `/completion` for an order."""
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
        "stream": True,
        "return_tokens": True,
        # A prompt that was read before gives the same answer only up to rounding; affinity is worth more than that.
        "cache_prompt": True,
    }


class _LlamaCppReader:
    """The events of one request."""

    def __init__(self, engine: LlamaCppEngine, request: GenerateRequest) -> None:
        self._engine, self._request = engine, request
        self._known: list[int] = []  # all ids so far, those of filled gaps too
        self._missing = 0  # of those before and between them that nobody could name
        self._unwritten: list[int] = []  # ids whose text the server holds back: it may become a stop string

    async def take(self, event: dict[str, Any]) -> list[StreamDelta]:
        counted = int(event["tokens_predicted"])
        ids = tuple(int(one) for one in event["tokens"])
        gap = counted - len(self._known) - self._missing - len(ids)
        if gap < 0:
            raise MalformedOutput(f"it counts {counted} tokens and has told {counted - gap}")
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
        for place, one in enumerate(ids):
            if one in self._request.stop_ids and finish is None and len(self._known) >= self._request.min_tokens:
                finish, by = FinishReason.stop, one
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
        if len(places) != len(ids) or any(int(place["id"]) != one for place, one in zip(places, ids, strict=True)):
            raise MalformedOutput("log-probabilities of other tokens than those told")
        logprobs = (None,) * hidden + tuple(float(place["logprob"]) for place in places)
        if not requested:
            return logprobs, None
        best = tuple(
            tuple((int(one["id"]), float(one["logprob"])) for one in place["top_logprobs"][:requested])
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
        """The ids of a gap, or none where they cannot be known."""
        if self._missing:
            return ()  # what came before is not known either, so nothing can be asked again
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
            return ()  # the answer itself goes on; these ids stay unknown
        return ()


def _bytes_of(event: dict[str, Any]) -> bytes | None:
    """What an event wrote, where that can be told to the byte."""
    places = event.get("completion_probabilities") or ()
    if places:
        return b"".join(bytes(place["bytes"]) for place in places)
    text = str(event.get("content") or "")
    return None if _REPLACED in text or not text else text.encode()


class Vocabulary:
    """What each id writes, and which ids write what."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = dict(pieces)
        self._writers: dict[bytes, list[int]] = defaultdict(list)
        for one, piece in self._pieces.items():
            if piece:
                self._writers[piece].append(one)
        self._longest = max(map(len, self._writers), default=0)

    def between(
        self, before: Sequence[int], written: bytes, after: Sequence[int], tokens: int
    ) -> tuple[int, ...] | None:
        """The so many ids between two known runs that together wrote these bytes; None unless there is just one way."""
        head = b"".join(self._pieces.get(one, b"") for one in before)
        tail = b"".join(self._pieces.get(one, b"") for one in after)
        if not (written.startswith(head) and written.endswith(tail)) or len(written) < len(head) + len(tail):
            return None
        ways = self._ways(written[len(head) : len(written) - len(tail)], tokens)
        return ways[0] if len(ways) == 1 else None

    def _ways(self, rest: bytes, tokens: int) -> list[tuple[int, ...]]:
        """Up to two ways to write bytes in so many tokens: two are as good as many."""
        if tokens == 0:
            return [] if rest else [()]
        found: list[tuple[int, ...]] = []
        for cut in range(1, min(len(rest) - tokens + 1, self._longest) + 1):
            writers = self._writers.get(rest[:cut])
            if not writers:
                continue
            for way in self._ways(rest[cut:], tokens - 1):
                found.extend((one, *way) for one in writers)
                if len(found) > 1:
                    return found[:2]
        return found
