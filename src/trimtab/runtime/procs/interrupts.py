"""Ctrl-C during a run: the first stops it after the current iteration, the second at once; SIGTERM counts as Ctrl-C.

While Ray starts and shuts down, signals are only recorded: an exception within Ray's calls leaves threads that crash
the process, and orphaned processes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signals since the start of a run: held back until `release`, then raised once."""

    def __init__(self) -> None:
        self._count = 0
        self._is_held = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came. Call where nothing is half done."""
        if self._count:
            raise KeyboardInterrupt

    def release(self) -> None:
        """Raise on arrival from now on."""
        self._is_held = False
        self.check()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1 and not self._is_held:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals; does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[Interrupts]:
    """Defer Ctrl-C until `release`, and raise it once: the cleanup after it is not interrupted again."""
    interrupts = Interrupts()
    with _handled(interrupts.on_signal, signal.SIGINT, signal.SIGTERM):
        yield interrupts


@contextlib.contextmanager
def stop_on_interrupt(stop: Callable[[str], None], is_ending: Callable[[], bool]) -> Iterator[None]:
    """Call `stop` on the first signal; raise KeyboardInterrupt on a second unless the run is ending.

    A run in another thread than the main one must be stopped by its caller.
    """
    count = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1 and not is_ending():
            raise KeyboardInterrupt
        stop("Ctrl-C" if number == signal.SIGINT else "it was asked to end (SIGTERM)")

    with _handled(on_signal, signal.SIGINT, signal.SIGTERM):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP during a cleanup that has its own deadlines."""
    with _handled(signal.SIG_IGN, *_ENDING):
        yield


@contextlib.contextmanager
def reliable_interrupts() -> Iterator[Callable[[], None]]:
    """Yields a check that raises a Ctrl-C which was swallowed; call it now and then.

    Python swallows a KeyboardInterrupt that is raised in a destructor, and Ray's references have destructors.
    """
    came: list[int] = []

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    # An application that handles Ctrl-C itself is left alone.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _handled(interrupt, *([signal.SIGINT] if is_default else ())):
        yield check


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C: what was started is stopped in order."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt, *_ENDING):
        yield
