"""Reads, watches, starts and ends processes of this machine: /proc and pidfds, in one place.

A process is a pid and a start time, as pids are reused. A family is the descendants of a process, its session, and all
processes with its mark in the environment, so that nothing escapes by leaving its parent or its session. Nothing else
must ever be signalled: no `ray stop`, no names, no patterns. A process that guards others adopts orphans, starts a
child that dies with it, and reaps what has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trimtab.core.frozen import Frozen

MARK = "TRIMTAB_NODE"  # in the environment of every process of a node; the value identifies the node
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.05


class ProcessIdentity(Frozen):
    """A process: pid and start time (seconds since boot)."""

    pid: int
    born: float

    @property
    def alive(self) -> bool:
        """Whether it exists; a zombie does not."""
        return born(self.pid) == self.born


class ProcessRow(NamedTuple):
    """A row of /proc."""

    state: str
    parent: int
    group: int
    session: int
    born: float  # seconds since boot


# ---- reading --------------------------------------------------------------------------------------------------------


def row(pid: int) -> ProcessRow | None:
    """What /proc says of a process; None if it does not exist or is a zombie."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # os.open: a node agent reads hundreds of these
    except OSError:
        return None
    try:
        fields = os.read(file, 4096).rpartition(b")")[2].split()
    except OSError:
        return None
    finally:
        os.close(file)
    if fields[0] in (b"Z", b"X"):
        return None
    return ProcessRow(
        fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]) / _TICKS_PER_S
    )


def born(pid: int) -> float | None:
    """Start time of a process in seconds since boot; None if it does not exist or is a zombie."""
    found = row(pid)
    return found.born if found else None


def exists(pid: int) -> bool:
    """Whether the pid is taken, by a zombie too, and can be seen from here."""
    return os.path.exists(f"/proc/{pid}")


def this() -> ProcessIdentity:
    return process(os.getpid())


def process(pid: int) -> ProcessIdentity:
    """The process with this pid; ProcessLookupError if there is none."""
    found = born(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return ProcessIdentity(pid, found)


def table() -> dict[int, ProcessRow]:
    """All visible processes but zombies."""
    return {int(name): found for name in os.listdir("/proc") if name.isdecimal() and (found := row(int(name)))}


def descendants(*pids: int, groups: bool = False) -> list[ProcessIdentity]:
    """Processes below these; with `groups` also those in process groups with these numbers."""
    known = table()
    found = _below(pids, known)
    if groups:
        found |= {pid for pid, row in known.items() if row.group in pids and pid not in pids}
    return _identities(found, known)


def marked(name: str, value: str) -> list[ProcessIdentity]:
    """Processes with this variable in their environment, as far as it is readable."""
    known = table()
    line = os.fsencode(f"{name}={value}")
    return _identities((pid for pid in known if line in _parts(pid, "environ")), known)


def family(root: ProcessIdentity | None, mark: str) -> list[ProcessIdentity]:
    """All processes of a node but `root`, which may be gone already."""
    known = table()
    found = {process.pid for process in marked(MARK, mark)} & set(known)
    if root is not None:
        if root.alive:
            found |= _below((root.pid,), known)
        # A pid is not reused while it is a session id, so this holds after the death of the root.
        if root.alive or root.pid not in known:
            found |= {pid for pid, row in known.items() if row.session == root.pid}
        found.discard(root.pid)
    return _identities(found - {os.getpid()}, known)


def environment(pid: int) -> dict[str, str]:
    """Environment of a process; empty if unreadable."""
    pairs = (part.partition(b"=") for part in _parts(pid, "environ") if b"=" in part)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def command(pid: int) -> list[str]:
    """Command line of a process; empty if unreadable."""
    return [os.fsdecode(part) for part in _parts(pid, "cmdline")]


def pid_namespace() -> int:
    """Number of this process's pid namespace: pids mean the same within one, not in containers that share /tmp."""
    return os.stat("/proc/self/ns/pid").st_ino


def boot_id() -> str:
    """Id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---- watching and ending --------------------------------------------------------------------------------------------


def send(process: ProcessIdentity, number: signal.Signals) -> None:
    """Signal this process by pidfd, if it still exists."""
    with contextlib.suppress(OSError), _open(process.pid) as handle:
        if process.alive:
            signal.pidfd_send_signal(handle, number)


def gone(processes: Iterable[ProcessIdentity], wait_s: float) -> list[ProcessIdentity]:
    """Wait until they have exited; returns those that have not in time."""
    deadline = time.monotonic() + wait_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [process for process in left if process.alive]
    return left


async def exited(process: ProcessIdentity, timeout_s: float | None = None, *, kill: bool = False) -> None:
    """Wait until the process has exited, after SIGKILL if `kill`; asyncio.TimeoutError if it has not in time."""
    with contextlib.suppress(ProcessLookupError), _open(process.pid) as handle:
        if not process.alive:
            return
        if kill:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handle, over.set)
        try:
            await asyncio.wait_for(over.wait(), timeout_s)
        finally:
            loop.remove_reader(handle)


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


@contextlib.contextmanager
def _open(pid: int) -> Iterator[int]:
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def _identities(pids: Iterable[int], known: dict[int, ProcessRow]) -> list[ProcessIdentity]:
    return [ProcessIdentity(pid, known[pid].born) for pid in sorted(pids)]


def _below(pids: Iterable[int], known: dict[int, ProcessRow]) -> set[int]:
    found: set[int] = set()
    level = set(pids)
    while level:
        level = {pid for pid, row in known.items() if row.parent in level} - found
        found |= level
    return found


def _parts(pid: int, file: str) -> list[bytes]:
    with contextlib.suppress(OSError):
        return [part for part in Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0") if part]
    return []


NOT_FOUND = 127  # as in a shell
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_child(line: list[str], prepare: Callable[[], object]) -> int:
    """Start a child that the kernel kills if this process dies; `prepare` runs in it before exec. Returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:  # only what leads to exec
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            prepare()
            os.execvp(line[0], line)
    except OSError as fault:
        os.write(2, f"{line[0]}: {fault.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def reap(child: int | None) -> int | None:
    """Reap exited children, adopted ones too; returns the exit code of `child` if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = os.waitstatus_to_exitcode(status)
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
