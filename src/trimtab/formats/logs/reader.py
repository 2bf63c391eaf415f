"""Computes component costs from training logs of any framework.

Rules for every framework: warm-up steps are dropped after every start and restart; periodic work (validation,
checkpoints) is not part of an iteration; a time that is a wait is marked and must never count as a cost; GPU counts are
given, never guessed. Everything left out or doubtful is in the profile's notes.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError, unknown
from trimtab.formats.frameworks import registry
from trimtab.formats.logs import gpus as logs_gpus
from trimtab.formats.logs import lengths as rollout_lengths
from trimtab.formats.logs import measured, wandb
from trimtab.formats.logs import tensorboard as tensorboard_events
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.ledger import booked, ledger
from trimtab.formats.logs.measured import CostSample
from trimtab.formats.logs.records import LogFramework, Rows, StepRecord, read_lines
from trimtab.model.workflow import ComponentProfile, Profile

FRAMEWORKS: Mapping[str, LogFramework] = {name: framework.LOG for name, framework in registry.FRAMEWORKS.items()}

_ANY_START = re.compile("|".join(f"(?:{one.line_start.pattern})" for one in FRAMEWORKS.values() if one.line_start))

OVERLAP = 1.15
"""Components whose times sum to more than this share of their step ran side by side."""

NOTICEABLE = 0.01
"""Periodic work below this share of its step is ignored: verl times a profiler in each step, also when off."""

_FIRST_IN_CHAIN = ("rollout", "generation")
_NO_TOKENS = ("weight_sync",)
_NOT_WAITING = (*_FIRST_IN_CHAIN, "weight_sync")


@dataclass
class JoinedSteps:
    """The timed steps of a run in order, cut into pieces at restarts; repeated lines are dropped."""

    framework: LogFramework
    pieces: list[list[StepRecord]] = field(default_factory=list)
    repeated: int = 0
    cut_off: int = 0
    _known: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    @property
    def newest(self) -> StepRecord | None:
        """The latest step; further values of it are added to it."""
        return self.pieces[-1][-1] if self.pieces else None

    def take(self, record: StepRecord) -> bool:
        """Add a record; return whether it begins a step."""
        framework, newest = self.framework, self.newest
        if not record.whole:
            self.cut_off += 1
            return False
        again = newest is not None and newest.step == record.step
        if not any(name.startswith(framework.prefix) for name in record.values):
            # E.g. validation scores: values of the same step belong to it.
            if newest is not None and again:
                self._add(newest, record)
            return False
        self._give_back_total(record)
        if newest is not None and again and not disagree(framework, record, newest):
            # A redrawn progress bar, or a step in two lines.
            self._add(newest, record)
            return False
        if record.values in self._known.get(record.step, ()):
            self.repeated += 1
            return False
        if newest is None or again or record.step < newest.step:
            self.pieces.append([])
        self._known.setdefault(record.step, []).append(dict(record.values))
        self.pieces[-1].append(record)
        if framework.complete is not None:
            framework.complete(record.values)
        return True

    def _add(self, step: StepRecord, more: StepRecord) -> None:
        step.values.update(more.values)
        if self.framework.complete is not None:
            self.framework.complete(step.values)

    def _give_back_total(self, record: StepRecord) -> None:
        """Move a total that is logged with the next step to the step that took it."""
        prefix = self.framework.prefix
        if not self.framework.late_total or prefix + self.framework.late_total not in record.values:
            return
        total, newest = record.values.pop(prefix + self.framework.total, 0.0), self.newest
        if newest is not None and newest.step == record.step - 1 and total > 0:
            newest.values[prefix + self.framework.total] = total

    def steps(self, warmup: int) -> list[StepRecord]:
        return [record for piece in self.pieces for record in piece[warmup:]]


def read(
    paths: Sequence[Path],
    *,
    facts: RunFacts | None = None,
    framework: str | None = None,
    config: Path | None = None,
    warmup: int = measured.WARMUP_STEPS,
    kind: str = "",
    lengths: Sequence[Path] = (),
    group_size: int | None = None,
) -> Profile:
    """The profile of a run, from its log files in order. Raises InputError."""
    if not paths:
        raise InputError("no log file is given")
    if warmup < 0:
        raise InputError("--warmup cannot be negative")
    files = list(itertools.chain.from_iterable(files_of(path) for path in paths))
    source = framework_named(framework) if framework else detect(files)
    given = facts or RunFacts()
    facts = given if config is None else given.with_defaults(logs_gpus.from_config(config, source.name))
    run = join(source, files)
    steps = run.steps(warmup)
    found = sum(len(piece) for piece in run.pieces)
    if not found:
        raise InputError(
            f"no step with timings of {source.name} is in {_named(files)}", hint=f"supported: {source.supported_logs}"
        )
    if not steps:
        raise InputError(
            f"all {found} steps are warm-up (the first {warmup} after every start)",
            where=_named(files),
            hint="let the run go on for 10 steps or so, or give --warmup 0",
        )
    samples = samples_of(source, steps, facts)
    logs_gpus.check_names(given, samples)
    curve = rollout_lengths.read(lengths, group_size) if lengths else ((), ())
    return _profile(run, warmup, samples, facts, kind, curve)


def detect(files: Sequence[Path]) -> LogFramework:
    """The framework that wrote these files, by the first line or tag that is unique to a framework."""
    for path in files:
        found = None
        if tensorboard_events.is_event_file(path):
            found = _owner(scalar.tag for scalar in tensorboard_events.read_scalars(path, lambda _: True, lambda: None))
        elif wandb.is_wandb_file(path):
            found = _owner(name for _, row in wandb.read_rows(path, lambda: None) for name in row)
        else:
            for line in read_lines(path, line_start=_ANY_START):
                found = next((one for one in FRAMEWORKS.values() if one.marker.search(line.text)), None)
                if found is None and line.text.lstrip().startswith("{") and (row := _json_object(line.text)):
                    found = _owner(row)
                if found is not None:
                    break
        if found is not None:
            return found
    known = "; ".join(framework.supported_logs for framework in FRAMEWORKS.values())
    hint = f"supported: {known}"
    if any(rollout_lengths.looks_like_dump(path) for path in files):
        hint = "these are answers, not timings: give them with --lengths beside the run's log"
    raise InputError("these timings are of no known framework", where=_named(files), hint=hint)


def _owner(names: Iterable[str]) -> LogFramework | None:
    """The framework whose timer is among these names; else the one whose prefix was first."""
    near: LogFramework | None = None
    for name in names:
        for framework in FRAMEWORKS.values():
            if framework.named(name) in framework.timers:
                return framework
            if near is None and name.startswith(framework.prefix):
                near = framework
    return near


def _json_object(text: str) -> dict[str, Any]:
    """The names and values of a line that is a JSON object; empty for any other."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    inner = (data.get(key) for key in ("data", "metrics"))
    return data | {name: value for some in inner if isinstance(some, dict) for name, value in some.items()}


def framework_named(name: str) -> LogFramework:
    known = {"nemo": "nemo_rl"}.get(name.lower(), name.lower().replace("-", "_"))
    if known not in FRAMEWORKS:
        raise unknown(name.lower(), FRAMEWORKS, what="--framework {} is not known")
    return FRAMEWORKS[known]


def files_of(path: Path) -> list[Path]:
    """The file, or the logs in a folder: event files of a run, or JSON lines, sorted by name."""
    if not path.is_dir():
        return [path]
    try:
        names = sorted(entry for entry in path.iterdir() if entry.is_file())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    inside = (
        [entry for entry in names if "tfevents" in entry.name]
        or wandb.run_files(path)
        or [entry for entry in names if entry.suffix in (".jsonl", ".log")]
        or sorted(path.glob("*/*tfevents*"))
        or sorted(path.glob("*/*/*tfevents*"))
    )
    if not inside:
        raise InputError(f"the folder {path} holds no log", hint="name the log file itself")
    return inside


def _records(framework: LogFramework, path: Path, run: JoinedSteps) -> Iterator[StepRecord]:
    def cut_off() -> None:
        run.cut_off += 1

    if wandb.is_wandb_file(path):
        rows = Rows(framework)
        for at, row in wandb.read_rows(path, cut_off):
            yield from rows.take(row, at)
        return
    if not tensorboard_events.is_event_file(path):
        yield from framework.parse(path)
        return
    record: StepRecord | None = None
    for scalar in tensorboard_events.read_scalars(path, framework.keeps, cut_off):
        if record is None or scalar.step != record.step or scalar.tag in record.values:
            if record is not None:
                yield record
            record = StepRecord(scalar.step)
        record.values[scalar.tag] = scalar.value
    if record is not None:
        yield record


def join(framework: LogFramework, files: Iterable[Path]) -> JoinedSteps:
    run = JoinedSteps(framework)
    for record in itertools.chain.from_iterable(_records(framework, path, run) for path in files):
        run.take(record)
    return run


def disagree(framework: LogFramework, record: StepRecord, other: StepRecord) -> bool:
    """Whether two records of a step hold different times: then the step ran twice."""
    return any(
        name.startswith(framework.prefix) and other.values.get(name, value) != value
        for name, value in record.values.items()
    )


def _profile(
    run: JoinedSteps,
    warmup: int,
    samples: dict[str, list[CostSample]],
    facts: RunFacts,
    kind: str,
    completion: tuple[rollout_lengths.CompletionCurve, tuple[str, ...]],
) -> Profile:
    framework, steps = run.framework, run.steps(warmup)
    if not samples:
        alternatives = itertools.chain.from_iterable(framework.parts.values())
        raise InputError(
            f"no component's time is among what this {framework.name} log holds",
            hint=f"timers read are: {', '.join(framework.prefix + timers[0] for timers in alternatives)}",
        )
    missing = [name for name in samples if facts.gpus(name) is None]
    if missing:
        raise InputError(
            f"the log does not state the number of GPUs of: {', '.join(missing)}", hint=logs_gpus.GPUS_HINT
        )
    notes = _step_notes(run, warmup)
    waits, derived = waits_of(framework, steps, samples, facts)
    if derived:
        notes.append(
            f"{framework.last}'s timer contains waiting; as all components share their GPUs, "
            "its cost is the rest of the step"
        )
    components: list[ComponentProfile] = []
    for name, taken in samples.items():
        component = measured.summarise(name, facts.gpus(name) or 0, taken, kind, waits=name in waits)
        if component.seconds[0][1] <= 0:
            notes.append(f"{name} took no time and is left out")
            continue
        if name in waits:
            notes.append(f"{name} is marked as a wait, not a cost: {waits[name]}")
        elif len(taken) < len(steps) and name != framework.last:
            notes.append(f"{name} ran in {len(taken)} of {len(steps)} steps; its time is that of a step with it")
        if name in _FIRST_IN_CHAIN and completion[0]:
            component = replace(component, completion=completion[0])
        components.append(component)
        drift = measured.drift_note(component, taken, by_length=name not in _NO_TOKENS)
        if drift:
            notes.append(drift)
    totals = [record.values[framework.prefix + framework.total] for record in _plain_steps(framework, steps)]
    if totals:
        explained = sum(component.seconds[0][1] for component in components if not component.waits)
        took = f"an iteration took {statistics.median(totals):.4g} s"
        notes.append(f"{took}, the components that are costs {explained:.4g} s")
    if (where := ledger(framework, steps, waits)) is not None:
        notes.append(where.sentence())
    elif not framework.total:
        notes.append(f"{framework.name} logs no total of a step: what no timer books is not known")
    if not components:
        raise InputError("every component's time in this log is 0")
    return Profile(framework.name, tuple(components), (*notes, *completion[1]))


def waits_of(
    framework: LogFramework, steps: Sequence[StepRecord], samples: dict[str, list[CostSample]], facts: RunFacts
) -> tuple[dict[str, str], bool]:
    """(components whose times are waits, with the reason; whether the last component's samples were derived).

    Derived samples are written to `samples`.
    """
    waits = waits_by_name(framework, (name for record in steps for name in record.values), facts)
    if facts.asynchronous:
        first = next((name for name in _FIRST_IN_CHAIN if name in samples), next(iter(samples)))
        waits.setdefault(first, f"in {facts.asynchronous} mode it runs beside the training")
    overlap = None if framework.timers_exclude_waits else _overlap(framework, steps, samples, waits)
    if overlap is None:
        return waits, False
    if facts.shared and framework.last in samples and derive_last(framework, steps, samples, waits):
        return waits, True
    for name in samples:
        if name not in _NOT_WAITING:
            waits.setdefault(name, overlap)
    return waits, False


def waits_by_name(framework: LogFramework, names: Iterable[str], facts: RunFacts) -> dict[str, str]:
    """The components whose times are waits in a run that logs these names; none if it is known to be synchronous."""
    return {} if facts.synchronous else framework.waiting(frozenset(names))


def samples_of(framework: LogFramework, steps: Iterable[StepRecord], facts: RunFacts) -> dict[str, list[CostSample]]:
    """The samples of each component, one per step that has it."""
    samples: dict[str, list[CostSample]] = {}
    for record in steps:
        tokens, length = framework.token_counts(record.values)
        if tokens is None and length is not None and facts.answers_per_step:
            tokens = length * facts.answers_per_step
        for name in framework.parts:
            seconds = seconds_of(framework, name, record)
            if seconds is not None and seconds >= 0:
                sample = CostSample(seconds) if name in _NO_TOKENS else CostSample(seconds, tokens, length)
                samples.setdefault(name, []).append(sample)
    return samples


def derive_last(
    framework: LogFramework, steps: Iterable[StepRecord], samples: dict[str, list[CostSample]], waits: Mapping[str, str]
) -> bool:
    """Replace the last component's samples by the rest of each step; false if nothing is left."""
    derived: list[CostSample] = []
    for record in _plain_steps(framework, steps):
        others = [name for name in samples if name != framework.last and name not in waits]
        taken = sum(seconds_of(framework, name, record) or 0.0 for name in others)
        taken += sum(record.values.get(framework.prefix + name, 0.0) for name in framework.other_timers)
        left = record.values[framework.prefix + framework.total] - taken
        if left <= 0:
            return False
        derived.append(CostSample(left, *framework.token_counts(record.values)))
    samples[framework.last] = derived
    return bool(derived)


def seconds_of(framework: LogFramework, component: str, record: StepRecord) -> float | None:
    """A component's seconds in a step; None if it logged none."""
    for timers in framework.parts[component]:
        found = [record.values[framework.prefix + t] for t in timers if framework.prefix + t in record.values]
        # The first timer of an alternative is the component itself, the others are its side work.
        if found and framework.prefix + timers[0] in record.values:
            return sum(found)
    return None


def periodic_work(framework: LogFramework, values: Mapping[str, float]) -> tuple[str, ...]:
    """Noticeable timers of validation, checkpoints etc. in a step: its total is not an iteration's."""
    total = values.get(framework.prefix + framework.total, 0.0)
    if not framework.total:
        total = sum(booked(framework, values).values())
    return tuple(n for n in framework.periodic if values.get(framework.prefix + n, 0.0) > NOTICEABLE * max(total, 0.0))


def _plain_steps(framework: LogFramework, steps: Iterable[StepRecord]) -> list[StepRecord]:
    """Steps with a total and without periodic work: only their totals are an iteration's."""
    total = framework.prefix + framework.total
    return [r for r in steps if r.values.get(total, 0.0) > 0 and not periodic_work(framework, r.values)]


def _overlap(
    framework: LogFramework, steps: Iterable[StepRecord], samples: Mapping[str, object], waits: Mapping[str, str]
) -> str | None:
    """The reason if components' times overlap: then all but the first contain waiting for input."""
    ratios = []
    for record in _plain_steps(framework, steps):
        taken = [seconds_of(framework, name, record) or 0.0 for name in samples if name not in waits]
        ratios.append(sum(taken) / record.values[framework.prefix + framework.total])
    if not ratios or statistics.median(ratios) <= OVERLAP:
        return None
    return f"the components together take {statistics.median(ratios):.2f} times their step, so they ran side by side"


def _step_notes(run: JoinedSteps, warmup: int) -> list[str]:
    framework, steps = run.framework, run.steps(warmup)
    notes: list[str] = []
    found = sum(len(piece) for piece in run.pieces)
    numbers = f"steps {steps[0].step} to {steps[-1].step}" if len(run.pieces) == 1 else "all pieces"
    notes.append(f"{len(steps)} of {_steps(found)} count ({numbers}); {found - len(steps)} were warm-up")
    if len(run.pieces) > 1:
        again = len(run.pieces) - 1
        times = "once" if again == 1 else f"{again} times"
        notes.append(f"the step number goes back {times} (a restart): the first {_steps(warmup)} after it are warm-up")
    if run.repeated:
        notes.append(f"logged more than once, with the same values, and counted once: {_steps(run.repeated)}")
    if run.cut_off:
        notes.append(f"cut off in the log, and left out: {_steps(run.cut_off)}")
    if len(steps) < measured.MIN_RELIABLE_STEPS:
        notes.append(f"{_steps(len(steps))} are few: medians of {measured.MIN_RELIABLE_STEPS} or more are steadier")
    periodic = sum(bool(periodic_work(framework, record.values)) for record in steps)
    if periodic:
        notes.append(f"validation, checkpoints or the like fell into {_steps(periodic)}; their totals are left out")
    idle = {
        name.removeprefix(framework.prefix)
        for record in steps
        for name, value in record.values.items()
        if value > 0 and name.startswith(tuple(framework.prefix + timer for timer in framework.idle))
    }
    if idle:
        notes.append(f"waits, hence no costs, and left out: {', '.join(sorted(idle))}")
    return notes


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _named(files: Sequence[Path]) -> str:
    shown = ", ".join(str(path) for path in files[:3])
    return shown if len(files) <= 3 else f"{shown} and {len(files) - 3} more"
