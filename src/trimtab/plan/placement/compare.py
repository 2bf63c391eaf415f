"""Compares the chosen plan with others, and rates how certain the choice is.

Runners-up (all shared, all separate, mixed, the user's own placement) are the best of their class, with the reason why
they lose; near ties are other groupings within the noise; sensitivity is how far each cost may be off before another
plan is faster by more than the noise.
"""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.core.errors import InputError
from trimtab.model.plan import Alternative, CurrentPlacement, Plan, Sensitivity
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.infeasible import why_not_apart, why_not_together
from trimtab.plan.placement.search import search
from trimtab.plan.placement.simulate import Floats, GroupingShapes, cells_of
from trimtab.plan.placement.space import Grouping, GroupMembers, PlanSpace
from trimtab.plan.placement.timeline import to_plan

STEPS_UP = tuple(1 + 0.05 * step for step in range(1, 21))
STEPS_DOWN = tuple(1 - 0.05 * step for step in range(1, 11))
MAX_NEAR_TIES = 5
MANY_GROUPINGS = 1_000


def time_text(seconds: float) -> str:
    """A plan time: milliseconds below one second."""
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
