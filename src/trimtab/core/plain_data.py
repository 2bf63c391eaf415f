"""Plain data of JSON and YAML files, checked for what every reader relies on.

Integers have at most 30 digits, so that they convert to floats; texts hold no lone surrogates, so that they can be
printed; nesting is bounded. Data that break these rules are refused where the file is read.
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
    """Data of JSON text; numbers are finite. Raises ValueError for any fault."""
    try:
        data = _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    found = fault_of(data)
    if found is not None:
        raise ValueError(found[0])
    return data


def check(data: Any, name: str) -> Any:
    """The data unchanged, or an InputError that names the file and the key."""
    found = fault_of(data)
    if found is not None:
        what, keys = found
        raise InputError(what, where=f"{name}: {keys}" if keys else name)
    return data


def fault_of(data: Any) -> tuple[str, str] | None:
    """What is wrong with the data and at which key, or None. Shared parts are checked once."""
    seen: set[int] = set()
    pending: list[tuple[Any, str, int]] = [(data, "", 0)]
    while pending:
        value, keys, level = pending.pop()
        kind = type(value)
        if kind is float or kind is bool or value is None:
            continue
        if kind is str:
            if _SURROGATE.search(value):
                return "this text holds half of a character (a lone surrogate)", keys
        elif kind is int:
            if not -MAX_NUMBER <= value <= MAX_NUMBER:
                return f"this number is beyond {MAX_NUMBER:.0e}", keys
        elif isinstance(value, Mapping | list | tuple | set):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if level > MAX_DEPTH:
                return f"this is nested more than {MAX_DEPTH} levels deep", keys[:60]
            if isinstance(value, Mapping):
                pending += ((key, keys, level + 1) for key in value)
                pending += ((item, f"{keys}.{key}" if keys else str(key), level + 1) for key, item in _named(value))
            else:
                pending += ((item, f"{keys}[{at}]", level + 1) for at, item in enumerate(value))
    return None


def _named(data: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values; a key too large to be written is replaced by an empty one (it is reported by itself)."""
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
