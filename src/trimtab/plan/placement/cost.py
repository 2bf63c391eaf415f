"""Cost of a component on so many GPUs, from its measured points.

Measured points are exact. Between two of them time is linear in 1/gpus; below the smallest, and with a single point,
the part above the stated floor is inversely proportional to the GPUs; above the largest, the line in 1/gpus through the
last two continues, but never beyond perfect scaling from the last one. Values outside the measured range are marked as
extrapolated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from trimtab.model.workflow import Cluster, Component, Variant

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


@dataclass(frozen=True)
class CostOption:
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
