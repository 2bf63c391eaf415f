"""Dispatch of a machine's events to its handlers, by event type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args


def handlers_of(machine: type, events: Any) -> dict[type, Callable[[Any, Any, float], None]]:
    """The method `_on_<event>` for each event type of a union. Raises AttributeError where one is missing."""
    return {
        event: getattr(machine, "_on" + re.sub("([A-Z])", r"_\1", event.__name__).lower()) for event in get_args(events)
    }
