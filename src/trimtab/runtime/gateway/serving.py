"""Answers generation calls.

What must never happen: a request that stays in the pool after its client has disconnected; a stream that ends without a
final event; two responses to one call. A call counts as open from its head to the last byte of its response, so that a
stop knows what is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.model.rollout import UP
from trimtab.runtime.gateway.calls import GenerationCall, PendingCall, is_answer, response_headers, samples_of
from trimtab.runtime.gateway.errors import Refusal, refusal_for_error, refusal_for_sample
from trimtab.runtime.gateway.exchange import HttpExchange, Send
from trimtab.runtime.gateway.fields import BodyParser
from trimtab.runtime.gateway.guard import ClientLeft, GatewayGuard, Receive, Scope
from trimtab.runtime.gateway.headers import RequestTerms, read_terms
from trimtab.runtime.gateway.metrics import GatewayMetrics
from trimtab.runtime.gateway.openai import ServedKinds
from trimtab.runtime.gateway.response_format import ResponseFormat
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.sampling import Chunk, RefusedError

Read = Callable[[Any, RequestTerms, ServedKinds], Awaitable[ResponseFormat]]
"""Reads a body, given the kinds of engines that are up."""

Refused = Callable[[Refusal], dict[str, object]]
"""Formats a refusal."""

STOPPING = "the gateway stops"
REFRESH_S = 0.5
MIN_SHARE = 16


class GenerationTracker:
    """Open calls."""

    def __init__(
        self, pool: RolloutPool, settings: GatewaySettings, guard: GatewayGuard, metrics: GatewayMetrics
    ) -> None:
        self.pool, self.settings, self.guard, self.metrics = pool, settings, guard, metrics
        self.bodies = BodyParser()
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
            views = [view for view in self.pool.workers() if view.state in UP]
            engines = (self.pool.engine(view.worker) for view in views)
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
        exchange.unwatch()
        self.waiting.pop(exchange, None)
        self._open.discard(exchange)
        if not self._open:
            self._empty.set()

    async def until_empty(self, within_s: float) -> bool:
        """Whether all open calls ended in time."""
        if self._open and within_s > 0:
            try:
                await asyncio.wait_for(self._empty.wait(), within_s)
            except asyncio.TimeoutError:
                return False
        return not self._open

    def abort_all(self) -> None:
        """Answers all open calls now, with what there is."""
        for exchange in list(self._open):
            waiting = self.waiting.get(exchange)
            if waiting is not None:
                exchange.closing = True
                waiting.cancel()  # partial answers come at once
            else:
                exchange.abort(STOPPING)


class GenerationEndpoint:
    """One endpoint; plain ASGI, because every token passes here."""

    def __init__(self, serving: GenerationTracker, name: str, read: Read, refused: Refused) -> None:
        self._serving, self._name, self._read, self._refused = serving, name, read, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._serving
        exchange = HttpExchange(scope, receive, send, serving.settings.write_s)
        began = asyncio.get_running_loop().time()
        try:
            if not serving.settings.allows_anonymous:
                serving.guard.check_token(exchange.headers)
            serving.enter(exchange)
            try:
                await self._answer(exchange)
            finally:
                serving.leave(exchange)
        except Refusal as refusal:
            await self._refuse(exchange, refusal)
        except TrimtabError as error:
            await self._refuse(exchange, refusal_for_error(error))
        except ClientLeft:
            exchange.client_gone = True
        except asyncio.CancelledError:
            if not (exchange.client_gone or exchange.abort_reason):
                raise  # the server stops
            if exchange.abort_reason:
                await self._refuse(exchange, Refusal(503, exchange.abort_reason, code="stopping"))
        serving.metrics.answered(self._name, exchange, asyncio.get_running_loop().time() - began)

    async def _answer(self, exchange: HttpExchange) -> None:
        serving = self._serving
        terms = read_terms(exchange.headers, serving.settings.deadline_s)
        body = await serving.bodies.parsed(await serving.guard.body(exchange.headers, exchange.receive))
        exchange.watch()
        form = await self._read(body, terms, serving.kinds)
        if form.call.stream:
            await self._stream(exchange, form)
        else:
            await self._whole(exchange, form)

    async def _whole(self, exchange: HttpExchange, form: ResponseFormat) -> None:
        serving = self._serving
        waiting = serving.waiting[exchange] = PendingCall(serving.pool, form.call, serving.share())
        completions = await waiting.answers()
        del serving.waiting[exchange]
        samples = samples_of(completions)
        serving.metrics.made(samples)
        if not any(map(is_answer, samples)):
            raise refusal_for_sample(samples[0])
        answer = await form.whole(completions)
        await exchange.json(answer, headers=response_headers(form.call, samples))

    async def _stream(self, exchange: HttpExchange, form: ResponseFormat) -> None:
        serving, begun, tail = self._serving, False, b""
        left = sum(params.n for params in form.call.params)
        try:
            async with aclosing(chunks_of(serving.pool, form.call, serving.share())) as chunks:
                async for place, chunk in chunks:
                    sample = chunk.sample
                    if not begun:
                        if sample is not None and left == 1 and not is_answer(sample):
                            raise refusal_for_sample(sample)
                        await exchange.events([(b"x-trimtab-id", form.call.id.encode("ascii", "replace"))])
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

    async def _refuse(self, exchange: HttpExchange, refusal: Refusal) -> None:
        exchange.unwatch()
        if exchange.status:
            return  # the response has begun; only the connection can be closed
        headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
        await exchange.json(self._refused(refusal), refusal.status, headers)


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
    terms = call.terms
    return pool.stream(
        call.prompts[place],
        call.params[place],
        class_=terms.class_,
        group=terms.group,
        session=terms.session,
        version=terms.version,
        at_least=terms.at_least,
        spans=terms.spans,
        key=terms.key_of(place, len(call.prompts)),
        deadline_s=terms.deadline_s,
        restarts="hold",
    )
