"""Policies that can be compared, by name: the pool machine with its settings, baselines, and the clairvoyant bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.core.errors import InputError, check_known
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import PoolSpec, PreemptionPolicy
from trimtab.replay.pool.baselines import OrderedScheduler
from trimtab.replay.pool.driver import PoolScheduler
from trimtab.replay.pool.las import THRESHOLD_GPU_S, LeastAttained
from trimtab.replay.pool.workload import POOL

UNLIMITED_S = 1e9
PREEMPTION_KEYS = tuple(
    item.name for item in fields(PreemptionPolicy) if item.name not in ("label_rules", "protected_pools", "cross_pool")
)
POOL_KEYS = ("starvation_timeout_s", "starvation_runs", "reuse", "return_preempts")
SWITCHES = ("same_pool", "reuse", "return_preempts")  # booleans; the others are numbers

KNOWN = {
    "trimtab": "the pool machine, with preemption",
    "trimtab_no_preemption": "the pool machine, without preemption",
    "fifo": "first come first served; a job that does not fit blocks all behind it",
    "fifo_fill": "first come first served; jobs that fit pass those that do not",
    "priority": "by priority, no preemption; a job that does not fit blocks all behind it",
    "priority_fill": "by priority, no preemption; jobs that fit pass those that do not",
    "las": "least attained service first, two levels (Tiresias-like)",
    "clairvoyant": "knows all lengths; preempts and moves at no cost, no fragmentation: a bound",
}


@dataclass(frozen=True)
class PoolPolicy:
    """A policy of a scenario."""

    name: str  # as shown in tables
    use: str  # a key of KNOWN
    preemption: dict[str, Any] = field(default_factory=dict)  # overrides of PreemptionPolicy
    pool: dict[str, Any] = field(default_factory=dict)  # overrides of PoolSpec
    threshold_gpu_s: float = THRESHOLD_GPU_S  # of least attained service

    def __post_init__(self) -> None:
        where = f"policy {self.name}"
        check_known([self.use], KNOWN, where, "unknown policy {}")
        check_known(self.preemption, PREEMPTION_KEYS, where)
        check_known(self.pool, POOL_KEYS, where)
        if (self.preemption and self.use != "trimtab") or (self.pool and not self.use.startswith("trimtab")):
            raise InputError(f"{self.use} takes no such settings", where=where, hint="they go with use: trimtab")
        PreemptionPolicy(**self.preemption)  # raises where a value is wrong
        PoolSpec(POOL, Resources(), **self.pool)

    def text(self) -> str:
        more = {**self.preemption, **self.pool}
        if self.use == "las":
            more["threshold_gpu_s"] = self.threshold_gpu_s
        changes = ", ".join(f"{key} {value}" for key, value in more.items())
        return KNOWN[self.use] + (f" ({changes})" if changes else "")


def scheduler(policy: PoolPolicy, node_gpus: int, quota_gpus: int) -> tuple[PoolScheduler, list[e.PoolEvent]]:
    """A new scheduler, and the events that configure it."""
    made: dict[str, Callable[[], PoolScheduler]] = {
        "fifo": lambda: OrderedScheduler(node_gpus),
        "fifo_fill": lambda: OrderedScheduler(node_gpus, fill=True),
        "priority": lambda: OrderedScheduler(node_gpus, by_priority=True),
        "priority_fill": lambda: OrderedScheduler(node_gpus, by_priority=True, fill=True),
        "las": lambda: LeastAttained(node_gpus, policy.threshold_gpu_s),
    }
    if policy.use in made:
        return made[policy.use](), []
    spec = PoolSpec(POOL, Resources.of(gpu=quota_gpus), **{"wait_s": UNLIMITED_S, **policy.pool})
    first: list[e.PoolEvent] = [e.PoolEnsured(spec)]
    if policy.use == "trimtab":
        first.append(e.PolicySet(PreemptionPolicy(**policy.preemption)))
    return PoolMachine(), first
