"""Drives a pool scheduler under a virtual clock and executes its instructions by a model of reality.

The scheduler is the pool machine that runs live, or a baseline with the same interface: events in, instructions out.
Durations are drawn by seed, task and attempt, not by the order of events, so all policies meet the same reality.
Unsaved work is redone. Invariants are checked on every event (`PoolInvariants`); the scheduler checks its own state
every CHECK_EVERY events and at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab.core.frozen import Frozen
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.model.pool import TaskSpec
from trimtab.replay.common.timing import MEASURED, Agenda, ChurnEvent, Distribution, PoolTimes
from trimtab.replay.pool.invariants import InvariantError, PoolInvariants

POOL = "pool"
CHECK_EVERY = 100_000  # events between two full checks
BINS = 240  # points of the curves over time


class WorkloadTask(Frozen):
    """A task, its submission time, and the length of its work, which only the simulation knows."""

    spec: TaskSpec
    submit_s: float
    work_s: float
    gpus: int
    class_: str


class PoolScheduler(Protocol):
    """A scheduler: the pool machine or a baseline."""

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        """Processes an event and returns instructions."""

    def next_deadline(self) -> float | None:
        """Time of the next PoolTick."""

    def check(self) -> None:
        """Raises AssertionError if its state is inconsistent."""


class PoolReality(Frozen):
    """The simulated cluster: the same for every scheduler."""

    nodes: tuple[str, ...]
    node_gpus: int
    times: PoolTimes = MEASURED
    churn: tuple[ChurnEvent, ...] = ()
    checkpoint_s: float = 1800.0  # a task that is lost redoes its work since its last own checkpoint; 0: all of it
    seed: int = 0


@dataclass
class SimulatedTask:
    """A task in the simulation."""

    work: WorkloadTask
    units: tuple[int, ...]
    left_s: float  # remaining work
    queued_at: float  # start of the current wait
    waited_s: float = 0.0  # total time in the queue
    first_start_s: float | None = None
    attempt: int = 0
    began_s: float | None = None  # start of the work of this attempt
    held_since: float = 0.0
    stop: str = ""  # "done", "evicted" or "lost": the outcome of the stop under way
    evictions: int = 0
    losses: int = 0
    redone_s: float = 0.0  # work that was redone
    done_s: float | None = None


@dataclass
class PoolCurves:
    """Time series, a point per bin."""

    at: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    used_gpus: list[int] = field(default_factory=list)

    def add(self, at: float, waiting: int, used_gpus: int) -> None:
        self.at.append(at)
        self.waiting.append(waiting)
        self.used_gpus.append(used_gpus)


@dataclass
class PoolOutcome:
    """Raw results of a run."""

    tasks: list[SimulatedTask]
    events: int
    evictions: int
    end_s: float
    window_s: float  # until the last submission
    capacity_gpu_s: float  # in the window
    held_gpu_s: float  # in the window: held by processes
    work_gpu_s: float  # in the window: work that was not redone
    curves: PoolCurves
    looks: int  # invariant checks
    checks: int  # full consistency checks


class PoolReplay:
    """A simulated run."""

    def __init__(
        self,
        scheduler: PoolScheduler,
        workload: Sequence[WorkloadTask],
        reality: PoolReality,
        *,
        first: Sequence[e.PoolEvent] = (),
        check_every: int = CHECK_EVERY,
        on_event: Callable[[float, e.PoolEvent, list[e.PoolInstruction]], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._reality = reality
        self._agenda: Agenda[e.PoolEvent | ChurnEvent] = Agenda()
        self._invariants = PoolInvariants()
        self._tasks: dict[str, SimulatedTask] = {}
        self._order: list[SimulatedTask] = []
        self._groups_told: set[str] = set()
        self._check_every, self._on_event, self._progress = check_every, on_event, progress
        self._events = self._checks = self._evictions = 0
        self._waiting = self._used = 0
        self._window_s = max((task.submit_s for task in workload), default=0.0)
        self._held = self._worked = 0.0
        self._capacity, self._gpus_present, self._present_since = 0.0, 0, 0.0
        self._curves = PoolCurves()
        self._next_bin = 0.0
        self._source = random.Random()
        for event in first:
            self._send_event(event)
        for node in reality.nodes:
            self._node_joins(node)
        self._expect(workload)
        for change in reality.churn:
            self._agenda.put(change.at_s, change)

    def _expect(self, workload: Sequence[WorkloadTask]) -> None:
        for work in workload:
            task = SimulatedTask(
                work, tuple(bundle.get("gpu") for bundle in work.spec.bundles), work.work_s, work.submit_s
            )
            self._order.append(task)
            self._tasks[work.spec.id] = task
            self._agenda.put(work.submit_s, e.TaskSubmitted(work.spec))

    # ---- time ------------------------------------------------------------------------------------------------------

    def run(self) -> PoolOutcome:
        """Runs until every task has ended."""
        agenda, left = self._agenda, len(self._order)
        while self._invariants.done < left:
            due, first = self._scheduler.next_deadline(), agenda.next_time()
            if first is None and due is None:
                raise InvariantError(f"no event is left, but {left - self._invariants.done} tasks have not ended")
            if first is None or (due is not None and due < first):
                agenda.advance_to(due if due is not None else agenda.now)
                self._sample()
                self._send_event(e.PoolTick())
                continue
            what = agenda.pop()
            self._sample()
            self._process(what)
        self._count_capacity()
        self._check()
        return PoolOutcome(
            self._order, self._events, self._evictions, agenda.now, self._window_s, self._capacity, self._held,
            self._worked, self._curves, self._invariants.looks, self._checks,
        )  # fmt: skip

    def _sample(self) -> None:
        now = self._agenda.now
        if now < self._next_bin or now > self._window_s:
            return
        self._curves.add(now, self._waiting, self._used)
        self._next_bin = now + self._window_s / BINS
        if self._progress is not None:
            self._progress(now / self._window_s if self._window_s else 1.0)

    def _check(self) -> None:
        self._invariants.check_totals()
        self._scheduler.check()
        self._checks += 1

    def _send_event(self, event: e.PoolEvent) -> None:
        now = self._agenda.now
        out = self._scheduler.handle(event, now)
        self._events += 1
        if self._on_event is not None:
            self._on_event(now, event, out)
        for instruction in out:
            self._execute(instruction, now)
        if self._events % self._check_every == 0:
            self._check()

    # ---- events ----------------------------------------------------------------------------------------------------

    def _process(self, event: e.PoolEvent | ChurnEvent) -> None:
        if isinstance(event, e.TaskStarted):
            self._started(event)
        elif isinstance(event, e.TaskEnded):
            self._ended(event)
        elif isinstance(event, e.TaskStopped):
            self._stopped(event)
        elif isinstance(event, e.TaskSubmitted):
            self._invariants.task_submitted(event.spec.id)
            self._waiting += 1
            self._send_event(event)
        elif isinstance(event, e.PlacementGroupReady | e.PlacementGroupRemoved):
            if event.group in self._invariants.groups:
                ready = isinstance(event, e.PlacementGroupReady)
                (self._invariants.group_ready if ready else self._invariants.group_removed)(event.group)
                self._send_event(event)
        elif isinstance(event, ChurnEvent):
            self._node(event)
        else:
            self._send_event(event)

    def _started(self, event: e.TaskStarted) -> None:
        task = self._tasks[event.task]
        if task.attempt != event.attempt or task.stop:
            return
        now = self._agenda.now
        task.began_s = now
        self._agenda.put(now + task.left_s, e.TaskEnded(event.task, event.attempt))
        self._send_event(event)

    def _ended(self, event: e.TaskEnded) -> None:
        task = self._tasks[event.task]
        if task.attempt != event.attempt or task.stop:
            return
        self._worked_until(task, self._agenda.now, kept=True)
        task.left_s, task.stop, task.done_s = 0.0, "done", self._agenda.now
        self._send_event(event)

    def _stopped(self, event: e.TaskStopped) -> None:
        task, now = self._tasks[event.task], self._agenda.now
        self._invariants.task_stopped(event.task)
        self._used -= task.work.gpus
        self._held += task.work.gpus * self._inside(task.held_since, now)
        if task.stop == "done":
            self._invariants.task_ended(event.task)
        else:
            task.queued_at = now
            self._waiting += 1
        task.stop, task.began_s = "", None
        task.attempt = 0  # events scheduled for this attempt are void
        self._send_event(event)

    def _inside(self, begin: float, end: float) -> float:
        """Seconds of an interval that are inside the window."""
        return max(0.0, min(end, self._window_s) - min(begin, self._window_s))

    def _worked_until(self, task: SimulatedTask, end: float, *, kept: bool) -> None:
        """Ends the work of this attempt. If not `kept`, only what its own checkpoints cover counts."""
        began = task.began_s
        if began is None:
            return
        ran = end - began
        every = self._reality.checkpoint_s
        good = ran if kept else (ran // every * every if every else 0.0)
        task.left_s = max(0.0, task.left_s - good)
        task.redone_s += ran - good
        task.began_s = None
        self._worked += task.work.gpus * self._inside(began, began + good)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _node(self, event: ChurnEvent) -> None:
        if event.what == "joined":
            self._node_joins(event.node)
        elif event.node in self._invariants.nodes:
            if event.what == "draining":
                self._send_event(e.NodeDrained(event.node))
                self._agenda.put(self._agenda.now + event.notice_s, ChurnEvent(0.0, event.node, "lost"))
            else:
                self._node_lost(event.node)

    def _node_joins(self, node: str) -> None:
        if node not in self._invariants.nodes:
            self._count_capacity()
            self._gpus_present += self._reality.node_gpus
            self._invariants.node_joined(node, self._reality.node_gpus)
            self._send_event(e.NodeJoined(node, Resources.of(gpu=self._reality.node_gpus)))

    def _node_lost(self, node: str) -> None:
        self._count_capacity()
        self._gpus_present -= self._reality.node_gpus
        gone = self._invariants.nodes[node]
        for name, process in self._invariants.processes.items():
            if any(at is gone for _, at, _ in process.places):
                task = self._tasks[name]
                if task.stop != "done":
                    task.losses += 1
                    self._worked_until(task, self._agenda.now, kept=False)
                    task.stop = task.stop or "lost"
        self._invariants.node_lost(node)
        self._send_event(e.NodeLost(node, "simulated"))

    def _count_capacity(self) -> None:
        self._capacity += self._gpus_present * self._inside(self._present_since, self._agenda.now)
        self._present_since = self._agenda.now

    # ---- instructions ----------------------------------------------------------------------------------------------

    def _execute(self, instruction: e.PoolInstruction, now: float) -> None:
        if isinstance(instruction, e.StartTask):
            self._start(instruction, now)
        elif isinstance(instruction, e.StopTask):
            self._stop(instruction, now)
        elif isinstance(instruction, e.CreatePlacementGroup):
            self._invariants.group_creating(instruction)
            self._agenda.put(
                now + self._duration("bind", instruction.group, 0), e.PlacementGroupReady(instruction.group)
            )
        elif isinstance(instruction, e.RemovePlacementGroup):
            self._invariants.group_removing(instruction.group)
            self._agenda.put(
                now + self._duration("bind", instruction.group, 1), e.PlacementGroupRemoved(instruction.group)
            )
        else:
            raise InvariantError(f"turns are not simulated: {instruction}")

    def _start(self, instruction: e.StartTask, now: float) -> None:
        task = self._tasks[instruction.task]
        self._invariants.task_starting(instruction, task.units)
        task.attempt, task.held_since = instruction.attempt, now
        self._waiting -= 1
        self._used += task.work.gpus
        task.waited_s += now - task.queued_at
        if task.first_start_s is None:
            task.first_start_s = now
        took = self._duration("start", instruction.task, instruction.attempt)
        if instruction.attempt > 1 and task.left_s < task.work.work_s:
            took += self._duration("load", instruction.task, instruction.attempt)
        self._agenda.put(now + took, e.TaskStarted(instruction.task, instruction.attempt))

    def _stop(self, instruction: e.StopTask, now: float) -> None:
        task = self._tasks[instruction.task]
        took = self._duration("stop", instruction.task, instruction.attempt)
        saved = False
        if not task.stop:
            task.stop = "evicted"
            task.evictions += 1
            self._evictions += 1
            if task.began_s is not None:
                saving = self._duration("save", instruction.task, instruction.attempt)
                saved = task.work.spec.saves and saving <= instruction.checkpoint_timeout_s
                self._worked_until(task, now, kept=saved)
                took = min(took, instruction.cancel_grace_s) + (
                    min(saving, instruction.checkpoint_timeout_s) if task.work.spec.saves else 0.0
                )
        self._agenda.put(now + took, e.TaskStopped(instruction.task, instruction.attempt, "returned", saved))

    def _duration(self, what: str, name: str, attempt: int) -> float:
        known: Distribution = getattr(self._reality.times, f"{what}_s")
        if known.sigma or known.values:
            self._source.seed(f"{self._reality.seed} {what} {name} {attempt}")
        return known.draw(self._source)
