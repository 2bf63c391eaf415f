"""What `trimtab rollout serve` shows until it is told to end: on a terminal a picture that is redrawn, elsewhere lines.

It looks and tells, on the event loop of the gateway, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from trimtab.render.output import out
from trimtab.render.text import rollout as rollout_text

LOOK_EVERY_S = 1.0
LINES_EVERY_S = 0.25


async def watch(look: Callable[[], dict[str, Any]], over: asyncio.Event, hints: Sequence[str]) -> None:
    """Show the pool until it is over."""
    if not out.is_terminal:
        await _tell_changes(look, over)
        return
    screen = Console(highlight=False)  # lines are folded, where `out` would have the picture cut them
    with _quiet(), Live(console=screen, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        while not over.is_set():
            live.update(rollout_text.picture(look(), hints), refresh=True)
            await _wait(over, LOOK_EVERY_S)


async def _tell_changes(look: Callable[[], dict[str, Any]], over: asyncio.Event) -> None:
    before: dict[str, Any] | None = None
    while not over.is_set():
        data = look()
        for line in rollout_text.change_lines(before, data):
            print(line, flush=True)
        before = data
        await _wait(over, LINES_EVERY_S)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the pool warns of is in the picture; written beside it, it would tear it."""
    log = logging.getLogger("trimtab.rollout")
    before, log.propagate = log.propagate, False
    silent = logging.NullHandler()
    log.addHandler(silent)
    try:
        yield
    finally:
        log.removeHandler(silent)
        log.propagate = before


async def _wait(over: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
