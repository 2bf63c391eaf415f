"""Noise of iterations: a factor for each component and iteration, around its level.

Cut from traces of real training steps, synthetic with stated parameters, drawn from a distribution, or as measured by a
past run. The seed decides all of it before a run begins, so that every policy meets the same iterations; an iteration
that is run again after a loss takes the same time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from trimtab.core.errors import InputError
from trimtab.plan.placement.simulate import Floats
from trimtab.replay.common.timing import Distribution
from trimtab.replay.common.traces import TraceKind, rows

MINIBATCHES = TraceKind("table of mini-batches", ("worker", "iteration", "batch_time_norm"), ("gpu_percent",))
Factors = dict[str, Floats]  # by component; index is the iteration, 0 is unused


@lru_cache(maxsize=16)
def minibatches(path: Path) -> tuple[Floats, ...]:
    """Step times of each worker, in order."""
    found: dict[str, list[float]] = {}
    last: dict[str, int] = {}
    for line, row in rows(path, (MINIBATCHES,)):
        worker, step, seconds = row.words["worker"], row.whole("iteration"), row.number("batch_time_norm")
        if step < last.get(worker, 0):  # real traces have duplicate steps
            raise InputError(
                f"iteration {step} of worker {worker} is after iteration {last[worker]}",
                where=f"{path}, line {line}",
                hint="sort the trace by iteration",
            )
        if not seconds:
            raise InputError("a step with a time of 0", where=f"{path}, line {line}")
        last[worker] = step
        found.setdefault(worker, []).append(seconds)
    if not found:
        raise InputError("the trace has no rows", where=str(path))
    return tuple(np.array(steps) for steps in found.values())


@dataclass(frozen=True)
class TraceNoise:
    """Stretches of real steps, each of another worker, around its own level."""

    files: tuple[Path, ...]

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        source = random.Random(seed)
        series = [steps for file in self.files for steps in minibatches(file)]
        some = source.sample(series, len(names)) if len(series) >= len(names) else source.choices(series, k=len(names))
        some = [_long(steps, iterations) for steps in some]
        starts = [source.randrange(len(steps) - iterations) for steps in some]
        # Only the noise around a stretch's own level counts, not how a job's level drifted.
        cut = [steps[at : at + iterations + 1] for steps, at in zip(some, starts, strict=True)]
        return {name: steps / np.median(steps) for name, steps in zip(names, cut, strict=True)}

    def text(self) -> str:
        series = [steps for file in self.files for steps in minibatches(file)]
        return (
            f"noise of real steps: {len(series)} workers of {', '.join(file.name for file in self.files)}, "
            "each around its own level"
        )


def _long(steps: Floats, iterations: int) -> Floats:
    """Extends a series by its mirror image, so that neighbours stay similar."""
    parts, length = [steps], len(steps)
    while length <= iterations:
        parts.append(parts[-1][::-1])
        length += len(steps)
    return np.concatenate(parts)


@dataclass(frozen=True)
class SyntheticNoise:
    """Autocorrelated noise, with occasional iterations that take up to twice as long."""

    spread: float = 0.04
    alike: float = 0.7  # correlation of neighbouring iterations
    tail: float = 0.02  # share of iterations that take 1.3 to 2 times as long

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        source = random.Random(seed)
        return {name: self._series(source, iterations + 1) for name in names}

    def _series(self, source: random.Random, count: int) -> Floats:
        values, at = [], 0.0
        for _ in range(count):
            at = self.alike * at + source.gauss(0.0, self.spread * (1 - self.alike**2) ** 0.5)
            tail = source.uniform(1.3, 2.0) if source.random() < self.tail else 1.0
            values.append(max(1 + at, 0.05) * tail)
        return np.array(values)

    def text(self) -> str:
        if not self.spread and not self.tail:
            return "no noise"
        return (
            f"synthetic noise: spread {self.spread:.1%}, correlation {self.alike:g}, "
            f"{self.tail:.1%} of the iterations take 1.3 to 2 times as long"
        )


@dataclass(frozen=True)
class DrawnNoise:
    """Independent noise of every iteration, from a distribution."""

    factor: Distribution

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        source = random.Random(seed)
        return {name: np.array([max(self.factor.draw(source), 1e-6) for _ in range(iterations + 1)]) for name in names}

    def text(self) -> str:
        return f"independent noise of every iteration: {self.factor.text(' times')}"


@dataclass(frozen=True)
class PastNoise:
    """Measured noise of a past run, the same for every seed."""

    run: str
    by_component: Mapping[str, tuple[float, ...]]

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        return {name: np.array((1.0, *self.by_component[name][:iterations])) for name in names}

    def text(self) -> str:
        return f"costs as the run in {self.run} measured them: a level from five neighbours, the rest is noise"


Noise = TraceNoise | SyntheticNoise | DrawnNoise | PastNoise
