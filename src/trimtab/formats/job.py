"""Reads trimtab's job file: the cluster, the costs of a workflow, and the rules of its run.

    run:
      iterations: 60
      loop: {mode: auto, dwell_iterations: 5}    # any field of `model.run.ReplanRules`

Every key is checked, also those of a run when a job is only planned: unknown keys are refused with the nearest known
one, numbers must be finite and in range. Nothing is guessed: what is not stated is not checked, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from trimtab.core.errors import InputError, nearest
from trimtab.core.numbers import MAX_COUNT
from trimtab.core.ranks import rank_range, ranks_text
from trimtab.formats import sections
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.rollout.elastic_config import SETTINGS
from trimtab.formats.rollout.schema import RolloutSection
from trimtab.formats.sections import (
    MAX_GPUS,
    Completion,
    FieldsOf,
    Gigabytes,
    Gpus,
    Limit,
    Name,
    Names,
    Points,
    Priority,
    Seconds,
    Section,
    Seed,
    Share,
    Switch,
    Text,
    Within,
)
from trimtab.formats.yaml_text import Source, dump
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.model.run import ReplanRules
from trimtab.model.workflow import (
    ANY_KIND,
    NOTHING,
    Cluster,
    Component,
    GpuCurve,
    Memory,
    Node,
    PlacementJob,
    Profile,
    Variant,
    WeightSync,
    Workflow,
    check_workflow,
    unknown_component,
)

Iterations = Annotated[int, Within(1, MAX_COUNT)]
Loop = Annotated[dict[str, Any], FieldsOf(ReplanRules, types={"elastic": Names})]
LOOP_KEYS = tuple(field.name for field in fields(ReplanRules))


class RunSection(Section):
    """The section, with its defaults."""

    iterations: Iterations = 1
    seed: Seed = 0
    save_every: Iterations = 10  # iterations between two checkpoints
    step_limit_s: Limit = 600.0  # a component call that takes longer counts as hung
    place_limit_s: Limit = 120.0  # on Ray, for a component to get its slots and its process, or its turn on shared GPUs
    close_limit_s: Limit = 30.0  # for a component to end
    profile_iterations: Annotated[int, Within(2, MAX_COUNT)] = 4  # measured before planning, where costs are not stated
    priority: Priority = 8.0  # of the job's tasks in the cluster
    modules_from: Text | None = None  # where the components' modules are; default: beside the file and above it
    loop: Loop = Field(default_factory=dict)  # when the run is moved to another plan

    @property
    def rules(self) -> ReplanRules:
        return ReplanRules(**self.loop)


def check_loop(loop: dict[str, Any], components: Collection[str], source: Source, *keys: str | int) -> None:
    """Refuse components that scale within the plan and are not in the workflow."""
    for name in loop.get("elastic", ()):
        if name not in components:
            raise unknown_component(name, components, source.place(*keys, "elastic"))


NAME = "trimtab"
MAX_STALENESS = 64  # iterations that rollouts may be ahead
EXAMPLE = "see `trimtab plan --help` for a whole example"


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
    Annotated[Gigabytes, Tag("<one>")] | Annotated[dict[Gpus, Gigabytes], Tag("<points>")], _Form
]
NodeGpus = Annotated[int, Within(0, MAX_GPUS)]
Cpus = Annotated[float, Within(0.0, 1e6)]
Spread = Annotated[float, Within(0.0, 2.0)]  # standard deviation of the logarithm


class NodeSection(Section):
    """An entry of `cluster.nodes`, when that is a list."""

    name: Name | None = None
    gpus: NodeGpus  # how many
    gpu: Name | None = None  # their kind, such as H100
    gpu_memory_gb: Gigabytes | None = None
    host_memory_gb: Gigabytes | None = None
    cpus: Cpus | None = None


class ClusterSection(Section):
    """The `cluster` section."""

    nodes: Annotated[Annotated[NodeGpus, Tag("<one>")] | Annotated[list[NodeSection], Tag("<list>")], _Form] = 1
    gpus_per_node: Annotated[int, Within(0, 1024)] | None = None  # where `nodes` is a number
    gpu: Name | None = None  # kind of the GPUs, such as H100
    gpu_memory_gb: Gigabytes | None = None  # of each GPU
    host_memory_gb: Gigabytes | None = None  # of each node
    cpus: Cpus | None = None


class MemorySection(Section):
    """`memory_gb` of a component or variant."""

    active: GigabytesForms | None = None  # of each GPU while it works
    resident: GigabytesForms = 0.0  # of each GPU while others work there
    sharded: Gigabytes | None = None  # in all, divided among the GPUs
    per_gpu: Gigabytes | None = None  # of each GPU in addition

    @model_validator(mode="after")
    def _one_form(self) -> MemorySection:
        if self.active is not None and (self.sharded is not None or self.per_gpu is not None):
            raise ValueError("state either `active`, or `sharded` and `per_gpu`, not both")
        return self


class CostSection(Section):
    """Keys that a component and its variants share."""

    seconds: SecondsForms | None = None  # of an iteration, as measured: {GPUs: seconds}, also by kind of GPU
    gpus: list[Gpus] | None = None  # allowed numbers of GPUs
    multiple_of: Gpus | None = None  # GPUs come in multiples of this
    floor_seconds: Seconds | None = None  # that more GPUs do not shorten
    memory_gb: (
        Annotated[Annotated[Gigabytes, Tag("<one>")] | Annotated[MemorySection, Tag("<section>")], _Form] | None
    ) = None
    host_memory_gb: Gigabytes | None = None  # for each of its GPUs, while parked


class VariantSection(CostSection):
    """One entry of `variants`."""

    name: Name


class TailSection(Section):
    """Batches of an emulated component that take longer than others."""

    share: Share = 0.0
    factor: Annotated[float, Within(1.0, 1e9)] = 1.0


class LevelSection(Section):
    """The drift of an emulated component."""

    to: Annotated[float, Within(1e-9, 1e9)] = 1.0  # times its profile
    over: Annotated[int, Within(1, 1_000_000)] = 1  # iterations
    begin: Annotated[int, Within(1, 1_000_000)] = Field(default=1, alias="from")  # iteration


class EmulateSection(Section):
    """How an emulated component differs from its profile."""

    seconds: Points | None = None  # instead of the profile, by GPUs
    noise: Spread = 0.0  # between iterations
    step_noise: Spread = 0.0  # between batches
    factors: Annotated[list[Annotated[float, Within(1e-9, 1e9)]], Field(min_length=1)] | None = None  # measured noise
    tail: TailSection = Field(default_factory=TailSection)
    drift: LevelSection = Field(default_factory=LevelSection)


class ComponentSection(CostSection):
    """A component."""

    after: Annotated[Annotated[list[Name], Tag("<list>")] | Annotated[Name, Tag("<one>")], _Form] = Field(
        default_factory=list
    )
    granularity: Gpus | Literal["all"] = 1  # batches that it takes at a time
    completion: Completion | None = None  # share of batches done by share of time
    switch_seconds: Seconds = 0.0  # what it pays to take its turn on shared GPUs
    engine: Name | None = None  # components of one engine take turns without a switch
    device: Literal["gpu", "cpu"] = "gpu"
    cpus: Cpus = 0.0  # that it takes, on CPUs
    variants: Annotated[list[VariantSection], Field(min_length=1, max_length=16)] | None = None  # ways to run it
    use: Text | None = None  # package.module:Class that `trimtab run` makes
    settings: dict[str, Any] | None = None  # of its constructor
    emulate: Switch | EmulateSection | None = None  # `trimtab run` only takes the time of its steps


class SyncSection(Section):
    """The `weight_sync` section."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    shared_seconds: Seconds = 0.0  # on the same GPUs
    separate_seconds: Seconds = 0.0  # on different GPUs


class WorkflowSection(Section):
    """The `workflow` section."""

    batches: Gpus = 1  # of an iteration
    staleness: Annotated[int, Within(0, MAX_STALENESS)] = 0  # iterations that rollouts may be ahead
    components: dict[Name, ComponentSection]  # by name
    weight_sync: SyncSection | None = None  # new weights, from the trainer to the rollout


class JobFile(Section):
    """A whole job file."""

    cluster: ClusterSection  # nodes and GPUs
    workflow: WorkflowSection  # components and their costs
    placement: dict[Name, str | int] | None = None  # the current plan: components and GPU ranks
    rollout: RolloutSection | None = None  # engines and gateway of `trimtab engine serve`
    elastic_config: Annotated[dict[str, Any], SETTINGS] | None = None  # how the number of engines follows the load
    run: RunSection = Field(default_factory=RunSection)  # how `trimtab run` runs it


def matches(config: Mapping[str, Any]) -> bool:
    """Whether the data has the keys of trimtab's job file."""
    return "workflow" in config or set(config) <= set(JobFile.model_fields)


def read(config: Mapping[str, Any], path: Path, profile: Profile | None = None, text: str = "") -> LoadedJob:
    """A job from the data of a file; InputError names the wrong key, and its line where the text is given."""
    source = Source(str(path), text)
    with source.located():
        return loaded(parsed(config, source), path, profile)


def cluster_of(config: Mapping[str, Any], path: Path) -> Cluster:
    """The cluster of a job file, whose components may lack costs."""
    source = Source(str(path))
    with source.located():
        return _cluster(parsed(config, source).cluster)


def parsed(config: Mapping[str, Any], source: Source) -> JobFile:
    try:
        file = sections.read(JobFile, {key: value for key, value in config.items() if value is not None}, source)
    except InputError as error:
        error.hint = error.hint or EXAMPLE
        raise
    check_loop(file.run.loop, file.workflow.components, source, "run", "loop")
    return file


def loaded(file: JobFile, path: Path, profile: Profile | None = None) -> LoadedJob:
    name = str(path)
    cluster = _cluster(file.cluster)
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
    check_workflow(workflow)
    return LoadedJob(
        file_format=NAME,
        path=path,
        job=PlacementJob(cluster, workflow),
        settings=lambda plan: settings(plan, cluster),
        current=None if file.placement is None else _current(file.placement, workflow, cluster, name),
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


def _cluster(section: ClusterSection) -> Cluster:
    if isinstance(section.nodes, list):
        if section.gpus_per_node is not None:
            what = "gpus_per_node goes with a number of nodes; a list of nodes states `gpus` for each"
            raise InputError(what, where="cluster.gpus_per_node")
        listed = section.nodes
    elif section.gpus_per_node is None:
        raise InputError(
            "how many GPUs a node has is not stated",
            where="cluster",
            hint="add cluster.gpus_per_node, or list the nodes with their `gpus`",
        )
    else:
        listed = [NodeSection(gpus=section.gpus_per_node)] * section.nodes
    shared = section.model_dump(exclude_none=True, exclude={"nodes"})
    nodes: dict[str, Node] = {}
    for i, node in enumerate(listed):
        stated = {**shared, **node.model_dump(exclude_none=True)}
        called = node.name or f"node{i}"
        if called in nodes:
            raise InputError(f"two nodes are called {called}", where="cluster.nodes")
        memory = {key: stated.get(key) for key in ("gpu_memory_gb", "host_memory_gb", "cpus")}
        nodes[called] = Node(called, node.gpus, stated.get("gpu", ANY_KIND), **memory)
    cluster = Cluster(tuple(nodes.values()))
    if cluster.gpus > MAX_GPUS:
        raise InputError(f"{cluster.gpus} GPUs are more than the {MAX_GPUS} trimtab plans for", where="cluster")
    return cluster


def _component(name: str, section: ComponentSection, cluster: Cluster, profile: Profile | None, file: str) -> Component:
    where = f"workflow.components.{name}"
    measured = profile.component(name) if profile else None
    completion = section.completion if section.completion is not None or measured is None else measured.completion
    after = (section.after,) if isinstance(section.after, str) else tuple(dict.fromkeys(section.after))
    common: dict[str, Any] = {
        "name": name,
        "after": after,
        "granularity": None if section.granularity == "all" else section.granularity,
        "completion": tuple(point for point in completion or () if point != (0.0, 0.0)),
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
        where = f"placement.{key}"
        for component in (part.strip() for part in key.split(",")):
            if component not in workflow.names:
                raise unknown_component(component, workflow.names, where)
            if component in ranks:
                raise InputError(f"{component} is placed twice", where=where)
            ranks[component] = ranks_of(str(value), cluster.gpus, where)
    return CurrentPlacement(ranks, f"{name}: placement")


def ranks_of(text: str, total: int, where: str) -> tuple[int, ...]:
    """GPU ranks of a placement: `all`, a rank, a range, or several with commas."""
    if text.strip().lower() == "all":
        return tuple(range(total))
    ranks: list[int] = []
    for part in text.split(","):
        found = rank_range(part)
        if found is None:
            raise InputError(
                f"the placement {text!r} cannot be understood at {part!r}",
                where=where,
                hint='write all, a rank, a range such as "0-3", or several with commas',
            )
        ranks.extend(found)
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(ranks) < 4096 else []
    if twice:
        raise InputError(f"the placement {text!r} names GPU {ranks_text(twice)} twice", where=where)
    return tuple(sorted(set(ranks)))
