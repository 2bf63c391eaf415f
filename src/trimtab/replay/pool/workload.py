"""The tasks of a simulation: from a job table or from a generator, with a class of priority for each by a seed.

Job tables do not say how important a job was. So every job gets a class by chance, with the shares that the scenario
states, whatever its size and length: by the seed and its place in the trace alone, the same for every policy. A job
larger than a node is a gang of whole nodes and the rest.
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
    """Tasks of one importance."""

    name: str
    priority: float
    share: float  # of all tasks, by chance


CLASSES = (
    PriorityClass("high", 8.0, 0.1),
    PriorityClass("normal", 5.0, 0.3),
    PriorityClass("low", 2.0, 0.6),
)


@dataclass(frozen=True)
class WorkloadTask:
    """A task, when it comes, and how long its work takes alone. Nobody but the simulation knows the latter."""

    spec: TaskSpec
    submit_s: float
    work_s: float
    gpus: int
    class_: str


@dataclass(frozen=True)
class TaskGenerator:
    """Jobs made up: arrivals at random at a steady rate, lengths lognormal, sizes by share."""

    count: int
    per_hour: float
    duration_s: Distribution
    gpus: tuple[tuple[int, float], ...]  # sizes and their shares

    def rows(self, seed: int) -> list[JobRow]:
        """The jobs, in order of submission."""
        source = random.Random(f"tasks {seed}")
        sizes, shares = zip(*self.gpus, strict=True)
        at, found = 0.0, []
        for _ in range(self.count):
            at += source.expovariate(self.per_hour / 3600.0)
            size = source.choices(sizes, shares)[0]
            found.append(JobRow(at, max(1.0, self.duration_s.draw(source)), size))
        return found

    def text(self) -> str:
        """As a report states it."""
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
    """The rows as tasks. `rate` 2: they come twice as fast; `estimates`: a task says how long it will run."""
    source = random.Random(f"classes {seed}")
    names = [one.name for one in classes]
    by_name = {one.name: one for one in classes}
    drawn = source.choices(names, [one.share for one in classes], k=len(rows))
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
            awaits_node=True,  # one that fails comes back
        )
        found.append(WorkloadTask(spec, row.submit_s / rate, row.duration_s, row.gpus, name))
    return found


def bundles(gpus: int, node_gpus: int) -> tuple[Resources, ...]:
    """A job's bundles: one where a node can hold it, else whole nodes and the rest."""
    if gpus <= node_gpus:
        return (Resources.of(gpu=gpus),)
    whole, rest = divmod(gpus, node_gpus)
    return (Resources.of(gpu=node_gpus),) * whole + ((Resources.of(gpu=rest),) if rest else ())


def classes_of(said: Mapping[str, Mapping[str, float]], where: str) -> tuple[PriorityClass, ...]:
    """As a scenario says them: {high: {priority: 8, share: 0.1}}."""
    found = tuple(PriorityClass(name, one["priority"], one["share"]) for name, one in said.items())
    if not found or not sum(one.share for one in found) > 0 or any(one.share < 0 for one in found):
        raise InputError("no class has a share of the tasks", where=where, hint="{high: {priority: 8, share: 0.1}}")
    return found
