"""Reads and validates one line of a run's `events.jsonl`: JSON with numbers that a run can have.

Every reader of a run uses it, so that all agree on which lines are malformed: these are left out and counted. What an
event of a given kind must have is checked by its reader.
"""

from __future__ import annotations

from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.errors import TrimtabError

# What processing a malformed event may raise.
ODD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, TrimtabError)

MAX_GPUS = 65_536
MAX_COUNT = 10**9
MAX_TIME_S = 1e12

_COUNTS = (
    *("number", "iteration", "iterations", "after", "void", "move", "step", "least", "most", "batches", "seed"),
    *("running", "limit"),
)
_GPUS = ("gpus", "nodes")
_TIMES = ("at", "deadline", "bars")
_FREE = ("metrics", "numbers", "settings")  # free-form


def read_event(line: str | bytes) -> dict[str, Any]:
    """The event of a line. Raises ValueError for anything else, or for a number that no run can have."""
    event = plain.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("this is no event")
    pending: list[tuple[Any, str, float | None]] = [(event, "", None)]
    while pending:
        value, key, limit = pending.pop()
        if isinstance(value, dict):
            pending += ((item, name, _limit(name, limit)) for name, item in value.items() if name not in _FREE)
        elif isinstance(value, list):
            pending += ((item, key, limit) for item in value)
        elif limit is not None and isinstance(value, int | float) and not abs(value) <= limit:
            raise ValueError(f"{key} is {value:.6g}, beyond {limit:.6g}")
    nodes = event.get("nodes")
    listed = [node for node in nodes if isinstance(node, list)] if isinstance(nodes, list) else []
    if sum(gpus for node in listed for gpus in node if type(gpus) is int) > MAX_GPUS:
        raise ValueError(f"the nodes have more than {MAX_GPUS:,} GPUs")
    return event


def check_plan(event: dict[str, Any]) -> dict[str, Any]:
    """The event, with groups and variants validated. Raises ValueError."""
    for group in event["groups"]:
        if not _words(group["components"]) or not isinstance(group.get("gpus", ""), str):
            raise ValueError("a group has the names of its components and its GPUs")
        if not isinstance(group.get("kind", ""), str):
            raise ValueError("a kind of GPU is a word")
    variants = event.get("variants", {})
    if not isinstance(variants, dict) or not _words(list(variants.values())):
        raise ValueError("variants are words by component")
    return event


def _words(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(word, str) for word in data)


def _limit(key: str, above: float | None) -> float | None:
    """The largest number under a key; an unknown key inherits the limit of its parent."""
    if key in _COUNTS:
        return MAX_COUNT
    if key in _GPUS:
        return MAX_GPUS
    return MAX_TIME_S if key in _TIMES or key.endswith("_s") else above
