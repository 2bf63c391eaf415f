"""Pause, sleep, wake and refit through the adapters of vLLM and SGLang, on servers with the traps that were seen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine_answers import answer, greedy, run
from engine_scenes import BOTH, PAUSES, PROMPT, RELEASES, expected, reached, running, scene
from engine_stubs import VllmStub
from trimtab.core.reasons import ReasonCode
from trimtab.runtime.engines.detect import KINDS
from trimtab.runtime.engines.engine import (
    EngineBusyError,
    EngineFailedError,
    EngineMalformedError,
    EnginePausedError,
    EngineRefusedError,
    FinishReason,
    MemoryTag,
    NotSupportedError,
    PauseMode,
    WeightUpdate,
)
from trimtab.runtime.engines.http_engine import HttpEngine, open_session
from trimtab.runtime.rollout.worker_actions import sleep_and_verify

# Pauses.


@BOTH
def test_nothing_is_sent_to_a_paused_engine(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            await engine.pause(PauseMode.abort)
            assert (await task).finish is FinishReason.aborted
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
            await engine.pause(PauseMode.wait)
            assert (await task).ids == expected(30)
        await engine.resume()
        async with running(stub, engine, 30) as task:
            await engine.pause(PauseMode.keep)
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
        with pytest.raises(EnginePausedError, match="was requested"):
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
        with pytest.raises(EngineFailedError, match="but is paused"):
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
        with pytest.raises(EnginePausedError, match="another client"):
            await answer(engine, greedy("a", PROMPT, 2))
        stub.go()
        stub.stamp = None
        assert (await engine.ready()).up
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(kind, play, call_s=2.0)


def test_a_request_caught_in_somebody_elses_pause_is_told_as_that_and_not_as_a_wedge() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            stub.stop("keep")
            with pytest.raises(EnginePausedError, match="another client paused it") as caught:
                await task
            assert len(caught.value.so_far.token_ids) > 0

    scene("vllm", play, silence_s=2.5)


def test_an_idle_engine_whose_loads_stand_still_is_not_taken_for_paused() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.stamp = stub.fresh_at = 1000.0
        assert (await engine.ready()).up
        load = await engine.load()
        assert load.fresh is False, "but its loads are not believed"

    scene("sglang", play)


def test_a_release_without_a_page_that_says_so_is_found_paused_by_loads_that_stand_still() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.refuse["/ready"] = (404, {})
        assert (await engine.ready()).up
        stub.stop("keep")
        stub.stamp = 1000.0
        await engine.load()
        state = await engine.ready()
        assert (state.up, state.paused) == (False, True)
        stub.go()
        stub.stamp = None
        assert (await engine.ready()).up

    scene("sglang", play, call_s=2.0)


def test_a_server_that_calls_itself_ready_over_a_scheduler_that_stands_still_is_wedged_and_not_paused() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.refuse["/ready"] = (200, {})
        stub.stop("keep")
        stub.stamp = stub.fresh_at = 1000.0
        await engine.load()
        state = await engine.ready()
        assert (state.up, state.paused) == (False, False)
        assert "does not generate" in state.why

    scene("sglang", play, call_s=2.0)


def test_health_is_never_asked_of_an_engine_that_computes_for_it() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert (await engine.ready()).up
        assert "/health" not in stub.calls()
        assert "/ready" in stub.calls()

    scene("sglang", play)


def test_the_same_request_from_another_adapter_has_another_name_at_the_engine() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with open_session() as others:
            same = KINDS["sglang"]("other", stub.url, others)
            await answer(same, greedy("a", PROMPT, 2))
            assert (await answer(engine, greedy("a", PROMPT, 100))).ids == expected(100), "it lives through the echo"

    scene("sglang", play)


# Loads.


@BOTH
def test_loads_of_a_paused_engine_are_not_believed(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            load = await engine.load()
            assert (load.running, load.waiting, load.fresh) == (1, 0, True)
            assert load.kv_used_share is not None
            await engine.pause(PauseMode.keep)
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


def test_what_holds_memory_counts_as_running_before_the_engine_counts_it() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        stub.counts_late = True
        async with open_session() as others:
            async with running(stub, KINDS["sglang"]("other", stub.url, others), 500) as task:
                assert (await engine.load()).running == 1
                with pytest.raises(EngineBusyError, match="of other clients"):
                    await engine.sleep(1)
                assert (await task).ids == expected(500)
            assert (await engine.load()).running == 0

    scene("sglang", play)


# Sleep, wake and refit.


@BOTH
@pytest.mark.parametrize("whose", ["ours", "somebody else's"])
def test_memory_is_never_released_with_requests_running(kind: str, whose: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with open_session() as others:
            same = KINDS[kind]("other", stub.url, others)
            tokens = (
                60 if whose == "ours" else 500
            )  # others' may be a figure that lags, so it is looked at for a moment
            async with running(stub, engine if whose == "ours" else same, tokens) as task:
                with pytest.raises(EngineBusyError, match="requests"):
                    await engine.sleep(1)
                assert not stub.calls(*RELEASES)
                assert (await task).ids == expected(tokens)
        assert not stub.dead
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2), "a refused sleep changes nothing"

    scene(kind, play)


def test_requests_that_only_stand_still_keep_vllm_from_sleeping_and_sglang_not() -> None:
    async def vllm(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine):
            await engine.pause(PauseMode.keep)
            with pytest.raises(EngineBusyError, match="hold their memory"):
                await engine.sleep(1)
            assert not stub.calls(*RELEASES)

    async def sglang(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 40) as task:
            await engine.pause(PauseMode.keep)
            await engine.sleep(2)
            assert stub.released == {"weights", "kv_cache"}
            await engine.wake([MemoryTag.weights])
            await engine.refit(WeightUpdate("v2", "v2"))
            await engine.wake([MemoryTag.kv_cache])
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
            await engine.refit(WeightUpdate("v2", "v2"))
        await engine.wake([MemoryTag.weights])
        await engine.wake([MemoryTag.kv_cache])
        assert await engine.version() is None
        assert (await engine.ready()).version is None
        with pytest.raises(EnginePausedError, match="discarded"):
            await engine.resume()
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("a", PROMPT, 2))
        await engine.refit(WeightUpdate("v2", "v2"))
        await engine.resume()
        assert await engine.version() == "v2"
        assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, "v2")

    scene(kind, play)


@BOTH
def test_a_refit_changes_the_answers_and_one_with_requests_running_is_refused(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.refit(WeightUpdate("v7", "v7"))
        assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, "v7")
        async with running(stub, engine):
            with pytest.raises(EngineBusyError):
                await engine.refit(WeightUpdate("v8", "v8"))
        assert stub.loaded == "v7"
        with pytest.raises(NotSupportedError, match="sent by the trainer"):
            await engine.refit(WeightUpdate("", "v9", way="nccl"))

    scene(kind, play)


@BOTH
def test_weights_that_the_trainer_sent_itself_count_when_the_engine_says_so_too(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.sleep(2)
        await engine.wake()
        with pytest.raises(EngineFailedError, match="not 'v3'"):
            await engine.refitted("v3")
        assert await engine.version() is None
        stub.loaded = stub.version = "v3"
        await engine.refitted("v3")
        await engine.resume()
        assert await engine.version() == "v3"
        assert (await answer(engine, greedy("a", PROMPT, 3))).ids == expected(3, "v3")

    scene(kind, play)


def test_a_200_that_says_success_false_is_a_failure() -> None:
    async def sglang(stub: Any, engine: HttpEngine) -> None:
        with pytest.raises(EngineFailedError, match="success: false"):
            await engine.refit(WeightUpdate("nowhere", "v2"))
        assert await engine.version() is None, "nobody knows what it has now"
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("a", PROMPT, 2))
        await engine.refit(WeightUpdate("v2", "v2"))
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2, "v2")

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
            with pytest.raises(EngineRefusedError, match="running requests"):
                await engine.flush()

    scene("sglang", play)


@BOTH
def test_a_refit_whose_version_is_not_confirmed_has_failed(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        path = "/weight_info" if kind == "vllm" else "/model_info"
        stub.refuse[path] = (200, {"weight_version": "default"})
        with pytest.raises(EngineFailedError, match="reports version 'default' and not 'v2'"):
            await engine.refit(WeightUpdate("v2", "v2"))
        assert await engine.version() is None
        assert not (await engine.ready()).up

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


# Memory.


@pytest.mark.parametrize(
    ("readings", "released", "said"),
    [
        ([80 << 30, 78 << 30, 5 << 30], True, "gave 75.0 GiB back"),
        ([80 << 30, 79 << 30], False, "only 1.0 GiB of 80.0 GiB came free"),
        ([None], None, "cannot be read here"),
        ([80 << 30, None], None, "cannot be read any more"),
    ],
)
def test_memory_that_a_sleep_did_not_release_is_said(
    readings: list[int | None], released: bool | None, said: str
) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        left = iter(readings)
        slept = await sleep_and_verify(engine, [0, 1], within_s=0.3, used=lambda gpus: next(left, readings[-1]))
        assert slept.released is released
        assert said in slept.reason.sentence
        assert (slept.reason.code is ReasonCode.memory_kept) == (released is False)
        assert stub.asleep

    scene("vllm", play)


# Answers that cannot be.


@BOTH
def test_loads_that_cannot_be_read_are_nonsense_and_not_zero(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        path = "/metrics" if kind == "vllm" else "/v1/loads"
        for answered in ({"loads": "many"}, {"loads": [{}]}, []):
            stub.refuse[path] = (200, answered)
            with pytest.raises(EngineMalformedError):
                await engine.load()
            with pytest.raises(EngineMalformedError):
                await engine.sleep(1)
        assert not stub.calls(*RELEASES)

    scene(kind, play)


@BOTH
def test_an_engine_out_of_memory_on_waking_stays_shut(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.sleep(1)
        path = "/wake_up" if kind == "vllm" else "/resume_memory_occupation"
        stub.refuse[path] = (500, {"error": {"message": "CUDA out of memory"}})
        with pytest.raises(EngineFailedError, match="out of memory"):
            await engine.wake()
        assert not (await engine.ready()).up
        with pytest.raises(EnginePausedError):
            await answer(engine, greedy("a", PROMPT, 2))
        del stub.refuse[path]
        await engine.wake()
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(kind, play)


@BOTH
def test_an_engine_restarted_with_old_weights_says_its_old_version(kind: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.refit(WeightUpdate("v5", "v5"))
        assert (await engine.ready()).version == "v5"
        stub.loaded = stub.version = "default"  # as after a restart
        state = await engine.ready()
        assert (state.up, state.version) == (True, "default"), "up, but whoever routes can see that it is stale"

    scene(kind, play)
