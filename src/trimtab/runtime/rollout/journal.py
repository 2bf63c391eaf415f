"""The journal of a rollout pool: every event on disk, for a look afterwards; begun anew when it has grown long.

What stood in it before is read beside the event loop, only to be sure that it is a rollout pool's, and not kept. While
it is written, a snapshot takes the place of what came before once there are many events: at a quiet moment, because the
machine's whole state is written down between two events, or at the latest at ten times as many.
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
    """Of one pool that runs."""

    def __init__(self, core: RolloutCore, journal: Journal) -> None:
        self._core, self._journal = core, journal
        self._fault: str | None = None

    @classmethod
    async def begin(cls, core: RolloutCore, directory: Path) -> RolloutJournal:
        """Open it, and write down all that happens from now on."""

        def opened() -> Journal:
            journal = Journal(directory, kinds=ROLLOUT_EVENTS, owner="rollout pool")
            journal.take_contents()
            return journal

        made = cls(core, await asyncio.to_thread(opened))
        made._snapshot()
        core.listeners.append(made._write_down)
        core.background.start("journal", made._look_after)
        return made

    def close(self) -> None:
        """All of it is on disk afterwards."""
        self._core.listeners.remove(self._write_down)
        self._journal.close()

    def _write_down(self, what: Any, now: float) -> None:
        if type(what).__name__ in ROLLOUT_EVENTS:
            self._journal.append(now, what)

    def _snapshot(self) -> None:
        self._journal.snapshot(self._core.clock(), self._core.machine.dump())

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            events = self._journal.since_snapshot
            quiet = len(self._core.machine.requests()) <= QUIET_REQUESTS
            if self._journal.vanished or events > (COMPACT_EVENTS if quiet else 10 * COMPACT_EVENTS):
                self._snapshot()
            if self._journal.fault != self._fault:
                self._fault = self._journal.fault
                self._core.warn("", self._fault or "the journal can be written again")
