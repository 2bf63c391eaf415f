"""The components of a run in this process: made, called with a deadline, measured, and closed.

Every call ends in a time or in a ComponentError that says whose fault it is. What a component does not have (`offload`,
`save` ...) is not called. A component that hung is never called again, also not to be closed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trimtab.model.plan import Plan
from trimtab.model.workflow import Workflow
from trimtab.runtime.run.calls import Caller, DeadlineError
from trimtab.runtime.run.clock import Clock
from trimtab.runtime.run.component import (
    Batch,
    Component,
    ComponentError,
    Place,
    Result,
    checked,
    make_component,
    origin,
    said,
)
from trimtab.runtime.run.emulated import EmulatedComponent, emulated_settings
from trimtab.runtime.run.job import RunJob

CLOSE_LIMIT_S = 10.0


class CrewLike(Protocol):
    """All components of a run, wherever they are. Times are seconds; ComponentError says who did what it may not."""

    def make(self, workflow: Workflow, plan: Plan, iteration: int) -> None:
        """Make all components, and have those that share GPUs leave them."""

    def change(self, workflow: Workflow, before: Plan, after: Plan, iteration: int, loaded: frozenset[str]) -> None:
        """Another plan, between two iterations; `loaded` are those on their GPUs."""

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

    def check_health(self) -> None:
        """Raise where one says that it is not well."""

    def close(self) -> None:
        """The run is over. Never raises for a component's sake."""


class Crew:
    """All components of a run, each with its place in the plan."""

    def __init__(self, run: RunJob, clock: Clock, folder: Path | None) -> None:
        self._run = run
        self._clock = clock
        self._folder = folder
        self._caller = Caller()
        self._made: dict[str, Component] = {}
        self._children = {
            name: tuple(c.name for c in run.job.workflow.components if name in c.after)
            for name in run.job.workflow.names
        }

    def make(self, workflow: Workflow, plan: Plan, iteration: int) -> None:
        """Make all components, and have those that share GPUs leave them."""
        for component in workflow.in_order():
            self._make(workflow, plan, component.name, iteration)
            if self._shares(plan, component.name):
                self.offload(component.name)

    def change(self, workflow: Workflow, before: Plan, after: Plan, iteration: int, loaded: frozenset[str]) -> None:
        """Another plan, between two iterations: who gets other GPUs is made anew with the state it had.

        A component that cannot save and load stays the object it is. Afterwards those that share GPUs are off them, and
        all others on theirs.
        """
        for component in workflow.in_order():
            name = component.name
            on = name in loaded
            if before.placed(name).gpus != after.placed(name).gpus or self._run.parts[name].use is None:
                on = self._made_anew(workflow, after, name, iteration) or on
            if self._shares(after, name):
                if on:
                    self.offload(name)
            elif not on:
                self.onload(name)

    def _made_anew(self, workflow: Workflow, plan: Plan, name: str, iteration: int) -> bool:
        """Whether a component could be made anew, and is on its GPUs therefore."""
        if not (self.has(name, "save") and self.has(name, "load")):
            return False
        with tempfile.TemporaryDirectory(prefix="trimtab-move-") as folder:
            self.save(name, Path(folder))
            if self.has(name, "close"):
                self._timed(name, "close")
            self._make(workflow, plan, name, iteration)
            self.load(name, Path(folder))
        return True

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

    def check_health(self) -> None:
        """Raise ComponentError where one says that it is not well."""
        for name in self._made:
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
        )
        if part.use is None:
            settings = emulated_settings(workflow, plan, name, curve=part.curve, disturbance=part.disturbance)
            self._made[name] = EmulatedComponent(**settings, place=place, clock=self._clock)
            return
        use, given, near = part.use, part.settings, self._run.near
        self._made[name] = self._called(name, "make", lambda: make_component(use, given, place, near))

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
                name, "raised", f"the {method} of {name} raised {said(error)}", where=origin(error)
            ) from error
        except BaseException as error:  # SystemExit and the like
            what = f"the {method} of {name} wanted to end the process: {said(error)}"
            raise ComponentError(name, "raised", what) from error
