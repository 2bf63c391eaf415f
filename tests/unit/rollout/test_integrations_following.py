"""Weights that a trainer sends by itself are followed: with servers that behave as SGLang does, updated behind the
pool's back as trainers do that know only a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from rollout_scenes import Scene, expected, play
from trimtab.core.errors import InputError
from trimtab.integrations.following import catch_up, following
from trimtab.rollout import Span, WorkerState

S = WorkerState


async def update(scene: Scene, *which: int, version: str) -> None:
    """What the trainer does, one engine after the other."""
    async with aiohttp.ClientSession() as session:
        for at in which:
            body = {"model_path": f"/weights/{version}", "weight_version": version}
            async with session.post(f"{scene.stubs[at].url}/update_weights_from_disk", json=body) as answer:
                assert (await answer.json())["success"] is True


def serve(scene: Scene, version: int, *which: int) -> Callable[[], bool]:
    """Whether these do, with that version being the pool's."""
    return lambda: scene.pool.version == version and all(scene.state(at) is S.active for at in which)


def test_engines_that_a_trainer_updates_by_itself_go_on_serving_with_the_new_weights() -> None:
    async def act(scene: Scene) -> None:
        async with following(scene.pool, poll_s=0.02):
            assert (await scene.one(5)).token_ids == expected(5)
            for version in ("1", "2"):
                await update(scene, 0, 1, version=version)
                assert await scene.pool.until(serve(scene, int(version), 0, 1), 10.0), (
                    scene.reason(0),
                    scene.reason(1),
                )
                sample = await scene.one(5)
                assert sample.token_ids == expected(5, f"/weights/{version}")
                assert sample.spans == (Span(int(version), 5),)

    play(act)


def test_an_engine_that_has_not_got_them_yet_waits_until_it_says_so_itself() -> None:
    async def act(scene: Scene) -> None:
        async with following(scene.pool, poll_s=0.02):
            await update(scene, 0, version="1")
            assert await scene.pool.until(serve(scene, 1, 0), 10.0)
            assert scene.state(1) is S.stale
            assert {(await scene.one(3)).workers for _ in range(4)} == {(scene.names[0],)}
            await update(scene, 1, version="1")
            await scene.becomes(1, S.active)

    play(act)


def test_an_engine_that_comes_back_with_older_weights_stays_out_of_service() -> None:
    async def act(scene: Scene) -> None:
        async with following(scene.pool, poll_s=0.02):
            await update(scene, 0, 1, version="2")
            assert await scene.pool.until(serve(scene, 2, 0, 1), 10.0)
            await update(scene, 1, version="1")
            await scene.becomes(1, S.stale, S.lost)
            for _ in range(10):
                await asyncio.sleep(0.02)
                assert scene.pool.version == 2
                assert scene.state(1) is not S.active

    play(act)


def test_nothing_is_done_where_nothing_new_is_reported() -> None:
    async def act(scene: Scene) -> None:
        assert await catch_up(scene.pool) == 0
        epoch = scene.pool.membership().epoch
        for _ in range(3):
            await catch_up(scene.pool)
        assert scene.pool.membership().epoch == epoch
        with pytest.raises(InputError):
            async with following(scene.pool, poll_s=0):
                pass

    play(act)
