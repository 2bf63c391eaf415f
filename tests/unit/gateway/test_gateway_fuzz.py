"""Whatever a client sends, the gateway answers with a status of its own: never a 500, never silence."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from engine_stubs import SglangStub, VllmStub
from gateway_scenes import TOKEN, Front, play_stubs
from trimtab.runtime.gateway import fields as extras
from trimtab.runtime.gateway import openai, sglang
from waiting import until_async

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/generate", "/workers", "/scale", "/workers/x/drain", "/workers/x",
    "/story/%00%ff", "/add_worker?url=http://[", "/remove_worker?url=%ff", "/workers/%2e%2e?deadline_s=1e999",
    "/status",
)  # fmt: skip
HEADERS = (
    b"x-trimtab-class", b"x-trimtab-group", b"x-trimtab-session", b"x-trimtab-version", b"x-trimtab-at-least",
    b"x-trimtab-spans",
    b"x-trimtab-deadline-s", b"x-trimtab-details", b"x-trimtab-nothing", b"idempotency-key", b"origin", b"host",
    b"authorization", b"content-type", b"accept-encoding", b"expect",
)  # fmt: skip
VALUES = (
    b"", b"0", b"1", b"-1", b"\xb2", b"\xd9\xa1", b"9" * 400, b"1e999", b"nan", b"http://[", b"http://localhost",
    b"[::1]", b"localhost:99999999", b"Basic \xff", b"Basic OnRva2Vu", b"Bearer ", b"\xff\xfe", b"k", b"true",
    b"a" * 300, b"100-continue",
)  # fmt: skip
NAMES = (*openai.CHAT, *openai.COMPLETIONS, *sglang.KNOWN, *extras.NEUTRAL, *sorted(extras.KNOWN["vllm"]), "url",
         "name", "limit", "workers", "for_s", "why", "deadline_s", "nothing")  # fmt: skip
NUMBERS = ("temperature", "top_p", "top_k", "n", "max_tokens", "min_tokens", "seed", "logprobs", "stop", "stream")
AT_ONCE = 8
SAMPLING = (*sglang.SAMPLING, *extras.NEUTRAL, "regex", "nothing")
LEAVES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, float("inf"), float("nan"), "",
    "a", "\ud800", "\u0000", "http://127.0.0.1:1", "http://[", "stop", "x" * 400, [], {}, [1], [[1]], [1, [2]],
)  # fmt: skip
BODIES = (b"", b"{", b"[]", b"null", b"\xff", b"[" * 3_000, b'{"a":' * 3_000, b'{"prompt": [1' + b"1" * 5_000 + b"]}")


def value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if kind < 0.75 or depth == 3:
        return chance.choice(LEAVES)
    if kind < 0.87:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(("role", "content", "n", "type", "a")): value(chance, depth + 1) for _ in range(2)}


def body(chance: random.Random) -> bytes:
    if chance.random() < 0.1:
        return chance.choice(BODIES)
    base: dict[str, Any] = chance.choice((
        {"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "tools": [{"function": {"name": "f"}}]},
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}, "image_data": "x"},
        {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}, {"url": "http://127.0.0.1:1"}, {"workers": 1},
    ))  # fmt: skip
    base = {**base, "max_tokens": 2} if "prompt" in base or "messages" in base else dict(base)
    for _ in range(chance.randrange(4)):
        base[chance.choice(NAMES if chance.random() < 0.5 else NUMBERS)] = value(chance)
    if chance.random() < 0.4:
        base["sampling_params"] = {chance.choice(SAMPLING): value(chance) for _ in range(chance.randrange(4))}
    return json.dumps(base).encode()


def request(chance: random.Random) -> bytes:
    given = body(chance)
    method = b"POST" if chance.random() < 0.9 else chance.choice((b"GET", b"DELETE", b"PUT", b"OPTIONS", b"HEAD"))
    heads = [(b"host", b"localhost"), (b"authorization", f"Bearer {TOKEN}".encode())]
    heads += [(chance.choice(HEADERS), chance.choice(VALUES)) for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 8)))]
    heads += [(b"content-length", str(len(given)).encode()), (b"connection", b"close")]
    lines = b"".join(name + b": " + what + b"\r\n" for name, what in heads)
    return method + b" " + chance.choice(PATHS).encode() + b" HTTP/1.1\r\n" + lines + b"\r\n" + given


async def asked(front: Front, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        writer.close()


def storm(seed: int, requests: int) -> None:
    chance = random.Random(seed)

    async def act(front: Front) -> None:
        counts: dict[bytes, int] = {}

        async def one(sent: bytes) -> None:
            got = await asked(front, sent)
            if got.startswith(b"HTTP/1.1 100"):
                got = got.partition(b"\r\n\r\n")[2]
            status = got[9:12]
            counts[status] = counts.get(status, 0) + 1
            assert status.isdigit(), (sent, got)
            assert status != b"500", (sent, got)

        for _ in range(requests // AT_ONCE):
            await asyncio.wait_for(asyncio.gather(*(one(request(chance)) for _ in range(AT_ONCE))), 50)
        await until_async(lambda: front.gateway.open == 0)
        assert (await front.complete()).status == 200, "and it serves as before"
        assert {b"200", b"400"} <= counts.keys(), counts

    play_stubs([chance.choice((VllmStub, SglangStub))()], act, model_name="tiny", change_s=5.0, deadline_s=2.0)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_header_and_no_body_is_answered_with_a_500(seed: int) -> None:
    storm(seed, 400)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 30))
def test_many_more_headers_and_bodies_are_not_answered_with_a_500(seed: int) -> None:
    storm(seed, 1_000)
