"""Supervised background work: loops and one-off jobs.

A loop that raises is logged with its traceback, counted, and restarted after an exponential back-off; one that fails
too often within a window is given up, and its owner is called back. Running and failed jobs are plain data for
`status`. No job may end silently: exceptions are never swallowed, only cancelling (`close`, `Task.cancel`) is silent.

Coroutines (`start`, `once`) belong to the event loop that starts them; `start_thread` is for code without one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trimtab.core.frozen import Frozen

log = logging.getLogger(__name__)

MAX_ENDED = 50  # jobs that were given up; the latest are kept
WorkStatus = Literal["running", "backing off", "failed"]
OnFailed = Callable[[str, Exception], None]


class RestartPolicy(Frozen):
    """Restart limit: more than `max_failures` within `window_s` and the loop is given up (None: never)."""

    max_failures: int | None = 20
    window_s: float = 600.0
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Back-off after this many failures in the window."""
        return float(min(self.max_backoff_s, self.backoff_s * 2.0 ** min(failures - 1, 30)))


NEVER_GIVE_UP = RestartPolicy(max_failures=None)  # for vital loops


@dataclass
class _BackgroundJob:
    name: str
    policy: RestartPolicy
    on_failed: OnFailed | None
    repeats: bool = True  # a loop, not a one-off job
    state: WorkStatus = "running"
    failures: int = 0  # since the start
    last_error: str = ""
    recent: deque[float] = field(default_factory=deque)  # times of failures within the window

    def failed(self, error: Exception, now: float) -> float | None:
        """Count a failure; returns the back-off, or None to give up."""
        self.failures += 1
        self.last_error = describe(error)
        self.recent.append(now)
        while now - self.recent[0] > self.policy.window_s:
            self.recent.popleft()
        if self.policy.max_failures is not None and len(self.recent) > self.policy.max_failures:
            self.state = "failed"
            return None
        self.state = "backing off"
        return self.policy.delay_s(len(self.recent))


class Background:
    """The background jobs of a process or controller."""

    def __init__(
        self, policy: RestartPolicy | None = None, clock: Callable[[], float] = time.monotonic, prefix: str = "trimtab"
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._prefix = prefix
        self._lock = threading.Lock()
        self._jobs: dict[int, _BackgroundJob] = {}  # running ones; a clean end leaves no entry
        self._ended_failures: dict[str, _BackgroundJob] = {}  # by name: the latest of each
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = threading.Event()

    # ---- starting --------------------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        *,
        policy: RestartPolicy | None = None,
        on_failed: OnFailed | None = None,
    ) -> asyncio.Task[None]:
        """Run a loop; restarted when it raises. Ends when it returns, is cancelled or fails too often."""
        return self._spawn(self._enter(name, policy, on_failed), work)

    def once(
        self, name: str, work: Coroutine[Any, Any, None], *, on_failed: OnFailed | None = None
    ) -> asyncio.Task[None]:
        """Run a one-off job; an exception is logged, counted and passed to `on_failed`."""

        async def run() -> None:
            await work

        task = self._spawn(self._enter(name, RestartPolicy(max_failures=0), on_failed, repeats=False), run)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task

    def start_thread(
        self,
        name: str,
        work: Callable[[], None],
        *,
        policy: RestartPolicy | None = None,
        on_failed: OnFailed | None = None,
    ) -> threading.Thread:
        """Run a loop in a daemon thread, supervised as by `start`. It must end when `stopping` is set."""
        job = self._enter(name, policy, on_failed)
        thread = threading.Thread(
            target=self._supervise_thread, args=(job, work), name=f"{self._prefix}-{name}", daemon=True
        )
        thread.start()
        return thread

    @property
    def stopping(self) -> threading.Event:
        """Set by `stop`; threads wait on it instead of sleeping."""
        return self._stop

    # ---- ending ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Set `stopping`, and cancel tasks. Call from the event loop's thread."""
        self._stop.set()
        for task in list(self._tasks):
            task.cancel()

    async def close(self, within_s: float = 10.0) -> None:
        """Stop, and wait for the tasks."""
        self.stop()
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    # ---- status ----------------------------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """A row for each loop and each job that was given up, as plain data."""
        with self._lock:
            jobs = [*(job for job in self._jobs.values() if job.repeats), *self._ended_failures.values()]
            return [
                {"name": job.name, "state": job.state, "failures": job.failures, "last_error": job.last_error}
                for job in jobs
            ]

    def unhealthy(self) -> list[str]:
        """A sentence for each job that has failed, restarted or not."""
        return [sentence(row) for row in self.status() if row["failures"]]

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _enter(
        self, name: str, policy: RestartPolicy | None, on_failed: OnFailed | None, *, repeats: bool = True
    ) -> _BackgroundJob:
        job = _BackgroundJob(name, policy or self._policy, on_failed, repeats)
        with self._lock:
            self._jobs[id(job)] = job
        return job

    def _leave(self, job: _BackgroundJob) -> None:
        with self._lock:
            self._jobs.pop(id(job), None)
            if job.state == "failed":
                before = self._ended_failures.pop(job.name, None)
                job.failures += before.failures if before else 0
                self._ended_failures[job.name] = job
                while len(self._ended_failures) > MAX_ENDED:
                    del self._ended_failures[next(iter(self._ended_failures))]

    def _spawn(self, job: _BackgroundJob, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._supervise(job, work), name=f"{self._prefix}-{job.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # As a callback: a task that is cancelled before its first step runs no code.
        task.add_done_callback(lambda _: self._leave(job))
        return task

    async def _supervise(self, job: _BackgroundJob, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
                return
            except Exception as error:
                delay_s = self._failed(job, error)
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)
            job.state = "running"

    def _supervise_thread(self, job: _BackgroundJob, work: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                try:
                    work()
                    return
                except Exception as error:
                    delay_s = self._failed(job, error)
                if delay_s is None or self._stop.wait(delay_s):
                    return
                job.state = "running"
        finally:
            self._leave(job)

    def _failed(self, job: _BackgroundJob, error: Exception) -> float | None:
        with self._lock:
            delay_s = job.failed(error, self._clock())
        if delay_s is not None:
            log.error("%s failed, next start in %.1f s: %s", job.name, delay_s, job.last_error, exc_info=error)
            return delay_s
        log.error("%s failed and is not started again: %s", job.name, job.last_error, exc_info=error)
        if job.on_failed is not None:
            try:
                job.on_failed(job.name, error)
            except Exception:
                log.exception("%s: on_failed raised", job.name)
        return None


def describe(error: BaseException) -> str:
    """Type and first line of an exception's message; the type alone if it has none (a timeout)."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def first_line(error: BaseException) -> str:
    """First line of an exception's message, its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def sentence(row: Mapping[str, Any]) -> str:
    """A failed job, as a sentence."""
    times = "once" if row["failures"] == 1 else f"{row['failures']} times"
    state = "not started again" if row["state"] == "failed" else row["state"]
    return f"{row['name']} failed {times} and is {state}: {row['last_error']}"
