"""trimtab keeps an RL post-training run in trim.

`trimtab.load` reads a job file of any framework, `trimtab.plan_placement` plans it, `trimtab.profile.component` times
the components of any loop, `trimtab.connect` gives pools on a Ray cluster (`SimpleScheduler` is another interface to
them), `trimtab.ElasticGroup` runs as many members as fit, and `trimtab.Job` runs a job. All of them are imported when
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab import profile as profile
    from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler as ElasticScheduler
    from trimtab.compat.simple_scheduler.scheduler import PreemptionAggressiveness as PreemptionAggressiveness
    from trimtab.compat.simple_scheduler.scheduler import SimpleScheduler as SimpleScheduler
    from trimtab.compat.simple_scheduler.scheduler import SimpleTaskSpec as SimpleTaskSpec
    from trimtab.formats.load import load as load
    from trimtab.model.elastic_config import ElasticConfig as ElasticConfig
    from trimtab.plan.placement.planner import plan_placement as plan_placement
    from trimtab.render.notebook import report as report
    from trimtab.running import Job as Job
    from trimtab.runtime.client.session import Pool as Pool
    from trimtab.runtime.client.session import Session as Session
    from trimtab.runtime.client.session import connect as connect
    from trimtab.runtime.client.task import Task as Task
    from trimtab.runtime.elastic.group import ElasticGroup as ElasticGroup
    from trimtab.runtime.elastic.group import GroupError as GroupError
    from trimtab.runtime.elastic.group import GroupGaveUpError as GroupGaveUpError
    from trimtab.runtime.elastic.group import MemberWorld as MemberWorld
    from trimtab.runtime.elastic.group import StepFailedError as StepFailedError
    from trimtab.runtime.elastic.group import StepResult as StepResult

_HOMES = {
    "load": "trimtab.formats.load",
    "plan_placement": "trimtab.plan.placement.planner",
    "connect": "trimtab.runtime.client.session",
    "Session": "trimtab.runtime.client.session",
    "Pool": "trimtab.runtime.client.session",
    "Task": "trimtab.runtime.client.task",
    "ElasticConfig": "trimtab.model.elastic_config",
    "ElasticGroup": "trimtab.runtime.elastic.group",
    "ElasticScheduler": "trimtab.compat.elastic_scheduler.scheduler",
    "GroupError": "trimtab.runtime.elastic.group",
    "GroupGaveUpError": "trimtab.runtime.elastic.group",
    "MemberWorld": "trimtab.runtime.elastic.group",
    "StepFailedError": "trimtab.runtime.elastic.group",
    "StepResult": "trimtab.runtime.elastic.group",
    "SimpleScheduler": "trimtab.compat.simple_scheduler.scheduler",
    "SimpleTaskSpec": "trimtab.compat.simple_scheduler.scheduler",
    "PreemptionAggressiveness": "trimtab.compat.simple_scheduler.scheduler",
    "Job": "trimtab.running",
    "report": "trimtab.render.notebook",
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
