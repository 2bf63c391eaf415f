"""Parameters, requests and results of generation: token ids in, token ids out.

An answer is a sample: tokens with log-probabilities, how and why it ended, the workers that generated it, and the
version of the weights for each run of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol

import msgspec

from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.frozen import Frozen, Message
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.model.rollout import End, RequestSpec, Span
from trimtab.runtime.engines.engine import (
    ROUTED_EXPERTS,
    ForwardRequest,
    GenerateRequest,
    MalformedOutput,
    RawAnswer,
    StreamDelta,
    TopLogprobs,
)

TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
WITHOUT_STATE = frozenset({"ignore_eos", "min_p", "logit_bias", "skip_special_tokens", "priority"})
"""Fields of `extra` whose effect on a token does not depend on the tokens before it."""


class SamplingParams(Frozen):
    """Sampling parameters."""

    max_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    n: int = 1  # samples per prompt
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None  # of the first sample; the next ones add 1 each
    logprobs: int | None = None  # None: off; 0: of the chosen tokens; n: also of the top n at each position
    extra: Mapping[str, Any] = field(default_factory=dict)  # passed to the engine unchanged
    resume: bool | None = None  # an interrupted answer may continue from its tokens; None: if that changes nothing
    lora: str | None = None  # a LoRA adapter of the pool (`load_adapter`); None: the weights alone

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise InputError(f"stop is the string {self.stop!r}", hint=f"a tuple of strings: ({self.stop!r},)")
        if self.n < 1:
            raise InputError(f"n is {self.n}", hint="samples of each prompt, at least 1")
        if self.resume and ROUTED_EXPERTS in self.extra:
            raise InputError(f"resume is True, with {ROUTED_EXPERTS}", hint="experts are those of one whole answer")
        self.engine_request("params", (0,), self.max_tokens, self.min_tokens)  # validates

    def may_resume(self, *, reads_text: bool) -> bool:
        """Whether prompt plus partial answer continues as an uninterrupted answer would.

        A seed counts from the start of a call, and penalties, grammars and other fields of `extra` see the answer
        alone. A stop string may span the interruption: then the tokens must be detokenized.
        """
        if self.resume is not None:
            return self.resume
        return self.may_cut(reads_text=reads_text)

    def may_cut(self, *, reads_text: bool) -> bool:
        """Whether an answer in several requests is distributed as one in a single request, whatever `resume` says."""
        reseeded = self.seed is not None and self.temperature > 0
        return (
            self.resume is not False
            and not reseeded
            and WITHOUT_STATE.issuperset(self.extra)
            and (reads_text or not self.stop)
        )

    def sample(self, index: int) -> SamplingParams:
        if self.n == 1 or self.seed is None:
            return self
        return replace(self, n=1, seed=self.seed + index)

    def engine_request(
        self,
        name: str,
        token_ids: Sequence[int],
        max_tokens: int,
        min_tokens: int,
        piece: int | None = 1,
        cache_key: str = "",
        *,
        stops: bool = True,
        raw: bool = False,
    ) -> GenerateRequest:
        return GenerateRequest(
            name,
            token_ids,
            max_tokens,
            min_tokens,
            self.stop if stops else (),
            self.stop_ids,
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed,
            self.logprobs,
            self.extra,
            piece,
            cache_key,
            self.lora,
            raw,
        )


class Sample(Message):
    """One answer. `ok`: it ended with a stop or at max_tokens; otherwise `reason` says why not."""

    request: str
    token_ids: tuple[int, ...]
    end: End
    reason: Reason
    logprobs: tuple[float | None, ...] | None = None  # if requested; None: not reported by the engine
    best: tuple[TopLogprobs, ...] | None = None  # if requested
    text: str = ""  # as written by the engines; empty if they write none
    spans: tuple[Span, ...] = ()  # version of the weights for each run of tokens
    workers: tuple[str, ...] = ()  # that generated it, in order
    moves: int = 0  # interruptions after which it continued
    restarts: int = 0  # interruptions after which it restarted
    stopped_by: str | int | None = None  # stop string or id, if known
    missing: int = 0  # generated tokens whose ids are unknown
    lora: str | None = None  # the adapter that made it
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else the engine said of the whole answer
    raw: RawAnswer | None = None  # instead of tokens, which then count as missing, and of their text

    @property
    def ok(self) -> bool:
        return self.end in (End.stop, End.length)


class Completion(Message):
    """All samples of one prompt."""

    samples: tuple[Sample, ...]

    @property
    def ok(self) -> bool:
        return all(sample.ok for sample in self.samples)


class ForwardedAnswer(Message):
    """An engine's own reply to a request that was sent to it as it is."""

    request: str
    body: Mapping[str, Any]
    workers: tuple[str, ...]  # that it was sent to; the last one replied
    version: int | None  # of the weights; None: the reply counts no tokens
    restarts: int  # on other workers, or under other weights

    @classmethod
    def of(cls, sample: Sample) -> ForwardedAnswer:
        """Raises where there is no reply."""
        if "body" in sample.extra:
            version = sample.spans[-1].version if sample.spans else None
            return cls(sample.request, sample.extra["body"], sample.workers, version, sample.restarts)
        if sample.ok:
            raise InputError(f"request {sample.request} has the key of one that was not forwarded")
        wrong = InputError if sample.reason.code is ReasonCode.refused else UnreachableError
        raise wrong(sample.reason.sentence)


class Chunk(Message):
    """What a sample gained since its previous chunk."""

    index: int  # 0 .. n - 1
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    best: tuple[TopLogprobs, ...] | None = None
    text: str = ""
    restarted: bool = False  # discard all previous chunks of this index
    sample: Sample | None = None  # with the last chunk


class ChunkSink(Protocol):
    """Takes chunks, at any time, and does nothing else then: a queue, for one."""

    def put_nowait(self, chunk: Chunk, /) -> None:
        """The next one."""


class RefusedError(UnreachableError):
    """The queue is full. Retry after `retry_after_s`."""

    def __init__(self, reason: Reason, retry_after_s: float) -> None:
        super().__init__(reason.sentence, hint=f"retry in {retry_after_s:.3g} s, or raise the class's queue_limit")
        self.reason = reason
        self.retry_after_s = retry_after_s


def forwarded_tokens(body: Mapping[str, Any]) -> int:
    """The most tokens that the reply to a forwarded body may have, as far as it says."""
    sampling = body.get("sampling_params")
    given = {**body, **sampling} if isinstance(sampling, dict) else body
    limits = (given.get(name) for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"))
    most = next((limit for limit in limits if type(limit) is int and limit > 0), SamplingParams.max_tokens)
    samples = given.get("n")
    return most * samples if type(samples) is int and samples > 0 else most


def checked_prompt(prompt: Sequence[int], where: str) -> tuple[int, ...]:
    """Token ids, or an InputError."""
    if isinstance(prompt, str):
        raise InputError("the prompt is text; the pool takes token ids", where=where, hint="the gateway takes text")
    try:
        ids = tuple(prompt)
    except TypeError:
        raise InputError(f"the prompt is a {type(prompt).__name__}", where=where, hint="a list of token ids") from None
    if not ids:
        raise InputError("the prompt has no tokens", where=where)
    with contextlib.suppress(ValueError):
        msgspec.convert(ids, TokenIds)
        return ids
    checked = []
    for token in ids:  # numpy integers
        if isinstance(token, bool | float | str) or not hasattr(token, "__index__") or token < 0:
            raise InputError(f"{token!r} is no token id", where=where, hint="whole numbers, 0 or more")
        checked.append(int(token))
    return tuple(checked)


@dataclass
class PendingRequest:
    """A request at its client, and its answer so far.

    All attempts append to the same answer. After an interruption the next attempt continues from the number of tokens
    that the machine names (`resumed`), and tokens beyond that are discarded. Two attempts never write to the same
    answer, because tokens of superseded attempts are refused. A streaming client sees each token once; when an answer
    restarts after some of it was sent, the client gets a chunk with `restarted`, or, where that is impossible, the
    tokens must come out the same.
    """

    spec: RequestSpec
    prompt: Sequence[int]
    params: SamplingParams
    index: int
    answered: asyncio.Future[Sample]
    chunks: ChunkSink | None = None  # set for streaming clients
    attempt: int = 0
    worker: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    best: list[TopLogprobs] = field(default_factory=list)
    base: int = 0  # tokens kept when this attempt began
    before: str = ""  # text of the tokens before the current call of the engine
    before_tokens: int = 0  # their number
    texts: list[tuple[int, str]] = field(default_factory=list)  # of this call: (number of tokens by then, text)
    cuts: int = 0  # calls of the engine after the first one of this attempt
    sent_text: str = ""  # text sent to a streaming client
    missing: int = 0
    stopped_by: str | int | None = None
    workers: list[str] = field(default_factory=list)
    moves: int = 0
    restarts: int = 0
    forward: ForwardRequest | None = None  # set for a call that goes to an engine as it is, instead of a prompt
    extra: Mapping[str, Any] = field(default_factory=dict)  # of the whole answer
    takes_raw: bool = False  # the client takes the answer as the engine wrote it
    raw: RawAnswer | None = None  # all of this attempt, until it is read

    @property
    def text(self) -> str:
        return self.before + "".join(text for _, text in self.texts)

    @property
    def made(self) -> int:
        """Tokens of this attempt, including unidentified ones."""
        return len(self.ids) - self.base + self.missing + (0 if self.raw is None else self.raw.tokens)

    def read(self) -> None:
        """Reads what an engine wrote."""
        if self.raw is not None:
            delta, self.raw = self.raw.delta(self.params.logprobs), None
            self.take(delta)

    def begin(self, attempt: int, worker: str, resumed: int) -> None:
        """Starts an attempt that continues from `resumed` tokens."""
        self.read()
        if self.attempt and resumed:
            self.moves += 1
        elif self.attempt and (self.ids or self.forward is not None):
            self.restarts += 1
        discarded = len(self.ids) > resumed or self.missing > 0
        kept = "".join(text for tokens, text in self.texts if tokens <= resumed)
        self.before = self.before + kept if resumed >= self.before_tokens else ""
        self.texts, self.before_tokens, self.cuts = [], resumed, 0
        del self.ids[resumed:], self.logprobs[resumed:], self.best[resumed:]
        self.attempt, self.worker, self.base, self.missing, self.extra = attempt, worker, resumed, 0, {}
        if not self.workers or self.workers[-1] != worker:
            self.workers.append(worker)
        if discarded and self.chunks is not None:
            self._send_chunk(Chunk(self.index, restarted=True))
            self.sent_text = ""
            self.send_all()  # send what was kept again

    def take(self, piece: StreamDelta) -> None:
        if piece.raw is not None:
            self.raw, self.stopped_by = piece.raw, piece.stopped_by
            return
        self.read()
        self.ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs += piece.logprobs
        if piece.best is not None:
            self.best += piece.best
        if piece.text:
            self.texts.append((len(self.ids), piece.text))
        self.missing += piece.missing
        if piece.stopped_by is not None:
            self.stopped_by = piece.stopped_by
        self.extra = piece.extra or self.extra
        if self.chunks is not None and (piece.token_ids or piece.text):
            self.sent_text += piece.text or ""
            self._send_chunk(Chunk(self.index, piece.token_ids, piece.logprobs, piece.best, piece.text or ""))

    def cut(self) -> None:
        """The engine's call has ended, and the answer continues with another one."""
        self.before, self.texts, self.before_tokens = self.text, [], len(self.ids)
        self.cuts += 1

    def send_all(self) -> None:
        """Sends everything so far to a streaming client that has nothing yet."""
        if self.chunks is not None and (self.ids or self.before):
            self.sent_text = self.text
            logprobs = tuple(self.logprobs) if self.params.logprobs is not None else None
            best = tuple(self.best) if self.params.logprobs else None
            self._send_chunk(Chunk(self.index, tuple(self.ids), logprobs, best, self.sent_text))

    def send_held_text(self) -> None:
        """Sends text that an engine held back when it was aborted, if it continues the sent text."""
        if self.chunks is not None and self.before.startswith(self.sent_text):
            rest = self.before[len(self.sent_text) :].rstrip("\ufffd")
            if rest:
                self.sent_text += rest
                self._send_chunk(Chunk(self.index, text=rest))

    def rewrite(self, text: str) -> None:
        """Replaces the joined text of the calls by the text of all tokens, unless that only adds special tokens."""
        joined = self.text
        if not text.startswith(joined):
            rest = iter(text)
            if not all(character in rest for character in joined):
                self.before, self.texts, self.before_tokens = text, [], len(self.ids)

    def truncate(self, tokens: int, text: str, stopped_by: str) -> None:
        """Ends the answer at a stop string that was found late, across an interruption."""
        del self.ids[tokens:], self.logprobs[tokens:], self.best[tokens:]
        self.before, self.texts, self.stopped_by = text, [], stopped_by

    def answer(self, end: End, spans: tuple[Span, ...], reason: Reason) -> None:
        """Answers the client, once."""
        if self.answered.done():
            return
        raw = self.raw if end in (End.stop, End.length) and self.raw is not None and self.raw.ended else None
        if raw is None and self.raw is not None:
            with contextlib.suppress(MalformedOutput, TypeError, ValueError, IndexError):
                self.read()
        sample = Sample(
            self.spec.id,
            tuple(self.ids),
            end,
            reason,
            tuple(self.logprobs) if self.params.logprobs is not None else None,
            tuple(self.best) if self.params.logprobs else None,
            self.text,
            spans,
            tuple(self.workers),
            self.moves,
            self.restarts,
            self.stopped_by,
            self.missing + (0 if raw is None else raw.tokens),
            self.params.lora,
            self.extra if self.forward is not None or end in (End.stop, End.length) else {},
            raw,
        )
        self._send_chunk(Chunk(self.index, sample=sample))
        self.answered.set_result(sample)

    def _send_chunk(self, chunk: Chunk) -> None:
        """Nothing is sent after the answer, though the engine may still be generating."""
        if self.chunks is not None and not self.answered.done():
            self.chunks.put_nowait(chunk)

    def refuse(self, reason: Reason, retry_after_s: float) -> None:
        if not self.answered.done():
            self.answered.set_exception(RefusedError(reason, retry_after_s))
