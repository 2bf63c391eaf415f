"""Carries the runs of a scenario out, here or in several processes, and says how far it is.

A run depends on its scenario, policy and seed alone, so that the answer is the same with any number of processes.
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

RunRequest = tuple[int, int]  # which policy, which seed
OnProgress = Callable[[float], None]
Figures = TypeVar("Figures", PoolFigures, RolloutFigures, ReplanFigures)


@dataclass(frozen=True)
class PoolRuns:
    """The runs of a pool scenario."""

    scenario: PoolScenario

    def one(self, at: int, seed: int, further: OnProgress | None = None) -> PoolFigures:
        """One policy with one seed."""
        return run_pool(self.scenario, self.scenario.policies[at], seed, further)


@dataclass(frozen=True)
class RolloutRuns:
    """The runs of a rollout scenario."""

    scenario: RolloutScenario

    def one(self, at: int, seed: int, further: OnProgress | None = None) -> RolloutFigures:
        """One policy with one seed."""
        return run_rollout(self.scenario, self.scenario.policies[at], seed)


@dataclass(frozen=True)
class _TimedRun(Generic[Figures]):
    """A run with its time; plain, so that another process can have it."""

    do: Callable[[int, int, OnProgress | None], Figures]

    def __call__(self, at: int, seed: int, further: OnProgress | None = None) -> Figures:
        began = time.perf_counter()
        return replace(self.do(at, seed, further), seconds=time.perf_counter() - began)


def pool_runs(scenario: PoolScenario, jobs: int) -> list[PoolFigures]:
    """Every policy with every seed, policy by policy."""
    return _all(_TimedRun(PoolRuns(scenario).one), [policy.name for policy in scenario.policies], scenario.seeds, jobs)


def rollout_runs(scenario: RolloutScenario, jobs: int) -> list[RolloutFigures]:
    """Every policy with every seed, policy by policy."""
    return _all(
        _TimedRun(RolloutRuns(scenario).one), [policy.name for policy in scenario.policies], scenario.seeds, jobs
    )


def loop_runs(scenario: ReplanScenario, jobs: int) -> list[ReplanFigures]:
    """Every policy with every seed, policy by policy."""
    return _all(_TimedRun(scenario.run), [policy.name for policy in scenario.policies], scenario.seeds, jobs)


def _all(run: _TimedRun[Figures], names: list[str], seeds: tuple[int, ...], jobs: int) -> list[Figures]:
    asked = [(at, seed) for at in range(len(names)) for seed in seeds]
    found: dict[RunRequest, Figures] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"{len(asked)} runs", total=len(asked))
        runs = _here(run, names, asked, bar, task) if jobs <= 1 else _apart(run, asked, jobs)
        for number, (request, figures) in enumerate(runs, 1):
            found[request] = figures
            bar.update(task, completed=number, description=f"{number} of {len(asked)} runs")
    return [found[request] for request in asked]


@dataclass(frozen=True)
class _BarProgress:
    """Moves the bar on within a run."""

    bar: Progress
    task: TaskID
    done: int
    words: str

    def __call__(self, share: float) -> None:
        self.bar.update(self.task, completed=self.done + share, description=self.words)


def _here(
    run: _TimedRun[Figures], names: list[str], asked: list[RunRequest], bar: Progress, task: TaskID
) -> Iterator[tuple[RunRequest, Figures]]:
    for number, (at, seed) in enumerate(asked):
        yield (at, seed), run(at, seed, _BarProgress(bar, task, number, f"{names[at]}, seed {seed}"))


def _apart(run: _TimedRun[Figures], asked: list[RunRequest], jobs: int) -> Iterator[tuple[RunRequest, Figures]]:
    with ProcessPoolExecutor(min(jobs, len(asked)), mp_context=get_context("spawn")) as crew:
        by_run: dict[Future[Figures], RunRequest] = {crew.submit(run, *request): request for request in asked}
        try:
            for done in as_completed(by_run):
                yield by_run[done], done.result()
        except BaseException:
            crew.shutdown(wait=False, cancel_futures=True)
            raise
