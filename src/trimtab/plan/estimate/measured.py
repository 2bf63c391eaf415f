"""Measured seconds of stages scale the model: what a profile or a run says of a stage replaces the guess for it.

A stage is estimated where it was measured, on as many GPUs, and the ratio of the two holds for the run. On the GPU
count that was measured only the spread of the measurement remains; on another one the error that rows of one release
and model leave to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.model.workflow import Profile
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.step import RunInputs, StepTime, combined, step_time

LOG_PROBS = ("old log-probs", "reference log-probs")
STAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("rollout", "generation"), ("generate",)),
    **dict.fromkeys(("inference", "logprobs"), LOG_PROBS),
    "old_log_prob": LOG_PROBS[:1],
    **dict.fromkeys(("ref", "reference"), LOG_PROBS[1:]),
    **dict.fromkeys(("values", "critic_inference", "value_inference"), ("values",)),
    **dict.fromkeys(("update_critic", "critic", "value_training"), ("critic update",)),
    **dict.fromkeys(("update_actor", "actor", "trainer", "policy"), ("update",)),
    "weight_sync": ("refit",),
}
"""The stages that a component of a profile is, under the names of all frameworks."""
LEAST = 0.05
"""Half-width of a measured step, as a logarithm, where a profile states no spread."""
QUANTILE = 2.44
"""Half interquartile ranges, as profiles state a spread, that hold nine of ten values."""


class Correction(Frozen):
    """A measured component: its stages, how much longer they took than estimated, and what remains uncertain."""

    component: str
    stages: tuple[str, ...]
    factor: float
    half_width: float
    seconds: float
    gpus: int

    @property
    def text(self) -> str:
        names = " and ".join(self.stages)
        return f"{names}: {self.factor:.2f}x the model, {self.component} took {self.seconds:.4g} s on {self.gpus} GPUs"


def on_gpus(run: RunInputs, gpus: int) -> RunInputs:
    """The run with so many GPUs for each stage."""
    trainer = replace(run.trainer, gpus=gpus)
    return replace(run, gpus=gpus, rollout_gpus=gpus if run.rollout_gpus else 0, trainer=trainer)


def corrections(run: RunInputs, profile: Profile, c: Constants) -> tuple[Correction, ...]:
    """What the profile says of the run's stages, from the measured GPU count next to the run's own."""
    found = []
    own = {"generate": run.decode_gpus}
    estimated = {stage.name for stage in step_time(run, c).stages}
    for component in profile.components:
        stages = tuple(name for name in STAGES.get(component.name, ()) if name in estimated)
        if not stages or component.waits or not component.seconds:
            continue
        wanted = own.get(stages[0], run.trainer.gpus)
        gpus, seconds = min(component.seconds, key=lambda point: abs(math.log(max(1, point[0]) / wanted)))
        there = step_time(on_gpus(run, max(1, gpus)), c)
        guess = sum(there.stage(name) for name in stages)
        width = max(LEAST, QUANTILE * (component.spread or 0.0))
        if gpus != wanted and stages != ("refit",):
            width = max(width, c.measured_error)
        if guess > 0 and seconds > 0:
            width = min(width, c.stage_error)
            found.append(Correction(component.name, stages, seconds / guess, width, seconds, gpus))
    return tuple(found)


def corrected(step: StepTime, found: Sequence[Correction]) -> StepTime:
    """The step with measured stages as measured."""
    factors = {name: correction.factor for correction in found for name in correction.stages}
    stages = tuple(replace(stage, seconds=stage.seconds * factors.get(stage.name, 1.0)) for stage in step.stages)
    return replace(step, seconds=combined(stages), stages=stages)


def half_widths(step: StepTime, found: Sequence[Correction], c: Constants) -> tuple[float, dict[str, float]]:
    """(half-width of the step, of each stage) as logarithms: stages weigh by their seconds."""
    known = {name: correction.half_width for correction in found for name in correction.stages}
    widths = {stage.name: known.get(stage.name, c.stage_error) for stage in step.stages}
    total = sum(stage.seconds for stage in step.stages)
    step_width = sum(stage.seconds * known.get(stage.name, c.step_error) for stage in step.stages) / total
    return step_width, widths
