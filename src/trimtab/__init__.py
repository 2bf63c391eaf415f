"""trimtab keeps an RL post-training run in trim.

From Python: `trimtab.load` reads a job file of any dialect, `trimtab.plan_placement` plans it,
`trimtab.profile.component` times the components of anybody's loop, and `trimtab.connect` has pools on a Ray cluster
(`SimpleScheduler` is another way to them); `trimtab.ElasticGroup` has a member wherever there is room, and
`trimtab.Job` is a job that runs. All of them are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab import profile as profile
    from trimtab.formats.load import load as load
    from trimtab.model.elastic_config import ElasticConfig as ElasticConfig
    from trimtab.plan.placement.planner import plan_placement as plan_placement
    from trimtab.running import Job as Job
    from trimtab.runtime.elastic_scheduler import ElasticScheduler as ElasticScheduler
    from trimtab.runtime.ray.client import Pool as Pool
    from trimtab.runtime.ray.client import Session as Session
    from trimtab.runtime.ray.client import connect as connect
    from trimtab.runtime.ray.elastic import ElasticGroup as ElasticGroup
    from trimtab.runtime.ray.elastic import GroupError as GroupError
    from trimtab.runtime.ray.elastic import GroupGaveUpError as GroupGaveUpError
    from trimtab.runtime.ray.elastic import MemberWorld as MemberWorld
    from trimtab.runtime.ray.elastic import StepFailedError as StepFailedError
    from trimtab.runtime.ray.elastic import StepResult as StepResult
    from trimtab.runtime.ray.task import Task as Task
    from trimtab.runtime.simple import PreemptionAggressiveness as PreemptionAggressiveness
    from trimtab.runtime.simple import SimpleScheduler as SimpleScheduler
    from trimtab.runtime.simple import SimpleTaskSpec as SimpleTaskSpec
    from trimtab.ui.notebook import report as report

_HOMES = {
    "load": "trimtab.formats.load",
    "plan_placement": "trimtab.plan.placement.planner",
    "connect": "trimtab.runtime.ray.client",
    "Session": "trimtab.runtime.ray.client",
    "Pool": "trimtab.runtime.ray.client",
    "Task": "trimtab.runtime.ray.task",
    "ElasticConfig": "trimtab.model.elastic_config",
    "ElasticGroup": "trimtab.runtime.ray.elastic",
    "ElasticScheduler": "trimtab.runtime.elastic_scheduler",
    "GroupError": "trimtab.runtime.ray.elastic",
    "GroupGaveUpError": "trimtab.runtime.ray.elastic",
    "MemberWorld": "trimtab.runtime.ray.elastic",
    "StepFailedError": "trimtab.runtime.ray.elastic",
    "StepResult": "trimtab.runtime.ray.elastic",
    "SimpleScheduler": "trimtab.runtime.simple",
    "SimpleTaskSpec": "trimtab.runtime.simple",
    "PreemptionAggressiveness": "trimtab.runtime.simple",
    "Job": "trimtab.running",
    "report": "trimtab.ui.notebook",
}

__all__ = [
    "ElasticConfig",
    "ElasticGroup",
    "ElasticScheduler",
    "GroupError",
    "GroupGaveUpError",
    "Job",
    "MemberWorld",
    "Pool",
    "PreemptionAggressiveness",
    "Session",
    "SimpleScheduler",
    "SimpleTaskSpec",
    "StepFailedError",
    "StepResult",
    "Task",
    "__version__",
    "connect",
    "load",
    "plan_placement",
    "profile",
    "report",
]


def __getattr__(name: str) -> Any:
    if name == "profile":
        return importlib.import_module("trimtab.profile")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
