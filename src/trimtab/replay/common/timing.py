"""How long things take in reality, as distributions: what start-up, binding, stopping, saving and loading last.

A distribution is said as one number, as a median with a 99th percentile (lognormal), or as values that were measured
(drawn with equal chance). Every run states what it drew from. Nothing here is random by itself: a source of random
numbers is handed in, and the same source gives the same times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trimtab.core.errors import InputError, nearest

P99 = 2.3263478740408408  # standard deviations at the 99th percentile
FORMS = "a number of seconds, {median: 1, p99: 4} or {values: [1, 2, 3]}"


@dataclass(frozen=True)
class Distribution:
    """Seconds, or any amount that is not negative."""

    median: float = 0.0
    sigma: float = 0.0  # of the logarithm
    values: tuple[float, ...] = ()  # where they were measured; then nothing else counts

    @classmethod
    def of(cls, said: Any, where: str) -> Distribution:
        """As a scenario says it."""
        if isinstance(said, Mapping):
            return cls._of_mapping(said, where)
        return cls(_amount(said, where))

    @classmethod
    def _of_mapping(cls, said: Mapping[Any, Any], where: str) -> Distribution:
        for key in said:
            if key not in ("median", "p99", "values"):
                near = nearest(str(key), ("median", "p99", "values"))
                raise InputError(
                    f"{key} is not known here", where=where, hint=f"did you mean {near}?" if near else FORMS
                )
        if "values" in said:
            if len(said) > 1 or not isinstance(said["values"], list) or not said["values"]:
                raise InputError("values is a list with at least one number, and stands alone", where=where)
            return cls(values=tuple(_amount(one, where) for one in said["values"]))
        if "median" not in said:
            raise InputError("a median is missing", where=where, hint=FORMS)
        median = _amount(said["median"], where)
        p99 = _amount(said.get("p99", median), where)
        if p99 < median or (median == 0 and p99 > 0):
            raise InputError(f"p99 is {p99:g}, and the median {median:g}", where=where, hint="0 < median <= p99")
        return cls(median, math.log(p99 / median) / P99 if median else 0.0)

    def draw(self, source: random.Random) -> float:
        """One amount."""
        if self.values:
            return self.values[int(source.random() * len(self.values))]
        if not self.sigma:
            return self.median
        return self.median * math.exp(self.sigma * source.gauss(0.0, 1.0))

    def text(self, unit: str = " s") -> str:
        """As a report states it."""
        if self.values:
            ordered = sorted(self.values)
            return f"{len(ordered)} measured values, median {ordered[len(ordered) // 2]:g}{unit}"
        if not self.sigma:
            return f"{self.median:g}{unit}"
        return f"median {self.median:g}{unit}, p99 {self.median * math.exp(P99 * self.sigma):.3g}{unit}"


@dataclass(frozen=True)
class PoolTimes:
    """What the deeds of a pool take. Binding and starting as our own benches measure them; the state of a task is
    assumed to be 20 GB, written and read at about 2 GB/s."""

    bind_s: Distribution = Distribution(0.006, math.log(5) / P99)  # a placement group is made or removed
    start_s: Distribution = Distribution(1.0, math.log(4) / P99)  # a process, until the task is constructed
    stop_s: Distribution = Distribution(0.1, math.log(20) / P99)  # told, or at its end, until the process is gone
    save_s: Distribution = Distribution(10.0, math.log(3) / P99)  # its state, before it leaves
    load_s: Distribution = Distribution(10.0, math.log(3) / P99)  # its state, when it returns

    @classmethod
    def of(cls, said: Mapping[str, Any], where: str) -> PoolTimes:
        """As a scenario says it; what it leaves out is as measured or assumed above."""
        known = [one.name for one in fields(cls)]
        for key in said:
            if key not in known:
                near = nearest(str(key), known)
                hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
                raise InputError(f"{key} is not known here", where=where, hint=hint)
        return cls(**{key: Distribution.of(value, f"{where}.{key}") for key, value in said.items()})

    def text(self) -> list[str]:
        """A line for each."""
        return [f"{one.name}: {getattr(self, one.name).text()}" for one in fields(self)]


MEASURED = PoolTimes()


def _amount(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InputError(f"{value!r} is no amount of 0 or more", where=where, hint=FORMS)
    return float(value)
