"""A slow, obvious planner to check the real one against: plain loops over batches, plans and options.

It shares no code with `trimtab.plan`: costs, memory, simulation and enumeration are written a second time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.model.plan import FrameworkRules
from trimtab.model.workflow import Component, PlacementJob, Variant


def seconds_on(variant: Variant, kind: str, gpus: int) -> float:
    points = sorted(variant.points(kind))
    for count, seconds in points:
        if count == gpus:
            return seconds
    below = [p for p in points if p[0] < gpus]
    above = [p for p in points if p[0] > gpus]
    if len(points) == 1 and variant.doubling < 1:
        doublings = math.log2(gpus / points[0][0])
        return variant.floor_seconds + (points[0][1] - variant.floor_seconds) / (2 * variant.doubling) ** doublings
    if len(points) == 1 or not below:
        count, seconds = points[0]
        return variant.floor_seconds + (seconds - variant.floor_seconds) * count / gpus
    (g0, s0), (g1, s1) = (below[-1], above[0]) if above else points[-2:]
    share = (1 / gpus - 1 / g0) / (1 / g1 - 1 / g0)
    line = s0 + share * (s1 - s0)
    return line if above else max(line, s1 * g1 / gpus)


@dataclass(frozen=True)
class Choice:
    """A component's place: the number of its group (None on CPU), and its time."""

    group: int | None
    seconds: float


def iteration(
    job: PlacementJob, choices: dict[str, Choice], iterations: int = 1
) -> list[dict[str, tuple[float, float]]]:
    """(start, end) of every component, iteration by iteration, batch by batch."""
    workflow = job.workflow
    order = [c.name for c in workflow.in_order()]
    count = workflow.batches
    by_name = {c.name: c for c in workflow.components}
    groups: dict[int, list[str]] = {}
    for name in order:
        if choices[name].group is not None:
            groups.setdefault(choices[name].group, []).append(name)
    sync = sync_seconds(job, choices)
    ends: list[dict[str, list[float]]] = []
    spans: list[dict[str, tuple[float, float]]] = []
    for t in range(iterations):
        done: dict[str, list[float]] = {}
        span = {}
        for name in order:
            component = by_name[name]
            free = 0.0
            if choices[name].group is None:
                if t:
                    free = ends[t - 1][name][-1]
            else:
                members = groups[choices[name].group]
                at = members.index(name)
                if at:
                    free = done[members[at - 1]][-1]
                elif t:
                    free = ends[t - 1][members[-1]][-1]
                free += switch(component, by_name[members[at - 1]], len(members))
            if workflow.weight_sync and t:
                if name == workflow.weight_sync.source:
                    free = max(free, ends[t - 1][name][-1] + sync)
                if name == workflow.weight_sync.target and t - 1 - workflow.staleness >= 0:
                    free = max(free, ends[t - 1 - workflow.staleness][workflow.weight_sync.source][-1] + sync)
            clock = free
            mine = []
            for b in range(count):
                chunk = count if component.granularity is None else component.granularity
                last = min((b // chunk + 1) * chunk, count) - 1
                ready = max((done[p][last] for p in component.after), default=0.0)
                start = max(clock, ready)
                if b == 0:
                    first = start
                clock = start + choices[name].seconds * (
                    share_of_time(component, (b + 1) / count) - share_of_time(component, b / count)
                )
                mine.append(clock)
            done[name] = mine
            span[name] = (first, clock)
        ends.append(done)
        spans.append(span)
    return spans


def sync_seconds(job: PlacementJob, choices: dict[str, Choice]) -> float:
    sync = job.workflow.weight_sync
    if sync is None:
        return 0.0
    shared = choices[sync.source].group == choices[sync.target].group
    return sync.shared_seconds if shared else sync.separate_seconds


def switch(component: Component, previous: Component, members: int) -> float:
    if members == 1:
        return 0.0
    if component.engine is not None and component.engine == previous.engine:
        return 0.0
    return component.switch_seconds


def share_of_time(component: Component, share: float) -> float:
    if not component.completion:
        return share
    points = [(0.0, 0.0), *component.completion]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if share <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return points[-1][1]


def plan_seconds(job: PlacementJob, choices: dict[str, Choice]) -> float:
    if not job.workflow.staleness:
        (span,) = iteration(job, choices)
        return max(end for _, end in span.values()) + sync_seconds(job, choices)
    many = 60 * len(job.workflow.components)
    spans = iteration(job, choices, many)
    ends = [max(end for _, end in span.values()) for span in spans]
    # The system repeats with some whole number of iterations: the mean over a common multiple is the period.
    for repeat in range(1, 13):
        tail = [ends[-1 - k] - ends[-1 - k - repeat] for k in range(24)]
        if max(tail) - min(tail) <= 1e-9 * max(1.0, max(tail)):
            return tail[0] / repeat
    raise AssertionError("the simulation did not become periodic")


def partitions(items: list[str]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        for i in range(len(partition)):
            yield [*partition[:i], [first, *partition[i]], *partition[i + 1 :]]
        yield [[first], *partition]


def group_choices(job: PlacementJob, group: list[str], kind: str, gpus: int) -> list[dict[str, float]]:
    """Every combination of variants and counts (at most `gpus`) of a group that fits in memory, as times."""
    cluster = job.cluster
    limit, host = cluster.gpu_memory_gb(kind), cluster.host_memory_gb_per_gpu(kind)
    ways = []
    for name in group:
        mine = []
        for variant in job.workflow.component(name).variants:
            if not variant.points(kind):
                continue
            for count in range(1, gpus + 1):
                if count % variant.multiple_of or (variant.gpus is not None and count not in variant.gpus):
                    continue
                mine.append(
                    (
                        seconds_on(variant, kind, count),
                        variant.memory.active.at(count),
                        variant.memory.resident.at(count),
                        variant.host_memory_gb,
                    )
                )
        # A way that another one matches in time and in memory is not needed.
        mine = list(dict.fromkeys(mine))
        ways.append(
            [w for w in mine if not any(o != w and all(a <= b for a, b in zip(o, w, strict=True)) for o in mine)]
        )
    found = []
    for combination in itertools.product(*ways):
        if limit is not None and any(
            active + sum(other[2] for j, other in enumerate(combination) if j != i) > limit + 1e-9
            for i, (_, active, _, _) in enumerate(combination)
        ):
            continue
        if (
            host is not None
            and len(combination) > 1
            and any(
                sum(other[3] for j, other in enumerate(combination) if j != i) > host + 1e-9
                for i in range(len(combination))
            )
        ):
            continue
        found.append({name: way[0] for name, way in zip(group, combination, strict=True)})
    # Keep only times of which none is better in every member; the simulation is monotone in each.
    found = list({tuple(sorted(f.items())): f for f in found}.values())
    return [f for f in found if not any(g is not f and all(g[n] <= f[n] for n in group) for g in found)]


def lies_evenly(groups: list[tuple[int, set[int]]], nodes: list[int], widest: int) -> bool:
    """Whether groups of (size, blocks) can have as many GPUs on each of their nodes: every choice of nodes is tried."""
    if not groups:
        return True
    size, blocks = groups[0]
    for count in range(1, len(nodes) + 1):
        each = size // count
        if size % count or any(each % b if b <= widest else b % each for b in blocks):
            continue
        for chosen in itertools.combinations(range(len(nodes)), count):
            left = [gpus - each * (node in chosen) for node, gpus in enumerate(nodes)]
            if min(left) >= 0 and lies_evenly(groups[1:], left, widest):
                return True
    return False


def allowed(
    job: PlacementJob, rules: FrameworkRules, partition: list[list[str]], kinds: tuple[str, ...], sizes: tuple[int, ...]
) -> bool:
    """Whether a framework can run it."""
    wanted = {frozenset(group): size for group, size in zip(partition, sizes, strict=True)}
    if not any(
        {group.components for group in grouping} == set(wanted)
        and all(group.sizes is None or wanted[group.components] in group.sizes for group in grouping)
        for grouping in rules.groupings
    ):
        return False
    if not rules.even_nodes:
        return True
    blocks = [{v.multiple_of for name in group for v in job.workflow.component(name).variants} for group in partition]
    for kind in job.cluster.kinds:
        nodes = [node.gpus for node in job.cluster.nodes if node.gpus and node.gpu == kind]
        mine = [(s, b) for s, b, k in zip(sizes, blocks, kinds, strict=True) if k == kind]
        if not lies_evenly(mine, nodes, max(nodes)):
            return False
    return True


def every_plan(job: PlacementJob, rules: FrameworkRules | None = None) -> Iterator[tuple[float, int, int]]:
    """(seconds, groups, gpus) of every plan."""
    on_gpu = [c.name for c in job.workflow.components if not c.on_cpu]
    fixed = {c.name: Choice(None, c.cpu_seconds) for c in job.workflow.components if c.on_cpu}
    budgets = {kind: len(job.cluster.ranks(kind)) for kind in job.cluster.kinds}
    cache: dict[tuple[tuple[str, ...], str, int], list[dict[str, float]]] = {}
    for partition in partitions(on_gpu):
        for kinds in itertools.product(budgets, repeat=len(partition)):
            for sizes in itertools.product(*(range(1, budgets[kind] + 1) for kind in kinds)):
                if any(
                    sum(s for s, k in zip(sizes, kinds, strict=True) if k == kind) > budget
                    for kind, budget in budgets.items()
                ):
                    continue
                if rules is not None and not allowed(job, rules, partition, kinds, sizes):
                    continue
                ways = []
                for group, kind, size in zip(partition, kinds, sizes, strict=True):
                    key = (tuple(group), kind, size)
                    if key not in cache:
                        cache[key] = group_choices(job, group, kind, size)
                    ways.append(cache[key])
                # A size that allows exactly what one GPU fewer allows is the same plan with an idle GPU.
                if rules is None and any(
                    size > 1 and cache.get((tuple(group), kind, size - 1)) == cache[tuple(group), kind, size]
                    for group, kind, size in zip(partition, kinds, sizes, strict=True)
                ):
                    continue
                for combination in itertools.product(*ways):
                    choices = dict(fixed)
                    for number, times in enumerate(combination):
                        for name, seconds in times.items():
                            choices[name] = Choice(number, seconds)
                    yield plan_seconds(job, choices), len(partition), sum(sizes)


def best(job: PlacementJob, rules: FrameworkRules | None = None) -> tuple[float, int, int] | None:
    """The least seconds, and the fewest groups, then GPUs, among plans within a tie of it."""
    plans = list(every_plan(job, rules))
    if not plans:
        return None
    least = min(seconds for seconds, _, _ in plans)
    tied = [(groups, gpus) for seconds, groups, gpus in plans if seconds <= least * (1 + 1e-9)]
    groups, gpus = min(tied)
    assert math.isfinite(least)
    return least, groups, gpus
