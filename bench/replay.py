"""How fast the same machines run under a virtual clock, and what a naive event loop takes for the same events.

The whole Philly job table (82,247 jobs, where it is at hand: `TRIMTAB_TRACES`, else ../shared/data; else as many jobs
made up in its manner) on 2,504 GPUs with preemption on. As it was recorded it never needs more than half of them, so
nobody waits; beside it the whole on 768 GPUs, too few at its peaks, where thousands are evicted, and a part of it on
192, too few for weeks, where thousands wait. The naive loop keeps the moments to come in a list that it scans for the
first one, looks at every task for who is due and at every node for room; it does less than the machine (nobody is
evicted, no reasons, no books to check). Also: growth from 100 to 10,000 nodes, and request events a minute of the
rollout machine. Each row in a process of its own, CPU time of one core, and its peak memory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from trimtab.model.elastic_config import ElasticConfig
from trimtab.replay.common.timing import Distribution
from trimtab.replay.common.traces import JobRow, jobs
from trimtab.replay.pool.driver import PoolReality, PoolReplay, WorkloadTask
from trimtab.replay.pool.policies import PoolPolicy, scheduler
from trimtab.replay.pool.scenario import TaskGenerator, workload
from trimtab.replay.rollout.driver import PROFILES, RolloutReplay, SimulatedFleet

TRACES = Path(os.environ.get("TRIMTAB_TRACES") or Path(__file__).parents[2] / "shared" / "data")
JOBS, NODES, PER_NODE = 82_247, 313, 8
GOAL_S, GOAL_MB = 60.0, 500.0
FEW_NODES = 96
NAIVE_JOBS = 20_000  # of them all: a linear scan would take too long with more
TIGHT_JOBS, TIGHT_NODES = 5_000, 24
SIZES = (100, 1_000, 10_000)
GROWTH_JOBS = 4_000


def table() -> tuple[list[JobRow], str]:
    """The jobs, and where they are from."""
    path = TRACES / "philly_jobs.csv.gz"
    if path.exists():
        return jobs(path), "the Philly job table"
    made = TaskGenerator(
        JOBS, 31.5, Distribution(1_144.0, 2.3), ((1, 0.93), (2, 0.022), (4, 0.023), (8, 0.02), (16, 0.005))
    )
    return made.rows(1), "generated jobs"


def replayed(asked: list[WorkloadTask], nodes: int, use: str = "trimtab") -> dict[str, float]:
    """One run of a policy."""
    reality = PoolReality(tuple(f"n{at:05d}" for at in range(nodes)), PER_NODE, seed=1)
    machine, first = scheduler(PoolPolicy(use, use), PER_NODE, nodes * PER_NODE)
    began = time.process_time()
    outcome = PoolReplay(machine, asked, reality, first=first, check_every=10**9).run()
    seconds = time.process_time() - began
    return {"events": outcome.events, "seconds": seconds, "evictions": outcome.evictions, "looks": outcome.looks}


def naive(asked: list[WorkloadTask], nodes: int) -> dict[str, float]:
    """The same jobs by a loop that scans: for the next moment, for who has ended, for a node with room."""
    free = dict.fromkeys(range(nodes), PER_NODE)
    to_come = [(one.submit_s, number) for number, one in enumerate(asked)]
    running: list[tuple[float, int, list[tuple[int, int]]]] = []
    waiting: list[int] = []
    began, events = time.process_time(), 0
    while to_come or running:
        comes = min(to_come, default=None)
        ends = min(running, key=lambda one: one[0], default=None)
        events += 1
        if comes is not None and (ends is None or comes[0] <= ends[0]):
            to_come.remove(comes)
            now = comes[0]
            waiting.append(comes[1])
        elif ends is not None:
            running.remove(ends)
            now = ends[0]
            for node, gpus in ends[2]:
                free[node] += gpus
        for number in sorted(waiting, key=lambda one: (-asked[one].spec.priority, one)):
            taken: list[tuple[int, int]] = []
            for bundle in asked[number].spec.bundles:
                gpus = bundle.get("gpu") // 10_000
                fits = [node for node, left in free.items() if left >= gpus]
                if not fits:
                    break
                node = min(fits, key=lambda one: free[one])
                free[node] -= gpus
                taken.append((node, gpus))
            if len(taken) < len(asked[number].spec.bundles):
                for node, gpus in taken:
                    free[node] += gpus
                continue
            waiting.remove(number)
            running.append((now + asked[number].work_s, number, taken))
    return {"events": events, "seconds": time.process_time() - began, "evictions": 0, "looks": 0}


def rollouts() -> dict[str, float]:
    """Request events of closed-loop steps."""
    profile = PROFILES["short"]
    batches = profile.lengths(6, 512, 8, 1)
    replay = RolloutReplay(ElasticConfig(requests_per_worker_capacity=32), SimulatedFleet())
    began = time.process_time()
    outcome = replay.closed(profile, batches)
    return {"events": outcome.events, "seconds": time.process_time() - began, "evictions": 0, "looks": outcome.answered}


def measure(what: str) -> None:
    """One row, in a process of its own: what it finds goes to standard output as JSON."""
    rows, source = table()
    part = rows[:NAIVE_JOBS]
    if what == "whole":
        found = replayed(workload(rows, seed=1, node_gpus=PER_NODE), NODES)
    elif what == "few":
        found = replayed(workload(rows, seed=1, node_gpus=PER_NODE), FEW_NODES)
    elif what == "tight":
        found = replayed(workload(rows[:TIGHT_JOBS], seed=1, node_gpus=PER_NODE), TIGHT_NODES)
    elif what in ("part", "naive"):
        asked = workload(part, seed=1, node_gpus=PER_NODE)
        found = replayed(asked, NODES) if what == "part" else naive(asked, NODES)
    elif what == "rollouts":
        found = rollouts()
    else:
        nodes = int(what)
        # As many jobs for each node at a time, whatever the size.
        rate = nodes / 100
        asked = workload(rows[40_000 : 40_000 + GROWTH_JOBS], seed=1, node_gpus=PER_NODE, rate=rate)
        begin = asked[0].submit_s
        found = replayed([replace(one, submit_s=one.submit_s - begin) for one in asked], nodes)
    mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**found, "mb": mb, "source": source}))


def asked_of(what: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", f"from bench.replay import measure; measure({what!r})"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(run.stdout)
    return found


def main() -> None:
    rows = [
        ("whole", f"all {JOBS:,} jobs, {NODES * PER_NODE:,} GPUs"),
        ("few", f"all {JOBS:,} jobs, {FEW_NODES * PER_NODE} GPUs: too few at peaks"),
        ("part", f"{NAIVE_JOBS:,} jobs, {NODES * PER_NODE:,} GPUs"),
        ("naive", "  the same, naive loop with scans"),
        ("tight", f"{TIGHT_JOBS:,} jobs, {TIGHT_NODES * PER_NODE} GPUs: too few for weeks"),
        *((str(size), f"{GROWTH_JOBS:,} jobs, {size:,} nodes") for size in SIZES),
        ("rollouts", "rollout steps, 24,576 requests"),
    ]
    print(f"{'replay, CPU time of one core':42}{'events':>10}{'seconds':>9}{'events/s':>10}{'evictions':>11}{'MB':>7}")
    found = {}
    for key, words in rows:
        one = found[key] = asked_of(key)
        print(
            f"{words:42}{one['events']:>10,}{one['seconds']:>9.1f}{one['events'] / one['seconds']:>10,.0f}"
            f"{one['evictions']:>11,}{one['mb']:>7.0f}"
        )
    print(f"\ntrace: {found['whole']['source']}; goal for all of it: {GOAL_S:g} s and {GOAL_MB:g} MB")
    for key, words in rows[:2]:
        met = found[key]["seconds"] <= GOAL_S and found[key]["mb"] <= GOAL_MB
        print(f"  {words}: {'met' if met else 'MISSED'}")
    times = found["naive"]["seconds"] / found["part"]["seconds"]
    print(f"the naive loop takes {times:.1f} times as long for the same jobs")
    print(f"request events a minute: {found['rollouts']['events'] / found['rollouts']['seconds'] * 60:,.0f}")


if __name__ == "__main__":
    main()
