"""Samples taken by a module in a child process: it prints JSON lines, the parent reads the latest one with its age.

For queries that may end or hang the process that makes them. A sample that is a text says why there is none. The child
ends when its standard input is closed, so it never outlives its parent.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from trimtab.core.errors import TrimtabError
from trimtab.runtime.procs.background import Background, RestartPolicy

Sample = TypeVar("Sample")
View = TypeVar("View")


class ChildSampler(Generic[Sample]):
    """Runs `python -m module arguments...`; `parse` makes a sample of a line's data."""

    def __init__(self, module: str, *arguments: str, parse: Callable[[Any], Sample]) -> None:
        self._parse = parse
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,  # closing it ends the child
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._news = threading.Condition()
        self._latest: Sample | str = "it has not answered yet"
        self._at = -math.inf
        # A malformed line is logged, and the next one is read.
        self._reader = Background(RestartPolicy(max_failures=None, max_backoff_s=1.0)).start_thread(
            "child samples", self._read
        )

    def latest(self) -> tuple[Sample | str, float]:
        """The latest sample, or why there is none, and its age in seconds; never blocks."""
        with self._news:
            return self._latest, time.monotonic() - self._at

    def wait(self, timeout_s: float) -> None:
        """Wait for the next sample."""
        with self._news:
            self._news.wait(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._reader.join(5)
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            data = json.loads(line)
            sample = data if isinstance(data, str) else self._parse(data)
            with self._news:
                self._latest, self._at = sample, time.monotonic()
                self._news.notify_all()


def print_samples(connect: Callable[[], View], take: Callable[[View], Any], every_s: float) -> NoReturn:
    """The child's part: print samples, one line each, until the parent is gone; connect again after a fault."""

    def exit_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    view: View | None = None
    while True:
        try:
            view = view if view is not None else connect()
            sample = take(view)
        except TrimtabError as fault:
            view, sample = None, fault.what
        print(json.dumps(sample), flush=True)
        time.sleep(every_s)
