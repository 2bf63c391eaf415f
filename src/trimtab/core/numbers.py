"""Ranges of numeric settings: what is outside is refused where a setting is made.

Timers of the system take no time beyond `LONGEST_S`, and an interval below `SHORTEST_S` is a busy loop.
"""

from __future__ import annotations

import math

from trimtab.core.errors import InputError

LONGEST_S = 1e9  # thirty years
SHORTEST_S = 0.01
MOST = 1_000_000_000


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether it is a finite number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and least <= value <= most


def is_whole(value: object, least: float = -math.inf, most: float = MOST) -> bool:
    """Whether it is a whole number from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_number(name: str, value: float, where: str, least: float = 0.0, most: float = LONGEST_S) -> None:
    """Raise InputError unless it is a finite number from `least` to `most`."""
    if not is_number(value):
        raise InputError(f"{name} must be a number, not {value!r}", where=where)
    _check_range(name, value, where, least, most)


def check_whole(name: str, value: int, where: str, least: int = 0, most: int = MOST) -> None:
    """Raise InputError unless it is a whole number from `least` to `most`."""
    if not is_whole(value, most=math.inf):
        raise InputError(f"{name} must be a whole number, not {value!r}", where=where)
    _check_range(name, value, where, least, most)


def _check_range(name: str, value: float, where: str, least: float, most: float) -> None:
    if value < least:
        sign = "must not be negative: it " if least == 0 else ""
        raise InputError(f"{name} {sign}must be at least {least:g}, but is {value:g}", where=where)
    if value > most:
        raise InputError(f"{name} must be at most {most:g}, but is {value:g}", where=where)
