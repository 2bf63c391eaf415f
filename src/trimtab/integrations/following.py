"""Follows weight updates that a trainer sends to the engines directly, without telling the pool.

Trainers written for a plain router (slime, NeMo RL with SGLang, AReaL) update the weights of each engine themselves. To
the pool such an engine has unconfirmed weights and may not serve. `follow` does what a pool-aware trainer would do:
when an engine reports a version newer than the pool's, it begins and ends a refit to that version and confirms every
engine that reports it, also those that report it later.

Only versions that are whole numbers count, and only the newest seen: an engine that restarted with its initial weights
reports an older version, or none, and stays out of service. The version never goes back. What must never happen: an
engine is confirmed because of another engine's report.
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

POLLED_STATES = (WorkerState.active, WorkerState.stale)
POLL_S = 0.5
REQUEST_TIMEOUT_S = 5.0


@asynccontextmanager
async def following(pool: RolloutPool, poll_s: float = POLL_S) -> AsyncIterator[None]:
    """Run `follow` in the background within the block."""
    if not poll_s > 0:
        raise InputError(f"poll_s is {poll_s}", hint="seconds, more than 0")
    task = pool.background.start("follow weights", functools.partial(follow, pool, poll_s))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def follow(pool: RolloutPool, poll_s: float = POLL_S) -> None:
    while True:
        try:
            await catch_up(pool)
        except TrimtabError as error:
            log.warning("cannot follow the weights that engines report: %s", error.what)
        await asyncio.sleep(poll_s)


async def catch_up(pool: RolloutPool) -> int:
    """Follow the reported versions once; return the pool's version afterwards."""
    reported = await _reported(pool)
    newest = max(reported.values(), default=pool.version)
    if newest > pool.version:
        log.info("engines report version %d; the pool was at %d", newest, pool.version)
        await _refit(pool, newest)
    for view in pool.workers():
        if view.state is WorkerState.stale and reported.get(view.worker) == pool.version:
            pool.vouch(view.worker)
    return pool.version


async def _refit(pool: RolloutPool, version: int) -> None:
    """Refit to weights that the engines have already: engines that report `version` are confirmed, the others fail."""
    async with pool.refit(version, way=RefitWay.collective) as refit:
        reported = await _reported(pool)
        for member in refit.engines:
            if reported.get(member.worker) == version:
                refit.confirm(member.worker)
            else:
                refit.fail(member.worker, f"it does not report version {version} yet")


async def _reported(pool: RolloutPool) -> dict[str, int]:
    """The versions that engines report, where they are numbers; engines that do not answer are left out."""
    workers = [view.worker for view in pool.workers() if view.state in POLLED_STATES]
    versions = await asyncio.gather(*(_version_of(pool, worker) for worker in workers))
    return {worker: version for worker, version in zip(workers, versions, strict=True) if version is not None}


async def _version_of(pool: RolloutPool, worker: str) -> int | None:
    try:
        engine = pool.engine(worker)
        if engine is None or EngineCapability.version not in engine.capabilities:
            return None
        return version_number(await asyncio.wait_for(engine.version(), REQUEST_TIMEOUT_S))
    except (TrimtabError, OSError, asyncio.TimeoutError):
        return None
