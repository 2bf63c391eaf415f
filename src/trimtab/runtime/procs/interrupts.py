"""Ctrl-C and a run: once ends it after the iteration under way, twice at once; SIGTERM counts as Ctrl-C.

While Ray starts and ends it is only noted: an exception in the midst of Ray's calls leaves threads of Ray's behind that
end the process with a fault of their own, and processes that nobody knows.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupts:
    """What was heard since the start of a run: held until `release`, and from then on raised once, never again."""

    def __init__(self) -> None:
        self._came = 0
        self._is_held = True

    def check(self) -> None:
        """Raise what came; for where nothing is half done."""
        if self._came:
            raise KeyboardInterrupt

    def release(self) -> None:
        """All is started: from now on it is raised where it comes."""
        self._is_held = False
        self.check()

    def heard(self, number: int, frame: FrameType | None) -> None:
        """A handler of signals."""
        self._came += 1
        if self._came == 1 and not self._is_held:
            raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[Interrupts]:
    """Within, Ctrl-C is held until `release` and raised once: what cleans up after it is not interrupted again."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {number: signal.signal(number, interrupts.heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_interrupt(stop: Callable[[str], None], is_ending: Callable[[], bool]) -> Iterator[None]:
    """Within, the first one calls `stop`, and a second one raises KeyboardInterrupt unless the run ends already.

    Only the main thread hears signals: a run in another one is stopped by whoever started it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    times = 0

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal times
        times += 1
        if times > 1 and not is_ending():
            raise KeyboardInterrupt
        stop("Ctrl-C" if number == signal.SIGINT else "it was asked to end (SIGTERM)")

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
