"""The public API for rollout engines: `RolloutPool` and the types it uses.

from trimtab.rollout import RolloutPool, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trimtab.machines.rollout.policies.load import Taker
from trimtab.machines.rollout.policies.policy import Decision
from trimtab.machines.rollout.policies.policy import register as register_policy
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
from trimtab.runtime.engines.actor import ActorEngine
from trimtab.runtime.engines.engine import EngineDeadlines
from trimtab.runtime.rollout.launch.launcher import EngineCommand, Launcher, NoRoomError, Started
from trimtab.runtime.rollout.launch.processes import ProcessLauncher
from trimtab.runtime.rollout.leases import Lease
from trimtab.runtime.rollout.pool import RolloutPool
from trimtab.runtime.rollout.refits import RefitEngine, RefitSession
from trimtab.runtime.rollout.sampling import Chunk, Completion, ForwardedAnswer, RefusedError, Sample, SamplingParams

if TYPE_CHECKING:
    from trimtab.runtime.gateway.server import Gateway
    from trimtab.runtime.gateway.settings import GatewaySettings
    from trimtab.runtime.rollout.launch.start import engines_as_processes, engines_on_slots
    from trimtab.runtime.run.engines.component import EngineRollout

__all__ = [
    "ActorEngine",
    "Chunk",
    "Completion",
    "Decision",
    "ElasticConfig",
    "End",
    "EngineCommand",
    "EngineDeadlines",
    "EngineRollout",
    "ForwardedAnswer",
    "Gateway",
    "GatewaySettings",
    "InFlight",
    "Launcher",
    "Lease",
    "Membership",
    "NoRoomError",
    "Owner",
    "Ownership",
    "ProcessLauncher",
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
    "engines_as_processes",
    "engines_on_slots",
    "register_policy",
]


_LAZY = {  # these need Ray or the libraries of the extra `serve`: imported on first use
    "EngineRollout": "trimtab.runtime.run.engines.component",
    "Gateway": "trimtab.runtime.gateway.server",
    "GatewaySettings": "trimtab.runtime.gateway.settings",
    "engines_as_processes": "trimtab.runtime.rollout.launch.start",
    "engines_on_slots": "trimtab.runtime.rollout.launch.start",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'trimtab.rollout' has no attribute {name!r}")
