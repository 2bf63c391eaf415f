"""Timelines as SVG: rows of coloured bars over a time axis, with idle time shaded.

A `Chart` is the data: rows of bars, time without a bar is a gap. `plan_chart` makes the chart of a plan, `svg` draws
any chart. Pure: the same chart gives the same text. Must never happen: time is lost (gaps and bars of a row add up to
the whole, also after bars were merged), or a picture shows more than its chart. Only time without a bar is shaded, bars
are merged only where the gap cannot be seen, colour is never the only cue (names, hatching and tooltips say the same),
and no name reaches the markup unescaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from trimtab.core.frozen import Frozen
from trimtab.core.ranks import ranks_text
from trimtab.model.plan import Plan, TimelineBar
from trimtab.render.html.kit.assets import asset
from trimtab.render.html.kit.labels import duration, escape, fit, share, text_width, ticks, wrap
from trimtab.render.html.kit.svg import hatch_pattern, px, rect, svg_document, text_at

BarLook = Literal["run", "switch", "sync"]


class ChartBar(Frozen):
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


class ChartRow(Frozen):
    """A row of a chart; it does one thing at a time. `weight` (GPUs, say) makes it a little taller.

    `shaded`: time without a bar is idle, and shown as such.
    """

    label: str
    bars: tuple[ChartBar, ...]
    detail: str = ""
    weight: int = 1
    shaded: bool = True


class ChartSpan(Frozen):
    """A named period, bracketed above the rows: an iteration, a cycle."""

    start: float
    end: float
    label: str = ""


class ChartMark(Frozen):
    """A named moment: a dashed line through the rows, labelled above them."""

    at: float
    label: str


class Chart(Frozen):
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


COLOURS = 8
NARROW_TIMELINE_PX = 560
JOIN_PX = 0.5
"""Bars closer together than this are drawn as one."""

_MAX_SPANS = 12
_NO_TIME_S = 1e-9
_WORDS: dict[BarLook, str] = {"run": "", "switch": "switch", "sync": "weight sync"}


def plan_chart(
    plan: Plan,
    title: str,
    *,
    keys: tuple[str, ...] = (),
    axis_seconds: float | None = None,
    marks: tuple[ChartMark, ...] = (),
) -> Chart:
    """The chart of a plan: a row per group, per CPU component, and for unused GPUs.

    `keys` fixes the order of colours, so that a component looks the same in the charts of several plans.
    """
    rows = []
    for group in plan.groups:
        detail = _gpus(group.gpus) + (f" · {group.kind}" if group.kind else "")
        planned = (bar for bar in plan.timeline if bar.component in group.components)
        bars = tuple(_chart_bar(plan, bar, len(group.gpus)) for bar in planned)
        rows.append(ChartRow(", ".join(group.components), bars, detail, weight=len(group.gpus)))
    grouped = {name for group in plan.groups for name in group.components}
    for component in plan.components:
        if component.name not in grouped:
            planned = (bar for bar in plan.timeline if bar.component == component.name)
            bars = tuple(_chart_bar(plan, bar, 0) for bar in planned)
            rows.append(ChartRow(component.name, bars, "CPU", weight=0, shaded=False))
    used = {rank for group in plan.groups for rank in group.gpus}
    unused = tuple(rank for rank in range(plan.total_gpus) if rank not in used)
    if unused:
        rows.append(ChartRow("not used", (), _gpus(unused), weight=len(unused)))
    seconds = max(plan.timeline_seconds, plan.iteration_seconds)
    return Chart(
        title,
        tuple(rows),
        tuple(dict.fromkeys((*keys, *(component.name for component in plan.components)))),
        seconds,
        axis_seconds,
        _periods(plan, seconds),
        marks,
        f"{plan.describe()}. One iteration takes {duration(plan.iteration_seconds)}; "
        f"{share(plan.idle_share)} of the GPU time is idle.",
    )


def _gpus(numbers: tuple[int, ...]) -> str:
    return f"GPU{'s' if len(numbers) != 1 else ''} {ranks_text(numbers, ', ')}"


def _chart_bar(plan: Plan, bar: TimelineBar, row_gpus: int) -> ChartBar:
    used = len(plan.placed(bar.component).gpus)
    if bar.doing == "run" and 0 < used < row_gpus:
        return ChartBar(bar.start, bar.end, bar.component, note=f"on {used} of {row_gpus} GPUs", part=used / row_gpus)
    return ChartBar(bar.start, bar.end, bar.component, bar.doing)


def _periods(plan: Plan, seconds: float) -> tuple[ChartSpan, ...]:
    """The iteration; with staleness, each whole period of the steady state, the first labelled."""
    period = plan.iteration_seconds
    if period <= 0:
        return ()
    if seconds <= period * (1 + 1e-9):
        return (ChartSpan(0.0, period, f"one iteration · {duration(period)}"),)
    whole = min(int(seconds / period + 1e-9), _MAX_SPANS)
    label = f"one iteration every {duration(period)}"
    return tuple(ChartSpan(i * period, (i + 1) * period, label if i == 0 else "") for i in range(whole))


def svg(
    chart: Chart, width: int = 960, standalone: bool = True, *, compact: bool = False, prefix: str = "timeline"
) -> str:
    """Draw a chart. Standalone: a file with its own style, title and background; otherwise part of a page.

    `compact` leaves out the legend and draws thin rows. `prefix` keeps ids apart where a page has several.
    """
    return _Canvas(chart, width, standalone, compact, escape(prefix)).draw()


class TimeCanvas:
    """A picture in progress, of rows over time: `y` is the bottom of what is drawn."""

    def __init__(self, width: int, prefix: str, left: float, right: float, seconds: float, keys: Sequence[str]) -> None:
        self.width, self.prefix, self.left, self.right = width, prefix, left, right
        self.axis = seconds if seconds > _NO_TIME_S else 0.0
        self.scale = (right - left) / self.axis if self.axis else 0.0
        self.colour = {key: index % COLOURS for index, key in enumerate(keys)}
        self.y = 0.0
        self.out: list[str] = []

    def x(self, seconds: float) -> float:
        return self.left + min(max(seconds, 0.0), self.axis) * self.scale

    def time_grid(self, line: Callable[[float], str], labels_y: float, first: float, last: float) -> list[str]:
        """Lines at round times, with labels between `first` and `last` where there is room."""
        out = []
        free_from = first - 1
        for at, words in ticks(self.axis, max(2, int((self.right - self.left) / 88))):
            x, half = self.x(at), text_width(words, 12) / 2
            out.append(line(x))
            middle = max(min(x, last - half), first + half)
            if middle - half >= free_from:
                out.append(text_at(middle, labels_y, words, "quiet", anchor="middle"))
                free_from = middle + half + 4
        return out


class _Canvas(TimeCanvas):
    """The picture of a chart."""

    def __init__(self, chart: Chart, width: int, standalone: bool, compact: bool, prefix: str) -> None:
        self.chart, self.standalone, self.compact = chart, standalone, compact
        self.pad = 20.0 if standalone else 0.0
        self.narrow = width < NARROW_TIMELINE_PX
        left = self.pad + (1.0 if self.narrow else min(0.22 * width, 210.0))
        seconds = chart.seconds if chart.axis_seconds is None else chart.axis_seconds
        super().__init__(width, prefix, left, width - self.pad - 2.0, seconds, chart.keys)
        # Compact charts only compare lengths: finer detail would be noise.
        self.join_px = 3 * JOIN_PX if compact else JOIN_PX
        self.y = self.pad
        self.bands: list[tuple[float, float]] = []  # top and bottom of each row drawn, without its label

    def draw(self) -> str:
        if self.standalone and self.chart.title:
            title = fit(self.chart.title, self.width - 2 * self.pad, 15, bold=True)
            self.out.append(text_at(self.pad, self.y + 13, title, "heading"))
            self.y += 34
        if not self.compact:
            self.legend()
        self.captions()
        top = self.y
        body_from = len(self.out)
        for row in self.chart.rows:
            self.row(row)
        bottom = self.y
        self.out[body_from:body_from] = self.grid(top, bottom)
        self.lines(top, bottom)
        return self.page(self.y + 18 + self.pad)

    def page(self, height: float) -> str:
        chart, head = self.chart, ""
        if self.standalone:
            head += f"<style>{asset('timeline.css')}</style>"
            head += f'<rect class="surface" width="{self.width}" height="{px(height)}" rx="8"/>'
        body = head + hatch_pattern(self.prefix) + "".join(self.out)
        return svg_document(body, self.width, height, self.prefix, chart.title, chart.description)

    def legend(self) -> None:
        """Names with their colours, then the looks that occur; wrapped where the line is full."""
        shown = {(s.key, s.look) for row in self.chart.rows for s in row.bars if s.end > s.start}
        entries = [(f"k{self.colour[key]}", key, False) for key in self.chart.keys if (key, "run") in shown]
        looks = {look for _, look in shown}
        if "switch" in looks:
            first = next(key for key in self.chart.keys if (key, "switch") in shown)
            entries.append((f"k{self.colour[first]}", "switch", True))
        if "sync" in looks:
            entries.append(("sync", "weight sync", False))
        if any(row.shaded and gaps(row, self.chart.seconds) for row in self.chart.rows):
            entries.append(("idle", "idle", False))
        x = self.pad
        for css, words, hatched in entries:
            words = fit(words, 200, 12) or "…"
            taken = 18 + text_width(words, 12)
            if x > self.pad and x + taken > self.width - self.pad:
                x, self.y = self.pad, self.y + 20
            self.out.append(rect(x, self.y + 1, 12, 12, f"swatch {css}", rx=2))
            if hatched:
                self.out.append(self.hatch(x, self.y + 1, 12, 12))
            self.out.append(text_at(x + 18, self.y + 11, words, "small"))
            x += taken + 16
        self.y += 34 if entries else 0

    def captions(self) -> None:
        """The names of spans and marks, each on the first line above the rows where there is room."""
        wanted = [(m.at, m.at, m.label) for m in self.chart.marks] + [
            (s.start, s.end, s.label) for s in self.chart.spans if s.label
        ]
        lines: list[list[tuple[float, float]]] = []
        for start, end, label in wanted:
            arrow = " →" if end > self.axis * (1 + 1e-9) else ""
            words = fit(label + arrow, self.right - self.pad, 12)
            half = text_width(words, 12) / 2
            middle = (self.x(start) + self.x(end)) / 2 if end > start else self.x(end)
            middle = max(min(middle, self.right - half), (self.left if end > start else self.pad) + half)
            taken = (middle - half - 8, middle + half + 8)
            level = next(
                (i for i, line in enumerate(lines) if all(taken[1] <= a or b <= taken[0] for a, b in line)), -1
            )
            if level < 0:
                level = len(lines)
                lines.append([])
            lines[level].append(taken)
            self.out.append(text_at(middle, self.y + 11 + 16 * level, words, "quiet", anchor="middle"))
        self.y += 16 * len(lines)
        if self.chart.spans:
            y = self.y + 6
            for span in self.chart.spans:
                if span.start < self.axis:
                    x0, x1 = self.x(span.start), self.x(span.end)
                    close = "V" + px(y + 4) if span.end <= self.axis * (1 + 1e-9) else ""
                    self.out.append(f'<path class="bracket" d="M{px(x0)} {px(y + 4)}V{px(y)}H{px(x1)}{close}"/>')
            self.y += 20 if self.narrow else 14
        elif lines:
            self.y += 4

    def row(self, row: ChartRow) -> None:
        heaviest = max((other.weight for other in self.chart.rows), default=0) or 1
        low, grow = (14.0, 10.0) if self.compact else (36.0, 16.0)
        height = low + grow * row.weight / heaviest if row.weight else (12.0 if self.compact else 24.0)
        if height >= 34 and len(self.name(row)) > 1:
            height = max(height, 52.0)
        self.label(row, height)
        self.bands.append((self.y, self.y + height))
        end = min(self.chart.seconds, self.axis)
        empty = gaps(row, self.chart.seconds)
        if row.shaded:
            idle = sum(b - a for a, b in empty)
            of_all = f" of {duration(self.chart.seconds)} ({share(idle / self.chart.seconds)})" if idle else ""
            words = f"{row.label}: idle {duration(idle)}{of_all}"
            self.out.append(rect(self.left, self.y, self.x(end) - self.left, height, "track idle", words, rx=2))
        else:
            self.out.append(rect(self.left, self.y, self.x(end) - self.left, height, "track rest", rx=2))
        for bar in merge_bars(row.bars, self.join_px / self.scale if self.scale else 0.0):
            if bar.start < self.axis:
                self.bar(bar, height)
        if row.shaded and not self.compact:
            for a, b in empty:
                self.inside(self.x(a), self.x(b), self.y + height / 2, [f"idle {duration(b - a)}"], "quiet")
        self.y += height + (6 if self.compact else 10)

    def label(self, row: ChartRow, height: float) -> None:
        """Name and detail: above the row where the picture is narrow, otherwise left of it on one or two lines."""
        room = self.right - self.pad if self.narrow else self.left - self.pad - 14
        tip = f"{row.label} · {row.detail}" if row.detail else row.label
        size = 12 if self.compact else 13
        css = "name small" if self.compact else "name"
        if self.narrow or height < 34:
            y = self.y + 12 if self.narrow else self.y + height / 2 + 4.5
            name = fit(row.label, room, size, bold=True)
            left = room - text_width(name, size, bold=True) - 8
            detail = row.detail if text_width(row.detail, 12) <= left else ""
            aside = f'<tspan class="quiet" font-weight="400" dx="8">{escape(detail)}</tspan>' if detail else ""
            self.out.append(text_at(self.pad, y, name, css, tip=tip, more=aside))
            self.y += 18 if self.narrow else 0
            return
        lines = self.name(row)
        y = self.y + height / 2 + 4.5 - 8 * len(lines)
        for words in lines:
            self.out.append(text_at(self.pad, y, words, css, tip=tip))
            y += 16
        self.out.append(text_at(self.pad, y, fit(row.detail, room, 12), "quiet", tip=tip))

    def name(self, row: ChartRow) -> list[str]:
        """A row's name, split into the lines it takes left of the row."""
        return [""] if self.narrow else wrap(row.label, self.left - self.pad - 14, 13, bold=True)

    def bar(self, bar: ChartBar, height: float) -> None:
        x0, x1 = self.x(bar.start), self.x(bar.end)
        tall = height * bar.part
        y = self.y + height - tall
        colour = "sync" if bar.look == "sync" else f"k{self.colour.get(bar.key, 0)}"
        what = f"{bar.key}: {_WORDS[bar.look]}" if bar.look != "run" else bar.key
        lasts = bar.end - bar.start
        tip = f"{what}\n{duration(bar.start)} to {duration(bar.end)}: {duration(lasts)}"
        if bar.busy < 0.995:
            tip += f", of which {duration(lasts * bar.busy)} busy"
        tip += f"\n{bar.note}" if bar.note else ""
        css = f"bar {bar.look} {colour}".replace("sync sync", "sync") + (" edged" if x1 - x0 >= 4 else "")
        faded = f' fill-opacity="{max(bar.busy, 0.2):.2f}"' if bar.busy < 0.995 else ""
        self.out.append(rect(x0, y, x1 - x0, tall, css, tip, rx=2 if x1 - x0 >= 6 else 0, more=faded))
        if bar.look == "switch":
            self.out.append(self.hatch(x0, y, x1 - x0, tall))
        elif not self.compact and bar.busy > 0.6:
            name = "sync" if bar.look == "sync" else bar.key
            css = "onsync" if bar.look == "sync" else f"on{self.colour.get(bar.key, 0)}"
            self.inside(x0, x1, y + tall / 2, [f"{name} · {duration(lasts)}", name], f"small {css}")

    def inside(self, x0: float, x1: float, middle: float, choices: list[str], css: str) -> None:
        """Draw the first of the choices that fits between two edges, or nothing."""
        for words in choices:
            if text_width(words, 12) + 14 <= x1 - x0:
                self.out.append(text_at((x0 + x1) / 2, middle + 4.3, words, f"inside {css}", anchor="middle"))
                return

    def hatch(self, x: float, y: float, width: float, height: float) -> str:
        return rect(x, y, width, height, "inside", more=f' fill="url(#{self.prefix}-hatch)"')

    def grid(self, top: float, bottom: float) -> list[str]:
        return self.time_grid(lambda x: self.line("grid", x, top - 2, bottom), bottom + 14, self.pad, self.right + 2)

    def lines(self, top: float, bottom: float) -> None:
        last = bottom - (6 if self.compact else 10) + 3
        for span in self.chart.spans:
            if span.end <= self.axis * (1 + 1e-9):
                self.out.append(self.line("end", self.x(span.end), top - 4, last))
        for mark in self.chart.marks:
            if mark.at <= self.axis:
                self.out.append(self.line("mark", self.x(mark.at), top - 8, last))

    def line(self, css: str, x: float, top: float, bottom: float) -> str:
        """A vertical line; interrupted where row names stand between the rows."""
        bands = [(a - 2, b + 2) for a, b in self.bands] if self.narrow else [(top, bottom)]
        return f'<path class="{css}" d="{"".join(f"M{px(x)} {px(a)}V{px(b)}" for a, b in bands)}"/>'
