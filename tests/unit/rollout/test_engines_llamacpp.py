"""The adapter of llama.cpp on real servers: what streams, what is aborted, what is left when one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_answers import answer, answers, greedy, prompts, run
from engine_servers import LlamaServer, again, servers, wait_up
from tiny_gguf import END, pieces, tiny_gguf
from trimtab.core.errors import InputError
from trimtab.runtime.engines.detect import attach, detect
from trimtab.runtime.engines.engine import (
    Engine,
    EngineDeadlines,
    EngineGoneError,
    EnginePausedError,
    EngineRefusedError,
    EngineWedgedError,
    FinishReason,
    GenerateRequest,
    NotSupportedError,
    PartialOutput,
    PauseMode,
    WeightUpdate,
)
from trimtab.runtime.engines.http_engine import open_session
from trimtab.runtime.engines.llamacpp import LlamaCppEngine, Vocabulary, samplers

PROMPT = (40, 41, 42, 43, 44)
LONG = 3500  # tokens: seconds of work, so that something can happen meanwhile


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """A server that no test hurts."""
    with servers(1, tmp_path_factory.mktemp("engines"), context=4096) as started:
        yield started[0]


@pytest.fixture(scope="module")
def broken_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """A server whose model writes bytes that are no UTF-8 all the time."""
    with servers(1, tmp_path_factory.mktemp("engines"), model=tiny_gguf(beyond_ascii=True)) as started:
        yield started[0]


@asynccontextmanager
async def reached(server: LlamaServer, **seconds: float) -> AsyncIterator[LlamaCppEngine]:
    async with open_session() as session:
        engine = LlamaCppEngine("one", server.url, session, EngineDeadlines(**seconds))
        yield engine
        await engine.close()


async def whole(engine: LlamaCppEngine, prompt: tuple[int, ...], tokens: int, **more: Any) -> tuple[int, ...]:
    """The ids as the server tells them when it does not stream."""
    body = {"prompt": list(prompt), "n_predict": tokens, "return_tokens": True, "temperature": 0} | more
    return tuple((await engine.wire.post("/completion", body))["tokens"])


async def idle(engine: Engine) -> None:
    while (load := await engine.load()).running or load.waiting:
        await asyncio.sleep(0.02)


def test_it_is_an_engine_and_says_which(here: LlamaServer) -> None:
    async def scene() -> None:
        async with open_session() as session:
            engine, dialect = await attach("one", here.url, session)
            assert isinstance(engine, Engine)
            assert (engine.kind, dialect.kind) == ("llamacpp", "llamacpp")
            assert "does not say its release" in dialect.note
            state = await engine.ready()
            assert state.up
            assert state.dialect.startswith("llamacpp")
            load = await engine.load()
            assert (load.running, load.waiting, load.fresh) == (0, 0, True)

    run(scene())


def test_a_stream_gives_the_ids_that_a_plain_call_gives(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            got = await answer(engine, greedy("a", PROMPT, 40))
            assert got.ids == await whole(engine, PROMPT, 40)
            assert got.finish in (FinishReason.length, FinishReason.stop)
            written = pieces()
            assert got.so_far.text.encode() == b"".join(written[one] for one in got.ids)

    run(scene())


def test_log_probabilities_come_for_every_token_with_the_best_ones_beside(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            got = await answer(engine, greedy("a", PROMPT, 12, logprobs=2))
            assert got.so_far.logprobs is not None
            assert len(got.so_far.logprobs) == len(got.ids)
            best = [one for piece in got.pieces for one in piece.best or ()]
            assert [one[0][0] for one in best] == list(got.ids)
            assert [one[0][1] for one in best] == list(got.so_far.logprobs)
            assert all(one[0][1] >= one[1][1] for one in best)
            none = await answer(engine, greedy("b", PROMPT, 12))
            assert none.so_far.logprobs is None

    run(scene())


def test_a_stop_string_that_spans_tokens_ends_the_answer_and_is_named(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            free = await answer(engine, greedy("a", PROMPT, 30))
            text = free.so_far.text
            stop = text[5:8]
            cut = await answer(engine, greedy("b", PROMPT, 30, stop=(stop,)))
            assert cut.finish is FinishReason.stop
            assert cut.pieces[-1].stopped_by == stop
            assert cut.so_far.text == text[: text.index(stop)]
            # The ids go on to the token that completed it: whoever needs them can cut, nobody can add.
            assert cut.ids == free.ids[: len(cut.ids)]
            assert b"".join(pieces()[one] for one in cut.ids).decode().startswith(text[: text.index(stop) + len(stop)])

    run(scene())


def test_a_stop_id_ends_the_answer_here_and_the_work_there(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            free = await answer(engine, greedy("a", PROMPT, 20, min_tokens=20))
            stop = free.ids[6]
            cut = await answer(engine, greedy("b", PROMPT, LONG, stop_ids=(stop,)))
            assert cut.ids == free.ids[: free.ids.index(stop) + 1]
            assert (cut.finish, cut.pieces[-1].stopped_by) == (FinishReason.stop, stop)
            await idle(engine)

    run(scene())


def test_an_end_token_is_the_last_id_unless_it_is_forbidden(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            ended = await answer(engine, greedy("a", PROMPT, 9, extra={"logit_bias": [[END, 100]]}))
            assert (ended.ids, ended.finish) == ((END,), FinishReason.stop)
            forced = await answer(engine, greedy("b", PROMPT, 9, min_tokens=9, extra={"logit_bias": [[END, 100]]}))
            assert len(forced.ids) == 9
            assert END not in forced.ids
            with pytest.raises(InputError, match="has no min_tokens"):
                await answer(engine, greedy("c", PROMPT, 9, min_tokens=3))

    run(scene())


def test_an_answer_that_fills_the_context_says_so(broken_text: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(broken_text) as engine:
            almost = PROMPT * 203  # nine places are left
            got = await answer(engine, greedy("a", almost, 50, min_tokens=50))
            assert got.finish is FinishReason.full
            assert 0 < len(got.ids) < 50
            with pytest.raises(EngineRefusedError, match="exceeds the available context"):
                await answer(engine, greedy("b", PROMPT * 1000, 5))

    run(scene())


def test_a_seed_repeats_an_answer_and_two_seeds_differ(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            one, two, other = [
                (await answer(engine, GenerateRequest(key, PROMPT, 24, min_tokens=24, seed=seed))).ids
                for key, seed in (("a", 5), ("b", 5), ("c", 6))
            ]
            assert one == two != other

    run(scene())


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_ids_of_broken_text_are_found_again_for_greedy_answers(broken_text: LlamaServer, logprobs: int | None) -> None:
    async def scene() -> None:
        async with reached(broken_text) as engine:
            for index, prompt in enumerate(prompts(8)):
                got = await answer(engine, greedy(f"{index}", prompt, 30, logprobs=logprobs))
                assert got.ids == await whole(engine, prompt, 30)
                assert got.so_far.missing == 0
                hidden = [one for one in got.so_far.logprobs or () if one is None]
                assert bool(hidden) == (logprobs is not None)
                assert got.so_far.logprobs is None or len(got.so_far.logprobs) == len(got.ids)

    run(scene())


def test_ids_that_nobody_can_name_are_counted_as_missing_and_never_guessed(broken_text: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(broken_text) as engine:
            told = 0
            for index, prompt in enumerate(prompts(8)):
                order = GenerateRequest(f"{index}", prompt, 30, min_tokens=30, seed=index)
                got = await answer(engine, order)
                plain = {"temperature": 1, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "seed": index}
                samplers = {"samplers": ["temperature", "top_k", "top_p"]}
                truth = await whole(engine, prompt, 30, **plain, **samplers)
                assert len(got.ids) + got.so_far.missing == 30
                left = iter(truth)
                assert all(one in left for one in got.ids), "an id that was not generated there"
                told += got.so_far.missing
                exact = await answer(engine, GenerateRequest("x", prompt, 30, min_tokens=30, seed=index, logprobs=0))
                # With log-probabilities the bytes are told; only a tail that never became text stays unknown.
                assert exact.ids == truth[: len(exact.ids)]
                assert exact.so_far.missing == 30 - len(exact.ids) <= 4
            assert told

    run(scene())


def test_two_ways_to_write_the_same_bytes_are_no_answer() -> None:
    known = Vocabulary({1: b"a", 2: b"b", 3: b"ab", 4: b"abc", 5: b"c", 6: b"bc", 7: b"a", 8: b""})
    assert known.between((), b"bcb", (2,), 1) == (6,)
    assert known.between((), b"bb", (2,), 1) == (2,)
    assert known.between((2,), b"bbcc", (5,), 1) == (6,)
    assert known.between((), b"ab", (2,), 1) is None, "two ids write the same"
    assert known.between((), b"abcb", (2,), 2) is None, "two ways to cut"
    assert known.between((), b"xb", (2,), 1) is None
    assert known.between((), b"b", (3,), 1) is None


def test_the_same_prompts_give_the_same_greedy_answers_whatever_runs_beside(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            orders = [greedy(f"{index}", prompt, 32, logprobs=2) for index, prompt in enumerate(prompts(24))]
            alone = await answers(engine, orders, beside=1)
            crowded = await answers(engine, orders, beside=8)
            for one, other in zip(alone, crowded, strict=True):
                sure = one.sure()
                assert one.ids[:sure] == other.ids[:sure]
                if sure == len(one.ids):
                    assert one.ids == other.ids
            assert sum(one.sure() == len(one.ids) for one in alone) > len(alone) // 2

    run(scene())


def test_a_killed_engine_leaves_what_it_had_said_and_another_carries_on(here: LlamaServer, tmp_path: Path) -> None:
    async def scene(victim: LlamaServer) -> None:
        async with reached(here) as engine, reached(victim) as doomed:
            order = greedy("a", PROMPT, 2000, min_tokens=2000, logprobs=2)
            seen: list[PartialOutput] = []

            def each(so_far: PartialOutput) -> None:
                seen.append(so_far)
                if len(so_far.token_ids) == 20:
                    victim.kill()

            with pytest.raises(EngineGoneError) as caught:
                await answer(doomed, order, each)
            left = caught.value.so_far
            assert left == seen[-1]
            assert 20 <= len(left.token_ids) < 2000
            assert left.logprobs is not None
            assert len(left.logprobs) == len(left.token_ids)
            state = await doomed.ready()
            assert not state.up
            with pytest.raises(EngineGoneError):
                await answer(doomed, greedy("b", PROMPT, 2))
            reference = await answer(engine, greedy("c", PROMPT, 60, min_tokens=60, logprobs=2))
            kept = left.token_ids[:20]
            rest = await answer(engine, greedy("d", PROMPT + kept, 40, min_tokens=40))
            sure = reference.sure()
            assert (kept + rest.ids)[:sure] == reference.ids[:sure]
            assert sure > 20

    with servers(1, tmp_path, context=4096) as (victim,):
        run(scene(victim))


def test_an_engine_that_stands_still_is_told_apart_and_comes_back(tmp_path: Path) -> None:
    async def scene(frozen: LlamaServer) -> None:
        async with reached(frozen, silence_s=0.5, first_bytes_s=20, call_s=0.5) as engine:
            order = greedy("a", PROMPT, LONG, min_tokens=LONG)
            with pytest.raises(EngineWedgedError, match=r"no bytes for 0\.5 s") as caught:
                await answer(engine, order, lambda so_far: frozen.freeze())
            assert 0 < len(caught.value.so_far.token_ids) < LONG
            assert "no answer in 0.5 s" in (await engine.ready()).why
            frozen.thaw()
        async with reached(frozen) as engine:
            await idle(engine)
            assert len((await answer(engine, greedy("b", PROMPT, 5, min_tokens=5))).ids) == 5

    with servers(1, tmp_path, context=4096) as (frozen,):
        run(scene(frozen))


def test_a_client_that_goes_away_frees_the_engine(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            async with aclosing(engine.generate(greedy("a", PROMPT, LONG, min_tokens=LONG))) as stream:
                async for piece in stream:
                    assert piece.finish is None
                    break
            await idle(engine)
            slots = await engine.wire.get("/slots")
            assert all(slot.get("next_token", [{}])[0].get("n_decoded", 0) < LONG for slot in slots)
            # The same id is free again.
            assert (await answer(engine, greedy("a", PROMPT, 2))).ids

    run(scene())


def test_an_abort_ends_the_stream_with_what_it_has(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            got = []
            async for piece in engine.generate(greedy("a", PROMPT, LONG, min_tokens=LONG)):
                got.append(piece)
                if len(got) == 3:
                    await engine.abort(["a", "somebody else's"])
            assert got[-1].finish is FinishReason.aborted
            assert 3 <= len(PartialOutput.of(got).token_ids) < LONG
            await idle(engine)

    run(scene())


def test_an_abort_reaches_a_request_that_has_not_begun(tmp_path: Path) -> None:
    async def scene(server: LlamaServer) -> None:
        async with reached(server) as engine:
            async with aclosing(engine.generate(greedy("a", PROMPT, LONG, min_tokens=LONG))) as first:
                assert (await anext(first)).token_ids
                server.freeze()
                waits = asyncio.create_task(answer(engine, greedy("b", PROMPT, 5)))
                await asyncio.sleep(0.1)
                assert not waits.done()
                await engine.abort(["b"])
                ended = await waits
                assert (ended.finish, ended.ids) == (FinishReason.aborted, ())
                server.thaw()
            await idle(engine)

    with servers(1, tmp_path, context=4096, slots=1) as (server,):
        run(scene(server))


def test_a_paused_engine_is_sent_nothing_until_it_is_resumed(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            running = asyncio.ensure_future(answer(engine, greedy("a", PROMPT, LONG, min_tokens=LONG)))
            while not (await engine.load()).running:
                await asyncio.sleep(0.01)
            await engine.pause(PauseMode.abort)
            assert (await running).finish is FinishReason.aborted
            before = await engine.wire.get("/metrics")
            with pytest.raises(EnginePausedError, match="nothing is sent to it"):
                await answer(engine, greedy("b", PROMPT, 2))
            state = await engine.ready()
            assert (state.up, state.paused) == (False, True)
            totals = [line for line in before.splitlines() if line.startswith("llamacpp:prompt_tokens_total")]
            assert totals[0] in await engine.wire.get("/metrics")
            await engine.resume()
            assert (await engine.ready()).up
            assert (await answer(engine, greedy("c", PROMPT, 2))).ids

    run(scene())


def test_what_it_cannot_do_is_refused_by_name(here: LlamaServer) -> None:
    async def scene() -> None:
        async with reached(here) as engine:
            for verb, call in (
                ("sleep", engine.sleep()), ("sleep", engine.wake()), ("flush", engine.flush()),
                ("refit", engine.refit(WeightUpdate("somewhere", "v2"))),
            ):  # fmt: skip
                with pytest.raises(NotSupportedError, match=f"no way to {verb}"):
                    await call
            assert await engine.version() is None

    run(scene())


def test_other_weights_at_the_same_address_give_other_answers(tmp_path: Path) -> None:
    async def scene(server: LlamaServer) -> tuple[int, ...]:
        async with reached(server) as engine:
            return (await answer(engine, greedy("a", PROMPT, 20, min_tokens=20))).ids

    with servers(1, tmp_path) as started:
        before, url = run(scene(started[0])), started[0].url
        started[0].kill()
        started[0] = wait_up(again(started[0], model=tiny_gguf(shift=0.5)))
        assert started[0].url == url
        assert run(scene(started[0])) != before


def test_nothing_at_an_address_is_an_answer_of_ready_and_an_error_of_detect(tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        async with open_session() as session:
            engine = LlamaCppEngine("one", url, session)
            state = await engine.ready()
            assert not state.up
            assert state.why
            with pytest.raises(EngineGoneError):
                await detect(url, session)

    with servers(1, tmp_path) as (gone,):
        gone.kill()
        run(scene(gone.url))


def test_what_an_order_hands_on_is_among_the_samplers() -> None:
    assert samplers({}) == ["temperature", "top_k", "top_p"]
    assert samplers({"min_p": 0.1, "repeat_penalty": 1.2}) == ["penalties", "temperature", "top_k", "top_p", "min_p"]
