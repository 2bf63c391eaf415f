"""Plans for tests of runs: any at all, and the one where nobody shares."""

from __future__ import annotations

import random

from trimtab.model.plan import Plan
from trimtab.model.workflow import PlacementJob
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.space import PlanSpace
from trimtab.plan.placement.timeline import to_plan


def any_plan(rng: random.Random, job: PlacementJob) -> tuple[PlanSpace, FoundPlan, Plan] | None:
    """A plan of the job, good or bad."""
    space = PlanSpace(job)
    groupings = space.groupings()
    if not groupings:
        return None
    grouping = rng.choice(groupings)
    sizes = tuple(table.sizes[0] for table in grouping.tables)
    options, seconds = space.best_of(grouping, sizes)
    found = FoundPlan(grouping, sizes, options, seconds)
    return space, found, to_plan(space, found)


def any_separate(job: PlacementJob) -> Plan:
    space = PlanSpace(job)
    grouping = next(g for g in space.groupings() if all(len(members) == 1 for members in g.groups))
    sizes = tuple(table.sizes[0] for table in grouping.tables)
    options, seconds = space.best_of(grouping, sizes)
    return to_plan(space, FoundPlan(grouping, sizes, options, seconds))
