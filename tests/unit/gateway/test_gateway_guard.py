"""Who the gateway lets in, what it refuses and how: one test for each rule and each bad input."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_stubs import VllmStub
from gateway_scenes import BEARER, PROMPT, QUICK, TOKEN, Answered, Front, play, play_stubs
from trimtab.core.errors import InputError
from trimtab.model.rollout import RequestClass, RolloutRules
from trimtab.runtime.gateway import fields as extras
from trimtab.runtime.gateway import openai, sglang
from trimtab.runtime.gateway.exchange import Refusal
from trimtab.runtime.gateway.fields import DEFAULT_TERMS
from trimtab.runtime.gateway.guard import AllowedHosts, GatewayGuard
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.gateway.tokenizing import PoolTokenizer
from trimtab.runtime.http.listening import host_name
from waiting import until_async

NOT_LOOPBACK = ("[::1].evil.example", "[::1]x", "localhost:x.evil.example", "127.0.0.1:80.evil.example")
CHANGES = [
    ("POST", "/workers"), ("POST", "/add_worker?url=http://127.0.0.1:1"), ("POST", "/remove_worker?url=x"),
    ("DELETE", "/workers/x"), ("POST", "/workers/x/drain"), ("POST", "/workers/x/resume"), ("POST", "/scale"),
    ("DELETE", "/scale"),
]  # fmt: skip


# ---- the token -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
def test_whatever_changes_something_needs_the_token_on_loopback_too() -> None:
    async def act(front: Front) -> None:
        for heads in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "Basic !"}):
            for method, path in CHANGES:
                got = await front.ask(method, path, {"workers": 1, "url": "http://127.0.0.1:1"}, headers=heads)
                assert (got.status, got.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
                assert TOKEN not in got.text
        assert front.pool.workers() == ()
        assert (await front.get("/status")).json["scaling"]["by_hand"] is None
        assert (await front.post("/scale", {"workers": 1}, headers=BEARER)).status == 200

    play([], act)


def test_the_token_may_be_the_password_of_basic_authentication() -> None:
    async def act(front: Front) -> None:
        for user in ("", "anybody"):
            basic = base64.b64encode(f"{user}:{TOKEN}".encode()).decode()
            got = await front.post("/scale", {"workers": 1}, headers={"authorization": f"Basic {basic}"})
            assert got.status == 200, got.text

    play([], act)


@pytest.mark.usefixtures("processes")
def test_asking_is_open_on_loopback_and_needs_the_token_elsewhere() -> None:
    async def act(front: Front) -> None:
        for path in ("/status", "/metrics", "/workers", "/v1/models", "/story/x"):
            assert (await front.get(path)).status == 401, path
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            assert (await front.post(path, {})).status == 401, path
            assert (await front.post(path, {}, headers=BEARER)).status == 400, path
        assert (await front.get("/status", headers=BEARER)).status == 200
        assert (await front.get("/health")).status == 200
        assert (await front.get("/ready")).status == 503

    play([], act, open_requests=False, model_name="m")
    assert GatewaySettings(TOKEN).allows_anonymous
    assert not GatewaySettings(TOKEN, host="0.0.0.0").allows_anonymous
    assert GatewaySettings(TOKEN, host="0.0.0.0", open_requests=True).allows_anonymous


@pytest.mark.parametrize("token", ["", "short", "a token with spaces in it", "ünïcödë-tökën-0123456789"])
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(InputError, match="token"):
        GatewaySettings(token)


def test_the_token_is_not_in_the_settings_as_they_are_printed() -> None:
    assert TOKEN not in repr(GatewaySettings(TOKEN))


@pytest.mark.parametrize("wrong", [
    {"port": -1}, {"port": 70_000}, {"max_body_bytes": 0}, {"max_concurrent": 0}, {"body_s": 0}, {"write_s": -1},
    {"deadline_s": float("nan")}, {"default_max_tokens": 0}, {"vocabulary": 0},
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        GatewaySettings(TOKEN, **wrong)


# ---- Host and Origin -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
def test_a_host_that_is_another_machine_is_refused_everywhere() -> None:
    async def act(front: Front) -> None:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:1", *NOT_LOOPBACK):
            for method, path in (("GET", "/health"), ("POST", "/generate"), ("POST", "/workers")):
                got = await front.ask(method, path, {}, headers={"host": host, **BEARER})
                assert (got.status, got.json["error"]["code"]) == (421, "wrong_host"), (host, path)
        for host in ("localhost", "LOCALHOST:1234", "[::1]:80", "127.0.0.1", "rollout.lan:8000"):
            assert (await front.get("/health", headers={"host": host})).status == 200, host

    play([], act, allowed_hosts=("rollout.lan",))


def test_beyond_loopback_an_address_in_numbers_is_as_good_as_a_name() -> None:
    guard = GatewayGuard(GatewaySettings(TOKEN, host="0.0.0.0", allowed_hosts=("head.lan",)))
    for host in (b"10.0.0.5:8268", b"[fd00::5]:8268", b"head.lan", b"localhost:1"):
        guard.check_host({b"host": host})
    for host in (b"evil.example", b"10.0.0.5.evil.example:8268", b"0.0.0.0.evil.example", b""):
        with pytest.raises(Refusal, match="not served here"):
            guard.check_host({b"host": host})


@pytest.mark.usefixtures("processes")
def test_a_page_of_another_origin_may_not_ask() -> None:
    async def act(front: Front) -> None:
        got = await front.post("/generate", {}, headers={"origin": "https://evil.example"})
        assert (got.status, got.json["error"]["code"]) == (403, "wrong_origin")
        assert (await front.get("/health", headers={"origin": "null"})).status == 403
        assert (await front.get("/health", headers={"origin": "http://localhost:3000"})).status == 200

    play([], act)


def test_an_origin_that_only_begins_like_loopback_is_refused() -> None:
    guard = GatewayGuard(GatewaySettings(TOKEN))
    for origin in (
        *(f"http://{host}" for host in NOT_LOOPBACK),
        "http://localhost@evil.example",
        "http://[",
        "http://::1",
    ):
        with pytest.raises(Refusal):
            guard.check_host({b"host": b"localhost", b"origin": origin.encode("latin-1")})
    for origin in (b"http://localhost", b"https://LOCALHOST:3000", b"http://[::1]:80"):
        guard.check_host({b"host": b"localhost", b"origin": origin})


def test_names_in_host_headers_are_read_without_their_ports() -> None:
    assert [host_name(one) for one in ("A:1", "a", "[::1]:8", "[::1]", "")] == ["a", "a", "::1", "::1", ""]
    assert [host_name(one) for one in (*NOT_LOOPBACK, "a:", "a:1:2", "a b", "[::1", "a:\u00b2")] == [""] * 9


def test_what_cannot_be_read_in_a_header_is_a_400_that_names_it() -> None:
    async def act(front: Front) -> None:
        origin = await front.post("/generate", {}, headers={"origin": "http://["})
        assert (origin.status, origin.json["error"]["param"]) == (400, "origin")
        body = json.dumps({"prompt": PROMPT}).encode()
        for value in (b"\xb2", b"1" * 30):
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-trimtab-version: " + value
            )
            got = await raw(front, head + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            assert got.startswith(b"HTTP/1.1 400 "), got
            assert b"x-trimtab-version" in got

    play([], act, model_name="m")


def test_a_number_beyond_any_range_is_a_400_that_names_its_field() -> None:
    async def act(front: Front) -> None:
        huge = 10**400
        for name in ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "n", "seed", "logprobs", "min_p"):
            got = await front.post("/v1/completions", {"prompt": PROMPT, name: huge})
            assert (got.status, got.json["error"]["param"]) == (400, name), got.text
            assert len(got.message) < 300
        for name in ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "n", "sampling_seed"):
            got = await front.generate(sampling={name: huge})
            assert (got.status, got.json["error"]["param"]) == (400, f"sampling_params.{name}"), got.text
        for name in ("workers", "for_s"):
            got = await front.post("/scale", {"workers": 1, name: huge}, headers=BEARER)
            assert (got.status, got.json["error"]["param"]) == (400, name), got.text

    play_stubs([VllmStub()], act, model_name="tiny")


def test_fields_of_engines_are_bounded() -> None:
    def passed(name: str, value: Any) -> dict[str, Any]:
        return extras.engine_extras({name: value}, {"llamacpp"}, (), "sampling_params.")

    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    for name, value in (
        ("repeat_last_n", 2**31 - 1), ("dry_penalty_last_n", -(2**31)), ("min_p", float("nan")), ("min_p", 10**400),
        ("grammar", "a" * 300_000), ("logit_bias", {str(one): 1 for one in range(100_000)}), ("json_schema", nested),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=f"sampling_params.{name}"):
            passed(name, value)
    for name, value in (("repeat_last_n", 4096), ("min_p", 0.05), ("grammar", 'root ::= "a"'), ("cache_prompt", False)):
        assert passed(name, value) == {name: value}


async def raw(front: Front, request: bytes) -> bytes:
    """The answer to bytes that no library would send; the request closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 50)
    finally:
        writer.close()


# ---- hosts of workers ----------------------------------------------------------------------------------------------


def test_a_worker_on_a_host_that_is_not_allowed_is_not_taken() -> None:
    async def act(front: Front) -> None:
        for url in ("http://10.0.0.9:8000", "http://evil.example:80", "http://127.0.0.1.evil.example"):
            got = await front.post("/workers", {"url": url}, headers=BEARER)
            assert (got.status, got.json["error"]["param"]) == (403, "url"), url
        for url in (
            "",
            "file:///etc/passwd",
            "127.0.0.1:80",
            "http://u:p@127.0.0.1:1",
            "http://127.0.0.1:1/?q",
            7,
            None,
        ):
            got = await front.post("/workers", {"url": url}, headers=BEARER)
            assert (got.status, got.json["error"]["param"]) == (400, "url"), url
        assert front.pool.workers() == ()

    play([], act)


def test_places_are_names_suffixes_addresses_and_networks() -> None:
    places = AllowedHosts(("node1", "*.cluster.local", "10.0.0.0/8", "fd00::/8"))
    for host in ("node1", "NODE1", "a.cluster.local", "10.1.2.3", "fd00::1"):
        assert host in places, host
    for host in ("node2", "cluster.local.evil", "11.0.0.1", "fe80::1", "10.evil", ""):
        assert host not in places, host
    assert "anything" in AllowedHosts(("*",))
    for wrong in ("10.0.0.0/99", ""):
        with pytest.raises(InputError, match="worker_hosts"):
            AllowedHosts((wrong,))


def test_a_worker_that_is_not_there_or_of_another_type_is_said_to_be() -> None:
    async def act(front: Front) -> None:
        got = await front.post("/workers", {"url": "http://127.0.0.1:1"}, headers=BEARER)
        assert got.status == 503, got.text
        for wrong in ({"worker_type": "prefill"}, {"priority": 3}, {"limit": 0}, {"size": "2"}, {"name": "a\nb"}):
            got = await front.post("/workers", {"url": "http://127.0.0.1:1", **wrong}, headers=BEARER)
            assert (got.status, got.json["error"]["param"]) == (400, next(iter(wrong)))
        for method, path in (("DELETE", "/workers/x"), ("POST", "/workers/x/drain"), ("POST", "/remove_worker?url=x")):
            assert (await front.ask(method, path, {}, headers=BEARER)).status == 404, path
        wrong_query = await front.ask("DELETE", "/workers/x?deadlin_s=3", headers=BEARER)
        assert (wrong_query.status, wrong_query.json["error"]["param"]) == (400, "deadlin_s")
        for body in ({}, {"workers": -1}, {"workers": "two"}, {"workers": 1, "for_s": -1}, {"workers": 1, "more": 1}):
            assert (await front.post("/scale", body, headers=BEARER)).status == 400, body

    play([], act)


def test_an_engine_joins_once_under_whatever_name_its_host_is_called() -> None:
    async def act(front: Front) -> None:
        [there] = front.pool.workers()
        port = front.pool.url(there.worker).rpartition(":")[2]
        for url in (f"http://localhost:{port}", f"http://LOCALHOST:{port}/", f"http://127.0.0.1:{port}"):
            got = await front.post("/workers", {"url": url}, headers=BEARER)
            assert (got.status, got.json["worker_id"]) == (202, there.worker), got.text
        with pytest.raises(InputError, match=there.worker):
            await front.pool.attach(f"http://localhost:{port}")
        assert len(front.pool.workers()) == 1

    play_stubs([VllmStub()], act, model_name="tiny")


# ---- bodies --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    async def act(front: Front) -> None:
        async def endless() -> Any:
            for _ in range(64):
                yield b" " * 1024

        large = await front.complete(list(range(1000)))
        assert (large.status, large.json["error"]["code"]) == (413, "too_large")
        assert "2048" in large.message
        chunked = await front.post("/generate", headers={}, data=endless())
        assert chunked.status == 413

    play([], act, max_body_bytes=2048, model_name="m")


@pytest.mark.usefixtures("processes")
def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def act(front: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readline(), 20)
        assert b"408" in head
        writer.close()
        await writer.wait_closed()
        assert front.gateway.open == 0

    play([], act, body_s=0.05)


@pytest.mark.usefixtures("processes")
def test_heads_whose_bodies_never_begin_do_not_keep_others_out() -> None:
    async def act(front: Front) -> None:
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        held = [await asyncio.open_connection("127.0.0.1", front.gateway.port) for _ in range(3)]
        for _, writer in held:
            writer.write(head)
        for reader, writer in held:
            assert b"408" in await asyncio.wait_for(reader.readline(), 50)
            writer.close()
            await writer.wait_closed()
        await until_async(lambda: front.gateway.open == 0)
        assert (await front.generate()).status == 200

    play_stubs([VllmStub()], act, body_s=3.0, max_concurrent=3, model_name="tiny")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async def act(front: Front) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            got = await front.post(path, body)
            assert got.status == 400, (path, got.text)

    play([], act, model_name="m")


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [2**40]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "8"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 20}, "min_tokens"), ({"n": 0}, "n"), ({"n": 10**6}, "n"), ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"), ({"stream": "yes"}, "stream"), ({"stop": [""]}, "stop"), ({"stop": [1]}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"), ({"seed": "x"}, "seed"), ({"logprobs": 99}, "logprobs"),
    ({"logprobs": True}, "logprobs"), ({"stream_options": {"x": 1}}, "stream_options.x"), ({"echo": True}, "echo"),
    ({"best_of": 5}, "best_of"), ({"max_tokenss": 5}, "max_tokenss"), ({"priority": 4}, "priority"),
    ({"guided_regexp": "a"}, "guided_regexp"), ({"no_stop_trim": True}, "no_stop_trim"),
]  # fmt: skip


def test_a_field_that_is_wrong_or_unknown_is_named() -> None:
    async def act(front: Front) -> None:
        for wrong, param in COMPLETIONS:
            got = await front.post("/v1/completions", {"prompt": PROMPT, **wrong})
            error = got.json["error"]
            assert (got.status, error["param"], error["type"]) == (400, param, "invalid_request_error"), (
                wrong,
                got.text,
            )
            assert param in error["message"]
        near = (await front.complete(max_tokenss=5)).message
        assert "did you mean max_tokens?" in near
        assert all(not one.running for one in front.pool.workers())
        nan = await front.post("/v1/completions", b'{"prompt": [1], "temperature": NaN}')
        assert (nan.status, nan.json["error"]["param"]) == (400, "temperature")

    play_stubs([VllmStub()], act, model_name="tiny")


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0]"), ({"messages": [{"role": "user", "content": 5}]},
     "messages[0].content"), ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": 2}, "logprobs"),
    ({"tools": {"type": "function"}}, "tools"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
]  # fmt: skip


def test_a_chat_that_is_wrong_is_refused_before_an_engine_is_asked() -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        for wrong, param in CHATS:
            body = {"messages": [{"role": "user", "content": "hi"}]} | wrong
            got = await front.post("/v1/chat/completions", body)
            assert (got.status, got.json["error"]["param"]) == (400, param), (wrong, got.text)
        assert not stub.calls("/tokenize", "/v1/completions")

    play_stubs([stub], act, model_name="tiny")


GENERATES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": None}, "text"), ({"text": "both"}, "text"), ({"input_ids": []}, "input_ids"),
    ({"input_ids": "x"}, "input_ids"), ({"input_ids": [[1], "x"]}, "input_ids"), ({"rid": 5}, "rid"),
    ({"rid": ["a", "b"]}, "rid"), ({"sampling_params": 5}, "sampling_params"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"temprature": 0}}, "sampling_params.temprature"),
    ({"sampling_params": {"min_new_tokens": 999}}, "sampling_params.min_new_tokens"),
    ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
    ({"return_hidden_states": True}, "return_hidden_states"), ({"lora_path": "x"}, "lora_path"),
    ({"image_data": ["x"]}, "image_data"), ({"stream": 1}, "stream"),
]  # fmt: skip


def test_generate_names_the_field_that_is_wrong_or_unknown() -> None:
    async def act(front: Front) -> None:
        for wrong, param in GENERATES:
            got = await front.post("/generate", {"input_ids": PROMPT, **wrong})
            assert (got.status, got.json["error"]["param"]) == (400, param), (wrong, got.text)

    play_stubs([VllmStub()], act, model_name="tiny")


def test_headers_of_ours_that_are_wrong_are_named() -> None:
    async def act(front: Front) -> None:
        for name, value in (
            ("x-trimtab-clas", "a"), ("x-trimtab-version", "new"), ("x-trimtab-at-least", "-1"),
            ("x-trimtab-deadline-s", "0"), ("x-trimtab-deadline-s", "soon"), ("x-trimtab-details", "perhaps"),
            ("x-trimtab-group", "g" * 300), ("idempotency-key", "k" * 300),
        ):  # fmt: skip
            got = await front.complete(headers={name: value})
            assert (got.status, got.json["error"]["param"]) == (400, name)
        assert "did you mean x-trimtab-class?" in (await front.complete(headers={"x-trimtab-clas": "a"})).message

    play([], act, model_name="m")


@pytest.mark.usefixtures("processes")
def test_paths_and_methods_that_are_not_there_are_said_so() -> None:
    async def act(front: Front) -> None:
        assert (await front.get("/v1/embeddings")).status == 404
        got = await front.ask("PUT", "/workers")
        assert (got.status, got.headers["allow"]) == (405, "GET, HEAD, POST")
        assert (await front.get("/generate")).status == 405

    play([], act)


# ---- one key, one answer -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
def test_a_stream_with_a_key_that_was_answered_gets_that_answer_again() -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        for path, heads in (("/v1/completions", {"idempotency-key": "a"}), ("/generate", {"idempotency-key": "b"})):
            shared = {"stream": True, "temperature": 0}
            body = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True, **shared}
            if path == "/generate":
                body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0}, "stream": True}
            first, second = [await front.post(path, body, headers=heads) for _ in range(2)]
            texts, ids = zip(*(told(path, one) for one in (first, second)), strict=True)
            assert texts[0], first.text
            assert texts[0] == texts[1], second.text
            assert len(ids[0]) == 6
            assert ids[0] == ids[1]
        assert len(stub.calls("/v1/completions")) == 2, "a repeated key generates nothing"

    def told(path: str, got: Answered) -> tuple[str, list[int]]:
        if path == "/generate":
            last = got.events[-2]
            return last["text"], last["output_ids"]
        choices = got.choices()
        return "".join(one["text"] for one in choices), [
            one for choice in choices for one in choice.get("token_ids", [])
        ]

    play_stubs([stub], act, model_name="tiny")


# ---- too much ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    stub = VllmStub()
    stub.step_s = 0.05
    rules = RolloutRules(**{**vars(QUICK), "classes": (RequestClass(queue_limit=1),)})

    async def act(front: Front) -> None:
        long = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0}
        tasks = [asyncio.create_task(front.post("/v1/completions", long)) for _ in range(2)]
        await until_async(lambda: len(front.pool._core.machine.requests()) == 2)
        for body in (long, {**long, "stream": True}, {**long, "n": 3}, {**long, "n": 3, "stream": True}):
            got = await front.post("/v1/completions", body)
            assert (got.status, got.json["error"]["code"]) == (429, "QUEUE_FULL")
            assert int(got.headers["retry-after"]) >= 1
            assert got.json["error"]["type"] == "rate_limit_error"
        assert (await front.generate()).status == 429
        assert len(front.pool._core.machine.requests()) == 2, "nothing of what was refused is left"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_async(lambda: front.gateway.open == 0)

    play_stubs([stub], act, rules=rules, limit=1, model_name="tiny")


@pytest.mark.usefixtures("processes")
def test_too_many_at_once_are_told_to_come_back() -> None:
    stub = VllmStub()
    stub.step_s = 0.05

    async def act(front: Front) -> None:
        body = {"prompt": PROMPT, "max_tokens": 2000, "temperature": 0, "stream": True}
        async with front.streaming("/v1/completions", body), front.streaming("/v1/completions", body):
            got = await front.complete()
            assert (got.status, got.json["error"]["code"], got.headers["retry-after"]) == (503, "too_many", "1")
            assert (await front.get("/health")).status == 200
        await until_async(lambda: front.gateway.open == 0)
        assert (await front.complete()).status == 200

    play_stubs([stub], act, max_concurrent=2, model_name="tiny")


@pytest.mark.usefixtures("processes")
def test_a_body_in_parts_is_one_body_and_its_parts_count_together() -> None:
    async def act(front: Front) -> None:
        for parts, status in ((1, b"200"), (40, b"413")):
            reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
            head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            body = [b'{"input_ids": [1, 2], "sampling_', b'params": {"max_new_tokens": 2}}', *[b" " * 60] * parts]
            for part in (head, *(b"%x\r\n%b\r\n" % (len(one), one) for one in body), b"0\r\n\r\n"):
                writer.write(part)
                await asyncio.sleep(0)
            assert (await asyncio.wait_for(reader.readline(), 50)).split()[1] == status
            writer.close()

    play_stubs([VllmStub()], act, max_body_bytes=1_024, model_name="tiny")


# ---- any body at all -------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.sampled_from(["", "a", "stop", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["n", "role", "content"]), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [*openai.FORWARDED_CHAT, *openai.COMPLETIONS, *sglang.KNOWN, *sglang.MEDIA, *extras.NEUTRAL, "nobodys"]
)
TOLD = {"model", "max_tokens"}  # that the gateway adds to what it forwards
PARAMETERS = st.dictionaries(st.sampled_from([*sglang.SAMPLING, "regex", "nobodys"]), VALUES, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.none() | PARAMETERS | st.lists(PARAMETERS, max_size=2))
def test_whatever_a_body_has_in_it_is_understood_or_refused(body: dict[str, Any], sampling: Any) -> None:
    async def whole() -> None:
        texts = cast(PoolTokenizer, SimpleNamespace(tokenize=ids, render=ids, model=ids, check_known=ids))
        reader = openai.OpenAIReader(texts, "tiny", 16, lambda: ["a"])
        mine = {"sampling_params": sampling, "input_ids": PROMPT, **body}
        for read, given_body in (
            (reader.completions, {"prompt": PROMPT, **body}),
            (reader.chat, {"messages": [{"role": "user", "content": "x"}], **body}),
            (sglang.SglangReader(texts, lambda: ["a"]).generate, mine),
        ):
            try:
                call = (await read(given_body, DEFAULT_TERMS, lambda: {"sglang"})).call
            except (Refusal, InputError):
                continue
            sent = {} if call.forward is None else call.forward[1]
            assert all(call.prompts) or (sent and sent.keys() <= given_body.keys() | TOLD)
            assert len(call.params) == len(call.prompts)
            json.dumps([one.extra for one in call.params])

    async def ids(*_: Any) -> tuple[int, ...]:
        return (1,)

    asyncio.run(whole())
