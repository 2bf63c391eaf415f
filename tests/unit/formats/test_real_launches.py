"""Launches in the forms that public repositories have are read as they are meant, and plans for them are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dialect_plans import DATA
from real_launches import read
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats import write_back
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.launch.launch import Launch
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

READ = ("areal", "roll", "trl", "slime", "skyrl", "prime_rl", "rlinf")
CASES = [
    pytest.param(name, case, id=f"{name}-{at}")
    for name in READ
    for at, case in enumerate(yaml.safe_load((DATA / "real" / name / "launches.yaml").read_text()))
]


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
