"""Emulated components: the profiled times, disturbed as stated, the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs import cluster, component, seed_job
from run_parts import Bare, Noting
from trimtab.core.errors import InputError
from trimtab.model.workflow import PlacementJob, WeightSync, Workflow
from trimtab.plan.placement.planner import plan_placement
from trimtab.runtime.run.component import Batch, Place
from trimtab.runtime.run.emulated import (
    OPTIONAL,
    Disturbance,
    EmulatedComponent,
    PacedComponent,
    VirtualClock,
    WallClock,
    emulated_settings,
)

ONE = Place("rollout", gpus=8, seed=3, emulated=True)


def made(disturbance: Disturbance, batches: int = 4, seed: int = 3, name: str = "rollout") -> EmulatedComponent:
    place = Place(name, gpus=8, seed=seed, emulated=True)
    return EmulatedComponent(place=place, batch_s=(1.0,) * batches, disturbance=disturbance, clock=VirtualClock())


def iteration_s(one: EmulatedComponent, iteration: int, batches: int = 4) -> float:
    return sum(one.seconds(iteration, index) for index in range(batches))


def test_an_undisturbed_component_takes_exactly_its_profiled_time_on_its_gpus() -> None:
    job = seed_job()
    plan = plan_placement(job).best
    clock = VirtualClock()
    settings = emulated_settings(job.workflow, plan, "trainer")
    one = EmulatedComponent(place=ONE, clock=clock, **settings)
    for index in range(job.workflow.batches):
        one.step(Batch(1, index, job.workflow.batches))
    assert clock.now() == pytest.approx(plan.placed("trainer").seconds, rel=1e-12)
    assert one.iteration == 1


def test_a_curve_takes_the_place_of_the_profile() -> None:
    job = seed_job()
    plan = plan_placement(job).best
    settings = emulated_settings(job.workflow, plan, "trainer", curve={4: 20.0, 8: 12.0})
    assert sum(settings["batch_s"]) == pytest.approx(12.0)
    with pytest.raises(InputError, match="no set of points"):
        emulated_settings(job.workflow, plan, "trainer", curve={})


def test_completion_switches_and_weight_syncs_take_their_time() -> None:
    chain = (
        component("rollout", {1: 10.0}, completion=((0.5, 0.2), (1.0, 1.0)), switch_seconds=1.5),
        component("trainer", {1: 5.0}, ("rollout",), switch_seconds=0.5),
    )
    job = PlacementJob(cluster(1), Workflow(chain, 2, 0, WeightSync("trainer", "rollout", 0.25, 9.0)))
    plan = plan_placement(job).best
    rollout = emulated_settings(job.workflow, plan, "rollout")
    assert rollout["batch_s"] == pytest.approx((2.0, 8.0))
    assert rollout["switch_s"] == 1.5
    clock = VirtualClock()
    trainer = EmulatedComponent(place=ONE, clock=clock, **emulated_settings(job.workflow, plan, "trainer"))
    trainer.onload()
    trainer.weights()
    assert clock.now() == pytest.approx(0.75)


def test_the_same_seed_gives_the_same_times_in_any_order_and_after_a_resume(tmp_path: Path) -> None:
    noisy = Disturbance(noise=0.1, step_noise=0.3, tail_share=0.2, tail_factor=3.0)
    one, other = made(noisy), made(noisy)
    forwards = [one.seconds(t, b) for t in range(1, 6) for b in range(4)]
    backwards = [other.seconds(t, b) for t in range(5, 0, -1) for b in range(3, -1, -1)]
    assert forwards == backwards[::-1]
    assert forwards != [made(noisy, seed=4).seconds(t, b) for t in range(1, 6) for b in range(4)]
    assert forwards != [made(noisy, name="trainer").seconds(t, b) for t in range(1, 6) for b in range(4)]
    one.step(Batch(9, 3, 4))
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.iteration == 9


def test_noise_has_the_stated_spread_and_does_not_move_the_level() -> None:
    one = made(Disturbance(noise=0.07))
    times = np.array([iteration_s(one, t) for t in range(1, 2001)])
    assert np.mean(times) == pytest.approx(4.0, rel=0.01)
    assert np.std(np.log(times)) == pytest.approx(0.07, rel=0.1)
    steps = made(Disturbance(step_noise=0.2))
    batches = np.array([steps.seconds(t, 0) for t in range(1, 2001)])
    assert np.mean(batches) == pytest.approx(1.0, rel=0.02)
    assert np.std(np.log(batches)) == pytest.approx(0.2, rel=0.1)


def test_measured_factors_are_drawn_as_they_are() -> None:
    one = made(Disturbance(factors=(0.9, 1.0, 1.3)))
    seen = {round(iteration_s(one, t) / 4, 6) for t in range(1, 60)}
    assert seen == {0.9, 1.0, 1.3}
    ordered = made(Disturbance(factors=(0.9, 1.0, 1.3), in_order=True))
    assert [iteration_s(ordered, t) / 4 for t in range(1, 6)] == pytest.approx([0.9, 1.0, 1.3, 0.9, 1.0])


def test_a_long_tail_strikes_the_stated_share_of_batches() -> None:
    one = made(Disturbance(tail_share=0.05, tail_factor=6.0))
    batches = np.array([one.seconds(t, b) for t in range(1, 1001) for b in range(4)])
    assert set(np.round(batches, 9)) == {1.0, 6.0}
    assert np.mean(batches > 1) == pytest.approx(0.05, abs=0.012)


def test_a_drift_begins_and_ends_when_stated() -> None:
    one = made(Disturbance(drift_to=3.0, drift_over=60, drift_from=11))
    assert iteration_s(one, 1) == iteration_s(one, 11) == pytest.approx(4.0)
    assert iteration_s(one, 41) == pytest.approx(8.0)
    assert iteration_s(one, 71) == iteration_s(one, 500) == pytest.approx(12.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": -0.1},
        {"noise": 3.0},
        {"tail_share": 1.5},
        {"tail_factor": 0.5},
        {"drift_to": 0.0},
        {"drift_over": 0},
        {"factors": (1.0, 0.0)},
        {"noise": 0.1, "factors": (1.0,)},
    ],
)
def test_disturbances_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(InputError):
        Disturbance(**wrong)


def test_oversleeping_is_made_good_so_that_the_level_stays_true() -> None:
    class Late(VirtualClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds + 0.25)  # a crowded machine

    clock = Late()
    one = EmulatedComponent(place=ONE, batch_s=(1.0,) * 8, clock=clock)
    for index in range(8):
        one.step(Batch(1, index, 8))
    assert clock.now() == pytest.approx(8.25)


def test_on_the_wall_clock_time_really_passes() -> None:
    clock = WallClock()
    one = EmulatedComponent(place=ONE, batch_s=(0.02,), clock=clock)
    began = clock.now()
    one.step(Batch(1, 0, 1))
    assert clock.now() - began >= 0.02


class Working:
    """Takes time of its own for whatever is asked of it."""

    def __init__(self, clock: VirtualClock, takes_s: float) -> None:
        self.clock, self.takes_s = clock, takes_s

    def step(self, batch: Batch) -> str:
        self.clock.sleep(self.takes_s)
        return f"batch {batch.index}"

    def offload(self) -> None:
        self.clock.sleep(self.takes_s)

    def onload(self) -> None:
        self.clock.sleep(self.takes_s)

    def weights(self) -> str:
        self.clock.sleep(self.takes_s)
        return "weights"


def paced(takes_s: float, **settings) -> tuple[PacedComponent, VirtualClock]:
    clock = VirtualClock()
    given = {"batch_s": (1.0, 1.0), "switch_s": 2.0, "sync_s": 3.0, **settings}
    return PacedComponent(Working(clock, takes_s), place=ONE, clock=clock, **given), clock


def test_paced_code_gives_what_it_gives_and_lasts_as_long_as_the_emulated_one() -> None:
    one, clock = paced(0.25)
    assert [one.step(Batch(1, index, 2)) for index in range(2)] == ["batch 0", "batch 1"]
    assert clock.now() == pytest.approx(2.0)
    one.offload()
    one.onload()
    assert clock.now() == pytest.approx(4.0)  # leaving and coming back are one switch
    assert one.weights() == "weights"
    assert clock.now() == pytest.approx(7.0)


def test_work_that_takes_longer_than_its_pace_takes_as_long_as_it_takes_and_is_not_made_good() -> None:
    one, clock = paced(5.0)
    one.step(Batch(1, 0, 2))
    one.offload()
    one.onload()
    assert clock.now() == pytest.approx(15.0)
    one.component.takes_s = 0.0
    one.step(Batch(1, 1, 2))
    assert clock.now() == pytest.approx(16.0)


def test_paced_code_is_disturbed_as_the_emulated_one_and_takes_another_pace_when_told() -> None:
    drifts = Disturbance(drift_to=3.0, drift_over=1, drift_from=1)
    one, clock = paced(0.25, disturbance=drifts)
    one.step(Batch(2, 0, 2))
    assert clock.now() == pytest.approx(3.0)
    one.pace(batch_s=(0.5, 0.5))
    one.step(Batch(2, 1, 2))
    assert clock.now() == pytest.approx(3.5)


def test_paced_code_has_the_methods_that_it_has_and_no_others(tmp_path: Path) -> None:
    def methods(one: object) -> set[str]:
        return {name for name in OPTIONAL if callable(getattr(one, name, None))}

    settings = {"place": ONE, "batch_s": (0.0,), "clock": VirtualClock()}
    noting, bare = Noting(place=ONE), Bare(ONE)
    assert methods(PacedComponent(noting, **settings)) == methods(noting) >= {"save", "load", "onload", "sync"}
    assert methods(PacedComponent(bare, **settings)) == methods(bare) == set()
    assert methods(PacedComponent(bare, switch_s=1.0, **settings)) == {"onload"}  # its turns take time all the same
    noting.total = 7
    PacedComponent(noting, **settings).save(tmp_path)
    assert (tmp_path / "total").read_text() == "7"


def test_a_step_that_raises_is_not_waited_for() -> None:
    clock = VirtualClock()
    one = PacedComponent(Noting(place=ONE, fail={"how": "raise"}), place=ONE, clock=clock, batch_s=(5.0,))
    with pytest.raises(RuntimeError, match="out of memory"):
        one.step(Batch(1, 0, 1))
    assert clock.now() == 0.0
