"""A partition as an HTML page: the pipeline, its steady state, the numbers, and what to improve.

Everything drawn is in tables too, and every number comes from the answer.
"""

from __future__ import annotations

from trimtab.formats.pipeline.pipeedge import schedule_yaml
from trimtab.model.pipeline import PartitionAnswer, PipelineStage
from trimtab.render.html.kit import timeline
from trimtab.render.html.kit.labels import duration, escape, escape_block, share
from trimtab.render.html.kit.page import both, list_section, page_foot, page_head, page_header
from trimtab.render.html.partition.pictures import frontier_svg, stages_svg, steady_chart, type_colours
from trimtab.render.text.partition import MIB, improve_sentence


def partition_report(answer: PartitionAnswer, *, command: str | None, search_seconds: float | None) -> str:
    """The report of an answer as HTML. `command` made it."""
    parts = [page_head(answer.job.model.name), _headline(answer)]
    if answer.schedule.stages:
        parts += [_pipeline(answer), _steady(answer), _frontier(answer)]
    took = f" Searched in {duration(search_seconds)}." if search_seconds is not None else ""
    parts += [_schedule(schedule_yaml(answer.schedule)), _assumed(answer), page_foot(command, more=took)]
    return "\n".join(part for part in parts if part) + "\n"


def _headline(answer: PartitionAnswer) -> str:
    schedule, job = answer.schedule, answer.job
    what = "bottleneck" if answer.objective == "throughput" else "latency"
    if answer.optimal:
        proof = f'<dd class="good">Proven<small>no schedule has a lower {what}</small></dd>'
    else:
        bound = duration(answer.lower_bound_seconds)
        proof = f'<dd class="warn">Not proven<small>no {what} can be below {bound}</small></dd>'
    rate = f"{answer.throughput:.4g}" if answer.throughput is not None else "–"
    spare = len(job.hosts) - len(schedule.stages)
    numbers = [
        (
            "Bottleneck",
            f"<dd>{_seconds(schedule.bottleneck_seconds)}<small>per microbatch of {job.batch_size}</small></dd>",
        ),
        ("Throughput", f"<dd>{rate}<small>items per second</small></dd>"),
        ("Latency", f"<dd>{_seconds(schedule.latency_seconds)}<small>from end to end</small></dd>"),
        (
            "Devices used",
            f"<dd>{len(schedule.stages)} of {len(job.hosts)}<small>{spare} left free</small></dd>"
            if spare
            else f"<dd>{len(job.hosts)}<small>all of them</small></dd>",
        ),
        ("Optimal", proof),
    ]
    lede = f"Improve first: {improve_sentence(answer)}."
    return page_header(f"trimtab partition · {answer.objective}", job.model.name, lede, numbers)


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if 0.1 <= value < 1000 else duration(value)


def _pipeline(answer: PartitionAnswer) -> str:
    drawn = both(lambda width, name: stages_svg(answer, width, name), "stages")
    heads = ("Host", "Type", "Layers", "Compute, s", "Send, s", "Memory, MB", "Of, MB", "Busy")
    numeric = ' class="number"'
    columns = "".join(f'<th scope="col"{numeric if i > 2 else ""}>{head}</th>' for i, head in enumerate(heads))
    colours = type_colours(answer)
    bottleneck = answer.schedule.bottleneck_seconds
    rows = "\n".join(_row(stage, colours[stage.type], bottleneck) for stage in answer.schedule.stages)
    source = ""
    if answer.schedule.input_seconds:
        source = (
            f"<p>The input comes from {escape(answer.job.source or '')} in "
            f"{duration(answer.schedule.input_seconds)}.</p>\n"
        )
    return (
        '<section aria-labelledby="h-pipeline">\n<h2 id="h-pipeline">Pipeline</h2>\n'
        "<p>Each box is a stage with its compute time, utilisation and memory. "
        f"The arrows show transfer times.</p>\n{source}"
        f'<div class="card"><figure>{drawn}</figure>\n'
        '<div class="scroll" role="region" aria-labelledby="h-pipeline" tabindex="0"><table>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div></div>\n</section>"
    )


def _row(stage: PipelineStage, colour: int, bottleneck: float) -> str:
    busy = stage.compute_seconds / bottleneck if bottleneck > 0 else 0.0
    numbers = (
        f"{stage.compute_seconds:.4f}",
        f"{stage.transfer_seconds:.4f}" if stage.transfer_seconds else "–",
        f"{stage.memory_bytes / MIB:,.1f}",
        f"{stage.memory_available_bytes / MIB:,.1f}",
        share(busy),
    )
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return (
        f'<tr><th scope="row"><span class="named"><span class="tt-key key{colour}"></span>'
        f"<span>{escape(stage.host)}</span></span></th><td>{escape(stage.type)}</td>"
        f"<td>{stage.first}–{stage.last}</td>{cells}</tr>"
    )


def _steady(answer: PartitionAnswer) -> str:
    if answer.schedule.bottleneck_seconds <= 0:
        return ""
    chart = steady_chart(answer)
    drawn = both(lambda width, name: timeline.svg(chart, width, standalone=False, prefix=name), "steady")
    return (
        '<section aria-labelledby="h-steady">\n<h2 id="h-steady">Steady state</h2>\n'
        "<p>Once the pipeline is full: each colour is one microbatch on its way through the stages.</p>\n"
        f'<div class="card"><figure>{drawn}</figure></div>\n</section>'
    )


def _frontier(answer: PartitionAnswer) -> str:
    if not answer.frontier:
        return ""
    drawn = both(lambda width, name: frontier_svg(answer, width, name), "frontier")
    rows, before = "", None
    for point in answer.frontier:
        rate = answer.job.batch_size / point.bottleneck_seconds if point.bottleneck_seconds else None
        gain = f"+{share(rate / before - 1)}" if rate and before else "–"
        rows += (
            f'<tr><th scope="row">{point.devices}</th><td class="number">{_seconds(point.bottleneck_seconds)}</td>'
            f'<td class="number">{f"{rate:.4g}" if rate is not None else "–"}</td><td class="number">{gain}</td></tr>'
        )
        before = rate
    return (
        '<section aria-labelledby="h-frontier">\n<h2 id="h-frontier">How many devices are worth it</h2>\n'
        "<p>The minimum bottleneck for each number of devices.</p>\n"
        f'<div class="card"><figure>{drawn}</figure>\n'
        '<div class="scroll" role="region" aria-labelledby="h-frontier" tabindex="0"><table>\n'
        '<thead><tr><th scope="col">Devices</th><th scope="col" class="number">Bottleneck</th>'
        '<th scope="col" class="number">Items per second</th><th scope="col" class="number">Gain of the last one</th>'
        f"</tr></thead>\n<tbody>{rows}</tbody>\n</table></div></div>\n</section>"
    )


def _schedule(block: str) -> str:
    return (
        '<section aria-labelledby="h-block">\n<h2 id="h-block">Schedule</h2>\n'
        "<p>Hosts in stage order, with their first and last layer.</p>\n"
        f'<div class="copy"><pre tabindex="0" aria-label="Schedule">{escape_block(block.rstrip())}</pre></div>\n'
        "</section>"
    )


def _assumed(answer: PartitionAnswer) -> str:
    sentences = [*answer.assumptions, *answer.warnings]
    if not answer.optimal or not answer.ties_proven:
        sentences.insert(0, answer.method if not answer.optimal else "schedules of equal cost were not all compared")
    return list_section("assumptions", "What was assumed", sentences)
