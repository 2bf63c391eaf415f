"""Emulated components: they only take time, as profiled on their GPUs, with stated disturbances.

Plans for many GPUs can be tried on one machine, with real queues and real order. The time of a step depends only on
seed, component, iteration and batch, never on when or where it runs: a job is reproducible, and a run that is resumed
or moved continues the same series.

`PacedComponent` runs user code and then waits until the step has taken as long as the emulated one would. Its output is
unchanged; work that takes longer than that is not shortened. Emulated components sleep by the run's clock and runs
measure by it; under a virtual clock a run of hours takes milliseconds and is reproducible.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import MAX_COUNT, Ranges, check_fields
from trimtab.machines.replan.estimates import profiled_seconds
from trimtab.model.plan import Plan
from trimtab.model.workflow import Workflow
from trimtab.plan.placement.order import batch_seconds
from trimtab.plan.placement.space import Points, seconds_at
from trimtab.runtime.run.component import Batch, OptionalMethods, Place, Result


class Clock(Protocol):
    """Monotonic seconds, and a way to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """Time that passes only by `sleep`, and then at once."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


_T = TypeVar("_T")


class Disturbance(Frozen):
    """How real times differ from profiled ones.

    `noise` is the spread between iterations, `step_noise` between batches: standard deviations of the logarithm, with a
    mean of 1. `factors` are measured ones instead of `noise`: drawn at random per iteration, or with `in_order` cycled
    through. A share `tail_share` of the batches takes `tail_factor` times as long, which raises the mean. From
    iteration `drift_from` on the level moves linearly to `drift_to` over `drift_over` iterations.
    """

    noise: float = 0.0
    step_noise: float = 0.0
    factors: tuple[float, ...] = ()
    in_order: bool = False
    tail_share: float = 0.0
    tail_factor: float = 1.0
    drift_to: float = 1.0
    drift_over: int = 1
    drift_from: int = 1

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("noise", "step_noise"), (0.0, 2.0)),
        **dict.fromkeys(("drift_over", "drift_from"), (1, MAX_COUNT)),
        "tail_share": (0.0, 1.0),
        "tail_factor": (1.0, 1e9),
        "drift_to": (1e-9, 1e9),
    }

    def __post_init__(self) -> None:
        check_fields(self, "emulate")
        if any(factor <= 0 for factor in self.factors):
            raise InputError("factors are above 0", where="emulate")
        if self.noise and self.factors:
            raise InputError("state either noise or factors, not both", where="emulate")

    def level(self, iteration: int) -> float:
        """Drift factor of an iteration: 1 before the drift begins."""
        passed = (iteration - self.drift_from) / self.drift_over
        return 1.0 + (self.drift_to - 1.0) * min(1.0, max(0.0, passed))

    def of_iteration(self, seed: int, component: str, iteration: int) -> float:
        """Factor of all batches of an iteration, drift included."""
        rng = _rng(seed, component, iteration, 0)
        factor = 1.0
        if self.factors:
            drawn = iteration - 1 if self.in_order else int(rng.integers(len(self.factors)))
            factor = self.factors[drawn % len(self.factors)]
        elif self.noise:
            factor = float(np.exp(rng.normal(-(self.noise**2) / 2, self.noise)))
        return factor * self.level(iteration)

    def of_batch(self, seed: int, component: str, iteration: int, index: int) -> float:
        if not self.step_noise and not self.tail_share:
            return 1.0
        rng = _rng(seed, component, iteration, index + 1)
        factor = float(np.exp(rng.normal(-(self.step_noise**2) / 2, self.step_noise))) if self.step_noise else 1.0
        return factor * (self.tail_factor if rng.random() < self.tail_share else 1.0)


def _rng(seed: int, component: str, iteration: int, index: int) -> np.random.Generator:
    return np.random.default_rng([seed & 0x7FFFFFFF, zlib.crc32(component.encode()), iteration, index])


UNDISTURBED = Disturbance()


class EmulatedComponent:
    """Takes as long as a component does on its GPUs."""

    def __init__(
        self,
        *,
        place: Place,
        batch_s: tuple[float, ...],
        switch_s: float = 0.0,
        sync_s: float = 0.0,
        disturbance: Disturbance = UNDISTURBED,
        clock: Clock | None = None,
    ) -> None:
        self.place = place
        self.version: int | None = None
        self.iteration = place.iteration - 1  # the last iteration of which all batches have ended
        self._batch_s = batch_s
        self.switch_s = switch_s
        self.sync_s = sync_s
        self._disturbance = disturbance
        self._clock: Clock = clock if clock is not None else WallClock()
        self._overslept_s = 0.0

    def step(self, batch: Batch) -> Result:
        took_s = self.seconds(batch.iteration, batch.index)
        self.sleep_for(took_s)
        if batch.index == batch.of - 1:
            self.iteration = batch.iteration
        return Result({"component": self.place.component, "iteration": batch.iteration, "index": batch.index})

    def seconds(self, iteration: int, index: int) -> float:
        seed, name = self.place.seed, self.place.component
        factor = self._disturbance.of_iteration(seed, name, iteration)
        return self._batch_s[index] * factor * self._disturbance.of_batch(seed, name, iteration, index)

    def onload(self) -> None:
        """Take the switch time; the profile states offload and onload as one."""
        self.sleep_for(self.switch_s)

    def offload(self) -> None:
        """Takes no time."""

    def weights(self) -> dict[str, int]:
        """Take the time of a weight sync; the target keeps working meanwhile."""
        self.sleep_for(self.sync_s)
        return {"iteration": self.iteration}

    def sync(self, weights: Any, version: int) -> None:
        self.version = version

    def save(self, path: Path) -> None:
        (path / "iteration").write_text(str(self.iteration), encoding="utf-8")

    def load(self, path: Path) -> None:
        self.iteration = int((path / "iteration").read_text(encoding="utf-8"))

    def sleep_for(self, seconds: float) -> None:
        """Sleep, less what earlier sleeps overran on a busy machine, so that the mean stays right."""
        began = self._clock.now()
        self._clock.sleep(max(0.0, seconds - self._overslept_s))
        took_s = self._clock.now() - began
        self._overslept_s = max(0.0, self._overslept_s + took_s - seconds)


OPTIONAL = tuple(name for name in vars(OptionalMethods) if not name.startswith("_"))


class PacedComponent:
    """User code whose steps, switches and weight syncs are stretched to emulated times.

    It has the optional methods of the wrapped component only; `onload` also if a switch takes time.
    """

    def __init__(self, component: Any, *, place: Place, clock: Clock | None = None, **settings: Any) -> None:
        self.component = component
        self._place = place
        self._clock: Clock = clock if clock is not None else WallClock()
        self._offload_s = 0.0  # seconds of the last offload: part of the next switch
        self.pace(**settings)

    def __getattr__(self, name: str) -> Any:
        if name == "onload" and self._emulated.switch_s:
            return self._onload
        found = getattr(self.component, name)
        return {"offload": self._offload, "onload": self._onload, "weights": self._weights}.get(name, found)

    def pace(self, **settings: Any) -> None:
        """Set the emulated times, also after a resize."""
        self._emulated = EmulatedComponent(**settings, place=self._place, clock=self._clock)

    def step(self, batch: Batch) -> Any:
        seconds = self._emulated.seconds(batch.iteration, batch.index)
        return self._padded(seconds, lambda: self.component.step(batch))

    def _onload(self) -> None:
        onload = getattr(self.component, "onload", None)
        seconds = max(0.0, self._emulated.switch_s - self._offload_s)
        self._offload_s = 0.0
        self._padded(seconds, onload if callable(onload) else lambda: None)

    def _offload(self) -> None:
        began = self._clock.now()
        self.component.offload()
        self._offload_s = self._clock.now() - began

    def _weights(self) -> Any:
        return self._padded(self._emulated.sync_s, self.component.weights)

    def _padded(self, seconds: float, work: Callable[[], _T]) -> _T:
        """Do the work and sleep for the rest of its time."""
        began = self._clock.now()
        given = work()
        left_s = seconds - (self._clock.now() - began)
        if left_s > 0:
            self._emulated.sleep_for(left_s)
        return given


def emulated_settings(
    workflow: Workflow,
    plan: Plan,
    name: str,
    *,
    curve: Mapping[int, float] | None = None,
    disturbance: Disturbance = UNDISTURBED,
) -> dict[str, Any]:
    """Picklable settings of an `EmulatedComponent` that stands for a component of a plan.

    Times are those of the profile, whatever costs the plan was made with. A `curve` of points {gpus: seconds} replaces
    the profile: what the component really takes, where that differs from what the planner knows.
    """
    component, placed = workflow.component(name), plan.placed(name)
    kind = next((group.kind for group in plan.groups if name in group.components), "")
    profiled = profiled_seconds(component, placed.variant, kind, len(placed.gpus))
    seconds = placed.seconds if profiled is None else profiled
    if curve is not None:
        seconds = seconds_at(curve_points(curve, name), 0.0, max(1, len(placed.gpus)))
    sync = workflow.weight_sync
    return {
        "batch_s": batch_seconds(component, workflow.batches, seconds),
        "switch_s": placed.switch_seconds,
        "sync_s": plan.sync_seconds if sync is not None and sync.source == name else 0.0,
        "disturbance": disturbance,
    }


def curve_points(curve: Mapping[int, float], name: str) -> Points:
    points = tuple(sorted(curve.items()))
    if not points or any(gpus < 1 or not seconds >= 0 for gpus, seconds in points):
        raise InputError(
            f"the curve of {name} is no set of points {{gpus: seconds}}",
            where=f"workflow.components.{name}.emulate",
            hint="emulate: {seconds: {8: 20.0, 16: 11.0}}",
        )
    return points
