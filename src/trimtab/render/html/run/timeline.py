"""The timeline of a run: a row per GPU, grouped by node, with events in lanes above.

`run_chart` makes the chart from a story, `static_svg` draws it as a still picture (without scripts, and on paper),
`chart_data` passes it to `assets/js/timeline.mjs`, which draws the same with zoom. GPUs that do the same share a track,
drawn in one path, so that neither the page nor a frame grows with GPUs times bars. Time without a bar while a node is
present is idle; while it is absent, nothing is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.render.html.kit import page
from trimtab.render.html.kit.assets import asset
from trimtab.render.html.kit.labels import counted, duration, escape, fit, gpus_words, reason_text, text_width
from trimtab.render.html.kit.svg import hatch_pattern, px, rect, svg_document, text_at, tooltip
from trimtab.render.html.kit.timeline import JOIN_PX, NARROW_TIMELINE_PX, BarLook, ChartBar, TimeCanvas, merge_bars
from trimtab.render.html.run.story import GpuKey, ReportBar, ReportEvent, ReportMigration, ReportNode, RunStory

Rows = tuple[tuple[int, int, int], ...]
"""Adjacent rows: node index (-1: CPU components), first and last row."""

LANES = {"moves": "moves", "nodes": "nodes", "tasks": "tasks", "workers": "workers", "run": "run"}
"""Lanes of marks above the rows."""

_MARKS: dict[str, dict[str, str]] = json.loads(asset("marks.json"))
SHAPES = {kind: mark["shape"] for kind, mark in _MARKS.items()}
"""Outlines of marks, two units wide and high around their centre; distinct without colour."""

SHAPE_WORDS = {kind: mark["words"] for kind, mark in _MARKS.items() if "words" in mark}
_LOOKS: tuple[BarLook, ...] = ("run", "switch", "sync")
_LANE_PX, _GLYPH_PX, _NODE_PX = 20.0, 5.0, 19.0
_CROWDED_PX = 7.0


class TimelineTrack(Frozen):
    """Rows with the same bars; bars in order, without overlap."""

    rows: Rows
    bars: tuple[ReportBar, ...]

    @property
    def height(self) -> int:
        return sum(last - first + 1 for _, first, last in self.rows)


class RunChart(Frozen):
    """The chart of a run."""

    keys: tuple[str, ...]
    nodes: tuple[ReportNode, ...]
    on_cpu: tuple[str, ...]
    tracks: tuple[TimelineTrack, ...]
    marks: tuple[ReportEvent, ...]
    moves: tuple[ReportMigration, ...]
    end_s: float
    is_open: bool = False  # it may continue

    @property
    def lanes(self) -> tuple[str, ...]:
        used = {mark.lane for mark in self.marks}
        return tuple(lane for lane in LANES if lane in used)

    @property
    def used_gpu_s(self) -> float:
        """GPU seconds with a bar."""
        return sum(
            track.height * sum(bar.end - bar.start for bar in track.bars)
            for track in self.tracks
            if track.rows[0][0] >= 0
        )

    @property
    def available_gpu_s(self) -> float:
        """GPU seconds of all nodes while present."""
        return sum(
            node.gpus * ((self.end_s if until is None else until) - since)
            for node in self.nodes
            for since, until in node.presence
        )


def run_chart(story: RunStory) -> RunChart:
    places = {node.name: at for at, node in enumerate(story.nodes)}
    on_cpu = story.on_cpu
    rows_of: dict[tuple[int, str, int], Rows] = {}
    bars: dict[Rows, list[ReportBar]] = {}
    for bar in story.bars:
        key = (bar.plan, bar.component, bar.gpus)
        if key not in rows_of:
            gpu_slots = story.plans[bar.plan].gpu_slots(bar.component) if bar.plan >= 0 else ()
            rows_of[key] = _rows(gpu_slots[: bar.gpus] if bar.gpus else gpu_slots, places)
            if not gpu_slots and bar.component in on_cpu:
                at = on_cpu.index(bar.component)
                rows_of[key] = ((-1, at, at),)
        if rows_of[key]:
            bars.setdefault(rows_of[key], []).append(bar)
    tracks = tuple(TimelineTrack(rows, tuple(_without_overlap(row_bars))) for rows, row_bars in bars.items())
    return RunChart(
        story.components,
        tuple(story.nodes),
        on_cpu,
        tracks,
        tuple(sorted(story.timeline_events, key=lambda event: event.t_s)),
        tuple(story.moves),
        story.end_s,
        not story.state,
    )


def _rows(gpu_slots: tuple[GpuKey, ...], places: Mapping[str, int]) -> Rows:
    found: list[list[int]] = []
    for node, gpu in sorted((places[name], gpu) for name, gpu in gpu_slots):
        if found and found[-1][0] == node and found[-1][2] == gpu - 1:
            found[-1][2] = gpu
        else:
            found.append([node, gpu, gpu])
    return tuple((node, first, last) for node, first, last in found)


def _without_overlap(bars: list[ReportBar]) -> Iterator[ReportBar]:
    free_from = 0.0
    for bar in sorted(bars, key=lambda bar: (bar.start, bar.end)):
        start = max(bar.start, free_from)
        if bar.end > start:
            yield bar if start == bar.start else replace(bar, start=start)
            free_from = bar.end


# ---- script data ----------------------------------------------------------------------------------------------------


def chart_data(chart: RunChart) -> dict[str, Any]:
    """The chart as the script takes it; the script's head comment describes the fields."""
    # Four decimals are finer than a pixel even when zoomed in a hundredfold; short runs get microseconds.
    digits = 6 if chart.end_s < 1000 else 4
    key = {name: at for at, name in enumerate(chart.keys)}
    return {
        "keys": list(chart.keys),
        "nodes": [
            {"name": node.name, "kind": node.kind, "gpus": node.gpus, "lives": [list(life) for life in node.presence]}
            for node in chart.nodes
        ],
        "cpu": list(chart.on_cpu),
        "lanes": [[lane, LANES[lane]] for lane in chart.lanes],
        "tracks": [
            {
                "rows": [list(rows) for rows in track.rows],
                "bars": [
                    value
                    for bar in track.bars
                    for value in (
                        round(bar.start, digits),
                        round(bar.end, digits),
                        key[bar.component],
                        _LOOKS.index(_look(bar.doing)) + (4 if bar.void else 0),
                        bar.iteration,
                    )
                ],
            }
            for track in chart.tracks
        ],
        "marks": [
            [
                round(mark.t_s, digits),
                mark.lane,
                mark.kind,
                mark.title,
                reason_text(mark.code, mark.reason),
                int(mark.strong),
                at,
            ]
            for at, mark in enumerate(chart.marks)
            if mark.lane in LANES
        ],
        "moves": [
            [round(move.began_s, digits), None if move.ended_s is None else round(move.ended_s, digits), move.id]
            for move in chart.moves
        ],
        "shapes": SHAPES,
        "end": chart.end_s,
        "open": chart.is_open,
    }


# ---- still picture --------------------------------------------------------------------------------------------------


def static_svg(chart: RunChart, width: int, prefix: str, title: str) -> str:
    return _Drawing(chart, width, escape(prefix)).draw(title)


class _Drawing(TimeCanvas):
    """The still picture of a run."""

    def __init__(self, chart: RunChart, width: int, prefix: str) -> None:
        self.chart = chart
        left = 66.0 if width < NARROW_TIMELINE_PX else 104.0
        super().__init__(width, prefix, left, width - 3.0, chart.end_s, chart.keys)
        rows = sum(node.gpus for node in chart.nodes)
        self.row = 20.0 if rows <= 12 else 14.0 if rows <= 32 else 9.0 if rows <= 96 else 5.0
        self.tops: list[float] = []  # of each node's first row
        self.cpu_top = 0.0
        self.y = 20.0

    def draw(self, title: str) -> str:
        for lane in self.chart.lanes:
            self.lane(lane)
        top = self.y
        self.places()
        bottom = self.y
        for node, node_top in zip(self.chart.nodes, self.tops, strict=True):
            self.idle(node, node_top)
        for at, name in enumerate(self.chart.on_cpu):
            y = self.cpu_top + at * (self.row + 2)
            self.out.append(rect(self.left, y, self.right - self.left, self.row, "rest"))
            self.out.append(self.label(name, y + self.row / 2))
        for track in self.chart.tracks:
            self.track(track)
        for node, node_top in zip(self.chart.nodes, self.tops, strict=True):
            self.head(node, node_top)
        self.separators()
        self.through(top, bottom)
        grid = self.time_grid(lambda x: f'<path class="grid" d="M{px(x)} 16V{px(bottom)}"/>', 11, 0.0, self.right)
        words = (
            f"{counted(sum(node.gpus for node in self.chart.nodes), 'GPU')} of "
            f"{counted(len(self.chart.nodes), 'node')} over {duration(self.chart.end_s)}. "
            "Events are listed below the picture."
        )
        body = hatch_pattern(self.prefix) + "".join(grid) + "".join(self.out)
        return svg_document(body, self.width, bottom + 4, self.prefix, title, words)

    def places(self) -> None:
        """Compute where the rows of each node and of the CPU components begin."""
        for node in self.chart.nodes:
            named = bool(node.name) or len(self.chart.nodes) > 1
            self.y += _NODE_PX if named else 6.0
            self.tops.append(self.y)
            self.y += node.gpus * self.row
        if self.chart.on_cpu:
            self.y += 10.0
            self.cpu_top = self.y
            self.y += len(self.chart.on_cpu) * (self.row + 2)

    def label(self, words: str, middle: float) -> str:
        return text_at(0, middle + 4, fit(words, self.left - 8, 12), "quiet", tip=words)

    def lane(self, lane: str) -> None:
        middle = self.y + _LANE_PX / 2
        self.out.append(self.label(LANES[lane], middle))
        self.out.append(f'<path class="grid" d="M{px(self.left)} {px(middle)}H{px(self.right)}"/>')
        if lane == "moves":
            for move in self.chart.moves:
                x0, x1 = self.x(move.began_s), self.x(self.chart.end_s if move.ended_s is None else move.ended_s)
                self.out.append(rect(x0, middle - 5, max(x1 - x0, 1.0), 10, "moving", _move_tip(move)))
        marks = [mark for mark in self.chart.marks if mark.lane == lane and mark.kind in SHAPES]
        for group in _crowds(marks, self.x):
            x = self.x(group[0].t_s)
            tip = "\n".join(f"{duration(mark.t_s)}: {mark.title}" for mark in group[:6])
            tip += f"\nand {len(group) - 6} more" if len(group) > 6 else ""
            self.out.append(glyph(group[0].kind, x, middle, tip))
        self.y += _LANE_PX

    def idle(self, node: ReportNode, top: float) -> None:
        """Shade the intervals in which a node is present; bars are drawn over it."""
        for since, until in node.presence:
            x0, x1 = self.x(since), self.x(self.chart.end_s if until is None else until)
            tip = f"{node.name or 'GPUs'}: idle where nothing is drawn"
            self.out.append(rect(x0, top, x1 - x0, node.gpus * self.row, "track idle", tip))

    def head(self, node: ReportNode, top: float) -> None:
        if node.name or len(self.chart.nodes) > 1:
            self.out.append(rect(self.left, top - _NODE_PX, self.right - self.left, _NODE_PX, "head"))
            name = node.name or "GPUs without a node name"
            has = fit(gpus_words(node.gpus, node.kind), self.right / 3, 12)
            shown = fit(name, self.right - text_width(has, 12) - 16, 13, bold=True)
            aside = f'<tspan class="quiet" font-weight="400" dx="8">{escape(has)}</tspan>'
            self.out.append(text_at(0, top - 6, shown, "name small", tip=name, more=aside))
        if self.row >= 11:
            self.out += [self.label(f"GPU {gpu}", top + (gpu + 0.5) * self.row) for gpu in range(node.gpus)]

    def blocks(self, rows: Rows) -> list[tuple[float, float]]:
        """Top and bottom of rows that are drawn in one path; node heads are painted over it."""
        found: list[tuple[float, float, int, int]] = []
        for node, first, last in rows:
            if node < 0:
                top = self.cpu_top + first * (self.row + 2)
                found.append((top, top + self.row, node, last))
                continue
            top, bottom = self.tops[node] + first * self.row, self.tops[node] + (last + 1) * self.row
            before = found[-1] if found else None
            if before and node > 0 and not first and before[2:] == (node - 1, self.chart.nodes[node - 1].gpus - 1):
                found[-1] = (before[0], bottom, node, last)
            else:
                found.append((top, bottom, node, last))
        return [(top, bottom) for top, bottom, _, _ in found]

    def track(self, track: TimelineTrack) -> None:
        blocks = self.blocks(track.rows)
        bars = (
            ChartBar(bar.start, bar.end, bar.component, _look(bar.doing), "void" if bar.void else "")
            for bar in track.bars
        )
        for bar in merge_bars(bars, JOIN_PX / self.scale if self.scale else 0.0):
            x0, x1 = self.x(bar.start), self.x(bar.end)
            colour = "sync" if bar.look == "sync" else f"k{self.colour[bar.key]}"
            what = {"run": bar.key, "switch": f"{bar.key}: switch", "sync": "weight sync"}[bar.look]
            tip = f"{what}{' (run again later)' if bar.note else ''}\n{duration(bar.start)} to {duration(bar.end)}"
            opacity = max(bar.busy, 0.2) * (0.35 if bar.note else 1.0)
            faded = f' fill-opacity="{opacity:.2f}"' if opacity < 0.995 else ""
            # One path for all blocks of a bar, on any number of nodes.
            shape = "".join(f"M{px(x0)} {px(a)}H{px(x1)}V{px(b)}H{px(x0)}Z" for a, b in blocks)
            self.out.append(f'<path class="bar {colour}" d="{shape}"{faded}>{tooltip(tip)}</path>')
            if bar.look == "switch" and x1 - x0 > 3:
                self.out.append(f'<path class="inside" d="{shape}" fill="url(#{self.prefix}-hatch)"/>')

    def separators(self) -> None:
        """Separate the rows with thin lines in the background colour."""
        lines = ""
        for node, top in zip(self.chart.nodes, self.tops, strict=True):
            lines += "".join(
                f"M{px(self.left)} {px(top + gpu * self.row)}H{px(self.right)}" for gpu in range(1, node.gpus)
            )
        self.out.append(f'<path class="inside apart" d="{lines}"/>')

    def through(self, top: float, bottom: float) -> None:
        for move in self.chart.moves:
            x0, x1 = self.x(move.began_s), self.x(self.chart.end_s if move.ended_s is None else move.ended_s)
            self.out.append(rect(x0, top + 4, max(x1 - x0, 0.5), bottom - top - 4, "inside moving"))
        for mark in self.chart.marks:
            if mark.strong:
                self.out.append(f'<path class="inside mark" d="M{px(self.x(mark.t_s))} {px(top)}V{px(bottom)}"/>')


def _look(doing: str) -> BarLook:
    return next((look for look in _LOOKS if look == doing), "run")


def _crowds(marks: list[ReportEvent], x: Any) -> Iterator[list[ReportEvent]]:
    """Group marks that would overlap."""
    group: list[ReportEvent] = []
    for mark in marks:
        if group and (x(mark.t_s) - x(group[0].t_s) >= _CROWDED_PX):
            yield group
            group = []
        group.append(mark)
    if group:
        yield group


def glyph(kind: str, x: float, y: float, tip: str = "") -> str:
    title = tooltip(tip) if tip else ""
    where = f"translate({px(x)} {px(y)}) scale({px(_GLYPH_PX)})"
    bad, good = kind in ("lost", "evicted", "rollback"), kind in ("joined", "arrived")
    tone = "bad" if bad else "good" if good else "plain"
    return f'<path class="glyph {tone}" transform="{where}" d="{SHAPES[kind]}">{title}</path>'


def _move_tip(move: ReportMigration) -> str:
    stages = ", ".join(f"{name} {duration(took)}" for name, _, took in move.stages if took)
    return f"move {move.id}: {move.state}\n{move.reason}" + (f"\n{stages}" if stages else "")


def legend(chart: RunChart) -> str:
    """The legend of colours and marks, for both ways of drawing."""
    looks = {bar.doing for track in chart.tracks for bar in track.bars}
    entries = [(page.key_of(at), name) for at, name in enumerate(chart.keys)]
    first = next((bar.component for track in chart.tracks for bar in track.bars if bar.doing == "switch"), None)
    if first is not None:
        entries.append((page.key_of(chart.keys.index(first)).replace('"></', ' hatched"></'), "switch"))
    seen = {
        "sync": ("weight sync", "sync" in looks),
        "void": ("run again later", any(bar.void for track in chart.tracks for bar in track.bars)),
        "idle": ("idle", bool(chart.nodes)),
    }
    entries += [(f'<span class="tt-key key{css}"></span>', words) for css, (words, there) in seen.items() if there]
    for kind in dict.fromkeys(mark.kind for mark in chart.marks if mark.lane in LANES):
        if kind in SHAPE_WORDS:
            drawn = f'<svg class="tt" width="12" height="12" aria-hidden="true">{glyph(kind, 6, 6)}</svg>'
            entries.append((drawn, SHAPE_WORDS[kind]))
    return page.legend(entries)
