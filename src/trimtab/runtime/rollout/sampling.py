"""What a client asks of rollout, and what it gets: token ids in, token ids out.

An answer is one sample: its tokens with their log-probabilities, how it ended and why, which workers made it, and
which version of the weights made which run of its tokens. Nothing here acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import Reason
from trimtab.model.rollout import End, Span
from trimtab.runtime.engines.engine import GenerateRequest, TopLogprobs


@dataclass(frozen=True)
class SamplingParams:
    """How to generate."""

    max_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    n: int = 1  # samples of each prompt
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None  # of the first sample; the others count on from it
    logprobs: int | None = None  # None: none; 0: of the chosen tokens; n: also of the n best at each place
    extra: Mapping[str, Any] = field(default_factory=dict)  # handed to the engine as it is
    resume: bool | None = None  # whether a cut answer may go on from its tokens; None: where that changes nothing

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise InputError(f"stop is the string {self.stop!r}", hint=f"a tuple of strings: ({self.stop!r},)")
        if self.n < 1:
            raise InputError(f"n is {self.n}", hint="samples of each prompt, at least 1")
        self.engine_request("params", (0,), self.max_tokens, self.min_tokens)  # refused here rather than at the engine

    def may_resume(self, *, reads_text: bool) -> bool:
        """Whether prompt plus partial answer gives what the whole would have been.

        A seed counts from the beginning of a call, and penalties, grammars and the like, which come in `extra`, look
        at the answer alone. A stop string may lie across the cut: then somebody has to be able to read the tokens.
        """
        if self.resume is not None:
            return self.resume
        drawn_anew = self.seed is not None and self.temperature > 0
        return not drawn_anew and not self.extra and (reads_text or not self.stop)

    def sample(self, index: int) -> SamplingParams:
        """The parameters of one of the n samples."""
        if self.n == 1 or self.seed is None:
            return self
        return replace(self, seed=self.seed + index)

    def engine_request(
        self, name: str, token_ids: tuple[int, ...], max_tokens: int, min_tokens: int
    ) -> GenerateRequest:
        """What an engine is asked for."""
        return GenerateRequest(
            name,
            token_ids,
            max_tokens,
            min_tokens,
            self.stop,
            self.stop_ids,
            self.temperature,
            self.top_p,
            self.top_k,
            self.seed,
            self.logprobs,
            self.extra,
        )


@dataclass(frozen=True)
class Sample:
    """One answer. `ok`: the model ended it, or it has all tokens that were asked; else `reason` says why not."""

    request: str
    token_ids: tuple[int, ...]
    end: End
    reason: Reason
    logprobs: tuple[float | None, ...] | None = None  # where asked; None in places that the engine hid
    best: tuple[TopLogprobs, ...] | None = None  # where asked
    text: str = ""  # as the engines wrote it; empty where they write none
    spans: tuple[Span, ...] = ()  # which version of the weights made which run of tokens
    workers: tuple[str, ...] = ()  # that made it, in order
    moves: int = 0  # cuts after which it went on with what it had
    restarts: int = 0  # cuts after which it began again
    stopped_by: str | int | None = None  # stop string or id, where known
    missing: int = 0  # tokens that were generated and that nobody can name

    @property
    def ok(self) -> bool:
        """Whether this is a whole answer."""
        return self.end in (End.stop, End.length)


@dataclass(frozen=True)
class Completion:
    """All samples of one prompt."""

    samples: tuple[Sample, ...]

    @property
    def ok(self) -> bool:
        """Whether all of them are whole."""
        return all(one.ok for one in self.samples)


@dataclass(frozen=True)
class Chunk:
    """What came of one sample since its last chunk."""

    index: int  # 0 .. n - 1
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    best: tuple[TopLogprobs, ...] | None = None
    text: str = ""
    restarted: bool = False  # it began again: forget all chunks of this index that came before
    sample: Sample | None = None  # the whole of it, with its last chunk


class RefusedError(UnreachableError):
    """Not accepted: too many wait already. The same may be asked again after `retry_after_s`."""

    def __init__(self, reason: Reason, retry_after_s: float) -> None:
        super().__init__(reason.sentence, hint=f"ask again in {retry_after_s:.3g} s, or raise the class's queue_limit")
        self.reason = reason
        self.retry_after_s = retry_after_s


def checked_prompt(prompt: Sequence[int], where: str) -> tuple[int, ...]:
    """Token ids, or a clear error."""
    if isinstance(prompt, str):
        raise InputError("the prompt is text; the pool takes token ids", where=where, hint="the gateway takes text")
    try:
        ids = tuple(prompt)
    except TypeError:
        raise InputError(f"the prompt is a {type(prompt).__name__}", where=where, hint="a list of token ids") from None
    if not ids:
        raise InputError("the prompt has no tokens", where=where)
    if set(map(type, ids)) == {int} and min(ids) >= 0:
        return ids
    checked = []
    for one in ids:  # numpy's and the like
        if isinstance(one, bool | float | str) or not hasattr(one, "__index__") or one < 0:
            raise InputError(f"{one!r} is no token id", where=where, hint="whole numbers, 0 or more")
        checked.append(int(one))
    return tuple(checked)
