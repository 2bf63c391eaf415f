"""The data model of a chart over time: rows of bars; time without a bar is a gap.

Independent of plans, pipelines and runs; `timeline` draws it. Must never happen: time is lost. Gaps and bars of a row
add up to the whole, also after bars were merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

BarLook = Literal["run", "switch", "sync"]


@dataclass(frozen=True)
class ChartBar:
    """An activity from `start` to `end` (seconds).

    `key` names its owner and selects the colour. `part` is the share of the row's height that it takes (4 of a group's
    6 GPUs). `busy` is the share of its time that is work, below 1 where bars were merged.
    """

    start: float
    end: float
    key: str
    look: BarLook = "run"
    note: str = ""
    part: float = 1.0
    busy: float = 1.0


@dataclass(frozen=True)
class ChartRow:
    """A row of a chart; it does one thing at a time. `weight` (GPUs, say) makes it a little taller.

    `shaded`: time without a bar is idle, and shown as such.
    """

    label: str
    bars: tuple[ChartBar, ...]
    detail: str = ""
    weight: int = 1
    shaded: bool = True


@dataclass(frozen=True)
class ChartSpan:
    """A named period, bracketed above the rows: an iteration, a cycle."""

    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class ChartMark:
    """A named moment: a dashed line through the rows, labelled above them."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Rows over `seconds`, on an axis that ends at `axis_seconds` (None: at `seconds`).

    `keys` are the names in the order of their colours.
    """

    title: str
    rows: tuple[ChartRow, ...]
    keys: tuple[str, ...]
    seconds: float
    axis_seconds: float | None = None
    spans: tuple[ChartSpan, ...] = ()
    marks: tuple[ChartMark, ...] = ()
    description: str = ""


def gaps(row: ChartRow, seconds: float) -> list[tuple[float, float]]:
    """The intervals from 0 to `seconds` in which a row does nothing."""
    found = []
    free_from = 0.0
    for bar in sorted(row.bars, key=lambda s: (s.start, s.end)):
        if bar.start > free_from:
            found.append((free_from, min(bar.start, seconds)))
        free_from = max(free_from, bar.end)
        if free_from >= seconds:
            return found
    return [*found, (free_from, seconds)] if free_from < seconds else found


def merge_bars(bars: Iterable[ChartBar], min_gap_s: float) -> list[ChartBar]:
    """Bars to draw: in order, without overlap, merged where the gap is too small to be seen.

    Two are merged when less than `min_gap_s` lies between them and they are of the same kind, or the first is shorter
    than that. The kind with the most work gives its name, and `busy` keeps the share that is work.
    """
    out: list[ChartBar] = []
    worked: list[dict[ChartBar, float]] = []
    for bar in sorted(bars, key=lambda s: (s.start, s.end)):
        start = max(bar.start, out[-1].end) if out else bar.start
        if bar.end <= start:
            continue
        kind = replace(bar, start=0.0, end=0.0)
        work = (bar.end - start) * bar.busy
        if out and start - out[-1].end < min_gap_s:
            last, parts = out[-1], worked[-1]
            if replace(last, start=0.0, end=0.0, busy=bar.busy) == kind or last.end - last.start < min_gap_s:
                parts[kind] = parts.get(kind, 0.0) + work
                main = max(parts, key=lambda k: parts[k])
                busy = min(1.0, sum(parts.values()) / (bar.end - last.start))
                out[-1] = replace(main, start=last.start, end=bar.end, busy=busy)
                continue
        out.append(replace(bar, start=start))
        worked.append({kind: work})
    return out
