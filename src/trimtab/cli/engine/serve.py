"""`trimtab engine serve`: builds pool, engines and gateway from a job file, and stops them in order.

The gateway listens before its engines are ready, so that they can be watched while they start. An unreachable engine is
reported and retried; others may serve in the meantime. Must never happen: a stop that leaves processes behind. The
first Ctrl-C refuses new requests, lets running ones finish and stops the engines started here; the second stops at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli.engine import client as rollout_place
from trimtab.cli.options import controller_session
from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.formats.rollout.job_section import RolloutSettings
from trimtab.formats.rollout.schema import AttachedEngine, StartedEngines
from trimtab.model.rollout import WorkerSpec
from trimtab.render.live import LiveView
from trimtab.render.output import err, out
from trimtab.render.text import rollout as rollout_text
from trimtab.runtime.engines.http_engine import addresses
from trimtab.runtime.gateway.server import Gateway
from trimtab.runtime.gateway.server import run_alone as run_alone
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.http import tokens
from trimtab.runtime.rollout.launch.launcher import EngineCommand
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.pool import RolloutPool

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

RETRY_S = 2.0
REFRESH_EVERY_S, LINES_EVERY_S = 1.0, 0.25
FORCED_STOP_S = 2.0
FORCED = 130


class StopRequests:
    """Stop requests by signal: the first stops gracefully, the second at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def request(self) -> None:
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handles SIGINT, SIGTERM and SIGHUP; not SIGHUP under `nohup`."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def commands(settings: RolloutSettings) -> dict[int, EngineCommand]:
    """Start commands of engines, by their index in the file. Errors carry the line."""
    found = {}
    for index, engines in enumerate(settings.engines):
        if isinstance(engines, StartedEngines):
            with settings.source.located("rollout", "engines", index):
                found[index] = EngineCommand(
                    engines.model, engines.kind or "", engines.command or (), engines.arguments, engines.environment,
                    engines.host, settings.rules.version, engines.start_s, engines.stop_s, engines.folder,
                ).over(engines.nodes)  # fmt: skip
    return found


def gateway_of(
    pool: RolloutPool, settings: RolloutSettings, token: str, host: str | None, port: int | None, processes: int | None
) -> Gateway:
    """The gateway, not yet listening; the command line overrides the file."""
    given = settings.gateway.model_dump(exclude={"stop_s"})
    line = {"host": host, "port": port, "processes": processes}
    given |= {name: value for name, value in line.items() if value is not None and value != ""}
    with settings.source.located("rollout", "gateway"):
        return Gateway(pool, GatewaySettings(token=token, **given))


async def serve(
    settings: RolloutSettings,
    environment: Mapping[str, str] = os.environ,
    *,
    host: str | None = None,
    port: int | None = None,
    processes: int | None = None,
    token_file: Path | None = None,
) -> int:
    """Serves until a stop is requested; returns the exit status."""
    engine_commands = commands(settings)
    name = str(os.getpid())
    with contextlib.ExitStack() as stack:
        session = None
        if any(isinstance(entry, StartedEngines) and entry.pool is not None for entry in settings.engines):
            session = stack.enter_context(controller_session(settings.section.ray, None))
        path = token_file or rollout_place.folder(environment) / f"rollout-{name}.token"
        token, kept_in = stack.enter_context(tokens.token(environment, rollout_place.TOKEN, path, name))
        pool = RolloutPool(
            settings.rules,
            settings.elastic,
            journal=settings.beside(settings.section.journal),
            gpus_of=lambda worker: engines.gpus_of(worker),
        )
        engines = ServedEngines(pool, settings, engine_commands, session)
        stops = StopRequests()
        stack.enter_context(stops.on_signals())
        gateway = gateway_of(pool, settings, token, host, port, processes)
        await pool.start()
        try:
            await gateway.start()
            logs = settings.beside(settings.section.logs)
            logs = logs or rollout_place.folder(environment) / f"rollout-{gateway.url.rpartition(':')[2]}-logs"
            stack.enter_context(rollout_place.published(environment, gateway.url, settings.path, kept_in, logs))
            here = any(isinstance(entry, StartedEngines) and entry.pool is None for entry in settings.engines)
            hints = _start_lines(gateway.url, kept_in, logs if here else None)
            await _until_over(pool, gateway, engines, logs, settings, stops, hints)
            err.print("stopping: running requests may finish; Ctrl-C again stops at once", markup=False)
        finally:
            await _end(pool, gateway, settings.gateway.stop_s, stops)
    out.print("stopped at once: remaining requests were cut off" if stops.forced.is_set() else "stopped")
    return FORCED if stops.forced.is_set() else 0


async def _until_over(
    pool: RolloutPool,
    gateway: Gateway,
    engines: ServedEngines,
    logs: Path,
    settings: RolloutSettings,
    stops: StopRequests,
    hints: Sequence[str],
) -> None:
    def look() -> dict[str, Any]:
        return rollout_text.status_data(pool.status(), gateway.url, str(settings.path))

    requested = asyncio.create_task(stops.requested.wait(), name="rollout-over")
    showing = pool.background.start("display", functools.partial(watch, look, stops.requested, hints))
    joining = asyncio.create_task(engines.join(logs), name="rollout-join")
    beside = [showing, joining]
    if settings.section.follow_weights:
        from trimtab.integrations.following import follow

        beside.append(pool.background.start("follow weights", functools.partial(follow, pool)))
    left: set[asyncio.Task[Any]] = {requested, *beside}
    try:
        while not requested.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises if the file names something that cannot be an engine
    finally:
        stops.requested.set()
        for task in (requested, *beside[1:]):
            task.cancel()
        await asyncio.gather(requested, *beside, return_exceptions=True)


async def watch(read_status: Callable[[], dict[str, Any]], over: asyncio.Event, hints: Sequence[str]) -> None:
    """Show the pool until `over` is set; on the gateway's event loop, so it only reads."""
    with contextlib.ExitStack() as stack:
        view = LiveView(lambda data: rollout_text.picture(data, hints), rollout_text.change_lines)
        if view.is_redrawn:
            stack.enter_context(_quiet())
        stack.enter_context(view)
        while not over.is_set():
            view.show(read_status())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), REFRESH_EVERY_S if view.is_redrawn else LINES_EVERY_S)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the pool's warnings out of the log: they are in the display, which log lines would break."""
    log = logging.getLogger("trimtab.rollout")
    before, log.propagate = log.propagate, False
    silent = logging.NullHandler()
    log.addHandler(silent)
    try:
        yield
    finally:
        log.removeHandler(silent)
        log.propagate = before


async def _end(pool: RolloutPool, gateway: Gateway, drain_s: float, stops: StopRequests) -> None:
    """Stops in order; after a second request only briefly: the engines' process guards do the rest."""
    await _unless_forced(gateway.stop(drain_s), stops, math.inf)
    if stops.forced.is_set():
        await _unless_forced(gateway.stop(0.0), stops, FORCED_STOP_S)
    await _unless_forced(pool.stop(), stops, FORCED_STOP_S)


async def _unless_forced(stopping: Coroutine[Any, Any, None], stops: StopRequests, allowed_s: float) -> None:
    """Awaits the stop; after a second request for at most `allowed_s`, or not at all if it is infinite."""
    task, forced = asyncio.ensure_future(stopping), asyncio.ensure_future(stops.forced.wait())
    await asyncio.wait({task, forced}, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not task.done() and allowed_s < math.inf:
        await asyncio.wait({task}, timeout=allowed_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _start_lines(url: str, token_file: Path | None, logs: Path | None) -> list[str]:
    """Lines for the start and below the live view."""
    lines = [
        f"listening on {url}",
        tokens.told(token_file, rollout_place.TOKEN),
        *([f"engine logs are in {logs}"] if logs else []),
        "trimtab engine list | drain | undrain | scale | doctor   # in another terminal",
        "Ctrl-C stops it",
    ]
    if not out.is_terminal:
        for line in lines:
            print(line, flush=True)
    return lines


class ServedEngines:
    """The engines of a job file: attached, or started on demand."""

    def __init__(
        self,
        pool: RolloutPool,
        settings: RolloutSettings,
        lines: Mapping[int, EngineCommand],
        session: Session | None = None,
    ) -> None:
        self._pool = pool
        self._session = session
        self._settings = settings
        self._lines = lines
        self._devices: dict[str, Callable[[], str]] = {}

    def gpus_of(self, worker: str) -> tuple[int, ...]:
        named = self._devices.get(worker, str)().split(",")
        return tuple(int(word) for word in named if word.strip().isdecimal())

    async def join(self, logs: Path) -> None:
        """Adds all engines; returns when each has been reached once."""
        attached = []
        for index, engines in enumerate(self._settings.engines):
            with self._settings.source.located("rollout", "engines", index):
                if isinstance(engines, StartedEngines):
                    self._start(engines, self._lines[index], logs)
                else:
                    attached.append(self._attach(engines, self._settings.source.place("rollout", "engines", index)))
        await asyncio.gather(*attached)

    def _start(self, group: StartedEngines, command: EngineCommand, logs: Path) -> None:
        if group.pool is not None:
            self._on_slots(group, command)
            return
        launcher = ProcessLauncher(self._pool, command, devices=group.devices, logs=logs)
        for name in group.names:
            self._devices[name] = functools.partial(launcher.devices_of, name)
            spec = WorkerSpec(name, limit=group.limit, size=group.size, startable=True, can_sleep=group.sleeps)
            self._pool.add_startable(spec, launcher)

    def _on_slots(self, group: StartedEngines, command: EngineCommand) -> None:
        """Starts engines on slots of a Ray pool; imported here, because the others need no Ray."""
        from trimtab.runtime.rollout.launch.start import engines_on_slots

        assert self._session is not None
        assert group.pool is not None
        engines_on_slots(
            self._pool, self._session, group.pool, command, resources=group.resources, workers=group.workers,
            nodes=group.nodes, per_node=group.per_node, max_workers=self._settings.rules.max_workers,
            name=group.label, limit=group.limit, size=group.size, priority=group.priority,
        )  # fmt: skip

    async def _attach(self, engine: AttachedEngine, where: str) -> None:
        """Retries until the engine is attached; logs each new cause."""
        before = ""
        while True:
            try:
                if before and (there := self._pool.worker_at(await addresses(engine.url))) is not None:
                    self._pool.warn(f"it has joined as {there}", engine.label)
                    return
                name = await self._pool.attach(
                    engine.url,
                    name=engine.name,
                    limit=engine.limit,
                    version=engine.version,
                    size=engine.size,
                    node=engine.node,
                )
            except UnreachableError as fault:  # noqa: PERF203 - it waits anyway
                if fault.what != before:
                    text = f"not reachable: {fault.what}; retried every {RETRY_S:g} s"
                    self._pool.warn(text, engine.label, ReasonCode.not_reached)
                before = fault.what
                await asyncio.sleep(RETRY_S)
            except TrimtabError as fault:
                fault.where = where
                raise
            else:
                self._devices[name] = lambda: ",".join(engine.devices)
                return
