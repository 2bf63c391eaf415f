"""The adapters on real vLLM and SGLang servers: drain, sleep, wake, refit, kill and SIGTERM with requests in flight.

Run by `make test-engines`, which makes the environments first (tools/make-engine-envs). On CPU no memory is released,
so what a sleep frees is not looked at here.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from engine_processes import MODELS, PROMPT, RELEASES, START_S, Process, come_up, engine

from engine_answers import Whole, answer, answers, greedy, prompts, run
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.engines.engine import (
    EngineBusyError,
    EngineCapability,
    EngineDeadlines,
    EngineError,
    EngineGoneError,
    EnginePausedError,
    FinishReason,
    GenerateRequest,
    MemoryTag,
    PauseMode,
    WeightUpdate,
)
from trimtab.runtime.engines.http_engine import HttpEngine, open_session

pytestmark = pytest.mark.engines
LONG = 1900
FREE = {"ignore_eos": True}  # answers as long as they were ordered


@pytest.fixture(scope="module", params=RELEASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server of each release that no test hurts."""
    with engine(request.param, tmp_path_factory.mktemp("engines")) as started:
        run(come_up(started), within_s=START_S)
        yield started


@asynccontextmanager
async def reached(process: Process, **seconds: float) -> AsyncIterator[HttpEngine]:
    async with open_session() as session:
        adapter, _ = await attach("one", process.url, session, EngineDeadlines(**seconds))
        yield adapter
        await adapter.close()


@asynccontextmanager
async def running(adapter: HttpEngine, tokens: int = LONG, key: str = "long") -> AsyncIterator[asyncio.Task[Whole]]:
    """A request that has begun to stream."""
    begun = asyncio.Event()
    order = greedy(key, PROMPT, tokens, extra=FREE)
    task = asyncio.create_task(answer(adapter, order, lambda _: begun.set()))
    await begun.wait()
    yield task
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


async def idle(adapter: HttpEngine) -> None:
    while (load := await adapter.load()).running or load.waiting:
        await asyncio.sleep(0.1)


def test_it_is_found_and_its_release_was_tried(server: Process) -> None:
    async def scene() -> None:
        async with open_session() as session:
            adapter, dialect = await attach("one", server.url, session)
            assert (adapter.kind, dialect.kind, dialect.note) == (server.kind, server.kind, "")
            assert dialect.release.startswith(RELEASES[server.release])
            state = await adapter.ready()
            assert state.up
            assert not state.paused
            says_version = EngineCapability.version in adapter.capabilities
            assert (await adapter.version() is not None) == says_version == (server.release in ("vllm", "sglang"))

    run(scene())


def test_answers_have_ids_log_probabilities_text_stops_and_seeds(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter:
            got = await answer(adapter, greedy("a", PROMPT, 30, logprobs=2, extra=FREE))
            assert (len(got.ids), got.finish, got.so_far.missing) == (30, FinishReason.length, 0)
            assert got.so_far.logprobs is not None
            best = [one for piece in got.pieces for one in piece.best or ()]
            assert [one[0][0] for one in best] == list(got.ids)
            assert [one[0][1] for one in best] == pytest.approx(list(got.so_far.logprobs))
            stop = got.ids[7]
            cut = await answer(adapter, greedy("b", PROMPT, 30, stop_ids=(stop,), extra=FREE))
            assert cut.ids == got.ids[: got.ids.index(stop) + 1]
            assert cut.finish is FinishReason.stop
            one, two = [
                (await answer(adapter, GenerateRequest(key, PROMPT, 12, min_tokens=12, seed=7, temperature=0.9))).ids
                for key in ("c", "d")
            ]
            assert len(one) == len(two) == 12
            assert one == two or server.kind == "sglang", "SGLang heeds a seed only where it was started for it"

    run(scene())


def test_an_answer_is_carried_on_from_its_own_tokens(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter:
            orders = [greedy(f"{at}", one, 24, logprobs=2, extra=FREE) for at, one in enumerate(prompts(8))]
            alone = await answers(adapter, orders, beside=1)
            crowded = await answers(adapter, orders, beside=8)
            for order, one, other in zip(orders, alone, crowded, strict=True):
                sure = one.sure()
                assert one.ids[:sure] == other.ids[:sure]
                kept = one.ids[:9]
                rest = await answer(adapter, greedy("rest", order.token_ids + kept, 15, extra=FREE))
                assert (kept + rest.ids)[:sure] == one.ids[:sure]

    run(scene())


def test_aborts_and_clients_that_go_away_free_the_engine(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter:
            async with running(adapter) as task:
                await adapter.abort(["long"])
                ended = await task
                assert ended.finish is FinishReason.aborted
                assert 0 < len(ended.ids) < LONG
            async with aclosing(adapter.generate(greedy("gone", PROMPT, LONG, extra=FREE))) as stream:
                async for _ in stream:
                    break
            await idle(adapter)

    run(scene())


def test_a_drained_engine_has_finished_everything_and_is_sent_nothing(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter:
            async with running(adapter, 300) as task:
                await adapter.pause(PauseMode.wait)
                ended = await task
                assert (len(ended.ids), ended.finish) == (300, FinishReason.length), ended.pieces[-2:]
            with pytest.raises(EnginePausedError):
                await answer(adapter, greedy("a", PROMPT, 2))
            await adapter.resume()
            assert len((await answer(adapter, greedy("a", PROMPT, 2, extra=FREE))).ids) == 2

    run(scene())


def test_a_pause_of_somebody_else_is_seen_and_its_abort_told_apart(server: Process) -> None:
    async def scene() -> None:
        async with reached(server, call_s=3) as adapter, reached(server) as other:
            if EngineCapability.pause not in adapter.capabilities:
                pytest.skip(f"{server.release} has no pause")
            async with running(adapter) as task:
                await other.pause(PauseMode.abort)
                ended = await task
                assert ended.finish is FinishReason.aborted_elsewhere
                assert len(ended.ids) > 0
            assert (await adapter.ready()).paused
            with pytest.raises(EnginePausedError, match="another client"):
                await answer(adapter, greedy("a", PROMPT, 2))
            await other.resume()
            assert (await adapter.ready()).up

    run(scene())


def test_a_sleep_is_refused_while_requests_run_and_the_engine_lives(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter, reached(server) as other:
            async with running(other, 1800) as task:
                with pytest.raises(EngineBusyError):
                    await adapter.sleep(1)
                assert len((await task).ids) == 1800
            assert server.alive
            assert (await adapter.ready()).up

    run(scene())


def test_an_engine_that_slept_answers_as_before(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter:
            before = (await answer(adapter, greedy("a", PROMPT, 20, extra=FREE))).ids
            await adapter.sleep(1)
            assert not (await adapter.ready()).up
            with pytest.raises(EnginePausedError):
                await answer(adapter, greedy("b", PROMPT, 2))
            await adapter.wake()
            assert (await adapter.ready()).up
            assert (await answer(adapter, greedy("c", PROMPT, 20, extra=FREE))).ids == before

    run(scene())


def test_a_refit_is_seen_in_the_answers_and_a_way_back_too(server: Process) -> None:
    async def scene() -> None:
        async with reached(server) as adapter:
            first = (await answer(adapter, greedy("a", PROMPT, 20, extra=FREE))).ids
            await adapter.sleep(2)
            assert await adapter.version() is None
            await adapter.wake([MemoryTag.weights])
            await adapter.refit(WeightUpdate(str(MODELS / "v2"), "two"))
            await adapter.wake([MemoryTag.kv_cache])
            assert await adapter.version() == "two"
            second = (await answer(adapter, greedy("b", PROMPT, 20, extra=FREE))).ids
            assert second != first
            await adapter.pause(PauseMode.wait)
            await adapter.refit(WeightUpdate(str(MODELS / "v1"), "three"))
            await adapter.resume()
            assert (await adapter.ready()).version == "three"
            assert (await answer(adapter, greedy("c", PROMPT, 20, extra=FREE))).ids == first

    run(scene())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_killed_engine_leaves_what_it_had_said(kind: str, tmp_path: Path) -> None:
    async def scene(process: Process) -> None:
        await come_up(process)
        async with reached(process, silence_s=10) as adapter:
            async with running(adapter) as task:
                process.signal(signal.SIGKILL)
                with pytest.raises(EngineGoneError) as caught:
                    await task
                assert 0 < len(caught.value.so_far.token_ids) < LONG
            assert not (await adapter.ready()).up

    with engine(kind, tmp_path) as process:
        run(scene(process), within_s=START_S)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_paused_before_it_is_ended_leaves_nothing_hanging(kind: str, tmp_path: Path) -> None:
    async def scene(process: Process) -> None:
        await come_up(process)
        async with reached(process) as adapter, running(adapter) as task:
            await adapter.pause(PauseMode.abort)
            assert (await task).finish is FinishReason.aborted
        process.signal(signal.SIGTERM)

    with engine(kind, tmp_path) as process:
        run(scene(process), within_s=START_S)
        assert process.gone(), process.tail()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_sigterm_in_flight_ends_in_an_answer_or_an_error_and_never_in_a_wait(kind: str, tmp_path: Path) -> None:
    async def scene(process: Process) -> None:
        await come_up(process)
        async with reached(process, silence_s=5, call_s=3) as adapter, running(adapter) as task:
            process.signal(signal.SIGTERM)
            await asyncio.wait([task])
            failed = task.exception()
            if failed is None:
                assert task.result().finish in (FinishReason.length, FinishReason.aborted_elsewhere)
            else:
                assert isinstance(failed, EngineError)
                assert 0 < len(failed.so_far.token_ids) < LONG

    with engine(kind, tmp_path) as process:
        run(scene(process), within_s=START_S)
