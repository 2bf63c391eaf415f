"""Waiting for something to become true, with a guard instead of a deadline: a crowded machine is slow, not wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GUARD_S = 180.0


def until(true: Callable[[], T], what: str = "it", within_s: float = GUARD_S) -> T:
    """Wait until it is true, and return what it gave."""
    end = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end, f"{what}: not so after {within_s:g} s"
        time.sleep(0.05)
    return found


async def until_async(true: Callable[[], T], what: str = "it", within_s: float = GUARD_S) -> T:
    """Wait until it is true while the event loop goes on, and return what it gave."""
    end = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end, f"{what}: not so after {within_s:g} s"
        await asyncio.sleep(0.01)
    return found
