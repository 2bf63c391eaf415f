"""Virtual time: the clock, durations as distributions, node churn at stated times or at random.

Events at the same time occur in the order in which they were put, so a run depends on its inputs alone. Time never goes
back: an event put for the past occurs now. A distribution is given as a number, as a median with a 99th percentile
(lognormal), or as measured values (drawn uniformly); every run states what it drew from. Random numbers come from the
caller: the same source gives the same times. Random churn is drawn before a run begins, so that every policy meets the
same failures: a node's time to failure is exponential, a repair takes its time, and the node comes back empty.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Discriminator, Field, Tag

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.sections import Amount, Made, Section, Share, Within

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
        self.now = max(self.now, at)


P99 = 2.3263478740408408  # standard deviations at the 99th percentile


class Distribution(Frozen):
    """Seconds, or any non-negative amount."""

    median: float = 0.0
    sigma: float = 0.0  # of the logarithm
    values: tuple[float, ...] = ()  # measured values; if given, nothing else counts

    @classmethod
    def lognormal(cls, median: float, p99: float | None = None) -> Distribution:
        """A median with a 99th percentile."""
        p99 = median if p99 is None else p99
        if p99 < median or (median == 0 and p99 > 0):
            raise InputError(f"p99 is {p99:g}, and the median {median:g}", hint="0 < median <= p99")
        return cls(median, math.log(p99 / median) / P99 if median else 0.0)

    def draw(self, source: random.Random) -> float:
        if self.values:
            return self.values[int(source.random() * len(self.values))]
        if not self.sigma:
            return self.median
        return self.median * math.exp(self.sigma * source.gauss(0.0, 1.0))

    def text(self, unit: str = " s") -> str:
        if self.values:
            ordered = sorted(self.values)
            return f"{len(ordered)} measured values, median {ordered[len(ordered) // 2]:g}{unit}"
        if not self.sigma:
            return f"{self.median:g}{unit}"
        p99 = self.median * math.exp(P99 * self.sigma)
        return f"median {self.median:,g}{unit}, p99 {format(p99, ',.0f' if p99 >= 1000 else '.3g')}{unit}"


class MedianSection(Section):
    """A lognormal distribution."""

    median: Amount
    p99: Amount | None = None  # None: constant


class ValuesSection(Section):
    """Measured values, drawn uniformly."""

    values: Annotated[tuple[Amount, ...], Field(min_length=1)]


def _form(value: Any) -> str:
    return "<number>" if not isinstance(value, Mapping) else "<values>" if "values" in value else "<median>"


def _distribution(stated: float | MedianSection | ValuesSection) -> Distribution:
    if isinstance(stated, MedianSection):
        return Distribution.lognormal(stated.median, stated.p99)
    return Distribution(values=stated.values) if isinstance(stated, ValuesSection) else Distribution(stated)


Durations = Annotated[
    Distribution,
    Made(
        Annotated[
            Annotated[Amount, Tag("<number>")]
            | Annotated[MedianSection, Tag("<median>")]
            | Annotated[ValuesSection, Tag("<values>")],
            Discriminator(_form),
        ],
        _distribution,
    ),
]
"""In a scenario: 3, {median: 1, p99: 4} or {values: [1, 2, 3]}."""


class PoolTimes(Frozen):
    """Durations of pool operations. Bind and start times are from our own benchmarks; a task's state is assumed to be
    20 GB, written and read at about 2 GB/s.
    """

    bind_s: Durations = Distribution(0.006, math.log(5) / P99)  # create or remove a placement group
    start_s: Durations = Distribution(1.0, math.log(4) / P99)  # start a process, until the task is constructed
    # from the stop request, or the end of its work, until the process has exited
    stop_s: Durations = Distribution(0.1, math.log(20) / P99)
    save_s: Durations = Distribution(10.0, math.log(3) / P99)  # save its state before it is evicted
    load_s: Durations = Distribution(10.0, math.log(3) / P99)  # load its state when it restarts

    def text(self) -> list[str]:
        return [f"{field.name}: {getattr(self, field.name).text()}" for field in fields(self)]


MEASURED = PoolTimes()


AN_HOUR = Distribution(3600.0)
NodeEventKind = Literal["lost", "joined", "draining"]


class ChurnEvent(Frozen):
    """A change of a node's state. A draining node is lost `notice_s` later."""

    at_s: float
    node: str
    what: NodeEventKind
    notice_s: float = 0.0


class Churn(Frozen):
    """Random failures."""

    days_between: Annotated[float, Within(0.001, 1e12)]  # mean time between failures of a node
    repair_s: Durations = AN_HOUR
    drained: Share = 0.0  # share of failures announced by a drain
    notice_s: Amount = 120.0

    def events(self, nodes: list[str], until_s: float, seed: int) -> list[ChurnEvent]:
        """Events in order of time."""
        found = []
        for node in nodes:
            source = random.Random(f"churn {seed} {node}")
            at = 0.0
            while True:
                at += source.expovariate(1.0 / (self.days_between * 86_400.0))
                if at >= until_s:
                    break
                announced = source.random() < self.drained
                found.append(ChurnEvent(at, node, "draining" if announced else "lost", self.notice_s * announced))
                at += (self.notice_s if announced else 0.0) + self.repair_s.draw(source)
                found.append(ChurnEvent(at, node, "joined"))
        return sorted(found, key=lambda event: (event.at_s, event.node))

    def text(self) -> str:
        text = f"each node fails every {self.days_between:g} days on average and is back after {self.repair_s.text()}"
        return text + (f"; {self.drained:.0%} announced {self.notice_s:g} s ahead" if self.drained else "")
