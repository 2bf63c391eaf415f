"""From submission to the first answer, with warm hosts and without, against a fresh Ray actor in the same run.

A fresh actor in a placement group that stands already is what everybody does today. Times are those of a client: from
the call that submits until the first call to the object has returned. Also what the controller costs: memory, journal,
recovery.
"""

from __future__ import annotations

import gc
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trimtab.core.resources import Resources
from trimtab.machines.pool import events
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import PoolSpec, TaskSpec

ROUNDS = 30
WARM = 6


class Plain:
    """Something to start."""

    def ping(self) -> str:
        """The first call."""
        return "pong"

    def cancel(self) -> None:
        """Leave at once."""


class Torch:
    """Something that imports torch when it is made, as most things in this field do."""

    def __init__(self) -> None:
        import torch

        self.version = torch.__version__

    def ping(self) -> str:
        """The first call."""
        return str(self.version)


def main() -> None:
    import ray

    from trimtab.runtime.client.session import connect

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    with connect("local", name="bench", cpus=64) as session:
        base = fresh_actors(ray, Plain, ROUNDS)
        print(
            f"Until the first call has returned, ms ({ROUNDS} each; goals in brackets; the ratio is to a fresh actor)"
        )
        print(f"{'':<52}{'median':>9}{'p99':>9}{'':>3}{'median':>10}{'p99':>10}")
        row("fresh Ray actor in a placement group that stands", base, base)
        session.preemption(cancel_timeout_s=5.0)
        pool = session.pool("warm", {"cpu": 16}, warm_hosts=WARM)
        row("submit, a host is warm", submits(session, pool, Plain, ROUNDS), base, (20, 10))
        row("preempt, the victim cooperates, a host is warm", preempts(session, pool, ROUNDS), base, (10, 5))
        burst = submits(session, pool, Plain, WARM + 4, settle=False)
        for at, seconds in enumerate(burst):
            if at in (0, WARM - 1, WARM, len(burst) - 1):
                row(f"submit number {at + 1} at once, {WARM} hosts were warm", [seconds], base)
        torch_base = fresh_actors(ray, Torch, 5)
        row("class that imports torch: fresh Ray actor", torch_base, torch_base)
        row("class that imports torch: warm host", submits(session, pool, Torch, 5), torch_base)
        preloaded = session.pool("preloaded", {"cpu": 16}, warm_hosts=2, preload=("torch",))
        row("class that imports torch: host with preload", submits(session, preloaded, Torch, 5), torch_base)
        session.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    overhead()


def fresh_actors(ray: Any, kind: type, rounds: int) -> list[float]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready(), timeout=60)
    found = []
    for _ in range(rounds):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        began = time.perf_counter()
        actor = ray.remote(kind).options(num_cpus=1, scheduling_strategy=strategy).remote()
        ray.get(actor.ping.remote(), timeout=120)
        found.append(time.perf_counter() - began)
        ray.kill(actor)
        time.sleep(0.1)
    ray.util.remove_placement_group(group)
    return found


def submits(session: Any, pool: Any, kind: type, rounds: int, settle: bool = True) -> list[float]:
    """One after another; with `settle`, a host is warm again before the next."""
    found, tasks = [], []
    warm(session, sum(one["target_hosts"] for one in session.status()["pools"].values()))
    for _ in range(rounds):
        if settle:
            warm(session, sum(one["target_hosts"] for one in session.status()["pools"].values()))
        began = time.perf_counter()
        task = pool.submit(kind, resources={"cpu": 1})
        task.call("ping", timeout=120)
        found.append(time.perf_counter() - began)
        tasks.append(task)
        if settle:
            tasks.pop().complete()
            task.wait("ended", timeout=60)
    for task in tasks:
        task.complete()
        task.wait("ended", timeout=60)
    return found


def preempts(session: Any, pool: Any, rounds: int) -> list[float]:
    """A full pool; one of higher priority comes, somebody leaves, and comes back when it has gone."""
    low = [pool.submit(Plain, resources={"cpu": 4}, priority=1.0) for _ in range(4)]
    for task in low:
        task.wait("running", timeout=120)
    found = []
    for _ in range(rounds):
        warm(session, WARM)
        began = time.perf_counter()
        task = pool.submit(Plain, resources={"cpu": 4}, priority=9.0)
        task.call("ping", timeout=120)
        found.append(time.perf_counter() - began)
        task.complete()
        for one in low:
            one.wait("running", timeout=120)
    for task in low:
        task.complete()
        task.wait("ended", timeout=60)
    return found


def warm(session: Any, count: int) -> None:
    """Wait until so many hosts are warm, and for the machine to be quiet."""
    deadline = time.monotonic() + 120
    while sum(one["ready"] for one in session.status()["warm_hosts"].values()) < count:
        assert time.monotonic() < deadline, "hosts are not warm after two minutes"
        time.sleep(0.05)
    time.sleep(0.05)


def row(name: str, seconds: list[float], base: list[float], goals: tuple[int, int] | None = None) -> None:
    middle, last = statistics.median(seconds), p99(seconds)
    said = [f"[{goal}x]" for goal in goals] if goals else ["", ""]
    if seconds is base:
        ratios = "1x"
    else:
        ratios = f"{statistics.median(base) / middle:>7.1f}x {said[0]:<6}{p99(base) / last:>7.1f}x {said[1]}"
    print(f"{name:<52}{middle * 1e3:>9.1f}{last * 1e3:>9.1f}   {ratios:>10}", flush=True)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.99))]


# ---- what the controller costs ----


def overhead(count: int = 10_000, history: int = 100_000) -> None:
    """Memory of many tasks, the rate of the journal, and how long a controller needs to come back."""
    from trimtab.runtime.controller.controller_loop import COMPACT_EVERY
    from trimtab.runtime.store.journal import Journal, read_journal

    print("\nThe controller")
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    machine, said = PoolMachine(), lived(count)
    for now, event in said:
        machine.handle(event, now)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"memory of {count:,} running tasks: {grown / 1024:.0f} MB")
    with tempfile.TemporaryDirectory() as directory:
        everything = lived(count, history)
        journal = Journal(directory)
        machine = PoolMachine()
        handled = written = 0.0
        for now, event in everything:
            began = time.perf_counter()
            machine.handle(event, now)
            middle = time.perf_counter()
            journal.append(now, event)
            handled, written = handled + middle - began, written + time.perf_counter() - middle
            if journal.since_snapshot >= COMPACT_EVERY:
                journal.snapshot(now, machine.dump())
        journal.close()
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
        print(
            f"journal: {len(everything) / written:,.0f} events a second ({size / len(everything):.0f} bytes each), "
            f"{written / handled:.2f}x the time of deciding"
        )
        gc.disable()  # as the controller does while it comes back
        began = time.perf_counter()
        found = read_journal(directory)
        again = PoolMachine.load(found.snapshot) if found.snapshot else PoolMachine()
        for now, event in found.events:
            again.handle(event, now)
        seconds = time.perf_counter() - began
        gc.enable()
        assert json.dumps(again.dump()) == json.dumps(machine.dump())
        print(f"recovery after {len(everything):,} events: {seconds:.2f} s [5 s]")


def lived(running: int, events_in_all: int = 0) -> list[tuple[float, Any]]:
    """What a controller hears that starts so many tasks, and goes on with tasks that come and go."""
    nodes = 1_250
    said: list[tuple[float, Any]] = []
    machine = PoolMachine()
    now = 0.0

    def tell(event: Any) -> None:
        nonlocal now
        queue = [event]
        while queue:
            now += 0.001
            event = queue.pop(0)
            said.append((now, event))
            for one in machine.handle(event, now):
                if isinstance(one, events.CreatePlacementGroup):
                    queue.append(events.PlacementGroupReady(one.group))
                elif isinstance(one, events.RemovePlacementGroup):
                    queue.append(events.PlacementGroupRemoved(one.group))
                elif isinstance(one, events.StartTask):
                    queue.append(events.TaskStarted(one.task, one.attempt, "a warm host"))
                elif isinstance(one, events.StopTask):
                    queue.append(events.TaskStopped(one.task, one.attempt))

    for at in range(nodes):
        tell(events.NodeJoined(f"node{at}", Resources.of(gpu=8, cpu=64)))
    tell(events.PoolEnsured(PoolSpec("p", Resources.of(gpu=8 * nodes, cpu=64 * nodes))))
    ask = (Resources.of(gpu=1, cpu=1),)
    for at in range(running):
        tell(events.TaskSubmitted(TaskSpec(f"task{at}", "p", ask)))
    at = 0
    while len(said) < events_in_all:
        tell(events.TaskEnded(f"task{at}", machine.tasks[f"task{at}"].attempt))
        tell(events.TaskSubmitted(TaskSpec(f"task{at + running}", "p", ask)))
        at += 1
    return said


if __name__ == "__main__":
    main()
