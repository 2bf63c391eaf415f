"""Random kills during a run of many tasks: every task ends done exactly once, and nothing is left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import storm as storms
from disks import mounted_disk
from storm import HEALTH_CHECKS, Storm, Work, is_process, process_names, still_lives
from trimtab.core.errors import TrimtabError
from trimtab.model.pool import ENDED, TaskState
from trimtab.runtime.client.session import Session, connect
from waiting import until

CPUS = 2  # of a node
KILLS_MEANWHILE = 2  # while a controller that was killed is not back


@contextlib.contextmanager
def storm_over(nodes: int, seed: int) -> Iterator[Storm]:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(storms)
    before = dict(os.environ)
    os.environ.update(HEALTH_CHECKS, RAY_USAGE_STATS_ENABLED="0")
    one = Storm(nodes, CPUS, seed)
    try:
        ray.init(address=one.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield one
    finally:
        ray.shutdown()
        one.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        cloudpickle.unregister_pickle_by_value(storms)


def rage(storm: Storm, session: Session, disk: Path | None, wanted: int, pause_s: float) -> None:
    """Until so many faults were made: every thirteenth kills the controller, every fortieth a node, every seventh
    freezes the process of a task, every eleventh fills the controller's disk where it has one of its own, and the
    others kill a task.

    While the controller is away, processes that it last named are killed too, and it finds that when it is back.
    """
    last_controller, running = 0, list[str]()
    deadline = time.monotonic() + 20.0 * wanted
    while (number := storm.faults.total + 1) <= wanted:
        assert time.monotonic() < deadline, f"of {wanted} only these:\n{storm.faults}"
        time.sleep(pause_s)
        with contextlib.suppress(TrimtabError):
            pid = session.status()["pid"] if number % 13 == 0 else last_controller
            if number % 40 == 20:
                storm.kill_node()
            elif pid != last_controller:  # one that has come back since: Ray restarts it when it sees it dead
                storm.kill_controller(pid)
                last_controller = pid
                for _ in range(KILLS_MEANWHILE):
                    time.sleep(pause_s)
                    storm.kill_host(running)
            else:
                running = process_names(member.pid for seen in session.tasks() for member in seen.members)
                if disk and number % 11 == 0:
                    storm.fill_disk(disk, running)
                else:
                    (storm.freeze_host if number % 7 == 0 else storm.kill_host)(running)


def weather(
    storm: Storm, directory: Path, name: str, wanted: int, count: int, *, seconds: float, pause_s: float
) -> None:
    """So many faults while so many tasks run, each of which works for some seconds."""
    import ray

    with (
        mounted_disk(directory / "disk", "64m") as disk,
        connect(name=name, journal_dir=str(directory / "disk" / "journal")) as session,
    ):
        pool = session.pool("p", quota={"cpu": len(storm.nodes) * CPUS}, warm_hosts=len(storm.nodes), wait_s=3_600.0)
        tasks = [f"t{at:03d}" for at in range(count)]
        for at, task in enumerate(tasks):
            settings = {"id": task, "run": "run", "restarts": -1, "priority": float(at % 3)}
            pool.submit(Work, (task, str(directory), seconds), resources={"cpu": 1}, **settings)
        rage(storm, session, disk, wanted, pause_s)
        (directory / "calm").touch()
        for task in tasks:  # the first one waits for all that come before it
            assert session.task(task).result(timeout=60.0 + 4.0 * count) == f"result of {task}"
        processes: set[str] = set()
        for task in tasks:
            explanation = session.explain(task)
            ends = [chapter.state for chapter in explanation.story if chapter.state in [one.value for one in ENDED]]
            assert ends == [TaskState.done.value], f"{task} ended as {ends}"
            lines = (directory / f"{task}.log").read_text().split()
            assert all(map(is_process, lines)), f"two processes of {task} at once: {lines}"
            assert 1 <= len(lines) <= explanation.attempts, f"{task} began {len(lines)} times in {explanation.attempts}"
            processes |= set(lines)
        assert not session.status()["journal"]["fault"]
        assert not disk or storm.faults.counts["disk full"]
        session.shutdown()
        until(lambda: not any(map(still_lives, processes)), "a process of a task is left behind")
        groups = ray.util.placement_group_table().values()
        assert [one["name"] for one in groups if one["state"] != "REMOVED"] == []
        left = ray.util.list_named_actors(all_namespaces=True)
        assert [one for one in left if one["name"].startswith(f"trimtab:{name}:")] == []


def test_sixty_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    with storm_over(nodes=3, seed=7) as storm:
        weather(storm, tmp_path, "storm", 60, 40, seconds=6.0, pause_s=0.1)
    assert {"task killed", "task frozen", "controller killed", "node killed"} <= set(storm.faults.counts)


@pytest.mark.long
def test_a_storm_of_six_hundred_faults_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with storm_over(nodes=4, seed=8) as storm:
        weather(storm, tmp_path, "long-storm", 600, 300, seconds=4.0, pause_s=0.25)
