"""Explains why no placement exists: which constraint ruled out what. Decides nothing."""

from __future__ import annotations

from trimtab.core.errors import InfeasibleError
from trimtab.plan.placement.cost import fits
from trimtab.plan.placement.space import GroupMembers, PlanSpace


def why_infeasible(space: PlanSpace) -> InfeasibleError:
    """The first component that can run nowhere, or what prevents separate and shared placements."""
    for i in space.on_gpu:
        if not any(space.ways[i, kind].options for kind in space.budgets):
            return _why_nowhere(space, i)
    framework = f" that {space.rules.framework} can run" if space.rules else ""
    return InfeasibleError(
        f"no placement{framework} fits on {space.job.cluster.gpus} GPUs",
        where="workflow.components",
        hint=f"apart: {why_not_apart(space)}; together: {why_not_together(space, tuple(sorted(space.on_gpu)))}",
    )


def why_not_apart(space: PlanSpace) -> str:
    """The GPUs that the components need when each has its own."""
    min_gpus = {space.order[i].name: min(space.ways[i, kind].min_gpus for kind in space.budgets) for i in space.on_gpu}
    listed = ", ".join(f"{name} {gpus}" for name, gpus in min_gpus.items())
    return f"needs at least {sum(min_gpus.values())} GPUs ({listed})"


def why_not_together(space: PlanSpace, members: GroupMembers) -> str:
    """Why components cannot share GPUs, for the largest possible group."""
    for kind, budget in space.budgets.items():
        gpu_limit, host_limit = space.limits[kind]
        fronts = [space.ways[i, kind].front(budget) for i in members]
        if not all(fronts):
            continue
        lean = [min(front, key=lambda option: option.resident_gb) for front in fronts]
        resident = sum(option.resident_gb for option in lean)
        for i, front, option in zip(members, fronts, lean, strict=True):
            need = min(other.active_gb for other in front) + resident - option.resident_gb
            if gpu_limit is not None and not fits(need, gpu_limit):
                return (
                    f"memory: {space.order[i].name} beside the resident parts of the others needs {need:g} GB "
                    f"a GPU, there are {gpu_limit:g}"
                )
        parked = sum(option.host_gb for option in lean) - min(option.host_gb for option in lean)
        if host_limit is not None and not fits(parked, host_limit):
            return f"host memory: the parked components need {parked:g} GB a GPU, its share is {host_limit:g}"
    return "no count of GPUs suits all of them, or memory forbids it"


def _why_nowhere(space: PlanSpace, i: int) -> InfeasibleError:
    component = space.order[i]
    where = f"workflow.components.{component.name}"
    if not any(variant.points(kind) for variant in component.variants for kind in space.budgets):
        kinds = sorted({kind for variant in component.variants for kind in variant.seconds})
        return InfeasibleError(
            f"{component.name} was measured on {', '.join(kinds)}, and the cluster has {', '.join(space.budgets)}",
            where=f"{where}.seconds",
            hint="measure it on a kind that the cluster has, or state seconds without a kind",
        )
    needs = [
        (variant.memory.active.at(gpus), gpus)
        for kind, budget in space.budgets.items()
        for variant in component.variants
        if variant.points(kind)
        for gpus in range(1, budget + 1)
        if variant.allows(gpus)
    ]
    if not needs:
        asked = "; ".join(
            f"one of {list(variant.gpus)}" if variant.gpus is not None else f"a multiple of {variant.multiple_of}"
            for variant in component.variants
        )
        return InfeasibleError(
            f"no GPU count is allowed for {component.name}: it asks for {asked}, the cluster has "
            + ", ".join(f"{budget} {kind}".strip() for kind, budget in space.budgets.items()),
            where=f"{where}.gpus",
            hint="allow a smaller count, or plan for a larger cluster",
        )
    need, gpus = min(needs)
    limit = max(space.limits[kind][0] or 0.0 for kind in space.budgets)
    return InfeasibleError(
        f"{component.name} fits nowhere: it needs {need:g} GB a GPU (on {gpus}), a GPU has {limit:g} GB",
        where=f"{where}.memory_gb.active",
        hint="use a larger parallel size, a larger cluster, or GPUs with more memory",
    )
