"""Settings of elastic rollout: thresholds, limits, capacity and times, validated on construction.

Contradictions are errors; settings that are allowed but likely to thrash, starve or cut requests off are warnings that
say what would happen. The policies in `trimtab.machines.rollout.policies` read these settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from trimtab.core.errors import InputError, check_known
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import SHORTEST_S, Ranges, check_fields

NARROW_GAP = 0.15  # thresholds closer than this are warned about
HIGH_THRESHOLD = 0.95  # above it requests queue before a worker is added

MAX_TIME_S = 1e8  # 3 years; the machine's own limits are sums of these
MAX_WORKERS = 1_000_000  # also of requests per worker
MAX_SHARE = 100.0  # of capacity

WHERE = "elastic_config"

PolicyFunction = Callable[[Any, Any], tuple[Any, Any]]  # state and sample in, state and decision out


class ElasticConfig(Frozen):
    """Settings of elastic rollout. Thresholds are shares of capacity, times are seconds."""

    scale_down_threshold: float = 0.5  # workers are released when the load is below this share of capacity
    scale_up_threshold: float = 0.8  # workers are added when the load is above this share of capacity
    min_workers: int = 1
    max_workers: int = 8
    requests_per_worker_capacity: int = 8  # concurrent requests per worker
    monitoring_interval: float = 5.0  # between two load samples
    drain_timeout: float = 30.0  # then requests still on a draining worker move to others
    scale_down_cooldown: float = 60.0  # between a step of any kind and a step down
    scale_up_cooldown: float = 30.0  # between two steps up
    min_stable_period: float = 10.0  # the load must have called for the step this long
    enable_elastic: bool = True  # off: the number of workers stays as it is
    # A name among `trimtab.machines.rollout.policies.policy.policies`, or a function.
    policy: str | PolicyFunction = "threshold"
    scale_down_requires_demand: bool = False  # release a worker only to a borrower that can use it long enough

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("scale_down_threshold", "scale_up_threshold"), (0.0, MAX_SHARE)),
        **dict.fromkeys(("min_workers", "max_workers", "requests_per_worker_capacity"), (1, MAX_WORKERS)),
        **dict.fromkeys(("drain_timeout", "scale_down_cooldown", "scale_up_cooldown"), (0.0, MAX_TIME_S)),
        "min_stable_period": (0.0, MAX_TIME_S),
        "monitoring_interval": (SHORTEST_S, MAX_TIME_S),
    }

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
        for name in ("enable_elastic", "scale_down_requires_demand"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        if not callable(self.policy) and not (isinstance(self.policy, str) and self.policy):
            raise _wrong("policy", self.policy, "the name of a policy, or a function")
        self._check_together()

    def _check_together(self) -> None:
        if self.scale_down_threshold >= self.scale_up_threshold:
            raise InputError(
                f"scale_down_threshold {self.scale_down_threshold:g} is not below scale_up_threshold "
                f"{self.scale_up_threshold:g}: one load would ask for fewer workers and for more",
                where=f"{WHERE}.scale_down_threshold",
                hint="leave a gap, as 0.5 and 0.8",
            )
        if self.min_workers > self.max_workers:
            raise InputError(
                f"min_workers {self.min_workers} is above max_workers {self.max_workers}",
                where=f"{WHERE}.min_workers",
                hint="min_workers is how many always serve, max_workers how many ever do",
            )

    @property
    def fit_share(self) -> float:
        """The share of capacity that a scaling step aims at: midway between the thresholds."""
        return (self.scale_down_threshold + self.scale_up_threshold) / 2

    def warnings(self) -> list[str]:
        """Sentences about settings that are allowed and likely to disappoint; none for the defaults."""
        if not self.enable_elastic:
            return []
        return [sentence for applies, sentence in self._risks() if applies]

    def _risks(self) -> list[tuple[bool, str]]:
        down, up = self.scale_down_threshold, self.scale_up_threshold
        return [
            (
                up - down < NARROW_GAP,
                f"the gap between scale_down_threshold {down:g} and scale_up_threshold {up:g} is narrow: small swings "
                f"of the load move workers; leave {NARROW_GAP:g} or more",
            ),
            (down == 0, "scale_down_threshold 0 means that no worker is ever given up"),
            (
                up > HIGH_THRESHOLD,
                f"scale_up_threshold {up:g} is so high that requests wait in the queue before a worker is added",
            ),
            (
                self.requests_per_worker_capacity == 1 and up < 1,
                f"requests_per_worker_capacity 1 with scale_up_threshold {up:g}: one request fills its worker, so a "
                "spare worker is always asked for",
            ),
            (
                self.min_workers == self.max_workers,
                f"min_workers and max_workers are both {self.min_workers}: nothing is ever scaled",
            ),
            (
                self.scale_down_cooldown < self.scale_up_cooldown,
                f"scale_down_cooldown {self.scale_down_cooldown:g} s is shorter than scale_up_cooldown "
                f"{self.scale_up_cooldown:g} s: workers are given up faster than they can be had again",
            ),
            (self.min_stable_period == 0, "min_stable_period 0 lets a single look at the load move workers"),
            (
                0 < self.min_stable_period < self.monitoring_interval,
                f"monitoring_interval {self.monitoring_interval:g} s is longer than min_stable_period "
                f"{self.min_stable_period:g} s: what happens between two looks is not seen",
            ),
            (
                0 < self.scale_up_cooldown < self.monitoring_interval,
                f"monitoring_interval {self.monitoring_interval:g} s is longer than scale_up_cooldown "
                f"{self.scale_up_cooldown:g} s: the cooldown is over before the next look",
            ),
            (self.drain_timeout == 0, "drain_timeout 0 interrupts every request of a worker that is given up"),
            (
                0 < self.scale_down_cooldown < self.drain_timeout,
                f"drain_timeout {self.drain_timeout:g} s is longer than scale_down_cooldown "
                f"{self.scale_down_cooldown:g} s: workers may be given up while others still drain",
            ),
        ]

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str = WHERE) -> ElasticConfig:
        """Settings from plain data; an unknown key is an error that names the nearest one."""
        known = [field.name for field in dataclasses.fields(cls)]
        check_known(data, known, where, "{} is no setting of elastic rollout")
        try:
            return cls(**data)
        except InputError as error:
            error.where = (error.where or where).replace(WHERE, where, 1)
            raise


def _wrong(name: str, value: object, expected: str) -> InputError:
    return InputError(f"{name} must be {expected}, not {value!r}", where=f"{WHERE}.{name}")
