"""Weights, sleep and the number of workers, with servers that behave as vLLM and SGLang do: what they answer tells
which weights they have, and one whose memory is released under a running request dies of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollout_scenes import DEADLINES, PROMPT, QUICK, Scene, expected, play
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.reasons import ReasonCode
from trimtab.model.rollout import Owner, Ownership, WorkerSpec
from trimtab.rollout import ElasticConfig, RefitSession, SamplingParams, Span, Taker, WorkerState
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.rollout.launch.launcher import Started
from trimtab.runtime.rollout.pool import RolloutPool

S = WorkerState
BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


# ---- refits ---------------------------------------------------------------------------------------------------------


@BOTH
def test_after_a_refit_from_disk_the_answers_are_those_of_the_new_weights(kind: str) -> None:
    async def act(scene: Scene) -> None:
        assert (await scene.one(5)).token_ids == expected(5)
        async with scene.pool.refit(1) as refit:
            assert [one.size for one in refit.engines] == [1, 1]
            assert [one.offset for one in refit.engines] == [0, 1]
            assert all(scene.state(at) is S.stale for at in (0, 1))
            await refit.load("/weights/1")
        assert refit.outcome is not None
        assert set(refit.outcome.current) == set(scene.names)
        sample = await scene.one(5)
        assert (sample.token_ids, sample.spans) == (expected(5, "/weights/1"), (Span(1, 5),))

    play(act, kinds=(kind, kind))


@BOTH
def test_requests_that_run_at_a_refit_stay_paused_and_say_which_version_made_what(kind: str) -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(40) as task:
            async with scene.pool.refit(1) as refit:
                assert not task.done()
                await refit.load("/weights/1")
            sample = await task
        first = sample.spans[0].tokens
        assert sample.spans == (Span(0, first), Span(1, 40 - first))
        assert sample.token_ids[:first] == expected(first)
        rest = expected(40 - first, "/weights/1", (*PROMPT, *sample.token_ids[:first]))
        assert sample.token_ids[first:] == rest
        assert sample.moves == 0

    play(act, kinds=(kind,))


@BOTH
def test_what_may_not_be_of_two_versions_begins_again_at_a_refit(kind: str) -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(40, spans=False) as task:
            async with scene.pool.refit(1) as refit:
                await refit.load("/weights/1")
            sample = await task
        assert (sample.token_ids, sample.spans) == (expected(40, "/weights/1"), (Span(1, 40),))
        assert (sample.moves, sample.restarts) == (0, 1)

    play(act, kinds=(kind, kind))


def test_a_refit_that_fails_on_one_engine_leaves_it_out_and_the_others_serve() -> None:
    async def act(scene: Scene) -> None:
        scene.stubs[1].refuse["/update_weights_from_disk"] = (200, {"success": False, "message": "disk is full"})
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        assert refit.outcome is not None
        assert (refit.outcome.current, refit.outcome.failed) == ((scene.names[0],), (scene.names[1],))
        assert scene.state(1) is S.stale
        assert "disk is full" in scene.reason(1)
        samples = await asyncio.gather(*(scene.one(5) for _ in range(6)))
        assert {one.workers for one in samples} == {(scene.names[0],)}
        scene.stubs[1].refuse.clear()
        async with scene.pool.refit(2) as refit:  # the next one takes it in again
            await refit.load("/weights/2")
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.active]

    play(act)


def test_a_refit_that_fails_everywhere_says_so_and_serves_nothing() -> None:
    async def act(scene: Scene) -> None:
        with pytest.raises(InfeasibleError, match="no engine has version 1"):
            async with scene.pool.refit(1) as refit:
                await refit.load("nowhere")
        assert {scene.state(at) for at in (0, 1)} == {S.stale}
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        assert (await scene.one(5)).token_ids == expected(5, "/weights/1")

    play(act)


def test_weights_that_the_trainer_sends_itself_count_when_the_engines_say_so() -> None:
    async def act(scene: Scene) -> None:
        async with scene.pool.refit(1, way="collective") as refit:
            for stub in scene.stubs:
                stub.loaded = "/weights/1"
            scene.stubs[0].version = "1"  # the other one has not got them, whatever the trainer believes
        assert refit.outcome is not None
        assert (refit.outcome.current, refit.outcome.failed) == ((scene.names[0],), (scene.names[1],))

    play(act)


def test_a_trainer_that_breaks_off_leaves_nobody_believed_who_was_not_confirmed() -> None:
    async def act(scene: Scene) -> None:
        sessions: list[RefitSession] = []

        async def broken_off() -> None:
            async with scene.pool.refit(1, way="collective") as refit:
                sessions.append(refit)
                scene.stubs[0].loaded, scene.stubs[0].version = "/weights/1", "1"
                refit.confirm(scene.names[0])
                raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="died"):
            await broken_off()
        assert sessions[0].outcome is not None
        assert sessions[0].outcome.failed == (scene.names[1],)
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.stale]

    play(act)


def test_the_set_of_engines_is_fixed_during_a_refit_and_a_newcomer_waits_for_the_next() -> None:
    async def act(scene: Scene) -> None:
        late = scene.stubs.pop()
        await scene.pool.remove(scene.names.pop())
        async with scene.pool.refit(1) as refit:
            before = refit.membership
            scene.names.append(await scene.pool.attach(late.url))
            assert refit.membership == before == scene.pool.membership()
            assert scene.state(1) is S.stale
            await refit.load("/weights/1")
        scene.stubs.append(late)
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.stale]
        offered = scene.pool.membership()
        assert (offered.epoch, offered.joined) == (before.epoch + 1, (scene.names[1],))
        async with scene.pool.refit(2) as refit:
            assert len(refit.engines) == 2
            await refit.load("/weights/2")
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.active]

    play(act)


def test_with_refits_in_trimtabs_hands_newcomers_get_the_weights_by_themselves() -> None:
    async def act(scene: Scene) -> None:
        late = scene.stubs.pop()
        await scene.pool.remove(scene.names.pop())
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        assert refit.outcome is not None
        scene.names.append(await scene.pool.attach(late.url))
        scene.stubs.append(late)
        await scene.becomes(1, S.active)
        assert late.loaded == "/weights/1"

    play(act, rules=replace(QUICK, ownership=Ownership(refit=Owner.trimtab)))


class Starter:
    """Starts a stub's engine with whatever weights it is asked for, as a command line would name them."""

    def __init__(self, stub: Any, pool: RolloutPool) -> None:
        self.stub, self.pool = stub, pool

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        self.stub.loaded, self.stub.version = path or "", str(version)
        engine, _ = await attach(worker, self.stub.url, self.pool._session, DEADLINES)
        return Started(engine, version, self.stub.url)

    async def stop(self, worker: str) -> None:
        pass

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        return await self.start(worker, version, path)

    async def close(self) -> None:
        pass


def test_nothing_is_loaded_under_a_worker_that_was_started_with_the_weights_and_serves() -> None:
    async def act(scene: Scene) -> None:
        late = scene.stubs.pop()
        await scene.pool.remove(scene.names.pop())
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        late.asked.clear()
        scene.names.append(
            scene.pool.add_startable(WorkerSpec("late", startable=True, limit=8), Starter(late, scene.pool))
        )
        scene.stubs.append(late)
        await scene.becomes(1, S.active)
        samples = await asyncio.gather(*(scene.one(5) for _ in range(12)))
        assert {one.token_ids for one in samples} == {expected(5, "/weights/1")}
        assert late.calls("/generate")
        assert (late.loaded, late.calls("/update_weights_from_disk")) == ("/weights/1", [])

    play(act, rules=replace(QUICK, ownership=Ownership(refit=Owner.trimtab)))


def test_a_refit_that_is_open_is_not_begun_again() -> None:
    async def act(scene: Scene) -> None:
        async with scene.pool.refit(1) as refit:
            with pytest.raises(InputError, match="open"):
                async with scene.pool.refit(2):
                    pass
            await refit.load("/weights/1")
        with pytest.raises(InputError, match="none of disk, collective, same_gpu"):
            scene.pool.refit(2, way="pigeon")

    play(act)


def test_a_request_may_wait_for_the_weights_it_asks_for() -> None:
    async def act(scene: Scene) -> None:
        task = asyncio.create_task(scene.one(5, at_least=1))
        await asyncio.sleep(0.05)
        assert not task.done()
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        assert (await task).token_ids == expected(5, "/weights/1")
        gone = await scene.one(5, version=0)
        assert gone.reason.code is ReasonCode.version_gone

    play(act)


# ---- sleep, wake, and how many --------------------------------------------------------------------------------------


@BOTH
def test_scaling_down_never_releases_memory_under_a_running_request_and_wakes_again(kind: str) -> None:
    async def act(scene: Scene) -> None:
        requests = [asyncio.create_task(scene.one(60)) for _ in range(8)]
        await scene.pool.until(lambda: sum(len(stub.running) for stub in scene.stubs) >= 8, 1.0)
        scene.pool.scale(1, why="by a test")
        await scene.pool.until(lambda: sum(one.asleep for one in scene.pool.workers()) == 1, 10.0)
        scene.pool.scale(2)
        samples = await asyncio.gather(*requests)
        assert [one.token_ids for one in samples] == [expected(60)] * 8
        await scene.pool.until(lambda: all(one.state is S.active for one in scene.pool.workers()), 10.0)
        assert not any(stub.dead for stub in scene.stubs)
        steps = scene.pool.steps
        assert [one.reason.code for one in steps[-2:]] == [ReasonCode.by_hand, ReasonCode.by_hand]

    play(act, kinds=(kind, kind), limit=4)


def test_an_engine_whose_weights_were_discarded_in_its_sleep_serves_only_after_a_refit() -> None:
    async def act(scene: Scene) -> None:
        assert scene.pool._session is not None
        engine, _ = await attach("emptied", scene.stubs[1].url, scene.pool._session)
        await scene.pool.remove(scene.names.pop())
        spec = WorkerSpec("emptied", sleep_keeps_weights=False)
        scene.names.append(await scene.pool.add_engine(engine, spec, url=scene.stubs[1].url))
        scene.pool.drain("emptied", deadline_s=1.5)
        await scene.becomes(1, S.inactive)
        scene.pool.resume("emptied")
        await scene.becomes(1, S.empty)
        samples = await asyncio.gather(*(scene.one(5) for _ in range(6)))
        assert {one.workers for one in samples} == {(scene.names[0],)}
        async with scene.pool.refit(1) as refit:
            await refit.load("/weights/1")
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.active]
        answers = await scene.pool.generate([PROMPT] * 8, GREEDY)
        assert {one.samples[0].token_ids for one in answers} == {expected(5, "/weights/1")}
        assert {one.samples[0].workers[0] for one in answers} == set(scene.names)

    play(act, kinds=("vllm", "vllm"), limit=4)


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/wake_up"), ("sglang", "/resume_memory_occupation")])
def test_an_engine_that_has_no_memory_to_wake_up_with_is_tried_again_and_then_given_up(kind: str, path: str) -> None:
    async def act(scene: Scene) -> None:
        scene.pool.scale(1)
        await scene.pool.until(lambda: sum(one.asleep for one in scene.pool.workers()) == 1, 10.0)
        at = next(place for place, one in enumerate(scene.pool.workers()) if one.asleep)
        scene.stubs[at].refuse[path] = (500, {"error": {"message": "CUDA out of memory"}})
        scene.pool.scale(2)
        await scene.pool.until(
            lambda: (
                any("out of memory" in said for _, _, said, _ in scene.pool._core.warnings)
                or "out of memory" in scene.reason(at)
            ),
            10.0,
        )
        assert "out of memory" in "".join(chapter.reason.sentence for chapter in scene.pool.story(scene.names[at]))
        assert (await scene.one(5)).workers == (scene.names[1 - at],)

    play(act, kinds=(kind, kind))


def test_engines_are_given_up_for_a_taker_and_come_back_with_the_load() -> None:
    elastic = ElasticConfig(
        min_workers=1, max_workers=3, requests_per_worker_capacity=4, monitoring_interval=0.1, drain_timeout=0.5,
        scale_down_cooldown=0.2, scale_up_cooldown=0.1, min_stable_period=0.2, scale_down_requires_demand=True,
    )  # fmt: skip

    async def act(scene: Scene) -> None:
        def decided() -> str:
            decision = scene.pool.status()["scaling"]["decision"]
            return decision["reason"]["code"] if decision else ""

        assert await scene.pool.until(lambda: decided() == "NO_TAKER", 60.0)
        assert [one.state for one in scene.pool.workers()] == [S.active] * 3  # no task wants them
        scene.pool.takers((Taker("trainer", 2, 3600.0),))
        assert await scene.pool.until(lambda: sum(one.asleep for one in scene.pool.workers()) == 2, 20.0)
        scene.pool.takers(())
        for stub in scene.stubs:
            stub.step_s = 0.02
        answers = asyncio.create_task(scene.pool.generate([PROMPT] * 24, SamplingParams(max_tokens=60)))
        assert await scene.pool.until(lambda: sum(one.state is S.active for one in scene.pool.workers()) == 3, 20.0)
        assert all(one.ok for one in await answers)
        assert all(one.reason.sentence and one.expects for one in scene.pool.steps)
        assert not any(stub.dead for stub in scene.stubs)

    rules = replace(QUICK, min_workers=1, max_workers=3, capacity=4)
    play(act, kinds=("sglang",) * 3, rules=rules, elastic=elastic, limit=4)


def test_workers_are_held_for_a_validation_and_a_hold_that_cannot_be_says_so() -> None:
    async def act(scene: Scene) -> None:
        scene.pool.scale(1)
        await scene.pool.until(lambda: sum(one.asleep for one in scene.pool.workers()) == 1, 10.0)
        scene.pool.release_scale()
        async with scene.pool.hold(2, wait_s=10.0):
            assert [one.state for one in scene.pool.workers()] == [S.active] * 2

    play(act)


def test_a_trainer_that_owns_sleep_is_only_watched() -> None:
    async def act(scene: Scene) -> None:
        scene.pool.scale(1)
        await scene.pool.until(lambda: any(one.state is S.inactive for one in scene.pool.workers()), 10.0)
        assert not any(stub.asleep for stub in scene.stubs)
        scene.stubs[0].asleep = True
        scene.stubs[0].stop("abort")
        await scene.pool.until(lambda: scene.pool.workers()[0].asleep, 10.0)
        assert "/sleep" not in [path for stub in scene.stubs for path in stub.calls()]

    play(act, kinds=("vllm", "vllm"), rules=replace(QUICK, ownership=Ownership(sleep=Owner.trainer)))


def status_of(scene: Scene, at: int) -> dict[str, Any]:
    found: dict[str, Any] = scene.pool.status()["workers"][at]
    return found


def test_the_status_says_of_every_worker_what_it_is_and_why() -> None:
    async def act(scene: Scene) -> None:
        async with scene.running(200):
            at = scene.busy()
            await scene.pool.until(lambda: status_of(scene, at)["load"] is not None, 5.0)
            told = status_of(scene, at)
            assert (told["state"], told["kind"], told["running"], told["version"]) == ("active", "sglang", 1, 0)
            assert told["dialect"].startswith("sglang 0.5")
            assert told["reason"]["sentence"]
            assert scene.pool.status()["requests"]["streaming"] == 1
            assert scene.pool.status()["queue"][0]["class"] == "default"

    play(act)
