"""A partition as text and as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from trimtab.formats.pipeline.pipeedge import schedule_yaml
from trimtab.model.pipeline import FrontierPoint, PartitionAnswer, PipelineLimit, PipelineStage
from trimtab.render.html.kit.labels import duration, share
from trimtab.render.output import out, picked, print_list, text_table

MIB = 2**20


def as_data(answer: PartitionAnswer, searched: float) -> dict[str, Any]:
    """The data of `--format json` and `yaml`."""
    schedule, job = answer.schedule, answer.job
    bottleneck = schedule.bottleneck_seconds
    return {
        "model": job.model.name,
        "objective": answer.objective,
        "bottleneck_seconds": bottleneck,
        "items_per_second": answer.throughput,
        "latency_seconds": schedule.latency_seconds,
        **picked(answer, "lower_bound_seconds", "optimal", "ties_proven", "method"),
        "batch_size": job.batch_size,
        "devices_used": len(schedule.stages),
        "devices": len(job.hosts),
        "input_seconds": schedule.input_seconds,
        "stages": [
            {
                **picked(stage, "host", "type"),
                "layers": [stage.first, stage.last],
                **picked(stage, "compute_seconds", "transfer_seconds"),
                "memory_mb": stage.memory_bytes / MIB,
                "memory_available_mb": stage.memory_available_bytes / MIB,
                "utilisation": _part(stage.compute_seconds, bottleneck),
                "link_utilisation": _part(stage.transfer_seconds, bottleneck),
            }
            for stage in schedule.stages
        ],
        "improve_first": improve_as_data(answer),
        "frontier": [
            {
                **picked(point, "devices", "bottleneck_seconds"),
                "items_per_second": job.batch_size / point.bottleneck_seconds if point.bottleneck_seconds else None,
            }
            for point in answer.frontier
        ],
        "assumptions": list(answer.assumptions),
        "warnings": list(answer.warnings),
        "schedule": [{stage.host: [stage.first, stage.last]} for stage in schedule.stages],
        "search": {"seconds": round(searched, 6)},
    }


def improve_as_data(answer: PartitionAnswer) -> dict[str, Any] | None:
    if not answer.limits:
        return None
    first = answer.limits[0]
    after = answer.limits[1] if len(answer.limits) > 1 else None
    return {
        "what": first.what,
        "stage": first.stage + 1,
        "seconds": first.seconds,
        "next_seconds": after.seconds if after else None,
        "sentence": improve_sentence(answer),
    }


def _part(seconds: float, whole: float) -> float:
    return seconds / whole if whole > 0 else 0.0


def improve_sentence(answer: PartitionAnswer) -> str:
    """The stage or link to improve first, as a sentence."""
    if not answer.limits:
        return "nothing takes any time"
    first, *others = answer.limits
    words = f"{limit_words(answer, first)} takes {first.seconds:.4g} s"
    if others:
        words += f"; with that gone, {limit_words(answer, others[0])} limits at {others[0].seconds:.4g} s"
    return words


def limit_words(answer: PartitionAnswer, limit: PipelineLimit) -> str:
    stages = answer.schedule.stages
    if limit.stage < 0:
        return f"the link {answer.job.source} to {stages[0].host}"
    stage = stages[limit.stage]
    if limit.what == "compute":
        return f"stage {limit.stage + 1} ({stage.host}, layers {stage.first}-{stage.last})"
    after = stages[limit.stage + 1].host if limit.stage + 1 < len(stages) else answer.job.sink
    return f"the link {stage.host} to {after}"


def proof_words(answer: PartitionAnswer) -> str:
    what = "bottleneck" if answer.objective == "throughput" else "latency"
    if answer.optimal and answer.ties_proven:
        return f"proven least {what}"
    if answer.optimal:
        return f"proven least {what}; ties not all compared"
    bound = answer.lower_bound_seconds
    got = answer.schedule.bottleneck_seconds if answer.objective == "throughput" else answer.schedule.latency_seconds
    above = share(got / bound - 1) if bound > 0 else "an unknown part"
    return f"{answer.method}: at most {above} above the least {what}"


def print_text(answer: PartitionAnswer, searched: float) -> None:
    """Print the answer; the schedule comes last, ready to copy."""
    schedule, job = answer.schedule, answer.job
    if not schedule.stages:
        out.print("the model has no layers")
        out.print()
        out.print(schedule_yaml(schedule).rstrip("\n"), markup=False)
        return
    rate = f"{answer.throughput:.4g} items a second" if answer.throughput is not None else "no time at all"
    out.print(f"[bold]{schedule.bottleneck_seconds:.4f} s[/] per microbatch of {job.batch_size}: {rate}")
    out.print(
        f"{schedule.latency_seconds:.4f} s from end to end; {len(schedule.stages)} of {len(job.hosts)} devices; "
        f"{escape(proof_words(answer))}"
    )
    out.print(f"[dim]searched in {searched:.3f} s[/]")
    out.print()
    out.print(_stages(answer))
    out.print(f"\n[bold]Improve first[/]: {escape(improve_sentence(answer))}")
    if answer.frontier:
        out.print()
        out.print(_frontier(answer))
    print_list("Assumed", answer.assumptions)
    out.print("\nBest schedule for this pipeline is:")
    out.print()
    out.print(schedule_yaml(schedule).rstrip("\n"), markup=False)


def _stages(answer: PartitionAnswer) -> Table:
    bottleneck, input_seconds = answer.schedule.bottleneck_seconds, answer.schedule.input_seconds
    rows = [(answer.job.source or "", "(source)", "-", "-", f"{input_seconds:.4f}")] if input_seconds else []
    cells = [_cells(stage, bottleneck) for stage in answer.schedule.stages]
    heads = ("host", "type", "layers", ">compute s", ">send s", ">MB", ">of MB", ">busy")
    return text_table(heads, [*rows, *cells])


def _cells(stage: PipelineStage, bottleneck: float) -> list[str]:
    return [
        stage.host,
        stage.type,
        f"{stage.first}-{stage.last}",
        f"{stage.compute_seconds:.4f}",
        f"{stage.transfer_seconds:.4f}" if stage.transfer_seconds else "-",
        f"{stage.memory_bytes / MIB:.1f}",
        f"{stage.memory_available_bytes / MIB:.1f}",
        share(_part(stage.compute_seconds, bottleneck)),
    ]


def _frontier(answer: PartitionAnswer) -> Table:
    rows = (
        (point.devices, duration(point.bottleneck_seconds), rate.replace("–", "-"), gain or "-")
        for point, rate, gain in frontier_gains(answer)
    )
    return text_table((">devices", ">bottleneck", ">items/s", ">gain of the last one"), rows)


def frontier_gains(answer: PartitionAnswer) -> Iterator[tuple[FrontierPoint, str, str]]:
    """Each number of devices with its items per second, and the gain of the last device (empty: not known)."""
    before = None
    for point in answer.frontier:
        rate = answer.job.batch_size / point.bottleneck_seconds if point.bottleneck_seconds else None
        gain = share(rate / before - 1) if rate and before else ""
        yield point, f"{rate:.4g}" if rate is not None else "–", gain
        before = rate
