"""Several processes on one port, one pool behind them: what is lost with a process, and what is counted over all."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
import pytest

from engine_stubs import SglangStub, VllmStub
from gateway_scenes import BEARER, PROMPT, Answered, Front, play_stubs
from waiting import until_async


def kill_fronts(scene: Front) -> list[int]:
    """All processes that serve the port, without a word to them."""
    assert scene.gateway.fronts is not None
    pids = [front.pid for front in scene.gateway.fronts.all]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_a_key_outlives_the_process_that_took_it_and_is_answered_once(stream: bool) -> None:
    stub = SglangStub()
    stub.step_s = 0.2

    async def act(scene: Front) -> None:
        headers = {"idempotency-key": "one"}
        first = asyncio.create_task(scene.generate(8, headers=headers, stream=stream))
        await until_async(lambda: len(stub.running) == 1)
        kill_fronts(scene)
        with pytest.raises(aiohttp.ClientError):
            await first
        answer = await scene.generate(8, headers=headers, stream=stream)
        assert answer.status == 200
        ids = (answer.events[-2] if stream else answer.json)["output_ids"]
        assert len(ids) == 8
        third = await scene.generate(8, headers=headers)
        assert third.json["output_ids"] == ids
        assert len(stub.calls("/generate")) == 1, "it was generated once"

    play_stubs([stub], act, processes=2)


def test_one_process_killed_among_several_loses_no_request_that_has_a_key() -> None:
    stub = SglangStub()
    stub.step_s = 0.2

    async def act(scene: Front) -> None:
        def ask(key: str) -> asyncio.Task[Answered]:
            return asyncio.create_task(scene.generate(8, headers={"idempotency-key": key}))

        asked = {key: ask(key) for key in "abcdefghijkl"}
        await until_async(lambda: len(stub.running) == len(asked))
        assert scene.gateway.fronts is not None
        os.kill(next(front.pid for front in scene.gateway.fronts.all if front.calls), signal.SIGKILL)
        ends = dict(zip(asked, await asyncio.gather(*asked.values(), return_exceptions=True), strict=True))
        broken = [key for key, end in ends.items() if isinstance(end, BaseException)]
        assert broken
        ends |= {key: await ask(key) for key in broken}
        assert [len(end.json["output_ids"]) for end in ends.values() if isinstance(end, Answered)] == [8] * len(asked)
        assert len(stub.calls("/generate")) == len(asked), "each was generated once"

    play_stubs([stub], act, processes=3, limit=16)


def test_requests_without_a_key_end_with_the_process_that_took_them_and_another_is_started() -> None:
    stub = SglangStub()
    stub.step_s = 0.2

    async def act(scene: Front) -> None:
        asked = [asyncio.create_task(scene.generate(4_000)) for _ in range(4)]
        await until_async(lambda: len(stub.running) == 4)
        before = kill_fronts(scene)
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(end, aiohttp.ClientError) for end in ends), ends
        await until_async(lambda: not scene.pool._core.machine.requests() and scene.gateway.open == 0)
        await until_async(lambda: not stub.running)
        stub.step_s = 0.0
        assert (await scene.generate(4)).status == 200
        assert [front.pid for front in scene.gateway.fronts.all] != before  # type: ignore[union-attr]
        assert any("gateway front" in job["name"] for job in scene.pool.background.status())

    play_stubs([stub], act, processes=2)


def test_limits_and_counts_are_those_of_all_processes_together() -> None:
    stub = VllmStub()
    stub.step_s = 0.05

    async def act(scene: Front) -> None:
        body = {"prompt": PROMPT, "max_tokens": 2_000, "temperature": 0}
        held = [asyncio.create_task(scene.post("/v1/completions", body)) for _ in range(6)]
        await until_async(lambda: scene.gateway.open == 6)
        for _ in range(8):  # whichever process takes it
            refused = await scene.complete()
            assert (refused.status, refused.json["error"]["code"]) == (503, "too_many")
        answer = await scene.post("/abort_request", {"abort_all": True}, headers=BEARER)
        assert answer.json == {"aborted": 6}
        assert {one.json["choices"][0]["finish_reason"] for one in await asyncio.gather(*held)} == {"abort"}
        await until_async(lambda: scene.gateway.open == 0)
        page = (await scene.get("/metrics")).text
        assert 'http_answers_total{door="completions",status="200"} 6.0' in page
        assert 'http_answers_total{door="completions",status="503"} 8.0' in page

    play_stubs([stub], act, processes=3, max_concurrent=6, model_name="tiny")


def test_a_stream_through_a_front_process_goes_on_when_its_engine_is_lost() -> None:
    stubs = [SglangStub(), SglangStub()]
    for stub in stubs:
        stub.step_s = 0.02

    async def act(scene: Front) -> None:
        asked = asyncio.create_task(scene.generate(60, stream=True))
        await until_async(lambda: any(one.ids for stub in stubs for one in stub.running.values()))
        next(stub for stub in stubs if stub.running).die()
        answer = await asked
        last = answer.events[-2]
        assert len(last["output_ids"]) == 60
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 60}

    play_stubs(stubs, act, processes=2)


def test_a_client_that_leaves_a_front_process_ends_its_request() -> None:
    stub = SglangStub()
    stub.step_s = 0.05

    async def act(scene: Front) -> None:
        for stream in (False, True):
            asked = asyncio.create_task(scene.generate(4_000, stream=stream))
            await until_async(lambda: len(stub.running) == 1)
            asked.cancel()
            await until_async(lambda: not stub.running and not scene.pool._core.machine.requests())

    play_stubs([stub], act, processes=2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_the_pools_process_is_an_answer(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Front) -> None:
        def submit(*given: object, **more: object) -> None:
            raise ValueError("a surprise")

        with monkeypatch.context() as patched:
            patched.setattr(scene.pool, "submit", submit)
            answer = await scene.generate(4, stream=stream)
            assert (answer.status, answer.json["error"]["code"]) == (500, "fault")
        assert (await scene.generate(4, stream=stream)).status == 200
        assert scene.gateway.open == 0
        assert not scene.gateway.fronts.all[0].calls  # type: ignore[union-attr]

    play_stubs([SglangStub()], act, processes=2)


def test_several_prompts_with_several_samples_come_through_a_front_process() -> None:
    async def act(scene: Front) -> None:
        body = {"prompt": [PROMPT, [3, *PROMPT]], "n": 12, "max_tokens": 4, "temperature": 0}
        whole = await scene.post("/v1/completions", body)
        texts = [choice["text"] for choice in whole.json["choices"]]
        assert len(texts) == 24
        streamed = await scene.post("/v1/completions", {**body, "stream": True})
        parts: dict[int, str] = {}
        for event in streamed.events[:-1]:
            for choice in event["choices"]:
                parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
        assert [parts[index] for index in range(24)] == texts

    play_stubs([VllmStub()], act, processes=2, limit=4, model_name="tiny")


def test_a_stop_answers_what_is_open_and_leaves_no_process() -> None:
    stub = SglangStub()
    stub.step_s = 0.05

    async def act(scene: Front) -> None:
        asked = asyncio.create_task(scene.generate(4_000))
        await until_async(lambda: len(stub.running) == 1)
        pids = [front.pid for front in scene.gateway.fronts.all]  # type: ignore[union-attr]
        await scene.gateway.stop(0.1)
        answer = await asked
        assert (answer.status, answer.json["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    play_stubs([stub], act, processes=2)
