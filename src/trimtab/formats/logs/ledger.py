"""Where the seconds of logged steps go: components, other timers, waits, periodic work, and what no timer books.

Shares are of all counted steps with a total together, so they add up to the whole, except where timers ran side by
side: then they are more, and nothing is left over that no timer books.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from trimtab.core.frozen import Frozen
from trimtab.formats.logs.records import LogFramework, StepRecord

UNBOOKED = "no timer"
WAITS = " (waits)"
LEAST_SHARE = 0.005
"""Smaller entries are added to `others`."""


class StepLedger(Frozen):
    """Seconds of an average step by entry, largest first; `unbooked` is the share that no timer books."""

    step_s: float
    seconds: Mapping[str, float]
    unbooked: float
    overlap: float = 0.0  # by what share the timers are longer than the step

    def shares(self) -> dict[str, float]:
        return {name: seconds / self.step_s for name, seconds in self.seconds.items()}

    def sentence(self) -> str:
        """Shares in words; small ones together."""
        found = self.shares()
        small = sum(share for share in found.values() if share < LEAST_SHARE)
        words = [f"{name} {share:.0%}" for name, share in found.items() if share >= LEAST_SHARE]
        words += [f"others {small:.1%}"] if small > 0 else []
        words.append(f"{UNBOOKED} {self.unbooked:.1%}")
        over = f"; timers overlap by {self.overlap:.0%}" if self.overlap > LEAST_SHARE else ""
        return f"of a step's {self.step_s:.4g} s: {', '.join(words)}{over}"


def booked(framework: LogFramework, values: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by entry: components by their names, other timers of the step by their own."""
    found: dict[str, float] = {}
    used: set[str] = set()
    for component, ways in framework.parts.items():
        for timers in ways:
            names = [framework.prefix + timer for timer in timers]
            if names[0] in values:
                used |= {*names, *(framework.prefix + t for way in ways for t in way)}
                found[component] = sum(values[name] for name in names if name in values)
                break
    for name, seconds in values.items():
        timer = name.removeprefix(framework.prefix)
        if not name.startswith(framework.prefix) or name in used or not seconds > 0:
            continue
        if timer in (*framework.periodic, *framework.other_timers) or timer.startswith(framework.idle or ("\0",)):
            found[timer] = found.get(timer, 0.0) + seconds
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def ledger(framework: LogFramework, steps: Iterable[StepRecord], waits: Container[str] = ()) -> StepLedger | None:
    """The ledger of an average step; None if no step has a total. Timers of `waits` contain waiting."""
    count, total = 0, 0.0
    sums: dict[str, float] = {}
    for record in steps:
        seconds = record.values.get(framework.prefix + framework.total, 0.0) if framework.total else 0.0
        if seconds <= 0:
            continue
        found = booked(framework, record.values)
        extra = sum(some for name, some in found.items() if name in framework.periodic)
        costs = sum(some for name, some in found.items() if name not in waits) - extra
        if costs + extra > seconds * (1 + LEAST_SHARE) and costs <= seconds * (1 + LEAST_SHARE):
            seconds += extra  # the total is without periodic work
        left = max(0.0, seconds - costs - extra)
        for name in [name for name in found if name in waits]:  # beside others: only what they leave
            waited = min(found.pop(name), left)
            left -= waited
            found[name + WAITS] = waited
        count, total = count + 1, total + seconds
        for name, some in found.items():
            sums[name] = sums.get(name, 0.0) + some
    if not count:
        return None
    known = sum(sums.values())
    largest = dict(sorted(((name, some / count) for name, some in sums.items()), key=lambda item: -item[1]))
    return StepLedger(total / count, largest, max(0.0, 1 - known / total), max(0.0, known / total - 1))
