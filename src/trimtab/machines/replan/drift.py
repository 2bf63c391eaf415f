"""Monitors a run: current costs, gains of other plans, outcome of the last migration.

Keeps the last plan comparison, so that an iteration without drift needs no search. Changes only figures of the run; the
machine acts.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan.decision import (
    SYNC_SEPARATE,
    SYNC_SHARED,
    PlanComparison,
    ReplanDecision,
    ReplanPlanner,
    cost_of,
    kinds_of,
    weigh,
)
from trimtab.machines.replan.estimates import CostEstimates, sure_level
from trimtab.machines.replan.events import MoveJudged, SetGpuRange
from trimtab.machines.replan.explain import costs_text, drift_reason
from trimtab.machines.replan.placed_plan import GpuSlot, PlacedPlan, changes, gpu_slots, without
from trimtab.machines.replan.state import PromisedGain, ReplanState
from trimtab.model.plan import FrameworkRules
from trimtab.model.run import ChangeKind, DecisionNumbers, Iteration, ReplanRules
from trimtab.model.workflow import Workflow

LEVEL_CHANGE = 0.02  # relative change of a level that triggers a new comparison
SOME = 3  # predictions before the bias is used
OVERHEAD_CHANGE = 0.01  # of an iteration: a switch or sync that changes by more changes the model
LEAST_CAME = 0.5  # share of a promised gain below which a migration fell short
MAX_SETBACKS = 5  # doublings of the dwell time


class DriftMonitor:
    """Figures of a run."""

    def __init__(
        self, state: ReplanState, workflow: Workflow, rules: ReplanRules, allowed: FrameworkRules | None
    ) -> None:
        self.run = state.run
        self.workflow = workflow
        self.rules = rules
        self._stated = ReplanPlanner(workflow, allowed)
        self.planner = self._stated.with_overheads(self.run.overheads) if self.run.overheads else self._stated
        alone = replace(workflow, staleness=0)
        self._cold = ReplanPlanner(alone) if workflow.staleness else None  # no work of the iteration has begun before
        if self.run.cluster.gpus:
            self.planner.prepare(self.run.cluster)
        self.estimates = CostEstimates(workflow, rules, state.tracks)
        self._costs = state.costs
        self._comparison: PlanComparison | None = None  # at `run.compared_levels`; derived, so not in snapshots

    # ---- iterations ------------------------------------------------------------------------------------------------

    def take(self, iteration: Iteration, moving: bool) -> MoveJudged | None:
        """Count an iteration; the outcome of the last migration where it is known now."""
        run, plan = self.run, self.run.running.plan
        kinds = kinds_of(plan)
        self.estimates.take(iteration, {c.name: (c.variant, kinds.get(c.name, "")) for c in plan.components})
        for part in iteration.components:
            run.switching[part.component] = part.switch_s
        self._measure_overheads(iteration)
        was_cold, run.is_cold = run.is_cold, False
        return None if moving or iteration.extra or iteration.wall_s <= 0 else self._compare(iteration, was_cold)

    def _measure_overheads(self, iteration: Iteration) -> None:
        """Measured switches and syncs replace stated ones, also for plans that have not run."""
        run, plan, window = self.run, self.run.running.plan, self.rules.window
        if iteration.extra or run.is_cold:
            return
        found = {part.component: part.switch_s for part in iteration.components if part.switch_s > 0}
        for name, took_s in found.items():
            if len(plan.group_of(name).components) > 1:
                run.switches[name] = [*run.switches.get(name, []), took_s][-window:]
        sync = self.workflow.weight_sync
        if sync is not None and iteration.sync_s is not None:
            key = SYNC_SHARED if sync.target in plan.group_of(sync.source).components else SYNC_SEPARATE
            run.syncs[key] = [*run.syncs.get(key, []), iteration.sync_s][-window:]
        measured = {key: median(took) for key, took in (run.switches | run.syncs).items() if len(took) >= SOME}
        changes_s = [abs(took_s - run.overheads.get(key, -1.0)) for key, took_s in measured.items()]
        if any(change_s > OVERHEAD_CHANGE * iteration.wall_s for change_s in changes_s):
            run.overheads = measured
            self.planner = self._stated.with_overheads(measured)
            self.planner.prepare(run.cluster)
            self.invalidate()

    def _times(self, iteration: Iteration) -> dict[str, float]:
        batches = self.workflow.batches
        return {part.component: part.busy_s * batches / (part.batches or batches) for part in iteration.components}

    def expected_s(self) -> float | None:
        """Prediction of the next iteration by the present costs, with what the model has missed of late."""
        run = self.run
        if run.lost or not self.estimates.measured:
            return None
        estimates = self.estimates.all()
        levels = {name: estimate.level * (1 + estimate.trend) for name, estimate in estimates.items()}
        times = self.planner.times(run.running.plan, levels)
        if run.is_cold and self._cold is not None:
            return self._cold.with_times(run.running.plan, times)
        bias = median(run.bias) if run.bias else run.carried_bias
        return self.planner.with_times(run.running.plan, times) * bias

    def staying_s(self, iteration: Iteration) -> float | None:
        """What the first plan would have taken for an iteration, by its costs; None while that plan runs."""
        run = self.run
        if run.first is None or run.first.same_as(run.running) or iteration.extra:
            return None
        kinds, levels = kinds_of(run.running.plan), {}
        for name, seconds in self._times(iteration).items():
            placed = run.running.plan.placed(name)
            level = self.estimates.level(name, seconds, placed.variant, kinds.get(name, ""), len(placed.gpus))
            if level is None:
                return None
            levels[name] = level
        return self.planner.seconds(run.first.plan, levels) * run.first_bias

    def _compare(self, iteration: Iteration, was_cold: bool) -> MoveJudged | None:
        """Compare the iteration time with the prediction for its component times."""
        run = self.run
        times = self._times(iteration)
        run.walls = [*run.walls, iteration.wall_s][-self.rules.window :]
        if times.keys() >= set(self.workflow.names) and not was_cold:
            predicted = self.planner.with_times(run.running.plan, times)
            if predicted > 0:
                run.bias = [*run.bias, iteration.wall_s / predicted][-self.rules.window :]
        promise = run.promise
        if promise is None:
            return None
        promise.walls.append(iteration.wall_s)
        if len(promise.walls) < self.rules.least_iterations:
            return None
        run.promise = None
        return self._judge(promise)

    def _judge(self, promise: PromisedGain) -> MoveJudged:
        """Whether the last migration gained what it promised: if not by half, the dwell time doubles."""
        old_s = self.planner.seconds(promise.before.plan, self.levels()) * promise.bias
        gained = 1 - median(promise.walls) / old_s if old_s > 0 else 0.0
        came = min(1.0, max(0.0, gained / promise.share)) if promise.share > 0 else 1.0
        self.run.kept = (self.run.kept + came) / 2
        self.run.setbacks = 0 if came >= LEAST_CAME else self.run.setbacks + 1
        return MoveJudged(promise.move, promise.share, gained)

    def shortfall(self, judged: MoveJudged) -> Reason | None:
        if not self.run.setbacks:
            return None
        text = f"the last move promised {judged.promised:.0%} of an iteration and gained {judged.realised:.0%}"
        return Reason(ReasonCode.fell_short, f"{text}; the next one waits {self.dwell()} iterations")

    # ---- other plans -----------------------------------------------------------------------------------------------

    def decide(self) -> ReplanDecision:
        """Keep or migrate, with a new comparison where the last one is outdated."""
        estimates = self.estimates.all()
        run = self.run
        levels = {name: estimate.level for name, estimate in estimates.items()}
        sure = {name: sure_level(estimate, run.reference[name]) for name, estimate in estimates.items()}
        drifted = [name for name in sure if sure[name] != run.reference[name]]
        why = drift_reason(drifted, levels, run, self.planner.times(run.running.plan, levels))
        comparison, fresh = self._compared(levels, sure)
        decision = self._weighed(comparison, why)
        if decision.to is not None and not fresh:
            # A migration must rest on current figures, not on those of an older comparison.
            self.invalidate()
            decision = self._weighed(self._compared(levels, sure)[0], why)
        if decision.reason.code is ReasonCode.no_gain and why.code is ReasonCode.better_plan:
            steady = Reason(ReasonCode.costs_steady, costs_text(estimates, run.reference, drifted))
            decision = ReplanDecision(None, steady, decision.numbers)
        return decision

    def invalidate(self) -> None:
        """Drop the last comparison: the plan or the cluster changed."""
        self._comparison, self.run.compared_levels, self.run.compared_sure_levels = None, {}, {}

    def _compared(self, levels: dict[str, float], sure: dict[str, float]) -> tuple[PlanComparison, bool]:
        """The comparison, and whether it is new."""
        run = self.run
        then = run.compared_sure_levels
        fresh = not then or any(abs(sure[name] / then[name] - 1) > LEVEL_CHANGE for name in sure)
        if fresh:
            self._comparison, run.compared_levels, run.compared_sure_levels = None, levels, sure
        if self._comparison is None:
            usable = without(run.cluster, run.leaving)
            self._comparison = self.planner.compare(run.running, usable, run.compared_levels, run.compared_sure_levels)
        return self._comparison, fresh

    def _weighed(self, comparison: PlanComparison, why: Reason) -> ReplanDecision:
        costs = [self.cost(candidate.placed_plan) for candidate in comparison.candidates]
        decision = weigh(comparison, costs, self.rules, self.horizon(), why, self.run.kept)
        return ReplanDecision(decision.to, decision.reason, self._with_dwell(decision.numbers))

    # ---- figures ---------------------------------------------------------------------------------------------------

    def must_migrate(self) -> bool:
        return bool(self.run.lost) or self.run.running.uses(self.run.leaving)

    def is_available(self, placed_plan: PlacedPlan) -> bool:
        return placed_plan.on(self.run.cluster) is not None and not placed_plan.uses(self.run.leaving)

    def used_slots(self) -> set[GpuSlot]:
        here = gpu_slots(self.run.running.cluster)
        return {here[rank] for group in self.run.running.plan.groups for rank in group.gpus}

    def levels(self) -> dict[str, float]:
        """Current cost of every component relative to its profile."""
        return {name: estimate.level for name, estimate in self.estimates.all().items()}

    def cost(self, to: PlacedPlan) -> tuple[float, bool]:
        """Cost of the migration, and whether it was measured."""
        touched = tuple(
            change.component for change in changes(self.run.running, to) if change.how is not ChangeKind.stays
        )
        switching_s = sum(self.run.switching.get(name, 0.0) for name in touched)
        return cost_of(touched, self._costs, self.rules, switching_s)

    def horizon(self) -> int:
        remaining = self.run.remaining
        max_iterations = self.rules.horizon_iterations
        return max_iterations if remaining is None else min(max_iterations, remaining)

    def dwell(self) -> int:
        return int(self.rules.dwell_iterations * 2 ** min(self.run.setbacks, MAX_SETBACKS))

    def _with_dwell(self, numbers: DecisionNumbers) -> DecisionNumbers:
        moved_at = self.run.moved_at
        left = 0 if moved_at is None else max(0, moved_at + self.dwell() - self.run.done)
        return replace(numbers, dwell_left=left)

    @property
    def bias(self) -> float | None:
        """Measured over predicted iteration time, once enough iterations ran under this plan."""
        return median(self.run.bias) if len(self.run.bias) >= SOME else None

    def ranges(self) -> tuple[SetGpuRange, ...]:
        """GPU ranges of elastic components under the plan."""
        found = []
        for name in self.rules.elastic:
            max_gpus = len(self.run.running.plan.placed(name).gpus)
            alone = any(group.components == (name,) for group in self.run.running.plan.groups)
            slack = self.rules.range_slack
            min_gpus = self.planner.fewest(self.run.running.plan, name, self.levels(), slack) if alone else max_gpus
            found.append(SetGpuRange(name, min_gpus, max_gpus))
        return tuple(found)
