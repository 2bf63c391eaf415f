"""Journal of a rollout pool: every event on disk, for later analysis.

Existing content is read in a thread, only to check that it belongs to a rollout pool, and then replaced. After many
events a snapshot replaces them: while few requests are open, because the whole state is written between two events, or
at the latest after ten times as many events.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from trimtab.runtime.rollout.machine_loop import RolloutCore
from trimtab.runtime.store.journal import ROLLOUT_EVENTS, Journal

COMPACT_EVENTS = 100_000
QUIET_REQUESTS = 200
LOOK_S = 5.0


class RolloutJournal:
    """Journal of a running pool."""

    def __init__(self, core: RolloutCore, journal: Journal) -> None:
        self._core, self._journal = core, journal
        self._fault: str | None = None

    @classmethod
    async def begin(cls, core: RolloutCore, directory: Path) -> RolloutJournal:
        def opened() -> Journal:
            journal = Journal(directory, kinds=ROLLOUT_EVENTS, owner="rollout pool")
            journal.take_contents()
            return journal

        made = cls(core, await asyncio.to_thread(opened))
        made._snapshot()
        core.listeners.append(made._append)
        core.background.start("journal", made._compact_loop)
        return made

    def close(self) -> None:
        self._core.listeners.remove(self._append)
        self._journal.close()

    def _append(self, what: Any, now: float) -> None:
        if type(what).__name__ in ROLLOUT_EVENTS:
            self._journal.append(now, what)

    def _snapshot(self) -> None:
        self._journal.snapshot(self._core.clock(), self._core.machine.dump())

    async def _compact_loop(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            events = self._journal.since_snapshot
            quiet = len(self._core.machine.requests()) <= QUIET_REQUESTS
            if self._journal.vanished or events > (COMPACT_EVENTS if quiet else 10 * COMPACT_EVENTS):
                self._snapshot()
            if self._journal.fault != self._fault:
                self._fault = self._journal.fault
                self._core.warn("", self._fault or "the journal can be written again")
