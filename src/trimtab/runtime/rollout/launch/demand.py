"""Who waits for room that rollout engines hold: told to the rollout pool, which may give up engines for them.

A waiter of the slots' cluster counts when nothing but rollout engines would have to end for it to start. Whoever may
evict by its priority does so by itself and is none. Who has got its room is out of it at the next look, and engines
that are on their way out already are counted off: otherwise more would be given up than anybody wants.
"""

from __future__ import annotations

import asyncio
import logging

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.rollout.policies.policy import Taker
from trimtab.model.pool import TaskExplanation
from trimtab.model.rollout import WorkerState
from trimtab.runtime.rollout.launch.slots import SlotLauncher

log = logging.getLogger("trimtab.rollout")

INTERVAL_S = 1.0
MAX_WAITERS = 32  # waiters that are asked about at each look, first in the queue first


class DemandWatch:
    """Looks for them, and tells."""

    def __init__(self, launcher: SlotLauncher, use_s: float = 600.0, every_s: float = INTERVAL_S) -> None:
        if not use_s > 0 or not every_s > 0:
            raise InputError(f"use_s {use_s:g}, every_s {every_s:g}", where="takers", hint="above 0 seconds")
        self._launcher = launcher
        self._use_s, self._every_s = use_s, every_s
        self._told: tuple[Taker, ...] = ()

    async def watch_demand(self) -> None:
        """Until cancelled."""
        while True:
            try:
                find = await self.find()
                if find != self._told:
                    self._told = find
                    self._launcher.pool.takers(find)
            except TrimtabError as fault:
                log.warning("who waits for slots could not be asked: %s", fault.what)
            await asyncio.sleep(self._every_s)

    async def find(self) -> tuple[Taker, ...]:
        """Who could use workers now, and how many."""
        launcher = self._launcher
        ours = {slot.member.task.id for slot in launcher.worker_slots.values()}
        held = {slot.member.task.id for slot in launcher.worker_slots.values() if slot.up}
        pools = (await launcher.ask("status"))["pools"].values()
        waiting = [task for pool in pools for task in pool["queue"] if task not in ours]
        leaving = self._leaving()
        find = []
        for task in waiting[:MAX_WAITERS] if held else ():
            explanation: TaskExplanation = await launcher.ask("explain", task)
            wanted = self._wanted(explanation, held)
            counted_off = min(wanted, leaving)
            leaving -= counted_off
            if wanted > counted_off:
                use_s = getattr(explanation, "estimate_s", 0.0) or self._use_s
                find.append(Taker(task, wanted - counted_off, use_s))
        return tuple(find)

    def _wanted(self, explanation: TaskExplanation, held: set[str]) -> int:
        """How many workers would have to go; 0 where that would not help, or where they are going already."""
        needs = set(explanation.needs)
        if explanation.reason.code is ReasonCode.evicting or not needs <= held:
            return 0
        return len(needs)

    def _leaving(self) -> int:
        """Workers that give up their slots already, and not because the slots' pool took them."""
        worker_slots = self._launcher.worker_slots
        draining = (one.worker for one in self._launcher.pool.workers() if one.state is WorkerState.draining)
        return sum(worker in worker_slots and not worker_slots[worker].taken for worker in draining)
