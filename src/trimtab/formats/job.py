"""Reads trimtab's job file: the cluster and the costs of a workflow.

Every key is checked: unknown keys are refused with the nearest known one, numbers must be finite and in range. Nothing
is guessed: what is not stated is not checked, and the answer says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from trimtab.core.errors import InputError, nearest
from trimtab.core.ranks import ranks_text
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.run_section import read_section, unknown_component, unknown_key
from trimtab.formats.yaml_text import dump
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.profile import Profile
from trimtab.model.workflow import (
    ANY_KIND,
    NOTHING,
    Cluster,
    Component,
    GpuCurve,
    Memory,
    Node,
    PlacementJob,
    Variant,
    WeightSync,
    Workflow,
    check_workflow,
)

NAME = "trimtab"
MAX_GPUS = 65_536
MAX_BATCHES = 65_536
MAX_STALENESS = 64  # iterations that rollouts may be ahead


def _whole(value: Any) -> Any:
    """Counts are numbers or digit strings, never booleans."""
    if isinstance(value, bool):
        raise ValueError("a whole number is expected, not true or false")
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 12:
        return int(value)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a finite number is expected")
    return value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MAX_GPUS, strict=True)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e9, allow_inf_nan=False)]
Gigabytes = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=100)]
Points = dict[Count, Seconds]


def _form(value: Any) -> str:
    """The form of a union value, so that errors are about that form alone."""
    if isinstance(value, BaseModel):
        return "<section>"
    if isinstance(value, Mapping):
        counts = all(isinstance(key, int) or (isinstance(key, str) and key.strip().isdecimal()) for key in value)
        return "<points>" if counts else "<section>"
    return "<list>" if isinstance(value, list) else "<one>"


_Form = Discriminator(_form)
SecondsForms = Annotated[
    Annotated[Seconds, Tag("<one>")]
    | Annotated[Points, Tag("<points>")]
    | Annotated[dict[Name, Points], Tag("<section>")],
    _Form,
]
GigabytesForms = Annotated[
    Annotated[Gigabytes, Tag("<one>")] | Annotated[dict[Count, Gigabytes], Tag("<points>")], _Form
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class NodeSection(_Section):
    """An entry of `cluster.nodes`, when that is a list."""

    name: Name | None = None
    gpus: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_GPUS, strict=True)]
    gpu: Name | None = None
    gpu_memory_gb: Gigabytes | None = None
    host_memory_gb: Gigabytes | None = None
    cpus: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None


class ClusterSection(_Section):
    """The `cluster` section."""

    nodes: Annotated[
        Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_GPUS, strict=True), Tag("<one>")]
        | Annotated[list[NodeSection], Tag("<list>")],
        _Form,
    ] = 1
    gpus_per_node: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=1024, strict=True)] | None = None
    gpu: Name | None = None
    gpu_memory_gb: Gigabytes | None = None
    host_memory_gb: Gigabytes | None = None
    cpus: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None


class MemorySection(_Section):
    """`memory_gb` of a component or variant."""

    active: GigabytesForms | None = None
    resident: GigabytesForms = 0.0
    sharded: Gigabytes | None = None
    per_gpu: Gigabytes | None = None

    @model_validator(mode="after")
    def _one_form(self) -> MemorySection:
        if self.active is not None and (self.sharded is not None or self.per_gpu is not None):
            raise ValueError("state either `active`, or `sharded` and `per_gpu`, not both")
        return self


class CostSection(_Section):
    """Keys that a component and its variants share."""

    seconds: SecondsForms | None = None
    gpus: list[Count] | None = None
    multiple_of: Count | None = None
    floor_seconds: Seconds | None = None
    memory_gb: (
        Annotated[Annotated[Gigabytes, Tag("<one>")] | Annotated[MemorySection, Tag("<section>")], _Form] | None
    ) = None
    host_memory_gb: Gigabytes | None = None


class VariantSection(CostSection):
    """One entry of `variants`."""

    name: Name


class ComponentSection(CostSection):
    """A component."""

    after: Annotated[Annotated[list[Name], Tag("<list>")] | Annotated[Name, Tag("<one>")], _Form] = Field(
        default_factory=list
    )
    granularity: Count | Literal["all"] = 1
    completion: list[tuple[Share, Share]] | None = None
    switch_seconds: Seconds = 0.0
    engine: Name | None = None
    device: Literal["gpu", "cpu"] = "gpu"
    cpus: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    variants: Annotated[list[VariantSection], Field(min_length=1, max_length=16)] | None = None
    use: Any = None  # these three are read by `trimtab run`
    settings: Any = None
    emulate: Any = None


class SyncSection(_Section):
    """The `weight_sync` section."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    shared_seconds: Seconds = 0.0
    separate_seconds: Seconds = 0.0


class WorkflowSection(_Section):
    """The `workflow` section."""

    batches: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=MAX_BATCHES, strict=True)] = 1
    staleness: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MAX_STALENESS, strict=True)] = 0
    components: dict[Name, ComponentSection]
    weight_sync: SyncSection | None = None


class JobFile(_Section):
    """A whole job file."""

    cluster: ClusterSection
    workflow: WorkflowSection
    placement: dict[Name, str | int] | None = None
    rollout: Any = None  # these two are read by `formats.rollout.job_section`
    elastic_config: Any = None
    run: Any = None  # read by `formats.run_section`


def matches(config: Mapping[str, Any]) -> bool:
    """Whether the data has the keys of trimtab's job file."""
    return "workflow" in config or set(config) <= set(JobFile.model_fields)


def read(config: Mapping[str, Any], path: Path, profile: Profile | None = None) -> LoadedJob:
    """A job from the data of a file; InputError names the wrong key."""
    name = str(path)
    try:
        file = JobFile.model_validate(dict(config))
    except ValidationError as error:
        raise _input_error(error, name) from None
    except RecursionError:
        raise InputError("the file is nested too deeply", where=name) from None
    cluster = _cluster(file.cluster, name)
    read_section(file.run, path, file.workflow.components)
    components = tuple(
        _component(n, section, cluster, profile, name) for n, section in file.workflow.components.items()
    )
    sync = file.workflow.weight_sync
    workflow = Workflow(
        components=components,
        batches=file.workflow.batches,
        staleness=file.workflow.staleness,
        weight_sync=(
            WeightSync(sync.source, sync.target, sync.shared_seconds, sync.separate_seconds) if sync else None
        ),
    )
    try:
        check_workflow(workflow)
    except InputError as error:
        raise InputError(error.what, where=f"{name}: {error.where}", hint=error.hint) from None
    current = None
    if file.placement is not None:
        current = _current(file.placement, workflow, cluster, name)
    return LoadedJob(
        file_format=NAME,
        path=path,
        job=PlacementJob(cluster, workflow),
        settings=lambda plan: settings(plan, cluster),
        current=current,
        # This format has no parent files; a missing `placement` is added at the end.
        literal=lambda key: True,
        states=lambda key, value: key == "placement" and file.placement == value,
    )


def settings(plan: Plan, cluster: Cluster) -> PlanSettings:
    """A plan as the `placement` section of a job file."""
    placement = {
        ",".join(group.components): "all" if len(group.gpus) == cluster.gpus else ranks_text(group.gpus)
        for group in plan.groups
    }
    return PlanSettings({"placement": placement}, dump({"placement": placement}))


def _cluster(section: ClusterSection, name: str) -> Cluster:
    if isinstance(section.nodes, list):
        if section.gpus_per_node is not None:
            raise InputError(
                "gpus_per_node goes with a number of nodes; a list of nodes states `gpus` for each",
                where=f"{name}: cluster.gpus_per_node",
            )
        nodes = tuple(
            Node(
                name=node.name or f"node{i}",
                gpus=node.gpus,
                gpu=node.gpu or section.gpu or ANY_KIND,
                gpu_memory_gb=_first(node.gpu_memory_gb, section.gpu_memory_gb),
                host_memory_gb=_first(node.host_memory_gb, section.host_memory_gb),
                cpus=_first(node.cpus, section.cpus),
            )
            for i, node in enumerate(section.nodes)
        )
        names = [node.name for node in nodes]
        for node in names:
            if names.count(node) > 1:
                raise InputError(f"two nodes are called {node}", where=f"{name}: cluster.nodes")
    else:
        if section.gpus_per_node is None:
            raise InputError(
                "how many GPUs a node has is not stated",
                where=f"{name}: cluster",
                hint="add cluster.gpus_per_node, or list the nodes with their `gpus`",
            )
        nodes = tuple(
            Node(
                f"node{i}",
                section.gpus_per_node,
                section.gpu or ANY_KIND,
                section.gpu_memory_gb,
                section.host_memory_gb,
                section.cpus,
            )
            for i in range(section.nodes)
        )
    cluster = Cluster(nodes)
    if cluster.gpus > MAX_GPUS:
        raise InputError(
            f"{cluster.gpus} GPUs are more than the {MAX_GPUS} trimtab plans for", where=f"{name}: cluster"
        )
    return cluster


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _component(name: str, section: ComponentSection, cluster: Cluster, profile: Profile | None, file: str) -> Component:
    where = f"{file}: workflow.components.{name}"
    measured = profile.component(name) if profile else None
    completion = section.completion
    if completion is None and measured is not None and measured.completion:
        completion = list(measured.completion)
    after = (section.after,) if isinstance(section.after, str) else tuple(dict.fromkeys(section.after))
    common: dict[str, Any] = {
        "name": name,
        "after": after,
        "granularity": None if section.granularity == "all" else section.granularity,
        "completion": _completion(completion, f"{where}.completion") if completion else (),
        "switch_seconds": section.switch_seconds,
        "engine": section.engine,
    }
    measures = section.use is not None or section.emulate not in (None, False)  # running it measures its cost
    if section.device == "cpu":
        for key in ("gpus", "multiple_of", "variants", "memory_gb", "floor_seconds"):
            if getattr(section, key) is not None:
                raise InputError(f"{key} is for GPU components, and {name} runs on CPUs", where=f"{where}.{key}")
        if not isinstance(section.seconds, float | int):
            if measured is not None and section.seconds is None:
                return Component(**common, cpu_seconds=measured.seconds[-1][1], cpus=section.cpus)
            if measures and section.seconds is None:
                raise _not_measured(name, file, where)
            raise InputError(
                f"{name} runs on CPUs: its `seconds` is one number", where=f"{where}.seconds", hint="seconds: 3.0"
            )
        return Component(**common, cpu_seconds=float(section.seconds), cpus=section.cpus)
    sections: list[tuple[str, CostSection, str]] = [("", section, where)]
    if section.variants is not None:
        sections = [(v.name, _inherit(v, section), f"{where}.variants[{i}]") for i, v in enumerate(section.variants)]
        names = [variant.name for variant in section.variants]
        if len(set(names)) < len(names):
            raise InputError(f"two variants of {name} have the same name", where=f"{where}.variants")
    variants = []
    for variant_name, costs, at in sections:
        if costs.seconds is None and measured is not None:
            if measured.waits:
                raise InputError(
                    f"the profile's time of {name} contains waiting for others: it is no cost to plan with",
                    where=at,
                    hint="take a profile in shared mode, where components run one after another",
                )
            costs = costs.model_copy(update={"seconds": dict(measured.seconds)})
        if costs.seconds is None and measures:
            raise _not_measured(name, file, at)
        variants.append(_variant(variant_name, costs, cluster, at))
    return Component(**common, variants=tuple(variants))


def _not_measured(name: str, file: str, where: str) -> InputError:
    return InputError(
        f"what {name} costs is not stated: running the job measures it",
        where=f"{where}.seconds",
        hint=f"`trimtab run {file}` measures, then plans; `trimtab plan {file} --from-run DIR` plans from a past run",
    )


def _inherit(variant: VariantSection, section: ComponentSection) -> VariantSection:
    """The variant with the component's values as defaults."""
    shared = {
        key: getattr(section, key)
        for key in CostSection.model_fields
        if getattr(variant, key) is None and getattr(section, key) is not None
    }
    return variant.model_copy(update=shared)


def _completion(points: list[tuple[float, float]], where: str) -> tuple[tuple[float, float], ...]:
    points = [point for point in points if point != (0.0, 0.0)]
    before = (0.0, 0.0)
    for point in points:
        if point[0] <= before[0] or point[1] < before[1]:
            raise InputError(
                f"completion must rise: {list(point)} comes after {list(before)}",
                where=where,
                hint="points are [share of batches done, share of time], from [0, 0] to [1.0, 1.0]",
            )
        before = point
    if before != (1.0, 1.0):
        raise InputError("completion must end at [1.0, 1.0]: all batches in all of the time", where=where)
    return tuple(points)


def _variant(name: str, section: CostSection, cluster: Cluster, where: str) -> Variant:
    if section.seconds is None:
        raise InputError(
            "no cost is stated", where=f"{where}.seconds", hint="add measured points, such as seconds: {8: 95.7}"
        )
    seconds: dict[str, tuple[tuple[int, float], ...]] = {}
    stated: Any = section.seconds
    if isinstance(stated, float | int):
        raise InputError(
            "a single number does not say on how many GPUs it was measured",
            where=f"{where}.seconds",
            hint=f"write seconds: {{{cluster.gpus or 8}: {stated:g}}}",
        )
    by_kind = {ANY_KIND: stated} if all(isinstance(key, int) for key in stated) else stated
    for kind, points in by_kind.items():
        if kind != ANY_KIND and kind not in cluster.kinds and cluster.kinds != (ANY_KIND,):
            # Profiles move between clusters, so a kind that the cluster lacks is fine. A misspelt one is not.
            near = nearest(kind, cluster.kinds)
            if near:
                raise InputError(f"the cluster has no {kind}; did you mean {near}?", where=f"{where}.seconds.{kind}")
        if not isinstance(points, Mapping) or not points:
            raise InputError(
                "measured points {gpus: seconds} are expected", where=f"{where}.seconds{'.' + kind if kind else ''}"
            )
        seconds[kind] = tuple(sorted((int(g), float(s)) for g, s in points.items()))
    floor = section.floor_seconds or 0.0
    shortest = min((s for points in seconds.values() for _, s in points), default=0.0)
    if floor > shortest:
        raise InputError(
            f"the floor of {floor:g} s is above a measured {shortest:g} s",
            where=f"{where}.floor_seconds",
            hint="the floor is the part of the time that more GPUs do not shorten: at most the shortest measured time",
        )
    return Variant(
        name=name,
        seconds=seconds,
        floor_seconds=floor,
        gpus=tuple(sorted(set(section.gpus))) if section.gpus is not None else None,
        multiple_of=section.multiple_of or 1,
        memory=_memory(section.memory_gb),
        host_memory_gb=section.host_memory_gb or 0.0,
    )


def _memory(stated: MemorySection | float | None) -> Memory:
    if stated is None:
        return Memory()
    if isinstance(stated, float | int):
        return Memory(active=GpuCurve(per_gpu=float(stated)))
    active = GpuCurve(sharded=stated.sharded or 0.0, per_gpu=stated.per_gpu or 0.0)
    if stated.active is not None:
        active = _curve(stated.active)
    return Memory(active=active, resident=_curve(stated.resident))


def _curve(stated: float | dict[int, float]) -> GpuCurve:
    if isinstance(stated, dict):
        return GpuCurve(points=tuple(sorted((int(g), float(v)) for g, v in stated.items()))) if stated else NOTHING
    return GpuCurve(per_gpu=float(stated))


def _current(placement: Mapping[str, str | int], workflow: Workflow, cluster: Cluster, name: str) -> CurrentPlacement:
    ranks: dict[str, tuple[int, ...]] = {}
    for key, value in placement.items():
        where = f"{name}: placement.{key}"
        for component in (part.strip() for part in key.split(",")):
            if component not in workflow.names:
                raise unknown_component(component, workflow.names, where)
            if component in ranks:
                raise InputError(f"{component} is placed twice", where=where)
            ranks[component] = ranks_of(str(value), cluster.gpus, where)
    return CurrentPlacement(ranks, f"{name}: placement")


def _input_error(error: ValidationError, name: str) -> InputError:
    fault, keys = first_fault(error, prefixes=("<",))
    path = [str(key) for key in keys]
    last = path[-1] if path else "the file"
    where = f"{name}: {'.'.join(path) or 'top level'}"
    example = "see `trimtab plan --help` for a whole example"
    if fault["type"] == "extra_forbidden":
        return unknown_key(last, _known_keys(path[:-1]), where)
    if fault["type"] == "missing":
        return InputError(f"{last} is missing", where=where, hint=example)
    if fault["type"].startswith("union_tag"):
        return InputError(f"{last} has a form that is not known here", where=where, hint=example)
    return invalid_value(fault, last, where)


def first_fault(
    error: ValidationError, *, names: Sequence[str] = (), prefixes: tuple[str, ...] = ()
) -> tuple[Any, list[int | str]]:
    """The first error of pydantic, unknown keys before others, and its keys in the file.

    Parts of a location that name a branch of a union are left out; `names` and `prefixes` are those of the caller.
    """
    faults = sorted(error.errors(), key=lambda fault: (fault["type"] != "extra_forbidden", -len(fault["loc"])))

    def is_branch(part: int | str) -> bool:
        return isinstance(part, str) and (
            part in {"int", "float", "str", "[key]", *names}
            or part.startswith(("constrained-", "function-", "literal[", *prefixes))
        )

    return faults[0], [part for part in faults[0]["loc"] if not is_branch(part)]


def invalid_value(fault: Any, key: str, where: str) -> InputError:
    """The error for a value that pydantic refused."""
    message = fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    shown = "" if isinstance(given, Mapping | list) else f": {given!r}"[:80]
    return InputError(f"{key} is not right{shown}", where=where, hint=message[:1].lower() + message[1:])


def _known_keys(path: list[str]) -> list[str]:
    """The known keys of a section."""
    model: type[BaseModel] = JobFile
    step = [part for part in path if not part.isdecimal()]
    if step[:1] == ["cluster"]:
        model = NodeSection if "nodes" in step else ClusterSection
    elif step[:2] == ["workflow", "components"] and len(step) >= 3:
        model = ComponentSection
        if "variants" in step[3:]:
            model = VariantSection
        if "memory_gb" in step[3:]:
            model = MemorySection
    elif step[:2] == ["workflow", "weight_sync"]:
        model = SyncSection
    elif step[:1] == ["workflow"]:
        model = WorkflowSection
    return [field.alias or key for key, field in model.model_fields.items()]


def ranks_of(text: str, total: int, where: str) -> tuple[int, ...]:
    """GPU ranks of a placement: `all`, a rank, a range, or several with commas."""
    if text.strip().lower() == "all":
        return tuple(range(total))
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(
                f"the placement {text!r} cannot be understood at {part!r}",
                where=where,
                hint='write all, a rank, a range such as "0-3", or several with commas',
            )
        ranks.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(ranks) < 4096 else []
    if twice:
        raise InputError(f"the placement {text!r} names GPU {ranks_text(twice)} twice", where=where)
    return tuple(sorted(set(ranks)))
