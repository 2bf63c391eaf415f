"""The exact search for the best placement.

Time never grows with a group's GPUs, so a box of group sizes is bounded from below by its upper corner. The search
keeps boxes of every grouping in one queue, takes the most promising first, splits them, and ends when none can beat
the best plan found: that is the proof. Two cheaper bounds keep the queue short: the work of a group on so many GPUs,
with what must come before and after it, tells the least size it needs to beat the best plan; and groupings whose
least sizes together exceed the cluster are never opened.

Among equally fast plans the one with fewer groups is chosen, then fewer GPUs, then file order. Nothing here is random
and nothing looks at a clock: the same job gives the same answer, also when `limit` stops the search early.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.plan.cost import Option
from trimtab.plan.simulate import Floats, Shapes
from trimtab.plan.space import Grouping, GroupTable, Space

TIE = 1e-9
"""Plans whose times differ by less than this, relatively, are equally fast."""

BEATS = 1 - 1e-11
"""A bound above this share of the best time is not worth opening."""

BATCH = 64
"""Boxes opened at once: enough to keep the simulation vectorised, few enough to stay near best-first order."""

SMALL = 96
"""A box of so many plans is simulated whole instead of being split further."""

ROWS = 512
CELLS = 500_000
"""Plans simulated in one call, and (plan, batch) pairs: bounds the memory."""

EFFORT = 2_000_000_000
"""(plan, component, batch) triples after which a search gives up the proof: some twenty seconds."""

LEVELS = 48
"""Steps of the scale on which groupings are first compared."""

Indices = tuple[int, ...]
Box = tuple[int, Indices, Indices]
"""A grouping, and for each of its groups the least and the most index into the sizes of its table."""


@dataclass(frozen=True)
class Found:
    """A plan as the search knows it: sizes and configurations of the groups of a grouping."""

    grouping: Grouping
    sizes: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The best plan, a proven lower bound on every plan, and how many were simulated."""

    best: Found | None
    lower_bound: float
    considered: int

    @property
    def optimal(self) -> bool:
        """Whether nothing can be better."""
        return self.best is not None and self.lower_bound >= self.best.seconds * (1 - TIE)


def search(
    space: Space,
    groupings: Iterable[Grouping] | None = None,
    *,
    beat: float = np.inf,
    limit: int = EFFORT,
    settle_ties: bool = True,
) -> Outcome:
    """The best plan among the groupings (all of the space unless given), if any is faster than `beat` seconds.

    `limit` is the effort after which the search gives up the proof and says how far it got.
    """
    hunt = _Hunt(space, list(space.groupings() if groupings is None else groupings), beat, limit)
    lower_bound = hunt.run()
    best = hunt.best
    if best is not None and settle_ties:
        best = hunt.simplest(best)
    return Outcome(best, min(lower_bound, best.seconds) if best else lower_bound, hunt.considered)


class _Hunt:
    """One search: the queue of boxes, the best plan so far, and the least sizes that it implies.

    Sizes of a group are handled as indices into its table. A box is (bound, number, grouping, low, high).
    """

    def __init__(self, space: Space, groupings: list[Grouping], beat: float, limit: int) -> None:
        self.space = space
        self.groupings = groupings
        self.limit = limit
        self.considered = 0
        units = space.simulator.units
        self._effort = 0
        self._effort_a_plan = units * len(space.order) + 2_000  # the second part is what a plan costs at the least
        self._rows = max(1, min(ROWS, CELLS // units))
        self.best: Found | None = None
        self._beat = beat
        # Boxes with nothing better than the best, in which there may be plans as fast: (bound, box).
        self._tied: list[tuple[float, Box]] = []
        self._tables = list({id(table): table for g in groupings for table in g.tables}.values())
        number = {id(table): index for index, table in enumerate(self._tables)}
        self._members = [[number[id(table)] for table in g.tables] for g in groupings]
        self._kinds = [[table.kind for table in g.tables] for g in groupings]
        self._head, self._tail = space.simulator.heads_and_tails(space.fastest)
        self._bounds = [self._least_seconds(table) for table in self._tables]
        self._base = space.cpu_row
        self._shapes: Shapes | None = None
        self._row_of: dict[int, int] = {}
        self._check_nodes = space.rules is not None and space.rules.whole_nodes

    @property
    def ceiling(self) -> float:
        """What a plan must stay below to be better than what is known."""
        return min(self._beat, self.best.seconds if self.best else np.inf)

    @property
    def hopeless(self) -> float:
        """The bound from which on a box holds nothing better, and nothing as fast either."""
        return self.best.seconds * (1 + TIE) if self.best and self.best.seconds < self._beat else self.ceiling

    # -- bounds -------------------------------------------------------------------------------------------------

    def _least_seconds(self, table: GroupTable) -> Floats:
        """For each size, a lower bound on any plan that has such a group of that size."""
        workflow = self.space.job.workflow
        head, tail = self._head, self._tail
        sync = 0.0
        if workflow.staleness:
            head, tail = np.zeros_like(head), np.zeros_like(tail)
        elif workflow.weight_sync is not None:
            sync = min(workflow.weight_sync.shared_seconds, workflow.weight_sync.separate_seconds)
        switch = self.space.shape(Grouping((table,))).switch
        bound = np.zeros(len(table.sizes))
        for first, a in enumerate(table.members):
            spent = np.zeros(len(table.sizes))
            for last, b in enumerate(table.members[first:], first):
                # Around the clock every switch counts; within one iteration the first may hide behind its inputs.
                spent = spent + table.times[:, last] + (switch[b] if last > first or workflow.staleness else 0.0)
                bound = np.maximum(bound, head[a] + spent + tail[b])
        return bound + sync

    def _least_sizes(self, ceiling: float) -> list[int]:
        """For each table the index of the least size that may stay within the ceiling (its length where none does)."""
        return [int(np.count_nonzero(bound > ceiling)) for bound in self._bounds]

    # -- the search ---------------------------------------------------------------------------------------------

    def run(self) -> float:
        """Find the best plan; the proven lower bound on every plan."""
        alive = self._survey(list(range(len(self.groupings))))
        alive = self._survey(alive)
        self._climb()
        queue: list[tuple[float, int, int, Indices, Indices]] = []
        numbers = itertools.count()
        least = self._least_sizes(self.hopeless)
        boxes: list[Box] = []
        for g in alive:
            tables = [self._tables[t] for t in self._members[g]]
            box = self._tighten(g, tuple(least[t] for t in self._members[g]), tuple(len(t.sizes) - 1 for t in tables))
            if box:
                boxes.append((g, *box))
        floor = np.inf
        while boxes or queue:
            for (g, low, high), bound in zip(boxes, self._corners(boxes), strict=True):
                if bound <= self.hopeless:
                    heapq.heappush(queue, (bound, next(numbers), g, low, high))
            boxes = []
            if self._effort > self.limit:
                floor = queue[0][0] if queue else np.inf
                break
            before = self.ceiling
            opened: list[Box] = []
            while queue and len(opened) < BATCH:
                if queue[0][0] >= self.ceiling * BEATS:
                    self._tied.extend((bound, (g, low, high)) for bound, _, g, low, high in queue)
                    queue.clear()
                    break
                _, _, g, low, high = heapq.heappop(queue)
                opened.append((g, low, high))
            self._try_inside(opened)
            if self.ceiling < before:
                least = self._least_sizes(self.hopeless)
            opened = self._drop_settled(opened)
            for g, low, high in self._branch(opened):
                raised = tuple(max(a, least[t]) for a, t in zip(low, self._members[g], strict=True))
                box = self._tighten(g, raised, high)
                if box:
                    boxes.append((g, *box))
            boxes = self._finish_small(boxes)
        if self.space.truncated and self.best:
            return min(floor, self._relaxed_floor(alive))
        return min(floor, self.ceiling)

    def _relaxed_floor(self, alive: list[int]) -> float:
        """A bound that holds even where configurations were left out: every group at its largest."""
        boxes = [(g, *self._whole(g)) for g in alive]
        return float(min(self._corners(boxes), default=np.inf))

    def _whole(self, g: int) -> tuple[Indices, Indices]:
        sizes = [len(self._tables[t].sizes) - 1 for t in self._members[g]]
        return tuple(0 for _ in sizes), tuple(sizes)

    def _survey(self, alive: list[int]) -> list[int]:
        """Compare groupings on a scale of times: drop those that cannot beat the best, simulate the most promising."""
        if not alive:
            return []
        used = sorted({t for g in alive for t in self._members[g]})
        top = min(self.ceiling, max(float(self._bounds[t][0]) for t in used))
        bottom = min(top, min(float(self._bounds[t][-1]) for t in used))
        levels = top * np.geomspace(max(bottom / top, 1e-6), 1.0, LEVELS) if top > 0 else np.zeros(LEVELS)
        count = len(self._tables)
        index = np.full((count + 1, LEVELS), 0)
        need = np.zeros((count + 1, LEVELS))
        for t in used:
            sizes, bound = self._tables[t].sizes, self._bounds[t]
            # Bounds fall with size: the first size whose bound is at most the level.
            index[t] = np.searchsorted(-bound, -levels, side="left")
            need[t] = np.append(np.array(sizes, dtype=float), np.inf)[index[t]]
        width = max(len(self._members[g]) for g in alive)
        possible = np.ones((len(alive), LEVELS), dtype=bool)
        for kind, budget in self.space.budgets.items():
            rows = np.full((len(alive), width), count)
            for row, g in enumerate(alive):
                mine = [t for t, k in zip(self._members[g], self._kinds[g], strict=True) if k == kind]
                rows[row, : len(mine)] = mine
            possible &= need[rows].sum(axis=1) <= budget
        level = np.where(possible.any(axis=1), possible.argmax(axis=1), LEVELS)
        promising = sorted((int(at), row) for row, at in enumerate(level) if at < LEVELS)[:ROWS]
        self._try([(alive[row], tuple(int(index[t, at]) for t in self._members[alive[row]])) for at, row in promising])
        # A grouping that is impossible one level lower takes longer than that level.
        longer_than = np.append(levels, np.inf)[np.maximum(level - 1, 0)]
        longer_than[level == 0] = 0.0
        return [g for g, least in zip(alive, longer_than, strict=True) if least <= self.hopeless]

    def _climb(self) -> None:
        """Improve the best plan by moving GPUs between its groups, as long as that helps."""
        while self.best is not None:
            before = self.best
            g = next(i for i, grouping in enumerate(self.groupings) if grouping is before.grouping)
            tables = before.grouping.tables
            at = [table.sizes.index(size) for table, size in zip(tables, before.sizes, strict=True)]
            moves: list[Indices] = []
            for giver, taker in itertools.permutations(range(len(at)), 2):
                if tables[giver].kind != tables[taker].kind:
                    continue
                for step in (1, 2, 4, 8, 16, 32, 64, 128):
                    to = list(at)
                    to[giver] -= step
                    if to[giver] < 0:
                        break
                    room = (
                        before.sizes[taker] + before.sizes[giver] - tables[giver].sizes[to[giver]] + self._idle(before)
                    )
                    to[taker] = bisect_right(tables[taker].sizes, room) - 1
                    moves.append(tuple(to))
            self._try([(g, move) for move in dict.fromkeys(moves)])
            if self.best is before:
                return

    def _idle(self, found: Found) -> int:
        """GPUs that a plan leaves unused, where there is one kind of them."""
        return sum(self.space.budgets.values()) - sum(found.sizes) if len(self.space.budgets) == 1 else 0

    def _tighten(self, g: int, low: Indices, high: Indices) -> tuple[Indices, Indices] | None:
        """The box without sizes that the others' least sizes leave no GPUs for; None where nothing is left."""
        tables = self.groupings[g].tables
        if any(a > b for a, b in zip(low, high, strict=True)):
            return None
        room = dict(self.space.budgets)
        for table, a in zip(tables, low, strict=True):
            room[table.kind] -= table.sizes[a]
        if any(left < 0 for left in room.values()):
            return None
        return low, tuple(
            b
            if table.sizes[b] - table.sizes[a] <= room[table.kind]
            else bisect_right(table.sizes, table.sizes[a] + room[table.kind]) - 1
            for table, a, b in zip(tables, low, high, strict=True)
        )

    def _drop_settled(self, boxes: list[Box]) -> list[Box]:
        """The boxes without those whose corner is a plan itself: nothing in them beats it, and it has been tried."""
        if self._check_nodes:
            return boxes
        left = []
        for box, bound in zip(boxes, self._corners(boxes), strict=True):
            if not self._affordable(box[0], box[2]):
                left.append(box)
            elif bound <= self.hopeless:
                self._tied.append((float(bound), box))
        return left

    def _affordable(self, g: int, at: Indices) -> bool:
        need = dict.fromkeys(self.space.budgets, 0)
        for table, index in zip(self.groupings[g].tables, at, strict=True):
            need[table.kind] += table.sizes[index]
        return all(need[kind] <= budget for kind, budget in self.space.budgets.items())

    def _branch(self, boxes: list[Box]) -> list[Box]:
        """Smaller boxes that hold every plan of these that can still beat the best.

        The lower half of each side is bounded first. Sides whose lower half is hopeless are all cut at once; only
        where none is, the box is split in two, across the side whose lower half promises least.
        """
        asked: list[tuple[int, int]] = []
        corners: list[tuple[int, Indices]] = []
        for number, (g, low, high) in enumerate(boxes):
            for j, (a, b) in enumerate(zip(low, high, strict=True)):
                if a < b:
                    asked.append((number, j))
                    corners.append((g, (*high[:j], (a + b + 1) // 2 - 1, *high[j + 1 :])))
        halves: list[list[tuple[float, int]]] = [[] for _ in boxes]
        for (number, j), bound in zip(asked, self._simulate(corners) if corners else (), strict=True):
            halves[number].append((float(bound), j))
        smaller: list[Box] = []
        for (g, low, high), sides in zip(boxes, halves, strict=True):
            hopeless = {j for bound, j in sides if bound > self.hopeless}
            middle = [(a + b + 1) // 2 for a, b in zip(low, high, strict=True)]
            if hopeless:
                smaller.append((g, tuple(middle[j] if j in hopeless else a for j, a in enumerate(low)), high))
            elif sides:
                _, cut = max(sides)
                smaller.append((g, (*low[:cut], middle[cut], *low[cut + 1 :]), high))
                smaller.append((g, low, (*high[:cut], middle[cut] - 1, *high[cut + 1 :])))
        return smaller

    def _split(self, g: int, low: Indices, high: Indices) -> list[tuple[Indices, Indices]]:
        """Two halves of a box, cut across the group whose time it leaves most open."""
        tables = self.groupings[g].tables
        gaps = [
            float(table.work[a] - table.work[b]) if b > a else -1.0
            for table, a, b in zip(tables, low, high, strict=True)
        ]
        cut = max(range(len(gaps)), key=gaps.__getitem__)
        if gaps[cut] < 0:
            return []
        middle = (low[cut] + high[cut] + 1) // 2
        upper = ((*low[:cut], middle, *low[cut + 1 :]), high)
        lower = (low, (*high[:cut], middle - 1, *high[cut + 1 :]))
        return [upper, lower]

    def _finish_small(self, boxes: list[Box]) -> list[Box]:
        """Simulate every plan that matters of small boxes; the other boxes are returned."""
        large: list[Box] = []
        plans: list[tuple[int, Indices]] = []
        small: list[tuple[Box, slice]] = []
        for box in boxes:
            inside = self._points(*box)
            if inside is None:
                large.append(box)
            elif inside:
                small.append((box, slice(len(plans), len(plans) + len(inside))))
                plans.extend((box[0], at) for at in inside)
        seconds = self._try(plans)
        for box, mine in small:
            least = float(seconds[mine].min())
            if least <= self.hopeless:
                self._tied.append((least, box))
        return large

    def _points(self, g: int, low: Indices, high: Indices) -> list[Indices] | None:
        """The plans of a box of which none is smaller in every group than another; None where there are too many."""
        tables = self.groupings[g].tables
        widths = [b - a + 1 for a, b in zip(low, high, strict=True)]
        free = list(range(len(low)))
        rest = -1
        if not self._check_nodes:
            rest = max(range(len(low)), key=widths.__getitem__)
            free.remove(rest)
        count = 1
        for j in free:
            count *= widths[j]
            if count > SMALL:
                return None
        points = []
        for some in itertools.product(*(range(low[j], high[j] + 1) for j in free)):
            room = dict(self.space.budgets)
            for j, at in zip(free, some, strict=True):
                room[tables[j].kind] -= tables[j].sizes[at]
            if any(left < 0 for left in room.values()):
                continue
            if rest < 0:
                points.append(some)
                continue
            most = min(high[rest], bisect_right(tables[rest].sizes, room[tables[rest].kind]) - 1)
            if most >= low[rest]:
                points.append((*some[:rest], most, *some[rest:]))
        return points

    # -- simulation ---------------------------------------------------------------------------------------------

    def _simulate(self, plans: Sequence[tuple[int, Indices]]) -> Floats:
        """Seconds of plans when every member of a group has its least time: exact, or a bound where contested."""
        self.considered += len(plans)
        self._effort += len(plans) * self._effort_a_plan
        missing = [g for g in dict.fromkeys(g for g, _ in plans) if g not in self._row_of]
        if missing:
            self._add_shapes(missing)
        assert self._shapes is not None
        seconds = np.empty(len(plans))
        for begin in range(0, len(plans), self._rows):
            some = plans[begin : begin + self._rows]
            times = np.repeat(self._base[None, :], len(some), axis=0)
            for row, (g, at) in enumerate(some):
                line = times[row]
                for t, index in zip(self._members[g], at, strict=True):
                    table = self._tables[t]
                    line[table.columns] = table.times[index]
            rows = np.array([self._row_of[g] for g, _ in some], dtype=np.intp)
            seconds[begin : begin + self._rows] = self.space.simulator.seconds(times, self._shapes.take(rows))
        return seconds

    def _add_shapes(self, missing: list[int]) -> None:
        new = Shapes.stack([self.space.shape(self.groupings[g]) for g in missing])
        start = len(self._row_of)
        self._row_of.update({g: start + offset for offset, g in enumerate(missing)})
        self._shapes = new if self._shapes is None else self._shapes.joined(new)

    def _corners(self, boxes: Sequence[Box]) -> Floats:
        return self._simulate([(g, high) for g, _, high in boxes]) if boxes else np.empty(0)

    def _try_inside(self, boxes: list[Box]) -> None:
        """Simulate one plan of each box, its room shared out in proportion."""
        plans = []
        for g, low, high in boxes:
            tables = self.groupings[g].tables
            share = {}
            for kind, budget in self.space.budgets.items():
                least = sum(t.sizes[a] for t, a in zip(tables, low, strict=True) if t.kind == kind)
                most = sum(t.sizes[b] for t, b in zip(tables, high, strict=True) if t.kind == kind)
                share[kind] = min(1.0, (budget - least) / (most - least)) if most > least else 1.0
            at = tuple(
                max(a, bisect_right(t.sizes, t.sizes[a] + share[t.kind] * (t.sizes[b] - t.sizes[a])) - 1)
                for t, a, b in zip(tables, low, high, strict=True)
            )
            plans.append((g, at))
        self._try(plans)

    def _try(self, plans: list[tuple[int, Indices]]) -> Floats:
        """Simulate plans and keep the best; their seconds (bounds where configurations are contested)."""
        if not plans:
            return np.empty(0)
        results = self._simulate(plans)
        for index in np.flatnonzero(results < self.ceiling):
            if results[index] < self.ceiling:
                g, at = plans[index]
                found = self._settle(g, at, float(results[index]))
                if found is not None and found.seconds < self.ceiling:
                    self.best = found
        return results

    def _settle(self, g: int, at: Indices, seconds: float) -> Found | None:
        """A plan with its configurations: the fastest combination where memory makes the members choose."""
        grouping = self.groupings[g]
        sizes = tuple(table.sizes[index] for table, index in zip(grouping.tables, at, strict=True))
        if not self.space.node_fit(sizes, grouping.kinds):
            return None
        ways = [self.space.configurations(t, size) for t, size in zip(grouping.tables, sizes, strict=True)]
        if all(len(way) == 1 for way in ways):
            return Found(grouping, sizes, tuple(way[0] for way in ways), seconds)
        options, seconds = self.space.best_of(grouping, sizes)
        return Found(grouping, sizes, options, seconds)

    # -- ties ---------------------------------------------------------------------------------------------------

    def simplest(self, best: Found) -> Found:
        """Among plans as fast as the best: fewest groups, then fewest GPUs, then file order."""
        ceiling = best.seconds * (1 + TIE)
        boxes = sorted((len(low), g, low, high) for bound, (g, low, high) in self._tied if bound <= ceiling)
        winner: Found | None = None
        for groups, g, low, high in boxes:
            if winner is not None and groups > len(winner.sizes):
                break
            found = self._fewest_gpus(g, low, high, ceiling, sum(winner.sizes) - 1 if winner else None)
            winner = found or winner
        return winner or best

    def _fewest_gpus(self, g: int, low: Indices, high: Indices, ceiling: float, most: int | None) -> Found | None:
        """The plan of a grouping with fewest GPUs (at most so many) within a time."""
        tables = self.groupings[g].tables

        def total(at: Indices) -> int:
            return sum(table.sizes[index] for table, index in zip(tables, at, strict=True))

        queue = [(total(low), (low, high))]
        while queue:
            gpus, (low, high) = heapq.heappop(queue)
            if most is not None and gpus > most:
                return None
            shaved = self._shave(g, low, high, ceiling)
            if shaved is None:
                continue
            if shaved[0] != low:
                heapq.heappush(queue, (total(shaved[0]), shaved))
                continue
            (seconds,) = self._simulate([(g, low)])
            if seconds <= ceiling:
                found = self._settle(g, low, float(seconds))
                if found is not None and found.seconds <= ceiling:
                    return found
            for half in self._split(g, *shaved):
                tight = self._tighten(g, *half)
                if tight:
                    heapq.heappush(queue, (total(tight[0]), tight))
        return None

    def _shave(self, g: int, low: Indices, high: Indices, ceiling: float) -> tuple[Indices, Indices] | None:
        """Raise each group's least size to what it needs when the others have their most; None where nothing fits."""
        while True:
            (corner,) = self._simulate([(g, high)])
            if corner > ceiling:
                return None
            lows, highs = list(low), list(high)
            while any(a < b for a, b in zip(lows, highs, strict=True)):
                open_ = [j for j in range(len(low)) if lows[j] < highs[j]]
                middles = {j: (lows[j] + highs[j]) // 2 for j in open_}
                results = self._simulate([(g, (*high[:j], middles[j], *high[j + 1 :])) for j in open_])
                for j, seconds in zip(open_, results, strict=True):
                    if seconds <= ceiling:
                        highs[j] = middles[j]
                    else:
                        lows[j] = middles[j] + 1
            raised = tuple(lows)
            box = self._tighten(g, raised, high)
            if box is None:
                return None
            if box == (low, high):
                return box
            low, high = box
