"""Text to ids and back by the engines' own tokenizers: each dialect's calls, turns, faults, and answers cut short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from engine_answers import run
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.model.rollout import End, WorkerState
from trimtab.runtime.engines.detect import KINDS
from trimtab.runtime.engines.engine import EngineGoneError, EngineMalformedError, EngineRefusedError
from trimtab.runtime.engines.http_engine import open_session
from trimtab.runtime.engines.tokenizer import Tokenizer, tokenizer_of
from trimtab.runtime.gateway.exchange import Refusal
from trimtab.runtime.gateway.tokenizing import PoolTokenizer, TextStream
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.sampling import Chunk, Sample

HEARD = Reason(ReasonCode.completed, "as it should be")


class TokenizerStub:
    """Answers as vLLM 0.32 and SGLang 0.5.23 do; a token is a letter."""

    def __init__(self, kind: str) -> None:
        self.kind, self.path = kind, "nowhere"
        self.asked: list[Any] = []
        self.answer: Any = None

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.answer is not None:
            return web.json_response(self.answer, status=400 if "error" in self.answer else 200)
        text = body.get("prompt") or "".join(one["content"] for one in body["messages"])
        return web.json_response({"tokens": [ord(one) for one in text], "count": len(text)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        text = "".join(map(chr, body["tokens"]))
        return web.json_response({"text" if self.kind == "sglang" else "prompt": text})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.path})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Tokenizer]:
        app = web.Application()
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._info)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with open_session() as session:
            engine = KINDS[self.kind]("one", f"http://127.0.0.1:{runner.addresses[0][1]}", session)
            found = tokenizer_of(engine)
            assert found is not None
            yield found
        await runner.cleanup()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_each_dialect_reads_and_writes_text(kind: str, tmp_path: Path) -> None:
    async def whole() -> None:
        stub = TokenizerStub(kind)
        stub.path = str(tmp_path)
        (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 7}}')
        async with stub.up() as texts:
            assert await texts.tokenize("hey") == (104, 101, 121)
            assert stub.asked[-1] == {"prompt": "hey", "add_special_tokens": True}
            assert await texts.detokenize((104, 105), special=True) == "hi"
            assert stub.asked[-1].get("skip_special_tokens") is (False if kind == "sglang" else None)
            count = len(stub.asked)
            assert await texts.detokenize(()) == ""
            assert len(stub.asked) == count, "nothing is asked about nothing"
            assert await texts.render([{"role": "user", "content": "x"}], {"chat_template_kwargs": {}}) == (120,)
            assert stub.asked[-1]["messages"] == [{"role": "user", "content": "x"}]
            assert await texts.model() == "tiny"
            assert await texts.vocabulary() == (7 if kind == "sglang" else None)
            (tmp_path / "config.json").write_text("[]")
            assert await texts.vocabulary() is None

    run(whole())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_is_no_answer_of_a_tokenizer_is_nonsense(kind: str) -> None:
    async def whole() -> None:
        stub = TokenizerStub(kind)
        async with stub.up() as texts:
            for wrong in ({"tokens": ["a"]}, {"tokens": [-1]}, {"tokens": [True]}, {"ids": [1]}, [1]):
                stub.answer = wrong
                with pytest.raises(EngineMalformedError, match="gave no ids"):
                    await texts.tokenize("x")
            stub.answer = {"error": {"message": "no template"}}
            with pytest.raises(EngineRefusedError, match="no template"):
                await texts.render([], {})

    run(whole())


# ---- a pool's ------------------------------------------------------------------------------------------------------


@dataclass
class Letters:
    """A tokenizer in this process: a token is a letter. `fault` is raised by every call."""

    name: str
    asked: list[str] = field(default_factory=list)
    fault: Exception | None = None

    async def tokenize(self, text: str) -> tuple[int, ...]:
        self._hear(text)
        return tuple(map(ord, text))

    async def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        self._hear(f"{list(ids)}")
        return "".join(map(chr, ids))

    async def render(self, messages: Any, options: Any) -> tuple[int, ...]:
        return await self.tokenize("".join(one["content"] for one in messages))

    async def model(self) -> str:
        self._hear("model")
        return "letters"

    def _hear(self, what: str) -> None:
        self.asked.append(what)
        if self.fault is not None:
            raise self.fault


def pool_of(*letters: Letters, states: Sequence[WorkerState] = ()) -> PoolTokenizer:
    """A pool of workers that can read, as far as a `PoolTokenizer` looks at one."""
    by_name = {one.name: SimpleNamespace(texts=one) for one in letters}
    views = [
        SimpleNamespace(worker=one.name, state=states[at] if states else WorkerState.active)
        for at, one in enumerate(letters)
    ]
    pool = SimpleNamespace(workers=lambda: views, engine=by_name.__getitem__)
    return PoolTokenizer(cast(RolloutPool, pool), 1.0)


def sample(letters: str, end: End = End.length, **more: Any) -> Sample:
    return Sample("r1", tuple(map(ord, letters)), end, HEARD, **more)


def test_workers_are_asked_in_turn_and_one_that_fails_is_passed_over() -> None:
    async def whole() -> None:
        one, two = Letters("one"), Letters("two")
        texts = pool_of(one, two)
        for _ in range(4):
            assert await texts.tokenize("a") == (97,)
        assert (len(one.asked), len(two.asked)) == (2, 2)
        one.fault = EngineGoneError("it is gone", engine="one")
        for _ in range(4):
            assert await texts.tokenize("a") == (97,)
        two.fault = EngineGoneError("gone too", engine="two")
        with pytest.raises(Refusal, match="gone") as refused:
            await texts.tokenize("a")
        assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
        two.fault = one.fault = EngineRefusedError("no such role")
        with pytest.raises(Refusal, match="no such role") as refused:
            await texts.render([], {})
        assert refused.value.status == 400

    run(whole())


def test_those_that_serve_are_asked_first_and_the_others_only_where_none_does() -> None:
    async def whole() -> None:
        one, two = Letters("one"), Letters("two")
        texts = pool_of(one, two, states=(WorkerState.stale, WorkerState.active))
        await texts.tokenize("a")
        await texts.tokenize("a")
        assert not one.asked
        only = pool_of(one, two, states=(WorkerState.stale, WorkerState.lost))
        await only.tokenize("a")
        assert one.asked
        with pytest.raises(Refusal, match="no worker has a tokenizer"):
            await pool_of().tokenize("a")

    run(whole())


def test_a_reader_that_never_answers_is_not_waited_for() -> None:
    class Silent(Letters):
        async def tokenize(self, text: str) -> tuple[int, ...]:
            await asyncio.sleep(600)
            return ()

    async def whole() -> None:
        texts = pool_of(Silent("one"))
        texts._within_s = 0.01
        with pytest.raises(Refusal, match="no answer within"):
            await texts.tokenize("a")

    run(whole())


def test_names_of_tokens_and_of_the_model_are_asked_for_once() -> None:
    async def whole() -> None:
        one = Letters("one")
        texts = pool_of(one)
        assert await texts.names([97, 98, 97]) == ["a", "b", "a"]
        assert await texts.names([98, 99]) == ["b", "c"]
        assert len(one.asked) == 3
        assert [await texts.model() for _ in range(2)] == ["letters", "letters"]
        assert one.asked.count("model") == 1

    run(whole())


def test_the_text_of_an_answer_that_moved_is_written_from_its_ids() -> None:
    async def whole() -> None:
        texts = pool_of(Letters("one"))
        assert await texts.text_of(sample("hello", text="as the engine wrote it")) == "as the engine wrote it"
        assert await texts.text_of(sample("hello", text="hexlo", moves=1)) == "hello"
        assert await texts.text_of(sample("hello", text="")) == "hello", "engines that write no text"
        ended = sample("hello|", End.stop, text="helo", moves=1)
        assert await texts.text_of(ended) == "hello", "without the end token"
        assert await texts.text_of(ended, keep_stop=True) == "hello|"
        stopped = sample("say END", End.stop, text="say", moves=1, stopped_by="END")
        assert await texts.text_of(stopped) == "say "
        assert await texts.text_of(stopped, keep_stop=True) == "say END"
        by_id = sample("hello!", End.stop, text="hello", moves=2, stopped_by=33)
        assert await texts.text_of(by_id) == "hello"
        assert await texts.text_of(sample("hel\ufffd", text="he", moves=1)) == "hel", "half a character"
        assert await pool_of().text_of(sample("hello", text="helo", moves=1)) == "helo", "nobody can read"

    run(whole())


def test_a_stream_that_moved_ends_with_the_text_that_the_cut_had_cost() -> None:
    async def whole() -> None:
        flow = TextStream(pool_of(Letters("one")), special=False, keep_stop=False)
        assert await flow.more(Chunk(0, (104,), text="h")) == "h"
        assert await flow.more(Chunk(0, (101, 121), text="e")) == "e"
        assert await flow.more(Chunk(0, sample=sample("hey", text="he", moves=1))) == "y"
        assert flow.text == "hey"
        other = TextStream(pool_of(Letters("one")), special=False, keep_stop=False)
        await other.more(Chunk(0, (104,), text="H"))
        last = Chunk(0, text="!", sample=sample("hey", text="H!", moves=1))
        assert await other.more(last) == "!", "what was written is not taken back"

    run(whole())
