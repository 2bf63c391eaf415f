"""Waiting for an engine that was just begun, until it really serves.

A port that is open says little: engines listen long before they serve, and somebody else may have taken the port and
answer there. So the software is asked what it is, its adapter is asked whether it would serve, and the process is
looked at: it must live, and the port must be its own. A wait that fails says what the engine said last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.runtime.engines.detect import attach
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.engines.http_engine import HttpEngine
from trimtab.runtime.engines.wire import require_private
from trimtab.runtime.rollout.launch.launcher import EngineCommand, EngineProcessState

FIRST_POLL_S, MAX_POLL_S = 0.05, 1.0  # between looks: more often at first, for some engines start in half a second
PORT_TRIES = 3

ProcessProbe = Callable[[], Awaitable[EngineProcessState]]


class EngineEndedError(UnreachableError):
    """The engine's process ended before it served."""


class PortTakenError(EngineEndedError):
    """It ended, and somebody else has the port that it was given: another one may do."""


async def wait_until_serving(
    name: str,
    url: str,
    command: EngineCommand,
    session: aiohttp.ClientSession,
    probe: ProcessProbe,
    deadlines: EngineDeadlines | None,
) -> tuple[HttpEngine, str]:
    """The adapter of the engine, once it would serve, and what a person should know of it."""
    await require_private(url)
    began, pause_s = time.monotonic(), FIRST_POLL_S
    seen = "it does not listen yet"
    while True:
        process = await probe()
        if process.ended:
            kind = PortTakenError if process.port_taken else EngineEndedError
            raise kind(f"the engine of {name} did not come up: {process.ended}", hint=_shown(command))
        if process.listens:
            engine, note, seen = await _try_attach(name, url, command, session, deadlines)
            if engine is not None:
                return engine, note
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
) -> tuple[HttpEngine | None, str, str]:
    """The engine where it would serve, a note, and what was seen."""
    try:
        engine, dialect = await attach(name, url, session, deadlines)
    except TrimtabError as fault:
        return None, "", fault.what
    if command.kind and dialect.kind != command.kind:
        raise InputError(
            f"a {dialect.kind} engine answers, and the command says {command.kind}", where=url, hint=_shown(command)
        )
    state = await engine.ready()
    return (engine, dialect.note, state.why) if state.up else (None, "", state.why)


def _shown(command: EngineCommand) -> str:
    return f"it was started with: {' '.join(command.words)}"
