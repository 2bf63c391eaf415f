"""What is shown while something runs: redrawn in place on a terminal, otherwise a line for each change; progress bars.

A display only reads, and one that can no longer be written to is disabled: it never ends a run. A simulated run depends
only on its scenario, policy and seed: the result is the same with any number of processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from trimtab.core.frozen import Frozen
from trimtab.render.output import err, out, text_table
from trimtab.render.text.run import RunNarrator, seconds

State = TypeVar("State")


class LiveView(Generic[State]):
    """Shows states while the `with` block is active; `stays` leaves the last picture on the terminal.

    `lines` are printed where there is no terminal: what changed since the state before, None at first.
    """

    def __init__(
        self,
        picture: Callable[[State], RenderableType],
        lines: Callable[[State | None, State], Iterable[str]],
        *,
        stays: bool = False,
    ) -> None:
        self._picture, self._lines = picture, lines
        self._before: State | None = None
        self._live: Live | None = None
        if out.is_terminal:
            screen = Console(highlight=False)  # folds long lines; `out` would crop them
            self._live = Live(console=screen, auto_refresh=False, transient=not stays, vertical_overflow="crop")

    @property
    def is_redrawn(self) -> bool:
        return self._live is not None

    def __enter__(self) -> LiveView[State]:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: State) -> None:
        if self._live is not None:
            self._live.update(self._picture(state), refresh=True)
            return
        for line in self._lines(self._before, state):
            print(line, flush=True)
        self._before = state


LINES_EVERY_S = 0.5  # at most one line of iterations per interval
REFRESH_PER_S = 4
AGAIN_S = 1.0  # how long the run may take to end after a second Ctrl-C
HINT = "Ctrl-C stops the run after this iteration, a second Ctrl-C at once"
ENDING = "the run stops after the current iteration; Ctrl-C again stops it at once"


class RunDisplay:
    """Shows a run while the `with` block is active; events come in through `on_event`."""

    def __init__(self, title: str, story: RunNarrator, *, quiet: bool = False) -> None:
        self._title = title
        self.story = story
        self._quiet = quiet
        self._live: Live | None = None
        self._printed_at = 0.0
        self._broken = False
        self._hint = HINT
        self._has_plan = False

    def __enter__(self) -> RunDisplay:
        if not self._quiet and err.is_terminal:
            screen = Console(stderr=True, highlight=False)  # folds long lines; `err` would crop them
            self._live = Live(
                console=screen,
                get_renderable=self._picture,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_event(self, event: str, facts: dict[str, Any]) -> None:
        """Process an event; any thread may call this."""
        self._has_plan = self._has_plan or event == "plan"
        lines = self.story.on_event(event, facts)
        if self._quiet:
            return
        if event == "iteration":
            if self._live is not None or not self._is_due():
                return
            self._printed_at = time.monotonic()
        for line in lines:
            self.say(line)

    def say(self, line: str) -> None:
        if self._quiet or self._broken:
            return
        try:
            if self._live is not None:
                self._live.console.print(escape(line))
            else:
                err.print(escape(line))
        except (OSError, ValueError):  # the reader of the pipe is gone
            self._broken = True

    def interrupted(self, times: int) -> None:
        """Show what Ctrl-C does, in the hint line and as a line."""
        self._hint = "it ends"
        if self._has_plan:
            self._hint = ENDING if times == 1 else "the run stops at once"
        if times <= 2:
            self.say(self._hint)

    def _is_due(self) -> bool:
        """Whether an iteration gets a line: the first, the last, and one per LINES_EVERY_S."""
        ends = self.story.done in (1, self.story.iterations)
        return ends or time.monotonic() - self._printed_at >= LINES_EVERY_S

    def _picture(self) -> RenderableType:
        story = self.story
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_row(
            f"[bold]{escape(self._title)}[/]",
            ProgressBar(total=max(1, story.iterations), completed=story.done, width=30),
            escape(story.line()),
        )
        rows: list[RenderableType] = [head]
        if story.plan:
            rows.append(escape(f"plan: {story.plan} GPUs" + (f"   {story.move}" if story.move else "")))
        if story.components:
            rows.append(self._components())
        rows.append(f"[dim]{escape(self._hint)}[/]")
        return Group(*rows)

    def _components(self) -> Table:
        rows = []
        for component in self.story.components:
            planned = self.story.costs_s.get(component["component"])
            rows.append(
                (
                    component["component"],
                    component.get("gpus") or "CPU",
                    seconds(float(component["busy_s"])),
                    "-" if planned is None or self.story.measuring else seconds(planned),
                    seconds(float(component.get("wait_s", 0.0))),
                )
            )
        return text_table(("component", ">GPUs", ">computes", ">planned", ">waits"), rows)


@contextlib.contextmanager
def signal_callbacks(interrupted: Callable[[int], None], on_usr1: Callable[[], None]) -> Iterator[None]:
    """While active, call `interrupted` with the number of Ctrl-C so far, and `on_usr1` on SIGUSR1.

    The run handles Ctrl-C itself. Python signal handlers run at arbitrary points; a byte in a pipe that another thread
    reads is safe.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    usr1_before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    listener = threading.Thread(
        target=_read_signals, args=(reading, interrupted, on_usr1), name="trimtab-signals", daemon=True
    )
    listener.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, usr1_before)
        signal.set_wakeup_fd(fd_before)
        os.close(writing)
        listener.join(5)
        os.close(reading)


def _read_signals(reading: int, interrupted: Callable[[int], None], on_usr1: Callable[[], None]) -> None:
    count = 0
    is_confirmed = False
    while True:
        if count == 2 and not is_confirmed:
            is_confirmed = True
            if not select.select([reading], [], [], AGAIN_S)[0]:
                # Python merges two simultaneous signals into one: send the second again.
                os.kill(os.getpid(), signal.SIGINT)
        data = os.read(reading, 64)
        if not data:
            return
        for number in data:
            if number in (signal.SIGINT, signal.SIGTERM):
                count += 1
                interrupted(count)
            elif number == signal.SIGUSR1:
                on_usr1()


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect what components print to standard error: standard output carries only the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


RunRequest = tuple[int, int]  # index of the policy, seed
PROGRESS = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))


class _TimedRun(Frozen):
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


class _BarProgress(Frozen):
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
