"""What a client of the gateway sees when something ends early: engines, itself, or the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from engine_answers import Whole, answer, greedy, prompts, run
from engine_scenes import expected
from engine_servers import LlamaServer, servers
from engine_stubs import SglangStub, VllmStub
from gateway_scenes import BEARER, PROMPT, QUICK, Front, front, play, play_stubs
from trimtab.model.rollout import WorkerState
from trimtab.runtime.engines.http_engine import open_session
from trimtab.runtime.engines.llamacpp import LlamaCppEngine
from trimtab.runtime.gateway.serving import CallInbox, GenerationCall, PoolCallRun
from trimtab.runtime.rollout.sampling import SamplingParams
from waiting import until_async

LONG = 300
STUB_PROMPT = (4, 5, 6)


def slow(*stubs: Any, step_s: float = 0.01) -> list[Any]:
    for stub in stubs:
        stub.step_s = step_s
    return list(stubs)


# ---- engines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LlamaServer]]:
    with servers(2, tmp_path_factory.mktemp("engines")) as started:
        yield started


async def sure_answer(url: str) -> tuple[tuple[int, ...], Whole]:
    """A prompt whose greedy answer no rounding could change, and that answer, from an engine that nobody disturbs."""
    async with open_session() as session:
        engine = LlamaCppEngine("reference", url, session)
        for number, prompt in enumerate(prompts(40, seed=5)):
            whole = await answer(engine, greedy(f"r{number}", prompt, LONG, min_tokens=LONG, logprobs=2))
            if whole.sure() == LONG and not whole.so_far.missing:
                await engine.close()
                return prompt, whole
    raise AssertionError("no prompt is sure")


def worker_with_work(scene: Front, engines: list[LlamaServer]) -> LlamaServer:
    busy = next(view.worker for view in scene.pool.workers() if view.running)
    return next(one for one in engines if one.url == scene.pool.url(busy))


def test_an_engine_killed_half_way_leaves_the_client_with_one_whole_answer(engines: list[LlamaServer]) -> None:
    async def whole() -> None:
        prompt, reference = await sure_answer(engines[0].url)
        body = {
            "prompt": list(prompt), "max_tokens": LONG, "min_tokens": LONG, "temperature": 0, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        async with front([one.url for one in engines]) as scene:
            async with scene.streaming("/v1/completions", body) as streamed:
                first = await streamed.content.readuntil(b"\n\n")
                while b'"token_ids"' not in first.rpartition(b"data: ")[2].replace(b"prompt_token_ids", b""):
                    first += await streamed.content.readuntil(b"\n\n")
                worker_with_work(scene, engines).kill()
                said = (first + await streamed.read()).decode()
            events = [one.removeprefix("data: ") for one in said.split("\n\n") if one]
            assert events[-1] == "[DONE]"
            choices = [json.loads(one)["choices"][0] for one in events[:-1]]
            assert tuple(one for choice in choices for one in choice.get("token_ids", [])) == reference.ids
            assert "".join(choice["text"] for choice in choices) == reference.so_far.text
            assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
            page = (await scene.get("/metrics")).text
            assert "trimtab_rollout_moves_total 1.0" in page

    run(whole(), within_s=60)


def test_an_answer_in_one_piece_says_that_it_moved_and_reads_as_if_it_had_not(engines: list[LlamaServer]) -> None:
    async def whole() -> None:
        prompt, reference = await sure_answer(engines[0].url)
        async with front([one.url for one in engines]) as scene:
            asked = asyncio.create_task(
                scene.complete(list(prompt), LONG, min_tokens=LONG, return_token_ids=True, stop="\x7f")
            )
            await until_async(lambda: any(one.tokens for one in scene.pool._core.machine.requests()) or asked.done())
            worker_with_work(scene, engines).kill()
            got = await asked
            assert got.headers["x-trimtab-moves"] == "1"
            assert len(got.headers["x-trimtab-workers"].split(",")) == 2
            [choice] = got.json["choices"]
            assert tuple(choice["token_ids"]) == reference.ids
            assert choice["text"] == reference.so_far.text

    run(whole(), within_s=60)


def test_a_seeded_stream_is_held_until_it_is_whole_because_it_may_begin_again() -> None:
    stubs = slow(VllmStub(), VllmStub())

    async def act(scene: Front) -> None:
        body = {"prompt": STUB_PROMPT, "max_tokens": 40, "temperature": 1.0, "seed": 3, "stream": True,
                "return_token_ids": True}  # fmt: skip
        asked = asyncio.create_task(scene.post("/v1/completions", body))
        await until_async(lambda: any(len(one.ids) > 5 for stub in stubs for one in stub.running.values()))
        next(stub for stub in stubs if stub.running).die()
        got = await asked
        told = [one for choice in got.choices() for one in choice.get("token_ids", [])]
        assert tuple(told) == expected(40), "each token once"
        assert got.events[-1] == "[DONE]"

    play_stubs(stubs, act, model_name="tiny")


def test_an_abort_that_others_asked_for_is_passed_on_with_its_tokens() -> None:
    stub = SglangStub()
    slow(stub)

    async def act(scene: Front) -> None:
        asked = asyncio.create_task(scene.generate(2000))
        streamed = asyncio.create_task(scene.complete(tokens=2000, stream=True))
        await until_async(lambda: len(stub.running) == 2 and all(len(one.ids) > 3 for one in stub.running.values()))
        stub.abort(None)
        got = (await asked).json
        assert got["meta_info"]["finish_reason"]["type"] == "abort"
        assert "status_code" not in got["meta_info"]["finish_reason"]
        assert 3 < len(got["output_ids"]) < 2000
        assert [one["finish_reason"] for one in (await streamed).choices() if one["finish_reason"]] == ["abort"]

    play_stubs([stub], act, model_name="tiny")


def test_what_an_engine_refuses_is_the_clients_to_know_in_each_dialect() -> None:
    stub = VllmStub()

    async def act(scene: Front) -> None:
        for stream in (False, True):
            stub.fault = "refuse"
            got = await scene.complete(stream=stream)
            assert (got.status, got.json["error"]["code"]) == (400, "REFUSED"), got.text
            assert "too many tokens" in got.message
        stub.fault = "refuse"
        assert (await scene.generate()).status == 400

    play_stubs([stub], act, model_name="tiny")


def test_one_sample_that_fails_beside_others_is_told_apart() -> None:
    stub = SglangStub()

    async def act(scene: Front) -> None:
        stub.fault = "refuse"  # the first that arrives
        got = await scene.complete(n=2)
        assert got.status == 200, got.text
        ends = sorted(one["finish_reason"] for one in got.json["choices"])
        assert ends == ["error", "length"]
        failed = next(one for one in got.json["choices"] if one["finish_reason"] == "error")
        assert failed["trimtab"]["reason"]["code"] == "REFUSED"
        stub.fault = "refuse"
        pair = (await scene.generate(sampling={"n": 2})).json
        broken = next(one["meta_info"] for one in pair if one["meta_info"]["finish_reason"]["type"] == "abort")
        assert broken["finish_reason"]["status_code"] == 400

    play_stubs([stub], act, model_name="tiny")


def test_an_engine_that_always_breaks_is_an_error_with_its_reason() -> None:
    stub = VllmStub()

    async def act(scene: Front) -> None:
        stub.refuse["/v1/completions"] = (500, {"error": {"message": "out of memory"}})
        got = await scene.complete(headers={"x-trimtab-deadline-s": "1"})
        assert got.status in (502, 504), got.text
        assert got.json["error"]["type"] == "server_error"
        assert got.json["error"]["code"] in ("RETRIES_USED", "TOO_LATE")

    play_stubs([stub], act, model_name="tiny")


def test_a_deadline_that_passes_half_way_is_an_error_and_ends_a_stream_in_order() -> None:
    stub = SglangStub()
    slow(stub)

    async def act(scene: Front) -> None:
        heads = {"x-trimtab-deadline-s": "0.4"}
        whole, streamed, told = await asyncio.gather(
            scene.complete(tokens=5000, headers=heads),
            scene.complete(tokens=5000, stream=True, headers=heads),
            scene.generate(5000, stream=True, headers=heads),
        )
        assert (whole.status, whole.json["error"]["code"]) == (504, "TOO_LATE")
        assert streamed.status == 200
        assert streamed.events[-1] == "[DONE]"
        [last] = [one for one in streamed.choices() if one["finish_reason"]]
        assert (last["finish_reason"], last["trimtab"]["reason"]["code"]) == ("error", "TOO_LATE")
        finish = told.events[-2]["meta_info"]["finish_reason"]
        assert (finish["type"], finish["status_code"]) == ("abort", 504)
        await until_async(lambda: not stub.running)

    play_stubs([stub], act, model_name="tiny")


# ---- clients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_client_that_leaves_has_its_request_cancelled_on_the_engine(path: str, stream: bool) -> None:
    stub = VllmStub()
    slow(stub)

    async def act(scene: Front) -> None:
        sampling: dict[str, Any] = {"max_new_tokens": 5000, "temperature": 0, "n": 2}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream}
        if path != "/generate":
            body = {"prompt": [PROMPT, PROMPT], "max_tokens": 5000, "temperature": 0, "stream": stream}
        asked = asyncio.create_task(scene.post(path, body))
        await until_async(lambda: len(stub.running) == 2)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until_async(lambda: not stub.running and scene.gateway.open == 0)
        assert not scene.pool._core.machine.requests()
        await until_async(lambda: scene.running() == 0)
        page = (await scene.get("/metrics")).text
        assert 'status="499"} 1.0' in page

    play_stubs([stub], act, model_name="tiny")


@pytest.mark.usefixtures("processes")
def test_a_client_that_reads_nothing_counts_as_gone() -> None:
    stub = SglangStub()
    slow(stub, step_s=0.0)

    async def act(scene: Front) -> None:
        assert scene.gateway._socket is not None
        # Small buffers, which those that are accepted inherit: they are full sooner.
        scene.gateway._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", scene.gateway.port))
        sampling = {"max_new_tokens": 20_000, "temperature": 0}
        body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        try:
            await asyncio.to_thread(raw.sendall, head + body)
            await until_async(lambda: scene.gateway.open == 1)
            await until_async(lambda: scene.gateway.open == 0)
            await until_async(lambda: not stub.running)
        finally:
            raw.close()

    play_stubs([stub], act, write_s=0.2, model_name="tiny")


def test_one_prompt_that_is_refused_ends_the_others_of_its_call() -> None:
    stub = VllmStub()
    slow(stub)

    async def act(scene: Front) -> None:
        call = GenerationCall([(1,), ()], [SamplingParams(max_tokens=2000)] * 2)
        with pytest.raises(Exception, match="no tokens"):
            PoolCallRun(scene.pool, call, 16, CallInbox())
        assert not scene.pool._core.machine.requests()

    play_stubs([stub], act, model_name="tiny")


# ---- the gateway's own end -----------------------------------------------------------------------------------------


def test_a_stop_lets_what_runs_finish_and_refuses_what_is_new() -> None:
    stub = VllmStub()
    slow(stub)

    async def act(scene: Front) -> None:
        asked = asyncio.create_task(scene.complete(tokens=60, stream=True))
        whole = asyncio.create_task(scene.complete(tokens=60))
        await until_async(lambda: len(stub.running) == 2)
        url = scene.gateway.url
        stopping = asyncio.create_task(scene.gateway.stop(30))
        await until_async(lambda: scene.gateway.app.serving.stopping)
        async with aiohttp.ClientSession() as other, other.post(url + "/generate", json={}) as late:
            assert late.status == 503
            assert late.headers["connection"] == "close"
            assert (await late.json())["error"]["code"] == "stopping"
        async with aiohttp.ClientSession() as other, other.get(url + "/ready") as late:
            assert late.status == 503
        assert len((await whole).json["choices"][0]["text"]) == 60
        assert "".join(one["text"] for one in (await asked).choices()) == (await whole).json["choices"][0]["text"]
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await scene.http.get(url + "/health")

    play_stubs([stub], act, model_name="tiny")


def test_past_its_deadline_a_stop_answers_with_what_there_is() -> None:
    stub = VllmStub()
    slow(stub)

    async def act(scene: Front) -> None:
        whole = asyncio.create_task(scene.complete(tokens=5000, return_token_ids=True))
        stream = asyncio.create_task(scene.complete(tokens=5000, stream=True, n=2))
        generate = asyncio.create_task(scene.generate(5000, stream=True))
        await until_async(lambda: len(stub.running) == 4 and all(len(one.ids) > 3 for one in stub.running.values()))
        await scene.gateway.stop(0.05)
        [choice] = (await whole).json["choices"]
        assert choice["finish_reason"] == "abort"
        assert 3 < len(choice["token_ids"]) < 5000
        assert choice["trimtab"]["reason"]["code"] == "CANCELLED"
        streamed = await stream
        assert streamed.events[-1] == "[DONE]"
        for index in (0, 1):
            assert [one["finish_reason"] for one in streamed.choices(index) if one["finish_reason"]] == ["abort"]
        events = (await generate).events
        assert events[-1] == "[DONE]"
        assert events[-2]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(events[-2]["output_ids"]) > 3
        await until_async(lambda: not stub.running)

    play_stubs([stub], act, model_name="tiny", rules=replace(QUICK, resume_every=1))


def test_a_stopped_gateway_can_be_started_again(engines: list[LlamaServer]) -> None:
    async def act(scene: Front) -> None:
        await scene.gateway.stop()
        await scene.gateway.stop()
        await scene.gateway.start()
        assert (await scene.complete()).status == 200

    play([engines[0].url], act)


def test_a_removed_worker_finishes_what_it_has() -> None:
    stubs = slow(VllmStub(), VllmStub())

    async def act(scene: Front) -> None:
        heads = {"authorization": "Bearer a-token-of-the-tests"}
        asked = asyncio.create_task(scene.complete(tokens=60))
        await until_async(lambda: any(stub.running for stub in stubs))
        busy = next(view.worker for view in scene.pool.workers() if view.running)
        got = await scene.ask("DELETE", f"/workers/{busy}?deadline_s=20", headers=heads)
        assert got.status == 202
        assert scene.state(busy) is WorkerState.draining
        whole = await asked
        assert len(whole.json["choices"][0]["text"]) == 60
        assert whole.headers["x-trimtab-moves"] == "0"
        await until_async(lambda: scene.state(busy) is None)

    play_stubs(stubs, act, model_name="tiny")


def test_hundreds_of_clients_at_once_are_all_answered() -> None:
    stub = VllmStub()

    async def act(scene: Front) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as many:

            async def one(number: int) -> str:
                body = {"prompt": STUB_PROMPT, "max_tokens": 4, "temperature": 0, "stream": number % 2 == 0}
                async with many.post(scene.gateway.url + "/v1/completions", json=body) as got:
                    assert got.status == 200
                    return await got.text()

            texts = await asyncio.gather(*(one(number) for number in range(300)))
        assert all(text.endswith("[DONE]\n\n") for text in texts[::2])
        assert len({json.loads(text)["choices"][0]["text"] for text in texts[1::2]}) == 1
        assert scene.gateway.open == 0

    play_stubs([stub], act, limit=64, model_name="tiny")


# ---- as slime asks: hundreds at once, then an abort ----------------------------------------------------------------


def test_a_worker_that_joins_has_as_many_requests_at_once_as_its_engine_runs() -> None:
    stub = SglangStub()
    stub.running_limit = 512

    async def act(scene: Front) -> None:
        joined = await scene.post("/workers", {"url": stub.url}, headers=BEARER)
        assert joined.status == 202, joined.text
        assert [one["limit"] for one in (await scene.get("/workers")).json["workers"]] == [512]
        told = await scene.post("/workers", {"url": stub.url, "limit": 8}, headers=BEARER)
        assert told.json["worker_id"] == joined.json["worker_id"]

    async def whole() -> None:
        async with stub.up(), front([]) as scene:
            await act(scene)

    run(whole(), within_s=60)


@pytest.mark.parametrize("running", [600, 16])
def test_an_abort_of_all_at_the_engine_ends_512_requests_that_run_there_or_wait_here(running: int) -> None:
    stub = SglangStub()
    stub.running_limit, stub.step_s = running, 1.0

    async def act(scene: Front) -> None:
        await scene.post("/workers", {"url": stub.url}, headers=BEARER)
        asked = [asyncio.create_task(scene.generate(4_000)) for _ in range(512)]
        await until_async(lambda: len(stub.running) == min(512, running) and scene.known() == 512, 40)
        async with aiohttp.ClientSession() as trainer:
            await trainer.post(stub.url + "/abort_request", json={"abort_all": True})
        ends = {(one.status, one.json["meta_info"]["finish_reason"]["type"]) for one in await asyncio.gather(*asked)}
        assert ends == {(200, "abort")}
        assert sum(path == "/generate" for path, _ in stub.asked) == min(512, running)

    async def whole() -> None:
        async with stub.up(), front([]) as scene:
            scene.http._connector._limit = 0  # type: ignore[union-attr]
            await act(scene)

    run(whole(), within_s=60)


def test_an_abort_at_the_gateway_ends_what_runs_and_what_waits() -> None:
    stub = SglangStub()
    stub.step_s = 0.5

    async def act(scene: Front) -> None:
        asked = [asyncio.create_task(scene.generate(4_000)) for _ in range(6)]
        await until_async(lambda: scene.running() == 2 and scene.known() == 6, 40)
        assert (await scene.post("/abort_request", {"abort_all": True})).status == 401
        assert (await scene.post("/abort_request", {"rid": "x"}, headers=BEARER)).status == 400
        answer = await scene.post("/abort_request", {"abort_all": True}, headers=BEARER)
        assert answer.json == {"aborted": 6}
        ends = {(one.status, one.json["meta_info"]["finish_reason"]["type"]) for one in await asyncio.gather(*asked)}
        assert ends == {(200, "abort")}

    play_stubs([stub], act, limit=2)


def test_one_model_is_shown_by_its_id() -> None:
    async def act(scene: Front) -> None:
        assert (await scene.get("/v1/models/tiny")).json["id"] == "tiny"
        assert (await scene.get("/v1/models/other")).status == 404

    play_stubs([VllmStub()], act)
