"""Virtual clock: a queue of events in order of time.

Events at the same time occur in the order in which they were put, so a run depends on its inputs alone. Time never goes
back: an event put for the past occurs now.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Agenda(Generic[Event]):
    """Events to come, and the current time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, at: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at if at > self.now else self.now, self._count, event))

    def next_time(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Event:
        """Removes the next event and sets the clock to its time."""
        at, _, event = heapq.heappop(self._heap)
        self.now = at
        return event

    def advance_to(self, at: float) -> None:
        """Sets the clock without popping an event."""
        self.now = max(self.now, at)
