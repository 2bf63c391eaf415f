"""Task that holds a slot for a rollout engine: runs the engine's process on the slot's node and devices.

Of an engine over several nodes, each member of a gang runs the process of its rank.
The task lasts as long as the slot is held; the launcher starts, checks and ends the engine in it by calls, so after an
eviction the task gets the current weights and not those of its submission. Calls come on the main thread, `drain` and
`cancel` on others: the task stays until the launcher releases it or its notice is over, and then ends the engine. If
this process dies, its engine dies with it.
"""

from __future__ import annotations

import threading

from trimtab.runtime.procs.ports import free_ports
from trimtab.runtime.rayapi.private import logs_dir
from trimtab.runtime.rollout.launch.launcher import (
    NODE_ADDRESS,
    EngineCommand,
    EngineProcessState,
    base_url,
    safe_name,
)
from trimtab.runtime.rollout.launch.process_engine import EngineProcess

ENDED_HERE = "it was stopped"
SPARE_S = 1.0  # of the notice: for the process to end before it is killed with its worker process


class SlotTask:
    """Leaves a slot when the launcher releases it, or when its notice is over."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._changing = threading.RLock()
        self._let_go = threading.Event()

    def end(self, force: bool = False) -> bool:
        """Ends the engine, by `force` at once; whether it is gone. The slot is kept."""
        raise NotImplementedError

    def leave(self) -> bool:
        """Ends the engine and releases the slot."""
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
    """Slot task for an engine process."""

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
        """Process state during the start."""
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
