"""Thousands of random turns of fate: whatever happens to engines, clients and weights, what must be true stays true.

The world (`rollout_world`) looks at every truth after every event. At the end of each run everything goes well:
whatever was accepted must be answered, once; then the journal is replayed, with a snapshot half-way.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollout_world import Engine, RolloutWorld
from trimtab.machines.rollout import events as e
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    InFlight,
    Owner,
    Ownership,
    RefitWay,
    RequestClass,
    RolloutRules,
    WorkerState,
)

STEPS = 60
RUNS = 150
MAX_ENGINES = 9
AT = st.integers(0, 1_000)  # which of those there are, modulo their number

TROUBLES = (
    "kill",
    "kill",
    "kill unseen",
    "restart unseen",
    "wedge",
    "break",
    "break",
    "fatal",
    "gap",
    "gap",
    "abort",
    "streams first",
)

counted: Counter[str] = Counter()

own = st.sampled_from([Owner.trimtab, Owner.trimtab, Owner.trainer])


@st.composite
def rules(draw: st.DrawFn) -> RolloutRules:
    least = draw(st.sampled_from([0, 1, 1, 2]))
    return RolloutRules(
        min_workers=least,
        max_workers=draw(st.sampled_from([least, least + 1, 4, 8, 8])) or 1,
        capacity=draw(st.sampled_from([2, 4])),
        classes=(
            RequestClass(queue_limit=draw(st.sampled_from([3, 1_000]))),
            RequestClass("validation", priority=5, deadline_s=draw(st.sampled_from([40.0, 4_000.0]))),
        ),
        ownership=Ownership(draw(own), draw(own), draw(st.sampled_from(list(Owner))), draw(own)),
        drain_s=draw(st.sampled_from([0.0, 5.0, 30.0])),
        stall_s=draw(st.sampled_from([20.0, 200.0])),
        refit_s=draw(st.sampled_from([60.0, 600.0])),
        start_s=100.0,
        retries=draw(st.sampled_from([0, 2, 5, 5])),
        answers_kept=draw(st.sampled_from([0, 5, 1_000])),
    )


elastics = st.sampled_from(
    [
        ElasticConfig(policy="static"),
        ElasticConfig(scale_down_cooldown=10.0, scale_up_cooldown=5.0, min_stable_period=5.0),
        ElasticConfig(scale_down_cooldown=0.0, scale_up_cooldown=0.0, min_stable_period=0.0),
    ]
)


class Fate(RuleBasedStateMachine):
    @initialize(
        rules=rules(),
        elastic=elastics,
        engines=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4),
    )
    def begin(self, rules, elastic, engines):
        self.world = RolloutWorld(rules, elastic)
        for startable, can_sleep, up in engines:
            self.world.add(up or not startable, startable=startable, can_sleep=can_sleep, limit=2 + can_sleep)
        self.world.wait(1.0)
        self.world.add(limit=4)
        for _ in range(3):
            self.world.ask(group="a")

    def engine(self, at: int) -> Engine:
        names = list(self.world.engines)
        return self.world.engines[names[at % len(names)]]

    def go_on(self, told: bool) -> None:
        if told:
            self.world.deliver()

    # ---- clients ----

    @rule(
        count=st.sampled_from([1, 3, 8]),
        group=st.sampled_from(["", "a", "b"]),
        session=st.sampled_from(["", "", "s", "t"]),
        class_=st.sampled_from(["default", "default", "default", "validation", "nonsense"]),
        resumable=st.sampled_from([True, True, False]),
        spans=st.sampled_from([True, True, False]),
        min_tokens=st.sampled_from([0, 5]),
        key=st.sampled_from(["", "", "", "k1", "k2"]),
        pin=st.sampled_from([None] * 6 + ["now", "next", "at least next"]),
    )
    def ask(self, count, group, session, class_, resumable, spans, min_tokens, key, pin):
        version = self.world.version
        for _ in range(count):
            self.world.ask(
                group=group,
                session=session,
                class_=class_,
                resumable=resumable,
                spans=spans,
                min_tokens=min_tokens,
                key=key,
                version={"now": version, "next": version + 1}.get(pin),
                at_least=version + 1 if pin == "at least next" else None,
            )

    @precondition(lambda self: self.world.unanswered())
    @rule(at=AT)
    def cancel(self, at):
        names = self.world.unanswered()
        self.world.cancel(names[at % len(names)])

    # ---- engines ----

    @rule(tokens=st.sampled_from([1, 2, 5, 12]), told=st.sampled_from([True, True, True, False]))
    def generate(self, tokens, told):
        self.world.generate(tokens)
        self.go_on(told)

    @rule(tokens=st.sampled_from([3, 5, 8]))
    def go_well_for_a_while(self, tokens):
        world = self.world
        world.deliver()
        for _ in range(6):
            world.do_act(0)
            world.do_abort(0)
        world.generate(tokens)
        world.deliver()

    @rule(at=AT, how=st.sampled_from(["well"] * 8 + ["badly", "badly", "silently"]), told=st.booleans())
    def carry_out(self, at, how, told):
        for _ in range(3):
            self.world.do_act(at, how)
            self.world.do_abort(at)
        self.go_on(told)

    @rule()
    def deliver(self):
        self.world.deliver()

    @precondition(lambda self: len(self.world.engines) < MAX_ENGINES)
    @rule(
        startable=st.booleans(),
        up=st.booleans(),
        can_sleep=st.booleans(),
        can_pause=st.booleans(),
        keeps=st.booleans(),
        size=st.sampled_from([1, 2]),
    )
    def add(self, startable, up, can_sleep, can_pause, keeps, size):
        self.world.add(
            up or not startable,
            startable=startable,
            can_sleep=can_sleep,
            can_pause=can_pause,
            sleep_keeps_weights=keeps,
            size=size,
            limit=3,
        )

    @rule(
        at=AT,
        what=st.sampled_from(TROUBLES),
        told=st.booleans(),
    )
    def trouble(self, at, what, told):
        world, engine = self.world, self.engine(at)
        if what == "kill":
            world.kill(engine)
        elif what == "streams first":
            world.kill(engine, streams_first=True)
        elif what == "kill unseen":
            world.kill(engine, said=False)
        elif what == "restart unseen":
            world.restart_unseen(engine)
        elif what == "wedge":
            engine.wedged = engine.alive
        elif what == "break":
            world.break_one(engine)
        elif what == "fatal":
            world.break_one(engine, "bad request", fatal=True)
        elif what == "gap":
            for one in world.engines.values():
                world.lose_ids(one)
        else:
            world.deliver()
            world.abort_elsewhere(engine)
        self.go_on(told)

    @rule(at=AT, what=st.sampled_from(["look", "back", "back", "unwell", "very unwell", "well", "load", "old load"]))
    def notice(self, at, what):
        world, engine = self.world, self.engine(at)
        name = engine.spec.id
        if what == "look":
            world.look_at(engine)
        elif what == "back":
            world.come_back(engine)
        elif what == "unwell" and engine.alive:
            world.tell(e.WorkerUnhealthy(name, 3.0, "no answer"))
        elif what == "very unwell" and not engine.alive:
            world.tell(e.WorkerUnhealthy(name, 40.0, "no answer"))
        elif what == "well" and engine.alive:
            world.tell(e.WorkerHealthy(name))
        elif what in ("load", "old load"):
            at = world.now - (0.0 if what == "load" else 60.0)
            world.tell(e.LoadReported(name, len(engine.running) + 1, 0, 0.5, at))
        world.deliver()

    @rule(at=AT, what=st.sampled_from(["take", "take hard", "give", "give", "remove"]))
    def lend(self, at, what):
        world, engine = self.world, self.engine(at)
        name = engine.spec.id
        if what.startswith("take"):
            world.tell(e.WorkerReclaimed(name, world.now + 20.0, "the trainer needs it", what == "take hard"))
        elif what == "give":
            world.tell(e.WorkerReturned(name))
        elif len(world.engines) - len(world.removed) > 2:
            world.removed.add(name)
            world.tell(e.WorkerRemoved(name))

    # ---- time, weights, numbers ----

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0, 6.0, 25.0, 130.0]))
    def wait(self, seconds):
        self.world.wait(seconds)
        if seconds in (3.0, 25.0):
            self.world.reload()

    @rule(way=st.sampled_from(list(RefitWay)), in_flight=st.sampled_from(list(InFlight)))
    def refit(self, way, in_flight):
        self.world.deliver()
        self.world.generate(2)
        self.world.deliver()
        self.world.begin_refit(way, in_flight)

    @precondition(lambda self: self.world.begun is not None)
    @rule(at=AT, how=st.sampled_from(["well"] * 6 + ["badly", "end", "end"]), told=st.booleans())
    def weights(self, at, how, told):
        if how == "end":
            self.world.end_refit()
        else:
            for more in range(3):
                self.world.confirm(at + more, how == "well")
        self.go_on(told)

    @rule(what=st.sampled_from(["scale", "release", "hold", "unhold"]), workers=st.integers(0, 5))
    def people(self, what, workers):
        world = self.world
        if what == "scale":
            world.tell(e.ScaleRequested(workers, world.now + 50.0))
        elif what == "release":
            world.tell(e.ScaleReleased())
        elif what == "hold":
            world.tell(e.HoldRequested("validation", workers, world.now + 30.0))
        else:
            world.tell(e.HoldReleased("validation"))

    def teardown(self):
        if not hasattr(self, "world") or self.world.broken:
            return
        world = self.world
        for name in world.engines:
            if name not in world.removed:
                world.tell(e.WorkerReturned(name))
                world.come_back(world.engines[name])
        world.tell(e.ScaleReleased())
        world.reload()
        world.all_well()
        assert all(len(one.answers) == 1 for one in world.clients.values())
        world.replay()
        counted.update(world.counted)
        counted["runs"] += 1
        counted["requests"] += len(world.clients)
        counted["events"] += len(world.journal)


def fate(runs: int, steps: int) -> None:
    run_state_machine_as_test(
        Fate,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )


def test_every_request_is_answered_once_whatever_happens() -> None:
    counted.clear()
    fate(RUNS, STEPS)
    floors = {
        "runs": RUNS // 2,
        "requests": RUNS * 5,
        "SendRequest": RUNS * 4,
        "AbortAttempt": RUNS // 2,
        "resumed": 20,
    }
    floors |= {"sent again from the prompt": 20, "spanning": 5, "RefitOver": RUNS // 8, "up": 20, "down": 5}
    floors |= {"sessions kept": RUNS // 4, "sessions moved": RUNS // 8}
    floors |= {"reloads": RUNS, "gaps": 5, "RefuseRequest": 5, "abort": 10, "cancelled": 10, "failed": 5, "stop": RUNS}
    short = {name: (counted[name], floor) for name, floor in floors.items() if counted[name] < floor}
    assert not short, f"too little happened: {short} of {dict(counted)}"


@pytest.mark.long
def test_every_request_is_answered_once_whatever_happens_for_long() -> None:
    fate(3_000, 100)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    load=st.integers(0, 40),
    engines=st.integers(1, 8),
    down=st.sampled_from([0.2, 0.4, 0.5]),
    up=st.sampled_from([0.6, 0.8, 0.95]),
    cooldown_s=st.sampled_from([0.0, 5.0, 30.0]),
)
def test_a_constant_load_never_moves_workers_back_and_forth(load, engines, down, up, cooldown_s) -> None:
    elastic = ElasticConfig(
        scale_down_threshold=down,
        scale_up_threshold=up,
        scale_down_cooldown=cooldown_s,
        scale_up_cooldown=cooldown_s,
        min_stable_period=0.0,
        monitoring_interval=1.0,
    )
    world = RolloutWorld(RolloutRules(min_workers=1, max_workers=8, capacity=4, monitor_s=1.0), elastic)
    for _ in range(engines):
        world.add(startable=True, limit=4)
    for _ in range(8 - engines):
        world.add(up=False, startable=True, limit=4)
    for _ in range(load):
        world.ask(max_tokens=1_000)
    for _ in range(40):
        world.wait(2.0)
        while world.acts or world.aborts:
            world.do_act(0)
            world.do_abort(0)
            world.deliver()
    directions = [1 if one.workers > one.before else -1 for one in world.machine.steps]
    assert len(set(directions)) <= 1, [(one.before, one.workers, one.reason.sentence) for one in world.machine.steps]
    assert all(one.reason.sentence for one in world.machine.steps)
    serving = sum(one.state is WorkerState.active for one in world.machine.workers())
    assert serving >= 1
