"""Runs that move to another plan while they train: what drifts is followed, and a move that fails is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from run_moves import drifting, events, moves_of, parts_that_move, trained
from trimtab.model.run import STAGES, MigrationStage
from trimtab.runtime.run.emulated import VirtualClock
from trimtab.runtime.run.local_executor import LocalExecutor
from trimtab.runtime.run.replanner import MigrationExecutor
from trimtab.runtime.run.run import Run


def run(folder: Path, **more: Any) -> Run:
    return Run(drifting(**more), folder, executor=LocalExecutor(VirtualClock()))


def test_a_rollout_that_gets_longer_is_given_more_gpus_and_iterations_get_shorter_than_under_the_kept_plan(
    tmp_path: Path,
) -> None:
    moved = run(tmp_path / "auto").run()
    kept = run(tmp_path / "kept", mode="advise").run()
    assert (moved.state, len(moved.iterations)) == ("done", 60)
    arrived = moves_of(tmp_path / "auto", "arrived")
    assert arrived
    assert len(moved.plan.placed("rollout").gpus) > len(kept.plan.placed("rollout").gpus)
    assert sum(one.wall_s for one in moved.iterations) < 0.9 * sum(one.wall_s for one in kept.iterations)
    assert not moves_of(tmp_path / "kept", "begun")
    assert [one for one in events(tmp_path / "kept", "decided") if one["what"] == "advise"]


def test_every_decision_is_told_with_its_reason_and_every_stage_with_its_seconds(tmp_path: Path) -> None:
    run(tmp_path / "run").run()
    decided = events(tmp_path / "run", "decided")
    assert len(decided) >= 40
    assert all(one["code"] and one["reason"] for one in decided)
    stages = [one["stage"] for one in moves_of(tmp_path / "run", "stage") if one["move"] == 1]
    assert stages == [stage.value for stage in STAGES]
    times = [one["t_s"] for one in events(tmp_path / "run")]
    assert times == sorted(times)


def test_noise_alone_moves_nothing(tmp_path: Path) -> None:
    end = run(tmp_path / "noise", drift=False, noise=0.08).run()
    assert end.state == "done"
    assert not moves_of(tmp_path / "noise", "begun")


def test_a_move_keeps_what_the_components_have_learned(tmp_path: Path) -> None:
    end = Run(parts_that_move(), tmp_path / "run", LocalExecutor(VirtualClock())).run()
    assert moves_of(tmp_path / "run", "arrived")
    assert trained(end) == 60 * 4


class Breaks(MigrationExecutor):
    """A move of which one stage fails, so many times."""

    at, times = MigrationStage.drain, 1

    def do(self, stage: MigrationStage) -> None:
        if stage is Breaks.at and Breaks.times:
            Breaks.times -= 1
            if stage in (MigrationStage.release, MigrationStage.place):
                super().do(stage)  # half done, or done and found wrong
            raise OSError(5, f"the disk is gone at {stage.value}")
        super().do(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_move_that_fails_at_any_stage_is_undone_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: MigrationStage
) -> None:
    monkeypatch.setattr(Breaks, "at", stage)
    monkeypatch.setattr(Breaks, "times", 1)
    monkeypatch.setattr("trimtab.runtime.run.run.MigrationExecutor", Breaks)
    end = Run(parts_that_move(), tmp_path / "run", LocalExecutor(VirtualClock())).run()
    assert (end.state, [one.number for one in end.iterations]) == ("done", list(range(1, 61))), end.reason
    assert trained(end) == 60 * 4  # nothing lost, nothing twice
    back = moves_of(tmp_path / "run", "rolling back")
    assert [(one["move"], one["stage"]) for one in back] == [(1, stage.value)]
    assert stage.value in back[0]["reason"]
    assert [one["move"] for one in moves_of(tmp_path / "run", "rolled back")] == [1]
    later = [one["move"] for one in moves_of(tmp_path / "run", "arrived")]
    assert later
    assert 1 not in later
    assert not list((tmp_path / "run").glob("move-*"))  # nothing is left behind


@pytest.mark.parametrize("wrong", ["save", "make", "load", "health", "sync"])
def test_a_component_that_fails_in_a_move_has_it_undone(tmp_path: Path, wrong: str) -> None:
    end = Run(parts_that_move(fails=wrong), tmp_path / "run", LocalExecutor(VirtualClock())).run()
    assert (end.state, len(end.iterations)) == ("done", 60), end.reason
    assert trained(end) == 60 * 4
    assert moves_of(tmp_path / "run", "rolled back")


def test_a_way_back_that_fails_too_ends_the_run_with_its_reason_and_it_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoWayBack(LocalExecutor):
        broken = True

        def place(self, workflow: Any, to: Any, iteration: int, *moved: Any) -> Any:
            if self.broken and moved:
                raise OSError(12, "out of memory")
            return super().place(workflow, to, iteration, *moved)

    end = Run(parts_that_move(), tmp_path / "run", NoWayBack(VirtualClock())).run()
    assert end.state == "failed"
    assert "out of memory" in end.reason.sentence
    assert moves_of(tmp_path / "run", "stuck")
    monkeypatch.setattr(NoWayBack, "broken", False)
    again = Run(parts_that_move(), tmp_path / "run", NoWayBack(VirtualClock()), resume=True).run()
    assert (again.state, [one.number for one in again.iterations]) == ("done", list(range(1, 61)))
    assert trained(again) == 60 * 4


def test_a_resumed_run_goes_on_with_the_plan_it_had_moved_to(tmp_path: Path) -> None:
    first = run(tmp_path / "run", iterations=50)
    ended = first.run()
    assert ended.state == "done"
    moved = ended.plan.describe()
    assert moved != events(tmp_path / "run", "plan")[0]["plan"]
    longer = run(tmp_path / "run", iterations=52)
    longer = Run(drifting(iterations=52), tmp_path / "run", LocalExecutor(VirtualClock()), resume=True)
    end = longer.run()
    assert [one["plan"] for one in events(tmp_path / "run", "plan")][-1] == moved
    assert len(end.iterations) == 52


def test_a_trainer_that_cannot_save_is_never_moved(tmp_path: Path) -> None:
    end = Run(parts_that_move(use="run_moves:Forgetful"), tmp_path / "run", LocalExecutor(VirtualClock())).run()
    assert (end.state, len(end.iterations)) == ("done", 60)
    assert not moves_of(tmp_path / "run", "arrived")
    assert any("cannot save" in one["reason"] for one in events(tmp_path / "run", "move", "told") if "reason" in one)


def test_asking_is_answered_when_the_iteration_is_over(tmp_path: Path) -> None:
    asked = run(tmp_path / "run", drift=False, iterations=5)
    asked.request_replan("is it still right?")
    asked.run()
    decided = events(tmp_path / "run", "decided")
    assert any(one["numbers"].get("iteration_s") for one in decided)  # it looked before it had measured enough
