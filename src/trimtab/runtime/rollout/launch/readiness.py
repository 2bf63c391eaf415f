"""Waits until a new engine serves.

An open port is not enough: engines listen long before they serve, and another process may have taken the port. So the
software is detected, its adapter is asked for its state, and the process is checked: it must be alive and own the port.
A failed wait reports the end of the engine's log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import aiohttp

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import HttpEngine, require_private
from trimtab.runtime.rollout.launch.launcher import EngineCommand, EngineProcessState, Started

FIRST_POLL_S, MAX_POLL_S = 0.05, 1.0  # back-off: some engines start in half a second
PORT_TRIES = 3

ProcessProbe = Callable[[], Awaitable[EngineProcessState]]


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
    """Returns the engine's adapter once it would serve."""
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
    name: str,
    url: str,
    command: EngineCommand,
    session: aiohttp.ClientSession,
    deadlines: EngineDeadlines | None,
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
