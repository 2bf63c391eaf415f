"""The nouns of an answer: a plan, its timeline, what it was compared with, and what a framework is able to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

PlacementMode = Literal["collocated", "disaggregated", "hybrid"]
BarKind = Literal["run", "switch", "sync"]


@dataclass(frozen=True)
class AllowedGroup:
    """Components that a framework can put on the same GPUs, and the group sizes it accepts (`None`: any)."""

    components: frozenset[str]
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class FrameworkRules:
    """Which plans a framework can run; the search stays inside them.

    `framework` is its name for people, with its mode where that matters.
    `groupings` lists every allowed partition of the GPU components. With `even_nodes`, a group has the same number of
    GPUs on each of its nodes. Each of `spanning` is groups side by side, and a last one that takes turns with all of
    them: its GPUs lie over theirs.
    """

    framework: str
    groupings: tuple[tuple[AllowedGroup, ...], ...]
    even_nodes: bool = False
    spanning: tuple[tuple[AllowedGroup, ...], ...] = ()


@dataclass(frozen=True)
class TimelineBar:
    """One stretch of a timeline: a component doing one thing without a break."""

    component: str
    doing: BarKind
    start: float
    end: float


@dataclass(frozen=True)
class ComponentGroup:
    """Components that take turns on the same GPUs, in workflow order. `gpus` are global ranks, contiguous in a kind.

    Groups share no GPUs, except where a framework lets one lie over others: they take turns then.
    """

    components: tuple[str, ...]
    gpus: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True)
class PlacedComponent:
    """One component of a plan.

    `seconds` is its own computing time for all batches; `start` and `end` are within the iteration; `gpus` are the
    ranks it computes on (a group may hold more than one of its members can use). `idle_share` is the share of the
    iteration in which the GPUs of its group do nothing at all (of CPU components: in which it does nothing).
    """

    name: str
    gpus: tuple[int, ...]
    variant: str
    seconds: float
    start: float
    end: float
    idle_share: float
    extrapolated: bool = False
    switch_seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Which GPUs each component gets, and the predicted iteration.

    `components` stand in workflow order. `timeline` covers `timeline_seconds`: one iteration, or with staleness a few
    in steady state, where `iteration_seconds` is the period.
    """

    groups: tuple[ComponentGroup, ...]
    components: tuple[PlacedComponent, ...]
    iteration_seconds: float
    sync_seconds: float
    mode: PlacementMode
    timeline: tuple[TimelineBar, ...]
    timeline_seconds: float
    idle_share: float
    total_gpus: int

    def placed(self, name: str) -> PlacedComponent:
        """The component of that name."""
        return next(component for component in self.components if component.name == name)

    @property
    def gpus(self) -> int:
        """GPUs that the plan uses."""
        return len({rank for group in self.groups for rank in group.gpus})

    @cached_property
    def overlaps(self) -> bool:
        """Whether some groups share GPUs."""
        return self.gpus < sum(len(group.gpus) for group in self.groups)

    def describe(self) -> str:
        """The grouping in a line: `rollout 6 | inference, trainer 10`, or `env 4 | rollout 4 under actor 8`."""
        above = [group for group in self.groups if any(set(other.gpus) < set(group.gpus) for other in self.groups)]
        sides = ([group for group in self.groups if group not in above], above)
        texts = [" | ".join(f"{', '.join(g.components)} {len(g.gpus)}" for g in side) for side in sides]
        return " under ".join(text for text in texts if text)


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen: which one it is (`all shared`, `your placement` ...), and why it loses.

    `plan` is `None` where no such plan is feasible; the reason then says which constraint ruled it out.
    """

    label: str
    plan: Plan | None
    reason: str


@dataclass(frozen=True)
class Sensitivity:
    """How far one component's cost may be off before the choice changes.

    A factor is the first 5 % step at which another plan is faster than the chosen one by more than the noise; `None`
    means that none is, down to half or up to double. `*_becomes` describes the plan that is then best.
    """

    component: str
    lower_factor: float | None
    upper_factor: float | None
    lower_becomes: str | None = None
    upper_becomes: str | None = None


@dataclass(frozen=True)
class ScalingCaveat:
    """What a plan becomes if more GPUs help less than perfectly, where components were measured on one count only.

    `components` are those, `doubling` the share of a perfect speed-up that twice the GPUs then give. `chosen_seconds`
    is what the chosen plan takes then. `plan` is the best one then, where that is another, and `measure` the component
    and the number of GPUs whose measurement decides between the two.
    """

    components: tuple[str, ...]
    doubling: float
    chosen_seconds: float
    plan: Plan | None = None
    measure: tuple[str, int] | None = None


@dataclass(frozen=True)
class PlacementAnswer:
    """What the planner says: the best plan with its proof, and what it was compared with.

    `unrestricted` is the best plan without the rules of `framework`, where that is better. `scaling` is there where
    some component was measured on one number of GPUs only. With `kept` the best plan is the placement in the file:
    it is faster than every plan that can be written for the framework, and nothing is to be changed.
    """

    best: Plan
    lower_bound_seconds: float
    optimal: bool
    plans_considered: int
    alternatives: tuple[Alternative, ...] = ()
    near_ties: tuple[Plan, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    assumptions: tuple[str, ...] = ()
    unrestricted: Plan | None = None
    scaling: ScalingCaveat | None = None
    kept: bool = False
    framework: str = ""


@dataclass(frozen=True)
class CurrentPlacement:
    """Where the user's file puts the components now: name to global ranks, or to `None` where it does not say.

    `overlap`: components may share some of their GPUs without sharing all.
    """

    ranks: Mapping[str, tuple[int, ...]]
    where: str
    overlap: bool = False
