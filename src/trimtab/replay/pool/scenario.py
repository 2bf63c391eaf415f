"""Reads a pool scenario file: a cluster, its tasks, durations, and the policies to compare; and runs a policy of it.

The file is validated before anything runs: an unknown key is refused with the nearest known key, an invalid value with
its place. Trace paths are relative to the file.

Job tables have no priorities. Every job gets a class at random, with the shares of the scenario, independent of its
size and length: it depends on the seed and its position in the trace alone, so it is the same for every policy. A job
larger than a node becomes a gang of whole nodes and a remainder.

Wait: all time in the queue, including after evictions. Completion: from submission to the end of the work. Percentiles
are values of the sorted list, nothing is fitted. Utilisation counts work that was not redone, until the last
submission: after that the cluster only drains.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from trimtab.core.errors import InputError, check_known
from trimtab.core.frozen import Frozen
from trimtab.core.resources import Resources
from trimtab.formats import sections
from trimtab.formats.yaml_text import read_source
from trimtab.model.pool import PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec
from trimtab.replay.common.comparison import (
    BY_USE,
    SEEDS,
    Comparison,
    PolicySummary,
    Recommendation,
    ScenarioKind,
    Seeds,
    Spread,
    SweepRules,
    by_policy,
    check_unique,
    percentile,
    spread,
    spreads,
)
from trimtab.replay.common.timing import MEASURED, Churn, ChurnEvent, Durations, NodeEventKind, PoolTimes
from trimtab.replay.common.traces import JobRow, jobs
from trimtab.replay.pool import driver
from trimtab.replay.pool.clairvoyant import Clairvoyant
from trimtab.replay.pool.policies import POOL_KEYS, PREEMPTION_KEYS, SWITCHES, THRESHOLD_GPU_S, PoolPolicy, scheduler

ALL = "all"
OF_RUN = ("evictions", "losses", "redone_gpu_h", "utilisation", "held", "makespan_s")


class ClassFigures(Frozen):
    """Figures of a class of tasks, or of all tasks."""

    tasks: int
    wait_mean_s: float
    wait_p50_s: float
    wait_p99_s: float
    completion_mean_s: float
    completion_p99_s: float
    slowdown_mean: float  # completion time over length of work
    evictions: int


OF_CLASS = tuple(item.name for item in fields(ClassFigures) if item.name != "tasks")


class PoolFigures(Frozen):
    """Figures of a run."""

    policy: str
    seed: int
    classes: dict[str, ClassFigures]
    evictions: int
    losses: int
    redone_gpu_h: float  # lost work
    utilisation: float  # useful work as a share of capacity
    held: float  # held by processes, as a share of capacity
    makespan_s: float
    events: int
    looks: int  # invariant checks
    checks: int  # full consistency checks of the scheduler
    curves: driver.PoolCurves
    seconds: float = 0.0  # wall time of the simulation

    def record(self) -> dict[str, Any]:
        """One flat record, for JSON and CSV."""
        by_class = {
            f"{class_}.{name}": getattr(known, name)
            for class_, known in self.classes.items()
            for name in ("tasks", *OF_CLASS)
        }
        before, after = ("policy", "seed", *OF_RUN), ("events", "looks", "checks", "seconds")
        return {name: getattr(self, name) for name in before} | by_class | {name: getattr(self, name) for name in after}


def figures(outcome: driver.PoolOutcome, policy: str, seed: int, classes: Sequence[str]) -> PoolFigures:
    by_class = {name: [task for task in outcome.tasks if task.work.class_ == name] for name in classes}
    found = {name: _class_figures(tasks) for name, tasks in by_class.items() if tasks}
    found[ALL] = _class_figures(outcome.tasks)
    capacity = outcome.capacity_gpu_s or 1.0
    return PoolFigures(
        policy,
        seed,
        found,
        outcome.evictions,
        sum(task.losses for task in outcome.tasks),
        sum(task.redone_s * task.work.gpus for task in outcome.tasks) / 3600.0,
        outcome.work_gpu_s / capacity,
        outcome.held_gpu_s / capacity,
        outcome.end_s,
        outcome.events,
        outcome.looks,
        outcome.checks,
        outcome.curves,
    )


def _class_figures(tasks: Sequence[driver.SimulatedTask]) -> ClassFigures:
    waits = sorted(task.waited_s for task in tasks)
    took = [(math.nan if task.done_s is None else task.done_s) - task.work.submit_s for task in tasks]
    completions = sorted(took)
    return ClassFigures(
        len(tasks),
        fmean(waits),
        percentile(waits, 0.5),
        percentile(waits, 0.99),
        fmean(completions),
        percentile(completions, 0.99),
        fmean(seconds / max(task.work.work_s, 1.0) for seconds, task in zip(took, tasks, strict=True)),
        sum(task.evictions for task in tasks),
    )


def summary(runs: Sequence[PoolFigures]) -> list[PolicySummary]:
    """One row per policy, in the order of the runs; figures of a class are named `high.wait_mean_s`."""
    return [PolicySummary(policy, _means(known)) for policy, known in by_policy(runs).items()]


def _means(runs: Sequence[PoolFigures]) -> dict[str, Spread]:
    found = spreads(runs, OF_RUN)
    for class_ in runs[0].classes:
        known = [run.classes[class_] for run in runs if class_ in run.classes]
        for name in OF_CLASS:
            found[f"{class_}.{name}"] = spread(getattr(figures, name) for figures in known)
    return found


MAX_WAIT_RATIO, NEGLIGIBLE_WAIT_S = 1.05, 10.0  # of the first class's waits
MIN_UTILISATION_RATIO = 0.99
POLICIES = ("trimtab", "fifo", "priority", "las", "clairvoyant")


Sizes = Annotated[
    tuple[tuple[int, float], ...],
    sections.Made(
        Annotated[dict[sections.Count, sections.Positive], Field(min_length=1)],
        lambda shares: tuple(sorted(shares.items())),
    ),
]


class PriorityClass(Frozen):
    """A priority class and its share of the tasks."""

    name: str
    priority: sections.Priority
    share: sections.Amount  # of all tasks, at random


CLASSES = (PriorityClass("high", 8.0, 0.1), PriorityClass("normal", 5.0, 0.3), PriorityClass("low", 2.0, 0.6))


class TaskGenerator(Frozen):
    """Generated jobs: Poisson arrivals, random durations, sizes by share."""

    count: sections.Count
    per_hour: sections.Positive
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
) -> list[driver.WorkloadTask]:
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
            driver.POOL,
            sizes[row.gpus],
            priority=by_name[name].priority,
            estimate_s=row.duration_s if estimates else 0.0,
            strategy=PlacementStrategy.pack,
            restarts=-1,
            saves=saves,
            awaits_node=True,  # a failed node comes back
        )
        found.append(driver.WorkloadTask(spec, row.submit_s / rate, row.duration_s, row.gpus, name))
    return found


def bundles(gpus: int, node_gpus: int) -> tuple[Resources, ...]:
    """Bundles of a job: one if it fits on a node, else whole nodes and a remainder."""
    if gpus <= node_gpus:
        return (Resources.of(gpu=gpus),)
    whole, rest = divmod(gpus, node_gpus)
    return (Resources.of(gpu=node_gpus),) * whole + ((Resources.of(gpu=rest),) if rest else ())


# ---- file ---------------------------------------------------------------------------------------------------------


Whole = Annotated[int, sections.Within(0, 1_000_000_000)]


class NodeEventSection(sections.Section):
    """A change of a node's state."""

    at_s: sections.Amount
    node: Whole
    what: NodeEventKind
    notice_s: sections.Amount = 120.0


def _classes(stated: dict[str, dict[str, float]]) -> tuple[PriorityClass, ...]:
    if not sum(settings["share"] for settings in stated.values()) > 0:
        raise InputError("shares must not all be 0", hint="{high: {priority: 8, share: 0.1}}")
    return tuple(PriorityClass(name, **settings) for name, settings in stated.items())


Event = Annotated[
    ChurnEvent,
    sections.Made(
        NodeEventSection, lambda event: ChurnEvent(event.at_s, f"n{event.node:05d}", event.what, event.notice_s)
    ),
]
Class = Annotated[dict[str, Any], sections.FieldsOf(PriorityClass, only=("priority", "share"))]
Classes = Annotated[tuple[PriorityClass, ...], sections.Made(dict[sections.Name, Class], _classes)]


class PoolPolicySection(sections.Section):
    """An entry of `policies`."""

    use: str
    name: str | None = None
    preemption: Annotated[dict[str, Any], sections.FieldsOf(PreemptionPolicy, only=PREEMPTION_KEYS)] = Field(
        default_factory=dict
    )
    pool: Annotated[dict[str, Any], sections.FieldsOf(PoolSpec, only=POOL_KEYS)] = Field(default_factory=dict)
    threshold_gpu_s: sections.Amount = THRESHOLD_GPU_S  # of least attained service


def _policy(section: PoolPolicySection) -> PoolPolicy:
    name = section.name or section.use
    return PoolPolicy(name, section.use, section.preemption, section.pool, section.threshold_gpu_s)


Policy = Annotated[PoolPolicy, sections.Made(Annotated[PoolPolicySection, BY_USE], _policy)]
Policies = Annotated[tuple[Policy, ...], Field(min_length=1), sections.checked_by(check_unique)]


# ---- settings -----------------------------------------------------------------------------------------------------


class ClusterSettings(Frozen):
    """Identical nodes, and their churn."""

    nodes: sections.Count
    gpus: Annotated[int, sections.Within(1, 1024)] = 8
    events: tuple[Event, ...] = ()
    churn: Annotated[Churn, sections.FieldsOf(Churn)] | None = None

    def __post_init__(self) -> None:
        for event in self.events:
            if event.what != "joined" and int(event.node[1:]) >= self.nodes:
                what = f"there is no node {int(event.node[1:])} of {self.nodes}"
                raise InputError(what, hint="nodes are counted from 0")

    def text(self) -> str:
        size = f"{self.nodes:,} nodes of {self.gpus} GPUs, {self.nodes * self.gpus:,} in all"
        more = [f"{len(self.events)} stated events"] if self.events else []
        return "; ".join([size, *more, *([self.churn.text()] if self.churn else [])])


class WorkloadSettings(Frozen):
    """The workload of a scenario."""

    trace: Path | None = None
    generate: Annotated[TaskGenerator, sections.FieldsOf(TaskGenerator)] | None = None
    limit: sections.Count | None = None
    most_gpus: sections.Count | None = None
    rate: sections.Positive = 1.0
    classes: Classes = CLASSES
    saves: bool = True
    estimates: bool = False
    skip: Whole = 0

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.generate is None):
            raise InputError("tasks need exactly one source", hint="one of `trace`, `generate`")

    @cached_property
    def _read(self) -> list[JobRow]:
        if self.trace is None:
            return []
        rows = jobs(self.trace, None if self.limit is None else self.skip + self.limit)[self.skip :]
        if not rows:
            raise InputError(f"skip {self.skip} leaves no job", where=str(self.trace), hint="skip fewer")
        # Time starts with the first job that is not skipped.
        return [replace(row, submit_s=row.submit_s - rows[0].submit_s) for row in rows] if self.skip else rows

    def rows(self, seed: int) -> list[JobRow]:
        rows = self.generate.rows(seed) if self.generate is not None else self._read
        return [row for row in rows if self.most_gpus is None or row.gpus <= self.most_gpus]

    def text(self) -> str:
        if self.generate is not None:
            text = self.generate.text()
        else:
            behind = f" behind the first {self.skip:,}" if self.skip else ""
            text = f"{len(self._read):,} jobs of {self.trace.name if self.trace else ''}{behind}"
        text += f", {self.rate:g} times as fast" if self.rate != 1 else ""
        text += f", those of at most {self.most_gpus} GPUs" if self.most_gpus is not None else ""
        total = sum(item.share for item in self.classes)
        shares = ", ".join(f"{c.name} (priority {c.priority:g}) {c.share / total:.0%}" for c in self.classes)
        return f"{text}; classes drawn at random, independent of size and length: {shares}"


class PoolScenario(Frozen):
    """A pool scenario."""

    cluster: Annotated[ClusterSettings, sections.FieldsOf(ClusterSettings)]
    tasks: Annotated[WorkloadSettings, sections.FieldsOf(WorkloadSettings)]
    name: str = ""
    times: Annotated[PoolTimes, sections.FieldsOf(PoolTimes)] = MEASURED
    policies: Policies = tuple(PoolPolicy(name, name) for name in POLICIES)
    seeds: Seeds = SEEDS
    checkpoint_s: sections.Amount = 1800.0

    def assumptions(self) -> list[str]:
        """The assumptions of a scenario, for a report."""
        kept = "saved when it is evicted" if self.tasks.saves else "not saved when it is evicted"
        every = f"and every {self.checkpoint_s:g} s" if self.checkpoint_s else "and at no other time"
        return [
            self.cluster.text(),
            self.tasks.text(),
            f"a task's work is {kept} {every}; what is lost is done again",
            *self.times.text(),
        ]


FILE = sections.FieldsOf(PoolScenario)


def reality(scenario: PoolScenario, seed: int, until_s: float) -> driver.PoolReality:
    """The cluster of a scenario, with its churn under a seed."""
    cluster = scenario.cluster
    names = tuple(f"n{at:05d}" for at in range(cluster.nodes))
    by_chance = cluster.churn.events(list(names), until_s, seed) if cluster.churn else []
    events = sorted([*cluster.events, *by_chance], key=lambda event: (event.at_s, event.node))
    return driver.PoolReality(names, cluster.gpus, scenario.times, tuple(events), scenario.checkpoint_s, seed)


def tasks(scenario: PoolScenario, seed: int) -> list[driver.WorkloadTask]:
    """The workload of a scenario under a seed."""
    settings = scenario.tasks
    rows = settings.rows(seed)
    total = scenario.cluster.nodes * scenario.cluster.gpus
    for row in rows:
        if row.gpus > total:
            raise InputError(
                f"a job asks for {row.gpus} GPUs, but the cluster has {total}",
                where="cluster",
                hint="add nodes, or set `most_gpus` under `tasks` to skip larger jobs",
            )
    return workload(
        rows,
        seed=seed,
        node_gpus=scenario.cluster.gpus,
        classes=settings.classes,
        rate=settings.rate,
        saves=settings.saves,
        estimates=settings.estimates,
    )


def run_pool(
    scenario: PoolScenario, policy: PoolPolicy, seed: int, progress: Callable[[float], None] | None = None
) -> PoolFigures:
    submitted = tasks(scenario, seed)
    until_s = max(task.submit_s for task in submitted) + max(task.work_s for task in submitted)
    real = reality(scenario, seed, until_s)
    classes = [priority_class.name for priority_class in scenario.tasks.classes]
    if policy.use == "clairvoyant":
        return figures(Clairvoyant(submitted, real).run(), policy.name, seed, classes)
    gpus = scenario.cluster.nodes * scenario.cluster.gpus
    machine, first = scheduler(policy, scenario.cluster.gpus, gpus)
    outcome = driver.PoolReplay(machine, submitted, real, first=first, progress=progress).run()
    return figures(outcome, policy.name, seed, classes)


def read(path: Path) -> PoolScenario:
    """Reads a scenario file. Raises InputError with file and key."""
    source, data = read_source(path)
    scenario = PoolScenario(**FILE.read(data, source))
    trace = scenario.tasks.trace
    tasks = replace(scenario.tasks, trace=None if trace is None else path.parent / trace)
    return replace(scenario, name=scenario.name or path.stem, tasks=tasks)


# ---- comparison and sweeps ------------------------------------------------------------------------------------------


def compare_pools(
    scenario: Any, runs: Sequence[PoolFigures], advice: Recommendation | None = None
) -> Comparison[Any, PoolFigures]:
    return Comparison(scenario, runs, summary(runs), advice=advice)


def _base(scenario: PoolScenario) -> PoolPolicy:
    return next((policy for policy in scenario.policies if policy.use == "trimtab"), PoolPolicy("trimtab", "trimtab"))


def _with_setting(base: PoolPolicy, key: str, value: float, where: str) -> PoolPolicy:
    check_known([key], (*PREEMPTION_KEYS, *POOL_KEYS), where, "{} cannot be swept")
    setting = {key: bool(value) if key in SWITCHES else value}
    changed = replace(base, name=f"{base.name}, {key} {value:g}")
    if key in PREEMPTION_KEYS:
        return replace(changed, preemption={**base.preemption, **setting})
    return replace(changed, pool={**base.pool, **setting})


def _rejection(name: str, runs: Sequence[PoolFigures], base: Sequence[PoolFigures]) -> str:
    """Values with which the first class waits longer, or less work is done."""
    first = next(name for name in base[0].classes if all(name in run.classes for run in (*runs, *base)))
    wait, base_wait = (spread(run.classes[first].wait_mean_s for run in side)[0] for side in (runs, base))
    if wait > max(MAX_WAIT_RATIO * base_wait, NEGLIGIBLE_WAIT_S):
        return f"with {name} the class {first} waits longer"
    done, base_done = (spread(run.utilisation for run in side)[0] for side in (runs, base))
    return f"with {name} less work is done" if done < MIN_UTILISATION_RATIO * base_done else ""


SWEEP: SweepRules[PoolFigures] = SweepRules(
    _base, _with_setting, lambda run: run.classes[ALL].wait_mean_s, "the mean wait of all tasks", _rejection
)
POOLS = ScenarioKind(read, run_pool, SWEEP, compare_pools)
