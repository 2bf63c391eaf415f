"""Answers that are passed on as SGLang wrote them, and what makes them be read after all."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import pytest

from engine_answers import answer, greedy, run
from engine_scenes import expected
from engine_scenes import scene as engine_scene
from engine_stubs import Generation, SglangStub
from gateway_scenes import BEARER, PROMPT, QUICK, Front, play_stubs
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.model.rollout import End, RequestSpec
from trimtab.runtime.engines.engine import EngineDeadlines, EngineMalformedError, FinishReason, RawAnswer, StreamDelta
from trimtab.runtime.engines.http_engine import HttpEngine
from trimtab.runtime.engines.http_stream import EngineConnections, HttpEventStream, _Connection
from trimtab.runtime.engines.sglang import SglangEngine
from trimtab.runtime.rollout.sampling import PendingRequest, SamplingParams
from waiting import until_async

PIECES = replace(QUICK, resume_every=4)


class Telling(SglangStub):
    """It says more of an answer than anybody here knows."""

    def event(self, one: Generation, finish: str | None, fault: str) -> dict[str, Any]:
        event = super().event(one, finish, fault)
        event["meta_info"] |= {"cached_tokens": 3, "spec_verify_ct": {"kept": [1, "ä"]}}
        return event


def made(tokens: int) -> list[int]:
    return list(expected(tokens, prompt=tuple(PROMPT)))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("rules", [QUICK, PIECES], ids=["whole", "in pieces"])
def test_what_an_engine_says_besides_is_passed_on_and_what_is_ours_stays_ours(rules: Any) -> None:
    async def act(scene: Front) -> None:
        got = (await scene.generate(9, rid="mine", return_logprob=True, top_logprobs_num=2)).json
        meta = got["meta_info"]
        assert (got["output_ids"], len(got["text"])) == (made(9), 9)
        assert (meta["cached_tokens"], meta["spec_verify_ct"]) == (3, {"kept": [1, "ä"]})
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 4, 9)
        assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 9}]
        assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in made(9)]
        assert meta["input_token_logprobs"] == []
        assert "trimtab" not in meta
        plain = (await scene.generate(9)).json
        assert (plain["output_ids"], plain["meta_info"]["cached_tokens"]) == (made(9), 3)
        assert "output_token_logprobs" not in plain["meta_info"]
        page = (await scene.get("/metrics")).text
        assert "tokens_total 18.0" in page

    play_stubs([Telling()], act, rules=rules)


def test_who_asks_with_a_key_or_for_details_has_tokens_that_were_read() -> None:
    async def act(scene: Front) -> None:
        for headers in ({"idempotency-key": "one"}, {"idempotency-key": "one"}, {"x-trimtab-details": "true"}):
            meta = (got := (await scene.generate(9, headers=headers)).json)["meta_info"]
            assert got["output_ids"] == made(9)
            assert "cached_tokens" not in meta
            assert meta.get("trimtab", {"missing_tokens": 0})["missing_tokens"] == 0
        both = await asyncio.gather(scene.generate(9), scene.complete(tokens=9, return_token_ids=True))
        assert both[0].json["output_ids"] == both[1].json["choices"][0]["token_ids"] == made(9)

    play_stubs([Telling()], act, model_name="tiny")


def test_an_answer_that_was_held_as_it_came_goes_on_elsewhere_when_its_engine_is_lost() -> None:
    stubs = [Telling(), Telling()]
    for stub in stubs:
        stub.step_s = 0.02

    async def act(scene: Front) -> None:
        asked = asyncio.create_task(scene.generate(60, return_logprob=True))
        await until_async(lambda: any(one.said >= 8 for stub in stubs for one in stub.running.values()))
        lost = next(stub for stub in stubs if stub.running)
        await until_async(lambda: bool(scene.pool._core.machine.requests()[0].tokens >= 4))
        lost.die()
        answer = await asked
        got = answer.json
        assert (got["output_ids"], answer.headers["x-trimtab-moves"]) == (made(60), "1")
        assert [one[1] for one in got["meta_info"]["output_token_logprobs"]] == made(60)
        assert all(one[0] == -0.5 for one in got["meta_info"]["output_token_logprobs"])
        [again] = next(stub for stub in stubs if stub is not lost).bodies
        assert len(again["input_ids"]) >= len(PROMPT) + 4
        assert again["input_ids"] == [*PROMPT, *made(60)][: len(again["input_ids"])]

    play_stubs(stubs, act, rules=PIECES)


def test_an_answer_that_is_aborted_half_way_has_the_tokens_so_far() -> None:
    stub = Telling()
    stub.step_s = 0.02

    async def act(scene: Front) -> None:
        asked = asyncio.create_task(scene.generate(4_000, return_logprob=True))
        await until_async(lambda: any(one.said >= 8 for one in stub.running.values()))
        await until_async(lambda: bool(scene.pool._core.machine.requests()[0].tokens >= 4))
        await scene.post("/abort_request", {"abort_all": True}, headers=BEARER)
        got = (await asked).json
        ids = got["output_ids"]
        assert len(ids) >= 4
        assert ids == made(len(ids))
        assert got["meta_info"]["finish_reason"]["type"] == "abort"
        assert [one[1] for one in got["meta_info"]["output_token_logprobs"]] == ids

    play_stubs([stub], act, rules=PIECES)


def test_an_answer_whose_engine_was_lost_before_it_said_the_end_is_read() -> None:
    async def play() -> None:
        for ended, reason in ((False, b"null"), (True, b'{"type":"length","length":2}')):
            answered = asyncio.get_running_loop().create_future()
            request = PendingRequest(RequestSpec("r", 4, 2), (1,), SamplingParams(2), 0, answered, takes_raw=True)
            request.begin(1, "w", 0)
            raw = RawAnswer(2, b'"ab"', b"[7,8]", {"finish_reason": reason})
            request.take(StreamDelta(raw=raw))
            assert request.made == 2
            request.answer(End.length, (), Reason(ReasonCode.completed, ""))
            sample = await answered
            assert (sample.raw is not None, sample.missing) == (ended, 2 * ended)
            assert (sample.token_ids, sample.text) == (((), "") if ended else ((7, 8), "ab"))

    run(play())


# ---- the adapter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [None, 4])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_what_was_not_read_reads_as_what_was(piece: int | None, logprobs: int | None) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        read = await answer(engine, greedy("a", PROMPT, 9, logprobs=logprobs, piece=piece))
        unread = await answer(engine, greedy("b", PROMPT, 9, logprobs=logprobs, piece=piece, raw=True))
        last = unread.pieces[-1]
        assert all(one.raw is not None and not one.token_ids for one in unread.pieces)
        assert last.raw is not None
        assert (last.raw.tokens, last.finish, last.version) == (9, FinishReason.length, read.pieces[-1].version)
        found = last.raw.delta(logprobs)
        assert (found.token_ids, found.logprobs, found.text) == (read.ids, read.so_far.logprobs, read.so_far.text)
        best = [one for each in read.pieces for one in each.best or ()]
        assert list(found.best or ()) == best

    engine_scene("sglang", play)


def test_tokens_of_several_weights_and_of_events_with_new_ones_only_are_read() -> None:
    async def weights(stub: Any, engine: HttpEngine) -> None:
        pieces, versions = [], dict.fromkeys(("default", "v2"), 0)
        async for piece in engine.generate(greedy("a", PROMPT, 12, piece=2, raw=True, logprobs=0)):
            pieces.append(piece)
            if piece.raw is not None and piece.raw.tokens >= 4:
                stub.version = "v2"
        held = [one.raw.tokens for one in pieces if one.raw is not None][-1]
        for piece in pieces:
            assert piece.raw is None or piece.version == "default"
            versions[str(piece.version)] += len(piece.token_ids)
        assert held + sum(versions.values()) == 12
        assert versions["v2"] >= 1
        assert "".join(one.text or "" for one in pieces if one.raw is None) != ""

    async def new_only(stub: Any, engine: HttpEngine) -> None:
        stub.only_new = True
        got = await answer(engine, greedy("a", PROMPT, 12, piece=4, raw=True))
        raw = [one.raw for one in got.pieces if one.raw is not None]
        assert len(raw) == 1
        assert raw[0].tokens + sum(len(one.token_ids) for one in got.pieces) == 12

    engine_scene("sglang", weights)
    engine_scene("sglang", new_only)


class Wire:
    """A transport to no engine."""

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    pause_reading = resume_reading = close = abort = is_closing = lambda self: False


def told(versions: list[str], end: bytes) -> bytes:
    """The response of an engine that writes an event for each token."""
    events = []
    for at, version in enumerate(versions, 1):
        reason = {"type": "length"} if at == len(versions) else None
        meta = {"id": "a", "completion_tokens": at, "finish_reason": reason, "weight_version": version}
        events.append(json.dumps({"text": "x" * at, "output_ids": list(range(at)), "meta_info": meta}).encode())
    chunks = [b"data: " + event + end for event in (*events, b"[DONE]")]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n"])
@pytest.mark.parametrize("versions", [["1"] * 4, ["1", "1", "2", "2"]])
@pytest.mark.parametrize("raw", [False, True])
def test_events_are_the_same_answer_wherever_they_are_cut(raw: bool, versions: list[str], end: bytes) -> None:
    response = told(versions, end)

    async def read(cut: int) -> list[tuple[str | None, int]]:
        engine = SglangEngine("e", "http://h:1", None)
        reader = engine._reader(greedy("a", PROMPT, 4, piece=4, raw=raw))
        connections = EngineConnections("e", "http://h:1", EngineDeadlines(), lambda *_: None, keep_alive=True)
        connection = _Connection(connections)
        connection.connection_made(cast(Any, Wire()))
        connections.release(connection)

        async def deltas() -> list[StreamDelta]:
            stream = HttpEventStream(connections, "/generate", {}, reader=reader)
            try:
                return [delta async for event in stream for delta in await reader.take(event)]
            finally:
                stream.close()

        reading = asyncio.create_task(deltas())
        for part in (response[:cut], response[cut:]):
            for _ in range(3):
                await asyncio.sleep(0)
            connection.data_received(part)
        found = await reading
        connections.close()
        assert found[-1].finish is FinishReason.length
        read_at_once = [one for one in found if one.raw is None]
        if raw and len(set(versions)) == 1:
            assert not read_at_once
            assert found[-1].raw is not None
            return [(found[-1].version, found[-1].raw.tokens)]
        return [(one.version, len(one.token_ids)) for one in read_at_once]

    async def play() -> None:
        for cut in range(1, len(response)):
            found = await read(cut)
            made = {version: sum(count for one, count in found if one == version) for version, _ in found}
            assert sum(made.values()) == 4 or raw
            if not raw:
                assert made == {version: versions.count(version) for version in versions}, cut

    run(play())


def test_a_count_that_does_not_fit_is_malformed_as_ever() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.fault = "miscount"
        with pytest.raises(EngineMalformedError, match="counts"):
            await answer(engine, greedy("a", PROMPT, 9, piece=None, raw=True))

    engine_scene("sglang", play)
