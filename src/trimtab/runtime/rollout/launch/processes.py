"""Launcher of engines as processes of this machine.

An engine that ends by itself is reported at once. What must never happen: a process that outlives the pool or the
pool's process; two engines of a worker at the same time; two engines on the same devices, if devices were named.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from trimtab.core.errors import InfeasibleError, UnreachableError
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import open_session
from trimtab.runtime.procs.background import Background, describe
from trimtab.runtime.procs.ports import free_ports
from trimtab.runtime.rollout.launch.launcher import (
    EngineCommand,
    EngineProcessState,
    LauncherCallbacks,
    Started,
    base_url,
    safe_name,
)
from trimtab.runtime.rollout.launch.process_engine import EngineProcess
from trimtab.runtime.rollout.launch.readiness import start_with_retries, wait_until_serving

log = logging.getLogger("trimtab.rollout")


class ProcessLauncher:
    """Starts and stops engines as local processes.

    `devices` are values of CUDA_VISIBLE_DEVICES, one per engine that runs at the same time ("0", "1", or "0,1" for two
    GPUs); without them every engine sees what this process sees. Logs are in `logs`, one file per worker.
    """

    def __init__(
        self,
        pool: LauncherCallbacks,
        command: EngineCommand,
        *,
        devices: Sequence[str] = (),
        logs: Path | str | None = None,
        deadlines: EngineDeadlines | None = None,
    ) -> None:
        self.command = command
        self.logs = Path(logs) if logs is not None else Path(tempfile.mkdtemp(prefix="trimtab-engines-"))
        self._pool = pool
        self._devices = tuple(devices)
        self._deadlines = deadlines
        self._session: aiohttp.ClientSession | None = None
        self._running: dict[str, EngineProcess] = {}
        self._device_of: dict[str, str] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self.background = Background(prefix="engines")

    # ---- for the pool

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        return await start_with_retries(self, lambda: self._begin(worker, version, path))

    async def stop(self, worker: str) -> None:
        """SIGTERM, then SIGKILL."""
        watching = self._watching.pop(worker, None)
        if watching is not None:
            watching.cancel()
        process = self._running.get(worker)
        if process is not None and not await process.end_async():
            raise UnreachableError(f"process {process.pid} of {worker} still exists after SIGKILL")
        self._running.pop(worker, None)
        self._device_of.pop(worker, None)

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        return await self.start(worker, version, path)

    async def close(self) -> None:
        ends = await asyncio.gather(*(self.stop(worker) for worker in list(self._running)), return_exceptions=True)
        for fault in ends:
            if isinstance(fault, BaseException):
                log.warning("%s", fault)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def devices_of(self, worker: str) -> str:
        """Devices of its engine; empty if none were named, or it has none now."""
        return self._device_of.get(worker, "")

    def log_of(self, worker: str) -> Path:
        return self.logs / f"{safe_name(worker)}.log"

    # ---- internals

    async def _begin(self, worker: str, version: int, path: str | None) -> Started:
        await self.stop(worker)  # the previous engine
        command, (port, dist_port) = self.command, free_ports(self.command.host, 2)
        line = command.line(name=worker, host=command.host, port=port, version=version, path=path, dist_port=dist_port)
        settings = {**command.settings, **self._device(worker)}
        process = EngineProcess(line, settings, self.log_of(worker), stop_s=command.stop_s, folder=command.folder)
        self._running[worker] = process
        self._session = self._session or open_session()
        url = base_url(command.host, port)

        async def probe() -> EngineProcessState:
            return await asyncio.to_thread(process.probe, port)  # reads all of /proc

        try:
            engine = await wait_until_serving(worker, url, command, self._session, probe, self._deadlines)
        except BaseException:
            process.kill()  # `stop` waits for it
            raise
        self._watching[worker] = self.background.start(
            f"process of {worker}",
            functools.partial(self._watch, worker, process),
            on_failed=lambda _, error: self._pool.died(worker, f"its process cannot be watched: {describe(error)}"),
        )
        return Started(engine, command.started_version(version, path), url)

    async def _watch(self, worker: str, process: EngineProcess) -> None:
        """Reports an unexpected end to the pool."""
        await process.ended()
        why = process.exit_reason()
        log.warning("the engine of %s is gone: %s", worker, why)
        self._pool.died(worker, why)
        self._watching.pop(worker, None)

    def _device(self, worker: str) -> dict[str, str]:
        if not self._devices:
            return {}
        free = [device for device in self._devices if device not in self._device_of.values()]
        if not free:
            raise InfeasibleError(
                f"all {len(self._devices)} sets of devices have an engine", where=f"worker {worker}",
                hint="name more devices, or add fewer workers",
            )  # fmt: skip
        self._device_of[worker] = free[0]
        return {"CUDA_VISIBLE_DEVICES": free[0]}
