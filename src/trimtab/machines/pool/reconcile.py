"""Finds lost instructions: the machine waits for their outcome and nothing executes them.

Compares outstanding instructions with those being executed. Only what is missing in two consecutive checks counts as
lost, never what is merely between two event-loop iterations. The controller checks periodically and re-issues them.
"""

from __future__ import annotations

from collections.abc import Collection

from trimtab.core.frozen import Frozen
from trimtab.machines.pool.events import CreatePlacementGroup, PoolInstruction, RemovePlacementGroup
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import TaskState

AwaitedKey = tuple[str, str, int]  # kind, group or task, attempt


class AwaitedEnd(Frozen):
    """Not an instruction, but awaited as well: the end or death of a running task."""

    task: str
    attempt: int


def key_of(awaited: PoolInstruction | AwaitedEnd) -> AwaitedKey:
    if isinstance(awaited, (CreatePlacementGroup, RemovePlacementGroup)):
        return type(awaited).__name__, awaited.group, 0
    return type(awaited).__name__, awaited.task, awaited.attempt


def expected(machine: PoolMachine) -> list[PoolInstruction | AwaitedEnd]:
    """Everything that must be in progress for the machine to make progress."""
    running = [
        AwaitedEnd(task.id, task.attempt)
        for task in machine.tasks.values()
        if task.state in (TaskState.running, TaskState.parked) and not task.moving
    ]
    return [*machine.outstanding(), *running]


class PoolReconciler:
    """Remembers what was missing in the last check."""

    def __init__(self) -> None:
        self._missing: frozenset[AwaitedKey] = frozenset()

    def lost(
        self, wanted: Collection[PoolInstruction | AwaitedEnd], doing: Collection[AwaitedKey]
    ) -> list[PoolInstruction | AwaitedEnd]:
        missing = {key: awaited for awaited in wanted if (key := key_of(awaited)) not in doing}
        lost = [awaited for key, awaited in missing.items() if key in self._missing]
        self._missing = frozenset(missing)
        return lost
