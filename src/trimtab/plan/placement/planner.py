"""Entry point of the placement planner: which GPUs each component gets, with an explanation.

Stays within the rules of a framework, and reports what those rules cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.model.plan import Alternative, CurrentPlacement, FrameworkRules, PlacementAnswer, Plan
from trimtab.model.workflow import PlacementJob, check_workflow
from trimtab.plan.placement.compare import (
    current_plan,
    near_ties,
    over_interval,
    runners_up,
    scaling_of,
    scaling_text,
    sensitivity,
    why_infeasible,
    why_it_loses,
)
from trimtab.plan.placement.search import SearchOutcome, search
from trimtab.plan.placement.space import PlanSpace
from trimtab.plan.placement.timeline import to_plan

NOISE = 0.05
"""Real runs do not distinguish plans closer than this."""


def best_plan(job: PlacementJob, rules: FrameworkRules | None = None) -> tuple[PlanSpace, SearchOutcome]:
    """The best plan and its proof only: the cost of the search itself."""
    check_workflow(job.workflow)
    check_cluster(job)
    space = PlanSpace(job, rules)
    outcome = search(space)
    if outcome.best is None:
        raise why_infeasible(space)
    return space, outcome


def explain(
    space: PlanSpace,
    outcome: SearchOutcome,
    *,
    current: CurrentPlacement | None = None,
    assumptions: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    noise: float = NOISE,
    with_sensitivity: bool = True,
    estimated: Sequence[Mapping[str, float]] = (),
) -> PlacementAnswer:
    """The answer around a best plan: runners-up, near ties, sensitivity, assumptions.

    `estimated` are components whose costs were not measured, with the factor by which they may be off; those of one
    mapping are off together.

    If the best plan is slower than the placement in the file, that placement is the answer.
    """
    found = outcome.best
    assert found is not None
    best = to_plan(space, found)
    alternatives: list[Alternative] = list(runners_up(space, found))
    kept = False
    if current is not None:
        mine = current_plan(space, current, found)
        kept = mine.plan is not None and mine.plan.iteration_seconds < best.iteration_seconds * (1 - 1e-9)
        if kept and mine.plan is not None:
            label = f"best that {space.rules.framework} can be told" if space.rules else "best other"
            alternatives = [Alternative(label, best, why_it_loses(best, mine.plan))]
            best = mine.plan
        else:
            alternatives.append(mine)
    unrestricted = None
    if space.rules is not None:
        free = PlanSpace(space.job)
        anything = search(free, beat=best.iteration_seconds * (1 - 1e-9)).best
        unrestricted = to_plan(free, anything) if anything else None
        if unrestricted is not None and unrestricted.describe() == best.describe():
            unrestricted = None  # the same placement, with some GPUs of a component unused
    scaling = scaling_of(space, best, current)
    return PlacementAnswer(
        best=best,
        lower_bound_seconds=min(outcome.lower_bound, best.iteration_seconds),
        optimal=outcome.optimal and not kept and (scaling is None or scaling.plan is None),
        plans_considered=outcome.considered,
        alternatives=tuple(alternatives),
        near_ties=() if kept else near_ties(space, found, noise),
        sensitivity=sensitivity(space, found, noise) if with_sensitivity and not kept else (),
        assumptions=(
            *((scaling_text(scaling),) if scaling else ()),
            *notes,
            *assumptions,
            # A dialect states its own assumptions on streaming.
            *_assumptions(space, best, with_streaming=not assumptions),
        ),
        unrestricted=unrestricted,
        scaling=scaling,
        kept=kept,
        framework=space.rules.framework if space.rules else "",
        interval=over_interval(space, found, estimated, noise) if estimated and not kept else None,
    )


def plan_placement(
    job: PlacementJob, rules: FrameworkRules | None = None, *, current: CurrentPlacement | None = None
) -> PlacementAnswer:
    space, outcome = best_plan(job, rules)
    return explain(space, outcome, current=current)


def check_cluster(job: PlacementJob) -> None:
    """Raises where the cluster has no GPUs, or too few CPUs for any plan."""
    cluster = job.cluster
    if cluster.gpus == 0:
        raise InputError(
            "the cluster has no GPUs", where="cluster", hint="state cluster.nodes and cluster.gpus_per_node"
        )
    need = sum(component.cpus for component in job.workflow.components if component.on_cpu)
    if cluster.cpus is not None and need > cluster.cpus:
        raise InfeasibleError(
            f"the CPU components need {need:g} CPUs together, the cluster has {cluster.cpus:g}",
            where="workflow.components",
            hint="lower their `cpus`, or plan for nodes with more",
        )


def _assumptions(space: PlanSpace, plan: Plan, with_streaming: bool) -> tuple[str, ...]:
    """What the prediction assumes beyond measured and stated figures."""
    notes = []
    outside = [c.name for c in plan.components if c.extrapolated]
    if outside:
        notes.append(
            f"extrapolated beyond what was measured: {', '.join(outside)}; measure there before you rely on it"
        )
    cluster, components = space.job.cluster, space.job.workflow.components
    stated = any(v.memory.active.at(1) > 0 for c in components for v in c.variants)
    if stated and any(cluster.gpu_memory_gb(kind) is None for kind in space.budgets):
        notes.append("GPU memory of the cluster is not stated (gpu_memory_gb): memory was not checked")
    elif not stated:
        notes.append("no component states memory_gb: memory was not checked")
    parked = any(v.host_memory_gb for c in components for v in c.variants)
    if parked and any(cluster.host_memory_gb_per_gpu(kind) is None for kind in space.budgets):
        notes.append("host memory of the nodes is not stated (host_memory_gb): parked components were not checked")
    streaming = [c.name for c in components if c.after and c.granularity is not None]
    whole = [c.name for c in components if c.after and c.granularity is None]
    if with_streaming and space.job.workflow.batches > 1 and streaming:
        notes.append(f"streaming (started before all inputs are there): {', '.join(streaming)}")
    if with_streaming and whole and streaming:
        notes.append(f"not streaming (started with all inputs there): {', '.join(whole)}")
    return tuple(notes)
