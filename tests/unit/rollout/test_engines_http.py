"""What the adapters of vLLM and SGLang make of streams, faults and addresses, on servers that behave as seen."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from engine_answers import answer, greedy, run
from engine_scenes import BOTH, LONG, PROMPT, expected, reached, running, scene
from engine_stubs import VllmStub
from trimtab.core.errors import InputError, UnreachableError
from trimtab.model.rollout import ReleaseSupport
from trimtab.runtime.engines.detect import KINDS, attach, detect
from trimtab.runtime.engines.engine import (
    Engine,
    EngineDeadlines,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineMalformedError,
    EngineRefusedError,
    EngineWedgedError,
    FinishReason,
    GenerateRequest,
    PartialOutput,
)
from trimtab.runtime.engines.http_engine import HttpEngine, open_session
from trimtab.runtime.engines.http_stream import EngineConnections, HttpEventStream

# Streams.


def test_stop_ids_are_watched_for_where_the_engine_forgets_them_with_the_end_tokens() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stop = expected(5)[-1]
        until = expected(expected(5).index(stop) + 1)
        order = greedy("a", PROMPT, 5000, stop_ids=(stop,), logprobs=1, extra={"ignore_eos": True})
        got = await answer(engine, order)
        assert (got.ids, got.finish, got.pieces[-1].stopped_by) == (until, FinishReason.stop, stop)
        assert len(got.so_far.logprobs or ()) == len(until)
        while stub.running:
            await asyncio.sleep(0.01)
        assert "/abort_request" in stub.calls()

    scene("sglang", play)


@BOTH
def test_an_answer_streams_as_ids_with_log_probabilities_and_text(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert isinstance(engine, Engine)
        got = await answer(engine, greedy("a", PROMPT, 6, logprobs=2))
        assert got.ids == expected(6)
        assert got.finish is FinishReason.length
        assert got.so_far.logprobs == (-0.5,) * 6
        assert [best for piece in got.pieces for best in piece.best or ()] == [
            ((one, -0.5), (1, -1.5)) for one in got.ids
        ]
        assert len(got.so_far.text) == 6
        assert len(got.pieces) == 6, "every token came when it was made"

    scene(kind, play)


def test_what_is_ordered_reaches_the_engines_in_their_words() -> None:
    order = GenerateRequest(
        "a", PROMPT, 9, min_tokens=2, stop=("x",), stop_ids=(7,), temperature=0.5, top_p=0.9, top_k=3, seed=11,
        extra={"ignore_eos": True},
    )  # fmt: skip

    async def vllm(stub: Any, engine: HttpEngine) -> None:
        await answer(engine, order)
        shared = {"max_tokens": 9, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [7], "seed": 11, "top_k": 3}
        assert {key: stub.body[key] for key in shared} == shared
        assert stub.body["ignore_eos"]

    async def sglang(stub: Any, engine: HttpEngine) -> None:
        await answer(engine, order)
        wanted = {"max_new_tokens": 9, "min_new_tokens": 2, "stop": ["x"], "stop_token_ids": [7], "sampling_seed": 11}
        sampling = stub.body["sampling_params"]
        assert {key: sampling[key] for key in wanted} == wanted
        assert sampling["ignore_eos"]
        assert sampling["top_k"] == 3
        await answer(engine, greedy("b", PROMPT, 1))
        assert stub.body["sampling_params"]["top_k"] == -1

    scene("vllm", vllm)
    scene("sglang", sglang)


def test_ids_that_come_whole_or_only_new_are_told_apart_by_the_count() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.only_new = True
        got = await answer(engine, greedy("a", PROMPT, 6, logprobs=0))
        assert got.ids == expected(6)
        assert len(got.so_far.text) == 6

    scene("sglang", play)


def test_tokens_made_by_two_weights_are_told_apart() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        got: list[int] = []

        def each(so_far: PartialOutput) -> None:
            if len(so_far.token_ids) == 4:
                stub.loaded = stub.version = "v2"

        whole = await answer(engine, greedy("a", PROMPT, 10), each)
        by = dict.fromkeys(("default", "v2"), 0)
        for piece in whole.pieces:
            by[str(piece.version)] += len(piece.token_ids)
            got.extend(piece.token_ids)
        assert sum(by.values()) == len(got) == 10
        assert by["default"] >= 4
        assert by["v2"] >= 1

    scene("sglang", play)


# Faults within a stream: each has its own error, and each says what there was until then.

FAULTS = {
    "cut": (EngineGoneError, "POST /"),
    "silent": (EngineWedgedError, "no bytes for 3 s"),
    "failure": (EngineFailedError, "the scheduler died"),
    "nonsense": (EngineMalformedError, "no object"),
    "miscount": (EngineMalformedError, "it counts"),
}


@BOTH
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_stream_that_goes_wrong_ends_in_an_error_with_the_tokens_so_far(kind: str, fault: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        error, said = FAULTS[fault]
        stub.fault = fault
        with pytest.raises(error, match=said) as caught:
            await answer(engine, greedy("a", PROMPT, 20, logprobs=0))
        assert isinstance(caught.value, EngineError)
        assert caught.value.so_far.token_ids == expected(2)
        assert caught.value.so_far.logprobs == (-0.5, -0.5)
        assert caught.value.engine == "one"
        assert (await answer(engine, greedy("a", PROMPT, 3))).ids == expected(3), "the id and the engine are free again"

    # The server shares our event loop: a silence must be longer than the loop may stand still on a busy machine.
    scene(kind, play, silence_s=3.0 if fault == "silent" else 60.0)


@BOTH
def test_a_stream_without_a_finish_is_no_answer(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        original = stub.event
        stub.event = lambda one, finish, fault: original(one, None, fault)
        with pytest.raises(EngineGoneError, match="without finishing") as caught:
            await answer(engine, greedy("a", PROMPT, 4))
        assert caught.value.so_far.token_ids == expected(4)

    scene(kind, play)


@BOTH
def test_a_500_is_the_engines_fault_and_a_400_the_orders(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.fault = "error"
        with pytest.raises(EngineFailedError, match="out of memory"):
            await answer(engine, greedy("a", PROMPT, 4))
        for fault, said in (("refuse", "too many tokens"), ("late refusal", "no such grammar")):
            stub.fault = fault
            with pytest.raises(EngineRefusedError, match=said):
                await answer(engine, greedy("a", PROMPT, 4))
        if kind == "sglang":
            original, status = stub.event, 400

            def refusing(one: Any, finish: Any, fault: str) -> Any:
                told = original(one, finish, fault)
                told["meta_info"]["finish_reason"] = {"type": "abort", "message": "no room", "status_code": status}
                return told

            stub.event = refusing
            with pytest.raises(EngineRefusedError, match="no room"):
                await answer(engine, greedy("a", PROMPT, 4))
            status = 503
            with pytest.raises(EngineFailedError, match="no room"):
                await answer(engine, greedy("a", PROMPT, 4))

    scene(kind, play)


@BOTH
def test_an_abort_by_an_engine_that_is_ending_is_no_abort_of_somebody_else(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            stub.refuse |= {"/health": (503, {}), "/model_info": (503, {})}
            stub.abort(None)
            with pytest.raises(EngineGoneError, match="it ended") as caught:
                await task
            made = len(caught.value.so_far.token_ids)
            assert caught.value.so_far.token_ids == expected(made)
            assert made > 0

    scene(kind, play)


@BOTH
def test_an_engine_that_dies_breaks_every_stream_and_is_not_ready(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            stub.die()
            with pytest.raises(EngineGoneError) as caught:
                await task
            assert caught.value.so_far.token_ids == expected(len(caught.value.so_far.token_ids))
        assert not (await engine.ready()).up

    scene(kind, play)


@BOTH
def test_a_reader_that_takes_its_time_is_no_silence_of_the_engine(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.step_s = 0.0
        got = 0
        async for piece in engine.generate(greedy("a", PROMPT, 4)):
            if not got:
                await asyncio.sleep(3.5)
            got += len(piece.token_ids)
        assert got == 4

    scene(kind, play, silence_s=2.5)


# Aborts.


@BOTH
def test_a_client_that_goes_away_ends_the_work_on_the_engine(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with aclosing(engine.generate(greedy("a", PROMPT, LONG))) as stream:
            async for _ in stream:
                break
        while stub.running:
            await asyncio.sleep(0.01)
        if kind == "sglang":
            await engine.close()
            assert "/abort_request" in stub.calls(), "it would notice a closed connection only after two seconds"

    scene(kind, play)


@BOTH
def test_an_abort_ends_only_the_streams_that_it_names(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.step_s = 0.02
        async with running(stub, engine, 40) as task:
            other = asyncio.create_task(answer(engine, greedy("other", PROMPT, LONG)))
            while len(stub.running) < 2:
                await asyncio.sleep(0.01)
            await engine.abort(["unknown"])
            await engine.abort([])
            await engine.abort(["other", "unknown"])
            ended = await other
            assert ended.finish is FinishReason.aborted
            assert ended.ids == expected(len(ended.ids))
            assert (await task).ids == expected(40)

    scene(kind, play)


def test_an_abort_that_the_engine_does_not_know_of_closes_the_connection() -> None:
    async def play() -> None:
        stub = VllmStub()
        stub.development = False
        async with reached(stub) as engine, running(stub, engine) as task:
            await engine.abort()
            assert (await task).finish is FinishReason.aborted
            while stub.running:
                await asyncio.sleep(0.01)

    run(play())


@BOTH
def test_an_abort_of_somebody_else_is_told_apart_and_keeps_the_tokens(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            stub.abort(None)
            ended = await task
            assert ended.finish is FinishReason.aborted_elsewhere
            assert ended.ids == expected(len(ended.ids))

    scene(kind, play)


@BOTH
def test_a_request_is_sent_once_under_its_id(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            with pytest.raises(InputError, match="already running"):
                await answer(engine, greedy("long", PROMPT, 2))

    scene(kind, play)


# Addresses and dialects.


def test_only_private_addresses_are_spoken_to() -> None:
    async def play() -> None:
        async with open_session() as session:
            for url in ("http://8.8.8.8:8000", "http://0.0.0.0:8000", "ftp://127.0.0.1", "127.0.0.1:8000"):
                engine = KINDS["vllm"]("one", url, session)
                with pytest.raises(InputError):
                    await answer(engine, greedy("a", PROMPT, 2))
                state = await engine.ready()
                assert not state.up
                with pytest.raises(InputError):
                    await detect(url, session)

    run(play())


@BOTH
def test_the_dialect_and_its_release_are_found_and_unknown_ones_said(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with open_session() as session:
            found, dialect = await attach("one", stub.url, session)
            assert (found.kind, dialect.release, dialect.note) == (kind, stub.release, "")
            assert found.release is ReleaseSupport.tried
            stub.release = "9.1.0"
            assert "9.1.0 was never tried" in (await detect(stub.url, session)).note
            again, _ = await attach("two", stub.url, session)
            assert again.release is ReleaseSupport.untried
            assert (await engine.ready()).dialect == f"{kind} 9.1.0"

    scene(kind, play)


def test_what_is_no_engine_is_not_taken_for_one() -> None:
    async def play() -> None:
        async def version(request: web.Request) -> web.Response:
            return web.json_response(["1.0"])

        app = web.Application()
        app.router.add_get("/version", version)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with open_session() as session:
            with pytest.raises(UnreachableError, match="neither vLLM nor SGLang nor"):
                await detect(url, session)
        await runner.cleanup()

    run(play())


def test_orders_and_deadlines_that_make_no_sense_are_refused_where_they_are_made() -> None:
    for wrong in (
        {"token_ids": ()},
        {"max_tokens": 0},
        {"min_tokens": 9},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"stop": ("",)},
    ):
        with pytest.raises(InputError):
            GenerateRequest(**({"id": "a", "token_ids": (1,), "max_tokens": 4} | wrong))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="silence_s"):
        EngineDeadlines(silence_s=0)


# Redirects.


async def test_connections_that_wait_for_the_rest_of_an_answer_are_closed_with_the_others() -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: {"a": 1}\n\n\r\n'
        )  # not the end
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connections = EngineConnections("one", url, EngineDeadlines(), lambda *_: None, keep_alive=True)
        stream = HttpEventStream(connections, "/generate", {})
        assert await stream.__anext__() == {"a": 1}
        await stream.rest()
        assert connections.open
        connections.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not connections.open
        await ended.wait()


@BOTH
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_of_an_engine_is_an_error_and_no_other_host_is_asked(kind: str, status: int) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        other = VllmStub()
        async with other.up():
            paths = {"vllm": ("/v1/completions", "/load"), "sglang": ("/generate", "/model_info")}[kind]

            async def elsewhere(request: web.Request) -> web.Response:
                return web.Response(status=status, headers={"location": f"{other.url}{request.path}"})

            stub.elsewhere = dict.fromkeys(paths, elsewhere)
            with pytest.raises(EngineFailedError, match=rf"redirect.*{other.url}"):
                await answer(engine, greedy("a", PROMPT, 4))
            with pytest.raises(EngineFailedError, match="redirect"):
                await engine.wire.get(paths[1])
            assert other.asked == []

    scene(kind, play)
