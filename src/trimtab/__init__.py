"""trimtab plans, schedules and runs RL post-training on Ray.

What user code imports is here, in `trimtab.rollout` (engines and requests) and in `trimtab.integrations` (trainers).
`trimtab.load` reads a job file of any framework, `trimtab.plan_placement` plans it, `trimtab.profile.component` times
the components of any loop, `trimtab.connect` gives pools on a Ray cluster (`SimpleScheduler` is another interface to
them), `trimtab.ElasticGroup` runs as many members as fit, and `trimtab.Job` runs a job, whose components take `Batch`
and `Place` and give `Result`. All of them are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab import profile
    from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler
    from trimtab.compat.schedulemesh.simple import PreemptionAggressiveness, SimpleScheduler, SimpleTaskSpec
    from trimtab.core.errors import InfeasibleError, InputError, TrimtabError, UnreachableError
    from trimtab.core.reasons import Reason, ReasonCode
    from trimtab.formats.load import load
    from trimtab.model.elastic_config import ElasticConfig
    from trimtab.model.nodes import ElasticSpec, NodePolicy
    from trimtab.model.pool import PoolSpec, PreemptionPolicy, TaskSpec
    from trimtab.model.run import Iteration, ReplanMode, ReplanRules
    from trimtab.model.workflow import Cluster, Component, Node, PlacementJob, Variant, WeightSync, Workflow
    from trimtab.plan.placement.planner import plan_placement
    from trimtab.render.notebook import report
    from trimtab.running import Job
    from trimtab.runtime.client.session import Pool, Session, connect
    from trimtab.runtime.client.task import Task
    from trimtab.runtime.controller.rpc import ControllerSettings
    from trimtab.runtime.elastic.group import (
        ElasticGroup,
        GroupError,
        GroupGaveUpError,
        MemberWorld,
        StepFailedError,
        StepResult,
    )
    from trimtab.runtime.run.component import Batch, ComponentError, Place, Result
    from trimtab.runtime.run.job import UNMEASURED_S, ComponentCode, RunJob
    from trimtab.runtime.run.measurements import Metrics, summary_facts
    from trimtab.runtime.run.run import Run, RunEnd

_NAMES = {
    "trimtab.compat.elastic_scheduler.scheduler": "ElasticScheduler",
    "trimtab.compat.schedulemesh.simple": "PreemptionAggressiveness SimpleScheduler SimpleTaskSpec",
    "trimtab.core.errors": "InfeasibleError InputError TrimtabError UnreachableError",
    "trimtab.core.reasons": "Reason ReasonCode",
    "trimtab.formats.load": "load",
    "trimtab.model.elastic_config": "ElasticConfig",
    "trimtab.model.nodes": "ElasticSpec NodePolicy",
    "trimtab.model.pool": "PoolSpec PreemptionPolicy TaskSpec",
    "trimtab.model.run": "Iteration ReplanMode ReplanRules",
    "trimtab.model.workflow": "Cluster Component Node PlacementJob Variant WeightSync Workflow",
    "trimtab.plan.placement.planner": "plan_placement",
    "trimtab.render.notebook": "report",
    "trimtab.running": "Job",
    "trimtab.runtime.client.session": "Pool Session connect",
    "trimtab.runtime.client.task": "Task",
    "trimtab.runtime.controller.rpc": "ControllerSettings",
    "trimtab.runtime.elastic.group": "ElasticGroup GroupError GroupGaveUpError MemberWorld StepFailedError StepResult",
    "trimtab.runtime.run.component": "Batch ComponentError Place Result",
    "trimtab.runtime.run.job": "UNMEASURED_S ComponentCode RunJob",
    "trimtab.runtime.run.measurements": "Metrics summary_facts",
    "trimtab.runtime.run.run": "Run RunEnd",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "UNMEASURED_S",
    "Batch",
    "Cluster",
    "Component",
    "ComponentCode",
    "ComponentError",
    "ControllerSettings",
    "ElasticConfig",
    "ElasticGroup",
    "ElasticScheduler",
    "ElasticSpec",
    "GroupError",
    "GroupGaveUpError",
    "InfeasibleError",
    "InputError",
    "Iteration",
    "Job",
    "MemberWorld",
    "Metrics",
    "Node",
    "NodePolicy",
    "Place",
    "PlacementJob",
    "Pool",
    "PoolSpec",
    "PreemptionAggressiveness",
    "PreemptionPolicy",
    "Reason",
    "ReasonCode",
    "ReplanMode",
    "ReplanRules",
    "Result",
    "Run",
    "RunEnd",
    "RunJob",
    "Session",
    "SimpleScheduler",
    "SimpleTaskSpec",
    "StepFailedError",
    "StepResult",
    "Task",
    "TaskSpec",
    "TrimtabError",
    "UnreachableError",
    "Variant",
    "WeightSync",
    "Workflow",
    "__version__",
    "connect",
    "load",
    "plan_placement",
    "profile",
    "report",
    "summary_facts",
]


def __getattr__(name: str) -> Any:
    if name == "profile":
        return importlib.import_module("trimtab.profile")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
