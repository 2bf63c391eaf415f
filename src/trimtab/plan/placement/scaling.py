"""Tests a plan where components were measured on a single number of GPUs.

One point does not show how a component scales. The plan is then made twice: with perfect scaling, and with 80 % of a
perfect speed-up for each doubling of GPUs. Where the two differ neither is proven, and the deciding measurement is
named. A stated `floor_seconds` is a statement on scaling: such a component is taken as stated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from trimtab.model.plan import CurrentPlacement, Plan, ScalingCaveat
from trimtab.model.workflow import PlacementJob, Variant
from trimtab.plan.placement.compare import predicted, time_text
from trimtab.plan.placement.search import TIE, search
from trimtab.plan.placement.space import PlanSpace
from trimtab.plan.placement.timeline import to_plan

DOUBLING = 0.8
"""Assumed share of a perfect speed-up for twice the GPUs, where nothing was measured."""


def measured_once(job: PlacementJob) -> tuple[str, ...]:
    """Components of unknown scaling that could run on several numbers of GPUs."""
    return tuple(
        component.name
        for component in job.workflow.components
        if any(_measured_once(variant, job) for variant in component.variants)
    )


def _measured_once(variant: Variant, job: PlacementJob) -> bool:
    if variant.floor_seconds:
        return False
    for kind in job.cluster.kinds:
        points, counts = variant.points(kind), range(1, len(job.cluster.ranks(kind)) + 1)
        if len(points) == 1 and any(variant.allows(gpus) and gpus != points[0][0] for gpus in counts):
            return True
    return False


def with_doubling(job: PlacementJob, names: Collection[str], doubling: float = DOUBLING) -> PlacementJob:
    """The job with this scaling for components with one measured point."""
    components = tuple(
        replace(c, variants=tuple(v if v.floor_seconds else replace(v, doubling=doubling) for v in c.variants))
        if c.name in names
        else c
        for c in job.workflow.components
    )
    return replace(job, workflow=replace(job.workflow, components=components))


def scaling_of(space: PlanSpace, best: Plan, current: CurrentPlacement | None) -> ScalingCaveat | None:
    """The best plan under worse scaling; None where the scaling of all components is known."""
    names = measured_once(space.job)
    if not names:
        return None
    slower = PlanSpace(with_doubling(space.job, names), space.rules)
    chosen = _seconds(slower, best)
    found = search(slower).best
    other = to_plan(slower, found) if found is not None else None
    mine = predicted(slower, current) if current is not None else None
    if isinstance(mine, Plan) and (other is None or mine.iteration_seconds < other.iteration_seconds * (1 - TIE)):
        other = mine
    if other is None or chosen <= other.iteration_seconds * (1 + TIE) or other.describe() == best.describe():
        return ScalingCaveat(names, DOUBLING, chosen)
    return ScalingCaveat(names, DOUBLING, chosen, other, _deciding(space, best, other, names))


def _deciding(space: PlanSpace, best: Plan, other: Plan, names: tuple[str, ...]) -> tuple[str, int] | None:
    """The component whose scaling decides between the two plans, and on how many GPUs to measure it."""
    lead = _seconds(space, other) - _seconds(space, best)
    shifts: dict[str, float] = {}
    for name in names:
        alone = PlanSpace(with_doubling(space.job, [name]))
        shifts[name] = lead - (_seconds(alone, other) - _seconds(alone, best))
    unsure = [name for name in names if best.placed(name).extrapolated or other.placed(name).extrapolated]
    if not unsure:
        return None
    name = max(unsure, key=shifts.__getitem__)
    points = [point for v in space.job.workflow.component(name).variants for point in v.seconds.values()]
    measured = points[0][0][0]
    counts = [len(plan.placed(name).gpus) for plan in (other, best) if plan.placed(name).extrapolated]
    return name, max(counts, key=lambda gpus: max(gpus / measured, measured / gpus))


def _seconds(space: PlanSpace, plan: Plan) -> float:
    """Iteration time of a plan at the costs of a space."""
    ranks = {name: group.gpus for group in plan.groups for name in group.components}
    found = predicted(space, CurrentPlacement(ranks, "the plan"))
    assert isinstance(found, Plan), found
    return found.iteration_seconds


def scaling_text(scaling: ScalingCaveat) -> str:
    assumed = f"perfect scaling: {', '.join(scaling.components)} was measured on one number of GPUs only"
    if len(scaling.components) > 1:
        assumed = assumed.replace(" was measured", " were each measured")
    if scaling.plan is None:
        return (
            f"{assumed}; the plan is the same if each doubling of GPUs gives {scaling.doubling:.0%} of a perfect "
            f"speed-up (then {time_text(scaling.chosen_seconds)})"
        )
    return (
        f"{assumed}; if each doubling of GPUs gives {scaling.doubling:.0%} of a perfect speed-up this plan takes "
        f"{time_text(scaling.chosen_seconds)}, and {scaling.plan.describe()} takes "
        f"{time_text(scaling.plan.iteration_seconds)}"
        + (f"; measure {scaling.measure[0]} on {scaling.measure[1]} GPUs: that decides" if scaling.measure else "")
    )
