"""Engines of several releases: what each can do is found out by asking it, and what it lacks is made up for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine_answers import answer, greedy, run
from engine_forms import SGLANG, VLLM, SglangForm, VllmForm
from engine_scenes import PROMPT, expected, reached, running
from trimtab.runtime.engines.engine import (
    EngineBusyError,
    EngineCapability,
    EngineFailedError,
    EngineRefusedError,
    FinishReason,
    MemoryTag,
    NotSupportedError,
    PauseMode,
    WeightUpdate,
)
from trimtab.runtime.engines.http_engine import HttpEngine

C = EngineCapability
PAGES = pytest.mark.parametrize("openapi", [True, False], ids=["page", "no-page"])


def scene(stub: Any, play: Callable[[Any, HttpEngine], Awaitable[None]], **seconds: float) -> None:
    async def whole() -> None:
        async with reached(stub, **seconds) as engine:
            await play(stub, engine)

    run(whole(), within_s=60)


def has(engine: HttpEngine) -> set[str]:
    return {verb.value for verb in engine.capabilities}


# What is found out.

VLLM_HAS = {
    "0.10.0": {"sleep", "flush", "load"},
    "0.10.2": {"sleep", "flush", "load", "refit"},
    "0.11.1": {"sleep", "flush", "load", "refit"},
    "0.12.0": {"sleep", "flush", "load", "refit", "pause"},
    "0.16.0": {"sleep", "flush", "load", "refit", "pause", "keep"},
    "0.26.0": {"sleep", "flush", "load", "refit", "pause", "keep"},
    "0.27.0": {"sleep", "flush", "load", "refit", "pause", "keep", "version"},
    "0.32.0": {"sleep", "flush", "load", "refit", "pause", "keep", "version"},
}
SGLANG_HAS = {
    "0.4.6": {"flush", "refit"},
    "0.4.8": {"sleep", "flush", "refit", "load"},
    "0.4.9": {"sleep", "flush", "refit", "load", "pause"},
    "0.5.2": {"sleep", "flush", "refit", "load", "pause", "version"},
    "0.5.4": {"sleep", "flush", "refit", "load", "pause", "version"},
    "0.5.6": {"sleep", "flush", "refit", "load", "pause", "version", "keep"},
    "0.5.23": {"sleep", "flush", "refit", "load", "pause", "version", "keep"},
}


@pytest.mark.parametrize(("release", "interval", "every"), [("0.26.0", 32, 32), ("0.26.0", 1, 1), ("0.11.1", None, 1)])
def test_the_interval_of_streams_is_asked_of_a_server_that_takes_none_with_a_request(
    release: str, interval: int | None, every: int
) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.ready()
        assert engine.pieces.every == every
        stub.interval = 8
        stub.restart()
        await engine.ready()  # sees that it is another process
        await engine.ready()
        assert engine.pieces.every == 8, "another process has settings of its own"

    stub = VllmForm(release)
    stub.interval = interval
    scene(stub, play)


@PAGES
@pytest.mark.parametrize("release", VLLM)
def test_what_a_vllm_server_can_do_is_found_by_asking_and_changes_nothing(release: str, openapi: bool) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 30) as task:
            assert (await engine.ready()).up
            assert has(engine) == VLLM_HAS[release]
            assert ("collective" in engine.refit_ways) == bool(VLLM[release].get("transfer"))
            assert (await task).ids == expected(30)
        assert not stub.calls("/pause", "/sleep", "/collective_rpc", "/abort_requests", "/reset_prefix_cache")

    scene(VllmForm(release, openapi=openapi), play)


@PAGES
@pytest.mark.parametrize("release", SGLANG)
def test_what_an_sglang_server_can_do_is_found_by_asking_and_changes_nothing(release: str, openapi: bool) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 30) as task:
            assert (await engine.ready()).up
            assert has(engine) == SGLANG_HAS[release]
            assert engine.refit_ways == ("disk", "collective", "same_gpu")
            levels = {"0.4.6": set(), "0.4.8": {2}}.get(release, {1, 2})
            assert engine.sleep_levels == levels
            assert (await task).ids == expected(30)
        assert not stub.calls("/pause_generation", "/release_memory_occupation", "/abort_request", "/flush_cache")

    scene(SglangForm(release, openapi=openapi), play)


# Refits.


@pytest.mark.parametrize("release", [release for release in VLLM if release != "0.10.0"])
def test_a_refit_from_disk_works_on_every_vllm_that_can_load(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        for version in ("1", "2"):
            await engine.refit(WeightUpdate(f"/weights/{version}", version))
            assert await engine.version() == (await engine.ready()).version == version
            assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, f"/weights/{version}")
        assert bool(stub.calls("/update_weight_version")) == VLLM[release]["version"]

    scene(VllmForm(release), play)


@pytest.mark.parametrize("release", [release for release in VLLM if release != "0.10.0"])
def test_weights_that_a_sleep_discarded_are_loaded_before_the_cache_is_back(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.sleep(2)
        await engine.wake([MemoryTag.weights])
        await engine.refit(WeightUpdate("/weights/1", "1"))
        await engine.wake([MemoryTag.kv_cache])
        assert await engine.version() == "1"
        assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, "/weights/1")

    scene(VllmForm(release), play)


def test_a_vllm_that_cannot_load_weights_says_so_and_serves_on() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        with pytest.raises(NotSupportedError, match="no way to refit: this release has no such call"):
            await engine.refit(WeightUpdate("/weights/1", "1"))
        assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5), "nothing was touched"

    scene(VllmForm("0.10.0"), play)


@pytest.mark.parametrize("release", SGLANG)
def test_a_refit_from_disk_works_on_every_sglang(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        for version in ("1", "2"):
            await engine.refit(WeightUpdate(f"/weights/{version}", version))
            assert await engine.version() == (await engine.ready()).version == version
            assert (await answer(engine, greedy("a", PROMPT, 5))).ids == expected(5, f"/weights/{version}")
        with pytest.raises(EngineRefusedError, match="no such folder"):
            await engine.refit(WeightUpdate("nowhere", "3"))
        assert await engine.version() is None

    scene(SglangForm(release), play)


def test_weights_that_were_sent_by_the_trainer_are_recorded_where_the_engine_cannot_say_them() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert (await engine.ready()).up
        stub.loaded = "v3"
        await engine.refitted("3")
        assert await engine.version() == "3"
        assert (await answer(engine, greedy("a", PROMPT, 3))).ids == expected(3, "v3")

    scene(VllmForm("0.26.0"), play)


@pytest.mark.parametrize("stub", [VllmForm("0.26.0"), SglangForm("0.4.9")], ids=["vllm", "sglang"])
def test_what_was_recorded_is_void_when_the_process_is_another(stub: Any) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.refit(WeightUpdate("/weights/1", "1"))
        before = await engine.ready()
        assert (before.version, (await engine.ready()).boots) == ("1", before.boots)
        stub.restart()
        after = await engine.ready()
        assert (after.version, after.boots) == (None, before.boots + 1)
        assert await engine.version() is None
        assert (await engine.ready()).boots == after.boots, "once"

    scene(stub, play)


def test_a_process_that_is_replaced_during_a_refit_has_not_got_the_weights() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        assert (await engine.ready()).up
        stub.restart()
        with pytest.raises(EngineFailedError, match="replaced during the refit"):
            await engine.refitted("1")
        assert await engine.version() is None

    scene(VllmForm("0.26.0"), play)


def test_an_engine_that_shows_neither_version_nor_process_is_not_believed_until_it_is_vouched_for() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        with pytest.raises(EngineFailedError, match=r"pool\.vouch"):
            await engine.refit(WeightUpdate("/weights/1", "1"))
        assert await engine.version() is None
        assert (await answer(engine, greedy("a", PROMPT, 3))).ids == expected(3, "/weights/1"), "whoever asks it"

    scene(VllmForm("0.26.0", shows=False), play)


def test_an_engine_that_trimtab_started_needs_no_start_time() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        engine.launched = True
        await engine.refit(WeightUpdate("/weights/1", "1"))
        assert await engine.version() == "1"

    scene(VllmForm("0.26.0", shows=False), play)


def test_a_path_that_two_versions_had_proves_nothing() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.refit(WeightUpdate("/weights/latest", "1"))
        with pytest.raises(EngineFailedError, match=r"several versions share it; call pool\.vouch\('one'\)"):
            await engine.refit(WeightUpdate("/weights/latest", "2"))
        stub.loaded = "sent by NCCL"
        with pytest.raises(EngineFailedError, match=r"pool\.vouch"):
            await engine.refitted("3")

    scene(SglangForm("0.4.9"), play)


# Pauses and aborts.


@pytest.mark.parametrize("release", VLLM)
def test_pauses_of_every_vllm_do_what_they_say_or_are_refused_with_nothing_sent(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 60) as task:
            if "keep" in VLLM_HAS[release]:
                await engine.pause(PauseMode.keep)
                await engine.resume()
            else:
                with pytest.raises(NotSupportedError, match="cannot hold running requests"):
                    await engine.pause(PauseMode.keep)
                assert not stub.calls("/pause")
            await engine.pause(PauseMode.wait)
            assert (await task).ids == expected(60), "a pause that waits aborts nothing"
        await engine.resume()
        async with running(stub, engine) as task:
            await engine.pause(PauseMode.abort)
            assert (await task).finish is FinishReason.aborted
        await engine.resume()
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(VllmForm(release), play, abort_s=0.2)


@pytest.mark.parametrize("release", SGLANG)
def test_pauses_of_every_sglang_do_what_they_say_or_are_refused_with_nothing_sent(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 60) as task:
            if "keep" in SGLANG_HAS[release]:
                await engine.pause(PauseMode.keep)
                await engine.resume()
            else:
                with pytest.raises(NotSupportedError, match="cannot hold running requests"):
                    await engine.pause(PauseMode.keep)
                assert not stub.calls("/pause_generation")
            await engine.pause(PauseMode.wait)
            assert (await task).ids == expected(60)
        await engine.resume()
        async with running(stub, engine) as task:
            await engine.pause(PauseMode.abort)
            assert (await task).finish is FinishReason.aborted
        await engine.resume()
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(SglangForm(release), play, abort_s=0.2)


@pytest.mark.parametrize("release", [release for release in SGLANG if SGLANG[release]["abort"]])
def test_an_abort_of_one_request_ends_no_other_whose_id_begins_alike(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        # The ids of the first and the tenth attempt of a request begin alike.
        first = asyncio.create_task(answer(engine, greedy("a", PROMPT, 3000)))
        while not stub.running:
            await asyncio.sleep(0.01)
        engine._attempts = 9
        engine._open_streams["b"] = engine._open_streams.pop("a")
        tenth = asyncio.create_task(answer(engine, greedy("a", PROMPT, 60)))
        while len(stub.running) < 2:
            await asyncio.sleep(0.01)
        await engine.abort(["b"])
        assert (await tenth).ids == expected(60)
        assert (await first).finish is FinishReason.aborted

    scene(SglangForm(release), play, abort_s=0.5)


@pytest.mark.parametrize("stub", [VllmForm("0.26.0"), SglangForm("0.4.8")], ids=["vllm", "sglang"])
def test_all_requests_are_aborted_one_by_one_where_the_engine_wants_ids(stub: Any) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine) as task:
            await engine.abort()
            ended = await task
            assert ended.finish is FinishReason.aborted
            assert ended.ids == expected(len(ended.ids))

    scene(stub, play)


# Sleep and loads.


@pytest.mark.parametrize("release", VLLM)
def test_every_vllm_sleeps_and_wakes(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        await engine.sleep(1)
        assert stub.asleep
        await engine.wake()
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2)

    scene(VllmForm(release), play)


def test_an_sglang_that_releases_all_memory_at_once_is_not_put_to_sleep_with_its_weights() -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        with pytest.raises(NotSupportedError, match="keep its weights"):
            await engine.sleep(1)
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2), "a refused sleep changes nothing"
        await engine.sleep(2)
        assert await engine.version() is None
        await engine.wake([MemoryTag.weights])
        await engine.refit(WeightUpdate("/weights/1", "1"))
        assert (await answer(engine, greedy("a", PROMPT, 2))).ids == expected(2, "/weights/1")

    scene(SglangForm("0.4.8"), play)


@pytest.mark.parametrize("release", SGLANG)
def test_loads_of_every_sglang_tell_busy_from_idle_or_are_known_to_be_missing(release: str) -> None:
    async def play(stub: Any, engine: HttpEngine) -> None:
        async with running(stub, engine, 400) as task:
            if SGLANG[release]["loads"] is None:
                with pytest.raises(NotSupportedError, match="how many requests"):
                    await engine.load()
                with pytest.raises(NotSupportedError, match="no way to sleep"):
                    await engine.sleep(1)
            else:
                load = await engine.load()
                assert (load.running, load.fresh) == (1, True)
                with pytest.raises(EngineBusyError):
                    await engine.sleep(2)
            assert (await task).ids == expected(400)
        if SGLANG[release]["loads"] is not None:
            assert (await engine.load()).running == 0

    scene(SglangForm(release), play)
