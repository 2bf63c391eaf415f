"""Processes that trimtab started, told from all others: who they are, what belongs to them, and how they are ended.

A process is a number and a start time, for numbers are given anew. A family is what descends from a process, what is in
its session, and what carries its mark in the environment; so nothing escapes by leaving its parent or its session.
Nothing else is ever signalled: `ray stop`, names and patterns are not used here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "TRIMTAB_NODE"  # in the environment of every process of a node; its value is the node's own
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, for certain: its number and when it started (seconds since boot)."""

    pid: int
    born: float

    @property
    def alive(self) -> bool:
        """Whether it is there; one of which only the exit status is left is not."""
        found = _row(self.pid)
        return found is not None and found.born == self.born


@dataclass(frozen=True)
class ProcessRow:
    """A line of the table of processes."""

    parent: int
    session: int
    born: float


def this() -> ProcessIdentity:
    """The process that asks."""
    return process(os.getpid())


def process(pid: int) -> ProcessIdentity:
    """The process that has this number now; ProcessLookupError where there is none."""
    found = _row(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return ProcessIdentity(pid, found.born)


def table() -> dict[int, ProcessRow]:
    """All living processes that can be seen from here."""
    return {int(one): row for one in os.listdir("/proc") if one.isdecimal() and (row := _row(int(one)))}


def descendants(*pids: int) -> list[ProcessIdentity]:
    """All descendants of these processes."""
    known = table()
    return [ProcessIdentity(one, known[one].born) for one in sorted(_below(pids, known))]


def family(root: ProcessIdentity | None, mark: str) -> list[ProcessIdentity]:
    """Whatever belongs to a node, without `root` itself, which may be gone already."""
    known = table()
    descendants: set[int] = set()
    if root is not None:
        if root.alive:
            descendants = _below((root.pid,), known)
        # A number is not given anew while it names a session, so this holds when the root is gone.
        if root.alive or root.pid not in known:
            descendants |= {pid for pid, row in known.items() if row.session == root.pid}
    descendants |= {pid for pid in known if environment(pid).get(MARK) == mark}
    if root is not None:
        descendants.discard(root.pid)
    descendants.discard(os.getpid())
    return [ProcessIdentity(pid, known[pid].born) for pid in sorted(descendants)]


def send(one: ProcessIdentity, number: signal.Signals) -> None:
    """Signal this very process, if it is still there."""
    try:
        handle = os.pidfd_open(one.pid)
    except OSError:
        return
    try:
        if one.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def gone(them: Iterable[ProcessIdentity], wait_s: float) -> list[ProcessIdentity]:
    """Wait until they are gone; those that are not when the time is up."""
    deadline = time.monotonic() + wait_s
    left = [one for one in them if one.alive]
    while left and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        left = [one for one in left if one.alive]
    return left


def kill_family(root: ProcessIdentity | None, mark: str, wait_s: float = 10.0) -> list[ProcessIdentity]:
    """Kill whatever belongs to a node, without the root; what is still there when the time is up."""
    deadline = time.monotonic() + wait_s
    while True:
        left = family(root, mark)
        if not left or time.monotonic() >= deadline:
            return left
        for one in left:
            send(one, signal.SIGKILL)
        gone(left, 1.0)


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; empty where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in text.split(b"\0") if b"=" in part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command(pid: int) -> list[str]:
    """A process's command line; empty where that cannot be read."""
    try:
        return [os.fsdecode(part) for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if part]
    except OSError:
        return []


def _below(pids: Iterable[int], known: dict[int, ProcessRow]) -> set[int]:
    found: set[int] = set()
    level = set(pids)
    while level:
        level = {one for one, row in known.items() if row.parent in level} - found
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
