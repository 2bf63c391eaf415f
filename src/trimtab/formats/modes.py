"""The modes that a framework has beside the one of a config, each planned with the same costs.

A mode is a set of overrides of the config: it is read and planned as any config is, so nothing is shown that its reader
would refuse. Costs are those of the present mode: what generation and training take does not depend on whether they run
side by side, except where they disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.loaded import LoadedJob, OtherMode
from trimtab.formats.write_back import shell_words
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan


@dataclass(frozen=True)
class ModePlan:
    """The best plan of a mode: `staleness` is how many iterations old weights may be; `words` are all overrides.

    `needs` are what no override can say. Without a plan there is a `reason`.
    """

    mode: str
    seconds: float | None = None
    staleness: int = 0
    placement: str = ""
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reason: str = ""


def plan_modes(loaded: LoadedJob, read: Callable[[Sequence[str]], LoadedJob]) -> tuple[ModePlan, ...]:
    """The best plan of each other mode; `read` loads the config with more overrides."""
    return tuple(_planned(mode, read) for mode in loaded.modes)


def _planned(mode: OtherMode, read: Callable[[Sequence[str]], LoadedJob]) -> ModePlan:
    try:
        other = read(mode.overrides)
        space, outcome = best_plan(other.job, other.rules)
        if outcome.best is None:
            return ModePlan(mode.name, reason="no plan fits")
        plan = to_plan(space, outcome.best)
        settings = other.settings(plan)
    except (InputError, InfeasibleError) as error:
        return ModePlan(mode.name, needs=mode.needs, reason=error.what)
    return ModePlan(
        mode.name,
        plan.iteration_seconds,
        other.job.workflow.staleness,
        plan.describe(),
        (*mode.words, *shell_words(settings)),
        (*mode.needs, *settings.advice),
    )
