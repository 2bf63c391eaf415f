"""`trimtab rollout serve`: a pool, its engines and the gateway put together from a job file, and ended in order.

The gateway listens before its engines are there, so that one can look at them while they start. An engine that cannot
be reached is said and tried again: others may serve meanwhile. What must never happen is an end that leaves something
behind: the first Ctrl-C refuses new requests, lets those under way end and stops the engines that were started here;
the second waits for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cli.pool import controller_session
from trimtab.cli.rollout import address_files as rollout_place
from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.reasons import ReasonCode
from trimtab.formats.rollout.settings import AttachedEngine, RolloutSettings, StartedEngines
from trimtab.model.rollout import WorkerSpec
from trimtab.render.live import rollout as rollout_live
from trimtab.render.output import err, out
from trimtab.render.text import rollout as rollout_text
from trimtab.runtime.engines.wire import addresses
from trimtab.runtime.gateway.server import Gateway
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.launch.launcher import EngineCommand
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.pool import RolloutPool

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

TRY_AGAIN_S = 2.0
HURRY_S = 2.0
HURRIED = 130


class StopRequests:
    """How often somebody asked for the end. The first is an order, the second a hurry."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        """Once more."""
        if self.over.is_set():
            self.hurry.set()
        self.over.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Ctrl-C, being ended and being hung up on ask for it; under `nohup` the last does not."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def commands(settings: RolloutSettings) -> dict[int, EngineCommand]:
    """How engines are started, by their place in the file. What is wrong with one is an error with its line."""
    made = {}
    for index, one in enumerate(settings.engines):
        if isinstance(one, StartedEngines):
            try:
                made[index] = EngineCommand(
                    one.model, one.kind, one.command, one.arguments, one.environment, one.host, settings.rules.version,
                    one.start_s, one.stop_s, one.folder,
                )  # fmt: skip
            except InputError as error:
                error.where = one.where
                raise
    return made


def gateway_of(pool: RolloutPool, settings: RolloutSettings, token: str, host: str | None, port: int | None) -> Gateway:
    """The gateway, not yet listening; the command line wins over the file."""
    given = asdict(settings.gateway)
    del given["stop_s"]
    given |= {"host": host or given["host"], "port": given["port"] if port is None else port}
    try:
        return Gateway(pool, GatewaySettings(token=token, **given))
    except InputError as error:
        error.where = error.where or settings.place("rollout", "gateway")
        raise


async def serve(
    settings: RolloutSettings,
    environment: Mapping[str, str] = os.environ,
    *,
    host: str | None = None,
    port: int | None = None,
    token_file: Path | None = None,
) -> int:
    """Serve until somebody asks for the end; the exit status."""
    lines = commands(settings)
    name = str(os.getpid())
    with contextlib.ExitStack() as stack:
        session = None
        if any(isinstance(one, StartedEngines) and one.pool is not None for one in settings.engines):
            session = stack.enter_context(controller_session(settings.ray, None))
        token, kept_in = stack.enter_context(rollout_place.token(environment, token_file, name))
        pool = RolloutPool(
            settings.rules, settings.elastic, journal=settings.journal, gpus_of=lambda worker: crew.gpus_of(worker)
        )
        crew = ServedEngines(pool, settings, lines, session)
        stops = StopRequests()
        stack.enter_context(stops.on_signals())
        gateway = gateway_of(pool, settings, token, host, port)
        await pool.start()
        try:
            await gateway.start()
            stack.enter_context(rollout_place.said(environment, gateway.url, settings.path, kept_in))
            logs = settings.logs or rollout_place.folder(environment) / f"rollout-{gateway.url.rpartition(':')[2]}-logs"
            here = any(isinstance(one, StartedEngines) and one.pool is None for one in settings.engines)
            hints = _greeting(gateway.url, kept_in, logs if here else None)
            await _until_over(pool, gateway, crew, logs, settings, stops, hints)
            err.print("ending: what runs may finish; Ctrl-C again waits for nobody", markup=False)
        finally:
            await _end(pool, gateway, settings.gateway.stop_s, stops)
    out.print("hurried: what was left was ended" if stops.hurry.is_set() else "ended; nothing is left of it")
    return HURRIED if stops.hurry.is_set() else 0


async def _until_over(
    pool: RolloutPool,
    gateway: Gateway,
    crew: ServedEngines,
    logs: Path,
    settings: RolloutSettings,
    stops: StopRequests,
    hints: Sequence[str],
) -> None:
    def look() -> dict[str, Any]:
        return rollout_text.status_data(pool.status(), gateway.url, str(settings.path))

    over = asyncio.create_task(stops.over.wait(), name="rollout-over")
    showing = pool.background.start("display", functools.partial(rollout_live.watch, look, stops.over, hints))
    joining = asyncio.create_task(crew.join(logs), name="rollout-join")
    beside = [showing, joining]
    if settings.follow_weights:
        beside.append(pool.background.start("follow weights", functools.partial(_follow, pool)))
    left: set[asyncio.Task[Any]] = {over, *beside}
    try:
        while not over.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()  # raises where the file names what cannot be an engine
    finally:
        stops.over.set()
        for one in (over, *beside[1:]):
            one.cancel()
        await asyncio.gather(over, *beside, return_exceptions=True)


async def _follow(pool: RolloutPool) -> None:
    """A trainer sends weights to engines by itself, and tells nobody but them."""
    from trimtab.integrations.following import follow

    await follow(pool)


async def _end(pool: RolloutPool, gateway: Gateway, drain_s: float, stops: StopRequests) -> None:
    """In order; once somebody is in a hurry, only as far as it goes at once: engines' guards do the rest."""
    await _unless_hurried(gateway.stop(drain_s), stops, math.inf)
    if stops.hurry.is_set():
        await _unless_hurried(gateway.stop(0.0), stops, HURRY_S)
    await _unless_hurried(pool.stop(), stops, HURRY_S)


async def _unless_hurried(deed: Coroutine[Any, Any, None], stops: StopRequests, allowed_s: float) -> None:
    """Until it is done; after somebody is in a hurry for no longer than allowed, or at once where that is not said."""
    doing, hurry = asyncio.ensure_future(deed), asyncio.ensure_future(stops.hurry.wait())
    await asyncio.wait({doing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not doing.done() and allowed_s < math.inf:
        await asyncio.wait({doing}, timeout=allowed_s)
    doing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await doing


def _greeting(url: str, token_file: str, logs: Path | None) -> list[str]:
    """What is said at the beginning, and under the picture."""
    lines = [
        f"listening on {url}",
        f"the token is in {token_file}" if token_file else f"the token is {rollout_place.TOKEN}",
        *([f"what engines print is in {logs}"] if logs else []),
        "trimtab rollout status | drain | resume | scale | doctor   # in another terminal",
        "Ctrl-C ends it",
    ]
    if not out.is_terminal:
        for line in lines:
            print(line, flush=True)
    return lines


class ServedEngines:
    """The engines of a job file: attached, or started when they are needed."""

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
        """The GPUs of this machine that a worker is on, where that is known."""
        named = self._devices.get(worker, str)().split(",")
        return tuple(int(one) for one in named if one.strip().isdecimal())

    async def join(self, logs: Path) -> None:
        """Adds all of them; returns when each has been there once."""
        for index, one in enumerate(self._settings.engines):
            if isinstance(one, StartedEngines):
                self._start(one, self._lines[index], logs)
        attached = [one for one in self._settings.engines if isinstance(one, AttachedEngine)]
        await asyncio.gather(*(self._attach(one) for one in attached))

    def _start(self, group: StartedEngines, command: EngineCommand, logs: Path) -> None:
        if group.pool is not None:
            self._on_slots(group, command)
            return
        launcher = ProcessLauncher(self._pool, command, devices=group.devices, logs=logs)
        for name in group.names:
            self._devices[name] = functools.partial(launcher.devices_of, name)
            spec = WorkerSpec(
                name, limit=group.limit, size=group.size, startable=True, can_sleep=group.sleeps,
                can_pause=group.kind in ("vllm", "sglang"),
            )  # fmt: skip
            self._pool.add_startable(spec, launcher)

    def _on_slots(self, group: StartedEngines, command: EngineCommand) -> None:
        """On slots of a pool of a Ray cluster; imported here, because others need no Ray."""
        from trimtab.runtime.rollout.launch.start import engines_on_slots

        assert self._session is not None
        assert group.pool is not None
        asked = {"gpu": group.gpus, "cpu": group.cpus, "memory": (group.memory_gb or 0.0) * 1e9}
        try:
            engines_on_slots(
                self._pool, self._session, group.pool, command,
                resources={name: amount for name, amount in asked.items() if amount}, workers=group.count,
                per_node=group.per_node, most=self._settings.rules.most, name=group.name, limit=group.limit,
                size=group.size, priority=group.priority,
            )  # fmt: skip
        except InputError as error:
            error.where = group.where
            raise

    async def _attach(self, one: AttachedEngine) -> None:
        """Until it is there; what is in the way is said when it is another."""
        before = ""
        while True:
            try:
                if before and (there := self._pool.worker_at(await addresses(one.url))) is not None:
                    self._pool.warn(f"it joined as {there} meanwhile", one.label)
                    return
                name = await self._pool.attach(
                    one.url, name=one.name, limit=one.limit, version=one.version, size=one.size, node=one.node
                )
            except UnreachableError as fault:  # noqa: PERF203 - it waits anyway
                if fault.what != before:
                    said = f"it is not there: {fault.what}; tried again every {TRY_AGAIN_S:g} s"
                    self._pool.warn(said, one.label, ReasonCode.not_reached)
                before = fault.what
                await asyncio.sleep(TRY_AGAIN_S)
            except TrimtabError as fault:
                fault.where = one.where
                raise
            else:
                self._devices[name] = lambda: ",".join(one.devices)
                return
