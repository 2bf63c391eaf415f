"""The common result of reading a job file or a framework config.

A reader turns a file into a `LoadedJob`: the job to plan, the framework's rules, assumptions, and a function that
expresses a plan in the file's own keys. Planner and command line know nothing else about file formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.model.plan import CurrentPlacement, FrameworkRules, Plan
from trimtab.model.workflow import PlacementJob


class PlanSettings(Frozen):
    """A plan in a file's own keys: dotted key to value, in display order. A value of `None` removes a key.

    `block` is the same as YAML text; `advice` are sentences on what keys cannot express; `words` are command-line flags
    of a framework that takes no Hydra overrides.
    """

    values: Mapping[str, Any]
    block: str
    advice: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


class LaunchedScript(Frozen):
    """The launch script that a job was read from; `rewritten` is its text with a plan, or raises InputError."""

    path: Path
    rewritten: Callable[[PlanSettings], str]


class OtherMode(Frozen):
    """A mode of a framework beside that of a config: the overrides that read the config in it.

    `words` are those that the framework's command line needs beside the plan's; `needs` are what no word can say.
    """

    name: str
    overrides: tuple[str, ...]
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


class LoadedJob(Frozen):
    """A job file, read.

    `settings` raises InputError for a plan that the framework cannot express. `literal` tells whether a dotted key can
    be edited in the file itself (its value does not come from a parent file, an interpolation, or the command line);
    `states` whether the file has that value already.
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
    script: LaunchedScript | None = None
    modes: tuple[OtherMode, ...] = ()
