"""The whole answer of an estimate: a step with its interval, memory, throughput, staleness, and what a run costs."""

from __future__ import annotations

import math

from trimtab.core.frozen import Frozen
from trimtab.model.workflow import Profile
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.measured import Correction, corrected, corrections, half_widths
from trimtab.plan.estimate.phases import Phase, phases
from trimtab.plan.estimate.step import RunInputs, StepTime, step_time


class Interval(Frozen):
    """Low, likely and high: nine of ten measured values lay between low and high."""

    low: float
    likely: float
    high: float

    @classmethod
    def of(cls, likely: float, spread: float) -> Interval:
        return cls(likely * math.exp(-spread), likely, likely * math.exp(spread))

    def times(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.likely * factor, self.high * factor)


class Estimate(Frozen):
    """What a step and a run take."""

    run: RunInputs
    step: StepTime
    seconds: Interval
    stages: tuple[tuple[str, Interval, str], ...]
    phases: tuple[Phase, ...]
    host_gb: float
    tokens_per_gpu: float
    mfu: float
    mean_staleness: float
    greatest_staleness: float
    measured: tuple[Correction, ...] = ()

    def hours(self, steps: int) -> Interval:
        return self.seconds.times(steps / 3600)

    def gpu_hours(self, steps: int) -> Interval:
        return self.hours(steps).times(self.run.gpus + self.run.judge_gpus)

    @property
    def fits(self) -> bool:
        return all(phase.gb <= phase.gpu_gb for phase in self.phases) and self.step.slots >= 1


def estimate(run: RunInputs, c: Constants, offload: str = "all", measured: Profile | None = None) -> Estimate:
    """The whole answer; measured components scale their stages and narrow the interval."""
    found_corrections = corrections(run, measured, c) if measured else ()
    step = corrected(step_time(run, c), found_corrections)
    step_width, widths = half_widths(step, found_corrections, c)
    tokens = run.samples * run.lengths.mean
    mean, greatest = staleness(run, step)
    found, host = phases(run, c, offload)
    return Estimate(
        run=run,
        step=step,
        seconds=Interval.of(step.seconds, step_width),
        stages=tuple(
            (stage.name, Interval.of(stage.seconds, widths[stage.name]), stage.limit) for stage in step.stages
        ),
        phases=found,
        host_gb=host,
        tokens_per_gpu=tokens / step.seconds / (run.gpus + run.judge_gpus),
        mfu=step.flops / (run.gpus * run.gpu.flops(run.trainer.precision) * step.seconds),
        mean_staleness=mean,
        greatest_staleness=greatest,
        measured=found_corrections,
    )


def gain_interval(likely: float, c: Constants) -> Interval:
    """The gain of another mode: what was published came to more than was predicted rather than to less."""
    return Interval(likely * math.exp(-c.gain_over), likely, likely * math.exp(c.gain_under))


def staleness(run: RunInputs, step: StepTime) -> tuple[float, float]:
    """(mean, greatest) steps between the weights that decoded a sample and the step that trains on it."""
    if run.mode == "sync":
        return 0.0, 0.0
    behind = step.stage("generate") / step.seconds
    return min(run.staleness, behind), run.staleness
