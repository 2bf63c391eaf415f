"""Compacts a journal: replays its closed segments and writes the resulting snapshot.

A separate process, `python -m trimtab.runtime.store.compact DIRECTORY SEGMENT`: the state of 10,000 tasks takes a
second to write, during which the controller would not answer. The controller continues in a new segment meanwhile.
Killed half way, it leaves everything unchanged.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from trimtab.machines.pool.machine import PoolMachine
from trimtab.runtime.store.journal import read_journal, write_snapshot


def compact(directory: Path, before: int) -> None:
    """Write the snapshot of everything before a segment, and delete the older files."""
    found = read_journal(directory, before=before)
    machine = PoolMachine.load(found.snapshot) if found.snapshot is not None else PoolMachine()
    for now, event in found.events:
        machine.handle(event, now)
    write_snapshot(directory, before, found.last_time, machine.dump())


if __name__ == "__main__":
    os.nice(10)
    gc.disable()  # all data stays alive
    compact(Path(sys.argv[1]), int(sys.argv[2]))
