"""Replays the closed part of a journal and writes the snapshot it comes to. A process of its own: `python -m ...`.

The state of ten thousand tasks takes a second to write down; a controller that did so itself would leave everybody
waiting. Replaying gives the same state, so nobody needs to stop: the controller goes on in a fresh segment while this
reads the ones before it. Killed half way it leaves everything as it was.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from trimtab.machines.pool.machine import PoolMachine
from trimtab.runtime.store.journal import read_journal, write_snapshot


def compact(directory: Path, before: int) -> None:
    """Write the snapshot that stands for everything before a segment, and delete what it stands for."""
    found = read_journal(directory, before=before)
    machine = PoolMachine.load(found.snapshot) if found.snapshot is not None else PoolMachine()
    for now, event in found.events:
        machine.handle(event, now)
    write_snapshot(directory, before, found.last_time, machine.dump())


if __name__ == "__main__":
    os.nice(10)
    gc.disable()  # nothing here is garbage
    compact(Path(sys.argv[1]), int(sys.argv[2]))
