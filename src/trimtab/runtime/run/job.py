"""A job to run: the planner's job, the code of each component, and the length of the run.

Needs neither pydantic nor a YAML reader: a job made in Python runs without them. Files are read by `job_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.model.plan import Plan
from trimtab.model.run import Iteration, ReplanRules
from trimtab.model.workflow import ANY_KIND, Component, PlacementJob, Variant, Workflow, check_workflow
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.compare import DOUBLING
from trimtab.plan.placement.space import PlanSpace
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.run.emulated import UNDISTURBED, Disturbance

UNMEASURED_S = 1.0  # placeholder for unknown costs, so that components can be placed for measuring


class ComponentCode(Frozen):
    """The code of a component: a class with its settings, or (`use` is None) emulated.

    With `paced` the code is real and its steps are stretched to emulated times.
    """

    use: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[int, float] | None = None
    disturbance: Disturbance = UNDISTURBED
    paced: bool = False


class RunJob(Frozen):
    """A job with everything needed to run it. `unmeasured` are components without stated costs.

    `near` is the job file's folder, searched for modules that Python does not find. A component call that takes longer
    than `step_limit_s` counts as hung; `place_limit_s` and `close_limit_s` are for a component to be placed and to end.
    """

    job: PlacementJob
    parts: Mapping[str, ComponentCode]
    iterations: int = 1
    seed: int = 0
    save_every: int = 10
    step_limit_s: float = 600.0
    place_limit_s: float = 120.0
    close_limit_s: float = 30.0
    profile_iterations: int = 4
    unmeasured: frozenset[str] = frozenset()
    near: Path | None = None
    name: str = "job"
    rules: ReplanRules = field(default_factory=ReplanRules)
    priority: float = 8.0
    text: str | None = None  # the job as a job file, kept in the run folder

    def __post_init__(self) -> None:
        check_workflow(self.job.workflow)
        for key, minimum in (("iterations", 1), ("save_every", 1), ("profile_iterations", 2)):
            if getattr(self, key) < minimum:
                raise InputError(f"{key} is a whole number of {minimum} or more", where=f"{self.name}: run.{key}")
        for key in ("step_limit_s", "place_limit_s", "close_limit_s"):
            if not getattr(self, key) > 0:
                raise InputError(f"{key} is more than 0", where=f"{self.name}: run.{key}")
        for component in self.job.workflow.names:
            where = f"{self.name}: workflow.components.{component}"
            part = self.parts.get(component)
            if part is None:
                raise InputError(
                    f"{component} has neither use nor emulate",
                    where=where,
                    hint="add use: package.module:Class, or emulate: true",
                )
            if (part.use is None or part.paced) and part.curve is None and component in self.unmeasured:
                raise InputError(f"{component} is emulated and has no costs", where=where, hint="add its `seconds`")


def shared_plan(job: PlacementJob) -> Plan:
    """All components on the same GPUs, as many of one kind as they can use: for measuring costs without waiting."""
    space = PlanSpace(job)
    for kind in space.budgets:
        grouping = space.grouping((tuple(space.on_gpu),), (kind,))
        if grouping is None:
            continue
        sizes = (grouping.tables[0].sizes[-1],)
        options, seconds = space.best_of(grouping, sizes)
        return to_plan(space, FoundPlan(grouping, sizes, options, seconds))
    raise InfeasibleError(
        "the components do not fit on the same GPUs, so their costs cannot be measured there",
        where="workflow.components",
        hint="state their `seconds`",
    )


def with_costs(
    workflow: Workflow, iterations: Sequence[Iteration], names: frozenset[str], syncs_s: Sequence[float] = ()
) -> Workflow:
    """The workflow with measured costs of some components: medians, at the GPU count they ran on.

    Switch and weight-sync times are the measured ones only where none are stated.
    """
    costs: dict[str, list[tuple[int, float, float]]] = {}
    for iteration in iterations:
        for timing in iteration.components:
            costs.setdefault(timing.component, []).append((timing.gpus, timing.busy_s, timing.switch_s))

    def measured(component: Component) -> Component:
        if component.name not in names or component.name not in costs:
            return component
        gpus = costs[component.name][-1][0]
        mine = [(busy, switch) for at, busy, switch in costs[component.name] if at == gpus]
        busy_s = float(np.median([busy for busy, _ in mine]))
        if component.on_cpu:
            return replace(component, cpu_seconds=busy_s)
        switch_s = component.switch_seconds or float(np.median([switch for _, switch in mine]))
        # Measured on one number of GPUs: a plan on another promises no perfect speed-up.
        variants = tuple(
            replace(variant, seconds={ANY_KIND: ((gpus, busy_s),)}, doubling=DOUBLING) for variant in component.variants
        )
        return replace(component, variants=variants or (Variant(),), switch_seconds=switch_s)

    sync = workflow.weight_sync
    if sync is not None and syncs_s and not (sync.shared_seconds or sync.separate_seconds):
        sync_s = float(np.median(syncs_s))
        sync = replace(sync, shared_seconds=sync_s, separate_seconds=sync_s)
    components = tuple(measured(component) for component in workflow.components)
    return replace(workflow, components=components, weight_sync=sync)
