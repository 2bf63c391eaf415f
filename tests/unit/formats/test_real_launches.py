"""Launches in the forms that public repositories have are read as they are meant, and plans for them are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dialect_plans import DATA
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.launch.launch import Launch
from trimtab.formats.load import load
from trimtab.formats.loaded import LoadedJob
from trimtab.model.workflow import ComponentProfile, Profile
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

READ = ("areal", "roll", "trl", "slime", "skyrl", "prime_rl", "rlinf")
CASES = [
    pytest.param(name, case, id=f"{name}-{at}")
    for name in READ
    for at, case in enumerate(yaml.safe_load((DATA / "real" / name / "launches.yaml").read_text()))
]


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


def test_there_are_twenty_of_each_framework() -> None:
    assert all(sum(case.values[0] == name for case in CASES) >= 20 for name in READ)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_launch_is_read_as_it_is_meant_and_its_plan_is_no_slower(
    name: str, case: dict[str, Any], tmp_path: Path
) -> None:
    kind = FRAMEWORKS[name]
    if "refused" in case:
        with pytest.raises((InputError, InfeasibleError), match=case["refused"]):
            read(kind, case, tmp_path)
        return
    loaded, says = read(kind, case, tmp_path), case["reads"]
    assert loaded.file_format == name
    assert loaded.current is not None
    ranks = loaded.current.ranks
    assert {component: len(gpus) for component, gpus in ranks.items()} == says["gpus"]
    assert len({*ranks["rollout"]} & {*ranks[kind.REQUIRED[1]]}) == says["shared"]
    assert (loaded.job.workflow.batches, loaded.job.workflow.staleness) == (says["batch"], says["staleness"])
    assert loaded.job.cluster.gpus == says["cluster"]
    space, outcome = best_plan(loaded.job, loaded.rules)
    assert outcome.best is not None
    best = to_plan(space, outcome.best)
    own = current_plan(space, loaded.current, outcome.best).plan
    assert own is not None
    assert best.iteration_seconds <= own.iteration_seconds * (1 + 1e-9)
    again = read(FRAMEWORKS[name], case, tmp_path, tuple(write_back.overrides(loaded.settings(best))))
    assert again.current is not None
    planned = {placed.name: len(placed.gpus) for placed in best.components if placed.gpus}
    assert {component: len(gpus) for component, gpus in again.current.ranks.items()} == planned
    assert again.job.workflow.batches == loaded.job.workflow.batches
    assert again.job.workflow.staleness == loaded.job.workflow.staleness


@pytest.mark.parametrize("name", READ)
def test_other_programs_are_nobodys_launch(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("a: 1\n")
    for program, arguments in (
        (("python", "train.py"), ("--config", "other.yaml", "a=1")),
        (("python", "train.py"), ()),
        (("bash",), ("-c", "true")),
        ((), ()),
    ):
        assert FRAMEWORKS[name].launched(Launch(program, arguments, {}, tmp_path)) is None
