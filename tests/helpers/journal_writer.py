"""Processes that write a journal until they are killed, at a disk that refuses now and then; for `test_faults.py`.

As a script it starts one for every seed that it reads, by forking, which takes milliseconds, and says when it is gone.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import sys
from pathlib import Path

from trimtab.machines.pool.events import PoolTick
from trimtab.runtime.store.journal import Journal, read_journal

SAID = struct.Struct("=cQ")  # what happened, and the number of the event
HAS, REFUSED = b"h", b"r"  # the journal has all events up to this one; the kernel refused a write
STARTED, GONE = b"s", b"g"  # with the process's number
SNAPSHOT_EVERY = 40


def write_forever(directory: str, pipe: int, seed: int) -> None:
    """Append events numbered from where the journal ends, and say on the pipe which are there."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an error
    chance = random.Random(seed)
    journal = Journal(directory, owner="writer", lock_wait_s=60.0)
    number = last_of(directory)
    while True:
        number += 1
        if chance.random() < 0.2:
            written = max(path.stat().st_size for path in Path(directory).glob("journal-*"))
            _allow(written + chance.randrange(60))
        journal.append(float(number), PoolTick())
        if journal.fault is not None:
            os.write(pipe, SAID.pack(REFUSED, number))
            if chance.random() < 0.5:
                number += 1
                journal.append(float(number), PoolTick())  # while there is no room: kept in order
            _allow(resource.RLIM_INFINITY)
            journal.catch_up()
        _allow(resource.RLIM_INFINITY)
        assert journal.fault is None, journal.fault
        os.write(pipe, SAID.pack(HAS, number))
        if number % SNAPSHOT_EVERY == 0:
            journal.snapshot(float(number), {"last": number})


def last_of(directory: str) -> int:
    """The number of the last event in the journal; AssertionError where one is missing, or there twice."""
    found = read_journal(directory)
    before = found.snapshot["last"] if found.snapshot is not None else 0
    numbers = [int(now) for now, _ in found.events]
    assert numbers == list(range(before + 1, before + 1 + len(numbers))), (before, numbers)
    return int(before + len(numbers))


def _allow(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def serve(directory: str) -> None:
    """A writer for each seed on standard input; on standard output, what they say and when they come and go."""
    out = sys.stdout.fileno()
    for line in sys.stdin:
        writer = os.fork()
        if writer == 0:
            write_forever(directory, out, int(line))
        os.write(out, SAID.pack(STARTED, writer))
        os.waitpid(writer, 0)
        os.write(out, SAID.pack(GONE, writer))


if __name__ == "__main__":
    serve(sys.argv[1])
