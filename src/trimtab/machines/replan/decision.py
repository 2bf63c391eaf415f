"""Decides whether another plan is worth a migration: the exact best plan at the measured costs, gain against cost.

A comparison finds the candidates (the best plan, and the best with the current groups, which is cheaper to reach) and
their iteration times. `weigh` decides. Neither executes anything.

A gain is computed twice: at the estimated costs, and at costs that drifted only as far as is certain. The second must
pay for the migration: when all that changed is noise, it is zero. What must never happen: a migration for a gain that
noise alone explains, or that does not pay within the remaining iterations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan.estimates import profiled_seconds
from trimtab.machines.replan.placed_plan import PlacedPlan, on_current_gpus
from trimtab.model.plan import FrameworkRules, Plan
from trimtab.model.run import DecisionNumbers, MigrationCost, ReplanRules
from trimtab.model.workflow import Cluster, PlacementJob, Workflow
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.compare import why_infeasible
from trimtab.plan.placement.planner import check_cluster
from trimtab.plan.placement.search import search
from trimtab.plan.placement.simulate import GroupingShape, GroupingShapes, Simulator, cells_of, shape_of
from trimtab.plan.placement.space import Grouping, PlanSpace
from trimtab.plan.placement.timeline import to_plan

CostLevels = Mapping[str, float]

SYNC_SHARED, SYNC_SEPARATE = "sync on shared GPUs", "sync on separate GPUs"

COSTS_KEPT = 5  # latest migrations that predict the cost of the next


class CandidatePlan(Frozen):
    """A plan that could run instead: seconds per iteration at the estimated and at the sure levels."""

    placed_plan: PlacedPlan
    seconds: float
    sure_seconds: float


class PlanComparison(Frozen):
    """The running plan and its candidates at given levels."""

    seconds: float  # of the running plan, at the estimated levels
    sure_seconds: float
    candidates: tuple[CandidatePlan, ...]


class ReplanDecision(Frozen):
    """Keep the plan (no `to`), or migrate."""

    to: PlacedPlan | None
    reason: Reason
    numbers: DecisionNumbers


class ReplanPlanner:
    """The placement planner for a workflow whose costs and cluster change."""

    def __init__(self, workflow: Workflow, allowed: FrameworkRules | None = None) -> None:
        self.workflow = workflow
        self.allowed = allowed
        self._simulator = Simulator(workflow)
        self._space: PlanSpace | None = None  # at profiled costs, for the last cluster

    def with_overheads(self, overheads: Mapping[str, float]) -> ReplanPlanner:
        """A planner for measured switches (by component) and syncs (`SYNC_SHARED`, `SYNC_SEPARATE`)."""
        workflow = self.workflow
        components = tuple(
            replace(component, switch_seconds=overheads.get(component.name, component.switch_seconds))
            for component in workflow.components
        )
        sync = workflow.weight_sync
        if sync is not None:
            shared_s = overheads.get(SYNC_SHARED, sync.shared_seconds)
            separate_s = overheads.get(SYNC_SEPARATE, sync.separate_seconds)
            sync = replace(sync, shared_seconds=shared_s, separate_seconds=separate_s)
        return ReplanPlanner(replace(workflow, components=components, weight_sync=sync), self.allowed)

    def seconds(self, plan: Plan, levels: CostLevels) -> float:
        return self.with_times(plan, self.times(plan, levels))

    def with_times(self, plan: Plan, times: Mapping[str, float]) -> float:
        order = self._simulator.order
        row = np.array([times[component.name] for component in order])
        return float(self._simulator.seconds(row[None, :], GroupingShapes.stack([self._shape(plan)]))[0])

    def _shape(self, plan: Plan) -> GroupingShape:
        position = {component.name: i for i, component in enumerate(self._simulator.order)}
        groups = [(tuple(sorted(position[name] for name in group.components)), group.gpus) for group in plan.groups]
        cells = cells_of(groups) if plan.overlaps else [members for members, _ in groups]
        return shape_of(self._simulator.order, self.workflow, cells)

    def times(self, plan: Plan, levels: CostLevels) -> dict[str, float]:
        """Time of each component for all batches at these levels."""
        kinds = kinds_of(plan)
        times = {}
        for placed in plan.components:
            component = self.workflow.component(placed.name)
            seconds = profiled_seconds(component, placed.variant, kinds.get(placed.name, ""), len(placed.gpus))
            times[placed.name] = (placed.seconds if seconds is None else seconds) * levels.get(placed.name, 1.0)
        return times

    def best(self, cluster: Cluster, levels: CostLevels) -> PlacedPlan:
        """The best plan. Raises InfeasibleError, or InputError where there is no GPU."""
        space = self._at(cluster, levels)
        found = search(space).best
        if found is None:
            raise why_infeasible(space)
        return PlacedPlan(to_plan(space, found), cluster)

    def compare(self, running: PlacedPlan, cluster: Cluster, levels: CostLevels, sure: CostLevels) -> PlanComparison:
        """Candidates for a plan whose GPUs all exist."""
        now, now_sure = self.seconds(running.plan, levels), self.seconds(running.plan, sure)
        found: list[FoundPlan] = []
        try:
            space = self._at(cluster, levels)
        except (InfeasibleError, InputError):
            space = None
        if space is not None:
            best = search(space, beat=now).best
            if best is not None:
                found.append(best)
                found.extend(self._same_groups(space, running, best, now))
        candidates = []
        for candidate in found:
            assert space is not None
            placed_plan = on_current_gpus(PlacedPlan(to_plan(space, candidate), cluster), running)
            if not placed_plan.same_as(running):
                candidates.append(CandidatePlan(placed_plan, candidate.seconds, self.seconds(placed_plan.plan, sure)))
        return PlanComparison(now, now_sure, tuple(candidates))

    def _same_groups(self, space: PlanSpace, running: PlacedPlan, best: FoundPlan, beat: float) -> list[FoundPlan]:
        """The best plan with the current groups, unless it is the best of all."""
        names = {frozenset(group.components): group.kind for group in running.plan.groups}

        def alike(grouping: Grouping) -> bool:
            groups = {frozenset(space.order[i].name for i in table.members): table.kind for table in grouping.tables}
            return groups == names and grouping.spans == running.plan.overlaps

        if alike(best.grouping):
            return []
        same = [grouping for grouping in space.groupings() if alike(grouping)]
        other = search(space, same, beat=beat).best if same else None
        return [other] if other is not None else []

    def prepare(self, cluster: Cluster) -> PlanSpace:
        """The plan space of a cluster at profiled costs; computed once."""
        if self._space is None or self._space.job.cluster != cluster:
            job = PlacementJob(cluster, self.workflow)
            check_cluster(job)
            self._space = PlanSpace(job, self.allowed)
            self._space.groupings()
        return self._space

    def _at(self, cluster: Cluster, levels: CostLevels) -> PlanSpace:
        """The plan space at these levels."""
        space = self.prepare(cluster)
        for index, component in enumerate(space.order):
            level = levels.get(component.name, 1.0)
            if level != 1.0:
                space = space.scaled(index, level)
        return space

    def fewest(self, plan: Plan, component: str, levels: CostLevels, slack: float) -> int:
        """The fewest GPUs of a component that lengthen the iteration by at most the slack share."""
        times, kind = self.times(plan, levels), kinds_of(plan).get(component, "")
        placed = plan.placed(component)
        part = self.workflow.component(component)
        variant = next(variant for variant in part.variants if variant.name == placed.variant)
        counts = [gpus for gpus in range(1, len(placed.gpus) + 1) if variant.allows(gpus)] or [len(placed.gpus)]
        limit = self.with_times(plan, times) * (1 + slack)

        def enough(gpus: int) -> bool:
            seconds = profiled_seconds(part, placed.variant, kind, gpus) or 0.0
            return self.with_times(plan, {**times, component: seconds * levels.get(component, 1.0)}) <= limit

        return counts[bisect_left(counts, True, hi=len(counts) - 1, key=enough)]


def kinds_of(plan: Plan) -> dict[str, str]:
    return {name: group.kind for group in plan.groups for name in group.components}


def cost_of(
    touched: Sequence[str], known: Sequence[MigrationCost], rules: ReplanRules, switching_s: float
) -> tuple[float, bool]:
    """Cost of migrating these components, and whether it was measured.

    Migrations of the same components count first; else the most expensive recent one. Until one is measured, it is the
    assumed cost plus the components' offload and onload times.
    """
    same = [cost.seconds for cost in known if cost.touched == tuple(touched)][-COSTS_KEPT:]
    if same:
        return float(np.median(same)), True
    if known:
        return max(cost.seconds for cost in known[-COSTS_KEPT:]), True
    return rules.assumed_move_s + switching_s, False


def weigh(
    comparison: PlanComparison,
    costs: Sequence[tuple[float, bool]],
    rules: ReplanRules,
    horizon: int,
    why: Reason,
    kept: float = 1.0,
) -> ReplanDecision:
    """Keep or migrate; `costs` are those of each candidate, `why` is the reason for a migration that pays.

    `kept` is the share of promised gains that came.
    """
    numbers = DecisionNumbers(iteration_s=comparison.seconds, horizon=horizon, margin=rules.margin)
    if not comparison.candidates:
        reason = Reason(ReasonCode.no_gain, f"no plan is faster than {_s(comparison.seconds)} an iteration")
        return ReplanDecision(None, reason, numbers)
    worth = [
        min(comparison.sure_seconds - candidate.sure_seconds, comparison.seconds - candidate.seconds) * kept * horizon
        - cost * (1 + rules.margin)
        for candidate, (cost, _) in zip(comparison.candidates, costs, strict=True)
    ]
    chosen = max(range(len(worth)), key=lambda at: (worth[at], -at))
    candidate, (cost, known) = comparison.candidates[chosen], costs[chosen]
    gain, sure = comparison.seconds - candidate.seconds, comparison.sure_seconds - candidate.sure_seconds
    numbers = replace(
        numbers, new_iteration_s=candidate.seconds, gain_s=gain, sure_gain_s=sure, cost_s=cost, cost_measured=known
    )
    described = candidate.placed_plan.plan.describe()
    text = f"{described} would take {_s(candidate.seconds)} instead of {_s(comparison.seconds)}"
    if gain < rules.least_gain * comparison.seconds:
        return ReplanDecision(None, Reason(ReasonCode.no_gain, f"{text}: less than {rules.least_gain:.0%}"), numbers)
    if sure < rules.least_gain / 2 * comparison.sure_seconds:
        text += f", but only {_s(max(sure, 0.0))} of that is more than noise"
        return ReplanDecision(None, Reason(ReasonCode.within_noise, text), numbers)
    if worth[chosen] <= 0:
        price = f"{_s(cost)} {'as measured' if known else 'assumed'}"
        text += f": {_s(min(gain, sure))} x {horizon} iterations do not pay for a move of {price}"
        return ReplanDecision(None, Reason(ReasonCode.not_worth, text), numbers)
    return ReplanDecision(candidate.placed_plan, Reason(why.code, f"{why.sentence}; {text}"), numbers)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"
