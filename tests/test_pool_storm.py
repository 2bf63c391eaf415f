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
from storm import HEALTH_CHECKS, Storm, Work, is_process, process_names, still_lives
from trimtab.model.errors import TrimtabError
from trimtab.model.pool import ENDED, State
from trimtab.runtime.ray.client import Session, connect
from waiting import until

NODES, CPUS, TASKS, KILLS = 4, 2, 100, 200
KILLS_MEANWHILE = 2  # while a controller that was killed is not back


@pytest.fixture(scope="module")
def storm() -> Iterator[Storm]:
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(storms)
    before = dict(os.environ)
    os.environ.update(HEALTH_CHECKS, RAY_USAGE_STATS_ENABLED="0")
    one = Storm(NODES, CPUS, seed=7)
    ray.init(address=one.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield one
    ray.shutdown()
    one.cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)
    cloudpickle.unregister_pickle_by_value(storms)


def rage(storm: Storm, session: Session, wanted: int, pause_s: float) -> None:
    """Until so many kills were made: every thirteenth of the controller, every fortieth of a node, others of tasks.

    While the controller is away, processes that it last named are killed too, and it finds that when it is back.
    """
    last_controller, running = 0, list[str]()
    for number in range(1, 10 * wanted):
        if sum(storm.kills.values()) >= wanted:
            return
        time.sleep(pause_s)
        with contextlib.suppress(TrimtabError):
            if number % 40 == 20:
                storm.kill_node()
            elif number % 13 == 0:
                pid = session.status()["pid"]
                # Only one that has come back since: Ray restarts it when it sees it dead.
                if pid != last_controller:
                    storm.kill_controller(pid)
                    last_controller = pid
                    for _ in range(KILLS_MEANWHILE):
                        time.sleep(pause_s)
                        storm.kill_host(running)
            else:
                running = process_names(member.pid for seen in session.tasks() for member in seen.members)
                storm.kill_host(running)
    raise AssertionError(f"only {storm.kills} of {wanted} kills")


def weather(storm: Storm, directory: Path, name: str, kills: int, count: int, pause_s: float) -> None:
    import ray

    wanted = sum(storm.kills.values()) + kills
    with connect(name=name) as session:
        pool = session.pool("p", quota={"cpu": NODES * CPUS}, warm_hosts=NODES, wait_s=3_600.0)
        tasks = [f"t{at:03d}" for at in range(count)]
        for at, task in enumerate(tasks):
            settings = {"id": task, "run": "run", "restarts": -1, "priority": float(at % 3)}
            pool.submit(Work, (task, str(directory), 4.0), resources={"cpu": 1}, **settings)
        rage(storm, session, wanted, pause_s)
        (directory / "calm").touch()
        for task in tasks:
            assert session.task(task).result(timeout=120.0) == f"result of {task}"
        processes: set[str] = set()
        for task in tasks:
            explanation = session.explain(task)
            ends = [chapter.state for chapter in explanation.story if chapter.state in [one.value for one in ENDED]]
            assert ends == [State.done.value], f"{task} ended as {ends}"
            lines = (directory / f"{task}.log").read_text().split()
            assert all(map(is_process, lines)), f"two processes of {task} at once: {lines}"
            assert 1 <= len(lines) <= explanation.attempts, f"{task} began {len(lines)} times in {explanation.attempts}"
            processes |= set(lines)
        status = session.status()
        assert not status["journal"]["fault"]
        session.shutdown()
        until(lambda: not any(map(still_lives, processes)), "a process of a task is left behind")
        groups = ray.util.placement_group_table().values()
        assert [one["name"] for one in groups if one["state"] != "REMOVED"] == []
        left = ray.util.list_named_actors(all_namespaces=True)
        assert [one for one in left if one["name"].startswith(f"trimtab:{name}:")] == []


def test_two_hundred_kills_lose_and_double_nothing(storm: Storm, tmp_path: Path):
    weather(storm, tmp_path, "storm", KILLS, TASKS, pause_s=0.25)
    assert all(storm.kills.values()), storm.kills


@pytest.mark.long
def test_a_storm_of_six_hundred_kills_loses_and_doubles_nothing(storm: Storm, tmp_path: Path):
    weather(storm, tmp_path, "long-storm", 3 * KILLS, 3 * TASKS, pause_s=0.25)
