"""Generation calls, independent of the API they came by, and their requests in the pool.

A call has a share of the pool: so many of its requests are in the pool at a time, and the next is submitted when one
has ended. So a large call is never queued as a whole before the requests of other clients.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.model.rollout import End, Span
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.gateway.headers import DEFAULT_TERMS, RequestTerms
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.request_api import RequestOptions
from trimtab.runtime.rollout.sampling import Completion, PendingRequest, RefusedError, Sample, SamplingParams

FINISHES = {End.stop: "stop", End.length: "length", End.abort: "abort", End.cancelled: "abort", End.failed: "error"}


_BOOT = uuid.uuid4().hex[:16]
_NUMBERS = itertools.count(1)


def new_id() -> str:
    """Id of a call, unique over processes."""
    return f"{_BOOT}{next(_NUMBERS):08x}"


@dataclass
class GenerationCall:
    """Prompts to be answered. Answers are numbered over all prompts: see `number`."""

    prompts: list[tuple[int, ...]]
    params: list[SamplingParams]  # per prompt
    terms: RequestTerms = DEFAULT_TERMS
    stream: bool = False
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time.time()))
    forward: tuple[str, Mapping[str, Any]] | None = None  # path and body for an engine, instead of a prompt

    def number(self, prompt: int, index: int) -> int:
        """Number of the answer `index` of a prompt among all answers."""
        return prompt * self.params[0].n + index if prompt else index


def samples_of(completions: Sequence[Completion]) -> list[Sample]:
    return [sample for completion in completions for sample in completion.samples]


def is_answer(sample: Sample) -> bool:
    """Whether it counts as an answer: complete, or partial after an abort. A failure does not, with or without
    tokens.
    """
    return sample.ok or sample.end is End.abort or (sample.end is End.cancelled and bool(sample.token_ids))


def details(sample: Sample) -> dict[str, object]:
    """Execution details of an answer."""
    return {
        "request": sample.request,
        "workers": list(sample.workers),
        "moves": sample.moves,
        "restarts": sample.restarts,
        "versions": [{"version": span.version, "tokens": span.tokens} for span in sample.spans],
        "missing_tokens": sample.missing,
        "reason": {"code": sample.reason.code.value, "sentence": sample.reason.sentence},
    }


def response_headers(call: GenerationCall, samples: Sequence[Sample]) -> list[tuple[bytes, bytes]]:
    """Headers of an answer: workers, moves, and tokens per weight version."""
    if len(samples) == 1:
        workers: Sequence[str] = samples[0].workers
        moves, versions = samples[0].moves + samples[0].restarts, versions_text(samples[0].spans)
    else:
        workers = sorted({worker for sample in samples for worker in sample.workers})
        moves = sum(sample.moves + sample.restarts for sample in samples)
        versions = ",".join(sorted({str(span.version) for sample in samples for span in sample.spans}))
    return [
        (b"x-trimtab-id", call.id.encode("ascii", "replace")),
        (b"x-trimtab-workers", ",".join(workers[:16]).encode("ascii", "replace")),
        (b"x-trimtab-moves", str(moves).encode()),
        (b"x-trimtab-versions", versions.encode()),
    ]


def versions_text(spans: Sequence[Span]) -> str:
    """`3:120,4:7`: version 3 made 120 tokens, then version 4 made 7."""
    return ",".join(f"{span.version}:{span.tokens}" for span in spans)


class PendingCall:
    """Requests of one call; awaited and cancelled together. Raises if the first cannot be submitted."""

    def __init__(self, pool: RolloutPool, call: GenerationCall, share: int) -> None:
        self._pool, self._call, self._share = pool, call, share
        self._submitted: list[list[PendingRequest]] = [[] for _ in call.prompts]
        self._left: deque[tuple[int, int]] = deque()  # (prompt, sample) not submitted yet
        self._open = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._all_submitted: asyncio.Future[None] | None = None
        try:
            if sum(params.n for params in call.params) <= share:
                for place in range(len(call.prompts)):
                    self._submit(place, None)
            else:
                self._left.extend(
                    (place, index) for place, params in enumerate(call.params) for index in range(params.n)
                )
                self._fill()
                self._all_submitted = self._loop.create_future()
        except BaseException:
            self.cancel()
            raise

    def _submit(self, place: int, samples: Sequence[int] | None) -> list[PendingRequest]:
        call = self._call
        terms, params = call.terms, call.params[place]
        options = RequestOptions(
            terms.class_,
            terms.group or (f"{call.id}.{place}" if params.n > 1 else ""),
            terms.session,
            terms.version,
            terms.at_least,
            terms.spans,
            terms.key_of(place, len(call.prompts)),
            None if terms.deadline_s is None else max(0.0, terms.deadline_s - self._late_s()),
        )
        if call.forward is not None:
            submitted = [self._pool.submit_forward(*call.forward, options)]
            if submitted[0].answered.done():
                submitted[0].answered.result()  # raises if it was refused
        else:
            submitted = self._pool.submit(call.prompts[place], params, samples=samples, **vars(options))
        self._submitted[place] += submitted
        return submitted

    def _late_s(self) -> float:
        return self._loop.time() - self._began

    def _fill(self) -> None:
        while self._left and self._open < self._share:
            place, index = self._left[0]
            [request] = self._submit(place, (index,))
            self._left.popleft()
            self._open += 1
            request.answered.add_done_callback(self._ended)

    def _ended(self, answered: asyncio.Future[Sample]) -> None:
        self._open -= 1
        if self._left and self._timer is None:
            self._go_on()

    def _go_on(self) -> None:
        """Submits more. The first were accepted, so a full queue is waited for until the deadline."""
        assert self._all_submitted is not None
        self._timer = None
        if self._all_submitted.done():
            return
        try:
            self._fill()
        except RefusedError as refused:
            allowed_s = self._call.terms.deadline_s
            if allowed_s is not None and self._late_s() >= allowed_s:
                self._all_submitted.set_exception(refused)
            else:
                self._timer = self._loop.call_later(refused.retry_after_s, self._go_on)
            return
        except TrimtabError as error:
            self._all_submitted.set_exception(error)
            return
        if not self._left:
            self._all_submitted.set_result(None)

    async def answers(self) -> list[Completion]:
        """All answers, once the last has come. Cancelling the wait cancels the requests."""
        try:
            if self._all_submitted is not None:
                await self._all_submitted
                if self._left:
                    raise Refusal(503, f"stopped before {len(self._left)} answers were begun", code="stopping")
            return [Completion(tuple([await request.answered for request in row])) for row in self._submitted]
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancels unfinished requests; the answers are partial."""
        if self._timer is not None:
            self._timer.cancel()
        if self._all_submitted is not None and not self._all_submitted.done():
            self._all_submitted.set_result(None)
        for request in self.requests:
            self._pool.cancel(request)

    @property
    def requests(self) -> Sequence[str]:
        return [request.spec.id for row in self._submitted for request in row]
