"""Runs a job: iterations under a plan, checkpoints, replanning, migration, and recovery from lost components.

Components are on an executor, in this process or on Ray. `wall_s` of an iteration is the time of the executor's
timeline: on Ray wall time, in one process the plan's time with measured costs; `here_s` is the wall time of this
process. When a component's process or node is lost, all components are created anew under a plan that fits, and the run
resumes from the last checkpoint; later iterations are void: they are run again and counted once.

A run ends as done, stopped (Ctrl-C: once after the current iteration, twice at once) or failed, with a reason. In every
case the folder holds each iteration once and a checkpoint to resume from.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from trimtab.core.codec import encode
from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan import events as e
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import Plan
from trimtab.model.run import STAGES, Iteration
from trimtab.model.workflow import PlacementJob, Workflow
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.procs.interrupts import stop_on_interrupt
from trimtab.runtime.run.component import ComponentError, error_text, finite_or_none
from trimtab.runtime.run.executor import ComponentLostError, Executor
from trimtab.runtime.run.folder import (
    RUN_QUEUE,
    RunFolder,
    RunHistory,
    clear_requests,
    event_log_path,
    read_event_log,
    read_run,
    take_requests,
)
from trimtab.runtime.run.iteration import Checkpointer, Inputs, IterationRunner
from trimtab.runtime.run.job import RunJob, shared_plan, with_costs
from trimtab.runtime.run.local_executor import LocalExecutor
from trimtab.runtime.run.measurements import Metrics, bars_facts, plan_facts, summary_facts
from trimtab.runtime.run.replanner import MigrationExecutor, Replanner, load_machine, nodes_facts, save_machine

log = logging.getLogger(__name__)

LOOP = "loop.json"
POLL_S = 0.25  # between two polls of the run folder, or of the cluster
MAX_LOSSES = 20  # in a row without an iteration in between, after which the run fails
RunStatus = Literal["running", "done", "stopped", "failed"]
_CODES = {"raised": ReasonCode.raised, "hung": ReasonCode.hung, "unhealthy": ReasonCode.unhealthy}


class RunEnd(Frozen):
    """How a run ended: its iterations, each once, and the reason."""

    state: RunStatus
    reason: Reason
    iterations: tuple[Iteration, ...]
    plan: Plan
    since: int = 1  # the first iteration under `plan`
    metrics: Mapping[int, Metrics] = field(default_factory=dict)
    here_s: Mapping[int, float] = field(default_factory=dict)  # wall time in this process, saving included
    error: TrimtabError | None = None
    expected_errors: tuple[float, ...] = ()  # relative, of predictions by the costs measured just before


class Run:
    """Runs a job on an executor (default: in this process), from its first iteration or from its last checkpoint.

    A given `plan` is used as it is; otherwise the job is planned, after a few iterations on shared GPUs if costs are
    not stated. `on_iteration` is called after every iteration, in the thread of `run`. `inputs(iteration, index)` is
    the input of components without predecessors.
    """

    def __init__(
        self,
        job: RunJob,
        folder: Path | None = None,
        executor: Executor | None = None,
        *,
        plan: Plan | None = None,
        resume: bool = False,
        on_iteration: Callable[[Iteration, Metrics], None] | None = None,
        inputs: Inputs | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        if resume and folder is None:
            raise InputError("a run is resumed from its folder, and none is named")
        self._job, self._workflow = job, job.job.workflow
        self._given_plan, self._path, self._resume = plan, folder, resume
        self._executor = executor if executor is not None else LocalExecutor()
        self._cluster = self._executor.nodes(job.job.cluster)
        self._on_iteration, self._inputs, self._on_event = on_iteration, inputs, on_event
        self._replanner: Replanner | None = None
        self._requests: queue.SimpleQueue[e.ReplanEvent] = queue.SimpleQueue()
        self._stop: Reason | None = None
        self._ending = False
        self._folder: RunFolder | None = None
        self._history = RunHistory()
        self._void = 0  # iterations of the resumed run after its checkpoint
        self._plan_since = 1
        self._here = time.perf_counter()
        self._here_s: dict[int, float] = {}
        self._expected_errors: list[float] = []  # of predictions by the costs measured just before
        self._saved_machine: ReplanMachine | None = None  # of the replanner, from the checkpoint
        self._measured = False  # costs that were not stated are measured and planned with
        self._losses = 0  # since the last iteration
        self._spans: dict[str, tuple[int, int]] = {}
        self._offsets: dict[str, int] = {}  # read position in each component's worker event log
        self._polled_at = 0.0
        self._emit_lock = threading.Lock()

    def stop(self, why: str = "stop requested") -> None:
        """End the run after the current iteration, with a checkpoint. From any thread."""
        self._stop = Reason(ReasonCode.by_hand, why)

    def request_replan(self, why: str = "requested") -> None:
        """Re-evaluate the plan when the current iteration ends; the answer is an event. From any thread."""
        self._requests.put(e.ReplanRequested(why))

    def run(self) -> RunEnd:
        """Run to the end. Raises only for errors found before anything has begun."""
        first = self._open()
        try:
            self._plan = self._first_plan()
            self._executor.open(self._job, self._path, self._emit)
        except BaseException:
            if self._folder is not None:
                self._folder.close()
            raise
        with stop_on_interrupt(self.stop, lambda: self._ending):
            state, reason, error = self._run_to_end(first)
            self._finish(state, reason)
        history = self._history
        iterations = tuple(history.iterations)
        off, since = tuple(self._expected_errors), self._plan_since
        return RunEnd(state, reason, iterations, self._plan, since, history.metrics, self._here_s, error, off)

    def _run_to_end(self, first: int) -> tuple[RunStatus, Reason, TrimtabError | None]:
        """Run the iterations; whatever ends the run is returned, not raised."""
        try:
            try:
                try:
                    self._begin(first)
                except ComponentLostError as lost:
                    first = self._recover(lost)
                self._all_iterations(first)
            finally:
                self._ending = True  # from here on Ctrl-C changes nothing
        except KeyboardInterrupt:
            sentence = f"stopped at once: iteration {self._done + 1} was not over, and does not count"
            return "stopped", Reason(ReasonCode.by_hand, sentence), None
        except ComponentError as fault:
            return "failed", Reason(_CODES.get(fault.fault_kind, ReasonCode.faulty), fault.what), fault
        except TrimtabError as refused:
            return "failed", Reason(ReasonCode.refused, refused.what), refused
        except OSError as full:
            error = InputError(f"the state cannot be saved: {full.strerror or full}", where=str(self._path))
            return "failed", Reason(ReasonCode.faulty, error.what), error
        except BaseException as broken:  # of ours, or of a callback: the folder is left consistent all the same
            self._finish("failed", Reason(ReasonCode.raised, f"crashed: {error_text(broken)}"))
            raise
        if self._replanner is not None and self._replanner.stop is not None:
            return "failed", self._replanner.stop, UnreachableError(self._replanner.stop.sentence)
        if self._stop is not None and self._done < self._job.iterations:
            return "stopped", self._stop, None
        return "done", Reason(ReasonCode.completed, f"all {self._job.iterations} iterations are done"), None

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _open(self) -> int:
        """Open the folder; returns the first iteration to run."""
        if self._path is not None:
            if self._resume:
                self._history = read_run(self._path)
                if self._history.left_out:
                    log.warning(self._history.left_out)
            self._folder = RunFolder(self._path, resume=self._resume)
            self._folder.write_job(self._job.text)
            logs = {name: event_log_path(self._path, name) for name in self._workflow.names}
            self._offsets = {name: path.stat().st_size for name, path in logs.items() if path.is_file()}
            clear_requests(self._path)
        names, job, saved = self._workflow.names, self._job, self._history.saved
        self._checkpointer = Checkpointer(
            self._folder, names, job.save_every, job.iterations, self._emit, job.step_limit_s
        )
        self._checkpointer.last_complete = saved
        self._void = self._history.void_after(saved)
        return saved + 1

    def _first_plan(self) -> Plan:
        """The initial plan; nothing has been started yet, so errors are raised."""
        if self._given_plan is not None:
            return self._given_plan
        known = self._history.planned and len(self._history.iterations) >= self._job.profile_iterations
        if self._job.unmeasured and known:
            self._measured, self._workflow = True, self._measured_workflow()
        if self._resume and self._path is not None and not self._has_to_measure():
            self._saved_machine = load_machine(self._path / LOOP, self._workflow, self._cluster, self._job.rules)
            if self._saved_machine is not None:
                return self._saved_machine.plan
        return self._fresh_plan()

    def _fresh_plan(self) -> Plan:
        """The best plan for the current cluster; while costs are unknown, one on shared GPUs to measure them."""
        job = PlacementJob(self._cluster, self._workflow)
        if self._has_to_measure():
            return shared_plan(job)
        space, outcome = best_plan(job)
        assert outcome.best is not None
        return to_plan(space, outcome.best)

    def _begin(self, first: int) -> None:
        if first > 1:
            self._emit("resumed", after=first - 1, void=self._void)
        else:
            self._emit("began", job=self._job.name, iterations=self._job.iterations, seed=self._job.seed)
        self._emit("cluster", why="first", leaving=[], deadline=None, nodes=nodes_facts(self._cluster))
        self._emit("plan", why="first", iteration=first, **plan_facts(self._plan))
        self._summarise("running", Reason(ReasonCode.began, "it runs"))
        self._make_components(PlacedPlan(self._plan, self._cluster), first - 1)

    def _make_components(self, to: PlacedPlan, saved: int) -> None:
        """Create all components, with their state of a checkpoint."""
        self._executor.place(self._workflow, to, saved + 1)
        if not saved or self._folder is None:
            return
        for name in self._workflow.names:
            state = self._folder.state(saved, name)
            if state is not None and self._executor.has(name, "load"):
                self._executor.call(name, "load", str(state))
        self._executor.sync_weights(self._workflow.weight_sync, saved)

    def _finish(self, state: str, reason: Reason) -> None:
        self._executor.close()
        if self._path is not None:
            self._emit_worker_events(self._path)
            clear_requests(self._path)
        self._emit("ended", state=state, code=reason.code.value, reason=reason.sentence, iteration=self._done)
        self._summarise(state, reason)
        if self._folder is not None:
            self._folder.close()

    # ---- iterations ----------------------------------------------------------------------------------------------

    @property
    def _done(self) -> int:
        return self._history.iterations[-1].number if self._history.iterations else 0

    @property
    def _is_ending(self) -> bool:
        return self._stop is not None or (self._replanner is not None and self._replanner.stop is not None)

    def _has_to_measure(self) -> bool:
        return self._given_plan is None and bool(self._job.unmeasured) and not self._measured

    def _all_iterations(self, first: int) -> None:
        """Run to the last iteration; with costs unknown, measure them first and plan with them."""
        last = self._job.iterations
        while not self._is_ending and first <= last:
            until = last
            try:
                if self._has_to_measure():
                    until = min(last, max(first, self._job.profile_iterations))
                elif self._replanner is None:
                    self._make_replanner(first)
                loaded = self._iterate(first, until)
                first = self._done + 1
                if not self._is_ending and first <= last:
                    self._next_plan(first, loaded)
            except ComponentLostError as lost:
                first = self._recover(lost)
        if self._stop is not None and self._done:
            self._checkpointer.complete(self._executor, self._done)
            self._checkpointer.finish(self._executor, lambda bucket, start_s, end_s: None)

    def _iterate(self, first: int, last: int) -> frozenset[str]:
        """Iterations `first` to `last` under one plan; returns the components on their GPUs at the end."""
        runner = IterationRunner(
            self._executor, self._workflow, self._plan, self._checkpointer, first, last, self._inputs
        )
        self._here = time.perf_counter()
        self._executor.drive(runner, self._poll, self._action_ended)
        self._checkpointer.finish(self._executor, runner.measurements.book)
        return runner.order.loaded

    def _poll(self) -> None:
        """Pass cluster changes and posted events to the replanner."""
        if self._replanner is not None:
            self._apply_cluster_changes(self._replanner)
            self._replanner.poll()

    def _apply_cluster_changes(self, replanner: Replanner) -> None:
        while (change := self._executor.cluster_change()) is not None:
            self._cluster = change.cluster
            replanner.cluster_changed(change)

    def _action_ended(self, runner: IterationRunner, now_s: float) -> None:
        """Report iterations that end with an action, and begin a requested stop."""
        self._poll_folder()
        self._checkpointer.poll(runner.measurements.book)
        while self._done < runner.order.finished:
            self._iteration_done(runner, self._done + 1, now_s)
        if self._is_ending or (self._replanner is not None and self._replanner.move is not None):
            with runner.lock:
                runner.order.stop_after(runner.order.finished)

    def _iteration_done(self, runner: IterationRunner, number: int, now_s: float) -> None:
        """Report an iteration. Only this thread begins actions, so idle components stay idle; others may end."""
        idle = tuple(name for name in self._workflow.names if runner.order.is_idle(name))
        is_due = self._checkpointer.is_due(number)
        extra = ("checkpoint",) if is_due and self._job.save_every > 1 else ()  # not if every iteration has one
        with runner.lock:
            for action, name, switch in self._executor.late_spans():
                runner.measurements.switched(action, name, *switch)
            iteration, metrics, sync_s, bars = runner.measurements.ended(number, now_s, extra)
        here = time.perf_counter()
        self._here_s[number], self._here = here - self._here, here
        self._history.add(iteration, metrics, sync_s)
        machine = self._replanner.machine if self._replanner is not None else None
        expected_s, stay_s = (machine.expected_s, machine.staying_s(iteration)) if machine is not None else (None, None)
        if expected_s is not None and not extra:
            self._expected_errors.append(iteration.wall_s / expected_s - 1)
        self._emit(
            "iteration",
            iteration=encode(iteration),
            here_s=round(self._here_s[number], 6),
            expected_s=finite_or_none(expected_s),
            stay_s=finite_or_none(stay_s),
            metrics=metrics,
            sync_s=round(sync_s, 6),
            bars=bars_facts(bars),
        )
        if is_due:  # after the event is written: a checkpoint is never ahead of the event log
            self._checkpointer.complete(self._executor, number)
            self._checkpointer.poll(runner.measurements.book)
            self._save_replanner()
        if self._on_iteration is not None:
            self._on_iteration(iteration, metrics)
        if self._replanner is not None:
            self._replanner.handle(e.IterationDone(iteration))
            self._replanner.poll()
        self._losses = 0
        for name in idle:  # components that bring their own workers get the GPU range that the replanner allows
            span = self._replanner.ranges.get(name) if self._replanner is not None else None
            if span is not None and self._spans.get(name) != span:
                if self._executor.has(name, "span"):
                    self._executor.call(name, "span", *span)
                self._spans[name] = span

    # ---- replanning and migration --------------------------------------------------------------------------------

    def _make_replanner(self, first: int) -> None:
        machine = self._saved_machine
        if machine is None or machine.plan != self._plan:
            machine = ReplanMachine(self._workflow, self._cluster, self._plan, self._job.rules)
        self._replanner = replanner = Replanner(machine, self._emit, self._executor.now, self._requests)
        replanner.handle(e.RunResumed(first - 1, self._job.iterations - first + 1))
        self._report_placement(replanner)
        self._apply_cluster_changes(replanner)

    def _report_placement(self, replanner: Replanner) -> None:
        if placements := self._executor.placements():
            replanner.handle(e.PlanPlaced(tuple(placements.items())))

    def _save_replanner(self) -> None:
        if self._replanner is not None and self._path is not None:
            save_machine(self._path / LOOP, self._replanner.machine)

    def _next_plan(self, first: int, loaded: frozenset[str]) -> None:
        """Another plan for the next iterations, after measuring or if the replanner migrates."""
        if self._has_to_measure():
            self._plan_measured(first, loaded)
            return
        replanner = self._replanner
        assert replanner is not None
        if replanner.move is None:  # begun and rolled back already, or the run ends
            self._executor.settle(self._plan, loaded)
            return
        here, there = replanner.machine.placed_plan, replanner.machine.moving_to
        assert there is not None
        if self._migration(here, there, replanner.move.touched, first, loaded).run(replanner):
            self._set_plan(replanner.machine.plan, first, "move")
            self._save_replanner()

    def _plan_measured(self, first: int, loaded: frozenset[str]) -> None:
        """Plan with measured costs and migrate; if that fails the plan stays."""
        self._measured, self._workflow = True, self._measured_workflow()
        before, after = self._plan, self._fresh_plan()
        touched = tuple(
            name for name in self._workflow.names if _placement_key(before, name) != _placement_key(after, name)
        )
        here, there = PlacedPlan(before, self._cluster), PlacedPlan(after, self._cluster)
        migration = self._migration(here, there, touched, first, loaded)
        try:
            for stage in STAGES:
                migration.do(stage)
        except ComponentError as fault:  # the old plan worked: it goes on
            self._emit("told", code=ReasonCode.rolled_back.value, reason=f"the plan stays as it is: {fault.what}")
            migration.undo()
            return
        finally:
            migration.end()
            self._executor.catch_up()
        self._set_plan(after, first, "measured")

    def _migration(
        self, before: PlacedPlan, after: PlacedPlan, touched: tuple[str, ...], first: int, loaded: frozenset[str]
    ) -> MigrationExecutor:
        return MigrationExecutor(
            self._executor, self._workflow, before, after, touched, first, loaded, inside=self._path
        )

    def _set_plan(self, plan: Plan, first: int, why: str) -> None:
        if self._replanner is not None:
            self._report_placement(self._replanner)
            plan = self._replanner.machine.plan
        self._plan, self._plan_since = plan, first
        self._emit("plan", why=why, iteration=first, **plan_facts(plan))

    def _measured_workflow(self) -> Workflow:
        """The workflow with measured costs, without the first iteration, which is a warm-up."""
        done, known_s = self._history.iterations, self._history.sync_s
        measured = done[1 : self._job.profile_iterations] or done
        syncs_s = [known_s[iteration.number] for iteration in measured if iteration.number in known_s]
        return with_costs(self._job.job.workflow, measured, self._job.unmeasured, syncs_s)

    # ---- losses --------------------------------------------------------------------------------------------------

    def _recover(self, lost: ComponentLostError) -> int:
        """Create all components anew under a plan that fits, from the last checkpoint; returns the next iteration."""
        while True:
            self._losses += 1
            if self._losses > MAX_LOSSES:
                raise lost
            self._checkpointer.void()
            saved = self._checkpointer.last_complete
            void = self._history.void_after(saved)
            self._emit("lost", component=lost.component, why=lost.what, after=saved, void=void)
            self._emit("resumed", after=saved, void=void)
            try:
                self._executor.end()
                to = self._fitting_plan(saved, lost)
                if not self._is_ending:
                    self._rebuild(to, saved)
                return saved + 1
            except ComponentLostError as again:
                lost = again

    def _fitting_plan(self, saved: int, lost: ComponentLostError) -> PlacedPlan:
        """The current plan if its GPUs are there; else what the replanner migrates to, once it finds one.

        A replanner in advise mode stops no run, so the wait here has a deadline.
        """
        replanner = self._replanner
        if replanner is None:
            before = self._cluster
            while (change := self._executor.cluster_change()) is not None:
                self._cluster = change.cluster
            return PlacedPlan(self._plan if self._cluster == before else self._fresh_plan(), self._cluster)
        replanner.handle(e.RunResumed(saved, self._job.iterations - saved))
        end = self._executor.now() + self._job.rules.wait_s + self._job.rules.rollback_limit_s
        while True:
            if self._executor.now() > end:
                raise UnreachableError(f"{lost.what}; no plan fits the remaining nodes in time")
            self._poll()
            machine, to = replanner.machine, replanner.machine.moving_to
            if to is not None and not isinstance(replanner.next_step, e.RollBackMigration):
                return to
            if not machine.drift.must_migrate() or self._is_ending:
                return machine.placed_plan
            if to is not None:
                replanner.rolled_back(0.0)  # there is nothing to roll back to: it searches another plan
            elif replanner.advised is not None:  # advise mode, but the old plan is gone
                replanner.handle(e.AdviceTaken())
                replanner.advised = None
            else:
                time.sleep(POLL_S)

    def _rebuild(self, to: PlacedPlan, saved: int) -> None:
        """Create all components with the state of a checkpoint; a migration under way is complete then."""
        replanner, began, plan = self._replanner, self._executor.now(), to.plan
        step = replanner.next_step if replanner is not None and replanner.move is not None else None
        try:
            self._make_components(to, saved)
        except ComponentLostError:
            if replanner is not None and isinstance(step, e.RunMigrationStage):
                replanner.stage_failed(step.stage, "a component was lost again")
            raise
        took_s = self._executor.now() - began
        if replanner is not None and isinstance(step, e.RollBackMigration):
            replanner.rolled_back(took_s)
        elif replanner is not None and step is not None:
            for stage in STAGES:
                if replanner.move is not None:
                    replanner.stage_done(stage, took_s if stage.value == "place" else 0.0)
            plan = replanner.machine.plan
        self._set_plan(plan, saved + 1, "lost")

    # ---- events --------------------------------------------------------------------------------------------------

    def _poll_folder(self) -> None:
        """Take requests from outside and events of components' own workers, at most every POLL_S."""
        if self._path is None or time.monotonic() - self._polled_at < POLL_S:
            return
        self._polled_at = time.monotonic()
        self._emit_worker_events(self._path)
        for request in take_requests(self._path, RUN_QUEUE):
            if request.get("ask") == "replan":
                why = str(request.get("why") or "requested")[:200]
                self._emit("told", code=ReasonCode.by_hand.value, reason=f"is the plan still right? ({why})")
                self.request_replan(why)
            else:
                self._emit("told", code=ReasonCode.refused.value, reason="a request was not understood")

    def _emit_worker_events(self, folder: Path) -> None:
        for name in self._workflow.names:
            lines, self._offsets[name] = read_event_log(event_log_path(folder, name), self._offsets.get(name, 0))
            for line in lines:
                at_s = self._executor.now() - max(0.0, time.time() - line.pop("at"))
                self._emit("worker", component=name, t_s=round(at_s, 4), **line)

    def _emit(self, event: str, **facts: Any) -> None:
        facts.setdefault("t_s", round(self._executor.now(), 4))
        with self._emit_lock:
            if self._folder is not None:
                self._folder.append_event(event, **facts)
            if self._on_event is not None:
                self._on_event(event, facts)

    def _summarise(self, state: str, reason: Reason) -> None:
        if self._folder is not None:
            history, plan, since = self._history, self._plan, self._plan_since
            off = self._expected_errors
            facts = summary_facts(state, reason, plan, history.iterations, history.metrics, since, off)
            self._folder.summarise({**facts, "saved": self._checkpointer.last_complete, "fault": self._folder.fault})


def _placement_key(plan: Plan, name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What identifies a component's placement: its GPUs and the components that share them."""
    return plan.placed(name).gpus, plan.group_of(name).components
