"""Heuristic schedules where the exact search is too large: by orders of hosts, and by prices of classes.

Orders: for a fixed order of hosts, any of which may be skipped, the best schedule is found exactly by dynamic
programming. The order is improved by exchanges until none helps or the effort is spent. The result is a schedule, never
a proof; its bound is `lower_bound`, which lets every stage use the best host and link.

Prices: with a price for each class, the cheapest path is found without counting devices. If even that one costs more
than all devices together, no schedule exists: a proof. If it uses no more of any class than there are, it is a
schedule. Prices rise for overused classes until one of the two happens or the rounds are over; then nothing is claimed.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np

from trimtab.model.pipeline import Host, Objective, PipelineJob
from trimtab.plan.partition.paths import PathFinder, Pieces, price
from trimtab.plan.partition.space import TIE, UNLIMITED, Floats, PartitionSpace, candidates, first_true

EFFORT = 1.5e9
"""Steps after which the order is kept: about five seconds."""

ONE_HOST = 20_000
"""Overhead of one host in steps."""

MIN_ORDERS = 40

PlacedStages = tuple[tuple[int, int, int], ...]
"""For each stage its first cut, its last cut and the number of its class (here: of its host)."""

Score = tuple[float, float, int]


def lower_bound(space: PartitionSpace, objective: Objective) -> float:
    """A bound on every schedule: unlimited hosts of each class, and at least an equal share of the work."""
    if objective == "latency":
        return PathFinder(space, UNLIMITED).priced(np.zeros(space.classes)).whole
    values, endless = candidates(space), np.zeros(space.classes)
    least = first_true(len(values), lambda at: PathFinder(space, values[at]).priced(endless).whole < np.inf)
    steps = np.arange(space.layers)
    work = float(space.seconds[:, steps, steps + 1].min(axis=0).sum())
    return max(float(values[least]) if least < len(values) else np.inf, work / space.max_devices)


def improve(space: PartitionSpace, order: list[int], objective: Objective) -> tuple[PlacedStages, Score] | None:
    """A good schedule of hosts that are each a class of their own, starting from an order of them."""
    best = best_in_order(space, order, objective)
    steps_per_order = 2 * len(order) * (ONE_HOST + space.layers**2 + space.layers * len(order))
    left = max(MIN_ORDERS, int(EFFORT / steps_per_order))
    better = True
    while better and left > 0:
        better = False
        for i in range(len(order)):
            for j in range(i + 1, len(order)):
                if left <= 0:
                    break
                exchanged, moved = list(order), list(order)
                exchanged[i], exchanged[j] = exchanged[j], exchanged[i]
                moved.insert(i, moved.pop(j))
                for tried in (exchanged, moved):
                    left -= 1
                    found = best_in_order(space, tried, objective)
                    if found is not None and (best is None or _better(found[1], best[1])):
                        best, order, better = found, tried, True
                        break
    return best


def _better(a: Score, b: Score) -> bool:
    for x, y in zip(a, b, strict=True):
        if abs(x - y) > TIE * max(abs(x), abs(y)):
            return x < y
    return False


def best_in_order(space: PartitionSpace, order: list[int], objective: Objective) -> tuple[PlacedStages, Score] | None:
    """The best schedule with hosts in this order, and its score: first the objective, then the rest."""
    if objective == "latency":
        found = _fold(space, order, UNLIMITED, add=True)
    else:
        first = _fold(space, order, UNLIMITED, add=False)
        if first is None:
            return None
        found = _fold(space, order, max(_times(space, first)) * (1 + TIE), add=True)
    if found is None:
        return None
    times = _times(space, found)
    score = (sum(times), float(len(found)), 0) if objective == "latency" else (max(times), sum(times), len(found))
    return found, score


def _fold(space: PartitionSpace, order: list[int], bottleneck: float, *, add: bool) -> PlacedStages | None:
    """Dynamic programming over cuts for hosts in order; costs are added, or the maximum counts."""
    layers, size = space.layers, len(order)
    stages = space.max_devices

    def within(values: Floats) -> Floats:
        return np.where(values <= bottleneck, values, np.inf)

    # cost[k][j]: layers up to cut j are placed and host k of the order holds the last of them.
    cost = np.full((size, layers + 1), np.inf)
    came = np.full((size, layers + 1, 2), -1, dtype=np.int64)
    used = np.zeros((size, layers + 1), dtype=np.int64)
    for k, t in enumerate(order):
        before = np.full(layers + 1, np.inf)
        origin = np.full(layers + 1, -1, dtype=np.int64)
        before[0] = within(space.enter[t : t + 1])[0]
        if k:
            over = within(space.cut[:, order[:k], t].T)
            reach = cost[:k] + over if add else np.maximum(cost[:k], over)
            # A path that has used all devices allowed ends here.
            reach = np.where(used[:k] < stages, reach, np.inf)
            origin[1:] = reach[:, 1:].argmin(axis=0)
            before[1:] = reach[:, 1:].min(axis=0)
        own = within(np.where(space.fits[t], space.seconds[t], np.inf))
        total = before[:, None] + own if add else np.maximum(before[:, None], own)
        begin = total.argmin(axis=0)
        cost[k] = total.min(axis=0)
        came[k, :, 0], came[k, :, 1] = begin, np.where(begin > 0, origin[begin], -1)
        used[k] = 1 + np.where(came[k, :, 1] >= 0, used[came[k, :, 1], begin], 0)
    leave = within(space.leave[order])
    final = cost[:, layers] + leave if add else np.maximum(cost[:, layers], leave)
    k, b = int(final.argmin()), layers
    if not np.isfinite(final[k]):
        return None
    out = []
    while k >= 0:
        a, previous = (int(value) for value in came[k, b])
        out.append((a, b, order[k]))
        k, b = previous, a
    return tuple(reversed(out))


def _times(space: PartitionSpace, placed: PlacedStages) -> list[float]:
    out = [float(space.enter[placed[0][2]]), float(space.leave[placed[-1][2]])]
    out += [float(space.seconds[t, a, b]) for a, b, t in placed]
    out += [float(space.cut[b, t, after[2]]) for (_, b, t), after in pairwise(placed)]
    return out


def first_order(job: PipelineJob, hosts: list[Host]) -> list[int]:
    """Initial order: hosts of one type together, faster types first, so that few links cross types."""
    kinds = {kind.name: kind for kind in job.types}
    return sorted(range(len(hosts)), key=lambda i: (sum(kinds[hosts[i].type].time_s), hosts[i].type, i))


# ---- prices ----------------------------------------------------------------------------------------------------------


ROUNDS = 60
EAGER = 0.5
"""Growth rate of the price of a class with its relative overuse."""


def by_prices(space: PartitionSpace, objective: Objective) -> tuple[Pieces | None, float]:
    """A schedule, if one is found, and a lower bound of the objective."""
    if objective == "latency":
        found, bound = _cheapest(space, UNLIMITED)
        return (found if found is not None else _settled(space, UNLIMITED)[0]), bound
    values = candidates(space)

    @cache
    def settled(at: int) -> tuple[Pieces | None, bool]:
        return _settled(space, float(values[at]))

    good = first_true(len(values), lambda at: settled(at)[0] is not None)
    low = first_true(good, lambda at: not settled(at)[1])
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
