"""Exact amounts of resources: what a task requests, a slot holds, a node has, a pool may use.

Ray counts resources in ten-thousandths, so amounts here are integers of those and sums never drift. Memory is in bytes.
Names are the user's (`cpu`, `gpu`, `memory`, custom ones); the runtime translates them for Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen

GRAIN = 10_000  # units in 1
LABEL = "label "  # a label that a node must have is a resource of this name: `label gpu=h200`


class Resources(Frozen):
    """Amounts by name, in ten-thousandths, sorted by name, none of them zero."""

    units: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, amounts: Mapping[str, float] | None = None, *, where: str | None = None, **more: float) -> Resources:
        """From numbers: `Resources.of(cpu=1.5, gpu=1)` or `Resources.of({"cpu": 1.5})`."""
        units = []
        for name, amount in sorted({**(amounts or {}), **more}.items()):
            if not isinstance(name, str) or not name:
                raise InputError(f"a resource needs a name, not {name!r}", where=where)
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not math.isfinite(amount):
                raise InputError(f"{name} must be a number, not {amount!r}", where=where)
            if amount < 0:
                raise InputError(f"{name} must not be negative, but is {amount:g}", where=where)
            exact = round(amount * GRAIN)
            if exact == 0 and amount > 0:
                raise InputError(f"{name} is {amount:g}, below the smallest amount, 0.0001", where=where)
            if exact:
                units.append((name, exact))
        return cls(tuple(units))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.units)

    def __bool__(self) -> bool:
        return bool(self.units)

    def get(self, name: str) -> int:
        return next((units for known, units in self.units if known == name), 0)

    def plus(self, other: Resources) -> Resources:
        sums = dict(self.units)
        for name, units in other.units:
            sums[name] = sums.get(name, 0) + units
        return Resources(tuple(sorted((name, units) for name, units in sums.items() if units)))

    def minus(self, other: Resources) -> Resources:
        """The difference, never negative."""
        left = dict(self.units)
        for name, units in other.units:
            left[name] = max(0, left.get(name, 0) - units)
        return Resources(tuple(sorted((name, units) for name, units in left.items() if units)))

    def within(self, other: Resources) -> bool:
        limits = dict(other.units)
        return all(units <= limits.get(name, 0) for name, units in self.units)

    def floats(self) -> dict[str, float]:
        """Numbers by name, without labels; integers where they are whole."""
        amounts = {name: units for name, units in self.units if not name.startswith(LABEL)}
        return {name: units // GRAIN if units % GRAIN == 0 else units / GRAIN for name, units in amounts.items()}

    def __str__(self) -> str:
        return ", ".join(amount_text(name, units) for name, units in self.units) or "nothing"


def amount_text(name: str, units: int) -> str:
    """An amount for display: `1.5 cpu`, `2 GiB memory`."""
    amount = units / GRAIN
    if name.startswith(LABEL):
        return name
    if name == "memory" and amount >= 2**20:
        size, unit = (amount / 2**30, "GiB") if amount >= 2**30 else (amount / 2**20, "MiB")
        return f"{size:.4g} {unit} memory"
    return f"{amount:.10g} {name}"


def total(amounts: Iterator[Resources] | tuple[Resources, ...] | list[Resources]) -> Resources:
    sums: dict[str, int] = {}
    for amount in amounts:
        for name, units in amount.units:
            sums[name] = sums.get(name, 0) + units
    return Resources(tuple(sorted(sums.items())))


NOTHING = Resources()
