"""Breaks ties between equally fast plans: fewest groups, then fewest GPUs, then file order.

The search passes the boxes that may hold such plans; all others are slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from trimtab.plan.placement.boxes import Box, FoundPlan, Indices, SearchGround


def simplest(ground: SearchGround, tied: Iterable[Box], ceiling: float, limit: int) -> FoundPlan | None:
    """The simplest plan within a time; None where the boxes hold none, or the effort is spent."""
    winner: FoundPlan | None = None
    for groups, g, low, high in sorted((len(low), g, low, high) for g, low, high in tied):
        if winner is not None and groups > len(winner.sizes):
            break
        found = _fewest_gpus(ground, (g, low, high), ceiling, sum(winner.sizes) - 1 if winner else None, limit)
        winner = found or winner
    return winner


def _fewest_gpus(ground: SearchGround, box: Box, ceiling: float, most: int | None, limit: int) -> FoundPlan | None:
    """The plan of a box with the fewest GPUs (at most `most`) within a time."""
    queue: list[tuple[int, Box]] = [(ground.gpus(box[0], box[1]), box)]
    while queue and ground.effort < limit:
        gpus, (g, low, high) = heapq.heappop(queue)
        if most is not None and gpus > most:
            return None
        shaved = _shaved(ground, (g, low, high), ceiling)
        if shaved is None:
            continue
        if shaved[1] != low:
            heapq.heappush(queue, (ground.gpus(g, shaved[1]), shaved))
            continue
        (seconds,) = ground.simulate([(g, low)])
        if seconds <= ceiling:
            found = ground.settled(g, low, float(seconds))
            if found is not None and found.seconds <= ceiling:
                return found
        widths = [b - a for a, b in zip(shaved[1], shaved[2], strict=True)]
        if not any(widths):
            continue
        for half in ground.halved(shaved, max(range(len(widths)), key=widths.__getitem__)):
            tight = ground.tightened(*half)
            if tight:
                heapq.heappush(queue, (ground.gpus(g, tight[1]), tight))
    return None


def _shaved(ground: SearchGround, box: Box, ceiling: float) -> Box | None:
    """The box with each group's minimum size raised to what it needs when the others have their maximum."""
    while True:
        g, low, high = box
        (corner,) = ground.corners([box])
        if corner > ceiling:
            return None
        lows, highs = list(low), list(high)
        while sides := [j for j in range(len(low)) if lows[j] < highs[j]]:
            middles = {j: (lows[j] + highs[j]) // 2 for j in sides}
            results = ground.simulate([(g, _with(high, j, middles[j])) for j in sides])
            for j, seconds in zip(sides, results, strict=True):
                if seconds <= ceiling:
                    highs[j] = middles[j]
                else:
                    lows[j] = middles[j] + 1
        smaller = ground.tightened(g, tuple(lows), high)
        if smaller is None or smaller == box:
            return smaller
        box = smaller


def _with(at: Indices, side: int, index: int) -> Indices:
    return (*at[:side], index, *at[side + 1 :])
