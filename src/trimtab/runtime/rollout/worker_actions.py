"""Executes actions on workers: start, wake, sleep, stop, pause, resume, refit, probe.

One action at a time per worker, in order; a newer action supersedes, and begins when the previous one has ended or was
cancelled. Every action ends in ActionDone or ActionFailed before its deadline. An engine that cannot load weights is
refitted by a restart with them, if trimtab may start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from trimtab.core.errors import InfeasibleError, TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.model.rollout import WorkerVerb
from trimtab.runtime.engines.engine import Engine, EngineError, GenerateRequest, PauseMode, WeightUpdate
from trimtab.runtime.engines.engine import EngineCapability as Offers
from trimtab.runtime.engines.gated import GatedEngine
from trimtab.runtime.procs.background import describe
from trimtab.runtime.procs.gpus import used_bytes
from trimtab.runtime.rollout.dispatcher import version_number
from trimtab.runtime.rollout.machine_loop import RolloutCore, WorkerHandle

log = logging.getLogger("trimtab.rollout")

DEADLINE_SHARE = 0.95
"""Of an action's time, so that its failure is reported before the machine's own timeout."""
_MIN_FREED_SHARE = 0.1
"""Of the memory in use before: freeing less counts as nothing freed, if `min_bytes` is not given."""
_GIB = 2**30

MemoryProbe = Callable[[Sequence[int]], "int | None"]
"""Bytes in use on these GPUs of this node; None: unknown."""


class WorkerActions:
    """Executes actions and reports each outcome as an event."""

    def __init__(
        self,
        core: RolloutCore,
        on_engine: Callable[[str], None],  # called when a worker got an engine
        gpus_of: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:
        self._core, self._on_engine, self._gpus_of = core, on_engine, gpus_of
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
        core.handlers[e.WorkerAction] = self._start_action

    def is_busy(self, worker: str) -> bool:
        task = self._doing.get(worker)
        return task is not None and not task.done()

    def _start_action(self, action: e.WorkerAction) -> None:
        before = self._doing.get(action.worker)
        if before is not None:
            before.cancel()
        task = self._core.spawn(self._run_action(action, before), f"{action.verb.value}-{action.worker}")
        self._doing[action.worker] = task

    async def _run_action(self, action: e.WorkerAction, before: asyncio.Task[None] | None) -> None:
        core = self._core
        if before is not None and not before.done():
            await asyncio.wait({before}, timeout=max(0.0, action.deadline - core.clock()))
        try:
            handle = core.worker_handle(action.worker)
            left_s = max(0.0, DEADLINE_SHARE * (action.deadline - core.clock()))
            done: Any = await asyncio.wait_for(self._verbs[action.verb](handle, action), left_s)
        except asyncio.TimeoutError:
            done = e.ActionFailed(action.worker, action.attempt, f"it took more than {left_s:.3g} s")
        except (TrimtabError, OSError) as error:
            done = e.ActionFailed(action.worker, action.attempt, said(error))
        except Exception as error:
            log.exception("%s of %s failed", action.verb.value, action.worker)
            done = e.ActionFailed(action.worker, action.attempt, describe(error))
        if self._doing.get(action.worker) is asyncio.current_task():
            del self._doing[action.worker]
        core.handle_event(done)
        if action.verb is WorkerVerb.start and isinstance(done, e.ActionDone):
            self._confirm_weights(action.worker, done.version)

    def _confirm_weights(self, worker: str, version: int | None) -> None:
        """An engine started with the trainer's weights has them."""
        if version is not None and version == self._core.machine.version:
            self._core.handle_event(e.RefitConfirmed(worker, version))

    # ---- actions ---------------------------------------------------------------------------------------------------

    async def _start(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        if handle.launcher is None:
            raise InfeasibleError(f"{action.worker} has no launcher, so it cannot be started")
        version = self._core.machine.version if action.version is None else action.version
        started = await handle.launcher.start(action.worker, version, self._core.weights.get(version))
        handle.engine, handle.url, handle.node = started.engine, started.url, started.node or handle.node
        handle.note, handle.boots, handle.unhealthy_since, handle.resume_after_refit = started.note, 0, None, False
        self._on_engine(action.worker)
        record_weights(started.engine, started.version)
        return e.ActionDone(action.worker, action.attempt, started.version, started.note)

    async def _stop(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        if handle.launcher is not None:
            await handle.launcher.stop(action.worker)
        if handle.engine is not None:
            await handle.engine.close()
            handle.engine = None
        return e.ActionDone(action.worker, action.attempt)

    async def _wake(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        engine = _require_engine(handle)
        if Offers.sleep not in engine.capabilities:
            return e.ActionDone(action.worker, action.attempt)
        await engine.wake()
        version = await engine.version()
        emptied = Offers.version in engine.capabilities or bool(getattr(engine, "discarded", False))
        handle.resume_after_refit = emptied and version is None
        return e.ActionDone(action.worker, action.attempt, version_number(version))

    async def _sleep(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        engine, note = _require_engine(handle), ""
        if Offers.flush in engine.capabilities:
            with contextlib.suppress(EngineError):  # only the sleep below matters
                await engine.flush()
        if Offers.sleep in engine.capabilities:
            gpus = () if self._gpus_of is None else self._gpus_of(action.worker)
            slept = await sleep_and_verify(engine, gpus, level=1 if action.keeps_weights else 2)
            handle.slept = slept.reason
            note = slept.reason.sentence if slept.reason.code is ReasonCode.memory_kept else ""
        return e.ActionDone(action.worker, action.attempt, note=note)

    async def _pause(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        await _require_engine(handle).pause(PauseMode.keep)
        return e.ActionDone(action.worker, action.attempt)

    async def _resume(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        await _require_engine(handle).resume()
        return e.ActionDone(action.worker, action.attempt)

    async def _refit(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        version = self._core.machine.version if action.version is None else action.version
        await self._core.until(
            lambda: version in self._core.weights or self._core.restoring == version,
            action.deadline - self._core.clock(),
        )
        view = self._core.machine.worker(action.worker)
        if view is None or view.doing is not WorkerVerb.refit:
            raise InfeasibleError("it is not needed any more")  # confirmed meanwhile: it may serve already
        await self.load(handle, action.worker, version)
        return e.ActionDone(action.worker, action.attempt, version)

    async def load(self, handle: WorkerHandle, worker: str, version: int) -> None:
        """Loads weights from disk into an engine, or raises."""
        engine, path = _require_engine(handle), self._core.weights.get(version)
        if self._core.restoring == version:
            if await engine.version() == str(version):
                await resume_after_update(handle)
                return
            path = path or getattr(engine, "model_path", "") or None
        loads = Offers.refit in engine.capabilities
        if path is None and (loads or self._core.restoring != version):
            raise InfeasibleError(f"the path of version {version} is unknown", hint="await refit.load(path) sets it")
        if loads and path is not None:
            await engine.refit(WeightUpdate(path, str(version)))
            await resume_after_update(handle)
            return
        if handle.launcher is None:
            why = getattr(engine, "lacks", {}).get(Offers.refit, "")
            raise InfeasibleError(
                f"this {engine.kind} engine cannot load weights{why and f' ({why})'}, and this worker has no launcher",
                where=worker,
                hint=f"restart it with these weights, then call pool.vouch({worker!r})",
            )
        await engine.close()
        started = await handle.launcher.restart(worker, version, path)
        handle.engine, handle.url, handle.boots = started.engine, started.url, 0
        if started.version != version:
            raise InfeasibleError(f"it was restarted and has version {started.version}, not {version}")
        record_weights(started.engine, version)

    async def _probe(self, handle: WorkerHandle, action: e.WorkerAction) -> e.ActionDone:
        """Generates one token: a health page proves nothing about a wedged engine."""
        order = GenerateRequest(
            f"probe-{action.worker}-{action.attempt}", (self._core.known_ids[0],), 1, temperature=0.0
        )
        async with contextlib.aclosing(_require_engine(handle).generate(order)) as pieces:
            async for _ in pieces:
                pass
        return e.ActionDone(action.worker, action.attempt)


def _require_engine(handle: WorkerHandle) -> Engine:
    if handle.engine is None:
        raise EngineError("it has no engine", engine=handle.spec.id)
    return handle.engine


def said(error: Exception) -> str:
    """An error in one line: what failed, and what to do."""
    if not isinstance(error, TrimtabError):
        return str(error)
    return f"{error.what} ({error.hint})" if error.hint else error.what


def record_weights(engine: Engine | None, version: int | None, *, by_caller: bool = False) -> None:
    """Records the version of an engine that cannot report it, or whose weights the caller vouches for."""
    if version is None or not isinstance(engine, GatedEngine):
        return
    if by_caller or Offers.version not in engine.capabilities:
        engine.vouched(str(version))


async def forget_prefixes(engine: Engine) -> None:
    """Clears a prefix cache of older weights, where the trainer has not done so. Requests there would keep theirs."""
    if Offers.flush in engine.capabilities:
        with contextlib.suppress(EngineError):  # requests of other clients run there
            await engine.flush()


async def resume_after_update(handle: WorkerHandle) -> None:
    """Opens the gate of an engine that woke without weights."""
    if handle.resume_after_refit and handle.engine is not None:
        await handle.engine.resume()
        handle.resume_after_refit = False


class SleepResult(Frozen):
    """Effect of a sleep on GPU memory."""

    before: int | None
    after: int | None
    reason: Reason

    @property
    def released(self) -> bool | None:
        """None: unknown."""
        return None if self.after is None else self.reason.code is ReasonCode.asleep


async def sleep_and_verify(
    engine: Engine,
    gpus: Sequence[int],
    *,
    level: int = 1,
    min_bytes: int | None = None,
    within_s: float = 10.0,
    used: MemoryProbe | None = None,
) -> SleepResult:
    """Puts an engine to sleep and waits for its GPU memory to be freed.

    Engines confirm a sleep that freed nothing: a flag was missing at start, or another process holds the rest. The next
    user of the memory must not find out by an out-of-memory error, so the driver is read before and after. If no driver
    can be read, the result is unknown, not success.
    """
    read = used or used_bytes
    before = read(gpus)
    await engine.sleep(level)
    if before is None:
        sentence = f"{engine.name} sleeps; its GPU memory cannot be read here"
        return SleepResult(None, None, Reason(ReasonCode.asleep, sentence))
    wanted = min_bytes if min_bytes is not None else int(before * _MIN_FREED_SHARE)
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        after = read(gpus)
        if after is None:
            sentence = f"{engine.name} sleeps; its GPU memory cannot be read any more"
            return SleepResult(before, None, Reason(ReasonCode.asleep, sentence))
        freed = before - after
        if freed >= wanted:
            sentence = f"{engine.name} sleeps and gave {_gib(freed)} back; {_gib(after)} are still in use"
            return SleepResult(before, after, Reason(ReasonCode.asleep, sentence))
        if asyncio.get_running_loop().time() >= deadline:
            sentence = (
                f"{engine.name} sleeps, but only {_gib(max(freed, 0))} of {_gib(before)} came free in {within_s:g} s; "
                f"{_gib(wanted)} were expected"
            )
            return SleepResult(before, after, Reason(ReasonCode.memory_kept, sentence))
        await asyncio.sleep(min(0.1, within_s))


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
