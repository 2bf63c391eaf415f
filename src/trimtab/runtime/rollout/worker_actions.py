"""What is done to workers: started, woken, put to sleep, stopped, paused, resumed, refitted, probed.

One deed at a time for each worker, in the order they were said; a newer one supersedes, and begins when the one before
has ended or was cancelled. Every deed ends in ActionDone or ActionFailed before its deadline. An engine that cannot
load weights by itself is refitted by being started again with them, where trimtab may start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from trimtab.core.errors import InfeasibleError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import WorkerVerb
from trimtab.runtime.engines.engine import Engine, EngineError, GenerateRequest, PauseMode, WeightUpdate
from trimtab.runtime.engines.engine import EngineCapability as Offers
from trimtab.runtime.engines.memory import sleep_and_look
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rollout.dispatcher import number_of
from trimtab.runtime.rollout.machine_loop import RolloutCore, WorkerHandle

log = logging.getLogger("trimtab.rollout")

SPARE_SHARE = 0.95
"""Of the time that a deed has: so that its own failure is told before the machine gives it up."""


class WorkerActions:
    """Carries acts out."""

    def __init__(self, core: RolloutCore, gpus_of: Callable[[str], tuple[int, ...]] | None = None) -> None:
        self._core = core
        self._gpus_of = gpus_of
        self._doing: dict[str, asyncio.Task[None]] = {}
        self._verbs: dict[WorkerVerb, Callable[[WorkerHandle, e.WorkerAction], Awaitable[e.ActionDone]]] = {
            WorkerVerb.start: self._start,
            WorkerVerb.stop: self._stop,
            WorkerVerb.wake: self._wake,
            WorkerVerb.sleep: self._sleep,
            WorkerVerb.pause: self._pause,
            WorkerVerb.resume: self._resume,
            WorkerVerb.refit: self._refit,
            WorkerVerb.probe: self._probe,
        }
        core.handlers[e.WorkerAction] = self._act
        # What is to be done when a worker has an engine, or has none any more; set by the pool.
        self.on_engine: Callable[[str], None] = lambda worker: None

    def is_doing(self, worker: str) -> bool:
        """Whether something is being done to it."""
        task = self._doing.get(worker)
        return task is not None and not task.done()

    def _act(self, act: e.WorkerAction) -> None:
        before = self._doing.get(act.worker)
        if before is not None:
            before.cancel()
        task = self._core.spawn(self._do(act, before), f"{act.verb.value}-{act.worker}")
        self._doing[act.worker] = task

    async def _do(self, act: e.WorkerAction, before: asyncio.Task[None] | None) -> None:
        core = self._core
        if before is not None and not before.done():
            await asyncio.wait({before}, timeout=max(0.0, act.deadline - core.clock()))
        try:
            hand = core.hand(act.worker)
            left_s = max(0.0, SPARE_SHARE * (act.deadline - core.clock()))
            done: Any = await asyncio.wait_for(self._verbs[act.verb](hand, act), left_s)
        except asyncio.TimeoutError:
            done = e.ActionFailed(act.worker, act.attempt, f"it took more than {left_s:.3g} s")
        except (TrimtabError, OSError) as error:
            done = e.ActionFailed(act.worker, act.attempt, getattr(error, "what", None) or str(error))
        except Exception as error:
            log.exception("%s of %s failed", act.verb.value, act.worker)
            done = e.ActionFailed(act.worker, act.attempt, describe(error))
        if self._doing.get(act.worker) is asyncio.current_task():
            del self._doing[act.worker]
        core.tell(done)
        if act.verb is WorkerVerb.start and isinstance(done, e.ActionDone):
            self._vouch(act.worker, done.version)

    def _vouch(self, worker: str, version: int | None) -> None:
        """Whoever started it with the trainer's weights knows that it has them."""
        if version is not None and version == self._core.machine.version:
            self._core.tell(e.RefitConfirmed(worker, version))

    # ---- the verbs -------------------------------------------------------------------------------------------------

    async def _start(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        if hand.launcher is None:
            raise InfeasibleError(f"nobody here can start {act.worker}")
        version = self._core.machine.version if act.version is None else act.version
        started = await hand.launcher.start(act.worker, version, self._core.weights.get(version))
        hand.engine, hand.url, hand.node = started.engine, started.url, started.node or hand.node
        hand.note, hand.boots, hand.unwell_since, hand.resume_after_refit = started.note, 0, None, False
        self.on_engine(act.worker)
        return e.ActionDone(act.worker, act.attempt, started.version, started.note)

    async def _stop(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        if hand.launcher is not None:
            await hand.launcher.stop(act.worker)
        if hand.engine is not None:
            await hand.engine.close()
            hand.engine = None
        return e.ActionDone(act.worker, act.attempt)

    async def _wake(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        engine = _there(hand)
        if Offers.sleep not in engine.verbs:
            return e.ActionDone(act.worker, act.attempt)
        await engine.wake()
        version = await engine.version()
        hand.resume_after_refit = Offers.version in engine.verbs and version is None
        return e.ActionDone(act.worker, act.attempt, number_of(version))

    async def _sleep(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        engine, note = _there(hand), ""
        if Offers.flush in engine.verbs:
            with contextlib.suppress(EngineError):  # the sleep below is what counts, and says so if it fails
                await engine.flush()
        if Offers.sleep in engine.verbs:
            gpus = () if self._gpus_of is None else self._gpus_of(act.worker)
            slept = await sleep_and_look(engine, gpus, level=1 if act.keeps_weights else 2)
            hand.slept = slept.reason
            note = slept.reason.sentence if slept.reason.code is ReasonCode.memory_kept else ""
        return e.ActionDone(act.worker, act.attempt, note=note)

    async def _pause(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        await _there(hand).pause(PauseMode.keep)
        return e.ActionDone(act.worker, act.attempt)

    async def _resume(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        await _there(hand).resume()
        return e.ActionDone(act.worker, act.attempt)

    async def _refit(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        version = self._core.machine.version if act.version is None else act.version
        await self._core.until(lambda: version in self._core.weights, act.deadline - self._core.clock())
        await self.load(hand, act.worker, version)
        return e.ActionDone(act.worker, act.attempt, version)

    async def load(self, hand: WorkerHandle, worker: str, version: int) -> None:
        """The engine has these weights afterwards, read from disk; or raises."""
        path = self._core.weights.get(version)
        if path is None:
            raise InfeasibleError(
                f"nobody has said where version {version} lies", hint="await refit.load(path) says it"
            )
        engine = _there(hand)
        if Offers.refit in engine.verbs:
            await engine.refit(WeightUpdate(path, str(version)))
            await resumed(hand)
            return
        if hand.launcher is None:
            raise InfeasibleError(
                f"a {engine.kind} engine cannot load weights, and this one is not started here",
                where=worker,
                hint="start it again with the new weights, and say so with pool.vouch",
            )
        await engine.close()
        started = await hand.launcher.restart(worker, version, path)
        hand.engine, hand.url, hand.boots = started.engine, started.url, 0
        if started.version != version:
            raise InfeasibleError(f"it was started again and has version {started.version}, not {version}")

    async def _probe(self, hand: WorkerHandle, act: e.WorkerAction) -> e.ActionDone:
        """One token, really generated: a health check that passes proves nothing of a wedged engine."""
        order = GenerateRequest(f"probe-{act.worker}-{act.attempt}", (self._core.a_token,), 1, temperature=0.0)
        async with contextlib.aclosing(_there(hand).generate(order)) as pieces:
            async for _ in pieces:
                pass
        return e.ActionDone(act.worker, act.attempt)


def _there(hand: WorkerHandle) -> Engine:
    if hand.engine is None:
        raise EngineError("it has no engine", engine=hand.spec.id)
    return hand.engine


async def resumed(hand: WorkerHandle) -> None:
    """An engine that woke without weights has some now: its gate opens."""
    if hand.resume_after_refit and hand.engine is not None:
        await hand.engine.resume()
        hand.resume_after_refit = False
