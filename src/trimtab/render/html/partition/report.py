"""A partition as an HTML page: the pipeline, its steady state, the numbers, and what to improve.

Everything drawn is in tables too, and every number comes from the answer.
"""

from __future__ import annotations

from trimtab.formats.pipeline.pipeedge import schedule_yaml
from trimtab.model.pipeline import PartitionAnswer, PipelineStage
from trimtab.render.html.kit import page
from trimtab.render.html.kit.labels import duration, escape, share
from trimtab.render.html.kit.lines import curves_svg
from trimtab.render.html.kit.page import Tile
from trimtab.render.html.partition.pictures import frontier_chart, stages_svg, steady_chart, type_colours
from trimtab.render.text.partition import MIB, frontier_gains, improve_sentence


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
    return page.header(f"trimtab partition · {answer.objective}", job.model.name, lede, tiles)


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
