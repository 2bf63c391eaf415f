"""Exact search for the best placement.

Time never grows with the GPUs of a group, so a box of group sizes is bounded from below by its upper corner. The search
keeps boxes of all groupings in one queue, best bound first, splits them, and ends when none can beat the best plan
found: that is the proof. Two cheaper bounds keep the queue short: the work of a group on so many GPUs, with what must
come before and after it, gives the minimum size it needs to beat the best plan; and groupings whose minimum sizes
together exceed the cluster are never opened.

Among equally fast plans the one with fewer groups is chosen, then fewer GPUs, then file order. No randomness and no
clock: the same job gives the same answer, also when `limit` stops the search early.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from trimtab.core.frozen import Frozen
from trimtab.plan.placement.boxes import ROWS, At, Box, FoundPlan, Indices, SearchGround
from trimtab.plan.placement.simulate import Floats
from trimtab.plan.placement.space import Grouping, PlanSpace

TIE = 1e-9
"""Plans whose times differ by less than this, relatively, are equally fast."""

BEATS = 1 - 1e-11
"""A bound above this share of the best time is not worth opening."""

BATCH = 64
"""Boxes opened at once: enough to keep the simulation vectorised, few enough to stay near best-first order."""

EFFORT = 2_000_000_000
"""(plan, component, batch) triples after which a search stops without a proof: about twenty seconds."""

LEVELS = 48
"""Steps of the time scale on which groupings are first compared."""


class SearchOutcome(Frozen):
    """The best plan, a proven lower bound on every plan, and the number of simulated plans."""

    best: FoundPlan | None
    lower_bound: float
    considered: int

    @property
    def optimal(self) -> bool:
        return self.best is not None and self.lower_bound >= self.best.seconds * (1 - TIE)


def search(
    space: PlanSpace,
    groupings: Iterable[Grouping] | None = None,
    *,
    beat: float = np.inf,
    limit: int = EFFORT,
    settle_ties: bool = True,
) -> SearchOutcome:
    """The best plan among the groupings (default: all of the space), if any is faster than `beat` seconds.

    `limit` is the effort after which the search stops without a proof and returns its bound.
    """
    asked = list(space.groupings() if groupings is None else groupings)
    ground = SearchGround(space, [grouping for grouping in asked if not grouping.spans])
    box_search = _BoxSearch(ground, beat, limit)
    lower_bound = box_search.run()
    best = box_search.best
    if best is not None and settle_ties:
        ceiling = best.seconds * (1 + TIE)
        best = simplest(ground, [box for bound, box in box_search.tied if bound <= ceiling], ceiling, 2 * limit) or best
    considered = ground.considered
    if spanning := [grouping for grouping in asked if grouping.spans]:
        over = SearchGround(space, spanning)
        best = best_spanning(over, min(beat, best.seconds * (1 - TIE) if best else np.inf)) or best
        considered += over.considered
    return SearchOutcome(best, min(lower_bound, best.seconds) if best else lower_bound, considered)


def best_spanning(ground: SearchGround, beat: float) -> FoundPlan | None:
    """The best plan with a group over the others, if any is faster: all splits of the GPUs below it are tried.

    More GPUs never make a plan worse, so the group above gets as many as help it, and the last one below the rest.
    """
    plans: list[At] = []
    for g, grouping in enumerate(ground.groupings):
        *below, last, above = grouping.tables
        for some in itertools.product(*(range(len(table.sizes)) for table in below)):
            left = ground.space.budgets[last.kind] - sum(t.sizes[at] for t, at in zip(below, some, strict=True))
            if left >= last.sizes[0]:
                plans.append((g, (*some, bisect_right(last.sizes, left) - 1, len(above.sizes) - 1)))
    best: FoundPlan | None = None
    for (g, at), seconds in zip(plans, ground.simulate(plans), strict=True):
        if seconds < (best.seconds if best else beat):
            best = ground.settled(g, at, float(seconds)) or best
    return best


class _BoxSearch:
    """One search: the queue of boxes, the best plan so far, and the minimum sizes that it implies."""

    def __init__(self, ground: SearchGround, beat: float, limit: int) -> None:
        self.ground = ground
        self.limit = limit
        self.best: FoundPlan | None = None
        self.tied: list[tuple[float, Box]] = []
        """Boxes that hold nothing better than the best, but maybe plans as fast, with their bounds."""
        self._beat = beat

    @property
    def ceiling(self) -> float:
        """A plan must be faster than this to be better."""
        return min(self._beat, self.best.seconds if self.best else np.inf)

    @property
    def hopeless(self) -> float:
        """A box with a bound above this holds nothing better, and nothing as fast either."""
        return self.best.seconds * (1 + TIE) if self.best and self.best.seconds < self._beat else self.ceiling

    def run(self) -> float:
        """Find the best plan; returns the proven lower bound on every plan."""
        ground = self.ground
        alive = self._survey(list(range(len(ground.groupings))))
        alive = self._survey(alive)
        self._climb()
        queue: list[tuple[float, int, Box]] = []
        numbers = itertools.count()
        boxes = self._raised([ground.whole(g) for g in alive])
        floor = np.inf
        while boxes or queue:
            for box, bound in zip(boxes, ground.corners(boxes), strict=True):
                if bound <= self.hopeless:
                    heapq.heappush(queue, (float(bound), next(numbers), box))
            if ground.effort > self.limit:
                floor = queue[0][0] if queue else np.inf
                break
            opened: list[Box] = []
            while queue and len(opened) < BATCH:
                if queue[0][0] >= self.ceiling * BEATS:
                    self.tied.extend((bound, box) for bound, _, box in queue)
                    queue.clear()
                    break
                opened.append(heapq.heappop(queue)[2])
            self._try([ground.inside(box) for box in opened])
            boxes = self._finish_small(self._raised(self._branch(self._drop_settled(opened))))
        if ground.space.truncated and self.best:
            # Where configurations were left out, only the bound with every group at its largest holds.
            floor = min(floor, float(min(ground.corners([ground.whole(g) for g in alive]), default=np.inf)))
        return min(floor, self.ceiling)

    def _raised(self, boxes: list[Box]) -> list[Box]:
        """The boxes without sizes that are too small, or leave too little for the other groups."""
        least = self.ground.least_sizes(self.hopeless)
        raised = []
        for g, low, high in boxes:
            at_least = tuple(max(a, least[t]) for a, t in zip(low, self.ground.members[g], strict=True))
            box = self.ground.tightened(g, at_least, high)
            if box:
                raised.append(box)
        return raised

    def _survey(self, alive: list[int]) -> list[int]:
        """Compare groupings on a scale of times: drop those that cannot beat the best, simulate the most promising."""
        ground = self.ground
        if not alive:
            return []
        used = sorted({t for g in alive for t in ground.members[g]})
        top = min(self.ceiling, max(float(ground.bounds[t][0]) for t in used))
        bottom = min(top, min(float(ground.bounds[t][-1]) for t in used))
        levels = top * np.geomspace(max(bottom / top, 1e-6), 1.0, LEVELS) if top > 0 else np.zeros(LEVELS)
        count = len(ground.tables)
        index = np.full((count + 1, LEVELS), 0)
        need = np.zeros((count + 1, LEVELS))
        for t in used:
            sizes, bound = ground.tables[t].sizes, ground.bounds[t]
            # Bounds fall with size: the first size whose bound is at most the level.
            index[t] = np.searchsorted(-bound, -levels, side="left")
            need[t] = np.append(np.array(sizes, dtype=float), np.inf)[index[t]]
        width = max(len(ground.members[g]) for g in alive)
        possible = np.ones((len(alive), LEVELS), dtype=bool)
        for kind, budget in ground.space.budgets.items():
            rows = np.full((len(alive), width), count)
            for row, g in enumerate(alive):
                mine = [t for t in ground.members[g] if ground.tables[t].kind == kind]
                rows[row, : len(mine)] = mine
            possible &= need[rows].sum(axis=1) <= budget
        level = np.where(possible.any(axis=1), possible.argmax(axis=1), LEVELS)
        few = max(8, min(ROWS, self.limit // (40 * ground.effort_a_plan)))
        promising = sorted((int(at), row) for row, at in enumerate(level) if at < LEVELS)[:few]
        self._try([(alive[row], tuple(int(index[t, at]) for t in ground.members[alive[row]])) for at, row in promising])
        # A grouping that is impossible one level lower takes longer than that level.
        longer_than = np.append(levels, np.inf)[np.maximum(level - 1, 0)]
        longer_than[level == 0] = 0.0
        return [g for g, least in zip(alive, longer_than, strict=True) if least <= self.hopeless]

    def _climb(self) -> None:
        """Improve the best plan by moving GPUs between its groups, as long as that helps."""
        while self.best is not None:
            before = self.best
            g = next(i for i, grouping in enumerate(self.ground.groupings) if grouping is before.grouping)
            tables = before.grouping.tables
            at = [table.sizes.index(size) for table, size in zip(tables, before.sizes, strict=True)]
            moves: list[Indices] = []
            # Unused GPUs, where there is a single kind.
            budgets = self.ground.space.budgets
            idle = sum(budgets.values()) - sum(before.sizes) if len(budgets) == 1 else 0
            for donor, receiver in itertools.permutations(range(len(at)), 2):
                if tables[donor].kind != tables[receiver].kind:
                    continue
                for step in (1, 2, 4, 8, 16, 32, 64, 128):
                    to = list(at)
                    to[donor] -= step
                    if to[donor] < 0:
                        break
                    freed = before.sizes[donor] - tables[donor].sizes[to[donor]]
                    available = before.sizes[receiver] + freed + idle
                    to[receiver] = bisect_right(tables[receiver].sizes, available) - 1
                    moves.append(tuple(to))
            self._try([(g, move) for move in dict.fromkeys(moves)])
            if self.best is before:
                return

    def _drop_settled(self, boxes: list[Box]) -> list[Box]:
        """Drop boxes whose corner is itself a plan: it is the best of the box, and was tried."""
        if self.ground.space.even_nodes:
            return boxes
        left = []
        for box, bound in zip(boxes, self.ground.corners(boxes), strict=True):
            if not self.ground.affordable(box[0], box[2]):
                left.append(box)
            elif bound <= self.hopeless:
                self.tied.append((float(bound), box))
        return left

    def _branch(self, boxes: list[Box]) -> list[Box]:
        """Smaller boxes that contain every plan that can still beat the best.

        The lower half of each side is bounded first. All sides whose lower half is hopeless are cut at once; if there
        is none, the box is split across the side with the worst lower half.
        """
        smaller: list[Box] = []
        for box, sides in zip(boxes, self.ground.lower_halves(boxes), strict=True):
            cut = [j for bound, j in sides if bound > self.hopeless]
            for j in cut:
                box, _ = self.ground.halved(box, j)
            if cut:
                smaller.append(box)
            elif sides:
                smaller.extend(self.ground.halved(box, max(sides)[1]))
        return smaller

    def _finish_small(self, boxes: list[Box]) -> list[Box]:
        """Simulate every relevant plan of small boxes; returns the other boxes."""
        large: list[Box] = []
        plans: list[At] = []
        small: list[tuple[Box, slice]] = []
        for box in boxes:
            inside = self.ground.points(*box)
            if inside is None:
                large.append(box)
            elif inside:
                small.append((box, slice(len(plans), len(plans) + len(inside))))
                plans.extend((box[0], at) for at in inside)
        seconds = self._try(plans)
        for box, mine in small:
            least = float(seconds[mine].min())
            if least <= self.hopeless:
                self.tied.append((least, box))
        return large

    def _try(self, plans: Sequence[At]) -> Floats:
        """Simulate plans and keep the best; their seconds (bounds where configurations are contested)."""
        results = self.ground.simulate(plans)
        for index in np.flatnonzero(results < self.ceiling).tolist():
            if results[index] < self.ceiling:
                g, at = plans[index]
                found = self.ground.settled(g, at, float(results[index]))
                if found is not None and found.seconds < self.ceiling:
                    self.best = found
        return results


# ---- ties ------------------------------------------------------------------------------------------------------------


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
            results = ground.simulate([(g, (*high[:j], middles[j], *high[j + 1 :])) for j in sides])
            for j, seconds in zip(sides, results, strict=True):
                if seconds <= ceiling:
                    highs[j] = middles[j]
                else:
                    lows[j] = middles[j] + 1
        smaller = ground.tightened(g, tuple(lows), high)
        if smaller is None or smaller == box:
            return smaller
        box = smaller
