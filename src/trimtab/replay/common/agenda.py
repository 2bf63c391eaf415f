"""The virtual clock: what will happen, in order of time. It knows nothing of what that is.

Two things at one moment happen in the order in which they were put down, so a run depends on its inputs alone. Time
never goes back: what is put down for the past happens now.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

What = TypeVar("What")


class Agenda(Generic[What]):
    """Moments to come, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, What]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, at: float, what: What) -> None:
        """It happens then."""
        self._count += 1
        heapq.heappush(self._heap, (at if at > self.now else self.now, self._count, what))

    def first(self) -> float | None:
        """When the next thing happens."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> What:
        """The next thing; it is its time now."""
        at, _, what = heapq.heappop(self._heap)
        self.now = at
        return what

    def leap(self, at: float) -> None:
        """Time passes, and nothing that was put down happens."""
        self.now = max(self.now, at)
