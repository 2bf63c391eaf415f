"""The shipped constants on public rows that need no fit: switches, alternatives, and counts that are known to die."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[3])]

from bench.truth import aiconfigurator, choosing, fit, pairs, rows, switches  # noqa: E402

from trimtab.plan.estimate.constants import CONSTANTS  # noqa: E402


def test_every_switch_of_the_evidence_goes_the_way_it_went() -> None:
    found = switches.gains(lambda family: CONSTANTS)
    assert len(found) >= 25
    assert [each.label for each in found if not each.sign] == []


def test_the_chosen_one_of_published_alternatives_is_near_the_best() -> None:
    found = choosing.alternatives(lambda family: CONSTANTS)
    complete = [each for each in found if each.complete]
    assert len(complete) >= 5
    assert all(each.regret <= choosing.NEAR for each in complete)
    assert sum(each.regret <= choosing.NEAR for each in found) >= 0.9 * len(found) >= 12


def test_the_smallest_count_is_above_those_that_needed_more_gpus() -> None:
    found = [each for each in choosing.smallest_counts(lambda family: CONSTANTS) if each.cure == "more GPUs"]
    assert found
    assert not any(each.wrong for each in found)


def test_the_better_of_two_published_modes_is_proposed_from_the_synchronous_one() -> None:
    found = pairs.pairs(lambda family: CONSTANTS)
    judged = [pair for pair in found if pair.judged]
    assert len(judged) >= 18
    assert sum(pair.right for pair in judged) >= 0.8 * len(judged)
    assert any(pair.reason and not pair.judged for pair in found)  # a GPU kind that no table has is said, not guessed
    assert not any(pair.judged for pair in found if not pair.same_gpus)


def test_what_was_measured_on_a_gpu_at_hand_is_estimated_within_a_seventh_at_the_median() -> None:
    errors = np.abs(np.expm1(fit.gpu_errors(CONSTANTS, None, ("decode", "prefill", "train"))))
    assert len(errors) >= 54
    assert np.median(errors) < 0.15


def test_the_stated_high_of_memory_holds_measured_peaks() -> None:
    spreads = {"training": CONSTANTS.memory_error, "generation": CONSTANTS.engine_memory_error}
    beyond = [
        point.point.value
        / (fit.memory_gb(point, CONSTANTS) * math.exp(spreads[point.phase]) + fit.margin_gb(point, CONSTANTS))
        for point in rows.memory_points()
    ]
    assert len(beyond) >= 400
    assert sum(value > 1 for value in beyond) <= 0.01 * len(beyond)
    assert max(beyond) <= 1.05


def test_another_estimator_was_asked_for_every_serving_point() -> None:
    points = rows.read("serving_points")
    said = aiconfigurator.stored()
    assert set(said) == {point["id"] for point in points}
    assert sum(value is not None for value in said.values()) > 1800
    asked = [aiconfigurator.settings(point) for point in points]
    assert all(each["batch_size"] >= 1 for each in asked)  # type: ignore[operator]
    assert not any(each["moe_ep_size"] for each in asked if "Llama" in str(each["model_path"]))
