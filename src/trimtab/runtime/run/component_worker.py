"""Calls of a component where it is: created, called and timed, in this process or in a worker process of the cluster.

On a cluster it runs in a warm worker process of a pool. Data goes from worker to worker through Ray's object store: the
run's driver passes references to step outputs and never fetches them. Small data travels with the calls, as Ray inlines
it; references nested in other values would cost more than the calls, since each is borrowed and released on its own.
Times are taken here, once the inputs are local. A component's failure is returned as a `ComponentError`, never as its
own exception.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.runtime.run.component import (
    Batch,
    ComponentError,
    Place,
    checked,
    error_text,
    make_component,
    origin,
    visible_devices,
)
from trimtab.runtime.run.emulated import OPTIONAL, Clock, EmulatedComponent, PacedComponent, WallClock

WITH_DATA = ("step", "weights")  # calls that return data beside their result


@dataclass(frozen=True)
class ComponentStartSpec:
    """What to create: a class with its settings (`use`), or an emulated component (`use` is None)."""

    place: Place
    use: str | None
    settings: Mapping[str, Any]
    after: tuple[str, ...] = ()  # components whose outputs are its input
    wanted_by: tuple[str, ...] = ()
    pace: Mapping[str, Any] | None = None  # emulated times for paced user code


@dataclass(frozen=True)
class CallResult:
    """Result of a call: its seconds, and a small plain value or the data."""

    took_s: float = 0.0
    value: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: ComponentError | None = None


class ComponentCalls:
    """The calls of one worker of a component, timed by a clock."""

    def __init__(self, spec: ComponentStartSpec, clock: Clock) -> None:
        self._spec, self._place, self._clock = spec, spec.place, clock
        self._component: Any = None
        self._fault: ComponentError | None = None

    def make(self) -> CallResult:
        """Create the component; raises what its constructor does."""
        spec = self._spec
        if spec.use is None:
            self._component = EmulatedComponent(**spec.settings, place=self._place, clock=self._clock)
        else:
            self._component = make_component(spec.use, spec.settings, self._place, self._place.near)
            if spec.pace is not None:
                self._component = PacedComponent(self._component, place=self._place, clock=self._clock, **spec.pace)
        return self.has()

    def has(self) -> CallResult:
        """Which optional methods the component has."""
        return CallResult(value=tuple(filter(self._has, OPTIONAL)), fault=self._fault)

    def step(self, iteration: int, index: int, of: int, *inputs: Any) -> tuple[CallResult, Any]:
        """Run a batch; returns the result and the data. `inputs` are those of `after`, or that of the run."""
        data = dict(zip(self._spec.after, inputs, strict=True)) if len(inputs) > 1 else inputs[0]
        leads, given = self._place.rank == 0, None

        def run_step() -> CallResult:
            nonlocal given
            if self._place.emulated and not leads:
                return CallResult()
            began_s = self._clock.now()
            output = self._component.step(Batch(iteration, index, of, data))
            took_s = self._clock.now() - began_s
            result = checked(output, self._place.component, wanted_by=self._spec.wanted_by if leads else ())
            given = result.data if leads and self._spec.wanted_by else None
            return CallResult(took_s, metrics=result.metrics)

        return self.guarded("step", run_step), given

    def weights(self) -> tuple[CallResult, Any]:
        """The current weights, beside the time it took to get them."""
        done = self._do("weights")
        return replace(done, value=None), done.value

    def sync(self, weights: Any, version: int) -> CallResult:
        return self._do("sync", weights, version)

    def resize(self, gpus: int, pace: Mapping[str, Any] | None) -> CallResult:
        if pace is not None and isinstance(self._component, PacedComponent):
            self._component.pace(**pace)
        return self._do("resize", gpus)

    def span(self, min_gpus: int, max_gpus: int) -> CallResult:
        return self._do("span", min_gpus, max_gpus)

    def health(self) -> CallResult:
        done = self._do("health")
        if done.fault is None and done.value is not True:
            why = done.value if isinstance(done.value, str) else "health() did not return True"
            name = self._place.component
            return CallResult(fault=ComponentError(name, "unhealthy", f"{name} is unhealthy: {why}"))
        return done

    def save(self, folder: str) -> CallResult:
        target = Path(folder) if self._place.world == 1 else Path(folder) / f"rank-{self._place.rank}"
        target.mkdir(parents=True, exist_ok=True)
        return self._do("save", target)

    def load(self, folder: str) -> CallResult:
        """Restore the state of this rank; that of rank 0 if there were fewer ranks."""
        target = Path(folder) / f"rank-{self._place.rank}"
        if not target.is_dir():
            target = Path(folder) / "rank-0"
        return self._do("load", target if target.is_dir() else Path(folder))

    def offload(self) -> CallResult:
        return self._do("offload") if self._has("offload") else CallResult()

    def onload(self) -> CallResult:
        return self._do("onload") if self._has("onload") else CallResult()

    def close(self) -> CallResult:
        return self._do("close") if self._has("close") else CallResult()

    def guarded(self, method: str, call: Callable[[], CallResult]) -> CallResult:
        """Call; a failure, also an earlier one of `make`, is returned."""
        if self._fault is not None:
            return CallResult(fault=self._fault)
        name = self._place.component
        try:
            return call()
        except ComponentError as error:
            return CallResult(fault=error)
        except Exception as error:
            what = f"the {method} of {name} raised {error_text(error)}"
            fault = ComponentError(name, "raised", what, origin(error))
            fault.__cause__ = error
            return CallResult(fault=fault)

    def _has(self, method: str) -> bool:
        return callable(getattr(self._component, method, None))

    def _do(self, method: str, *arguments: Any) -> CallResult:
        def timed() -> CallResult:
            began = self._clock.now()
            value = getattr(self._component, method)(*arguments)
            return CallResult(self._clock.now() - began, value)

        return self.guarded(method, timed)


class ComponentWorker(ComponentCalls):
    """A worker of a component as a task of the run's pool, which calls `park`, `unpark` and `cancel`."""

    def __init__(self, spec: ComponentStartSpec) -> None:
        rank, world = int(os.environ.get("TRIMTAB_RANK", 0)), int(os.environ.get("TRIMTAB_WORLD_SIZE", 1))
        devices = visible_devices() or spec.place.devices
        super().__init__(replace(spec, place=replace(spec.place, rank=rank, world=world, devices=devices)), WallClock())
        self._fault = self.guarded("make", self.make).fault

    def park(self) -> None:
        self._switch("offload")

    def unpark(self) -> None:
        self._switch("onload")

    def cancel(self) -> None:
        self.close()

    def _switch(self, method: str) -> None:
        """An error is the pool's to report."""
        if self._has(method):
            getattr(self._component, method)()
