"""The components of a run in this process: created, called with a deadline, timed, closed.

Every call ends in a time or in a ComponentError. Optional methods that a component lacks (`offload`, `save` ...) are
not called. A component that hung is never called again, not even `close`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
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
    error_text,
    make_component,
    origin,
)
from trimtab.runtime.run.emulated import EmulatedComponent, PacedComponent, emulated_settings
from trimtab.runtime.run.job import RunJob

CLOSE_LIMIT_S = 10.0


class ComponentLostError(UnreachableError):
    """A component's process is gone; its work since the last checkpoint is lost."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(what)
        self.component = component


class ComponentSet(Protocol):
    """All components of a run, wherever they are. Times are seconds; a failure is a ComponentError."""

    def make(self, workflow: Workflow, placed_plan: PlacedPlan, iteration: int) -> None:
        """Create all components; those that share GPUs are offloaded."""

    def drop(self, names: Sequence[str] | None = None) -> None:
        """End these components, or all. Ignores errors of the components."""

    def place(self, workflow: Workflow, placed_plan: PlacedPlan, names: Sequence[str], iteration: int) -> None:
        """Create these components anew where a plan places them."""

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        """Give a resizable component the GPU count of a plan."""

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        """Offload components that share GPUs, onload all others; `loaded` are on their GPUs now."""

    def has(self, name: str, method: str) -> bool:
        """Whether a component has an optional method."""

    def step(self, name: str, batch: Batch) -> tuple[Result, float]: ...

    def offload(self, name: str) -> float: ...

    def onload(self, name: str) -> float: ...

    def weights(self, source: str) -> tuple[Any, float]: ...

    def sync(self, target: str, weights: Any, version: int) -> float: ...

    def save(self, name: str, folder: Path) -> float: ...

    def load(self, name: str, folder: Path) -> None: ...

    def check_health(self, names: Sequence[str]) -> None:
        """Raise ComponentError if one of these is unhealthy."""

    def span(self, name: str, min_gpus: int, max_gpus: int) -> None:
        """Tell a component that brings its own workers its range of GPUs."""

    def close(self) -> None: ...


class DeadlineError(Exception):
    """A call did not return in time."""


class _Call:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.value = self.function(*self.arguments)
        except BaseException as error:  # also SystemExit: user code must not end the run's process
            self.error = error
        finally:
            self.done.set()


class DeadlineCaller:
    """Makes calls into user code one at a time, in one thread, each with a deadline; Ctrl-C interrupts the wait.

    A call that hangs cannot be ended from outside: its thread is left behind as a daemon, and no further call is made.
    """

    def __init__(self, name: str = "trimtab-run") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stuck = False  # a call did not return

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """Call the function; raises what it raises, or DeadlineError."""
        if self.stuck:
            raise DeadlineError("an earlier call has not returned")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        call = _Call(function, arguments)
        self._calls.put(call)
        try:
            in_time = call.done.wait(limit_s)
        except BaseException:  # Ctrl-C: the call may never return
            self.stuck = not call.done.is_set()
            raise
        if not in_time:
            self.stuck = True
            raise DeadlineError(f"not over after {limit_s:g} s")
        if call.error is not None:
            raise call.error
        return call.value

    def close(self, wait_s: float = 5.0) -> None:
        """Waits a moment for a call that is stuck, so that the process does not end in the middle of it."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(wait_s)
            self._thread = None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()


class LocalComponents:
    """All components of a run in this process."""

    def __init__(self, run: RunJob, clock: Clock, folder: Path | None) -> None:
        self._run = run
        self._clock = clock
        self._folder = folder
        self._caller = DeadlineCaller()
        self._made: dict[str, RunComponent] = {}
        self._consumers = {
            name: tuple(c.name for c in run.job.workflow.components if name in c.after)
            for name in run.job.workflow.names
        }

    def make(self, workflow: Workflow, placed_plan: PlacedPlan, iteration: int) -> None:
        for component in workflow.in_order():
            self._make(workflow, placed_plan.plan, component.name, iteration)
            if self._shares(placed_plan.plan, component.name):
                self.offload(component.name)

    def drop(self, names: Sequence[str] | None = None) -> None:
        for name in list(self._made) if names is None else names:
            if name in self._made and not self._caller.stuck and self.has(name, "close"):
                with contextlib.suppress(ComponentError):
                    self._called(name, "close", self._method(name, "close"))
            self._made.pop(name, None)

    def place(self, workflow: Workflow, placed_plan: PlacedPlan, names: Sequence[str], iteration: int) -> None:
        """Create these components anew; they are onloaded then."""
        for component in workflow.in_order():
            if component.name in names:
                self._make(workflow, placed_plan.plan, component.name, iteration)

    def resize(self, workflow: Workflow, plan: Plan, name: str) -> None:
        component = self._made[name]
        if isinstance(component, PacedComponent):
            component.pace(**self._emulated(workflow, plan, name))
        self._timed(name, "resize", len(plan.placed(name).gpus))

    def settle(self, plan: Plan, loaded: frozenset[str]) -> None:
        for name in self._made:
            if self._shares(plan, name):
                if name in loaded:
                    self.offload(name)
            elif name not in loaded:
                self.onload(name)

    def has(self, name: str, method: str) -> bool:
        return callable(getattr(self._made[name], method, None))

    def step(self, name: str, batch: Batch) -> tuple[Result, float]:
        output, took_s = self._timed(name, "step", batch)
        return checked(output, name, wanted_by=self._consumers[name]), took_s

    def offload(self, name: str) -> float:
        return self._timed(name, "offload")[1] if self.has(name, "offload") else 0.0

    def onload(self, name: str) -> float:
        return self._timed(name, "onload")[1] if self.has(name, "onload") else 0.0

    def weights(self, source: str) -> tuple[Any, float]:
        return self._timed(source, "weights") if self.has(source, "weights") else (None, 0.0)

    def sync(self, target: str, weights: Any, version: int) -> float:
        return self._timed(target, "sync", weights, version)[1] if self.has(target, "sync") else 0.0

    def save(self, name: str, folder: Path) -> float:
        return self._timed(name, "save", folder)[1]

    def load(self, name: str, folder: Path) -> None:
        self._timed(name, "load", folder)

    def span(self, name: str, min_gpus: int, max_gpus: int) -> None:
        if self.has(name, "span"):
            self._timed(name, "span", min_gpus, max_gpus)

    def check_health(self, names: Sequence[str]) -> None:
        for name in names:
            if self.has(name, "health"):
                answer, _ = self._timed(name, "health")
                if answer is not True:
                    why = answer if isinstance(answer, str) else "health() did not return True"
                    raise ComponentError(name, "unhealthy", f"{name} is unhealthy: {why}")

    def close(self) -> None:
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
            what = f"the {method} of {name} tried to exit the process: {error_text(error)}"
            raise ComponentError(name, "raised", what) from error
