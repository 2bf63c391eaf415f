"""Advice on runs of each framework: it comes when a cost has really changed, names it, and can be put in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from advise_world import (
    CASES,
    NEMO,
    OPENRLHF,
    RLINF,
    VERL,
    Case,
    Told,
    grows,
    measured,
    nemo_blocks,
    verl_console,
    verl_jsonl,
)
from framework_rules import nemo_rl_accepts, openrlhf_accepts
from trimtab.core.errors import InputError
from trimtab.core.reasons import ReasonCode
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import RunLog
from trimtab.formats.logs.follow_costs import RunConfig
from trimtab.model.run import ReplanRules
from trimtab.model.workflow import Profile
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.advise.analysis import AdviceTracker, FollowEvent
from trimtab.runtime.advise.replanner import scaled

RULES = ReplanRules(assumed_move_s=120.0)
ids = [case.framework for case in CASES]


class Run:
    """A run that is read step by step."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        *,
        overrides: tuple[str, ...] = (),
        points: Any = None,
        config: Path | None = None,
    ) -> None:
        framework = logs.FRAMEWORKS[case.framework]
        points = points if points is not None else case.points
        profile: Profile | None = measured(points) if points else None
        self.config = RunConfig(config or case.path(folder), (*case.overrides, *overrides))
        self.log = RunLog(framework)
        self.advising = AdviceTracker(framework, self.config, profile, RULES, 2)
        self.news: list[FollowEvent] = []

    def take(self, text: str, name: str = "run.log") -> Run:
        for step in [*self.log.take(name, text.encode()), *self.log.settle(), *self.log.settle()]:
            self.news += self.advising.take(step)
        return self

    def whats(self) -> list[str]:
        return [one.what for one in self.news]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_advice_comes_with_the_drift_and_names_the_component(case: Case, tmp_path: Path) -> None:
    run = Run(case, tmp_path).take(case.write(case.told()))
    first = run.news[0]
    assert first.what == "advised"
    assert case.after < first.step <= case.after + case.over + RULES.window
    assert first.advice is not None
    assert first.advice.reason.code is ReasonCode.drifted
    assert first.sentence.startswith(f"{case.drifts} takes ")
    adviser = run.advising.adviser
    assert adviser is not None
    assert adviser.drifted()[0] == case.drifts
    advice = adviser.advice
    assert advice is not None
    # What is advised in the end is what is best for the true costs, of which the log knows only noisy ones.
    loaded = adviser.loaded
    space, outcome = best_plan(scaled(loaded.job, {case.drifts: case.to}), loaded.rules)
    assert outcome.best is not None
    best = to_plan(space, outcome.best)
    true = scaled(loaded.job, {case.drifts: case.to})
    assert _seconds(true, advice.plan) <= 1.03 * best.iteration_seconds
    assert advice.low < advice.gain < advice.high
    gain = 1 - _seconds(true, advice.plan) / _seconds(true, adviser.plan)
    assert advice.low <= gain <= advice.high


def _seconds(job: Any, plan: Any) -> float:
    from trimtab.machines.replan.decision import ReplanPlanner

    return ReplanPlanner(job.workflow).seconds(plan, {})


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_overrides_put_the_advised_plan_in_place(case: Case, tmp_path: Path) -> None:
    run = Run(case, tmp_path).take(case.write(case.told()))
    assert run.advising.adviser is not None
    advice = run.advising.adviser.advice
    assert advice is not None
    again = RunConfig(run.config.path, (*run.config.overrides, *advice.overrides))
    placed, _ = again.placement(case.seconds)
    sizes = {frozenset(group.components): len(group.gpus) for group in advice.plan.groups}
    found: dict[tuple[int, ...], set[str]] = {}
    for name, ranks in placed.ranks.items():
        found.setdefault(tuple(ranks), set()).add(name)
    assert {frozenset(names): len(ranks) for ranks, names in found.items()} == sizes
    _accepted(case, dict(advice.settings.values), {name: len(ranks) for name, ranks in placed.ranks.items()})
    # With the run started anew so, the same costs give no further advice.
    points = case.points or {name: {1: 1.0} for name in case.seconds}
    if case.points:
        moved = Told({name: _at(points[name], len(placed.ranks[name])) for name in case.seconds},
                     lambda step: {case.drifts: case.to})  # fmt: skip
        after = Run(case, tmp_path, overrides=advice.overrides)
        if case.framework == "verl":  # RLinf's separate placements overlap, so that their times are waits
            after.take(case.write(moved))
            assert after.whats() == []


def _accepted(case: Case, values: dict[str, Any], gpus: dict[str, int]) -> None:
    """The framework's own rules, as tests of its dialect have them; of RLinf and verl their own code is asked."""
    if case is NEMO:
        assert nemo_rl_accepts(values, reward_model=True)["policy"] == gpus["policy"]
    elif case is OPENRLHF:
        assert openrlhf_accepts(values, 1, is_async=True) == {"actor": gpus["actor"], "rollout": gpus["rollout"]}


def _at(points: Any, gpus: int) -> float:
    from trimtab.plan.placement.space import seconds_at

    return seconds_at(tuple(sorted(points.items())), 0.0, gpus)


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("seed", [3, 8])
def test_noise_alone_is_no_reason_for_advice(case: Case, seed: int, tmp_path: Path) -> None:
    run = Run(case, tmp_path).take(case.write(case.steady(seed, saves=5)))
    assert run.news == []
    assert run.advising.picture().reason.code in (ReasonCode.costs_steady, ReasonCode.no_gain, ReasonCode.within_noise)


def test_other_advice_comes_when_something_else_drifts(tmp_path: Path) -> None:
    first, second = grows("rollout", after=15, to=3.0), grows("inference", after=45, to=5.0)
    told = Told(RLINF.seconds, lambda step: {**first(step), **second(step)}, steps=80)
    run = Run(RLINF, tmp_path).take(RLINF.write(told))
    assert run.whats()[:2] == ["advised", "changed"]
    before, after = run.news[0].advice, run.news[1].advice
    assert before is not None
    assert after is not None
    assert 15 < run.news[0].step <= 35
    assert 45 < run.news[1].step <= 65
    assert "inference takes" in run.news[1].sentence
    assert len(after.plan.placed("inference").gpus) > len(before.plan.placed("inference").gpus)


def test_costs_on_one_number_of_gpus_are_weighed_for_lesser_scaling_too(tmp_path: Path) -> None:
    told = Told(RLINF.seconds, grows("rollout", after=15, to=3.0), steps=40)
    run = Run(RLINF, tmp_path, points={**RLINF.points, "inference": {16: RLINF.seconds["inference"]}})
    advice = run.take(RLINF.write(told)).advising.picture().advice
    assert advice is not None
    assert advice.extrapolated == ("inference",)
    assert advice.gain_if_less is not None
    assert advice.gain_if_less != pytest.approx(advice.gain)
    measured_well = Run(RLINF, tmp_path).take(RLINF.write(told)).advising.picture().advice
    assert measured_well is not None
    assert measured_well.gain_if_less is None


def test_advice_goes_when_its_cause_goes(tmp_path: Path) -> None:
    def there_and_back(step: int) -> dict[str, float]:
        return {"rollout": 3.0 if 20 < step <= 45 else 1.0}

    run = Run(RLINF, tmp_path).take(RLINF.write(Told(RLINF.seconds, there_and_back, steps=75)))
    assert run.whats()[0] == "advised"
    assert run.whats()[-1] == "withdrawn"
    assert 45 < run.news[-1].step <= 60
    assert run.advising.picture().advice is None


def test_a_placement_that_was_never_good_is_told_once_enough_steps_count(tmp_path: Path) -> None:
    apart = ("reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1", "trainer.nnodes=1")
    seconds = {name: _at(points, 8) for name, points in VERL.points.items()} if VERL.points else {}
    run = Run(VERL, tmp_path, overrides=apart).take(verl_jsonl(Told(seconds)))
    assert run.news[0].what == "advised"
    assert run.news[0].step == 2 + RULES.least_iterations
    assert run.news[0].advice is not None
    assert run.news[0].advice.reason.code is ReasonCode.better_plan


def test_a_mode_whose_timings_are_waits_gives_no_cost_and_no_advice(tmp_path: Path) -> None:
    separate = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1", "trainer.nnodes=2")
    told = Told({**VERL.seconds, "rollout": 3.0}, grows("rollout", after=10, to=9.0), extra={"switch_wait": 1.0})
    run = Run(VERL, tmp_path, overrides=separate, points={})
    run.take(verl_jsonl(told))
    picture = run.advising.picture()
    rollout = next(part for part in picture.parts if part.name == "rollout")
    assert rollout.wait is not None
    assert "wait" in rollout.wait
    assert picture.advice is None
    assert run.news == []
    assert "--profile" in picture.reason.sentence
    assert [one.busy is None for one in picture.sharing if "rollout" in one.components] == [True]


def test_in_such_a_mode_a_profile_tells_the_cost_and_the_log_the_rest(tmp_path: Path) -> None:
    config = tmp_path / "nemo.yaml"
    config.write_text(
        NEMO.config.replace("colocated: {enabled: true}", "colocated: {enabled: false, resources: {gpus_per_node: 4}}")
        .replace("env: {reward_model: {enabled: true, resources: {num_nodes: 1, gpus_per_node: 2}}}\n", "")
        .replace("num_generations_per_prompt: 8", "num_generations_per_prompt: 8, async_grpo: {enabled: true}")
    )
    points = {"generation": {4: 60.0}, "logprobs": {4: 12.0}, "policy": {4: 45.0}}
    told = Told({"exposed": 2.0, "logprobs": 12.0, "policy": 45.0}, grows("policy", after=25, to=2.5))
    run = Run(NEMO, tmp_path, points=points, config=config).take(nemo_blocks(told))
    advice = run.news[0].advice
    assert advice is not None
    assert 25 < run.news[0].step <= 45
    assert run.news[0].sentence.startswith("policy takes ")
    gpus = {name: len(group.gpus) for group in advice.plan.groups for name in group.components}
    assert gpus["policy"] > 4
    assert gpus["generation"] < 4


def test_a_restart_drops_its_warm_up_and_is_told(tmp_path: Path) -> None:
    run = Run(VERL, tmp_path).take(verl_console(VERL.steady(1, steps=20), pid=1))
    run.take(verl_console(VERL.steady(2, steps=12), pid=2))
    assert run.whats() == ["restarted"]
    assert run.advising.picture().counted == 18 + 10


def test_after_the_users_command_the_next_start_runs_the_advised_plan(tmp_path: Path) -> None:
    run = Run(VERL, tmp_path).take(verl_console(VERL.told(), pid=1))
    adviser = run.advising.adviser
    assert adviser is not None
    assert adviser.advice is not None
    advised = adviser.advice.plan
    run.advising.hook_succeeded(adviser.advice)
    sizes = {one.name: len(one.gpus) for one in advised.components}
    now = {name: _at(points, sizes[name]) for name, points in (VERL.points or {}).items()}
    run.take(verl_console(Told(now, lambda step: {"reward": VERL.to}, steps=30), pid=2))
    assert adviser.plan is advised
    assert run.whats() == ["advised", "restarted"]
    assert adviser.advice is None


def test_under_an_advised_placement_times_that_have_become_waits_are_no_costs(tmp_path: Path) -> None:
    run = Run(RLINF, tmp_path).take(RLINF.write(RLINF.told()))
    adviser = run.advising.adviser
    assert adviser is not None
    assert adviser.advice is not None
    run.advising.hook_succeeded(adviser.advice)
    # Side by side every timer but the rollout's contains waiting: as costs they would call for yet another plan.
    told = Told({"rollout": 110.0, "inference": 105.0, "actor": 120.0}, steps=30, overlap=0.6, seed=4)
    run.log.file_replaced("run.log")
    run.take(RLINF.write(told))
    assert run.whats() == ["advised", "restarted"]
    waits = {part.name: part.wait is not None for part in run.advising.picture().parts}
    assert waits == {"rollout": False, "inference": True, "actor": True, "weight_sync": False}
    assert [one.measured > 0 for one in adviser.estimates.values()] == [True, False, False]


def test_where_the_time_goes_adds_up(tmp_path: Path) -> None:
    run = Run(VERL, tmp_path).take(verl_jsonl(Told(VERL.seconds, noisy=False, steps=30)))
    picture = run.advising.picture()
    assert {part.name: part.seconds for part in picture.parts} == pytest.approx(VERL.seconds)
    assert picture.other_s == pytest.approx(2.0)
    assert picture.step_s == pytest.approx(sum(VERL.seconds.values()) + 2.0)
    assert picture.idle == pytest.approx(2.0 / picture.step_s)
    assert picture.length_drift == pytest.approx(0.0)
    assert {part.name: part.gpus for part in picture.parts}["update_actor"] == 24


def test_idle_gpus_of_separate_pools_are_told(tmp_path: Path) -> None:
    run = Run(NEMO, tmp_path).take(nemo_blocks(Told(NEMO.seconds, noisy=False, steps=20)))
    busy = {one.components: one.busy for one in run.advising.picture().sharing}
    total = sum(NEMO.seconds.values()) + 1.0
    assert busy["reward",] == pytest.approx(18.0 / total, abs=0.01)
    assert run.advising.picture().idle == pytest.approx(1 - (6 * 104.0 + 2 * 18.0) / (8 * total), abs=0.01)


def test_lengths_drift_beside_costs(tmp_path: Path) -> None:
    run = Run(RLINF, tmp_path).take(RLINF.write(RLINF.told()))
    drift = run.advising.picture().length_drift
    assert drift is not None
    assert drift == pytest.approx(2.0, abs=0.1)


def test_a_configuration_that_does_not_say_where_things_are_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(RLINF.config.replace(', component_placement: {"actor,rollout,reward": all}', ""))
    with pytest.raises(InputError, match="does not state where"):
        Run(RLINF, tmp_path, config=config).take(RLINF.write(RLINF.steady(1)))


def test_a_run_that_warms_up_its_critic_is_weighed_once_the_policy_trains(tmp_path: Path) -> None:
    before = {name: value for name, value in VERL.seconds.items() if name != "update_actor"}
    run = Run(VERL, tmp_path, points={}).take(verl_jsonl(Told(before, steps=20)))
    picture = run.advising.picture()
    assert "update_actor is not in the log yet" in picture.reason.sentence
    assert {part.name: part.gpus for part in picture.parts} == dict.fromkeys(before)  # shown, though not weighed
    run.take("".join(verl_jsonl(Told(VERL.seconds, steps=40)).splitlines(True)[20:]))
    assert run.advising.picture().reason.code is ReasonCode.costs_steady
    alone = Run(VERL, tmp_path, points={}).take(verl_jsonl(Told(before, steps=20)))
    alone.advising.end()
    assert "update_actor is not in the log, and verl trains with it" in alone.advising.picture().reason.sentence


def test_too_few_steps_are_told_and_weighed_as_far_as_they_go(tmp_path: Path) -> None:
    run = Run(VERL, tmp_path).take(verl_jsonl(VERL.steady(1, steps=5)))
    assert run.advising.picture().reason.code is ReasonCode.too_few
    run.advising.end()
    assert run.advising.picture().counted == 3
    assert run.advising.picture().parts
    with pytest.raises(InputError, match="warm-up"):
        Run(VERL, tmp_path).take(verl_jsonl(VERL.steady(1, steps=2))).advising.end()
