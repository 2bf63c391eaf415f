"""The rollout pool with servers that behave as real ones do, faults included: each fault has one outcome."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine_servers import servers
from rollout_scenes import PROMPT, QUICK, Scene, expected, play, run
from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.rollout import RequestSpec
from trimtab.rollout import (
    Chunk,
    End,
    RefusedError,
    RequestClass,
    RolloutPool,
    RolloutRules,
    SamplingParams,
    WorkerSpec,
    WorkerState,
)
from trimtab.runtime.engines.engine import EngineGoneError, StreamDelta
from trimtab.runtime.engines.llamacpp import LlamaCppEngine
from trimtab.runtime.rollout.dispatcher import StopMatch, StopStringBuffer
from trimtab.runtime.rollout.sampling import PendingRequest
from trimtab.runtime.store.journal import ROLLOUT_EVENTS, read_journal

S = WorkerState


# ---- answers --------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts_and_n_of_each() -> None:
    async def act(scene: Scene) -> None:
        prompts = [(one,) for one in range(1, 21)]
        params = SamplingParams(max_tokens=5, n=2, temperature=0.0, logprobs=1)
        answers = await scene.pool.generate(prompts, params)
        for prompt, completion in zip(prompts, answers, strict=True):
            assert len(completion.samples) == 2
            for sample in completion.samples:
                assert sample.token_ids == expected(5, prompt=prompt)
                assert (sample.end, sample.logprobs, len(sample.best or ())) == (End.length, (-0.5,) * 5, 5)
        assert {one.samples[0].workers[0] for one in answers} == set(scene.names)  # both had some

    play(act, limit=4)


def test_samples_of_one_prompt_have_seeds_of_their_own() -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.generate([PROMPT], SamplingParams(max_tokens=2, n=1, seed=7))
        assert scene.stubs[0].body["sampling_params"]["sampling_seed"] == 7
        assert SamplingParams(n=3, seed=7).sample(2).seed == 9

    play(act, kinds=("sglang",))


def test_a_stream_gives_each_token_once_and_the_whole_at_its_end() -> None:
    async def act(scene: Scene) -> None:
        params = SamplingParams(max_tokens=6, temperature=0.0, n=2)
        chunks = [chunk async for chunk in scene.pool.stream(PROMPT, params)]
        for index in (0, 1):
            own = [one for one in chunks if one.index == index]
            assert tuple(token for one in own for token in one.token_ids) == expected(6)
            assert own[-1].sample is not None
            assert own[-1].sample.token_ids == expected(6)

    play(act)


def test_a_client_that_leaves_a_stream_cancels_it_on_the_engine() -> None:
    async def act(scene: Scene) -> None:
        stream = scene.pool.stream(PROMPT, SamplingParams(max_tokens=5000))
        await anext(stream)
        await stream.aclose()
        await scene.pool.until(lambda: not scene.pool._core.attempts, 5.0)
        assert not any(stub.running for stub in scene.stubs)
        assert scene.pool.counters["answered_cancelled"] == 1

    play(act)


def test_cancelling_the_caller_cancels_all_its_requests() -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(5000):
            pass
        await scene.pool.until(lambda: not scene.pool._core.attempts, 5.0)
        assert not any(stub.running for stub in scene.stubs)

    play(act)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [((), "no tokens"), ("text", "takes token ids"), ((1, -2), "no token id"), (5, "is a int")],
)
def test_a_prompt_that_is_none_is_refused_before_anything_is_sent(prompt: object, says: str) -> None:
    async def act(scene: Scene) -> None:
        with pytest.raises(InputError, match=says):
            await scene.pool.generate([PROMPT, prompt])  # type: ignore[list-item]
        assert not scene.pool._core.pending

    play(act, kinds=("sglang",))


def test_a_pool_that_is_not_running_says_so() -> None:
    with pytest.raises(InputError, match="not running"):
        run(RolloutPool().generate([PROMPT]))


# ---- engines that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", ["cut", "silent", "nonsense", "failure", "miscount"])
def test_an_answer_that_breaks_goes_on_elsewhere_with_the_tokens_it_has(kind: str, fault: str) -> None:
    async def act(scene: Scene) -> None:
        for stub in scene.stubs:
            stub.fault = fault
        scene.stubs[1].fault = ""
        samples = [await scene.one(12) for _ in range(2)]  # whoever is asked first, one of them meets the fault
        assert [one.token_ids for one in samples] == [expected(12)] * 2
        assert [one.end for one in samples] == [End.length] * 2
        (broken,) = [one for one in samples if len(one.workers) > 1]
        assert (broken.moves, broken.restarts) == (1, 0)
        assert broken.workers == (scene.names[0], scene.names[1])

    play(act, kinds=(kind, kind))


def test_an_error_before_the_first_token_is_tried_elsewhere() -> None:
    async def act(scene: Scene) -> None:
        scene.stubs[0].fault = scene.stubs[1].fault = "error"
        sample = await scene.one(8)
        assert (sample.token_ids, sample.end) == (expected(8), End.length)

    play(act)


def test_what_the_engine_refuses_is_not_tried_again() -> None:
    async def act(scene: Scene) -> None:
        scene.stubs[0].fault = scene.stubs[1].fault = "refuse"
        sample = await scene.one(8)
        assert (sample.end, sample.reason.code) == (End.failed, ReasonCode.refused)
        assert "too many tokens" in sample.reason.sentence
        assert sum(len(stub.calls("/generate")) for stub in scene.stubs) == 1

    play(act)


def test_retries_are_bounded_and_the_reason_names_the_last_one() -> None:
    async def act(scene: Scene) -> None:
        for stub in scene.stubs:
            stub.refuse["/generate"] = (500, {"error": {"message": "out of memory"}})
        sample = await scene.one(8)
        assert (sample.end, sample.reason.code) == (End.failed, ReasonCode.retries_used)
        assert "out of memory" in sample.reason.sentence

    play(act, rules=replace(QUICK, retries=2, faults=10))


def test_a_wedged_engine_that_looks_healthy_loses_its_requests_to_others() -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(60) as task:
            at = scene.busy()
            scene.stubs[at].step_s = 600.0  # healthy, and never says anything more
            sample = await task
        assert (sample.token_ids, sample.moves) == (expected(60), 1)
        assert sample.workers[-1] == scene.names[1 - at]

    play(act)


def test_a_dead_engine_is_lost_and_its_requests_are_answered_by_others() -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(60) as task:
            at = scene.busy()
            scene.stubs[at].die()
            sample = await task
        assert (sample.token_ids, sample.moves) == (expected(60), 1)
        await scene.becomes(at, S.lost)

    play(act)


def test_an_abort_by_others_is_passed_on_with_its_tokens_and_never_tried_again() -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(600) as task:
            scene.stubs[scene.busy()].abort(None)
            sample = await task
        assert (sample.end, sample.reason.code, sample.moves) == (End.abort, ReasonCode.passed_on, 0)
        assert 0 < len(sample.token_ids) < 600
        assert sample.token_ids == expected(len(sample.token_ids))
        assert sum(len(stub.calls("/generate")) for stub in scene.stubs) == 1

    play(act)


def test_nothing_is_sent_to_an_engine_that_others_paused_and_it_serves_again_after_their_resume() -> None:
    async def act(scene: Scene) -> None:
        scene.stubs[0].stop("keep")
        await scene.pool.until(lambda: scene.pool.workers()[0].paused_elsewhere, 5.0)
        samples = await asyncio.gather(*(scene.one(5) for _ in range(6)))
        assert {one.workers for one in samples} == {(scene.names[1],)}
        assert scene.stubs[0].hung == 0
        scene.stubs[0].go()
        assert await scene.pool.until(lambda: not scene.pool.workers()[0].paused_elsewhere, 5.0)

    play(act, kinds=("vllm", "vllm"))


def test_an_engine_restarted_with_old_weights_serves_nothing() -> None:
    async def act(scene: Scene) -> None:
        async with scene.pool.refit(3) as refit:
            await refit.load("3")
        assert [one.version for one in scene.pool.workers()] == [3, 3]
        scene.stubs[0].version, scene.stubs[0].loaded = "2", "2"  # a supervisor's restart, from an older checkpoint
        await scene.becomes(0, S.stale)
        samples = await asyncio.gather(*(scene.one(5) for _ in range(6)))
        assert {one.workers for one in samples} == {(scene.names[1],)}
        assert {one.token_ids for one in samples} == {expected(5, "3")}

    play(act)


# ---- what a cut may and may not do ----------------------------------------------------------------------------------


def test_a_drain_past_its_deadline_moves_what_runs_with_its_tokens() -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(200) as task:
            at = scene.busy()
            scene.pool.drain(scene.names[at], deadline_s=1.1, why="by a test")
            sample = await task
        assert (sample.token_ids, sample.moves, sample.end) == (expected(200), 1, End.length)
        await scene.becomes(at, S.inactive)
        scene.pool.resume(scene.names[at])
        await scene.becomes(at, S.active)

    play(act)


@pytest.mark.parametrize(
    "params",
    [{"seed": 4, "temperature": 1.0}, {"extra": {"repetition_penalty": 1.1}}, {"resume": False}],
)
def test_what_a_cut_would_change_begins_again_from_the_prompt(params: dict[str, object]) -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(200, **params) as task:
            scene.pool.drain(scene.names[scene.busy()], deadline_s=1.1)
            sample = await task
        assert (sample.moves, sample.restarts, sample.token_ids) == (0, 1, expected(200))

    play(act)


def test_a_stop_string_allows_to_resume_only_where_somebody_can_read_the_tokens() -> None:
    assert SamplingParams(stop=("END",)).may_resume(reads_text=True)
    assert not SamplingParams(stop=("END",)).may_resume(reads_text=False)


def test_a_stream_is_told_of_a_restart_or_never_sees_one() -> None:
    async def act(scene: Scene) -> None:
        seeded = SamplingParams(max_tokens=150, seed=1, temperature=1.0)

        async def drained(chunks: list[Chunk]) -> None:
            while not any(len(one.ids) > 3 for stub in scene.stubs for one in stub.running.values()):
                await asyncio.sleep(0.005)
            name = scene.names[scene.busy()]
            scene.pool.drain(name, deadline_s=1.05)
            await scene.pool.until(lambda: bool(chunks and chunks[-1].sample), 20.0)
            scene.pool.resume(name)
            await scene.pool.until(lambda: all(one.state is S.active for one in scene.pool.workers()), 5.0)

        async def heard(restarts: str) -> list[Chunk]:
            chunks: list[Chunk] = []
            beside = asyncio.create_task(drained(chunks))
            async for chunk in scene.pool.stream(PROMPT, seeded, restarts=restarts):  # type: ignore[arg-type]
                chunks.append(chunk)  # noqa: PERF401 - looked at while it grows
            beside.cancel()
            for name in scene.names:
                scene.pool.resume(name)
            await scene.pool.until(lambda: all(one.state is S.active for one in scene.pool.workers()), 5.0)
            return chunks

        told = await heard("tell")
        at = next(place for place, one in enumerate(told) if one.restarted)
        assert at > 0
        assert tuple(token for one in told[at:] for token in one.token_ids) == expected(150)
        held = await heard("hold")
        assert not any(one.restarted for one in held)
        assert tuple(token for one in held for token in one.token_ids) == expected(150)
        assert held[-1].sample is not None
        assert held[-1].sample.restarts == 1

    play(act)


def test_a_stop_string_across_a_cut_ends_the_answer_where_it_would_have_ended(tmp_path: Path) -> None:
    """A real engine that breaks after each possible number of tokens: the answer is always the undisturbed one."""

    class Breaks(LlamaCppEngine):
        after = 10_000

        async def generate(self, order):  # type: ignore[no-untyped-def,override]
            count = 0
            async for piece in super().generate(order):
                yield piece
                count += len(piece.token_ids)
                if count >= self.after and piece.finish is None:
                    self.after = 10_000
                    raise EngineGoneError("it broke, as planned", engine=self.name)

    async def whole() -> None:
        with servers(1, tmp_path, slots=2) as (server,):
            async with RolloutPool(QUICK) as pool:
                engine = Breaks("one", server.url, pool._session)  # type: ignore[arg-type]
                await pool.add_engine(engine, WorkerSpec("one", can_sleep=False), version=0)
                plain = (await pool.generate([PROMPT], SamplingParams(max_tokens=40, temperature=0.0)))[0].samples[0]
                word = plain.text[18:24]
                params = SamplingParams(max_tokens=40, temperature=0.0, stop=(word, "never this"))
                right = (await pool.generate([PROMPT], params))[0].samples[0]
                assert (right.end, right.stopped_by) == (End.stop, word)
                assert right.text == plain.text[: plain.text.find(word)]
                cuts = 0
                for after in range(1, len(right.token_ids) + 1):
                    engine.after = after
                    sample = (await pool.generate([PROMPT], params))[0].samples[0]
                    assert (sample.token_ids, sample.text) == (right.token_ids, right.text), after
                    assert (sample.end, sample.stopped_by) == (End.stop, word)
                    cuts += sample.moves
                assert cuts >= len(right.token_ids) - 1

    run(whole())


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("some E", "ND more", StopMatch("END", 5, 2)),
        ("some EN", "D", StopMatch("END", 5, 1)),
        ("some ", "END", None),  # the engine sees that one itself
        ("END", "x", None),  # it would have ended before
        ("E", "EN", None),
        ("", "ND", None),
    ],
)
def test_a_stop_string_is_found_where_it_begins_before_the_cut_and_ends_after_it(
    before: str, after: str, found: StopMatch | None
) -> None:
    assert StopStringBuffer(before, ("END",)).found(after) == found


# ---- queue, keys, deadlines -----------------------------------------------------------------------------------------


def test_a_sample_that_waited_for_a_place_in_the_queue_keeps_its_seed() -> None:
    async def act(scene: Scene) -> None:
        await scene.pool.generate([PROMPT], SamplingParams(max_tokens=3, n=4, seed=7))
        assert scene.pool.counters["refused"] > 0
        assert sorted(body["sampling_params"]["sampling_seed"] for body in scene.stubs[0].bodies) == [7, 8, 9, 10]

    rules = replace(QUICK, classes=(RequestClass(queue_limit=1),))
    play(act, kinds=("sglang",), rules=rules, limit=1)


def test_a_full_queue_refuses_a_stream_with_a_reason_and_lets_generate_wait() -> None:
    async def act(scene: Scene) -> None:
        params = SamplingParams(max_tokens=40, temperature=0.0)
        busy = asyncio.create_task(scene.pool.generate([PROMPT] * 4, params))
        await scene.pool.until(lambda: len(scene.pool._core.machine.requests()) >= 3, 5.0)
        with pytest.raises(RefusedError, match="wait already") as refused:
            async for _ in scene.pool.stream(PROMPT, params):
                pass
        assert refused.value.retry_after_s > 0
        answers = await busy  # four were asked and only three fit at once: the last one waited outside
        assert [one.samples[0].token_ids for one in answers] == [expected(40)] * 4

    classes = (RequestClass(queue_limit=2),)
    play(act, kinds=("sglang",), limit=1, rules=replace(QUICK, classes=classes))


def test_the_same_key_gets_the_same_answer_and_generates_once() -> None:
    async def act(scene: Scene) -> None:
        params = SamplingParams(max_tokens=30)
        first = asyncio.create_task(scene.pool.generate([PROMPT], params, keys=["a"]))
        second = asyncio.create_task(scene.pool.generate([PROMPT], params, keys=["a"]))
        await scene.pool.until(lambda: bool(scene.pool._core.attempts), 5.0)
        first.cancel()  # whoever asked first leaves; the other still wants it
        answer = (await second)[0].samples[0]
        later = (await scene.pool.generate([PROMPT], params, keys=["a"]))[0].samples[0]
        assert answer.token_ids == later.token_ids == expected(30)
        assert sum(len(stub.calls("/generate")) for stub in scene.stubs) == 1

    play(act)


def test_a_request_past_its_deadline_is_answered_with_what_it_has() -> None:
    async def act(scene: Scene) -> None:
        answers = await scene.pool.generate([PROMPT], SamplingParams(max_tokens=5000), deadline_s=0.5)
        sample = answers[0].samples[0]
        assert (sample.end, sample.reason.code) == (End.failed, ReasonCode.too_late)
        assert sample.token_ids == expected(len(sample.token_ids))
        await scene.pool.until(lambda: not scene.pool._core.attempts, 5.0)
        assert not any(stub.running for stub in scene.stubs)

    play(act)


# ---- leases and holds -----------------------------------------------------------------------------------------------


def test_a_lease_is_a_place_on_an_engine_and_is_revoked_when_its_worker_goes() -> None:
    async def act(scene: Scene) -> None:
        async with await scene.pool.acquire() as lease:
            assert lease.url in [stub.url for stub in scene.stubs]
            assert [one.running for one in scene.pool.workers() if one.worker == lease.worker] == [1]
            at = scene.names.index(lease.worker)
            scene.pool.drain(lease.worker, deadline_s=1.2, why="it is wanted elsewhere")
            await asyncio.wait_for(lease.revoked.wait(), 10)
            assert "drains" in lease.why
            await lease.release()
        await scene.becomes(at, S.inactive)
        assert sum(one.running for one in scene.pool.workers()) == 0

    play(act)


def test_a_lease_that_is_not_given_back_ends_all_the_same() -> None:
    async def act(scene: Scene) -> None:
        lease = await scene.pool.acquire(for_s=0.0, wait_s=3.0)
        await asyncio.wait_for(lease.revoked.wait(), 10)
        gone = await scene.pool.until(lambda: not any(one.running for one in scene.pool.workers()), 10.0)
        assert gone
        await lease.release()  # too late is harmless

    play(act)


def test_a_lease_that_nobody_can_have_says_why() -> None:
    async def act(scene: Scene) -> None:
        async with await scene.pool.acquire():
            with pytest.raises(UnreachableError, match=r"no worker in 0\.2 s"):
                await scene.pool.acquire(wait_s=0.2)
        async with await scene.pool.acquire(wait_s=30.0):
            pass

    play(act, kinds=("sglang",), limit=1)


# ---- the journal ----------------------------------------------------------------------------------------------------


def test_the_journal_holds_every_event_and_leads_to_the_same_state(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []

    async def act(scene: Scene) -> None:
        async with scene.running(60) as task:
            scene.pool.drain(scene.names[scene.busy()], deadline_s=1.05)
            await task
        seen.append(scene.pool._core.machine.dump())

    play(act, journal=tmp_path)
    found = read_journal(tmp_path, kinds=ROLLOUT_EVENTS)
    assert found.snapshot is not None
    machine = RolloutMachine.load(found.snapshot)
    stories = []
    for now, event in found.events:
        machine.handle(event, now)
        stories.append(machine.dump())
    assert seen[0] in stories
    text = "".join(path.read_text() for path in tmp_path.glob("journal-*"))
    assert '"prompt_tokens":3' in text
    assert "token_ids" not in text  # counts and ids, never prompts or answers


def test_rules_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InputError, match="min_workers 3 is above max_workers 2"):
        RolloutRules(min_workers=3, max_workers=2)


def test_nothing_comes_after_the_answer_though_the_engine_is_not_cut_off_yet() -> None:
    async def act(scene: Scene) -> None:
        for stub in scene.stubs:
            stub.step_s = 0.001
        for _ in range(10):
            stream = scene.pool.stream(PROMPT, SamplingParams(max_tokens=5000), deadline_s=0.05)
            chunks = [chunk async for chunk in stream]
            assert [chunk.sample is not None for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
            told = tuple(token for chunk in chunks for token in chunk.token_ids)
            assert chunks[-1].sample is not None
            assert chunks[-1].sample.token_ids == told

    play(act)


def test_what_is_cut_back_to_fewer_tokens_is_given_out_anew() -> None:
    async def act(scene: Scene) -> None:
        spec = RequestSpec("r", 3, 10)
        queue: asyncio.Queue[Chunk] = asyncio.Queue()
        asked = PendingRequest(spec, PROMPT, SamplingParams(), 0, asyncio.get_running_loop().create_future(), queue)
        asked.begin(1, "one", 0)
        for token, text in ((7, "a"), (8, "b"), (9, "c")):
            asked.take(StreamDelta((token,), text=text))
        asked.begin(2, "two", 2)  # the machine counts two of them
        chunks = [queue.get_nowait() for _ in range(queue.qsize())]
        assert [chunk.restarted for chunk in chunks] == [False, False, False, True, False]
        assert (chunks[-1].token_ids, chunks[-1].text, asked.text) == ((7, 8), "ab", "ab")

    play(act, kinds=())
