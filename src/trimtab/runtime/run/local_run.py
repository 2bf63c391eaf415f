"""A whole job in one process, without Ray: for debugging, for machines that have none, and for one GPU.

Components work one after another, in the order in which the plan would have them begin (`plan/placement/order.py`),
each with its real outputs. Times are those of the plan: what ran here after something that it need not have waited for
counts as if it had run beside it. So `wall_s` of an iteration is what the plan gives with the times measured, and
`here_s` what it took in this process; under a plan where all share the same GPUs the two are the same.

A run ends in one of three ways, each with its reason: done, stopped (Ctrl-C: once after the iteration under way, twice
at once) or failed. Whatever way it ends, the folder holds each iteration once, and a state to go on from.
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
from trimtab.runtime.run import control_files as asks
from trimtab.runtime.run.checkpoints import Checkpointer
from trimtab.runtime.run.clock import Clock, WallClock
from trimtab.runtime.run.component import ComponentError, said
from trimtab.runtime.run.components import ComponentLostError, ComponentSet, LocalComponents
from trimtab.runtime.run.engines.event_log import diary_of, read_diary
from trimtab.runtime.run.folder import PastRun, RunFolder, iteration_facts, read_run
from trimtab.runtime.run.iteration import Inputs, IterationRunner
from trimtab.runtime.run.job import RunJob, shared_plan, with_costs
from trimtab.runtime.run.measurements import Metrics, bars_facts, plan_facts, summary_facts
from trimtab.runtime.run.migration import MigrationExecutor, carry_out
from trimtab.runtime.run.replanner import Replanner, keep_machine, kept_machine, nodes_facts

log = logging.getLogger(__name__)

LOOP = "loop.json"
LOOK_S = 0.25  # between two looks into the folder, at what others have written there
RunStatus = Literal["running", "done", "stopped", "failed"]
_CODES = {"raised": ReasonCode.raised, "hung": ReasonCode.hung, "unhealthy": ReasonCode.unhealthy}


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: its iterations, each once, and why it did not go on."""

    state: RunStatus
    reason: Reason
    iterations: tuple[Iteration, ...]
    plan: Plan
    since: int = 1  # the first iteration under that plan
    metrics: Mapping[int, Metrics] = field(default_factory=dict)
    here_s: Mapping[int, float] = field(default_factory=dict)  # what iterations took in this process, saving included
    error: TrimtabError | None = None


class LocalRun:
    """Runs a job here, from its first iteration or from where its folder stands.

    `plan` is taken as it is; without one the job is planned, after a few iterations on shared GPUs where costs are not
    stated. `told` hears of every iteration as it ends, in the thread of `run`. `inputs(iteration, index)` is what
    components get that come after nobody.
    """

    def __init__(
        self,
        run: RunJob,
        folder: Path | None = None,
        *,
        plan: Plan | None = None,
        resume: bool = False,
        clock: Clock | None = None,
        told: Callable[[Iteration, Metrics], None] | None = None,
        inputs: Inputs | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        if resume and folder is None:
            raise InputError("a run is resumed from its folder, and none is named")
        self._job = run
        self._workflow: Workflow = run.job.workflow
        self._given = plan
        self._path = folder
        self._resume = resume
        self._clock: Clock = clock if clock is not None else WallClock()
        self._told = told
        self._on_event = on_event
        self._inputs = inputs
        self._loop: Replanner | None = None
        self._asked: list[str] = []
        self._stop: Reason | None = None
        self._ending = False
        self._folder: RunFolder | None = None
        self._past = PastRun()
        self._iterations: list[Iteration] = []
        self._metrics: dict[int, Metrics] = {}
        self._saving = Checkpointer(None, run.job.workflow.names, run.save_every, run.iterations, self._tell)
        self._plan_now: Plan | None = None
        self._plan_since = 1
        self._time_s = 0.0  # of the plan, since the run began
        self._here = time.perf_counter()
        self._here_s: dict[int, float] = {}
        self._sync_s: dict[int, float] = {}
        self._cluster = run.job.cluster
        self._kept: ReplanMachine | None = None  # what the loop knew when the run was left
        self._measured = False  # costs that were not stated are known, and planned with
        self._spans: dict[str, tuple[int, int]] = {}
        self._diaries: dict[str, int] = {}  # how far those of components' own workers were read
        self._looked = 0.0
        self._telling = threading.Lock()
        self._acted = self._clock.now()  # when the last act was over, by the clock

    def stop(self, why: str = "somebody asked for it") -> None:
        """End the run after the iteration that is under way, with its state saved. From any thread."""
        self._stop = Reason(ReasonCode.by_hand, why)

    def ask(self, why: str = "somebody asked") -> None:
        """Whether the plan is still right: the answer is told when the iteration under way is over. From any thread."""
        if self._loop is None:
            self._asked.append(why)
        else:
            self._loop.post(ReplanRequested(why))

    def run(self) -> RunEnd:
        """Run it to its end. Raises only for what is wrong before anything has begun."""
        first = self._open()
        try:
            plan = self._first_plan()
            crew = self._make_crew()
        except BaseException:
            if self._folder is not None:
                self._folder.close()
            raise
        with stop_on_interrupt(self.stop, lambda: self._ending):
            state, reason, error = self._to_its_end(crew, plan, first)
            crew.close()
            plan = self._plan_now or plan
            self._finish(state, reason, plan)
        return RunEnd(
            state, reason, tuple(self._iterations), plan, self._plan_since, self._metrics, self._here_s, error
        )

    def _to_its_end(self, crew: ComponentSet, plan: Plan, first: int) -> tuple[RunStatus, Reason, TrimtabError | None]:
        """All iterations, or as many as it comes to; whatever ends it is said, not raised."""
        try:
            try:
                try:
                    self._begin(crew, plan, first)
                except ComponentLostError as lost:
                    plan, first = self._recovered(crew, lost, plan)
                self._all_iterations(crew, plan, first)
            finally:
                self._ending = True  # from here on Ctrl-C changes nothing
        except KeyboardInterrupt:
            sentence = f"stopped at once: iteration {self._done + 1} was not over, and does not count"
            return "stopped", Reason(ReasonCode.by_hand, sentence), None
        except ComponentError as fault:
            return "failed", Reason(_CODES.get(fault.wrong, ReasonCode.faulty), fault.what), fault
        except TrimtabError as refused:
            return "failed", Reason(ReasonCode.refused, refused.what), refused
        except OSError as full:
            error = InputError(f"the state cannot be saved: {full.strerror or full}", where=str(self._path))
            return "failed", Reason(ReasonCode.faulty, error.what), error
        except BaseException as broken:  # of ours, or of whoever is told: the folder is left in order all the same
            crew.close()
            self._finish("failed", Reason(ReasonCode.raised, f"it broke off: {said(broken)}"), self._plan_now or plan)
            raise
        if self._loop is not None and self._loop.stop is not None:
            return "failed", self._loop.stop, UnreachableError(self._loop.stop.sentence)
        if self._stop is not None and self._done < self._job.iterations:
            return "stopped", self._stop, None
        return "done", Reason(ReasonCode.completed, f"all {self._job.iterations} iterations are done"), None

    def _make_crew(self) -> ComponentSet:
        return LocalComponents(self._job, self._clock, self._path)

    # ---- beginning and ending ------------------------------------------------------------------------------------

    def _open(self) -> int:
        """Open the folder; gives the first iteration to run."""
        if self._path is None:
            return 1
        if self._resume:
            self._past = read_run(self._path)
            if self._past.left_out:
                log.warning(self._past.left_out)
        self._folder = RunFolder(self._path, resume=self._resume)
        self._folder.keep_job(self._job.text)
        self._diaries = {name: size_of(diary_of(self._path, name)) for name in self._workflow.names}
        asks.forget(self._path)
        saved = self._past.saved
        self._saving = Checkpointer(
            self._folder, self._workflow.names, self._job.save_every, self._job.iterations, self._tell
        )
        self._saving.whole = saved
        self._iterations = [one for one in self._past.iterations if one.number <= saved]
        self._metrics = {number: dict(one) for number, one in self._past.metrics.items() if number <= saved}
        self._sync_s = dict(self._past.sync_s)
        return saved + 1

    def _first_plan(self) -> Plan:
        """The plan to begin with; nothing has been made yet, so whatever is wrong is raised."""
        if self._given is not None:
            return self._given
        if self._job.unmeasured and self._past.planned and self._costs_known():
            self._measured, self._workflow = True, self._measured_workflow()
        if self._resume and self._path is not None and not self._has_to_measure():
            self._kept = kept_machine(self._path / LOOP, self._workflow, self._cluster, self._job.rules)
            if self._kept is not None:
                return self._kept.plan
        return self._fresh_plan()

    def _fresh_plan(self) -> Plan:
        """The best plan for what there is; as long as costs are not known, one on shared GPUs to measure them."""
        best = shared_plan if self._has_to_measure() else _best
        return best(PlacementJob(self._cluster, self._workflow))

    def _begin(self, crew: ComponentSet, plan: Plan, first: int) -> None:
        """Make the components, and bring them to where the run stands."""
        self._plan_now = plan
        if first > 1:
            self._tell("resumed", after=first - 1, void=max(0, len(self._past.iterations) - len(self._iterations)))
        else:
            self._tell("began", job=self._job.name, iterations=self._job.iterations, seed=self._job.seed)
        self._tell("cluster", why="first", leaving=[], deadline=None, nodes=nodes_facts(self._cluster))
        self._tell("plan", why="first", iteration=first, **plan_facts(plan))
        self._summarise("running", Reason(ReasonCode.began, "it runs"), plan)
        crew.make(self._workflow, PlacedPlan(plan, self._cluster), first)
        if first == 1 or self._folder is None:
            return
        self._load_states(crew, first - 1)

    def _load_states(self, crew: ComponentSet, saved: int) -> None:
        """Bring everybody to the state after an iteration."""
        for name in self._workflow.names:
            state = None if self._folder is None else self._folder.state(saved, name)
            if state is not None and crew.has(name, "load"):
                crew.load(name, state)
        self._sync_now(crew, saved)

    def _sync_now(self, crew: ComponentSet, version: int) -> None:
        sync = self._workflow.weight_sync
        if sync is not None:
            weights, _ = crew.weights(sync.source)
            crew.sync(sync.target, weights, version)

    def _finish(self, state: str, reason: Reason, plan: Plan) -> None:
        if self._path is not None:
            self._tell_workers(self._path)
            asks.forget(self._path)
        self._tell("ended", state=state, code=reason.code.value, reason=reason.sentence, iteration=self._done)
        self._summarise(state, reason, plan)
        if self._folder is not None:
            self._folder.close()

    # ---- iterations ----------------------------------------------------------------------------------------------

    @property
    def _done(self) -> int:
        return self._iterations[-1].number if self._iterations else 0

    def _all_iterations(self, crew: ComponentSet, plan: Plan, first: int) -> None:
        """Run to the last iteration; with costs unknown, measure them first, and plan with them."""
        last = self._job.iterations
        while not self._ends and first <= last:
            until = last
            try:
                if self._has_to_measure():
                    until = min(last, max(first, self._job.profile_iterations))
                elif self._loop is None:
                    self._loop = self._make_loop(plan, first)
                loaded = self._iterate(crew, plan, first, until)
                first = self._done + 1
                if not self._ends and first <= last:
                    plan = self._next_plan(crew, plan, first, loaded)
            except ComponentLostError as lost:
                plan, first = self._recovered(crew, lost, plan)
        if self._stop is not None and self._done:
            self._saving.complete(crew, self._done)

    @property
    def _ends(self) -> bool:
        return self._stop is not None or (self._loop is not None and self._loop.stop is not None)

    def _has_to_measure(self) -> bool:
        return self._given is None and bool(self._job.unmeasured) and not self._measured

    def _recovered(self, crew: ComponentSet, lost: ComponentLostError, plan: Plan) -> tuple[Plan, int]:
        """Go on after a component was lost; gives the plan and the iteration to go on with."""
        raise lost  # in one process nobody is lost alone

    # ---- the loop, and moves -------------------------------------------------------------------------------------

    def _make_loop(self, plan: Plan, first: int) -> Replanner:
        machine = self._kept
        if machine is None or machine.plan != plan:
            machine = ReplanMachine(self._workflow, self._cluster, plan, self._job.rules)
        loop = Replanner(machine, self._tell, self._now)
        loop.began(first - 1, self._job.iterations - first + 1)
        while self._asked:
            loop.post(ReplanRequested(self._asked.pop(0)))
        return loop

    def _keep_loop(self) -> None:
        if self._loop is not None and self._path is not None:
            keep_machine(self._path / LOOP, self._loop.machine)

    def _next_plan(self, crew: ComponentSet, plan: Plan, first: int, loaded: frozenset[str]) -> Plan:
        """What the next iterations run under: another plan where costs are known now, or where the loop moves."""
        if self._has_to_measure():
            self._measured, self._workflow = True, self._measured_workflow()
            before, after = plan, self._fresh_plan()
            touched = tuple(name for name in self._workflow.names if _seat(before, name) != _seat(after, name))
            here, there = PlacedPlan(before, self._cluster), PlacedPlan(after, self._cluster)
            moving = self._moving(crew, here, there, touched, first, loaded)
            try:
                for stage in STAGES:
                    moving.do(stage)
            except ComponentError as fault:  # it ran well as it was: so it goes on
                self._tell("told", code=ReasonCode.rolled_back.value, reason=f"the plan stays as it is: {fault.what}")
                moving.undo()
                return before
            finally:
                moving.end()
                self._passed()
            self._settled(crew, after, first, "measured")
            return after
        loop = self._loop
        assert loop is not None
        if loop.move is None:  # it was begun and is rolled back already, or the run ends
            crew.settle(plan, loaded)
            return plan
        return self._moved(crew, loop, plan, first, loaded)

    def _moved(self, crew: ComponentSet, loop: Replanner, plan: Plan, first: int, loaded: frozenset[str]) -> Plan:
        """Carry out a move that has begun, and is drained by now; gives the plan that is in place then."""
        assert loop.move is not None
        here, there = loop.machine.sited, loop.machine.moving_to
        assert there is not None
        moving = self._moving(crew, here, there, loop.move.touched, first, loaded)
        if not carry_out(loop, moving, self._now, self._passed):
            return plan
        self._settled(crew, loop.machine.plan, first, "move")
        self._keep_loop()
        return loop.machine.plan

    def _moving(
        self,
        crew: ComponentSet,
        before: PlacedPlan,
        after: PlacedPlan,
        touched: tuple[str, ...],
        first: int,
        loaded: frozenset[str],
    ) -> MigrationExecutor:
        return MigrationExecutor(
            crew,
            self._workflow,
            before,
            after,
            touched,
            first,
            loaded,
            inside=self._path,
            sync=lambda: self._sync_now(crew, first - 1),
        )

    def _settled(self, crew: ComponentSet, plan: Plan, first: int, why: str) -> None:
        """Another plan is in place."""
        self._plan_now, self._plan_since = plan, first
        self._tell("plan", why=why, iteration=first, **plan_facts(plan))

    def _now(self) -> float:
        """Seconds of the run's timeline."""
        return self._time_s

    def _passed(self) -> None:
        """Something that is no act took time: so much later is it on the timeline."""
        now = self._clock.now()
        self._time_s += max(0.0, now - self._acted)
        self._acted = now

    def _costs_known(self) -> bool:
        return len(self._iterations) >= self._job.profile_iterations

    def _measured_workflow(self) -> Workflow:
        """The workflow with costs as measured; the first iteration is left out, since everything is cold in it."""
        measured = tuple(self._iterations[1 : self._job.profile_iterations]) or tuple(self._iterations)
        syncs_s = [self._sync_s[one.number] for one in measured if one.number in self._sync_s]
        return with_costs(self._job.job.workflow, measured, self._job.unmeasured, syncs_s)

    def _iterate(self, crew: ComponentSet, plan: Plan, first: int, last: int) -> frozenset[str]:
        """Iterations `first` to `last` under one plan; gives who is on its GPUs at the end."""
        acting = IterationRunner(
            crew,
            self._workflow,
            plan,
            self._saving,
            first=first,
            last=last,
            now_s=self._now(),
            inputs=self._inputs,
        )
        self._here = time.perf_counter()
        self._drive(acting)
        self._acted = self._clock.now()
        return acting.order.loaded

    def _drive(self, acting: IterationRunner) -> None:
        """Perform all acts: here one after another, timed as if they ran side by side."""
        for played in play(acting.order, acting.perform, self._time_s):
            self._act_ended(acting, played.end_s)

    def _act_ended(self, acting: IterationRunner, now_s: float) -> None:
        """An act is over: whatever iterations end with it are told, and a stop that was asked for is begun."""
        self._time_s = now_s
        self._look_around()
        while self._done < acting.order.finished:
            self._iteration_done(acting, self._done + 1, now_s)
        if self._ends or (self._loop is not None and self._loop.move is not None):
            with acting.lock:
                acting.order.stop_after(acting.order.finished)

    def _iteration_done(self, acting: IterationRunner, number: int, now_s: float) -> None:
        """Tell of an iteration. Only this thread begins acts, so who is idle stays so; others under way may end."""
        idle = tuple(name for name in self._workflow.names if acting.order.is_idle(name))
        acting.crew.check_health(idle)
        is_due = self._saving.is_due(number)
        extra = ("checkpoint",) if is_due and self._job.save_every > 1 else ()  # what is in each is no exception
        with acting.lock:
            iteration = acting.measuring.iteration(number, now_s, extra)
            metrics = acting.measuring.metrics(number)
            self._sync_s[number] = acting.measuring.sync_s(number)
            bars = bars_facts(acting.measuring.bars(number))
        here = time.perf_counter()
        self._here_s[number], self._here = here - self._here, here
        self._iterations.append(iteration)
        self._metrics[number] = metrics
        self._tell(
            "iteration",
            iteration=iteration_facts(iteration),
            here_s=round(self._here_s[number], 6),
            metrics=metrics,
            sync_s=round(self._sync_s[number], 6),
            bars=bars,
        )
        if is_due:  # after it is told: a state that counts never knows more than the events do
            self._saving.complete(acting.crew, number)
            self._keep_loop()
        if self._told is not None:
            self._told(iteration, metrics)
        if self._loop is not None:
            self._loop.iteration(iteration)
            self._loop.look()
        self._tell_ranges(acting.crew, idle)

    def _tell_ranges(self, crew: ComponentSet, names: Sequence[str]) -> None:
        """Tell components that bring their own workers what the loop lets them have."""
        for name in names:
            span = self._loop.ranges.get(name) if self._loop is not None else None
            if span is not None and self._spans.get(name) != span:
                crew.span(name, *span)
                self._spans[name] = span

    def _look_around(self) -> None:
        """What is asked from outside, and what became of components' own workers; looked for now and then."""
        if self._path is None or time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        self._tell_workers(self._path)
        for one in asks.taken(self._path, asks.RUN):
            if one.get("ask") == "replan":
                why = str(one.get("why") or "somebody asked")[:200]
                self._tell("told", code=ReasonCode.by_hand.value, reason=f"is the plan still right? ({why})")
                self.ask(why)
            else:
                self._tell("told", code=ReasonCode.refused.value, reason="something was asked that is not understood")

    def _tell_workers(self, folder: Path) -> None:
        for name in self._workflow.names:
            lines, self._diaries[name] = read_diary(diary_of(folder, name), self._diaries.get(name, 0))
            for line in lines:
                at_s = self._now() - max(0.0, time.time() - line.pop("at"))
                self._tell("worker", component=name, t_s=round(at_s, 4), **line)

    # ---- telling -------------------------------------------------------------------------------------------------

    def _tell(self, event: str, **facts: Any) -> None:
        facts.setdefault("t_s", round(self._now(), 4))
        with self._telling:
            if self._folder is not None:
                self._folder.tell(event, **facts)
            if self._on_event is not None:
                self._on_event(event, facts)

    def _summarise(self, state: str, reason: Reason, plan: Plan) -> None:
        if self._folder is not None:
            facts = summary_facts(state, reason, plan, self._iterations, self._metrics, self._plan_since)
            self._folder.summarise({**facts, "saved": self._saving.whole, "fault": self._folder.fault})


def _seat(plan: Plan, name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What makes a component's place another one: its GPUs, and who shares them."""
    company = next((group.components for group in plan.groups if name in group.components), (name,))
    return plan.placed(name).gpus, company


def size_of(path: Path) -> int:
    """Bytes of a file; none where there is none."""
    return path.stat().st_size if path.is_file() else 0


def _best(job: PlacementJob) -> Plan:
    space, outcome = best_plan(job)
    assert outcome.best is not None
    return to_plan(space, outcome.best)
