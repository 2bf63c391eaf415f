"""trimtab keeps an RL post-training run in trim.

From Python: `trimtab.load` reads a job file of any dialect, `trimtab.plan_placement` plans it, and
`trimtab.profile.component` times the components of anybody's loop. All of them are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab import profile as profile
    from trimtab.formats.load import load as load
    from trimtab.plan.placement import plan_placement as plan_placement

__all__ = ["__version__", "load", "plan_placement", "profile"]

_HOMES = {"load": "trimtab.formats.load", "plan_placement": "trimtab.plan.placement"}


def __getattr__(name: str) -> Any:
    if name == "profile":
        return importlib.import_module("trimtab.profile")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
