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
import operator
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.core.errors import TrimtabError
from trimtab.model.rollout import UP, End
from trimtab.runtime.gateway.exchange import HttpExchange, Refusal, refusal_for_error, refusal_for_sample
from trimtab.runtime.gateway.fields import DEFAULT_TERMS, BodyParser, RequestTerms, ServedKinds, read_terms
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.request_api import RequestOptions, RestartGate, merge_chunks
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

    prompts: Sequence[Sequence[int]]
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

    def options(self, prompt: int) -> dict[str, Any]:
        """Those of `RequestOptions`: each prompt of a call is a request of its own, also by its key."""
        own = {**vars(self.terms.options), "raw": self.raw}
        if len(self.prompts) > 1 and own["key"]:
            own["key"] = f"{own['key']}/{prompt}"
        return own


def samples_of(completions: Sequence[Completion]) -> list[Sample]:
    return [sample for completion in completions for sample in completion.samples]


def is_answer(sample: Sample) -> bool:
    """Whether it counts as an answer: complete, or partial after an abort. A failure does not, even with tokens."""
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


class CallSink(Protocol):
    """Hears what comes of a call, until the last chunk, the answers or the error."""

    def chunk(self, prompt: int, chunk: Chunk, last: bool) -> None:
        """Of a call that streams."""

    def answered(self, completions: list[Completion]) -> None:
        """All of one that does not."""

    def failed(self, error: BaseException) -> None:
        """It has ended without an answer, or within its stream."""


class CallInbox:
    """A sink with one reader."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None

    def chunk(self, prompt: int, chunk: Chunk, last: bool) -> None:
        self._put((prompt, chunk, last))

    def answered(self, completions: list[Completion]) -> None:
        self._put(completions)

    def failed(self, error: BaseException) -> None:
        self._put(error)

    def _put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Any]:
        """All that has come, at least one; an error is raised after what came before it."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        if isinstance(items[-1], BaseException):
            self._items = [items.pop()]
        if not items:
            raise self._items[0]
        return items


class PoolCallRun:
    """Requests of one call in the pool, without a task. Raises if the first cannot be submitted."""

    def __init__(self, pool: RolloutPool, call: GenerationCall, share: int, sink: CallSink) -> None:
        self._pool, self._call, self._share, self._sink = pool, call, share, sink
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._submitted: list[list[PendingRequest]] = [[] for _ in call.prompts]
        self._left = sum(params.n for params in call.params)  # answers
        self._open = self._given_up = 0
        self._ready: list[_PromptChunks] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._waiting: deque[tuple[int, Sequence[int] | None]] = deque()  # (prompt, samples) not submitted yet
        if self._left <= share:
            self._waiting.extend((place, None) for place in range(len(call.prompts)))
        else:
            self._waiting.extend((place, (index,)) for place, one in enumerate(call.params) for index in range(one.n))
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        while self._waiting and self._open < self._share:
            self._submit(*self._waiting[0])
            self._waiting.popleft()

    def _submit(self, place: int, samples: Sequence[int] | None) -> None:
        call, pool = self._call, self._pool
        options, params = call.options(place), call.params[place]
        if params.n > 1 and not options["group"]:
            options["group"] = f"{call.id}.{place}"
        if options["deadline_s"] is not None:
            options["deadline_s"] = max(0.0, options["deadline_s"] - self._loop.time() + self._began)
        chunks = _PromptChunks(self, place) if call.stream and call.forward is None else None
        if call.forward is not None:
            submitted = [pool.submit_forward(*call.forward, RequestOptions(**options))]
            if submitted[0].answered.done():
                submitted[0].answered.result()  # raises if it was refused
        else:
            prompt = call.prompts[place]
            submitted = pool.submit(prompt, params, samples=samples, chunks=chunks, checked=True, **options)
        self._open += len(submitted)
        self._submitted[place] += submitted
        if chunks is not None:
            chunks.gate = RestartGate(submitted)
            return
        for request in submitted:
            request.answered.add_done_callback(self._answered)

    def _go_on(self) -> None:
        """Submits more. The first were accepted, so a full queue is waited for until the deadline."""
        self._timer = None
        try:
            self._fill()
        except RefusedError as refused:
            allowed_s = self._call.terms.options.deadline_s
            if allowed_s is not None and self._loop.time() - self._began >= allowed_s:
                self._fail(refused)
            else:
                self._timer = self._loop.call_later(refused.retry_after_s, self._go_on)
        except Exception as error:
            self._fail(error)

    # ---- what comes of them ------------------------------------------------------------------------------------------

    def soon(self, chunks: _PromptChunks) -> None:
        """Chunks of one turn of the event loop go out together."""
        if not self._ready:
            self._loop.call_soon(self._send)
        self._ready.append(chunks)

    def _send(self) -> None:
        ready, self._ready = self._ready, []
        try:
            for chunks in ready:
                held, chunks.held = chunks.held, []
                for merged in merge_chunks(held):
                    for chunk in chunks.gate.passes(merged):
                        if not self._closed:
                            self._pass(chunks.place, chunk)
        except Exception as error:
            self._fail(error)

    def _pass(self, place: int, chunk: Chunk) -> None:
        if chunk.sample is not None:
            self._open -= 1
            self._left -= 1
            if not self._left:
                self._closed, self._submitted = True, []
        self._sink.chunk(place, chunk, self._closed)
        if self._waiting and self._timer is None:
            self._go_on()

    def _answered(self, answered: asyncio.Future[Sample]) -> None:
        if self._closed:
            return
        self._open -= 1
        self._left -= 1
        if self._waiting and self._timer is None:
            self._go_on()
        elif not self._open and not self._waiting:
            self._end()

    def _end(self) -> None:
        """All that was submitted is answered."""
        if self._closed:
            return
        self._closed = True
        if self._given_up:
            self._sink.failed(Refusal(503, f"stopped before {self._given_up} answers were begun", code="stopping"))
            return
        rows = [tuple([request.answered.result() for request in row]) for row in self._submitted]
        self._submitted = []  # they refer to this
        if self._call.stream:  # it went to an engine as it is, and comes whole
            self._sink.chunk(0, Chunk(0, sample=rows[0][0]), True)
        else:
            self._sink.answered([Completion(row) for row in rows])

    def _fail(self, error: BaseException) -> None:
        if not self._closed:
            self.close()
            self._sink.failed(error)

    def cancel(self) -> None:
        """Cancels unfinished requests; the answers are partial."""
        if self._timer is not None:
            self._timer.cancel()
        self._given_up += len(self._waiting)
        self._waiting.clear()
        for row in self._submitted:
            for request in row:
                self._pool.cancel(request.spec.id)
        if not self._open:
            self._loop.call_soon(self._end)

    def close(self) -> None:
        """Ends it, and nothing more is said of it; harmless after its end."""
        if not self._closed:
            self._closed = True
            self.cancel()
        self._submitted = []


class _PromptChunks:
    """Chunks of one prompt that are not sent yet."""

    gate: RestartGate

    def __init__(self, run: PoolCallRun, place: int) -> None:
        self._run, self.place = run, place
        self.held: list[Chunk] = []

    def put_nowait(self, chunk: Chunk) -> None:
        if not self.held:
            self._run.soon(self)
        self.held.append(chunk)


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


class OpenCall(Protocol):
    """A call until it is answered: of a connection here, or of another process."""

    closing: bool
    aborted: bool

    def abort(self, why: str) -> None:
        """Ends the response now, with what there is."""


class GenerationTracker:
    """Open calls."""

    def __init__(self, pool: RolloutPool | None, settings: GatewaySettings, metrics: GenerationMetrics) -> None:
        self._pool, self.settings, self.metrics = pool, settings, metrics
        self.bodies = BodyParser(settings.parse_s)
        self.stopping = False
        self._open: set[OpenCall] = set()
        self.waiting: dict[OpenCall, Callable[[], None]] = {}  # calls answered in one piece: what cancels them
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

    def enter(self, exchange: OpenCall) -> None:
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

    def leave(self, exchange: OpenCall) -> None:
        self.waiting.pop(exchange, None)
        self._open.discard(exchange)
        if not self._open:
            self._empty.set()

    def begin(self, call: GenerationCall, exchange: OpenCall, sink: CallSink) -> Callable[[], None]:
        """Begins a call, and returns what ends it without a word; raises if it is refused."""
        assert self._pool is not None
        run = PoolCallRun(self._pool, call, self.share(), sink)
        if not call.stream:
            self.waiting[exchange] = run.cancel
        return run.close

    async def completions(self, exchange: OpenCall, call: GenerationCall) -> list[Completion]:
        """All answers of a call."""
        inbox = CallInbox()
        close = self.begin(call, exchange, inbox)
        try:
            found: list[Completion] = (await inbox.take())[0]
            return found
        finally:
            close()
            self.waiting.pop(exchange, None)

    async def chunks(self, call: GenerationCall, exchange: OpenCall) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of a call; closing it cancels the requests. What went to an engine as it is comes whole."""
        inbox, last = CallInbox(), False
        close = self.begin(call, exchange, inbox)
        try:
            while not last:
                came = await inbox.take()
                last = came[-1][2]
                for place, some in itertools.groupby(came, key=operator.itemgetter(0)):
                    for chunk in merge_chunks([one[1] for one in some]):
                        yield place, chunk
        finally:
            close()

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
            cancel = self.waiting.get(exchange)
            if cancel is not None:
                exchange.closing = exchange.closing or self.stopping
                exchange.aborted = not self.stopping
                cancel()  # partial answers come at once
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
                exchange.uncancellable()
                serving.leave(exchange)
        except (Refusal, TrimtabError) as error:
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
            await exchange.write(form.fault(refusal_for_error(fault)))
        await exchange.write(tail + form.end(), more=False)
