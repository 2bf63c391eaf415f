"""Placement answers: plans, timelines, alternatives, and the plans that a framework can run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from trimtab.core.frozen import Frozen

PlacementMode = Literal["collocated", "disaggregated", "hybrid"]
BarKind = Literal["run", "switch", "sync"]


class AllowedGroup(Frozen):
    """Components that a framework can put on the same GPUs, and the group sizes it accepts (`None`: any)."""

    components: frozenset[str]
    sizes: tuple[int, ...] | None = None


class FrameworkRules(Frozen):
    """Which plans a framework can run; the search stays inside them.

    `framework` is its display name, with its mode where that matters. `groupings` lists every allowed partition of the
    GPU components. With `even_nodes`, a group has the same number of GPUs on each of its nodes. Each of `spanning` is a
    set of disjoint groups, and a last group that overlaps all of them and takes turns with them.
    """

    framework: str
    groupings: tuple[tuple[AllowedGroup, ...], ...]
    even_nodes: bool = False
    spanning: tuple[tuple[AllowedGroup, ...], ...] = ()


class TimelineBar(Frozen):
    """One bar of a timeline: a component doing one thing without interruption."""

    component: str
    doing: BarKind
    start: float
    end: float


class ComponentGroup(Frozen):
    """Components that take turns on the same GPUs, in workflow order. `gpus` are global ranks, contiguous in a kind.

    Groups are disjoint, except where a framework lets one overlap others: they take turns then.
    """

    components: tuple[str, ...]
    gpus: tuple[int, ...]
    kind: str = ""


class PlacedComponent(Frozen):
    """One component of a plan.

    `seconds` is its compute time for all batches; `start` and `end` are within the iteration; `gpus` are the ranks it
    computes on (its group may hold more). `idle_share` is the share of the iteration in which the GPUs of its group are
    idle (for CPU components: in which it is idle).
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


class Plan(Frozen):
    """Which GPUs each component gets, and the predicted iteration.

    `components` are in workflow order. `timeline` covers `timeline_seconds`: one iteration, or with staleness a few in
    steady state, where `iteration_seconds` is the period.
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
        return next(component for component in self.components if component.name == name)

    def group_of(self, name: str) -> ComponentGroup:
        """The group of a component; one of its own if it uses no GPUs."""
        return next((group for group in self.groups if name in group.components), ComponentGroup((name,), ()))

    @property
    def gpus(self) -> int:
        return len({rank for group in self.groups for rank in group.gpus})

    @cached_property
    def overlaps(self) -> bool:
        return self.gpus < sum(len(group.gpus) for group in self.groups)

    def describe(self) -> str:
        """The grouping in a line: `rollout 6 | inference, trainer 10`, or `env 4 | rollout 4 under actor 8`."""
        above = [group for group in self.groups if any(set(other.gpus) < set(group.gpus) for other in self.groups)]
        sides = ([group for group in self.groups if group not in above], above)
        texts = [" | ".join(f"{', '.join(g.components)} {len(g.gpus)}" for g in side) for side in sides]
        return " under ".join(text for text in texts if text)


class Alternative(Frozen):
    """A plan that was not chosen: its label (`all shared`, `your placement` ...), and why it loses.

    `plan` is `None` where no such plan is feasible; the reason then names the constraint.
    """

    label: str
    plan: Plan | None
    reason: str


class Sensitivity(Frozen):
    """How far a component's cost may be off before the choice changes.

    A factor is the first 5 % step at which another plan beats the chosen one by more than the noise; `None`: none does,
    down to half or up to double. `*_becomes` describes the plan that is then best.
    """

    component: str
    lower_factor: float | None
    upper_factor: float | None
    lower_becomes: str | None = None
    upper_becomes: str | None = None


class ScalingCaveat(Frozen):
    """The effect on a plan if more GPUs scale less than perfectly, for components measured on one GPU count only.

    `components` are those; `doubling` is the assumed share of a perfect speed-up that doubling the GPUs gives, and
    `chosen_seconds` the time of the chosen plan then. `plan` is the best one then, if another; `measure` is the
    component and GPU count whose measurement decides between the two.
    """

    components: tuple[str, ...]
    doubling: float
    chosen_seconds: float
    plan: Plan | None = None
    measure: tuple[str, int] | None = None


class IntervalCheck(Frozen):
    """Whether the best plan stays the best while estimated costs lie anywhere in their intervals.

    `loss` is how much slower it is than another plan, at the worst corner; `factors` are the costs there, by component,
    and `becomes` the plan that is better.
    """

    holds: bool
    loss: float
    factors: Mapping[str, float]
    becomes: str | None


class PlacementAnswer(Frozen):
    """The planner's answer: the best plan with its proof, and what it was compared with.

    `unrestricted` is the best plan without the rules of `framework`, where that is better. `scaling` is set where some
    component was measured on one GPU count only. `kept`: the placement in the file is faster than every plan that can
    be written for the framework, so nothing changes. `interval` is set where costs were estimated.
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
    interval: IntervalCheck | None = None


class CurrentPlacement(Frozen):
    """Where the user's file places the components now: name to global ranks, or `None` where it does not say.

    `overlap`: components may share some of their GPUs without sharing all.
    """

    ranks: Mapping[str, tuple[int, ...]]
    where: str
    overlap: bool = False
