"""The base of values that never change: events, instructions, findings, figures.

mypy refuses assignments to them; Python does so only in its development mode (`python -X dev`): the `__init__` of a
dataclass that is frozen at run time calls a function for each field, which was a tenth of the CPU of a rollout request.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from typing_extensions import dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Every subclass is a dataclass with a hash."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=sys.flags.dev_mode, unsafe_hash=True)(cls)
