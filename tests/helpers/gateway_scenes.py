"""Scenes for tests of the gateway: real engines or scripted servers, a real pool, a real port, and a client."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from engine_answers import run
from trimtab.model.rollout import RolloutRules, WorkerState
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.gateway.server import Gateway
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.pool import RolloutPool

TOKEN = "a-token-of-the-tests"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PROMPT = [5, 6, 7, 8]
QUICK = RolloutRules(
    min_workers=1, max_workers=8, drain_s=2.0, abort_s=3.0, stall_s=15.0, suspect_s=0.5, lost_s=2.0,
    back_off_s=0.05, probe_s=3.0,
    monitor_s=0.1,
)  # fmt: skip
# The servers share our event loop, which may stand still for a second on a busy machine: none is silent by that.
DEADLINES = EngineDeadlines(call_s=15.0, change_s=15.0, first_bytes_s=15.0, silence_s=5.0, abort_s=1.5)


PROCESSES = contextvars.ContextVar("processes", default=1)
"""Of every gateway that says nothing else."""


@dataclass
class Answered:
    """What came back."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])

    @property
    def events(self) -> list[Any]:
        """Of a stream: the JSON of each event, and the last one as it is."""
        found = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        return [one if one == "[DONE]" else json.loads(one) for one in found]

    def choices(self, index: int = 0) -> list[Any]:
        """Of a stream of OpenAI's: all choices of one answer."""
        events = [one for one in self.events if one != "[DONE]"]
        return [choice for one in events for choice in one["choices"] if choice["index"] == index]


class Front:
    """A gateway and a client of it."""

    def __init__(self, pool: RolloutPool, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.pool, self.gateway, self.http = pool, gateway, http

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Answered:
        if body is not None:
            more["data"] = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.request(method, self.gateway.url + path, **more) as answer:
            heads = {name.lower(): value for name, value in answer.headers.items()}
            return Answered(answer.status, heads, await answer.text())

    async def get(self, path: str, **more: Any) -> Answered:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Any = None, **more: Any) -> Answered:
        return await self.ask("POST", path, body, **more)

    async def complete(self, prompt: Any = None, tokens: int = 8, **more: Any) -> Answered:
        headers = more.pop("headers", {})
        body = {"prompt": PROMPT if prompt is None else prompt, "max_tokens": tokens, "temperature": 0, **more}
        return await self.post("/v1/completions", body, headers=headers)

    async def generate(self, tokens: int = 8, headers: Any = None, **more: Any) -> Answered:
        sampling = {"max_new_tokens": tokens, "temperature": 0, **more.pop("sampling", {})}
        body = {"input_ids": PROMPT, "sampling_params": sampling, **more}
        return await self.post("/generate", body, headers=headers)

    @asynccontextmanager
    async def streaming(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream that has begun."""
        answer = await self.http.post(self.gateway.url + path, json=body)
        try:
            assert answer.status == 200, await answer.text()
            yield answer
        finally:
            answer.close()

    def state(self, worker: str) -> WorkerState | None:
        return next((view.state for view in self.pool.workers() if view.worker == worker), None)

    def running(self) -> int:
        """Requests on workers."""
        return sum(view.running for view in self.pool.workers())

    def known(self) -> int:
        """Requests of the pool, on workers or waiting; one that the gateway still reads is not among them."""
        return sum(self.pool.status()["requests"].values())


@asynccontextmanager
async def front(
    urls: Sequence[str],
    *,
    rules: RolloutRules = QUICK,
    limit: int = 8,
    deadlines: EngineDeadlines = DEADLINES,
    **settings: Any,
) -> AsyncIterator[Front]:
    """A gateway before these engines."""
    async with contextlib.AsyncExitStack() as stack:
        pool = RolloutPool(rules, look_s=0.1, deadlines=deadlines)
        await stack.enter_async_context(pool)
        for url in urls:
            await pool.attach(url, limit=limit)
        gateway = Gateway(pool, GatewaySettings(TOKEN, **{"processes": PROCESSES.get(), **settings}))
        await gateway.start()
        stack.push_async_callback(gateway.stop, 0.0)
        timeout = aiohttp.ClientTimeout(total=50)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Front(pool, gateway, http)


def play(urls: Sequence[str], act: Callable[[Front], Awaitable[None]], **settings: Any) -> None:
    """One scene before engines that run already."""

    async def whole() -> None:
        async with front(urls, **settings) as scene:
            await act(scene)

    run(whole(), within_s=60 if PROCESSES.get() == settings.get("processes", 1) == 1 else 180)


def play_stubs(stubs: Sequence[Any], act: Callable[[Front], Awaitable[None]], **settings: Any) -> None:
    """One scene before scripted servers."""

    async def whole() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for stub in stubs:
                await stack.enter_async_context(stub.up())
            async with front([stub.url for stub in stubs], **settings) as scene:
                await act(scene)

    run(whole(), within_s=60 if PROCESSES.get() == settings.get("processes", 1) == 1 else 180)
