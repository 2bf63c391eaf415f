"""Engine objects on slots of a pool: the task that holds a slot, and the launcher that talks to it.

The slot logic (acquire, notice, handover, reacquire) is that of `runtime/rollout/launch/slots.py`. Here the engine is
an object in the task's own process instead of a process that listens. If the task's process dies, the engine dies with
it and the pool reports it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from trimtab.core.errors import UnreachableError
from trimtab.runtime.client.session import Pool, Session
from trimtab.runtime.client.task import Task
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.rollout.launch.launcher import EngineCommand, LauncherCallbacks, Started
from trimtab.runtime.rollout.launch.slot_task import ENDED_HERE, SlotTask
from trimtab.runtime.rollout.launch.slots import SlotLauncher, WorkerSlot
from trimtab.runtime.run.component import Place, visible_devices
from trimtab.runtime.run.engines.engine_thread import EngineMessage, EngineReply, EngineThread, engine_class
from trimtab.runtime.run.engines.object_engine import ThreadedEngine, WeightsAt, no_refit_error, started


@dataclass(frozen=True)
class EngineObjectSpec:
    """How an engine object is created in a slot."""

    use: str
    place: Place
    settings: Mapping[str, Any] = field(default_factory=dict)
    near: Path | None = None
    start_s: float = 120.0
    stop_s: float = 10.0


class EngineObjectSlotTask(SlotTask):
    """A slot's task, with or without an engine object. `drain` and `cancel` come on other threads."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self._engine_thread: EngineThread | None = None

    def launch(self, actor: EngineObjectSpec) -> int:
        """Create an engine, replacing an earlier one; returns its process id."""
        with self._changing:
            self.end()
            if self._let_go.is_set():
                raise RuntimeError("this slot is being given up")
            kind = engine_class(actor.use, actor.settings, actor.near, "engine")
            place = replace(actor.place, component=self._worker, devices=visible_devices())
            self._engine_thread = EngineThread(kind, actor.settings, place, within_s=actor.start_s, unwrap=_get_weights)
        return os.getpid()

    def exchange(self, what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
        """See `EngineThread.exchange`."""
        engine_thread = self._engine_thread
        if engine_thread is None:
            raise RuntimeError(ENDED_HERE)
        return engine_thread.exchange(what, wait_s)

    def ended(self, within_s: float = 0.0) -> str:
        """How the engine ended; empty while it runs."""
        return ENDED_HERE if self._engine_thread is None else ""

    def end(self, force: bool = False) -> bool:
        with self._changing:
            engine_thread, self._engine_thread = self._engine_thread, None
            if engine_thread is not None:
                engine_thread.close()
            return True


def _get_weights(weights: Any) -> Any:
    """Weights come as a reference in a list, so that the object store transfers them once per node."""
    import ray

    return ray.get(weights[0])


class _SlotTaskPool:
    """The slots' pool as the launcher sees it: what it submits holds an engine object."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.name = pool.name

    def submit(self, kind: Any, args: Any, **settings: Any) -> Task:
        return self._pool.submit(EngineObjectSlotTask, args, **settings)


class ActorLauncher(SlotLauncher):
    """Starts and ends engine objects on slots."""

    def __init__(
        self,
        pool: LauncherCallbacks,
        session: Session,
        slots: str,
        actor: EngineObjectSpec,
        methods: frozenset[str],
        weights_at: WeightsAt,
        *,
        deadlines: EngineDeadlines | None = None,
        **settings: Any,
    ) -> None:
        slot_pool = cast(Pool, _SlotTaskPool(session.pool(slots)))
        # Of a command only `stop_s` is read; the launch is overridden here.
        super().__init__(pool, session, slot_pool, cast(EngineCommand, actor), deadlines=deadlines, **settings)
        self._actor = actor
        self._methods = methods
        self._weights_at = weights_at
        self.pids: dict[str, int] = {}  # of engines, by worker

    async def _launch_once(self, place: WorkerSlot, version: int, path: str | None) -> Started:
        actor, worker = self._actor, place.worker
        self.pids[worker] = await place.call("launch", actor, within_s=actor.start_s)

        async def exchange(what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
            replies: list[EngineReply] = await place.call("exchange", what, wait_s)
            return replies

        engine = ThreadedEngine(worker, self._methods, exchange, self._weights_at, self._deadlines)
        state = await engine.ready()
        if not state.up:
            raise UnreachableError(f"the engine of {worker} is not ready: {state.why}")
        result = started(engine, path, place.member.node)
        place.up = True
        place.watching = asyncio.create_task(self._watch(place), name=f"engine-{worker}")
        return result

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Only for engines without refit, which this launcher refuses."""
        raise no_refit_error(worker)
