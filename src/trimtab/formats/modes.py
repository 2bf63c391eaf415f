"""The modes of a framework side by side, for a synchronous config: the present one, and those of `data/modes.yaml`.

A mode is a set of overrides of the config: it is read and planned as any config is, so nothing is shown that its reader
would refuse. Where model and GPU kind are known each placed mode is estimated as a whole, so that what a mode changes
in decoding counts (a batch's longest answers); measured components scale the estimate. Else costs are those of the
present mode, and where scaling is assumed the range is from perfect scaling to that of `DOUBLING`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.loaded import LoadedJob, OtherMode
from trimtab.formats.run_settings import Settings
from trimtab.formats.write_back import shell_words
from trimtab.model.plan import Plan
from trimtab.model.workflow import Profile
from trimtab.plan.estimate.answer import Estimate, Interval, estimate, gain_interval
from trimtab.plan.estimate.constants import CONSTANTS
from trimtab.plan.placement.compare import if_scaling_is_worse
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

Reading = tuple[LoadedJob, Settings | None]
"""A config as read, and the run that it describes where model and GPU kind are known."""
NOISE = 0.05
"""A mode that gains less is not proposed: runs do not tell them apart."""


class ModePlan(Frozen):
    """The best plan of a mode: `staleness` is how many steps old weights are at most, `age` on average.

    `words` are all overrides; `needs` are what no override can say. Without a plan there is a `reason`.
    """

    mode: str
    seconds: Interval | None = None
    staleness: float = 0.0
    age: float | None = None
    memory_gb: Interval | None = None
    placement: str = ""
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reason: str = ""
    gain: Interval | None = None
    """Of the present mode's seconds over this one's; errors that both have fall out."""
    proposed: bool = False


def plan_modes(
    present: Reading, plan: Plan, read: Callable[[Sequence[str]], Reading], profile: Profile | None = None
) -> tuple[ModePlan, ...]:
    """The present mode as planned, then the best plan of each other one; `read` loads the config with more overrides.

    The fastest is proposed, if it gains more than the noise of a run.
    """
    if not present[0].modes:
        return ()
    own = _row("as planned", present, plan, profile)
    others = tuple(_compared(_planned(mode, read, profile), own) for mode in present[0].modes)
    known = [mode for mode in others if mode.gain is not None and mode.gain.likely > 1 + NOISE]
    best = max(known, key=lambda mode: mode.gain.likely if mode.gain else 0.0, default=None)
    return (own, *(replace(mode, proposed=mode is best) for mode in others))


def _planned(mode: OtherMode, read: Callable[[Sequence[str]], Reading], profile: Profile | None) -> ModePlan:
    try:
        other = read(mode.overrides)
        space, outcome = best_plan(other[0].job, other[0].rules)
        if outcome.best is None:
            return ModePlan(mode.name, reason="no plan fits")
        plan = to_plan(space, outcome.best)
        settings = other[0].settings(plan)
        row = _row(mode.name, other, plan, profile)
    except (InputError, InfeasibleError) as error:
        return ModePlan(mode.name, needs=mode.needs, reason=error.what)
    planned = shell_words(settings)
    keys = {word.partition("=")[0] for word in planned if "=" in word}
    words = (*(word for word in mode.words if word.partition("=")[0] not in keys), *planned)
    return replace(row, words=words, needs=(*mode.needs, *settings.advice))


def _compared(mode: ModePlan, own: ModePlan) -> ModePlan:
    if mode.seconds is None or own.seconds is None:
        return mode
    return replace(mode, gain=gain_interval(own.seconds.likely / mode.seconds.likely, CONSTANTS))


def _row(name: str, read: Reading, plan: Plan, profile: Profile | None) -> ModePlan:
    loaded, settings = read
    found = placed(loaded, settings, plan, profile) if settings is not None else None
    if found is None:
        likely, other = plan.iteration_seconds, if_scaling_is_worse(loaded.job, plan)
        seconds = Interval(min(likely, other), likely, max(likely, other))
        return ModePlan(name, seconds, loaded.job.workflow.staleness, placement=plan.describe())
    peak = max(found.phases, key=lambda phase: phase.gb)
    return ModePlan(
        name,
        found.seconds,
        found.greatest_staleness,
        found.mean_staleness,
        Interval(peak.gb * math.exp(-peak.spread), peak.gb, peak.high_gb),
        plan.describe(),
    )


def placed(loaded: LoadedJob, settings: Settings, plan: Plan, profile: Profile | None) -> Estimate | None:
    """The estimate of a run with a plan's GPUs; None where the job does not say which component trains and decodes."""
    sync = loaded.job.workflow.weight_sync
    if sync is None:
        return None
    trainer, rollout = plan.group_of(sync.source).gpus, plan.group_of(sync.target).gpus
    apart = 0 if set(trainer) & set(rollout) else len(rollout)
    run = replace(
        settings.run,
        gpus=len({*trainer, *rollout}),
        rollout_gpus=apart,
        trainer=replace(settings.run.trainer, gpus=len(trainer)),
    )
    return estimate(run, CONSTANTS, settings.offload, profile)
