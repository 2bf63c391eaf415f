"""Whole jobs on a real Ray: components on slots, in turns and side by side, nothing counted twice."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.formats.load import load
from trimtab.model.plan import Plan
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.client.session import Session, connect
from trimtab.runtime.run.job import ComponentCode, RunJob
from trimtab.runtime.run.ray_executor import RayExecutor
from trimtab.runtime.run.run import Run

JOB = """
cluster: {nodes: 1, gpus_per_node: 8}
workflow:
  batches: 4
  components:
    rollout: {seconds: {8: 0.4, 4: 0.5}}
    inference: {seconds: {8: 0.1, 2: 0.2}, after: [rollout]}
    trainer: {seconds: {8: 0.4, 4: 0.6}, after: [inference]}
  weight_sync: {from: trainer, to: rollout, shared_seconds: 0.01, separate_seconds: 0.02}
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    import ray

    ray.init(
        address="local", num_cpus=4, num_gpus=8, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    with connect(name="runs") as session:
        yield session
        session.shutdown()
    ray.shutdown()


def job(folder: Path, iterations: int, **part: object) -> RunJob:
    path = folder / "job.yaml"
    path.write_text(JOB)
    loaded = load(path).job
    parts = {name: ComponentCode(**part) for name in loaded.workflow.names}  # type: ignore[arg-type]
    return RunJob(loaded, parts, iterations=iterations, save_every=2, near=Path(__file__).parents[1] / "helpers")


def plan_of(run: RunJob) -> Plan:
    space, outcome = best_plan(run.job)
    assert outcome.best is not None
    return to_plan(space, outcome.best)


def events(folder: Path, *kinds: str) -> list[dict[str, object]]:
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [one for one in told if one["event"] in kinds]


def test_emulated_components_take_turns_and_work_side_by_side_as_the_plan_has_them(
    session: Session, tmp_path: Path
) -> None:
    run = job(tmp_path, 3)
    assert [len(group.components) for group in plan_of(run).groups] == [2, 1]  # some share, one is alone
    end = Run(run, tmp_path / "emulated", RayExecutor(session)).run()
    assert (end.state, [one.number for one in end.iterations]) == ("done", [1, 2, 3])
    for iteration in end.iterations:
        measured = {one.component: one for one in iteration.components}
        assert set(measured) == {"rollout", "inference", "trainer"}
        assert all(one.batches == 4 for one in measured.values())
        busy_s = sum(measured[name].busy_s for name in ("rollout", "trainer"))
        assert iteration.wall_s >= busy_s  # they share their GPUs, so they never work at the same time
    assert session.tasks() == [] or all(one.state.value in ("done", "cancelled") for one in session.tasks())


@pytest.mark.long
def test_a_run_goes_on_from_its_folder(session: Session, tmp_path: Path) -> None:
    first = job(tmp_path, 4, use="run_parts:Noting")
    assert Run(first, tmp_path / "resumed", RayExecutor(session)).run().state == "done"
    longer = job(tmp_path, 6, use="run_parts:Noting")
    end = Run(longer, tmp_path / "resumed", RayExecutor(session), resume=True).run()
    assert (end.state, [one.number for one in end.iterations]) == ("done", list(range(1, 7)))
    assert len(events(tmp_path / "resumed", "iteration")) == 6


def test_a_component_that_raises_ends_the_run_with_its_name_and_the_reason(session: Session, tmp_path: Path) -> None:
    fails = {"fail": {"how": "raise", "iteration": 2, "batch": 1}}
    end = Run(job(tmp_path, 4, use="run_parts:Noting", settings=fails), tmp_path / "raised", RayExecutor(session)).run()
    assert (end.state, [one.number for one in end.iterations]) == ("failed", [1])
    assert "out of memory" in end.reason.sentence


@pytest.mark.long
def test_a_component_that_is_killed_comes_back_and_no_iteration_counts_twice(session: Session, tmp_path: Path) -> None:
    run = job(tmp_path, 8, use="run_parts:Noting", settings={"pause_s": 0.02})
    folder = tmp_path / "killed"
    running = Run(run, folder, RayExecutor(session))

    def kill_the_trainer() -> None:
        while not ((folder / "events.jsonl").exists() and len(events(folder, "iteration")) >= 3):
            time.sleep(0.02)
        pids = [member.pid for seen in session.tasks() if ".trainer." in seen.id for member in seen.members]
        os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_the_trainer)
    killer.start()
    end = running.run()
    killer.join()
    assert (end.state, [one.number for one in end.iterations]) == ("done", list(range(1, 9))), end.reason
    assert len(events(folder, "lost")) >= 1
    # Each batch of each iteration counted once in what the trainer keeps: 8 iterations of 4.
    totals = [one["metrics"]["trainer"]["total"] for one in events(folder, "iteration")]  # type: ignore[index]
    assert max(totals) == pytest.approx(30.5)  # the mean of batches 29 to 32


LARGE = """
cluster: {nodes: 1, gpus_per_node: 2}
workflow:
  batches: 2
  components:
    rollout: {seconds: {1: 0.02, 2: 0.01}}
    trainer: {seconds: {1: 0.02, 2: 0.01}, after: [rollout]}
  weight_sync: {from: trainer, to: rollout}
"""


def large(folder: Path, trainer: str, iterations: int, **more: object) -> RunJob:
    path = folder / "large.yaml"
    path.write_text(LARGE)
    parts = {"rollout": ComponentCode(use="run_parts:LargeRollout"), "trainer": ComponentCode(use=trainer)}
    near = Path(__file__).parents[1] / "helpers"
    return RunJob(load(path).job, parts, iterations=iterations, near=near, **more)  # type: ignore[arg-type]


def test_large_data_and_weights_arrive_and_every_part_of_their_way_is_booked(session: Session, tmp_path: Path) -> None:
    end = Run(large(tmp_path, "run_parts:SlowToSave", 3), tmp_path / "large", RayExecutor(session)).run()
    assert end.state == "done", end.reason
    # Two batches of 1s, of 2s and of 3s: what the trainer adds up, and what the rollout sees of it an iteration later.
    assert end.metrics[3]["trainer"]["total"] == 10.5
    assert [end.metrics[number]["rollout"]["seen"] for number in (1, 2, 3)] == [0.0, 2.0, 6.0]
    for iteration in end.iterations:
        assert iteration.booked is not None
        assert iteration.unbooked_s is not None
        assert {"compute", "sync_pack", "sync_move", "sync_unpack", "sync_load", "data", "calls"} <= set(
            iteration.booked
        )
        assert sum(iteration.booked.values()) + iteration.unbooked_s == pytest.approx(iteration.wall_s, abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"opens": False}, {"shares": False}])
def test_weights_stay_on_a_gpu_that_is_shared_unless_its_memory_cannot_be(
    session: Session, tmp_path: Path, settings: dict[str, bool]
) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "lending.yaml"
    path.write_text(LARGE.replace("gpus_per_node: 2", "gpus_per_node: 1"))
    parts = {
        "rollout": ComponentCode(use="lending:BorrowingRollout"),
        "trainer": ComponentCode(use="lending:LendingTrainer", settings={"folder": str(tmp_path), **settings}),
    }
    near = Path(__file__).parents[1] / "helpers"
    folder = tmp_path / "lending"
    end = Run(RunJob(load(path).job, parts, iterations=4, near=near), folder, RayExecutor(session)).run()
    assert end.state == "done", end.reason
    assert [end.metrics[number]["rollout"]["mean"] for number in (1, 2, 3, 4)] == [0.0, 2.0, 4.0, 6.0]
    said = [event["reason"] for event in events(folder, "told")]
    opened, released = tmp_path / "weights.opened", tmp_path / "weights.released"
    if not settings:
        assert said == []
        assert opened.read_text().count("opened") == 4
        assert all("sync_move" not in (one.booked or {}) for one in end.iterations)
    else:
        assert len(said) == 1
        assert "weights go through host memory" in str(said[0])
        assert ("rollout" if "opens" in settings else "trainer") in str(said[0])
        assert not opened.exists()
        assert released.exists() == ("opens" in settings)
        assert all((one.booked or {})["sync_move"] > 0 for one in end.iterations)
    for iteration in end.iterations:
        assert iteration.unbooked_s is not None
        assert sum((iteration.booked or {}).values()) + iteration.unbooked_s == pytest.approx(
            iteration.wall_s, abs=1e-4
        )


def test_a_snapshot_is_written_beside_the_next_iterations_and_counts_when_it_is_whole(
    session: Session, tmp_path: Path
) -> None:
    run = large(tmp_path, "run_parts:SlowToSave", 12, save_every=4)
    end = Run(run, tmp_path / "beside", RayExecutor(session)).run()
    assert end.state == "done", end.reason
    told = events(tmp_path / "beside", "iteration", "saved")
    order = [one["iteration"] if one["event"] == "saved" else None for one in told]
    assert [number for number in order if number] == [4, 8, 12]
    assert order.index(4) > 4  # iterations ended while it was written
    saved = tmp_path / "beside" / "state" / "00000012" / "trainer"
    assert sorted(path.name for path in saved.iterdir()) == ["layer.npy", "written"]
    assert not list(saved.parent.glob("*.written"))
    again = Run(
        large(tmp_path, "run_parts:SlowToSave", 13), tmp_path / "beside", RayExecutor(session), resume=True
    ).run()
    assert again.metrics[13]["rollout"]["seen"] == 2.0 * sum(range(1, 13))


def test_a_snapshot_that_cannot_be_written_ends_the_run_and_the_checkpoint_before_counts(
    session: Session, tmp_path: Path
) -> None:
    run = large(tmp_path, "run_parts:CannotSave", 5, save_every=2)
    end = Run(run, tmp_path / "full", RayExecutor(session)).run()
    assert end.state == "failed"
    assert "no space left" in end.reason.sentence
    assert not (tmp_path / "full" / "saved.json").exists()
