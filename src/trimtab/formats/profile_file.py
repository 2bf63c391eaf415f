"""Reads and writes profiles: measured costs of a run as a YAML file that can be read and edited.

Reading checks everything and names the wrong key; writing is atomic. A profile keeps times as measured: times that
contain waiting stay in the file with a mark, and its readers refuse them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trimtab.core.errors import InputError
from trimtab.formats import files, sections, yaml_text
from trimtab.formats.sections import Completion, FieldsOf, Gpus, Made, Measured, Section, Text, Within
from trimtab.formats.yaml_text import Source
from trimtab.model.workflow import ComponentProfile, Profile

Points = Annotated[dict[Gpus, Annotated[float, Within(1e-12, 1e9)]], Measured]
COMPONENT = FieldsOf(
    ComponentProfile,
    elsewhere={"name": ("is the key of the component", "")},
    types={
        "seconds": Annotated[tuple[Any, ...], Made(Points, lambda points: tuple(sorted(points.items())))],
        "completion": Annotated[tuple[Any, ...], Made(Completion | None, lambda points: tuple(points or ()))],
    },
)


class ProfileSection(Section):
    """The `profile` section."""

    source: str = ""
    notes: tuple[str, ...] | None = None
    components: Annotated[dict[Text, Annotated[dict[str, Any], COMPONENT]], Field(min_length=1)]


class ProfileFile(Section):
    """A profile file."""

    profile: ProfileSection


def read(path: Path) -> Profile:
    source, data = yaml_text.read_source(path)
    return from_data(data, source.name, source.text)


def from_data(data: Any, name: str, text: str = "") -> Profile:
    """A profile from plain data; `name` is used in errors."""
    if not isinstance(data, Mapping) or "profile" not in data:
        hint = "a profile file starts with `profile:`; `trimtab profile logs FILE --output profile.yaml` writes one"
        raise InputError("this file holds no profile", where=name, hint=hint)
    section = sections.read(ProfileFile, data, Source(name, text)).profile
    components = tuple(ComponentProfile(key, **stated) for key, stated in section.components.items())
    return Profile(section.source, components, section.notes or ())


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
    data = {
        "seconds": {gpus: _short(seconds) for gpus, seconds in component.seconds},
        "kind": component.kind or None,
        "spread": None if component.spread is None else round(component.spread, 4),
        "drift": None if component.drift is None else round(component.drift, 4),
        "steps": component.steps or None,
        "completion": [[_short(done), _short(time)] for done, time in component.completion] or None,
        "seconds_per_1k_tokens": component.seconds_per_1k_tokens and _short(component.seconds_per_1k_tokens),
        "waits": component.waits or None,
    }
    return {key: value for key, value in data.items() if value is not None}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
