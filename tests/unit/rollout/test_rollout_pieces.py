"""Answers in pieces: whole, in segments and in streams with an interval, against the answer of a stream of tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_scenes import expected
from engine_stubs import VllmStub, written
from rollout_scenes import PROMPT, QUICK, Scene, play
from trimtab.core.errors import InputError
from trimtab.formats.rollout.job_section import from_text
from trimtab.model.rollout import End, Owner, Ownership, RolloutRules, Span, resume_bounds
from trimtab.rollout import EngineCommand, Sample, SamplingParams
from trimtab.runtime.engines.engine import PieceSupport
from trimtab.runtime.rollout.dispatcher import PiecePlan, PiecePlanner

FOUR = replace(QUICK, resume_every=4)
WHOLE = replace(QUICK, resume_every=math.inf)


@asynccontextmanager
async def after(scene: Scene, made: int, tokens: int = 60) -> AsyncIterator[asyncio.Task[Sample]]:
    """A request of which so many tokens were made, in however many calls."""
    task = asyncio.create_task(scene.one(tokens))
    try:
        while sum(stub.made for stub in scene.stubs) < made:
            await asyncio.sleep(0.001)
        yield task
    finally:
        task.cancel()


# ---- the plan --------------------------------------------------------------------------------------------------------


@given(
    every=st.one_of(st.integers(1, 5_000), st.just(math.inf)),
    left=st.integers(1, 20_000),
    support=st.builds(PieceSupport, st.booleans(), st.booleans(), st.booleans()),
    streams=st.booleans(),
    may_cut=st.booleans(),
    earlier=st.integers(0, 5),
)
def test_no_piece_is_longer_than_resume_every_and_all_of_them_make_the_answer(
    every: float, left: int, support: PieceSupport, streams: bool, may_cut: bool, earlier: int
) -> None:
    planner = PiecePlanner(RolloutRules(resume_every=every))
    for _ in range(earlier):
        planner.plan(support, streams=False, may_cut=True, left=10_000)
    plan = planner.plan(support, streams=streams, may_cut=may_cut, left=left)
    if streams or not support.whole:
        assert plan == PiecePlan(1)
        return
    made = calls = 0
    while made < left:
        asked = plan.tokens(calls, left - made)
        assert 1 <= asked <= left - made
        arrives = asked if plan.piece is None else plan.piece
        assert not may_cut or arrives <= every
        made, calls = made + asked, calls + 1
    assert made == left
    assert may_cut or calls == 1


def test_requests_that_begin_together_are_not_cut_together() -> None:
    planner = PiecePlanner(RolloutRules(resume_every=128))
    firsts = [planner.plan(PieceSupport(True), streams=False, may_cut=True, left=1024).first for _ in range(64)]
    assert sorted(set(firsts)) == [16, 32, 48, 64, 80, 96, 112, 128]


def test_seconds_become_tokens_by_the_speed_of_the_engine() -> None:
    planner = PiecePlanner(RolloutRules(resume_every="2 s"))
    assert [planner.every(rate) for rate in (None, 100.0, 0.1)] == [32, 200, 1]
    both = PiecePlanner(RolloutRules(resume_every=50, resume_every_s=2.0))
    assert [both.every(rate) for rate in (100.0, 10.0)] == [50, 20]


@pytest.mark.parametrize("given", [0, -1, 1.5, "soon", "0 s", True, math.nan])
def test_a_resume_every_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="resume_every"):
        RolloutRules(resume_every=given)


def test_resume_every_may_be_tokens_seconds_or_no_bound() -> None:
    assert [resume_bounds(each) for each in (128, "128", "128 tokens", "10 s", math.inf, "inf", None)] == [
        (128.0, None), (128.0, None), (128.0, None), (None, 10.0), (None, None), (None, None), (None, None)
    ]  # fmt: skip


# ---- which requests are cut ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "calls"),
    [
        ({}, 5),
        ({"temperature": 1.0}, 5),
        ({"seed": 7}, 5),  # greedy: it has no effect
        ({"extra": {"ignore_eos": True}}, 5),
        ({"seed": 7, "temperature": 1.0}, 1),
        ({"seed": 7, "temperature": 1.0, "resume": True}, 1),  # resumed if it must be, but not cut
        ({"extra": {"presence_penalty": 1.0}}, 1),
        ({"extra": {"guided_regex": "a*"}, "resume": True}, 1),
        ({"resume": False}, 1),
    ],
)
def test_only_answers_that_a_cut_does_not_change_are_cut(more: dict[str, Any], calls: int) -> None:
    async def act(scene: Scene) -> None:
        sample = await scene.one(20, **more)
        assert sample.token_ids == expected(20)
        bodies = [body for body in scene.stubs[0].bodies if body["max_tokens"] > 1 or len(body["prompt"]) > 3]
        assert not any(body.get("stream") for body in bodies)
        assert (len(bodies) >= calls) if calls > 1 else len(bodies) == 1
        assert all(body["max_tokens"] <= 4 for body in bodies) == (calls > 1)
        assert (sample.moves, sample.restarts, sample.workers) == (0, 0, (scene.names[0],))

    play(act, kinds=("vllm",), rules=FOUR)


def test_a_caller_that_streams_gets_tokens_as_they_come() -> None:
    async def act(scene: Scene) -> None:
        chunks = [chunk async for chunk in scene.pool.stream(PROMPT, SamplingParams(max_tokens=12, temperature=0.0))]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected(12)
        assert len(chunks) > 4
        assert all(body["stream"] for body in scene.stubs[0].bodies)

    play(act, kinds=("vllm",), rules=WHOLE)


@pytest.mark.parametrize(
    ("kind", "rules", "form"),
    [
        ("vllm 0.26.0", FOUR, "segments"),
        ("vllm 0.32.0", FOUR, "interval"),
        ("sglang", FOUR, "interval"),
        ("vllm", WHOLE, "whole"),
        ("sglang", WHOLE, "whole"),
        ("sglang 0.4.6", FOUR, "segments"),
    ],
)
def test_each_form_gives_the_same_answer(kind: str, rules: RolloutRules, form: str) -> None:
    async def act(scene: Scene) -> None:
        stub = scene.stubs[0]
        await scene.one(6)  # an engine that takes no interval has said so by now
        stub.bodies.clear()
        sample = await scene.one(20, logprobs=2)
        assert (sample.token_ids, sample.end, sample.spans) == (expected(20), End.length, (Span(0, 20),))
        assert sample.text == written(list(expected(20)))
        assert sample.logprobs == (-0.5,) * 20
        assert sample.best is not None
        assert [best[0][0] for best in sample.best] == list(expected(20))
        sampling = [body.get("sampling_params", body) for body in stub.bodies]
        if form == "interval":
            assert [body["stream_interval"] for body in sampling] == [4]
        else:
            assert (len(stub.bodies) == 1) == (form == "whole")
            assert not any(body.get("stream") for body in stub.bodies)

    play(act, kinds=(kind,), rules=rules)


def test_n_and_min_tokens_shrink_with_every_segment() -> None:
    async def act(scene: Scene) -> None:
        params = SamplingParams(max_tokens=14, min_tokens=9, temperature=0.0, n=3)
        (completion,) = await scene.pool.generate([PROMPT], params)
        assert [sample.token_ids for sample in completion.samples] == [expected(14)] * 3
        for body in scene.stubs[0].bodies:
            made = len(body["prompt"]) - len(PROMPT)
            assert body["min_tokens"] == min(max(0, 9 - made), body["max_tokens"])
            assert tuple(body["prompt"]) == (*PROMPT, *expected(made))

    play(act, kinds=("vllm",), rules=FOUR)


def test_segments_end_where_the_context_is_full() -> None:
    async def act(scene: Scene) -> None:
        scene.stubs[0].context = 13
        await scene.pool.remove(scene.names[0], deadline_s=0.0)
        scene.names[0] = await scene.pool.attach(scene.stubs[0].url)
        sample = await scene.one(20)
        assert (sample.token_ids, sample.end) == (expected(10), End.length)

    play(act, kinds=("vllm",), rules=FOUR)


# ---- stop strings across cuts ----------------------------------------------------------------------------------------


class Spelling:
    """A vLLM that writes a fixed text, one character or half a character for each token, and stops at stop strings."""

    def __init__(self, stub: VllmStub, text: str) -> None:
        self.stub, self.text, self.bodies = stub, text, stub.bodies
        # A letter is a token; other characters are two, of which neither is a character.
        self.tokens = [half for one in text for half in ([one] if one.isascii() else [f"{one}<", f"{one}>"])]
        self.tokens.append("")  # the end
        stub.elsewhere["/v1/completions"] = self.complete
        stub.elsewhere["/detokenize"] = self.detokenize

    def written(self, ids: list[int]) -> str:
        words = [self.tokens[token] for token in ids]
        out = ""
        for at, word in enumerate(words):
            if len(word) < 2:
                out += word
            elif word[1] == ">":
                out += word[0] if at and words[at - 1] == f"{word[0]}<" else "\ufffd"
            elif at + 1 == len(words) or words[at + 1] != f"{word[0]}>":
                out += "\ufffd"
        return out

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        begin = 0 if len(body["prompt"]) == len(PROMPT) else body["prompt"][-1] + 1
        ids: list[int] = []
        before = self.written(list(range(begin)))
        garbled = before.endswith("\ufffd")  # then it writes the prompt, too, and looks for stop strings in it
        finish, stopped, text = "length", None, ""
        while len(ids) < body["max_tokens"]:
            ids.append(begin + len(ids))
            whole = self.written(list(range(begin + len(ids))))
            text = ("PROMPT END " + whole if garbled else whole[len(before) :]).rstrip("\ufffd")
            stopped = next((word for word in body.get("stop", ()) if word in text), None)
            if stopped is not None and len(ids) > body["min_tokens"]:
                finish, text = "stop", text[: text.index(stopped)]
                break
            if begin + len(ids) == len(self.tokens):
                finish = "stop"
                break
        choice = {"text": text, "token_ids": ids, "finish_reason": finish, "stop_reason": stopped}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": len(ids)}})

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        return web.json_response({"prompt": self.written(ids) + "<eos>" * (len(self.tokens) - 1 in ids)})


TEXTS = st.text(st.sampled_from("abcE ND\u00e9\u4e2d"), min_size=1, max_size=40)


@settings(max_examples=12, deadline=None)
@given(texts=st.lists(TEXTS, min_size=8, max_size=8), every=st.integers(2, 6))
def test_stop_strings_and_half_characters_at_cuts_change_nothing(texts: list[str], every: int) -> None:
    async def act(scene: Scene) -> None:
        for text in (*texts, "abcEND", "ab\u00e9END", "\u4e2d\u4e2dE\u00e9ND", "EN" * 5 + "D"):
            for stop in ((), ("END",), ("\u00e9E", "D")):
                spelling = Spelling(scene.stubs[0], text)
                params = SamplingParams(max_tokens=60, temperature=0.0, stop=stop)
                whole = (await scene.pool.generate([PROMPT], replace(params, resume=False)))[0].samples[0]
                cut = (await scene.pool.generate([PROMPT], params))[0].samples[0]
                assert cut.token_ids == whole.token_ids, (text, stop)
                assert (cut.text, cut.end) == (whole.text, whole.end), (text, stop, spelling.bodies[-3:])
                assert cut.stopped_by == whole.stopped_by

    play(act, kinds=("vllm",), rules=replace(QUICK, resume_every=every))


# ---- what a lost engine, an abort and a refit cost -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm 0.26.0", "vllm 0.32.0", "sglang"])
@pytest.mark.parametrize("every", [2, 7, 20])
def test_a_killed_engine_costs_at_most_resume_every_tokens_of_each_request(kind: str, every: int) -> None:
    async def act(scene: Scene) -> None:
        answers = asyncio.gather(*(scene.one(40) for _ in range(12)))
        while not any(stub.made > 100 for stub in scene.stubs):
            await asyncio.sleep(0.005)
        lost = max(scene.stubs, key=lambda stub: len(stub.running))
        held = len(lost.running)
        lost.die()
        samples = await answers
        assert [sample.token_ids for sample in samples] == [expected(40)] * 12
        again = sum(stub.made for stub in scene.stubs) - 12 * 40
        assert again <= held * (every + 1)  # and a token that was made while it died
        assert all(sum(span.tokens for span in sample.spans) == 40 for sample in samples)

    play(act, kinds=(kind, kind), rules=replace(QUICK, resume_every=every))


@pytest.mark.parametrize("kind", ["vllm 0.32.0", "sglang", "vllm"])
def test_a_drain_gets_the_tokens_of_what_it_cuts(kind: str) -> None:
    async def act(scene: Scene) -> None:
        async with after(scene, 10) as task:
            at = scene.busy()
            scene.pool.drain(scene.names[at], deadline_s=0.01)
            sample = await task
        assert (sample.token_ids, sample.moves) == (expected(60), 1)
        assert sum(stub.made for stub in scene.stubs) <= 61

    play(act, kinds=(kind, kind), rules=WHOLE if kind != "vllm" else replace(QUICK, resume_every=50))


def test_a_drain_waits_for_the_segment_where_an_abort_would_lose_it() -> None:
    async def act(scene: Scene) -> None:
        async with after(scene, 3) as task:
            at = scene.busy()
            scene.pool.drain(scene.names[at], deadline_s=0.01)
            sample = await task
        assert (sample.token_ids, sample.moves) == (expected(60), 1)
        assert sum(stub.made for stub in scene.stubs) == 60

    play(act, kinds=("vllm 0.16.0", "vllm 0.16.0"), rules=replace(QUICK, resume_every=10))


@pytest.mark.parametrize("kind", ["vllm 0.26.0", "vllm 0.32.0", "sglang", "vllm 0.16.0"])
@pytest.mark.parametrize("every", [5, 1000])
def test_every_token_has_the_version_that_made_it(kind: str, every: int) -> None:
    async def act(scene: Scene) -> None:
        async with after(scene, 12) as task:
            async with scene.pool.refit(1) as refit:
                await refit.load("/weights/1")
            sample = await task
        first = sample.spans[0].tokens if len(sample.spans) > 1 else 0
        assert sample.token_ids[:first] == expected(first)
        assert sample.token_ids[first:] == expected(60 - first, "/weights/1", (*PROMPT, *sample.token_ids[:first]))
        assert sample.spans[-1] == Span(1, 60 - first)
        assert first >= 12 or kind == "vllm 0.16.0"  # which can neither abort nor say how far it is

    play(act, kinds=(kind,), rules=replace(QUICK, resume_every=every))


def test_tokens_of_unknown_weights_are_made_again() -> None:
    """The trainer pauses, loads and resumes the engine, and aborts nothing."""
    rules = replace(QUICK, resume_every=1000, ownership=Ownership(pause=Owner.trainer, abort=Owner.trainer))

    async def act(scene: Scene) -> None:
        stub = scene.stubs[0]
        async with after(scene, 12) as task:
            async with scene.pool.refit(1) as refit:
                stub.stop("keep")
                while stub.goes.is_set():
                    await asyncio.sleep(0.001)
                stub.loaded = "/weights/1"
                refit.confirm(scene.names[0])
            stub.go()
            sample = await task
        assert sample.token_ids == expected(60, "/weights/1")
        assert sample.spans == (Span(1, 60),)

    play(act, kinds=("vllm 0.16.0",), rules=rules)


def test_caches_of_different_weights_are_kept_apart() -> None:
    async def act(scene: Scene) -> None:
        await scene.one(5)
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        await scene.one(5)
        salts = [body.get("cache_salt") for body in scene.stubs[0].bodies]
        assert salts == ["trimtab-0", "trimtab-1"]

    play(act, kinds=("vllm 0.32.0",), rules=WHOLE)


def test_a_whole_answer_may_take_longer_than_any_silence_while_its_engine_generates() -> None:
    rules = replace(WHOLE, stall_s=2.0)

    async def act(scene: Scene) -> None:
        sample = await scene.one(800)
        assert (sample.token_ids, sample.moves, sample.restarts) == (expected(800), 0, 0)

    play(act, kinds=("vllm",), rules=rules)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "tokens", "seconds"), [("64", 64.0, None), ("'10 s'", None, 10.0), (".inf", None, None)]
)
def test_a_job_file_states_resume_every(written: str, tokens: float | None, seconds: float | None) -> None:
    text = f"rollout:\n  engines: ['http://127.0.0.1:8000']\n  rules:\n    resume_every: {written}\n"
    rules = from_text(text, Path("job.yaml")).rules
    assert (rules.resume_every, rules.resume_every_s) == (tokens, seconds)
    with pytest.raises(InputError, match="resume_every"):
        from_text(text.replace(written, "soon"), Path("job.yaml"))


def test_vllm_is_started_with_an_interval_unless_it_does_not_know_it() -> None:
    command = EngineCommand("model", "vllm")
    assert command.words[-2:] == ("--stream-interval", "128")
    assert command.stream_interval == 128
    older = command.without_interval(
        "it ended with status 2: vllm: error: unrecognized arguments: --stream-interval 128"
    )
    assert older is not None
    assert (older.stream_interval, "--stream-interval" in older.words) == (1, False)
    assert command.without_interval("out of memory") is None
    assert EngineCommand("model", "vllm", arguments=("--stream-interval=8",)).stream_interval == 8
    assert EngineCommand("model", "sglang").stream_interval == 1
