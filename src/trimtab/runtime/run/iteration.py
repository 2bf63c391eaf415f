"""Runs the actions of one plan on its components and tracks outputs, measurements and checkpoints.

Component calls are made outside the lock, so actions may run one after another or side by side in threads; the order
(`plan/placement/order.py`) never gives a component two at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.model.plan import Plan
from trimtab.model.workflow import Workflow
from trimtab.plan.placement.order import BatchStep, ExecutionOrder, GpuTurn, PlanAction, WeightSyncStep
from trimtab.runtime.run.component import ComponentError
from trimtab.runtime.run.executor import NO_MEMORY, WRITING, BegunCall, CallResult, Executor, hung_error, written_mark
from trimtab.runtime.run.folder import EmitEvent, RunFolder
from trimtab.runtime.run.measurements import RunMeasurements

Inputs = Callable[[int, int], Any]
FINISH_POLL_S = 0.01

_Key = tuple[str, int, int]  # component, iteration, batch


@dataclass
class _Beside:
    """A save or health check that goes on beside other work."""

    kind: str
    iteration: int
    component: str
    call: BegunCall
    sent_s: float
    end: float  # of the time that it may take
    folder: Path | None = None
    unwritten: int = 0  # ranks whose snapshots are not written


class Checkpointer:
    """Saves components and checks their health beside the iterations, and commits checkpoints.

    The checkpoint after iteration t holds every component as it was at the end of its own iteration t, whatever the
    others were doing then, so no component waits for a checkpoint, even where iterations overlap. It is complete or
    void: it counts when all components have saved, those checked before are well, and the iteration's event is written.
    Calls may begin in any thread; `poll` is for one.
    """

    def __init__(
        self, folder: RunFolder | None, names: tuple[str, ...], every: int, last: int, emit: EmitEvent, limit_s: float
    ) -> None:
        self._folder = folder
        self._emit = emit
        self._names = names
        self._every = every
        self._last = last
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._begun: set[tuple[int, str]] = set()  # saves of checkpoints that are not complete yet
        self._going: list[_Beside] = []
        self._unchecked: dict[str, int] = {}  # components whose health is to be checked after an iteration
        self._ended: list[int] = []  # iterations with a checkpoint to commit
        self._said = False  # that there is no memory for snapshots
        self.last_complete = 0  # iteration of the last complete checkpoint

    def is_due(self, iteration: int) -> bool:
        return self._folder is not None and (iteration % self._every == 0 or iteration == self._last)

    def component_ended(self, executor: Executor, name: str, iteration: int, *, shares: bool) -> None:
        """A component has ended an iteration: begin to save it, where that is due, and to check its health.

        The health of one that `shares` GPUs is checked when it has left them.
        """
        if self.is_due(iteration):
            self.save(executor, name, iteration)
        with self._lock:
            self._unchecked[name] = iteration
        if not shares:
            self.check_health(executor, (name,))

    def check_health(self, executor: Executor, names: Iterable[str]) -> None:
        """Begin to check the health of these components, if that is due."""
        for name in names:
            with self._lock:
                iteration = self._unchecked.pop(name, None)
            if iteration is not None and executor.has(name, "health"):
                self._begin(executor, "health", name, iteration, None)

    def save(self, executor: Executor, name: str, iteration: int) -> None:
        """Begin to save a component that has just ended an iteration. Raises OSError."""
        if self._folder is None:
            return
        if executor.has(name, "save"):
            self._begin(executor, "save", name, iteration, self._folder.new_state_folder(iteration, name))
        with self._lock:
            self._begun.add((iteration, name))

    def _begin(self, executor: Executor, kind: str, name: str, iteration: int, folder: Path | None) -> None:
        sent_s, end = executor.now(), time.monotonic() + self._limit_s
        call = executor.begin(name, kind, *([] if folder is None else [str(folder)]))
        with self._lock:
            self._going.append(_Beside(kind, iteration, name, call, sent_s, end, folder))

    def complete(self, executor: Executor, iteration: int) -> None:
        """Commit the checkpoint after an iteration as soon as all have saved. Raises OSError."""
        if self._folder is None or self.last_complete >= iteration or iteration in self._ended:
            return
        for name in self._names:
            if (iteration, name) not in self._begun:
                self.save(executor, name, iteration)
        self._ended.append(iteration)

    def poll(self, book: Callable[[str, float, float], None]) -> None:
        """Take what is over, book its time, and commit. Raises what a component raised, and OSError.

        No checkpoint is committed while events cannot be written: after a crash it would be ahead of the event log.
        """
        with self._lock:
            going = list(self._going)
        over = [id(beside) for beside in going if self._is_over(beside, book)]
        with self._lock:
            self._going = [beside for beside in self._going if id(beside) not in over]
            oldest = min((beside.iteration for beside in self._going), default=None)
        while self._ended and (oldest is None or self._ended[0] < oldest):
            assert self._folder is not None
            iteration = self._ended[0]
            if not self._folder.all_written():
                return
            self._folder.commit_state(iteration)
            self._emit("saved", iteration=iteration)
            del self._ended[0]
            with self._lock:
                self.last_complete = iteration
                self._begun = {begun for begun in self._begun if begun[0] > iteration}

    def finish(self, executor: Executor, book: Callable[[str, float, float], None]) -> None:
        """Wait until all is saved, checked and committed."""
        self.check_health(executor, self._names)
        self.poll(book)
        while self._going:
            time.sleep(FINISH_POLL_S)
            self.poll(book)

    def void(self) -> None:
        """Forget what is not complete: components were lost."""
        with self._lock:
            self._begun, self._going, self._ended, self._unchecked = set(), [], [], {}

    def _is_over(self, beside: _Beside, book: Callable[[str, float, float], None]) -> bool:
        if not beside.unwritten:
            done = beside.call.poll()
            if done is None:
                return False
            for bucket, start, end in done.spans:
                book(bucket, beside.sent_s + start, beside.sent_s + end)
            if done.value == NO_MEMORY and not self._said:
                self._said = True
                self._emit("told", reason=f"{beside.component} is saved in place: no memory for a snapshot of it")
            beside.unwritten = done.workers if done.value == WRITING else 0
            if not beside.unwritten:
                return True
        assert beside.folder is not None
        marks = [written_mark(beside.folder, rank) for rank in range(beside.unwritten)]
        if not all(mark.exists() for mark in marks):
            if time.monotonic() > beside.end:
                raise hung_error(beside.component, "snapshot", self._limit_s)
            return False
        errors = [mark.read_text() for mark in marks]
        for mark in marks:
            mark.unlink()
        if error := next(filter(None, errors), None):
            raise ComponentError(beside.component, "raised", f"the state of {beside.component} is not written: {error}")
        return True


class IterationRunner:
    """Iterations `first` to `last` under one plan, from now on."""

    def __init__(
        self,
        executor: Executor,
        workflow: Workflow,
        plan: Plan,
        checkpointer: Checkpointer,
        first: int,
        last: int,
        inputs: Inputs | None = None,
    ) -> None:
        self.executor = executor
        self.order = ExecutionOrder(workflow, plan, first=first, last=last)
        self.measurements = RunMeasurements(workflow, plan, first, executor.now())
        self.lock = threading.RLock()  # guards everything but component calls
        self._workflow = workflow
        self._checkpointer = checkpointer
        self._sync_source = workflow.weight_sync.source if workflow.weight_sync is not None else None
        self._inputs = inputs
        self._input_lock = threading.Lock()
        self._sharing = {name for group in plan.groups if len(group.components) > 1 for name in group.components}
        self._consumers = {
            c.name: sum(c.name in other.after for other in workflow.components) for c in workflow.components
        }
        self._outputs: dict[_Key, tuple[Any, int]] = {}  # with the number of consumers that have not taken it
        self._held_weights: tuple[CallResult | None, int] | None = None  # until their target is between iterations

    def perform(self, action: PlanAction, now_s: float) -> float:
        """Run an action that begins now; returns its seconds on the timeline, without those for saving."""
        with self.lock:
            self.measurements.begin(action, now_s)
        if isinstance(action, GpuTurn):
            start_s, took_s = now_s, self._turn(action, now_s)
        elif isinstance(action, WeightSyncStep):
            start_s, took_s = now_s, self._sync(action, now_s)
        else:
            start_s, took_s = self._step(action, now_s)
        with self.lock:
            self.measurements.add(action, start_s, took_s)
        if (
            isinstance(action, BatchStep)
            and action.batch == self._workflow.batches - 1
            and action.component != self._sync_source  # its weights come first
        ):
            self._component_ended(action.component, action.iteration)
        return start_s - now_s + took_s if self.executor.is_virtual else self.executor.now() - now_s

    def _step(self, action: BatchStep, now_s: float) -> tuple[float, float]:
        """Run a batch; returns when its computing began, and the seconds of that."""
        inputs = self._take_inputs(action)
        held_weights, sync = None, self._workflow.weight_sync
        if action.batch == 0 and sync is not None and sync.target == action.component:
            with self.lock:
                held_weights, self._held_weights = self._held_weights, None
        if held_weights is not None:
            now_s += self._call(now_s, lambda: self.executor.sync(action.component, *held_weights)).whole_s
        place = action.iteration, action.batch, self._workflow.batches
        sent_s = self._now(now_s)
        done = self._call(now_s, lambda: self.executor.call(action.component, "step", *place, *inputs))
        start_s = sent_s + min((start for bucket, start, _ in done.spans if bucket == "compute"), default=0.0)
        with self.lock:
            if self._consumers[action.component]:
                key = action.component, action.iteration, action.batch
                self._outputs[key] = done.value, self._consumers[action.component]
            self.measurements.step(action, start_s, done.took_s, done.metrics)
        return start_s, done.took_s

    def _take_inputs(self, action: BatchStep) -> list[Any]:
        """The inputs of a batch, or that of the run; outputs that all consumers have taken are dropped."""
        after = self._workflow.component(action.component).after
        if not after:
            if self._inputs is None:
                return [None]
            began_s = self.executor.now()
            with self._input_lock:
                found = [self._inputs(action.iteration, action.batch)]
            self.measurements.book("wait_input", began_s, self.executor.now())
            return found
        found = []
        with self.lock:
            for parent in after:
                key = parent, action.iteration, action.batch
                output, left = self._outputs.pop(key)
                if left > 1:
                    self._outputs[key] = output, left - 1
                found.append(output)
        return found

    def _component_ended(self, name: str, iteration: int) -> None:
        self._checkpointer.component_ended(self.executor, name, iteration, shares=name in self._sharing)

    def _turn(self, action: GpuTurn, now_s: float) -> float:
        took_s, spans = self.executor.turn(action)
        self._checkpointer.check_health(self.executor, action.offload)
        with self.lock:
            self.measurements.turned(action, now_s, took_s)
            for name, (bucket, start, end) in spans:
                self.measurements.switched(action, name, bucket, now_s + start, now_s + end)
        return took_s

    def _sync(self, action: WeightSyncStep, now_s: float) -> float:
        """Send weights at once or, while the target is inside an iteration, when that ends."""
        reader = None if self._workflow.staleness else action.target  # which else may take its turn beside this
        weights = self._call(now_s, lambda: self.executor.weights(action.source, reader))
        given = weights if weights.spans else None
        self._component_ended(action.source, action.iteration)
        with self.lock:
            self._held_weights = given, action.iteration
            if not self.order.is_between(action.target):
                return weights.whole_s
            self._held_weights = None
        synced = self._call(now_s + weights.whole_s, lambda: self.executor.sync(action.target, given, action.iteration))
        return weights.whole_s + synced.whole_s

    def _now(self, at_s: float) -> float:
        """The present on the timeline; where that stands still during an action, `at_s`."""
        return max(self.executor.now(), at_s)

    def _call(self, at_s: float, call: Callable[[], CallResult | None]) -> CallResult:
        """Make a call, and book its time."""
        sent_s, done = self._now(at_s), call() or CallResult()
        for bucket, start, end in done.spans:
            self.measurements.book(bucket, sent_s + start, sent_s + end)
        return done
