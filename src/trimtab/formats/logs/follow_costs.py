"""What a followed run's timers mean: which are costs, which are waits, and where the run's configuration puts whom.

The first steps that count settle it, as they do for a profile of a finished log. A time that is a wait is shown and
never given out as a cost; neither is one of a step that logs timers of a mode in which it would be a wait. Numbers of
GPUs come from the configuration that the run was started with, read as the planner reads it; none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.formats.load import load
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs import measured
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, StepRecord
from trimtab.model.plan import CurrentPlacement
from trimtab.model.profile import ComponentProfile, Profile
from trimtab.model.workflow import Cluster

WEIGHT_SYNC = "weight_sync"
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "verl": ("rollout", "update_actor"),
    "rlinf": ("rollout", "actor"),
    "nemo_rl": ("generation", "policy"),
    "openrlhf": ("rollout", "actor"),
}
"""Without these no run trains; a run that warms up its critic logs them later."""

_VERL_MODES = ("colocate_async", "separate_async")


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run: the file and what was overridden on its command line."""

    path: Path
    overrides: tuple[str, ...] = ()

    def load(self, profile: Profile | None) -> LoadedJob:
        """The job with these costs."""
        return load(self.path, self.overrides, profile)

    def placement(self, components: Iterable[str]) -> tuple[CurrentPlacement, Cluster]:
        """Where these components are now, and on what; an InputError where the file does not say."""
        # Where things are does not depend on what they cost, but a framework's file is read with costs only.
        some = tuple(ComponentProfile(name, ((1, 1.0),)) for name in components if name != WEIGHT_SYNC)
        loaded = self.load(Profile("", some))
        if loaded.current is None:
            raise InputError(
                "the configuration does not say where the components are now",
                where=str(self.path),
                hint="give the configuration that the run was started with, and its overrides",
            )
        return loaded.current, loaded.job.cluster

    def framework(self) -> str | None:
        """Whose configuration it is, where it is a framework's."""
        from trimtab.formats import job
        from trimtab.formats.frameworks.hydra_config import compose
        from trimtab.formats.frameworks.nemo_rl import config as nemo_rl
        from trimtab.formats.frameworks.openrlhf import config as openrlhf
        from trimtab.formats.frameworks.rlinf import config as rlinf
        from trimtab.formats.frameworks.verl import config as verl

        composed = compose(self.path, self.overrides)
        if job.matches(composed.config):
            return None
        known = (rlinf, verl, nemo_rl, openrlhf)
        return next((file_format.NAME for file_format in known if file_format.matches(composed.reader)), None)

    def asynchronous(self) -> str | None:
        """The mode, where it is one in which generation runs beside training."""
        from trimtab.formats.frameworks.hydra_config import compose

        reader = compose(self.path, self.overrides).reader
        if reader.has("async_training"):
            return "fully_async"
        if reader.has("actor_rollout_ref") and reader.has("rollout.nnodes"):
            return "one_step_off"
        if reader.has("vllm.num_engines"):
            return None  # OpenRLHF's timers are of each component's own work, also side by side
        if reader.get("grpo.async_grpo.enabled", False) is True:
            return "asynchronous GRPO"
        mode = reader.get("trainer.v1.trainer_mode", "sync")
        return mode if mode in _VERL_MODES and reader.get("trainer.use_v1", True) is True else None


@dataclass(frozen=True)
class TimerReading:
    """What the timers of one run mean. `waits` says why, by component; `derived`: the last one's timer is no cost."""

    framework: LogFramework
    facts: RunFacts
    waits: Mapping[str, str]
    derived: bool = False

    def seconds(self, step: LoggedStep) -> dict[str, float]:
        """What the log says of each component in a step, waits among it."""
        record = StepRecord(step.number, dict(step.values))
        samples = logs.samples_of(self.framework, [record], self.facts)
        if self.derived and not logs.derive_last(self.framework, [record], samples, self.waits):
            # Its own timer contains waiting, and with periodic work in the step what the others leave is no cost.
            samples.pop(self.framework.last, None)
        return {name: one.seconds for name, (one,) in samples.items()}

    def costs(self, step: LoggedStep) -> dict[str, float]:
        """What each component cost in a step, where that is known."""
        waits = {*self.waits, *self.framework.waiting(frozenset(step.values))}
        return {name: taken for name, taken in self.seconds(step).items() if name not in waits and taken > 0}

    def total(self, step: LoggedStep) -> float | None:
        """How long a step took; None where it says nothing of one, or periodic work fell into it."""
        total = step.values.get(self.framework.prefix + self.framework.total, 0.0)
        return total if total > 0 and not step.extra else None

    def length(self, step: LoggedStep) -> float | None:
        """The mean length of its answers, in tokens."""
        return self.framework.amounts(step.values)[1]


def reading_of(framework: LogFramework, steps: Sequence[LoggedStep], facts: RunFacts) -> TimerReading:
    """What the timers mean, by the first steps that count."""
    records = [StepRecord(step.number, dict(step.values)) for step in steps]
    samples = logs.samples_of(framework, records, facts)
    if not samples:
        raise InputError(
            f"no component's time is among what this {framework.name} log holds", hint=f"read are: {framework.reads}"
        )
    waits, derived = logs.waits_of(framework, records, samples, facts)
    return TimerReading(framework, facts, waits, derived)


def profile_of(reading: TimerReading, steps: Sequence[LoggedStep], gpus: Mapping[str, int]) -> Profile:
    """What everything costs in these steps, on as many GPUs as it has; waits are left out."""
    samples: dict[str, list[measured.CostSample]] = {}
    for step in steps:
        for name, seconds in reading.costs(step).items():
            samples.setdefault(name, []).append(measured.CostSample(seconds))
    most = max(gpus.values(), default=1)
    found = [measured.summarise(name, gpus.get(name) or most, taken) for name, taken in samples.items()]
    return Profile(reading.framework.name, tuple(found))
