"""A small scenario that is played on a real Ray and in a replay: tasks that sleep, preemption, a node that joins.

What happens by itself (a task comes, ends, a node joins) is kept apart by `APART_S`, so that the order of events is no
luck; `apart_s` says so. Live it goes through the controller and real processes on nodes
with logical GPUs; `simulated` plays it in the world that the live journal tells, with the lengths that were asked for.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster

from storm import below, kill
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.model.pool import PlacementStrategy, TaskSpec
from trimtab.replay.common.timing import ChurnEvent, Distribution, PoolTimes
from trimtab.replay.journal.record import JournalRecord, read_record
from trimtab.replay.journal.replay import UNCHANGED, JournalRun, ReplayAgreement, agreement, recorded, run_alternative
from trimtab.replay.journal.world import JournalWorld
from trimtab.replay.pool.driver import PoolReality, PoolReplay, WorkloadTask
from trimtab.replay.pool.policies import PoolPolicy, scheduler
from trimtab.runtime.client.session import connect
from trimtab.runtime.store.journal import read_journal
from waiting import until

APART_S = 0.3
GPUS = 2  # of each node
WARM = 3  # hosts that each node keeps ready
JOINING_S = 3.0  # that a node takes to come, about
USUAL = PoolTimes(*(Distribution(one) for one in (0.02, 0.1, 0.1, 0.05, 0.05)))  # to look for a scenario with


@dataclass(frozen=True)
class Step:
    """A task of the scenario."""

    id: str
    at_s: float
    gpus: int
    priority: float
    work_s: float


@dataclass(frozen=True)
class Scene:
    """What is played: tasks on two nodes, and when a third one is started."""

    steps: tuple[Step, ...]
    joins_s: float | None = None


SHORT = Scene(
    (
        Step("t00", 0.9, 1, 5.0, 2.86),
        Step("t01", 1.45, 1, 8.0, 1.66),
        Step("t02", 2.09, 2, 2.0, 2.69),
        Step("t03", 2.69, 1, 2.0, 3.7),
        Step("t04", 3.54, 1, 5.0, 2.79),
        Step("t05", 4.19, 1, 5.0, 2.89),
        Step("t06", 4.58, 1, 8.0, 2.15),
        Step("t07", 5.01, 2, 2.0, 2.56),
        Step("t08", 5.49, 1, 8.0, 2.71),
    ),
    joins_s=4.4,
)


LONG = Scene(
    (
        Step("t00", 3.52, 2, 8.0, 11.53),
        Step("t01", 6.82, 2, 2.0, 9.62),
        Step("t02", 9.71, 2, 2.0, 8.46),
        Step("t03", 13.23, 2, 5.0, 7.9),
        Step("t04", 15.98, 2, 2.0, 11.99),
        Step("t05", 19.55, 2, 2.0, 4.72),
        Step("t06", 22.53, 1, 8.0, 5.46),
        Step("t07", 24.52, 2, 2.0, 7.7),
        Step("t08", 26.38, 1, 8.0, 6.26),
        Step("t09", 29.33, 2, 8.0, 9.68),
        Step("t10", 31.2, 2, 8.0, 8.02),
        Step("t11", 33.92, 1, 2.0, 11.85),
        Step("t12", 36.56, 2, 2.0, 7.6),
        Step("t13", 38.41, 2, 8.0, 9.17),
        Step("t14", 42.0, 2, 2.0, 8.27),
        Step("t15", 44.99, 2, 5.0, 4.16),
        Step("t16", 47.0, 1, 2.0, 7.87),
        Step("t17", 50.42, 1, 2.0, 7.15),
        Step("t18", 54.01, 2, 2.0, 10.05),
        Step("t19", 58.23, 1, 5.0, 10.57),
    ),
    joins_s=30.0,
)


def apart_s(one: Scene) -> float:
    """The least time between two things that happen by themselves, as simulated; when a node joins is left to it."""
    happens: list[float] = []
    machine, first = scheduler(PoolPolicy("trimtab", "trimtab"), GPUS, 3 * GPUS)

    def heard(now: float, event: e.PoolEvent, _: list[e.PoolInstruction]) -> None:
        if isinstance(event, (e.TaskSubmitted, e.TaskEnded)):
            happens.append(now)

    workload = [WorkloadTask(spec_of(step), step.at_s, step.work_s, step.gpus, "tasks") for step in one.steps]
    churn = () if one.joins_s is None else (ChurnEvent(one.joins_s + JOINING_S, "n2", "joined"),)
    PoolReplay(machine, workload, PoolReality(("n0", "n1"), GPUS, USUAL, churn), first=first, on_event=heard).run()
    return min(b - a for a, b in pairwise(happens))


def spec_of(step: Step) -> TaskSpec:
    """A task as it is submitted."""
    return TaskSpec(
        step.id,
        "pool",
        (Resources.of(gpu=step.gpus),),
        priority=step.priority,
        strategy=PlacementStrategy.pack,
        restarts=-1,
        saves=True,
        awaits_node=True,
    )


class Sleeper:
    """Works by sleeping, and can leave at any moment with what it has done."""

    def __init__(self) -> None:
        self.before_s = 0.0
        self.began: float | None = None
        self._leaves = threading.Event()

    def work(self, seconds: float) -> None:
        self.began = time.monotonic()
        self._leaves.wait(timeout=seconds - self.before_s)

    def cancel(self) -> None:
        self._leaves.set()

    def save(self) -> float:
        return self.before_s + (0.0 if self.began is None else time.monotonic() - self.began)

    def load(self, before_s: float) -> None:
        self.before_s = before_s


# ---- live -----------------------------------------------------------------------------------------------------------


class Joining:
    """Starts a node beside everything else, so that nobody waits for it."""

    def __init__(self, address: str) -> None:
        self._command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
        self._command += ["--num-cpus=8", f"--num-gpus={GPUS}", "--disable-usage-stats"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, start_new_session=True)

    def end(self) -> None:
        """All of the node is gone."""
        if self._process is not None:
            pids = below(self._process.pid)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=30)
            for pid in (self._process.pid, *pids):
                kill(pid)


@contextmanager
def nodes_with_gpus() -> Iterator[Joining]:
    """A head without GPUs and two nodes with some; what is given starts a third."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=8, num_gpus=GPUS, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="trimtab")
        joining = Joining(cluster.address)
        try:
            yield joining
        finally:
            joining.end()
    finally:
        ray.shutdown()
        cluster.shutdown()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def play(one: Scene, node: Joining, journal: Path) -> JournalRecord:
    """Play it live; what the controller's journal says."""
    session = connect(name=f"live-{journal.name}", journal_dir=str(journal))
    try:
        session.preemption(cancel_timeout_s=5.0, save_timeout_s=60.0)
        pool = session.pool("pool", {"gpu": 3 * GPUS}, warm_each=WARM)
        until(lambda: _warm(session) >= 3 * WARM, "warm hosts")
        began, tasks, joins = time.monotonic(), [], one.joins_s is not None
        for step in one.steps:
            if joins and one.joins_s is not None and step.at_s >= one.joins_s:
                joins = False
                node.start()
            time.sleep(max(0.0, began + step.at_s - time.monotonic()))
            tasks.append(
                pool.submit(
                    Sleeper,
                    resources={"gpu": step.gpus},
                    id=step.id,
                    priority=step.priority,
                    run="work",
                    run_args=[step.work_s],
                    strategy=PlacementStrategy.pack,
                    restarts=-1,
                    awaits_node=True,
                )
            )
        for task in tasks:
            task.result(timeout=120.0)
        until(lambda: not set(session.status()["tasks"]) - {"done"}, "all tasks are done")
        found = read_journal(journal)
        return read_record(found.snapshot, found.events, found.instructions, found.last_time)
    finally:
        session.shutdown()


def _warm(session: Any) -> int:
    counts = session.status()["warm_hosts"]
    return sum(one["ready"] for one in counts.values())


# ---- simulated ------------------------------------------------------------------------------------------------------


def as_planned(world: JournalWorld, one: Scene, *, medians: bool) -> JournalWorld:
    """The world of the live run with the lengths that were asked for, instead of those that were measured.

    With `medians` deeds take what they took in the middle, and tasks come when they were to come, after the first.
    """
    steps = {step.id: step for step in one.steps}
    first_s = world.workload[0].submit_s - one.steps[0].at_s
    workload = tuple(
        replace(
            work,
            work_s=steps[work.spec.id].work_s,
            submit_s=first_s + steps[work.spec.id].at_s if medians else work.submit_s,
        )
        for work in world.workload
    )
    if not medians:
        return replace(world, workload=workload)
    times = PoolTimes(*(Distribution(_middle(getattr(world.times, f"{name}_s"))) for name in _DEEDS))
    return replace(world, workload=workload, took={}, times=times)


_DEEDS = ("bind", "start", "stop", "save", "load")


def _middle(one: Distribution) -> float:
    return median(one.values) if one.values else 0.05


def simulated(world: JournalWorld, one: Scene, *, medians: bool = False) -> tuple[JournalRun, ReplayAgreement]:
    """The scenario in a replay, and how near it comes to what was."""
    planned = as_planned(world, one, medians=medians)
    run = run_alternative(planned, UNCHANGED)
    return run, agreement(world, recorded(world), run)


def starts_and_stops(run: JournalRun) -> list[tuple[float, str]]:
    """When which task was told to start, where, and to stop."""
    many: Counter[str] = Counter()
    found = []
    for each in run.given:
        if isinstance(each.instruction, e.StartTask):
            many[each.task] += 1
            nodes = ", ".join(place.node for place in each.instruction.places)
            found.append((each.at_s, f"start {many[each.task]} of {each.task} on {nodes}"))
        elif isinstance(each.instruction, e.StopTask):
            found.append((each.at_s, f"stop {many[each.task]} of {each.task}"))
    return found


def out_of_order(was: JournalRun, now: JournalRun) -> list[str]:
    """What is not the same: deeds of one alone, and pairs that were apart and come the other way round."""
    then, places = starts_and_stops(was), {what: at for at, (_, what) in enumerate(starts_and_stops(now))}
    alone = {what for _, what in then} ^ set(places)
    if alone:
        return sorted(alone)
    return [
        f"{first} before {second}"
        for at, (first_s, first) in enumerate(then)
        for second_s, second in then[at + 1 :]
        if second_s - first_s >= APART_S and places[first] > places[second]
    ]
