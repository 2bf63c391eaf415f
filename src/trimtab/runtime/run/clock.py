"""The time of a run: the machine's, or one that passes only when somebody sleeps.

Emulated components sleep by a clock, and runs measure by the same one; under a virtual clock a run of hours takes
milliseconds and is the same each time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from some beginning, and how to let them pass."""

    def now(self) -> float:
        """Seconds since some moment in the past; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""


class WallClock:
    """The machine's own time."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """Time that passes only by `sleep`, and then at once."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds slept so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Be so many seconds later."""
        self._now += max(0.0, seconds)
