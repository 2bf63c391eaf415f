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
    from trimtab import profile
    from trimtab.compat.elastic_scheduler.scheduler import ElasticScheduler
    from trimtab.compat.schedulemesh.simple import PreemptionAggressiveness, SimpleScheduler, SimpleTaskSpec
    from trimtab.formats.load import load
    from trimtab.model.elastic_config import ElasticConfig
    from trimtab.plan.placement.planner import plan_placement
    from trimtab.render.notebook import report
    from trimtab.running import Job
    from trimtab.runtime.client.session import Pool, Session, connect
    from trimtab.runtime.client.task import Task
    from trimtab.runtime.elastic.group import (
        ElasticGroup,
        GroupError,
        GroupGaveUpError,
        MemberWorld,
        StepFailedError,
        StepResult,
    )

_NAMES = {
    "trimtab.compat.elastic_scheduler.scheduler": "ElasticScheduler",
    "trimtab.compat.schedulemesh.simple": "PreemptionAggressiveness SimpleScheduler SimpleTaskSpec",
    "trimtab.formats.load": "load",
    "trimtab.model.elastic_config": "ElasticConfig",
    "trimtab.plan.placement.planner": "plan_placement",
    "trimtab.render.notebook": "report",
    "trimtab.running": "Job",
    "trimtab.runtime.client.session": "Pool Session connect",
    "trimtab.runtime.client.task": "Task",
    "trimtab.runtime.elastic.group": "ElasticGroup GroupError GroupGaveUpError MemberWorld StepFailedError StepResult",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

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
