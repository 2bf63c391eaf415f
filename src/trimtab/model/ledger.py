"""The ledger of an iteration: what its wall time was spent on.

It is a partition of the wall time, so overlaps count once: an instant is booked to the first bucket of `BUCKETS` that
has a span then. What runs beside a component's step therefore costs nothing, and waiting is booked only where nothing
else goes on. Every bucket has timers of its own and none is a remainder; `unbooked` is what no timer saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from trimtab.core.frozen import Frozen

BUCKETS = {
    "compute": "compute",
    "sync_pack": "weight sync: pack",
    "sync_move": "weight sync: move",
    "sync_unpack": "weight sync: unpack",
    "sync_load": "weight sync: load",
    "onload": "onload",
    "offload": "offload",
    "data": "data between components",
    "save": "saving",
    "health": "health checks",
    "calls": "Ray calls",
    "run": "the run's own work",
    "wait_input": "waiting for input",
    "wait_turn": "waiting for the GPU's turn",
}
"""Buckets with their labels, in the order in which an instant is booked."""

UNBOOKED_WARNING = 0.03
"""Share of the wall time above which unbooked time is warned of."""


class TimedSpan(Frozen):
    """What a timer measured: a bucket, and its seconds on a timeline."""

    bucket: str
    start_s: float
    end_s: float


def booked_seconds(spans: Iterable[TimedSpan], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each bucket from `start_s` to `end_s`; together at most `end_s` - `start_s`."""
    by_bucket: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        if span.end_s > start_s and span.start_s < end_s:
            by_bucket.setdefault(span.bucket, []).append((max(span.start_s, start_s), min(span.end_s, end_s)))
    booked: dict[str, float] = {}
    covered: list[tuple[float, float]] = []
    covered_s = 0.0
    for bucket in (name for name in BUCKETS if name in by_bucket):
        covered = _merged([*covered, *by_bucket[bucket]])
        now_s = sum(end - start for start, end in covered)
        booked[bucket] = max(0.0, now_s - covered_s)
        covered_s = now_s
    return booked


def _merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


class LedgerSummary(Frozen):
    """Median share of the wall time of several iterations, by bucket, and unbooked."""

    shares: Mapping[str, float]
    unbooked: float

    @property
    def warns(self) -> bool:
        return self.unbooked > UNBOOKED_WARNING


def ledger_summary(iterations: Sequence[tuple[float, Mapping[str, float] | None]]) -> LedgerSummary | None:
    """The summary of (wall time, booked seconds) pairs; None if none has a ledger."""
    known = [(wall_s, booked) for wall_s, booked in iterations if booked is not None and wall_s > 0]
    if not known:
        return None
    shares = {
        bucket: median(booked.get(bucket, 0.0) / wall_s for wall_s, booked in known)
        for bucket in BUCKETS
        if any(booked.get(bucket) for _, booked in known)
    }
    unbooked = median(max(0.0, 1 - sum(booked.values()) / wall_s) for wall_s, booked in known)
    return LedgerSummary(shares, unbooked)
