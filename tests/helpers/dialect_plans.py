"""Plans made by hand, and configs written on the spot, for tests of dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.formats.frameworks.hydra_config import ComposedConfig, compose
from trimtab.model.plan import ComponentGroup, PlacedComponent, Plan
from trimtab.model.workflow import ComponentProfile, Profile

DATA = Path(__file__).parents[1] / "data"


def plan_of(groups: Mapping[str, Sequence[int]], total: int = 8) -> Plan:
    """A plan from `{"rollout trainer": ranks}`; only where things lie matters."""
    made = tuple(ComponentGroup(components=tuple(names.split()), gpus=tuple(ranks)) for names, ranks in groups.items())
    placed = tuple(
        PlacedComponent(name=name, gpus=group.gpus, variant="", seconds=1.0, start=0.0, end=1.0, idle_share=0.0)
        for group in made
        for name in group.components
    )
    return Plan(
        groups=made,
        components=placed,
        iteration_seconds=1.0,
        sync_seconds=0.0,
        mode="collocated" if len(made) == 1 else "disaggregated",
        timeline=(),
        timeline_seconds=1.0,
        idle_share=0.0,
        total_gpus=total,
    )


def profile_of(seconds: Mapping[str, Mapping[int, float]], waits: Sequence[str] = ()) -> Profile:
    return Profile(
        source="test",
        components=tuple(
            ComponentProfile(name=name, seconds=tuple(sorted(points.items())), waits=name in waits)
            for name, points in seconds.items()
        ),
    )


def composed(folder: Path, text: str, *overrides: str) -> ComposedConfig:
    path = folder / "job.yaml"
    path.write_text(text)
    return compose(path, overrides)
