"""A partition as an HTML page: the pipeline, its steady state, the numbers, and what to improve.

Everything drawn is in tables too, and every number comes from the answer. Colour is never the only cue: types, limits
and shares are written out, and every mark has a tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.formats.pipeline.pipeedge import schedule_yaml
from trimtab.model.pipeline import PartitionAnswer, PipelineStage
from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import duration, escape, fit, share, text_width
from trimtab.render.html.kit.lines import CurveChart, ReportCurve, curves_svg
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.kit.svg import px, rect, svg_document, text_at
from trimtab.render.html.kit.timeline import COLOURS, Chart, ChartBar, ChartRow, ChartSpan
from trimtab.render.text.partition import MIB, frontier_gains, improve_sentence, limit_words

PERIODS = 4
"""Periods of the steady state that are drawn."""

THIN_LINK = 0.02
"""Links less busy than this get no row."""

MAX_STAGES_WITH_LINKS = 24
_BOX_HEIGHT, _ROW_GAP = 96.0, 34.0
_WIDE_PX = 700


def type_colours(answer: PartitionAnswer) -> dict[str, int]:
    """A colour index for each device type in use, in stage order."""
    kinds = dict.fromkeys(stage.type for stage in answer.schedule.stages)
    return {kind: number % COLOURS for number, kind in enumerate(kinds)}


def stages_svg(answer: PartitionAnswer, width: int, prefix: str) -> str:
    """The stages as boxes in order, with arrows that show transfer times."""
    stages = answer.schedule.stages
    in_row = min(len(stages), 4 if width >= _WIDE_PX else 2)
    gap = 62.0 if width >= _WIDE_PX else 54.0
    box = min((width - 2 - (in_row - 1) * gap) / in_row, 260.0)
    colours = type_colours(answer)
    out: list[str] = []
    y = 1.0
    for index, stage in enumerate(stages):
        column = index % in_row
        x = 1.0 + column * (box + gap)
        y = 1.0 + index // in_row * (_BOX_HEIGHT + _ROW_GAP)
        out += _box(answer, index, stage, x, y, box, colours[stage.type])
        if index + 1 < len(stages):
            words = duration(stage.transfer_seconds) if stage.transfer_seconds else ""
            tip = f"{stage.host} to {stages[index + 1].host}: {duration(stage.transfer_seconds)}"
            middle = y + _BOX_HEIGHT / 2
            if column + 1 < in_row:
                end = x + box + gap - 6
                head = ((end - 5, middle - 4), (end, middle), (end - 5, middle + 4))
                out += _arrow(f"M{px(x + box + 4)} {px(middle)}H{px(end)}", head, tip)
                out.append(text_at(x + box + gap / 2, middle - 8, words, "quiet", anchor="middle"))
            else:
                # The next row begins at the left: route the line between the rows.
                between = y + _BOX_HEIGHT + _ROW_GAP / 2
                way = f"M{px(x + box / 2)} {px(y + _BOX_HEIGHT + 3)}V{px(between)}H{px(1 + box / 2)}"
                left, end = 1 + box / 2, between + _ROW_GAP / 2 - 5
                out += _arrow(f"{way}V{px(end)}", ((left - 4, end - 5), (left, end), (left + 4, end - 5)), tip)
                left = (x + 1 + box) / 2 if in_row > 1 else 1 + box / 2 + 8 + text_width(words, 12) / 2
                out.append(text_at(left, between - 5, words, "quiet", anchor="middle"))
    height = y + _BOX_HEIGHT + 2
    title = f"Pipeline of {len(stages)} stages"
    listed = "; ".join(f"{s.host}: layers {s.first} to {s.last}" for s in stages)
    return svg_document("".join(out), width, height, prefix, title, listed)


def _arrow(way: str, head: Sequence[tuple[float, float]], tip: str) -> list[str]:
    """A line with a tooltip, and the arrow head at its end, through three points."""
    strokes = "L".join(f"{px(x)} {px(y)}" for x, y in head)
    line = f'<path class="bracket" d="{way}"><title>{escape(tip)}</title></path>'
    return [line, f'<path class="bracket" d="M{strokes}"/>']


def _box(
    answer: PartitionAnswer, index: int, stage: PipelineStage, x: float, y: float, wide: float, colour: int
) -> list[str]:
    bottleneck = answer.schedule.bottleneck_seconds
    first = answer.limits[0] if answer.limits else None
    limits = first is not None and (first.what, first.stage) == ("compute", index)
    busy = stage.compute_seconds / bottleneck if bottleneck > 0 else 0.0
    full = stage.memory_bytes / stage.memory_available_bytes if stage.memory_available_bytes > 0 else 0.0
    inner = wide - 28
    memory = f"{stage.memory_bytes / MIB:,.1f} of {stage.memory_available_bytes / MIB:,.1f} MB"
    tip = "\n".join(
        (
            f"{stage.host} ({stage.type})",
            f"layers {stage.first} to {stage.last}",
            f"compute {duration(stage.compute_seconds)}, busy {share(busy)}",
            f"memory {memory}",
        )
    )
    mark = "limits" if limits else ""
    room = inner - (text_width(mark, 12) + 8 if mark else 0)
    used = f"{stage.memory_bytes / MIB:,.0f} / {stage.memory_available_bytes / MIB:,.0f} MB"
    bar = inner * 0.24
    layers = f"layers {stage.first}–{stage.last}" if stage.first != stage.last else f"layer {stage.first}"
    out = [
        rect(x, y, wide, _BOX_HEIGHT, "surface", tip, rx=6),
        rect(x, y, wide, _BOX_HEIGHT, "inside rest", rx=6),
        rect(x, y + 8, 5, _BOX_HEIGHT - 16, f"inside k{colour}", rx=2),
        text_at(x + 16, y + 21, fit(stage.host, room, 13, bold=True), "name"),
        text_at(x + 16, y + 38, fit(f"{layers} · {stage.type}", inner, 12), "quiet"),
    ]
    if mark:
        out.append(text_at(x + wide - 12, y + 21, mark, "small", anchor="end"))
        out.append(
            f'<rect class="inside end" x="{px(x)}" y="{px(y)}" width="{px(wide)}" height="96" rx="6" fill="none"/>'
        )
    for row, (part, words) in enumerate(((busy, f"{duration(stage.compute_seconds)} · {share(busy)}"), (full, used))):
        top = y + 50 + row * 22
        out.append(rect(x + 16, top + 4, bar, 7, "inside idle", rx=2))
        css = f"inside k{colour}" if row == 0 else "inside sync"
        out.append(rect(x + 16, top + 4, max(1.0, bar * min(part, 1.0)), 7, css, rx=2))
        out.append(text_at(x + 16 + bar + 8, top + 12, fit(words, inner - bar - 8, 12), "small"))
    return out


def steady_chart(answer: PartitionAnswer) -> Chart:
    """The steady state: microbatches arrive at the pace of the bottleneck, and every stage repeats itself.

    No stage or link takes longer than that pace, so nothing queues: times are sums.
    """
    schedule = answer.schedule
    period = schedule.bottleneck_seconds
    with_links = len(schedule.stages) <= MAX_STAGES_WITH_LINKS and any(
        s.transfer_seconds > THIN_LINK * period for s in schedule.stages
    )
    window = PERIODS * period
    # The window opens when the first microbatch has reached the last stage, at a multiple of the period.
    reached = schedule.latency_seconds - schedule.stages[-1].compute_seconds - schedule.stages[-1].transfer_seconds
    begin = int(reached / period + 1) * period if period > 0 else 0.0
    rows: list[ChartRow] = []
    keys: dict[int, None] = {}
    at = schedule.input_seconds

    def repeated(offset: float, lasts: float, note: str) -> tuple[ChartBar, ...]:
        found = []
        if lasts <= 0 or period <= 0:
            return ()
        number = max(0, int((begin - offset - lasts) / period))
        while offset + number * period < begin + window:
            start = offset + number * period - begin
            if start + lasts > 1e-9 * period:
                keys.setdefault(number)
                stop = min(start + lasts, window)
                found.append(ChartBar(max(start, 0.0), stop, _name(number), note=note))
            number += 1
        return tuple(found)

    for index, stage in enumerate(schedule.stages):
        detail = f"layers {stage.first}–{stage.last}"
        bars = repeated(at, stage.compute_seconds, f"{detail} on {stage.host}")
        rows.append(ChartRow(stage.host, bars, detail))
        at += stage.compute_seconds
        if with_links and stage.transfer_seconds > 0:
            to = schedule.stages[index + 1].host if index + 1 < len(schedule.stages) else answer.job.sink or ""
            sent = repeated(at, stage.transfer_seconds, f"{stage.host} to {to}")
            rows.append(ChartRow(f"→ {to}", sent, weight=0, shaded=False))
        at += stage.transfer_seconds
    spans = (ChartSpan(0.0, period, f"one microbatch every {duration(period)}"),)
    names = tuple(_name(number) for number in sorted(keys))
    limit = limit_words(answer, answer.limits[0]) if answer.limits else "nothing"
    description = f"Steady state of {len(schedule.stages)} stages; limited by {limit}."
    return Chart("Steady state", tuple(rows), names, window, spans=spans, description=description)


def _name(number: int) -> str:
    return f"microbatch {number + 1}"


def frontier_chart(answer: PartitionAnswer) -> CurveChart:
    """The minimum bottleneck over the number of devices, as a line."""
    used = len(answer.schedule.stages)
    points = tuple((float(point.devices), point.bottleneck_seconds) for point in answer.frontier)
    notes = tuple("this schedule" if point.devices == used else "" for point in answer.frontier)
    listed = "; ".join(f"{point.devices}: {duration(point.bottleneck_seconds)}" for point in answer.frontier)
    title = "Bottleneck over the number of devices"
    curve = ReportCurve("minimum bottleneck", points, 0, notes=notes)
    return CurveChart(title, (curve,), "seconds", listed, across="devices")


def partition_report(answer: PartitionAnswer, *, command: str | None, search_seconds: float | None) -> str:
    """The report of an answer as HTML. `command` made it."""
    parts = [_headline(answer)]
    if answer.schedule.stages:
        parts += [_pipeline(answer), _steady(answer), _frontier(answer)]
    lede = "Hosts in stage order, with their first and last layer."
    block = schedule_yaml(answer.schedule).rstrip()
    parts += [page.copy_section("block", "Schedule", lede, "Schedule", block), _assumed(answer)]
    took = f" Searched in {duration(search_seconds)}." if search_seconds is not None else ""
    return page.document(answer.job.model.name, parts, command=command, more=took)


def _headline(answer: PartitionAnswer) -> str:
    schedule, job = answer.schedule, answer.job
    what = "bottleneck" if answer.objective == "throughput" else "latency"
    proof = Tile("Optimal", "Proven", f"no schedule has a lower {what}", "good")
    if not answer.optimal:
        bound = duration(answer.lower_bound_seconds)
        proof = Tile("Optimal", "Not proven", f"no {what} can be below {bound}", "warn")
    rate = f"{answer.throughput:.4g}" if answer.throughput is not None else "–"
    used, spare = len(schedule.stages), len(job.hosts) - len(schedule.stages)
    tiles = [
        Tile("Bottleneck", _seconds(schedule.bottleneck_seconds), f"per microbatch of {job.batch_size}"),
        Tile("Throughput", rate, "items per second"),
        Tile("Latency", _seconds(schedule.latency_seconds), "from end to end"),
        Tile("Devices used", f"{used} of {used + spare}", f"{spare} left free")
        if spare
        else Tile("Devices used", str(used), "all of them"),
        proof,
    ]
    lede = f"Improve first: {improve_sentence(answer)}."
    return page.header(f"trimtab: pipeline · {answer.objective}", job.model.name, lede, tiles)


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if 0.1 <= value < 1000 else duration(value)


def _pipeline(answer: PartitionAnswer) -> str:
    drawn = page.picture(lambda width, name: stages_svg(answer, width, name), "stages")
    colours, bottleneck = type_colours(answer), answer.schedule.bottleneck_seconds
    heads = ("Host", "Type", "Layers", "Compute, s", "Send, s", "Memory, MB", "Of, MB", "Busy")
    rows = [_row(stage, colours[stage.type], bottleneck) for stage in answer.schedule.stages]
    source = ""
    if answer.schedule.input_seconds:
        took = duration(answer.schedule.input_seconds)
        source = f"<p>The input comes from {escape(answer.job.source or '')} in {took}.</p>\n"
    lede = "Each box is a stage with its compute time, utilisation and memory. The arrows show transfer times."
    body = page.card(f"{drawn}\n{page.table('Pipeline', heads, rows, numeric=range(3, 8))}")
    return page.section("pipeline", "Pipeline", lede, source + body)


def _row(stage: PipelineStage, colour: int, bottleneck: float) -> list[str]:
    busy = stage.compute_seconds / bottleneck if bottleneck > 0 else 0.0
    return [
        page.keyed(colour, escape(stage.host)),
        escape(stage.type),
        f"{stage.first}–{stage.last}",
        f"{stage.compute_seconds:.4f}",
        f"{stage.transfer_seconds:.4f}" if stage.transfer_seconds else "–",
        f"{stage.memory_bytes / MIB:,.1f}",
        f"{stage.memory_available_bytes / MIB:,.1f}",
        share(busy),
    ]


def _steady(answer: PartitionAnswer) -> str:
    if answer.schedule.bottleneck_seconds <= 0:
        return ""
    drawn = page.chart_picture(steady_chart(answer), "steady")
    lede = "Once the pipeline is full: each colour is one microbatch on its way through the stages."
    return page.section("steady", "Steady state", lede, page.card(drawn))


def _frontier(answer: PartitionAnswer) -> str:
    if not answer.frontier:
        return ""
    drawn = page.picture(lambda width, name: curves_svg(frontier_chart(answer), width, name), "frontier")
    rows = [
        [str(point.devices), _seconds(point.bottleneck_seconds), rate, f"+{gain}" if gain else "–"]
        for point, rate, gain in frontier_gains(answer)
    ]
    title = "How many devices are worth it"
    heads = ("Devices", "Bottleneck", "Items per second", "Gain of the last one")
    body = page.card(f"{drawn}\n{page.table(title, heads, rows, numeric=range(1, 4))}")
    return page.section("frontier", title, "The minimum bottleneck for each number of devices.", body)


def _assumed(answer: PartitionAnswer) -> str:
    sentences = [*answer.assumptions, *answer.warnings]
    if not answer.optimal or not answer.ties_proven:
        sentences.insert(0, answer.method if not answer.optimal else "schedules of equal cost were not all compared")
    return page.list_section("assumptions", "What was assumed", sentences)
