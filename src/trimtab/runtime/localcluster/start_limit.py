"""How many nodes of this machine start at once: few, for Ray gives its own parts fifteen seconds to come up.

Each place is a file, taken by a lock that ends with its holder however that ends. A keeper takes a place before it
starts Ray and gives it back when the node runs or has failed; until then it waits, and can be told to end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def places() -> int:
    """How many may start at once: one for every two cores."""
    return max(1, (os.cpu_count() or 2) // 2)


class StartPermit:
    """A place among those that start, once it is taken."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to have a place; whether one is held."""
        for number in range(places()):
            if self._descriptor is not None:
                break
            descriptor = os.open(self._directory / f"turn-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._descriptor = descriptor
                break
            os.close(descriptor)
        return self._descriptor is not None

    def release(self) -> None:
        """Let the next one start."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
