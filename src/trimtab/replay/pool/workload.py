"""The tasks of a pool simulation: from a job table or a generator, each with a random priority class.

Job tables have no priorities. Every job gets a class at random, with the shares of the scenario, independent of its
size and length: it depends on the seed and its position in the trace alone, so it is the same for every policy. A job
larger than a node becomes a gang of whole nodes and a remainder.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from trimtab.core.resources import Resources
from trimtab.formats.sections import Amount, Count, Made, Positive, Priority
from trimtab.model.pool import PlacementStrategy, TaskSpec
from trimtab.replay.common.timing import Durations
from trimtab.replay.common.traces import JobRow

POOL = "pool"
Sizes = Annotated[
    tuple[tuple[int, float], ...],
    Made(Annotated[dict[Count, Positive], Field(min_length=1)], lambda shares: tuple(sorted(shares.items()))),
]


@dataclass(frozen=True)
class PriorityClass:
    """A priority class and its share of the tasks."""

    name: str
    priority: Priority
    share: Amount  # of all tasks, at random


CLASSES = (
    PriorityClass("high", 8.0, 0.1),
    PriorityClass("normal", 5.0, 0.3),
    PriorityClass("low", 2.0, 0.6),
)


@dataclass(frozen=True)
class WorkloadTask:
    """A task, its submission time, and the length of its work, which only the simulation knows."""

    spec: TaskSpec
    submit_s: float
    work_s: float
    gpus: int
    class_: str


@dataclass(frozen=True)
class TaskGenerator:
    """Generated jobs: Poisson arrivals, random durations, sizes by share."""

    count: Count
    per_hour: Positive
    duration_s: Durations
    gpus: Sizes = ((1, 1.0),)  # sizes and their shares

    def rows(self, seed: int) -> list[JobRow]:
        """Jobs in order of submission."""
        source = random.Random(f"tasks {seed}")
        sizes, shares = zip(*self.gpus, strict=True)
        at, found = 0.0, []
        for _ in range(self.count):
            at += source.expovariate(self.per_hour / 3600.0)
            size = source.choices(sizes, shares)[0]
            found.append(JobRow(at, max(1.0, self.duration_s.draw(source)), size))
        return found

    def text(self) -> str:
        sizes = ", ".join(f"{size} GPUs {share:g}" for size, share in self.gpus)
        return (
            f"{self.count:,} generated jobs, {self.per_hour:g} an hour at random, lasting {self.duration_s.text()}; "
            f"shares of sizes: {sizes}"
        )


def workload(
    rows: Sequence[JobRow],
    *,
    seed: int,
    node_gpus: int,
    classes: Sequence[PriorityClass] = CLASSES,
    rate: float = 1.0,
    saves: bool = True,
    estimates: bool = False,
) -> list[WorkloadTask]:
    """Turns rows into tasks. `rate` 2: they arrive twice as fast; `estimates`: tasks state their length."""
    source = random.Random(f"classes {seed}")
    names = [item.name for item in classes]
    by_name = {item.name: item for item in classes}
    drawn = source.choices(names, [item.share for item in classes], k=len(rows))
    sizes: dict[int, tuple[Resources, ...]] = {}
    found = []
    for number, (row, name) in enumerate(zip(rows, drawn, strict=True)):
        if row.gpus not in sizes:
            sizes[row.gpus] = bundles(row.gpus, node_gpus)
        spec = TaskSpec(
            f"t{number}",
            POOL,
            sizes[row.gpus],
            priority=by_name[name].priority,
            estimate_s=row.duration_s if estimates else 0.0,
            strategy=PlacementStrategy.pack,
            restarts=-1,
            saves=saves,
            awaits_node=True,  # a failed node comes back
        )
        found.append(WorkloadTask(spec, row.submit_s / rate, row.duration_s, row.gpus, name))
    return found


def bundles(gpus: int, node_gpus: int) -> tuple[Resources, ...]:
    """Bundles of a job: one if it fits on a node, else whole nodes and a remainder."""
    if gpus <= node_gpus:
        return (Resources.of(gpu=gpus),)
    whole, rest = divmod(gpus, node_gpus)
    return (Resources.of(gpu=node_gpus),) * whole + ((Resources.of(gpu=rest),) if rest else ())
