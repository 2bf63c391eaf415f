"""What real rollouts carry, through the gateway: tools, images, sessions, LoRA adapters, routed experts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine_stubs import SglangStub, VllmStub
from gateway_scenes import PROMPT, QUICK, Answered, Front, play_stubs
from trimtab.model.rollout import RequestClass, RolloutRules, WorkerState
from trimtab.runtime.gateway.serving import GenerationTracker
from waiting import until_async

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
LOOK = [{"role": "user", "content": IMAGE}]
KINDS = pytest.mark.parametrize("kind", [VllmStub, SglangStub])


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": HI, "tools": [TOOL], "max_tokens": 5, **more}


def pair(kind: Any) -> list[Any]:
    return [kind(), kind()]


def slow(stubs: list[Any]) -> None:
    for stub in stubs:
        stub.step_s = 0.02


async def begun(stubs: list[Any]) -> int:
    """Which of them works on a conversation."""
    await until_async(lambda: any(stub.running for stub in stubs), "an engine has begun")
    return next(at for at, stub in enumerate(stubs) if stub.running)


# ---- chats that only engines understand ------------------------------------------------------------------------------


@KINDS
def test_a_chat_with_tools_is_answered_by_an_engine_and_looks_like_every_other_answer(kind: Any) -> None:
    stubs = pair(kind)

    async def act(front: Front) -> None:
        body = chat(n=2, tool_choice="required", temperature=0.5, reasoning_effort="low", user="u", stop=None)
        got = await front.post(CHAT, body, headers={"x-trimtab-details": "1"})
        assert got.status == 200, got.text
        first, second = got.json["choices"]
        assert [call["function"]["name"] for call in second["message"]["tool_calls"]] == ["look_up", "look_up"]
        assert (first["finish_reason"], got.json["usage"]["completion_tokens"]) == ("tool_calls", 10)
        assert got.json["id"] == f"chatcmpl-{got.headers['x-trimtab-id']}"
        assert (got.json["model"], got.json["object"]) == ("tiny", "chat.completion")
        assert (got.headers["x-trimtab-moves"], got.headers["x-trimtab-versions"]) == ("0", "0:10")
        assert first["trimtab"]["workers"] == [got.headers["x-trimtab-workers"]]
        (sent,) = (body for stub in stubs for body in stub.bodies)
        assert sent.pop("model") == ("tiny" if kind is VllmStub else "default")
        del body["stop"]  # null is nothing
        assert sent == body
        assert "trimtab_rollout_tokens_total 10.0" in (await front.get("/metrics")).text

    play_stubs(stubs, act)


@pytest.mark.parametrize("part", [IMAGE[1], {"type": "input_audio", "input_audio": {}}, {"type": "video_url"}])
def test_a_chat_with_parts_that_are_not_text_is_forwarded_and_one_with_text_is_not(part: dict[str, Any]) -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [IMAGE[0], part]}]
        got = await front.post(CHAT, {"messages": messages})
        assert (got.status, got.json["choices"][0]["finish_reason"]) == (200, "stop")
        assert stub.bodies == [{"messages": messages, "max_tokens": 3, "model": "tiny"}], "the gateway's default limit"
        text = await front.post(CHAT, {"messages": [{"role": "user", "content": [IMAGE[0]]}], "tools": []})
        assert (text.status, len(stub.calls(CHAT))) == (503, 1), "this stub has no tokenizer, which text needs"

    play_stubs([stub], act, default_max_tokens=3)


def assembled(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Messages from a stream of deltas, as clients of OpenAI's put them together."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            message = found.setdefault(choice["index"], {"content": "", "calls": {}, "finish": None})
            assert message["finish"] is None, "nothing follows the finish"
            delta = choice["delta"]
            message["role"] = delta.get("role", message.get("role"))
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                call = message["calls"].setdefault(part["index"], {"arguments": ""})
                call |= {key: part[key] for key in ("id", "type") if key in part}
                call["name"] = part["function"].get("name", call.get("name"))
                call["arguments"] += part["function"].get("arguments") or ""
            message["finish"] = choice["finish_reason"]
    return found


@KINDS
def test_a_stream_of_tool_calls_is_read_back_by_a_client_of_events(kind: Any) -> None:
    async def act(front: Front) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = chat(n=2, stream=True, stream_options=options)
        events: list[Any] = []
        async with front.streaming(CHAT, body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-trimtab-id"]
            async for line in answer.content:
                if line.strip():
                    name, _, data = line.decode().strip().partition(": ")
                    assert name == "data"
                    events.append(data)
        assert events.pop() == "[DONE]"
        *chunks, usage = map(json.loads, events)
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 10)
        assert all(chunk["usage"] == usage["usage"] for chunk in chunks)
        whole = (await front.post(CHAT, chat(n=2))).json["choices"]
        for index, message in assembled(chunks).items():
            calls = whole[index]["message"]["tool_calls"]
            assert (message["role"], message["content"], message["finish"]) == ("assistant", "", "tool_calls")
            assert [message["calls"][at] for at in sorted(message["calls"])] == [
                {"id": call["id"], "type": "function", **call["function"]} for call in calls
            ]
        plain = await front.post(CHAT, {"messages": LOOK, "max_tokens": 4, "stream": True})
        message = assembled(plain.events[:-1])[0]
        assert (len(message["content"]), message["finish"], plain.events[-1]) == (4, "stop", "[DONE]")

    play_stubs([kind()], act)


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_killed_costs_a_restart_and_there_is_one_answer(kind: Any, stream: bool) -> None:
    stubs = pair(kind)

    async def act(front: Front) -> None:
        slow(stubs)
        asking = asyncio.create_task(front.post(CHAT, chat(max_tokens=100, stream=stream)))
        at = await begun(stubs)
        stubs[1 - at].step_s = 0.001
        stubs[at].die()
        got = await asking
        assert got.status == 200, got.text
        assert [len(stub.calls(CHAT)) for stub in stubs] == [1, 1]
        if stream:
            assert assembled(got.events[:-1])[0]["finish"] == "tool_calls"
        else:
            assert got.headers["x-trimtab-moves"] == "1"
            assert len(got.headers["x-trimtab-workers"].split(",")) == 2

    play_stubs(stubs, act)


def test_what_the_engine_refuses_is_a_400_with_its_words_streamed_or_not() -> None:
    stub = VllmStub()
    stub.refuse[CHAT] = (422, {"error": {"message": "no tool parser is set"}})

    async def act(front: Front) -> None:
        for stream in (False, True):
            got = await front.post(CHAT, chat(stream=stream))
            assert (got.status, got.json["error"]["type"]) == (400, "invalid_request_error")
            assert "no tool parser is set" in got.message
        assert len(stub.calls(CHAT)) == 2, "it is not tried again"
        stub.refuse[CHAT] = (500, {"error": {"message": "out of memory"}})
        got = await front.post(CHAT, chat())
        assert (got.status, "out of memory" in got.message) == (502, True)

    play_stubs([stub], act)


@pytest.mark.parametrize(
    ("wrong", "status", "param"),
    [
        ({"tools": {"type": "function"}}, 400, "tools"),
        ({"tools": ["look_up"]}, 400, "tools"),
        ({"n": 0}, 400, "n"),
        ({"n": 10_000}, 400, "n"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"priority": 3}, 400, "priority"),
        ({"lora_path": "x"}, 400, "lora_path"),
        ({"model": "another"}, 404, "model"),
        ({"stream_options": {"usage": True}}, 400, "stream_options.usage"),
        ({"thinking_budget": 1e300}, 400, "thinking_budget"),
        ({"add_generation_prompt": False}, 400, "add_generation_prompt"),
    ],
)
def test_limits_hold_for_what_is_forwarded(wrong: dict[str, Any], status: int, param: str) -> None:
    stub = SglangStub()

    async def act(front: Front) -> None:
        got = await front.post(CHAT, chat(**wrong))
        assert (got.status, got.json["error"]["param"]) == (status, param), got.text
        assert not stub.calls(CHAT)

    play_stubs([stub], act)


def test_bodies_tokens_queues_and_deadlines_bound_what_is_forwarded() -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        big = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:," + "A" * 200_000}}]}]
        bearer = {"authorization": "Bearer a-token-of-the-tests"}
        assert (await front.post(CHAT, {"messages": big}, headers=bearer)).status == 413
        assert (await front.post(CHAT, chat())).status == 401
        slow([stub])
        soon = {**bearer, "x-trimtab-deadline-s": "2"}
        first = asyncio.create_task(front.post(CHAT, chat(max_tokens=4_000), headers=soon))
        await begun([stub])
        second = asyncio.create_task(front.post(CHAT, chat(max_tokens=2), headers=bearer))
        await until_async(lambda: front.pool.metrics()["pending_requests"] == 1, "it is queued")
        third = await front.post(CHAT, chat(), headers=bearer)
        assert (third.status, int(third.headers["retry-after"]) >= 1) == (429, True)
        assert (await first).status == 504
        assert (await second).status == 200

    rules = RolloutRules(classes=(RequestClass(queue_limit=1),), abort_s=3.0, stall_s=15.0)
    play_stubs([stub], act, rules=rules, limit=1, max_body_bytes=100_000, open_requests=False)


def test_the_same_idempotency_key_gets_the_same_answer_from_one_engine() -> None:
    stubs = pair(VllmStub)

    async def act(front: Front) -> None:
        key = {"idempotency-key": "k"}
        first, second = await asyncio.gather(*(front.post(CHAT, chat(), headers=key) for _ in range(2)))
        third = await front.post(CHAT, chat(stream=True), headers=key)
        assert first.json["choices"] == second.json["choices"]
        calls = [call["function"] for call in first.json["choices"][0]["message"]["tool_calls"]]
        said = assembled(third.events[:-1])[0]["calls"]
        assert [{key: said[at][key] for key in ("name", "arguments")} for at in range(2)] == calls
        assert sum(len(stub.calls(CHAT)) for stub in stubs) == 1
        other = await front.post(CHAT, chat(max_tokens=50), headers=key)
        assert (other.status, "another prompt or limit" in other.message) == (400, True)

    play_stubs(stubs, act)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_call_at_the_engine(stream: bool) -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        slow([stub])
        asking = asyncio.create_task(front.post(CHAT, chat(max_tokens=4_000, stream=stream)))
        await begun([stub])
        asking.cancel()
        await until_async(lambda: not stub.running and front.running() == 0, "the engine is free")
        assert stub.left == 1

    play_stubs([stub], act)


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_that_stops_answers_what_is_forwarded(stream: bool) -> None:
    stub = VllmStub()

    async def act(front: Front) -> None:
        slow([stub])
        asking = asyncio.create_task(front.post(CHAT, chat(max_tokens=4_000, stream=stream)))
        await begun([stub])
        await front.gateway.stop(0.0)
        assert (await asking).status == 503

    play_stubs([stub], act)


def test_kinds_of_engines_that_cannot_take_it_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationTracker, "kinds", lambda self: frozenset({"vllm", "llamacpp"}))

    async def act(front: Front) -> None:
        for body, param in ((chat(), "tools"), ({"messages": LOOK}, "messages[0].content")):
            got = await front.post(CHAT, body)
            assert (got.status, got.json["error"]["param"]) == (400, param)
            assert "llamacpp engines cannot take it" in got.message

    play_stubs([VllmStub()], act)


# ---- /generate with images -------------------------------------------------------------------------------------------


def test_images_at_generate_go_to_an_sglang_engine_as_they_are() -> None:
    stub = SglangStub()

    async def act(front: Front) -> None:
        sampling = {"max_new_tokens": 4, "temperature": 0}
        body = {"text": "<image> what?", "image_data": ["data:,A"], "sampling_params": sampling, "rid": "mine"}
        got = await front.post("/generate", body, headers={"x-trimtab-details": "1"})
        assert got.status == 200, got.text
        assert (len(got.json["output_ids"]), got.json["meta_info"]["id"]) == (4, "mine")
        assert got.json["meta_info"]["trimtab"]["missing_tokens"] == 4
        assert got.headers["x-trimtab-versions"] == "0:4"
        assert stub.bodies[-1] == {key: body[key] for key in ("text", "image_data", "sampling_params")}
        for more in ({"stream": True}, {"text": ["a", "b"]}, {"sampling_params": {"n": 2}}):
            refused = await front.post("/generate", body | {"rid": None} | more)
            assert (refused.status, refused.json["error"]["param"]) == (400, "image_data"), more

    play_stubs([stub], act)


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_stays_on_one_engine_and_moves_when_it_is_lost() -> None:
    stubs = pair(VllmStub)

    async def act(front: Front) -> None:
        async def turn(session: str) -> str:
            headers = {"x-trimtab-session": session}
            answers = [await front.complete(tokens=2, headers=headers), await front.post(CHAT, chat(), headers=headers)]
            streamed = await front.complete(tokens=2, headers={**headers, "x-trimtab-details": "1"}, stream=True)
            (third,) = streamed.choices()[-1]["trimtab"]["workers"]
            (worker,) = {*(got.headers["x-trimtab-workers"] for got in answers), third}
            return worker

        homes = [await turn(f"s{number}") for number in range(3)]
        assert [await turn(f"s{number}") for number in range(3)] == homes
        next(stub for stub in stubs if stub.url.endswith(homes[0])).die()
        await until_async(lambda: front.state(homes[0]) is WorkerState.lost, "it is lost")
        assert await turn("s0") == await turn("s0") != homes[0]
        assert (await front.complete(headers={"x-trimtab-session": "s" * 300})).status == 400

    play_stubs(stubs, act)


# ---- LoRA ------------------------------------------------------------------------------------------------------------


@KINDS
def test_the_name_of_an_adapter_as_model_selects_it(kind: Any) -> None:
    stub = kind()

    async def act(front: Front) -> None:
        await front.pool.load_adapter("sql", "/loras/sql")
        listed = (await front.get("/v1/models")).json["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("sql", "tiny")]
        plain = await front.complete(return_token_ids=True)
        adapted = await front.complete(return_token_ids=True, model="sql")
        assert adapted.json["model"] == "sql"
        assert plain.json["choices"][0]["token_ids"] != adapted.json["choices"][0]["token_ids"]
        forwarded = await front.post(CHAT, chat(model="sql"))
        assert (forwarded.status, forwarded.json["model"]) == (200, "sql")
        assert stub.bodies[-1]["model" if kind is VllmStub else "lora_path"] == "sql"
        generated = await front.generate(lora_path="sql")
        assert generated.json["output_ids"] == adapted.json["choices"][0]["token_ids"]
        unknown = await front.complete(model="sqll")
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
        wrong = await front.generate(lora_path="sqll")
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "lora_path")

    play_stubs([stub], act)


# ---- routed experts --------------------------------------------------------------------------------------------------


@KINDS
def test_routed_experts_are_in_meta_info_of_the_whole_answer(kind: Any) -> None:
    async def act(front: Front) -> None:
        def experts(got: Answered) -> Any:
            answer = got.json if got.text.startswith("{") else got.events[-2]
            return answer["meta_info"].get("routed_experts")

        said = f"experts of {len(PROMPT) + 8 - 1}"
        assert experts(await front.generate(8, return_routed_experts=True)) == said
        assert experts(await front.generate(8, return_routed_experts=True, stream=True)) == said
        assert experts(await front.generate(8)) is None

    play_stubs([kind()], act, rules=QUICK)
