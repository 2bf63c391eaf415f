"""Identifies, finds and ends processes that trimtab started.

A process is a pid and a start time, as pids are reused. A family is the descendants of a process, its session, and all
processes with its mark in the environment, so that nothing escapes by leaving its parent or its session. Nothing else
must ever be signalled: no `ray stop`, no names, no patterns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "TRIMTAB_NODE"  # in the environment of every process of a node; the value identifies the node
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.05


@dataclass(frozen=True)
class ProcessIdentity:
    """A process: pid and start time (seconds since boot)."""

    pid: int
    born: float

    @property
    def alive(self) -> bool:
        """Whether it exists; a zombie does not."""
        found = _row(self.pid)
        return found is not None and found.born == self.born


@dataclass(frozen=True)
class ProcessRow:
    """A row of /proc."""

    parent: int
    session: int
    born: float


def this() -> ProcessIdentity:
    return process(os.getpid())


def process(pid: int) -> ProcessIdentity:
    """The process with this pid; ProcessLookupError if there is none."""
    found = _row(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return ProcessIdentity(pid, found.born)


def table() -> dict[int, ProcessRow]:
    """All visible processes but zombies."""
    return {int(name): row for name in os.listdir("/proc") if name.isdecimal() and (row := _row(int(name)))}


def descendants(*pids: int) -> list[ProcessIdentity]:
    known = table()
    return [ProcessIdentity(pid, known[pid].born) for pid in sorted(_below(pids, known))]


def family(root: ProcessIdentity | None, mark: str) -> list[ProcessIdentity]:
    """All processes of a node but `root`, which may be gone already."""
    known = table()
    pids: set[int] = set()
    if root is not None:
        if root.alive:
            pids = _below((root.pid,), known)
        # A pid is not reused while it is a session id, so this holds after the death of the root.
        if root.alive or root.pid not in known:
            pids |= {pid for pid, row in known.items() if row.session == root.pid}
    pids |= {pid for pid in known if environment(pid).get(MARK) == mark}
    if root is not None:
        pids.discard(root.pid)
    pids.discard(os.getpid())
    return [ProcessIdentity(pid, known[pid].born) for pid in sorted(pids)]


def send(process: ProcessIdentity, number: signal.Signals) -> None:
    """Signal this process by pidfd, if it still exists."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def gone(processes: Iterable[ProcessIdentity], wait_s: float) -> list[ProcessIdentity]:
    """Wait until they have exited; returns those that have not in time."""
    deadline = time.monotonic() + wait_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [process for process in left if process.alive]
    return left


def kill_family(root: ProcessIdentity | None, mark: str, wait_s: float = 10.0) -> list[ProcessIdentity]:
    """Kill all processes of a node but the root; returns those left after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        left = family(root, mark)
        if not left or time.monotonic() >= deadline:
            return left
        for process in left:
            send(process, signal.SIGKILL)
        gone(left, 1.0)


def environment(pid: int) -> dict[str, str]:
    """Environment of a process; empty if unreadable."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in text.split(b"\0") if b"=" in part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command(pid: int) -> list[str]:
    """Command line of a process; empty if unreadable."""
    try:
        return [os.fsdecode(part) for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if part]
    except OSError:
        return []


def _below(pids: Iterable[int], known: dict[int, ProcessRow]) -> set[int]:
    found: set[int] = set()
    level = set(pids)
    while level:
        level = {pid for pid, row in known.items() if row.parent in level} - found
        found |= level
    return found


def _row(pid: int) -> ProcessRow | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessRow(int(fields[1]), int(fields[3]), int(fields[19]) / _TICKS_PER_S)


def ended_children() -> Iterator[tuple[int, int]]:
    """Reap children, adopted ones too: pid and exit status of each."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])
