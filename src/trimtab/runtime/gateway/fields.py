"""Reading the fields of a body: each has a type and a range, and none is passed over.

Whatever is not taken is left in `rest`, and its owner has to say what becomes of it. `null` is as good as nothing, as
both dialects have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.runtime.gateway.errors import Refusal, bad

LARGE = 2**20
"""Bytes of a body; what has more is parsed beside (`bodies`)."""

MAX_TOKEN_IDS = 2**20
"""Token ids of all prompts of one call: checking and sending them keeps others waiting."""

_LARGEST_ID = 2**31
_LARGEST = 10**15  # of numbers that have no range of their own; beyond it arithmetic is not exact


class BodyFields:
    """One JSON object."""

    def __init__(self, body: Any, *, within: str = "") -> None:
        if not isinstance(body, dict):
            raise Refusal(400, f"{within or 'the body'} is no JSON object", param=within or None, code="invalid_value")
        self.rest: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
        self._prefix = f"{within}." if within else ""

    def take(self, name: str) -> Any:
        """Whatever it is; None where it is not there."""
        return self.rest.pop(name, None)

    def wrong(self, name: str, message: str) -> Refusal:
        """A field that is not as it should be."""
        return bad(self._prefix + name, f"{self._prefix}{name}: {message}")

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: Any, least: int | None = None, most: int | None = None) -> Any:
        """A whole number; the default may be None."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self.wrong(name, f"a whole number, not {_shown(value)}")
        if not (-_LARGEST if least is None else least) <= value <= (_LARGEST if most is None else most):
            raise self.wrong(name, f"{_shown(value)} is not {_range(least, most)}")
        return value

    def number(self, name: str, default: float, least: float | None = None, most: float | None = None) -> float:
        """A finite number."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not -_LARGEST <= value <= _LARGEST:  # no NaN is
            raise self.wrong(name, f"a number, not {_shown(value)}")
        if (least is not None and value < least) or (most is not None and value > most):
            raise self.wrong(name, f"{value} is not {_range(least, most)}")
        return float(value)

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, f"a string, not {_shown(value)}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or several; none of them empty."""
        value = self.take(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.wrong(name, f"a string or a list of strings, not {_shown(value)}")
        if "" in found:
            raise self.wrong(name, "an empty string would end every answer at once")
        return tuple(found)

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids; none where it is not there."""
        value = self.take(name)
        return () if value is None else self.as_ids(name, value)

    def as_ids(self, name: str, value: Any) -> tuple[int, ...]:
        """Token ids, or a refusal that names the field."""
        whole = isinstance(value, list) and set(map(type, value)) <= {int}  # a bool is no int here
        if not whole or (value and (min(value) < 0 or max(value) >= _LARGEST_ID)):
            raise self.wrong(name, "a list of token ids, whole numbers of 0 or more")
        return tuple(value)

    def prompts(self, name: str, given: list[Any]) -> list[tuple[int, ...]]:
        """Token ids of one prompt, or of several. How many there are is looked at before what they are."""
        nested = isinstance(given[0], list)
        ids = sum(len(one) for one in given if isinstance(one, list)) if nested else len(given)
        if ids > MAX_TOKEN_IDS:
            raise self.wrong(name, f"{ids} token ids in one call; {MAX_TOKEN_IDS} are the most")
        return [self.as_ids(name, one) for one in given] if nested else [self.as_ids(name, given)]

    def neutral(self, table: Mapping[str, Sequence[Any]]) -> None:
        """Drops what says only what holds anyway."""
        for name in list(self.rest):
            if name in table and any(_same(self.rest[name], one) for one in table[name]):
                del self.rest[name]


def parsed(body: bytes) -> Any:
    """JSON, or a refusal."""
    try:
        return json.loads(body.decode())
    except (ValueError, RecursionError) as fault:
        raise not_json(str(fault)) from None


def not_json(said: str) -> Refusal:
    """A body that is none."""
    return Refusal(400, f"the body is no JSON: {said[:100]}", code="invalid_json")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"{least} or more, and at most {_LARGEST}" if least is not None else f"within {_LARGEST}"
    return f"{least} to {most}" if least is not None else f"{most} or less"


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > _LARGEST:
        return "a number of many digits"  # repr refuses the longest
    return repr(value)[:60]
