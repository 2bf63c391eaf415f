"""Launcher of engines as processes of this machine, and the wait of all launchers until an engine serves.

An engine that ends by itself is reported at once. What must never happen: a process that outlives the pool or the
pool's process; two engines of a worker at the same time; two engines on the same devices, if devices were named.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import aiohttp

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import HttpEngine, open_session, require_private
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

log = logging.getLogger("trimtab.rollout")

FIRST_POLL_S, MAX_POLL_S = 0.05, 1.0  # back-off: some engines start in half a second
PORT_TRIES = 3

ProcessProbe = Callable[[], Awaitable[EngineProcessState]]


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


# ---- waiting for an engine to serve


class EngineEndedError(UnreachableError):
    """The engine's process ended before it served."""


class PortTakenError(EngineEndedError):
    """It ended because another process has its port: retry with another port."""


class HasCommand(Protocol):
    """A launcher, with the command line of its engines."""

    command: EngineCommand


async def start_with_retries(launcher: HasCommand, start: Callable[[], Awaitable[Started]]) -> Started:
    """Starts again where the port was taken, and without the stream interval where the engine does not know it."""
    for _ in range(PORT_TRIES - 1):
        try:
            return await start()
        except PortTakenError:  # noqa: PERF203 - a start takes seconds
            continue
        except EngineEndedError as ended:
            older = launcher.command.without_interval(ended.what)
            if older is None:
                raise
            launcher.command = older
    return await start()


async def wait_until_serving(
    name: str,
    url: str,
    command: EngineCommand,
    session: aiohttp.ClientSession,
    probe: ProcessProbe,
    deadlines: EngineDeadlines | None,
) -> HttpEngine:
    """Returns the engine's adapter once it would serve.

    An open port is not enough: engines listen long before they serve, and another process may have taken the port. So
    the software is detected, its adapter is asked for its state, and the process is checked: it must be alive and own
    the port. A failed wait reports the end of the engine's log.
    """
    await require_private(url)
    began, pause_s = time.monotonic(), FIRST_POLL_S
    seen = "it does not listen yet"
    while True:
        process = await probe()
        if process.ended:
            kind = PortTakenError if process.port_taken else EngineEndedError
            raise kind(f"the engine of {name} did not start: {process.ended}", hint=_shown(command))
        if process.listens:
            engine, seen = await _try_attach(name, url, command, session, deadlines)
            if engine is not None:
                engine.launched = True
                engine.pieces = replace(engine.pieces, every=max(engine.pieces.every, command.stream_interval))
                return engine
        if time.monotonic() - began > command.start_s:
            raise UnreachableError(
                f"the engine of {name} does not serve after {command.start_s:g} s: {seen}", where=url,
                hint="a large model needs longer: start_s",
            )  # fmt: skip
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_POLL_S, pause_s * 1.5)


async def _try_attach(
    name: str, url: str, command: EngineCommand, session: aiohttp.ClientSession, deadlines: EngineDeadlines | None
) -> tuple[HttpEngine | None, str]:
    """The engine if it would serve, and its state."""
    try:
        engine, dialect = await attach(name, url, session, deadlines)
    except TrimtabError as fault:
        return None, fault.what
    if command.kind and dialect.kind != command.kind:
        raise InputError(
            f"a {dialect.kind} engine answers, and the command says {command.kind}", where=url, hint=_shown(command)
        )
    state = await engine.ready()
    return (engine if state.up else None), state.why


def _shown(command: EngineCommand) -> str:
    return f"it was started with: {' '.join(command.words)}"
