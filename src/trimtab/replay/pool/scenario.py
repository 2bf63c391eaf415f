"""Reads a pool scenario file: a cluster, its tasks, durations, and the policies to compare; and runs a policy of it.

The file is validated before anything runs: an unknown key is refused with the nearest known key, an invalid value with
its place. Trace paths are relative to the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trimtab.core.errors import InputError
from trimtab.formats import yaml_text
from trimtab.formats.files import meant
from trimtab.replay.common.churn import AN_HOUR, Churn, ChurnEvent
from trimtab.replay.common.keys import check_unique
from trimtab.replay.common.timing import Distribution, PoolTimes
from trimtab.replay.common.traces import JobRow, jobs
from trimtab.replay.pool.clairvoyant import Clairvoyant
from trimtab.replay.pool.driver import PoolReality, PoolReplay
from trimtab.replay.pool.figures import PoolFigures, figures
from trimtab.replay.pool.policies import PoolPolicy, scheduler
from trimtab.replay.pool.workload import CLASSES, PriorityClass, TaskGenerator, WorkloadTask, classes_of, workload

SEEDS = (1, 2, 3, 4, 5)
POLICIES = ("trimtab", "fifo", "priority", "las", "clairvoyant")


# ---- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterSettings:
    """Identical nodes, and their churn."""

    nodes: int
    gpus: int
    events: tuple[ChurnEvent, ...] = ()
    churn: Churn | None = None

    def text(self) -> str:
        size = f"{self.nodes:,} nodes of {self.gpus} GPUs, {self.nodes * self.gpus:,} in all"
        more = [f"{len(self.events)} stated events"] if self.events else []
        return "; ".join([size, *more, *([self.churn.text()] if self.churn else [])])


@dataclass(frozen=True)
class WorkloadSettings:
    """The workload of a scenario."""

    trace: Path | None
    generate: TaskGenerator | None
    limit: int | None = None
    most_gpus: int | None = None
    rate: float = 1.0
    classes: tuple[PriorityClass, ...] = CLASSES
    saves: bool = True
    estimates: bool = False
    skip: int = 0

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
        """Jobs in order of submission."""
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


@dataclass(frozen=True)
class PoolScenario:
    """A pool scenario."""

    name: str
    cluster: ClusterSettings
    tasks: WorkloadSettings
    times: PoolTimes
    policies: tuple[PoolPolicy, ...]
    seeds: tuple[int, ...] = SEEDS
    checkpoint_s: float = 1800.0

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


def reality(scenario: PoolScenario, seed: int, until_s: float) -> PoolReality:
    """The cluster of a scenario, with its churn under a seed."""
    cluster = scenario.cluster
    names = tuple(f"n{at:05d}" for at in range(cluster.nodes))
    by_chance = cluster.churn.events(list(names), until_s, seed) if cluster.churn else []
    events = sorted([*cluster.events, *by_chance], key=lambda event: (event.at_s, event.node))
    return PoolReality(names, cluster.gpus, scenario.times, tuple(events), scenario.checkpoint_s, seed)


def tasks(scenario: PoolScenario, seed: int) -> list[WorkloadTask]:
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
    outcome = PoolReplay(machine, submitted, real, first=first, progress=progress).run()
    return figures(outcome, policy.name, seed, classes)


# ---- file ---------------------------------------------------------------------------------------------------------


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1_000_000, strict=True)]
Amount = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1e12, allow_inf_nan=False)]
More = Annotated[float, BeforeValidator(_no_bool), Field(ge=1e-6, le=1e12, allow_inf_nan=False)]


class ScenarioSection(BaseModel):
    """A section of a scenario file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class NodeEventSection(ScenarioSection):
    """A change of a node's state."""

    at_s: Amount
    node: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, strict=True)]
    what: Literal["lost", "joined", "draining"]
    notice_s: Amount = 120.0


class ChurnSection(ScenarioSection):
    """Random failures."""

    days_between: Annotated[More, Field(ge=0.001)]
    repair_s: Any = None
    drained: Annotated[float, Field(ge=0, le=1)] = 0.0
    notice_s: Amount = 120.0


class PoolClusterSection(ScenarioSection):
    """The `cluster` section."""

    nodes: Whole
    gpus: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1024, strict=True)] = 8
    events: list[NodeEventSection] = Field(default_factory=list)
    churn: ChurnSection | None = None


class GenerateSection(ScenarioSection):
    """Generated jobs."""

    count: Whole
    per_hour: More
    duration_s: Any
    gpus: dict[Whole, More] = Field(default_factory=lambda: {1: 1.0}, min_length=1)


class PriorityClassSection(ScenarioSection):
    """A priority class."""

    priority: Annotated[float, BeforeValidator(_no_bool), Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
    share: Amount


class TasksSection(ScenarioSection):
    """The `tasks` section."""

    trace: str | None = None
    generate: GenerateSection | None = None
    skip: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, strict=True)] = 0
    limit: Whole | None = None
    most_gpus: Whole | None = None
    rate: More = 1.0
    classes: dict[str, PriorityClassSection] | None = None
    saves: bool = True
    estimates: bool = False


class PoolPolicySection(ScenarioSection):
    """An entry of `policies`."""

    use: str
    name: str | None = None
    preemption: dict[str, Any] = Field(default_factory=dict)
    pool: dict[str, Any] = Field(default_factory=dict)
    threshold_gpu_s: Amount | None = None


def _all_policies() -> list[str | PoolPolicySection]:
    return list(POLICIES)


class PoolScenarioFile(ScenarioSection):
    """The scenario file."""

    name: str | None = None
    cluster: PoolClusterSection
    tasks: TasksSection
    times: dict[str, Any] = Field(default_factory=dict)
    checkpoint_s: Amount = 1800.0
    policies: Annotated[list[str | PoolPolicySection], Field(min_length=1)] = Field(default_factory=_all_policies)
    seeds: Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)] = Field(
        default_factory=lambda: list(SEEDS)
    )


Sections = Mapping[str, type[BaseModel]]
SECTIONS: Sections = {
    "cluster": PoolClusterSection,
    "events": NodeEventSection,
    "churn": ChurnSection,
    "tasks": TasksSection,
    "generate": GenerateSection,
    "classes": PriorityClassSection,
    "policies": PoolPolicySection,
}


# ---- reading ------------------------------------------------------------------------------------------------------


def read(path: Path) -> PoolScenario:
    """Reads a scenario file. Raises InputError with file and key."""
    data = yaml_text.read_mapping(path)
    try:
        section = PoolScenarioFile.model_validate(data)
    except ValidationError as error:
        raise explained(error, path, PoolScenarioFile, SECTIONS) from None
    where = str(path)
    events = tuple(_event(event, section.cluster.nodes, f"{where}: cluster.events") for event in section.cluster.events)
    churn = None if section.cluster.churn is None else churn_of(section.cluster.churn, where)
    policies = tuple(_policy(policy, where) for policy in section.policies)
    check_unique([policy.name for policy in policies], f"{where}: policies")
    return PoolScenario(
        section.name or path.stem,
        ClusterSettings(section.cluster.nodes, section.cluster.gpus, events, churn),
        _tasks(section.tasks, path),
        PoolTimes.of(section.times, f"{where}: times"),
        policies,
        tuple(dict.fromkeys(section.seeds)),
        section.checkpoint_s,
    )


def _event(section: NodeEventSection, nodes: int, where: str) -> ChurnEvent:
    if section.what != "joined" and section.node >= nodes:
        raise InputError(f"there is no node {section.node} of {nodes}", where=where, hint="nodes are counted from 0")
    return ChurnEvent(section.at_s, f"n{section.node:05d}", section.what, section.notice_s)


def churn_of(section: ChurnSection, where: str) -> Churn:
    """The churn of a scenario; `where` names the file for errors."""
    repair = (
        AN_HOUR if section.repair_s is None else Distribution.of(section.repair_s, f"{where}: cluster.churn.repair_s")
    )
    return Churn(section.days_between, repair, section.drained, section.notice_s)


def _tasks(section: TasksSection, path: Path) -> WorkloadSettings:
    where = f"{path}: tasks"
    if (section.trace is None) == (section.generate is None):
        raise InputError("tasks need exactly one source", where=where, hint="one of `trace`, `generate`")
    made = None
    if section.generate is not None:
        settings = section.generate
        duration = Distribution.of(settings.duration_s, f"{where}.generate.duration_s")
        made = TaskGenerator(settings.count, settings.per_hour, duration, tuple(sorted(settings.gpus.items())))
    classes: tuple[PriorityClass, ...] = CLASSES
    if section.classes is not None:
        classes = classes_of(
            {name: section.model_dump() for name, section in section.classes.items()}, f"{where}.classes"
        )
    trace = None if section.trace is None else path.parent / section.trace
    return WorkloadSettings(
        trace,
        made,
        section.limit,
        section.most_gpus,
        section.rate,
        classes,
        section.saves,
        section.estimates,
        section.skip,
    )


def _policy(section: str | PoolPolicySection, where: str) -> PoolPolicy:
    section = PoolPolicySection(use=section) if isinstance(section, str) else section
    more = {} if section.threshold_gpu_s is None else {"threshold_gpu_s": section.threshold_gpu_s}
    try:
        return PoolPolicy(section.name or section.use, section.use, section.preemption, section.pool, **more)
    except InputError as error:
        error.where = f"{where}: {error.where or 'policies'}"
        raise
    except TypeError as error:
        raise InputError(str(error), where=f"{where}: policies") from None


def explained(error: ValidationError, path: Path, root: type[BaseModel], sections: Sections) -> InputError:
    """The first error of a validation; an unknown key with the nearest known one."""
    faults = error.errors(include_url=False)
    # An unknown key explains a missing one.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    # Pydantic puts the name of a union's alternative into the location; it is not in the file.
    keys = [str(key) for key in first["loc"] if str(key) != "str" and not str(key).endswith("Section")]
    where = f"{path}: {'.'.join(keys)}" if keys else str(path)
    if first["type"] == "extra_forbidden":
        section = root
        for key in keys[:-1]:
            section = sections.get(key, section)
        known = list(section.model_fields)
        hint = meant(keys[-1], known, "known: " + ", ".join(known))
        return InputError(f"{keys[-1]} is not known here", where=where, hint=hint)
    if first["type"] == "missing":
        return InputError(f"{keys[-1]} is missing", where=where)
    text = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    shown = f" (got {value!r})" if not isinstance(value, Mapping | list) else ""
    return InputError(text[0].lower() + text[1:] + shown, where=where)
