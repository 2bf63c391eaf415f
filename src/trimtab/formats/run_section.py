"""The `run` section of a job file: length of the run, checkpoints, and the rules of its loop.

    run:
      iterations: 60
      loop: {mode: auto, dwell_iterations: 5}    # any field of `model.run.ReplanRules`

Every key is checked here, also when a job is only planned, so that a misspelt key is never ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field

from trimtab.core.numbers import MAX_COUNT
from trimtab.formats.sections import FieldsOf, Limit, Names, Priority, Section, Seed, Text, Within
from trimtab.formats.yaml_text import Source
from trimtab.model.run import ReplanRules
from trimtab.model.workflow import unknown_component

Iterations = Annotated[int, Within(1, MAX_COUNT)]
Loop = Annotated[dict[str, Any], FieldsOf(ReplanRules, types={"elastic": Names})]
LOOP_KEYS = tuple(field.name for field in fields(ReplanRules))


class RunSection(Section):
    """The section, with its defaults."""

    iterations: Iterations = 1
    seed: Seed = 0
    save_every: Iterations = 10  # iterations between two checkpoints
    step_limit_s: Limit = 600.0  # a component call that takes longer counts as hung
    place_limit_s: Limit = 120.0  # on Ray, for a component to get its slots and its process, or its turn on shared GPUs
    close_limit_s: Limit = 30.0  # for a component to end
    profile_iterations: Annotated[int, Within(2, MAX_COUNT)] = 4  # measured before planning, where costs are not stated
    priority: Priority = 8.0  # of the job's tasks in the cluster
    modules_from: Text | None = None  # where the components' modules are; default: beside the file and above it
    loop: Loop = Field(default_factory=dict)  # when the run is moved to another plan

    @property
    def rules(self) -> ReplanRules:
        return ReplanRules(**self.loop)


def check_loop(loop: dict[str, Any], components: Collection[str], source: Source, *keys: str | int) -> None:
    """Refuse components that scale within the plan and are not in the workflow."""
    for name in loop.get("elastic", ()):
        if name not in components:
            raise unknown_component(name, components, source.place(*keys, "elastic"))
