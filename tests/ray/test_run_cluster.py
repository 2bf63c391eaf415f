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
