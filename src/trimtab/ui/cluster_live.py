"""The view that `trimtab cluster start` keeps up to date until it is interrupted or the cluster ends.

On a terminal one picture that is redrawn; elsewhere a line per change. It looks and tells, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.live import Live

from trimtab.ui import cluster_text
from trimtab.ui.output import out

LOOK_EVERY_S = 1.0


def watch(look: Callable[[], dict[str, Any] | None], hints: Sequence[str]) -> None:
    """Show the cluster until `look` says None: it has ended."""
    if not out.is_terminal:
        _tell_changes(look)
        return
    with Live(console=out, auto_refresh=False, transient=False) as live:
        while (data := look()) is not None:
            live.update(cluster_text.picture(data, [*hints, "", "Ctrl-C ends the cluster"]), refresh=True)
            time.sleep(LOOK_EVERY_S)


def _tell_changes(look: Callable[[], dict[str, Any] | None]) -> None:
    before: dict[str, Any] | None = None
    while (data := look()) is not None:
        for line in cluster_text.change_lines(before, data):
            print(line, flush=True)
        before = data
        time.sleep(LOOK_EVERY_S)
