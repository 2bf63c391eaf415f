"""How long the pool machine takes to decide, with 100 to 10,000 tasks running on 10,000 GPUs.

1,250 nodes of 8 GPUs; whatever the running tasks leave over is held by others, but for a little, so that every eviction
is needed at every size. Each row is the CPU time of `handle` alone, for events of one kind; all that is carried out in
between is in memory and not counted. The scan beside it does what the public code does: it scores every running task in
plain Python and takes the best one. It knows no nodes, quotas or sets, and ends with one victim.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections import defaultdict
from dataclasses import dataclass, field

from trimtab.core.codec import decode, encode
from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.pool import events
from trimtab.machines.pool.events import CreatePlacementGroup, PoolEvent, RemovePlacementGroup, StartTask, StopTask
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec

NODES, PER_NODE = 1_250, 8
SIZES = (100, 1_000, 10_000)
SPARE_NODES = 4  # free of everybody, for what finds room at once
ROUNDS = 300
GOAL_P99_MS = 1.0
KINDS = (
    "submit, room is free",
    "submit, one must go",
    "submit 8 GPUs, several must go",
    "submit a gang of 4 x 8, many must go",
    "ended",
    "died",
    "stopped",
    "started",
    "group made or gone",
    "tick",
)

ONE, NODE = Resources.of(gpu=1, cpu=4), Resources.of(gpu=8, cpu=32)


@dataclass
class Driver:
    """A machine, and somebody who carries everything out at once."""

    machine: PoolMachine = field(default_factory=PoolMachine)
    now: float = 0.0
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    journal: list[tuple[float, PoolEvent]] = field(default_factory=list)

    def tell(self, kind: str, event: PoolEvent) -> list[events.PoolInstruction]:
        """One event, timed."""
        self.now += 0.01
        self.journal.append((self.now, event))
        began = time.thread_time()
        wanted = self.machine.handle(event, self.now)
        self.times[kind].append(time.thread_time() - began)
        return wanted

    def settle(self, wanted: list[events.PoolInstruction]) -> None:
        """Carry out, and what follows from it."""
        queue = list(wanted)
        while queue:
            one = queue.pop(0)
            if isinstance(one, CreatePlacementGroup):
                queue += self.tell("group made or gone", events.PlacementGroupReady(one.group))
            elif isinstance(one, RemovePlacementGroup):
                queue += self.tell("group made or gone", events.PlacementGroupRemoved(one.group))
            elif isinstance(one, StartTask):
                queue += self.tell("started", events.TaskStarted(one.task, one.attempt))
            elif isinstance(one, StopTask):
                queue += self.tell("stopped", events.TaskStopped(one.task, one.attempt, "returned"))

    def do(self, kind: str, event: PoolEvent) -> None:
        """Tell, and carry out what comes of it."""
        self.settle(self.tell(kind, event))


def filled(running: int) -> Driver:
    """A cluster in which so many tasks of one GPU run, and next to nothing else is free."""
    driver = Driver()
    full = -(-running // PER_NODE)
    whole = Resources.of(gpu=PER_NODE, cpu=64)
    for at in range(NODES + SPARE_NODES):
        free = at < full + SPARE_NODES
        driver.tell("node", events.NodeJoined(f"node{at:04d}", whole, NOTHING if free else whole))
    driver.tell(
        "pool", events.PoolEnsured(PoolSpec("p", Resources.of(gpu=2 * NODES * PER_NODE, cpu=10**6), wait_s=1e9))
    )
    driver.tell("policy", events.PolicySet(PreemptionPolicy()))
    for at in range(running):
        spec = TaskSpec(
            f"low{at:05d}", "p", (ONE,), priority=1.0 + at % 5, estimate_s=600.0, labels=(("role", f"r{at % 4}"),),
            restarts=-1,
        )  # fmt: skip
        driver.do("fill", events.TaskSubmitted(spec))
    return driver


def mixed(driver: Driver, rounds: int) -> None:
    """Rounds of everything that happens in a day; each leaves the cluster as it was."""
    machine = driver.machine

    def attempt(task: str) -> int:
        return machine.tasks[task].attempt

    def low(number: int) -> str:
        return f"low{number * 7919 % count:05d}"

    count = sum(name.startswith("low") for name in machine.tasks)
    for at in range(rounds):
        driver.do("submit, room is free", events.TaskSubmitted(TaskSpec(f"free{at}", "p", (ONE,), 5.0)))
        driver.do("ended", events.TaskEnded(f"free{at}", 1))
        driver.do("tick", events.PoolTick())
    # Now the spare nodes are taken as well.
    for at in range(SPARE_NODES):
        driver.do("fill", events.TaskSubmitted(TaskSpec(f"spare{at}", "p", (NODE,), 10.0)))
    for at in range(rounds):
        driver.do("submit, one must go", events.TaskSubmitted(TaskSpec(f"one{at}", "p", (ONE,), 9.0)))
        driver.do("ended", events.TaskEnded(f"one{at}", 1))
        victim = low(at)
        if machine.tasks[victim].state.value == "running":
            driver.do("died", events.TaskDied(victim, attempt(victim), "signal 9"))
        driver.now += 60.0  # back-off ends
        driver.do("tick", events.PoolTick())
    for at in range(rounds // 3):
        several = TaskSpec(f"several{at}", "p", (NODE,), 9.0)
        driver.do("submit 8 GPUs, several must go", events.TaskSubmitted(several))
        driver.do("ended", events.TaskEnded(several.id, 1))
        gang = TaskSpec(f"gang{at}", "p", (NODE,) * 4, 9.0, strategy=PlacementStrategy.spread)
        driver.do("submit a gang of 4 x 8, many must go", events.TaskSubmitted(gang))
        driver.do("ended", events.TaskEnded(gang.id, 1))
        driver.do("tick", events.PoolTick())


@dataclass
class Running:
    """A running task as the public code keeps it."""

    name: str
    priority: float
    labels: dict[str, str]
    resources: dict[str, float]
    estimate_s: float
    started_at: float


def scan(tasks: dict[str, Running], priority: float, ask: dict[str, float], now: float) -> str | None:
    """The best victim by score, every task looked at: gap, label and remaining time, as the public code does it."""
    best, best_score = None, float("-inf")
    for task in tasks.values():
        gap = priority - task.priority
        if gap < 1.0 or any(task.resources.get(name, 0.0) < amount for name, amount in ask.items()):
            continue
        remaining = max(0.0, task.estimate_s - (now - task.started_at))
        score = gap + 0.1 * remaining + (0.5 if task.labels.get("role") == "rollout" else 0.0)
        if score > best_score:
            best, best_score = task.name, score
    return best


def scan_seconds(running: int) -> float:
    tasks = {
        f"low{at}": Running(f"low{at}", 1.0 + at % 5, {"role": f"r{at % 4}"}, {"gpu": 1.0, "cpu": 4.0}, 600.0, 0.0)
        for at in range(running)
    }
    times = []
    for _ in range(25):
        began = time.thread_time()
        scan(tasks, 9.0, {"gpu": 1.0, "cpu": 4.0}, 100.0)
        times.append(time.thread_time() - began)
    return sorted(times)[len(times) // 2]


def memory_mb(running: int) -> float:
    """What a machine with so many running tasks holds beyond one with none."""
    empty = filled(0)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    driver = filled(running)
    driver.journal.clear()
    driver.times.clear()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del empty
    return held / 2**20


def replay_rate(journal: list[tuple[float, PoolEvent]]) -> tuple[int, float]:
    """Events, and events a second, read from JSON lines and heard by a fresh machine."""
    kinds = {kind.__name__: kind for kind in {type(event) for _, event in journal}}
    lines = [json.dumps([at, type(event).__name__, encode(event)]) for at, event in journal]
    began = time.perf_counter()
    machine = PoolMachine()
    for line in lines:
        at, kind, data = json.loads(line)
        machine.handle(decode(kinds[kind], data), at)
    return len(lines), len(lines) / (time.perf_counter() - began)


def measure(running: int) -> None:
    """One size, in a process of its own: what it finds goes to standard output as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    driver = filled(running)
    driver.times.clear()
    mixed(driver, ROUNDS)
    driver.machine.check()
    rows = {}
    for kind in KINDS:
        times = sorted(driver.times[kind])
        rows[kind] = (len(times), times[len(times) // 2] * 1e3, times[int(len(times) * 0.99)] * 1e3)
    every = sorted(one for times in driver.times.values() for one in times)
    spent = sum(every)
    found = {
        "rows": rows,
        "all": (len(every), every[len(every) // 2] * 1e3, every[int(len(every) * 0.99)] * 1e3),
        "per_second": len(every) / spent,
        "scan_ms": scan_seconds(running) * 1e3,
        "replay": replay_rate(driver.journal),
        "mb": memory_mb(running),
        "evictions": sum(one.evictions for one in driver.machine.tasks.values()),
    }
    print(json.dumps(found))


def main() -> None:
    print(f"Pool machine alone: {NODES * PER_NODE:,} GPUs, one core; milliseconds of one `handle`, median and p99")
    found = []
    for running in SIZES:
        run = subprocess.run(
            [sys.executable, "-c", f"from bench.pools import measure; measure({running})"],
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(run.stdout))
    print(f"{'running tasks':<38}" + "".join(f"{running:>20,}" for running in SIZES) + "  growth of the median")
    for kind in KINDS:
        row(kind, [one["rows"][kind][1:] for one in found])
    row(f"all (goal p99 {GOAL_P99_MS:g} at {SIZES[-1]:,})", [one["all"][1:] for one in found])
    row("scan of all tasks for one victim", [(one["scan_ms"],) for one in found])
    line("  against `submit, one must go`", [f"{one['scan_ms'] / one['rows'][KINDS[1]][1]:.2f}x" for one in found])
    line("events a second", [f"{one['per_second']:,.0f}" for one in found])
    line("replayed from JSON, events a second", [f"{one['replay'][1]:,.0f}" for one in found])
    line("memory of the tasks, MB", [f"{one['mb']:.1f}" for one in found])


def row(label: str, cells: list[list[float]]) -> None:
    growth = cells[-1][0] / max(cells[0][0], 1e-9)
    line(label, [" ".join(f"{one:>8.3f}" for one in cell) + " " * 9 * (2 - len(cell)) for cell in cells], growth)


def line(label: str, cells: list[str], growth: float | None = None) -> None:
    print(f"{label:<38}" + "".join(f"{cell:>20}" for cell in cells) + (f"{growth:>10.1f}x" if growth else ""))


if __name__ == "__main__":
    main()
