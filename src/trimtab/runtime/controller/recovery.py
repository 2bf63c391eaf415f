"""After a restart: what the journal says is brought together with what is alive.

Processes of tasks that still run are taken up again, what is gone is told to the machine, what nobody owns is ended,
and what was being carried out is carried out again. Nothing here starts a task a second time: a start that was under
way goes on if all its processes are there, and begins afresh only after what there was of it is gone. Where the
journal itself is gone, what runs is asked what it is and taken up again, and it is said that history is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Protocol

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode
from trimtab.core.errors import TrimtabError
from trimtab.machines.pool.events import (
    CreatePlacementGroup,
    PlacementGroupLost,
    PoolEvent,
    PoolInstruction,
    RecoveredTask,
    StartTask,
    StateRecovered,
    TaskDied,
)
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.records import PgState, PoolTask
from trimtab.model.pool import HOLDS_SLOTS, PoolSpec, TaskSpec, TaskState
from trimtab.runtime.controller.executor import InstructionExecutor
from trimtab.runtime.controller.nodes import NodeMonitor
from trimtab.runtime.workers.task_workers import FoundPlacementGroup, TaskWorker, TaskWorkerManager
from trimtab.runtime.workers.worker_process import WorkerIdentity

log = logging.getLogger("trimtab.controller")

ANSWER_S = 60.0


class RecoveryContext(Protocol):
    """What recovery needs of the controller."""

    machine: PoolMachine

    def feed(self, event: PoolEvent) -> None:
        """Tell the machine; never raises."""


async def recover_without_journal(world: RecoveryContext, members: TaskWorkerManager) -> str | None:
    """The journal is empty: take up whatever runs whole and knows what it is; a sentence if anything was alive.

    What is left over is ended when the rest is reconciled. Who may evict whom was in the journal alone.
    """
    seats = await asyncio.wait_for(members.seats(), ANSWER_S)
    groups = await asyncio.wait_for(members.groups(), ANSWER_S)
    if not seats and not groups:
        return None
    by_start: dict[tuple[str, int], list[WorkerIdentity]] = {}
    for seat in seats.values():
        by_start.setdefault((seat.task, seat.attempt), []).append(seat)
    pools: dict[str, PoolSpec] = {}
    found = []
    for (task, attempt), together in by_start.items():
        seat = together[0]
        group = groups.get(seat.group)
        if group is None or not group.intact or {one.rank for one in together} != set(range(seat.world)):
            continue
        try:
            facts = plain.loads(seat.facts)
            spec, pool = decode(TaskSpec, facts["spec"]), decode(PoolSpec, facts["pool"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, TrimtabError):
            log.warning("task %s does not say what it is", task)
            continue
        pools[pool.name] = pool
        nodes = tuple(str(node) for node in group.nodes)
        found.append(RecoveredTask(spec, attempt, seat.group, nodes, facts["reserved"]))
    world.feed(StateRecovered(tuple(pools.values()), tuple(found)))
    known = [one.spec.id for one in found if one.spec.id in world.machine.tasks]
    lost = sorted({task for task, _ in by_start} - set(known))
    ended = f"; ended, for they could not be: {', '.join(lost)}" if lost else ""
    return (
        f"history was lost: the journal was gone while {len(by_start)} tasks and {len(groups)} placement groups "
        f"of this controller were alive; taken up again: {', '.join(sorted(known)) or 'none'}{ended}"
    )


async def reconcile(
    world: RecoveryContext, members: TaskWorkerManager, deeds: InstructionExecutor, watch: NodeMonitor
) -> None:
    """Bring the machine, as the journal left it, together with what is there."""
    before = world.machine.outstanding()
    seen, groups = await _ask(members)
    starts = {(one.task, one.attempt): one for one in before if isinstance(one, StartTask)}
    kept, resumed = _take_up(world.machine, deeds, seen, starts)
    await asyncio.wait_for(members.sweep(kept), ANSWER_S)
    making = {one.group for one in before if isinstance(one, CreatePlacementGroup)}
    unowned = [one for one in groups.values() if one.group not in world.machine.groups or one.group in making]
    await _remove(members, unowned)
    await deeds.collect_states()
    # From here on the machine learns; what it says is carried out at once.
    await watch.step(wait=True)
    _tell_lost_groups(world, groups)
    _tell_dead(world, deeds)
    _carry_on(world.machine, deeds, before, resumed)


def _take_up(
    machine: PoolMachine,
    deeds: InstructionExecutor,
    seen: Sequence[TaskWorker],
    starts: dict[tuple[str, int], StartTask],
) -> tuple[list[TaskWorker], set[StartTask]]:
    """Attach the processes that belong to a task's present attempt; which they are, and which starts go on."""
    by_start: dict[tuple[str, int], list[TaskWorker]] = {}
    for member in seen:
        by_start.setdefault((member.task, member.attempt), []).append(member)
    kept: list[TaskWorker] = []
    resumed: set[StartTask] = set()
    for key, found in by_start.items():
        record = machine.tasks.get(key[0])
        if record is None or record.attempt != key[1] or record.state not in HOLDS_SLOTS:
            continue
        start = starts.get(key)
        if start is not None:
            if not _whole(record, found):
                continue
            resumed.add(start)
            deeds.resume(start, found)
        else:
            deeds.attach(record.id, found)
            if record.state in (TaskState.running, TaskState.parked) and _whole(record, found):
                deeds.follow(*key)
        kept += found
    return kept, resumed


def _whole(record: PoolTask, found: Collection[TaskWorker]) -> bool:
    return {member.rank for member in found} == set(range(record.spec.processes))


def _tell_lost_groups(world: RecoveryContext, seen: dict[str, FoundPlacementGroup]) -> None:
    for group in list(world.machine.groups.values()):
        if group.stand is not PgState.standing:
            continue
        there = seen.get(group.id)
        if there is None:
            world.feed(PlacementGroupLost(group.id, "the placement group is gone"))
        elif not there.intact or there.nodes != group.nodes:
            world.feed(PlacementGroupLost(group.id, "Ray has not all of its bundles where they were"))


def _tell_dead(world: RecoveryContext, deeds: InstructionExecutor) -> None:
    for record in list(world.machine.tasks.values()):
        if record.state in (TaskState.running, TaskState.parked) and not _whole(
            record, deeds.running.get(record.id, ())
        ):
            world.feed(TaskDied(record.id, record.attempt, "its process ended while the controller was away"))


def _carry_on(
    machine: PoolMachine,
    deeds: InstructionExecutor,
    before: Sequence[PoolInstruction],
    resumed: Collection[PoolInstruction],
) -> None:
    """Begin again what was under way and is still wanted."""
    wanted = machine.outstanding()
    for one in before:
        if one in wanted and one not in resumed:
            deeds.begin(one)


async def _ask(members: TaskWorkerManager) -> tuple[list[TaskWorker], dict[str, FoundPlacementGroup]]:
    return await asyncio.wait_for(members.seen(), ANSWER_S), await asyncio.wait_for(members.groups(), ANSWER_S)


async def _remove(members: TaskWorkerManager, groups: Collection[FoundPlacementGroup]) -> None:
    removed = [asyncio.wait_for(members.remove_group(one.group, one.pool), ANSWER_S) for one in groups]
    for one, fault in zip(groups, await asyncio.gather(*removed, return_exceptions=True), strict=True):
        if fault is not None:
            log.warning("group %s could not be removed: %s", one.group, fault)
