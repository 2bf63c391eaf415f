"""Range checks of numeric settings, made where a setting is created.

The system's timers accept nothing beyond `LONGEST_S`; an interval below `SHORTEST_S` is a busy loop.
"""

from __future__ import annotations

import math

from trimtab.core.errors import InputError

LONGEST_S = 1e9  # 30 years
SHORTEST_S = 0.01
MAX_COUNT = 1_000_000_000


def is_number(value: object, minimum: float = -math.inf, maximum: float = math.inf) -> bool:
    """Whether it is a finite number from `minimum` to `maximum`; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and minimum <= value <= maximum


def is_whole(value: object, minimum: float = -math.inf, maximum: float = MAX_COUNT) -> bool:
    """Whether it is an int from `minimum` to `maximum`; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def check_number(name: str, value: float, where: str, minimum: float = 0.0, maximum: float = LONGEST_S) -> None:
    if not is_number(value):
        raise InputError(f"{name} must be a number, not {value!r}", where=where)
    _check_range(name, value, where, minimum, maximum)


def check_whole(name: str, value: int, where: str, minimum: int = 0, maximum: int = MAX_COUNT) -> None:
    if not is_whole(value, maximum=math.inf):
        raise InputError(f"{name} must be a whole number, not {value!r}", where=where)
    _check_range(name, value, where, minimum, maximum)


def _check_range(name: str, value: float, where: str, minimum: float, maximum: float) -> None:
    if value < minimum:
        sign = "must not be negative: it " if minimum == 0 else ""
        raise InputError(f"{name} {sign}must be at least {minimum:g}, but is {value:g}", where=where)
    if value > maximum:
        raise InputError(f"{name} must be at most {maximum:g}, but is {value:g}", where=where)
