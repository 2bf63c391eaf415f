"""What a scaling policy is given and what it answers: the load at one time, a decision, and what is remembered.

Frozen facts, plain data. Time is in the sample, so that whoever decides needs no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.numbers import check_whole, is_number
from trimtab.core.reasons import Reason
from trimtab.model.elastic_config import ElasticConfig


@dataclass(frozen=True)
class Taker:
    """Who could use workers that are given up."""

    name: str
    workers: int  # how many it could use
    use_s: float  # for how long; inf: for as long as they are given

    def __post_init__(self) -> None:
        check_whole(f"workers of taker {self.name}", self.workers, "takers")
        if not (is_number(self.use_s, 0) or self.use_s == math.inf):
            raise InputError(
                f"use_s of taker {self.name} must be seconds, 0 or more, not {self.use_s!r}", where="takers"
            )


@dataclass(frozen=True)
class SleepCosts:
    """What it takes to give a worker up and have it back, as measured: means, None until measured."""

    sleep_s: float | None = None
    wake_s: float | None = None
    drain_s: float | None = None


@dataclass(frozen=True)
class LoadSample:
    """The load at one time, in requests, and the workers that carry it."""

    now: float
    queued: int
    running: int  # on ACTIVE workers
    draining: int  # on DRAINING workers
    active: int
    starting: int
    draining_workers: int
    ready_to_wake: int  # INACTIVE workers that can be had
    capacity: int  # requests that one worker takes
    min_workers: int  # limits as they are now
    max_workers: int
    takers: tuple[Taker, ...] = ()
    costs: SleepCosts = SleepCosts()
    fresh: bool = True  # False: some of this could not be asked, or is old
    idle: int = 0  # ACTIVE workers with no request at all
    service_s: float | None = None  # what a request takes on a worker, lately; None until one was answered

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise InputError(f"a worker takes at least one request, not {self.capacity}", where="the load sample")
        if not 0 <= self.min_workers <= self.max_workers:
            raise InputError(
                f"no number of workers is at least {self.min_workers} and at most {self.max_workers}",
                where="the load sample",
            )

    @property
    def load(self) -> int:
        """All requests that are not answered: whoever serves them now, the workers that remain will have to."""
        return self.queued + self.running + self.draining

    @property
    def serving(self) -> int:
        """Workers that serve or will do so by themselves."""
        return self.active + self.starting

    @property
    def inside(self) -> int:
        """The serving workers, or the nearest number of them that the limits allow."""
        return self.within(self.serving)

    def within(self, workers: int) -> int:
        """The nearest number of workers that the limits allow."""
        return min(max(workers, self.min_workers), self.max_workers)

    @property
    def ratio(self) -> float:
        """Load as a share of what the serving workers take."""
        if self.serving == 0:
            return math.inf if self.load else 0.0
        return self.load / (self.serving * self.capacity)


@dataclass(frozen=True)
class Decision:
    """How many workers should serve from now on, why, and what is expected of it."""

    workers: int  # ACTIVE and STARTING together
    reason: Reason
    expects: str
    checked: str = ""  # what became of what an earlier decision expected, where that is known now
    came_true: bool | None = None  # the same for programs; None: nothing was to be checked yet


@dataclass(frozen=True)
class LoadSpan:
    """A stretch of time with its load."""

    start: float
    end: float
    mean: float
    peak: float


@dataclass(frozen=True)
class ExpectedEffect:
    """What a decision expected: checked once its workers have come or gone, or when the next step is made."""

    at: float
    workers: int
    ratio: float  # of load to capacity: not more than this
    step: int  # how many workers more (or, negative, fewer); 0: none


@dataclass(frozen=True)
class PolicyMemory:
    """What a policy remembers from one look to the next. Plain data: it can be in a snapshot."""

    spans: tuple[LoadSpan, ...] = ()  # loads of the last `min_stable_period` and a little more, oldest first
    last_at: float | None = None  # of the last look at which the load was known
    last_load: float = 0.0
    known_since: float | None = None  # no look since then failed or came late; None: the last one failed
    over_since: float | None = None  # an overload began then, and goes on
    last_up: float | None = None
    last_down: float | None = None
    expected: ExpectedEffect | None = None  # of the last decision, unless it has been checked
    outcome: str = ""  # what became of the last step: told by the next one
    kept: Any = None  # what other policies, and those of users, remember: plain data


@dataclass(frozen=True)
class PolicyState:
    """Settings and memory: all that a policy knows besides the sample."""

    config: ElasticConfig
    memory: PolicyMemory = PolicyMemory()


ScalingPolicy = Callable[[PolicyState, LoadSample], tuple[PolicyState, Decision]]


def workers_text(count: int) -> str:
    """So many workers, in words."""
    return f"{count} worker{'' if count == 1 else 's'}"
