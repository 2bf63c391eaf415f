"""The nouns of a picture over time: a chart has rows, a row has stretches, and what no stretch covers is a gap.

They know nothing of plans, pipelines or runs, so that whatever happens over time is drawn by the same code. Whoever has
something to show builds these; `timeline` draws them. Nothing here may lose time: gaps and stretches of a row add up to
the whole, also after stretches were joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

BarLook = Literal["run", "switch", "sync"]


@dataclass(frozen=True)
class ChartBar:
    """Something that goes on from `start` to `end` (seconds).

    `key` names what it belongs to and decides the colour. `part` is the share of the row's height that it takes (4 of a
    group's 6 GPUs). `busy` is the share of the time in it that is really work, less than 1 where pieces were joined.
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
    """One line of a chart: it does one thing at a time. `weight` (GPUs, say) makes it a little taller.

    `shaded` says whether time without a stretch is a loss, to be shown as idle.
    """

    label: str
    stretches: tuple[ChartBar, ...]
    detail: str = ""
    weight: int = 1
    shaded: bool = True


@dataclass(frozen=True)
class ChartSpan:
    """A time with a name, bracketed above the rows: an iteration, a period."""

    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class ChartMark:
    """A moment with a name: a dashed line through the rows, labelled above them."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """A picture to be drawn: rows that cover `seconds`, on an axis that ends at `axis_seconds` (`None`: there too).

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
    """The times from 0 to `seconds` in which a row does nothing."""
    found = []
    free_from = 0.0
    for stretch in sorted(row.stretches, key=lambda s: (s.start, s.end)):
        if stretch.start > free_from:
            found.append((free_from, min(stretch.start, seconds)))
        free_from = max(free_from, stretch.end)
        if free_from >= seconds:
            return found
    return [*found, (free_from, seconds)] if free_from < seconds else found


def joined(stretches: Iterable[ChartBar], min_gap_s: float) -> list[ChartBar]:
    """Stretches to draw: in order, none over another, those that the eye could not tell apart as one.

    Two are joined when less than `min_gap_s` lies between them and they are of one kind, or the first is itself
    shorter than that. The one with the most work in it gives its name, and `busy` keeps the share that is work.
    """
    out: list[ChartBar] = []
    worked: list[dict[ChartBar, float]] = []
    for stretch in sorted(stretches, key=lambda s: (s.start, s.end)):
        start = max(stretch.start, out[-1].end) if out else stretch.start
        if stretch.end <= start:
            continue
        kind = replace(stretch, start=0.0, end=0.0)
        work = (stretch.end - start) * stretch.busy
        if out and start - out[-1].end < min_gap_s:
            last, parts = out[-1], worked[-1]
            if replace(last, start=0.0, end=0.0, busy=stretch.busy) == kind or last.end - last.start < min_gap_s:
                parts[kind] = parts.get(kind, 0.0) + work
                main = max(parts, key=lambda k: parts[k])
                busy = min(1.0, sum(parts.values()) / (stretch.end - last.start))
                out[-1] = replace(main, start=last.start, end=stretch.end, busy=busy)
                continue
        out.append(replace(stretch, start=start))
        worked.append({kind: work})
    return out
