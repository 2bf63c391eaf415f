"""Good schedules and bounds where device vectors are too many to enumerate: a price for each class.

With prices, the cheapest path is found without counting devices. If even that one costs more than all devices together,
no schedule exists: a proof. If it uses no more of any class than there are, it is a schedule. Prices rise for overused
classes until one of the two happens or the rounds are over; then nothing is claimed.
"""

from __future__ import annotations

import numpy as np

from trimtab.model.pipeline import Objective
from trimtab.plan.partition.paths import PathFinder, Pieces, price
from trimtab.plan.partition.reach import candidates
from trimtab.plan.partition.space import TIE, UNLIMITED, PartitionSpace

ROUNDS = 60
EAGER = 0.5
"""Growth rate of the price of a class with its relative overuse."""


def by_prices(space: PartitionSpace, objective: Objective) -> tuple[Pieces | None, float]:
    """A schedule, if one is found, and a lower bound of the objective."""
    if objective == "latency":
        found, bound = _cheapest(space, UNLIMITED)
        return (found if found is not None else _settled(space, UNLIMITED)[0]), bound
    values = candidates(space)
    seen: dict[int, tuple[Pieces | None, bool]] = {}

    def settled(at: int) -> tuple[Pieces | None, bool]:
        if at not in seen:
            seen[at] = _settled(space, float(values[at]))
        return seen[at]

    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if settled(middle)[0] is not None else (middle + 1, high)
    good = high
    low, high = 0, good
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if settled(middle)[1] else (low, middle)
    if good == len(values):
        return None, float(values[low]) if low < len(values) else np.inf
    pieces = settled(good)[0]
    faster, _ = _cheapest(space, float(values[good]) * (1 + TIE))
    return (faster if faster is not None else pieces), float(values[low])


def _cheapest(space: PartitionSpace, bottleneck: float) -> tuple[Pieces | None, float]:
    """A schedule of low latency under a bottleneck, if one is found, and a lower bound of the latency."""
    paths = PathFinder(space, bottleneck)
    free = paths.priced(np.zeros(space.classes))
    if not np.isfinite(free.whole):
        return None, np.inf
    _, bound, known = price(paths, free)
    return (known[1] if known is not None else None), bound


def _settled(space: PartitionSpace, bottleneck: float) -> tuple[Pieces | None, bool]:
    """A schedule under a bottleneck, or whether it is proven that there is none."""
    paths = PathFinder(space, bottleneck)
    for costs in (paths.by_end, paths.by_begin, paths.cut, paths.enter, paths.leave):
        costs[np.isfinite(costs)] = 0.0
    limits = np.array([*space.counts, space.max_devices], dtype=np.float64)
    prices = 1.0 / limits
    for _ in range(ROUNDS):
        now = paths.priced(prices[:-1] + prices[-1])
        if not now.whole <= float(prices @ limits) * (1 + TIE):
            return None, True
        used = np.append(now.used, now.used.sum())
        if (used <= limits).all():
            return now.pieces, False
        prices = prices * np.exp(EAGER * (used - limits) / limits)
        prices /= float(prices @ limits)
    return None, False
