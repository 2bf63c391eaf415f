"""What the machine waits for and nothing does: an instruction that was lost would leave its task where it is for ever.

Compares what is outstanding with what is being carried out. Acts on nothing that is merely between two turns: only what
is missing in two looks in a row counts as lost. The controller looks now and then, and has what is lost done again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trimtab.machines.pool.events import CreatePlacementGroup, PoolInstruction, RemovePlacementGroup
from trimtab.machines.pool.machine import PoolMachine
from trimtab.model.pool import TaskState

AwaitedKey = tuple[str, str, int]  # kind, group or task, attempt


@dataclass(frozen=True)
class AwaitedEnd:
    """No instruction, but waited for as well: that a task which runs ends or dies."""

    task: str
    attempt: int


def key_of(one: PoolInstruction | AwaitedEnd) -> AwaitedKey:
    """What makes two instructions the same."""
    if isinstance(one, (CreatePlacementGroup, RemovePlacementGroup)):
        return type(one).__name__, one.group, 0
    return type(one).__name__, one.task, one.attempt


def expected(machine: PoolMachine) -> list[PoolInstruction | AwaitedEnd]:
    """All that has to be under way for the machine to go on."""
    running = [
        AwaitedEnd(task.id, task.attempt)
        for task in machine.tasks.values()
        if task.state in (TaskState.running, TaskState.parked) and not task.moving
    ]
    return [*machine.outstanding(), *running]


class PoolReconciler:
    """Remembers what was missing by the last look."""

    def __init__(self) -> None:
        self._missing: frozenset[AwaitedKey] = frozenset()

    def lost(
        self, wanted: Collection[PoolInstruction | AwaitedEnd], doing: Collection[AwaitedKey]
    ) -> list[PoolInstruction | AwaitedEnd]:
        """What is missing now and was by the last look."""
        missing = {key: one for one in wanted if (key := key_of(one)) not in doing}
        lost = [one for key, one in missing.items() if key in self._missing]
        self._missing = frozenset(missing)
        return lost
