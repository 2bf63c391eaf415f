"""Runs a whole job in one process, without Ray: for debugging, for machines without Ray, and for one GPU.

Components run one after another, in the order in which the plan would start them (`plan/placement/order.py`), with
their real outputs. Times are those of the plan: work that ran here after something it need not have waited for counts
as if it had run in parallel. So `wall_s` of an iteration is the plan's time with measured costs, and `here_s` the time
in this process; the two are equal if all components share the same GPUs.

A run ends as done, stopped (Ctrl-C: once after the current iteration, twice at once) or failed, with a reason. In every
case the folder holds each iteration once and a checkpoint to resume from.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.replan.events import ReplanRequested
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import Plan
from trimtab.model.run import STAGES, Iteration
from trimtab.model.workflow import PlacementJob, Workflow
from trimtab.plan.placement.order import play
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.procs.interrupts import stop_on_interrupt
from trimtab.runtime.run import control_files
from trimtab.runtime.run.checkpoints import Checkpointer
from trimtab.runtime.run.clock import Clock, WallClock
from trimtab.runtime.run.component import ComponentError, error_text
from trimtab.runtime.run.components import ComponentLostError, ComponentSet, LocalComponents
from trimtab.runtime.run.engines.event_log import event_log_path, read_event_log
from trimtab.runtime.run.folder import PastRun, RunFolder, iteration_facts, read_run
from trimtab.runtime.run.iteration import Inputs, IterationRunner
from trimtab.runtime.run.job import RunJob, shared_plan, with_costs
from trimtab.runtime.run.measurements import Metrics, bars_facts, plan_facts, summary_facts
from trimtab.runtime.run.migration import MigrationExecutor, run_migration
from trimtab.runtime.run.replanner import Replanner, load_machine, nodes_facts, save_machine

log = logging.getLogger(__name__)

LOOP = "loop.json"
POLL_S = 0.25  # between two polls of the run folder
RunStatus = Literal["running", "done", "stopped", "failed"]
_CODES = {"raised": ReasonCode.raised, "hung": ReasonCode.hung, "unhealthy": ReasonCode.unhealthy}


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: its iterations, each once, and the reason."""

    state: RunStatus
    reason: Reason
    iterations: tuple[Iteration, ...]
    plan: Plan
    since: int = 1  # the first iteration under `plan`
    metrics: Mapping[int, Metrics] = field(default_factory=dict)
    here_s: Mapping[int, float] = field(default_factory=dict)  # wall time in this process, saving included
    error: TrimtabError | None = None


class LocalRun:
    """Runs a job here, from its first iteration or from its last checkpoint.

    A given `plan` is used as it is; otherwise the job is planned, after a few iterations on shared GPUs if costs are
    not stated. `on_iteration` is called after every iteration, in the thread of `run`. `inputs(iteration, index)` is
    the input of components without predecessors.
    """

    def __init__(
        self,
        run: RunJob,
        folder: Path | None = None,
        *,
        plan: Plan | None = None,
        resume: bool = False,
        clock: Clock | None = None,
        on_iteration: Callable[[Iteration, Metrics], None] | None = None,
        inputs: Inputs | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        if resume and folder is None:
            raise InputError("a run is resumed from its folder, and none is named")
        self._job = run
        self._workflow: Workflow = run.job.workflow
        self._given_plan = plan
        self._path = folder
        self._resume = resume
        self._clock: Clock = clock if clock is not None else WallClock()
        self._on_iteration = on_iteration
        self._on_event = on_event
        self._inputs = inputs
        self._replanner: Replanner | None = None
        self._early_requests: list[str] = []
        self._stop: Reason | None = None
        self._ending = False
        self._folder: RunFolder | None = None
        self._past = PastRun()
        self._iterations: list[Iteration] = []
        self._metrics: dict[int, Metrics] = {}
        self._checkpointer = Checkpointer(None, run.job.workflow.names, run.save_every, run.iterations, self._emit)
        self._plan_now: Plan | None = None
        self._plan_since = 1
        self._time_s = 0.0  # the plan's time since the run began
        self._here = time.perf_counter()
        self._here_s: dict[int, float] = {}
        self._sync_s: dict[int, float] = {}
        self._cluster = run.job.cluster
        self._saved_machine: ReplanMachine | None = None  # of the replanner, from the checkpoint
        self._measured = False  # costs that were not stated are measured and planned with
        self._spans: dict[str, tuple[int, int]] = {}
        self._offsets: dict[str, int] = {}  # read position in each component's worker event log
        self._polled_at = 0.0
        self._emit_lock = threading.Lock()
        self._last_action_s = self._clock.now()  # when the last action ended, by the run's clock

    def stop(self, why: str = "stop requested") -> None:
        """End the run after the current iteration, with a checkpoint. From any thread."""
        self._stop = Reason(ReasonCode.by_hand, why)

    def request_replan(self, why: str = "requested") -> None:
        """Re-evaluate the plan when the current iteration ends; the answer is an event. From any thread."""
        if self._replanner is None:
            self._early_requests.append(why)
        else:
            self._replanner.post(ReplanRequested(why))

    def run(self) -> RunEnd:
        """Run to the end. Raises only for errors found before anything has begun."""
        first = self._open()
        try:
            plan = self._first_plan()
            components = self._make_components()
        except BaseException:
            if self._folder is not None:
                self._folder.close()
            raise
        with stop_on_interrupt(self.stop, lambda: self._ending):
            state, reason, error = self._run_to_end(components, plan, first)
            components.close()
            plan = self._plan_now or plan
            self._finish(state, reason, plan)
        return RunEnd(
            state, reason, tuple(self._iterations), plan, self._plan_since, self._metrics, self._here_s, error
        )

    def _run_to_end(
        self, components: ComponentSet, plan: Plan, first: int
    ) -> tuple[RunStatus, Reason, TrimtabError | None]:
        """Run the iterations; whatever ends the run is returned, not raised."""
        try:
            try:
                try:
                    self._begin(components, plan, first)
                except ComponentLostError as lost:
                    plan, first = self._recover(components, lost, plan)
                self._all_iterations(components, plan, first)
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
            components.close()
            self._finish("failed", Reason(ReasonCode.raised, f"crashed: {error_text(broken)}"), self._plan_now or plan)
            raise
        if self._replanner is not None and self._replanner.stop is not None:
            return "failed", self._replanner.stop, UnreachableError(self._replanner.stop.sentence)
        if self._stop is not None and self._done < self._job.iterations:
            return "stopped", self._stop, None
        return "done", Reason(ReasonCode.completed, f"all {self._job.iterations} iterations are done"), None

    def _make_components(self) -> ComponentSet:
        return LocalComponents(self._job, self._clock, self._path)

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _open(self) -> int:
        """Open the folder; returns the first iteration to run."""
        if self._path is None:
            return 1
        if self._resume:
            self._past = read_run(self._path)
            if self._past.left_out:
                log.warning(self._past.left_out)
        self._folder = RunFolder(self._path, resume=self._resume)
        self._folder.write_job(self._job.text)
        self._offsets = {name: size_of(event_log_path(self._path, name)) for name in self._workflow.names}
        control_files.clear_requests(self._path)
        saved = self._past.saved
        self._checkpointer = Checkpointer(
            self._folder, self._workflow.names, self._job.save_every, self._job.iterations, self._emit
        )
        self._checkpointer.last_complete = saved
        self._iterations = [iteration for iteration in self._past.iterations if iteration.number <= saved]
        self._metrics = {number: dict(figures) for number, figures in self._past.metrics.items() if number <= saved}
        self._sync_s = dict(self._past.sync_s)
        return saved + 1

    def _first_plan(self) -> Plan:
        """The initial plan; nothing has been started yet, so errors are raised."""
        if self._given_plan is not None:
            return self._given_plan
        if self._job.unmeasured and self._past.planned and self._costs_known():
            self._measured, self._workflow = True, self._measured_workflow()
        if self._resume and self._path is not None and not self._has_to_measure():
            self._saved_machine = load_machine(self._path / LOOP, self._workflow, self._cluster, self._job.rules)
            if self._saved_machine is not None:
                return self._saved_machine.plan
        return self._fresh_plan()

    def _fresh_plan(self) -> Plan:
        """The best plan for the current cluster; while costs are unknown, one on shared GPUs to measure them."""
        best = shared_plan if self._has_to_measure() else _best
        return best(PlacementJob(self._cluster, self._workflow))

    def _begin(self, components: ComponentSet, plan: Plan, first: int) -> None:
        """Create the components and restore their state."""
        self._plan_now = plan
        if first > 1:
            self._emit("resumed", after=first - 1, void=max(0, len(self._past.iterations) - len(self._iterations)))
        else:
            self._emit("began", job=self._job.name, iterations=self._job.iterations, seed=self._job.seed)
        self._emit("cluster", why="first", leaving=[], deadline=None, nodes=nodes_facts(self._cluster))
        self._emit("plan", why="first", iteration=first, **plan_facts(plan))
        self._summarise("running", Reason(ReasonCode.began, "it runs"), plan)
        components.make(self._workflow, PlacedPlan(plan, self._cluster), first)
        if first == 1 or self._folder is None:
            return
        self._load_states(components, first - 1)

    def _load_states(self, components: ComponentSet, saved: int) -> None:
        for name in self._workflow.names:
            state = None if self._folder is None else self._folder.state(saved, name)
            if state is not None and components.has(name, "load"):
                components.load(name, state)
        self._sync_now(components, saved)

    def _sync_now(self, components: ComponentSet, version: int) -> None:
        sync = self._workflow.weight_sync
        if sync is not None:
            weights, _ = components.weights(sync.source)
            components.sync(sync.target, weights, version)

    def _finish(self, state: str, reason: Reason, plan: Plan) -> None:
        if self._path is not None:
            self._emit_worker_events(self._path)
            control_files.clear_requests(self._path)
        self._emit("ended", state=state, code=reason.code.value, reason=reason.sentence, iteration=self._done)
        self._summarise(state, reason, plan)
        if self._folder is not None:
            self._folder.close()

    # ---- iterations ----------------------------------------------------------------------------------------------

    @property
    def _done(self) -> int:
        return self._iterations[-1].number if self._iterations else 0

    def _all_iterations(self, components: ComponentSet, plan: Plan, first: int) -> None:
        """Run to the last iteration; with costs unknown, measure them first and plan with them."""
        last = self._job.iterations
        while not self._is_ending and first <= last:
            until = last
            try:
                if self._has_to_measure():
                    until = min(last, max(first, self._job.profile_iterations))
                elif self._replanner is None:
                    self._replanner = self._make_replanner(plan, first)
                loaded = self._iterate(components, plan, first, until)
                first = self._done + 1
                if not self._is_ending and first <= last:
                    plan = self._next_plan(components, plan, first, loaded)
            except ComponentLostError as lost:
                plan, first = self._recover(components, lost, plan)
        if self._stop is not None and self._done:
            self._checkpointer.complete(components, self._done)

    @property
    def _is_ending(self) -> bool:
        return self._stop is not None or (self._replanner is not None and self._replanner.stop is not None)

    def _has_to_measure(self) -> bool:
        return self._given_plan is None and bool(self._job.unmeasured) and not self._measured

    def _recover(self, components: ComponentSet, lost: ComponentLostError, plan: Plan) -> tuple[Plan, int]:
        """Continue after a component was lost; returns plan and iteration to continue with."""
        raise lost  # all components share this process

    # ---- replanning and migration --------------------------------------------------------------------------------

    def _make_replanner(self, plan: Plan, first: int) -> Replanner:
        machine = self._saved_machine
        if machine is None or machine.plan != plan:
            machine = ReplanMachine(self._workflow, self._cluster, plan, self._job.rules)
        replanner = Replanner(machine, self._emit, self._now)
        replanner.began(first - 1, self._job.iterations - first + 1)
        while self._early_requests:
            replanner.post(ReplanRequested(self._early_requests.pop(0)))
        return replanner

    def _save_replanner(self) -> None:
        if self._replanner is not None and self._path is not None:
            save_machine(self._path / LOOP, self._replanner.machine)

    def _next_plan(self, components: ComponentSet, plan: Plan, first: int, loaded: frozenset[str]) -> Plan:
        """The plan of the next iterations: another one after measuring, or if the replanner migrates."""
        if self._has_to_measure():
            self._measured, self._workflow = True, self._measured_workflow()
            before, after = plan, self._fresh_plan()
            touched = tuple(
                name for name in self._workflow.names if _placement_key(before, name) != _placement_key(after, name)
            )
            here, there = PlacedPlan(before, self._cluster), PlacedPlan(after, self._cluster)
            migration = self._make_migration(components, here, there, touched, first, loaded)
            try:
                for stage in STAGES:
                    migration.do(stage)
            except ComponentError as fault:  # the old plan worked: it goes on
                self._emit("told", code=ReasonCode.rolled_back.value, reason=f"the plan stays as it is: {fault.what}")
                migration.undo()
                return before
            finally:
                migration.end()
                self._advance_clock()
            self._set_plan(components, after, first, "measured")
            return after
        replanner = self._replanner
        assert replanner is not None
        if replanner.move is None:  # begun and rolled back already, or the run ends
            components.settle(plan, loaded)
            return plan
        return self._migrate(components, replanner, plan, first, loaded)

    def _migrate(
        self, components: ComponentSet, replanner: Replanner, plan: Plan, first: int, loaded: frozenset[str]
    ) -> Plan:
        """Execute a migration that has begun and is drained; returns the plan in place afterwards."""
        assert replanner.move is not None
        here, there = replanner.machine.placed_plan, replanner.machine.moving_to
        assert there is not None
        migration = self._make_migration(components, here, there, replanner.move.touched, first, loaded)
        if not run_migration(replanner, migration, self._now, self._advance_clock):
            return plan
        self._set_plan(components, replanner.machine.plan, first, "move")
        self._save_replanner()
        return replanner.machine.plan

    def _make_migration(
        self,
        components: ComponentSet,
        before: PlacedPlan,
        after: PlacedPlan,
        touched: tuple[str, ...],
        first: int,
        loaded: frozenset[str],
    ) -> MigrationExecutor:
        return MigrationExecutor(
            components,
            self._workflow,
            before,
            after,
            touched,
            first,
            loaded,
            inside=self._path,
            sync=lambda: self._sync_now(components, first - 1),
        )

    def _set_plan(self, components: ComponentSet, plan: Plan, first: int, why: str) -> None:
        self._plan_now, self._plan_since = plan, first
        self._emit("plan", why=why, iteration=first, **plan_facts(plan))

    def _now(self) -> float:
        return self._time_s

    def _advance_clock(self) -> None:
        """Account time spent outside of actions on the timeline."""
        now = self._clock.now()
        self._time_s += max(0.0, now - self._last_action_s)
        self._last_action_s = now

    def _costs_known(self) -> bool:
        return len(self._iterations) >= self._job.profile_iterations

    def _measured_workflow(self) -> Workflow:
        """The workflow with measured costs, without the first iteration, which is a warm-up."""
        measured = tuple(self._iterations[1 : self._job.profile_iterations]) or tuple(self._iterations)
        syncs_s = [self._sync_s[iteration.number] for iteration in measured if iteration.number in self._sync_s]
        return with_costs(self._job.job.workflow, measured, self._job.unmeasured, syncs_s)

    def _iterate(self, components: ComponentSet, plan: Plan, first: int, last: int) -> frozenset[str]:
        """Iterations `first` to `last` under one plan; returns the components on their GPUs at the end."""
        runner = IterationRunner(
            components,
            self._workflow,
            plan,
            self._checkpointer,
            first=first,
            last=last,
            now_s=self._now(),
            inputs=self._inputs,
        )
        self._here = time.perf_counter()
        self._drive(runner)
        self._last_action_s = self._clock.now()
        return runner.order.loaded

    def _drive(self, runner: IterationRunner) -> None:
        """Run all actions: here one after another, timed as if they ran in parallel."""
        for played in play(runner.order, runner.perform, self._time_s):
            self._action_ended(runner, played.end_s)

    def _action_ended(self, runner: IterationRunner, now_s: float) -> None:
        """Report iterations that end with an action, and begin a requested stop."""
        self._time_s = now_s
        self._poll_folder()
        while self._done < runner.order.finished:
            self._iteration_done(runner, self._done + 1, now_s)
        if self._is_ending or (self._replanner is not None and self._replanner.move is not None):
            with runner.lock:
                runner.order.stop_after(runner.order.finished)

    def _iteration_done(self, runner: IterationRunner, number: int, now_s: float) -> None:
        """Report an iteration. Only this thread begins actions, so idle components stay idle; others may end."""
        idle = tuple(name for name in self._workflow.names if runner.order.is_idle(name))
        runner.components.check_health(idle)
        is_due = self._checkpointer.is_due(number)
        extra = ("checkpoint",) if is_due and self._job.save_every > 1 else ()  # not if every iteration has one
        with runner.lock:
            iteration = runner.measurements.iteration(number, now_s, extra)
            metrics = runner.measurements.metrics(number)
            self._sync_s[number] = runner.measurements.sync_s(number)
            bars = bars_facts(runner.measurements.bars(number))
        here = time.perf_counter()
        self._here_s[number], self._here = here - self._here, here
        self._iterations.append(iteration)
        self._metrics[number] = metrics
        self._emit(
            "iteration",
            iteration=iteration_facts(iteration),
            here_s=round(self._here_s[number], 6),
            metrics=metrics,
            sync_s=round(self._sync_s[number], 6),
            bars=bars,
        )
        if is_due:  # after the event is written: a checkpoint is never ahead of the event log
            self._checkpointer.complete(runner.components, number)
            self._save_replanner()
        if self._on_iteration is not None:
            self._on_iteration(iteration, metrics)
        if self._replanner is not None:
            self._replanner.iteration(iteration)
            self._replanner.poll()
        self._send_gpu_ranges(runner.components, idle)

    def _send_gpu_ranges(self, components: ComponentSet, names: Sequence[str]) -> None:
        """Tell components that bring their own workers the GPU range that the replanner allows."""
        for name in names:
            span = self._replanner.ranges.get(name) if self._replanner is not None else None
            if span is not None and self._spans.get(name) != span:
                components.span(name, *span)
                self._spans[name] = span

    def _poll_folder(self) -> None:
        """Take requests from outside and events of components' own workers, at most every POLL_S."""
        if self._path is None or time.monotonic() - self._polled_at < POLL_S:
            return
        self._polled_at = time.monotonic()
        self._emit_worker_events(self._path)
        for request in control_files.take_requests(self._path, control_files.RUN):
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
                at_s = self._now() - max(0.0, time.time() - line.pop("at"))
                self._emit("worker", component=name, t_s=round(at_s, 4), **line)

    # ---- events --------------------------------------------------------------------------------------------------

    def _emit(self, event: str, **facts: Any) -> None:
        facts.setdefault("t_s", round(self._now(), 4))
        with self._emit_lock:
            if self._folder is not None:
                self._folder.append_event(event, **facts)
            if self._on_event is not None:
                self._on_event(event, facts)

    def _summarise(self, state: str, reason: Reason, plan: Plan) -> None:
        if self._folder is not None:
            facts = summary_facts(state, reason, plan, self._iterations, self._metrics, self._plan_since)
            self._folder.summarise({**facts, "saved": self._checkpointer.last_complete, "fault": self._folder.fault})


def _placement_key(plan: Plan, name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What identifies a component's placement: its GPUs and the components that share them."""
    group = next((group.components for group in plan.groups if name in group.components), (name,))
    return plan.placed(name).gpus, group


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _best(job: PlacementJob) -> Plan:
    space, outcome = best_plan(job)
    assert outcome.best is not None
    return to_plan(space, outcome.best)
