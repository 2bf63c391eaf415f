"""The policy that learns how load comes and goes: what it counts on, what it must never do, and that it runs live."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_scenes import QUICK, Scene, play
from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies import predictive, stream
from trimtab.machines.rollout.policies.load import LoadSample, PolicyMemory, PolicyState, SleepCosts, Taker
from trimtab.machines.rollout.policies.stream import StreamMemory
from trimtab.model.elastic_config import ElasticConfig
from trimtab.rollout import SamplingParams, WorkerState

CONFIG = ElasticConfig(policy="predictive", max_workers=4, monitoring_interval=1.0)
MEASURED = SleepCosts(2.0, 4.0, 1.0)


@dataclass
class Looks:
    """A policy that is asked again and again; whoever it wants serves at the next look."""

    config: ElasticConfig = CONFIG
    costs: SleepCosts = MEASURED
    active: int = 4
    now: float = 0.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = scaling.begin(self.config)

    def look(self, load: int, *, idle: int = 0, queued: int = 0, after_s: float = 1.0, **more: Any) -> int:
        self.now += after_s
        most = self.config.max_workers
        drains = more.pop("drains", 0)
        seen = LoadSample(
            self.now, queued, load - queued, 0, self.active, 0, drains, most - self.active,
            self.config.requests_per_worker_capacity, self.config.min_workers, most, idle=idle, service_s=10.0,
            costs=self.costs, **more,
        )  # fmt: skip
        self.state, decision = scaling.consult(self.state, seen)
        assert decision.reason.code is not ReasonCode.policy_fault, decision.reason.sentence
        self.active = decision.workers
        self.said.append(decision.reason.sentence)
        return decision.workers

    def step(self, *, pause_s: int) -> None:
        """A step and its pause, in which nothing is wrong."""
        for load in (30, 20, 10, 2):
            self.look(load)
        for _ in range(pause_s):
            self.look(0, idle=self.active)


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_nobody_is_given_up_in_a_step_or_pause_before_a_pause_has_been_seen() -> None:
    looks = Looks()
    wanted = [looks.look(30), looks.look(5), looks.look(2, idle=2), *(looks.look(0, idle=4) for _ in range(100))]
    assert set(wanted) == {4}
    assert "not known yet" in looks.said[-1]


def test_idle_workers_go_in_the_tail_all_but_the_least_in_the_pause_and_all_are_back_before_the_next_step() -> None:
    looks = Looks()
    looks.step(pause_s=40)
    assert [looks.look(30), looks.look(20), looks.look(3, idle=1), looks.look(2, idle=1)] == [4, 4, 3, 2]
    wanted = [looks.look(0, idle=looks.active) for _ in range(40)]
    assert wanted[:12] == [1] * 12
    assert wanted[-20:] == [4] * 20  # after one pause of 40 s the next may well be of 30
    assert "the next step is due in" in looks.said[-1]


def asleep_s(*pauses_s: int) -> int:
    """For how long it has only the least in a pause, after such pauses."""
    looks = Looks()
    for pause_s in pauses_s:
        looks.step(pause_s=pause_s)
    for load in (30, 20, 10, 2):
        looks.look(load)
    return sum(looks.look(0, idle=looks.active) == 1 for _ in range(60))


def test_the_more_alike_pauses_were_the_longer_it_sleeps_and_where_they_were_not_it_does_not() -> None:
    alike, spread, irregular = asleep_s(*[60] * 8), asleep_s(60, 55, 65, 58, 62, 60), asleep_s(60, 30, 60, 20)
    assert asleep_s(60) < alike  # one is little to go by
    assert 36 <= alike <= 44
    assert 15 <= spread < alike
    assert irregular == 0


@pytest.mark.parametrize("costs", [SleepCosts(8.0, 60.0, 1.0), SleepCosts(2.0, 25.0, 1.0)])
def test_nobody_goes_where_it_could_not_be_back_before_the_next_step(costs: SleepCosts) -> None:
    looks = Looks(costs=costs)
    for _ in range(3):
        looks.step(pause_s=30)
    assert [looks.look(30), looks.look(3, idle=2), *(looks.look(0, idle=4) for _ in range(25))] == [4] * 27


def test_until_waking_has_been_measured_one_idle_worker_sleeps_and_is_woken_at_once_and_nobody_else() -> None:
    looks = Looks(costs=SleepCosts())
    looks.look(30)
    assert looks.look(3, idle=2) == 3
    assert "how long that takes" in looks.said[-1]
    assert looks.look(3, idle=1, drains=1) == 3
    assert looks.look(3, idle=1) == 4  # asleep: awake again
    wanted = [looks.look(3, idle=2) for _ in range(5)] + [looks.look(0, idle=4) for _ in range(50)]
    assert set(wanted) == {4}


def test_where_none_runs_empty_in_a_step_waking_is_measured_in_the_first_pause() -> None:
    looks = Looks(costs=SleepCosts())
    assert [looks.look(load) for load in (30, 28, 26)] == [4] * 3
    assert looks.look(0, idle=4) == 3
    assert looks.look(0, idle=3) == 4
    assert {looks.look(0, idle=4) for _ in range(50)} == {4}
    looks.costs = MEASURED
    assert [looks.look(load) for load in (30, 28, 26)] == [4] * 3
    assert looks.look(0, idle=4) == 1


def test_bursts_of_unlike_sizes_with_short_pauses_are_a_stream_and_steps_of_like_sizes_are_not() -> None:
    def after(*loads: int) -> int:
        looks = Looks()
        for load in loads:
            looks.look(load, after_s=5.0)
            looks.look(0, idle=looks.active)
        return min(looks.look(1, idle=3, after_s=60.0) for _ in range(10))

    assert after(2, 1, 4, 1, 3, 1, 2, 1) == 1
    assert after(*[30, 29, 31, 30] * 2) == 4


def test_workers_wait_for_as_long_as_going_and_coming_takes_where_more_came_in_a_step_before() -> None:
    looks = Looks()
    looks.step(pause_s=60)
    looks.look(30)
    looks.look(10, after_s=12.0)
    looks.look(12)  # more came
    wanted = [looks.look(4, idle=2) for _ in range(12)]
    assert wanted[:7] == [4] * 7
    assert wanted[-1] == 2


def test_queued_requests_of_a_step_have_all_workers() -> None:
    looks = Looks(active=1)
    looks.step(pause_s=40)
    looks.active = 2
    assert looks.look(90, queued=40) == 4


def test_it_gives_up_only_for_takers_where_the_settings_say_so_and_nothing_where_they_are_off() -> None:
    looks = Looks(replace(CONFIG, scale_down_requires_demand=True))
    looks.step(pause_s=60)
    looks.step(pause_s=5)
    assert looks.active == 4
    assert looks.look(0, idle=4, takers=(Taker("trainer", 2, 50.0),)) == 2
    assert "trainer" in looks.said[-1]
    off = Looks(replace(CONFIG, enable_elastic=False))
    for _ in range(2):
        off.step(pause_s=60)
    assert off.active == 4


def test_an_unknown_load_changes_nothing_and_is_not_learned_from() -> None:
    looks = Looks()
    looks.step(pause_s=60)
    looks.look(30)
    kept = looks.state.memory.kept
    assert looks.look(0, idle=4, fresh=False) == 4
    assert looks.state.memory.kept == kept


# ---- streams --------------------------------------------------------------------------------------------------------


def streaming(looks: Looks, loads: list[int]) -> list[int]:
    capacity = looks.config.requests_per_worker_capacity
    return [looks.look(load, queued=max(0, load - looks.active * capacity), after_s=5.0) for load in loads]


WIDE = replace(CONFIG, max_workers=16, requests_per_worker_capacity=32, monitoring_interval=5.0)


def test_a_stream_has_as_many_workers_as_its_last_minutes_needed() -> None:
    looks = Looks(WIDE, active=16)
    swing = [60, 66, 62, 70, 64, 68, 61]
    wanted = streaming(looks, swing * 20)
    assert wanted[-1] == 3
    assert sorted(wanted, reverse=True) == wanted  # never up again for the same load
    assert max(before / after for before, after in pairwise(wanted)) <= 2.0


def test_a_stream_that_rises_has_another_worker_before_anybody_waits_long() -> None:
    looks = Looks(WIDE, active=16)
    streaming(looks, [60, 66, 62, 70] * 20)
    rising = list(range(70, 200, 4))
    wanted = streaming(looks, rising)
    # A request takes 10 s, so a tenth of the load waits for a second.
    assert all(load <= 1.15 * 32 * awake for load, awake in zip(rising[1:], wanted, strict=False))


def test_a_spike_of_one_look_moves_nobody() -> None:
    looks = Looks(WIDE, active=16)
    streaming(looks, [60, 66, 62, 70] * 20)
    assert set(streaming(looks, [66, 110, 64, 62, 60])) == {3}


def test_a_stream_that_stops_for_a_while_is_still_a_stream() -> None:
    looks = Looks(WIDE, active=16)
    streaming(looks, [60, 66, 62, 70] * 20)
    assert streaming(looks, [0] * 60)[-1] == 1
    assert looks.look(20, after_s=5.0) == 1


def test_a_worker_that_has_more_is_slower_so_fewer_have_more_than_their_share() -> None:
    seen = LoadSample(0.0, 0, 64, 0, 4, 0, 0, 0, 32, 1, 8)
    assert stream.on(32, 55.0, 4, 3) == pytest.approx(64, abs=1)
    assert stream.on(32, 64.0, 3, 4) == pytest.approx(55, abs=1)
    assert stream.on(32, 200.0, 4, 1) == float("inf")
    assert len(StreamMemory().look(seen).look(replace(seen, now=1.0)).loads) == 1  # one for every few seconds


# ---- whatever happens -----------------------------------------------------------------------------------------------

moments = st.tuples(
    st.integers(0, 200), st.integers(0, 4), st.sampled_from([0.1, 1.0, 5.0, 40.0]), st.booleans(), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(moments, max_size=60), st.booleans(), st.integers(0, 60))
def test_whatever_is_seen_it_decides_within_the_limits_and_the_same_after_a_snapshot(
    story: list[tuple[int, int, float, bool, bool]], measured: bool, cut: int
) -> None:
    costs = MEASURED if measured else SleepCosts()
    one, other = Looks(costs=costs), Looks(costs=costs)
    for turn, (load, idle, after_s, fresh, queued) in enumerate(story):
        if turn == cut:
            plain = json.loads(json.dumps(encode(other.state.memory), allow_nan=False))
            other.state = PolicyState(CONFIG, decode(PolicyMemory, plain))
        now = {"idle": min(idle, one.active), "after_s": after_s, "fresh": fresh, "queued": load // 3 if queued else 0}
        before = one.active
        assert one.look(load, **now) == other.look(load, **now)
        assert 1 <= one.active <= 4
        assert fresh or one.active == before
        assert len(json.dumps(encode(one.state.memory))) < 20_000


def test_policies_are_known_by_name() -> None:
    assert scaling.policy_of(CONFIG) is predictive.predictive
    with pytest.raises(InputError, match="did you mean predictive"):
        scaling.begin(replace(CONFIG, policy="predictiv"))


def test_what_another_policy_has_kept_counts_for_nothing() -> None:
    looks = Looks()
    for kept in ([1, 2], {"mine": 3}, {"pattern": {"new": 1}, "stream": {}}):
        looks.state = replace(looks.state, memory=replace(looks.state.memory, kept=kept))
        assert looks.look(30) == 4


# ---- live -----------------------------------------------------------------------------------------------------------


def test_a_live_pool_learns_the_pause_sleeps_in_it_and_is_awake_again_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predictive, "WEIGHTS_S", 0.5)
    monkeypatch.setattr(predictive, "BEGIN_S", 0.2)

    async def act(scene: Scene) -> None:
        pool = scene.pool
        machine = pool._core.machine

        def states() -> list[WorkerState]:
            return [one.state for one in pool.workers()]

        async def step() -> None:
            prompts = [(one,) for one in range(1, 10)]
            answers = await pool.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0))
            assert all(len(one.samples[0].token_ids) == 20 for one in answers)

        # One long answer, in whose time somebody idle sleeps and wakes once, and that is measured.
        async with scene.running(100_000) as long:
            assert await pool.until(lambda: machine.sample().costs.wake_s is not None, 60.0)
            assert await pool.until(lambda: states() == [WorkerState.active] * 3, 60.0)
            long.cancel()
        assert await pool.until(lambda: machine.sample().load == 0, 60.0)
        costs = machine.sample().costs
        await asyncio.sleep(4.0 + 5 * (costs.wake_s or 0.0) + 5 * (costs.sleep_s or 0.0))  # the trainer trains
        await step()
        assert await pool.until(lambda: states().count(WorkerState.inactive) == 2, 60.0)
        assert await pool.until(lambda: states() == [WorkerState.active] * 3, 60.0)  # and nobody has asked
        assert "the next step is due" in machine.steps[-1].reason.sentence
        await step()

    elastic = replace(CONFIG, max_workers=3, monitoring_interval=0.1)
    play(act, kinds=("sglang",) * 3, rules=replace(QUICK, max_workers=3), elastic=elastic)
