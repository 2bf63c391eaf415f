"""Input and output of scaling policies: load sample, decision, policy memory.

Frozen plain data. The time is in the sample, so that a policy needs no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import COUNT, Range
from trimtab.core.reasons import Reason
from trimtab.model.elastic_config import ElasticConfig


class Taker(Frozen):
    """A consumer that could use released workers."""

    name: str
    workers: int  # that it could use
    use_s: float  # for how long; inf: as long as it has them

    def __post_init__(self) -> None:
        Range(*COUNT, whole=True).check(f"workers of taker {self.name}", self.workers, "takers")
        if self.use_s != math.inf:
            Range(0.0, math.inf).check(f"use_s of taker {self.name}", self.use_s, "takers")


class SleepCosts(Frozen):
    """Measured means of releasing a worker and getting it back; None until measured."""

    sleep_s: float | None = None
    wake_s: float | None = None
    drain_s: float | None = None


class LoadSample(Frozen):
    """The load at one time, in requests, and the workers."""

    now: float
    queued: int
    running: int  # on ACTIVE workers
    draining: int  # on DRAINING workers
    active: int
    starting: int
    draining_workers: int
    ready_to_wake: int  # INACTIVE workers that are available
    capacity: int  # requests per worker
    min_workers: int  # current limits
    max_workers: int
    takers: tuple[Taker, ...] = ()
    costs: SleepCosts = SleepCosts()
    fresh: bool = True  # False: some figures are missing or stale
    idle: int = 0  # ACTIVE workers without requests
    service_s: float | None = None  # recent mean service time of a request; None until measured

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise InputError(
                f"capacity is {self.capacity}: a worker takes at least one request", where="the load sample"
            )
        if not 0 <= self.min_workers <= self.max_workers:
            raise InputError(
                f"no number of workers is at least {self.min_workers} and at most {self.max_workers}",
                where="the load sample",
            )

    @property
    def load(self) -> int:
        """All unanswered requests: the remaining workers will have to serve them."""
        return self.queued + self.running + self.draining

    @property
    def serving(self) -> int:
        """Workers that serve, or will without a further decision."""
        return self.active + self.starting

    @property
    def inside(self) -> int:
        return self.within(self.serving)

    def within(self, workers: int) -> int:
        return min(max(workers, self.min_workers), self.max_workers)

    @property
    def ratio(self) -> float:
        if self.serving == 0:
            return math.inf if self.load else 0.0
        return self.load / (self.serving * self.capacity)


class Decision(Frozen):
    """The wanted worker count, its reason, and its expected effect."""

    workers: int  # ACTIVE and STARTING together
    reason: Reason
    expects: str
    checked: str = ""  # outcome of an earlier decision, once known
    came_true: bool | None = None  # the same as a flag; None: not known yet


class LoadSpan(Frozen):
    """A time span with its load."""

    start: float
    end: float
    mean: float
    peak: float


class ExpectedEffect(Frozen):
    """Expected effect of a decision: checked once its workers have come or gone, or at the next step."""

    at: float
    workers: int
    ratio: float  # upper limit of load to capacity
    step: int  # workers added (negative: removed)


class PolicyMemory(Frozen):
    """Policy memory between evaluations. Plain data: part of snapshots."""

    spans: tuple[LoadSpan, ...] = ()  # loads of the last `min_stable_period` and a little more, oldest first
    last_at: float | None = None  # of the last evaluation with a known load
    last_load: float = 0.0
    known_since: float | None = None  # no evaluation since then failed or was late; None: the last one failed
    over_since: float | None = None  # start of the current overload
    last_up: float | None = None
    last_down: float | None = None
    expected: ExpectedEffect | None = None  # of the last decision, until checked
    outcome: str = ""  # of the last step; reported with the next one
    kept: Any = None  # memory of other policies, and of users' policies: plain data


class PolicyState(Frozen):
    """Settings and memory of a policy."""

    config: ElasticConfig
    memory: PolicyMemory = PolicyMemory()


ScalingPolicy = Callable[[PolicyState, LoadSample], tuple[PolicyState, Decision]]
