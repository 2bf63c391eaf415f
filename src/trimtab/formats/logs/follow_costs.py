"""Interprets the timers of a followed run: which are costs, which are waits, and on which GPUs components run.

The first counted steps decide, as for a profile of a finished log. A time that is a wait is shown but must never count
as a cost; the same holds for a step that logs timers of a mode in which it would be a wait. GPU counts come from the
config that the run was started with, read as the planner reads it; none is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats import job
from trimtab.formats.frameworks.registry import framework_of
from trimtab.formats.launch.read import composed_config
from trimtab.formats.load import load
from trimtab.formats.loaded import LoadedJob
from trimtab.formats.logs import measured
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.records import LogFramework, StepRecord
from trimtab.model.plan import CurrentPlacement
from trimtab.model.workflow import Cluster, ComponentProfile, Profile

WEIGHT_SYNC = "weight_sync"


class RunConfig(Frozen):
    """The config of a run: the file and its command-line overrides."""

    path: Path
    overrides: tuple[str, ...] = ()

    def load(self, profile: Profile | None) -> LoadedJob:
        return load(self.path, self.overrides, profile)

    def placement(self, components: Iterable[str]) -> tuple[CurrentPlacement, Cluster]:
        """The components' placement and the cluster. Raises InputError if the file does not state it."""
        # A placement does not depend on costs, but framework configs can only be read with costs.
        some = tuple(ComponentProfile(name, ((1, 1.0),)) for name in components if name != WEIGHT_SYNC)
        loaded = self.load(Profile("", some))
        if loaded.current is None:
            raise InputError(
                "the config does not state where the components are now",
                where=str(self.path),
                hint="give the config that the run was started with, and its overrides",
            )
        return loaded.current, loaded.job.cluster

    def framework(self) -> str | None:
        """The framework of the config; None for trimtab's job file."""
        composed = composed_config(self.path, self.overrides)
        kind = None if job.matches(composed.config) else framework_of(composed.reader)
        return None if kind is None else kind.NAME

    def asynchronous(self) -> str | None:
        """The mode if generation runs beside training and timers contain waits, else None."""
        reader = composed_config(self.path, self.overrides).reader
        kind = framework_of(reader)
        return None if kind is None else kind.asynchronous(reader)


class TimerReading(Frozen):
    """Meaning of a run's timers. `waits`: reasons by component; `derived`: the last component's timer is no cost."""

    framework: LogFramework
    facts: RunFacts
    waits: Mapping[str, str]
    derived: bool = False

    def seconds(self, step: LoggedStep) -> dict[str, float]:
        """The logged seconds of each component in a step, waits included."""
        record = StepRecord(step.number, dict(step.values))
        samples = logs.samples_of(self.framework, [record], self.facts)
        if self.derived and not logs.derive_last(self.framework, [record], samples, self.waits):
            # Its timer contains waiting, and with periodic work the rest of the step is no cost.
            samples.pop(self.framework.last, None)
        return {name: sample.seconds for name, (sample,) in samples.items()}

    def costs(self, step: LoggedStep) -> dict[str, float]:
        waits = {*self.waits, *logs.waits_by_name(self.framework, step.values, self.facts)}
        return {name: taken for name, taken in self.seconds(step).items() if name not in waits and taken > 0}

    def total(self, step: LoggedStep) -> float | None:
        """Seconds of a step; None if not logged, or with periodic work."""
        total = step.values.get(self.framework.prefix + self.framework.total, 0.0)
        return total if total > 0 and not step.extra else None

    def length(self, step: LoggedStep) -> float | None:
        return self.framework.token_counts(step.values)[1]


def reading_of(framework: LogFramework, steps: Sequence[LoggedStep], facts: RunFacts) -> TimerReading:
    """The meaning of the timers, by the first counted steps."""
    records = [StepRecord(step.number, dict(step.values)) for step in steps]
    samples = logs.samples_of(framework, records, facts)
    if not samples:
        raise InputError(
            f"no component's time is among what this {framework.name} log holds",
            hint=f"supported: {framework.supported_logs}",
        )
    waits, derived = logs.waits_of(framework, records, samples, facts)
    return TimerReading(framework, facts, waits, derived)


def profile_of(reading: TimerReading, steps: Sequence[LoggedStep], gpus: Mapping[str, int]) -> Profile:
    """The costs in these steps on the given GPU counts, without waits."""
    samples: dict[str, list[measured.CostSample]] = {}
    for step in steps:
        for name, seconds in reading.costs(step).items():
            samples.setdefault(name, []).append(measured.CostSample(seconds))
    highest = max(gpus.values(), default=1)
    found = [measured.summarise(name, gpus.get(name) or highest, taken) for name, taken in samples.items()]
    return Profile(reading.framework.name, tuple(found))
