"""Refits on engines of several releases behind a real pool, restarts in between, and the way back from a failed one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from rollout_scenes import QUICK, Scene, expected, play
from trimtab.core.errors import InfeasibleError, UnreachableError
from trimtab.machines.diagnose.rollout import examine
from trimtab.machines.diagnose.rollout_findings import RolloutIssue
from trimtab.model.rollout import Owner, Ownership
from trimtab.rollout import WorkerState

S = WorkerState
RELEASES = pytest.mark.parametrize(
    "kind",
    ["vllm 0.10.2", "vllm 0.12.0", "vllm 0.16.0", "vllm 0.26.0", "vllm 0.27.0", "vllm 0.32.0", "sglang 0.4.6",
     "sglang 0.4.9", "sglang 0.5.2", "sglang 0.5.4", "sglang 0.5.6", "sglang 0.5.23"],
)  # fmt: skip
OWNERS = pytest.mark.parametrize("owner", list(Owner))


def rules(owner: Owner) -> Any:
    return replace(QUICK, ownership=Ownership(refit=owner))


async def refit(scene: Scene, version: int, path: str | None = None) -> None:
    async with scene.pool.refit(version) as session:
        await session.load(path or f"/weights/{version}")


@RELEASES
def test_a_refit_from_disk_reaches_engines_of_every_release_with_requests_running(kind: str) -> None:
    async def act(scene: Scene) -> None:
        for stub in scene.stubs:
            stub.step_s = 0.02
        async with scene.running(40) as task:
            await refit(scene, 1)
            sample = await task
        assert sum(span.tokens for span in sample.spans) == len(sample.token_ids) == 40
        first = sample.spans[0].tokens if sample.spans[0].version == 0 else 0
        assert sample.token_ids[:first] == expected(first)
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.active]
        assert (await scene.one(5)).token_ids == expected(5, "/weights/1")
        await refit(scene, 2)
        assert (await scene.one(5)).token_ids == expected(5, "/weights/2")
        said = scene.pool.status()["remarks"]
        reports = kind in ("vllm 0.27.0", "vllm 0.32.0") or kind.startswith("sglang 0.5")
        assert [remark["workers"] for remark in said] == ([] if reports else [scene.names])
        assert not scene.pool.status()["warnings"]

    play(act, kinds=(kind, kind))


@pytest.mark.parametrize("kind", ["vllm 0.26.0", "vllm 0.32.0", "sglang 0.4.9", "sglang 0.5.23"])
def test_an_engine_that_is_restarted_after_a_refit_is_stale_until_somebody_vouches_for_it(kind: str) -> None:
    async def act(scene: Scene) -> None:
        await refit(scene, 1)
        assert scene.state(0) is S.active
        await scene.pool.until(lambda: scene.pool.status()["workers"][0]["reported_version"] == "1", 10.0)
        scene.stubs[0].restart()
        await scene.becomes(0, S.stale)
        scene.stubs[0].loaded = "/weights/1"
        scene.pool.vouch(scene.names[0])
        await scene.becomes(0, S.active)
        assert (await scene.one(5)).token_ids == expected(5, "/weights/1")

    play(act, kinds=(kind,))


@OWNERS
@pytest.mark.parametrize("kind", ["vllm 0.12.0", "vllm 0.26.0", "vllm 0.32.0", "sglang 0.4.9", "sglang 0.5.23"])
def test_a_refit_that_fails_everywhere_says_which_call_brings_the_pool_back_and_it_does(
    kind: str, owner: Owner
) -> None:
    async def act(scene: Scene) -> None:
        for path in ("nowhere", "/weights/3", "nowhere"):
            version = {"nowhere": 9}.get(path, 3)
            served = scene.pool.version if path == "nowhere" else 3
            if path == "nowhere":
                with pytest.raises(InfeasibleError, match="no engine has version 9") as caught:
                    await refit(scene, version, path)
                assert f"await pool.restore() brings version {served} back" in (caught.value.hint or "")
                assert {scene.state(at) for at in (0, 1)} == {S.stale}
                outcome = await scene.pool.restore()
                assert set(outcome.current) == set(scene.names)
            else:
                await refit(scene, version, path)
            assert [scene.state(at) for at in (0, 1)] == [S.active, S.active]
            weights = "/weights/3" if served == 3 else "default"
            sample = await scene.one(5)
            assert (sample.token_ids, sample.spans[0].version) == (expected(5, weights), served)

    play(act, kinds=(kind, kind), rules=rules(owner))


def test_a_way_back_that_fails_says_the_next_one() -> None:
    async def act(scene: Scene) -> None:
        with pytest.raises(InfeasibleError):
            await refit(scene, 9, "nowhere")
        with pytest.raises(InfeasibleError) as caught:
            await scene.pool.restore("nowhere")
        assert "await pool.restore(path) with weights of version 0" in (caught.value.hint or "")
        await scene.pool.restore("/weights/0")
        assert (await scene.one(5)).token_ids == expected(5, "/weights/0")

    play(act, kinds=("vllm 0.26.0",))


@OWNERS
def test_engines_that_were_never_touched_are_confirmed_and_not_loaded_again(owner: Owner) -> None:
    async def act(scene: Scene) -> None:
        with pytest.raises(InfeasibleError, match="this release has no such call") as caught:
            await refit(scene, 1)
        assert "pool.restore()" in (caught.value.hint or "")
        await scene.pool.restore()
        assert scene.state(0) is S.active
        assert (await scene.one(5)).token_ids == expected(5)

    play(act, kinds=("vllm 0.10.0",), rules=rules(owner))


@pytest.mark.parametrize("shows", [True, False])
def test_a_refit_without_development_mode_says_how_to_start_the_engine(shows: bool) -> None:
    async def act(scene: Scene) -> None:
        stub = scene.stubs[0]
        await scene.pool.remove(scene.names.pop())
        stub.shows = shows
        stub.refuse = {path: (404, {}) for path in ("/openapi.json", "/is_paused", *stub.paths)}
        name = await scene.pool.attach(stub.url)
        scene.names.append(name)
        with pytest.raises(InfeasibleError, match="VLLM_SERVER_DEV_MODE=1"):
            await refit(scene, 1)
        if shows:
            await scene.pool.restore()
        else:  # whether it is the process of before cannot be seen
            with pytest.raises(InfeasibleError, match=rf"pool\.vouch\('{name}'\)"):
                await scene.pool.restore()
            scene.pool.vouch(name)
        await scene.becomes(0, S.active)
        assert (await scene.one(5)).token_ids == expected(5)

    play(act, kinds=("vllm 0.26.0",))


def test_a_refit_that_never_began_says_which_call_brings_the_pool_back() -> None:
    async def act(scene: Scene) -> None:
        goes = asyncio.Event()

        async def hangs(request: web.Request) -> web.Response:
            await goes.wait()
            return web.json_response({"status": "paused"})

        scene.stubs[0].elsewhere["/pause"] = hangs
        async with scene.running(3000):
            with pytest.raises(UnreachableError, match="still busy") as caught:
                async with scene.pool.refit(1, wait_s=0.2):
                    pass
        assert "pool.restore()" in (caught.value.hint or "")
        goes.set()
        scene.stubs[0].elsewhere.clear()
        await scene.pool.restore()
        await scene.becomes(0, S.active)
        assert (await scene.one(5)).token_ids == expected(5)

    play(act, kinds=("vllm 0.26.0",))


def test_an_exception_of_the_trainer_is_noted_with_the_way_back() -> None:
    async def act(scene: Scene) -> None:
        async def broken_off() -> None:
            async with scene.pool.refit(1, way="collective"):
                raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="died") as caught:
            await broken_off()
        assert any("pool.restore()" in note for note in getattr(caught.value, "__notes__", ()))
        await scene.pool.restore()
        assert (await scene.one(5)).token_ids == expected(5)

    play(act, kinds=("vllm 0.26.0",))


def test_weights_sent_by_the_trainer_count_on_an_engine_that_cannot_say_its_version() -> None:
    async def act(scene: Scene) -> None:
        async with scene.pool.refit(1, way="collective"):
            for stub in scene.stubs:
                stub.loaded = "sent by NCCL"
        assert [scene.state(at) for at in (0, 1)] == [S.active, S.active]
        assert (await scene.one(5)).token_ids == expected(5, "sent by NCCL")

    play(act, kinds=("vllm 0.26.0", "vllm 0.16.0"))


def test_an_engine_that_shows_neither_version_nor_process_serves_when_vouched_for() -> None:
    async def act(scene: Scene) -> None:
        scene.stubs[0].shows = False
        await scene.pool.remove(scene.names.pop())
        scene.names.append(await scene.pool.attach(scene.stubs[0].url))
        assert (await scene.one(5)).token_ids == expected(5)
        with pytest.raises(InfeasibleError, match=r"pool\.vouch"):
            await refit(scene, 1)
        assert "pool.vouch" in scene.pool.status()["remarks"][0]["sentence"]
        scene.pool.vouch(scene.names[0])
        await scene.becomes(0, S.active)
        assert (await scene.one(5)).token_ids == expected(5, "/weights/1")

    play(act, kinds=("vllm 0.26.0",))


def test_a_release_that_was_never_tried_is_a_remark_of_the_doctor_and_no_warning() -> None:
    async def act(scene: Scene) -> None:
        status = scene.pool.status()
        assert status["warnings"] == []
        found = [finding for finding in examine(status) if finding.issue is RolloutIssue.release_unknown]
        assert len(found) == 1
        assert "vllm 0.12.0 was never tried" in found[0].sentence

    play(act, kinds=("vllm 0.12.0", "vllm 0.12.0"))
