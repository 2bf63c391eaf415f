"""Thousands of random turns of fate: whatever happens to a run and its moves, what must be true of them stays true.

The world (`loop_world`) looks at every truth after every event. At the end of each run everything goes well, then the
journal is replayed: it must say the same and end in the same state.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from loop_world import LoopWorld, nodes
from trimtab.machines.replan import events as e
from trimtab.model.run import STAGES, ComponentTiming, Iteration, ReplanMode, ReplanRules
from trimtab.model.workflow import Cluster, Node

STEPS = 40
RUNS = 80
NAMES = st.sampled_from(["rollout", "reference", "trainer"])
HOW = st.sampled_from(["well", "well", "well", "well", "badly", "late"])

counted: Counter[str] = Counter()


class Fate(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from([ReplanMode.auto, ReplanMode.auto, ReplanMode.auto, ReplanMode.advise]),
        dwell=st.sampled_from([0, 2, 5]),
        assumed_move_s=st.sampled_from([0.0, 5.0, 60.0, 2_000.0]),
        tries=st.sampled_from([1, 3]),
        elastic=st.sampled_from([(), ("rollout",)]),
    )
    def begin(self, mode, dwell, assumed_move_s, tries, elastic):
        rules = ReplanRules(
            mode=mode,
            dwell_iterations=dwell,
            assumed_move_s=assumed_move_s,
            tries=tries,
            elastic=elastic,
            window=6,
            least_iterations=4,
        )
        self.world = LoopWorld(rules)

    # ---- training ----

    @rule(
        times=st.sampled_from([1, 3, 7]),
        noise=st.lists(st.sampled_from([0.97, 0.99, 1.0, 1.01, 1.03]), min_size=3, max_size=3),
        odd=st.sampled_from([1.0, 1.0, 1.0, 1.7]),
        extra=st.sampled_from([(), (), ("validation",)]),
        well=st.booleans(),
    )
    def train(self, times, noise, odd, extra, well):
        if well:
            self.world.quiet()
        for at in range(times):
            spread = dict(zip(("rollout", "reference", "trainer"), noise[at % 3 :] + noise[: at % 3], strict=True))
            if at == 0:
                spread["rollout"] *= odd
            self.world.train(spread, extra if at == 1 else ())

    @rule(
        name=NAMES,
        factor=st.sampled_from([0.4, 0.7, 0.95, 1.05, 1.3, 1.8, 2.5]),
        then=st.sampled_from([0, 4, 10, 10]),
        carried=st.booleans(),
    )
    def drift(self, name, factor, then, carried):
        self.world.drift(name, factor)
        for _ in range(then):
            self.world.train({})
            if carried:
                self.world.carry_all()

    # ---- nodes ----

    @rule(
        sizes=st.lists(st.sampled_from([0, 2, 4, 4, 4, 4]), min_size=3, max_size=4),
        why=st.sampled_from(list(e.ClusterChangeCause)),
        carried=st.booleans(),
    )
    def other_nodes(self, sizes, why, carried):
        self.world.change(nodes(*sizes), why)
        if carried:
            self.world.carry_all()

    @precondition(lambda self: len(self.world.cluster.nodes) > 1)
    @rule(at=st.integers(0, 3))
    def drain(self, at):
        names = [node.name for node in self.world.cluster.nodes]
        self.world.change(self.world.cluster, e.ClusterChangeCause.draining, (names[at % len(names)],))

    # ---- moves ----

    @precondition(lambda self: self.world.stage is not None)
    @rule(hows=st.lists(HOW, min_size=1, max_size=7))
    def stages(self, hows):
        for how in hows:
            self.world.carry_stage(how)

    @precondition(lambda self: self.world.back is not None)
    @rule(how=st.sampled_from(["well", "well", "well", "well", "well", "badly", "late"]))
    def back(self, how):
        self.world.carry_back(how)

    @rule()
    def carry_all(self):
        self.world.carry_all()

    @rule(move=st.integers(0, 9), stage=st.sampled_from(STAGES))
    def hear_of_other_moves(self, move, stage):
        under_way = self.world.move is not None and self.world.move.id == move
        if not under_way:
            assert self.world.tell(e.MigrationStageDone(move, stage, 1.0)) == []
            assert self.world.tell(e.MigrationStageFailed(move, stage, "late")) == []
            assert self.world.tell(e.RolledBack(move, 1.0)) == []

    # ---- people, drivers, time ----

    @rule(remaining=st.sampled_from([None, 0, 1, 20, 500]))
    def remain(self, remaining):
        self.world.remaining = remaining
        self.world.tell(e.RemainingChanged(remaining))

    @rule()
    def ask(self):
        answer = self.world.tell(e.ReplanRequested("somebody wants to know")) if not self.world.stopped else [None]
        assert answer, "no answer"

    @rule(back=st.sampled_from([0, 0, 1, 3]), remaining=st.sampled_from([None, 40]))
    def resume(self, back, remaining):
        self.world.resume(back, remaining)

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 30.0, 700.0, 2_000.0]))
    def wait(self, seconds):
        self.world.tick(seconds)

    @rule()
    def wrong_events(self):
        world = self.world
        world.refused(e.IterationDone(Iteration(world.done + 2, 1.0)))
        world.refused(e.IterationDone(Iteration(world.done + 1, 1.0, (ComponentTiming("rolout", 1.0, 1),))))
        world.refused(e.RunResumed(-1))
        world.refused(e.RemainingChanged(-1))
        world.refused(e.GpuRangeUsed("trainer", 2))
        world.refused(e.ClusterChanged(Cluster((Node("a", 1), Node("a", 1))), e.ClusterChangeCause.joined))
        world.refused(e.ClusterChanged(world.cluster, e.ClusterChangeCause.draining, ("nobody",)))

    @rule(what=st.sampled_from(["reload", "echo"]))
    def what_changes_nothing(self, what):
        getattr(self.world, what)()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None or world.broken:
            return
        world.reload()
        world.quiet()
        world.replay()
        counted["runs"] += 1
        counted["events"] += len(world.journal)
        counted.update(world.counts)


def go(runs: int) -> None:
    chosen = settings(
        max_examples=runs,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Fate, settings=chosen)


def test_whatever_happens_to_a_run_and_its_moves_the_truths_hold():
    go(RUNS)
    floors = {"events": 1_200, "iterations": 600, "moves": 8, "forced moves": 15, "arrivals": 10, "rollbacks": 15,
              "stops": 1, "advice": 5, "losses": 20, "refused": 100}  # fmt: skip
    for name, least in floors.items():
        assert counted[name] >= least, f"{name}: {dict(counted)}"


@pytest.mark.long
def test_whatever_happens_to_very_many_runs_the_truths_hold():
    go(3_200)
