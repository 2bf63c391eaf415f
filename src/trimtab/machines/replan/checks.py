"""Input checks and invariants of the replan machine."""

from __future__ import annotations

from itertools import pairwise

from trimtab.core.errors import InputError, nearest
from trimtab.machines.replan.estimates import JUMP, CostEstimates
from trimtab.machines.replan.events import ClusterChanged
from trimtab.machines.replan.migration import MigrationTracker
from trimtab.machines.replan.state import ReplanState
from trimtab.model.run import STAGES, Iteration, ReplanMode, ReplanRules
from trimtab.model.workflow import Workflow


def check_iteration(iteration: Iteration, workflow: Workflow) -> None:
    """Raises InputError for an unknown component, or too many batches."""
    for component in iteration.components:
        if component.component not in workflow.names:
            near = nearest(component.component, workflow.names)
            raise InputError(
                f"there is no component named {component.component}",
                where=f"iteration {iteration.number}",
                hint=f"did you mean {near}?" if near else f"components are: {', '.join(workflow.names)}",
            )
        if component.batches is not None and component.batches > workflow.batches:
            raise InputError(
                f"{component.component} did {component.batches} batches of {workflow.batches}",
                where=f"iteration {iteration.number}",
            )


def check_cluster(event: ClusterChanged) -> None:
    """Raises InputError for duplicate node names, or a leaving node that does not exist."""
    names = [node.name for node in event.cluster.nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two nodes are named {twice}", where="ClusterChanged", hint="node names must be unique")
    for name in event.leaving:
        if name not in names:
            raise InputError(f"node {name} will leave, but is not there", where="ClusterChanged")


def check_machine(
    run: ReplanState, moves: MigrationTracker, estimates: CostEstimates, rules: ReplanRules, due: float | None
) -> None:
    """Raises AssertionError where an invariant is violated."""
    _check_plan(run)
    moving = moves.moving
    if moving is not None:
        assert moving.move.id == moves.begun, "a move under way is not the newest"
        assert tuple(stage for stage, _ in moving.took) == STAGES[: STAGES.index(moving.stage)], "a stage was skipped"
        assert moving.failed is not None or moving.deadline <= moving.end, "a stage may end after its move"
        assert run.stopped is None, "a stopped run moves"
        assert run.promise is None, "a promise is judged during a move"
    waits = moving is not None or run.retry_at is not None or run.wait_until is not None
    assert not waits or run.stopped is not None or due is not None, "a wait without a deadline"
    if run.lost and rules.mode is ReplanMode.auto and run.stopped is None:
        assert waits, "the plan is gone and nothing is done about it"
    assert run.done >= (run.moved_at or 0), "a move in the future"
    assert all(level > 0 for level in run.reference.values()), "a plan made for no cost"
    for track in estimates.tracks.values():
        assert len(track.recent) <= rules.window
        assert len(track.aside) < JUMP
        assert all(a[0] < b[0] for a, b in pairwise(track.recent)), "an iteration counted twice"
        assert all(number <= run.done for number, _ in [*track.recent, *track.aside]), "measured, and not counted"


def _check_plan(run: ReplanState) -> None:
    groups = run.running.plan.groups
    used = [rank for group in groups for rank in group.gpus]
    assert len(set(used)) == len(used), "two groups on one GPU"
    assert all(rank < run.running.cluster.gpus for rank in used), "a rank that is not there"
    if not run.lost:
        assert run.running.cluster == run.cluster, "the ranks of the plan count through another cluster"
