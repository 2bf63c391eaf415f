"""Observed runs: measured iterations, the rules of re-planning, and migrations; validated on construction.

Whether a run moves to another plan is decided in `trimtab.machines.replan`.
"""

from __future__ import annotations

import enum
import math
from typing import ClassVar

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import COUNT, LONGEST_S, MAX_COUNT, Ranges, check_fields, is_number, is_whole
from trimtab.core.reasons import Reason
from trimtab.model.ledger import BUCKETS
from trimtab.model.plan import Plan


class ReplanMode(str, enum.Enum):
    """What re-planning may do."""

    advise = "advise"  # report what it would do and the gain
    auto = "auto"  # do it


class MigrationStage(str, enum.Enum):
    """The stages of a migration, in order. A failure of any of them ends in the old plan."""

    drain = "drain"  # the current iteration ends; components that move accept no new work
    save = "save"  # components that move write their whole state
    release = "release"  # GPUs that change hands are released
    place = "place"  # new and moving components get their GPUs and processes
    load = "load"  # the whole state is read there
    check = "check"  # every component responds, with the saved state
    resume = "resume"  # batches flow again


STAGES = tuple(MigrationStage)

SHARE = (0.0, 1_000.0)  # of a cost, an iteration or a spread
MIN_LIMIT_S = 0.001


class ReplanRules(Frozen):
    """When a run is moved to another plan. Counts are iterations."""

    mode: ReplanMode = ReplanMode.advise
    horizon_iterations: int = 50  # a gain counts for at most this many, or for those that remain
    margin: float = 0.5  # by which the gain must exceed the move's cost, as a share of it
    dwell_iterations: int = 5  # between moves; doubled after one that failed or fell short
    least_gain: float = 0.04  # share of an iteration below which plans count as equal; half of it counts as sure
    noise: float = 0.06  # a cost within this share of the planned one is no drift, however steady
    noise_widths: float = 3.0  # nor is one within this multiple of the measured spread
    least_iterations: int = 8  # measured before any decision: the first ones are often slow
    window: int = 10  # latest iterations that give level, trend and spread
    trust: float = 0.5  # no moves if predicted and measured time differ by more than this share
    assumed_move_s: float = 60.0  # cost of a move until one was measured
    stage_limit_s: float = 600.0  # of each stage; the drain stage has twice the current iteration in addition
    rollback_limit_s: float = 900.0
    wait_s: float = 900.0  # for nodes, without a feasible plan
    tries: int = 3  # of a forced move
    back_off_s: float = 5.0  # before the second try; doubles
    elastic: tuple[str, ...] = ()  # components that scale within the plan's range
    range_slack: float = 0.02  # the range starts at the fewest GPUs that lengthen the iteration by at most this share

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("margin", "least_gain", "noise", "noise_widths", "trust", "range_slack"), SHARE),
        **dict.fromkeys(("stage_limit_s", "rollback_limit_s"), (MIN_LIMIT_S, LONGEST_S)),
        **dict.fromkeys(("horizon_iterations", "least_iterations"), (1, MAX_COUNT)),
        "dwell_iterations": COUNT,
        "window": (4, 10_000),
        "tries": (1, 100),
    }

    def __post_init__(self) -> None:
        check_fields(self, "the rules of the run")


class ComponentTiming(Frozen):
    """One component in one iteration. `busy_s` is its compute time for its batches, without waiting."""

    component: str
    busy_s: float
    gpus: int = 0  # used; 0: on CPUs
    batches: int | None = None  # None: all
    wait_s: float = 0.0  # for inputs and for space in its output queue
    offload_s: float = 0.0
    onload_s: float = 0.0
    turn_s: float = 0.0  # waiting for its turn on shared GPUs, besides offload and onload

    @property
    def switch_s(self) -> float:
        return self.offload_s + self.onload_s + self.turn_s

    def __post_init__(self) -> None:
        for name in ("busy_s", "wait_s", "offload_s", "onload_s", "turn_s"):
            if not is_number(getattr(self, name), 0):
                raise InputError(f"{name} of {self.component} is not a time", where="a measured iteration")
        if self.gpus < 0 or (self.batches is not None and self.batches < 1):
            raise InputError(f"{self.component} cannot have done this", where="a measured iteration")


class Iteration(Frozen):
    """A completed iteration. `extra` names periodic work in it (validation, checkpoint): it is no cost measurement.

    `booked` is its ledger: seconds of each of `ledger.BUCKETS`, None where nothing was timed.
    """

    number: int  # 1, 2, 3 ...
    wall_s: float
    components: tuple[ComponentTiming, ...] = ()
    extra: tuple[str, ...] = ()
    booked: dict[str, float] | None = None
    sync_s: float | None = None  # of its weight sync

    @property
    def unbooked_s(self) -> float | None:
        return None if self.booked is None else max(0.0, self.wall_s - sum(self.booked.values()))

    def __post_init__(self) -> None:
        if not is_whole(self.number, 1, math.inf):
            raise InputError(f"{self.number!r} is no number of an iteration", hint="they count from 1")
        if not is_number(self.wall_s, 0) or not (self.sync_s is None or is_number(self.sync_s, 0)):
            raise InputError(f"the wall time of iteration {self.number} is not a time", where="a measured iteration")
        names = [timing.component for timing in self.components]
        if len(set(names)) < len(names):
            raise InputError(f"a component of iteration {self.number} was measured twice", where="a measured iteration")
        for bucket, booked_s in (self.booked or {}).items():
            if bucket not in BUCKETS or not is_number(booked_s, 0):
                raise InputError(f"iteration {self.number} has no {bucket} of {booked_s!r:.40} s", where="its ledger")
        if sum((self.booked or {}).values()) > self.wall_s * (1 + 1e-6) + 1e-3:
            raise InputError(f"more is booked than iteration {self.number} took", where="its ledger")


class CostEstimate(Frozen):
    """Current cost of a component relative to its profile: the profile's curve times `level`.

    `middle` is the level without the trend (with one, of the newest iterations); `spread` that of single iterations;
    `trend` the change per iteration, if any. A level counts as different if it is further than `width` from both.
    """

    level: float = 1.0
    middle: float = 1.0
    spread: float = 0.0
    trend: float = 0.0
    width: float = 0.0
    measured: int = 0  # iterations used


class DecisionNumbers(Frozen):
    """The figures of a decision. Seconds per iteration are predicted from current measurements."""

    iteration_s: float | None = None  # of the plan that runs
    new_iteration_s: float | None = None  # of the best other plan
    gain_s: float | None = None  # per iteration
    sure_gain_s: float | None = None  # per iteration, if costs drifted only as far as the noise allows to say
    horizon: int | None = None  # iterations for which a gain counts
    cost_s: float | None = None  # of the move
    cost_measured: bool = False  # False: assumed
    margin: float | None = None
    dwell_left: int = 0  # iterations until a move is allowed again


class ChangeKind(str, enum.Enum):
    """What a migration does to a component."""

    stays = "stays"  # same GPUs, same group
    grows = "grows"  # keeps its GPUs and gets more
    shrinks = "shrinks"  # keeps some of its GPUs
    moves = "moves"  # other GPUs, or another way to run
    regroups = "regroups"  # shares its GPUs with other components than before
    replaced = "replaced"  # what it ran on is gone


class ComponentChange(Frozen):
    """What a migration does to one component. Slots are (node, GPU of that node)."""

    component: str
    how: ChangeKind
    before: tuple[tuple[str, int], ...]
    after: tuple[tuple[str, int], ...]


class Migration(Frozen):
    """From one plan to another while training goes on."""

    id: int  # 1, 2, 3 ...
    before: Plan
    after: Plan
    changes: tuple[ComponentChange, ...]
    reason: Reason
    numbers: DecisionNumbers
    forced: bool = False  # the old plan cannot go on

    @property
    def touched(self) -> tuple[str, ...]:
        return tuple(change.component for change in self.changes if change.how is not ChangeKind.stays)


class MigrationCost(Frozen):
    """Seconds of each stage of a completed migration."""

    move: int
    touched: tuple[str, ...]
    stages: tuple[tuple[MigrationStage, float], ...]

    @property
    def seconds(self) -> float:
        return sum(took for _, took in self.stages)
