"""Simulates an iteration under a plan: the only time model, used by the search, the charts and the live run.

The iteration is a (max,+) recurrence: batch b of a component ends at C[b+1] + max over b' <= b of (ready[b'] - C[b']),
where C is the component's own cumulative time and `ready` is given by its inputs and its GPUs. It is computed for many
plans at once. Batches are merged as far as every granularity allows, which changes no result.

With staleness iterations overlap; they form a (max,+)-linear system whose steady period is the maximum cycle mean over
the gates between iterations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd

import numpy as np
from numpy.typing import NDArray

from trimtab.core.frozen import Frozen
from trimtab.model.workflow import Component, Workflow

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

NEVER = -np.inf


class GroupingShape(Frozen):
    """How components share GPUs, in workflow order: all that the simulation needs of a grouping.

    `before[i]`: components right before i on any of its GPUs in the same iteration; `after[i]`: components that end the
    previous iteration on GPUs where i comes first (itself if it is alone); `switch[i]`: its seconds before the first
    batch; `sync`: seconds of the weight sync.
    """

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    switch: tuple[float, ...]
    sync: float


def shape_of(order: tuple[Component, ...], workflow: Workflow, cells: Iterable[tuple[int, ...]]) -> GroupingShape:
    """The shape of a placement: each cell holds the components that take turns on the same GPUs, as positions in
    `order`.

    The cells of groups that share no GPUs are the groups. CPU components are in none.
    """
    before: list[dict[int, None]] = [{} for _ in order]
    after: list[dict[int, None]] = [{} for _ in order]
    placed: list[set[int]] = [set() for _ in order]
    switch = [0.0] * len(order)
    for number, cell in enumerate(cells):
        for position, index in enumerate(cell):
            previous = cell[position - 1]
            placed[index].add(number)
            if position:
                before[index][previous] = None
            else:
                after[index][cell[-1]] = None
            engine = order[index].engine
            if len(cell) > 1 and (engine is None or engine != order[previous].engine):
                switch[index] = order[index].switch_seconds
    for index, here in enumerate(placed):
        if not here:
            after[index][index] = None
    sync = 0.0
    if workflow.weight_sync is not None:
        source = next(i for i, c in enumerate(order) if c.name == workflow.weight_sync.source)
        target = next(i for i, c in enumerate(order) if c.name == workflow.weight_sync.target)
        shared = bool(placed[source]) and placed[source] == placed[target]
        sync = workflow.weight_sync.shared_seconds if shared else workflow.weight_sync.separate_seconds
    return GroupingShape(tuple(map(tuple, before)), tuple(map(tuple, after)), tuple(switch), sync)


def cells_of(groups: Iterable[tuple[Iterable[int], Iterable[int]]]) -> tuple[tuple[int, ...], ...]:
    """Components that take turns on the same GPUs, from (components, GPUs) pairs that may overlap."""
    on: dict[int, list[int]] = {}
    for members, gpus in groups:
        for gpu in gpus:
            on.setdefault(gpu, []).extend(members)
    return tuple(dict.fromkeys(tuple(sorted(on[gpu])) for gpu in sorted(on)))


class GroupingShapes(Frozen):
    """Shapes of many plans as arrays, one row a plan; `before` and `after` are plans x components x width.

    Column n (a component that never ends) is the padding.
    """

    before: Ints
    after: Ints
    switch: Floats
    sync: Floats

    @staticmethod
    def stack(shapes: list[GroupingShape]) -> GroupingShapes:
        return GroupingShapes(
            before=_padded([shape.before for shape in shapes]),
            after=_padded([shape.after for shape in shapes]),
            switch=np.array([shape.switch for shape in shapes]),
            sync=np.array([shape.sync for shape in shapes]),
        )

    def take(self, rows: Ints) -> GroupingShapes:
        return GroupingShapes(self.before[rows], self.after[rows], self.switch[rows], self.sync[rows])

    def joined(self, other: GroupingShapes) -> GroupingShapes:
        return GroupingShapes(
            _joined(self.before, other.before),
            _joined(self.after, other.after),
            np.concatenate([self.switch, other.switch]),
            np.concatenate([self.sync, other.sync]),
        )


def _padded(of_plans: list[tuple[tuple[int, ...], ...]]) -> Ints:
    count = len(of_plans[0])
    width = max(1, max(len(some) for of_plan in of_plans for some in of_plan))
    return np.array(
        [[(*some, *([count] * (width - len(some)))) for some in of_plan] for of_plan in of_plans], dtype=np.intp
    )


def _joined(first: Ints, other: Ints) -> Ints:
    width = max(first.shape[2], other.shape[2])
    wide = [np.pad(a, ((0, 0), (0, 0), (0, width - a.shape[2])), constant_values=a.shape[1]) for a in (first, other)]
    return np.concatenate(wide)


class _ComponentStep(Frozen):
    """Precomputed recurrence data of a component.

    Its inputs come in chunks; `inputs_at[k]`: for parent k, the columns of its ends that the chunks wait for. `begin`:
    the share of its time done before each chunk; `ends`: the share done after each batch that is read; `chunk`: the
    chunk of that batch (`None`: one to one).
    """

    parents: tuple[int, ...]
    inputs_at: tuple[Ints, ...]
    begin: Floats
    ends: Floats
    chunk: Ints | None


@dataclass
class Simulator:
    """Predicts iteration times of a workflow under many plans."""

    workflow: Workflow
    order: tuple[Component, ...] = field(init=False)
    units: int = field(init=False)

    def __post_init__(self) -> None:
        self.order = self.workflow.in_order()
        batches = self.workflow.batches
        chunks = [min(c.granularity or batches, batches) for c in self.order if c.after]
        # Granularities only matter at multiples of the common divisor: such runs of batches are one unit.
        self._unit = gcd(batches, *chunks) if chunks else batches
        self.units = batches // self._unit
        self._index = {component.name: i for i, component in enumerate(self.order)}
        self._steps = self._make_steps(every_unit=False)
        sync = self.workflow.weight_sync
        self._source = self._index[sync.source] if sync else -1
        self._target = self._index[sync.target] if sync else -1

    def _make_steps(self, every_unit: bool) -> list[_ComponentStep]:
        units = self.units
        sizes = [self._chunk_units(component) for component in self.order]
        starts = [np.arange(0, units, size) for size in sizes]
        wanted = [np.minimum(start + size, units) - 1 for start, size in zip(starts, sizes, strict=True)]
        columns: list[Ints] = []
        for component in self.order:
            children = [j for j, child in enumerate(self.order) if component.name in child.after]
            asked = [wanted[j] for j in children] if not every_unit else [np.arange(units)]
            columns.append(np.unique(np.concatenate([*asked, np.array([units - 1])])))
        steps = []
        for i, component in enumerate(self.order):
            shares = completed(component.completion, np.arange(units + 1) / units)
            parents = tuple(self._index[name] for name in component.after)
            chunk = columns[i] // sizes[i]
            steps.append(
                _ComponentStep(
                    parents=parents,
                    inputs_at=tuple(np.searchsorted(columns[p], wanted[i]) for p in parents),
                    begin=shares[starts[i]],
                    ends=shares[columns[i] + 1],
                    chunk=None if np.array_equal(chunk, np.arange(len(starts[i]))) else chunk,
                )
            )
        return steps

    def _chunk_units(self, component: Component) -> int:
        if not component.after or component.granularity is None:
            return self.units
        return min(component.granularity, self.workflow.batches) // self._unit

    def seconds(self, times: Floats, shapes: GroupingShapes) -> Floats:
        """Iteration time (with staleness: the steady period) of each plan. `times` is plans x components."""
        if self.workflow.staleness:
            return self._period(times, shapes)
        ends = self._last_ends(times, shapes, shapes.switch)
        return np.asarray(ends.max(axis=1) + shapes.sync)

    def _last_ends(self, times: Floats, shapes: GroupingShapes, gates: Floats) -> Floats:
        """When each component ends its last batch, if component i may not start before gates[:, i]."""
        traces = _traces(self._steps, times, shapes, gates)
        return np.stack([trace[:, -1] for trace in traces], axis=1)

    def _period(self, times: Floats, shapes: GroupingShapes) -> Floats:
        """The steady period: the maximum cycle mean over the gates between iterations.

        Gate i is the time before which component i cannot start because of earlier iterations. Opening one gate alone,
        at 0, shows how it delays every end of the iteration; each end then opens gates of later iterations: the last
        component on some GPUs opens the gate of the first there an iteration later (plus its switch), and the source of
        the sync, plus the sync, opens its own next gate and the target's gate `staleness` + 1 iterations later.
        """
        plans, count = times.shape
        # A lag of k + 1 iterations is a chain of k extra nodes, each one iteration apart.
        size = count + self.workflow.staleness
        weight = np.full((plans, size, size), NEVER)
        rows = np.arange(plans)[:, None]
        for i in range(count):
            gates = np.full_like(times, NEVER)
            gates[:, i] = 0.0
            ends = self._last_ends(times, shapes, gates)
            ended = np.concatenate([ends, np.full((plans, 1), NEVER)], axis=1)
            for j in range(count):
                weight[:, i, j] = ended[rows, shapes.after[:, j]].max(axis=1) + shapes.switch[:, j]
            synced = ends[:, self._source] + shapes.sync
            weight[:, i, self._source] = np.maximum(weight[:, i, self._source], synced)
            weight[:, i, count] = synced
        for rest in range(count, size - 1):
            weight[:, rest, rest + 1] = 0.0
        weight[:, size - 1, self._target] = 0.0
        return max_cycle_mean(weight)

    def trace(self, times: Floats, shape: GroupingShape, iterations: int = 1) -> list[list[Floats]]:
        """Ends of every unit of one plan, for each iteration and component, for timelines."""
        shapes = GroupingShapes.stack([shape])
        steps = self._make_steps(every_unit=True)
        lag = self.workflow.staleness + 1
        ends: list[Floats] = []
        runs: list[list[Floats]] = []
        for t in range(iterations):
            gates = np.array(shape.switch)
            if t:
                for j, afters in enumerate(shape.after):
                    gates[j] += max((ends[-1][last] for last in afters), default=0.0)
                gates[self._source] = max(gates[self._source], ends[-1][self._source] + shape.sync)
            if t >= lag:
                gates[self._target] = max(gates[self._target], ends[t - lag][self._source] + shape.sync)
            traces = _traces(steps, times[None, :], shapes, gates[None, :])
            runs.append([trace[0] for trace in traces])
            ends.append(np.array([trace[0, -1] for trace in traces]))
        return runs

    def heads_and_tails(self, fastest: Floats) -> tuple[Floats, Floats]:
        """The minimum time before a component can start, and from its end to the end of the iteration."""
        count = len(self.order)
        head, tail = np.zeros(count), np.zeros(count)
        units = self.units
        shares = [completed(c.completion, np.arange(units + 1) / units) for c in self.order]
        chunk = [self._chunk_units(component) for component in self.order]
        for i, step in enumerate(self._steps):
            for p in step.parents:
                head[i] = max(head[i], head[p] + fastest[p] * shares[p][chunk[i]])
        for i in reversed(range(count)):
            last_chunk = (units - 1) // chunk[i] * chunk[i]
            after = fastest[i] * (1 - shares[i][last_chunk]) + tail[i]
            for p in self._steps[i].parents:
                tail[p] = max(tail[p], after)
        return head, tail

    def unit_seconds(self, component: int, seconds: float) -> Floats:
        shares = completed(self.order[component].completion, np.arange(self.units + 1) / self.units)
        return np.diff(shares) * seconds


def _traces(steps: list[_ComponentStep], times: Floats, shapes: GroupingShapes, gates: Floats) -> list[Floats]:
    """For each component the ends of the batches that are read, plans x batches."""
    plans, count = times.shape
    rows = np.arange(plans)
    single = shapes.before.shape[2] == 1
    finished = np.full((plans, count + 1), NEVER)
    traces: list[Floats] = []
    for i, step in enumerate(steps):
        before = (
            finished[rows, shapes.before[:, i, 0]] if single else finished[rows[:, None], shapes.before[:, i]].max(1)
        )
        free = np.maximum(before + shapes.switch[:, i], gates[:, i])
        own = times[:, i, None]
        offset = free[:, None]
        if step.parents:
            ready = traces[step.parents[0]][:, step.inputs_at[0]]
            for parent, at in zip(step.parents[1:], step.inputs_at[1:], strict=True):
                ready = np.maximum(ready, traces[parent][:, at])
            offset = ready - own * step.begin
            np.maximum(offset[:, 0], free, out=offset[:, 0])
            np.maximum.accumulate(offset, axis=1, out=offset)
        trace = own * step.ends + (offset if step.chunk is None else offset[:, step.chunk])
        traces.append(trace)
        finished[:, i] = trace[:, -1]
    return traces


def completed(points: tuple[tuple[float, float], ...], shares: Floats) -> Floats:
    """Share of time at which a share of the batches is done: linear between points, from (0, 0)."""
    if not points:
        return shares
    xs = np.array([0.0, *(x for x, _ in points)])
    ys = np.array([0.0, *(y for _, y in points)])
    return np.asarray(np.interp(shares, xs, ys))


def max_cycle_mean(weight: Floats) -> Floats:
    """The maximum cycle mean of each matrix [from, to] of a stack (Karp)."""
    plans, size, _ = weight.shape
    best: Floats = np.zeros((size + 1, plans, size))
    for length in range(1, size + 1):
        best[length] = (best[length - 1][:, :, None] + weight).max(axis=1)
    lengths = size - np.arange(size)
    with np.errstate(invalid="ignore"):
        means = (best[size][None] - best[:size]) / lengths[:, None, None]
    means[np.isnan(means)] = np.inf
    least: Floats = means.min(axis=0)
    least[~np.isfinite(best[size])] = NEVER
    return np.asarray(least.max(axis=1))
