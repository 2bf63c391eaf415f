"""Planning input: a cluster, a workflow of components with their costs, and the measured costs of a run.

Frozen and validated in form (finite numbers, known names); `check_workflow` checks the rules between components.
Loaders in `formats` build these, planners in `plan` read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import ClassVar

from trimtab.core.errors import InputError, unknown
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import COUNT, Ranges

ANY_KIND = ""  # of a cluster or profile that names no GPU kind; such a profile holds for every GPU

MAX_COMPONENTS = 8


class Node(Frozen):
    """One machine. `None` means not stated, hence not checked."""

    name: str
    gpus: int
    gpu: str = ANY_KIND
    gpu_memory_gb: float | None = None
    host_memory_gb: float | None = None
    cpus: float | None = None


class Cluster(Frozen):
    """The machines to plan for. GPU ranks count through the nodes in this order."""

    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.gpu for node in self.nodes if node.gpus))

    def ranks(self, kind: str) -> tuple[int, ...]:
        ranks: list[int] = []
        first = 0
        for node in self.nodes:
            if node.gpu == kind:
                ranks.extend(range(first, first + node.gpus))
            first += node.gpus
        return tuple(ranks)

    def gpu_memory_gb(self, kind: str) -> float | None:
        """Memory of a GPU of this kind: the minimum over its nodes, so that a group may span any of them."""
        stated = [n.gpu_memory_gb for n in self.nodes if n.gpus and n.gpu == kind and n.gpu_memory_gb is not None]
        return min(stated) if stated else None

    def host_memory_gb_per_gpu(self, kind: str) -> float | None:
        """Host memory per GPU of this kind: the minimum of the nodes' equal shares."""
        stated = [
            n.host_memory_gb / n.gpus for n in self.nodes if n.gpus and n.gpu == kind and n.host_memory_gb is not None
        ]
        return min(stated) if stated else None

    @property
    def cpus(self) -> float | None:
        """All CPUs; `None` unless every node states them."""
        stated = [node.cpus for node in self.nodes if node.cpus is not None]
        return sum(stated) if len(stated) == len(self.nodes) else None


class GpuCurve(Frozen):
    """A value per GPU (gigabytes) as a function of the number of GPUs a component uses.

    Points are interpolated linearly and constant outside; `sharded` is divided by the count; `per_gpu` is added to
    every GPU.
    """

    points: tuple[tuple[int, float], ...] = ()
    sharded: float = 0.0
    per_gpu: float = 0.0

    def at(self, gpus: int) -> float:
        """The value on one GPU when the component uses `gpus`."""
        value = self.per_gpu + self.sharded / gpus
        if not self.points:
            return value
        below = [point for point in self.points if point[0] <= gpus]
        above = [point for point in self.points if point[0] >= gpus]
        if not below:
            return value + above[0][1]
        if not above:
            return value + below[-1][1]
        (g0, v0), (g1, v1) = below[-1], above[0]
        return value + (v0 if g0 == g1 else v0 + (v1 - v0) * (gpus - g0) / (g1 - g0))


NOTHING = GpuCurve()


class Memory(Frozen):
    """GPU memory of a component: while it runs, and while another one of its group runs."""

    active: GpuCurve = NOTHING
    resident: GpuCurve = NOTHING


class Variant(Frozen):
    """One way to run a component (for example a tensor-parallel size) and its cost.

    `seconds` maps a GPU kind to measured points (gpus, seconds for all batches), ascending in gpus. Where a kind has
    one point only, `doubling` is the assumed share of a perfect speed-up that doubling the GPUs gives.
    """

    name: str = ""
    seconds: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    floor_seconds: float = 0.0
    gpus: tuple[int, ...] | None = None
    multiple_of: int = 1
    memory: Memory = Memory()
    host_memory_gb: float = 0.0
    doubling: float = 1.0

    def points(self, kind: str) -> tuple[tuple[int, float], ...]:
        """Measured points on a kind of GPU; empty where it was not measured."""
        return self.seconds.get(kind) or self.seconds.get(ANY_KIND) or ()

    def allows(self, gpus: int) -> bool:
        return gpus > 0 and gpus % self.multiple_of == 0 and (self.gpus is None or gpus in self.gpus)


class Component(Frozen):
    """One role of the training loop.

    `granularity` is how many batches it takes from its inputs at a time; `None`: all of them. `completion` maps the
    share of batches done to the share of time taken, from (0, 0) to (1, 1); empty: evenly. A component with
    `cpu_seconds` runs on CPUs and takes no GPU.
    """

    name: str
    variants: tuple[Variant, ...] = ()
    after: tuple[str, ...] = ()
    granularity: int | None = 1
    completion: tuple[tuple[float, float], ...] = ()
    switch_seconds: float = 0.0
    engine: str | None = None
    cpu_seconds: float | None = None
    cpus: float = 0.0

    @property
    def on_cpu(self) -> bool:
        return self.cpu_seconds is not None


class WeightSync(Frozen):
    """The copy of weights from the trainer to the rollout at the end of an iteration."""

    source: str
    target: str
    shared_seconds: float = 0.0
    separate_seconds: float = 0.0


class Workflow(Frozen):
    """The graph of components and how an iteration flows through it. Components are in file order."""

    components: tuple[Component, ...]
    batches: int = 1
    staleness: int = 0
    weight_sync: WeightSync | None = None

    def component(self, name: str) -> Component:
        return next(component for component in self.components if component.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(component.name for component in self.components)

    def in_order(self) -> tuple[Component, ...]:
        """Components in topological order, ties in file order. Raises InputError on a cycle."""
        done: list[Component] = []
        left = list(self.components)
        while left:
            names = {component.name for component in done}
            ready = next((c for c in left if names.issuperset(c.after)), None)
            if ready is None:
                cycle = ", ".join(component.name for component in left)
                raise InputError(
                    f"the components wait for each other in a circle: {cycle}",
                    where="workflow.components",
                    hint="remove one of their `after` entries; next iterations are implied and need none",
                )
            done.append(ready)
            left.remove(ready)
        return tuple(done)

    def scaled(self, name: str, factor: float) -> Workflow:
        """The workflow with one component's times multiplied, for what-if analysis."""

        def scale(component: Component) -> Component:
            if component.name != name:
                return component
            if component.cpu_seconds is not None:
                return replace(component, cpu_seconds=component.cpu_seconds * factor)
            return replace(
                component,
                variants=tuple(
                    replace(
                        variant,
                        floor_seconds=variant.floor_seconds * factor,
                        seconds={
                            kind: tuple((g, s * factor) for g, s in points) for kind, points in variant.seconds.items()
                        },
                    )
                    for variant in component.variants
                ),
            )

        return replace(self, components=tuple(scale(component) for component in self.components))


class PlacementJob(Frozen):
    """Input of the placement planner: a workflow on a cluster."""

    cluster: Cluster
    workflow: Workflow


def check_workflow(workflow: Workflow) -> None:
    """Raise InputError where the components do not fit together: names, cycles, sizes, sync ends."""
    names = workflow.names
    where = "workflow.components"
    if not 2 <= len(names) <= MAX_COMPONENTS:
        raise InputError(
            f"a workflow has 2 to {MAX_COMPONENTS} components, this one has {len(names)}",
            where=where,
            hint="join components that always run together on the same GPUs into one, with the sum of their times",
        )
    for component in workflow.components:
        for parent in component.after:
            if parent not in names:
                raise unknown_component(parent, names, f"{where}.{component.name}.after")
            if parent == component.name:
                raise InputError(f"{parent} cannot come after itself", where=f"{where}.{component.name}.after")
    workflow.in_order()
    if all(component.on_cpu for component in workflow.components):
        raise InputError("no component uses a GPU: there is nothing to place", where=where)
    sync = workflow.weight_sync
    if sync is not None:
        for key, end in (("from", sync.source), ("to", sync.target)):
            if end not in names:
                raise unknown_component(end, names, f"workflow.weight_sync.{key}")
            if workflow.component(end).on_cpu:
                raise InputError(f"{end} runs on CPUs and takes no weights", where=f"workflow.weight_sync.{key}")
        if sync.source == sync.target:
            raise InputError("weights go from one component to another", where="workflow.weight_sync")
    if workflow.staleness and sync is None:
        raise InputError(
            "staleness is counted between the two ends of the weight sync, and none is stated",
            where="workflow.staleness",
            hint="add workflow.weight_sync: {from: trainer, to: rollout}",
        )


def unknown_component(name: object, names: Collection[str], where: str) -> InputError:
    return unknown(name, names, where, "there is no component named {}")


class ComponentProfile(Frozen):
    """Measured cost of one component.

    `seconds` are points (gpus, median seconds of one iteration), ascending. `spread` is half the interquartile range
    over the median; `drift` the relative change from the first to the last third of the run. `waits` marks a time that
    includes waiting for others: it is no cost and must not be planned with.
    """

    name: str
    seconds: tuple[tuple[int, float], ...]
    kind: str = ""
    spread: float | None = None
    drift: float | None = None
    steps: int = 0
    completion: tuple[tuple[float, float], ...] = ()
    seconds_per_1k_tokens: float | None = None
    waits: bool = False

    RANGES: ClassVar[Ranges] = {
        "spread": (0.0, 1e9),
        "drift": (-1.0, 1e9),
        "steps": COUNT,
        "seconds_per_1k_tokens": (1e-12, 1e9),
    }


class Profile(Frozen):
    """The costs of a whole workflow, from one source (`verl`, `rlinf`, `nemo_rl`, `timer` ...)."""

    source: str
    components: tuple[ComponentProfile, ...]
    notes: tuple[str, ...] = ()

    def component(self, name: str) -> ComponentProfile | None:
        return next((component for component in self.components if component.name == name), None)
