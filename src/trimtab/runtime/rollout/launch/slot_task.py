"""What runs in the task that holds a slot for a rollout engine: the engine's process, on the slot's node and devices.

The task lives as long as the slot is held; the engine in it is started, looked at and ended by calls of the launcher,
so that one that comes back after an eviction gets the weights of that day and not those it was submitted with. Calls
come on the main thread; `drain` and `cancel` on others: who is told to leave stays until the launcher has let it go or
its time is up, and then the engine ends here, in order and for certain. If this process dies, its engine dies with it.
"""

from __future__ import annotations

import threading
from pathlib import Path

from trimtab.runtime.rollout.launch.launcher import EngineCommand, EngineProcessState, base_url, safe_name
from trimtab.runtime.rollout.launch.process_engine import EngineProcess, free_port

ENDED_HERE = "it was told to end"
SPARE_S = 1.0  # of the notice: for the process to vanish before it is killed with its host


class SlotTask:
    """How whoever holds a slot leaves it: when its launcher has let it go, or when its notice is over."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._changing = threading.RLock()
        self._let_go = threading.Event()

    def end(self) -> bool:
        """The engine is gone afterwards; whether that is so. The slot is still held."""
        raise NotImplementedError

    def leave(self) -> bool:
        """End the engine; whoever was told to leave need not stay longer."""
        ended = self.end()
        self._let_go.set()
        return ended

    def drain(self, seconds: float) -> None:
        """The slot is wanted by others: requests may be finished for so long. On a thread of its own."""
        self._let_go.wait(max(0.0, seconds - SPARE_S))
        self.cancel()

    def cancel(self) -> None:
        """Leave now: the process ends a moment later. On a thread of its own."""
        self._let_go.set()


class EngineSlotTask(SlotTask):
    """A slot's task, with an engine or without one."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self._process: EngineProcess | None = None
        self._port = 0

    def launch(self, command: EngineCommand, version: int, path: str | None) -> str:
        """Begin an engine, in the place of the one before; where it will listen."""
        import ray

        host = str(ray.util.get_node_ip_address())
        with self._changing:
            self.end()
            if self._let_go.is_set():
                raise RuntimeError("this slot is being given up")
            self._port = free_port(host)
            line = command.line(name=self._worker, host=host, port=self._port, version=version, path=path)
            self._process = EngineProcess(
                line, command.settings, _log_dir() / f"trimtab-engine-{safe_name(self._worker)}.log",
                stop_s=command.stop_s, folder=command.folder, own_session=False,
            )  # fmt: skip
        return base_url(host, self._port)

    def look(self) -> EngineProcessState:
        """How the engine is, while it comes up."""
        process = self._process
        return EngineProcessState(ENDED_HERE) if process is None else process.probe(self._port)

    def ended(self) -> str:
        """How the engine ended; empty while it runs."""
        process = self._process
        return ENDED_HERE if process is None else process.exit_reason()

    def end(self) -> bool:
        """The engine's process is gone afterwards; whether that is so."""
        with self._changing:
            ended = self._process is None or self._process.end()
            if ended:
                self._process = None
            return ended

    def cancel(self) -> None:
        """Leave now."""
        super().cancel()
        process = self._process
        if process is not None:
            process.kill()


def _log_dir() -> Path:
    """Where Ray keeps logs on this node, so that its dashboard shows them."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path())
