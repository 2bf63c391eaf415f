"""Reads and writes profiles: measured costs of a run as a YAML file that can be read and edited.

Reading checks everything and names the wrong key; writing is atomic. A profile keeps times as measured: times that
contain waiting stay in the file with a mark, and its readers refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError
from trimtab.formats import files, yaml_text
from trimtab.formats.run_section import unknown_key
from trimtab.model.profile import ComponentProfile, Profile

TOP_KEYS = ("source", "notes", "components")
COMPONENT_KEYS = (
    "seconds",
    "kind",
    "spread",
    "drift",
    "steps",
    "completion",
    "seconds_per_1k_tokens",
    "waits",
)


def read(path: Path) -> Profile:
    return from_data(yaml_text.read_mapping(path), str(path))


def from_data(data: Mapping[Any, Any], name: str) -> Profile:
    """A profile from plain data; `name` is used in errors."""
    where = f"{name}: profile"
    if "profile" not in data:
        hint = "a profile file starts with `profile:`; `trimtab profile logs FILE --output profile.yaml` writes one"
        raise InputError("this file holds no profile", where=name, hint=hint)
    _known(data, ("profile",), name)
    body = _mapping(data["profile"], where)
    _known(body, TOP_KEYS, where)
    components = _mapping(body.get("components"), f"{where}.components")
    if not components:
        raise InputError("a profile needs at least one component", where=f"{where}.components")
    source = body.get("source", "")
    notes = body.get("notes") or []
    if not isinstance(source, str):
        raise InputError("the source of a profile is a word", where=f"{where}.source")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise InputError("notes are a list of sentences", where=f"{where}.notes")
    return Profile(
        source=source,
        notes=tuple(notes),
        components=tuple(_component(key, value, f"{where}.components") for key, value in components.items()),
    )


def as_data(profile: Profile) -> dict[str, Any]:
    """The profile as plain data in the file's format; unmeasured fields are left out."""
    body: dict[str, Any] = {"source": profile.source}
    if profile.notes:
        body["notes"] = list(profile.notes)
    body["components"] = {component.name: _component_data(component) for component in profile.components}
    return {"profile": body}


def write(profile: Profile, path: Path) -> None:
    files.write_text(path, yaml_text.dump(as_data(profile)))


def merge(profiles: Iterable[Profile]) -> Profile:
    """Merge profiles of runs on different GPU counts.

    Where two runs measured the same count, the one with more steps is kept. Spread and drift are the worst of the runs,
    because a plan is as uncertain as its least certain point.
    """
    runs = list(profiles)
    if not runs:
        raise InputError("there is no profile to merge")
    names = dict.fromkeys(component.name for run in runs for component in run.components)
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    components: list[ComponentProfile] = []
    for name in names:
        parts = [part for run in runs if (part := run.component(name)) is not None]
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            raise InputError(
                f"{name} was measured on different kinds of GPU: {', '.join(sorted(k or 'not named' for k in kinds))}",
                hint="keep one profile per kind",
            )
        points: dict[int, float] = {}
        # The run with the most steps comes last and wins.
        for part in sorted(parts, key=lambda part: part.steps):
            for gpus, seconds in part.seconds:
                if gpus in points and not math.isclose(points[gpus], seconds, rel_tol=1e-9):
                    notes[f"{name} on {gpus} GPUs was measured more than once; the run with more steps is kept"] = None
                points[gpus] = seconds
        longest = max(parts, key=lambda part: part.steps)
        with_curve = [part for part in parts if part.completion]
        drifts = [part.drift for part in parts if part.drift is not None]
        components.append(
            ComponentProfile(
                name=name,
                seconds=tuple(sorted(points.items())),
                kind=longest.kind,
                spread=max((part.spread for part in parts if part.spread is not None), default=None),
                drift=max(drifts, key=abs) if drifts else None,
                steps=sum(part.steps for part in parts),
                completion=max(with_curve, key=lambda part: part.steps).completion if with_curve else (),
                seconds_per_1k_tokens=longest.seconds_per_1k_tokens,
                waits=any(part.waits for part in parts),
            )
        )
    sources = dict.fromkeys(run.source for run in runs)
    return Profile(source="+".join(sources), components=tuple(components), notes=tuple(notes))


def _component_data(component: ComponentProfile) -> dict[str, Any]:
    data: dict[str, Any] = {"seconds": {gpus: _short(seconds) for gpus, seconds in component.seconds}}
    if component.kind:
        data["kind"] = component.kind
    for key in ("spread", "drift"):
        value = getattr(component, key)
        if value is not None:
            data[key] = round(value, 4)
    if component.steps:
        data["steps"] = component.steps
    if component.completion:
        data["completion"] = [[_short(done), _short(time)] for done, time in component.completion]
    if component.seconds_per_1k_tokens is not None:
        data["seconds_per_1k_tokens"] = _short(component.seconds_per_1k_tokens)
    if component.waits:
        data["waits"] = True
    return data


def _component(name: Any, data: Any, parent: str) -> ComponentProfile:
    where = f"{parent}.{name}"
    if not isinstance(name, str) or not name:
        raise InputError(f"a component's name is a word, this one is {name!r}", where=parent, hint="quote it")
    body = _mapping(data, where)
    _known(body, COMPONENT_KEYS, where)
    if "seconds" not in body:
        raise InputError("a component needs its measured seconds", where=where, hint="seconds: {8: 59.9}")
    kind = body.get("kind", "")
    if not isinstance(kind, str):
        raise InputError("the kind of GPU is a word", where=f"{where}.kind")
    waits = body.get("waits", False)
    if not isinstance(waits, bool):
        raise InputError("waits is true or false", where=f"{where}.waits")
    steps = body.get("steps", 0)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        raise InputError("steps is a whole number, 0 or more", where=f"{where}.steps")
    spread = _optional(body, "spread", where)
    if spread is not None and spread < 0:
        raise InputError("spread cannot be negative", where=f"{where}.spread")
    drift = _optional(body, "drift", where)
    if drift is not None and drift < -1:
        raise InputError("drift is a relative change and cannot be below -1", where=f"{where}.drift")
    per_token = _optional(body, "seconds_per_1k_tokens", where)
    if per_token is not None and per_token <= 0:
        raise InputError("seconds per 1,000 tokens must be more than 0", where=f"{where}.seconds_per_1k_tokens")
    return ComponentProfile(
        name=name,
        seconds=_points(body["seconds"], f"{where}.seconds"),
        kind=kind,
        spread=spread,
        drift=drift,
        steps=steps,
        completion=_completion(body.get("completion"), f"{where}.completion"),
        seconds_per_1k_tokens=per_token,
        waits=waits,
    )


def _points(data: Any, where: str) -> tuple[tuple[int, float], ...]:
    points: dict[int, float] = {}
    for key, value in _mapping(data, where).items():
        gpus = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
            raise InputError(f"a number of GPUs is 1 or more, not {key!r}", where=where, hint="seconds: {8: 59.9}")
        if gpus in points:
            raise InputError(f"{gpus} GPUs are stated twice", where=where)
        seconds = _number(value, f"{where}.{key}")
        if seconds <= 0:
            raise InputError(f"seconds must be more than 0, not {value}", where=f"{where}.{key}")
        points[gpus] = seconds
    if not points:
        raise InputError("at least one measured point is needed", where=where, hint="seconds: {8: 59.9}")
    return tuple(sorted(points.items()))


def _completion(data: Any, where: str) -> tuple[tuple[float, float], ...]:
    if data is None or data == []:
        return ()
    hint = "pairs [share of batches done, share of time] that never fall and end in [1, 1]"
    if not isinstance(data, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in data):
        raise InputError("completion is a list of pairs", where=where, hint=hint)
    points = [(_number(done, where), _number(time, where)) for done, time in data]
    before = (0.0, 0.0)
    for position, point in enumerate(points):
        first = position == 0 and point == (0.0, 0.0)
        if not first and (point[0] <= before[0] or point[1] < before[1]):
            raise InputError(f"completion falls or stands still at point {position + 1}", where=where, hint=hint)
        before = point
    if before != (1.0, 1.0):
        raise InputError(f"completion ends in [{before[0]:g}, {before[1]:g}]", where=where, hint=hint)
    return tuple(points)


def _known(data: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in known:
            raise unknown_key(key, known, where)


def _mapping(data: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise InputError(f"keys with values are expected here, not {found}", where=where)
    return data


def _optional(body: Mapping[Any, Any], key: str, where: str) -> float | None:
    return None if body.get(key) is None else _number(body[key], f"{where}.{key}")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"a number is expected, not {value!r:.60}", where=where)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError("a finite number is expected", where=where)
    return number


def _short(value: float) -> float:
    return float(f"{value:.6g}")
