"""The display of `trimtab rollout serve`.

On a terminal it is redrawn in place; otherwise each change is printed as a line. It runs on the gateway's event loop
and only reads.
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

REFRESH_EVERY_S = 1.0
LINES_EVERY_S = 0.25


async def watch(read_status: Callable[[], dict[str, Any]], over: asyncio.Event, hints: Sequence[str]) -> None:
    """Show the pool until `over` is set."""
    if not out.is_terminal:
        await _print_changes(read_status, over)
        return
    screen = Console(highlight=False)  # folds long lines; `out` would crop them
    with _quiet(), Live(console=screen, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        while not over.is_set():
            live.update(rollout_text.picture(read_status(), hints), refresh=True)
            await _wait(over, REFRESH_EVERY_S)


async def _print_changes(read_status: Callable[[], dict[str, Any]], over: asyncio.Event) -> None:
    before: dict[str, Any] | None = None
    while not over.is_set():
        data = read_status()
        for line in rollout_text.change_lines(before, data):
            print(line, flush=True)
        before = data
        await _wait(over, LINES_EVERY_S)


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


async def _wait(over: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(over.wait(), seconds)
