"""The shape of every machine: events in, instructions out.

`handle(event, now)` is the only entry point. It reads no clock: `now` is set before the handler runs, never goes back,
and is as before where the event is refused. Handlers are methods marked `@on(EventType)`, of the machine or of the
parts that it is made of. What must never happen: an event type without a handler, or with two.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from trimtab.core.codec import encode
from trimtab.core.errors import InfeasibleError, InputError

Key = TypeVar("Key", bound=Hashable)
State = TypeVar("State")
Event = TypeVar("Event")
Instruction = TypeVar("Instruction")
Method = TypeVar("Method", bound=Callable[..., None])


class MachineClock(Protocol):
    """Holds the time of the current event, in seconds."""

    now: float


def on(event: type) -> Callable[[Method], Method]:
    """Marks the handler of an event type."""

    def mark(method: Method) -> Method:
        method._handles = event  # type: ignore[attr-defined]
        return method

    return mark


def earliest(*dues: float | None) -> float | None:
    found = None
    for due in dues:
        if due is not None and (found is None or due < found):
            found = due
    return found


class Machine(Generic[State, Event, Instruction]):
    """A machine around a state that the codec can write and read. `out` is shared with its parts."""

    EVENTS: ClassVar[type]  # the class of its event types

    def __init__(self, state: State, clock: MachineClock, out: list[Instruction], *parts: object) -> None:
        """`clock` is the part of the state that holds `now`."""
        self.state = state
        self._clock, self._out = clock, out
        found = [handler for part in (self, *parts) for handler in _handlers(part)]
        self._handlers: dict[type, Callable[[Any], None]] = dict(found)
        if len(found) > len(self._handlers) or self._handlers.keys() != set(self.EVENTS.__subclasses__()):
            raise TypeError(f"{type(self).__name__}: exactly one handler for each of its event types is needed")

    @property
    def now(self) -> float:
        return self._clock.now

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Instructions for the event. Raises InputError or InfeasibleError: it is refused, and nothing changed."""
        clock, out = self._clock, self._out
        before, clock.now = clock.now, max(float(now), clock.now)
        out.clear()
        try:
            self._handlers[type(event)](event)
        except (InputError, InfeasibleError):
            clock.now = before
            raise
        self.settle()
        return list(out)

    def settle(self) -> None:
        """What follows from the state after every event."""

    def next_deadline(self) -> float | None:
        """When a tick is due at the latest."""
        raise NotImplementedError

    def dump(self) -> dict[str, Any]:
        """The state as JSON data."""
        data: dict[str, Any] = encode(self.state)
        return data

    def check(self) -> None:
        """Raises AssertionError where an invariant is violated."""
        raise NotImplementedError


def _handlers(part: object) -> Iterator[tuple[type, Callable[[Any], None]]]:
    for name in dir(type(part)):
        event = getattr(getattr(type(part), name), "_handles", None)
        if event is not None:
            yield event, getattr(part, name)


class Timers(Generic[Key]):
    """A heap of deadlines. `due` says when a key is due; entries that it does not confirm any more are dropped.

    Must be told with `arm` of every key whose deadline came nearer; one that moved away is found when its entry is met.
    """

    def __init__(self, due: Callable[[Key], float | None]) -> None:
        self._due = due
        self._heap: list[tuple[float, Any]] = []
        self._armed: dict[Key, float] = {}  # by key: its earliest entry

    def arm(self, key: Key) -> None:
        due, armed = self._due(key), self._armed.get(key)
        if due is not None and (armed is None or due < armed):
            self._push(due, key)

    def next(self) -> float | None:
        while self._heap:
            at, key = self._heap[0]
            due = self._due(key)
            if due == at:
                return at
            self._pop()
            self.arm(key)
        return None

    def pop_due(self, now: float) -> Key | None:
        """The first key that is due; to be armed again once it was dealt with."""
        at = self.next()
        return None if at is None or at > now else self._pop()

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Keys that nothing wakes when they are due; for `check`."""
        armed = self._armed
        return [key for key in keys if (due := self._due(key)) is not None and armed.get(key, math.inf) > due]

    def _push(self, due: float, key: Key) -> None:
        self._armed[key] = due
        heapq.heappush(self._heap, (due, key))

    def _pop(self) -> Key:
        at, key = heapq.heappop(self._heap)
        if self._armed.get(key) == at:
            del self._armed[key]
        return key  # type: ignore[no-any-return]
