"""Compares the chosen plan with others, rates how certain the choice is, and explains why no plan exists.

Runners-up (all shared, all separate, mixed, the user's own placement) are the best of their class, with the reason why
they lose; near ties are other groupings within the noise; sensitivity is how far each cost may be off before another
plan is faster by more than the noise.

One measured point does not show how a component scales. The plan is then made twice: with perfect scaling, and with
80 % of a perfect speed-up for each doubling of GPUs. Where the two differ neither is proven, and the deciding
measurement is named. A stated `floor_seconds` is a statement on scaling: such a component is taken as stated.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.model.plan import Alternative, CurrentPlacement, IntervalCheck, Plan, ScalingCaveat, Sensitivity
from trimtab.model.workflow import PlacementJob, Variant
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.search import TIE, search
from trimtab.plan.placement.simulate import Floats, GroupingShapes, cells_of
from trimtab.plan.placement.space import Grouping, GroupMembers, PlanSpace, fits
from trimtab.plan.placement.timeline import to_plan

STEPS_UP = tuple(1 + 0.05 * step for step in range(1, 21))
STEPS_DOWN = tuple(1 - 0.05 * step for step in range(1, 11))
MAX_NEAR_TIES = 5
MANY_GROUPINGS = 1_000


def time_text(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 0.9995 else f"{seconds:.1f} s"


def runners_up(space: PlanSpace, best: FoundPlan) -> tuple[Alternative, ...]:
    """The best plan of each class that does not contain the chosen one, and why it loses."""
    everything = space.groupings()
    chosen = to_plan(space, best)
    count = len(space.on_gpu)
    classes = [
        ("all shared", [g for g in everything if len(g.tables) == 1]),
        ("all separate", [g for g in everything if len(g.tables) == count and not g.spans]),
        ("mixed", [g for g in everything if 1 < len(g.tables) < count or g.spans]),
    ]
    found: list[Alternative] = []
    for label, groupings in classes:
        if count == 1 and label == "all separate":
            continue
        if any(grouping.cells == best.grouping.cells for grouping in groupings):
            others = [g for g in groupings if g.cells != best.grouping.cells]
            if label == "mixed" and others:
                label, groupings = "another mixed", others
            else:
                continue
        if label == "mixed" and count < 3:
            continue
        outcome = search(space, groupings)
        if outcome.best is None:
            found.append(Alternative(label, None, _why_none(space, label)))
        else:
            plan = to_plan(space, outcome.best)
            found.append(Alternative(label, plan, why_it_loses(plan, chosen)))
    return tuple(found)


def why_it_loses(plan: Plan, best: Plan) -> str:
    """Where a plan spends time that the best plan does not."""
    if plan.iteration_seconds <= best.iteration_seconds * (1 + 1e-9):
        return "as fast, but not simpler"
    busiest = max(plan.groups, key=lambda group: _busy(plan, group.components))
    busy = _busy(plan, busiest.components)
    waits = plan.iteration_seconds - busy - plan.sync_seconds
    names = " and ".join(busiest.components) if len(busiest.components) < 3 else ", ".join(busiest.components)
    gpus = len(busiest.gpus)
    parts = []
    if len(plan.groups) == 1:
        parts.append(f"one after another on {gpus} GPUs: {time_text(busy)}")
    else:
        parts.append(f"{names} on {gpus} GPUs {'takes' if len(busiest.components) == 1 else 'take'} {time_text(busy)}")
    switches = sum(c.switch_seconds for c in plan.components if c.name in busiest.components)
    if switches > 0.01 * plan.iteration_seconds:
        parts[-1] += f" ({time_text(switches)} of it switching)"
    if waits > 0.01 * plan.iteration_seconds:
        parts.append(f"waiting for inputs adds {time_text(waits)}")
    if plan.sync_seconds > 0.01 * plan.iteration_seconds:
        parts.append(f"weight sync {time_text(plan.sync_seconds)}")
    if plan.idle_share > best.idle_share + 0.05:
        parts.append(f"{plan.idle_share:.0%} of the GPU time is idle")
    return "; ".join(parts)


def _busy(plan: Plan, components: tuple[str, ...]) -> float:
    return sum(c.seconds + c.switch_seconds for c in plan.components if c.name in components)


def _why_none(space: PlanSpace, label: str) -> str:
    if space.rules is not None:
        return f"{space.rules.framework} cannot run it, or not on these GPUs"
    if label == "all separate":
        return why_not_apart(space)
    if label == "all shared":
        return why_not_together(space, tuple(sorted(space.on_gpu)))
    return f"no such plan fits on {space.job.cluster.gpus} GPUs"


def near_ties(space: PlanSpace, best: FoundPlan, noise: float) -> tuple[Plan, ...]:
    """Other groupings whose best plan is within the noise, simplest first."""
    remaining = [g for g in space.groupings() if g.cells != best.grouping.cells]
    ceiling = best.seconds * (1 + noise)
    ties: list[FoundPlan] = []
    while remaining and len(ties) < MAX_NEAR_TIES:
        outcome = search(space, remaining, beat=ceiling)
        if outcome.best is None:
            break
        ties.append(outcome.best)
        remaining = [g for g in remaining if g.cells != outcome.best.grouping.cells]
    ties.sort(key=lambda found: (len(found.sizes), found.seconds))
    return tuple(to_plan(space, found) for found in ties)


def sensitivity(space: PlanSpace, best: FoundPlan, noise: float) -> tuple[Sensitivity, ...]:
    """For each component, the first 5 % step up and down at which another plan is faster by more than the noise."""
    rows = []
    for i, component in enumerate(space.order):
        down, down_plan = _first_change(space, best, i, STEPS_DOWN, noise)
        up, up_plan = _first_change(space, best, i, STEPS_UP, noise)
        rows.append(Sensitivity(component.name, down, up, down_plan, up_plan))
    return tuple(rows)


def _first_change(
    space: PlanSpace, best: FoundPlan, component: int, steps: tuple[float, ...], noise: float
) -> tuple[float | None, str | None]:
    """The first step at which another plan is faster by more than the noise, and that plan."""
    shapes = GroupingShapes.stack([space.shape(best.grouping)])

    def better(factor: float) -> str | None:
        times = plan_times(space, best)
        times[component] *= factor
        kept = float(space.simulator.seconds(times[None, :], shapes)[0])
        # No plan gets faster when a cost rises, nor by more than that cost falls.
        if kept <= best.seconds * min(factor, 1.0) * (1 + noise):
            return None
        scaled = space.scaled(component, factor)
        outcome = search(scaled, beat=kept / (1 + noise))
        return to_plan(scaled, outcome.best).describe() if outcome.best else None

    if len(space.groupings()) <= MANY_GROUPINGS:
        for factor in steps:
            if becomes := better(factor):
                return round(factor, 2), becomes
        return None, None
    # With thousands of groupings each step costs 0.1 s: bisect.
    becomes = better(steps[-1])
    if becomes is None:
        return None, None
    low, high = -1, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if plan := better(steps[middle]):
            high, becomes = middle, plan
        else:
            low = middle
    return round(steps[high], 2), becomes


def over_interval(
    space: PlanSpace, best: FoundPlan, widths: Sequence[Mapping[str, float]], noise: float
) -> IntervalCheck:
    """Compare the plan at the corners of intervals: components of one mapping move together, by their factors.

    A factor of 1.5 stands for costs from 1 / 1.5 to 1.5 times the likely ones.
    """
    shapes = GroupingShapes.stack([space.shape(best.grouping)])
    order = [component.name for component in space.order]
    check = IntervalCheck(True, 0.0, {}, None)
    for signs in itertools.product((-1, 0, 1), repeat=len(widths)):
        factors = {
            n: f**sign for sign, group in zip(signs, widths, strict=True) for n, f in group.items() if n in order
        }
        corner, times = space, plan_times(space, best)
        for name, factor in factors.items():
            index = order.index(name)
            corner = corner.scaled(index, factor)
            times[index] *= factor
        kept = float(space.simulator.seconds(times[None, :], shapes)[0])
        found = search(corner, beat=kept * (1 - 1e-9)).best
        loss = kept / found.seconds - 1 if found else 0.0
        if found and loss > check.loss:
            check = IntervalCheck(loss <= noise, loss, factors, to_plan(corner, found).describe())
    return check


def plan_times(space: PlanSpace, found: FoundPlan) -> Floats:
    """Component times under a plan, in workflow order."""
    times = space.cpu_row
    for table, options in zip(found.grouping.tables, found.options, strict=True):
        for i, option in zip(table.members, options, strict=True):
            times[i] = option.seconds
    return times


def current_plan(space: PlanSpace, current: CurrentPlacement, best: FoundPlan) -> Alternative:
    """The user's placement, checked and predicted; InputError for GPUs that do not exist, or overlap without
    permission.
    """
    label = "your placement"
    plan = predicted(space, current)
    if isinstance(plan, str):
        return Alternative(label, None, plan)
    chosen = to_plan(space, best)
    if plan.iteration_seconds <= chosen.iteration_seconds * (1 + 1e-9):
        return Alternative(label, plan, "it is as fast as the best: keep it")
    return Alternative(label, plan, why_it_loses(plan, chosen))


def predicted(space: PlanSpace, current: CurrentPlacement) -> Plan | str:
    """The plan of a placement at the costs of this space, ignoring its rules; or why it is impossible."""
    check_current(space, current)
    sets: dict[tuple[int, ...], list[int]] = {}
    for i in space.on_gpu:
        ranks = current.ranks.get(space.order[i].name)
        if ranks is None:
            return f"{current.where} does not say where {space.order[i].name} goes"
        sets.setdefault(tuple(sorted(ranks)), []).append(i)
    kind_of = {rank: kind for kind in space.budgets for rank in space.job.cluster.ranks(kind)}
    groups: list[tuple[GroupMembers, tuple[int, ...], str]] = []
    for ranks, sharing in sets.items():
        members = tuple(sorted(sharing))
        kinds = {kind_of[rank] for rank in ranks}
        if len(kinds) > 1:
            return f"{_names(space, members)} would span GPUs of the kinds {sorted(kinds)}"
        groups.append((members, ranks, kinds.pop()))
    free = PlanSpace(space.job)
    tables = []
    for members, ranks, kind in groups:
        table = free.table(members, kind)
        if table is None or table.sizes[0] > len(ranks):
            return f"{_names(space, members)} cannot run on {len(ranks)} GPUs: memory or counts"
        tables.append(table)
    turns = cells_of((members, ranks) for members, ranks, _ in groups) if current.overlap else None
    grouping = Grouping(tuple(tables), turns=turns)
    sizes = tuple(
        max(size for size in table.sizes if size <= len(ranks))
        for table, (_, ranks, _) in zip(tables, groups, strict=True)
    )
    options, seconds = free.best_of(grouping, sizes)
    return to_plan(free, FoundPlan(grouping, sizes, options, seconds), tuple(ranks for _, ranks, _ in groups))


def check_current(space: PlanSpace, current: CurrentPlacement) -> None:
    """Raises InputError for GPUs that do not exist, or partial sharing without permission."""
    total = space.job.cluster.gpus
    placed = list(current.ranks.items())
    for name, ranks in placed:
        outside = sorted(rank for rank in ranks if not 0 <= rank < total)
        if outside:
            raise InputError(
                f"{name} is placed on GPUs that do not exist: {_some(outside)}; the cluster has 0 to {total - 1}",
                where=current.where,
                hint="correct the placement, or state the cluster's real size",
            )
    if current.overlap:
        return
    for position, (name, ranks) in enumerate(placed):
        for other, theirs in placed[position + 1 :]:
            both = sorted(set(ranks) & set(theirs))
            if both and set(ranks) != set(theirs):
                raise InputError(
                    f"{name} and {other} overlap on GPUs {_some(both)} without sharing all of them",
                    where=current.where,
                    hint="give them the same GPUs, or none in common",
                )


def _some(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown + (" ..." if len(ranks) > 8 else "")


def _names(space: PlanSpace, members: Iterable[int]) -> str:
    return " and ".join(space.order[i].name for i in members)


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


def if_scaling_is_worse(job: PlacementJob, plan: Plan) -> float:
    """Seconds of a plan if components measured once scale by `DOUBLING`; those that were planned where none are."""
    names = measured_once(job)
    return _seconds(PlanSpace(with_doubling(job, names)), plan) if names else plan.iteration_seconds


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
    ranks = {name: group.gpus for group in plan.groups for name in group.components}
    found = predicted(space, CurrentPlacement(ranks, "the plan", overlap=True))
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
