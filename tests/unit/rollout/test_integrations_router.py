"""The gateway in sglang-router's place, as slime and NeMo RL use one: they register engines, generate through it, send
weights to the engines themselves, abort there, and take engines out; with `requests` and a .netrc, as they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from engine_answers import run
from engine_scenes import expected
from engine_stubs import SglangStub
from rollout_scenes import DEADLINES, PROMPT, QUICK
from trimtab.integrations.following import following
from trimtab.model.rollout import Owner, Ownership
from trimtab.rollout import RolloutPool, RolloutRules
from trimtab.runtime.gateway.server import Gateway
from trimtab.runtime.gateway.settings import GatewaySettings

TOKEN = "a-token-for-tests"
THEIRS = Ownership(sleep=Owner.trainer, pause=Owner.trainer, refit=Owner.trainer, abort=Owner.trimtab)


@dataclass
class Trainer:
    """What such a trainer does, in threads of its own."""

    router: str
    engines: list[SglangStub]

    async def call(self, method: str, url: str, body: Any = None) -> Any:
        answer = await asyncio.to_thread(requests.request, method, url, json=body, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    async def register(self, engine: SglangStub) -> None:
        await self.call("POST", f"{self.router}/workers", {"url": engine.url, "worker_type": "regular"})
        for _ in range(100):
            if engine.url in [one["url"] for one in (await self.call("GET", f"{self.router}/workers"))["workers"]]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it was not listed in time")

    async def generate(self, tokens: int = 5) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 0.0}
        body = {"input_ids": list(PROMPT), "sampling_params": sampling, "return_logprob": True}
        answer: dict[str, Any] = await self.call("POST", f"{self.router}/generate", body)
        return answer

    async def send_weights(self, version: int) -> None:
        for one in self.engines:
            body = {"model_path": f"/weights/{version}", "weight_version": str(version)}
            await self.call("POST", f"{one.url}/update_weights_from_disk", body)


@asynccontextmanager
async def trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trainer]:
    netrc = folder / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login trimtab password {TOKEN}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    rules = RolloutRules(**{**vars(QUICK), "ownership": THEIRS})
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(SglangStub().up()) for _ in range(2)]
        pool = await stack.enter_async_context(RolloutPool(rules, look_s=0.05, deadlines=DEADLINES))
        await stack.enter_async_context(following(pool, poll_s=0.02))
        gateway = await stack.enter_async_context(Gateway(pool, GatewaySettings(TOKEN)))
        one = Trainer(gateway.url, engines)
        for engine in engines:
            await one.register(engine)
        yield one


def ids_of(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(answer["output_ids"])


def test_a_trainer_registers_generates_updates_weights_and_generates_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with trainer(tmp_path, monkeypatch) as slime:
            answers = await asyncio.gather(*(slime.generate() for _ in range(8)))
            assert {ids_of(one) for one in answers} == {expected(5)}
            for version in (1, 2, 3):
                await slime.send_weights(version)
                answers = await asyncio.gather(*(slime.generate() for _ in range(4)))
                assert {ids_of(one) for one in answers} == {expected(5, f"/weights/{version}")}
                assert all(one["meta_info"]["finish_reason"]["type"] == "length" for one in answers)
                assert all(len(one["meta_info"]["output_token_logprobs"]) == 5 for one in answers)

    run(story(), within_s=60)


def test_what_a_trainer_aborts_at_the_engines_comes_back_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with trainer(tmp_path, monkeypatch) as slime:
            asked = [asyncio.create_task(slime.generate(200)) for _ in range(4)]
            while sum(len(one.ids) > 3 for stub in slime.engines for one in stub.running.values()) < 4:
                await asyncio.sleep(0.01)
            for worker in (await slime.call("GET", f"{slime.router}/workers"))["workers"]:
                await slime.call("POST", f"{worker['url']}/abort_request", {"abort_all": True})
            for one in await asyncio.gather(*asked):
                assert one["meta_info"]["finish_reason"]["type"] == "abort"
                assert ids_of(one) == expected(200)[: len(ids_of(one))]
                assert 3 < len(ids_of(one)) < 200

    run(story(), within_s=60)


def test_an_engine_that_a_trainer_takes_out_gets_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with trainer(tmp_path, monkeypatch) as slime:
            workers = (await slime.call("GET", f"{slime.router}/workers"))["workers"]
            gone = next(one for one in workers if one["url"] == slime.engines[0].url)
            await slime.call("DELETE", f"{slime.router}/workers/{gone['id']}")
            answers = await asyncio.gather(*(slime.generate() for _ in range(8)))
            assert {ids_of(one) for one in answers} == {expected(5)}
            served = [sum(path == "/generate" for path, _ in stub.asked) for stub in slime.engines]
            assert served == [0, 8]

    run(story(), within_s=60)


def test_without_the_token_nothing_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with trainer(tmp_path, monkeypatch) as slime:
            monkeypatch.setenv("NETRC", str(tmp_path / "none"))
            with pytest.raises(requests.HTTPError, match="401"):
                await slime.register(slime.engines[0])

    run(story(), within_s=60)
