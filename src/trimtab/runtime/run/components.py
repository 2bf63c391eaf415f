"""The components of a run in this process: made, called with a deadline, measured, and closed.

Every call ends in a time or in a ComponentError that says whose fault it is. What a component does not have (`offload`,
`save` ...) is not called. A component that hung is never called again, also not to be closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from trimtab.core.errors import UnreachableError
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import Plan
from trimtab.model.workflow import Workflow
from trimtab.runtime.run.clock import Clock
from trimtab.runtime.run.component import (
    Batch,
    ComponentError,
    Place,
    Result,
    RunComponent,
    checked,
    make_component,
    origin,
    error_text,
)
from trimtab.runtime.run.deadline_calls import DeadlineCaller, DeadlineError
from trimtab.runtime.run.emulated import EmulatedComponent, PacedComponent, emulated_settings
from trimtab.runtime.run.job import RunJob

CLOSE_LIMIT_S = 10.0


class ComponentLostError(UnreachableError):
    """A component's process is gone; what it had since it was saved is lost."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(what)
        self.component = component


class ComponentSet(Protocol):
    """All components of a run, wherever they are. Times are seconds; ComponentError says who did what it may not."""

    def make(self, workflow: Workflow, sited: PlacedPlan, iteration: int) -> None:
        """Make all components, and have those that share GPUs leave them."""

    def drop(self, names: Sequence[str] | None = None) -> None:
        """End these components, or all. Never raises for a component's sake."""

    def place(self, workflow: Workflow, sited: PlacedPlan, names: Sequence[str], iteration: int) -> None:
        """Make these components anew where a plan has them."""

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        """Have a component that can go on with the GPUs that a plan gives it."""

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        """Have those that share GPUs off them and all others on theirs; `loaded` are on theirs now."""

    def has(self, name: str, method: str) -> bool:
        """Whether a component can do something that it need not be able to."""

    def step(self, name: str, batch: Batch) -> tuple[Result, float]:
        """One batch, and the seconds it took."""

    def offload(self, name: str) -> float:
        """Have a component leave its GPUs."""

    def onload(self, name: str) -> float:
        """Have a component come back to its GPUs."""

    def weights(self, source: str) -> tuple[Any, float]:
        """The weights that a component has now."""

    def sync(self, target: str, weights: Any, version: int) -> float:
        """Give weights to a component."""

    def save(self, name: str, folder: Path) -> float:
        """Have a component write its state."""

    def load(self, name: str, folder: Path) -> None:
        """Have a component read its state."""

    def check_health(self, names: Sequence[str]) -> None:
        """Raise where one of these says that it is not well."""

    def span(self, name: str, least: int, most: int) -> None:
        """Tell a component that brings its own workers how many GPUs are its own to use."""

    def close(self) -> None:
        """The run is over. Never raises for a component's sake."""


class LocalComponents:
    """All components of a run, each with its place in the plan."""

    def __init__(self, run: RunJob, clock: Clock, folder: Path | None) -> None:
        self._run = run
        self._clock = clock
        self._folder = folder
        self._caller = DeadlineCaller()
        self._made: dict[str, RunComponent] = {}
        self._children = {
            name: tuple(c.name for c in run.job.workflow.components if name in c.after)
            for name in run.job.workflow.names
        }

    def make(self, workflow: Workflow, sited: PlacedPlan, iteration: int) -> None:
        """Make all components, and have those that share GPUs leave them."""
        for component in workflow.in_order():
            self._make(workflow, sited.plan, component.name, iteration)
            if self._shares(sited.plan, component.name):
                self.offload(component.name)

    def drop(self, names: Sequence[str] | None = None) -> None:
        """End these components, or all; says nothing of what goes wrong with somebody who is to go anyway."""
        for name in list(self._made) if names is None else names:
            if name in self._made and not self._caller.stuck and self.has(name, "close"):
                with contextlib.suppress(ComponentError):
                    self._called(name, "close", self._method(name, "close"))
            self._made.pop(name, None)

    def place(self, workflow: Workflow, sited: PlacedPlan, names: Sequence[str], iteration: int) -> None:
        """Make these components anew where a plan has them; they are on their GPUs then."""
        for component in workflow.in_order():
            if component.name in names:
                self._make(workflow, sited.plan, component.name, iteration)

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        """Have a component that can go on with the GPUs that a plan gives it."""
        component = self._made[name]
        if isinstance(component, PacedComponent):
            component.pace(**self._emulated(workflow, plan, name))
        self._timed(name, "resize", len(plan.placed(name).gpus))

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        """Have those that share GPUs off them and all others on theirs; `loaded` are on theirs now."""
        for name in self._made:
            if self._shares(plan, name):
                if name in loaded:
                    self.offload(name)
            elif name not in loaded:
                self.onload(name)

    def has(self, name: str, method: str) -> bool:
        """Whether a component can do something that it need not be able to."""
        return callable(getattr(self._made[name], method, None))

    def step(self, name: str, batch: Batch) -> tuple[Result, float]:
        """One batch, and the seconds it took."""
        output, took_s = self._timed(name, "step", batch)
        return checked(output, name, wanted_by=self._children[name]), took_s

    def offload(self, name: str) -> float:
        """Have a component leave its GPUs; gives the seconds."""
        return self._timed(name, "offload")[1] if self.has(name, "offload") else 0.0

    def onload(self, name: str) -> float:
        """Have a component come back to its GPUs; gives the seconds."""
        return self._timed(name, "onload")[1] if self.has(name, "onload") else 0.0

    def weights(self, source: str) -> tuple[Any, float]:
        """The weights that a component has now, and the seconds it took to get them."""
        return self._timed(source, "weights") if self.has(source, "weights") else (None, 0.0)

    def sync(self, target: str, weights: Any, version: int) -> float:
        """Give weights to a component; gives the seconds."""
        return self._timed(target, "sync", weights, version)[1] if self.has(target, "sync") else 0.0

    def save(self, name: str, folder: Path) -> float:
        """Have a component write its state; gives the seconds."""
        return self._timed(name, "save", folder)[1]

    def load(self, name: str, folder: Path) -> None:
        """Have a component read its state."""
        self._timed(name, "load", folder)

    def span(self, name: str, least: int, most: int) -> None:
        """Tell a component that brings its own workers how many GPUs are its own to use."""
        if self.has(name, "span"):
            self._timed(name, "span", least, most)

    def check_health(self, names: Sequence[str]) -> None:
        """Raise ComponentError where one of these says that it is not well."""
        for name in names:
            if self.has(name, "health"):
                answer, _ = self._timed(name, "health")
                if answer is not True:
                    why = answer if isinstance(answer, str) else "it says so"
                    raise ComponentError(name, "unhealthy", f"{name} is not well: {why}")

    def close(self) -> None:
        """Close all that can be; says nothing of what goes wrong, since the run is over."""
        for name in self._made:
            if not self._caller.stuck and self.has(name, "close"):
                with contextlib.suppress(Exception):
                    self._caller.call(self._method(name, "close"), limit_s=CLOSE_LIMIT_S)
        self._made.clear()
        self._caller.close()

    def _make(self, workflow: Workflow, plan: Plan, name: str, iteration: int) -> None:
        part = self._run.parts[name]
        gpus = plan.placed(name).gpus
        place = Place(
            component=name,
            devices=gpus,
            gpus=len(gpus),
            iteration=iteration,
            seed=self._run.seed,
            folder=self._folder,
            emulated=part.use is None,
            near=self._run.near,
        )
        if part.use is None:
            self._made[name] = EmulatedComponent(**self._emulated(workflow, plan, name), place=place, clock=self._clock)
            return
        use, given, near = part.use, part.settings, self._run.near
        made: RunComponent = self._called(name, "make", lambda: make_component(use, given, place, near))
        if part.paced:
            made = PacedComponent(made, place=place, clock=self._clock, **self._emulated(workflow, plan, name))
        self._made[name] = made

    def _emulated(self, workflow: Workflow, plan: Plan, name: str) -> dict[str, Any]:
        part = self._run.parts[name]
        return emulated_settings(workflow, plan, name, curve=part.curve, disturbance=part.disturbance)

    def _shares(self, plan: Plan, name: str) -> bool:
        return any(name in group.components and len(group.components) > 1 for group in plan.groups)

    def _method(self, name: str, method: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self._made[name], method)
        return found

    def _timed(self, name: str, method: str, *arguments: Any) -> tuple[Any, float]:
        function = self._method(name, method)

        def timed() -> tuple[Any, float]:
            began = self._clock.now()
            value = function(*arguments)
            return value, self._clock.now() - began

        value: tuple[Any, float] = self._called(name, method, timed)
        return value

    def _called(self, name: str, method: str, function: Callable[[], Any]) -> Any:
        limit_s = self._run.step_limit_s
        try:
            return self._caller.call(function, limit_s=limit_s)
        except DeadlineError:
            raise ComponentError(
                name,
                "hung",
                f"the {method} of {name} was not over after {limit_s:g} s",
                hint="raise run.step_limit_s if it needs longer",
            ) from None
        except (ComponentError, KeyboardInterrupt):
            raise
        except Exception as error:
            if method == "make":
                raise
            raise ComponentError(
                name, "raised", f"the {method} of {name} raised {error_text(error)}", where=origin(error)
            ) from error
        except BaseException as error:  # SystemExit and the like
            what = f"the {method} of {name} wanted to end the process: {error_text(error)}"
            raise ComponentError(name, "raised", what) from error
