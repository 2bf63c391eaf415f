"""Guard process between a launcher and an engine: ends the engine and all its descendants, whatever happens.

An engine starts processes that outlive it when it is killed, and hold its memory. So the guard is a subreaper and ends
everything below it: on SIGTERM (passed to the engine alone; after the stated time everything is killed), when the
engine has ended, and at once when the parent process is gone. If the guard is killed, the kernel kills the engine. It
exits with the engine's status. Run as a module: parent pid, seconds from SIGTERM to SIGKILL, folder, command.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

from trimtab.runtime.procs.processes import adopt_orphans, descendants, reap, send, start_child

PARENT_CHECK_S = 0.25  # between checks of the parent
CLEAR_S = 10.0  # for killed processes to disappear
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class EngineSupervisor:
    """Guards one engine."""

    def __init__(self, parent: int, stop_s: float, folder: str, command: list[str]) -> None:
        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
            if folder:
                os.chdir(folder)

        self._parent = parent
        self._stop_s = stop_s
        self._engine = start_child(command, prepare)
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
        code = reap(self._engine)
        if code is not None:
            self._status = 128 - code if code < 0 else code


def main() -> NoReturn:
    parent, stop_s, folder, *command = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    adopt_orphans()
    sys.exit(EngineSupervisor(int(parent), float(stop_s), folder, command).run())


if __name__ == "__main__":
    main()
