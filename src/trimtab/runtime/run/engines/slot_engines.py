"""Engine objects on slots of a pool: what runs in the task that holds a slot, and the launcher that speaks to it.

The launcher is the one for engines on slots (`runtime/rollout/launch/slots.py`): how a slot is had, given notice of,
handed over and had again is its doing. Here the engine in the slot is an object in the task's own process, and not a
process that listens. If the task's process dies, the engine dies with it, and the pool says so.
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
from trimtab.runtime.rollout.launch.slot_record import WorkerSlot as WorkerSlot
from trimtab.runtime.rollout.launch.slot_task import ENDED_HERE, SlotTask
from trimtab.runtime.rollout.launch.slots import SlotLauncher
from trimtab.runtime.run.component import Place
from trimtab.runtime.run.engines.engine_thread import EngineMessage, EngineThread, engine_class
from trimtab.runtime.run.engines.engine_thread import EngineReply as EngineReply
from trimtab.runtime.run.engines.object_engine import ThreadedEngine, WeightsAt, no_refit_error, started


@dataclass(frozen=True)
class EngineObjectSpec:
    """How an engine object is made in a slot."""

    use: str
    place: Place
    settings: Mapping[str, Any] = field(default_factory=dict)
    near: Path | None = None
    start_s: float = 120.0
    stop_s: float = 10.0


class EngineObjectSlotTask(SlotTask):
    """A slot's task, with an engine object or without one. Calls come on the main thread, `drain` and `cancel` not."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self._engine_thread: EngineThread | None = None

    def launch(self, actor: EngineObjectSpec) -> int:
        """Make an engine, in the place of the one before; gives the process that it lives in."""
        with self._changing:
            self.end()
            if self._let_go.is_set():
                raise RuntimeError("this slot is being given up")
            kind = engine_class(actor.use, actor.settings, actor.near, "engine")
            place = replace(actor.place, component=self._worker, devices=_devices())
            self._engine_thread = EngineThread(kind, actor.settings, place, within_s=actor.start_s, unwrap=_get_weights)
        return os.getpid()

    def exchange(self, what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
        """See `EngineThread.exchange`."""
        engine_thread = self._engine_thread
        if engine_thread is None:
            raise RuntimeError(ENDED_HERE)
        return engine_thread.exchange(what, wait_s)

    def ended(self) -> str:
        """How the engine ended; empty while it is there."""
        return ENDED_HERE if self._engine_thread is None else ""

    def end(self) -> bool:
        """The engine is gone afterwards."""
        with self._changing:
            engine_thread, self._engine_thread = self._engine_thread, None
            if engine_thread is not None:
                engine_thread.close()
            return True


def _devices() -> tuple[int, ...]:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(int(device) for device in shown.split(",") if device.strip().isdecimal())


def _get_weights(weights: Any) -> Any:
    """Weights come as a reference in a list, so that they travel through the object store and only once to a node."""
    import ray

    return ray.get(weights[0])


class _SlotTaskPool:
    """The slots' pool as the launcher sees it: what it submits is a berth for an object."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.name = pool.name

    def submit(self, kind: Any, args: Any, **settings: Any) -> Task:
        """The task that holds a slot."""
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
        # Of a command only `stop_s` is asked, but for the launch, which is another one here.
        super().__init__(pool, session, slot_pool, cast(EngineCommand, actor), deadlines=deadlines, **settings)
        self._actor = actor
        self._methods = methods
        self._weights_at = weights_at
        self.pids: dict[str, int] = {}  # of engines, by worker: for whoever looks for them

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
        result = started(engine, path, place.line.node)
        place.up = True
        place.watching = asyncio.create_task(self._watch(place), name=f"engine-{worker}")
        return result

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Only for engines that take no weights, and this one would not either."""
        raise no_refit_error(worker)
