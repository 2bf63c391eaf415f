"""An engine's process on this machine: started on a free port, watched, ended, with the end of its log.

Used by the launcher of local processes and by the task that holds a slot. What is started is a guard process, which
starts the engine and ends all of its descendants. Locally both run in a session of their own: Ctrl-C must reach the
pool, which stops engines in order, and not engines under running requests. On a slot they stay in the process group of
the slot's task, so that the node agent finds them if that task is killed: the slot is not reused before they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.runtime.http.tokens import without_tokens
from trimtab.runtime.procs.ports import is_free, listening_sockets, sockets_of
from trimtab.runtime.procs.processes import NOT_FOUND, ProcessIdentity, born, descendants, exited, gone, send, table
from trimtab.runtime.rollout.launch.launcher import EngineProcessState

GUARD = "trimtab.runtime.rollout.launch.process_guard"
KILL_S = 10.0  # for a killed process to disappear
LOG_TAIL_CHARS = 4_000  # read from the end of a log
LOG_TAIL_LINES = 12


class EngineProcess:
    """An engine, its guard, and all their descendants."""

    def __init__(
        self,
        line: Sequence[str],
        settings: Mapping[str, str],
        log: Path,
        *,
        stop_s: float,
        folder: str = "",
        own_session: bool = True,
    ) -> None:
        self.log = log
        self._own_session = own_session
        self._stop_s = stop_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._since = out.tell()  # the log before this is of earlier engines
            self._popen = subprocess.Popen(
                [sys.executable, "-m", GUARD, str(os.getpid()), str(stop_s), folder, *line],
                env={**without_tokens(os.environ), **settings},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=own_session,
            )
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def probe(self, port: int, dist_port: int = 0) -> EngineProcessState:
        ended = self.exit_reason()
        return (
            EngineProcessState(ended, port_taken=not (is_free(port) and is_free(dist_port)))
            if ended
            else EngineProcessState(listens=self._listens(port))
        )

    def _listens(self, port: int) -> bool:
        """Whether this engine, and not another process, listens on the port."""
        listening = listening_sockets(port)
        return any(listening & sockets_of(process.pid) for process in self._tree())

    def exit_reason(self, port: int = 0, within_s: float = 0.0) -> str:
        """How it ended, with the end of its log; empty while it runs.

        If it listens no more on `port`, it gets `within_s` to end: connections end before the process and its guard.
        """
        if within_s > 0 and self.alive and not self._listens(port):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(within_s)
        status = self._popen.poll()
        if status is None:
            return ""
        if status == NOT_FOUND:
            how = "its command could not be run"
        elif status < 0 or status > 128:
            how = f"it was ended by {_name(-status if status < 0 else status - 128)}"
        else:
            how = f"it ended with status {status}"
        tail = self.log_tail()
        return f"{how}; the end of {self.log}:\n{tail}" if tail else f"{how}, with an empty log ({self.log})"

    def log_tail(self) -> str:
        """Last lines of its log."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._since, end - LOG_TAIL_CHARS))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([line for line in text.splitlines() if line.strip()][-LOG_TAIL_LINES:])

    # ---- ending

    def terminate(self) -> None:
        """SIGTERM; after `stop_s` the guard kills what is left."""
        if self.alive:
            self._popen.terminate()

    def kill(self) -> None:
        """Kills it and its descendants, also if the guard was killed first."""
        for process in self._tree():
            send(process, signal.SIGKILL)

    def end(self, force: bool = False) -> bool:
        """Terminates, then kills, by `force` at once; whether it is gone. Blocks."""
        if force and self.alive:
            for process in descendants(self.pid):  # its guard kills what they started meanwhile
                send(process, signal.SIGKILL)
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(self._stop_s + KILL_S)
        return self._kill_tree()

    async def end_async(self) -> bool:
        self.terminate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ended(), self._stop_s + KILL_S)
        return await asyncio.to_thread(self._kill_tree)

    async def ended(self) -> None:
        # The pid is not reused before it is reaped, which only this object does.
        if self.alive and (since := born(self.pid)) is not None:
            await exited(ProcessIdentity(self.pid, since))
            self._popen.wait(KILL_S)

    def _kill_tree(self) -> bool:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILL_S)
        return not self.alive and not gone(self._tree(), KILL_S)

    def _tree(self) -> list[ProcessIdentity]:
        """The guard, its descendants, and its session, even if the guard is gone."""
        found = set(descendants(self.pid)) if self.alive else set()
        for pid, row in table().items():
            # A pid is not reused while it names a session.
            if (self._own_session and row.session == self.pid) or (self.alive and pid == self.pid):
                found.add(ProcessIdentity(pid, row.born))
        return list(found)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
