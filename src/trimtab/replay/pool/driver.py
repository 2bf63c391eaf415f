"""Drives a scheduler of pools under a virtual clock: carries its instructions out as a model of reality says.

The scheduler is the pool machine that runs live, or a baseline that speaks its language: events in, instructions out.
Every deed takes a time that is drawn by the seed, the task and the attempt, not by the order of events, so that all
policies meet the same reality. Work that was not saved is done again. What must be true is looked at with every event
(`truths`), and by the scheduler itself on a sample of events and at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.replay.common.agenda import Agenda
from trimtab.replay.common.churn import ChurnEvent
from trimtab.replay.common.timing import MEASURED, Distribution, PoolTimes
from trimtab.replay.pool.invariants import InvariantError, PoolInvariants
from trimtab.replay.pool.workload import WorkloadTask

CHECK_EVERY = 100_000  # events between two full checks
BINS = 240  # points of the curves over time


class PoolScheduler(Protocol):
    """Decides who runs: the pool machine, or a baseline."""

    def handle(self, event: e.PoolEvent, now: float) -> list[e.PoolInstruction]:
        """What is to be done about an event."""

    def next_deadline(self) -> float | None:
        """When a Tick is due."""

    def check(self) -> None:
        """Raise where the books contradict each other."""


@dataclass(frozen=True)
class PoolReality:
    """What is given, whoever schedules."""

    nodes: tuple[str, ...]
    node_gpus: int
    times: PoolTimes = MEASURED
    churn: tuple[ChurnEvent, ...] = ()
    checkpoint_s: float = 1800.0  # a loss throws away what was done since the last checkpoint of its own; 0: all
    seed: int = 0


@dataclass
class SimulatedTask:
    """A task in the simulation."""

    work: WorkloadTask
    units: tuple[int, ...]
    left_s: float  # of its work
    queued_at: float  # since when it waits, while it does
    waited_s: float = 0.0  # in the queue, all waits together
    first_start_s: float | None = None
    attempt: int = 0
    began_s: float | None = None  # its work, in this attempt
    held_since: float = 0.0
    stop: str = ""  # "done", "leaves" or "lost": what its stop will make of it
    evictions: int = 0
    losses: int = 0
    redone_s: float = 0.0  # work that had to be done again
    done_s: float | None = None


@dataclass
class PoolCurves:
    """What was over time, a point for each bin."""

    at: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    used_gpus: list[int] = field(default_factory=list)


@dataclass
class PoolOutcome:
    """What became of a run, before anybody sums it up."""

    tasks: list[SimulatedTask]
    events: int
    evictions: int
    end_s: float
    window_s: float  # until the last submission
    capacity_gpu_s: float  # in the window
    held_gpu_s: float  # in the window: a process had them
    work_gpu_s: float  # in the window: work that did not have to be done again
    curves: PoolCurves
    looks: int
    checks: int


class PoolReplay:
    """One run."""

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
        self._truths = PoolInvariants()
        self._tasks: dict[str, SimulatedTask] = {}
        self._order: list[SimulatedTask] = []
        self._groups_told: set[str] = set()
        self._check_every, self._on_event, self._progress = check_every, on_event, progress
        self._events = self._checks = self._evictions = 0
        self._waiting = self._used = 0
        self._window_s = max((one.submit_s for one in workload), default=0.0)
        self._held = self._worked = 0.0
        self._capacity, self._there, self._there_since = 0.0, 0, 0.0
        self._curves = PoolCurves()
        self._next_bin = 0.0
        self._source = random.Random()
        for event in first:
            self._send_event(event)
        for node in reality.nodes:
            self._node_joins(node)
        self._expect(workload)
        for happens in reality.churn:
            self._agenda.put(happens.at_s, happens)

    def _expect(self, workload: Sequence[WorkloadTask]) -> None:
        for one in workload:
            life = SimulatedTask(one, tuple(bundle.get("gpu") for bundle in one.spec.bundles), one.work_s, one.submit_s)
            self._order.append(life)
            self._tasks[one.spec.id] = life
            self._agenda.put(one.submit_s, e.TaskSubmitted(one.spec))

    # ---- time ------------------------------------------------------------------------------------------------------

    def run(self) -> PoolOutcome:
        """Until every task has ended."""
        agenda, left = self._agenda, len(self._order)
        while self._truths.done < left:
            due, first = self._scheduler.next_deadline(), agenda.first()
            if first is None and due is None:
                raise InvariantError(f"nothing happens any more, and {left - self._truths.done} tasks have not ended")
            if first is None or (due is not None and due < first):
                agenda.leap(due if due is not None else agenda.now)
                self._sample()
                self._send_event(e.PoolTick())
                continue
            what = agenda.pop()
            self._sample()
            self._occur(what)
        self._finish()
        return PoolOutcome(
            self._order, self._events, self._evictions, agenda.now, self._window_s, self._capacity, self._held,
            self._worked, self._curves, self._truths.looks, self._checks,
        )  # fmt: skip

    def _sample(self) -> None:
        now = self._agenda.now
        if now < self._next_bin or now > self._window_s:
            return
        self._curves.at.append(now)
        self._curves.waiting.append(self._waiting)
        self._curves.used_gpus.append(self._used)
        self._next_bin = now + self._window_s / BINS
        if self._progress is not None:
            self._progress(now / self._window_s if self._window_s else 1.0)

    def _finish(self) -> None:
        self._count_capacity()
        self._truths.whole()
        self._scheduler.check()
        self._checks += 1

    def _send_event(self, event: e.PoolEvent) -> None:
        now = self._agenda.now
        out = self._scheduler.handle(event, now)
        self._events += 1
        if self._on_event is not None:
            self._on_event(now, event, out)
        for one in out:
            self._deed(one, now)
        if self._events % self._check_every == 0:
            self._truths.whole()
            self._scheduler.check()
            self._checks += 1

    # ---- what happens ----------------------------------------------------------------------------------------------

    def _occur(self, what: e.PoolEvent | ChurnEvent) -> None:
        if isinstance(what, e.TaskStarted):
            self._started(what)
        elif isinstance(what, e.TaskEnded):
            self._ended(what)
        elif isinstance(what, e.TaskStopped):
            self._stopped(what)
        elif isinstance(what, e.TaskSubmitted):
            self._truths.came(what.spec.id)
            self._waiting += 1
            self._send_event(what)
        elif isinstance(what, e.PlacementGroupReady):
            if what.group in self._truths.groups:
                self._truths.standing(what.group)
                self._send_event(what)
        elif isinstance(what, e.PlacementGroupRemoved):
            if what.group in self._truths.groups:
                self._truths.gone(what.group)
                self._send_event(what)
        elif isinstance(what, ChurnEvent):
            self._node(what)
        else:
            self._send_event(what)

    def _started(self, event: e.TaskStarted) -> None:
        life = self._tasks[event.task]
        if life.attempt != event.attempt or life.stop:
            return
        now = self._agenda.now
        life.began_s = now
        self._agenda.put(now + life.left_s, e.TaskEnded(event.task, event.attempt))
        self._send_event(event)

    def _ended(self, event: e.TaskEnded) -> None:
        life = self._tasks[event.task]
        if life.attempt != event.attempt or life.stop:
            return
        self._worked_until(life, self._agenda.now, kept=True)
        life.left_s, life.stop, life.done_s = 0.0, "done", self._agenda.now
        self._send_event(event)

    def _stopped(self, event: e.TaskStopped) -> None:
        life, now = self._tasks[event.task], self._agenda.now
        self._truths.stopped(event.task)
        self._used -= life.work.gpus
        self._held += life.work.gpus * self._inside(life.held_since, now)
        if life.stop == "done":
            self._truths.ended(event.task)
        else:
            life.queued_at = now
            self._waiting += 1
        life.stop, life.began_s = "", None
        life.attempt = 0  # what was put down for this attempt does not happen
        self._send_event(event)

    def _inside(self, begin: float, end: float) -> float:
        """Seconds of a time that are in the window."""
        return max(0.0, min(end, self._window_s) - min(begin, self._window_s))

    def _worked_until(self, life: SimulatedTask, end: float, *, kept: bool) -> None:
        """The work of this attempt is over. What is kept counts; of the rest, what a checkpoint of its own has."""
        began = life.began_s
        if began is None:
            return
        ran = end - began
        every = self._reality.checkpoint_s
        good = ran if kept else (ran // every * every if every else 0.0)
        life.left_s = max(0.0, life.left_s - good)
        life.redone_s += ran - good
        life.began_s = None
        self._worked += life.work.gpus * self._inside(began, began + good)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _node(self, what: ChurnEvent) -> None:
        if what.what == "joined":
            self._node_joins(what.node)
        elif what.node in self._truths.nodes:
            if what.what == "draining":
                self._send_event(e.NodeDrained(what.node))
                self._agenda.put(self._agenda.now + what.notice_s, ChurnEvent(0.0, what.node, "lost"))
            else:
                self._node_lost(what.node)

    def _node_joins(self, node: str) -> None:
        if node not in self._truths.nodes:
            self._count_capacity()
            self._there += self._reality.node_gpus
            self._truths.joined(node, self._reality.node_gpus)
            self._send_event(e.NodeJoined(node, Resources.of(gpu=self._reality.node_gpus)))

    def _node_lost(self, node: str) -> None:
        self._count_capacity()
        self._there -= self._reality.node_gpus
        gone = self._truths.nodes[node]
        for task, process in self._truths.processes.items():
            if any(at is gone for _, at, _ in process.places):
                life = self._tasks[task]
                if life.stop != "done":
                    life.losses += 1
                    self._worked_until(life, self._agenda.now, kept=False)
                    life.stop = life.stop or "lost"
        self._truths.lost(node)
        self._send_event(e.NodeLost(node, "simulated"))

    def _count_capacity(self) -> None:
        self._capacity += self._there * self._inside(self._there_since, self._agenda.now)
        self._there_since = self._agenda.now

    # ---- deeds -----------------------------------------------------------------------------------------------------

    def _deed(self, one: e.PoolInstruction, now: float) -> None:
        if isinstance(one, e.StartTask):
            self._start(one, now)
        elif isinstance(one, e.StopTask):
            self._stop(one, now)
        elif isinstance(one, e.CreatePlacementGroup):
            self._truths.making(one)
            self._agenda.put(now + self._took("bind", one.group, 0), e.PlacementGroupReady(one.group))
        elif isinstance(one, e.RemovePlacementGroup):
            self._truths.removing(one.group)
            self._agenda.put(now + self._took("bind", one.group, 1), e.PlacementGroupRemoved(one.group))
        else:
            raise InvariantError(f"nobody here takes turns: {one}")

    def _start(self, one: e.StartTask, now: float) -> None:
        life = self._tasks[one.task]
        self._truths.starting(one, life.units)
        life.attempt, life.held_since = one.attempt, now
        self._waiting -= 1
        self._used += life.work.gpus
        life.waited_s += now - life.queued_at
        if life.first_start_s is None:
            life.first_start_s = now
        took = self._took("start", one.task, one.attempt)
        if one.attempt > 1 and life.left_s < life.work.work_s:
            took += self._took("load", one.task, one.attempt)
        self._agenda.put(now + took, e.TaskStarted(one.task, one.attempt))

    def _stop(self, one: e.StopTask, now: float) -> None:
        life = self._tasks[one.task]
        took = self._took("stop", one.task, one.attempt)
        saved = False
        if not life.stop:
            life.stop = "leaves"
            life.evictions += 1
            self._evictions += 1
            if life.began_s is not None:
                saving = self._took("save", one.task, one.attempt)
                saved = life.work.spec.saves and saving <= one.save_s
                self._worked_until(life, now, kept=saved)
                took = min(took, one.tell_s) + (min(saving, one.save_s) if life.work.spec.saves else 0.0)
        self._agenda.put(now + took, e.TaskStopped(one.task, one.attempt, "returned", saved))

    def _took(self, what: str, name: str, attempt: int) -> float:
        known: Distribution = getattr(self._reality.times, f"{what}_s")
        if known.sigma or known.values:
            self._source.seed(f"{self._reality.seed} {what} {name} {attempt}")
        return known.draw(self._source)
