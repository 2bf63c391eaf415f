"""A job whose components have estimated seconds where none are measured or stated, with memory and weight sync.

The estimate's stages become the components of the job file or of the framework, at GPU counts that its parallelism
divides. What was measured stays; on counts where it was not measured it scales as the estimate does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats import run_settings
from trimtab.formats.frameworks.run_inputs import inputs_of
from trimtab.formats.load import OpenedFile
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.run_settings import Settings
from trimtab.model.workflow import Cluster, Component, ComponentProfile, GpuCurve, Memory, Profile
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.measured import STAGES, on_gpus
from trimtab.plan.estimate.phases import context_gb, phases
from trimtab.plan.estimate.step import RunInputs, refit_seconds, step_time

PHASES = {"generate": "generate", "update": "update", "critic update": "update"}
"""The phase whose memory a stage takes; log-probs otherwise."""


class EstimatedJob(Frozen):
    """A job with its estimated components; `widths` are the factors by which they may be off, by what errs together."""

    loaded: LoadedJob
    settings: Settings
    widths: tuple[Mapping[str, float], ...]
    notes: tuple[str, ...]


def load_estimated(
    path: Path, overrides: Sequence[str], profile: Profile | None, given: Mapping[str, Any], c: Constants
) -> EstimatedJob:
    """A job file or framework config with estimates for what neither it nor the profile states."""
    return with_estimates(OpenedFile(path, overrides), profile, given, c)


def with_estimates(file: OpenedFile, profile: Profile | None, given: Mapping[str, Any], c: Constants) -> EstimatedJob:
    """The same of a file that is open already."""
    settings, kind = run_settings.build(run_settings.merged(inputs_of(file), given)), file.framework
    names = STAGES if kind is None else (*kind.REQUIRED, *getattr(kind, "COMPONENTS", STAGES))
    known = tuple(_scaled(part, settings, c) for part in profile.components) if profile else ()
    guesses = _components(settings, names, {part.name for part in known}, c, together=kind is not None)
    stated = _stated_costs(file) if kind is not None else {}
    measured = [part.name for part in guesses if STAGES[part.name] in stated]
    guesses = [
        _scaled(replace(part, seconds=stated[STAGES[part.name]]), settings, c) if part.name in measured else part
        for part in guesses
    ]
    merged = Profile(profile.source if profile else "estimate", (*known, *guesses), profile.notes if profile else ())
    loaded = file.load(merged)
    stages = {part.name: STAGES[part.name] for part in guesses}
    job, used = loaded.job, []
    components = []
    for part in job.workflow.components:
        guess = next((each for each in guesses if each.name == part.name), None)
        own = guess and any(variant.points("") == guess.seconds for variant in part.variants)
        there = _fitted(part, settings, stages[part.name], c) if own else _scaled_stated(part, settings, c)
        components.append(there)
        used += [part.name] if own and part.name not in measured else []
        measured += [part.name] if not own and there is not part else []
    workflow = replace(job.workflow, components=tuple(components))
    sync = workflow.weight_sync
    if sync is not None and not sync.shared_seconds and not sync.separate_seconds:
        run = settings.run
        shared, apart = (refit_seconds(run.model, run.engine, run.transport, c, shared=each) for each in (True, False))
        workflow = replace(workflow, weight_sync=replace(sync, shared_seconds=shared, separate_seconds=apart))
    cluster = _with_memory(job.cluster, settings.run.gpu.memory_gb)
    width = math.exp(c.stage_error)
    sides = [[n for n in used if (stages[n] == ("generate",)) is first] for first in (True, False)]
    seconds = ", ".join(used)
    before = {part.name: len(part.seconds) for part in profile.components} if profile else {}
    scaled = [part.name for part in known if len(part.seconds) > before[part.name]] + measured
    how = (f"scaling between GPU counts is estimated, the level is measured: {', '.join(scaled)}",) if scaled else ()
    notes = (
        f"estimated, not measured: {seconds}; each may be off by {width:.1f}x either way (`trimtab estimate`)",
        *(f"estimated with {each}" for each in settings.assumed),
    )
    return EstimatedJob(
        replace(loaded, job=replace(job, workflow=workflow, cluster=cluster)),
        settings,
        (
            *(dict.fromkeys(side, width) for side in sides if side),
            *([dict.fromkeys(scaled, math.exp(c.measured_error))] if scaled else []),
        ),
        how + (notes if used else ()),
    )


def _stated_costs(file: OpenedFile) -> dict[tuple[str, ...], tuple[tuple[int, float], ...]]:
    """Costs in the file itself, by stages; empty where it states none."""
    try:
        parts = file.load().job.workflow.components
    except InputError:
        return {}
    return {STAGES[part.name]: part.variants[0].points("") for part in parts if part.variants and part.name in STAGES}


def _scaled_stated(part: Component, settings: Settings, c: Constants) -> Component:
    """The same of a component with a cost in a job file of trimtab's own form; one with a floor states its scaling."""
    if part.on_cpu or any(each.floor_seconds for each in part.variants):
        return part
    variants = tuple(
        replace(
            each,
            seconds={
                kind: _scaled(ComponentProfile(part.name, measured), settings, c).seconds
                for kind, measured in each.seconds.items()
            },
        )
        for each in part.variants
    )
    return part if variants == part.variants else replace(part, variants=variants)


def _scaled(part: ComponentProfile, settings: Settings, c: Constants) -> ComponentProfile:
    """A component that was measured on one GPU count, on the others with the estimate's scaling."""
    run = settings.run
    exist = {stage.name for stage in step_time(run, c).stages}
    stages = tuple(stage for stage in STAGES.get(part.name, ()) if stage in exist)
    if len(part.seconds) != 1 or part.waits or not stages or stages == ("refit",):
        return part
    [(measured_on, seconds)] = part.seconds
    level = seconds / _seconds(run, measured_on, stages, c)
    sizes = counts(_multiple(settings, stages), run.gpus)
    points = {gpus: level * _seconds(run, gpus, stages, c) for gpus in sizes} | {measured_on: seconds}
    return replace(part, seconds=tuple(sorted(points.items())))


def _seconds(run: RunInputs, gpus: int, stages: tuple[str, ...], c: Constants) -> float:
    step = step_time(on_gpus(run, gpus), c)
    return sum(step.stage(stage) for stage in stages)


def counts(multiple: int, most: int) -> list[int]:
    """Multiples up to a limit, closer together where they are small."""
    sizes = {multiple * step * 2**power for step in (1, 3) for power in range(20)}
    return sorted({size for size in sizes if size <= most} | {most // multiple * multiple} - {0})


def _multiple(settings: Settings, stages: tuple[str, ...]) -> int:
    trainer = settings.run.trainer
    if stages == ("generate",):
        return settings.run.engine.tp
    return math.lcm(trainer.tp * trainer.pp * trainer.cp, trainer.pp * trainer.ep)


def _components(
    settings: Settings, names: Iterable[str], known: set[str], c: Constants, *, together: bool
) -> list[ComponentProfile]:
    """Estimated costs of the named components; with `together` each stage is part of one of them only."""
    run = settings.run
    exist = {stage.name for stage in step_time(run, c).stages}
    covered = {stage for name in known for stage in STAGES.get(name, ())} if together else set()
    found = []
    for name in dict.fromkeys(names):
        stages = tuple(stage for stage in STAGES.get(name, ()) if stage in exist)
        if not stages or stages == ("refit",) or name in known or covered & set(stages):
            continue
        if together:
            covered |= set(stages)
        sizes = counts(_multiple(settings, stages), run.gpus)
        found.append(ComponentProfile(name, tuple((gpus, _seconds(run, gpus, stages, c)) for gpus in sizes)))
    return found


def _fitted(part: Component, settings: Settings, stages: tuple[str, ...], c: Constants) -> Component:
    """The component on counts that its parallelism divides, with its memory there and what a switch takes."""
    run = settings.run
    multiple = _multiple(settings, stages)
    sizes = {}
    for gpus in counts(multiple, run.gpus):
        # An engine's memory does not depend on how many there are.
        there = run if stages == ("generate",) else on_gpus(run, gpus)
        found = {phase.name: phase for phase in phases(there, c, settings.offload)[0]}
        phase = found[PHASES.get(stages[0], "log-probs")]
        parked = dict(phase.terms).get("trainer, parked", 0.0)
        sizes[gpus] = (phase.gb - parked, context_gb(run.gpu, c) + (_parked(found) if "update" in stages else 0.0))
    active, resident = (GpuCurve(tuple((gpus, pair[i]) for gpus, pair in sizes.items())) for i in (0, 1))
    variants = tuple(
        replace(
            each,
            multiple_of=math.lcm(each.multiple_of, multiple),
            memory=Memory(active, resident) if each.memory == Memory() else each.memory,
        )
        for each in part.variants
    )
    switch = step_time(run, c).stage("switch") if "update" in stages else 0.0
    return replace(part, variants=variants, switch_seconds=part.switch_seconds or switch)


def _parked(found: Mapping[str, Any]) -> float:
    return float(dict(found["generate"].terms).get("trainer, parked", 0.0))


def _with_memory(cluster: Cluster, memory_gb: float) -> Cluster:
    nodes = (replace(node, gpu_memory_gb=node.gpu_memory_gb or memory_gb) for node in cluster.nodes)
    return Cluster(tuple(nodes))
