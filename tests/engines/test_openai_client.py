"""OpenAI's own client at the gateway before real vLLM, SGLang and llama.cpp servers: what it asks, as it asks it.

It is told to retry nothing: an answer that is wrong or missing once is seen.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_processes import START_S, Process, come_up, engine

from engine_answers import run
from engine_servers import servers
from gateway_scenes import QUICK, TOKEN, Front, front
from trimtab.machines.rollout import events as e
from trimtab.runtime.engines.engine import EngineDeadlines
from waiting import until_async

openai = pytest.importorskip("openai")
PROMPT = [40, 41, 42, 43, 44]
HELLO = [{"role": "user", "content": "hello"}]
LONG = 1_500
FREE = {"ignore_eos": True}  # answers as long as they were ordered
DEADLINES = EngineDeadlines(call_s=30.0, silence_s=60.0, abort_s=10.0)
RULES = replace(QUICK, stall_s=120.0, probe_s=30.0, abort_s=15.0, lost_s=10.0)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


class Fleet:
    """Two servers of one kind; tests but the last use the first."""

    def __init__(self, kind: str, urls: list[str], kill: Callable[[], None]) -> None:
        self.kind, self.urls, self.kill = kind, urls, kill


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        if kind == "llamacpp":
            llamas = stack.enter_context(servers(2, folder, slots=8, context=2_048))
            yield Fleet(kind, [one.url for one in llamas], llamas[0].kill)
            return
        both: list[Process] = [stack.enter_context(engine(kind, folder)) for _ in range(2)]

        async def up() -> None:
            await asyncio.gather(*map(come_up, both))

        run(up(), within_s=START_S)
        yield Fleet(kind, [one.url for one in both], lambda: both[0].signal(signal.SIGKILL))


BY_HAND = pytest.mark.engines  # llama.cpp is installed with the checks


@pytest.fixture(scope="module", params=[pytest.param(one, marks=BY_HAND) for one in ("vllm", "sglang")] + ["llamacpp"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started(request.param, tmp_path_factory.mktemp("engines")) as fleet:
        yield fleet


@asynccontextmanager
async def asking(urls: list[str], **more: Any) -> AsyncIterator[tuple[Any, Front]]:
    """The client, and the gateway that it speaks with."""
    async with front(urls, rules=RULES, deadlines=DEADLINES, model_name="tiny", **more) as scene:
        key, base = TOKEN, f"{scene.gateway.url}/v1"
        async with openai.AsyncOpenAI(api_key=key, base_url=base, max_retries=0, timeout=300) as client:
            yield client, scene


def play(fleet: Fleet, act: Callable[[Any, Front], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asking(fleet.urls[1:]) as (client, scene):
            await act(client, scene)

    run(whole())


async def completed(client: Any, tokens: int = 16, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, **more}
    return await client.completions.create(**{"extra_body": FREE, **asked})


async def chatted(client: Any, tokens: int = 16, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": tokens, "temperature": 0, **more}
    return await client.chat.completions.create(**{"extra_body": FREE, **asked})


def sayable(text: str) -> str:
    """A character of it that is no broken one."""
    return next(one for one in text[1:] if one.isascii() and one.isprintable())


def test_models_are_listed_and_one_is_found_by_its_id(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        assert [one.id async for one in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    play(fleet, act)


def test_a_completion_and_its_stream_say_the_same_with_usage_and_log_probabilities(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        whole = await completed(client, logprobs=2)
        [choice] = whole.choices
        assert (choice.finish_reason, whole.usage.completion_tokens, whole.usage.prompt_tokens) == ("length", 16, 5)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 16
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
        assert all(len(best) >= 2 for best in choice.logprobs.top_logprobs)
        events = [one async for one in await completed(client, stream=True, stream_options={"include_usage": True})]
        pieces = [one.choices[0] for one in events if one.choices]
        assert "".join(one.text for one in pieces) == choice.text
        assert [one.finish_reason for one in pieces if one.finish_reason] == ["length"]
        assert events[-1].usage == whole.usage

    play(fleet, act)


def test_several_prompts_as_text_and_several_samples_are_numbered_through(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        got = await completed(client, prompt=["ab", "cd"], n=2, temperature=0.9, seed=7)
        assert [one.index for one in got.choices] == [0, 1, 2, 3]
        assert got.usage.completion_tokens == 64
        chat = await chatted(client, n=3, temperature=0.9)
        assert [one.index for one in chat.choices] == [0, 1, 2]
        assert {one.finish_reason for one in chat.choices} == {"length"}

    play(fleet, act)


def test_a_stop_string_ends_the_answer_and_is_not_in_its_text(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        text = (await completed(client, 40)).choices[0].text
        stop = sayable(text)
        for got in (await completed(client, 40, stop=stop), await completed(client, 40, stop=[stop, "never said"])):
            [choice] = got.choices
            assert (choice.finish_reason, choice.text) == ("stop", text[: text.index(stop)])
        pieces = [one.choices[0] async for one in await completed(client, 40, stop=stop, stream=True)]
        assert "".join(one.text for one in pieces) == text[: text.index(stop)]
        assert pieces[-1].finish_reason == "stop"

    play(fleet, act)


def test_a_chat_and_its_stream_say_the_same_with_log_probabilities(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        whole = await chatted(client, 60, logprobs=True, top_logprobs=2)
        [choice] = whole.choices
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        assert len(choice.logprobs.content) == 60
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)
        pieces = [one.choices[0] async for one in await chatted(client, 60, stream=True)]
        assert pieces[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in pieces) == choice.message.content
        stop = sayable(choice.message.content)
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "temperature": 0, "stop": stop}
        async with client.chat.completions.stream(**asked, extra_body=FREE) as stream:
            said = [one.delta async for one in stream if one.type == "content.delta"]
            final = (await stream.get_final_completion()).choices[0]
        text = choice.message.content[: choice.message.content.index(stop)]
        assert ("".join(said), final.message.content, final.finish_reason) == (text, text, "stop")

    play(fleet, act)


def test_a_chat_with_tools_is_answered_by_engines_that_have_them_and_else_refused_by_name(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        asked = {"tools": [TOOL], "tool_choice": "none"}
        if fleet.kind == "llamacpp":
            with pytest.raises(openai.BadRequestError, match="tools"):
                await chatted(client, **asked)
            return
        whole = await chatted(client, **asked)
        assert (whole.model, whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("tiny", "length", 16)
        assert not whole.choices[0].message.tool_calls
        pieces = [one.choices[0] async for one in await chatted(client, stream=True, **asked)]
        assert "".join(one.delta.content or "" for one in pieces) == whole.choices[0].message.content
        assert pieces[-1].finish_reason == "length"

    play(fleet, act)


def test_what_is_wrong_and_an_image_for_a_model_without_eyes_are_bad_requests(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        for wrong in ({"temperature": -1}, {"max_tokens": 0}, {"extra_body": {"nonsense": 1}}):
            with pytest.raises(openai.BadRequestError) as refused:
                await completed(client, **wrong)
            assert refused.value.param
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                await chatted(client, messages=[{"role": "user", "content": [IMAGE]}], stream=stream)
        assert (await completed(client)).usage.completion_tokens == 16

    play(fleet, act)


def test_a_cancelled_call_and_a_stream_that_is_closed_free_the_engine(fleet: Fleet) -> None:
    async def act(client: Any, scene: Front) -> None:
        [view] = scene.pool.workers()
        adapter: Any = scene.pool.engine(view.worker)
        stream = await completed(client, LONG, stream=True)
        async for _ in stream:
            break
        assert scene.running() == 1
        await stream.close()
        call = asyncio.create_task(chatted(client, LONG))
        await until_async(lambda: scene.running() == 1 and scene.gateway.open == 1)
        call.cancel()
        await until_async(lambda: scene.running() == 0 and scene.gateway.open == 0)
        while (load := await adapter.load()).running or load.waiting:
            await asyncio.sleep(0.1)

    play(fleet, act)


def test_64_at_once_with_an_engine_killed_among_them_are_answered_once_each(fleet: Fleet) -> None:
    tokens = 250
    sent: Counter[str] = Counter()
    answered: Counter[str] = Counter()

    def note(what: Any, now: float) -> None:
        if isinstance(what, e.SendRequest):
            sent[what.request] += 1
        elif isinstance(what, e.AnswerRequest):
            answered[what.request] += 1

    async def streamed(client: Any) -> int:
        stream = await completed(client, tokens, stream=True, stream_options={"include_usage": True})
        events = [one async for one in stream]
        assert [one.choices[0].finish_reason for one in events if one.choices][-1] == "length"
        return int(events[-1].usage.completion_tokens)

    async def whole(client: Any, ask: Callable[..., Awaitable[Any]]) -> int:
        got = await ask(client, tokens)
        assert [one.finish_reason for one in got.choices] == ["length"]
        return int(got.usage.completion_tokens)

    async def scene() -> None:
        async with asking(fleet.urls, limit=8) as (client, front):
            front.pool.add_listener(note)
            calls = [
                asyncio.create_task(streamed(client) if at % 3 == 0 else whole(client, (completed, chatted)[at % 2]))
                for at in range(64)
            ]
            first = front.pool.workers()[0].worker
            runs = lambda: next(one for one in front.pool.workers() if one.worker == first).running  # noqa: E731
            await until_async(lambda: sum(answered.values()) >= 8 and runs())
            fleet.kill()
            assert await asyncio.gather(*calls) == [tokens] * 64
            assert len(answered) == 64
            assert set(answered.values()) == {1}
            assert any(times > 1 for times in sent.values()), "nothing was on the engine that was killed"

    run(scene())
