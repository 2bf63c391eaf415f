"""Rollout engines for a trainer: `RolloutPool` and what goes with it.

from trimtab.rollout import RolloutPool, SamplingParams
"""

from __future__ import annotations

from trimtab.fleet.scaling import Taker
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import (
    End,
    InFlight,
    Membership,
    Owner,
    Ownership,
    RefitWay,
    RequestClass,
    RolloutRules,
    Span,
    WorkerSpec,
    WorkerState,
)
from trimtab.runtime.rollout.launcher import EngineCommand, Launcher, Started
from trimtab.runtime.rollout.leases import Lease
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.refits import RefitEngine, RefitSession
from trimtab.runtime.rollout.sampling import Chunk, Completion, RefusedError, Sample, SamplingParams

__all__ = [
    "Chunk",
    "Completion",
    "ElasticConfig",
    "End",
    "EngineCommand",
    "InFlight",
    "Launcher",
    "Lease",
    "Membership",
    "Owner",
    "Ownership",
    "RefitEngine",
    "RefitSession",
    "RefitWay",
    "RefusedError",
    "RequestClass",
    "RolloutPool",
    "RolloutRules",
    "Sample",
    "SamplingParams",
    "Span",
    "Started",
    "Taker",
    "WorkerSpec",
    "WorkerState",
]
