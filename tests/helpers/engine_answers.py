"""Whole answers from engines, for tests: what came, and by how much each token won."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimtab.runtime.engines.engine import Engine, FinishReason, GenerateRequest, PartialOutput, StreamDelta

T = TypeVar("T")
NEAR_TIE = 1e-3
"""Nat between the two best tokens below which rounding may choose either."""


def run(work: Coroutine[Any, Any, T], *, within_s: float = 400.0) -> T:
    """Runs it in a loop of its own, not for ever."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, within_s)

    return asyncio.run(bounded())


@dataclass
class Whole:
    """One answer and the pieces that it came in."""

    pieces: list[StreamDelta] = field(default_factory=list)

    @property
    def so_far(self) -> PartialOutput:
        return PartialOutput.of(self.pieces)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.so_far.token_ids

    @property
    def finish(self) -> FinishReason | None:
        return self.pieces[-1].finish if self.pieces else None

    def sure(self) -> int:
        """How many of its first tokens won by more than a near tie; needs an order with `logprobs` 2."""
        won = [best[0][1] - best[1][1] for piece in self.pieces for best in piece.best or ()]
        return next((place for place, margin in enumerate(won) if margin < NEAR_TIE), len(won))


async def answer(engine: Engine, order: GenerateRequest, each: Callable[[PartialOutput], None] | None = None) -> Whole:
    """All of one answer; `each` is called after every piece."""
    whole = Whole()
    async for piece in engine.generate(order):
        whole.pieces.append(piece)
        if each:
            each(whole.so_far)
    return whole


async def answers(engine: Engine, orders: Sequence[GenerateRequest], *, beside: int) -> list[Whole]:
    """All of them, so many at a time."""
    places = asyncio.Semaphore(beside)

    async def one(order: GenerateRequest) -> Whole:
        async with places:
            return await answer(engine, order)

    return await asyncio.gather(*(one(order) for order in orders))


def prompts(count: int, *, seed: int = 1, ids: int = 150, longest: int = 60) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    return [tuple(chance.randrange(1, ids) for _ in range(chance.randrange(4, longest))) for _ in range(count)]


def greedy(key: str, prompt: Sequence[int], tokens: int, **more: Any) -> GenerateRequest:
    return GenerateRequest(key, tuple(prompt), tokens, temperature=0.0, **more)
