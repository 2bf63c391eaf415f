"""One line of a run's `events.jsonl`, as every reader of it takes it: JSON with numbers that a run can have.

A line is checked here before anybody counts, draws or plans with it, so that an odd line is odd to all of them:
a reader of a run leaves it out and counts it, and goes on. What an event of its kind must have is its reader's.
"""

from __future__ import annotations

from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.errors import TrimtabError

ODD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, TrimtabError)
"""What taking an odd event may raise."""

MAX_GPUS = 65_536
MAX_COUNT = 10**9
MAX_TIME_S = 1e12

_COUNTS = (
    *("number", "iteration", "iterations", "after", "void", "move", "step", "least", "most", "batches", "seed"),
    *("running", "limit"),
)
_GPUS = ("gpus", "nodes")
_TIMES = ("at", "deadline", "bars")
_FREE = ("metrics", "numbers", "settings")  # whatever a trainer or a decision has to say


def read_event(line: str | bytes) -> dict[str, Any]:
    """The event of a line. Raises ValueError where it is none, or has a number that no run has."""
    event = plain.loads(line)
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError("this is no event")
    waiting: list[tuple[Any, str, float | None]] = [(event, "", None)]
    while waiting:
        one, key, limit = waiting.pop()
        if isinstance(one, dict):
            waiting += ((value, name, _limit(name, limit)) for name, value in one.items() if name not in _FREE)
        elif isinstance(one, list):
            waiting += ((value, key, limit) for value in one)
        elif limit is not None and isinstance(one, int | float) and not abs(one) <= limit:
            raise ValueError(f"{key} is {one:.6g}, beyond {limit:.6g}")
    nodes = event.get("nodes")
    if isinstance(nodes, list) and sum(_gpus(node) for node in nodes) > MAX_GPUS:
        raise ValueError(f"the nodes have more than {MAX_GPUS:,} GPUs")
    return event


def check_plan(event: dict[str, Any]) -> dict[str, Any]:
    """The facts of a plan again, of which groups and variants can be relied on. Raises ValueError."""
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
    return isinstance(data, list) and all(isinstance(one, str) for one in data)


def _limit(key: str, above: float | None) -> float | None:
    """How large a number may be under a key; what is not known by itself is as what it is a part of."""
    if key in _COUNTS:
        return MAX_COUNT
    if key in _GPUS:
        return MAX_GPUS
    return MAX_TIME_S if key in _TIMES or key.endswith("_s") else above


def _gpus(node: Any) -> int:
    return sum(one for one in node if type(one) is int) if isinstance(node, list) else 0
