"""A component in a worker process of the cluster: created, called and timed there.

It runs in a warm worker process of a pool. Data goes from worker to worker through Ray's object store: the run's driver
passes references to step outputs and never fetches them. Small data travels with the calls, as Ray inlines it;
references nested in other values would cost more than the calls, since each is borrowed and released on its own. Times
are taken here, once the inputs are local. A component's failure comes back as a `ComponentFault`, never as its own
exception, which may not survive pickling.

`park` and `unpark`, the pool's calls for releasing and taking shared GPUs, become `offload` and `onload`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.runtime.run.clock import WallClock
from trimtab.runtime.run.component import (
    Batch,
    ComponentError,
    FaultKind,
    Place,
    RunComponent,
    checked,
    error_text,
    make_component,
    origin,
    visible_devices,
)
from trimtab.runtime.run.emulated import OPTIONAL, EmulatedComponent, PacedComponent


@dataclass(frozen=True)
class ComponentStartSpec:
    """What to create: a class with its settings (`use`), or an emulated component (`use` is None)."""

    place: Place
    use: str | None
    settings: Mapping[str, Any]
    near: Path | None = None
    wanted_by: tuple[str, ...] = ()
    pace: Mapping[str, Any] | None = None  # emulated times for paced user code


@dataclass(frozen=True)
class ComponentFault:
    """A failure of a component."""

    fault_kind: FaultKind
    what: str
    where: str | None = None


@dataclass(frozen=True)
class CallResult:
    """Result of a call: its seconds and a small plain value; data is returned beside it."""

    took_s: float = 0.0
    value: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: ComponentFault | None = None


class ComponentWorker:
    """One worker of a component."""

    def __init__(self, spec: ComponentStartSpec) -> None:
        rank, world = int(os.environ.get("TRIMTAB_RANK", 0)), int(os.environ.get("TRIMTAB_WORLD_SIZE", 1))
        devices = visible_devices() or spec.place.devices
        self._place = replace(spec.place, rank=rank, world=world, devices=devices)
        self._spec = spec
        self._component: RunComponent | None = None
        self._fault: ComponentFault | None = None
        self._fault = self._guarded("make", self._make).fault

    def has(self) -> CallResult:
        if self._fault is not None:
            return CallResult(fault=self._fault)
        found = tuple(method for method in OPTIONAL if callable(getattr(self._component, method, None)))
        return CallResult(value=found)

    def step(
        self, iteration: int, index: int, of: int, parents: tuple[str, ...], *inputs: Any, plain: Any = None
    ) -> tuple[CallResult, Any]:
        """Run a batch; returns the result and the data. `inputs` are those of `parents`, `plain` is for a root
        component.
        """
        data: Any = plain
        if parents:
            data = dict(zip(parents, inputs, strict=True)) if len(parents) > 1 else inputs[0]
        batch = Batch(iteration, index, of, data)
        leads = self._place.rank == 0
        given: Any = None

        def run_step() -> CallResult:
            nonlocal given
            assert self._component is not None
            if self._place.emulated and not leads:
                return CallResult()
            began_s = time.perf_counter()
            output = self._component.step(batch)
            took_s = time.perf_counter() - began_s
            result = checked(output, self._place.component, wanted_by=self._spec.wanted_by if leads else ())
            given = result.data if leads and self._spec.wanted_by else None
            return CallResult(took_s, metrics=result.metrics)

        return self._guarded("step", run_step), given

    def weights(self) -> tuple[CallResult, Any]:
        """The current weights, beside the time it took to get them."""
        done = self.do("weights")
        return replace(done, value=None), done.value

    def sync(self, weights: Any, version: int) -> CallResult:
        return self.do("sync", weights, version)

    def do(self, method: str, *arguments: Any) -> CallResult:
        """Any call that has no data to pass on."""

        def done() -> CallResult:
            began = time.perf_counter()
            value = getattr(self._component, method)(*arguments)
            return CallResult(time.perf_counter() - began, value=value)

        return self._guarded(method, done)

    def resize(self, gpus: int, pace: Mapping[str, Any] | None) -> CallResult:
        if pace is not None and isinstance(self._component, PacedComponent):
            self._component.pace(**pace)
        return self.do("resize", gpus)

    def save_to(self, folder: str) -> CallResult:
        target = Path(folder) if self._place.world == 1 else Path(folder) / f"rank-{self._place.rank}"
        target.mkdir(parents=True, exist_ok=True)
        return self.do("save", target)

    def load_from(self, folder: str) -> CallResult:
        """Restore the state of this rank; that of rank 0 if there were fewer ranks."""
        target = Path(folder) / f"rank-{self._place.rank}"
        if not target.is_dir():
            target = Path(folder) / "rank-0"
        return self.do("load", target if target.is_dir() else Path(folder))

    # ---- called by the pool --------------------------------------------------------------------------------------

    def park(self) -> None:
        self._switch("offload")

    def unpark(self) -> None:
        self._switch("onload")

    def cancel(self) -> None:
        if callable(getattr(self._component, "close", None)):
            self._guarded("close", lambda: CallResult(value=self._component.close()))  # type: ignore[union-attr]

    def _switch(self, method: str) -> None:
        if callable(getattr(self._component, method, None)):
            getattr(self._component, method)()

    def _make(self) -> CallResult:
        spec = self._spec
        if spec.use is None:
            self._component = EmulatedComponent(**spec.settings, place=self._place, clock=WallClock())
        else:
            self._component = make_component(spec.use, spec.settings, self._place, spec.near)
            if spec.pace is not None:
                self._component = PacedComponent(self._component, place=self._place, **spec.pace)
        return CallResult()

    def _guarded(self, method: str, call: Callable[[], CallResult]) -> CallResult:
        if self._fault is not None:
            return CallResult(fault=self._fault)
        name = self._place.component
        try:
            return call()
        except ComponentError as error:
            return CallResult(fault=ComponentFault(error.fault_kind, error.what, error.where))
        except Exception as error:
            return CallResult(
                fault=ComponentFault("raised", f"the {method} of {name} raised {error_text(error)}", origin(error))
            )
