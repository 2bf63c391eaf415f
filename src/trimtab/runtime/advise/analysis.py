"""Analysis of a followed run: when its costs are known, what is shown, and when the advice changes.

The first steps after every start are warm-up; the next few settle what the timers mean and, without a profile, the
costs; then every step is evaluated. Pure: no clock, no file.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.logs import measured
from trimtab.formats.logs.follow import LoggedStep
from trimtab.formats.logs.follow_costs import WEIGHT_SYNC, RunConfig, TimerReading, profile_of, reading_of
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.logs.ledger import StepLedger, ledger
from trimtab.formats.logs.records import LogFramework, StepRecord
from trimtab.model.plan import CurrentPlacement
from trimtab.model.run import ReplanRules
from trimtab.model.workflow import Cluster, Profile
from trimtab.runtime.advise.replanner import Advice, Adviser

KEPT_STEPS = 2000  # used for drift; older ones are dropped


class FollowEvent(Frozen):
    """A restart, or advice that is new, changed, withdrawn or valid again.

    A restart carries the advice that the run was started with, if any.
    """

    what: str  # restarted, advised, changed, withdrawn, stands again
    step: int
    sentence: str
    advice: Advice | None = None


class ComponentSummary(Frozen):
    """One component over the newest steps. `wait` says why its time is not its cost, if so."""

    name: str
    gpus: int | None  # 0: on CPUs; None: not known yet
    seconds: float
    share: float | None  # of the step
    spread: float | None
    drift: float | None  # from the first to the last third of the steps
    wait: str | None = None
    drifted: bool = False  # distinguishable from noise


class GpuSharing(Frozen):
    """Components on the same GPUs. `busy` is the share of a step in which they compute; None: not in the log."""

    components: tuple[str, ...]
    gpus: int
    busy: float | None


class RunPicture(Frozen):
    """What is known of the run."""

    framework: str
    steps: int
    counted: int
    newest: int | None
    step_s: float | None
    parts: tuple[ComponentSummary, ...]
    other_s: float | None
    ledger: StepLedger | None  # of the newest steps without periodic work
    length: float | None
    length_drift: float | None
    sharing: tuple[GpuSharing, ...]
    idle: float | None
    reason: Reason
    advice: Advice | None
    notes: tuple[str, ...]


class AdviceTracker:
    """Tracks the steps of one run and the advice for it."""

    def __init__(
        self, framework: LogFramework, config: RunConfig, profile: Profile | None, rules: ReplanRules, warmup: int
    ) -> None:
        self.framework = framework
        self.config = config
        self.rules = rules
        self.adviser: Adviser | None = None
        self._profile = profile
        self.warmup = warmup
        self._since_start = 0
        self._steps = 0
        self._newest: int | None = None
        self.counted: list[LoggedStep] = []  # the newest
        self._counted_ever = 0
        self.reading: TimerReading | None = None
        self._times: list[dict[str, float]] = []  # seconds of each component in each counted step
        self._placed: CurrentPlacement | None = None
        self.cluster: Cluster | None = None  # from the configuration
        self._provisional_names: tuple[str, ...] = ()  # components whose placement was read
        self._missing: tuple[str, ...] = ()  # components that the evaluation still lacks
        self._unplanned: str | None = None  # why no plan can be evaluated
        self._carried_out: Advice | None = None  # by the user's command; the next start of the run has it
        self.given: dict[tuple[str, ...], int] = {}  # overrides that were ever advised, and the step
        self._unsettled: list[LoggedStep] | None = None  # steps under a new placement, until its timers are settled

    # ---- steps ---------------------------------------------------------------------------------------------------

    def take(self, step: LoggedStep) -> list[FollowEvent]:
        news: list[FollowEvent] = []
        if step.restart:
            news.append(self._restarted(step))
        self._steps += 1
        self._since_start += 1
        self._newest = step.number
        if self._since_start <= self.warmup:
            return news
        self.counted.append(step)
        del self.counted[:-KEPT_STEPS]
        self._counted_ever += 1
        if self.reading is not None and (self.adviser is not None or self._unplanned is not None):
            self._times.append(self.reading.seconds(step))
            del self._times[:-KEPT_STEPS]
            return news + (self._weigh(step) if self._unsettled is None else self._settle(step))
        base = self.counted[-self.rules.least_iterations :]
        self._set_reading(self._provisional_reading(base))  # provisional, until there are enough steps
        return news + (self._begin(base) if len(base) == self.rules.least_iterations else [])

    def end(self) -> list[FollowEvent]:
        """No more steps will come: evaluate those there are."""
        if self._steps and not self.counted:
            raise InputError(
                f"all {self._steps} steps are warm-up (the first {self.warmup} after every start)",
                hint="let the run go on for 10 steps or so, or give --warmup 0",
            )
        if not self.counted or self.adviser is not None or self._unplanned is not None:
            return []
        base = self.counted[-self.rules.least_iterations :]
        self._missing = self._missing_components(base)
        if self._missing:
            self._unplanned = f"{', '.join(self._missing)} is not in the log, and {self.framework.name} trains with it"
            return []
        return self._begin(base)

    def hook_succeeded(self, advice: Advice) -> None:
        """The user's command has applied the advice: the next start of the run has it."""
        self._carried_out = advice

    def _restarted(self, step: LoggedStep) -> FollowEvent:
        self._since_start = 0
        taken = self._carried_out if self.adviser is not None else None
        if taken is not None and self.adviser is not None:
            self.adviser.taken(taken)
            self._unsettled = []
            sentence = f"the run was started anew, with the plan that was advised: {self.adviser.plan.describe()}"
        else:
            sentence = "the run was started anew; if with another placement, start this command anew with it"
        self._carried_out = None
        return FollowEvent("restarted", step.number, sentence, taken)

    def _settle(self, step: LoggedStep) -> list[FollowEvent]:
        """A step under an advised placement, where timers may contain waits that they did not before."""
        assert self._unsettled is not None
        assert self.adviser is not None
        self._unsettled.append(step)
        if len(self._unsettled) < self.rules.least_iterations:
            return []
        base, self._unsettled = self._unsettled, None
        shared = len(self.adviser.plan.groups) == 1
        facts = RunFacts(asynchronous=self._mode, shared=shared)
        self._set_reading(reading_of(self.framework, base, facts))
        return [news for logged in base for news in self._weigh(logged)]

    def _set_reading(self, reading: TimerReading) -> None:
        self.reading = reading
        self._times = [reading.seconds(step) for step in self.counted]

    def _missing_components(self, base: Sequence[LoggedStep]) -> tuple[str, ...]:
        """Required components that are neither in most of these steps nor profiled."""
        assert self.reading is not None
        logged = [set(self.reading.seconds(step)) for step in base]
        known = {component.name for component in self._profile.components} if self._profile else set()
        needed = (name for name in FRAMEWORKS[self.framework.name].REQUIRED if name not in known)
        return tuple(name for name in needed if 2 * sum(name in names for names in logged) < len(logged))

    def _provisional_reading(self, base: Sequence[LoggedStep]) -> TimerReading:
        """What the timers mean, as far as the first steps and the configuration tell."""
        facts = RunFacts(asynchronous=self._mode)
        names = tuple(reading_of(self.framework, base, facts).seconds(_union(base)))
        if names != self._provisional_names:
            self._provisional_names = names
            # A gap is an error only once there are enough steps: more components may have come by then.
            with contextlib.suppress(InputError):
                self._placed, self.cluster = self.config.placement(names)
        shared = self._placed is not None and len(set(self._placed.ranks.values())) == 1
        return reading_of(self.framework, base, replace(facts, shared=shared))

    @functools.cached_property
    def _mode(self) -> str | None:
        return self.config.asynchronous()

    def _begin(self, base: Sequence[LoggedStep]) -> list[FollowEvent]:
        """Enough steps count: determine the timers' meaning, the costs and the placement."""
        self._missing = self._missing_components(base)
        if self._missing:
            return []
        facts = RunFacts(asynchronous=self._mode)
        names = reading_of(self.framework, base, facts).seconds(_union(base))
        known = {component.name for component in self._profile.components} if self._profile else set()
        self._placed, self.cluster = placed, _ = self.config.placement(dict.fromkeys([*names, *known]))
        gpus = {name: len(ranks) for name, ranks in placed.ranks.items()}
        shared = len({placed.ranks[name] for name in gpus}) == 1
        reading = reading_of(self.framework, base, replace(facts, shared=shared))
        self._set_reading(reading)
        costs = profile_of(reading, base, gpus)
        profile = _joined(self._profile, costs)
        missing = [name for name in gpus if profile.component(name) is None]
        if missing:
            why = reading.waits.get(missing[0], "it is not in the log")
            hint = "give --profile with the costs of a synchronous run"
            self._unplanned = f"what {', '.join(missing)} costs is not known ({why}); {hint}"
            return []
        self.adviser = Adviser(self.config.load(profile), self.rules)
        return [news for step in base for news in self._weigh(step)]

    def _weigh(self, step: LoggedStep) -> list[FollowEvent]:
        adviser, reading = self.adviser, self.reading
        if adviser is None or reading is None:
            return []
        before = adviser.advice
        adviser.take(step.number, reading.costs(step), reading.total(step))
        after = adviser.advice
        if after is not None and (before is None or before.overrides != after.overrides):
            first, sentence = self.given.setdefault(after.overrides, step.number), after.reason.sentence
            what = "advised" if before is None else "changed"
            if first != step.number:
                what, sentence = "stands again", f"that of step {first}: {sentence}"
            return [FollowEvent(what, step.number, sentence, after)]
        if before is not None and after is None:
            return [FollowEvent("withdrawn", step.number, adviser.reason.sentence)]
        return []

    def restarted_with(self, overrides: Sequence[str]) -> AdviceTracker:
        """The same run from the start, with these overrides in addition."""
        config = replace(self.config, overrides=(*self.config.overrides, *overrides))
        again = AdviceTracker(self.framework, config, self._profile, self.rules, self.warmup)
        again.given.update(self.given)
        return again

    @property
    def groups(self) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        """Components on the same GPUs, and those GPUs; empty if not known yet."""
        known = self._placed.ranks if self._placed else {}
        ranks = {name: tuple(known[name]) for name in [*self.framework.parts, *known] if name in known}
        if self.adviser is not None:
            ranks = {name: tuple(group.gpus) for group in self.adviser.plan.groups for name in group.components}
        on: dict[int, list[str]] = {}
        for name, gpus in ranks.items():
            for gpu in gpus:
                on.setdefault(gpu, []).append(name)
        found: dict[tuple[str, ...], list[int]] = {}
        for gpu in sorted(on):
            found.setdefault(tuple(on[gpu]), []).append(gpu)
        first = {name: position for position, name in enumerate(ranks)}
        return tuple((names, tuple(found[names])) for names in sorted(found, key=lambda names: first[names[0]]))

    def seconds(self, step: LoggedStep) -> dict[str, float]:
        """Seconds of each component in a step, waits included."""
        return self.reading.seconds(step) if self.reading is not None else {}

    # ---- picture -------------------------------------------------------------------------------------------------

    def picture(self, notes: Sequence[str] = ()) -> RunPicture:
        reading = self.reading
        counted = self.counted if reading is not None else []
        newest = counted[-self.rules.window :]
        totals = [total for step in newest if reading and (total := reading.total(step)) is not None]
        step_s = statistics.median(totals) if totals else None
        parts = self._parts(step_s)
        sharing = self._sharing(parts, step_s)
        lengths = [length for step in counted if reading and (length := reading.length(step))]
        known_s = sum(part.seconds for part in parts)
        if step_s is not None and known_s > step_s:  # waits overlap with what they wait for
            known_s = sum(part.seconds for part in parts if part.wait is None)
        return RunPicture(
            framework=self.framework.name,
            steps=self._steps,
            counted=self._counted_ever,
            newest=self._newest,
            step_s=step_s,
            parts=parts,
            other_s=None if step_s is None or known_s > step_s else step_s - known_s,
            ledger=self._ledger(newest),
            length=statistics.median(lengths[-self.rules.window :]) if lengths else None,
            length_drift=measured.drift(lengths) if lengths else None,
            sharing=sharing,
            idle=_idle(sharing),
            reason=self._reason(),
            advice=self.adviser.advice if self.adviser else None,
            notes=(*(self.adviser.loaded.assumptions if self.adviser else ()), *notes),
        )

    def _ledger(self, steps: Sequence[LoggedStep]) -> StepLedger | None:
        if self.reading is None:
            return None
        records = [StepRecord(step.number, dict(step.values)) for step in steps if not step.extra]
        return ledger(self.framework, records, self.reading.waits)

    def _reason(self) -> Reason:
        if self._unplanned is not None:
            return Reason(ReasonCode.load_unknown, self._unplanned)
        if self.adviser is not None:
            return self.adviser.reason
        if self._missing:
            return Reason(ReasonCode.too_few, f"{', '.join(self._missing)} is not in the log yet")
        needed = self.rules.least_iterations
        return Reason(ReasonCode.too_few, f"{self._counted_ever} of {needed} steps are measured")

    def _parts(self, step_s: float | None) -> tuple[ComponentSummary, ...]:
        reading = self.reading
        if reading is None:
            return ()
        series: dict[str, list[float]] = {}
        for times in self._times:
            for name, seconds in times.items():
                series.setdefault(name, []).append(seconds)
        drifted = self.adviser.drifted() if self.adviser else ()
        parts = []
        for name, values in series.items():
            some = values[-self.rules.window :]
            middle = statistics.median(some)
            if middle <= 0:
                continue
            share, spread, drift = middle / step_s if step_s else None, measured.spread(some), measured.drift(values)
            wait = reading.waits.get(name)
            parts.append(
                ComponentSummary(name, self.gpus(name), middle, share, spread, drift, wait, drifted=name in drifted)
            )
        return tuple(parts)

    def gpus(self, name: str) -> int | None:
        """GPU count of a component; 0: on CPUs; None: not known yet."""
        if self._placed is None:
            return None
        ranks = dict(self._placed.ranks)
        if self.adviser is not None:
            ranks = {component.name: component.gpus for component in self.adviser.plan.components}
        if name == WEIGHT_SYNC:
            return len({rank for gpus in ranks.values() for rank in gpus})
        return len(ranks.get(name, ()))

    def _sharing(self, parts: Sequence[ComponentSummary], step_s: float | None) -> tuple[GpuSharing, ...]:
        """Components on the same GPUs, and how long they compute."""
        by_name = {part.name: part for part in parts}
        found = []
        for names, gpus in self.groups:
            mine = [by_name[name] for name in names if name in by_name]
            known = step_s is not None and len(mine) == len(names) and not any(part.wait for part in mine)
            busy = min(1.0, sum(part.seconds for part in mine) / step_s) if known and step_s else None
            found.append(GpuSharing(names, len(gpus), busy))
        return tuple(found)


def _union(steps: Sequence[LoggedStep]) -> LoggedStep:
    """A step with everything that any of them logs."""
    return LoggedStep(0, {name: value for step in steps for name, value in step.values.items()})


def _joined(profile: Profile | None, costs: Profile) -> Profile:
    """The profile's curves, and the log's own costs for components without one."""
    if profile is None:
        return costs
    known = {component.name for component in profile.components}
    return replace(profile, components=(*profile.components, *(c for c in costs.components if c.name not in known)))


def _idle(sharing: Sequence[GpuSharing]) -> float | None:
    """Share of GPU time in which the run's GPUs are idle, if the log tells."""
    gpus = sum(group.gpus for group in sharing)
    if not gpus or any(group.busy is None for group in sharing):
        return None
    return 1 - sum(group.gpus * (group.busy or 0.0) for group in sharing) / gpus
