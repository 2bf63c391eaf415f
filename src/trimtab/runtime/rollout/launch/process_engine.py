"""One engine's process on this machine: begun on a free port, watched, ended for certain, with its last words.

Used by whoever starts engines here: the launcher of local processes, and the task that holds a slot on a node. What is
started is a guard, which starts the engine and ends whatever came of it. Where a person may be at a terminal, both are
in a session of their own: Ctrl-C is to reach the pool, which stops engines in order, and not engines under running
requests. On a slot they stay in the group of the slot's process, by which the warden of the node finds them when that
process was killed: the slot is not given on before they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.runtime.http.tokens import without_tokens
from trimtab.runtime.procs.ports import is_free
from trimtab.runtime.procs.processes import ProcessIdentity, descendants, gone, send, table
from trimtab.runtime.rollout.launch.launcher import EngineProcessState
from trimtab.runtime.rollout.launch.process_guard import NOT_FOUND

GUARD = "trimtab.runtime.rollout.launch.process_guard"
KILL_S = 10.0  # for a killed process to vanish
WORDS_KEPT = 4_000  # characters of a log that are read for its last words
LINES_SAID = 12


def free_port(host: str) -> int:
    """A port that nobody listens on now. Somebody else may take it before the engine does: then another is tried."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((host, 0))
            return int(one.getsockname()[1])
    except OSError as fault:
        raise InputError(f"nothing can listen on {host}: {fault.strerror}", hint="an address of this machine") from None


class EngineProcess:
    """One engine, its guard, and all that it starts."""

    def __init__(
        self,
        line: Sequence[str],
        settings: Mapping[str, str],
        log: Path,
        *,
        stop_s: float,
        folder: str = "",
        apart: bool = True,
    ) -> None:
        self.log = log
        self._apart = apart  # in a session of its own
        self._stop_s = stop_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._since = out.tell()  # what is before this was said by an engine before it
            self._popen = subprocess.Popen(
                [sys.executable, "-m", GUARD, str(os.getpid()), str(stop_s), folder, *line],
                env={**without_tokens(os.environ), **settings},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=apart,
            )
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._popen.poll() is None

    def seen(self, port: int) -> EngineProcessState:
        """How it is: whether it runs, and has its port."""
        ended = self.how_it_ended()
        return (
            EngineProcessState(ended, robbed=not is_free(port))
            if ended
            else EngineProcessState(listens=self._listens(port))
        )

    def _listens(self, port: int) -> bool:
        """Whether it, and not somebody else, has this port."""
        links = (link for one in self._family() for link in _links(one.pid))
        return not {int(link[8:-1]) for link in links if link.startswith("socket:[")}.isdisjoint(_listening(port))

    def how_it_ended(self) -> str:
        """What became of it, with its last words; empty while it runs."""
        status = self._popen.poll()
        if status is None:
            return ""
        if status == NOT_FOUND:
            how = "its command could not be run"
        elif status < 0 or status > 128:
            how = f"it was ended by {_name(-status if status < 0 else status - 128)}"
        else:
            how = f"it ended with status {status}"
        words = self.last_words()
        return f"{how}; the end of {self.log}:\n{words}" if words else f"{how}, and said nothing ({self.log})"

    def last_words(self) -> str:
        """The last lines of what it printed."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._since, end - WORDS_KEPT))
                said = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([line for line in said.splitlines() if line.strip()][-LINES_SAID:])

    # ---- its end

    def tell(self) -> None:
        """Ask it to end; what is left of it after its time is killed by the guard."""
        if self.alive:
            self._popen.terminate()

    def kill(self) -> None:
        """It and all that came of it, at once. Also after a guard that was killed before it could do its duty."""
        for one in self._family():
            send(one, signal.SIGKILL)

    def end(self) -> bool:
        """In order, then for certain; whether it is gone. Waits."""
        self.tell()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(self._stop_s + KILL_S)
        return self._clear()

    async def end_beside(self) -> bool:
        """As `end`, while other things go on."""
        self.tell()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ended(), self._stop_s + KILL_S)
        return await asyncio.to_thread(self._clear)

    async def ended(self) -> None:
        """Returns when it is gone."""
        loop = asyncio.get_running_loop()
        if not self.alive:
            return
        handle = os.pidfd_open(self.pid)  # not given to another before it is reaped, which only this object does
        over = asyncio.Event()
        loop.add_reader(handle, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        self._popen.wait(KILL_S)

    def _clear(self) -> bool:
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILL_S)
        return not self.alive and not gone(self._family(), KILL_S)

    def _family(self) -> list[ProcessIdentity]:
        """The guard, what descends from it, and what is in its session, also where the guard is gone."""
        found = set(descendants(self.pid)) if self.alive else set()
        for pid, row in table().items():
            # A number is not given anew while it names a session.
            if (self._apart and row.session == self.pid) or (self.alive and pid == self.pid):
                found.add(ProcessIdentity(pid, row.born))
        return list(found)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listening(port: int) -> set[int]:
    """Sockets, by their numbers in the kernel, that listen on a port of any address here."""
    found: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            found.update(int(row[9]) for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port)
    return found


def _links(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found
