"""Job files to run: trimtab's own format, with the code of each component and the length of the run.

    workflow:
      components:
        rollout:
          use: package.module:Class      # or emulate: true, or emulate: {seconds: {8: 20.0}, noise: 0.07, ...}
          settings: {temperature: 1.0}   # constructor arguments, beside its place
    run: {iterations: 60, seed: 0, save_every: 10, step_limit_s: 600}

With both `use` and `emulate` the code is real and its steps last as long as emulated ones. Missing costs are measured.
Everything else is read and checked by `formats/job.py` and `formats/run_section.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import job as job_form
from trimtab.formats import yaml_text
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.run_section import mode_of, read_section, unknown_key, whole
from trimtab.runtime.run.emulated import Disturbance
from trimtab.runtime.run.job import UNMEASURED_S, ComponentCode, RunJob

PART_KEYS = ("use", "settings", "emulate")
EMULATE_KEYS = ("seconds", "noise", "step_noise", "factors", "tail", "drift")
MAX_DEPTH = 50  # nesting levels


def load_run(path: Path, **overrides: Any) -> RunJob:
    """Read a job file to run. `overrides` (iterations, seed, mode of the loop) win over its `run` section."""
    return read_run_job(yaml_text.read_mapping(path), path, **overrides)


def read_run_job(config: Mapping[str, Any], path: Path, **overrides: Any) -> RunJob:
    """A job to run from parsed data; InputError names the key at fault."""
    config = _with(config, {key: value for key, value in overrides.items() if value is not None})
    loaded, parts, unmeasured = read_costed(config, path)
    run = read_section(config.get("run"), path, loaded.job.workflow.names)
    near = run.modules_from or path.resolve().parent
    given = {key: value for key, value in vars(run).items() if key != "modules_from"}
    text = job_text(config, path, near)
    return RunJob(loaded.job, parts, **given, unmeasured=unmeasured, near=near, name=str(path), text=text)


def read_costed(config: Mapping[str, Any], path: Path) -> tuple[LoadedJob, dict[str, ComponentCode], frozenset[str]]:
    """The planner's job, the code of its components, and the components whose costs are placeholders."""
    data = dict(config)
    workflow = data.get("workflow")
    sections = workflow.get("components") if isinstance(workflow, Mapping) else None
    parts: dict[str, ComponentCode] = {}
    unmeasured = set()
    if isinstance(workflow, Mapping) and isinstance(sections, Mapping):
        costed = {}
        for component, section in sections.items():
            costed[component] = section
            if not isinstance(section, Mapping):
                continue
            part = _part(section, f"{path}: workflow.components.{component}")
            if part is not None:
                parts[component] = part
            kept = {key: value for key, value in section.items() if key not in PART_KEYS}
            if "seconds" not in kept and "variants" not in kept:
                if part is not None and part.paced and part.curve is None:
                    where = f"{path}: workflow.components.{component}"
                    raise InputError(f"{component} is emulated and has no costs", where=where, hint="add its `seconds`")
                unmeasured.add(component)
                kept["seconds"] = UNMEASURED_S if kept.get("device") == "cpu" else {1: UNMEASURED_S}
            costed[component] = kept
        data["workflow"] = {**workflow, "components": costed}
    return job_form.read(data, path), parts, frozenset(unmeasured)


def _with(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The data with overrides applied to its `run` section."""
    if not overrides:
        return dict(config)
    run = config.get("run")
    if run is not None and not isinstance(run, Mapping):
        return dict(config)  # refused when it is read
    section = dict(run or {})
    for key, value in overrides.items():
        where = f"command line: --{key}"
        if key == "mode":
            loop = section.get("loop") or {}
            section["loop"] = {**loop, "mode": mode_of(value, where).value} if isinstance(loop, Mapping) else loop
        else:
            section[key] = whole(value, key, where)
    return {**config, "run": section}


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
    given = _identity(now)
    for what, then in _identity(before).items():  # the components come first
        if then != given.get(what):
            change = f"{_shown(then)}, and {'are' if what.endswith(' were') else 'is'} {_shown(given[what])} now"
            raise InputError(
                f"the run in this folder is of another job: {what} {change}",
                where=where,
                hint="leave the job out to go on as before, or name another folder",
            )


def _identity(run: RunJob) -> dict[str, Any]:
    workflow, sync = run.job.workflow, run.job.workflow.weight_sync
    facts: dict[str, Any] = {"the components were": list(workflow.names)}
    for component in workflow.components:
        name, part = component.name, run.parts[component.name]
        facts |= {
            f"{name}.after was": list(component.after),
            f"{name}.granularity was": component.granularity or "all",
            f"{name}.device was": "cpu" if component.on_cpu else "gpu",
            f"{name}.use was": part.use,
            f"{name}.settings was": dict(part.settings),
            f"{name}.emulate was": (part.use is None or part.paced, part.curve, part.disturbance),
        }
    return facts | {
        "batches was": workflow.batches,
        "staleness was": workflow.staleness,
        "weight_sync was": f"{sync.source} to {sync.target}" if sync is not None else None,
        "run.seed was": run.seed,
    }


def _shown(value: Any) -> str:
    text = str(value) if value is not None else "nothing"
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---- components ------------------------------------------------------------------------------------------------------


def _part(section: Mapping[str, Any], where: str) -> ComponentCode | None:
    use, settings, emulate = (section.get(key) for key in PART_KEYS)
    if use is not None and not isinstance(use, str):
        raise InputError("use names a class", where=f"{where}.use", hint="write package.module:Class")
    if settings is not None and not (isinstance(settings, Mapping) and all(isinstance(k, str) for k in settings)):
        raise InputError("settings is a section of keys", where=f"{where}.settings")
    if emulate in (None, False):
        return ComponentCode(use, dict(settings or {})) if use is not None else None
    if emulate is True:
        emulated = ComponentCode()
    elif isinstance(emulate, Mapping):
        emulated = _emulated(emulate, f"{where}.emulate")
    else:
        raise InputError("emulate is true, or a section of keys", where=f"{where}.emulate")
    return replace(emulated, use=use, settings=dict(settings or {}), paced=use is not None)


def _emulated(section: Mapping[str, Any], where: str) -> ComponentCode:
    for key in section:
        if key not in EMULATE_KEYS:
            raise unknown_key(key, EMULATE_KEYS, f"{where}.{key}")
    curve = section.get("seconds")
    if curve is not None and not (
        isinstance(curve, Mapping) and curve and all(_is_count(g) and _is_number(s) for g, s in curve.items())
    ):
        raise InputError("measured points {gpus: seconds} are expected", where=f"{where}.seconds")
    tail = _sub(section, "tail", ("share", "factor"), where)
    drift = _sub(section, "drift", ("to", "over", "from"), where)
    factors = section.get("factors")
    given = {
        "noise": section.get("noise"),
        "step_noise": section.get("step_noise"),
        **{f"tail_{key}": value for key, value in tail.items()},
        **{f"drift_{key}": value for key, value in drift.items()},
    }
    stated = {key: value for key, value in given.items() if value is not None}
    for key, value in stated.items():
        if not _is_number(value):
            raise InputError(f"{key} is a number", where=where)
    if factors is not None:
        if not isinstance(factors, list) or not factors or not all(_is_number(factor) for factor in factors):
            raise InputError("factors is a list of numbers", where=f"{where}.factors")
        stated["factors"] = tuple(float(factor) for factor in factors)
    try:
        disturbance = Disturbance(**stated)
    except InputError as error:
        raise InputError(error.what, where=where) from None
    return ComponentCode(curve=dict(curve) if curve else None, disturbance=disturbance)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= abs(value) < 1e9


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sub(section: Mapping[str, Any], key: str, known: tuple[str, ...], where: str) -> dict[str, Any]:
    value = section.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{key} is a section of {', '.join(known)}", where=f"{where}.{key}")
    for name in value:
        if name not in known:
            raise unknown_key(name, known, f"{where}.{key}.{name}")
    return dict(value)
