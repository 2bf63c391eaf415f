"""The base of all framework configs: components from profiles, pools of whole nodes, and checks of a plan.

A framework's pool runs each member on all of its GPUs. So the allowed sizes of a pool are those on which every member
can run, and a plan is expressible only if its grouping and sizes are in the rules. Nothing here may accept a plan that
the framework would refuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any, ClassVar

from trimtab.core.errors import InfeasibleError, InputError, nearest
from trimtab.formats import yaml_text
from trimtab.formats.frameworks.hydra_config import MAX_COUNT, ComposedConfig, ConfigReader
from trimtab.formats.launch.launch import ConfigSource, Launch
from trimtab.formats.loaded import LoadedJob, OtherMode, PlanSettings
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework
from trimtab.model.plan import AllowedGroup, CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import (
    ANY_KIND,
    Cluster,
    Component,
    ComponentProfile,
    Node,
    PlacementJob,
    Profile,
    Variant,
    WeightSync,
    Workflow,
    check_workflow,
)
from trimtab.plan.placement.spread import even_splits

WEIGHT_SYNC = "weight_sync"
"""Name of the weight copy from trainer to rollout in profiles."""


class FrameworkConfig(ABC):
    """A framework's config while it is read. A framework is a subclass: a table, and methods for what is odd."""

    NAME: ClassVar[str]
    TITLE: ClassVar[str]
    LOG: ClassVar[LogFramework]
    COMPONENTS: ClassVar[tuple[str, ...]]  # in workflow order
    REQUIRED: ClassVar[tuple[str, str]]  # in every run: the rollout, and the trainer whose weights it gets
    NOT_PLACED: ClassVar[tuple[str, ...]] = ()  # measured, but not placed by themselves
    AFTER: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # those that a run has; without any, the first component
    GROUPS: ClassVar[bool] = True  # configs are made of Hydra's config groups, not of parent files
    EVEN_NODES: ClassVar[bool] = True  # a pool is `nodes x GPUs per node`, not a number of GPUs in a row

    cluster: Cluster
    batches: int = 1
    staleness: int = 0

    def __init__(self, composed: ComposedConfig, profile: Profile | None) -> None:
        self.composed = composed
        self.reader = composed.reader
        self.path = str(composed.path)
        self.profile = profile
        self.trainer = self.REQUIRED[1]
        self.assumptions: list[str] = []
        self.costs = self.stated_costs()

    @classmethod
    @abstractmethod
    def matches(cls, reader: ConfigReader) -> bool:
        """Whether a config is of this framework."""

    @classmethod
    @abstractmethod
    def facts(cls, reader: ConfigReader) -> RunFacts:
        """GPU counts and batches of a run with this config, for its log. Raises InputError if not stated."""

    @classmethod
    def launched(cls, launch: Launch) -> ConfigSource | None:
        """Where the config comes from, if a launch starts the framework's trainer; None for every other program.

        `launch.runs(...)` recognises modules and scripts, `launch.find(...)` finds config files of a checkout or an
        installed package; `launch/flags.py` reads argparse flags. What is unknown in an argument stays in the answer.
        """
        return None

    @classmethod
    def purpose(cls, reader: ConfigReader) -> str | None:
        """What a config is for if it is not for reinforcement learning on GPUs of its own: such are refused."""
        return None

    @classmethod
    def inputs(cls, reader: ConfigReader) -> dict[str, Any]:
        """A run's size for `trimtab estimate`, by the names of its options; what is not stated is None or left out."""
        raise InputError(f"{cls.TITLE} configs do not say how large a run is", where=str(reader.path))

    @classmethod
    def asynchronous(cls, reader: ConfigReader) -> str | None:
        """The mode if generation runs beside training and timers contain waits, else None."""
        return None

    @classmethod
    def read(cls, composed: ComposedConfig, profile: Profile | None) -> LoadedJob:
        return cls(composed, profile).loaded()

    def loaded(self) -> LoadedJob:
        members = {name: self._component(measured) for name, measured in self.costs.items()}
        sync = weight_sync(self.profile, self.trainer, self.REQUIRED[0])
        workflow = Workflow(tuple(members.values()), self.batches, self.staleness, sync)
        check_workflow(workflow)
        rules = self.rules(members)
        placed = {*self.costs, *self.NOT_PLACED, WEIGHT_SYNC}
        others = [c.name for c in self.profile.components if c.name not in placed] if self.profile else []
        note = f"not part of the plan, though in the profile: {', '.join(others)}"

        def settings(plan: Plan) -> PlanSettings:
            check_expressible(plan, rules)
            return self.settings(plan)

        return LoadedJob(
            file_format=self.NAME,
            path=self.composed.path,
            job=PlacementJob(self.cluster, workflow),
            settings=settings,
            rules=rules,
            current=self.current(),
            assumptions=(*self.composed.assumptions, *self.assumptions, *self.notes(), *([note] if others else [])),
            literal=self.composed.literal,
            states=self.composed.states,
            modes=tuple(self.other_modes()),
            script=self.composed.script,
        )

    def stated_costs(self) -> dict[str, ComponentProfile]:
        return self.profiled(self.COMPONENTS, self.REQUIRED)

    def profiled(
        self, known: Sequence[str], required: Sequence[str], hints: Mapping[str, str] | None = None
    ) -> dict[str, ComponentProfile]:
        """The known components of the profile, in order. Raises InputError for missing ones and waits."""
        if self.profile is None:
            raise InputError(
                f"component costs are unknown: a {self.TITLE} config has no times",
                where=self.path,
                hint="make a profile from the logs of a run with `trimtab profile logs`, and give it with "
                "--profile FILE; or give --gpu KIND to plan with estimates",
            )
        found = {name: measured for name in known if (measured := self.profile.component(name)) is not None}
        for measured in found.values():
            refuse_waits(measured)
        for name in required:
            if name not in found:
                near = nearest(name, [c.name for c in self.profile.components])
                meant = f"; did you mean {near}?" if near else ""
                raise InputError(
                    f"the profile has no {name}, which {self.TITLE} training needs{meant}",
                    where=f"profile ({self.profile.source})",
                    hint=(hints or {}).get(name, f"it knows: {', '.join(known)}"),
                )
        return found

    @property
    def title(self) -> str:
        return self.TITLE

    def measured(self, *names: str) -> list[str]:
        return [name for name in names if name in self.costs]

    def after(self, name: str) -> tuple[str, ...]:
        found = tuple(self.measured(*self.AFTER.get(name, ())))
        return found or (self.COMPONENTS[:1] if name != self.COMPONENTS[0] else ())

    def _component(self, measured: ComponentProfile) -> Component:
        name = measured.name
        component = Component(
            name, after=self.after(name), granularity=self.granularity(name), completion=measured.completion
        )
        if self.on_cpu(name):
            return replace(component, cpu_seconds=measured.seconds[-1][1])
        return replace(component, variants=(replace(self.sizes(name), seconds={ANY_KIND: measured.seconds}),))

    @abstractmethod
    def sizes(self, name: str) -> Variant:
        """The GPU counts on which a component can run: multiples of a parallel size, and only listed ones if any."""

    def granularity(self, name: str) -> int | None:
        """How many batches a component takes at a time; None: all."""
        return None

    def on_cpu(self, name: str) -> bool:
        return False

    def options(self) -> list[list[list[str]]]:
        """The groupings that the framework can run, each a list of pools."""
        raise NotImplementedError

    def pool_sizes(self) -> Sequence[int]:
        """Pool sizes that can be expressed on this cluster."""
        nodes = [node.gpus for node in self.cluster.nodes]
        return [size for size in range(1, sum(nodes) + 1) if not self.EVEN_NODES or even_splits(size, nodes)]

    def rules(self, members: Mapping[str, Component]) -> FrameworkRules:
        """The groupings whose pools each have a size that suits all members."""
        allowed: list[tuple[AllowedGroup, ...]] = []
        ruled_out: list[str] = []
        sizes = self.pool_sizes()
        for option in self.options():
            pools = [AllowedGroup(frozenset(p), runnable(sizes, (members[name] for name in p))) for p in option if p]
            bad = next((pool for pool in pools if not pool.sizes), None)
            if bad is None:
                allowed.append(tuple(pools))
            else:
                ruled_out.append(", ".join(sorted(bad.components)))
        if not allowed:
            raise InfeasibleError(
                f"no number of GPUs suits the parallel sizes and batch sizes of: {ruled_out[0]}",
                where=self.path,
                hint="change the parallel sizes or the batch size so that some number of GPUs divides them",
            )
        return FrameworkRules(self.title, tuple(allowed), even_nodes=self.EVEN_NODES)

    def notes(self) -> Iterable[str]:
        """Assumptions beyond the costs."""
        return ()

    def other_modes(self) -> Iterator[OtherMode]:
        """The framework's modes beside that of the config, for a synchronous one."""
        facts = self.mode_facts()
        for entry in modes_of(self.NAME) if facts else ():
            if any(facts.get(name) in (None, False) for name in entry.get("when", ())):
                continue
            stated = {key: _filled(value, facts) for key, value in entry["set"].items()}
            stated = {key: value for key, value in stated.items() if value is not None}
            gone = [key for key in entry.get("drop", ()) if self.reader.get(key) not in (None, False)]
            yield OtherMode(
                entry["mode"],
                (
                    *(f"++{key}={value_text(value)}" for key, value in stated.items()),
                    *(f"~{key}" for key in gone),
                    *(facts["apart"] if entry.get("apart") else ()),
                ),
                tuple(w for key, value in stated.items() if key[:8] != "trimtab." for w in self.mode_words(key, value)),
                (*entry.get("needs", ()), *(f"leave out {self.mode_words(key, True)[0]}" for key in gone)),
            )

    def mode_facts(self) -> Mapping[str, Any]:
        """What `data/modes.yaml` asks of a synchronous config, nothing for another; `apart` are overrides that give
        the rollout GPUs of its own.
        """
        return {}

    def mode_words(self, key: str, value: Any) -> tuple[str, ...]:
        """A key with its value as words of the framework's command line."""
        return (f"++{key}={value_text(value)}",)

    def cluster_overrides(self) -> tuple[str, ...]:
        """Overrides that keep the cluster, where its nodes are alike."""
        sizes = {node.gpus for node in self.cluster.nodes}
        if len(sizes) != 1:
            return ()
        return (f"++trimtab.nodes={len(self.cluster.nodes)}", f"++trimtab.gpus_per_node={sizes.pop()}")

    @abstractmethod
    def current(self) -> CurrentPlacement | None:
        """Where the file places the components; None if it does not say."""

    @abstractmethod
    def settings(self, plan: Plan) -> PlanSettings:
        """A plan within the rules, in the keys of the file."""

    def node_counts(self, plan: Plan, name: str) -> tuple[int, int]:
        return node_counts(plan.group_of(name).gpus, self.cluster, name)


@cache
def modes_of(framework: str) -> Sequence[Mapping[str, Any]]:
    """The rows of `data/modes.yaml` of a framework."""
    text = (resources.files("trimtab.formats") / "data" / "modes.yaml").read_text(encoding="utf-8")
    found: Sequence[Mapping[str, Any]] = yaml_text.parse(text, "modes.yaml").get(framework, ())
    return found


def _filled(value: Any, facts: Mapping[str, Any]) -> Any:
    """A value of the table of modes: `{name}` is a fact."""
    return facts.get(value[1:-1]) if isinstance(value, str) and value[:1] == "{" else value


def value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def gpus_by_component(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: group.gpus for group in plan.groups for name in group.components}


def even_cluster(nodes: int, gpus_per_node: int) -> Cluster:
    """A cluster of identical nodes. Raises InputError if it is too large."""
    check_gpus(nodes * gpus_per_node, f"{nodes:,} nodes of {gpus_per_node:,} GPUs")
    return Cluster(tuple(Node(name=f"node{index}", gpus=gpus_per_node) for index in range(nodes)))


def without(cluster: Cluster, gpus: int) -> Cluster:
    """The cluster without `gpus` GPUs, taken from its last nodes."""
    left = []
    for node in reversed(cluster.nodes):
        taken = min(gpus, node.gpus)
        gpus -= taken
        left.append(replace(node, gpus=node.gpus - taken))
    return Cluster(tuple(node for node in reversed(left) if node.gpus))


def check_gpus(gpus: int, what: str, where: str | None = None) -> None:
    """Raise InputError for more GPUs than the limit, before anything iterates over them."""
    if gpus > MAX_COUNT:
        raise InputError(f"{what} are {gpus:,} GPUs: plans are made for 1 to {MAX_COUNT:,}", where=where)


def refuse_waits(measured: ComponentProfile) -> None:
    """Refuse a time that contains waiting: it must not be planned with."""
    if measured.waits:
        raise InputError(
            f"the time of {measured.name} in this profile is a wait, not a cost",
            where=f"profile: {measured.name}",
            hint="take the profile from a synchronous run with shared GPUs",
        )
    if not measured.seconds:
        raise InputError(f"the profile has no times for {measured.name}", where=f"profile: {measured.name}")


def weight_sync(profile: Profile | None, source: str, target: str) -> WeightSync:
    """The weight sync between two components, with the measured time if any, shared or separate alike."""
    measured = profile.component(WEIGHT_SYNC) if profile else None
    seconds = measured.seconds[-1][1] if measured and measured.seconds and not measured.waits else 0.0
    return WeightSync(source=source, target=target, shared_seconds=seconds, separate_seconds=seconds)


def runnable(sizes: Iterable[int], members: Iterable[Component]) -> tuple[int, ...]:
    variants = [variant for member in members for variant in member.variants]
    return tuple(size for size in sizes if all(variant.allows(size) for variant in variants))


def check_expressible(plan: Plan, rules: FrameworkRules) -> None:
    """Raise InputError if the framework cannot run a plan."""
    groups = {frozenset(group.components): len(group.gpus) for group in plan.groups}
    near: str | None = None
    for grouping in rules.spanning if plan.overlaps else rules.groupings:
        if {allowed.components for allowed in grouping} != set(groups):
            continue
        wrong = [a for a in grouping if a.sizes is not None and groups[a.components] not in a.sizes]
        if not wrong:
            return
        names, sizes = ", ".join(sorted(wrong[0].components)), [str(size) for size in wrong[0].sizes or ()]
        listed = ", ".join(sizes if len(sizes) <= 12 else [*sizes[:10], "...", sizes[-1]])
        near = f"{names} cannot have {groups[wrong[0].components]} GPUs, only {listed}"
    known = [" | ".join(", ".join(sorted(pool.components)) for pool in grouping) for grouping in rules.groupings]
    raise InputError(
        f"{rules.framework} cannot run this plan: {plan.describe()}", hint=near or f"it can run: {'; or '.join(known)}"
    )


def node_counts(ranks: Sequence[int], cluster: Cluster, name: str) -> tuple[int, int]:
    ends = list(accumulate(node.gpus for node in cluster.nodes))
    found = Counter(bisect_right(ends, rank) for rank in ranks)
    counts = [found[at] for at in sorted(found)]
    if not counts or len(set(counts)) > 1:
        shape = " + ".join(str(count) for count in counts) or "none"
        raise InputError(
            f"the GPUs of {name} lie on nodes as {shape}, and a pool takes the same number on each of its nodes"
        )
    return len(counts), counts[0]


def divisors_of_batch(batch: int, model_parallel: int, highest: int) -> tuple[int, ...]:
    """GPU counts up to `highest` whose data-parallel size divides a batch."""
    return tuple(dp * model_parallel for dp in range(1, highest // model_parallel + 1) if batch % dp == 0)
