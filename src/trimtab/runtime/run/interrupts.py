"""Ctrl-C and a run: once ends it after the iteration under way, twice at once; SIGTERM counts as Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_heard(stop: Callable[[str], None], is_ending: Callable[[], bool]) -> Iterator[None]:
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
