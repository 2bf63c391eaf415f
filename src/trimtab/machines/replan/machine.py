"""Replan machine: keeps a run on the best plan while costs and cluster change, by migrations.

The transition that must not exist is from one plan to another without all stages of a migration done: until the last
stage is done the old plan is in place, and a migration that fails at any stage ends there again. What must never happen
besides: an iteration counted twice; two migrations at once; a migration for noise, for periodic work, within the dwell
time or without a gain that pays for it (only a plan whose GPUs are gone or will go must migrate at any cost); a wait
without a deadline.

`estimates` measures costs, `decision` weighs gain against cost, `migration` has the stages, `placed_plan` maps plans to
changing clusters, `state` is the state.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

from trimtab.core.codec import decode
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.machine import Machine, earliest, on
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry, record
from trimtab.machines.replan import events as e
from trimtab.machines.replan.decision import ReplanDecision
from trimtab.machines.replan.drift import DriftMonitor
from trimtab.machines.replan.estimates import JUMP, CostTrack
from trimtab.machines.replan.explain import gone_reason
from trimtab.machines.replan.migration import MigrationTracker, OngoingMigration
from trimtab.machines.replan.placed_plan import PlacedPlan, changes, gpu_slots, on_current_gpus, with_gpu_slots, without
from trimtab.machines.replan.state import PromisedGain, ReplanState, RunState
from trimtab.model.plan import FrameworkRules, Plan
from trimtab.model.run import STAGES, CostEstimate, DecisionNumbers, Iteration, Migration, ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Workflow, check_workflow, unknown_component

RUN = "run"  # subject of the run's own story
STORIES_KEPT = 21  # of the run and its latest migrations


class ReplanMachine(Machine[ReplanState, e.ReplanEvent, e.ReplanInstruction]):
    """The plan of one run."""

    EVENTS = e.ReplanEvent

    def __init__(
        self,
        workflow: Workflow,
        cluster: Cluster,
        plan: Plan,
        rules: ReplanRules = ReplanRules(),  # noqa: B008 -- it is frozen
        allowed: FrameworkRules | None = None,
        state: ReplanState | None = None,
    ) -> None:
        """`plan` has ranks of `cluster`; `allowed` are the framework's rules, if any; `state` is that of a dump."""
        check_workflow(workflow)
        self.rules = rules
        self.workflow = workflow
        if state is None:
            run = RunState(PlacedPlan(plan, cluster), cluster, dict.fromkeys(workflow.names, 1.0))
            run.first = run.running
            state = ReplanState(None, 0, [], run, {name: CostTrack() for name in workflow.names}, {RUN: []})
        self._run = state.run
        self.drift = DriftMonitor(state, workflow, rules, allowed)
        out: list[e.ReplanInstruction] = []
        outcomes = (self._moving_to_arrived, self._rolling_to_old, self._to_stuck)
        self._moves = MigrationTracker(rules, state, state.run, out, *outcomes)
        super().__init__(state, state.run, out, self._moves)

    @classmethod
    def load(
        cls,
        data: dict[str, Any],
        workflow: Workflow,
        rules: ReplanRules = ReplanRules(),  # noqa: B008 -- it is frozen
        allowed: FrameworkRules | None = None,
    ) -> ReplanMachine:
        state = decode(ReplanState, data)
        return cls(workflow, state.run.cluster, state.run.running.plan, rules, allowed, state)

    def next_deadline(self) -> float | None:
        run, moving = self._run, self.state.moving
        if run.stopped is not None:
            return None
        return earliest(moving.deadline if moving is not None else None, run.retry_at, run.wait_until)

    # ---- events of the run -----------------------------------------------------------------------------------

    @on(e.RunResumed)
    def _on_run_resumed(self, event: e.RunResumed) -> None:
        if event.iteration < 0 or (event.remaining is not None and event.remaining < 0):
            raise InputError("iteration and remaining must be 0 or more", where="RunResumed")
        run = self._run
        run.done, run.remaining = event.iteration, event.remaining
        run.moved_at = None if run.moved_at is None else min(run.moved_at, run.done)
        run.stopped = run.retry_at = run.wait_until = None
        run.failed_tries, run.is_cold = 0, True
        self.drift.estimates.forget_after(run.done)
        moving = self.state.moving
        if moving is not None:
            if moving.failed is None:
                self._moves.fail("the run was resumed during the migration")
            else:
                self._moves.roll_back()
            return
        self._out.extend(self.drift.ranges())
        if self.drift.must_migrate():
            self._forced()

    @on(e.IterationDone)
    def _on_iteration_done(self, event: e.IterationDone) -> None:
        iteration, run = event.iteration, self._run
        _check_iteration(iteration, self.workflow)
        if iteration.number <= run.done:
            return  # already counted
        if iteration.number > run.done + 1:
            hint = f"report iteration {run.done + 1} first, or RunResumed after {iteration.number - 1}"
            raise InputError(f"iteration {iteration.number} follows {run.done}: iterations are missing", hint=hint)
        run.done = iteration.number
        if run.remaining is not None:
            run.remaining = max(0, run.remaining - 1)
        judged = self.drift.take(iteration, moving=self.state.moving is not None)
        if judged is not None:
            self._out.append(judged)
            if (short := self.drift.shortfall(judged)) is not None:
                self._notify(short)
        if run.stopped is None:
            self._decide()

    @on(e.ClusterChanged)
    def _on_cluster_changed(self, event: e.ClusterChanged) -> None:
        _check_cluster(event)
        run = self._run
        if (event.cluster, event.leaving, event.deadline) == (run.cluster, run.leaving, run.leave_by):
            return
        if event.cluster != run.cluster:
            run.cluster_change = f"{event.why.value}: {event.cluster.gpus} GPUs, there were {run.cluster.gpus}"
        there = set(gpu_slots(event.cluster))
        gone = {node for node, gpu in self.drift.used_slots() if (node, gpu) not in there}
        run.cluster, run.leaving, run.leave_by = event.cluster, event.leaving, event.deadline
        if not run.lost and not gone:
            moved = run.running.on(event.cluster)
            if moved is None:  # a node of the same name has another kind of GPU: a different node
                gone = {node for node, _ in self.drift.used_slots()}
            else:
                run.running = moved
        run.lost = tuple(sorted({*run.lost, *gone}))
        self.drift.invalidate()
        run.failed_tries, run.retry_at = 0, None
        run.advised = None
        moving = self.state.moving
        if moving is not None:
            if moving.failed is None and not self.drift.is_available(moving.to):
                self._moves.fail("GPUs of the new plan are gone or will go")
            return
        if run.stopped is None:
            self._decide()

    @on(e.ReplanRequested)
    def _on_asked(self, event: e.ReplanRequested) -> None:
        if self._run.stopped is not None:
            self._notify(self._run.stopped)
            return
        self._decide(asked=True)

    @on(e.RemainingChanged)
    def _on_remaining_changed(self, event: e.RemainingChanged) -> None:
        if event.iterations is not None and event.iterations < 0:
            raise InputError("remaining iterations must be 0 or more", where="RemainingChanged")
        self._run.remaining = event.iterations

    @on(e.GpuRangeUsed)
    def _on_range_used(self, event: e.GpuRangeUsed) -> None:
        if event.component not in self.rules.elastic or event.component not in self.workflow.names:
            raise InputError(f"{event.component} is not elastic", hint="name it in the rules of the run: elastic")
        self._run.used[event.component] = event.gpus
        for gpu_range in self.drift.ranges():
            if gpu_range.component == event.component and not gpu_range.min_gpus <= event.gpus <= gpu_range.max_gpus:
                self._out.append(gpu_range)

    @on(e.PlanPlaced)
    def _on_seated(self, event: e.PlanPlaced) -> None:
        run = self._run
        if run.lost or self.state.moving is not None:
            raise InputError("no plan is in place", where="PlanPlaced")
        try:
            run.running = with_gpu_slots(run.running, dict(event.where))
        except ValueError as error:
            raise InputError(str(error), where="PlanPlaced") from None
        self.drift.invalidate()

    @on(e.AdviceTaken)
    def _on_advice_taken(self, event: e.AdviceTaken) -> None:
        run = self._run
        if run.advised is None or self.state.moving is not None:
            raise InputError("no advice is open", where="AdviceTaken")
        self._set_plan(run.advised, run.advised_levels)
        self._write(RUN, "moved", Reason(ReasonCode.arrived, f"the advice was taken: {run.running.plan.describe()}"))

    @on(e.ReplanTick)
    def _on_tick(self, event: e.ReplanTick) -> None:
        run = self._run
        if run.stopped is not None:
            return
        self._moves.late()
        if run.wait_until is not None and run.wait_until <= run.now and run.stopped is None:
            waited = f"nothing that fits came within {self.rules.wait_s:g} s"
            self._to_stopped(Reason(ReasonCode.stuck, f"{gone_reason(run).sentence}; {waited}"))
        elif run.retry_at is not None and run.retry_at <= run.now and self.state.moving is None:
            run.retry_at = None
            self._decide()

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _decide(self, asked: bool = False) -> None:
        if self.state.moving is not None:
            self._stay(Reason(ReasonCode.moving, f"move {self.state.begun} is under way"), DecisionNumbers())
            return
        if self.drift.must_migrate():
            self._forced()
            return
        run, rules = self._run, self.rules
        measured = self.drift.estimates.measured
        if measured < rules.least_iterations and not asked and not run.cluster_change:
            text = f"{measured} of {rules.least_iterations} iterations are measured"
            self._stay(Reason(ReasonCode.too_few, text), DecisionNumbers())
            return
        decision = self.drift.decide()
        numbers = decision.numbers
        if decision.to is None:
            self._stay(decision.reason, numbers)
            return
        bias = self.drift.bias
        if bias is not None and not 1 / (1 + rules.trust) <= bias <= 1 + rules.trust:
            text = f"an iteration takes {bias:.2f} times what the model says of it; {decision.reason.sentence}"
            self._stay(Reason(ReasonCode.model_off, text), numbers)
            return
        if rules.mode is ReplanMode.advise or (asked and numbers.dwell_left):
            self._advise(decision)
        elif numbers.dwell_left:
            text = f"{numbers.dwell_left} iterations too soon after the last move; {decision.reason.sentence}"
            self._stay(Reason(ReasonCode.dwell, text), numbers)
        else:
            self._begin(decision)

    def _forced(self) -> None:
        """The plan cannot continue, or not for long: migrate to the best remaining plan at any cost."""
        run, rules = self._run, self.rules
        why = gone_reason(run)
        if run.failed_tries >= rules.tries or run.retry_at is not None:
            text = f"{why.sentence}; {run.failed_tries} of {rules.tries} tries to move failed"
            self._stay(Reason(ReasonCode.plan_gone, text), DecisionNumbers())
            return
        levels = self.drift.levels()
        try:
            to = on_current_gpus(self.drift.planner.best(without(run.cluster, run.leaving), levels), run.running)
        except (InfeasibleError, InputError) as error:
            self._nothing_fits(Reason(ReasonCode.no_plan, f"{why.sentence}; {error.what}"))
            return
        run.wait_until = None
        cost, known = self.drift.cost(to)
        numbers = DecisionNumbers(new_iteration_s=to.plan.iteration_seconds, cost_s=cost, cost_measured=known)
        decision = ReplanDecision(to, Reason(why.code, f"{why.sentence}; {to.plan.describe()}"), numbers)
        if rules.mode is ReplanMode.advise:
            self._advise(decision)
        else:
            self._begin(decision, forced=True)

    def _nothing_fits(self, reason: Reason) -> None:
        run = self._run
        if not run.lost:
            self._stay(reason, DecisionNumbers())  # it continues until the node goes
            return
        if run.wait_until is None and self.rules.mode is ReplanMode.auto:
            run.wait_until = run.now + self.rules.wait_s
        self._notify(reason)

    def _advise(self, decision: ReplanDecision) -> None:
        assert decision.to is not None
        self._run.advised, self._run.advised_levels = decision.to, self.drift.levels()
        self._write(RUN, "advised", decision.reason)
        self._out.append(e.AdvisePlan(decision.to.plan, decision.reason, decision.numbers))

    def _stay(self, reason: Reason, numbers: DecisionNumbers) -> None:
        self._write(RUN, "stays", reason)
        self._out.append(e.KeepPlan(reason, numbers))

    # ---- migrations -------------------------------------------------------------------------------------------------

    def _begin(self, decision: ReplanDecision, forced: bool = False) -> None:
        run = self._run
        assert decision.to is not None
        alive = None
        if run.lost:
            alive = frozenset(slot for slot in gpu_slots(run.cluster) if slot[0] not in run.lost)
        changed, why = changes(run.running, decision.to, alive), decision.reason
        before, after = run.running.plan, decision.to.plan
        move = Migration(self.state.begun + 1, before, after, changed, why, decision.numbers, forced)
        run.promise = None
        self._write(f"move {move.id}", "begun", why)
        self._write(RUN, "moving", why)
        longest_s = max([*run.walls, run.running.plan.iteration_seconds])
        ends_s = (1 + self.workflow.staleness) * longest_s  # those ahead have begun, and end first
        self._moves.begin(move, decision.to, self.drift.levels(), ends_s)

    def _moving_to_arrived(self, moving: OngoingMigration) -> None:
        run, move = self._run, moving.move
        numbers, before, bias = move.numbers, run.running, self.drift.bias
        self._set_plan(moving.to, moving.levels)
        if not move.forced and numbers.gain_s and numbers.iteration_s:
            run.promise = PromisedGain(move.id, before, numbers.gain_s / numbers.iteration_s, bias or 1.0)
        reason = Reason(ReasonCode.arrived, f"move {move.id} is done: {run.running.plan.describe()}")
        self._write(f"move {move.id}", "arrived", reason)
        self._notify(reason)
        self._out.extend(self.drift.ranges())

    def _set_plan(self, to: PlacedPlan, levels: dict[str, float]) -> None:
        run = self._run
        moved = to.on(run.cluster)
        assert moved is not None, "a plan in place whose GPUs are not there"
        left_first = run.first is None or not run.first.same_as(run.running)
        run.running, run.reference = moved, dict(levels)
        run.lost, run.cluster_change, run.moved_at = (), "", run.done
        self.drift.invalidate()
        run.failed_tries, run.retry_at, run.wait_until = 0, None, None
        if run.bias:
            run.carried_bias = median(run.bias)
            if run.first is not None and not left_first:
                run.first_bias = run.carried_bias
        run.bias, run.walls, run.promise, run.advised, run.is_cold = [], [], None, None, True

    def _rolling_to_old(self, moving: OngoingMigration) -> None:
        run, move = self._run, moving.move
        assert moving.failed is not None
        run.moved_at = run.done
        run.setbacks += 1
        sentence = f"move {move.id} failed and the old plan is the plan: {moving.failed.sentence}"
        reason = Reason(ReasonCode.rolled_back, sentence)
        self._write(f"move {move.id}", "rolled back", reason)
        self._notify(reason)
        self._out.extend(self.drift.ranges())
        if not self.drift.must_migrate():
            return
        run.failed_tries += 1
        if run.failed_tries < self.rules.tries:
            run.retry_at = run.now + self.rules.back_off_s * 2.0 ** (run.failed_tries - 1)
        elif run.lost:
            self._to_stopped(Reason(ReasonCode.stuck, f"{gone_reason(run).sentence}; {run.failed_tries} moves failed"))

    def _to_stuck(self, moving: OngoingMigration, reason: Reason) -> None:
        self._write(f"move {moving.move.id}", "stuck", reason)
        self._to_stopped(reason)

    def _to_stopped(self, reason: Reason) -> None:
        run = self._run
        run.stopped, run.wait_until, run.retry_at = reason, None, None
        self._write(RUN, "stopped", reason)
        self._out.append(e.StopRun(reason))

    # ---- output ----------------------------------------------------------------------------------------------------

    def _notify(self, reason: Reason) -> None:
        self._write(RUN, "told", reason)
        self._out.append(e.Notify(reason))

    def _write(self, subject: str, state: str, reason: Reason) -> None:
        story = self.state.stories.get(subject)
        if subject == RUN and story and (story[-1].state, story[-1].reason.code) == (state, reason.code):
            return
        record(self.state.stories, subject, StoryEntry(self._run.now, state, reason), STORIES_KEPT, (RUN,))

    # ---- queries -----------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._run.running.plan

    @property
    def placed_plan(self) -> PlacedPlan:
        return self._run.running

    @property
    def moving_to(self) -> PlacedPlan | None:
        """Target of the current migration; ranks refer to the nodes that stay."""
        return None if self.state.moving is None else self.state.moving.to

    @property
    def cluster(self) -> Cluster:
        return self._run.cluster

    @property
    def iterations(self) -> int:
        return self._run.done

    @property
    def moving(self) -> Migration | None:
        return None if self.state.moving is None else self.state.moving.move

    @property
    def stopped(self) -> Reason | None:
        return self._run.stopped

    def estimates(self) -> dict[str, CostEstimate]:
        """Current cost of every component relative to its profile."""
        return self.drift.estimates.all()

    @property
    def expected_s(self) -> float | None:
        """Prediction of the next iteration by the present costs."""
        return self.drift.expected_s()

    def staying_s(self, iteration: Iteration) -> float | None:
        """What the first plan would have taken for an iteration that is not handled yet."""
        return self.drift.staying_s(iteration)

    def story(self, subject: str = RUN) -> tuple[StoryEntry, ...]:
        """State history of the run, or of `move 3`."""
        return tuple(self.state.stories.get(subject, ()))

    def check(self) -> None:
        _check_machine(self.state, self.rules, self.next_deadline())


# ---- input checks and invariants -------------------------------------------------------------------------------------


def _check_iteration(iteration: Iteration, workflow: Workflow) -> None:
    """Raises InputError for an unknown component, or too many batches."""
    for component in iteration.components:
        if component.component not in workflow.names:
            raise unknown_component(component.component, workflow.names, f"iteration {iteration.number}")
        if component.batches is not None and component.batches > workflow.batches:
            raise InputError(
                f"{component.component} did {component.batches} batches of {workflow.batches}",
                where=f"iteration {iteration.number}",
            )


def _check_cluster(event: e.ClusterChanged) -> None:
    """Raises InputError for duplicate node names, or a leaving node that does not exist."""
    names = [node.name for node in event.cluster.nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two nodes are named {twice}", where="ClusterChanged", hint="node names must be unique")
    for name in event.leaving:
        if name not in names:
            raise InputError(f"node {name} will leave, but is not there", where="ClusterChanged")


def _check_machine(state: ReplanState, rules: ReplanRules, due: float | None) -> None:
    run, moving = state.run, state.moving
    _check_plan(run)
    if moving is not None:
        assert moving.move.id == state.begun, "a move under way is not the newest"
        assert tuple(stage for stage, _ in moving.took) == STAGES[: STAGES.index(moving.stage)], "a stage was skipped"
        assert moving.failed is not None or moving.deadline <= moving.end, "a stage may end after its move"
        assert run.stopped is None, "a stopped run moves"
        assert run.promise is None, "a promise is judged during a move"
    waits = moving is not None or run.retry_at is not None or run.wait_until is not None
    assert not waits or run.stopped is not None or due is not None, "a wait without a deadline"
    if run.lost and rules.mode is ReplanMode.auto and run.stopped is None:
        assert waits, "the plan is gone and nothing is done about it"
    assert run.done >= (run.moved_at or 0), "a move in the future"
    assert all(level > 0 for level in run.reference.values()), "a plan made for no cost"
    for track in state.tracks.values():
        assert len(track.recent) <= rules.window
        assert len(track.aside) < JUMP
        assert all(a[0] < b[0] for a, b in pairwise(track.recent)), "an iteration counted twice"
        assert all(number <= run.done for number, _ in [*track.recent, *track.aside]), "measured, and not counted"


def _check_plan(run: RunState) -> None:
    groups = run.running.plan.groups
    used = [rank for group in groups for rank in group.gpus]
    assert len(set(used)) == len(used), "two groups on one GPU"
    assert all(rank < run.running.cluster.gpus for rank in used), "a rank that is not there"
    if not run.lost:
        assert run.running.cluster == run.cluster, "the ranks of the plan count through another cluster"
