"""State of a request at its client: the prompt, the answer so far, and the waiting future.

All attempts append to the same answer. After an interruption the next attempt continues from the number of tokens that
the machine names (`resumed`), and tokens beyond that are discarded. Two attempts never write to the same answer,
because tokens of superseded attempts are refused. A streaming client sees each token once; when an answer restarts
after some of it was sent, the client gets a chunk with `restarted`, or, where that is impossible, the tokens must come
out the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.reasons import Reason
from trimtab.model.rollout import End, RequestSpec, Span
from trimtab.runtime.engines.engine import ForwardRequest, StreamDelta, TopLogprobs
from trimtab.runtime.rollout.sampling import Chunk, RefusedError, Sample, SamplingParams


@dataclass
class PendingRequest:
    """A request and its answer so far."""

    spec: RequestSpec
    prompt: tuple[int, ...]
    params: SamplingParams
    index: int
    answered: asyncio.Future[Sample]
    chunks: asyncio.Queue[Chunk] | None = None  # set for streaming clients
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

    @property
    def text(self) -> str:
        return self.before + "".join(text for _, text in self.texts)

    @property
    def made(self) -> int:
        """Tokens of this attempt, including unidentified ones."""
        return len(self.ids) - self.base + self.missing

    def begin(self, attempt: int, worker: str, resumed: int) -> None:
        """Starts an attempt that continues from `resumed` tokens."""
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
            self.missing,
            self.params.lora,
            self.extra if self.forward is not None or end in (End.stop, End.length) else {},
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
