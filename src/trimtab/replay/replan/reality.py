"""A simulated RL job: what its iterations truly take under any plan, what its moves take, what happens to its nodes.

The loop is told only what it could measure; the truth is here. An iteration takes what the planner's simulation says of
the true costs (profile x drift x noise): whether that simulation is near reality is measured elsewhere, on real runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from trimtab.core.errors import InputError, nearest
from trimtab.machines.replan.decision import ReplanPlanner
from trimtab.machines.replan.events import ClusterChangeCause, ClusterChanged
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.plan import FrameworkRules, Plan
from trimtab.model.run import ComponentTiming, Iteration, MigrationStage
from trimtab.model.workflow import Cluster, Node, PlacementJob
from trimtab.replay.common.churn import NodeEventKind
from trimtab.replay.common.timing import P99, Distribution
from trimtab.replay.replan.noise import Factors, Noise, SyntheticNoise

DriftShape = Literal["steady", "exponential", "early", "wave", "jump"]


@dataclass(frozen=True)
class Drift:
    """How a component's level moves: to `to` times its profile, over so many iterations, after so many.

    `steady` in equal steps, `exponential` by equal factors, `early` most of it at first, `wave` there and back time
    and again, `jump` all at once. `points` (iteration, level) take the place of all that, straight lines between them.
    """

    to: float = 1.0
    over: int = 1
    after: int = 0
    shape: DriftShape = "steady"
    points: tuple[tuple[int, float], ...] = ()

    def level(self, iteration: int) -> float:
        """What an iteration costs against the profile."""
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
        before = [one for one in self.points if one[0] <= iteration]
        later = [one for one in self.points if one[0] > iteration]
        if not before or not later:
            return (before or later)[-1 if before else 0][1]
        (x, low), (end, high) = before[-1], later[0]
        return low + (high - low) * (iteration - x) / (end - x)

    def text(self) -> str:
        """As a report states it."""
        if self.points:
            return "level by iteration " + ", ".join(f"{at}: {level:g}" for at, level in self.points)
        when = f" after iteration {self.after}" if self.after else ""
        how = "at once" if self.shape == "jump" else f"over {self.over} iterations, {self.shape}"
        return f"to {self.to:g} times its profile{when}, {how}"


@dataclass(frozen=True)
class PeriodicWork:
    """Work that comes every so many iterations and is no drift: validation."""

    every: int
    component: str
    adds: float  # to what the component takes, as a share of it
    announced: bool = False  # the loop is told of it

    def text(self) -> str:
        """As a report states it."""
        said = f"every {self.every} iterations {self.component} takes {self.adds:.0%} longer"
        return said + (", which the loop is told" if self.announced else ", of which the loop is not told")


_STATE = Distribution(10.0, math.log(3) / P99)
_RELEASE = Distribution(0.1, math.log(5) / P99)
_PLACE = Distribution(1.5, math.log(4) / P99)
_CHECK = Distribution(0.01, math.log(5) / P99)
_RESUME = Distribution(0.05, math.log(5) / P99)


@dataclass(frozen=True)
class MigrationTimes:
    """What the stages of a move take.

    Ending, starting and greeting processes as our own bench measures them on a real Ray (`bench run_moves`); a state is
    assumed to be 20 GB, written and read at about 2 GB/s.
    """

    save_s: Distribution = _STATE
    release_s: Distribution = _RELEASE
    place_s: Distribution = _PLACE
    load_s: Distribution = _STATE
    check_s: Distribution = _CHECK
    resume_s: Distribution = _RESUME
    fails: float = 0.0  # share of moves of which one stage fails

    @classmethod
    def of(cls, said: Mapping[str, Any], where: str, otherwise: MigrationTimes | None = None) -> MigrationTimes:
        """As a scenario says it; what it leaves out is as above, or as it is otherwise."""
        known = [one.name for one in fields(cls)]
        stated: dict[str, Any] = {}
        for key, value in said.items():
            if key not in known:
                near = nearest(str(key), known)
                hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
                raise InputError(f"{key} is not known here", where=where, hint=hint)
            if key == "fails":
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                    raise InputError(f"fails is a share from 0 to 1, not {value!r}", where=f"{where}.fails")
                stated[key] = float(value)
            else:
                stated[key] = Distribution.of(value, f"{where}.{key}")
        return replace(otherwise or cls(), **stated)

    def draw(self, stage: MigrationStage, move: int, seed: int) -> float:
        """Seconds that a stage takes; the iteration that is drained would have run anyway."""
        if stage is MigrationStage.drain:
            return 0.0
        times: Distribution = getattr(self, f"{stage.value}_s")
        return times.draw(random.Random(f"move {seed} {move} {stage.value}"))

    def failing(self, move: int, seed: int) -> MigrationStage | None:
        """The stage at which a move fails, if it does."""
        source = random.Random(f"move fails {seed} {move}")
        if source.random() >= self.fails:
            return None
        return source.choice(
            (
                MigrationStage.save,
                MigrationStage.release,
                MigrationStage.place,
                MigrationStage.load,
                MigrationStage.check,
            )
        )

    def text(self) -> list[str]:
        """A line for each."""
        times = [
            f"a move's {stage.value}: {getattr(self, f'{stage.value}_s').text()}" for stage in list(MigrationStage)[1:]
        ]
        return times + ([f"one stage fails in {self.fails:.0%} of the moves"] if self.fails else [])


# ---- nodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduledNodeEvent:
    """Something happens to a node: at a time, or between two iterations, before the one that is named."""

    node: Node
    what: NodeEventKind
    at_s: float | None = None
    before: int | None = None
    notice_s: float = 120.0

    def text(self) -> str:
        """As a report states it."""
        when = f"before iteration {self.before}" if self.at_s is None else f"at {self.at_s:,.0f} s"
        what = {"joined": "joins", "lost": "is lost", "draining": "drains"}[self.what]
        notice = f", gone {self.notice_s:g} s later" if self.what == "draining" else ""
        return f"{self.node.name} {what} {when}{notice}"


@dataclass
class SimulatedNodes:
    """The nodes that are there, and those that will go."""

    there: dict[str, Node]
    leaving: dict[str, float] = field(default_factory=dict)  # until when

    @property
    def cluster(self) -> Cluster:
        """What is there."""
        return Cluster(tuple(self.there.values()))

    def change(self, happens: Sequence[ScheduledNodeEvent], now: float) -> ClusterChanged | None:
        """What the loop is told of all that happens at one moment; None where it changes nothing."""
        before = (dict(self.there), dict(self.leaving))
        for one in happens:
            name = one.node.name
            if one.what == "draining":
                if name in self.there:
                    self.leaving[name] = min(self.leaving.get(name, math.inf), now + one.notice_s)
                continue
            self.leaving.pop(name, None)
            if one.what == "joined":
                self.there.setdefault(name, one.node)
            else:
                self.there.pop(name, None)
        if before == (self.there, self.leaving):
            return None
        what = {one.what for one in happens}
        why = (
            ClusterChangeCause.lost
            if "lost" in what
            else ClusterChangeCause.draining
            if "draining" in what
            else ClusterChangeCause.joined
        )
        deadline = min(self.leaving.values(), default=None)
        return ClusterChanged(self.cluster, why, tuple(name for name in self.there if name in self.leaving), deadline)


# ---- the truth ----------------------------------------------------------------------------------------------------


MADE_UP = SyntheticNoise()
MEASURED = MigrationTimes()


@dataclass(frozen=True)
class ReplanReality:
    """A job with all that will happen to it under a seed."""

    job: PlacementJob
    iterations: int
    drift: Mapping[str, Drift] = field(default_factory=dict)
    noise: Noise = MADE_UP
    moves: MigrationTimes = MEASURED
    happens: tuple[ScheduledNodeEvent, ...] = ()
    save_every: int = 10  # iterations between two states to go on from after a loss; 0: every iteration, for nothing
    periodic: PeriodicWork | None = None
    allowed: FrameworkRules | None = None
    seed: int = 0

    def levels(self, iteration: int) -> dict[str, float]:
        """What every component that drifts costs in an iteration, against its profile."""
        return {name: one.level(iteration) for name, one in self.drift.items()}


class PlanCache:
    """The planner of a job, with what it has found: an oracle asks before every iteration of every run."""

    def __init__(self, job: PlacementJob, allowed: FrameworkRules | None = None) -> None:
        self.planner = ReplanPlanner(job.workflow, allowed)
        alone = replace(job.workflow, staleness=0)
        self.cold = ReplanPlanner(alone) if job.workflow.staleness else self.planner  # nothing of the next is begun yet
        self._found: dict[tuple[Cluster, tuple[tuple[str, float], ...]], PlacedPlan] = {}

    def best(self, cluster: Cluster, levels: Mapping[str, float]) -> PlacedPlan:
        """The best plan there is. Raises InfeasibleError, or InputError where there is no GPU at all."""
        key = (cluster, tuple(sorted(levels.items())))
        if key not in self._found:
            self._found[key] = self.planner.best(cluster, levels)
        return self._found[key]


class TrueCosts:
    """What an iteration really takes."""

    def __init__(self, reality: ReplanReality, plans: PlanCache | None = None) -> None:
        self.reality = reality
        self.plans = plans if plans is not None else PlanCache(reality.job, reality.allowed)
        self.factors: Factors = reality.noise.factors(reality.job.workflow.names, reality.iterations, reality.seed)

    def first(self) -> PlacedPlan:
        """The plan that a run begins with: the best one for the costs as profiled."""
        return self.plans.best(self.reality.job.cluster, {})

    def best(self, cluster: Cluster, iteration: int) -> PlacedPlan:
        """The best plan for the true costs of an iteration; noise is nobody's to know. InfeasibleError, InputError."""
        return self.plans.best(cluster, self.reality.levels(iteration))

    def busy(self, plan: Plan, iteration: int) -> dict[str, float]:
        """What each component computes."""
        true = self.plans.planner.times(plan, self.reality.levels(iteration))
        busy = {name: seconds * float(self.factors[name][iteration]) for name, seconds in true.items()}
        extra = self.reality.periodic
        if extra is not None and iteration % extra.every == 0:
            busy[extra.component] += extra.adds * true[extra.component]
        return busy

    def seconds(self, plan: Plan, iteration: int, cold: bool = False) -> float:
        """What an iteration takes; a cold one, the first after a standstill, has no work that was begun before it."""
        planner = self.plans.cold if cold else self.plans.planner
        return planner.with_times(plan, self.busy(plan, iteration))

    def measured(self, plan: Plan, iteration: int, cold: bool = False) -> Iteration:
        """What a run measures of it."""
        busy = self.busy(plan, iteration)
        extra = []
        every, periodic = self.reality.save_every, self.reality.periodic
        if every > 1 and (iteration % every == 0 or iteration == self.reality.iterations):
            extra.append("checkpoint")  # a run that saves now and then says so, and the loop does not count it
        if periodic is not None and periodic.announced and iteration % periodic.every == 0:
            extra.append("validation")
        return Iteration(
            iteration,
            (self.plans.cold if cold else self.plans.planner).with_times(plan, busy),
            tuple(ComponentTiming(name, seconds, len(plan.placed(name).gpus)) for name, seconds in busy.items()),
            tuple(extra),
        )
