"""Weights that a trainer sends to engines by itself: what the engines report is followed, so that they go on serving.

Trainers that were written for a plain router (slime, NeMo RL with SGLang, AReaL) update the weights of each engine and
tell nobody else. To the pool such an engine has weights that nobody confirmed, and it would serve no more. `follow`
does what the trainer would do if it knew of the pool: when an engine reports a newer version than the pool's, a refit
to it is begun and ended, and whoever reports it is confirmed; one that reports it later is confirmed then.

Only an engine's own word about a version that is a whole number counts, and only one that is as new as the newest seen:
an engine that was restarted with its first weights says something older, or nothing that is a number, and stays out of
service. A version never goes back. What must never happen is an engine confirmed for what another one reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trimtab.core.errors import InputError, TrimtabError
from trimtab.model.rollout import RefitWay, WorkerState
from trimtab.runtime.engines.engine import EngineCapability
from trimtab.runtime.rollout.dispatcher import version_number
from trimtab.runtime.rollout.pool import RolloutPool

log = logging.getLogger("trimtab.integrations.following")

SERVES_OR_COULD = (WorkerState.active, WorkerState.stale)
LOOK_S = 0.5
ASK_S = 5.0


@asynccontextmanager
async def following(pool: RolloutPool, look_s: float = LOOK_S) -> AsyncIterator[None]:
    """Within the block, the pool goes along with the weights that its engines report."""
    if not look_s > 0:
        raise InputError(f"look_s is {look_s}", hint="seconds, more than 0")
    task = pool.background.start("follow weights", functools.partial(follow, pool, look_s))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def follow(pool: RolloutPool, look_s: float = LOOK_S) -> None:
    """Until it is cancelled."""
    while True:
        try:
            await catch_up(pool)
        except TrimtabError as error:
            log.warning("weights that engines report could not be followed: %s", error.what)
        await asyncio.sleep(look_s)


async def catch_up(pool: RolloutPool) -> int:
    """Once. Gives the version that the pool is at afterwards."""
    reported = await _reported(pool)
    newest = max(reported.values(), default=pool.version)
    if newest > pool.version:
        log.info("engines report version %d; the pool was at %d", newest, pool.version)
        await _refitted(pool, newest)
    for view in pool.workers():
        if view.state is WorkerState.stale and reported.get(view.worker) == pool.version:
            pool.vouch(view.worker)
    return pool.version


async def _refitted(pool: RolloutPool, version: int) -> None:
    """A refit in which the weights are there already: every member that says so is confirmed, the others wait."""
    async with pool.refit(version, way=RefitWay.collective) as refit:
        said = await _reported(pool)
        for member in refit.engines:
            if said.get(member.worker) == version:
                refit.confirm(member.worker)
            else:
                refit.fail(member.worker, f"it does not report version {version} yet")


async def _reported(pool: RolloutPool) -> dict[str, int]:
    """What engines say, where it is a number; one that cannot be asked says nothing."""
    asked = [view.worker for view in pool.workers() if view.state in SERVES_OR_COULD]
    said = await asyncio.gather(*(_version_of(pool, worker) for worker in asked))
    return {worker: version for worker, version in zip(asked, said, strict=True) if version is not None}


async def _version_of(pool: RolloutPool, worker: str) -> int | None:
    try:
        engine = pool.engine(worker)
        if engine is None or EngineCapability.version not in engine.capabilities:
            return None
        return version_number(await asyncio.wait_for(engine.version(), ASK_S))
    except (TrimtabError, OSError, asyncio.TimeoutError):
        return None
