"""Text in and out of a pool that speaks token ids: any worker that serves is asked, one after another in turn.

All engines of a pool have one model, so any of them may read. One that fails is passed over and the next is asked; what
one refuses (a template that a message does not fit) all would, so that is the client's to know. The text of an answer
that was cut is written from its ids: a character may lie across the cut, and neither engine has seen the whole of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from trimtab.model.rollout import UP, End, WorkerState
from trimtab.runtime.engines.engine import EngineError, EngineRefusedError
from trimtab.runtime.engines.tokenizer import Tokenizer, tokenizer_of
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.fields import BodyFields
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.sampling import Chunk, Sample

T = TypeVar("T")
TRIES = 3
NAMES_KEPT = 400_000  # more than any vocabulary has
NAMES_AT_ONCE = 16
REFRESH_S = 0.5
_HALF = "\ufffd"  # stands where bytes are no character


class PoolTokenizer:
    """The tokenizer of a pool."""

    def __init__(self, pool: RolloutPool, within_s: float, vocabulary: int | None = None) -> None:
        self._pool, self._within_s = pool, within_s
        self._vocabulary, self._vocabulary_asked = vocabulary, False
        self._turn = 0
        self._model = ""
        self._names: dict[int, str] = {}  # what single tokens write
        self._readers_seen: list[Tokenizer] = []  # who can read, as seen a moment ago
        self._fresh_until = 0.0

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt."""
        return await self._call(lambda tokenizer: tokenizer.tokenize(text))

    async def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a conversation."""
        return await self._call(lambda tokenizer: tokenizer.render(messages, options))

    async def model(self) -> str:
        """What the engines call their model; asked once, because a refit may rename it."""
        if not self._model:
            self._model = await self._call(lambda tokenizer: tokenizer.model())
        return self._model

    async def check_known(self, prompts: Sequence[tuple[int, ...]], fields: BodyFields, name: str) -> None:
        """Refuses ids that the model does not know. They end some servers, and the next one that they are sent to."""
        if self._vocabulary is None and not self._vocabulary_asked:
            with contextlib.suppress(Refusal):  # nobody is there to be asked; the next call asks again
                self._vocabulary = await self._call(lambda tokenizer: tokenizer.vocabulary())
                self._vocabulary_asked = True
        if self._vocabulary is not None:
            largest = max(map(max, prompts))
            if largest >= self._vocabulary:
                raise fields.wrong(name, f"the model knows {self._vocabulary} token ids, and {largest} is none of them")

    async def names(self, ids: Sequence[int]) -> list[str]:
        """What each of these ids writes by itself; each is asked for once."""
        unknown = list({one for one in ids if one not in self._names})
        if len(self._names) + len(unknown) > NAMES_KEPT:
            self._names.clear()
            unknown = list(set(ids))
        for start in range(0, len(unknown), NAMES_AT_ONCE):
            part = unknown[start : start + NAMES_AT_ONCE]
            self._names.update(zip(part, await asyncio.gather(*map(self._name, part)), strict=True))
        return [self._names[one] for one in ids]

    async def _name(self, one: int) -> str:
        return await self._call(lambda tokenizer: tokenizer.detokenize((one,), special=True))

    async def text_of(self, sample: Sample, *, special: bool = False, keep_stop: bool = False) -> str:
        """The text of an answer: as the engine wrote it, or from its ids where several wrote it or none did."""
        if not sample.moves and (sample.text or not sample.token_ids):
            return sample.text
        ids, stopped = sample.token_ids, sample.stopped_by
        if sample.end is End.stop and not isinstance(stopped, str) and not keep_stop:
            ids = ids[:-1]  # the end token, or a stop id
        try:
            text = await self._detokenize(ids, special)
        except Refusal:
            return sample.text  # nobody can read; what the engines wrote is the best there is
        if isinstance(stopped, str) and stopped in text:
            text = text[: text.rindex(stopped) + (len(stopped) if keep_stop else 0)]
        # Half a character at the end is not written by engines either.
        return text if sample.text.endswith(_HALF) else text.rstrip(_HALF)

    async def _detokenize(self, ids: Sequence[int], special: bool) -> str:
        return await self._call(lambda tokenizer: tokenizer.detokenize(ids, special=special)) if ids else ""

    async def _call(self, question: Callable[[Tokenizer], Awaitable[T]]) -> T:
        said = "no worker is there that reads text"
        for tokenizer in self._readers()[:TRIES]:
            try:
                return await asyncio.wait_for(question(tokenizer), self._within_s)
            except EngineRefusedError as fault:
                raise Refusal(400, fault.what, code="refused_by_engine") from None
            except EngineError as fault:
                said = f"{fault.engine}: {fault.what}"
            except asyncio.TimeoutError:
                said = f"no answer within {self._within_s:g} s"
            self._fresh_until = 0.0  # whoever can read is looked at anew
        raise Refusal(
            503, f"text cannot be read now ({said}); token ids need no reader", code="no_reader",
            headers={"retry-after": "1"},
        )  # fmt: skip

    def _readers(self) -> list[Tokenizer]:
        """In turn."""
        now = time.monotonic()
        if now > self._fresh_until or not self._readers_seen:
            self._readers_seen, self._fresh_until = self._found(), now + REFRESH_S
        self._turn += 1
        turn = self._turn % len(self._readers_seen) if self._readers_seen else 0
        return self._readers_seen[turn:] + self._readers_seen[:turn]

    def _found(self) -> list[Tokenizer]:
        """Those that serve; where none does, all that are up."""
        views = [view for view in self._pool.workers() if view.state in UP]
        serve = [view for view in views if view.state is WorkerState.active] or views
        found = (tokenizer_of(self._pool.engine(view.worker)) for view in serve)
        return [tokenizer for tokenizer in found if tokenizer is not None]


class TextStream:
    """The text of one sample while it streams: what was written is never taken back."""

    def __init__(self, tokenizer: PoolTokenizer, *, special: bool, keep_stop: bool) -> None:
        self._tokenizer, self._special, self._keep_stop = tokenizer, special, keep_stop
        self._sent: list[str] = []

    async def more(self, chunk: Chunk) -> str:
        """What this chunk adds."""
        sample = chunk.sample
        if sample is None or not (sample.moves or (sample.token_ids and not sample.text)):
            text = chunk.text
        else:
            # A cut may have cost a few characters that an engine held back: they come with the end.
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
        """All of it so far."""
        if len(self._sent) > 1:
            self._sent = ["".join(self._sent)]
        return self._sent[0] if self._sent else ""
