"""Scenes for tests of the rollout pool: scripted servers that behave as vLLM and SGLang do, behind a real pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine_answers import run
from engine_forms import SglangForm, VllmForm
from engine_scenes import expected
from engine_stubs import SglangStub, Stub, VllmStub
from trimtab.machines.rollout.machine import STATIC
from trimtab.model.elastic_config import ElasticConfig
from trimtab.rollout import RolloutPool, RolloutRules, Sample, SamplingParams, WorkerState
from trimtab.runtime.engines.engine import EngineDeadlines

PROMPT = (4, 5, 6)
QUICK = RolloutRules(
    min_workers=1, max_workers=8, drain_s=0.5, abort_s=3.0, stall_s=12.0, suspect_s=0.5, lost_s=2.0,
    back_off_s=0.05, probe_s=3.0,
    monitor_s=0.1, load_fresh_s=3.0, resume_every=1,
)  # fmt: skip
# The servers share our event loop, which may stand still for a second on a busy machine: none is silent by that.
DEADLINES = EngineDeadlines(call_s=6.0, change_s=12.0, refit_s=12.0, first_bytes_s=12.0, silence_s=3.0, abort_s=1.5)


@dataclass
class Scene:
    """A pool and the scripted servers behind it."""

    pool: RolloutPool
    stubs: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def state(self, at: int) -> WorkerState | None:
        return next((one.state for one in self.pool.workers() if one.worker == self.names[at]), None)

    def reason(self, at: int) -> str:
        return next(one.reason.sentence for one in self.pool.workers() if one.worker == self.names[at])

    async def becomes(self, at: int, *states: WorkerState, within_s: float = 10.0) -> None:
        reached = await self.pool.until(lambda: self.state(at) in states, within_s)
        assert reached, f"{self.names[at]} is {self.state(at)}: {self.reason(at)}"

    async def one(self, tokens: int = 20, **more: Any) -> Sample:
        how = {key: more.pop(key) for key in tuple(more) if key in ("version", "at_least", "spans", "class_")}
        params = SamplingParams(max_tokens=tokens, temperature=more.pop("temperature", 0.0), **more)
        return (await self.pool.generate([PROMPT], params, **how))[0].samples[0]

    @asynccontextmanager
    async def running(self, tokens: int = 60, after: int = 3, **more: Any) -> AsyncIterator[asyncio.Task[Sample]]:
        """A request that has made some tokens already."""
        task = asyncio.create_task(self.one(tokens, **more))
        try:
            begun = await self.pool.until(
                lambda: (
                    any(len(one.ids) >= after for stub in self.stubs for one in stub.running.values()) or task.done()
                ),
                0.0,
            )
            while not begun and not task.done():
                await asyncio.sleep(0.005)
                begun = any(len(one.ids) >= after for stub in self.stubs for one in stub.running.values())
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def busy(self) -> int:
        """Which of the servers has a request."""
        return next(at for at, stub in enumerate(self.stubs) if stub.running)


def stub_of(kind: str) -> Stub:
    """A server of a kind, or of one of its releases: `vllm 0.26.0`."""
    kind, _, release = kind.partition(" ")
    if release:
        return VllmForm(release) if kind == "vllm" else SglangForm(release)
    return VllmStub() if kind == "vllm" else SglangStub()


def play(
    act: Callable[[Scene], Awaitable[None]],
    *,
    kinds: tuple[str, ...] = ("sglang", "sglang"),
    rules: RolloutRules = QUICK,
    elastic: ElasticConfig = STATIC,
    limit: int = 8,
    **pool: Any,
) -> None:
    """With a server of each kind behind one pool."""

    async def whole() -> None:
        async with contextlib.AsyncExitStack() as stack:
            scene = Scene(RolloutPool(rules, elastic, look_s=0.05, deadlines=DEADLINES, **pool))
            for kind in kinds:
                scene.stubs.append(await stack.enter_async_context(stub_of(kind).up()))
            await stack.enter_async_context(scene.pool)
            for stub in scene.stubs:
                scene.names.append(await scene.pool.attach(stub.url, limit=limit))
            await act(scene)
            if pool.get("journal") is None:
                scene.pool._core.machine.check()

    run(whole(), within_s=60)


__all__ = ["DEADLINES", "PROMPT", "QUICK", "Scene", "expected", "play", "run"]
