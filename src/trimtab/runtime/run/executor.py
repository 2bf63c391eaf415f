"""What executes the components of a run: in this process (`local_executor.py`) or on Ray (`ray_executor.py`).

An executor places components, calls them, moves and ends them, and reports lost ones. Every call ends in a result, a
`ComponentError` (the component failed) or a `ComponentLostError` (its process is gone). Optional methods that a
component lacks (`offload`, `save` ...) are not called.

`ComponentCalls` is where a component is: in this process, or in a warm worker process of a pool. Data goes from worker
to worker through Ray's object store: the run's driver passes references to step outputs and never fetches them. Small
data travels with the calls, as Ray inlines it; large data is stored by its maker and fetched by its taker
(`transfer.py`), so that both are timed. A component's failure is returned as a `ComponentError`, never as its own
exception.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import UnreachableError
from trimtab.core.frozen import Frozen
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
from trimtab.runtime.run.emulated import (
    OPTIONAL,
    Clock,
    EmulatedComponent,
    PacedComponent,
    WallClock,
    emulated_settings,
)
from trimtab.runtime.run.transfer import STORED_BYTES, NotOpenedError, Packed, Packer, Stored, gpu_handle, unpack

if TYPE_CHECKING:  # worker processes import this module too
    from trimtab.machines.replan.events import ClusterChanged
    from trimtab.machines.replan.placed_plan import PlacedPlan
    from trimtab.model.plan import Plan
    from trimtab.model.workflow import Cluster, WeightSync, Workflow
    from trimtab.plan.placement.order import GpuTurn
    from trimtab.runtime.run.folder import EmitEvent
    from trimtab.runtime.run.iteration import IterationRunner
    from trimtab.runtime.run.job import RunJob

WITH_DATA = ("step", "weights")  # calls that return data beside their result
CALL = "call"  # the span of a whole call, where it is executed
BUCKET_OF = {"step": "compute", "weights": "sync_pack", "sync": "sync_load"}  # of a method; others have their name

WRITING, NO_MEMORY = "writing", "no memory"  # what a save says of a snapshot
MEMORY_SLACK = 1.2  # free memory that a snapshot needs, in its sizes

CallSpan = tuple[str, float, float]
"""A bucket of the ledger (or `CALL`), and its seconds."""


class ComponentStartSpec(Frozen):
    """What to create: a class with its settings (`use`), or an emulated component (`use` is None)."""

    place: Place
    use: str | None
    settings: Mapping[str, Any]
    after: tuple[str, ...] = ()  # components whose outputs are its input
    wanted_by: tuple[str, ...] = ()
    pace: Mapping[str, Any] | None = None  # emulated times for paced user code


class CallResult(Frozen):
    """Result of a call: the seconds of the component's method, and a small plain value or the data.

    `spans` are on the clock of the process that executed it, the whole call first; an executor makes them seconds since
    the call was sent.
    """

    took_s: float = 0.0
    value: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: ComponentError | None = None
    spans: tuple[CallSpan, ...] = ()
    workers: int = 1  # that were called
    note: str = ""  # why weights do not stay on their GPU

    @property
    def whole_s(self) -> float:
        """Seconds until it was over, once its spans are those since it was sent."""
        return max((end for _, _, end in self.spans), default=0.0)


def spans_since_sent(spans: Sequence[CallSpan], sent_s: float, received_s: float) -> tuple[CallSpan, ...]:
    """Spans of a call as seconds since it was sent, with those of its messages.

    Clocks of one machine agree; on another machine the call is taken to lie in the middle.
    """
    if not spans:
        return (("calls", 0.0, received_s - sent_s),)
    _, entered_s, left_s = spans[0]
    shift_s = -sent_s
    if entered_s < sent_s or left_s > received_s:
        shift_s = max(0.0, (received_s - sent_s) - (left_s - entered_s)) / 2 - entered_s
    inside = tuple((bucket, start + shift_s, end + shift_s) for bucket, start, end in spans[1:])
    messages = ("calls", 0.0, entered_s + shift_s), ("calls", left_s + shift_s, received_s - sent_s)
    return (*messages, *inside)


class ComponentCalls:
    """The calls of one worker of a component, timed by a clock."""

    def __init__(self, spec: ComponentStartSpec, clock: Clock) -> None:
        self._spec, self._place, self._clock = spec, spec.place, clock
        self._component: Any = None
        self._fault: ComponentError | None = None
        self._spans: list[CallSpan] = []  # of the current call
        self._note = ""  # of the current call
        self._lent: Any = None  # weights that another component reads on this GPU; held until the next step or turn

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
        return CallResult(value=tuple(filter(self._has, OPTIONAL)), fault=self._fault)

    def step(self, iteration: int, index: int, of: int, *inputs: Any) -> tuple[CallResult, Any]:
        """Run a batch; returns the result and the data. `inputs` are those of `after`, or that of the run."""
        leads, given = self._place.rank == 0, None

        def run_step() -> CallResult:
            nonlocal given
            self._lent = None
            if self._place.emulated and not leads:
                return CallResult()
            with self._timed("data"):
                taken = [self.take(value) for value in inputs]
            data = dict(zip(self._spec.after, taken, strict=True)) if len(taken) > 1 else taken[0]
            with self._timed("compute"):
                output = self._component.step(Batch(iteration, index, of, data))
            took_s = self._last_s()
            result = checked(output, self._place.component, wanted_by=self._spec.wanted_by if leads else ())
            if leads and self._spec.wanted_by:
                given = self.give(result.data, "data", "data")
            metrics = result.metrics
            with self._timed("data"):
                del taken, data, output, result  # memory of this size takes time to free
            return CallResult(took_s, metrics=metrics)

        return self.guarded("step", run_step), given

    def weights(self, near: bool = False) -> tuple[CallResult, Any]:
        """The current weights, beside the time it took to get them. `near`: they are read on this GPU, and at once."""
        given = None

        def get_weights() -> CallResult:
            nonlocal given
            with self._timed("sync_pack"):
                weights = self._component.weights()
            took_s = self._last_s()
            given = self.give(weights, "sync_pack", "sync_move", near=near)
            return CallResult(took_s)

        return self.guarded("weights", get_weights), given

    def sync(self, weights: Any, version: int) -> CallResult:
        return self.guarded("sync", lambda: self.load_weights(weights, version))

    def load_weights(self, weights: Any, version: int) -> CallResult:
        return self._do("sync", self.take(weights, for_sync=True), version)

    def resize(self, gpus: int, pace: Mapping[str, Any] | None) -> CallResult:
        if pace is not None and isinstance(self._component, PacedComponent):
            self._component.pace(**pace)
        return self._call("resize", gpus)

    def span(self, min_gpus: int, max_gpus: int) -> CallResult:
        return self._call("span", min_gpus, max_gpus)

    def health(self) -> CallResult:
        done = self._call("health")
        if done.fault is None and done.value is not True:
            why = done.value if isinstance(done.value, str) else "health() did not return True"
            name = self._place.component
            return replace(done, fault=ComponentError(name, "unhealthy", f"{name} is unhealthy: {why}"))
        return done

    def save(self, folder: str) -> CallResult:
        return self.guarded("save", lambda: self._do("save", self._target(folder)))

    def _target(self, folder: str) -> Path:
        target = Path(folder) if self._place.world == 1 else Path(folder) / f"rank-{self._place.rank}"
        target.mkdir(parents=True, exist_ok=True)
        return target

    def load(self, folder: str) -> CallResult:
        """Restore the state of this rank; that of rank 0 if there were fewer ranks."""
        target = Path(folder) / f"rank-{self._place.rank}"
        if not target.is_dir():
            target = Path(folder) / "rank-0"
        return self._call("load", target if target.is_dir() else Path(folder))

    def offload(self) -> CallResult:
        return self._call("offload") if self._has("offload") else CallResult()

    def onload(self) -> CallResult:
        return self._call("onload") if self._has("onload") else CallResult()

    def close(self) -> CallResult:
        return self._call("close") if self._has("close") else CallResult()

    def guarded(self, method: str, call: Callable[[], CallResult]) -> CallResult:
        """Call; a failure, also an earlier one of `make`, is returned."""
        if self._fault is not None:
            return CallResult(fault=self._fault)
        name, entered_s = self._place.component, self._clock.now()
        self._spans, self._note = [], ""
        try:
            result = call()
        except ComponentError as error:
            return CallResult(fault=error)
        except Exception as error:
            if self.is_lost(error):
                raise
            what = f"the {method} of {name} raised {error_text(error)}"
            fault = ComponentError(name, "raised", what, origin(error))
            fault.__cause__ = error
            return CallResult(fault=fault)
        return replace(result, spans=((CALL, entered_s, self._clock.now()), *self._spans), note=self._note)

    def give(self, value: Any, packs: str, moves: str, *, near: bool = False) -> Any:
        """The value as other components get it; time is booked to these buckets."""
        return value

    def take(self, value: Any, *, for_sync: bool = False) -> Any:
        """What another component gave."""
        return value

    def is_lost(self, error: Exception) -> bool:
        """Whether an error says that the data of another component is lost."""
        return False

    @contextmanager
    def _timed(self, bucket: str) -> Iterator[None]:
        began_s = self._clock.now()
        yield
        self._spans.append((bucket, began_s, self._clock.now()))

    def _last_s(self) -> float:
        _, start_s, end_s = self._spans[-1]
        return end_s - start_s

    def _has(self, method: str) -> bool:
        return callable(getattr(self._component, method, None))

    def _call(self, method: str, *arguments: Any) -> CallResult:
        return self.guarded(method, lambda: self._do(method, *arguments))

    def _do(self, method: str, *arguments: Any) -> CallResult:
        with self._timed(BUCKET_OF.get(method, method)):
            value = getattr(self._component, method)(*arguments)
        return CallResult(self._last_s(), value)


def written_mark(folder: Path, rank: int) -> Path:
    """The file that says that a snapshot is written; it holds the error if that failed."""
    return folder.with_name(f"{folder.name}.{rank}.written")


def _memory_bytes(file: str, field_name: str) -> int | None:
    """A figure of a file in /proc; None where there is none."""
    try:
        line = next(line for line in Path(file).read_text().splitlines() if line.startswith(field_name))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


class ComponentWorker(ComponentCalls):
    """A worker of a component as a task of the run's pool, which calls `park`, `unpark` and `cancel`."""

    def __init__(self, spec: ComponentStartSpec) -> None:
        rank, world = int(os.environ.get("TRIMTAB_RANK", 0)), int(os.environ.get("TRIMTAB_WORLD_SIZE", 1))
        devices = visible_devices() or spec.place.devices
        super().__init__(replace(spec, place=replace(spec.place, rank=rank, world=world, devices=devices)), WallClock())
        self._packer = Packer()
        self._writer: threading.Thread | None = None
        self._snapshot_bytes: int | None = None  # of the last one
        self._parked: CallSpan | None = None
        self._unparked: CallSpan | None = None
        self._fault = self.guarded("make", self.make).fault

    def park(self) -> None:
        self._lent = None
        began_s = self._clock.now()
        if self._has("offload"):
            self._component.offload()  # an error is the pool's to report
        self._parked = "offload", began_s, self._clock.now()

    def unpark(self) -> None:
        began_s = self._clock.now()
        if self._has("onload"):
            self._component.onload()
        self._unparked = "onload", began_s, self._clock.now()

    def save(self, folder: str) -> CallResult:
        """Save; with a snapshot it is written beside what follows, and a mark says when that is done."""
        if not self._has("snapshot"):
            return super().save(folder)

        def take_snapshot() -> CallResult:
            target, mark = self._target(folder), written_mark(Path(folder), self._place.rank)
            with self._timed("save"):
                if self._writer is not None:
                    self._writer.join()
                free = _memory_bytes("/proc/meminfo", "MemAvailable:")
                before = _memory_bytes("/proc/self/status", "VmRSS:") or 0
                wanted = before if self._snapshot_bytes is None else self._snapshot_bytes
                if free is not None and free < MEMORY_SLACK * wanted:
                    self._component.save(target)
                    return CallResult(value=NO_MEMORY)
                write = self._component.snapshot()
                self._snapshot_bytes = max(0, (_memory_bytes("/proc/self/status", "VmRSS:") or before) - before)
            self._writer = threading.Thread(target=_write_snapshot, args=(write, target, mark), name="trimtab-save")
            self._writer.start()
            return CallResult(self._last_s(), value=WRITING)

        return self.guarded("save", take_snapshot)

    def turned(self, bucket: str) -> CallResult:
        """The last offload or onload, which the pool has called."""
        entered_s = self._clock.now()
        span = self._parked if bucket == "offload" else self._unparked
        return CallResult(spans=((CALL, entered_s, entered_s), *([span] if span is not None else [])))

    def cancel(self) -> None:
        self.close()

    def load_weights(self, weights: Any, version: int) -> CallResult:
        try:
            taken = self.take(weights, for_sync=True)
        except NotOpenedError as error:
            self._note = str(error)
            return CallResult()
        done, torch = self._do("sync", taken, version), sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            with self._timed("sync_load"):
                torch.cuda.synchronize()  # the sender may change what was read
        return done

    def give(self, value: Any, packs: str, moves: str, *, near: bool = False) -> Any:
        import ray

        with self._timed(packs):
            try:
                packed = self._packer.pack(value, gpu_handle if near else None)
            except Exception as error:
                if not near:
                    raise
                self._note, packed = error_text(error), self._packer.pack(value)
            self._lent = value if packed.handles else None
        if packed.nbytes < STORED_BYTES:
            return packed
        with self._timed(moves):
            return Stored(ray.put(packed))

    def take(self, value: Any, *, for_sync: bool = False) -> Any:
        import ray

        if isinstance(value, Stored):
            with self._timed("sync_move" if for_sync else "data"):
                value = ray.get(value.reference)
        if not isinstance(value, Packed):
            return value  # of the run
        with self._timed("sync_unpack" if for_sync else "data"):
            return unpack(value, only_reads=for_sync)

    def is_lost(self, error: Exception) -> bool:
        from ray import exceptions

        return isinstance(error, exceptions.ObjectLostError | exceptions.RayActorError)


def _write_snapshot(write: Callable[[Path], None], target: Path, mark: Path) -> None:
    try:
        write(target)
        outcome = ""
    except BaseException as error:
        outcome = error_text(error)
    part = mark.with_suffix(".part")
    part.write_text(outcome)
    os.replace(part, mark)


class BegunCall:
    """A call that has begun; `poll` gives its result once, or raises its failure. This one is over."""

    def __init__(self, result: CallResult) -> None:
        self._result: CallResult | None = result

    def poll(self) -> CallResult | None:
        return self._result

    def wait(self) -> None:
        """Wait until it is over; a failure is raised by `poll`."""


Placements = Mapping[str, tuple[tuple[str, int], ...]]
"""By component: the nodes of its GPUs, and how many it has there."""


class ComponentLostError(UnreachableError):
    """A component's process is gone; its work since the last checkpoint is lost."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(what)
        self.component = component


class Executor(ABC):
    """The components of one run, where they are, and how their actions run."""

    is_virtual = False  # the timeline stands still during an action

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

    def begin(self, name: str, method: str, *arguments: Any) -> BegunCall:
        """Begin a call of an idle component, beside what follows."""
        return BegunCall(self.call(name, method, *arguments))

    @abstractmethod
    def offload(self, name: str) -> CallResult:
        """Release the GPUs of a component, before another that shares them is onloaded."""

    @abstractmethod
    def onload(self, name: str) -> CallResult: ...

    def turn(self, action: GpuTurn) -> tuple[float, list[tuple[str, CallSpan]]]:
        """Give shared GPUs to a component: seconds, and the offloads and onload in it with their components."""
        spans: list[tuple[str, CallSpan]] = []
        passed_s = 0.0
        for name, switch in (*((name, self.offload) for name in action.offload), (action.component, self.onload)):
            took_s = switch(name).took_s
            spans.append((name, (switch.__name__, passed_s, passed_s + took_s)))
            passed_s += took_s
        return passed_s, spans

    def late_spans(self) -> list[tuple[GpuTurn, str, CallSpan]]:
        """Offloads and onloads of turns that are known only now, on the run's timeline, with their components."""
        return []

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
        return method in self._has[name]

    def weights(self, source: str, target: str | None = None) -> CallResult | None:
        """The current weights of a component; None if it has none. `target` gets them before the source goes on."""
        return self.call(source, "weights") if self.has(source, "weights") else None

    def sync(self, target: str, weights: CallResult | None, version: int) -> CallResult | None:
        if weights is None or not self.has(target, "sync"):
            return None
        return self.call(target, "sync", weights.value, version)

    def sync_weights(self, sync: WeightSync | None, version: int) -> None:
        if sync is not None:
            self.sync(sync.target, self.weights(sync.source, sync.target), version)

    def check_health(self, names: Sequence[str]) -> None:
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
