"""Tails the event log of a run folder, read-only. A folder without events yet has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.model.run_events import read_event
from trimtab.runtime.run.folder import EVENTS
from trimtab.runtime.store.files import FileTail

MAX_READ_BYTES = 2**23  # of one read: a large run comes in pieces


class EventTail:
    """Reads on where it stopped. A malformed line is returned as None, so that the caller can count it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        if not folder.exists():
            raise InputError("there is no such folder", where=str(folder), hint="name the folder of a run")
        if not folder.is_dir():
            raise InputError("this is a file, not the folder of a run", where=str(folder), hint="name its folder")
        self._tail = FileTail(self.path)

    def read(self) -> tuple[bool, list[dict[str, Any] | None]]:
        """Whether it begins anew, and the new events. Raises InputError if it cannot be read."""
        try:
            anew, lines = self._tail.lines(MAX_READ_BYTES)
        except OSError as fault:
            raise InputError(f"it cannot be read: {fault.strerror or fault}", where=str(self.path)) from None
        return anew, [_event(line) for line in lines]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return read_event(line)
    except ValueError:
        return None
