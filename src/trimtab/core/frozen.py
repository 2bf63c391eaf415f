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
    """A value of which each request makes several: mypy refuses assignments, Python in its development mode alone.

    What refuses them at run time costs a call for each field that is set, a tenth of the CPU of a rollout request.
    """

    _refuses: ClassVar[bool] = False
