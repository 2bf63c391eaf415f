"""Scenes for tests of the HTTP adapters: one stub, its adapter, and a request that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_answers import Whole, answer, greedy, run
from engine_stubs import SglangStub, Stub, VllmStub, follows
from trimtab.runtime.engines.detect import KINDS
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import HttpEngine, open_session

PROMPT = (4, 5, 6)
BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
RELEASES = ("/sleep", "/release_memory_occupation")
PAUSES = ("/pause", "/pause_generation")
LONG = 5000


def stub_of(kind: str) -> Any:
    return VllmStub() if kind == "vllm" else SglangStub()


@asynccontextmanager
async def reached(stub: Stub, **seconds: float) -> AsyncIterator[HttpEngine]:
    kind = "vllm" if isinstance(stub, VllmStub) else "sglang"
    async with stub.up(), open_session() as session:
        engine = KINDS[kind]("one", stub.url, session, EngineDeadlines(**seconds))
        yield engine
        await engine.close()


def scene(kind: str, play: Callable[[Any, HttpEngine], Awaitable[None]], **seconds: float) -> None:
    """Plays with one stub and its adapter."""

    async def whole() -> None:
        stub = stub_of(kind)
        async with reached(stub, **seconds) as engine:
            await play(stub, engine)

    run(whole(), within_s=60)


def expected(tokens: int, version: str = "default", prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(follows(ids[-1], version))
    return tuple(ids[len(prompt) :])


@asynccontextmanager
async def running(stub: Stub, engine: HttpEngine, tokens: int = LONG) -> AsyncIterator[asyncio.Task[Whole]]:
    """A request that has begun to stream."""
    begun = asyncio.Event()
    task = asyncio.create_task(answer(engine, greedy("long", PROMPT, tokens), lambda _: begun.set()))
    await begun.wait()
    yield task
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
