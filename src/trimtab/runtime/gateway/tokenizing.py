"""Tokenizer of a pool: calls the tokenizers of its workers in turn.

All engines of a pool have the same model, so any of them may tokenize. If a worker fails, the next is tried; what one
rejects (for example a message that does not fit the template) all would reject, so that is reported to the client. The
text of an interrupted answer is written from its ids: a character may span the interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.model.rollout import UP, End, WorkerState
from trimtab.runtime.engines.engine import EngineError, EngineRefusedError
from trimtab.runtime.engines.tokenizer import Tokenizer, tokenizer_of
from trimtab.runtime.gateway.exchange import Refusal
from trimtab.runtime.gateway.fields import BodyFields
from trimtab.runtime.rollout.sampling import Chunk, Sample

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

TRIES = 3
NAMES_KEPT = 400_000  # larger than any vocabulary
NAMES_AT_ONCE = 16
REFRESH_S = 0.5
_HALF = "\ufffd"  # replacement of incomplete characters


class PoolTokenizer:
    """The tokenizer of a pool."""

    def __init__(self, pool: RolloutPool | None, within_s: float, vocabulary: int | None = None) -> None:
        self._pool, self._within_s = pool, within_s
        self._vocabulary, self._vocabulary_asked = vocabulary, False
        self._turn = 0
        self._model = ""
        self._names: dict[int, str] = {}  # text of single tokens
        self._readers_seen: list[Tokenizer] = []  # cached for REFRESH_S
        self._fresh_until = 0.0

    async def tokenize(self, text: str) -> tuple[int, ...]:
        ids: tuple[int, ...] = await self.call("tokenize", text)
        return ids

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        ids: tuple[int, ...] = await self.call("render", messages, options)
        return ids

    async def model(self) -> str:
        """Model name of the engines; read once, because a refit may rename it."""
        if not self._model:
            self._model = await self.call("model")
        return self._model

    async def check_known(self, prompts: Sequence[tuple[int, ...]], fields: BodyFields, name: str) -> None:
        """Refuses ids outside the vocabulary. They crash some servers, and the request would be retried on the next."""
        if self._vocabulary is None and not self._vocabulary_asked:
            with contextlib.suppress(Refusal):  # no worker is up; the next call tries again
                self._vocabulary = await self.call("vocabulary")
                self._vocabulary_asked = True
        if self._vocabulary is not None:
            largest = max(map(max, prompts))
            if largest >= self._vocabulary:
                raise fields.wrong(name, f"{largest} is not in the model's vocabulary of {self._vocabulary} token ids")

    async def names(self, ids: Sequence[int]) -> list[str]:
        """Text of each id by itself; cached."""
        unknown = list({token for token in ids if token not in self._names})
        if len(self._names) + len(unknown) > NAMES_KEPT:
            self._names.clear()
            unknown = list(set(ids))
        for start in range(0, len(unknown), NAMES_AT_ONCE):
            part = unknown[start : start + NAMES_AT_ONCE]
            self._names.update(zip(part, await asyncio.gather(*map(self._name, part)), strict=True))
        return [self._names[token] for token in ids]

    async def _name(self, token: int) -> str:
        return await self._detokenize((token,), True)

    async def text_of(self, sample: Sample, *, special: bool = False, keep_stop: bool = False) -> str:
        """Text of an answer: as the engine wrote it, or from its ids if several engines or none wrote it."""
        if not sample.moves and (sample.text or not sample.token_ids):
            return sample.text
        ids, stopped = sample.token_ids, sample.stopped_by
        if sample.end is End.stop and not isinstance(stopped, str) and not keep_stop:
            ids = ids[:-1]  # the end token, or a stop id
        try:
            text = await self._detokenize(ids, special)
        except Refusal:
            return sample.text  # no tokenizer; the engines' text is the best there is
        if isinstance(stopped, str) and stopped in text:
            text = text[: text.rindex(stopped) + (len(stopped) if keep_stop else 0)]
        # Engines do not write an incomplete character at the end either.
        return text if sample.text.endswith(_HALF) else text.rstrip(_HALF)

    async def _detokenize(self, ids: Sequence[int], special: bool) -> str:
        text: str = await self.call("detokenize", ids, special=special) if ids else ""
        return text

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of any worker's tokenizer."""
        why = "no worker has a tokenizer"
        for tokenizer in self._readers()[:TRIES]:
            try:
                return await asyncio.wait_for(getattr(tokenizer, method)(*arguments, **options), self._within_s)
            except EngineRefusedError as fault:
                raise Refusal(400, fault.what, code="refused_by_engine") from None
            except EngineError as fault:
                why = f"{fault.engine}: {fault.what}"
            except asyncio.TimeoutError:
                why = f"no answer within {self._within_s:g} s"
            self._fresh_until = 0.0  # refresh the list
        raise Refusal(
            503, f"text cannot be tokenized now ({why}); token ids need no tokenizer", code="no_reader",
            headers={"retry-after": "1"},
        )  # fmt: skip

    def _readers(self) -> list[Tokenizer]:
        """Tokenizers, rotated at each call."""
        now = time.monotonic()
        if now > self._fresh_until or not self._readers_seen:
            self._readers_seen, self._fresh_until = self._found(), now + REFRESH_S
        self._turn += 1
        turn = self._turn % len(self._readers_seen) if self._readers_seen else 0
        return self._readers_seen[turn:] + self._readers_seen[:turn]

    def _found(self) -> list[Tokenizer]:
        """Those of active workers; if there are none, of all that are up."""
        assert self._pool is not None
        views = [view for view in self._pool.workers() if view.state in UP]
        serve = [view for view in views if view.state is WorkerState.active] or views
        found = (tokenizer_of(self._pool.engine(view.worker)) for view in serve)
        return [tokenizer for tokenizer in found if tokenizer is not None]


class TextStream:
    """Text of a streaming sample: what was sent is never retracted."""

    def __init__(self, tokenizer: PoolTokenizer, *, special: bool, keep_stop: bool) -> None:
        self._tokenizer, self._special, self._keep_stop = tokenizer, special, keep_stop
        self._sent: list[str] = []

    async def more(self, chunk: Chunk) -> str:
        sample = chunk.sample
        if sample is None or not (sample.moves or (sample.token_ids and not sample.text)):
            text = chunk.text
        else:
            # Characters held back by an interrupted engine are sent with the end.
            whole, sent = (
                await self._tokenizer.text_of(sample, special=self._special, keep_stop=self._keep_stop),
                self.text,
            )
            text = whole[len(sent) :] if whole.startswith(sent) else chunk.text
        if text:
            self._sent.append(text)
        return text

    @property
    def text(self) -> str:
        if len(self._sent) > 1:
            self._sent = ["".join(self._sent)]
        return self._sent[0] if self._sent else ""
