"""A world in memory around the machine of the loop: it trains by the plan in place, carries moves out, puts faults in.

It keeps books of its own of what really is: what everything truly costs, which nodes there are, where the components
really sit, which iterations were done. After every event it asserts what must be true of that. It believes nothing
that the machine says of itself: time is judged by the slow simulation of `obvious`, which shares no code with it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from jobs import component
from obvious import Choice, plan_seconds, seconds_on
from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.machines.replan import events as e
from trimtab.machines.replan.machine import ReplanMachine
from trimtab.machines.replan.placed_plan import GpuSlot, gpu_slots
from trimtab.model.plan import Plan
from trimtab.model.run import STAGES, ComponentTiming, Iteration, Migration, MigrationStage, ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Node, PlacementJob, WeightSync, Workflow
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

Placement = dict[str, tuple[GpuSlot, ...]]


def workflow(batches: int = 8) -> Workflow:
    """Three components that are better off side by side: switching is dear, and nothing scales perfectly."""
    return Workflow(
        (
            component("rollout", {2: 46.0, 8: 16.0}, switch_seconds=8.0, engine="vllm"),
            component("reference", {2: 12.0, 8: 5.0}, ("rollout",), switch_seconds=4.0),
            component("trainer", {2: 40.0, 8: 14.0}, ("reference",), switch_seconds=8.0, granularity=2),
        ),
        batches=batches,
        weight_sync=WeightSync("trainer", "rollout", 1.0, 2.0),
    )


def nodes(*gpus: int) -> Cluster:
    return Cluster(tuple(Node(f"n{at}", count) for at, count in enumerate(gpus) if count))


def first_plan(job: PlacementJob) -> Plan:
    space, outcome = best_plan(job)
    assert outcome.best is not None
    return to_plan(space, outcome.best)


def slots_of(plan: Plan, cluster: Cluster) -> Placement:
    """Where everybody sits."""
    here = gpu_slots(cluster)
    return {placed.name: tuple(here[rank] for rank in placed.gpus) for placed in plan.components}


class LoopWorld:
    """One run, as it really is."""

    def __init__(self, rules: ReplanRules, cluster: Cluster | None = None, flow: Workflow | None = None) -> None:
        self.rules = rules
        self.flow = flow or workflow()
        self.cluster = self.began_with = cluster or nodes(4, 4)
        self.leaving: tuple[str, ...] = ()
        self.levels = dict.fromkeys(self.flow.names, 1.0)
        self.plan = self.first = first_plan(PlacementJob(self.cluster, self.flow))
        self.place = slots_of(self.plan, self.cluster)  # where everybody really sits
        self.machine = ReplanMachine(self.flow, self.cluster, self.plan, rules)
        self.twin: ReplanMachine | None = None  # loaded from a snapshot; is told the same
        self.now = 0.0
        self.done = 0  # iterations, each counted once
        self.remaining: int | None = None
        self.lost: set[str] = set()  # nodes of the place that are gone or were
        self.move: Migration | None = None
        self.stage: e.RunMigrationStage | None = None
        self.back: e.RollBackMigration | None = None
        self.stopped = False
        self.moved_at: int | None = None
        self.old: tuple[Plan, Placement] | None = None
        self.journal: list[tuple[float, e.ReplanEvent, tuple[e.ReplanInstruction, ...]]] = []
        self.counts: Counter[str] = Counter()
        self.broken = False
        self.tell(e.RunResumed(0))

    # ---- the machine is told ---------------------------------------------------------------------------------------

    def tell(self, event: e.ReplanEvent) -> list[e.ReplanInstruction]:
        self.broken = True
        out = self.machine.handle(event, self.now)
        self.machine.check()
        self.journal.append((self.now, event, tuple(out)))
        if self.twin is not None:
            assert self.twin.handle(event, self.now) == out, "a machine from a snapshot says something else"
        for one in out:
            self._judge(one)
        assert self.machine.iterations == self.done, "iterations are counted otherwise than they were done"
        assert (self.machine.moving is None) == (self.move is None)
        self._judge_place()
        self._judge_waits()
        self.broken = False
        return out

    def refused(self, event: e.ReplanEvent) -> None:
        """A wrong event changes nothing."""
        before = json.dumps(self.machine.dump())
        try:
            self.machine.handle(event, self.now)
        except InputError:
            assert json.dumps(self.machine.dump()) == before, "a refused event changed something"
            self.counts["refused"] += 1
            return
        raise AssertionError(f"{event} was taken")

    # ---- what must be true -----------------------------------------------------------------------------------------

    def _judge(self, one: e.ReplanInstruction) -> None:
        assert not self.stopped, "it goes on after it said stop"
        if isinstance(one, e.SetGpuRange):
            assert 0 < one.min_gpus <= one.max_gpus <= self.cluster.gpus + 8
            return
        if isinstance(one, e.MoveJudged):
            assert 0 < one.promised <= 1
            assert one.realised <= 1
            return
        reason = one.move.reason if isinstance(one, (e.BeginMigration, e.RunMigrationStage)) else one.reason
        assert reason.sentence
        if isinstance(one, e.BeginMigration):
            self._judge_begin(one)
        elif isinstance(one, e.RunMigrationStage):
            self._judge_stage(one)
        elif isinstance(one, e.RollBackMigration):
            assert self.move is not None
            assert one.move.id == self.move.id, "a move is rolled back that is not under way"
            assert one.deadline > self.now
            assert one.done == STAGES[: STAGES.index(one.at)]
            self.back, self.stage = one, None
            self.counts["rollbacks"] += 1
        elif isinstance(one, e.StopRun):
            self.stopped = True
            self.move = self.back = self.stage = None
            self.counts["stops"] += 1
        elif isinstance(one, e.AdvisePlan):
            assert self.rules.mode is ReplanMode.advise or one.numbers.dwell_left
            self._judge_gain(one.plan, one.numbers.gain_s is None)
            self.counts["advice"] += 1
        elif isinstance(one, e.KeepPlan):
            self.counts["stays"] += 1
            self.counts[reason.code.value] += 1

    def _judge_begin(self, one: e.BeginMigration) -> None:
        assert self.move is None, "two moves at once"
        assert self.rules.mode is ReplanMode.auto, "advice is not asked to be carried out"
        assert one.deadline > self.now
        must = self.must_migrate()
        assert one.move.forced == must, "a move is forced if its plan's GPUs are gone or will go, and only then"
        assert slots_of(one.move.before, self.at_place()) == self.place, "the move begins somewhere else"
        if not must:
            if self.moved_at is not None:
                assert self.done - self.moved_at >= self.rules.dwell_iterations, "a move within the dwell time"
            numbers = one.move.numbers
            assert None not in (numbers.gain_s, numbers.sure_gain_s, numbers.cost_s, numbers.horizon)
            least = min(numbers.gain_s, numbers.sure_gain_s)
            assert least * numbers.horizon > numbers.cost_s * (1 + self.rules.margin), "a move that does not pay"
            assert self.remaining is None or numbers.horizon <= self.remaining
            self._judge_gain(one.move.after, False)
        usable = {name for name in (node.name for node in self.cluster.nodes) if name not in self.leaving}
        after = slots_of(one.move.after, self.usable())
        assert all(seat[0] in usable for mine in after.values() for seat in mine), "a move to GPUs that will go"
        self.move, self.old, self.to_cluster = one.move, (self.plan, dict(self.place)), self.usable()
        self.counts["forced moves" if must else "moves"] += 1

    def _judge_gain(self, plan: Plan, forced: bool) -> None:
        """By the true costs, as far as they have been the same for a while, and by other code."""
        if not forced and self.steady >= self.rules.window:
            assert self.true_seconds(plan) < self.true_seconds(self.plan), "the move would gain nothing"
            self.counts["gains judged"] += 1

    def _judge_stage(self, one: e.RunMigrationStage) -> None:
        assert self.move is not None
        assert one.move.id == self.move.id
        assert self.back is None, "a stage of a move that is being rolled back"
        before = STAGES.index(self.stage.stage) if self.stage is not None else -1
        assert STAGES.index(one.stage) == before + 1, "stages out of order"
        assert one.deadline > self.now
        self.stage = one

    def _judge_place(self) -> None:
        """The plan that the machine names is where everybody sits; a move under way is not a plan in place."""
        if not self.lost:
            assert slots_of(self.machine.plan, self.cluster) == self.place, "the plan in place is another one"

    def _judge_waits(self) -> None:
        due = self.machine.next_deadline()
        if self.stage is not None or self.back is not None:
            assert due is not None, "something is under way without a deadline"
            assert due <= (self.stage or self.back).deadline  # type: ignore[union-attr]
        if self.lost and self.rules.mode is ReplanMode.auto and not self.stopped:
            assert due is not None, "the plan is gone, and nobody waits for anything"

    # ---- what is -----------------------------------------------------------------------------------------------------

    def at_place(self) -> Cluster:
        """The cluster that the ranks of the plan in place count through."""
        return self.cluster if not self.lost else self.plan_cluster

    def usable(self) -> Cluster:
        return Cluster(tuple(node for node in self.cluster.nodes if node.name not in self.leaving))

    def must_migrate(self) -> bool:
        used = {seat[0] for mine in self.place.values() for seat in mine}
        return bool(self.lost) or bool(used & set(self.leaving))

    def true_seconds(self, plan: Plan) -> float:
        return plan_seconds(PlacementJob(self.cluster, self.flow), self._choices(plan, self.levels))

    def _choices(self, plan: Plan, factors: dict[str, float]) -> dict[str, Choice]:
        group = {name: at for at, one in enumerate(plan.groups) for name in one.components}
        return {
            one.name: Choice(
                group[one.name],
                seconds_on(self.flow.component(one.name).variants[0], "", len(one.gpus)) * factors[one.name],
            )
            for one in plan.components
        }

    # ---- training ----------------------------------------------------------------------------------------------------

    steady = 0  # iterations since a true cost changed

    def measured(self, number: int, noise: dict[str, float], extra: tuple[str, ...] = ()) -> Iteration:
        factors = {name: level * noise.get(name, 1.0) for name, level in self.levels.items()}
        choices = self._choices(self.plan, factors)
        wall = plan_seconds(PlacementJob(self.cluster, self.flow), choices)
        parts = tuple(
            ComponentTiming(one.name, choices[one.name].seconds, len(one.gpus)) for one in self.plan.components
        )
        return Iteration(number, wall, parts, extra)

    def train(self, noise: dict[str, float], extra: tuple[str, ...] = ()) -> list[e.ReplanInstruction]:
        """One more iteration; while the plan is gone, or a move is beyond its first stage, nothing trains."""
        draining = self.stage is not None and self.stage.stage is MigrationStage.drain
        if self.lost or self.stopped or (self.move is not None and not draining):
            return []
        one = self.measured(self.done + 1, noise, extra)
        self.now += one.wall_s
        self.done += 1
        self.steady += 0 if any(abs(factor - 1) > 0.2 for factor in noise.values()) else 1
        if self.remaining is not None:
            self.remaining = max(0, self.remaining - 1)
        self.counts["iterations"] += 1
        return self.tell(e.IterationDone(one))

    def drift(self, name: str, factor: float) -> None:
        self.levels[name] = min(8.0, max(0.125, self.levels[name] * factor))
        self.steady = 0

    def change(
        self, cluster: Cluster, why: e.ClusterChangeCause, leaving: tuple[str, ...] = (), within_s: float = 100.0
    ) -> None:
        """Nodes come, go, or will go."""
        there = set(gpu_slots(cluster))
        used = {seat for mine in self.place.values() for seat in mine}
        if not self.lost:
            self.plan_cluster = self.cluster
        gone = {seat[0] for seat in used if seat not in there}
        self.lost |= gone
        if not self.lost:
            self.plan = self._reranked(cluster)
        self.cluster, self.leaving = cluster, leaving
        self.counts["losses"] += bool(gone)
        self.tell(e.ClusterChanged(cluster, why, leaving, self.now + within_s if leaving else None))

    def _reranked(self, cluster: Cluster) -> Plan:
        rank = {seat: at for at, seat in enumerate(gpu_slots(cluster))}
        here = gpu_slots(self.cluster)
        return replace(
            self.plan,
            groups=tuple(replace(g, gpus=tuple(rank[here[at]] for at in g.gpus)) for g in self.plan.groups),
            components=tuple(replace(c, gpus=tuple(rank[here[at]] for at in c.gpus)) for c in self.plan.components),
        )

    def resume(self, back: int, remaining: int | None) -> None:
        """The driver is gone and back; the newest iterations were not kept."""
        self.done = max(0, self.done - back)
        self.remaining = remaining
        self.moved_at = None if self.moved_at is None else min(self.moved_at, self.done)
        self.stopped = False
        self.tell(e.RunResumed(self.done, remaining))

    # ---- moves -------------------------------------------------------------------------------------------------------

    def carry_stage(self, how: str = "well") -> None:
        if self.stage is None:
            return
        one = self.stage
        if how == "late":
            self.now = max(self.now, one.deadline)
            self.tell(e.ReplanTick())
            self.tell(e.MigrationStageDone(one.move.id, one.stage, 1.0))  # whoever was slow ends all the same
            return
        self.now += 1.0
        if how == "badly":
            self.tell(e.MigrationStageFailed(one.move.id, one.stage, "injected"))
            return
        if one.stage is STAGES[-1]:
            # The world knows before the machine does: this was the last stage.
            self.plan = self._as_now(one.move)
            self.place = slots_of(self.plan, self.cluster)
            self.move = self.stage = self.old = None
            self.lost.clear()
            self.moved_at = self.done
            self.counts["arrivals"] += 1
        self.tell(e.MigrationStageDone(one.move.id, one.stage, 2.0))

    def _as_now(self, move: Migration) -> Plan:
        before = self.cluster
        self.cluster, self.plan = self.to_cluster, move.after
        plan = self._reranked(before)
        self.cluster = before
        return plan

    def carry_back(self, how: str = "well") -> None:
        if self.back is None:
            return
        one = self.back
        assert self.old is not None
        if how == "well":
            self.now += 1.0
            self.place = self.old[1]  # wherever it was: what is lost of it is lost
            self.move = self.back = self.old = None
            self.moved_at = self.done
            self.tell(e.RolledBack(one.move.id, 1.0))
            return
        if how == "badly":
            self.tell(e.RollBackFailed(one.move.id, "injected"))
        else:
            self.now = max(self.now, one.deadline)
            self.tell(e.ReplanTick())
        assert self.stopped, "a way back that failed does not stop the run"

    def carry_all(self) -> None:
        while self.stage is not None or self.back is not None:
            self.carry_stage()
            self.carry_back()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tell(e.ReplanTick())

    # ---- what changes nothing ----------------------------------------------------------------------------------------

    def echo(self) -> None:
        """Being told the same twice changes nothing."""
        before = json.loads(json.dumps(self.machine.dump()))
        for _, event, _ in self.journal[-6:]:
            if isinstance(event, (e.IterationDone, e.MigrationStageDone, e.RolledBack, e.MigrationStageFailed)):
                if isinstance(event, e.IterationDone) and event.iteration.number > self.done:
                    continue  # it was not kept
                current = self.stage is not None and getattr(event, "stage", None) is self.stage.stage
                if getattr(event, "move", None) == getattr(self.move, "id", -1) and (current or self.back is not None):
                    continue
                assert self.machine.handle(event, self.now) == []
        after = json.loads(json.dumps(self.machine.dump()))
        for state in (before, after):
            state["run"].pop("now", None)
        assert after == before, "an echo changed something"

    def reload(self) -> None:
        data = json.loads(json.dumps(self.machine.dump()))
        twin = ReplanMachine.load(data, self.flow, self.rules)
        twin.check()
        assert json.loads(json.dumps(twin.dump())) == data, "a snapshot of a snapshot is another one"
        assert _answers(twin) == _answers(self.machine), "other answers after a snapshot"
        self.twin = twin
        self.counts["reloads"] += 1

    def replay(self) -> None:
        machine = ReplanMachine(self.flow, self.began_with, self.first, self.rules)
        for now, event, out in self.journal:
            kind: Any = type(event)
            fact = decode(kind, json.loads(json.dumps(encode(event))))
            assert tuple(machine.handle(fact, now)) == out, "a replay says something else"
        assert machine.dump() == self.machine.dump(), "a replay ends elsewhere"

    def quiet(self) -> None:
        """Everything goes well: whatever was under way ends, and the run trains or has said why not."""
        self.carry_all()
        if self.stopped:
            self.resume(0, self.remaining)
            self.carry_all()
        if self.leaving or self.lost:
            self.change(nodes(4, 4), e.ClusterChangeCause.joined)
        for _ in range(4):
            due = self.machine.next_deadline()
            if due is not None:
                self.now = max(self.now, due)
                self.tell(e.ReplanTick())
            self.carry_all()
        assert not self.lost or self.rules.mode is ReplanMode.advise or self.stopped, "it never got its GPUs back"
        before = self.done
        self.train({})
        assert self.done > before or self.lost or self.stopped
        self.carry_all()


def _answers(machine: ReplanMachine) -> list[Any]:
    """All that a machine can be asked."""
    moves = [f"move {number}" for number in range(1, 50)]
    return [
        machine.next_deadline(),
        machine.plan,
        machine.placed_plan,
        machine.moving_to,
        machine.cluster,
        machine.iterations,
        machine.moving,
        machine.stopped,
        machine.state.costs,
        machine.estimates(),
        [machine.story(), *map(machine.story, moves)],
        [machine.drift.levels(), machine.drift.ranges(), machine.drift.dwell(), machine.drift.bias],
    ]
