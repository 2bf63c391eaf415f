"""The job of `job.yaml`, made in Python: for machines that have numpy and PyTorch and nothing to read YAML with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab import (
    UNMEASURED_S,
    Cluster,
    Component,
    ComponentCode,
    Node,
    PlacementJob,
    RunJob,
    Variant,
    WeightSync,
    Workflow,
)

HOME = "examples.grpo.components"


def grpo(
    backend: str = "numpy",
    *,
    iterations: int = 80,
    seed: int = 0,
    gpus: int = 2,
    batches: int = 4,
    staleness: int = 0,
    digits: int = 16,
    questions: int = 16,
    group: int = 16,
    size: dict[str, Any] | None = None,
    save_every: int = 20,
    rate: float = 4e-3,
) -> RunJob:
    """GRPO on so many GPUs, each component on one of them; its costs are measured in the first iterations."""
    policy: dict[str, Any] = {"backend": backend, "digits": digits, **({"size": size} if size else {})}
    settings: dict[str, dict[str, Any]] = {
        "rollout": {**policy, "questions": questions, "group": group},
        "reward": {},
        "reference": policy,
        "trainer": {**policy, "group": group, "rate": rate},
    }
    # One GPU each, and not measured yet.
    on_one = (Variant(seconds={"": ((1, UNMEASURED_S),)}, gpus=(1,)),)
    workflow = Workflow(
        components=(
            Component("rollout", on_one),
            Component("reward", after=("rollout",), cpu_seconds=UNMEASURED_S),
            Component("reference", on_one, after=("rollout",)),
            Component("trainer", on_one, after=("rollout", "reward", "reference")),
        ),
        batches=batches,
        staleness=staleness,
        weight_sync=WeightSync("trainer", "rollout"),
    )
    return RunJob(
        job=PlacementJob(Cluster((Node("node0", gpus),)), workflow),
        parts={name: ComponentCode(f"{HOME}:{name.capitalize()}", given) for name, given in settings.items()},
        iterations=iterations,
        seed=seed,
        save_every=save_every,
        unmeasured=frozenset(workflow.names),
        near=Path(__file__).resolve().parent,
        name="grpo",
    )
