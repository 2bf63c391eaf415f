"""Runs the simulations of a scenario, in this process or in several, with a progress bar.

A run depends only on its scenario, policy and seed: the result is the same with any number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from trimtab.render.output import err

RunRequest = tuple[int, int]  # index of the policy, seed
PROGRESS = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))


@dataclass(frozen=True)
class _TimedRun:
    """A run with its duration; picklable for other processes."""

    scenario: Any
    run: Callable[..., Any]

    def __call__(self, at: int, seed: int, progress: Callable[[float], None] | None = None) -> Any:
        began = time.perf_counter()
        figures = self.run(self.scenario, self.scenario.policies[at], seed, progress)
        return replace(figures, seconds=time.perf_counter() - began)


def run_all(scenario: Any, run: Callable[..., Any], jobs: int) -> list[Any]:
    """Run every policy with every seed; the result is ordered by policy."""
    timed, names = _TimedRun(scenario, run), [policy.name for policy in scenario.policies]
    requests = [(at, seed) for at in range(len(names)) for seed in scenario.seeds]
    found: dict[RunRequest, Any] = {}
    columns = (*PROGRESS, TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"{len(requests)} runs", total=len(requests))
        runs = _run_local(timed, names, requests, bar, task) if jobs <= 1 else _run_in_processes(timed, requests, jobs)
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
    run: _TimedRun, names: list[str], requests: list[RunRequest], bar: Progress, task: TaskID
) -> Iterator[tuple[RunRequest, Any]]:
    for number, (at, seed) in enumerate(requests):
        yield (at, seed), run(at, seed, _BarProgress(bar, task, number, f"{names[at]}, seed {seed}"))


def _run_in_processes(run: _TimedRun, requests: list[RunRequest], jobs: int) -> Iterator[tuple[RunRequest, Any]]:
    with ProcessPoolExecutor(min(jobs, len(requests)), mp_context=get_context("spawn")) as executor:
        by_run = {executor.submit(run, *request): request for request in requests}
        try:
            for done in as_completed(by_run):
                yield by_run[done], done.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
