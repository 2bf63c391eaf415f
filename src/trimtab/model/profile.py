"""Measured costs of a run: seconds per component and iteration, with their reliability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.numbers import COUNT, Ranges


@dataclass(frozen=True)
class ComponentProfile:
    """Measured cost of one component.

    `seconds` are points (gpus, median seconds of one iteration), ascending. `spread` is half the interquartile range
    over the median; `drift` the relative change from the first to the last third of the run. `waits` marks a time that
    includes waiting for others: it is no cost and must not be planned with.
    """

    name: str
    seconds: tuple[tuple[int, float], ...]
    kind: str = ""
    spread: float | None = None
    drift: float | None = None
    steps: int = 0
    completion: tuple[tuple[float, float], ...] = ()
    seconds_per_1k_tokens: float | None = None
    waits: bool = False

    RANGES: ClassVar[Ranges] = {
        "spread": (0.0, 1e9),
        "drift": (-1.0, 1e9),
        "steps": COUNT,
        "seconds_per_1k_tokens": (1e-12, 1e9),
    }


@dataclass(frozen=True)
class Profile:
    """The costs of a whole workflow, from one source (`verl`, `rlinf`, `nemo_rl`, `timer` ...)."""

    source: str
    components: tuple[ComponentProfile, ...]
    notes: tuple[str, ...] = ()

    def component(self, name: str) -> ComponentProfile | None:
        return next((component for component in self.components if component.name == name), None)
