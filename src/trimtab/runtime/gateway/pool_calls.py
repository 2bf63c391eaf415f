"""Submits the requests of a call to the pool, for whole answers: futures only, so a call is cheap.

A call has a share of the pool: so many of its requests are in the pool at a time, and the next is submitted when one
has ended. So a large call is never queued as a whole before the requests of other clients.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from trimtab.core.errors import TrimtabError
from trimtab.runtime.gateway.calls import GenerationCall
from trimtab.runtime.gateway.errors import Refusal
from trimtab.runtime.rollout.pending_request import PendingRequest
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.sampling import Completion, RefusedError, Sample


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
        submitted = self._pool.submit(
            call.prompts[place],
            params,
            class_=terms.class_,
            group=terms.group or (f"{call.id}.{place}" if params.n > 1 else ""),
            version=terms.version,
            at_least=terms.at_least,
            spans=terms.spans,
            key=terms.key_of(place, len(call.prompts)),
            deadline_s=None if terms.deadline_s is None else max(0.0, terms.deadline_s - self._late_s()),
            samples=samples,
        )
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
