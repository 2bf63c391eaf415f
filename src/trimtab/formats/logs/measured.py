"""Computes a component's cost from samples: median, spread and drift.

Used by the log readers and the timer, so that profiles mean the same whatever their source. Nothing is smoothed or
dropped here; the caller decides which samples count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trimtab.core.frozen import Frozen
from trimtab.model.workflow import ComponentProfile

WARMUP_STEPS = 2
"""Steps dropped at the start of a run: compilation, CUDA graphs and cold caches make them slower."""

MIN_DRIFT_STEPS = 6
"""With fewer steps a third of the run is at most one step, and a drift would be noise."""

MIN_RELIABLE_STEPS = 5
MIN_REPORTED_DRIFT = 0.1
SHORTEST = 1e-9
"""Shorter times give no meaningful ratios."""


class CostSample(Frozen):
    """A component in a step. `tokens` are all response tokens of the step, `length` the mean response length."""

    seconds: float
    tokens: float | None = None
    length: float | None = None


def summarise(
    name: str, gpus: int, samples: Sequence[CostSample], kind: str = "", waits: bool = False
) -> ComponentProfile:
    """A component's cost on `gpus` GPUs, of at least one sample."""
    seconds = [sample.seconds for sample in samples]
    per_1k = [1000 * sample.seconds / sample.tokens for sample in samples if sample.tokens and sample.tokens >= 1]
    return ComponentProfile(
        name=name,
        seconds=((gpus, statistics.median(seconds)),),
        kind=kind,
        spread=spread(seconds),
        drift=drift(seconds),
        steps=len(seconds),
        seconds_per_1k_tokens=statistics.median(per_1k) if len(per_1k) == len(samples) else None,
        waits=waits,
    )


def spread(values: Sequence[float]) -> float | None:
    """Half the interquartile range over the median; `None` for a single or tiny value."""
    middle = statistics.median(values)
    if len(values) < 2 or middle <= SHORTEST:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def drift(values: Sequence[float]) -> float | None:
    """The relative change from the first to the last third of the run; `None` for a short run."""
    if len(values) < MIN_DRIFT_STEPS:
        return None
    third = len(values) // 3
    first, last = statistics.median(values[:third]), statistics.median(values[-third:])
    return (last - first) / first if first > SHORTEST else None


def drift_note(component: ComponentProfile, samples: Sequence[CostSample], by_length: bool = True) -> str | None:
    """A sentence on the cause of a drift: longer responses, or a higher cost per token."""
    if component.drift is None or abs(component.drift) < MIN_REPORTED_DRIFT:
        return None
    sentence = f"{component.name} drifts by {component.drift:+.0%} from the first to the last third of the run"
    if not by_length:
        return sentence
    token_counts = [sample.tokens or sample.length for sample in samples]
    known = [amount for amount in token_counts if amount and amount >= 1]
    if len(known) < len(samples):
        return f"{sentence}; answer lengths are not logged, so it may be longer answers"
    length = drift(known)
    cost = drift([sample.seconds / amount for sample, amount in zip(samples, known, strict=True)])
    if length is None or cost is None:
        return sentence
    return f"{sentence}: answers {length:+.0%}, cost per token {cost:+.0%}"
