"""How many workers: the settings, the policies, and what a policy must never do."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.codec import decode, encode
from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.formats.rollout import elastic_config as elastic_config_file
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import Decision, LoadSample, PolicyMemory, PolicyState, SleepCosts, Taker
from trimtab.machines.rollout.policies.policy import consult
from trimtab.model.elastic_config import ElasticConfig

DEFAULTS = ElasticConfig()
MEASURED_NOT = SleepCosts()


def sample(now: float = 0.0, load: int = 0, active: int = 4, **others: Any) -> LoadSample:
    """A sample with the default limits; the load runs unless said otherwise."""
    given_here = {"queued": 0, "running": load, "draining": 0, "starting": 0, "draining_workers": 0,
                  "ready_to_wake": 8 - active, "capacity": 8, "min_workers": 1, "max_workers": 8}  # fmt: skip
    return LoadSample(now=now, active=active, **{**given_here, **others})


@dataclass
class Fleet:
    """Workers that come and go as decided, after a while; the load is what it is told to be."""

    config: ElasticConfig = DEFAULTS
    active: int = 4
    wake_s: float = 0.0
    drain_s: float = 0.0
    takers: tuple[Taker, ...] = ()
    costs: SleepCosts = MEASURED_NOT
    least: int | None = None
    now: float = 0.0
    waking: list[float] = field(default_factory=list)  # when each will serve
    leaving: list[float] = field(default_factory=list)  # when each will be gone
    decisions: list[Decision] = field(default_factory=list)
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # when, from, to

    def __post_init__(self) -> None:
        self.state = scaling.begin(self.config)

    @property
    def serving(self) -> int:
        return self.active + len(self.waking)

    def look(self, queued: int = 0, running: int = 0, draining: int = 0, fresh: bool = True) -> Decision:
        """One look at the load, one interval after the last; the decision is carried out."""
        self.active += sum(at <= self.now for at in self.waking)
        self.waking = [at for at in self.waking if at > self.now]
        self.leaving = [at for at in self.leaving if at > self.now]
        seen = LoadSample(
            self.now, queued, running, draining, self.active, len(self.waking), len(self.leaving),
            max(0, self.config.max_workers - self.serving), self.config.requests_per_worker_capacity,
            self.config.min_workers if self.least is None else self.least, self.config.max_workers,
            self.takers, self.costs, fresh,
        )  # fmt: skip
        self.state, decision = consult(self.state, seen)
        self.decisions.append(decision)
        if decision.workers != self.serving:
            self.steps.append((self.now, self.serving, decision.workers))
            self._carry_out(decision.workers)
        self.now += self.config.monitoring_interval
        return decision

    def _carry_out(self, wanted: int) -> None:
        while self.serving < wanted:
            self.waking.append(self.now + self.wake_s)
            self.leaving = self.leaving[1:]
        while self.serving > wanted:
            if self.waking:
                self.waking.pop()
            else:
                self.active -= 1
            self.leaving.append(self.now + self.drain_s)

    def run(self, seconds: float, **load: int) -> None:
        for _ in range(round(seconds / self.config.monitoring_interval) + 1):
            self.look(**load)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_every_setting_has_its_documented_default() -> None:
    assert {one.name: getattr(DEFAULTS, one.name) for one in fields(ElasticConfig)} == {
        "scale_down_threshold": 0.5, "scale_up_threshold": 0.8, "min_workers": 1, "max_workers": 8,
        "requests_per_worker_capacity": 8, "monitoring_interval": 5.0, "drain_timeout": 30.0,
        "scale_down_cooldown": 60.0, "scale_up_cooldown": 30.0, "min_stable_period": 10.0, "enable_elastic": True,
        "policy": "threshold", "scale_down_requires_demand": False,
    }  # fmt: skip
    assert DEFAULTS.warnings() == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"scale_down_threshold": 0.8, "scale_up_threshold": 0.5}, "one load would ask for fewer workers and for more"),
        ({"scale_down_threshold": 0.8}, "is not below"),
        ({"scale_down_threshold": -0.1}, "a number of 0 or more"),
        ({"scale_up_threshold": float("nan")}, "a number of 0 or more"),
        ({"min_workers": 9}, "min_workers 9 is above max_workers 8"),
        ({"min_workers": 0}, "1 or more"),
        ({"max_workers": 2.5}, "whole number"),
        ({"min_workers": True}, "whole number"),
        ({"requests_per_worker_capacity": 0}, "1 or more"),
        ({"monitoring_interval": 0}, "a number of 0.01 or more"),
        ({"drain_timeout": -1}, "a number of 0 or more"),
        ({"min_stable_period": "10"}, "a number of 0 or more"),
        ({"scale_up_cooldown": float("inf")}, "a number of 0 or more"),
        ({"enable_elastic": "yes"}, "true or false"),
        ({"policy": ""}, "name of a policy"),
        ({"policy": 3}, "name of a policy"),
    ],
)
def test_settings_that_contradict_themselves_are_errors_that_name_the_key(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        ElasticConfig(**wrong)
    assert caught.value.where is not None
    assert caught.value.where.removeprefix("elastic_config.") in wrong


@pytest.mark.parametrize(
    ("risky", "said"),
    [
        ({"scale_down_threshold": 0.7}, "narrow"),
        ({"scale_down_threshold": 0.0}, "no worker is ever given up"),
        ({"scale_up_threshold": 1.2}, "wait in the queue"),
        ({"requests_per_worker_capacity": 1}, "spare worker"),
        ({"min_workers": 8}, "nothing is ever scaled"),
        ({"scale_down_cooldown": 30.0, "scale_up_cooldown": 40.0}, "given up faster"),
        ({"min_stable_period": 0.0}, "single look"),
        ({"monitoring_interval": 12.0}, "not seen"),
        ({"scale_up_cooldown": 2.0}, "over before the next look"),
        ({"drain_timeout": 0.0}, "interrupts every request"),
        ({"drain_timeout": 90.0}, "while others still drain"),
    ],
)
def test_risky_settings_are_warned_of_one_sentence_each(risky: dict[str, Any], said: str) -> None:
    found = ElasticConfig(**risky).warnings()
    assert len(found) == 1
    assert said in found[0]
    assert ElasticConfig(**risky, enable_elastic=False).warnings() == []


BLOCK = """
trainer: {nnodes: 1}
elastic_config:
  enable_elastic: true
  scale_down_threshold: 0.4
  max_workers: 6
  scale_down_cooldown: 120
  scale_down_requires_demand: true
"""


def test_the_block_of_a_training_config_is_read_and_the_rest_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(BLOCK)
    read = elastic_config_file.read(path)
    assert read == ElasticConfig(
        scale_down_threshold=0.4, max_workers=6, scale_down_cooldown=120, scale_down_requires_demand=True
    )
    assert elastic_config_file.from_text("trainer: {}") is None
    assert elastic_config_file.from_text("elastic_config:") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("elastic_config: {scale_up_treshold: 0.9}", "did you mean scale_up_threshold?"),
        ("elastic_config: {workers: 0.9}", "did you mean"),
        ("elastic_config: {zzz: 1}", "keys here: scale_down_threshold"),
        ("elastic_config: {max_workers: two}", "t.yaml:1: elastic_config.max_workers"),
        ("elastic_config: {min_workers: 5, max_workers: 2}", "t.yaml:1: elastic_config.min_workers"),
        ("elastic_config: 3", "a section of keys"),
        ("elastic_confg: {max_workers: 2}", "did you mean elastic_config?"),
        ("[1]", "a mapping of keys"),
    ],
)
def test_a_wrong_block_says_the_file_the_key_and_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        elastic_config_file.from_text(text, "t.yaml")
    assert said in str(caught.value)
    assert "t.yaml" in str(caught.value)


def test_a_file_without_the_block_says_so(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("trainer: {}")
    with pytest.raises(InputError, match="no elastic_config block"):
        elastic_config_file.read(path)


# ---- what the load is ------------------------------------------------------------------------------------------------


def test_queued_load_keeps_workers_and_asks_for_more() -> None:
    fleet = Fleet(active=4)
    fleet.run(120, queued=64)
    assert [(before, after) for _, before, after in fleet.steps] == [(4, 8)]


def test_load_on_draining_workers_counts_and_is_not_given_up_for() -> None:
    fleet = Fleet(active=4)
    fleet.run(300, running=4, draining=14)  # 18 of 32 by all, 4 of 32 by what runs
    assert fleet.steps == []


def test_draining_workers_are_called_back_when_the_load_returns() -> None:
    fleet = Fleet(active=8, drain_s=1000)
    fleet.run(60, running=4)
    assert (fleet.serving, len(fleet.leaving)) == (1, 7)
    fleet.run(60, running=8, draining=40)
    assert fleet.serving == 8
    assert "7 of them called back" in next(
        one.reason.sentence for one in fleet.decisions if one.reason.code is ReasonCode.load_high
    )


def test_workers_that_start_count_as_if_they_served() -> None:
    fleet = Fleet(active=1, wake_s=1000)
    fleet.run(600, queued=20)
    assert [(before, after) for _, before, after in fleet.steps] == [(1, 4)]


# ---- when and how far ------------------------------------------------------------------------------------------------


def test_one_to_eight_workers_takes_one_step() -> None:
    fleet = Fleet(active=1)
    fleet.run(60, queued=56, running=8)
    assert fleet.steps == [(10.0, 1, 8)]


def test_many_workers_are_given_up_in_one_step_when_the_load_fits_what_remains() -> None:
    fleet = Fleet(active=8)
    fleet.run(60, running=9)
    assert fleet.steps == [(10.0, 8, 2)]  # 9 of 16 requests; on one worker they would be too many


def test_a_worker_is_not_given_up_when_the_rest_would_be_near_the_upper_threshold() -> None:
    fleet = Fleet(active=2)
    fleet.run(600, running=7)  # 0.44 on two, 0.88 on one
    assert fleet.steps == []
    assert "on one worker fewer" in fleet.decisions[-1].reason.sentence


@pytest.mark.parametrize("interval", [0.01, 0.1, 1.0, 3.0, 5.0])
@pytest.mark.parametrize(("active", "load"), [(1, 64), (8, 1)])
def test_the_stable_period_is_time_however_many_looks_it_has(interval: float, active: int, load: int) -> None:
    config = replace(DEFAULTS, monitoring_interval=interval)
    fleet = Fleet(config, active)
    fleet.run(9.9 - interval, running=load)
    assert fleet.steps == []
    fleet.run(10, running=load)
    assert len(fleet.steps) == 1
    assert 9.9 <= fleet.steps[0][0] <= 10.0 + interval


def test_many_looks_do_not_make_the_memory_grow() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=0.01), 4)
    fleet.run(25, running=18)
    assert len(fleet.state.memory.spans) <= 70


def test_overload_in_bursts_is_overload() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=1.0), active=2)
    for turn in range(60):
        fleet.look(running=16, queued=(40, 0, 25, 3, 60, 0)[turn % 6])
    assert fleet.steps
    assert all(after > before for _, before, after in fleet.steps)


def test_overload_with_lulls_below_the_threshold_is_overload_while_the_mean_is_above() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=1.0), active=2)
    for turn in range(60):
        fleet.look(running=40 if turn % 6 < 4 else 5)
    assert fleet.steps
    assert fleet.steps[0][0] >= 10.0


def test_a_step_that_falls_into_a_lull_is_as_large_as_the_mean_asks_for() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=1.0), active=2)
    fleet.run(9, running=40)
    fleet.look(running=14)
    assert fleet.steps == [(10.0, 2, 8)]  # 40 on 8 workers; 14 would fit 3


def test_a_single_spike_moves_nobody() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=1.0), active=4)
    for turn in range(60):
        fleet.look(running=4000 if 20 <= turn < 25 else 18)
    assert fleet.steps == []


def test_two_spikes_with_calm_between_are_no_overload() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=1.0), active=4)
    for turn in range(60):
        fleet.look(running=4000 if turn in (20, 30) else 18)
    assert fleet.steps == []


def test_a_dip_in_the_load_gives_nobody_up() -> None:
    fleet = Fleet(replace(DEFAULTS, monitoring_interval=1.0), active=4)
    for turn in range(120):
        fleet.look(running=1 if turn % 10 < 8 else 20)
    assert fleet.steps == []


def test_steps_keep_their_distance() -> None:
    config = replace(DEFAULTS, monitoring_interval=1.0, max_workers=64)
    fleet = Fleet(config, active=1)
    for turn in range(600):
        fleet.look(running=8 + turn if turn < 300 else max(0, 308 - 4 * (turn - 300)))
    ups = [at for at, before, after in fleet.steps if after > before]
    downs = [at for at, before, after in fleet.steps if after < before]
    assert len(ups) > 3
    assert len(downs) > 1
    assert min(b - a for a, b in itertools.pairwise(ups)) >= config.scale_up_cooldown
    assert min(b - a for a, b in itertools.pairwise(downs)) >= config.scale_down_cooldown
    assert downs[0] - ups[-1] >= config.scale_down_cooldown


def test_a_worker_that_was_just_added_is_not_given_up_before_the_cooldown() -> None:
    fleet = Fleet(active=1)
    fleet.run(20, running=60)
    fleet.run(200, running=1)
    assert fleet.steps == [(10.0, 1, 8), (70.0, 8, 1)]


def test_limits_hold_at_once_and_leave_cooldowns_alone() -> None:
    fleet = Fleet(active=1)
    fleet.run(30, running=2)
    fleet.least = 6
    assert fleet.look(running=2).workers == 6
    assert fleet.decisions[-1].reason.code is ReasonCode.limits
    assert fleet.state.memory.last_up is None
    _, decision = consult(scaling.begin(DEFAULTS), sample(active=6, max_workers=2))
    assert (decision.workers, decision.reason.code) == (2, ReasonCode.limits)


def test_requests_that_nobody_serves_are_not_kept_waiting() -> None:
    _, decision = consult(scaling.begin(DEFAULTS), sample(active=0, queued=12, min_workers=0))
    assert decision.workers == 3
    _, decision = consult(scaling.begin(DEFAULTS), sample(active=0, min_workers=0))
    assert decision.workers == 0


def test_at_the_greatest_number_a_reason_says_how_many_would_be_right() -> None:
    fleet = Fleet(active=8)
    fleet.run(60, queued=100)
    assert fleet.steps == []
    assert fleet.decisions[-1].reason.code is ReasonCode.limits
    assert "20 workers are needed" in fleet.decisions[-1].reason.sentence


def test_the_master_switch_leaves_the_workers_as_they_are() -> None:
    fleet = Fleet(replace(DEFAULTS, enable_elastic=False), active=4)
    fleet.run(300, queued=500)
    fleet.run(300)
    assert fleet.steps == []
    assert {one.reason.code for one in fleet.decisions} == {ReasonCode.switched_off}


# ---- what is not known -----------------------------------------------------------------------------------------------


def test_a_load_that_is_not_known_moves_nobody() -> None:
    fleet = Fleet(active=4)
    for _ in range(60):
        fleet.look(fresh=False)
    assert fleet.steps == []
    assert {one.reason.code for one in fleet.decisions} == {ReasonCode.load_unknown}


def test_one_failed_look_starts_the_evidence_of_little_load_anew() -> None:
    fleet = Fleet(active=4)
    fleet.look(running=1)
    fleet.look(running=1)
    fleet.look(running=1, fresh=False)
    fleet.look(running=1)
    fleet.look(running=1)
    assert fleet.steps == []
    fleet.look(running=1)
    assert [(before, after) for _, before, after in fleet.steps] == [(4, 1)]


def test_overload_is_not_forgotten_for_a_failed_look() -> None:
    fleet = Fleet(active=1)
    for turn in range(6):
        fleet.look(queued=30, fresh=turn % 2 == 0)
    assert [before for _, before, _ in fleet.steps] == [1]


@pytest.mark.parametrize("load", [0, 64])
def test_two_looks_far_apart_are_no_evidence_of_what_was_between(load: int) -> None:
    fleet = Fleet(active=4)
    fleet.look(running=load)
    fleet.now += 1000
    fleet.look(running=load)
    assert fleet.steps == []


# ---- somebody who needs the workers ----------------------------------------------------------------------------------

WANTED = replace(DEFAULTS, scale_down_requires_demand=True)
MEASURED = SleepCosts(sleep_s=4.0, wake_s=6.0)


def test_nobody_needs_a_worker_so_none_is_given_up() -> None:
    fleet = Fleet(WANTED, active=8, costs=MEASURED)
    fleet.run(300, running=1)
    assert fleet.steps == []
    assert fleet.decisions[-1].reason.code is ReasonCode.no_taker


def test_a_taker_that_needs_it_for_less_than_sleep_and_wake_gets_none() -> None:
    fleet = Fleet(WANTED, active=8, costs=MEASURED, takers=(Taker("trainer", 4, 9.0),))
    fleet.run(300, running=1)
    assert fleet.steps == []
    assert "trainer only for 9 s" in fleet.decisions[-1].reason.sentence


def test_no_more_is_given_up_than_somebody_named_can_use() -> None:
    takers = (Taker("trainer", 2, 30.0), Taker("eval", 1, 11.0), Taker("reward", 4, 10.0))
    fleet = Fleet(WANTED, active=8, costs=MEASURED, takers=takers)
    fleet.run(30, running=1)
    assert [(before, after) for _, before, after in fleet.steps] == [(8, 5)]
    told = next(one.reason for one in fleet.decisions if one.reason.code is ReasonCode.load_low).sentence
    assert "trainer (30 s), eval (11 s)" in told
    assert "reward" not in told


def test_a_taker_gets_only_what_the_load_can_spare() -> None:
    fleet = Fleet(WANTED, active=4, costs=MEASURED, takers=(Taker("trainer", 8, 300.0),))
    fleet.run(300, running=12)
    assert fleet.serving == 3


def test_until_sleep_and_wake_are_measured_one_worker_is_given_up_to_a_taker_that_stays_long() -> None:
    fleet = Fleet(WANTED, active=8, takers=(Taker("trainer", 4, 300.0),))
    fleet.run(30, running=1)
    assert [(before, after) for _, before, after in fleet.steps] == [(8, 7)]
    assert "assumed" in next(one.reason for one in fleet.decisions if one.reason.code is ReasonCode.load_low).sentence
    fleet = Fleet(WANTED, active=8, takers=(Taker("trainer", 4, 50.0),))
    fleet.run(300, running=1)
    assert fleet.steps == []


# ---- what was expected -----------------------------------------------------------------------------------------------


def test_a_step_says_what_it_expects_and_a_later_decision_that_it_came_true() -> None:
    fleet = Fleet(active=1, wake_s=12.0)
    fleet.run(10, running=16)
    assert fleet.steps == [(10.0, 1, 4)]
    assert fleet.decisions[-1].expects == "4 workers serve, load at most 0.65 of capacity"
    assert fleet.look(running=16).came_true is None  # they still start
    assert fleet.decisions[-1].expects == "4 workers serve, load at most 0.65 of capacity"
    fleet.look(running=16)
    decision = fleet.look(running=16)
    assert decision.came_true is True
    assert decision.checked == "the last step came true (4 workers, load 0.50)"


def test_the_next_step_tells_what_became_of_the_last_one() -> None:
    fleet = Fleet(active=1)
    fleet.run(20, running=16)
    fleet.run(120, running=60)
    assert [(before, after) for _, before, after in fleet.steps] == [(1, 4), (4, 8)]
    reasons = [one.reason.sentence for one in fleet.decisions if one.reason.code is ReasonCode.load_high]
    assert "came true" not in reasons[0]
    assert "the last step came true (4 workers, load 0.50)" in reasons[1]


def test_a_step_that_was_not_carried_out_did_not_come_true() -> None:
    state, now = scaling.begin(DEFAULTS), 0.0
    told = []
    while now < 100:
        state, decision = consult(state, sample(now, load=30, active=1))
        told.append(decision)
        now += 5
    steps = [one for one in told if one.workers > 1]
    assert len(steps) > 1, "asked for again after the cooldown"
    assert any(one.came_true is False for one in told)
    assert "did not come true (6 and at most 0.65 expected; 1 worker, load 3.75)" in steps[1].reason.sentence


def test_what_a_look_without_a_step_expected_is_checked_too() -> None:
    fleet = Fleet(active=4)
    fleet.look(running=20)
    assert fleet.look(running=20).came_true is True
    decision = fleet.look(running=40)
    assert decision.came_true is False
    assert "4 and at most 0.80 expected; 4 workers, load 1.25" in decision.checked


# ---- policies of one's own -------------------------------------------------------------------------------------------


def two_more(state: PolicyState, seen: LoadSample) -> tuple[PolicyState, Decision]:
    """Two workers more than before, whatever happens; counts its calls."""
    memory = replace(state.memory, kept=(state.memory.kept or 0) + 1)
    decision = Decision(seen.serving + 2, Reason(ReasonCode.by_hand, "two more"), "two more serve")
    return replace(state, memory=memory), decision


def test_a_users_function_decides_within_the_limits() -> None:
    fleet = Fleet(replace(DEFAULTS, policy=two_more), active=1)
    fleet.run(25)
    assert [after for _, _, after in fleet.steps] == [3, 5, 7, 8]
    assert fleet.state.memory.kept == 6
    assert fleet.decisions[-1].reason.code is ReasonCode.limits
    assert "10 workers were wanted, at most 8 are allowed" in fleet.decisions[-1].reason.sentence


@pytest.fixture
def registered() -> Iterator[None]:
    scaling.register("two-more")(two_more)
    yield
    del scaling.policies["two-more"]


def test_the_policy_in_the_docs_decides() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "rollout-tuning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    block = next(one for one in blocks if "@register" in one)
    known: dict[str, Any] = {}
    try:
        exec(block, known)
        _, decision = consult(scaling.begin(known["config"]), sample(active=1, queued=25))
        assert decision.workers == 4
        assert decision.reason.sentence == "25 queued"
    finally:
        scaling.policies.pop("queue-only", None)


def test_every_warning_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "rollout-tuning.md").read_text(encoding="utf-8")
    rows = page.split("## Warnings")[1].split("## ")[0].count("\n| ") - 1
    assert rows == len(DEFAULTS._risks())
    for one in fields(ElasticConfig):
        assert f"`{one.name}`" in page, one.name


@pytest.mark.usefixtures("registered")
def test_a_registered_policy_is_found_by_its_name() -> None:
    assert scaling.policy_of(replace(DEFAULTS, policy="two-more")) is two_more
    with pytest.raises(InputError, match="already"):
        scaling.register("two-more")(scaling.static)


def test_a_name_that_nobody_has_is_an_error_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean threshold"):
        scaling.begin(replace(DEFAULTS, policy="treshold"))
    with pytest.raises(InputError, match="known: static, threshold, predictive"):
        scaling.begin(replace(DEFAULTS, policy="xyz"))


def raises(state: PolicyState, seen: LoadSample) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (raises, "policy raises: it raised ZeroDivisionError: division by zero"),
        (lambda state, seen: None, "it raised TypeError"),
        (lambda state, seen: (state, 3), "a state and a decision"),
        (lambda state, seen: (None, Decision(1, Reason(ReasonCode.by_hand, "x"), "y")), "a state and a decision"),
        (lambda state, seen: (state, Decision(-1, Reason(ReasonCode.by_hand, "x"), "y")), "-1 is no number"),
        (lambda state, seen: (state, Decision(2.5, Reason(ReasonCode.by_hand, "x"), "y")), "2.5 is no number"),  # type: ignore[arg-type]
        (lambda state, seen: (state, Decision(1, Reason(ReasonCode.by_hand, ""), "y")), "no reason"),
    ],
)
def test_a_policy_that_fails_moves_nobody_and_is_named(policy: Callable[..., Any], said: str) -> None:
    state = scaling.begin(replace(DEFAULTS, policy=policy))
    after, decision = consult(state, sample(load=60, active=3))
    assert (after, decision.workers, decision.reason.code) == (state, 3, ReasonCode.policy_fault)
    assert said in decision.reason.sentence


def test_the_static_policy_has_all_workers_serve_whatever_the_load() -> None:
    fleet = Fleet(replace(DEFAULTS, policy="static"), active=3)
    fleet.run(100, queued=99)
    fleet.run(100, queued=0)
    assert fleet.steps == [(0.0, 3, DEFAULTS.max_workers)]


def test_samples_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="at least 5 and at most 4"):
        sample(min_workers=5, max_workers=4)
    with pytest.raises(InputError, match="at least one request"):
        sample(capacity=0)


# ---- whatever happens ------------------------------------------------------------------------------------------------

shares = st.floats(0.05, 1.5)


@st.composite
def configs(draw: st.DrawFn) -> ElasticConfig:
    low, high = sorted(draw(st.tuples(shares, shares).filter(lambda two: abs(two[0] - two[1]) > 1e-6)))
    least = draw(st.integers(1, 6))
    return ElasticConfig(
        scale_down_threshold=low,
        scale_up_threshold=high,
        min_workers=least,
        max_workers=draw(st.integers(least, 24)),
        requests_per_worker_capacity=draw(st.integers(1, 20)),
        monitoring_interval=draw(st.sampled_from([0.5, 1.0, 5.0])),
        scale_down_cooldown=draw(st.sampled_from([0.0, 1.0, 60.0])),
        scale_up_cooldown=draw(st.sampled_from([0.0, 1.0, 30.0])),
        min_stable_period=draw(st.sampled_from([0.0, 3.0, 10.0])),
        scale_down_requires_demand=draw(st.booleans()),
    )


taker_lists = st.lists(
    st.builds(Taker, st.sampled_from(["trainer", "eval"]), st.integers(0, 4), st.floats(0, 100)), max_size=2
).map(tuple)
loads = st.tuples(st.integers(0, 300), st.integers(0, 200), st.integers(0, 50))


@settings(max_examples=80, deadline=None)
@given(configs(), st.integers(0, 30), loads, st.sampled_from([0.0, 7.0]), st.sampled_from([0.0, 13.0]), taker_lists)
def test_constant_load_moves_workers_in_one_direction_once_and_never_back(
    config: ElasticConfig, active: int, load: tuple[int, int, int], wake_s: float, drain_s: float,
    takers: tuple[Taker, ...],
) -> None:  # fmt: skip
    fleet = Fleet(config, active, wake_s, drain_s, takers, MEASURED)
    for _ in range(60):
        fleet.look(*load)
    moves = [(after > before) for _, before, after in fleet.steps]
    # The first may be for the limits' sake; after it the load decides, in one direction.
    by_load = moves[1:] if config.min_workers > active or config.max_workers < active else moves
    assert len(set(by_load)) <= 1, fleet.steps
    assert len(by_load) <= 1 or config.scale_down_requires_demand, fleet.steps


@settings(max_examples=80, deadline=None)
@given(configs(), st.integers(0, 30), st.lists(st.tuples(loads, st.booleans()), max_size=40), taker_lists)
def test_no_decision_is_outside_the_limits_or_without_reason_and_expectation(
    config: ElasticConfig, active: int, story: list[tuple[tuple[int, int, int], bool]], takers: tuple[Taker, ...]
) -> None:
    fleet = Fleet(config, active, 3.0, 4.0, takers, MEASURED)
    for load, fresh in story:
        before, known_since = fleet.serving, fleet.state.memory.known_since
        decision = fleet.look(*load, fresh=fresh)
        assert config.min_workers <= decision.workers <= config.max_workers
        assert decision.reason.sentence
        assert decision.expects
        if not fresh and config.min_workers <= before <= config.max_workers:
            assert decision.workers == before
        if decision.reason.code is ReasonCode.load_low:
            remaining = decision.workers * config.requests_per_worker_capacity
            assert sum(load) <= config.scale_up_threshold * remaining, "the load would not fit"
            assert known_since is not None or config.min_stable_period == 0
            at = fleet.now - config.monitoring_interval
            assert known_since is None or at - known_since >= config.min_stable_period - 1e-6


@settings(max_examples=80, deadline=None)
@given(configs(), st.integers(0, 24), st.lists(loads, max_size=20), st.lists(st.integers(0, 400), min_size=2))
def test_more_load_never_means_fewer_workers(
    config: ElasticConfig, active: int, story: list[tuple[int, int, int]], ends: list[int]
) -> None:
    config = replace(config, scale_down_requires_demand=False)
    fleet = Fleet(config, active)
    for load in story:
        fleet.look(*load)
    last = [
        consult(
            fleet.state,
            sample(fleet.now, active=fleet.serving, queued=queued, min_workers=config.min_workers,
                   max_workers=config.max_workers, capacity=config.requests_per_worker_capacity),
        )[1].workers
        for queued in sorted(ends)
    ]  # fmt: skip
    assert last == sorted(last)


@settings(max_examples=40, deadline=None)
@given(configs(), st.integers(0, 24), st.lists(st.tuples(loads, st.booleans()), max_size=25), st.integers(0, 25))
def test_a_state_that_was_put_away_and_taken_up_again_decides_the_same(
    config: ElasticConfig, active: int, story: list[tuple[tuple[int, int, int], bool]], cut: int
) -> None:
    one, other = Fleet(config, active), Fleet(config, active)
    for turn, (load, fresh) in enumerate(story):
        if turn == cut:
            plain = json.loads(json.dumps(encode(other.state.memory), allow_nan=False))
            other.state = PolicyState(config, decode(PolicyMemory, plain))
        assert one.look(*load, fresh=fresh) == other.look(*load, fresh=fresh)
