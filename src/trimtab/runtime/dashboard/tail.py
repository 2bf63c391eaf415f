"""Tails the event log of a run folder: whole lines only, from the start again if the file is new.

Read-only. A folder without events yet has none; a file that shrank or was replaced is another run. A malformed line is
returned as None, so that the caller can count it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.model.run_events import read_event
from trimtab.runtime.run.folder import EVENTS

MAX_READ_BYTES = 2**23  # of one read: a large run comes in pieces


class EventTail:
    """Reads on where it stopped."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        if not folder.exists():
            raise InputError("there is no such folder", where=str(folder), hint="name the folder of a run")
        if not folder.is_dir():
            raise InputError("this is a file, not the folder of a run", where=str(folder), hint="name its folder")
        self._at = 0
        self._file: tuple[int, int] | None = None
        self._partial = b""

    def read(self) -> tuple[bool, list[dict[str, Any] | None]]:
        """Whether it begins anew, and the new events. Raises InputError if it cannot be read."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                which = (found.st_dev, found.st_ino)
                anew = self._file is not None and (which != self._file or found.st_size < self._at)
                if anew:
                    self._at, self._partial = 0, b""
                self._file = which
                file.seek(self._at)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            anew = self._file is not None
            self._file, self._at, self._partial = None, 0, b""
            return anew, []
        except OSError as fault:
            raise InputError(f"it cannot be read: {fault.strerror or fault}", where=str(self.path)) from None
        self._at += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return anew, [_event(line) for line in lines]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return read_event(line)
    except ValueError:
        return None
