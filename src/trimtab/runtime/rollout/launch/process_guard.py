"""The one process between whoever starts an engine and the engine: ends all of it, once, whatever happens to either.

An engine starts processes of its own, which outlive it when it is killed, and hold its memory. So the guard takes in
whatever loses its parent below it, and ends everything that descends from it: when it is told to (SIGTERM is passed on
to the engine alone, and after the stated time everybody is killed), when the engine has ended by itself, and at once
when the process that started it is gone. If the guard itself is killed, the kernel kills the engine. It ends with the
engine's status. Run as a module: the number of its parent, seconds from SIGTERM to SIGKILL, a folder, the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

from trimtab.runtime.procs.processes import descendants, send

LOOK_S = 0.25  # between looks at whether the parent is still there
CLEAR_S = 10.0  # for killed processes to vanish
NOT_FOUND = 127  # as a shell has it
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class EngineSupervisor:
    """Guards one engine."""

    def __init__(self, parent: int, stop_s: float, folder: str, command: list[str]) -> None:
        self._parent = parent
        self._stop_s = stop_s
        self._engine = _begun(folder, command)
        self._status: int | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Until nothing is left; the engine's status."""
        while self._status is None:
            heard = signal.sigtimedwait(_WATCHED, LOOK_S)
            if heard is not None and heard.si_signo in (signal.SIGTERM, signal.SIGINT) and self._kill_at is None:
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
        """Everybody; whether there was anybody."""
        left = descendants(os.getpid())
        for one in left:
            send(one, signal.SIGKILL)
        return bool(left)

    def _reap(self) -> None:
        """Take note of children that ended, our own and those that came to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._engine:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = 128 - code if code < 0 else code


def _begun(folder: str, command: list[str]) -> int:
    """The engine, as a child that the kernel kills if this process dies."""
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
    """Guard what the command line says."""
    parent, stop_s, folder, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    sys.exit(EngineSupervisor(int(parent), float(stop_s), folder, command).run())


if __name__ == "__main__":
    main()
