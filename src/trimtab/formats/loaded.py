"""What every dialect of a job file comes down to.

A loader turns a file into a `LoadedJob`: the job to plan, the rules of the framework it belongs to, what had to be
assumed, and a way to say a plan in the file's own keys. The planner and the command line know nothing else of dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.model.plan import CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import PlacementJob


@dataclass(frozen=True)
class PlanSettings:
    """A plan in a file's own keys: dotted key to value, in the order they are shown. A value of `None` removes a key.

    `block` is the same as YAML text to read and to paste; `advice` are sentences on what keys alone cannot say; `words`
    are what goes on the command line of a framework that takes no Hydra overrides.
    """

    values: Mapping[str, Any]
    block: str
    advice: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedJob:
    """A job file, read.

    `settings` raises InputError for a plan that the framework cannot express. `literal` says whether a dotted key can
    be edited in the file itself (its value comes not from one of its defaults, an interpolation, or the command line);
    `states` whether the file says that value already, so that nothing need be written.
    """

    file_format: str
    path: Path
    job: PlacementJob
    settings: Callable[[Plan], PlanSettings]
    rules: FrameworkRules | None = None
    assumptions: tuple[str, ...] = ()
    current: CurrentPlacement | None = None
    literal: Callable[[str], bool] = lambda key: False
    states: Callable[[str, Any], bool] = lambda key, value: False
