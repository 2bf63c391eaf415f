"""A simulated RL job: true iteration times under any plan, migration times, and node events.

The replan machine sees only what it could measure; the truth is here. An iteration takes what the planner's simulation
predicts for the true costs (profile x drift x noise); how close that simulation is to reality is measured elsewhere, on
real runs.

Noise is a factor for each component and iteration, around its level: cut from traces of real training steps, synthetic
with stated parameters, drawn from a distribution, or as measured by a past run. The seed decides all of it before a run
begins, so that every policy meets the same iterations; an iteration that is run again after a loss takes the same time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.sections import Amount, Count, Index, Made, Positive, Share
from trimtab.machines.replan.decision import ReplanPlanner
from trimtab.machines.replan.events import ClusterChangeCause, ClusterChanged
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import FrameworkRules, Plan
from trimtab.model.run import STAGES, ComponentTiming, Iteration, MigrationStage
from trimtab.model.workflow import Cluster, Node, PlacementJob
from trimtab.plan.placement.simulate import Floats
from trimtab.replay.common.timing import P99, Distribution, Durations, NodeEventKind
from trimtab.replay.common.traces import TraceKind, rows

MINIBATCHES = TraceKind("table of mini-batches", ("worker", "iteration", "batch_time_norm"), ("gpu_percent",))
Factors = dict[str, Floats]  # by component; index is the iteration, 0 is unused


@lru_cache(maxsize=16)
def minibatches(path: Path) -> tuple[Floats, ...]:
    """Step times of each worker, in order."""
    found: dict[str, list[float]] = {}
    last: dict[str, int] = {}
    for line, row in rows(path, (MINIBATCHES,)):
        worker, step, seconds = row.words["worker"], row.whole("iteration"), row.number("batch_time_norm")
        if step < last.get(worker, 0):  # real traces have duplicate steps
            raise InputError(
                f"iteration {step} of worker {worker} is after iteration {last[worker]}",
                where=f"{path}, line {line}",
                hint="sort the trace by iteration",
            )
        if not seconds:
            raise InputError("a step with a time of 0", where=f"{path}, line {line}")
        last[worker] = step
        found.setdefault(worker, []).append(seconds)
    if not found:
        raise InputError("the trace has no rows", where=str(path))
    return tuple(np.array(steps) for steps in found.values())


class TraceNoise(Frozen):
    """Stretches of real steps, each of another worker, around its own level."""

    files: tuple[Path, ...]

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        source = random.Random(seed)
        series = [steps for file in self.files for steps in minibatches(file)]
        some = source.sample(series, len(names)) if len(series) >= len(names) else source.choices(series, k=len(names))
        some = [_long(steps, iterations) for steps in some]
        starts = [source.randrange(len(steps) - iterations) for steps in some]
        # Only the noise around a stretch's own level counts, not how a job's level drifted.
        cut = [steps[at : at + iterations + 1] for steps, at in zip(some, starts, strict=True)]
        return {name: steps / np.median(steps) for name, steps in zip(names, cut, strict=True)}

    def text(self) -> str:
        series = [steps for file in self.files for steps in minibatches(file)]
        return (
            f"noise of real steps: {len(series)} workers of {', '.join(file.name for file in self.files)}, "
            "each around its own level"
        )


def _long(steps: Floats, iterations: int) -> Floats:
    """Extends a series by its mirror image, so that neighbours stay similar."""
    parts, length = [steps], len(steps)
    while length <= iterations:
        parts.append(parts[-1][::-1])
        length += len(steps)
    return np.concatenate(parts)


class SyntheticNoise(Frozen):
    """Autocorrelated noise, with occasional iterations that take up to twice as long."""

    spread: float = 0.04
    alike: float = 0.7  # correlation of neighbouring iterations
    tail: float = 0.02  # share of iterations that take 1.3 to 2 times as long

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        source = random.Random(seed)
        return {name: self._series(source, iterations + 1) for name in names}

    def _series(self, source: random.Random, count: int) -> Floats:
        values, at = [], 0.0
        for _ in range(count):
            at = self.alike * at + source.gauss(0.0, self.spread * (1 - self.alike**2) ** 0.5)
            tail = source.uniform(1.3, 2.0) if source.random() < self.tail else 1.0
            values.append(max(1 + at, 0.05) * tail)
        return np.array(values)

    def text(self) -> str:
        if not self.spread and not self.tail:
            return "no noise"
        return (
            f"synthetic noise: spread {self.spread:.1%}, correlation {self.alike:g}, "
            f"{self.tail:.1%} of the iterations take 1.3 to 2 times as long"
        )


class DrawnNoise(Frozen):
    """Independent noise of every iteration, from a distribution."""

    factor: Distribution

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        source = random.Random(seed)
        return {name: np.array([max(self.factor.draw(source), 1e-6) for _ in range(iterations + 1)]) for name in names}

    def text(self) -> str:
        return f"independent noise of every iteration: {self.factor.text(' times')}"


class PastNoise(Frozen):
    """Measured noise of a past run, the same for every seed."""

    run: str
    by_component: Mapping[str, tuple[float, ...]]

    def factors(self, names: Sequence[str], iterations: int, seed: int) -> Factors:
        return {name: np.array((1.0, *self.by_component[name][:iterations])) for name in names}

    def text(self) -> str:
        return f"costs as the run in {self.run} measured them: a level from five neighbours, the rest is noise"


Noise = TraceNoise | SyntheticNoise | DrawnNoise | PastNoise


DriftShape = Literal["steady", "exponential", "early", "wave", "jump"]
Levels = Annotated[
    tuple[tuple[int, float], ...], Made(dict[Count, Positive], lambda points: tuple(sorted(points.items())))
]


class Drift(Frozen):
    """How a component's level drifts: to `to` times its profile, over `over` iterations, after iteration `after`.

    `steady` linearly, `exponential` geometrically, `early` most of it at first, `wave` periodically there and back,
    `jump` at once. `points` (iteration, level) replace all of that, with linear interpolation.
    """

    to: Positive = 1.0
    over: Count = 1
    after: Index = 0
    shape: DriftShape = "steady"
    points: Levels = ()

    def level(self, iteration: int) -> float:
        """Cost of an iteration relative to the profile."""
        if self.points:
            return self._between(iteration)
        share = min(1.0, max(0, iteration - self.after) / self.over)
        if self.shape == "jump":
            share = float(iteration > self.after)
        elif self.shape == "exponential":
            return float(self.to**share)
        elif self.shape == "early":
            share = (1 - math.exp(-3 * share)) / (1 - math.exp(-3))
        elif self.shape == "wave":
            share = (1 - math.cos(math.pi * max(0, iteration - self.after) / self.over)) / 2
        return 1 + (self.to - 1) * share

    def _between(self, iteration: int) -> float:
        before = [point for point in self.points if point[0] <= iteration]
        later = [point for point in self.points if point[0] > iteration]
        if not before or not later:
            return (before or later)[-1 if before else 0][1]
        (x, low), (end, high) = before[-1], later[0]
        return low + (high - low) * (iteration - x) / (end - x)

    def text(self) -> str:
        if self.points:
            return "level by iteration " + ", ".join(f"{at}: {level:g}" for at, level in self.points)
        when = f" after iteration {self.after}" if self.after else ""
        how = "at once" if self.shape == "jump" else f"over {self.over} iterations, {self.shape}"
        return f"to {self.to:g} times its profile{when}, {how}"


class PeriodicWork(Frozen):
    """Work every few iterations that is not drift: validation."""

    every: Count
    component: str
    adds: Amount  # to the component's time, as a share of it
    announced: bool = False  # the replan machine is told

    def text(self) -> str:
        text = f"every {self.every} iterations {self.component} takes {self.adds:.0%} longer"
        return text + (", announced to the loop" if self.announced else ", not announced to the loop")


_STATE = Distribution(10.0, math.log(3) / P99)
_RELEASE = Distribution(0.1, math.log(5) / P99)
_PLACE = Distribution(1.5, math.log(4) / P99)
_CHECK = Distribution(0.01, math.log(5) / P99)
_RESUME = Distribution(0.05, math.log(5) / P99)


class MigrationTimes(Frozen):
    """Durations of the stages of a migration.

    Stopping, starting and checking processes as measured by our own benchmark on a real Ray (`bench run_moves`); a
    state is assumed to be 20 GB, written and read at about 2 GB/s.
    """

    save_s: Durations = _STATE
    release_s: Durations = _RELEASE
    place_s: Durations = _PLACE
    load_s: Durations = _STATE
    check_s: Durations = _CHECK
    resume_s: Durations = _RESUME
    fails: Share = 0.0  # share of migrations of which a stage fails

    def draw(self, stage: MigrationStage, move: int, seed: int) -> float:
        """Seconds of a stage; the drained iteration would have run anyway."""
        if stage is MigrationStage.drain:
            return 0.0
        times: Distribution = getattr(self, f"{stage.value}_s")
        return times.draw(random.Random(f"move {seed} {move} {stage.value}"))

    def failing(self, move: int, seed: int) -> MigrationStage | None:
        """The stage at which a migration fails, if it does."""
        source = random.Random(f"move fails {seed} {move}")
        if source.random() >= self.fails:
            return None
        return source.choice(STAGES[1:-1])

    def text(self) -> list[str]:
        times = [
            f"migration, {stage.value}: {getattr(self, f'{stage.value}_s').text()}"
            for stage in list(MigrationStage)[1:]
        ]
        return times + ([f"a stage fails in {self.fails:.0%} of the migrations"] if self.fails else [])


class ScheduledNodeEvent(Frozen):
    """A change of a node's state, at a time or before an iteration."""

    node: Node
    what: NodeEventKind
    at_s: float | None = None
    before: int | None = None
    notice_s: float = 120.0

    def text(self) -> str:
        when = f"before iteration {self.before}" if self.at_s is None else f"at {self.at_s:,.0f} s"
        what = {"joined": "joins", "lost": "is lost", "draining": "drains"}[self.what]
        notice = f", gone {self.notice_s:g} s later" if self.what == "draining" else ""
        return f"{self.node.name} {what} {when}{notice}"


@dataclass
class SimulatedNodes:
    """The existing nodes, and those that are draining."""

    there: dict[str, Node]
    leaving: dict[str, float] = field(default_factory=dict)  # by node: its deadline

    @property
    def cluster(self) -> Cluster:
        return Cluster(tuple(self.there.values()))

    def change(self, happens: Sequence[ScheduledNodeEvent], now: float) -> ClusterChanged | None:
        """Applies simultaneous events; returns the event for the replan machine, or None if nothing changed."""
        before = (dict(self.there), dict(self.leaving))
        for event in happens:
            name = event.node.name
            if event.what == "draining":
                if name in self.there:
                    self.leaving[name] = min(self.leaving.get(name, math.inf), now + event.notice_s)
                continue
            self.leaving.pop(name, None)
            if event.what == "joined":
                self.there.setdefault(name, event.node)
            else:
                self.there.pop(name, None)
        if before == (self.there, self.leaving):
            return None
        what = {event.what for event in happens}
        why = ClusterChangeCause[next(word for word in ("lost", "draining", "joined") if word in what)]
        deadline = min(self.leaving.values(), default=None)
        return ClusterChanged(self.cluster, why, tuple(name for name in self.there if name in self.leaving), deadline)


SYNTHETIC = SyntheticNoise()
MEASURED = MigrationTimes()


class ReplanReality(Frozen):
    """A job and everything that will happen to it under a seed."""

    job: PlacementJob
    iterations: int
    drift: Mapping[str, Drift] = field(default_factory=dict)
    noise: Noise = SYNTHETIC
    moves: MigrationTimes = MEASURED
    happens: tuple[ScheduledNodeEvent, ...] = ()
    save_every: int = 10  # iterations between checkpoints; 0: after every iteration, at no cost
    periodic: PeriodicWork | None = None
    allowed: FrameworkRules | None = None
    seed: int = 0

    def levels(self, iteration: int) -> dict[str, float]:
        """True cost of every drifting component in an iteration, relative to its profile."""
        return {name: drift.level(iteration) for name, drift in self.drift.items()}


class PlanCache:
    """The planner of a job with a cache: an oracle plans before every iteration of every run."""

    def __init__(self, job: PlacementJob, allowed: FrameworkRules | None = None) -> None:
        self.planner = ReplanPlanner(job.workflow, allowed)
        alone = replace(job.workflow, staleness=0)
        # no work of the next iteration is started
        self.cold = ReplanPlanner(alone) if job.workflow.staleness else self.planner
        self._found: dict[tuple[Cluster, tuple[tuple[str, float], ...]], PlacedPlan] = {}

    def best(self, cluster: Cluster, levels: Mapping[str, float]) -> PlacedPlan:
        """The best plan. Raises InfeasibleError, or InputError if there is no GPU."""
        key = (cluster, tuple(sorted(levels.items())))
        if key not in self._found:
            self._found[key] = self.planner.best(cluster, levels)
        return self._found[key]


class TrueCosts:
    """True iteration times."""

    def __init__(self, reality: ReplanReality, plans: PlanCache | None = None) -> None:
        self.reality = reality
        self.plans = plans if plans is not None else PlanCache(reality.job, reality.allowed)
        self.factors: Factors = reality.noise.factors(reality.job.workflow.names, reality.iterations, reality.seed)

    def first(self) -> PlacedPlan:
        """The plan a run begins with: the best at the profiled costs."""
        return self.plans.best(self.reality.job.cluster, {})

    def best(self, cluster: Cluster, iteration: int) -> PlacedPlan:
        """The best plan at the true costs of an iteration, without noise. Raises InfeasibleError, InputError."""
        return self.plans.best(cluster, self.reality.levels(iteration))

    def busy(self, plan: Plan, iteration: int) -> dict[str, float]:
        """Busy seconds of each component."""
        true = self.plans.planner.times(plan, self.reality.levels(iteration))
        busy = {name: seconds * float(self.factors[name][iteration]) for name, seconds in true.items()}
        extra = self.reality.periodic
        if extra is not None and iteration % extra.every == 0:
            busy[extra.component] += extra.adds * true[extra.component]
        return busy

    def seconds(self, plan: Plan, iteration: int, cold: bool = False) -> float:
        """Seconds of an iteration; a cold one, the first after a standstill, has no work started ahead."""
        planner = self.plans.cold if cold else self.plans.planner
        return planner.with_times(plan, self.busy(plan, iteration))

    def measured(self, plan: Plan, iteration: int, cold: bool = False) -> Iteration:
        """The iteration as a run measures it."""
        busy = self.busy(plan, iteration)
        extra = []
        every, periodic = self.reality.save_every, self.reality.periodic
        if every > 1 and (iteration % every == 0 or iteration == self.reality.iterations):
            extra.append("checkpoint")  # a run reports its checkpoints, and the replan machine does not count them
        if periodic is not None and periodic.announced and iteration % periodic.every == 0:
            extra.append("validation")
        return Iteration(
            iteration,
            (self.plans.cold if cold else self.plans.planner).with_times(plan, busy),
            tuple(ComponentTiming(name, seconds, len(plan.placed(name).gpus)) for name, seconds in busy.items()),
            tuple(extra),
        )
