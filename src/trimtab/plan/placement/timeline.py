"""Converts a plan of the search to a Plan: ranks, starts and ends, timeline bars, idle shares.

Ranks of a group are contiguous, with model-parallel blocks inside nodes where possible: groups are ordered along the
ranks, with idle GPUs between them where that keeps a block from straddling two nodes. Ties go to no gaps, then to file
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from trimtab.core.frozen import Frozen
from trimtab.model.plan import ComponentGroup, PlacedComponent, PlacementMode, Plan, TimelineBar
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.simulate import Floats, GroupingShape
from trimtab.plan.placement.space import CostOption, PlanSpace, is_extrapolated
from trimtab.plan.placement.spread import positions_of

SHOWN_PERIODS = 2
"""Periods of the steady state that a timeline shows with staleness."""


def to_plan(space: PlanSpace, found: FoundPlan, ranks: tuple[tuple[int, ...], ...] | None = None) -> Plan:
    """The plan with its ranks (laid out unless given), predicted starts and ends, and timeline."""
    grouping = found.grouping
    ranks = ranks or _ranks(space, found)
    order, workflow = space.order, space.job.workflow
    shape = space.shape(grouping)
    options: dict[int, CostOption] = {}
    group_of: dict[int, int] = {}
    for number, (table, chosen) in enumerate(zip(grouping.tables, found.options, strict=True)):
        for i, option in zip(table.members, chosen, strict=True):
            options[i], group_of[i] = option, number
    times = np.array([options[i].seconds if i in options else space.cpu_times[i] for i in range(len(order))])
    spans, bars, shown = _draw(space, shape, times, found.seconds)
    syncing = set()
    if workflow.weight_sync is not None:
        syncing = {
            i for i, c in enumerate(order) if c.name in (workflow.weight_sync.source, workflow.weight_sync.target)
        }
    occupied: dict[int, float] = {}  # busy seconds of each GPU
    for table, here in zip(grouping.tables, ranks, strict=True):
        seconds = sum(float(times[m]) + shape.switch[m] for m in table.members)
        for rank in here:
            occupied[rank] = occupied.get(rank, 0.0) + seconds
    in_sync = {r for t, here in zip(grouping.tables, ranks, strict=True) if syncing & set(t.members) for r in here}
    for rank in in_sync:
        occupied[rank] += shape.sync
    placed = []
    for i, component in enumerate(order):
        extrapolated, variant = False, ""
        gpus: tuple[int, ...] = ()
        busy = float(times[i])
        if i in options:
            number, option = group_of[i], options[i]
            table = grouping.tables[number]
            gpus = ranks[number][: option.gpus]
            chosen_variant = component.variants[option.variant]
            variant = chosen_variant.name
            extrapolated = is_extrapolated(chosen_variant.points(table.kind), option.gpus)
            busy = _mean([occupied[rank] for rank in ranks[number]])
        placed.append(
            PlacedComponent(
                name=component.name,
                gpus=gpus,
                variant=variant,
                seconds=float(times[i]),
                start=spans[i][0],
                end=spans[i][1],
                idle_share=_share(1 - busy / found.seconds) if found.seconds else 0.0,
                extrapolated=extrapolated,
                switch_seconds=shape.switch[i],
            )
        )
    groups = tuple(
        ComponentGroup(tuple(order[i].name for i in table.members), gpus, table.kind)
        for table, gpus in zip(grouping.tables, ranks, strict=True)
    )
    working = sum(len(p.gpus) * p.seconds for p in placed)
    overhead = len(in_sync) * shape.sync + sum(
        len(group.gpus) * shape.switch[m]
        for group, table in zip(groups, grouping.tables, strict=True)
        for m in table.members
    )
    total = space.job.cluster.gpus
    return Plan(
        groups=groups,
        components=tuple(placed),
        iteration_seconds=found.seconds,
        sync_seconds=shape.sync,
        mode="hybrid" if len(occupied) < sum(map(len, ranks)) else _mode(groups),
        timeline=bars,
        timeline_seconds=shown,
        idle_share=_share(1 - (working + overhead) / (total * found.seconds)) if found.seconds else 0.0,
        total_gpus=total,
    )


def _mode(groups: tuple[ComponentGroup, ...]) -> PlacementMode:
    if len(groups) == 1:
        return "collocated"
    return "disaggregated" if all(len(group.components) == 1 for group in groups) else "hybrid"


def _mean(values: list[float]) -> float:
    return values[0] if values[0] == values[-1] else sum(values) / len(values)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _ranks(space: PlanSpace, found: FoundPlan) -> tuple[tuple[int, ...], ...]:
    result: list[tuple[int, ...]] = [()] * len(found.sizes)
    side_by_side = range(len(found.sizes) - 1 if found.grouping.spans else len(found.sizes))
    for kind in space.nodes:
        line = space.job.cluster.ranks(kind)
        mine = [i for i in side_by_side if found.grouping.tables[i].kind == kind]
        for i, at in zip(mine, _positions(space, found, kind, mine) if mine else (), strict=True):
            result[i] = tuple(line[position] for position in at)
        if found.grouping.spans and found.grouping.tables[-1].kind == kind:
            result[-1] = tuple(line[: found.sizes[-1]])
    return tuple(result)


def _positions(space: PlanSpace, found: FoundPlan, kind: str, mine: list[int]) -> list[Sequence[int]]:
    """GPU positions of groups of one kind, numbered across its nodes."""
    nodes = space.nodes[kind]
    if space.even_nodes:
        node_layout = space.node_layout(found.grouping, found.sizes, kind)
        assert node_layout is not None, "the search returns only sizes that lie evenly on nodes"
        return positions_of(node_layout, nodes)
    strips = []
    for i in mine:
        members = zip(found.grouping.tables[i].members, found.options[i], strict=True)
        blocks = tuple((space.order[m].variants[option.variant].multiple_of, option.gpus) for m, option in members)
        strips.append(RankStrip(found.sizes[i], blocks))
    starts = lay_out(tuple(strips), nodes)
    return [range(start, start + strip.size) for start, strip in zip(starts, strips, strict=True)]


def _draw(
    space: PlanSpace, shape: GroupingShape, times: Floats, period: float
) -> tuple[list[tuple[float, float]], tuple[TimelineBar, ...], float]:
    """Start and end of each component, the bars, and the seconds they cover."""
    workflow, simulator = space.job.workflow, space.simulator
    units = [simulator.unit_seconds(i, float(t)) for i, t in enumerate(times)]
    if not workflow.staleness:
        (trace,) = simulator.trace(times, shape)
        bars = _bars(space, shape, trace, units, None)
        spans = [_span(ends, unit) for ends, unit in zip(trace, units, strict=True)]
        if shape.sync:
            assert workflow.weight_sync is not None
            last, ends = max(end for _, end in spans), (workflow.weight_sync.source, workflow.weight_sync.target)
            bars += [TimelineBar(name, "sync", last, last + shape.sync) for name in ends]
        return spans, tuple(_in_order(bars)), period
    # Long enough for the warm-up to fade; the middle of the steady state is shown.
    iterations = 12 * (workflow.staleness + 1) + 4 * len(times)
    traces = simulator.trace(times, shape, iterations)
    shown_from = iterations - SHOWN_PERIODS - workflow.staleness - 2
    spans = [_span(ends, unit) for ends, unit in zip(traces[shown_from], units, strict=True)]
    origin = min(start for start, _ in spans)
    bars = []
    for t, trace in enumerate(traces[1:], 1):
        bars += _bars(space, shape, trace, units, traces[t - 1])
        if shape.sync and workflow.weight_sync is not None:
            source = next(i for i, c in enumerate(space.order) if c.name == workflow.weight_sync.source)
            bars.append(
                TimelineBar(space.order[source].name, "sync", trace[source][-1], trace[source][-1] + shape.sync)
            )
    width = SHOWN_PERIODS * period
    clipped = [
        TimelineBar(bar.component, bar.doing, max(bar.start - origin, 0.0), min(bar.end - origin, width))
        for bar in bars
        if bar.end - origin > 1e-12 and bar.start - origin < width
    ]
    return [(start - origin, end - origin) for start, end in spans], tuple(_in_order(clipped)), width


def _span(ends: Floats, unit: Floats) -> tuple[float, float]:
    return float(ends[0] - unit[0]), float(ends[-1])


def _bars(
    space: PlanSpace, shape: GroupingShape, trace: list[Floats], units: list[Floats], previous: list[Floats] | None
) -> list[TimelineBar]:
    """The intervals of one iteration in which each component computes or switches without a break."""
    bars: list[TimelineBar] = []
    for i, (ends, unit) in enumerate(zip(trace, units, strict=True)):
        name = space.order[i].name
        starts = ends - unit
        breaks = np.flatnonzero(starts[1:] > ends[:-1] + 1e-9 * max(1.0, float(ends[-1])))
        first = [0, *(int(at) + 1 for at in breaks)]
        last = [*(int(at) for at in breaks), len(ends) - 1]
        bars += [TimelineBar(name, "run", float(starts[a]), float(ends[b])) for a, b in zip(first, last, strict=True)]
        if shape.switch[i]:
            since = max((float(trace[before][-1]) for before in shape.before[i]), default=0.0)
            if previous is not None:
                since = max(since, *(float(previous[last][-1]) for last in shape.after[i]), 0.0)
            bars.append(TimelineBar(name, "switch", since, since + shape.switch[i]))
    return bars


def _in_order(bars: list[TimelineBar]) -> list[TimelineBar]:
    return sorted(bars, key=lambda bar: (bar.start, bar.end, bar.component))


# ---- ranks -----------------------------------------------------------------------------------------------------------


class RankStrip(Frozen):
    """A group to lay out: its size, and the (block, gpus) of its members; a block should be on one node."""

    size: int
    blocks: tuple[tuple[int, int], ...]


def lay_out(strips: tuple[RankStrip, ...], nodes: tuple[int, ...]) -> tuple[int, ...]:
    """First position of each strip on a line of nodes, with the fewest straddling blocks.

    The sizes together fit on the line.
    """
    edges = [0]
    for gpus in nodes:
        edges.append(edges[-1] + gpus)
    # state: (strips placed as bits, position reached) -> (straddles, gap, order, starts)
    states: dict[tuple[int, int], tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {(0, 0): (0, 0, (), ())}
    torn: dict[tuple[int, int], int] = {}
    everything = (1 << len(strips)) - 1
    sizes = sum(strip.size for strip in strips)
    for _ in strips:
        following: dict[tuple[int, int], tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {}
        for (mask, position), (cost, gap, order, starts) in sorted(states.items()):
            left = sizes - sum(strip.size for i, strip in enumerate(strips) if mask >> i & 1)
            for i, strip in enumerate(strips):
                if mask >> i & 1:
                    continue
                for start in _starts(position, strip, edges, edges[-1] - left):
                    state = (mask | 1 << i, start + strip.size)
                    if (i, start) not in torn:
                        torn[i, start] = straddles(strip, start, edges)
                    value = (cost + torn[i, start], gap + start - position, (*order, i), (*starts, start))
                    if state not in following or value < following[state]:
                        following[state] = value
        states = following
    _, _, order, starts = min(value for (mask, _), value in states.items() if mask == everything)
    first = dict(zip(order, starts, strict=True))
    return tuple(first[i] for i in range(len(strips)))


def _starts(position: int, strip: RankStrip, edges: list[int], latest: int) -> list[int]:
    """Positions worth trying: here, the next node, and the next multiple of its largest block in this node."""
    node = next((edge for edge in edges if edge >= position), position)
    here = max(edge for edge in edges if edge <= position)
    block = max((block for block, _ in strip.blocks), default=1)
    aligned = here + -(-(position - here) // block) * block
    return sorted({start for start in (position, node, aligned) if position <= start <= latest})


def straddles(strip: RankStrip, start: int, edges: list[int]) -> int:
    """Blocks of a strip at that position that lie across more nodes than necessary."""
    widest = max(b - a for a, b in pairwise(edges))
    count = 0
    for block, gpus in strip.blocks:
        if block <= widest:
            end = start + gpus // block * block
            count += sum(1 for edge in edges if start < edge < end and (edge - start) % block)
            continue
        for first in range(start, start + gpus - block + 1, block):
            crossed = sum(1 for edge in edges if first < edge < first + block)
            count += crossed > (block - 1) // widest
    return count
