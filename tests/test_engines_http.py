"""The adapters of vLLM and SGLang against servers that behave as the real ones were seen to, traps included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from engine_answers import Whole, answer, greedy, run
from engine_stubs import SglangStub, Stub, VllmStub, follows
from trimtab.model.errors import InputError, UnreachableError
from trimtab.model.reason import Code
from trimtab.runtime.engines.detect import KINDS, attach, detect
from trimtab.runtime.engines.engine import (
    Deadlines,
    Engine,
    EngineBusyError,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineNonsenseError,
    EnginePausedError,
    EngineWedgedError,
    Finish,
    GenerateOrder,
    NotOfferedError,
    OrderRefusedError,
    Part,
    Pause,
    Refit,
    SoFar,
)
from trimtab.runtime.engines.http_engine import HttpEngine
from trimtab.runtime.engines.memory import sleep_and_look, used_bytes
from trimtab.runtime.engines.wire import open_session

PROMPT = (4, 5, 6)
BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
RELEASES = ("/sleep", "/release_memory_occupation")
PAUSES = ("/pause", "/pause_generation")
LONG = 5000


def stub_of(kind: str) -> Any:
    return VllmStub() if kind == "vllm" else SglangStub()


@asynccontextmanager
async def reached(stub: Stub, **seconds: float) -> AsyncIterator[HttpEngine]:
    kind = "vllm" if isinstance(stub, VllmStub) else "sglang"
    async with stub.up(), open_session() as session:
        engine = KINDS[kind]("one", stub.url, session, Deadlines(**seconds))
        yield engine
        await engine.close()


def scene(kind: str, play: Callable[[Any, HttpEngine], Awaitable[None]], **seconds: float) -> None:
    """Plays with one stub and its adapter."""

    async def whole() -> None:
        stub = stub_of(kind)
        async with reached(stub, **seconds) as engine:
            await play(stub, engine)

    run(whole(), within_s=60)


def expected(tokens: int, version: str = "default", prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(follows(ids[-1], version))
    return tuple(ids[len(prompt) :])


@asynccontextmanager
async def running(stub: Stub, engine: HttpEngine, tokens: int = LONG) -> AsyncIterator[asyncio.Task[Whole]]:
    """A request that has begun to stream."""
    begun = asyncio.Event()
    task = asyncio.create_task(answer(engine, greedy("long", PROMPT, tokens), lambda _: begun.set()))
    await begun.wait()
    yield task
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


# Streams.


@BOTH
def test_an_answer_streams_as_ids_with_log_probabilities_and_text(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert isinstance(engine, Engine)
        got = await answer(engine, greedy("a", PROMPT, 6, logprobs=2))
        assert got.ids == expected(6)
        assert got.finish is Finish.length
        assert got.so_far.logprobs == (-0.5,) * 6
        assert [best for piece in got.pieces for best in piece.best or ()] == [
            ((one, -0.5), (1, -1.5)) for one in got.ids
        ]
        assert len(got.so_far.text) == 6
        assert len(got.pieces) == 6, "every token came when it was made"

    scene(kind, play)


def test_what_is_ordered_reaches_the_engines_in_their_words() -> None:
    order = GenerateOrder(
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

        def each(so_far: SoFar) -> None:
            if len(so_far.token_ids) == 4:
                stub.loaded = "v2"

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
    "silent": (EngineWedgedError, r"no bytes for 0\.3 s"),
    "failure": (EngineFailedError, "the scheduler died"),
    "nonsense": (EngineNonsenseError, "no object"),
    "miscount": (EngineNonsenseError, "it counts"),
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

    scene(kind, play, silence_s=0.3, call_s=5)


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
        stub.fault = "refuse"
        with pytest.raises(OrderRefusedError, match="too many tokens"):
            await answer(engine, greedy("a", PROMPT, 4))

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
            got += len(piece.token_ids)
            await asyncio.sleep(0.5)
        assert got == 4

    scene(kind, play, silence_s=0.2)


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
            await engine.abort(["other", "unknown"])
            ended = await other
            assert ended.finish is Finish.aborted
            assert ended.ids == expected(len(ended.ids))
            assert (await task).ids == expected(40)

    scene(kind, play)


def test_an_abort_that_the_engine_does_not_know_of_closes_the_connection() -> None:
    async def play() -> None:
        stub = VllmStub()
        stub.development = False
        async with reached(stub) as engine, running(stub, engine) as task:
            await engine.abort()
            assert (await task).finish is Finish.aborted
            while stub.running:
                await asyncio.sleep(0.01)

    run(play())


@BOTH
def test_an_abort_of_somebody_else_is_told_apart_and_keeps_the_tokens(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            stub.abort(None)
            ended = await task
            assert ended.finish is Finish.aborted_elsewhere
            assert ended.ids == expected(len(ended.ids))

    scene(kind, play)


@BOTH
def test_a_request_is_sent_once_under_its_id(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            with pytest.raises(InputError, match="already running"):
                await answer(engine, greedy("long", PROMPT, 2))

    scene(kind, play)


# Pauses.


@BOTH
def test_nothing_is_sent_to_a_paused_engine(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            await engine.pause(Pause.abort)
            assert (await task).finish is Finish.aborted
        sent = len(stub.calls("/generate", "/v1/completions"))
        with pytest.raises(EnginePausedError, match=r"paused \(abort\)"):
            await answer(engine, greedy("b", PROMPT, 2))
        state = await engine.ready()
        assert (state.up, state.paused) == (False, True), "whatever its health page says"
        assert len(stub.calls("/generate", "/v1/completions")) == sent
        assert stub.hung == 0
        await engine.resume()
        assert (await engine.ready()).up
        assert (await answer(engine, greedy("b", PROMPT, 2))).ids == expected(2)

    scene(kind, play)


@BOTH
def test_a_pause_that_waits_lets_running_requests_end_and_one_that_keeps_holds_them(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 30) as task:
            await engine.pause(Pause.wait)
            assert (await task).ids == expected(30)
        await engine.resume()
        async with running(stub, engine, 30) as task:
            await engine.pause(Pause.keep)
            assert not task.done()
            await engine.resume()
            assert (await task).ids == expected(30)

    scene(kind, play)


@BOTH
def test_a_pause_that_failed_leaves_the_gate_shut(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        path = PAUSES[kind == "sglang"]
        stub.refuse[path] = (500, {"error": "no"})
        with pytest.raises(EngineFailedError):
            await engine.pause()
        with pytest.raises(EnginePausedError, match="was asked for"):
            await answer(engine, greedy("a", PROMPT, 2))
        assert not (await engine.ready()).up
        await engine.resume()
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(kind, play)


def test_a_pause_or_resume_that_did_not_happen_is_a_failure_though_the_status_was_200() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.refuse["/pause"] = (200, {"status": "busy"})
        with pytest.raises(EngineFailedError, match="not 'paused'"):
            await engine.pause()
        del stub.refuse["/pause"]
        await engine.pause()
        stub.refuse["/resume"] = (200, {"status": "resumed"})
        with pytest.raises(EngineFailedError, match="and is paused"):
            await engine.resume()
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("a", PROMPT, 2))

    scene("vllm", play)


@BOTH
def test_a_pause_of_somebody_else_shuts_the_gate_when_it_is_seen_and_opens_it_when_it_is_over(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert (await engine.ready()).up
        stub.stop("keep")
        stub.fresh_at = stub.stamp = 1000.0  # its loads stand still, long ago
        if kind == "sglang":
            assert (await engine.load()).fresh is True, "it moved, though nobody knows the clock over there"
        state = await engine.ready()
        assert (state.up, state.paused) == (False, True)
        with pytest.raises(EnginePausedError, match="somebody else"):
            await answer(engine, greedy("a", PROMPT, 2))
        stub.go()
        stub.stamp = None
        assert (await engine.ready()).up
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(kind, play, call_s=0.5)


def test_a_request_caught_in_somebody_elses_pause_is_told_as_that_and_not_as_a_wedge() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            stub.stop("keep")
            with pytest.raises(EnginePausedError, match="somebody else paused it") as caught:
                await task
            assert len(caught.value.so_far.token_ids) > 0

    scene("vllm", play, silence_s=0.3)


def test_an_idle_engine_whose_loads_stand_still_is_not_taken_for_paused() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.stamp = stub.fresh_at = 1000.0
        assert (await engine.ready()).up
        load = await engine.load()
        assert load.fresh is False, "but its loads are not believed"

    scene("sglang", play)


def test_health_is_never_asked_of_an_engine_that_computes_for_it() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert (await engine.ready()).up
        assert "/health" not in stub.calls()
        assert "/ready" in stub.calls()

    scene("sglang", play)


# Loads.


@BOTH
def test_loads_of_a_paused_engine_are_not_believed(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            load = await engine.load()
            assert (load.running, load.waiting, load.fresh) == (1, 0, True)
            assert load.kv_used_share is not None
            await engine.pause(Pause.keep)
            assert (await engine.load()).fresh is False

    scene(kind, play)


def test_requests_that_hang_in_a_paused_engine_are_counted_though_its_metrics_hide_them() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.stop("keep")
        async with open_session() as others:
            body = {"model": "tiny", "prompt": [1], "max_tokens": 1, "request_id": "x", "return_token_ids": True}
            task = asyncio.create_task(others.post(stub.url + "/v1/completions", json=body))
            while not stub.hung:
                await asyncio.sleep(0.01)
            load = await engine.load()
            assert (load.running, load.waiting, load.fresh) == (0, 1, False)
            stub.go()
            (await task).close()

    scene("vllm", play)


# Sleep, wake and refit.


@BOTH
@pytest.mark.parametrize("whose", ["ours", "somebody else's"])
def test_memory_is_never_released_with_requests_running(kind: str, whose: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with open_session() as others:
            same = KINDS[kind]("other", stub.url, others)
            async with running(stub, engine if whose == "ours" else same, 60) as task:
                with pytest.raises(EngineBusyError, match="requests"):
                    await engine.sleep(1)
                assert not stub.calls(*RELEASES)
                assert (await task).ids == expected(60)
        assert not stub.dead
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2), "a refused sleep changes nothing"

    scene(kind, play)


def test_requests_that_only_stand_still_keep_vllm_from_sleeping_and_sglang_not() -> None:
    async def vllm(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            await engine.pause(Pause.keep)
            with pytest.raises(EngineBusyError, match="hold their memory"):
                await engine.sleep(1)
            assert not stub.calls(*RELEASES)

    async def sglang(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 40) as task:
            await engine.pause(Pause.keep)
            await engine.sleep(2)
            assert stub.released == {"weights", "kv_cache"}
            await engine.wake([Part.weights])
            await engine.refit(Refit("v2", "v2"))
            await engine.wake([Part.kv_cache])
            ended = await task
            assert len(ended.ids) == 40
            assert {piece.version for piece in ended.pieces} == {"default", "v2"}

    scene("vllm", vllm)
    scene("sglang", sglang)


@BOTH
def test_an_engine_is_paused_before_its_memory_goes_and_refuses_until_it_is_awake(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.sleep(1)
        calls = stub.calls(*RELEASES, *PAUSES)
        assert calls == [PAUSES[kind == "sglang"], RELEASES[kind == "sglang"]]
        with pytest.raises(EnginePausedError, match="asleep"):
            await answer(engine, greedy("a", PROMPT, 2))
        with pytest.raises(EnginePausedError, match="asleep"):
            await engine.resume()
        assert not (await engine.ready()).up
        await engine.wake()
        assert stub.released == set()
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(kind, play)


@BOTH
def test_discarded_weights_have_no_version_until_a_refit_is_confirmed(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert await engine.version() == "default"
        await engine.sleep(2)
        assert await engine.version() is None, "whatever it reports"
        with pytest.raises(EnginePausedError, match="weights are asleep"):
            await engine.refit(Refit("v2", "v2"))
        await engine.wake([Part.weights])
        await engine.wake([Part.kv_cache])
        assert await engine.version() is None
        assert (await engine.ready()).version is None
        with pytest.raises(EnginePausedError, match="discarded"):
            await engine.resume()
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("a", PROMPT, 2))
        await engine.refit(Refit("v2", "v2"))
        await engine.resume()
        assert await engine.version() == "v2"
        assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, "v2")

    scene(kind, play)


@BOTH
def test_a_refit_changes_the_answers_and_one_with_requests_running_is_refused(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.refit(Refit("v7", "v7"))
        assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, "v7")
        async with running(stub, engine):
            with pytest.raises(EngineBusyError):
                await engine.refit(Refit("v8", "v8"))
        assert stub.loaded == "v7"
        with pytest.raises(NotOfferedError, match="trainer's to send"):
            await engine.refit(Refit("", "v9", way="nccl"))

    scene(kind, play)


def test_a_200_that_says_success_false_is_a_failure() -> None:
    async def sglang(stub: Any, engine: HttpEngine) -> None:
        with pytest.raises(EngineFailedError, match="success: false"):
            await engine.refit(Refit("nowhere", "v2"))
        assert await engine.version() == "default"

    async def vllm(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            with pytest.raises(EngineFailedError, match="success: false"):
                await engine.flush()
        while stub.running:
            await asyncio.sleep(0.01)
        await engine.flush()

    scene("sglang", sglang)
    scene("vllm", vllm)


def test_a_cache_that_cannot_be_flushed_is_said() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            with pytest.raises(OrderRefusedError, match="running requests"):
                await engine.flush()

    scene("sglang", play)


@BOTH
def test_a_refit_whose_version_is_not_confirmed_has_failed(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        path = "/weight_info" if kind == "vllm" else "/model_info"
        stub.refuse[path] = (200, {"weight_version": "default"})
        with pytest.raises(EngineFailedError, match="says version 'default' and not 'v2'"):
            await engine.refit(Refit("v2", "v2"))

    scene(kind, play)


def test_a_sleep_that_did_not_happen_is_a_failure() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.refuse["/sleep"] = (200, {})
        with pytest.raises(EngineFailedError, match="not asleep"):
            await engine.sleep(1)
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("a", PROMPT, 2))

    scene("vllm", play)


def test_an_engine_without_development_mode_says_what_to_do() -> None:
    async def play() -> None:
        stub = VllmStub()
        stub.development = False
        async with reached(stub) as engine:
            assert (await engine.ready()).up
            assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)
            with pytest.raises(EngineFailedError) as caught:
                await engine.pause()
            assert "VLLM_SERVER_DEV_MODE" in str(caught.value)

    run(play())


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
            stub.release = "9.1.0"
            assert "9.1.0 was never tried" in (await detect(stub.url, session)).note
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
            GenerateOrder(**({"id": "a", "token_ids": (1,), "max_tokens": 4} | wrong))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="silence_s"):
        Deadlines(silence_s=0)


# Memory.


@pytest.mark.parametrize(
    ("readings", "released", "said"),
    [
        ([80 << 30, 78 << 30, 5 << 30], True, "gave 75.0 GiB back"),
        ([80 << 30, 79 << 30], False, "only 1.0 GiB of 80.0 GiB came free"),
        ([None], None, "cannot be seen from here"),
        ([80 << 30, None], None, "cannot be seen any more"),
    ],
)
def test_memory_that_a_sleep_did_not_release_is_said(
    readings: list[int | None], released: bool | None, said: str
) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        left = iter(readings)
        slept = await sleep_and_look(engine, [0, 1], within_s=0.3, used=lambda gpus: next(left, readings[-1]))
        assert slept.released is released
        assert said in slept.reason.sentence
        assert (slept.reason.code is Code.memory_kept) == (released is False)
        assert stub.asleep

    scene("vllm", play)


def test_memory_of_gpus_that_are_not_there_is_unknown() -> None:
    assert used_bytes([]) is None
    assert used_bytes([4096]) is None
