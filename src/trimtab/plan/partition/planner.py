"""Entry point of the partition planner: which layers go on which device, with a proof and what to improve.

Uses the exact search or, where hosts have too many different links for that, a heuristic search with a lower bound that
is marked as unproven. A job without a schedule gets the reason, never an empty answer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.model.pipeline import (
    FrontierPoint,
    Host,
    Objective,
    PartitionAnswer,
    PipelineJob,
    PipelineLimit,
    PipelineStage,
    Schedule,
)
from trimtab.plan.partition.order import by_prices, first_order, improve, lower_bound
from trimtab.plan.partition.paths import PathFinder, least_latency
from trimtab.plan.partition.space import (
    MIB,
    TIE,
    UNLIMITED,
    DeviceVectors,
    PartitionSpace,
    allowed,
    candidates,
    capacity_bytes,
    crossing_bytes,
    fewest_devices,
    host_classes,
    hosts_for,
    join_of,
    least_bottleneck,
    link_table,
    space_of,
    stage_bytes,
    transfer_seconds,
    vectors_of,
)

MAX_WORK = 1.5e11
"""Bits that one bottleneck test may touch in the exact search: about two seconds."""

MAX_STAGES = 2e7
"""Possible stages, over all classes of hosts, whose costs may be held in memory: about 500 MB."""

MAX_BYTES = 1e9
"""Memory for the sets of the exact search, in bytes."""

EXACT = "exact"
UNPROVEN = "good orders and prices of hosts; not proven, see the lower bound"

FORWARD_ONLY = "a forward pass: no gradients, optimiser state or 1F1B activations are counted"


class _FoundSchedule(Frozen):
    """Stages as cuts and hosts, and what is proven about them."""

    pieces: tuple[tuple[int, int, Host], ...]
    bound: float
    optimal: bool
    ties_proven: bool
    method: str
    frontier: tuple[FrontierPoint, ...] = ()


def plan_partition(job: PipelineJob, objective: Objective = "throughput", *, frontier: bool = False) -> PartitionAnswer:
    """The best schedule of a job. Raises InfeasibleError where there is none."""
    if job.model.layers == 0:
        return PartitionAnswer(job, objective, Schedule(()), 0.0, True, True, (), EXACT)
    classes = host_classes(job)
    if job.model.layers**2 * len(classes) > MAX_STAGES:
        raise InputError(
            f"{job.model.layers} layers on {len(classes)} kinds of hosts are too many to plan",
            hint="join neighbouring layers into one, adding up their time_s and mem_MB",
        )
    if not classes:
        raise InfeasibleError("no host can hold a layer", where="devices", hint="list hosts of a profiled type")
    space = space_of(job, classes)
    if _small_enough(space):
        found = _exact(job, space, classes, objective, frontier)
    else:
        found = _unproven(job, space, classes, objective)
    if found is None:
        raise why_not(job)
    schedule = _schedule(job, found.pieces)
    notes = [FORWARD_ONLY]
    if not schedule.bottleneck_seconds > 0:
        notes.append("no stage takes any time: check time_s")
    if frontier and not found.frontier:
        notes.append("the frontier needs the exact search, which would take too long here: it is left out")
    return PartitionAnswer(
        job,
        objective,
        schedule,
        found.bound,
        found.optimal,
        found.ties_proven,
        limits_of(schedule),
        found.method,
        found.frontier,
        tuple(notes),
    )


def _small_enough(space: PartitionSpace) -> bool:
    size = math.prod(count + 1 for count in space.counts)
    work = float(size) * space.layers * space.classes * (space.classes + 8)
    return work <= MAX_WORK and size * space.layers * space.classes / 4 <= MAX_BYTES


def _exact(
    job: PipelineJob, space: PartitionSpace, classes: list[list[Host]], objective: Objective, frontier: bool
) -> _FoundSchedule | None:
    vectors = vectors_of(space)
    least = least_bottleneck(space, vectors) if objective == "throughput" else 0.0
    if least is None:
        return None
    most = least * (1 + TIE) if objective == "throughput" else UNLIMITED
    path = least_latency(space, vectors, most, allowed(space, most))
    if path is None:
        return None
    hosts = hosts_for(job, classes, [t for _, _, t in path.pieces])
    pieces = tuple((a, b, host) for (a, b, _), host in zip(path.pieces, hosts, strict=True))
    points = _frontier(space, vectors) if frontier else ()
    if objective == "latency":
        return _FoundSchedule(pieces, path.lower_bound, path.proven, path.proven, EXACT, points)
    return _FoundSchedule(pieces, least, True, path.proven, EXACT, points)


def _unproven(
    job: PipelineJob, space: PartitionSpace, classes: list[list[Host]], objective: Objective
) -> _FoundSchedule | None:
    """The better of two heuristic schedules, with the better of two bounds."""
    best: tuple[float, tuple[tuple[int, int, Host], ...]] | None = None
    placed, bound = by_prices(space, objective)
    if placed is not None:
        hosts = hosts_for(job, classes, [t for _, _, t in placed])
        pieces = tuple((a, b, host) for (a, b, _), host in zip(placed, hosts, strict=True))
        best = (_score(job, pieces, objective), pieces)
    every = [member for members in classes for member in members]
    single = space_of(job, [[host] for host in every])
    found = improve(single, first_order(job, every), objective)
    if found is not None:
        pieces = tuple((a, b, every[t]) for a, b, t in found[0])
        score = _score(job, pieces, objective)
        if best is None or score < best[0] * (1 - TIE):
            best = (score, pieces)
    if best is None:
        return None
    bound = max(bound, lower_bound(single, objective))
    return _FoundSchedule(best[1], min(bound, best[0]), best[0] <= bound * (1 + TIE), False, UNPROVEN)


def _score(job: PipelineJob, pieces: tuple[tuple[int, int, Host], ...], objective: Objective) -> float:
    schedule = _schedule(job, pieces)
    return schedule.bottleneck_seconds if objective == "throughput" else schedule.latency_seconds


def _frontier(space: PartitionSpace, vectors: DeviceVectors) -> tuple[FrontierPoint, ...]:
    """The minimum bottleneck for every number of devices, by bisection between candidates."""
    values = candidates(space)
    needed: dict[int, int | None] = {}

    def need(at: int) -> int | None:
        if at not in needed:
            needed[at] = fewest_devices(space, vectors, allowed(space, values[at]))
        return needed[at]

    spans = [(0, len(values) - 1)]
    while spans:
        low, high = spans.pop()
        different = need(low) != need(high)
        if different and high - low > 1:
            middle = (low + high) // 2
            spans += [(low, middle), (middle, high)]
    points = []
    known = sorted((at, devices) for at, devices in needed.items() if devices is not None)
    for devices in range(1, space.max_devices + 1):
        at = next((at for at, fewest in known if fewest <= devices), None)
        if at is not None:
            points.append(FrontierPoint(devices, float(values[at])))
    return tuple(points)


def _schedule(job: PipelineJob, pieces: tuple[tuple[int, int, Host], ...]) -> Schedule:
    """The stages with their costs, each summed over its own layers."""
    kinds = {kind.name: kind for kind in job.types}
    links = link_table(job)
    crossing, need = crossing_bytes(job), stage_bytes(job)
    by_name = {host.name: host for host in job.hosts}
    stages = []
    receivers = [host for _, _, host in pieces[1:]] + [by_name[job.sink] if job.sink else None]
    for (a, b, host), receiver in zip(pieces, receivers, strict=True):
        sent = 0.0
        if receiver is not None and receiver.name != host.name:
            sent = transfer_seconds(float(crossing[b]), *join_of(job, links, host, receiver))
        kind = kinds[host.type]
        stages.append(
            PipelineStage(
                host.name,
                host.type,
                a + 1,
                b,
                math.fsum(kind.time_s[a:b]),
                sent,
                float(need[a, b]),
                capacity_bytes(job, kind),
            )
        )
    first = pieces[0][2]
    brought = 0.0
    if job.source is not None and job.source != first.name:
        brought = transfer_seconds(float(crossing[0]), *join_of(job, links, by_name[job.source], first))
    return Schedule(tuple(stages), brought)


def limits_of(schedule: Schedule) -> tuple[PipelineLimit, ...]:
    """What takes time in a pipeline, longest first: improve the first one first."""
    limits = [PipelineLimit("transfer", -1, schedule.input_seconds)]
    for index, stage in enumerate(schedule.stages):
        limits.append(PipelineLimit("compute", index, stage.compute_seconds))
        limits.append(PipelineLimit("transfer", index, stage.transfer_seconds))
    return tuple(sorted((limit for limit in limits if limit.seconds > 0), key=lambda limit: -limit.seconds))


def why_not(job: PipelineJob) -> InfeasibleError:
    """Why a job has no schedule."""
    if job.max_devices is not None:
        without = replace(job, max_devices=None)
        space = space_of(without, host_classes(without))
        if _small_enough(space):
            fewest = fewest_devices(space, vectors_of(space), allowed(space, UNLIMITED))
            if fewest is not None:
                return InfeasibleError(
                    f"{_devices(job.max_devices)} cannot hold the model: at least {fewest} are needed",
                    hint=f"raise --max-devices to {fewest}",
                )
    need = stage_bytes(job)
    classes = host_classes(job)
    kinds = [next(kind for kind in job.types if kind.name == members[0].type) for members in classes]
    largest = max(kinds, key=lambda kind: kind.mem_mb)
    capacity = capacity_bytes(job, largest)
    kept_free = f", of which {job.headroom:.0%} stays free" if job.headroom else ""
    for layer in range(job.model.layers):
        # A layer may need less inside a longer stage, where less crosses the cuts.
        least = float(need[: layer + 1, layer + 1 :].min())
        if not least < capacity:
            return InfeasibleError(
                f"layer {layer + 1} fits on no device: it needs {least / MIB:.1f} MB with its buffers, and the largest "
                f"type, {largest.name}, has {largest.mem_mb:g} MB{kept_free}",
                hint="use a smaller batch size, fewer buffers, or a device with more memory",
            )
    space = space_of(job, classes)
    endless = np.zeros(space.classes)
    if not np.isfinite(PathFinder(space, UNLIMITED).priced(endless).whole):
        joined = replace(
            space, cut=np.zeros_like(space.cut), enter=np.zeros(space.classes), leave=np.zeros(space.classes)
        )
        if np.isfinite(PathFinder(joined, UNLIMITED).priced(endless).whole):
            mute = sorted(kind.name for kind in job.types if kind.bw_mbps <= 0)
            listed = f" ({', '.join(mute)})" if mute else ""
            return InfeasibleError(
                f"the model needs more than one device, and devices without bandwidth{listed} can pass nothing on",
                hint="state bw_Mbps of the device types, or use a device that holds the whole model",
            )
        return InfeasibleError(
            "no way of cutting the model fits: wherever it is cut, some stage with its buffers exceeds every device",
            hint="use a smaller batch size, fewer buffers, or a device with more memory",
        )
    if not _small_enough(space):
        return InfeasibleError(
            "no schedule was found, and there are too many unlike hosts to prove that there is none",
            hint="leave out links that hardly differ, or hosts; or use a smaller batch size or fewer buffers",
        )
    held = sum(len(members) for members in classes)
    spared = f" ({job.headroom:.0%} stays free)" if job.headroom else ""
    total = sum(len(members) * capacity_bytes(job, kind) for members, kind in zip(classes, kinds, strict=True))
    return InfeasibleError(
        f"the devices together are too small: the layers take {math.fsum(job.model.mem_mb):.0f} MB without buffers, "
        f"{_devices(held)} {'have' if held != 1 else 'has'} {total / MIB:.0f} MB for them{spared}, and no split fits",
        hint="add devices, or use a smaller batch size or fewer buffers",
    )


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"
