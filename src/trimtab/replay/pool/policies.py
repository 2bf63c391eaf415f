"""The policies that can be compared, by name: the pool machine with its rules, baselines, and the clairvoyant bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.core.errors import InputError, nearest
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
    one.name for one in fields(PreemptionPolicy) if one.name not in ("label_rules", "protected_pools", "cross_pool")
)
POOL_KEYS = ("patience_s", "patience_runs", "reuse", "return_preempts")
SWITCHES = ("same_pool", "reuse", "return_preempts")  # true or false, the others are numbers

KNOWN = {
    "trimtab": "the pool machine, with preemption",
    "trimtab_no_preemption": "the pool machine, nobody is evicted",
    "fifo": "first come first served; who finds no room holds up all behind it",
    "fifo_fill": "first come first served; whoever fits passes one who does not",
    "priority": "by priority, nobody is evicted; who finds no room holds up all behind it",
    "priority_fill": "by priority, nobody is evicted; whoever fits passes one who does not",
    "las": "least attained service first, two levels (Tiresias-like)",
    "clairvoyant": "knows all lengths; stops and moves for nothing, GPUs in one heap: a bound",
}


@dataclass(frozen=True)
class PoolPolicy:
    """A policy as a scenario asks for it."""

    name: str  # as it stands in tables
    use: str  # one of KNOWN
    preemption: dict[str, Any] = field(default_factory=dict)  # settings of the pool machine's policy
    pool: dict[str, Any] = field(default_factory=dict)  # settings of its pool
    threshold_gpu_s: float = THRESHOLD_GPU_S  # of least attained service

    def __post_init__(self) -> None:
        where = f"policy {self.name}"
        if self.use not in KNOWN:
            near = nearest(self.use, KNOWN)
            hint = f"did you mean {near}?" if near else "known: " + ", ".join(KNOWN)
            raise InputError(f"there is no policy {self.use}", where=where, hint=hint)
        for said, known in ((self.preemption, PREEMPTION_KEYS), (self.pool, POOL_KEYS)):
            for key in said:
                if key not in known:
                    near = nearest(key, known)
                    hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
                    raise InputError(f"{key} is not known here", where=where, hint=hint)
        if (self.preemption and self.use != "trimtab") or (self.pool and not self.use.startswith("trimtab")):
            raise InputError(f"{self.use} has no such settings", where=where, hint="they are the pool machine's")
        PreemptionPolicy(**self.preemption)  # raises where a value is wrong
        PoolSpec(POOL, Resources(), **self.pool)

    def text(self) -> str:
        """As a report states it."""
        more = {**self.preemption, **self.pool}
        if self.use == "las":
            more["threshold_gpu_s"] = self.threshold_gpu_s
        said = ", ".join(f"{key} {value}" for key, value in more.items())
        return KNOWN[self.use] + (f" ({said})" if said else "")


def scheduler(policy: PoolPolicy, node_gpus: int, quota_gpus: int) -> tuple[PoolScheduler, list[e.PoolEvent]]:
    """A fresh scheduler, and what it is told first."""
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
