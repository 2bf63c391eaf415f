"""The bases of values that never change: events, instructions, findings, figures."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Every subclass is a frozen dataclass."""

    _refuses: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=cls._refuses or sys.flags.dev_mode, unsafe_hash=True)(cls)


class Message(Frozen):
    """Made several times a request: mypy refuses assignments, Python in development mode alone, as that costs CPU."""

    _refuses: ClassVar[bool] = False
