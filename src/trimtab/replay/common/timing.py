"""Durations as distributions: start, bind, stop, save and load times of the simulated cluster.

A distribution is given as a number, as a median with a 99th percentile (lognormal), or as measured values (drawn
uniformly). Every run states what it drew from. Random numbers come from the caller: the same source gives the same
times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from trimtab.core.errors import InputError
from trimtab.formats.sections import Amount, Made, Section

P99 = 2.3263478740408408  # standard deviations at the 99th percentile


@dataclass(frozen=True)
class Distribution:
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
        return f"median {self.median:g}{unit}, p99 {self.median * math.exp(P99 * self.sigma):.3g}{unit}"


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


@dataclass(frozen=True)
class PoolTimes:
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
