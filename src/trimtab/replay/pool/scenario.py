"""A scenario file: a cluster, the tasks that come to it, how long things take, and the policies to compare.

Read whole and checked before anything runs: an unknown key is refused with the nearest known one, a value that makes no
sense with its place. Paths of traces start at the folder of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trimtab.core.errors import InputError, nearest
from trimtab.formats import yaml_text
from trimtab.replay.common.churn import AN_HOUR, Churn, ChurnEvent
from trimtab.replay.common.timing import Distribution, PoolTimes
from trimtab.replay.common.traces import JobRow, jobs
from trimtab.replay.pool.policies import PoolPolicy
from trimtab.replay.pool.workload import CLASSES, PriorityClass, TaskGenerator, classes_of

SEEDS = (1, 2, 3, 4, 5)
POLICIES = ("trimtab", "fifo", "priority", "las", "clairvoyant")


# ---- as it is used ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterSettings:
    """Nodes alike, and what happens to them."""

    nodes: int
    gpus: int
    events: tuple[ChurnEvent, ...] = ()
    churn: Churn | None = None

    def text(self) -> str:
        """As a report states it."""
        size = f"{self.nodes:,} nodes of {self.gpus} GPUs, {self.nodes * self.gpus:,} in all"
        more = [f"{len(self.events)} stated events"] if self.events else []
        return "; ".join([size, *more, *([self.churn.text()] if self.churn else [])])


@dataclass(frozen=True)
class WorkloadSettings:
    """What comes to the cluster."""

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
        # Time begins with the first job that counts.
        return [replace(one, submit_s=one.submit_s - rows[0].submit_s) for one in rows] if self.skip else rows

    def rows(self, seed: int) -> list[JobRow]:
        """The jobs, in order of submission."""
        rows = self.generate.rows(seed) if self.generate is not None else self._read
        return [one for one in rows if self.most_gpus is None or one.gpus <= self.most_gpus]

    def text(self) -> str:
        """As a report states it."""
        if self.generate is not None:
            said = self.generate.text()
        else:
            behind = f" behind the first {self.skip:,}" if self.skip else ""
            said = f"{len(self._read):,} jobs of {self.trace.name if self.trace else ''}{behind}"
        said += f", {self.rate:g} times as fast" if self.rate != 1 else ""
        said += f", those of at most {self.most_gpus} GPUs" if self.most_gpus is not None else ""
        total = sum(one.share for one in self.classes)
        shares = ", ".join(f"{one.name} (priority {one.priority:g}) {one.share / total:.0%}" for one in self.classes)
        return f"{said}; classes by chance, whatever a job's size and length: {shares}"


@dataclass(frozen=True)
class PoolScenario:
    """All that is asked."""

    name: str
    cluster: ClusterSettings
    tasks: WorkloadSettings
    times: PoolTimes
    policies: tuple[PoolPolicy, ...]
    seeds: tuple[int, ...] = SEEDS
    checkpoint_s: float = 1800.0

    def assumptions(self) -> list[str]:
        """All that was assumed, for a report."""
        kept = "saved when it is evicted" if self.tasks.saves else "not saved when it is evicted"
        every = f"and every {self.checkpoint_s:g} s" if self.checkpoint_s else "and never besides"
        return [
            self.cluster.text(),
            self.tasks.text(),
            f"a task's work is {kept} {every}; what is lost is done again",
            *self.times.text(),
        ]


# ---- as it is written ---------------------------------------------------------------------------------------------


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1_000_000, strict=True)]
Amount = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1e12, allow_inf_nan=False)]
More = Annotated[float, BeforeValidator(_no_bool), Field(ge=1e-6, le=1e12, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodeEventSection(_Section):
    """Something that happens to a node."""

    at_s: Amount
    node: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, strict=True)]
    what: Literal["lost", "joined", "draining"]
    notice_s: Amount = 120.0


class ChurnSection(_Section):
    """Failures by chance."""

    days_between: Annotated[More, Field(ge=0.001)]
    repair_s: Any = None
    drained: Annotated[float, Field(ge=0, le=1)] = 0.0
    notice_s: Amount = 120.0


class PoolClusterSection(_Section):
    """The `cluster` section."""

    nodes: Whole
    gpus: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1024, strict=True)] = 8
    events: list[NodeEventSection] = Field(default_factory=list)
    churn: ChurnSection | None = None


class GenerateSection(_Section):
    """Jobs made up."""

    count: Whole
    per_hour: More
    duration_s: Any
    gpus: dict[Whole, More] = Field(default_factory=lambda: {1: 1.0}, min_length=1)


class PriorityClassSection(_Section):
    """A class of priority."""

    priority: Annotated[float, BeforeValidator(_no_bool), Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
    share: Amount


class TasksSection(_Section):
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


class PoolPolicySection(_Section):
    """One entry of `policies`."""

    use: str
    name: str | None = None
    preemption: dict[str, Any] = Field(default_factory=dict)
    pool: dict[str, Any] = Field(default_factory=dict)
    threshold_gpu_s: Amount | None = None


def _all_policies() -> list[str | PoolPolicySection]:
    return list(POLICIES)


class PoolScenarioFile(_Section):
    """The whole file."""

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
    """The scenario in a file. InputError with file and key where something is wrong."""
    data = yaml_text.read_mapping(path)
    try:
        said = PoolScenarioFile.model_validate(data)
    except ValidationError as error:
        raise explained(error, path, PoolScenarioFile, SECTIONS) from None
    where = str(path)
    events = tuple(_event(one, said.cluster.nodes, f"{where}: cluster.events") for one in said.cluster.events)
    churn = None if said.cluster.churn is None else churn_of(said.cluster.churn, where)
    policies = tuple(_policy(one, where) for one in said.policies)
    names = [one.name for one in policies]
    if len(set(names)) < len(names):
        doubled = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two policies are called {doubled}", where=f"{where}: policies", hint="give one a `name`")
    return PoolScenario(
        said.name or path.stem,
        ClusterSettings(said.cluster.nodes, said.cluster.gpus, events, churn),
        _tasks(said.tasks, path),
        PoolTimes.of(said.times, f"{where}: times"),
        policies,
        tuple(dict.fromkeys(said.seeds)),
        said.checkpoint_s,
    )


def _event(said: NodeEventSection, nodes: int, where: str) -> ChurnEvent:
    if said.what != "joined" and said.node >= nodes:
        raise InputError(f"there is no node {said.node} of {nodes}", where=where, hint="nodes are counted from 0")
    return ChurnEvent(said.at_s, f"n{said.node:05d}", said.what, said.notice_s)


def churn_of(said: ChurnSection, where: str) -> Churn:
    """Failures by chance, as a scenario at `where` says them."""
    repair = AN_HOUR if said.repair_s is None else Distribution.of(said.repair_s, f"{where}: cluster.churn.repair_s")
    return Churn(said.days_between, repair, said.drained, said.notice_s)


def _tasks(said: TasksSection, path: Path) -> WorkloadSettings:
    where = f"{path}: tasks"
    if (said.trace is None) == (said.generate is None):
        raise InputError("tasks come from a trace or from a generator", where=where, hint="one of `trace`, `generate`")
    made = None
    if said.generate is not None:
        one = said.generate
        duration = Distribution.of(one.duration_s, f"{where}.generate.duration_s")
        made = TaskGenerator(one.count, one.per_hour, duration, tuple(sorted(one.gpus.items())))
    classes: tuple[PriorityClass, ...] = CLASSES
    if said.classes is not None:
        classes = classes_of({name: one.model_dump() for name, one in said.classes.items()}, f"{where}.classes")
    trace = None if said.trace is None else path.parent / said.trace
    return WorkloadSettings(
        trace, made, said.limit, said.most_gpus, said.rate, classes, said.saves, said.estimates, said.skip
    )


def _policy(said: str | PoolPolicySection, where: str) -> PoolPolicy:
    one = PoolPolicySection(use=said) if isinstance(said, str) else said
    more = {} if one.threshold_gpu_s is None else {"threshold_gpu_s": one.threshold_gpu_s}
    try:
        return PoolPolicy(one.name or one.use, one.use, one.preemption, one.pool, **more)
    except InputError as error:
        error.where = f"{where}: {error.where or 'policies'}"
        raise
    except TypeError as error:
        raise InputError(str(error), where=f"{where}: policies") from None


def explained(error: ValidationError, path: Path, whole: type[BaseModel], inner: Sections) -> InputError:
    """The first fault, in words, with the nearest known key where one is not known."""
    faults = error.errors(include_url=False)
    # A key that is not known explains one that is missing.
    first = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    # Unions put the name of the alternative into the place; people did not write that.
    keys = [str(key) for key in first["loc"] if str(key) != "str" and not str(key).endswith("Section")]
    where = f"{path}: {'.'.join(keys)}" if keys else str(path)
    if first["type"] == "extra_forbidden":
        section = whole
        for key in keys[:-1]:
            section = inner.get(key, section)
        known = list(section.model_fields)
        near = nearest(keys[-1], known)
        hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
        return InputError(f"{keys[-1]} is not known here", where=where, hint=hint)
    if first["type"] == "missing":
        return InputError(f"{keys[-1]} is missing", where=where)
    said = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    shown = f" (it is {value!r})" if not isinstance(value, Mapping | list) else ""
    return InputError(said[0].lower() + said[1:] + shown, where=where)
