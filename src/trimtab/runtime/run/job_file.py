"""A job to run, read from a job file:

    workflow:
      components:
        rollout:
          use: package.module:Class      # or emulate: true, or emulate: {seconds: {8: 20.0}, noise: 0.07, ...}
          settings: {temperature: 1.0}   # constructor arguments, beside its place
    run: {iterations: 60, seed: 0, save_every: 10, step_limit_s: 600}

With both `use` and `emulate` the code is real and its steps last as long as emulated ones. Missing costs are measured.
Everything else is read and checked by `formats/job.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import job as job_form
from trimtab.formats import sections, yaml_text
from trimtab.formats.job import RunSection
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.yaml_text import Source
from trimtab.runtime.run.emulated import Disturbance
from trimtab.runtime.run.job import UNMEASURED_S, ComponentCode, RunJob

MAX_DEPTH = 50  # nesting levels


def load_run(path: Path, overrides: Sequence[str] = (), **settings: Any) -> RunJob:
    """Read a job file to run, with `key=value` overrides; `settings` (iterations, seed, mode of the loop) win."""
    config = yaml_text.overridden(yaml_text.read_mapping(path), overrides)
    return read_run_job(config, path, "" if overrides else yaml_text.read_text(path), **settings)


def read_run_job(config: Mapping[str, Any], path: Path, text: str = "", **overrides: Any) -> RunJob:
    """A job to run from parsed data; InputError names the key at fault, and its line in the text."""
    config = _with(config, {key: value for key, value in overrides.items() if value is not None})
    loaded, run, parts, unmeasured = read_costed(config, path, text)
    near = path.resolve().parent / (run.modules_from or "")
    return RunJob(
        job=loaded.job,
        parts=parts,
        unmeasured=unmeasured,
        near=near,
        name=str(path),
        rules=run.rules,
        text=job_text(config, path, near),
        **run.model_dump(exclude={"modules_from", "loop"}),
    )


def read_costed(
    config: Mapping[str, Any], path: Path, text: str = ""
) -> tuple[LoadedJob, RunSection, dict[str, ComponentCode], frozenset[str]]:
    """The planner's job, how to run it, the code of its components, and those whose costs are placeholders."""
    source = Source(str(path), text)
    file = job_form.parsed(config, source)
    parts: dict[str, ComponentCode] = {}
    unmeasured = set()
    costed = {}
    for component, section in file.workflow.components.items():
        keys = ("workflow", "components", component)
        with source.located(*keys, "emulate"):
            part = _part(section)
        if part is not None:
            parts[component] = part
        if section.seconds is None and section.variants is None:
            if part is not None and part.paced and part.curve is None:
                raise source.error(f"{component} is emulated and has no costs", *keys, hint="add its `seconds`")
            unmeasured.add(component)
            seconds = UNMEASURED_S if section.device == "cpu" else {1: UNMEASURED_S}
            section = section.model_copy(update={"seconds": seconds})
        costed[component] = section
    workflow = file.workflow.model_copy(update={"components": costed})
    with source.located():
        loaded = job_form.loaded(file.model_copy(update={"workflow": workflow}), path)
    return loaded, file.run, parts, frozenset(unmeasured)


def _with(config: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The data with overrides applied to its `run` section."""
    run = config.get("run") or {}
    if not overrides or not isinstance(run, Mapping):
        return dict(config)
    if "mode" in overrides:
        overrides["loop"] = {"mode": overrides.pop("mode")}
    sections.read(RunSection, overrides, Source("command line"))
    if isinstance(loop := run.get("loop") or {}, Mapping):
        overrides["loop"] = {**loop, **overrides.get("loop", {})}
    return {**config, "run": {**run, **overrides}}


def job_text(config: Mapping[str, Any], path: Path, near: Path) -> str:
    """The job as kept in the run folder, from which it can be run again."""
    section = config.get("run")
    run = {**(section if isinstance(section, Mapping) else {}), "modules_from": str(near)}
    data = plain_data({**config, "run": run}, str(path))
    return f"# The job of this run, from {path.name}.\n{yaml_text.dump(data)}"


def plain_data(data: Any, where: str, level: int = 0) -> Any:
    """Data that a file can hold; InputError names what it cannot."""
    if level > MAX_DEPTH:
        raise InputError("this is nested too deeply", where=where)
    if data is None or isinstance(data, bool | datetime.date):
        return data
    for kind in (int, float, str):
        if isinstance(data, kind):
            return kind(data)  # numpy scalars and the like
    if isinstance(data, Mapping):
        for key in data:
            if not isinstance(key, str | int | float):
                raise InputError(f"a key is a {type(key).__name__}: text or a number is expected", where=where)
        return {key: plain_data(value, f"{where}.{key}", level + 1) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain_data(value, f"{where}[{at}]", level + 1) for at, value in enumerate(data)]
    raise InputError(
        f"this is a {type(data).__name__}, which a job file cannot hold",
        where=where,
        hint="settings are plain data: numbers, texts, lists and sections of them",
    )


# ---- the same job again ----------------------------------------------------------------------------------------------


def check_same(before: RunJob, now: RunJob, where: str) -> None:
    """Raise InputError if a run cannot be resumed as another job, and say what differs.

    Components, their order, code and settings, batches, weights and seed must be equal. Costs, nodes, length,
    checkpoints and the rules of the loop may differ.
    """
    facts = _identity(now)
    for what, then in _identity(before).items():  # the components come first: the others depend on them
        if then != facts[what]:
            was, now_is = ("were", "are") if what == "the components" else ("was", "is")
            raise InputError(
                f"the run in this folder is of another job: {what} {was} {_shown(then)}, and {now_is} "
                f"{_shown(facts[what])} now",
                where=where,
                hint="leave the job out to go on as before, or name another folder",
            )


def _identity(run: RunJob) -> dict[str, Any]:
    """What must be equal when a run is resumed."""
    workflow, sync = run.job.workflow, run.job.workflow.weight_sync
    facts: dict[str, Any] = {"the components": list(workflow.names)}
    for component in workflow.components:
        name, part = component.name, run.parts[component.name]
        facts[f"{name}.after"] = list(component.after)
        facts[f"{name}.granularity"] = component.granularity or "all"
        facts[f"{name}.device"] = "cpu" if component.on_cpu else "gpu"
        facts[f"{name}.use"] = part.use
        facts[f"{name}.settings"] = dict(part.settings)
        facts[f"{name}.emulate"] = (part.use is None or part.paced, part.curve, part.disturbance)
    facts["batches"], facts["staleness"] = workflow.batches, workflow.staleness
    facts["weight_sync"] = f"{sync.source} to {sync.target}" if sync is not None else None
    return {**facts, "run.seed": run.seed}


def _shown(value: Any) -> str:
    text = str(value) if value is not None else "nothing"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _part(section: job_form.ComponentSection) -> ComponentCode | None:
    emulate, settings = section.emulate, dict(section.settings or {})
    if emulate is None or emulate is False:
        return ComponentCode(section.use, settings) if section.use is not None else None
    emulate = job_form.EmulateSection() if emulate is True else emulate
    disturbance = Disturbance(
        noise=emulate.noise,
        step_noise=emulate.step_noise,
        factors=tuple(emulate.factors or ()),
        tail_share=emulate.tail.share,
        tail_factor=emulate.tail.factor,
        drift_to=emulate.drift.to,
        drift_over=emulate.drift.over,
        drift_from=emulate.drift.begin,
    )
    return ComponentCode(section.use, settings, emulate.seconds, disturbance, paced=section.use is not None)
