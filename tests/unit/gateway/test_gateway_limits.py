"""One client's share of a gateway: heads, bodies, prompts and samples are bounded, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from engine_stubs import VllmStub
from gateway_scenes import PROMPT, Front, play, play_stubs
from trimtab.runtime.gateway import fields
from trimtab.runtime.gateway.exchange import Refusal
from waiting import until_async

# ---- heads ---------------------------------------------------------------------------------------------------------


async def connected(front: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", front.gateway.port)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("begin", [b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET /"])
def test_a_head_without_end_is_refused_when_it_is_too_large(begin: bytes) -> None:
    async def act(front: Front) -> None:
        reader, writer = await connected(front)
        writer.write(begin + b"a" * 12_000)
        got = await asyncio.wait_for(reader.read(), 50)
        assert got.startswith(b"HTTP/1.1 431 "), got

        async def flood() -> None:
            while True:
                writer.write(b"a" * 65_536)
                await writer.drain()

        with pytest.raises(ConnectionError):  # the rest is not read
            await asyncio.wait_for(flood(), 50)
        writer.close()
        assert (await front.get("/health")).status == 200

    play([], act, max_head_bytes=8_192)


@pytest.mark.usefixtures("processes")
def test_a_head_that_is_too_large_is_refused_in_one_piece_too() -> None:
    async def act(front: Front) -> None:
        got = await front.get("/health", headers={"x": "a" * 6_000})
        assert got.status == 200
        reader, writer = await connected(front)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 9_000 + b"\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 50)).startswith(b"HTTP/1.1 431 ")
        writer.close()

    play([], act, max_head_bytes=8_192)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("part", [b"", b"\r\n", b"POST /gen", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX: a"])
def test_a_head_that_does_not_end_is_not_waited_for(part: bytes) -> None:
    async def act(front: Front) -> None:
        held = [await connected(front) for _ in range(20)]
        for _, writer in held:
            writer.write(part)
        for reader, writer in held:
            got = await asyncio.wait_for(reader.read(), 50)
            assert got[:12] in ((b"HTTP/1.1 408",) if part.strip() else (b"", b"HTTP/1.1 408")), got
            writer.close()

    play([], act, head_s=0.3)


@pytest.mark.usefixtures("processes")
def test_the_second_head_of_a_connection_has_a_deadline_too_and_an_answer_has_none() -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        reader, writer = await connected(front)
        body = json.dumps({"prompt": PROMPT, "max_tokens": 40}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        stub.goes.clear()
        writer.write(head.encode() + body)
        await until_async(lambda: front.running() == 1)
        await asyncio.sleep(2.5)  # longer than a head may take
        stub.goes.set()
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 50)
        assert first.startswith(b"HTTP/1.1 200 "), first
        size = next(int(line.split(b":")[1]) for line in first.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(size)
        writer.write(b"GET /health HTT")
        assert (await asyncio.wait_for(reader.read(), 50)).startswith(b"HTTP/1.1 408 ")
        writer.close()

    play_stubs([stub], act, head_s=2.0, model_name="tiny")


# ---- bodies --------------------------------------------------------------------------------------------------------


async def test_a_large_body_is_parsed_while_the_event_loop_does_other_things() -> None:
    ids, turns = list(range(400_000)), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    working = asyncio.create_task(others())
    try:
        body = json.dumps({"prompt": ids, "text": "\ud800 \u00e4"}).encode()
        assert len(body) > fields.LARGE_BODY_BYTES
        assert await fields.BodyParser().parsed(body) == {"prompt": ids, "text": "\ud800 \u00e4"}
        assert turns > 100
        large = b" " * fields.LARGE_BODY_BYTES
        for wrong in (b"{" + large, large + b"\xff", b"[" * fields.LARGE_BODY_BYTES, large + b"1" * 5_000):
            with pytest.raises(Refusal, match="no JSON"):
                await fields.BodyParser().parsed(wrong)
    finally:
        working.cancel()


@pytest.mark.parametrize("nested", [False, True])
def test_more_token_ids_than_a_call_may_have_are_refused(nested: bool) -> None:
    ids = b"[" + b"7," * fields.MAX_TOKEN_IDS + b"7]"
    prompt = b"[" + ids + b",[7]]" if nested else ids

    async def act(front: Front) -> None:
        got = await front.post("/v1/completions", data=io.BytesIO(b'{"prompt":' + prompt + b"}"))
        assert (got.status, got.json["error"]["param"]) == (400, "prompt"), got.text
        got = await front.post("/generate", data=io.BytesIO(b'{"input_ids":' + prompt + b"}"))
        assert (got.status, got.json["error"]["param"]) == (400, "input_ids"), got.text
        assert f"{fields.MAX_TOKEN_IDS}" in got.message

    play([], act, model_name="m")


@pytest.mark.usefixtures("processes")
def test_more_answers_than_a_call_may_have_are_refused() -> None:
    async def act(front: Front) -> None:
        got = await front.complete([PROMPT] * 1_000, n=9)
        assert (got.status, got.json["error"]["param"]) == (400, "n"), got.text
        got = await front.generate(input_ids=[PROMPT] * 1_000, sampling={"n": 9})
        assert (got.status, got.json["error"]["param"]) == (400, "sampling_params.n"), got.text

    play_stubs([VllmStub()], act, model_name="tiny")


# ---- one client's share --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_hundreds_of_prompts_does_not_keep_another_client_waiting_for_all_of_them(stream: bool) -> None:
    stub = VllmStub()

    def made() -> int:
        return len(stub.calls("/v1/completions"))

    async def act(front: Front) -> None:
        prompts = [[1 + one % 50, 2, 3] for one in range(150)]
        batch = asyncio.create_task(front.complete(prompts, tokens=2, n=2, stream=stream))
        await until_async(lambda: made() > 8)
        before = made()
        assert (await front.complete(tokens=2)).status == 200
        assert made() < before + 60
        assert not batch.done()
        got = await batch
        assert got.status == 200
        if stream:
            assert sum(one["finish_reason"] == "length" for n in range(300) for one in got.choices(n)) == 300
        else:
            choices = got.json["choices"]
            assert [one["index"] for one in choices] == list(range(300))
            alone = await front.complete([prompts[7]], tokens=2)
            assert {choices[14]["text"], choices[15]["text"]} == {alone.json["choices"][0]["text"]}
        await until_async(lambda: front.gateway.open == 0 and not front.pool._core.machine.requests())

    play_stubs([stub], act, limit=4, model_name="tiny")


@pytest.mark.usefixtures("processes")
def test_a_client_that_leaves_takes_along_what_was_not_asked_yet() -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        batch = asyncio.create_task(front.complete([PROMPT] * 200, tokens=500))
        await until_async(lambda: len(stub.running) >= 4)
        batch.cancel()
        await until_async(lambda: front.gateway.open == 0 and not front.pool._core.machine.requests())
        asked = len(stub.calls("/v1/completions"))
        assert (await front.complete(tokens=2)).status == 200
        assert len(stub.calls("/v1/completions")) == asked + 1

    play_stubs([stub], act, limit=4, model_name="tiny")


def test_a_stop_answers_a_call_whose_prompts_were_not_all_asked() -> None:
    async def act(front: Front) -> None:
        batch = asyncio.create_task(front.complete([PROMPT] * 200, tokens=500))
        await until_async(lambda: front.running() >= 4)
        await front.gateway.stop(0.1)
        assert (await batch).status == 503

    play_stubs([VllmStub()], act, limit=4, model_name="tiny")
