"""Generation calls, independent of the API they came by: their requests in the pool, and how they are answered.

What must never happen: a request that stays in the pool after its client has disconnected; a stream that ends without a
final event; two responses to one call. A call counts as open from its head to the last byte of its response, so that a
stop knows what is open.

A call has a share of the pool: so many of its requests are in the pool at a time, and the next is submitted when one
has ended. So a large call is never queued as a whole before the requests of other clients.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.core.errors import TrimtabError
from trimtab.model.rollout import UP, End
from trimtab.runtime.gateway.exchange import HttpExchange, Refusal, refusal_for_error, refusal_for_sample
from trimtab.runtime.gateway.fields import DEFAULT_TERMS, BodyParser, RequestTerms, ServedKinds, read_terms
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.request_api import RequestOptions
from trimtab.runtime.rollout.sampling import Chunk, Completion, PendingRequest, RefusedError, Sample, SamplingParams

if TYPE_CHECKING:
    from trimtab.runtime.rollout.pool import RolloutPool

CLIENT_CLOSED = 499  # nginx's status for a client that disconnected
STOPPING = "the gateway stops"
REFRESH_S = 0.5
MIN_SHARE = 16
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
    raw: bool = False  # answers may come as an engine wrote them

    def number(self, prompt: int, index: int) -> int:
        """Number of the answer `index` of a prompt among all answers."""
        return prompt * self.params[0].n + index if prompt else index

    def options(self, prompt: int) -> RequestOptions:
        """Each prompt of a call is a request of its own, also by its key."""
        own = replace(self.terms.options, raw=True) if self.raw else self.terms.options
        return own if len(self.prompts) == 1 or not own.key else replace(own, key=f"{own.key}/{prompt}")


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
        moves = samples[0].moves + samples[0].restarts
        # `3:120,4:7`: version 3 made 120 tokens, then version 4 made 7.
        versions = ",".join(f"{span.version}:{span.tokens}" for span in samples[0].spans)
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
        options, params = call.options(place), call.params[place]
        if params.n > 1 and not options.group:
            options = replace(options, group=f"{call.id}.{place}")
        if options.deadline_s is not None:
            options = replace(options, deadline_s=max(0.0, options.deadline_s - self._late_s()))
        if call.forward is not None:
            submitted = [self._pool.submit_forward(*call.forward, options)]
            if submitted[0].answered.done():
                submitted[0].answered.result()  # raises if it was refused
        else:
            submitted = self._pool.submit(call.prompts[place], params, samples=samples, checked=True, **vars(options))
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
            allowed_s = self._call.terms.options.deadline_s
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
            # Flat first: Python 3.10 has no await in a nested comprehension.
            answered = iter([await request.answered for row in self._submitted for request in row])
            return [Completion(tuple(itertools.islice(answered, len(row)))) for row in self._submitted]
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


class ResponseFormat(Protocol):
    """Format of the response to one call."""

    call: GenerationCall

    async def whole(self, completions: Sequence[Completion]) -> Any:
        """Body of a response in one piece."""

    async def event(self, prompt: int, chunk: Chunk) -> bytes:
        """Bytes for a chunk; empty if it adds nothing."""

    def aborted(self, why: str) -> bytes:
        """Ends the unfinished answers of a stream as aborted, with what they have."""

    def fault(self, refusal: Refusal) -> bytes:
        """Error within a stream that has begun."""

    def end(self) -> bytes:
        """Last bytes of a stream."""


Read = Callable[[Any, RequestTerms, ServedKinds], Awaitable[ResponseFormat]]
"""Reads a body, given the kinds of engines that are up."""


class GenerationMetrics(Protocol):
    """What generation requests are counted by."""

    def count(self, endpoint: str, status: int, seconds: float) -> None:
        """An answered request."""

    def made(self, samples: Sequence[Sample]) -> None:
        """Its samples."""


class GenerationTracker:
    """Open calls."""

    def __init__(self, pool: RolloutPool | None, settings: GatewaySettings, metrics: GenerationMetrics) -> None:
        self._pool, self.settings, self.metrics = pool, settings, metrics
        self.bodies = BodyParser(settings.parse_s)
        self.stopping = False
        self._open: set[HttpExchange] = set()
        self.waiting: dict[HttpExchange, PendingCall] = {}  # calls answered in one piece
        self._empty = asyncio.Event()
        self._kinds: frozenset[str] = frozenset()
        self._capacity = 0
        self._fresh_until = 0.0

    @property
    def open(self) -> int:
        return len(self._open)

    def kinds(self) -> frozenset[str]:
        """Kinds of engines that are up, cached for a moment."""
        self._refresh()
        return self._kinds

    def share(self) -> int:
        """Requests of one call that may be in the pool at a time: enough to keep all engines busy."""
        self._refresh()
        return max(MIN_SHARE, 2 * self._capacity)

    def _refresh(self) -> None:
        now = time.monotonic()
        if now > self._fresh_until or not self._kinds:
            assert self._pool is not None
            views = [view for view in self._pool.workers() if view.state in UP]
            engines = (self._pool.engine(view.worker) for view in views)
            self._kinds = frozenset(engine.kind for engine in engines if engine is not None)
            self._capacity = sum(view.spec.limit for view in views)
            self._fresh_until = now + REFRESH_S

    def enter(self, exchange: HttpExchange) -> None:
        """Counts a call as open, or refuses it."""
        if self.stopping:
            exchange.closing = True
            raise Refusal(503, STOPPING, code="stopping", headers={"retry-after": "5"})
        if len(self._open) >= self.settings.max_concurrent:
            raise Refusal(
                503, f"{len(self._open)} requests are open, which is the limit",
                code="too_many", headers={"retry-after": "1"},
            )  # fmt: skip
        self._open.add(exchange)
        self._empty.clear()

    def leave(self, exchange: HttpExchange) -> None:
        exchange.uncancellable()
        self.waiting.pop(exchange, None)
        self._open.discard(exchange)
        if not self._open:
            self._empty.set()

    async def completions(self, exchange: HttpExchange, call: GenerationCall) -> list[Completion]:
        """All answers of a call."""
        assert self._pool is not None
        waiting = self.waiting[exchange] = PendingCall(self._pool, call, self.share())
        completions = await waiting.answers()
        del self.waiting[exchange]
        return completions

    def chunks(
        self, call: GenerationCall, exchange: HttpExchange | None = None
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of a call; closing it cancels the requests."""
        assert self._pool is not None
        return chunks_of(self._pool, call, self.share())

    async def until_empty(self, within_s: float) -> bool:
        """Whether all open calls ended in time."""
        if self._open and within_s > 0:
            try:
                await asyncio.wait_for(self._empty.wait(), within_s)
            except asyncio.TimeoutError:
                return False
        return not self._open

    def abort_all(self, why: str = STOPPING) -> int:
        """Answers all open calls now, with what there is; how many."""
        for exchange in list(self._open):
            waiting = self.waiting.get(exchange)
            if waiting is not None:
                exchange.closing = exchange.closing or self.stopping
                exchange.aborted = not self.stopping
                waiting.cancel()  # partial answers come at once
            else:
                exchange.abort(why)
        return len(self._open)


class GenerationEndpoint:
    """One endpoint."""

    def __init__(self, serving: GenerationTracker, name: str, read: Read) -> None:
        self._serving, self._name, self._read = serving, name, read

    async def __call__(self, exchange: HttpExchange) -> None:
        serving, clock = self._serving, asyncio.get_running_loop().time
        began = clock()
        try:
            serving.enter(exchange)
            try:
                await self._answer(exchange)
            finally:
                serving.leave(exchange)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except TrimtabError as error:
            await exchange.refuse(refusal_for_error(error))
        except asyncio.CancelledError:
            if not (exchange.client_gone or exchange.abort_reason):
                raise  # the server stops
            if exchange.abort_reason:
                await exchange.refuse(Refusal(503, exchange.abort_reason, code="stopping"))
        serving.metrics.count(self._name, CLIENT_CLOSED if exchange.client_gone else exchange.status, clock() - began)

    async def _answer(self, exchange: HttpExchange) -> None:
        serving = self._serving
        terms = read_terms(exchange.headers, serving.settings.deadline_s)
        body, exchange.body = exchange.body, b""
        form = await self._read(await serving.bodies.parsed(body), terms, serving.kinds)
        del body  # no list is kept that a garbage collection would go through
        if form.call.stream:
            await self._stream(exchange, form)
        else:
            await self._whole(exchange, form)

    async def _whole(self, exchange: HttpExchange, form: ResponseFormat) -> None:
        serving = self._serving
        completions = await serving.completions(exchange, form.call)
        samples = samples_of(completions)
        serving.metrics.made(samples)
        if not (exchange.aborted or any(map(is_answer, samples))):
            raise refusal_for_sample(samples[0])
        answer = await form.whole(completions)
        await exchange.json(answer, headers=response_headers(form.call, samples))

    async def _stream(self, exchange: HttpExchange, form: ResponseFormat) -> None:
        serving, begun, tail = self._serving, False, b""
        left = sum(params.n for params in form.call.params)
        try:
            async with aclosing(serving.chunks(form.call, exchange)) as chunks:
                async for place, chunk in chunks:
                    sample = chunk.sample
                    if not begun:
                        if sample is not None and left == 1 and not is_answer(sample):
                            raise refusal_for_sample(sample)
                        exchange.events([(b"x-trimtab-id", form.call.id.encode("ascii", "replace"))])
                        begun = True
                    if sample is not None:
                        serving.metrics.made((sample,))
                        left -= 1
                    event = await form.event(place, chunk)
                    if not left:
                        tail = event  # sent together with the end
                    elif event:
                        await exchange.write(event)
        except asyncio.CancelledError:
            if not exchange.abort_reason or not begun:
                raise
            await exchange.write(form.aborted(exchange.abort_reason))
        except (TrimtabError, Refusal) as fault:
            if not begun:
                raise
            await exchange.write(form.fault(fault if isinstance(fault, Refusal) else refusal_for_error(fault)))
        await exchange.write(tail + form.end(), more=False)


async def chunks_of(pool: RolloutPool, call: GenerationCall, share: int) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all prompts of a call, with the prompt's index; closing it cancels the requests.

    As many prompts stream at a time as fit in the call's share, at least one. What went to an engine as it is comes
    whole.
    """
    if call.forward is not None:
        (completion,) = await PendingCall(pool, call, share).answers()
        yield 0, Chunk(0, sample=completion.samples[0])
        return
    if len(call.prompts) == 1:
        async with aclosing(_stream_of(pool, call, 0)) as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue()
    concurrent = max(1, share // call.params[0].n)
    turns = asyncio.Semaphore(concurrent)
    tasks = [
        asyncio.create_task(_pump(pool, call, place, queue, turns, retry=place >= concurrent))
        for place in range(len(call.prompts))
    ]
    try:
        left = len(tasks)
        while left:
            place, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    pool: RolloutPool,
    call: GenerationCall,
    place: int,
    queue: asyncio.Queue[tuple[int, Chunk | BaseException | None]],
    turns: asyncio.Semaphore,
    *,
    retry: bool,
) -> None:
    """Chunks of one prompt; a full queue refuses the call, or is waited for once the call has begun."""
    try:
        async with turns:
            while True:
                try:
                    async with aclosing(_stream_of(pool, call, place)) as stream:
                        async for chunk in stream:
                            queue.put_nowait((place, chunk))
                    break
                except RefusedError as refused:  # before the first chunk
                    if not retry:
                        raise
                    await asyncio.sleep(refused.retry_after_s)
    except Exception as fault:
        queue.put_nowait((place, fault))
    else:
        queue.put_nowait((place, None))


def _stream_of(pool: RolloutPool, call: GenerationCall, place: int) -> AsyncGenerator[Chunk, None]:
    return pool.stream(call.prompts[place], call.params[place], restarts="hold", **vars(call.options(place)))
