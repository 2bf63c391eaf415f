"""Ranges of numeric settings, checked where a setting is created.

A dataclass states them by field in `RANGES`: minimum and maximum, and the name that users know where it is another one.
A field in seconds (`_s`) has a range without an entry. The system's timers accept nothing beyond `LONGEST_S`; an
interval below `SHORTEST_S` is a busy loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen

LONGEST_S = 1e9  # 30 years
SHORTEST_S = 0.01
MAX_COUNT = 1_000_000_000
SECONDS = (0.0, LONGEST_S)
COUNT = (0, MAX_COUNT)
Ranges = Mapping[str, tuple[Any, ...]]


def is_number(value: object, minimum: float = -math.inf, maximum: float = math.inf) -> bool:
    """Whether it is a finite number from `minimum` to `maximum`; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -math.inf < value < math.inf and minimum <= value <= maximum


def is_whole(value: object, minimum: float = -math.inf, maximum: float = MAX_COUNT) -> bool:
    """Whether it is an int from `minimum` to `maximum`; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


class Range(Frozen):
    """Numbers that a setting takes."""

    minimum: float = 0.0
    maximum: float = LONGEST_S
    whole: bool = False
    called: str = ""  # the setting, where its name is another than the field's
    optional: bool = False  # None is taken as well

    def takes(self, value: object) -> bool:
        check = is_whole if self.whole else is_number
        return check(value, self.minimum, self.maximum) or (self.optional and value is None)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        lowest = f" of {_shown(self.minimum)} or more" if math.isfinite(self.minimum) else ""
        return f"{kind}{lowest}, up to {_shown(self.maximum)}" if math.isfinite(self.maximum) else f"{kind}{lowest}"

    def check(self, name: str, value: object, where: str) -> None:
        if not self.takes(value):
            raise InputError(f"{self.called or name} must be {self}, not {value!r:.60}", where=where)


def check_fields(settings: Any, where: str) -> None:
    """Raise InputError for a number of a dataclass that is out of its range; `where` is a key, or a phrase."""
    kind: Any = type(settings)
    for name, allowed in ranges_of(kind).items():
        allowed.check(name, getattr(settings, name), f"{where}.{name}" if where.isidentifier() else where)


@cache
def ranges_of(kind: Any) -> Mapping[str, Range]:
    """The ranges of a dataclass by field: of `RANGES`, and of seconds."""
    stated: Ranges = getattr(kind, "RANGES", {})
    found = {}
    for field in fields(kind):
        low, high, *called = stated.get(field.name, SECONDS if field.name.endswith("_s") else (None, None))
        if low is not None:
            annotation = str(field.type)
            found[field.name] = Range(low, high, annotation.startswith("int"), "".join(called), "None" in annotation)
    return found


def _shown(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
