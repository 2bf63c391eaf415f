"""Processes that guard others: adopt orphans, start a child that dies with its parent, reap what has exited."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

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
