"""Actors and tasks that a task makes itself, on a real Ray: they are in its slot, in its quota, and end with it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from trimtab.core.errors import InputError
from trimtab.runtime.client.session import Pool, Session, Task, connect
from waiting import until

WAIT_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def session(cluster: None) -> Iterator[Session]:
    session = connect(name="nested")
    yield session
    session.shutdown()


@pytest.fixture
def pool(session: Session) -> Iterator[Pool]:
    pool = session.pool("engines", {"cpu": 8, "gpu": 4}, reuse=False)
    yield pool
    for seen in pool.tasks():
        if seen.state.value == "running":
            session.task(seen.id).cancel()
            session.task(seen.id).wait("ended", WAIT_S)


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Rank:
    """A worker process of an engine."""

    def where(self) -> tuple[int, list[str]]:
        return os.getpid(), [str(one) for one in ray.get_gpu_ids()]


class Engine:
    """Makes its workers as engines do: in the placement group that it is in, else in one of its own."""

    def __init__(self, workers: int, **options: Any) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = ray.util.get_current_placement_group()
        if group is None:
            group = placement_group([{"GPU": 1, "CPU": 1}] * workers)
            ray.get(group.ready())
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        kind = ray.remote(Rank).options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy, **options)
        self.ranks = [kind.remote() for _ in range(workers)]
        self.places = ray.get([rank.where.remote() for rank in self.ranks])

    def workers(self) -> list[tuple[int, list[str]]]:
        return self.places

    def bundles(self) -> list[dict[str, float]]:
        return list(ray.util.get_current_placement_group().bundle_specs)

    def cancel(self) -> None:
        pass

    def save(self) -> None:
        return None

    def load(self, state: None) -> None:
        pass


class AsyncEngine(Engine):
    async def later(self) -> None:
        pass


class Looks:
    """Says what Ray tells it, and makes things without saying where."""

    def sees(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        group = ray.util.get_current_placement_group()
        return {
            "gpus": [str(one) for one in ray.get_gpu_ids()],
            "visible": os.environ["CUDA_VISIBLE_DEVICES"].split(","),
            "accelerators": context.get_accelerator_ids()["GPU"],
            "group": group.id.hex() if group else None,
            "id": context.get_placement_group_id(),
            "bundles": group.bundle_specs if group else None,
            "assigned": context.get_assigned_resources(),
        }

    def makes(self) -> list[tuple[int, str | None]]:
        def where() -> tuple[int, str | None]:
            return os.getpid(), ray.get_runtime_context().get_placement_group_id()

        class Child:
            def where(self) -> tuple[int, str | None]:
                return where()

        self.child = ray.remote(Child).options(num_cpus=1).remote()
        return ray.get([self.child.where.remote(), ray.remote(where).options(num_cpus=0).remote()])

    def detaches(self, name: str) -> int:
        class Child:
            def pid(self) -> int:
                return os.getpid()

        child = ray.remote(Child).options(num_cpus=0, name=name, lifetime="detached").remote()
        return int(ray.get(child.pid.remote()))


def test_a_task_on_a_warm_host_sees_its_slot(pool: Pool) -> None:
    task = pool.submit(Looks, resources={"cpu": 1, "gpu": 2})
    sees = task.call("sees", timeout=WAIT_S)
    assert "host" in task.how
    assert len(sees["gpus"]) == 2
    assert sorted(sees["gpus"]) == sorted(sees["visible"]) == sorted(sees["accelerators"])
    assert sees["group"] is not None
    assert sees["group"] == sees["id"]
    assert sees["bundles"] == [{"CPU": 1.0, "GPU": 2.0}]
    assert sees["assigned"] == {"CPU": 1.0, "GPU": 2.0}


def test_what_a_task_makes_without_a_place_is_in_its_slot_and_ends_with_it(pool: Pool) -> None:
    task = pool.submit(Looks, resources={"cpu": 1})
    made = task.call("makes", timeout=WAIT_S)
    group = task.call("sees", timeout=WAIT_S)["group"]
    assert [where for _, where in made] == [group, group]
    until(lambda: ray.available_resources()["CPU"] == 7.0)
    task.cancel()
    task.wait("ended", WAIT_S)
    assert [pid for pid, _ in made if exists(pid)] == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Engine, {}, id="on a host"),
        pytest.param(AsyncEngine, {"num_gpus": 0}, id="as a plain actor", marks=pytest.mark.long),
    ],
)
def test_an_engine_s_workers_have_the_gpus_of_its_slot_also_on_a_full_cluster(
    pool: Pool, kind: type[Engine], options: dict[str, int]
) -> None:
    first, second = (
        pool.submit(kind, (2,), resources={"cpu": 2, "gpu": 2}, ray_options=options, start_timeout_s=WAIT_S)
        for _ in range(2)
    )
    used = [gpu for task in (first, second) for _, gpus in task.call("workers", timeout=WAIT_S) for gpu in gpus]
    assert sorted(used) == ["0", "1", "2", "3"]


@pytest.mark.long
def test_an_engine_may_have_a_bundle_for_each_of_its_workers(session: Session, pool: Pool) -> None:
    task = pool.submit(Engine, (3,), resources=[{"cpu": 1, "gpu": 1}] * 3, one_process=True, id="wide")
    workers = task.call("workers", timeout=WAIT_S)
    assert len(task.members) == 1
    assert len({gpu for _, gpus in workers for gpu in gpus}) == 3
    assert task.call("bundles") == [{"CPU": 1.0, "GPU": 1.0}] * 3
    until(lambda: ray.available_resources()["GPU"] == 1.0)
    controller = session.status()["pid"]
    os.kill(controller, signal.SIGKILL)
    until(lambda: session.status()["pid"] != controller)
    assert task.call("workers", timeout=WAIT_S) == workers
    ended_by_eviction(task)
    assert [pid for pid, _ in workers if exists(pid)] == []
    assert len(task.call("workers", timeout=WAIT_S)) == 3
    assert task.seen.attempt == 2


def ended_by_eviction(task: Task) -> None:
    attempt = task.seen.attempt
    task.evict()
    until(lambda: task.seen.attempt > attempt)


def ended_by_a_crash(task: Task) -> None:
    os.kill(task.members[0].pid, signal.SIGKILL)
    task.wait(("ended",), WAIT_S)


@pytest.mark.parametrize("end", [pytest.param(ended_by_eviction, marks=pytest.mark.long), ended_by_a_crash])
def test_the_workers_of_an_engine_are_gone_before_its_slot_is_given_on(pool: Pool, end: Callable[[Task], None]) -> None:
    task = pool.submit(Engine, (2,), {"max_restarts": -1}, resources={"cpu": 2, "gpu": 2})
    workers = [pid for pid, _ in task.call("workers", timeout=WAIT_S)]
    assert all(exists(pid) for pid in workers)
    end(task)
    assert [pid for pid in workers if exists(pid)] == []


def test_an_actor_that_a_task_detaches_outlives_it_outside_the_slot(pool: Pool) -> None:
    task = pool.submit(Looks, resources={"cpu": 1})
    pid = task.call("detaches", "outlives", timeout=WAIT_S)
    task.cancel()
    task.wait("ended", WAIT_S)
    assert exists(pid)
    ray.kill(ray.get_actor("outlives", namespace="trimtab"))


def test_a_plain_actor_cannot_take_more_than_its_slot_has(pool: Pool) -> None:
    with pytest.raises(InputError, match="num_gpus is 2, but its resources have 1"):
        pool.submit(AsyncEngine, (2,), resources={"cpu": 1, "gpu": 1}, ray_options={"num_gpus": 2})
