"""The one door from the gateway into the pool for whole answers: nothing but futures, so that a call costs little."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trimtab.runtime.rollout.asked import Asked
from trimtab.runtime.rollout.gateway.calls import Call
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.sampling import Completion


class Waiting:
    """The requests of one call, all accepted; awaited together, cancelled together."""

    def __init__(self, pool: RolloutPool, call: Call) -> None:
        self._pool = pool
        self._asked: list[list[Asked]] = []
        try:
            for place, prompt in enumerate(call.prompts):
                self._asked.append([])
                self._ask(call, place, prompt)
        except BaseException:
            self.cancel()
            raise

    def _ask(self, call: Call, place: int, prompt: tuple[int, ...]) -> None:
        terms, params, row = call.terms, call.params[place], self._asked[-1]
        row += self._pool.ask(
            prompt,
            params,
            class_=terms.class_,
            group=terms.group or (f"{call.id}.{place}" if params.n > 1 else ""),
            version=terms.version,
            at_least=terms.at_least,
            spans=terms.spans,
            key=terms.key_of(place, len(call.prompts)),
            deadline_s=terms.deadline_s,
        )

    async def answers(self) -> list[Completion]:
        """All of them, once the last is there. Whoever stops waiting cancels them."""
        try:
            return [Completion(tuple([await one.answered for one in row])) for row in self._asked]
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends what is not answered yet; the answers are what there was."""
        for request in self.requests:
            self._pool.cancel(request)

    @property
    def requests(self) -> Sequence[str]:
        """Their ids in the pool."""
        return [one.spec.id for row in self._asked for one in row]
