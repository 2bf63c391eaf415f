"""Costs from a past run for the planner: at the GPU counts it ran on, with its switches and weight syncs.

Costs are scaled to the level at the run's end. Iterations on both sides of a change of GPU count have the same level,
so a count that was left long ago still gives a point, scaled by the drift since. Points that the job states and the run
did not use keep the shape of their curve and are scaled by the same level. Notes say what the result rests on; a
component without any costs is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats import yaml_text
from trimtab.formats.job import matches, ranks_of
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs.measured import spread
from trimtab.model.plan import CurrentPlacement
from trimtab.model.run import ComponentTiming, Iteration
from trimtab.model.workflow import ANY_KIND, Component, PlacementJob, Variant, WeightSync, Workflow
from trimtab.plan.placement.space import seconds_at
from trimtab.runtime.run.folder import JOB, RunHistory, read_run
from trimtab.runtime.run.job_file import read_costed

NEAR = 8  # iterations at either end of a stretch that give its level there
NOISE, WIDTHS = 0.06, 4.0  # ends that differ by no more than this, or by this many spreads, are the same level
TREND, TREND_WIDTHS = 0.04, 5.0  # a trend of no more than this, or than this many spreads, is noise
NEWEST = 20  # last iterations that give switches and syncs


class CostStretch(Frozen):
    """Consecutive iterations in which a component ran with the same GPU count, kind and variant."""

    gpus: int
    kind: str
    variant: str
    busy_s: tuple[float, ...]

    def ends(self) -> tuple[float, float]:
        """Level at the beginning and at the end; equal if they cannot be told apart."""
        (first, width), (last, last_width) = _end_of(self.busy_s[:NEAR][::-1]), _end_of(self.busy_s[-NEAR:])
        if min(first, last) <= 0 or abs(log(last / first)) <= max(NOISE, WIDTHS * max(width, last_width)):
            return median(self.busy_s), median(self.busy_s)
        return first, last


def _end_of(values: Sequence[float]) -> tuple[float, float]:
    """Level at the end of a few values, and their relative spread: half the interquartile range.

    The level is their median or, with a significant trend (Theil-Sen), the end of the trend, so that a steady drift is
    not lagged behind.
    """
    slopes = [(b - a) / (j - i) for i, a in enumerate(values) for j, b in enumerate(values) if j > i]
    slope = median(slopes) if slopes else 0.0
    level = [value + slope * (len(values) - 1 - at) for at, value in enumerate(values)]
    width = spread(level) or 0.0
    if abs(slope) * (len(values) - 1) <= max(TREND, TREND_WIDTHS * width) * median(values):
        return median(values), spread(values) or 0.0
    return median(level), width


class PastComponentCosts(Frozen):
    """Costs of one component at the level of the run's end: points, newest first, and its drift."""

    points: tuple[tuple[CostStretch, float], ...]
    drift: float  # level at the end relative to the beginning


def load_from_run(folder: Path, file: Path | None, overrides: Sequence[str]) -> tuple[LoadedJob, tuple[str, ...]]:
    """A job with the costs that the run in a folder has measured, and notes on what they rest on.

    The job is the run's own or that of a file, which may state another cluster or other limits.
    """
    past = read_run(folder)
    path = file or folder / JOB
    if file is None and not path.is_file():
        raise InputError("the folder does not say which job it is of", where=str(path), hint="name the job file")
    data = yaml_text.read_mapping(path)
    if not matches(data):
        raise InputError("--from-run goes with job files in trimtab's own form", where=str(path))
    loaded, _, _, unmeasured = read_costed(yaml_text.overridden(data, overrides), path)
    workflow, notes = measured_workflow(loaded.job.workflow, unmeasured, past, str(folder))
    notes += (past.left_out,) * bool(past.left_out)
    job = PlacementJob(loaded.job.cluster, workflow)
    return replace(loaded, job=job, current=loaded.current or _last_placement(past, job, folder)), notes


def measured_workflow(
    workflow: Workflow, unmeasured: frozenset[str], past: RunHistory, where: str
) -> tuple[Workflow, tuple[str, ...]]:
    """A workflow with measured costs, and notes on them."""
    if not past.iterations:
        raise InputError("the run has measured nothing: no iteration of it ended", where=where)
    past_costs = {
        name: costs for name in workflow.names if (costs := _component_costs(past, name, workflow.batches)) is not None
    }
    unknown = sorted({timing.component for each in past.iterations for timing in each.components} - set(workflow.names))
    if unknown:
        raise InputError(f"the run had components that the job has not: {', '.join(unknown)}", where=where)
    missing = [name for name in workflow.names if name in unmeasured and name not in past_costs]
    if missing:
        raise InputError(
            f"what {' and '.join(missing)} cost is neither stated nor measured by the run",
            where=where,
            hint="state `seconds`, or let the run go on",
        )
    notes = [_what_was_measured(past_costs, len(past.iterations), where)]
    components = []
    for component in workflow.components:
        if component.name not in past_costs:
            components.append(component)
            notes.append(f"{component.name} was not measured: its cost is the stated one")
            continue
        costs = past_costs[component.name]
        measured, note = _with_costs(component, costs, is_stated=component.name not in unmeasured)
        components.append(replace(measured, switch_seconds=_switch_s(past, component)))
        notes += [note] * bool(note)
        if abs(costs.drift - 1) > NOISE:
            notes.append(f"{component.name} drifted to {costs.drift:.3g}x its initial cost: planned with the latest")
    sync, note = _sync(workflow.weight_sync, past)
    notes += [note] * bool(note)
    return replace(workflow, components=tuple(components), weight_sync=sync), tuple(notes)


# ---- components ------------------------------------------------------------------------------------------------------


def _component_costs(past: RunHistory, name: str, batches: int) -> PastComponentCosts | None:
    stretches = _stretches(past, name, batches)
    if not stretches:
        return None
    points: dict[tuple[int, str, str], tuple[CostStretch, float]] = {}
    since = 1.0  # drift since the stretch ended
    for stretch in reversed(stretches):
        first, last = stretch.ends()
        points.setdefault((stretch.gpus, stretch.kind, stretch.variant), (stretch, last * since))
        since *= last / first if first else 1.0
    return PastComponentCosts(tuple(points.values()), since)


def _stretches(past: RunHistory, name: str, batches: int) -> list[CostStretch]:
    """Times of a component by stretches, without warm-up iterations and those with periodic work."""
    runs: list[tuple[tuple[int, str, str], list[tuple[Iteration, ComponentTiming]]]] = []
    for iteration in past.iterations:
        measured = next((timing for timing in iteration.components if timing.component == name), None)
        if measured is None:
            continue
        facts = past.plans.get(iteration.number, {})
        group: Mapping[str, Any] = next((entry for entry in facts.get("groups", ()) if name in entry["components"]), {})
        key = (measured.gpus, str(group.get("kind", "")), str(facts.get("variants", {}).get(name, "")))
        if not runs or runs[-1][0] != key:
            runs.append((key, []))
        runs[-1][1].append((iteration, measured))
    stretches = []
    for key, run in runs:
        warm = run[1:] or run
        usual = [timing for iteration, timing in warm if not iteration.extra] or [timing for _, timing in warm]
        busy_s = (timing.busy_s * (batches / timing.batches if timing.batches else 1.0) for timing in usual)
        stretches.append(CostStretch(*key, tuple(busy_s)))
    return stretches


def _with_costs(component: Component, costs: PastComponentCosts, *, is_stated: bool) -> tuple[Component, str]:
    """A component with measured points, and a note on stated points that were scaled."""
    stretch, newest_s = costs.points[0]
    if component.on_cpu:
        return replace(component, cpu_seconds=newest_s), ""
    ran = next((variant for variant in component.variants if variant.name == stretch.variant), component.variants[0])
    stated = ran.points(stretch.kind) if is_stated else ()
    expected_s = seconds_at(stated, ran.floor_seconds, stretch.gpus) if stated else 0.0
    level = newest_s / expected_s if expected_s else 1.0
    variants = tuple(_moved(variant, costs, level, is_stated=is_stated) for variant in component.variants)
    counts = {gpus for points in ran.seconds.values() for gpus, _ in points} if is_stated else set()
    others = counts - {point.gpus for point, _ in costs.points}
    note = ""
    if others or (is_stated and len(variants) > 1):
        note = f"{component.name} where it was not measured: the stated cost times {level:.2f}"
    return replace(component, variants=variants), note


def _moved(variant: Variant, costs: PastComponentCosts, level: float, *, is_stated: bool) -> Variant:
    """A variant with its measured points; stated points are scaled by the level."""
    seconds: dict[str, dict[int, float]] = {}
    if is_stated:
        seconds = {kind: {gpus: each * level for gpus, each in points} for kind, points in variant.seconds.items()}
    for stretch, each in costs.points:
        if stretch.variant == variant.name:
            # For a kind without points of its own, those stated for any kind hold.
            before = seconds.get(ANY_KIND, {}) if is_stated else {}
            seconds.setdefault(stretch.kind, dict(before))[stretch.gpus] = each
    if not seconds:
        return variant
    lowest = min(each for points in seconds.values() for each in points.values())
    return replace(
        variant,
        seconds={kind: tuple(sorted(points.items())) for kind, points in seconds.items()},
        floor_seconds=min(variant.floor_seconds * level, lowest),
    )


def _switch_s(past: RunHistory, component: Component) -> float:
    """Offload and onload time where the component shared GPUs; else the stated time."""
    took = []
    for iteration in past.iterations:
        groups = past.plans.get(iteration.number, {}).get("groups", ())
        if any(component.name in group["components"] and len(group["components"]) > 1 for group in groups):
            took += [timing.switch_s for timing in iteration.components if timing.component == component.name]
    return median(took[-NEWEST:]) if took else component.switch_seconds


def _sync(sync: WeightSync | None, past: RunHistory) -> tuple[WeightSync | None, str]:
    """The weight sync as measured on shared and on separate GPUs, and a note on what is not known."""
    if sync is None:
        return None, ""
    took: dict[bool, list[float]] = {True: [], False: []}
    for number in sorted(past.plans):
        if past.sync_s.get(number):
            groups = past.plans[number].get("groups", ())
            together = any({sync.source, sync.target} <= set(group["components"]) for group in groups)
            took[together].append(past.sync_s[number])
    if not took[True] and not took[False]:
        return sync, ""
    known = {together: median(times[-NEWEST:]) for together, times in took.items() if times}
    shared_s = known.get(True, sync.shared_seconds or known.get(False, 0.0))
    separate_s = known.get(False, sync.separate_seconds or known.get(True, 0.0))
    note = ""
    if len(known) == 1:
        here, there = ("shared", "separate") if True in known else ("separate", "shared")
        stated = sync.separate_seconds if True in known else sync.shared_seconds
        note = f"the weight sync was measured on {here} GPUs alone; on {there} ones it is " + (
            "the stated one" if stated else "taken to be the same"
        )
    return replace(sync, shared_seconds=shared_s, separate_seconds=separate_s), note


# ---- notes -----------------------------------------------------------------------------------------------------------


def _what_was_measured(past_costs: Mapping[str, PastComponentCosts], iterations: int, where: str) -> str:
    parts = []
    for name, costs in past_costs.items():
        counts = sorted({stretch.gpus for stretch, _ in costs.points})
        if counts == [0]:
            parts.append(f"{name} on CPUs")
        else:
            text = " and ".join(map(str, counts))
            parts.append(f"{name} on {text} GPU{'s' * (counts != [1])}")
    return f"costs are those of {iterations} iterations of the run in {where}: {', '.join(parts)}"


def _last_placement(past: RunHistory, job: PlacementJob, folder: Path) -> CurrentPlacement | None:
    """Placement of the run's last plan, if the cluster still has those GPUs."""
    facts: Mapping[str, Any] = past.plans.get(past.iterations[-1].number, {})
    ranks = {
        name: ranks_of(str(group["gpus"]), job.cluster.gpus, str(folder))
        for group in facts.get("groups", ())
        for name in group["components"]
    }
    if not ranks or max(max(gpus, default=0) for gpus in ranks.values()) >= job.cluster.gpus:
        return None
    return CurrentPlacement(ranks, f"the last plan of the run in {folder}")
