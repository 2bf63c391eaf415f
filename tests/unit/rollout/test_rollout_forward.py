"""What only engines understand, through the pool: forwarded calls, sessions, LoRA adapters, routed experts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine_scenes import BOTH, RELEASES, expected, scene
from engine_stubs import SglangStub, VllmStub
from rollout_scenes import PROMPT, Scene, play
from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.model.rollout import End, Span, WorkerState
from trimtab.rollout import ForwardedAnswer, RequestClass, RolloutRules, SamplingParams
from trimtab.runtime.engines.engine import (
    EngineBusyError,
    EnginePausedError,
    FinishReason,
    ForwardRequest,
    NotSupportedError,
    PauseMode,
    StreamDelta,
)
from trimtab.runtime.engines.http_engine import HttpEngine, open_session
from trimtab.runtime.engines.llamacpp import LlamaCppEngine
from trimtab.runtime.rollout.sampling import forwarded_tokens
from waiting import until_async

CHAT = "/v1/chat/completions"
KINDS = pytest.mark.parametrize("kinds", [("vllm", "vllm"), ("sglang", "sglang")], ids=["vllm", "sglang"])


def chat(tokens: int = 8, **more: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    return {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": tokens, **more}


@asynccontextmanager
async def forwarding(play: Scene, tokens: int = 60, **more: Any) -> AsyncIterator[asyncio.Task[ForwardedAnswer]]:
    """A forwarded call that an engine works on."""
    task = asyncio.create_task(play.pool.forward(CHAT, chat(tokens), **more))
    try:
        await until_async(lambda: any(stub.made for stub in play.stubs) or task.done(), "an engine has begun")
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def chats(play: Scene) -> list[int]:
    """Calls of each engine."""
    return [len(stub.calls(CHAT)) for stub in play.stubs]


# ---- calls that go as they are ---------------------------------------------------------------------------------------


@KINDS
def test_a_forwarded_chat_reaches_an_engine_whole_and_its_reply_comes_back_whole(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        body = chat(5, n=2, model="what clients call it", metadata={"a": [1]})
        answer = await play.pool.forward(CHAT, body)
        (sent,) = (body for stub in play.stubs for body in stub.bodies if "messages" in body)
        own = "tiny" if kinds[0] == "vllm" else "default"
        assert sent == {**body, "model": own}
        calls = answer.body["choices"][1]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["look_up", "look_up"]
        assert (answer.body["usage"]["completion_tokens"], answer.version, answer.restarts) == (10, 0, 0)
        assert answer.workers == (play.names[chats(play).index(1)],)
        assert sum(view.served for view in play.pool.workers()) == 1
        view = play.pool._core.machine.request(answer.request)
        assert view is not None
        assert (view.tokens, view.spans) == (10, (Span(0, 10),))

    play(act, kinds=kinds)


@KINDS
def test_a_forwarded_call_whose_engine_is_killed_is_restarted_once_elsewhere(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        async with forwarding(play) as task:
            at = play.busy()
            play.stubs[at].die()
            answer = await task
        assert (answer.restarts, answer.workers) == (1, (play.names[at], play.names[1 - at]))
        assert chats(play) == [1, 1]
        assert answer.body["usage"]["completion_tokens"] == 60
        assert play.pool.counters["answered_stop"] == 1

    play(act, kinds=kinds)


@KINDS
def test_a_drain_restarts_a_forwarded_call_elsewhere_and_ends_it_where_it_was(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        play.stubs[0].step_s = play.stubs[1].step_s = 0.02
        async with forwarding(play, 200) as task:
            at = play.busy()
            play.pool.drain(play.names[at], deadline_s=0.01)
            play.stubs[1 - at].step_s = 0.001
            answer = await task
            await until_async(lambda: not play.stubs[at].running, "the drained engine has ended it")
        assert (answer.restarts, play.stubs[at].left) == (1, 1)
        assert answer.workers[-1] == play.names[1 - at]
        assert not play.stubs[at].calls("/abort_requests"), "it has an id of the engine's, and is aborted by its end"

    play(act, kinds=kinds)


@KINDS
def test_a_refit_restarts_a_forwarded_call_under_the_new_weights(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        play.stubs[0].step_s = play.stubs[1].step_s = 0.02
        async with forwarding(play, 100) as task:
            async with play.pool.refit(1) as refit:
                assert not any(stub.running for stub in play.stubs), "nothing runs while the weights change"
                await refit.load("/weights/1")
            play.stubs[0].step_s = play.stubs[1].step_s = 0.001
            answer = await task
        assert (answer.version, answer.restarts) == (1, 1)
        assert play.pool.counters["answered_stop"] == 1

    play(act, kinds=kinds)


@KINDS
def test_what_an_engine_refuses_is_the_callers_error_and_what_fails_is_tried_elsewhere(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        with pytest.raises(InputError, match="a message has no role"):
            await play.pool.forward(CHAT, chat() | {"messages": [{}]})
        with pytest.raises(InputError, match="is unknown there"):
            await play.pool.forward("/v1/nothing", {})
        assert sum(chats(play)) == 1
        for stub in play.stubs:
            stub.fault = "error"
        answer = await play.pool.forward(CHAT, chat())
        assert answer.restarts == 2
        assert answer.body["choices"][0]["finish_reason"] == "tool_calls"

    play(act, kinds=kinds)


@KINDS
def test_a_caller_that_leaves_ends_its_call_at_the_engine(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        play.stubs[0].step_s = play.stubs[1].step_s = 0.02
        async with forwarding(play, 3_000) as task:
            task.cancel()
            await until_async(lambda: not any(stub.running for stub in play.stubs), "no engine works on it")
        assert sum(stub.left for stub in play.stubs) == 1
        await until_async(lambda: not any(view.running for view in play.pool.workers()), "the pool knows it")

    play(act, kinds=kinds)


def test_a_forwarded_call_has_a_deadline_a_key_and_a_place_in_the_queue() -> None:
    async def act(play: Scene) -> None:
        play.stubs[0].step_s = 0.02
        async with forwarding(play, 2_000, deadline_s=1.5) as long:
            # The only place is taken, and the queue is full: the next waits until the first is too late.
            queued = asyncio.create_task(play.pool.forward(CHAT, chat(2), key="k"))
            await play.pool.until(lambda: play.pool.metrics()["pending_requests"] == 1)
            waits = asyncio.create_task(play.pool.forward(CHAT, chat(2, n=1), key="other"))
            with pytest.raises(UnreachableError, match="not done after"):
                await long
            first, third = await queued, await waits
        assert play.pool.counters["refused"] >= 1
        again = await play.pool.forward(CHAT, chat(2), key="k")
        assert (again.body, again.workers) == (first.body, first.workers)
        assert third.body["usage"]["completion_tokens"] == 2
        assert chats(play) == [3]
        await play.pool.generate([PROMPT], SamplingParams(max_tokens=2), keys=["mine"])
        with pytest.raises(InputError, match="another prompt or limit"):
            await play.pool.forward(CHAT, chat(2), key="mine")

    classes = (RequestClass(queue_limit=1, deadline_s=50.0),)
    rules = RolloutRules(classes=classes, stall_s=12.0, abort_s=3.0, resume_every=1)
    play(act, kinds=("vllm",), rules=rules, limit=1)


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat", {}), ("/x", {"stream": True}), ("/x", [1]), ("/x", {"a": {1, 2}.union}), ("/x", {"a": object()})],
)
def test_what_cannot_be_forwarded_is_refused_here(path: str, body: Any) -> None:
    async def act(play: Scene) -> None:
        with pytest.raises(InputError, match=r"forwarded|no JSON"):
            await play.pool.forward(path, body)

    play(act, kinds=("vllm",))


def test_the_tokens_of_a_reply_are_bounded_by_what_its_body_says() -> None:
    assert forwarded_tokens({}) == SamplingParams().max_tokens
    assert forwarded_tokens({"max_tokens": 7, "n": 3}) == 21
    assert forwarded_tokens({"max_completion_tokens": 5, "max_tokens": 7, "n": None}) == 5
    assert forwarded_tokens({"sampling_params": {"max_new_tokens": 9}}) == 9
    assert forwarded_tokens({"max_tokens": "many", "n": True}) == SamplingParams().max_tokens


@BOTH
def test_the_gate_holds_for_forwarded_calls(kind: str) -> None:
    async def act(stub: Any, engine: HttpEngine) -> None:
        async def call(name: str, tokens: int) -> list[StreamDelta]:
            return [delta async for delta in engine.forward(ForwardRequest(name, CHAT, chat(tokens)))]

        running = asyncio.create_task(call("a", 3_000))
        await until_async(lambda: stub.running, "it runs")
        with pytest.raises(EngineBusyError):
            await engine.sleep()
        assert not stub.calls(*RELEASES)
        await engine.pause(PauseMode.abort)
        assert [delta.finish for delta in await running] == [FinishReason.aborted]
        with pytest.raises(EnginePausedError):
            await call("b", 3)
        assert len(stub.calls(CHAT)) == 1, "nothing is sent to a paused engine"
        await engine.resume()
        (delta,) = await call("c", 3)
        assert (delta.missing, delta.finish) == (3, FinishReason.stop)
        running = asyncio.create_task(call("d", 40))
        await until_async(lambda: stub.running, "it runs")
        await engine.pause(PauseMode.wait)
        assert [delta.missing for delta in await running] == [40], "a pause that waits lets it end"

    scene(kind, act)


def test_an_engine_that_would_not_end_a_forwarded_call_takes_none() -> None:
    async def whole() -> None:
        async with open_session() as session:
            engine = LlamaCppEngine("one", "http://127.0.0.1:1", session)
            with pytest.raises(NotSupportedError, match="as they are"):
                engine.forward(ForwardRequest("a", CHAT, {}))
            with pytest.raises(NotSupportedError, match="LoRA"):
                await engine.load_adapter("a", "/a")

    asyncio.run(whole())


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_turns_of_a_session_stay_on_one_engine_forwarded_or_not_until_it_is_lost() -> None:
    async def act(play: Scene) -> None:
        async def turn(session: str) -> str:
            params = SamplingParams(max_tokens=2, temperature=0.0)
            (completion,) = await play.pool.generate([PROMPT], params, sessions=[session])
            streamed = [chunk async for chunk in play.pool.stream(PROMPT, params, session=session)]
            assert streamed[-1].sample is not None
            forwarded = await play.pool.forward(CHAT, chat(2), session=session)
            (submitted,) = play.pool.submit(PROMPT, params, session=session)
            found = {completion.samples[0].workers, streamed[-1].sample.workers, forwarded.workers}
            (worker,) = (found | {(await submitted.answered).workers}).pop()
            assert len(found) == 1
            return worker

        homes = [await turn(f"s{number}") for number in range(4)]
        assert [await turn(f"s{number}") for number in range(4)] == homes
        gone = play.names.index(homes[0])
        play.stubs[gone].die()
        await play.becomes(gone, WorkerState.lost)
        assert await turn("s0") == await turn("s0") != homes[0]
        with pytest.raises(InputError, match="2 sessions for 1 prompts"):
            await play.pool.generate([PROMPT], sessions=["a", "b"])

    play(act, kinds=("vllm", "vllm"))


# ---- LoRA ------------------------------------------------------------------------------------------------------------

LOADS = ("/v1/load_lora_adapter", "/load_lora_adapter")


@KINDS
def test_an_adapter_is_loaded_before_the_first_request_with_it_on_each_engine(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        await play.pool.load_adapter("sql", "/loras/sql")
        assert play.pool.adapters == {"sql": "/loras/sql"}
        assert sorted(len(stub.calls(*LOADS)) for stub in play.stubs) == [0, 1], "the second when it needs it"
        for session in "abcd":
            params = SamplingParams(max_tokens=4, temperature=0.0, lora="sql", n=2)
            (completion,) = await play.pool.generate([PROMPT], params, sessions=[session])
            assert {sample.token_ids for sample in completion.samples} == {expected(4, "default/loras/sql")}
            assert {sample.lora for sample in completion.samples} == {"sql"}
        await asyncio.gather(*(play.one(4, lora="sql") for _ in range(16)))
        assert [len(stub.calls(*LOADS)) for stub in play.stubs] == [1, 1], "once in each process"
        plain = await play.one(4)
        assert (plain.token_ids, plain.lora) == (expected(4), None)
        answer = await play.pool.forward(CHAT, chat(4, model="sql"))
        assert answer.body["usage"]["completion_tokens"] == 4
        sent = next(body for stub in play.stubs for body in reversed(stub.bodies) if "messages" in body)
        assert (sent["model"] if kinds[0] == "vllm" else sent["lora_path"]) == "sql"

    play(act, kinds=kinds)


@pytest.mark.parametrize("kind", ["vllm 0.26.0", "vllm", "sglang"])
def test_a_process_that_was_replaced_gets_the_adapter_again(kind: str) -> None:
    async def act(play: Scene) -> None:
        stub = play.stubs[0]
        await play.pool.load_adapter("sql", "/loras/sql")
        await play.one(4, lora="sql")
        if kind == "vllm 0.26.0":  # its start time shows that it is another process
            stub.restart()
            await play.becomes(0, WorkerState.stale)
            play.pool.vouch(play.names[0])
        else:  # nothing shows it
            stub.adapters.clear()
        first, second = await asyncio.gather(play.one(4, lora="sql"), play.one(4, lora="sql"))
        assert first.token_ids == second.token_ids == expected(4, "default/loras/sql")
        assert (first.end, second.end) == (End.length, End.length)
        assert len(stub.calls(*LOADS)) == 2

    play(act, kinds=(kind,))


@BOTH
def test_an_adapter_whose_memory_a_sleep_discarded_is_loaded_anew(kind: str) -> None:
    async def act(stub: Any, engine: HttpEngine) -> None:
        await engine.load_adapter("sql", "/loras/sql")
        await engine.load_adapter("sql", "/loras/sql")
        await engine.sleep(1)
        await engine.wake()
        await engine.load_adapter("sql", "/loras/sql")
        assert len(stub.calls(*LOADS)) == 1
        await engine.sleep(2)
        await engine.wake()
        engine.vouched("default")
        await engine.resume()
        await engine.load_adapter("sql", "/loras/sql")
        assert len(stub.calls(*LOADS)) == 2
        assert len(stub.calls("/unload_lora_adapter", "/v1/unload_lora_adapter")) == 1
        stub.adapters["other"] = "/from/elsewhere"
        await engine.load_adapter("other", "/from/elsewhere")
        stub.adapters["third"] = "/from/elsewhere"
        with pytest.raises(InputError, match="another third, from /from/elsewhere"):
            await engine.load_adapter("third", "/loras/third")
        assert len(stub.calls(*LOADS)) == 2, "what the engine has is taken, if it is the same"

    scene(kind, act)


@KINDS
def test_a_name_has_one_adapter_for_ever_and_one_that_does_not_load_is_no_adapter(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        await play.pool.load_adapter("sql", "/loras/sql")
        await play.pool.load_adapter("sql", "/loras/sql")
        with pytest.raises(InputError, match="sql is /loras/sql, not /loras/new") as refused:
            await play.pool.load_adapter("sql", "/loras/new")
        assert "another name" in str(refused.value)
        with pytest.raises(InputError, match="nowhere"):
            await play.pool.load_adapter("gone", "nowhere")
        with pytest.raises(InputError, match="a name and a path"):
            await play.pool.load_adapter("", "/x")
        assert list(play.pool.adapters) == ["sql"]
        with pytest.raises(InputError, match="there is no adapter sqll") as unknown:
            await play.one(4, lora="sqll")
        assert "did you mean sql?" in str(unknown.value)

    play(act, kinds=kinds)


@pytest.mark.parametrize(
    ("stub", "flag"), [(VllmStub, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"), (SglangStub, "--enable-lora")]
)
def test_an_engine_that_was_started_without_adapters_says_how_to_start_it(
    stub: Any, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(play: Scene) -> None:
        with pytest.raises(NotSupportedError, match=flag):
            await play.pool.load_adapter("sql", "/loras/sql")
        play.pool._core.adapters["sql"] = "/loras/sql"  # as if another engine had loaded it
        sample = await play.one(4, lora="sql")
        assert (sample.end, sample.reason.code) == (End.failed, ReasonCode.refused)
        assert flag in sample.reason.sentence

    made = stub.__init__

    def without(self: Any) -> None:
        made(self)
        self.lora = False

    monkeypatch.setattr(stub, "__init__", without)
    play(act, kinds=("vllm" if stub is VllmStub else "sglang",))


# ---- routed experts --------------------------------------------------------------------------------------------------

EXPERTS = {"return_routed_experts": True}


@KINDS
def test_routed_experts_come_with_the_whole_answer_also_after_a_restart(kinds: tuple[str, ...]) -> None:
    async def act(play: Scene) -> None:
        sample = await play.one(6, extra=EXPERTS)
        assert (sample.token_ids, sample.extra) == (expected(6), {"routed_experts": f"experts of {3 + 6 - 1}"})
        async with play.running(40, extra=EXPERTS) as task:
            play.stubs[play.busy()].die()
            restarted = await task
        assert restarted.token_ids == expected(40)
        assert restarted.extra == {"routed_experts": f"experts of {3 + 40 - 1}"}, "of the last attempt, all of them"
        assert len(restarted.workers) == 2
        params = SamplingParams(max_tokens=6, temperature=0.0, extra=EXPERTS)
        chunks = [chunk async for chunk in play.pool.stream(PROMPT, params)]
        assert chunks[-1].sample is not None
        assert chunks[-1].sample.extra == sample.extra, "a stream has them too, at its end"
        assert (await play.one(6)).extra == {}

    play(act, kinds=kinds)


@KINDS
def test_part_of_an_answer_has_no_experts_and_an_engine_without_them_is_told_how_to_have_them(
    kinds: tuple[str, ...],
) -> None:
    async def act(play: Scene) -> None:
        async with play.running(4_000, extra=EXPERTS):
            (request,) = play.pool._core.pending.values()
            play.stubs[play.busy()].abort(None)  # by another client
            sample = await request.answered
        assert (sample.end, sample.extra) == (End.abort, {})
        for stub in play.stubs:
            stub.experts = False
        refused = await play.one(6, extra=EXPERTS)
        assert (refused.end, refused.reason.code) == (End.failed, ReasonCode.refused)
        assert "--enable-return-routed-experts" in refused.reason.sentence
        with pytest.raises(InputError, match="return_routed_experts"):
            SamplingParams(extra=EXPERTS, resume=True)

    play(act, kinds=kinds)
