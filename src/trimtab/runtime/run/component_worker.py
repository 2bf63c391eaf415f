"""A component in a process of the cluster: what is made there, called there, and measured there.

It lives in a host of a pool. Data goes from seat to seat through Ray's object store: whoever drives the run passes on
references to what a step gave, and never opens them. What is small rides with the calls, as Ray has it; references
inside of other values would cost more than the calls do, since each is lent and given back on its own. Times are taken
here, where the work is done, once its inputs are there. Whatever a component does wrong comes back as a
`ComponentFault`, never as an exception of its own: those need not survive a journey between processes.

`park` and `unpark` are the pool's words for giving up and taking the GPUs that components share: they become the
component's `offload` and `onload`.
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
    make_component,
    origin,
    error_text,
)
from trimtab.runtime.run.emulated import OPTIONAL, EmulatedComponent, PacedComponent


@dataclass(frozen=True)
class ComponentStartSpec:
    """What is to be made: a class with its settings (`use`), or one that is emulated."""

    place: Place
    use: str | None
    settings: Mapping[str, Any]
    near: Path | None = None
    wanted_by: tuple[str, ...] = ()
    pace: Mapping[str, Any] | None = None  # what an emulated one would take, where somebody's code is made to last


@dataclass(frozen=True)
class ComponentFault:
    """What a component did wrong."""

    fault_kind: FaultKind
    what: str
    where: str | None = None


@dataclass(frozen=True)
class CallResult:
    """What came of a call: seconds of its own, and a small plain value; data that flows goes beside it."""

    took_s: float = 0.0
    value: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: ComponentFault | None = None


class ComponentWorker:
    """One member of a component."""

    def __init__(self, order: ComponentStartSpec) -> None:
        rank, world = int(os.environ.get("TRIMTAB_RANK", 0)), int(os.environ.get("TRIMTAB_WORLD_SIZE", 1))
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = tuple(int(one) for one in shown.split(",") if one.strip().isdecimal()) or order.place.devices
        self._place = replace(order.place, rank=rank, world=world, devices=devices)
        self._order = order
        self._component: RunComponent | None = None
        self._fault: ComponentFault | None = None
        self._fault = self._guarded("make", self._make).fault

    def has(self) -> CallResult:
        """Which of the methods that a component need not have it has."""
        if self._fault is not None:
            return CallResult(fault=self._fault)
        found = tuple(one for one in OPTIONAL if callable(getattr(self._component, one, None)))
        return CallResult(value=found)

    def step(
        self, iteration: int, index: int, of: int, parents: tuple[str, ...], *inputs: Any, plain: Any = None
    ) -> tuple[CallResult, Any]:
        """One batch, and what becomes of it; `inputs` are those of its `parents`, `plain` is for one that has none."""
        data: Any = plain
        if parents:
            data = dict(zip(parents, inputs, strict=True)) if len(parents) > 1 else inputs[0]
        batch = Batch(iteration, index, of, data)
        leads = self._place.rank == 0
        given: Any = None

        def stepped() -> CallResult:
            nonlocal given
            assert self._component is not None
            if self._place.emulated and not leads:
                return CallResult()
            began_s = time.perf_counter()
            output = self._component.step(batch)
            took_s = time.perf_counter() - began_s
            result = checked(output, self._place.component, wanted_by=self._order.wanted_by if leads else ())
            given = result.data if leads and self._order.wanted_by else None
            return CallResult(took_s, metrics=result.metrics)

        return self._guarded("step", stepped), given

    def weights(self) -> tuple[CallResult, Any]:
        """The weights that it has now, beside what getting them took."""
        done = self.do("weights")
        return replace(done, value=None), done.value

    def sync(self, weights: Any, version: int) -> CallResult:
        """Work with these weights."""
        return self.do("sync", weights, version)

    def do(self, method: str, *arguments: Any) -> CallResult:
        """Any other call that has no data to pass on."""

        def done() -> CallResult:
            began = time.perf_counter()
            value = getattr(self._component, method)(*arguments)
            return CallResult(time.perf_counter() - began, value=value)

        return self._guarded(method, done)

    def resize(self, gpus: int, pace: Mapping[str, Any] | None) -> CallResult:
        """Go on with so many GPUs."""
        if pace is not None and isinstance(self._component, PacedComponent):
            self._component.pace(**pace)
        return self.do("resize", gpus)

    def save_to(self, folder: str) -> CallResult:
        """Write its state into a folder of its rank."""
        target = Path(folder) if self._place.world == 1 else Path(folder) / f"rank-{self._place.rank}"
        target.mkdir(parents=True, exist_ok=True)
        return self.do("save", target)

    def load_from(self, folder: str) -> CallResult:
        """Read the state of its rank; that of rank 0 where there were fewer."""
        target = Path(folder) / f"rank-{self._place.rank}"
        if not target.is_dir():
            target = Path(folder) / "rank-0"
        return self.do("load", target if target.is_dir() else Path(folder))

    # ---- what the pool calls -----------------------------------------------------------------------------------------

    def park(self) -> None:
        """Leave the GPUs to whoever shares them."""
        self._switch("offload")

    def unpark(self) -> None:
        """Come back to them."""
        self._switch("onload")

    def cancel(self) -> None:
        """The process ends: so does the component, if it can say so."""
        if callable(getattr(self._component, "close", None)):
            self._guarded("close", lambda: CallResult(value=self._component.close()))  # type: ignore[union-attr]

    def _switch(self, method: str) -> None:
        if callable(getattr(self._component, method, None)):
            getattr(self._component, method)()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _make(self) -> CallResult:
        order = self._order
        if order.use is None:
            self._component = EmulatedComponent(**order.settings, place=self._place, clock=WallClock())
        else:
            self._component = make_component(order.use, order.settings, self._place, order.near)
            if order.pace is not None:
                self._component = PacedComponent(self._component, place=self._place, **order.pace)
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
