"""Event loop of the rollout machine: passes events in and instructions to their handlers.

One event loop, one core. `handle_event` is the only entry to the machine; it never waits and is never reentered,
because handlers start a task or call back later. A handler that raises drops neither later instructions nor the timer:
the error is logged, counted and reported as an event. Token reports are far more frequent than other events, so they
are batched: the first tokens of an attempt are reported at once, later ones at most every `TOKEN_REPORT_S`, and all of
them before any other event, so that no decision uses old counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimtab.core.errors import unknown
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.rollout import End, WorkerSpec
from trimtab.runtime.engines.engine import Engine, EngineLoad, EngineState
from trimtab.runtime.procs.background import Background, describe
from trimtab.runtime.rollout.launch.launcher import Launcher
from trimtab.runtime.rollout.sampling import PendingRequest

log = logging.getLogger("trimtab.rollout")

TOKEN_REPORT_S = 0.25
MIN_WAIT_S = 0.001
WARNINGS_KEPT = 100
FAILED_KEPT = 20
TICK_RETRY_S, TICK_RETRY_MAX_S = 0.1, 30.0  # after a failed tick

T = TypeVar("T")
Listener = Callable[[Any, float], None]


@dataclass
class WorkerHandle:
    """How a worker is reached; its state is in the machine."""

    spec: WorkerSpec
    engine: Engine | None = None  # None: not started
    url: str = ""
    addresses: frozenset[tuple[str, int]] = frozenset()  # of `url`, if it was attached
    launcher: Launcher | None = None
    node: str = ""
    note: str = ""  # warning shown in status
    state: EngineState | None = None  # as last seen
    load: EngineLoad | None = None
    slept: Reason | None = None  # memory released by the last sleep
    boots: int = 0
    reported: str | None = None  # weight version that it reported last
    unhealthy_since: float | None = None
    weight_updates: int = 0  # refits that may have changed its weights
    token_rate: float | None = None  # tokens per second of one request, as last measured
    resume_after_refit: bool = False  # it woke without weights; its gate is closed until a refit
    health_task: asyncio.Task[None] | None = None


@dataclass
class RequestAttempt:
    """A running attempt."""

    pending: PendingRequest
    number: int
    worker: str
    engine_request_id: str
    reported: int = 0
    reported_at: float = 0.0
    version: int | None = None
    named: dict[str, int | None] = field(default_factory=dict)  # versions that the engine reports by a name
    aborting: bool = False
    segments: bool = False  # its calls are short, so an abort may wait for the end of one
    silent: bool = False  # no token reports until it has ended
    adapters: set[str] | None = None  # LoRA adapters of its engine's process; None: it needs none, or has not got it
    task: asyncio.Task[None] | None = None


@dataclass
class RolloutCore:
    """The machine and everything that its instructions refer to."""

    machine: RolloutMachine
    clock: Callable[[], float] = time.monotonic
    handles: dict[str, WorkerHandle] = field(default_factory=dict)
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    # Kept for requests with the same key.
    keyed_answers: dict[str, PendingRequest] = field(default_factory=dict)
    attempts: dict[tuple[str, int], RequestAttempt] = field(default_factory=dict)
    last_actions: dict[str, e.WorkerAction] = field(default_factory=dict)  # by worker
    weights: dict[int, str] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)  # LoRA adapters by name: their paths
    restoring: int | None = None  # version that a failed refit is being reverted to
    counters: Counter[str] = field(default_factory=Counter)
    warnings: deque[tuple[float, str, str, ReasonCode | None]] = field(
        default_factory=lambda: deque(maxlen=WARNINGS_KEPT)
    )
    failed: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=FAILED_KEPT))
    listeners: list[Listener] = field(default_factory=list)
    handlers: dict[type, Callable[[Any], None]] = field(default_factory=dict)
    background: Background = field(default_factory=lambda: Background(prefix="rollout"))
    known_ids: Sequence[int] = (1,)  # token ids that the engines know
    closing: bool = False

    def __post_init__(self) -> None:
        self._unreported: dict[tuple[str, int], RequestAttempt] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._waiters: list[asyncio.Future[None]] = []
        self._handling = False
        self._ticks_failed = 0  # consecutive

    # ---- events and instructions -----------------------------------------------------------------------------------

    def handle_event(self, event: e.RolloutEvent) -> None:
        """Passes an event to the machine and executes its instructions. Raises, with nothing changed, as the machine
        does.
        """
        if self._unreported and type(event) is not e.TokensStreamed:
            self._report_all()
        self._handle(event)

    def _handle(self, event: e.RolloutEvent) -> None:
        assert not self._handling, "handle_event is not reentrant"
        self._handling = True
        try:
            now = self.clock()
            instructions = self.machine.handle(event, now)
            self._notify_listeners(event, now)
            for instruction in instructions:
                self._notify_listeners(instruction, now)
                if isinstance(instruction, e.WorkerAction):
                    self.last_actions[instruction.worker] = instruction
                try:
                    self.handlers[type(instruction)](instruction)
                except Exception as error:
                    self._instruction_failed(instruction, error)
        finally:
            self._handling = False
            self._arm()
        if self._waiters:
            self.wake_waiters()

    def _notify_listeners(self, what: Any, now: float) -> None:
        for listener in self.listeners:
            try:
                listener(what, now)
            except Exception as error:  # noqa: PERF203 - the machine goes on whatever its listeners do
                if not self.counters["listeners_failed"]:
                    log.exception("a listener of the rollout pool failed")
                    self.warn("", f"a listener failed: {describe(error)}")
                self.counters["listeners_failed"] += 1

    def _instruction_failed(self, instruction: Any, error: Exception) -> None:
        """Reports an outcome for an instruction that raised. Aborts have a deadline in the machine."""
        why = f"{type(instruction).__name__} failed: {describe(error)}"
        log.error("%s", why, exc_info=error)
        self.counters["instructions_failed"] += 1
        self.warn(getattr(instruction, "worker", ""), why)
        if isinstance(instruction, e.WorkerAction):
            self.handle_event_soon(e.ActionFailed(instruction.worker, instruction.attempt, why))
        elif isinstance(instruction, e.SendRequest):
            self.attempts.pop((instruction.request, instruction.attempt), None)
            self.handle_event_soon(e.AttemptFailed(instruction.request, instruction.attempt, 0, why))
        elif isinstance(instruction, (e.AnswerRequest, e.RefuseRequest)):
            self.fail_client(instruction.request, why)

    def fail_client(self, request: str, why: str) -> None:
        pending = self.pending.pop(request, None)
        if pending is not None:
            pending.answer(End.failed, (), Reason(ReasonCode.faulty, why))

    def wake_waiters(self) -> None:
        """Makes all `until` calls check again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def handle_event_soon(self, event: e.RolloutEvent) -> None:
        asyncio.get_running_loop().call_soon(self._handle_later, event)

    def _handle_later(self, event: e.RolloutEvent) -> None:
        if not self.closing:
            self.handle_event(event)

    def report_tokens(self, attempt: RequestAttempt) -> None:
        """Reports new tokens of an attempt, now or with the next batch."""
        if attempt.silent:
            return
        now = self.clock()
        if attempt.reported and now - attempt.reported_at < TOKEN_REPORT_S:
            self._unreported[attempt.pending.spec.id, attempt.number] = attempt
            return
        self._unreported.pop((attempt.pending.spec.id, attempt.number), None)
        self._report(attempt, now)

    def report_now(self, attempt: RequestAttempt) -> None:
        self._unreported.pop((attempt.pending.spec.id, attempt.number), None)
        self._report(attempt, self.clock())

    def _report(self, attempt: RequestAttempt, now: float) -> None:
        made = attempt.pending.made
        if made > attempt.reported:
            attempt.reported, attempt.reported_at = made, now
            self._handle(e.TokensStreamed(attempt.pending.spec.id, attempt.number, made, attempt.version))

    def _report_all(self) -> None:
        untold, self._unreported = self._unreported, {}
        now = self.clock()
        for attempt in untold.values():
            if attempt.pending.attempt == attempt.number:
                self._report(attempt, now)

    # ---- time ------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Sets the timer anew only for an earlier deadline: one that has moved away is found when it fires."""
        due = self.machine.next_deadline()
        if due is None or self.closing or (self._timer is not None and due >= self._timer_at):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = due
        wait_s = max(due - self.clock(), MIN_WAIT_S)
        with contextlib.suppress(RuntimeError):  # no event loop runs: the next event on one arms it
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer, due = None, self.machine.next_deadline()
        if self.closing or due is None or due > self.clock():
            self._arm()
            return
        try:
            self.handle_event(e.RolloutTick())
        except Exception:
            log.exception("a tick of the rollout pool failed")
            self.counters["ticks_failed"] += 1
            retry_s = min(TICK_RETRY_MAX_S, TICK_RETRY_S * 2.0 ** min(self._ticks_failed, 20))
            self._ticks_failed += 1
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(retry_s, self._tick)
        else:
            self._ticks_failed = 0

    async def until(self, condition: Callable[[], bool], within_s: float | None) -> bool:
        """Waits until the condition holds, checking after every event; False on timeout."""
        end = None if within_s is None else self.clock() + within_s
        while not condition():
            left_s = None if end is None else end - self.clock()
            if left_s is not None and left_s <= 0:
                return False
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await asyncio.wait({future}, timeout=left_s)
        return True

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def spawn_for(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task whose caller awaits the result."""
        task = asyncio.get_running_loop().create_task(work, name=f"rollout-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task; its errors are logged and counted."""
        task = asyncio.get_running_loop().create_task(work, name=f"rollout-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self.counters["tasks_failed"] += 1
            self.warn("", f"{task.get_name()} failed: {error!r}")

    def stop_timer(self) -> None:
        """No tick and no later event from now on."""
        self.closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def end_tasks(self) -> None:
        self.stop_timer()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await self.background.close()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)

    # ---- warnings and lookups --------------------------------------------------------------------------------------

    def warn(self, worker: str, sentence: str, code: ReasonCode | None = None) -> None:
        """Records a warning for `status` and logs it."""
        self.warnings.append((self.clock(), worker, sentence, code))
        log.warning("%s%s", f"{worker}: " if worker else "", sentence)

    def launchers(self) -> list[Launcher]:
        """Those of all workers, each once."""
        found = (handle.launcher for handle in self.handles.values())
        return list({id(launcher): launcher for launcher in found if launcher is not None}.values())

    def worker_handle(self, worker: str) -> WorkerHandle:
        """Raises an InputError for an unknown worker."""
        found = self.handles.get(worker)
        if found is None:
            raise unknown(worker, self.handles, what="there is no worker {}")
        return found
