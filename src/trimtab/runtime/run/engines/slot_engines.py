"""Engine objects on slots of a pool: the task that holds a slot, and the launcher that talks to it.

The slot logic (acquire, notice, handover, reacquire) is that of `runtime/rollout/launch/slots.py`. Here the engine is
an object in the task's own process instead of a process that listens. If the task's process dies, the engine dies with
it and the pool reports it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from trimtab.runtime.rollout.launch.launcher import Started
from trimtab.runtime.rollout.launch.process_engine import ENDED_HERE, SlotTask
from trimtab.runtime.rollout.launch.slots import WorkerSlot
from trimtab.runtime.run.component import visible_devices
from trimtab.runtime.run.engines.object_engine import (
    EngineMessage,
    EngineObjectSpec,
    EngineReply,
    EngineThread,
    ThreadedEngine,
    WeightsAt,
    started,
)


class EngineObjectSlotTask(SlotTask):
    """A slot's task, with or without an engine object. `drain` and `cancel` come on other threads."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self._engine_thread: EngineThread | None = None

    def launch(self, spec: EngineObjectSpec) -> int:
        """Create an engine, replacing an earlier one; returns its process id."""
        with self._changing:
            self.end()
            if self._let_go.is_set():
                raise RuntimeError("this slot is being given up")
            place = replace(spec.place, component=self._worker, devices=visible_devices())
            self._engine_thread = spec.thread(place, unwrap=_get_weights)
        return os.getpid()

    def exchange(self, what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
        engine_thread = self._engine_thread
        if engine_thread is None:
            raise RuntimeError(ENDED_HERE)
        return engine_thread.exchange(what, wait_s)

    def ended(self, within_s: float = 0.0) -> str:
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


class ObjectEngines:
    """Starts engine objects in slots."""

    task = EngineObjectSlotTask

    def __init__(
        self, spec: EngineObjectSpec, methods: frozenset[str], weights_at: WeightsAt, pids: dict[str, int]
    ) -> None:
        self._spec, self._methods, self._weights_at = spec, methods, weights_at
        self.stop_s = spec.stop_s
        self._pids = pids  # of engines, by worker

    async def launch(self, slot: WorkerSlot, version: int, path: str | None) -> Started:
        self._pids[slot.worker] = await slot.call("launch", self._spec, within_s=self._spec.start_s)

        async def exchange(what: list[EngineMessage], wait_s: float) -> list[EngineReply]:
            replies: list[EngineReply] = await slot.call("exchange", what, wait_s)
            return replies

        engine = ThreadedEngine(slot.worker, self._methods, exchange, self._weights_at)
        return await started(engine, path, slot.member.node)

    async def close(self) -> None: ...
