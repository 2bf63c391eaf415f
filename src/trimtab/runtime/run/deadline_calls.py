"""Calls into somebody's code that may take too long: each has a deadline, and Ctrl-C is heard while it runs.

A call runs in a thread of its own kind, one after another; the caller waits in short, interruptible sleeps. A call that
does not come back by its deadline cannot be ended from outside: its thread is left behind as a daemon, which never
keeps the process alive, and nothing is called through it again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

_OVER = None


class DeadlineError(Exception):
    """A call was not over in time."""


class _Call:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.over = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        try:
            self.value = self.function(*self.arguments)
        except BaseException as error:  # also SystemExit: somebody's code does not end the run's process
            self.error = error
        finally:
            self.over.set()


class DeadlineCaller:
    """Makes calls one at a time, in one thread, so that what is made in it is used in it."""

    def __init__(self, name: str = "trimtab-run") -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stuck = False  # a call did not come back

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        """What the function gives; raises what it raises, or DeadlineError."""
        if self.stuck:
            raise DeadlineError("an earlier call has not come back")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        call = _Call(function, arguments)
        self._calls.put(call)
        try:
            in_time = call.over.wait(limit_s)
        except BaseException:  # Ctrl-C: whether the call ever comes back is not known
            self.stuck = not call.over.is_set()
            raise
        if not in_time:
            self.stuck = True
            raise DeadlineError(f"not over after {limit_s:g} s")
        if call.error is not None:
            raise call.error
        return call.value

    def close(self, wait_s: float = 5.0) -> None:
        """No more calls. Waits a moment for a call that is stuck, so that a process does not end in the midst of it."""
        if self._thread is not None:
            self._calls.put(_OVER)
            self._thread.join(wait_s)
            self._thread = None

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
