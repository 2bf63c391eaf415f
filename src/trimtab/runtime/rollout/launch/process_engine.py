"""An engine's process on this machine: started on a free port, watched, ended, with the end of its log.

Used by the launcher of local processes and by the task that holds a slot, which is here too. What is started is a
guard process, which starts the engine and ends all of its descendants. Locally both run in a session of their own:
Ctrl-C must reach the pool, which stops engines in order, and not engines under running requests. On a slot they stay in
the process group of the slot's task, so that the node agent finds them if that task is killed: the slot is not reused
before they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.runtime.http.tokens import without_tokens
from trimtab.runtime.procs.ports import free_ports, is_free, listening_sockets, sockets_of
from trimtab.runtime.procs.processes import NOT_FOUND, ProcessIdentity, born, descendants, exited, gone, send, table
from trimtab.runtime.rayapi.private import logs_dir
from trimtab.runtime.rollout.launch.launcher import NODE_ADDRESS, EngineCommand, EngineProcessState, base_url, safe_name

GUARD = "trimtab.runtime.rollout.launch.process_guard"
KILL_S = 10.0  # for a killed process to disappear
LOG_TAIL_CHARS = 4_000  # read from the end of a log
LOG_TAIL_LINES = 12
ENDED_HERE = "it was stopped"
SPARE_S = 1.0  # of the notice: for the process to end before it is killed with its worker process


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


class SlotTask:
    """Task that holds a slot for a rollout engine, until the launcher releases it or its notice is over.

    The launcher starts, checks and ends the engine in it by calls, so after an eviction the task gets the current
    weights and not those of its submission. Calls come on the main thread, `drain` and `cancel` on others. If this
    process dies, its engine dies with it.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._changing = threading.RLock()
        self._let_go = threading.Event()

    def end(self, force: bool = False) -> bool:
        """Ends the engine, by `force` at once; whether it is gone. The slot is kept."""
        raise NotImplementedError

    def leave(self) -> bool:
        ended = self.end()
        self._let_go.set()
        return ended

    def drain(self, seconds: float) -> None:
        """The slot was reclaimed: requests may finish for this time. Runs on its own thread."""
        self._let_go.wait(max(0.0, seconds - SPARE_S))
        self.cancel()

    def cancel(self) -> None:
        """Leaves now; the process ends soon after. Runs on its own thread."""
        self._let_go.set()


class EngineSlotTask(SlotTask):
    """Runs the engine's process on the slot's node and devices; of an engine over several nodes, that of its rank."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self._process: EngineProcess | None = None
        self._host = ""
        self._port = self._dist_port = 0

    def prepare(self) -> tuple[str, int]:
        """Ends the previous engine; returns this node's address and a port for ranks to meet on, if this is rank 0."""
        if not self.end():
            raise RuntimeError("the previous engine does not end")
        self._host = _node_address()
        self._port, self._dist_port = free_ports(self._host, 2)
        return self._host, self._dist_port

    def launch(
        self, command: EngineCommand, version: int, path: str | None, rank: int, nodes: int, head: str, dist_port: int
    ) -> str:
        """Starts a rank of an engine on what was prepared; returns its URL."""
        import ray

        host, name = self._host, safe_name(self._worker) + (f".{rank}" if rank else "")
        address = {NODE_ADDRESS[command.kind]: host} if nodes > 1 and command.kind in NODE_ADDRESS else {}
        line = command.line(
            name=self._worker, host=host, port=self._port, version=version, path=path,
            rank=rank, nodes=nodes, head=head, dist_port=dist_port,
        )  # fmt: skip
        with self._changing:
            if self._let_go.is_set():
                raise RuntimeError("this slot is being given up")
            self._process = EngineProcess(
                line, {**address, **command.settings}, logs_dir(ray) / f"trimtab-engine-{name}.log",
                stop_s=command.stop_s, folder=command.folder, own_session=False,
            )  # fmt: skip
        return base_url(host, self._port)

    def probe(self) -> EngineProcessState:
        process = self._process
        return EngineProcessState(ENDED_HERE) if process is None else process.probe(self._port, self._dist_port)

    def ended(self, within_s: float = 0.0) -> str:
        """How the engine ended; empty while it runs. If nothing listens, its processes get `within_s` to end."""
        process = self._process
        return ENDED_HERE if process is None else process.exit_reason(self._port, within_s)

    def end(self, force: bool = False) -> bool:
        with self._changing:
            ended = self._process is None or self._process.end(force)
            if ended:
                self._process = None
            return ended

    def cancel(self) -> None:
        super().cancel()
        process = self._process
        if process is not None:
            process.kill()


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
