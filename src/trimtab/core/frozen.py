"""The base of values that never change: events, instructions, findings, figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)
