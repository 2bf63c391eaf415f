"""Reads the `run` section of a job file: length of the run, checkpoints, and the rules of its loop.

    run:
      iterations: 60
      seed: 0
      save_every: 10            # iterations between two checkpoints
      step_limit_s: 600         # a component call that takes longer counts as hung
      profile_iterations: 4     # measured before planning, where costs are not stated
      priority: 8               # of the job's tasks in the cluster
      modules_from: ../code     # where the components' modules are; default: beside the file and above it
      loop: {mode: auto, dwell_iterations: 5}    # any field of `model.run.ReplanRules`

Every key is checked here, also when a job is only planned, so that a misspelt key is never ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats.files import meant
from trimtab.model.run import ReplanMode, ReplanRules

MINIMUM = {"iterations": 1, "save_every": 1, "profile_iterations": 2}
WHOLE = ("iterations", "seed", "save_every", "profile_iterations")
NUMBERS = ("step_limit_s", "priority")
KEYS = (*WHOLE, *NUMBERS, "modules_from", "loop")
LARGEST = 1e9
MIN_S = 0.001
_DEFAULTS = ReplanRules()
LOOP_KEYS = tuple(field.name for field in fields(ReplanRules))


@dataclass(frozen=True)
class RunSection:
    """The section, with its defaults."""

    iterations: int = 1
    seed: int = 0
    save_every: int = 10
    step_limit_s: float = 600.0
    profile_iterations: int = 4
    priority: float = 8.0
    rules: ReplanRules = _DEFAULTS
    modules_from: Path | None = None


def read_section(section: Any, file: Path, components: Collection[str]) -> RunSection:
    """Read and check the section; InputError names the wrong key."""
    where = f"{file}: run"
    if section is None:
        return RunSection()
    if not isinstance(section, Mapping):
        raise InputError("run is a section of keys", where=where, hint="run: {iterations: 60}")
    stated: dict[str, Any] = {}
    for key, value in section.items():
        at = f"{where}.{key}"
        if key in WHOLE:
            stated[key] = whole(value, str(key), at)
        elif key in NUMBERS:
            stated[key] = _number(value, str(key), at)
        elif key == "modules_from":
            if not isinstance(value, str) or not value:
                raise _invalid(key, value, at, "a folder is expected")
            stated[key] = file.resolve().parent / value
        elif key == "loop":
            stated["rules"] = read_rules(value, at, components)
        else:
            raise unknown_key(key, KEYS, at)
    if not stated.get("step_limit_s", 1.0) >= MIN_S:
        hint = f"from {MIN_S:g} to {LARGEST:g} seconds"
        raise InputError("step_limit_s is more than 0", where=f"{where}.step_limit_s", hint=hint)
    return RunSection(**stated)


def whole(value: Any, key: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST:
        raise _invalid(key, value, where, "a whole number is expected")
    if value < MINIMUM.get(key, value):
        raise InputError(f"{key} is a whole number of {MINIMUM[key]} or more", where=where)
    return value


def read_rules(section: Any, where: str, components: Collection[str]) -> ReplanRules:
    """Read the rules of the loop; defaults are those of `ReplanRules`."""
    if not isinstance(section, Mapping):
        raise InputError("loop is a section of keys", where=where, hint="loop: {mode: auto}")
    stated: dict[str, Any] = {}
    for key, value in section.items():
        at = f"{where}.{key}"
        if key not in LOOP_KEYS:
            raise unknown_key(key, LOOP_KEYS, at)
        if key == "mode":
            stated[key] = mode_of(value, at)
        elif key == "elastic":
            stated[key] = _names(value, at, components)
        elif isinstance(getattr(_DEFAULTS, key), int):
            stated[key] = whole(value, key, at)
        else:
            stated[key] = _number(value, key, at)
    try:
        return ReplanRules(**stated)
    except InputError as error:
        raise InputError(error.what, where=where) from None


def mode_of(value: Any, where: str) -> ReplanMode:
    try:
        return ReplanMode(value)
    except ValueError:
        words = " or ".join(mode.value for mode in ReplanMode)
        raise InputError(f"mode is {words}, not {value!r}"[:120], where=where) from None


def unknown_key(key: Any, known: Collection[str], where: str) -> InputError:
    """The error for an unknown key, with the nearest known one."""
    hint = meant(key, known, f"known keys here: {', '.join(known)}")
    return InputError(f"unknown key {key}", where=where, hint=hint)


def unknown_component(name: object, components: Collection[str], where: str) -> InputError:
    hint = meant(name, components, f"components are: {', '.join(components)}")
    return InputError(f"there is no component named {name}", where=where, hint=hint)


def _names(value: Any, where: str, components: Collection[str]) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list):
        raise _invalid("elastic", value, where, "names of components are expected")
    for name in names:
        if name not in components:
            raise unknown_component(name, components, where)
    return tuple(dict.fromkeys(names))


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise _invalid(key, value, where, "a number is expected")
    return float(value)


def _invalid(key: Any, value: Any, where: str, expected: str) -> InputError:
    return InputError(f"{key} is not right: {value!r}"[:120], where=where, hint=expected)
