"""Boxes of group sizes for the search, and the simulation of plans in them.

Sizes of a group are indices into its table. A plan is (grouping, size index of each group); a box is a grouping with
the minimum and maximum index of each group. Nothing here decides which box is worth opening.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from trimtab.core.frozen import Frozen
from trimtab.plan.placement.simulate import Floats, GroupingShapes
from trimtab.plan.placement.space import CostOption, Grouping, GroupTable, PlanSpace

SMALL = 96
"""Boxes of up to this many plans are simulated whole instead of split."""

ROWS = 512
CELLS = 500_000
"""Plans simulated in one call, and (plan, batch) pairs: bounds the memory."""

Indices = tuple[int, ...]
At = tuple[int, Indices]
"""A plan: a grouping, and the index of each group's size."""

Box = tuple[int, Indices, Indices]
"""A grouping, and for each of its groups the minimum and maximum index of its size."""


class FoundPlan(Frozen):
    """A plan of the search: sizes and configurations of the groups of a grouping."""

    grouping: Grouping
    sizes: tuple[int, ...]
    options: tuple[tuple[CostOption, ...], ...]
    seconds: float


class SearchGround:
    """Some groupings of a space, with the bounds and the simulation that a search over them needs."""

    def __init__(self, space: PlanSpace, groupings: list[Grouping]) -> None:
        self.space = space
        self.groupings = groupings
        self.tables = list({id(table): table for g in groupings for table in g.tables}.values())
        number = {id(table): index for index, table in enumerate(self.tables)}
        self.members = [[number[id(table)] for table in g.tables] for g in groupings]
        """For each grouping, the table indices of its groups."""
        self._head, self._tail = space.simulator.heads_and_tails(space.fastest)
        self.bounds = [self._least_seconds(table) for table in self.tables]
        """For each table and size, a lower bound on any plan with such a group of that size."""
        self.considered = 0
        self.effort = 0
        units = space.simulator.units
        self.effort_a_plan = units * len(space.order) + 2_000  # 2,000: overhead per plan
        self._rows = max(1, min(ROWS, CELLS // units))
        self._base = space.cpu_row
        self._shapes: GroupingShapes | None = None
        self._row_of: dict[int, int] = {}

    def _least_seconds(self, table: GroupTable) -> Floats:
        """For each size, a lower bound on any plan with such a group of that size."""
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
                # With staleness every switch counts; within one iteration the first may overlap with its inputs.
                spent = spent + table.times[:, last] + (switch[b] if last > first or workflow.staleness else 0.0)
                bound = np.maximum(bound, head[a] + spent + tail[b])
        return bound + sync

    def least_sizes(self, ceiling: float) -> list[int]:
        """For each table the index of the smallest size that may meet the ceiling (its length where none does)."""
        return [int(np.count_nonzero(bound > ceiling)) for bound in self.bounds]

    def whole(self, g: int) -> Box:
        sizes = [len(table.sizes) - 1 for table in self.groupings[g].tables]
        return g, tuple(0 for _ in sizes), tuple(sizes)

    def tightened(self, g: int, low: Indices, high: Indices) -> Box | None:
        """The box without sizes for which the others' minimum sizes leave no GPUs; None where nothing is left."""
        tables = self.groupings[g].tables
        if any(a > b for a, b in zip(low, high, strict=True)):
            return None
        left_gpus = dict(self.space.budgets)
        for table, a in zip(tables, low, strict=True):
            left_gpus[table.kind] -= table.sizes[a]
        if any(left < 0 for left in left_gpus.values()):
            return None
        return (
            g,
            low,
            tuple(
                b
                if table.sizes[b] - table.sizes[a] <= left_gpus[table.kind]
                else bisect_right(table.sizes, table.sizes[a] + left_gpus[table.kind]) - 1
                for table, a, b in zip(tables, low, high, strict=True)
            ),
        )

    def affordable(self, g: int, at: Indices) -> bool:
        """Whether the cluster has the GPUs for these sizes."""
        need = dict.fromkeys(self.space.budgets, 0)
        for table, index in zip(self.groupings[g].tables, at, strict=True):
            need[table.kind] += table.sizes[index]
        return all(need[kind] <= budget for kind, budget in self.space.budgets.items())

    def lower_halves(self, boxes: Sequence[Box]) -> list[list[tuple[float, int]]]:
        """For each box and each side that can be halved: (bound of the lower half, side)."""
        asked: list[tuple[int, int]] = []
        corners: list[At] = []
        for number, (g, low, high) in enumerate(boxes):
            for j, (a, b) in enumerate(zip(low, high, strict=True)):
                if a < b:
                    asked.append((number, j))
                    corners.append((g, (*high[:j], (a + b + 1) // 2 - 1, *high[j + 1 :])))
        halves: list[list[tuple[float, int]]] = [[] for _ in boxes]
        for (number, j), bound in zip(asked, self.simulate(corners), strict=True):
            halves[number].append((float(bound), j))
        return halves

    def halved(self, box: Box, side: int) -> tuple[Box, Box]:
        """The upper and the lower half of a box."""
        g, low, high = box
        middle = (low[side] + high[side] + 1) // 2
        upper = (g, (*low[:side], middle, *low[side + 1 :]), high)
        return upper, (g, low, (*high[:side], middle - 1, *high[side + 1 :]))

    def points(self, g: int, low: Indices, high: Indices) -> list[Indices] | None:
        """The maximal plans of a box: none is smaller in every group than another; None where there are too many."""
        tables = self.groupings[g].tables
        widths = [b - a + 1 for a, b in zip(low, high, strict=True)]
        free = list(range(len(low)))
        rest = -1
        if not self.space.even_nodes:
            rest = max(range(len(low)), key=widths.__getitem__)
            free.remove(rest)
        count = 1
        for j in free:
            count *= widths[j]
            if count > SMALL:
                return None
        points = []
        for some in itertools.product(*(range(low[j], high[j] + 1) for j in free)):
            left_gpus = dict(self.space.budgets)
            for j, at in zip(free, some, strict=True):
                left_gpus[tables[j].kind] -= tables[j].sizes[at]
            if any(left < 0 for left in left_gpus.values()):
                continue
            if rest < 0:
                points.append(some)
                continue
            top = min(high[rest], bisect_right(tables[rest].sizes, left_gpus[tables[rest].kind]) - 1)
            if top >= low[rest]:
                points.append((*some[:rest], top, *some[rest:]))
        return points

    def inside(self, box: Box) -> At:
        """A plan inside a box, with the GPUs shared out in proportion."""
        g, low, high = box
        tables = self.groupings[g].tables
        share = {}
        for kind, budget in self.space.budgets.items():
            min_gpus = sum(t.sizes[a] for t, a in zip(tables, low, strict=True) if t.kind == kind)
            max_gpus = sum(t.sizes[b] for t, b in zip(tables, high, strict=True) if t.kind == kind)
            share[kind] = min(1.0, (budget - min_gpus) / (max_gpus - min_gpus)) if max_gpus > min_gpus else 1.0
        return g, tuple(
            max(a, bisect_right(t.sizes, t.sizes[a] + share[t.kind] * (t.sizes[b] - t.sizes[a])) - 1)
            for t, a, b in zip(tables, low, high, strict=True)
        )

    def gpus(self, g: int, at: Indices) -> int:
        return sum(table.sizes[index] for table, index in zip(self.groupings[g].tables, at, strict=True))

    def simulate(self, plans: Sequence[At]) -> Floats:
        """Seconds of plans when every member has its minimum time: exact, or a bound where contested."""
        self.considered += len(plans)
        self.effort += len(plans) * self.effort_a_plan
        missing = [g for g in dict.fromkeys(g for g, _ in plans) if g not in self._row_of]
        if missing:
            self._add_shapes(missing)
        seconds = np.empty(len(plans))
        if not plans:
            return seconds
        assert self._shapes is not None
        for begin in range(0, len(plans), self._rows):
            some = plans[begin : begin + self._rows]
            times = np.repeat(self._base[None, :], len(some), axis=0)
            for row, (g, at) in enumerate(some):
                line = times[row]
                for t, index in zip(self.members[g], at, strict=True):
                    table = self.tables[t]
                    line[table.columns] = table.times[index]
            rows = np.array([self._row_of[g] for g, _ in some], dtype=np.intp)
            seconds[begin : begin + self._rows] = self.space.simulator.seconds(times, self._shapes.take(rows))
        return seconds

    def _add_shapes(self, missing: list[int]) -> None:
        new = GroupingShapes.stack([self.space.shape(self.groupings[g]) for g in missing])
        start = len(self._row_of)
        self._row_of.update({g: start + offset for offset, g in enumerate(missing)})
        self._shapes = new if self._shapes is None else self._shapes.joined(new)

    def corners(self, boxes: Sequence[Box]) -> Floats:
        return self.simulate([(g, high) for g, _, high in boxes])

    def settled(self, g: int, at: Indices, seconds: float) -> FoundPlan | None:
        """A plan with its configurations: the fastest combination where memory forces a choice."""
        grouping = self.groupings[g]
        sizes = tuple(table.sizes[index] for table, index in zip(grouping.tables, at, strict=True))
        if not self.space.node_fit(grouping, sizes):
            return None
        if any(size in table.contested for table, size in zip(grouping.tables, sizes, strict=True)):
            options, seconds = self.space.best_of(grouping, sizes)
            return FoundPlan(grouping, sizes, options, seconds)
        ways = [self.space.configurations(t, size) for t, size in zip(grouping.tables, sizes, strict=True)]
        return FoundPlan(grouping, sizes, tuple(way[0] for way in ways), seconds)
