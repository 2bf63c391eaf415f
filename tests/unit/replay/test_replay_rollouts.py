"""Rollouts under a virtual clock: the machine that runs live, engines that are arithmetic, policies side by side."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimtab.cli.app import run as command
from trimtab.core.errors import InputError
from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.machines.rollout.policies.load import LoadSample, PolicyState, SleepCosts
from trimtab.machines.rollout.policies.policy import begin, consult
from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.common.comparison import percentile
from trimtab.replay.common.traces import RequestRow
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.rollout import scenario as rollout_scenario
from trimtab.replay.rollout.driver import (
    PROFILES,
    EngineSpeed,
    LengthProfile,
    RolloutOutcome,
    RolloutReplay,
    SimulatedEngine,
    SimulatedFleet,
    least_engine_s,
)
from trimtab.replay.rollout.scenario import as_documented, clairvoyant_engine_s, ray_serve, run_rollout

QUICK: dict[str, Any] = {
    "monitoring_interval": 1.0,
    "min_stable_period": 3.0,
    "scale_up_cooldown": 5.0,
    "scale_down_cooldown": 10.0,
    "drain_timeout": 5.0,
}
FLEET = SimulatedFleet(4, 32, training_s=40.0)
SHORT = PROFILES["short"]


def elastic(policy: Any = "threshold", **more: Any) -> ElasticConfig:
    return ElasticConfig(policy=policy, max_workers=4, requests_per_worker_capacity=8, **{**QUICK, **more})


def static(count: int) -> ElasticConfig:
    return replace(elastic("static"), min_workers=count, max_workers=count)


def closed(config: ElasticConfig, steps: int = 5, profile: LengthProfile = SHORT) -> RolloutOutcome:
    return RolloutReplay(config, FLEET, check_every=200).closed(profile, profile.lengths(steps, 12, 8, 1))


# ---- engines ------------------------------------------------------------


def test_an_engine_makes_a_token_for_everybody_in_each_step_and_is_slower_the_fuller_it_is() -> None:
    speed = EngineSpeed(decode_s=1.0, request_s=0.1, cached_s=0.0, read_s=0.01)
    engine = SimulatedEngine(speed)
    engine.add(("a", 1), "", 100, 0, 10, 0.0)  # read in 1 s, then 10 steps of 1.1 s
    assert engine.next_end() == (pytest.approx(12.0), ("a", 1))
    engine.add(("b", 1), "", 100, 0, 2, 1.0 + 1.1 * 4)
    # Four tokens are made; the other prompt is read, then steps take 1.2 s: the short one ends first.
    assert engine.next_end() == (pytest.approx(5.4 + 1.0 + 2.4), ("b", 1))
    assert engine.drop(("a", 1), 5.4 + 1.0 + 1.2) == 5


def test_a_prompt_that_its_group_has_brought_is_not_read_again_until_the_cache_is_flushed() -> None:
    engine = SimulatedEngine(EngineSpeed(1.0, 0.0, 0.0, 0.01))
    engine.add(("a", 1), "g", 100, 0, 5, 0.0)
    engine.add(("b", 1), "g", 100, 0, 5, 0.0)
    assert engine.reading_until == 1.0
    engine.flush_cache()
    engine.add(("c", 1), "g", 100, 0, 5, 0.0)
    assert engine.reading_until == 2.0


# ---- the machine itself ------------------------------------------------------------


def test_the_machine_in_replay_says_the_same_to_the_same_events_as_a_fresh_one() -> None:
    heard: list[tuple[float, e.RolloutEvent, list[e.RolloutInstruction]]] = []
    config = elastic()
    replay = RolloutReplay(config, FLEET, on_event=lambda *one: heard.append(one))
    replay.closed(SHORT, SHORT.lengths(2, 8, 4, 1))
    fresh = RolloutMachine(replay.machine.rules, config)
    for now, event, instructions in heard:
        assert fresh.handle(event, now) == instructions
    fresh.check()


@pytest.mark.parametrize("policy", ["threshold", as_documented, ray_serve, "predictive"])
def test_every_request_is_answered_once_and_whole_under_every_policy(policy: Any) -> None:
    outcome = closed(elastic(policy))
    assert outcome.answered == 5 * 12 * 8
    assert len(outcome.steps_s) == 5
    assert outcome.asleep_s + outcome.busy_s <= 4 * outcome.total_s


def test_requests_of_a_trace_come_when_it_says_and_wait_where_engines_are_full() -> None:
    rows = [RequestRow(0.5 * at, 64, 200, (at % 3,)) for at in range(60)]
    wide = RolloutReplay(static(4), FLEET).open(rows)
    narrow = RolloutReplay(static(1), replace(FLEET, limit=1)).open(rows)
    assert wide.answered == narrow.answered == 60
    assert max(wide.waits_s) == 0.0
    assert max(narrow.waits_s) > 1.0
    assert RolloutReplay(static(4), FLEET).open(rows, rate=10.0).total_s < wide.total_s


def test_of_a_trace_only_the_part_that_counts_is_counted_and_all_of_it_is_run() -> None:
    rows = [RequestRow(0.5 * at, 64, 200) for at in range(60)]
    whole = RolloutReplay(static(1), replace(FLEET, limit=1)).open(rows)
    late = RolloutReplay(static(1), replace(FLEET, limit=1)).open(rows, counted_from_s=20.0)
    assert (whole.answered, late.answered) == (60, 60)
    assert late.total_s == pytest.approx(whole.total_s - 20.0)
    assert late.busy_s == pytest.approx(whole.busy_s - 20.0, abs=1.0)
    assert 0 < len(late.waits_s) < 60
    assert min(late.waits_s) > min(whole.waits_s)


def test_an_answer_that_is_short_or_comes_twice_is_found_out() -> None:
    replay = RolloutReplay(static(4), FLEET)
    replay._arrive("r", 10, 20, 20, "")
    with pytest.raises(InvariantError, match="arrives twice"):
        replay._arrive("r", 10, 20, 20, "")
    replay._pending["r"].tokens = 25
    with pytest.raises(InvariantError, match="answered with 20 of 25 tokens"):
        replay._send_event(e.AttemptFinished("r", 1, 20))


# ---- policies ------------------------------------------------------------


def sample(now: float, load: int, *, active: int = 4, queued: int = 0) -> LoadSample:
    return LoadSample(now, queued, load - queued, 0, active, 0, 0, 4 - active, 8, 1, 4, costs=SleepCosts(2.0, 4.0, 1.0))


def looks(policy: Any, *loads: tuple[float, int, int]) -> list[int]:
    """What it wants at each look (time, load, engines awake)."""
    state: PolicyState = begin(elastic(policy))
    wanted = []
    for now, load, active in loads:
        state, decision = consult(state, sample(now, load, active=active))
        wanted.append(decision.workers)
    return wanted


def test_ray_serve_waits_half_a_minute_up_and_ten_minutes_down() -> None:
    up = [(float(at), 90, 1) for at in range(0, 40, 5)]
    assert looks(ray_serve, *up) == [1, 1, 1, 1, 1, 1, 4, 1]
    down = [(float(at), 1, 4) for at in range(0, 660, 60)]
    assert looks(ray_serve, *down)[-2:] == [4, 1]


def test_predictive_is_as_fast_as_all_engines_and_takes_far_fewer_engine_seconds() -> None:
    every, less = closed(static(4), 6), closed(elastic("predictive"), 6)
    assert sum(less.steps_s) <= 1.02 * sum(every.steps_s)
    assert 4 * less.total_s - less.asleep_s < 0.75 * 4 * every.total_s


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_on_seeds_that_did_not_make_it_predictive_has_the_steps_of_all_engines_up_to_the_slowest(name: str) -> None:
    profile = PROFILES[name]
    for seed in (11, 12, 13):
        batches = profile.lengths(8, 8, 8, seed)
        every = RolloutReplay(static(4), FLEET).closed(profile, batches)
        less = RolloutReplay(elastic("predictive"), FLEET).closed(profile, batches)
        assert percentile(sorted(less.steps_s), 0.95) <= 1.02 * percentile(sorted(every.steps_s), 0.95)
        assert 4 * less.total_s - less.asleep_s < 4 * every.total_s


@pytest.mark.parametrize(
    "fleet",
    [
        replace(FLEET, training_s=8.0),
        replace(FLEET, wake_s=30.0, sleep_s=8.0),
        replace(FLEET, training_s=60.0, training_p99_s=76.0),
    ],
)
def test_predictive_slows_no_step_where_pauses_are_short_or_vary_or_waking_is_slow(fleet: SimulatedFleet) -> None:
    batches = SHORT.lengths(5, 12, 8, 1)
    every = RolloutReplay(static(4), fleet).closed(SHORT, batches)
    less = RolloutReplay(elastic("predictive"), fleet).closed(SHORT, batches)
    assert less.steps_s == pytest.approx(every.steps_s, rel=0.01)
    assert 4 * less.total_s - less.asleep_s <= 4 * every.total_s


def test_nobody_takes_fewer_engine_seconds_than_the_bound() -> None:
    batches = SHORT.lengths(3, 12, 8, 1)
    answers = [(SHORT.prompt_tokens, tokens) for batch in batches for tokens in batch.values()]
    bound = least_engine_s(FLEET.speed, FLEET.limit, answers, 3 * 12 * SHORT.prompt_tokens)
    for config in (static(1), static(4), elastic("predictive"), elastic()):
        assert closed(config, 3).busy_s >= bound


# ---- loads and files ------------------------------------------------------------


def test_lengths_have_the_median_and_tail_that_the_profile_states_and_samples_of_a_prompt_are_alike() -> None:
    profile = PROFILES["reasoning"]
    (batch,) = profile.lengths(1, 400, 8, 7)
    ordered = sorted(batch.values())
    assert 1_400 < ordered[len(ordered) // 2] < 1_850
    assert 11_000 < ordered[int(len(ordered) * 0.99)] < 24_000
    logs = [[math.log(batch[f"s0p{prompt}.{at}"]) for at in range(8)] for prompt in range(400)]
    means = [sum(one) / 8 for one in logs]
    whole = sum(means) / 400
    between = sum((one - whole) ** 2 for one in means) / 400
    total = sum((x - whole) ** 2 for one in logs for x in one) / 3_200
    assert between / total > 0.55
    grown = PROFILES["growing"].lengths(20, 50, 8, 7)
    assert sum(grown[-1].values()) > 1.5 * sum(grown[0].values())


SMALL = """
name: small
engines: {count: 2, limit: 16, training_s: 20}
rollout: {profile: short, steps: 2, prompts: 4, samples: 4}
elastic: {monitoring_interval: 1.0}
seeds: [1]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "rollout.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_scenario_of_rollouts_runs_every_static_number_and_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = written(tmp_path, SMALL), tmp_path / "page.html"
    assert command(["simulate", str(path), "--format", "json", "--report", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [one["policy"] for one in found["summary"]]
    assert names == ["static 1", "static 2", *rollout_scenario.KNOWN]
    assert "Engine-seconds" in page.read_text(encoding="utf-8")
    assert command(["simulate", str(path), "--policy", "predictive"]) == 0
    assert "32 requests, each answered exactly once" in capsys.readouterr().out


def test_a_trace_of_requests_is_a_load_as_well(tmp_path: Path) -> None:
    rows = "".join(f"{at},100,50\n" for at in range(20))
    (tmp_path / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows, encoding="utf-8")
    text = SMALL.replace("{profile: short, steps: 2, prompts: 4, samples: 4}", "{trace: requests.csv, rate: 2}")
    scenario = rollout_scenario.read(written(tmp_path, text))
    assert run_rollout(scenario, scenario.policies[0], 1).answered == 20
    assert any("20 requests of requests.csv, 2 times as fast" in one for one in scenario.assumptions())


def test_the_clairvoyant_of_a_trace_has_the_fewest_engines_with_which_nobody_waits(tmp_path: Path) -> None:
    rows = "".join(f"{at / 10},100,500\n" for at in range(200)) + "".join(f"{40 + at},100,50\n" for at in range(40))
    (tmp_path / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows, encoding="utf-8")
    text = SMALL.replace("{profile: short, steps: 2, prompts: 4, samples: 4}", "{trace: requests.csv}")
    scenario = rollout_scenario.read(written(tmp_path, text))
    runs = [(one.elastic.max_workers, run_rollout(scenario, one, 1)) for one in scenario.policies[:2]]
    bound = clairvoyant_engine_s(runs, 16)
    assert bound is not None
    assert int(runs[1][1].step_s) <= bound < runs[1][1].engine_s  # one engine at least, two where they must be
    assert clairvoyant_engine_s(runs[:1], 16) is None  # with one engine alone somebody waits
    later = replace(scenario, part=(0.5, 1.0))
    assert run_rollout(later, later.policies[1], 1).engine_s < 0.6 * runs[1][1].engine_s


SWEEP = ["--policy", "threshold", "--sweep"]


def test_a_sweep_of_rollouts_recommends_with_evidence_from_runs_that_did_not_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = written(tmp_path, SMALL.replace("seeds: [1]", "seeds: [1, 2, 3]")), tmp_path / "page.html"
    asked = ["simulate", str(path), *SWEEP, "scale_up_threshold=0.5..0.95"]
    assert command([*asked, "--format", "json", "--report", str(page)]) == 0
    said = capsys.readouterr()
    assert "scale_up_threshold 0.5 is left out" in said.err
    advice = json.loads(said.out)["recommendation"]
    assert advice["choose"].startswith("threshold")
    assert "3 seeds that did not choose it" in advice["sentence"]
    assert "What the sweep recommends" in page.read_text(encoding="utf-8")


def test_a_sweep_over_a_trace_is_chosen_by_its_first_half_and_judged_by_its_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{at / 2},100,120\n" for at in range(400))
    (tmp_path / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows, encoding="utf-8")
    text = SMALL.replace("{profile: short, steps: 2, prompts: 4, samples: 4}", "{trace: requests.csv}")
    assert command(["simulate", str(written(tmp_path, text)), *SWEEP, "scale_down_cooldown=5,300"]) == 0
    assert "4 windows that did not choose it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("scale_up_treshold=0.5..0.9", "did you mean scale_up_threshold"),
        ("max_workers=1,2", "max_workers cannot be swept"),
        ("policy=1", "cannot be swept"),
        ("min_workers=1.5", "not a whole number"),
        ("scale_up_threshold=0.1", "not below scale_up_threshold"),
        ("scale_up_threshold", "no values"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sweep: str, said: str
) -> None:
    assert command(["simulate", str(written(tmp_path, SMALL)), *SWEEP, sweep]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps: 2", "part: [0.5, 0.2]", "the lower first"),
        ("training_s: 20", "training_s: 20, training_p99_s: 10", "p99 is 10, and the median 20"),
        ("profile: short", "profile: shorts", "did you mean short"),
        ("profile: short, ", "", "exactly one source"),
        ("profile: short", "profile: {name: a, median: 3}", "missing"),
        (
            "profile: short",
            "profile: {name: a, prompt_tokens: 1, median: 9, p99: 3, most: 9}",
            "not be below the median",
        ),
        ("steps: 2", "stesp: 2", "did you mean steps"),
        ("monitoring_interval", "monitor_interval", "did you mean monitoring_interval"),
        ("monitoring_interval: 1.0", "min_workers: 9", "9"),
        ("seeds: [1]", "policies: [predictiv]", "did you mean predictive"),
        ("count: 2", "count: 0", "a whole number of 1 or more"),
    ],
)
def test_a_scenario_of_rollouts_that_is_wrong_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        rollout_scenario.read(written(tmp_path, SMALL.replace(old, new)))
    assert said in str(raised.value)
