"""The tasks of a pool simulation: from a job table or a generator, each with a random priority class.

Job tables have no priorities. Every job gets a class at random, with the shares of the scenario, independent of its
size and length: it depends on the seed and its position in the trace alone, so it is the same for every policy. A job
larger than a node becomes a gang of whole nodes and a remainder.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.core.errors import InputError
from trimtab.core.resources import Resources
from trimtab.model.pool import PlacementStrategy, TaskSpec
from trimtab.replay.common.timing import Distribution
from trimtab.replay.common.traces import JobRow

POOL = "pool"


@dataclass(frozen=True)
class PriorityClass:
    """A priority class and its share of the tasks."""

    name: str
    priority: float
    share: float  # of all tasks, at random


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

    count: int
    per_hour: float
    duration_s: Distribution
    gpus: tuple[tuple[int, float], ...]  # sizes and their shares

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


def classes_of(classes: Mapping[str, Mapping[str, float]], where: str) -> tuple[PriorityClass, ...]:
    """Parses `classes` of a scenario: {high: {priority: 8, share: 0.1}}."""
    found = tuple(PriorityClass(name, item["priority"], item["share"]) for name, item in classes.items())
    if not found or not sum(item.share for item in found) > 0 or any(item.share < 0 for item in found):
        raise InputError(
            "shares must be 0 or more, and not all 0", where=where, hint="{high: {priority: 8, share: 0.1}}"
        )
    return found
