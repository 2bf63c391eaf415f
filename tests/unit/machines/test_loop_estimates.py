"""What everything costs now: levels told from noise, odd iterations, periodic work, jumps and drift."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from loop_world import workflow
from trimtab.core.errors import InputError
from trimtab.machines.replan.estimates import CostEstimates, CostTrack, sure_level
from trimtab.model.run import ComponentTiming, CostEstimate, Iteration, ReplanRules
from trimtab.model.workflow import Workflow

RULES = ReplanRules()
WAYS = dict.fromkeys(("rollout", "reference", "trainer"), ("", ""))
ROLLOUT = {2: 46.0, 8: 16.0}  # as profiled


def fresh(flow: Workflow) -> CostEstimates:
    return CostEstimates(flow, RULES, {name: CostTrack() for name in flow.names})


def watched(levels: Sequence[float], gpus: int = 2, extras: Sequence[tuple[str, ...]] = ()) -> CostEstimates:
    """Estimates after a rollout that took so many times its profile."""
    estimates = fresh(workflow())
    for at, level in enumerate(levels):
        part = ComponentTiming("rollout", ROLLOUT[gpus] * level, gpus)
        estimates.take(Iteration(at + 1, 100.0, (part,), extras[at] if extras else ()), WAYS)
    return estimates


def noise(seed: int, count: int) -> list[float]:
    """As measured in real training: neighbours alike (0.7), spread 4 %, one step in fifty up to twice as long."""
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at = 0.7 * at + rng.gauss(0.0, 0.04 * (1 - 0.7**2) ** 0.5)
        found.append((1 + at) * (rng.uniform(1.3, 2.0) if rng.random() < 0.02 else 1.0))
    return found


def test_before_anything_is_measured_the_profile_counts() -> None:
    assert watched([]).estimate("rollout") == CostEstimate(width=RULES.noise)


def test_a_level_is_the_middle_of_what_was_measured() -> None:
    one = watched([1.5, 1.52, 1.48, 1.5]).estimate("rollout")
    assert one.level == pytest.approx(1.5)
    assert one.measured == 4


def test_a_level_is_the_same_on_any_number_of_gpus() -> None:
    few, many = watched([1.3] * 5, gpus=2), watched([1.3] * 5, gpus=8)
    assert few.estimate("rollout").level == pytest.approx(many.estimate("rollout").level)


def test_half_of_the_batches_in_half_of_the_time_is_the_same_level() -> None:
    estimates = fresh(workflow(batches=8))
    estimates.take(Iteration(1, 100.0, (ComponentTiming("rollout", 23.0, 2, batches=4),)), WAYS)
    assert estimates.estimate("rollout").level == pytest.approx(1.0)


def test_a_component_that_did_nothing_tells_nothing() -> None:
    estimates = fresh(workflow())
    estimates.take(Iteration(1, 100.0, (ComponentTiming("rollout", 0.0, 2),)), WAYS)
    assert estimates.estimate("rollout").measured == 0


def test_an_iteration_with_named_extra_work_never_counts() -> None:
    extras = [(), (), (), (), *[("validation",)] * 6]
    one = watched([1.0] * 4 + [2.0] * 6, extras=extras).estimate("rollout")
    assert (one.level, one.measured) == (pytest.approx(1.0), 4)


@pytest.mark.parametrize("every", [2, 3, 4, 5, 10])
def test_iterations_that_stick_out_every_so_often_never_count(every: int) -> None:
    one = watched([1.8 if at % every == 0 else 1.0 for at in range(1, 41)]).estimate("rollout")
    assert one.level == pytest.approx(1.0)
    assert one.trend == 0


def test_one_odd_iteration_changes_nothing() -> None:
    assert watched([*[1.0] * 6, 5.0]).estimate("rollout").level == pytest.approx(1.0)


def test_three_in_a_row_on_one_side_are_a_jump() -> None:
    assert watched([*[1.0] * 8, 2.0, 2.0]).estimate("rollout").level == pytest.approx(1.0)
    assert watched([*[1.0] * 8, 2.0, 2.0, 2.0]).estimate("rollout").level == pytest.approx(2.0)


def test_odd_ones_on_both_sides_are_no_jump() -> None:
    assert watched([*[1.0] * 8, 2.0, 0.5, 2.0, 0.5]).estimate("rollout").level == pytest.approx(1.0)


def test_a_steady_growth_is_followed_without_delay() -> None:
    one = watched([1.02**at for at in range(20)]).estimate("rollout")
    assert one.level == pytest.approx(1.02**19, rel=0.005)
    assert one.trend == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("over", range(4, 31, 2))
def test_where_a_growth_ends_the_level_stays_however_steep_it_was(over: int) -> None:
    levels = [1 + 12 * min(1.0, max(0, at - 25) / over) for at in range(70)]
    jitter = [1 + 0.02 * ((at * 7) % 5 - 2) for at in range(70)]
    one = watched([level * away for level, away in zip(levels, jitter, strict=True)]).estimate("rollout")
    assert one.level == pytest.approx(13.0, rel=0.05)


def test_what_is_done_again_after_a_resume_is_measured_again() -> None:
    estimates = watched([1.0] * 4 + [1.1] * 4)
    estimates.forget_after(4)
    assert [number for number, _ in estimates.tracks["rollout"].recent] == [1, 2, 3, 4]


def test_a_level_within_its_width_has_not_drifted_for_certain() -> None:
    assert sure_level(CostEstimate(level=1.04, middle=1.04, width=0.05), 1.0) == 1.0
    assert sure_level(CostEstimate(level=1.21, middle=1.21, width=0.1), 1.0) == pytest.approx(1.1)
    assert sure_level(CostEstimate(level=0.5, middle=0.5, width=0.1), 1.0) == pytest.approx(0.55)


def test_a_level_is_not_sure_because_a_trend_leads_there() -> None:
    assert sure_level(CostEstimate(level=1.3, middle=1.05, width=0.1), 1.0) == 1.0


def test_noise_as_in_real_training_hardly_ever_looks_like_drift() -> None:
    drifted = looked = 0
    for seed in range(12):
        estimates = fresh(workflow())
        for at, factor in enumerate(noise(seed, 100)):
            estimates.take(Iteration(at + 1, 100.0, (ComponentTiming("rollout", 46.0 * factor, 2),)), WAYS)
            if at >= 3:
                looked += 1
                drifted += abs(sure_level(estimates.estimate("rollout"), 1.0) - 1.0) > 0.02
    assert drifted < 0.005 * looked


def test_a_drift_of_a_third_is_told_through_that_noise() -> None:
    for seed in range(8):
        levels = [factor * (1 + 0.02 * at) for at, factor in enumerate(noise(seed, 30))]
        one = watched(levels).estimate("rollout")
        assert sure_level(one, 1.0) > 1.15
        assert one.level == pytest.approx(1.58, rel=0.15)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ComponentTiming("rollout", float("nan"), 2),
        lambda: ComponentTiming("rollout", -1.0, 2),
        lambda: ComponentTiming("rollout", 1.0, -2),
        lambda: Iteration(0, 1.0),
        lambda: Iteration(1, float("inf")),
        lambda: Iteration(1, 1.0, (ComponentTiming("a", 1.0), ComponentTiming("a", 1.0))),
        lambda: ReplanRules(margin=-0.1),
        lambda: ReplanRules(window=1),
        lambda: ReplanRules(horizon_iterations=0),
        lambda: ReplanRules(stage_limit_s=0.0),
        lambda: ReplanRules(dwell_iterations=True),
    ],
)
def test_what_cannot_have_been_measured_or_meant_is_refused(wrong) -> None:
    with pytest.raises(InputError):
        wrong()


def test_a_drift_is_sure_of_its_newest_iterations_and_a_level_without_one_of_all() -> None:
    drifting = watched([1 + at / 30 for at in range(RULES.window)]).estimate("rollout")
    assert drifting.middle == pytest.approx(1 + (RULES.window - 3) / 30)
    steady = watched([1.2 + (at % 2) / 100 for at in range(RULES.window)]).estimate("rollout")
    assert steady.middle == pytest.approx(1.205, abs=1e-4)
    assert drifting.width > steady.width
