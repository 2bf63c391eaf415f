"""Job files to run: trimtab's own form, with the code of each component and the length of the run.

    workflow:
      components:
        rollout:
          use: package.module:Class      # or emulate: true, or emulate: {seconds: {8: 20.0}, noise: 0.07, ...}
          settings: {temperature: 1.0}   # what the class is made with, beside its place
    run: {iterations: 60, seed: 0, save_every: 10, step_limit_s: 600}

Costs may be missing: they are measured then. Everything else is read, and refused, by `formats/job.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.formats import job as job_form
from trimtab.formats import yaml_text
from trimtab.model.errors import InputError, nearest
from trimtab.runtime.run.emulated import Disturbance
from trimtab.runtime.run.job import UNMEASURED_S, Part, RunJob

RUN_KEYS = {"iterations": int, "seed": int, "save_every": int, "step_limit_s": float, "profile_iterations": int}
PART_KEYS = ("use", "settings", "emulate")
EMULATE_KEYS = ("seconds", "noise", "step_noise", "factors", "tail", "drift")


def load_run(path: Path, **overrides: Any) -> RunJob:
    """Read a job file to run. `overrides` (iterations, seed ...) win over its `run` section."""
    return read_run_job(yaml_text.read_mapping(path), path, **overrides)


def read_run_job(config: Mapping[str, Any], path: Path, **overrides: Any) -> RunJob:
    """A job to run from the data of a file; InputError names the key that is wrong."""
    name = str(path)
    data = {key: value for key, value in config.items() if key != "run"}
    run = _run_section(config.get("run"), name)
    run.update({key: value for key, value in overrides.items() if value is not None})
    workflow = data.get("workflow")
    sections = workflow.get("components") if isinstance(workflow, Mapping) else None
    parts: dict[str, Part] = {}
    unmeasured = set()
    if isinstance(workflow, Mapping) and isinstance(sections, Mapping):
        costed = {}
        for component, section in sections.items():
            costed[component] = section
            if not isinstance(section, Mapping):
                continue
            where = f"{name}: workflow.components.{component}"
            part = _part(section, where)
            if part is not None:
                parts[component] = part
            kept = {key: value for key, value in section.items() if key not in PART_KEYS}
            if "seconds" not in kept and "variants" not in kept:
                unmeasured.add(component)
                kept["seconds"] = UNMEASURED_S if kept.get("device") == "cpu" else {1: UNMEASURED_S}
            costed[component] = kept
        data["workflow"] = {**workflow, "components": costed}
    loaded = job_form.read(data, path)
    return RunJob(
        job=loaded.job,
        parts=parts,
        unmeasured=frozenset(unmeasured),
        near=path.resolve().parent,
        name=name,
        **run,
    )


def _run_section(section: Any, name: str) -> dict[str, Any]:
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise InputError("run is a section of keys", where=f"{name}: run", hint="run: {iterations: 60}")
    run: dict[str, Any] = {}
    for key, value in section.items():
        kind = RUN_KEYS.get(key)
        where = f"{name}: run.{key}"
        if kind is None:
            raise _unknown(key, RUN_KEYS, where)
        fits = isinstance(value, int | float) if kind is float else isinstance(value, int)
        if isinstance(value, bool) or not fits:
            raise InputError(f"{key} is not right: {value!r}"[:120], where=where, hint="a number is expected")
        run[key] = kind(value)
    return run


def _part(section: Mapping[str, Any], where: str) -> Part | None:
    use, settings, emulate = (section.get(key) for key in PART_KEYS)
    if emulate in (None, False):
        if use is None:
            return None
        if not isinstance(use, str):
            raise InputError("use names a class", where=f"{where}.use", hint="write package.module:Class")
        if settings is not None and not (isinstance(settings, Mapping) and all(isinstance(k, str) for k in settings)):
            raise InputError("settings is a section of keys", where=f"{where}.settings")
        return Part(use, dict(settings or {}))
    if emulate is True:
        return Part()
    if not isinstance(emulate, Mapping):
        raise InputError("emulate is true, or a section of keys", where=f"{where}.emulate")
    return _emulated(emulate, f"{where}.emulate")


def _emulated(section: Mapping[str, Any], where: str) -> Part:
    for key in section:
        if key not in EMULATE_KEYS:
            raise _unknown(key, EMULATE_KEYS, f"{where}.{key}")
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
        if not isinstance(factors, list) or not factors or not all(_is_number(one) for one in factors):
            raise InputError("factors is a list of numbers", where=f"{where}.factors")
        stated["factors"] = tuple(float(one) for one in factors)
    try:
        disturbance = Disturbance(**stated)
    except InputError as error:
        raise InputError(error.what, where=where) from None
    return Part(curve=dict(curve) if curve else None, disturbance=disturbance)


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
    for one in value:
        if one not in known:
            raise _unknown(one, known, f"{where}.{key}.{one}")
    return dict(value)


def _unknown(key: Any, known: Any, where: str) -> InputError:
    near = nearest(str(key), known)
    return InputError(
        f"unknown key {key}",
        where=where,
        hint=f"did you mean {near}?" if near else f"known keys here: {', '.join(known)}",
    )
