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
from typing import Any

from trimtab.core.errors import InputError
from trimtab.replay.common.keys import check_keys

P99 = 2.3263478740408408  # standard deviations at the 99th percentile
FORMS = "a number of seconds, {median: 1, p99: 4} or {values: [1, 2, 3]}"


@dataclass(frozen=True)
class Distribution:
    """Seconds, or any non-negative amount."""

    median: float = 0.0
    sigma: float = 0.0  # of the logarithm
    values: tuple[float, ...] = ()  # measured values; if given, nothing else counts

    @classmethod
    def of(cls, value: Any, where: str) -> Distribution:
        """Parses the scenario form: see FORMS."""
        if isinstance(value, Mapping):
            return cls._of_mapping(value, where)
        return cls(_amount(value, where))

    @classmethod
    def _of_mapping(cls, value: Mapping[Any, Any], where: str) -> Distribution:
        check_keys(value, ("median", "p99", "values"), where)
        if "values" in value:
            if len(value) > 1 or not isinstance(value["values"], list) or not value["values"]:
                raise InputError("values must be a non-empty list, with no other key beside it", where=where)
            return cls(values=tuple(_amount(value, where) for value in value["values"]))
        if "median" not in value:
            raise InputError("median is missing", where=where, hint=FORMS)
        median = _amount(value["median"], where)
        p99 = _amount(value.get("p99", median), where)
        if p99 < median or (median == 0 and p99 > 0):
            raise InputError(f"p99 is {p99:g}, and the median {median:g}", where=where, hint="0 < median <= p99")
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


@dataclass(frozen=True)
class PoolTimes:
    """Durations of pool operations. Bind and start times are from our own benchmarks; a task's state is assumed to be
    20 GB, written and read at about 2 GB/s.
    """

    bind_s: Distribution = Distribution(0.006, math.log(5) / P99)  # create or remove a placement group
    start_s: Distribution = Distribution(1.0, math.log(4) / P99)  # start a process, until the task is constructed
    # from the stop request, or the end of its work, until the process has exited
    stop_s: Distribution = Distribution(0.1, math.log(20) / P99)
    save_s: Distribution = Distribution(10.0, math.log(3) / P99)  # save its state before it is evicted
    load_s: Distribution = Distribution(10.0, math.log(3) / P99)  # load its state when it restarts

    @classmethod
    def of(cls, value: Mapping[str, Any], where: str) -> PoolTimes:
        """Parses the scenario's `times`; missing keys keep the defaults above."""
        known = [field.name for field in fields(cls)]
        check_keys(value, known, where)
        return cls(**{key: Distribution.of(value, f"{where}.{key}") for key, value in value.items()})

    def text(self) -> list[str]:
        return [f"{field.name}: {getattr(self, field.name).text()}" for field in fields(self)]


MEASURED = PoolTimes()


def _amount(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InputError(f"{value!r} is not a number of 0 or more", where=where, hint=FORMS)
    return float(value)
