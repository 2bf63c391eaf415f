"""The space of plans: which components may share GPUs, on how many, and the resulting costs.

A grouping gives every GPU component a group and every group a kind of GPU; a plan adds a size to each group. This
module tabulates the sizes of a group worth trying and its members' times on each: time never grows with size, because a
member may use fewer GPUs than its group has. Where memory does not let all members run in their fastest way at once, a
size has several configurations, none better than another in every member's time.

Measured costs are exact. Between two of them time is linear in 1/gpus; below the smallest, and with a single point, the
part above the stated floor is inversely proportional to the GPUs; above the largest, the line in 1/gpus through the
last two continues, but never beyond perfect scaling from the last one. Values outside the measured range are marked as
extrapolated.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trimtab.core.frozen import Frozen
from trimtab.model.plan import FrameworkRules
from trimtab.model.workflow import Cluster, Component, PlacementJob, Variant
from trimtab.plan.placement.simulate import Floats, GroupingShape, GroupingShapes, Ints, Simulator, shape_of
from trimtab.plan.placement.spread import EvenSplit, NodeSpread, even_splits, spread

Points = tuple[tuple[int, float], ...]

MEMORY_TOLERANCE_GB = 1e-9
"""Memory fits when it is at most the limit, to within rounding."""


def seconds_at(points: Points, floor_seconds: float, gpus: int, doubling: float = 1.0) -> float:
    """Predicted seconds for all batches on so many GPUs. `points` ascend in GPUs.

    `doubling` is the share of a perfect speed-up that twice the GPUs give; used with a single point only.
    """
    first_gpus, first_seconds = points[0]
    last_gpus, last_seconds = points[-1]
    if len(points) == 1 and doubling != 1.0 and gpus != first_gpus:
        speed_up = math.pow(gpus / first_gpus, 1 + math.log2(doubling))
        return floor_seconds + (first_seconds - floor_seconds) / speed_up
    if gpus < first_gpus or len(points) == 1:
        return floor_seconds + (first_seconds - floor_seconds) * first_gpus / gpus
    for (g0, s0), (g1, s1) in pairwise(points):
        if g0 <= gpus <= g1:
            return s0 if gpus == g0 else s1 if gpus == g1 else _line(g0, s0, g1, s1, gpus)
    (g0, s0), (g1, s1) = points[-2:]
    return max(_line(g0, s0, g1, s1, gpus), last_seconds * last_gpus / gpus)


def is_extrapolated(points: Points, gpus: int) -> bool:
    return not points[0][0] <= gpus <= points[-1][0]


def _line(g0: int, s0: float, g1: int, s1: float, gpus: int) -> float:
    slope = (s0 - s1) / (1 / g0 - 1 / g1)
    return s1 + slope * (1 / gpus - 1 / g1)


class CostOption(Frozen):
    """A way to run a component inside a group: a variant on a number of GPUs, with its time and memory per GPU."""

    variant: int
    gpus: int
    seconds: float
    active_gb: float
    resident_gb: float
    host_gb: float

    def no_worse_than(self, other: CostOption) -> bool:
        return (
            self.seconds <= other.seconds
            and self.active_gb <= other.active_gb
            and self.resident_gb <= other.resident_gb
            and self.host_gb <= other.host_gb
        )


def ways_to_run(component: Component, cluster: Cluster, kind: str, max_gpus: int) -> tuple[CostOption, ...]:
    """All ways to run a component on up to `max_gpus` GPUs of a kind, ordered by GPUs, then variant.

    Counts whose active memory exceeds a GPU are left out.
    """
    limit = cluster.gpu_memory_gb(kind)
    found = [
        option
        for index, variant in enumerate(component.variants)
        for option in _variant_options(index, variant, kind, max_gpus)
        if limit is None or fits(option.active_gb, limit)
    ]
    return tuple(sorted(found, key=lambda option: (option.gpus, option.variant)))


def _variant_options(index: int, variant: Variant, kind: str, max_gpus: int) -> list[CostOption]:
    points = variant.points(kind)
    if not points:
        return []
    counts = range(variant.multiple_of, max_gpus + 1, variant.multiple_of) if variant.gpus is None else variant.gpus
    active, resident = variant.memory.active, variant.memory.resident
    return [
        CostOption(
            variant=index,
            gpus=gpus,
            seconds=seconds_at(points, variant.floor_seconds, gpus, variant.doubling),
            active_gb=active.at(gpus),
            resident_gb=resident.at(gpus),
            host_gb=variant.host_memory_gb,
        )
        for gpus in counts
        if gpus <= max_gpus and variant.allows(gpus)
    ]


def fits(need_gb: float, limit_gb: float) -> bool:
    return need_gb <= limit_gb + MEMORY_TOLERANCE_GB


GroupMembers = tuple[int, ...]
"""Positions in workflow order of the components of a group, ascending."""

MAX_CONFIGURATIONS = 2_000


class GroupTable(Frozen):
    """Sizes of a group worth trying, ascending, and its members' times on each.

    `times[s, k]` is the minimum time of member k on `sizes[s]`. Where memory does not allow all minima at once, the
    size is in `contested`, with its possible configurations.
    """

    members: GroupMembers
    kind: str
    sizes: tuple[int, ...]
    times: Floats
    contested: Mapping[int, tuple[tuple[CostOption, ...], ...]]

    def scaled(self, component: int, factor: float) -> GroupTable:
        column = self.members.index(component)
        times = self.times.copy()
        times[:, column] *= factor
        contested = {
            size: tuple(
                tuple(o if k != column else replace(o, seconds=o.seconds * factor) for k, o in enumerate(options))
                for options in configurations
            )
            for size, configurations in self.contested.items()
        }
        return replace(self, times=times, contested=contested)

    @cached_property
    def columns(self) -> Ints:
        return np.array(self.members, dtype=np.intp)


class Grouping(Frozen):
    """A partition of the GPU components into groups with a kind each, in file order of their first component.

    With `spans` the last group lies over the GPUs of all the others. `turns` lists components that take turns on the
    same GPUs where groups overlap in another way.
    """

    tables: tuple[GroupTable, ...]
    spans: bool = False
    turns: tuple[GroupMembers, ...] | None = None

    @property
    def groups(self) -> tuple[GroupMembers, ...]:
        return tuple(table.members for table in self.tables)

    @property
    def cells(self) -> tuple[GroupMembers, ...]:
        if self.turns is not None:
            return self.turns
        if not self.spans:
            return self.groups
        *below, above = self.groups
        return tuple(tuple(sorted((*members, *above))) for members in below)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(table.kind for table in self.tables)


@dataclass
class PlanSpace:
    """All plans for a job, within the rules of a framework if given."""

    job: PlacementJob
    rules: FrameworkRules | None = None
    truncated: bool = field(default=False, init=False)
    """Too many configurations, some were left out: nothing is proven optimal."""

    def __post_init__(self) -> None:
        self.simulator = Simulator(self.job.workflow)
        self.order = self.simulator.order
        self.budgets = {kind: len(self.job.cluster.ranks(kind)) for kind in self.job.cluster.kinds}
        position = {component.name: i for i, component in enumerate(self.order)}
        # GPU components in file order, which orders groups and ties.
        self.on_gpu: GroupMembers = tuple(position[c.name] for c in self.job.workflow.components if not c.on_cpu)
        self.cpu_times = {i: c.cpu_seconds for i, c in enumerate(self.order) if c.cpu_seconds is not None}
        self.ways = {
            (i, kind): ComponentOptions(ways_to_run(self.order[i], self.job.cluster, kind, budget), budget)
            for i in self.on_gpu
            for kind, budget in self.budgets.items()
        }
        self.fastest = np.array(
            [
                self.cpu_times[i]
                if i in self.cpu_times
                else min(self.ways[i, kind].seconds[budget] for kind, budget in self.budgets.items())
                for i in range(len(self.order))
            ]
        )
        """The minimum time of each component in any plan."""
        cluster = self.job.cluster
        self.limits = {k: (cluster.gpu_memory_gb(k), cluster.host_memory_gb_per_gpu(k)) for k in self.budgets}
        self._groupings: tuple[Grouping, ...] | None = None
        self._tables: dict[tuple[GroupMembers, str, tuple[int, ...] | None], GroupTable | None] = {}
        self.nodes = {
            kind: tuple(n.gpus for n in self.job.cluster.nodes if n.gpus and n.gpu == kind) for kind in self.budgets
        }
        """The GPUs of each node of a kind."""
        self._fits: dict[tuple[tuple[GroupMembers, ...], tuple[str, ...], tuple[int, ...]], bool] = {}

    @property
    def even_nodes(self) -> bool:
        """Whether each group needs the same number of GPUs on each of its nodes."""
        return self.rules is not None and self.rules.even_nodes

    def groupings(self) -> tuple[Grouping, ...]:
        """All groupings with at least one size for each group within the cluster."""
        if self._groupings is None:
            self._groupings = tuple(
                grouping
                for groups, sizes in self._partitions()
                for kinds in itertools.product(self.budgets, repeat=len(groups))
                if (grouping := self.grouping(groups, kinds, sizes)) is not None
            ) + tuple(self._spanning())
        return self._groupings

    def grouping(
        self,
        groups: tuple[GroupMembers, ...],
        kinds: tuple[str, ...],
        sizes: tuple[tuple[int, ...] | None, ...] | None = None,
    ) -> Grouping | None:
        """A grouping; None where a group has no size, or the minimum sizes exceed the cluster."""
        tables = []
        need = dict.fromkeys(self.budgets, 0)
        for index, (members, kind) in enumerate(zip(groups, kinds, strict=True)):
            table = self.table(members, kind, sizes[index] if sizes else None)
            if table is None:
                return None
            need[kind] += table.sizes[0]
            tables.append(table)
        if any(need[kind] > budget for kind, budget in self.budgets.items()):
            return None
        return Grouping(tuple(tables))

    def _spanning(self) -> Iterator[Grouping]:
        """Groupings with a group over the others; none where memory limits exist, since their fit is not modelled."""
        if self.rules is None or any(limit is not None for limits in self.limits.values() for limit in limits):
            return
        position = {component.name: i for i, component in enumerate(self.order)}
        for allowed in self.rules.spanning:
            groups = tuple(tuple(sorted(position[name] for name in group.components)) for group in allowed)
            sizes = tuple(group.sizes for group in allowed)
            for kind in self.budgets:
                below = self.grouping(groups[:-1], (kind,) * (len(groups) - 1), sizes[:-1])
                above = self.table(groups[-1], kind, sizes[-1])
                if below is not None and above is not None:
                    yield Grouping((*below.tables, above), spans=True)

    def shape(self, grouping: Grouping) -> GroupingShape:
        return shape_of(self.order, self.job.workflow, grouping.cells)

    def _partitions(self) -> Iterator[tuple[tuple[GroupMembers, ...], tuple[tuple[int, ...] | None, ...] | None]]:
        if self.rules is None:
            for partition in set_partitions(self.on_gpu):
                yield tuple(tuple(sorted(group)) for group in partition), None
            return
        position = {component.name: i for i, component in enumerate(self.order)}
        for allowed in self.rules.groupings:
            groups = [(tuple(sorted(position[name] for name in g.components)), g.sizes) for g in allowed]
            groups.sort(key=lambda group: min(self.on_gpu.index(i) for i in group[0]))
            yield tuple(members for members, _ in groups), tuple(sizes for _, sizes in groups)

    def table(self, members: GroupMembers, kind: str, sizes: tuple[int, ...] | None = None) -> GroupTable | None:
        """Sizes and times of a group on a kind of GPU; None where it cannot run there."""
        key = (members, kind, sizes)
        if key not in self._tables:
            self._tables[key] = self._make_table(members, kind, sizes)
        return self._tables[key]

    def _make_table(self, members: GroupMembers, kind: str, only: tuple[int, ...] | None) -> GroupTable | None:
        ways = [self.ways[i, kind] for i in members]
        if not all(way.options for way in ways):
            return None
        sizes = np.arange(max(way.min_gpus for way in ways), self.budgets[kind] + 1)
        if only is not None or self.even_nodes:
            allowed = [g for g in sizes.tolist() if only is None or g in only]
            sizes = np.array(
                [g for g in allowed if not self.even_nodes or self.splits(members, g, kind)], dtype=np.intp
            )
        times = np.stack([way.seconds[sizes] for way in ways], axis=1)
        fit = self._fastest_fit(ways, sizes, kind)
        contested: dict[int, tuple[tuple[CostOption, ...], ...]] = {}
        for row in np.flatnonzero(~fit):
            found = self._configurations([way.front(int(sizes[row])) for way in ways], kind)
            if found:
                fit[row] = True
                if not self.truncated:  # otherwise the fastest ways remain, as a valid bound
                    times[row] = [min(c[k].seconds for c in found) for k in range(len(members))]
                contested[int(sizes[row])] = found
        sizes, times = sizes[fit], times[fit]
        if not len(sizes):
            return None
        new = np.ones(len(sizes), dtype=bool)
        # A larger size without a gain may still fit on nodes where a smaller one does not.
        if not self.even_nodes:
            new[1:] = (times[1:] != times[:-1]).any(axis=1)
        for at in range(1, len(sizes)):
            if contested.get(int(sizes[at])) != contested.get(int(sizes[at - 1])):
                new[at] = True
        return GroupTable(members, kind, tuple(int(g) for g in sizes[new]), times[new], contested)

    def _fastest_fit(self, ways: list[ComponentOptions], sizes: Ints, kind: str) -> NDArray[np.bool_]:
        """For each size, whether all members fit in memory in their fastest way."""
        fit = np.ones(len(sizes), dtype=bool)
        gpu_limit, host_limit = self.limits[kind]
        if gpu_limit is not None:
            resident = np.sum([way.resident[sizes] for way in ways], axis=0)
            for way in ways:
                fit &= resident - way.resident[sizes] + way.active[sizes] <= gpu_limit + MEMORY_TOLERANCE_GB
        if host_limit is not None and len(ways) > 1:
            host = np.stack([way.host[sizes] for way in ways])
            fit &= host.sum(axis=0) - host.min(axis=0) <= host_limit + MEMORY_TOLERANCE_GB
        return fit

    def best_of(self, grouping: Grouping, sizes: tuple[int, ...]) -> tuple[tuple[tuple[CostOption, ...], ...], float]:
        """The fastest configurations of groups of these sizes, and the seconds of that plan."""
        shape = self.shape(grouping)
        ways = [self.configurations(table, size) for table, size in zip(grouping.tables, sizes, strict=True)]
        best: tuple[tuple[tuple[CostOption, ...], ...], float] | None = None
        combinations = itertools.product(*ways)
        while some := list(itertools.islice(combinations, 512)):
            times = np.tile(self.cpu_row, (len(some), 1))
            for line, configurations in zip(times, some, strict=True):
                for table, options in zip(grouping.tables, configurations, strict=True):
                    line[table.columns] = [option.seconds for option in options]
            seconds = self.simulator.seconds(times, GroupingShapes.stack([shape] * len(some)))
            winner = int(seconds.argmin())
            if best is None or seconds[winner] < best[1]:
                best = some[winner], float(seconds[winner])
        assert best is not None
        return best

    @property
    def cpu_row(self) -> Floats:
        """A row of times with only the CPU components filled in."""
        return np.array([self.cpu_times.get(i, 0.0) for i in range(len(self.order))])

    def configurations(self, table: GroupTable, gpus: int) -> tuple[tuple[CostOption, ...], ...]:
        """What the members of a group can run at once on so many GPUs; none better than another in every time."""
        found = table.contested.get(gpus)
        return found or (tuple(self.ways[i, table.kind].front(gpus)[0] for i in table.members),)

    def splits(self, members: GroupMembers, gpus: int, kind: str) -> tuple[EvenSplit, ...]:
        """The ways in which a group of this size can lie evenly on nodes."""
        blocks = {variant.multiple_of for i in members for variant in self.order[i].variants}
        return even_splits(gpus, self.nodes[kind], blocks)

    def _configurations(self, fronts: list[list[CostOption]], kind: str) -> tuple[tuple[CostOption, ...], ...]:
        """Option tuples that fit in memory together; none better than another in every time."""
        limits = self.limits[kind]
        if all(len(front) == 1 for front in fronts):
            only = tuple(front[0] for front in fronts)
            return (only,) if _fit_together(only, limits) else ()
        partial: list[tuple[CostOption, ...]] = [()]
        for front in fronts:
            partial = [(*some, option) for some in partial for option in front]
            partial = [some for some in partial if _fit_together(some, limits)]
            if len(partial) > MAX_CONFIGURATIONS:
                self.truncated = True
                # The fastest, and the leanest, so that later members fit.
                fast = sorted(partial, key=lambda some: sum(o.seconds for o in some))
                lean = sorted(partial, key=_peak_gb)
                partial = list(dict.fromkeys(fast[: MAX_CONFIGURATIONS // 2] + lean[: MAX_CONFIGURATIONS // 2]))
        kept: list[tuple[CostOption, ...]] = []
        for some in sorted(partial, key=lambda some: sum(option.seconds for option in some)):
            if not any(all(a.seconds <= b.seconds for a, b in zip(k, some, strict=True)) for k in kept):
                kept.append(some)
        return tuple(kept)

    def scaled(self, component: int, factor: float) -> PlanSpace:
        """The same space with one component's times multiplied. Cheap: unchanged data is shared."""
        other = copy.copy(self)
        name = self.order[component].name
        workflow = self.job.workflow.scaled(name, factor)
        other.job = replace(self.job, workflow=workflow)
        other.simulator = Simulator(workflow)
        other.order = other.simulator.order
        other.fastest = self.fastest.copy()
        other.fastest[component] *= factor
        other.cpu_times = {i: s * factor if i == component else s for i, s in self.cpu_times.items()}
        other.ways = {key: ways.scaled(factor) if key[0] == component else ways for key, ways in self.ways.items()}
        other._tables = {
            key: table and table.scaled(component, factor) if component in key[0] else table
            for key, table in self._tables.items()
        }
        now = {id(table): other._tables[key] for key, table in self._tables.items()}
        other._groupings = tuple(
            replace(grouping, tables=tuple(table for old in grouping.tables if (table := now[id(old)]) is not None))
            for grouping in self.groupings()
        )
        return other

    def node_fit(self, grouping: Grouping, sizes: tuple[int, ...]) -> bool:
        """Whether groups of these sizes can all lie evenly on nodes, where the rules require it."""
        if not self.even_nodes:
            return True
        key = (grouping.groups, grouping.kinds, sizes)
        if key not in self._fits:
            self._fits[key] = all(self.node_layout(grouping, sizes, kind) is not None for kind in self.nodes)
        return self._fits[key]

    def node_layout(self, grouping: Grouping, sizes: tuple[int, ...], kind: str) -> tuple[NodeSpread, ...] | None:
        """Even layout of the groups on a kind of GPU; None where they do not all fit."""
        groups = [(t, size) for t, size in zip(grouping.tables, sizes, strict=True) if t.kind == kind]
        return spread([self.splits(table.members, size, kind) for table, size in groups], self.nodes[kind])


class ComponentOptions:
    """All ways to run a component on a kind of GPU, by the size of its group.

    Arrays are indexed by size: the fastest way within that size and its cost (infinite where there is none).
    """

    def __init__(self, ways: tuple[CostOption, ...], max_gpus: int) -> None:
        self._options = ways
        self._of: tuple[ComponentOptions, float] | None = None  # the original, and the factor
        self._made: dict[int, list[CostOption]] = {}  # scaled fronts, on demand
        self.min_gpus = ways[0].gpus if ways else max_gpus + 1
        self._fronts: list[list[CostOption]] = [[]]
        waiting = iter(ways)
        option = next(waiting, None)
        for gpus in range(1, max_gpus + 1):
            front = self._fronts[-1]
            while option is not None and option.gpus <= gpus:
                # An earlier option wins a tie: fewer GPUs, then file order.
                if not any(old.no_worse_than(option) for old in front):
                    front = [old for old in front if not option.no_worse_than(old)] + [option]
                    front.sort(key=lambda o: (o.seconds, o.gpus, o.variant))
                option = next(waiting, None)
            self._fronts.append(front)
        fastest = [front[0] if front else None for front in self._fronts]
        self.seconds = np.array([o.seconds if o else np.inf for o in fastest])
        self.active = np.array([o.active_gb if o else np.inf for o in fastest])
        self.resident = np.array([o.resident_gb if o else 0.0 for o in fastest])
        self.host = np.array([o.host_gb if o else 0.0 for o in fastest])

    def scaled(self, factor: float) -> ComponentOptions:
        """The same ways with scaled times. Options are created on demand."""
        other = copy.copy(self)
        other.seconds = self.seconds * factor
        other._of, other._made = (self, factor), {}
        return other

    @property
    def options(self) -> tuple[CostOption, ...]:
        """All options, ordered by GPUs, then variant."""
        if self._of is None:
            return self._options
        before, factor = self._of
        return tuple(_slower(option, factor) for option in before.options)

    def front(self, gpus: int) -> list[CostOption]:
        """The Pareto front of options within so many GPUs, fastest first."""
        if self._of is None:
            return self._fronts[gpus]
        if gpus not in self._made:
            before, factor = self._of
            self._made[gpus] = [_slower(option, factor) for option in before.front(gpus)]
        return self._made[gpus]


def _slower(option: CostOption, factor: float) -> CostOption:
    return replace(option, seconds=option.seconds * factor)


def _peak_gb(some: tuple[CostOption, ...]) -> float:
    """The peak memory of any member on a GPU beside the others' residents."""
    return sum(o.resident_gb for o in some) + max(o.active_gb - o.resident_gb for o in some)


def _fit_together(some: tuple[CostOption, ...], limits: tuple[float | None, float | None]) -> bool:
    """Whether members of a group fit: active parts beside the others' residents, and parked ones on the host."""
    gpu_limit, host_limit = limits
    if gpu_limit is not None:
        resident = sum(option.resident_gb for option in some)
        if not all(fits(resident - option.resident_gb + option.active_gb, gpu_limit) for option in some):
            return False
    if host_limit is not None and len(some) > 1:
        parked = sum(option.host_gb for option in some) - min(option.host_gb for option in some)
        return fits(parked, host_limit)
    return True


def set_partitions(items: GroupMembers) -> Iterator[list[list[int]]]:
    """All partitions of the items; groups in order of their first item."""
    if not items:
        yield []
        return

    def place(index: int, groups: list[list[int]]) -> Iterator[list[list[int]]]:
        if index == len(items):
            yield [list(group) for group in groups]
            return
        for group in groups:
            group.append(items[index])
            yield from place(index + 1, groups)
            group.pop()
        groups.append([items[index]])
        yield from place(index + 1, groups)
        groups.pop()

    yield from place(0, [])
