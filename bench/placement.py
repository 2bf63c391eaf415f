"""How long the exact placement search takes, how much memory, and what plain enumeration takes for the same answer.

Twenty seeded workflows a row, each in the same fresh process on one core; the worst counts. Enumeration tries every
grouping and every size of every group, one plan after another through the same simulator; where it would take longer
than a minute it is timed on a sample of plans and multiplied by their number, and marked with ~.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time
from math import comb

import numpy as np

from trimtab.model.workflow import (
    Cluster,
    Component,
    GpuCurve,
    Memory,
    Node,
    PlacementJob,
    Variant,
    WeightSync,
    Workflow,
)
from trimtab.plan.placement.search import search
from trimtab.plan.placement.simulate import GroupingShapes
from trimtab.plan.placement.space import PlanSpace, set_partitions

ROWS = ((3, 8), (3, 64), (3, 256), (3, 1024), (5, 8), (5, 64), (5, 256), (5, 1024), (8, 64))
GOALS = {(3, 1024): 0.1, (5, 1024): 0.5, (8, 64): 2.0}
SEEDS = 20
NAMES = ("rollout", "reference", "reward", "critic", "trainer", "judge", "teacher", "env")


def workflow_job(seed: int, components: int, gpus: int) -> PlacementJob:
    """A random workflow of a realistic kind: engines, floors, memory, mini-batches, a long-tailed rollout, a sync."""
    rng = random.Random(seed)
    names = NAMES[:components]
    parts = []
    for i, name in enumerate(names):
        after = () if i == 0 else tuple(rng.sample(names[:i], k=1 if i == 1 or rng.random() < 0.7 else 2))
        base, block = rng.uniform(10, 200), rng.choice([1, 1, 2, 4])
        points: tuple[tuple[int, float], ...] = ((gpus, round(base, 3)),)
        if rng.random() < 0.6:
            floor = rng.uniform(0.05, 0.4)
            counts = sorted({max(block, gpus // 8), max(block, gpus // 2), gpus})
            points = tuple((g, round(base * (floor + (1 - floor) * gpus / g), 3)) for g in counts)
        active, resident = rng.choice([30.0, 50.0, 60.0]), rng.choice([0.0, 2.0, 6.0])
        parts.append(
            Component(
                name,
                (
                    Variant(
                        seconds={"": points},
                        multiple_of=block,
                        memory=Memory(GpuCurve(per_gpu=active), GpuCurve(per_gpu=resident)),
                    ),
                ),
                after,
                granularity=rng.choice([1, 1, 4, 32, 128, None]),
                completion=((0.5, 0.2), (0.9, 0.5), (1.0, 1.0)) if i == 0 and rng.random() < 0.5 else (),
                switch_seconds=rng.choice([0.0, 1.0, 3.0]),
                engine=rng.choice(["vllm", "megatron"]),
            )
        )
    nodes = tuple(Node(f"node{i}", min(8, gpus), gpu_memory_gb=80.0) for i in range(max(1, gpus // 8)))
    sync = WeightSync("trainer" if components >= 5 else names[-1], "rollout", 1.0, 4.0)
    return PlacementJob(Cluster(nodes), Workflow(tuple(parts), batches=512, weight_sync=sync))


def enumeration_seconds(job: PlacementJob) -> tuple[float, bool, float]:
    """Seconds of a plain enumeration, whether that is an estimate, and the best time it found."""
    space = PlanSpace(job)
    gpus = job.cluster.gpus
    plans = sum(comb(gpus, len(p)) for p in set_partitions(space.on_gpu))
    sample = plans if plans <= 20_000 else 2_000
    done, best = 0, np.inf
    began = time.perf_counter()
    for partition in set_partitions(space.on_gpu):
        groups = tuple(tuple(sorted(group)) for group in partition)
        grouping = space.grouping(groups, ("",) * len(groups))
        if grouping is None:
            continue
        shapes = GroupingShapes.stack([space.shape(grouping)])
        for sizes in itertools.product(range(1, gpus + 1), repeat=len(groups)):
            if sum(sizes) > gpus:
                continue
            times = space.cpu_row
            feasible = True
            for table, size in zip(grouping.tables, sizes, strict=True):
                at = np.searchsorted(table.sizes, size, side="right") - 1
                if at < 0:
                    feasible = False
                    break
                times[table.columns] = table.times[at]
            if feasible:
                best = min(best, float(space.simulator.seconds(times[None, :], shapes)[0]))
            done += 1
            if done >= sample and sample < plans:
                spent = time.perf_counter() - began
                return spent / done * plans, True, np.inf
    return time.perf_counter() - began, False, best


def measure(components: int, gpus: int) -> None:
    """One row, in a process of its own: what it finds goes to standard output as JSON."""
    os.sched_setaffinity(0, {0})
    times, plans, gap = [], [], 0.0
    # One warm-up on another seed: numpy's first calls are not the search's.
    search(PlanSpace(workflow_job(10_000, components, gpus)))
    for seed in range(SEEDS):
        job = workflow_job(seed, components, gpus)
        began = time.perf_counter()
        outcome = search(PlanSpace(job))
        times.append(time.perf_counter() - began)
        plans.append(outcome.considered)
        assert outcome.best is not None
        gap = max(gap, outcome.best.seconds / outcome.lower_bound - 1)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    job = workflow_job(0, components, gpus)
    naive, estimated, best = enumeration_seconds(job)
    began = time.perf_counter()
    found = search(PlanSpace(job)).best
    mine = time.perf_counter() - began
    if not estimated:
        assert found is not None
        assert abs(best - found.seconds) <= 1e-9 * best
    print(
        json.dumps(
            {
                "median": sorted(times)[len(times) // 2],
                "worst": max(times),
                "plans": max(plans),
                "gap": gap,
                "mb": peak_mb,
                "ratio": naive / mine,
                "estimated": estimated,
            }
        )
    )


def main() -> None:
    print("Placement search: worst of 20 workflows, one core (goal in brackets)")
    head = ("components", "GPUs", "median s", "worst s", "goal s", "plans", "gap", "MB", "enumeration takes")
    print("{:>10} {:>6} {:>9} {:>8} {:>7} {:>7} {:>7} {:>6}  {}".format(*head))
    for components, gpus in ROWS:
        run = subprocess.run(
            [sys.executable, "-c", f"from bench.placement import measure; measure({components}, {gpus})"],
            capture_output=True,
            text=True,
            check=True,
        )
        row = json.loads(run.stdout)
        goal = GOALS.get((components, gpus))
        print(
            f"{components:>10} {gpus:>6} {row['median']:>9.3f} {row['worst']:>8.3f} "
            f"{f'[{goal}]' if goal else '':>7} {row['plans']:>7} {row['gap']:>7.0e} {row['mb']:>6.0f}  "
            f"{'~' if row['estimated'] else ''}{row['ratio']:,.0f}x as long"
        )


if __name__ == "__main__":
    main()
