"""Executes a run in this process, without Ray: for debugging, for machines without Ray, and for one GPU.

Components run one after another, in the order in which the plan would start them (`plan/placement/order.py`), with
their real outputs. Times are those of the plan: work that ran here after something it need not have waited for counts
as if it had run in parallel. A component that hung is never called again, not even `close`.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.plan.placement.order import play
from trimtab.runtime.run.component import ComponentError, error_text
from trimtab.runtime.run.emulated import Clock, WallClock
from trimtab.runtime.run.executor import WITH_DATA, CallResult, ComponentCalls, ComponentStartSpec, Executor, hung_error
from trimtab.runtime.run.folder import EmitEvent
from trimtab.runtime.run.iteration import IterationRunner
from trimtab.runtime.run.job import RunJob


class DeadlineError(Exception):
    """A call did not return in time."""


class DeadlineCaller:
    """Makes calls into user code one at a time, in one thread, each with a deadline; Ctrl-C interrupts the wait.

    A call that hangs cannot be ended from outside: its thread is left behind as a daemon, and no further call is made.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stuck = False  # a call did not return

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """Call the function; raises what it raises, or DeadlineError."""
        if self.stuck:
            raise DeadlineError("an earlier call has not returned")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trimtab-run", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(function, *arguments)))
        try:
            wait([future], limit_s)
        finally:  # after Ctrl-C too: the call may never return
            self.stuck = self.stuck or not future.done()
        if not future.done():
            raise DeadlineError(f"not over after {limit_s:g} s")
        return future.result()

    def close(self, wait_s: float = 5.0) -> None:
        """Waits a moment for a call that is stuck, so that the process does not end in the middle of it."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(wait_s)
            self._thread = None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # also SystemExit: user code must not end the run's process
                future.set_exception(error)


class LocalExecutor(Executor):
    """Components in this process, and a clock that they are timed by."""

    is_virtual = True

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock if clock is not None else WallClock()
        self._caller = DeadlineCaller()
        self._made: dict[str, ComponentCalls] = {}
        self._limit_s = 0.0  # of a call
        self._time_s = 0.0  # the plan's time since the run began
        self._last_action_s = self._clock.now()  # when the last action ended, by the clock

    def open(self, job: RunJob, folder: Path | None, emit: EmitEvent) -> None:
        super().open(job, folder, emit)
        self._limit_s = job.step_limit_s

    def close(self) -> None:
        self._limit_s = self._job.close_limit_s
        self.end()
        self._caller.close()

    def create(
        self, specs: Sequence[ComponentStartSpec], to: PlacedPlan, *, initial: bool
    ) -> dict[str, frozenset[str]]:
        has = {}
        for spec in specs:
            name = spec.place.component
            component = ComponentCalls(spec, self._clock)
            has[name] = frozenset(self._called(name, "make", component.make).value)
            self._made[name] = component
            if initial and len(to.plan.group_of(name).components) > 1:
                self.offload(name)
        return has

    def end(self, names: Sequence[str] | None = None) -> None:
        for name in list(self._made) if names is None else names:
            component = self._made.pop(name, None)
            if component is not None and not self._caller.stuck:
                with contextlib.suppress(ComponentError):
                    self._called(name, "close", component.close)

    def call(self, name: str, method: str, *arguments: Any) -> CallResult:
        done = self._called(name, method, getattr(self._made[name], method), *arguments)
        if method in WITH_DATA:
            done = replace(done[0], value=done[1])
        result: CallResult = done
        if result.fault is not None:
            raise result.fault
        began_s = result.spans[0][1] if result.spans else 0.0
        spans = tuple((bucket, start - began_s, end - began_s) for bucket, start, end in result.spans[1:])
        return replace(result, spans=spans)

    def offload(self, name: str) -> CallResult:
        return self.call(name, "offload")

    def onload(self, name: str) -> CallResult:
        return self.call(name, "onload")

    def drive(
        self, runner: IterationRunner, poll: Callable[[], None], ended: Callable[[IterationRunner, float], None]
    ) -> None:
        """Run actions one after another, timed as if they ran in parallel."""
        for played in play(runner.order, runner.perform, self._time_s):
            self._time_s = played.end_s
            ended(runner, played.end_s)
        self._last_action_s = self._clock.now()

    def now(self) -> float:
        return self._time_s

    def catch_up(self) -> None:
        now = self._clock.now()
        self._time_s += max(0.0, now - self._last_action_s)
        self._last_action_s = now

    def _called(self, name: str, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._caller.call(function, *arguments, limit_s=self._limit_s)
        except DeadlineError:
            raise hung_error(name, method, self._limit_s) from None
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit and the like
            what = f"the {method} of {name} tried to exit the process: {error_text(error)}"
            raise ComponentError(name, "raised", what) from error
