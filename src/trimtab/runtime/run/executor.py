"""What executes the components of a run: in this process (`local_executor.py`) or on Ray (`ray_executor.py`).

An executor places components, calls them, moves and ends them, and reports lost ones. Every call ends in a result, a
`ComponentError` (the component failed) or a `ComponentLostError` (its process is gone). Optional methods that a
component lacks (`offload`, `save` ...) are not called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import UnreachableError
from trimtab.machines.replan.events import ClusterChanged
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import Plan
from trimtab.model.workflow import Cluster, WeightSync, Workflow
from trimtab.runtime.run.component import ComponentError, Place
from trimtab.runtime.run.component_worker import CallResult, ComponentStartSpec
from trimtab.runtime.run.emulated import emulated_settings
from trimtab.runtime.run.folder import EmitEvent
from trimtab.runtime.run.job import RunJob

if TYPE_CHECKING:
    from trimtab.runtime.run.iteration import IterationRunner

Placements = Mapping[str, tuple[tuple[str, int], ...]]
"""By component: the nodes of its GPUs, and how many it has there."""


class ComponentLostError(UnreachableError):
    """A component's process is gone; its work since the last checkpoint is lost."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(what)
        self.component = component


class Executor(ABC):
    """The components of one run, where they are, and how their actions run."""

    def nodes(self, requested: Cluster) -> Cluster:
        """The nodes for a job that requests these. Raises InfeasibleError."""
        return requested

    def open(self, job: RunJob, folder: Path | None, emit: EmitEvent) -> None:
        """Get ready to place components; the run's time begins."""
        self._job, self._folder, self._emit = job, folder, emit
        self._has: dict[str, frozenset[str]] = {}  # optional methods of each component

    @abstractmethod
    def close(self) -> None:
        """End all components, and free what they used."""

    @abstractmethod
    def create(
        self, specs: Sequence[ComponentStartSpec], to: PlacedPlan, *, initial: bool
    ) -> dict[str, frozenset[str]]:
        """Create components where a plan places them; returns which optional methods each has.

        `initial`: at the start or after a loss. Components that share GPUs are ready for their first turn then.
        """

    @abstractmethod
    def end(self, names: Sequence[str] | None = None) -> None:
        """End these components, or all. Ignores errors of the components."""

    @abstractmethod
    def call(self, name: str, method: str, *arguments: Any) -> CallResult:
        """Call a method of `ComponentCalls`. Data in arguments and results may be references."""

    @abstractmethod
    def offload(self, name: str) -> float:
        """Release the GPUs of a component, before another that shares them is onloaded; returns seconds."""

    @abstractmethod
    def onload(self, name: str) -> float: ...

    @abstractmethod
    def drive(
        self, runner: IterationRunner, poll: Callable[[], None], ended: Callable[[IterationRunner, float], None]
    ) -> None:
        """Run all actions of an order. `ended` is called after each, with the time; `poll` when updates may be there.

        Both are called in the thread of the caller.
        """

    @abstractmethod
    def now(self) -> float:
        """Seconds on the run's timeline."""

    def catch_up(self) -> None:  # noqa: B027 -- wall time counts by itself
        """Count time spent outside of actions since the last one, where that does not count by itself."""

    def cluster_change(self) -> ClusterChanged | None:
        """The next change of the cluster that is not yet taken."""
        return None

    def placements(self) -> Placements:
        """Where components were placed, as far as the executor decides that."""
        return {}

    # ---- the job's components ------------------------------------------------------------------------------------

    def place(self, workflow: Workflow, to: PlacedPlan, iteration: int, names: Sequence[str] | None = None) -> None:
        """Create these components where a plan places them, or all at the start and after a loss."""
        chosen = [c.name for c in workflow.in_order() if names is None or c.name in names]
        specs = [self._spec(workflow, to.plan, name, iteration) for name in chosen]
        self._has.update(self.create(specs, to, initial=names is None))

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        """Give a resizable component the GPU count of a plan."""
        pace = self._emulated(workflow, plan, name) if self._job.parts[name].paced else None
        self.call(name, "resize", len(plan.placed(name).gpus), pace)

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        """Offload components that share GPUs, onload all others; `loaded` are on their GPUs now."""
        for name in self._has:
            shares = len(plan.group_of(name).components) > 1
            if shares and name in loaded:
                self.offload(name)
            elif not shares and name not in loaded:
                self.onload(name)

    def has(self, name: str, method: str) -> bool:
        """Whether a component has an optional method."""
        return method in self._has[name]

    def weights(self, source: str) -> CallResult | None:
        """The current weights of a component; None if it has none to pass on."""
        return self.call(source, "weights") if self.has(source, "weights") else None

    def sync(self, target: str, weights: CallResult | None, version: int) -> float:
        if weights is None or not self.has(target, "sync"):
            return 0.0
        return self.call(target, "sync", weights.value, version).took_s

    def sync_weights(self, sync: WeightSync | None, version: int) -> None:
        if sync is not None:
            self.sync(sync.target, self.weights(sync.source), version)

    def check_health(self, names: Sequence[str]) -> None:
        """Raise ComponentError if one of these is unhealthy."""
        for name in names:
            if self.has(name, "health"):
                self.call(name, "health")

    def _spec(self, workflow: Workflow, plan: Plan, name: str, iteration: int) -> ComponentStartSpec:
        job, part, gpus = self._job, self._job.parts[name], plan.placed(name).gpus
        place = Place(
            component=name,
            devices=gpus,
            gpus=len(gpus),
            iteration=iteration,
            seed=job.seed,
            folder=self._folder,
            emulated=part.use is None,
            near=job.near,
        )
        after = workflow.component(name).after
        wanted_by = tuple(c.name for c in workflow.components if name in c.after)
        pace = self._emulated(workflow, plan, name) if part.use is None or part.paced else None
        if part.use is None:
            return ComponentStartSpec(place, None, pace or {}, after, wanted_by)
        return ComponentStartSpec(place, part.use, part.settings, after, wanted_by, pace)

    def _emulated(self, workflow: Workflow, plan: Plan, name: str) -> dict[str, Any]:
        part = self._job.parts[name]
        return emulated_settings(workflow, plan, name, curve=part.curve, disturbance=part.disturbance)


def hung_error(name: str, method: str, limit_s: float) -> ComponentError:
    what = f"the {method} of {name} was not over after {limit_s:g} s"
    return ComponentError(name, "hung", what, hint="raise run.step_limit_s if it needs longer")
