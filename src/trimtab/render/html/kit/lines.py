"""Curves over iterations, time or a count: lines, steps for predictions, marks where the plan changed.

Pure. Must never happen: a curve hides a point. Where there are more points than pixels, the lowest and the highest per
pixel are kept; an outlier is drawn at the edge with an arrow and its value, so that it does not flatten the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from trimtab.core.frozen import Frozen
from trimtab.render.html.kit.labels import duration, escape, fit, round_step, share, text_width, ticks
from trimtab.render.html.kit.svg import px, svg_document, text_at, tooltip
from trimtab.render.html.kit.timeline import COLOURS

Unit = Literal["seconds", "share", "number"]
Point = tuple[float, float]

_HEIGHT_PX = 200.0
_MAX_DOTS = 120
_NORMAL_SHARE = 0.98
_ROOM_ABOVE = 1.25


class ReportCurve(Frozen):
    """A line through points; `dashed` ones are steps that hold until the next point. Gaps are left open.

    `colour` is a component's; None is the text colour.
    """

    name: str
    points: tuple[Point, ...]
    colour: int | None = None
    dashed: bool = False
    notes: tuple[str, ...] = ()  # per point, for tooltips


class CurveChart(Frozen):
    """Curves over one axis. `marks` are labelled vertical lines."""

    title: str
    curves: tuple[ReportCurve, ...]
    unit: Unit
    description: str
    marks: tuple[tuple[float, str], ...] = ()
    across: str = "iteration"  # what the horizontal axis counts; empty: seconds


def curves_svg(chart: CurveChart, width: int, prefix: str) -> str:
    return _Plot(chart, width, escape(prefix)).draw()


def figure(value: float, unit: Unit) -> str:
    if unit == "seconds":
        return duration(value)
    return share(value) if unit == "share" else f"{value:.4g}"


class _Plot:
    def __init__(self, chart: CurveChart, width: int, prefix: str) -> None:
        self.chart, self.width, self.prefix = chart, width, prefix
        points = [point for curve in chart.curves for point in curve.points]
        self.low, self.high = _span([y for _, y in points], chart.unit)
        self.first = min((x for x, _ in points), default=0.0) if chart.across else 0.0
        self.last = max((x for x, _ in points), default=1.0)
        self.ticks = _ticks(self.low, self.high, chart.unit)
        self.left = 12.0 + max(text_width(words, 12) for _, words in self.ticks)
        self.right = width - 10.0
        self.top = 12.0 + (18.0 if chart.marks else 0.0)
        self.bottom = self.top + _HEIGHT_PX
        self.out: list[str] = []

    def x(self, at: float) -> float:
        if self.last <= self.first:
            return (self.left + self.right) / 2
        return self.left + 6 + (self.right - self.left - 12) * (at - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return self.bottom - (self.bottom - self.top) * min(max(part, 0.0), 1.0)

    def draw(self) -> str:
        self.axes()
        self.marks()
        for curve in self.chart.curves:
            self.curve(curve)
        chart, height = self.chart, self.bottom + (42 if self.chart.across else 24)
        return svg_document("".join(self.out), self.width, height, self.prefix, chart.title, chart.description)

    def axes(self) -> None:
        for value, words in self.ticks:
            y = self.y(value)
            self.out.append(f'<path class="grid" d="M{px(self.left)} {px(y)}H{px(self.right)}"/>')
            self.out.append(text_at(self.left - 8, y + 4, words, "quiet", anchor="end"))
        free_from = 0.0
        for value, words in self.positions(max(2, int((self.right - self.left) / 70))):
            half = text_width(words, 12) / 2
            middle = min(self.x(value), self.right - half)
            if middle - half >= free_from:
                self.out.append(text_at(middle, self.bottom + 17, words, "quiet", anchor="middle"))
                free_from = middle + half + 8
        if self.chart.across:
            middle = (self.left + self.right) / 2
            self.out.append(text_at(middle, self.bottom + 36, self.chart.across, "quiet", anchor="middle"))

    def positions(self, limit: int) -> list[tuple[float, str]]:
        if not self.chart.across:
            return ticks(self.last, limit)
        return [(value, f"{value:,}") for value in _whole_steps(self.first, self.last, limit)]

    def marks(self) -> None:
        free_from = self.left
        for at, label in self.chart.marks:
            if not self.first <= at <= self.last:
                continue
            x = self.x(at)
            tip = f"<title>{escape(label)}</title>"
            self.out.append(f'<path class="mark" d="M{px(x)} {px(self.top - 6)}V{px(self.bottom)}">{tip}</path>')
            words = fit(label, 160, 12)
            half = text_width(words, 12) / 2
            middle = max(min(x, self.right - half), self.left + half)
            if words and middle - half >= free_from - 0.01:
                self.out.append(text_at(middle, 13, words, "quiet", anchor="middle", tip=label))
                free_from = middle + half + 10

    def curve(self, curve: ReportCurve) -> None:
        stroke = "var(--tt-quiet)" if curve.colour is None else f"var(--tt-{curve.colour % COLOURS})"
        if curve.colour is None and not curve.dashed:
            stroke = "var(--tt-ink)"
        look = ' stroke-dasharray="5 4"' if curve.dashed else ""
        drawn = self.steps(curve.points) if curve.dashed else self.line(curve.points)
        if not drawn:
            return
        thick = "1.5" if curve.dashed else "1.75"
        self.out.append(
            f'<path class="curve" d="{drawn}" fill="none" stroke="{stroke}" stroke-width="{thick}" '
            f'stroke-linejoin="round"{look}><title>{escape(curve.name)}</title></path>'
        )
        if curve.dashed:
            return
        dots = len(curve.points) <= _MAX_DOTS
        for at, (x, y) in enumerate(curve.points):
            if not dots and y <= self.high:
                continue
            note = curve.notes[at] if at < len(curve.notes) else ""
            where = f"{self.chart.across} {x:,.0f}" if self.chart.across else duration(x)
            words = f"{curve.name}\n{where}: {figure(y, self.chart.unit)}" + (f"\n{note}" if note else "")
            title = tooltip(words)
            if y > self.high:
                cx, cy = self.x(x), self.top
                up = f"M{px(cx - 4)} {px(cy + 5)}L{px(cx)} {px(cy - 2)}L{px(cx + 4)} {px(cy + 5)}Z"
                self.out.append(f'<path d="{up}" fill="{stroke}">{title}</path>')
            else:
                self.out.append(
                    f'<circle class="dot" cx="{px(self.x(x))}" cy="{px(self.y(y))}" r="{"3" if note else "2"}" '
                    f'fill="{stroke}">{title}</circle>'
                )

    def line(self, points: Sequence[Point]) -> str:
        kept = thinned([(self.x(x), self.y(y)) for x, y in points])
        return "M" + "L".join(f"{px(x)} {px(y)}" for x, y in kept) if kept else ""

    def steps(self, points: Sequence[Point]) -> str:
        """Each value holds until the next; `nan` leaves a gap."""
        out, drawing = "", False
        for at, (x, y) in enumerate(points):
            if math.isnan(y):
                drawing = False
                continue
            end = self.x(points[at + 1][0]) if at + 1 < len(points) else self.x(self.last)
            out += f"{'L' if drawing else 'M'}{px(self.x(x))} {px(self.y(y))}H{px(end)}"
            drawing = True
        return out


def thinned(points: Sequence[Point]) -> list[Point]:
    """Points in pixels, at most four per pixel column: first, lowest, highest and last."""
    out: list[Point] = []
    column: list[Point] = []
    for point in points:
        if column and int(point[0]) != int(column[0][0]):
            out += _kept(column)
            column = []
        column.append(point)
    return out + _kept(column)


def _kept(column: list[Point]) -> list[Point]:
    if len(column) <= 4:
        return column
    inner = sorted({column.index(min(column, key=lambda p: p[1])), column.index(max(column, key=lambda p: p[1]))})
    return [column[at] for at in sorted({0, *inner, len(column) - 1})]


def _span(values: Iterable[float], unit: Unit) -> tuple[float, float]:
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return 0.0, 1.0
    if unit == "share":
        return 0.0, 1.0
    top = known[-1]
    if unit == "seconds":
        normal = known[int(_NORMAL_SHARE * (len(known) - 1))]
        usual = max(normal, 2 * known[len(known) // 2])
        return 0.0, (usual * _ROOM_ABOVE if top > 2 * usual else top * 1.05) or 1.0
    low = known[0]
    if low == top:
        low, top = min(low, 0.0), max(top, 0.0)
    if low == top:
        top = low + 1.0
    if 0 < low < 0.5 * top:
        low = 0.0
    return low, top + 0.04 * (top - low)


def _ticks(low: float, high: float, unit: Unit) -> list[tuple[float, str]]:
    if unit == "seconds":
        return ticks(high, 4)
    if unit == "share":
        return [(part / 4, f"{25 * part} %") for part in range(5)]
    at_least = (high - low) / 4
    step = round_step(at_least)
    first = math.ceil(low / step - 1e-9)
    return [(at * step, f"{at * step:.6g}") for at in range(first, math.floor(high / step + 1e-9) + 1)] or [
        (low, f"{low:.4g}")
    ]


def _whole_steps(first: float, last: float, limit: int) -> list[int]:
    span = max(1, int(last - first))
    step = next(f * 10**p for p in range(12) for f in (1, 2, 5) if f * 10**p * limit >= span)
    start = int(first)
    return sorted({start, *range(-(-start // step) * step, int(last) + 1, step)} - {0 if start > 0 else -1})
