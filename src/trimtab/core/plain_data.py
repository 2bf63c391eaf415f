"""Plain data out of files: what every reader of JSON and YAML may rely on, whatever stands in the file.

Whole numbers have at most 30 digits, so that they can be floats as well; texts hold no lone surrogates, so that they
can be printed; nothing is nested without end. What breaks these rules is refused where the file is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError

MAX_NUMBER = 10**30
MAX_DEPTH = 100

_SURROGATE = re.compile("[\ud800-\udfff]")


def loads(text: str | bytes) -> Any:
    """Data of JSON text. Raises ValueError, whatever is wrong; numbers are finite."""
    try:
        data = _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    found = fault_of(data)
    if found is not None:
        raise ValueError(found[0])
    return data


def check(data: Any, name: str) -> Any:
    """The data again, or an InputError that names the file and the key."""
    found = fault_of(data)
    if found is not None:
        what, keys = found
        raise InputError(what, where=f"{name}: {keys}" if keys else name)
    return data


def fault_of(data: Any) -> tuple[str, str] | None:
    """What is wrong with data, and at which key; None where nothing is. Parts that occur twice are looked at once."""
    seen: set[int] = set()
    waiting: list[tuple[Any, str, int]] = [(data, "", 0)]
    while waiting:
        one, keys, level = waiting.pop()
        kind = type(one)
        if kind is float or kind is bool or one is None:
            continue
        if kind is str:
            if _SURROGATE.search(one):
                return "this text holds half of a character (a lone surrogate)", keys
        elif kind is int:
            if not -MAX_NUMBER <= one <= MAX_NUMBER:
                return f"this number is beyond {MAX_NUMBER:.0e}", keys
        elif isinstance(one, Mapping | list | tuple | set):
            if id(one) in seen:
                continue
            seen.add(id(one))
            if level > MAX_DEPTH:
                return f"this is nested more than {MAX_DEPTH} levels deep", keys[:60]
            if isinstance(one, Mapping):
                waiting += ((key, keys, level + 1) for key in one)
                waiting += ((value, f"{keys}.{key}" if keys else str(key), level + 1) for key, value in _named(one))
            else:
                waiting += ((value, f"{keys}[{at}]", level + 1) for at, value in enumerate(one))
    return None


def _named(data: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values; keys that cannot be written are reported by themselves."""
    return [(key if not isinstance(key, int) or abs(key) <= MAX_NUMBER else "", value) for key, value in data.items()]


def _whole(text: str) -> int:
    if len(text) > 31:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is not finite")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_float, parse_constant=_constant)
