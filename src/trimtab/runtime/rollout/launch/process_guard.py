"""Guard process between a launcher and an engine: ends the engine and all its descendants, whatever happens.

An engine starts processes that outlive it when it is killed, and hold its memory. So the guard is a subreaper and ends
everything below it: on SIGTERM (passed to the engine alone; after the stated time everything is killed), when the
engine has ended, and at once when the parent process is gone. If the guard is killed, the kernel kills the engine. It
exits with the engine's status. Run as a module: parent pid, seconds from SIGTERM to SIGKILL, folder, command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

from trimtab.runtime.procs.processes import descendants, ended_children, send

PARENT_CHECK_S = 0.25  # between checks of the parent
CLEAR_S = 10.0  # for killed processes to disappear
NOT_FOUND = 127  # as in a shell
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class EngineSupervisor:
    """Guards one engine."""

    def __init__(self, parent: int, stop_s: float, folder: str, command: list[str]) -> None:
        self._parent = parent
        self._stop_s = stop_s
        self._engine = _spawn_engine(folder, command)
        self._status: int | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Runs until nothing is left; returns the engine's status."""
        while self._status is None:
            received = signal.sigtimedwait(_WATCHED, PARENT_CHECK_S)
            if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT) and self._kill_at is None:
                self._kill_at = time.monotonic() + self._stop_s
                os.kill(self._engine, signal.SIGTERM)
            late = self._kill_at is not None and time.monotonic() >= self._kill_at
            if late or os.getppid() != self._parent:
                self._kill()
            self._reap()
        deadline = time.monotonic() + CLEAR_S
        while self._kill() and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        return self._status

    def _kill(self) -> bool:
        """Kills all descendants; whether there were any."""
        left = descendants(os.getpid())
        for process in left:
            send(process, signal.SIGKILL)
        return bool(left)

    def _reap(self) -> None:
        for pid, code in ended_children():
            if pid == self._engine:
                self._status = 128 - code if code < 0 else code


def _spawn_engine(folder: str, command: list[str]) -> int:
    """Starts the engine as a child that the kernel kills if this process dies."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            if folder:
                os.chdir(folder)
            os.execvp(command[0], command)
    except OSError as fault:
        os.write(2, f"{command[0]}: {fault.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> NoReturn:
    parent, stop_s, folder, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    sys.exit(EngineSupervisor(int(parent), float(stop_s), folder, command).run())


if __name__ == "__main__":
    main()
