"""How long the rollout machine takes to decide, with 100,000 requests queued on 512 workers.

512 workers of 64 places, all full, and 100,000 requests waiting in three classes, most of them eight samples of one
prompt. Each row is the CPU time of `handle` alone for events of one kind, all it does included: books, stories, timers,
reasons. `routing` is the choice by itself: who is sent where next, taken while everything waits. The scan beside it
does what a plain balancer does: it looks at every worker for the least loaded one, and knows no queue, prefix or class.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from trimtab.machines.rollout import events as e
from trimtab.machines.rollout.machine import RolloutMachine
from trimtab.model.rollout import RequestClass, RequestSpec, RolloutRules, WorkerSpec

WORKERS, LIMIT, QUEUED = 512, 64, 100_000
ROUNDS = 20_000
GOAL_P99_US = 50.0
CLASSES = (
    RequestClass("rollout", 0, QUEUED * 2),
    RequestClass("validation", 5, QUEUED),
    RequestClass("reward", 9, QUEUED),
)


class Driver:
    """A machine, and somebody who carries everything out at once."""

    def __init__(self) -> None:
        rules = RolloutRules(min_workers=1, max_workers=WORKERS, classes=CLASSES, monitor_s=1e6, stall_s=1e6)
        self.machine = RolloutMachine(rules)
        self.now = 0.0
        self.asked = 0
        self.running: deque[tuple[str, int]] = deque()
        self.times: dict[str, list[int]] = defaultdict(list)
        router = self.machine.state.router
        self._choose, router.choose = router.choose, self._timed_choice

    def _timed_choice(self) -> Any:
        begin = time.process_time_ns()
        choice = self._choose()
        if choice is not None:
            self.times["routing: who goes where next"].append(time.process_time_ns() - begin)
        return choice

    def tell(self, kind: str, event: e.RolloutEvent) -> list[e.RolloutInstruction]:
        """One event, timed."""
        self.now += 0.0001
        begin = time.process_time_ns()
        out = self.machine.handle(event, self.now)
        self.times[kind].append(time.process_time_ns() - begin)
        for one in out:
            if isinstance(one, e.SendRequest):
                self.running.append((one.request, one.attempt))
        return out

    def arrive(self, kind: str) -> None:
        """One request more, timed."""
        number, self.asked = self.asked, self.asked + 1
        class_ = ("rollout",) * 14 + ("validation", "reward")
        spec = RequestSpec(
            f"r{number}", 200 + number % 800, 4_096, class_=class_[number % 16], group=f"g{number // 8}", resumable=True
        )
        self.tell(kind, e.RequestArrived(spec))


def main() -> None:
    driver = Driver()
    for number in range(WORKERS):
        driver.tell("set up", e.WorkerAdded(WorkerSpec(f"w{number}", limit=LIMIT), True, 0))
    for _ in range(WORKERS * LIMIT):
        driver.arrive("arrival, sent at once")
    for _ in range(QUEUED):
        driver.arrive("arrival, queued")
    queued = driver.machine.sample().queued
    gc.collect()
    gc.freeze()
    driver.times["routing: who goes where next"].clear()
    for at in range(ROUNDS):
        request, attempt = driver.running.popleft()
        tokens = 50 + at * 37 % 900
        driver.tell("tokens came", e.TokensStreamed(request, attempt, tokens // 2))
        driver.tell("finished, the next one is sent", e.AttemptFinished(request, attempt, tokens))
        driver.arrive("arrival, queued")
    scans = _scan(driver)
    for at in range(ROUNDS // 10):
        request, attempt = driver.running.popleft()
        driver.tell("broke, goes on elsewhere", e.AttemptFailed(request, attempt, at % 50, "stream cut"))
    driver.machine.check()
    print(f"{queued:,} requests queued on {WORKERS} workers, {WORKERS * LIMIT:,} running; CPU microseconds")
    print(f"{'':36}{'count':>9}{'p50':>8}{'p99':>8}{'worst':>9}")
    for kind, times in driver.times.items():
        if kind != "set up":
            _row(kind, times)
    _row("a scan over all workers", scans)
    p99 = _share(driver.times["routing: who goes where next"], 0.99)
    print(
        f"\nrouting decision p99 {p99:.1f} us, goal under {GOAL_P99_US:.0f}: {'met' if p99 < GOAL_P99_US else 'MISSED'}"
    )


def _scan(driver: Driver) -> list[int]:
    lanes = list(driver.machine.state.router.lanes.values())
    return [_timed(lambda: min(lanes, key=lambda lane: lane.load)) for _ in range(2_000)]


def _timed(what: Callable[[], Any]) -> int:
    begin = time.process_time_ns()
    what()
    return time.process_time_ns() - begin


def _share(times: list[int], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))] / 1_000


def _row(kind: str, times: list[int]) -> None:
    print(f"{kind:36}{len(times):>9,}{_share(times, 0.5):>8.1f}{_share(times, 0.99):>8.1f}{_share(times, 1.0):>9.1f}")


if __name__ == "__main__":
    main()
