"""One request as its client sees it: the prompt, what there is of the answer, and whoever waits for it.

Every attempt appends to the same answer. When an attempt is cut, the next one goes on from as many tokens as the
machine says (`resume_from`), and what came beyond them is thrown away: two attempts never write to one answer, because
news of an attempt that is not the current one is refused. A client that streams sees each token once; when an answer
begins again after some of it was given out, that is told, or, where the client cannot be told, the tokens must be the
same again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from trimtab.core.reasons import Reason
from trimtab.model.rollout import End, RequestSpec, Span
from trimtab.runtime.engines.engine import StreamDelta, TopLogprobs
from trimtab.runtime.rollout.sampling import Chunk, RefusedError, Sample, SamplingParams


@dataclass
class PendingRequest:
    """A request and its answer so far."""

    spec: RequestSpec
    prompt: tuple[int, ...]
    params: SamplingParams
    index: int
    answered: asyncio.Future[Sample]
    chunks: asyncio.Queue[Chunk] | None = None  # where somebody streams
    attempt: int = 0
    worker: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    best: list[TopLogprobs] = field(default_factory=list)
    base: int = 0  # tokens that stood when this attempt began
    before: str = ""  # their text
    texts: list[tuple[int, str]] = field(default_factory=list)  # of this attempt, with the tokens that stood by then
    sent_text: str = ""  # text that a streaming client has
    missing: int = 0
    stopped_by: str | int | None = None
    workers: list[str] = field(default_factory=list)
    moves: int = 0
    restarts: int = 0

    @property
    def text(self) -> str:
        """Of the whole answer so far."""
        return self.before + "".join(text for _, text in self.texts)

    @property
    def made(self) -> int:
        """Tokens of this attempt, also those that nobody can name."""
        return len(self.ids) - self.base + self.missing

    def begin(self, attempt: int, worker: str, resumed: int) -> None:
        """Another attempt, from so many tokens."""
        if self.attempt and resumed:
            self.moves += 1
        elif self.attempt and self.ids:
            self.restarts += 1
        taken_back = len(self.ids) > resumed or self.missing > 0
        kept = "".join(text for tokens, text in self.texts if tokens <= resumed)
        self.before = self.before + kept if resumed >= self.base else ""
        self.texts = []
        del self.ids[resumed:], self.logprobs[resumed:], self.best[resumed:]
        self.attempt, self.worker, self.base, self.missing = attempt, worker, resumed, 0
        if not self.workers or self.workers[-1] != worker:
            self.workers.append(worker)
        if taken_back and self.chunks is not None:
            self._send_chunk(Chunk(self.index, restarted=True))
            self.sent_text = ""
            self.send_all()  # what stands is given out anew

    def take(self, piece: StreamDelta) -> None:
        """More of it."""
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
        if self.chunks is not None and (piece.token_ids or piece.text):
            self.sent_text += piece.text or ""
            self._send_chunk(Chunk(self.index, piece.token_ids, piece.logprobs, piece.best, piece.text or ""))

    def send_all(self) -> None:
        """All that there is, to a client that streams and has none of it."""
        if self.chunks is not None and (self.ids or self.before):
            self.sent_text = self.text
            logprobs = tuple(self.logprobs) if self.params.logprobs is not None else None
            best = tuple(self.best) if self.params.logprobs else None
            self._send_chunk(Chunk(self.index, tuple(self.ids), logprobs, best, self.sent_text))

    def send_held_text(self) -> None:
        """Text that an engine held back when it was cut is given out now, where it goes on from what was given."""
        if self.chunks is not None and self.before.startswith(self.sent_text):
            rest = self.before[len(self.sent_text) :].rstrip("\ufffd")
            if rest:
                self.sent_text += rest
                self._send_chunk(Chunk(self.index, text=rest))

    def truncate(self, tokens: int, text: str, stopped_by: str) -> None:
        """It had ended before: a stop string lay across a cut, and was seen late."""
        del self.ids[tokens:], self.logprobs[tokens:], self.best[tokens:]
        self.before, self.texts, self.stopped_by = text, [], stopped_by

    def answer(self, end: End, spans: tuple[Span, ...], reason: Reason) -> None:
        """To its client, once."""
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
        )
        self._send_chunk(Chunk(self.index, sample=sample))
        self.answered.set_result(sample)

    def _send_chunk(self, chunk: Chunk) -> None:
        """To a client that streams; nothing comes after the answer, though its engine may not be cut off yet."""
        if self.chunks is not None and not self.answered.done():
            self.chunks.put_nowait(chunk)

    def refuse(self, reason: Reason, retry_after_s: float) -> None:
        """It was not accepted."""
        if not self.answered.done():
            self.answered.set_exception(RefusedError(reason, retry_after_s))
