"""Runs the simulations of a scenario, in this process or in several, with a progress bar.

A run depends only on its scenario, policy and seed: the result is the same with any number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Generic, TypeVar

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from trimtab.render.output import err
from trimtab.replay.pool.figures import PoolFigures
from trimtab.replay.pool.runner import run_pool
from trimtab.replay.pool.scenario import PoolScenario
from trimtab.replay.replan.runner import ReplanFigures
from trimtab.replay.replan.scenario import ReplanScenario
from trimtab.replay.rollout.runner import RolloutFigures, run_rollout
from trimtab.replay.rollout.scenario import RolloutScenario

RunRequest = tuple[int, int]  # index of the policy, seed
OnProgress = Callable[[float], None]
Figures = TypeVar("Figures", PoolFigures, RolloutFigures, ReplanFigures)


@dataclass(frozen=True)
class PoolRuns:
    """The runs of a pool scenario."""

    scenario: PoolScenario

    def run(self, at: int, seed: int, on_progress: OnProgress | None = None) -> PoolFigures:
        return run_pool(self.scenario, self.scenario.policies[at], seed, on_progress)


@dataclass(frozen=True)
class RolloutRuns:
    """The runs of a rollout scenario."""

    scenario: RolloutScenario

    def run(self, at: int, seed: int, on_progress: OnProgress | None = None) -> RolloutFigures:
        return run_rollout(self.scenario, self.scenario.policies[at], seed)


@dataclass(frozen=True)
class _TimedRun(Generic[Figures]):
    """A run with its duration; picklable for other processes."""

    do: Callable[[int, int, OnProgress | None], Figures]

    def __call__(self, at: int, seed: int, on_progress: OnProgress | None = None) -> Figures:
        began = time.perf_counter()
        return replace(self.do(at, seed, on_progress), seconds=time.perf_counter() - began)


def pool_runs(scenario: PoolScenario, jobs: int) -> list[PoolFigures]:
    return _run_all(_TimedRun(PoolRuns(scenario).run), scenario, jobs)


def rollout_runs(scenario: RolloutScenario, jobs: int) -> list[RolloutFigures]:
    return _run_all(_TimedRun(RolloutRuns(scenario).run), scenario, jobs)


def loop_runs(scenario: ReplanScenario, jobs: int) -> list[ReplanFigures]:
    return _run_all(_TimedRun(scenario.run), scenario, jobs)


def _run_all(
    run: _TimedRun[Figures], scenario: PoolScenario | RolloutScenario | ReplanScenario, jobs: int
) -> list[Figures]:
    """Run every policy with every seed; the result is ordered by policy."""
    names = [policy.name for policy in scenario.policies]
    requests = [(at, seed) for at in range(len(names)) for seed in scenario.seeds]
    found: dict[RunRequest, Figures] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"{len(requests)} runs", total=len(requests))
        runs = _run_local(run, names, requests, bar, task) if jobs <= 1 else _run_in_processes(run, requests, jobs)
        for number, (request, figures) in enumerate(runs, 1):
            found[request] = figures
            bar.update(task, completed=number, description=f"{number} of {len(requests)} runs")
    return [found[request] for request in requests]


@dataclass(frozen=True)
class _BarProgress:
    """Advances the progress bar within a run."""

    bar: Progress
    task: TaskID
    done: int
    words: str

    def __call__(self, share: float) -> None:
        self.bar.update(self.task, completed=self.done + share, description=self.words)


def _run_local(
    run: _TimedRun[Figures], names: list[str], requests: list[RunRequest], bar: Progress, task: TaskID
) -> Iterator[tuple[RunRequest, Figures]]:
    for number, (at, seed) in enumerate(requests):
        yield (at, seed), run(at, seed, _BarProgress(bar, task, number, f"{names[at]}, seed {seed}"))


def _run_in_processes(
    run: _TimedRun[Figures], requests: list[RunRequest], jobs: int
) -> Iterator[tuple[RunRequest, Figures]]:
    with ProcessPoolExecutor(min(jobs, len(requests)), mp_context=get_context("spawn")) as executor:
        by_run: dict[Future[Figures], RunRequest] = {executor.submit(run, *request): request for request in requests}
        try:
            for done in as_completed(by_run):
                yield by_run[done], done.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
