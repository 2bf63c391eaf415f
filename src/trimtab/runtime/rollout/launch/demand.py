"""Reports tasks that wait for resources held by rollout engines, so that the rollout pool may give up engines.

A waiting task counts if only rollout engines would have to end for it to start. Tasks that may evict by priority do so
themselves and do not count. Engines that are already draining are subtracted: otherwise more would be given up than
needed.
"""

from __future__ import annotations

import asyncio
import logging

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.rollout.policies.load import Taker
from trimtab.model.pool import TaskExplanation
from trimtab.model.rollout import WorkerState
from trimtab.runtime.rollout.launch.slots import SlotLauncher

log = logging.getLogger("trimtab.rollout")

INTERVAL_S = 1.0
MAX_WAITERS = 32  # explained at each check, in queue order


class DemandWatch:
    """Finds waiting tasks and reports them to the rollout pool."""

    def __init__(self, launcher: SlotLauncher, use_s: float = 600.0, every_s: float = INTERVAL_S) -> None:
        if not use_s > 0 or not every_s > 0:
            raise InputError(f"use_s {use_s:g}, every_s {every_s:g}", where="takers", hint="above 0 seconds")
        self._launcher = launcher
        self._use_s, self._every_s = use_s, every_s
        self._reported: tuple[Taker, ...] = ()

    async def watch_demand(self) -> None:
        while True:
            try:
                found = await self.find()
                if found != self._reported:
                    self._reported = found
                    self._launcher.pool.takers(found)
            except TrimtabError as fault:
                log.warning("demand for slots could not be read: %s", fault.what)
            await asyncio.sleep(self._every_s)

    async def find(self) -> tuple[Taker, ...]:
        """Tasks that could use workers now, and how many workers each."""
        launcher = self._launcher
        own = {slot.member.task.id for slot in launcher.worker_slots.values()}
        held = {slot.member.task.id for slot in launcher.worker_slots.values() if slot.up}
        pools = (await launcher.ask("status"))["pools"].values()
        waiting = [task for pool in pools for task in pool["queue"] if task not in own]
        leaving = self._leaving()
        takers = []
        for task in waiting[:MAX_WAITERS] if held else ():
            explanation: TaskExplanation = await launcher.ask("explain", task)
            wanted = self._wanted(explanation, held)
            subtracted = min(wanted, leaving)
            leaving -= subtracted
            if wanted > subtracted:
                use_s = getattr(explanation, "estimate_s", 0.0) or self._use_s
                takers.append(Taker(task, wanted - subtracted, use_s))
        return tuple(takers)

    def _wanted(self, explanation: TaskExplanation, held: set[str]) -> int:
        """Number of workers that would have to leave; 0 if that would not help, or they are leaving already."""
        needs = set(explanation.needs)
        if explanation.reason.code is ReasonCode.evicting or not needs <= held:
            return 0
        return len(needs)

    def _leaving(self) -> int:
        """Workers that are giving up their slots, except those evicted by the slots' pool."""
        slots = self._launcher.worker_slots
        draining = (view.worker for view in self._launcher.pool.workers() if view.state is WorkerState.draining)
        return sum(worker in slots and not slots[worker].taken for worker in draining)
