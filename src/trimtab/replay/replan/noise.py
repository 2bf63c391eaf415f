"""How the iterations of a run differ from one another: a factor for each component and iteration, around its level.

Cut from traces of real training steps, made up with stated parameters, drawn from a distribution, or as a past run
measured it. A seed decides it all before a run begins, so that every policy meets the same iterations; one that is run
again after a loss takes as long as it did.
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
Factors = dict[str, Floats]  # by component; of iteration 1 at 1, so that 0 is nobody's


@lru_cache(maxsize=16)
def minibatches(path: Path) -> tuple[Floats, ...]:
    """What the steps of each worker took, in their order."""
    found: dict[str, list[float]] = {}
    last: dict[str, int] = {}
    for line, row in rows(path, (MINIBATCHES,)):
        worker, step, seconds = row.words["worker"], row.whole("iteration"), row.number("batch_time_norm")
        if step < last.get(worker, 0):  # a real trace says a step twice now and then
            raise InputError(
                f"iteration {step} of worker {worker} comes after iteration {last[worker]}",
                where=f"{path}, line {line}",
                hint="sort the trace by iteration",
            )
        if not seconds:
            raise InputError("a step that took no time", where=f"{path}, line {line}")
        last[worker] = step
        found.setdefault(worker, []).append(seconds)
    if not found:
        raise InputError("the trace has no line besides its columns", where=str(path))
    return tuple(np.array(steps) for steps in found.values())


@dataclass(frozen=True)
class TraceNoise:
    """Stretches of real steps, each of another worker, around its own level."""

    files: tuple[Path, ...]

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        """Factors of every component."""
        source = random.Random(seed)
        series = [one for file in self.files for one in minibatches(file)]
        some = source.sample(series, len(names)) if len(series) >= len(names) else source.choices(series, k=len(names))
        some = [_long(one, iterations) for one in some]
        starts = [source.randrange(len(one) - iterations) for one in some]
        # What counts is the noise around a stretch's own level: whether a job's level wandered is another question.
        cut = [one[at : at + iterations + 1] for one, at in zip(some, starts, strict=True)]
        return {name: one / np.median(one) for name, one in zip(names, cut, strict=True)}

    def text(self) -> str:
        """As a report states it."""
        series = [one for file in self.files for one in minibatches(file)]
        return (
            f"noise of real steps: stretches of {len(series)} workers of {', '.join(one.name for one in self.files)}, "
            "each around its own level"
        )


def _long(steps: Floats, iterations: int) -> Floats:
    """A series for so many iterations: where it ends it goes back the way it came, so that neighbours stay alike."""
    parts, length = [steps], len(steps)
    while length <= iterations:
        parts.append(parts[-1][::-1])
        length += len(steps)
    return np.concatenate(parts)


@dataclass(frozen=True)
class SyntheticNoise:
    """Neighbours alike, a spread around them, and now and then an iteration that takes up to twice as long."""

    spread: float = 0.04
    alike: float = 0.7  # correlation of an iteration and the next
    tail: float = 0.02  # share of iterations that take 1.3 to 2 times as long

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        """Factors of every component."""
        source = random.Random(seed)
        return {name: self._of_one(source, iterations + 1) for name in names}

    def _of_one(self, source: random.Random, count: int) -> Floats:
        values, at = [], 0.0
        for _ in range(count):
            at = self.alike * at + source.gauss(0.0, self.spread * (1 - self.alike**2) ** 0.5)
            tail = source.uniform(1.3, 2.0) if source.random() < self.tail else 1.0
            values.append(max(1 + at, 0.05) * tail)
        return np.array(values)

    def text(self) -> str:
        """As a report states it."""
        if not self.spread and not self.tail:
            return "no noise"
        return (
            f"noise that is made up: spread {self.spread:.1%}, neighbours alike ({self.alike:g}), "
            f"{self.tail:.1%} of the iterations take 1.3 to 2 times as long"
        )


@dataclass(frozen=True)
class DrawnNoise:
    """Every iteration by itself, from a distribution."""

    factor: Distribution

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        """Factors of every component."""
        source = random.Random(seed)
        return {name: np.array([max(self.factor.draw(source), 1e-6) for _ in range(iterations + 1)]) for name in names}

    def text(self) -> str:
        """As a report states it."""
        return f"noise of every iteration by itself: {self.factor.text(' times')}"


@dataclass(frozen=True)
class PastNoise:
    """What was measured around the level, the same for every seed."""

    run: str
    by_component: Mapping[str, tuple[float, ...]]

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        """Factors of every component."""
        return {name: np.array((1.0, *self.by_component[name][:iterations])) for name in names}

    def text(self) -> str:
        """As a report states it."""
        return f"costs as the run in {self.run} measured them: a level from five neighbours, the rest is noise"


Noise = TraceNoise | SyntheticNoise | DrawnNoise | PastNoise
