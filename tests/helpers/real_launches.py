"""Launches of the corpus (tests/data/real) as their frameworks read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.launch.launch import Launch
from trimtab.formats.load import load
from trimtab.formats.loaded import LoadedJob
from trimtab.model.workflow import ComponentProfile, Profile


def toml_text(data: Mapping[str, Any], section: str = "") -> str:
    own = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items() if not isinstance(value, dict))
    inside = (toml_text(value, f"{section}{key}.") for key, value in data.items() if isinstance(value, dict))
    return (f"[{section.rstrip('.')}]\n" if section else "") + own + "".join(inside)


def started(case: Mapping[str, Any], folder: Path) -> Launch:
    """The launch of a case, with its files in the folder."""
    files = {case["file"]: case["config"]} if "file" in case else case.get("files", {})
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(toml_text(data) if name.endswith(".toml") else yaml.safe_dump(data))
    beside = [Launch(("trl",), ("vllm-serve", *case["beside"]))] if "beside" in case else []
    return Launch(
        tuple(case["program"]),
        tuple(case["arguments"]),
        case.get("environment", {}),
        folder,
        wrapper=tuple(case.get("wrapper", ())),
        beside=tuple(beside),
    )


def profile_for(gpus: Mapping[str, int]) -> Profile:
    points = {name: ((n, 30.0 + 17 * at), (2 * n, 0.6 * (30 + 17 * at))) for at, (name, n) in enumerate(gpus.items())}
    return Profile("corpus", tuple(ComponentProfile(name, found) for name, found in points.items()))


def read(kind: type[FrameworkConfig], case: Mapping[str, Any], folder: Path, more: tuple[str, ...] = ()) -> LoadedJob:
    source = kind.launched(started(case, folder))
    assert source is not None
    config = source.config
    if not isinstance(config, Path):
        (folder / "flags.yaml").write_text(yaml.safe_dump(dict(config)))
        config = folder / "flags.yaml"
    gpus = case["reads"]["gpus"] if "reads" in case else dict.fromkeys(kind.REQUIRED, 1)
    return load(config, (*source.overrides, *more), profile_for(gpus))
