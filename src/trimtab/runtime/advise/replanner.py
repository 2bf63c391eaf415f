"""Whether to advise another plan than the one in place, step by step: a thin layer around the replan machine.

The machine (`machines/replan`, in mode advise) separates drift from noise and weighs the gain against the cost of a
restart. Here its answers become advice that stays until another plan is clearly better or until the gain is negligible,
so that it does not flicker; with the settings of the run's framework and an error band. Pure: no clock, no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.formats.loaded import LoadedJob, PlanSettings
from trimtab.formats.write_back import overrides
from trimtab.machines.replan import events as e
from trimtab.machines.replan.estimates import sure_level
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.model.plan import CurrentPlacement, FrameworkRules, Plan
from trimtab.model.run import ComponentTiming, CostEstimate, Iteration, ReplanRules
from trimtab.model.workflow import Component, PlacementJob
from trimtab.plan.placement.compare import current_plan, measured_once, with_doubling
from trimtab.plan.placement.planner import best_plan

NEAR = 0.02  # advice changes only for a plan that is faster by this share: real runs do not show less


class Advice(Frozen):
    """Another plan and its gain. Seconds are of one iteration, shares are of the plan in place."""

    since: int  # the step after which it was first given
    plan: Plan
    settings: PlanSettings
    reason: Reason
    iteration_s: float
    new_iteration_s: float
    gain: float
    low: float
    high: float
    extrapolated: tuple[str, ...] = ()  # components planned on GPU counts that were not measured
    gain_if_less: float | None = None  # at 80 % of a perfect speed-up per doubling; None: scaling is known

    @property
    def overrides(self) -> tuple[str, ...]:
        """To add to the run's command line; they identify the advice."""
        return tuple(overrides(self.settings))


class Adviser:
    """One run with its costs and its placement."""

    def __init__(self, loaded: LoadedJob, rules: ReplanRules) -> None:
        self.loaded = loaded
        self.rules = rules
        self.advice: Advice | None = None
        self.reason = Reason(ReasonCode.too_few, "nothing is measured yet")
        self._start(placement_now(loaded))

    def _start(self, plan: Plan) -> None:
        """Measure and decide under this plan from now on."""
        job, self._count = self.loaded.job, 0
        self.machine = ReplanMachine(job.workflow, job.cluster, plan, self.rules, self.loaded.rules)
        self.estimates: dict[str, CostEstimate] = self.machine.estimates()

    @property
    def plan(self) -> Plan:
        return self.machine.plan

    def drifted(self) -> tuple[str, ...]:
        """Components whose cost has changed significantly, the largest change first."""
        known = self.estimates
        found = [name for name in known if known[name].measured and sure_level(known[name], 1.0) != 1.0]
        return tuple(sorted(found, key=lambda name: -abs(math.log(known[name].level))))

    def take(self, step: int, costs: Mapping[str, float], wall_s: float | None) -> None:
        """Count a step: the cost of each component, and its duration if known."""
        placed = {component.name: len(component.gpus) for component in self.plan.components}
        parts = tuple(ComponentTiming(name, seconds, placed[name]) for name, seconds in costs.items() if name in placed)
        self._count += 1
        # A step with periodic work has no usable wall time; its component timers are valid.
        done = Iteration(self._count, wall_s or 0.0, parts)
        instructions = self.machine.handle(e.IterationDone(done), float(self._count))
        self.estimates = self.machine.estimates()
        for instruction in instructions:
            if isinstance(instruction, e.AdvisePlan):
                self._advise(step, instruction)
            elif isinstance(instruction, e.KeepPlan):
                self._keep(instruction)

    def taken(self, advice: Advice) -> None:
        """The run goes on with an advised plan."""
        # What cannot be measured there costs what it cost here: levels count from now on.
        self.loaded = replace(self.loaded, job=self._job_now())
        self._start(advice.plan)
        self.reason = Reason(ReasonCode.arrived, f"the advice was taken: {self.plan.describe()}")
        self.advice = None

    def seconds_now(self) -> float:
        return self._seconds(self.plan, {})

    def at_current_costs(self, plan: Plan) -> Plan:
        """A plan with its timeline at current costs."""
        return self._placed_as(self._job_now(), plan)

    def _job_now(self) -> PlacementJob:
        return scaled(self.loaded.job, {name: estimate.level for name, estimate in self.estimates.items()})

    def _placed_as(self, job: PlacementJob, plan: Plan) -> Plan:
        ranks = {name: group.gpus for group in plan.groups for name in group.components}
        return _placed(job, None, CurrentPlacement(ranks, str(self.loaded.path), overlap=plan.overlaps))

    # ---- current advice ------------------------------------------------------------------------------------------

    def _advise(self, step: int, instruction: e.AdvisePlan) -> None:
        old, plan = self.advice, instruction.plan
        self.reason = instruction.reason
        if old is not None and self._seconds(old.plan, {}) <= self._seconds(plan, {}) * (1 + NEAR):
            self.advice = self._evaluated(old, instruction.reason)
            return
        try:
            settings = self.loaded.settings(plan)
        except InputError as error:  # the framework's rules allow it, its keys cannot express it
            self.advice, self.reason = None, Reason(ReasonCode.no_gain, error.what)
            return
        far = tuple(component.name for component in plan.components if component.extrapolated)
        new = Advice(step, plan, settings, instruction.reason, 0.0, 0.0, 0.0, 0.0, 0.0, far)
        if old is not None and old.overrides == new.overrides:
            new = replace(new, since=old.since)
        self.advice = self._evaluated(new, instruction.reason)

    def _keep(self, instruction: e.KeepPlan) -> None:
        self.reason = instruction.reason
        if self.advice is None:
            return
        kept = self._evaluated(self.advice, self.advice.reason)
        self.advice = kept if kept.gain >= self.rules.least_gain / 2 else None

    def _evaluated(self, advice: Advice, reason: Reason) -> Advice:
        """The advice with its gain at current costs.

        The band is the change of the gain when each component costs more or less by its uncertainty, over all
        components.
        """
        now, then = self._seconds(self.plan, {}), self._seconds(advice.plan, {})
        cause, _, _ = reason.sentence.partition("; ")  # the rest may speak of another plan that is as good
        instruction = f"{cause}; {advice.plan.describe()} would take {then:.3g} s instead of {now:.3g} s"
        gain, variance = self._gain(advice.plan, {}), 0.0
        for name, estimate in self.estimates.items():
            sides = (
                self._gain(advice.plan, {name: factor}) for factor in (1 + estimate.width, 1 / (1 + estimate.width))
            )
            variance += max(abs(side - gain) for side in sides) ** 2
        return replace(
            advice,
            reason=Reason(reason.code, instruction),
            iteration_s=now,
            new_iteration_s=then,
            gain=gain,
            low=gain - math.sqrt(variance),
            high=gain + math.sqrt(variance),
            gain_if_less=self._gain_if_less(advice.plan),
        )

    def _gain_if_less(self, plan: Plan) -> float | None:
        """The gain if components that were measured on one GPU count scale less than perfectly."""
        names = measured_once(self.loaded.job)
        if not any(plan.placed(name).extrapolated for name in names):
            return None
        job = with_doubling(self._job_now(), names)
        now, then = (self._placed_as(job, each).iteration_seconds for each in (self.plan, plan))
        return 1 - then / now if now > 0 else 0.0

    def _gain(self, plan: Plan, factors: Mapping[str, float]) -> float:
        """Share of an iteration that a plan saves, if costs are off by these factors."""
        now = self._seconds(self.plan, factors)
        return 1 - self._seconds(plan, factors) / now if now > 0 else 0.0

    def _seconds(self, plan: Plan, factors: Mapping[str, float]) -> float:
        levels = {name: estimate.level * factors.get(name, 1.0) for name, estimate in self.estimates.items()}
        return self.machine.drift.planner.seconds(plan, levels)


def placement_now(loaded: LoadedJob) -> Plan:
    """The placement that the file states, as a plan with its time."""
    if loaded.current is None:
        raise InputError("the file does not say where the components are now", where=str(loaded.path))
    return _placed(loaded.job, loaded.rules, loaded.current)


def _placed(job: PlacementJob, rules: FrameworkRules | None, current: CurrentPlacement) -> Plan:
    space, outcome = best_plan(job, rules)
    assert outcome.best is not None
    found = current_plan(space, current, outcome.best)
    if found.plan is None:
        raise InputError(
            f"the current placement cannot be evaluated: {found.reason}",
            where=current.where,
            hint="give the configuration that the run was started with, and its overrides",
        )
    return found.plan


def scaled(job: PlacementJob, levels: Mapping[str, float]) -> PlacementJob:
    """The job with the cost of every component scaled."""

    def scaled_component(component: Component) -> Component:
        level = levels.get(component.name, 1.0)
        if component.cpu_seconds is not None:
            return replace(component, cpu_seconds=component.cpu_seconds * level)
        variants = tuple(
            replace(
                variant,
                floor_seconds=variant.floor_seconds * level,
                seconds={kind: tuple((g, s * level) for g, s in points) for kind, points in variant.seconds.items()},
            )
            for variant in component.variants
        )
        return replace(component, variants=variants)

    components = tuple(scaled_component(component) for component in job.workflow.components)
    return replace(job, workflow=replace(job.workflow, components=components))
