"""Thousands of random turns of fate: whatever happens to nodes and members, what must be true of them stays true.

The world (`fleet_world`) looks at every truth after every event. At the end of each run the journal is replayed, then
everything goes well: the group must make a step, or have said that it gave up, and nothing may be left behind.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fleet_world import UNIT, FleetWorld, facts
from trimtab.core.errors import InputError
from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.elastic import events as g
from trimtab.machines.nodes import events as n
from trimtab.model.nodes import ElasticSpec, NodePolicy

STEPS = 50
RUNS = 180

NODES = 6
MOST_MEMBERS = 60
AT = st.integers(0, 1_000)  # which of those there are, modulo their number

counted: Counter[str] = Counter()


@st.composite
def specs(draw: st.DrawFn) -> ElasticSpec:
    least = draw(st.sampled_from([1, 1, 2, 3]))
    return ElasticSpec(
        "g",
        UNIT,
        min_members=least,
        max_members=draw(st.sampled_from([None, least, least + 1, least + 3])),
        wait_s=draw(st.sampled_from([50.0, 5_000.0, 5_000.0])),
        step_timeout_s=draw(st.sampled_from([30.0, 600.0])),
        health_every_s=draw(st.sampled_from([0.0, 5.0])),
        restarts=draw(st.sampled_from([0, 2, 10, 10])),
        restart_window_s=draw(st.sampled_from([20.0, 600.0])),
        handover_s=draw(st.sampled_from([0.0, 5.0])),
    )


class Fate(RuleBasedStateMachine):
    @initialize(
        spec=specs(),
        policy=st.sampled_from([NodePolicy(), NodePolicy(), NodePolicy(forget_s=30.0), NodePolicy(free_losses=0)]),
        sizes=st.lists(st.sampled_from([1, 1, 2, 3, 0]), min_size=2, max_size=4),
    )
    def begin(self, spec, policy, sizes):
        self.world = FleetWorld(spec, policy)
        for at, gpus in enumerate(sizes):
            self.world.join(f"n{at}", facts(gpus, head=at == 0))
        self.world.carry_all()
        self.world.boundary()
        self.world.carry_all()

    @invariant()
    def count(self) -> None:
        counted["turns"] += 1  # every truth was looked at on the way, after every event

    def nodes(self) -> list[str]:
        return list(self.world.truth)

    def members(self, *states: str) -> list[str]:
        return [name for name, one in self.world.members.items() if one.state in states]

    # ---- nodes ----

    @rule(
        at=st.integers(0, NODES - 1),
        gpus=st.sampled_from([1, 1, 1, 2, 3, 0]),
        kind=st.sampled_from(["H100", "H100", "A100"]),
        outside=st.sampled_from([0, 0, 1]),
        named=st.booleans(),
    )
    def join(self, at, gpus, kind, outside, named):
        head = at == 0
        held = Resources.of(gpu=min(outside, gpus)) if outside else NOTHING
        if self.world.truth.get(f"n{at}") is not None and self.world.truth[f"n{at}"].alive:
            held = NOTHING  # nobody takes what members hold
            gpus = max(gpus, self.world.truth[f"n{at}"].gpus)
        self.world.join(f"n{at}", facts(gpus, kind=kind, head=head, name=f"w{at % 3}" if named else ""), held)

    @precondition(lambda self: self.nodes())
    @rule(at=AT, what=st.sampled_from(["kill", "kill", "die unseen", "stop", "freeze", "flap", "flap"]))
    def lose(self, at, what):
        name = self.nodes()[at % len(self.nodes())]
        if what == "kill":
            self.world.kill(name, noticed=True)
        elif what == "die unseen":
            self.world.kill(name, noticed=False)
        elif what == "stop":
            self.world.stop(name)
        elif what == "freeze":
            self.world.freeze(name)
        else:
            for _ in range(1 + at % 12):
                self.world.flap(name)
                if at % 2:
                    self.world.tick(0.5)

    @precondition(lambda self: self.nodes())
    @rule(at=AT, what=st.sampled_from(["link", "ray", "ray in order", "thaw", "links"]))
    def notice(self, at, what):
        name = self.nodes()[at % len(self.nodes())]
        if what == "link":
            self.world.notice(name)
        elif what in ("ray", "ray in order"):
            self.world.ray_notices(name, expected=what == "ray in order")
        elif what == "thaw":
            self.world.thaw(name)
        else:
            self.world.links()

    @precondition(lambda self: self.nodes())
    @rule(at=AT, seconds=st.sampled_from([None, -5.0, 2.0, 8.0, 30.0, 30.0, 100.0]), by_ray=st.booleans())
    def drain(self, at, seconds, by_ray):
        names = [*self.nodes(), "nobody"]
        deadline = None if seconds is None else self.world.now + seconds
        self.world.drain(names[at % len(names)], deadline, by_ray=by_ray)
        self.world.look()

    @precondition(lambda self: self.world.drains)
    @rule(at=AT)
    def stay(self, at):
        names = sorted(self.world.drains)
        self.world.tell_nodes(n.DrainCancelled(names[at % len(names)]))

    # ---- members ----

    @precondition(lambda self: self.members("queued", "starting"))
    @rule(at=AT, how=st.sampled_from(["well"] * 6 + ["badly", "fatal"]), told=st.booleans())
    def construct(self, at, how, told):
        self.world.place()
        names = self.members("starting")
        if names:
            self.world.construct(names[at % len(names)], how)
        if told:
            self.world.deliver()

    @precondition(lambda self: self.members("running"))
    @rule(at=AT, what=st.sampled_from(["crash", "crash", "evict", "take", "take soon"]), told=st.booleans())
    def trouble(self, at, what, told):
        names = self.members("running")
        name = names[at % len(names)]
        if what == "crash":
            self.world.crash(name)
        elif what == "evict":
            self.world.evict(name)
        else:
            self.world.take(name, 3.0 if what == "take soon" else 30.0)
        if told:
            self.world.deliver()

    @precondition(lambda self: any(one.ending for one in self.world.members.values()))
    @rule()
    def end(self):
        for name in list(self.world.members):
            self.world.end(name)

    @precondition(lambda self: self.world.health)
    @rule(at=AT, fault=st.sampled_from([None, None, None, "it raised"]))
    def answer(self, at, fault):
        names = sorted(self.world.health)
        self.world.answer_health(names[at % len(names)], fault)

    # ---- worlds and steps ----

    @rule()
    def boundary(self):
        self.world.boundary()

    @precondition(lambda self: self.world.entering is not None)
    @rule(how=st.sampled_from(["well"] * 6 + ["badly", "nobody"]))
    def enter(self, how):
        self.world.finish_entering(how)

    @precondition(lambda self: self.world.step is not None)
    @rule(how=st.sampled_from(["well"] * 6 + ["commit", "loss in commit", "hung", "nobody"]), again=st.booleans())
    def step(self, how, again):
        self.world.finish_step(how)
        if again and self.world.step is None:
            self.world.boundary()

    @precondition(lambda self: self.world.waits_for_step)
    @rule(often=st.sampled_from([False, False, True]))
    def withdraw(self, often):
        if often:
            self.world.withdraw()

    @rule(steps=st.sampled_from([1, 1, 2, 3]), begun=st.booleans())
    def train(self, steps, begun):
        if len(self.world.members) >= MOST_MEMBERS:
            return
        for _ in range(steps):
            self.world.carry_all()
            self.world.finish_step()
            self.world.boundary()
        if begun:
            self.world.carry_all()

    @rule(size=st.sampled_from([None, None, None, 1, 2, 3, 5]))
    def ask(self, size):
        try:
            self.world.tell(g.ResizeRequested(size))
        except InputError:
            self.world.broken = False
            assert size < self.world.spec.min_members or size > self.world.spec.max_members

    # ---- news, and time ----

    @rule(count=st.sampled_from([1, 2, 100]), looks=st.booleans())
    def deliver(self, count, looks):
        if looks:
            self.world.look()
        self.world.deliver(count)

    @rule()
    def carry_all(self):
        if len(self.world.members) < MOST_MEMBERS:
            self.world.carry_all()

    @rule(seconds=st.sampled_from([0.0, 0.3, 0.5, 1.0, 3.0, 5.0, 20.0, 100.0, 700.0]))
    def wait(self, seconds):
        self.world.tick(seconds)

    @rule(what=st.sampled_from(["reload", "echo", "echo", "settled"]))
    def what_changes_nothing(self, what):
        if what == "reload":
            self.world.reload()
        elif what == "settled":
            self.world.settled()
        else:
            self.world.echo()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None or world.broken:
            return
        counted["runs"] += 1
        counted["events"] += len(world.journal)
        counted.update(world.counts)
        world.reload()
        world.quiet()
        world.close()
        world.replay()


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


def test_whatever_happens_to_nodes_and_members_the_truths_hold():
    go(RUNS)
    assert counted["turns"] >= 5_000
    # Enough happened for this to mean something; how much differs with what else is imported.
    floors = {
        "joins": 250,
        "losses": 70,
        "flaps": 150,
        "drains": 60,
        "changes": 100,
        "starts": 300,
        "worlds": 120,
        "steps": 200,
        "redone": 25,
        "interrupts": 50,
        "replacements": 25,
        "evictions": 15,
        "waits": 80,
        "reloads": 60,
        "echoes": 30,
        "failed worlds": 10,
    }
    short = {what: counted[what] for what, least in floors.items() if counted[what] < least}
    assert not short, f"too little of {short}"


def test_members_of_a_node_that_came_back_smaller_are_not_too_many_before_their_loss_is_known():
    fate = Fate()
    fate.begin(
        spec=ElasticSpec("g", Resources.of(gpu=1), restarts=0, handover_s=0.0, health_every_s=0.0, wait_s=50.0),
        policy=NodePolicy(),
        sizes=[2, 1],
    )
    fate.lose(at=0, what="stop")
    fate.join(at=0, gpus=1, kind="H100", named=False, outside=0)
    fate.drain(at=0, by_ray=False, seconds=None)
    fate.teardown()


@pytest.mark.long
def test_whatever_happens_to_nodes_and_members_the_truths_hold_for_long():
    go(3_600)
