"""Recovery after a controller restart: reconciles the journal with what is alive.

Running task processes are adopted, lost ones are reported to the machine, unowned ones are ended, and instructions that
were in progress are resumed. A task must never be started twice: a start in progress continues if all its processes
exist, and begins again only after its remains are gone. Without a journal, running processes are queried for their
identity and adopted, and the loss of history is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from typing import Any

from trimtab.core import plain_data as plain
from trimtab.core.codec import decode
from trimtab.core.errors import TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.machines.pool import events as e
from trimtab.machines.pool.machine import PoolMachine
from trimtab.machines.pool.records import PgState, PoolTask
from trimtab.model.pool import HOLDS_SLOTS, PoolSpec, TaskSpec, TaskState
from trimtab.runtime.controller.executor import ControllerContext, InstructionExecutor
from trimtab.runtime.controller.nodes import NodeMonitor
from trimtab.runtime.controller.rpc import TaskWorker, controller_name
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.store.journal import JournalVersionError
from trimtab.runtime.workers.placement_groups import FoundPlacementGroup
from trimtab.runtime.workers.task_workers import TaskWorkerManager
from trimtab.runtime.workers.worker_process import WorkerIdentity

log = logging.getLogger("trimtab.controller")

ANSWER_S = 60.0


class Remains(Frozen):
    """Names of the Ray actors and placement groups that a controller left."""

    actors: tuple[str, ...]
    groups: tuple[str, ...]

    def __str__(self) -> str:
        parts = [
            f"{kind}{'s' * (len(names) != 1)} {', '.join(names)}"
            for kind, names in (("actor", self.actors), ("placement group", self.groups))
            if names
        ]
        return " and ".join(parts) or "nothing"


def find_remains(ray: Any, controller: str) -> Remains:
    """What of a controller is alive on the cluster, without the controller itself. Blocks; starts nothing."""
    from ray.util.placement_group import placement_group_table

    prefix, own = f"trimtab:{controller}:", controller_name(controller)
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE and actor["name"] != own]
    groups = [table["name"] for table in placement_group_table().values() if table["state"] != "REMOVED"]
    return Remains(*(tuple(sorted(name for name in each if name.startswith(prefix))) for each in (names, groups)))


def refused_journal(ray: Any, controller: str, refusal: JournalVersionError) -> JournalVersionError:
    """The refusal of a journal, with the names of what still runs and the command that frees it."""
    remains = find_remains(ray, controller)
    if remains == Remains((), ()):
        return refusal
    return JournalVersionError(
        f"{refusal.what}; of this controller are still alive: {remains}",
        where=refusal.where,
        hint=f"`trimtab pool free --name {controller}` ends them; then start with another journal_dir, "
        "or use the version of trimtab that wrote the journal",
    )


async def free_remains(ray: Any, controller: str, timeout_s: float) -> Remains:
    """End the processes and placement groups that a dead controller left; returns what there was."""
    remains = await asyncio.to_thread(find_remains, ray, controller)
    if remains != Remains((), ()):
        workers = TaskWorkerManager(controller, None, lambda member, why: None)
        await asyncio.wait_for(workers.close(), timeout_s)
        await asyncio.to_thread(_kill_actors, ray, find_remains(ray, controller).actors)  # of a trimtab of before
    return remains


def _kill_actors(ray: Any, names: Collection[str]) -> None:
    for name in names:
        with contextlib.suppress(ValueError):  # gone
            ray.kill(ray.get_actor(name, NAMESPACE))


async def recover_without_journal(context: ControllerContext, workers: TaskWorkerManager) -> str | None:
    """Adopt complete running tasks when the journal is empty; a sentence if anything was alive.

    The rest is ended by `reconcile`. The preemption policy is lost: only the journal has it.
    """
    identities = await asyncio.wait_for(workers.identities(), ANSWER_S)
    groups = await asyncio.wait_for(workers.groups(), ANSWER_S)
    if not identities and not groups:
        return None
    by_start: dict[tuple[str, int], list[WorkerIdentity]] = {}
    for identity in identities.values():
        by_start.setdefault((identity.task, identity.attempt), []).append(identity)
    pools: dict[str, PoolSpec] = {}
    found = []
    for (task, attempt), together in by_start.items():
        identity = together[0]
        group = groups.get(identity.group)
        if group is None or not group.intact or {member.rank for member in together} != set(range(identity.world)):
            continue
        try:
            facts = plain.loads(identity.facts)
            spec, pool = decode(TaskSpec, facts["spec"]), decode(PoolSpec, facts["pool"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, TrimtabError):
            log.warning("the processes of task %s do not say what it is", task)
            continue
        pools[pool.name] = pool
        nodes = tuple(str(node) for node in group.nodes)
        found.append(e.RecoveredTask(spec, attempt, identity.group, nodes, facts["reserved"]))
    context.feed(e.StateRecovered(tuple(pools.values()), tuple(found)))
    known = [task.spec.id for task in found if task.spec.id in context.machine.tasks]
    not_adopted = sorted({task for task, _ in by_start} - set(known))
    ended = f"; ended, for they could not be: {', '.join(not_adopted)}" if not_adopted else ""
    return (
        f"history was lost: the journal was gone while {len(by_start)} tasks and {len(groups)} placement groups "
        f"of this controller were alive; taken up again: {', '.join(sorted(known)) or 'none'}{ended}"
    )


async def reconcile(
    context: ControllerContext, workers: TaskWorkerManager, executor: InstructionExecutor, node_monitor: NodeMonitor
) -> None:
    """Reconcile the machine, as the journal left it, with what is alive."""
    before = context.machine.outstanding()
    seen = await asyncio.wait_for(workers.existing(), ANSWER_S)
    groups = await asyncio.wait_for(workers.groups(), ANSWER_S)
    starts = {(start.task, start.attempt): start for start in before if isinstance(start, e.StartTask)}
    kept, resumed = _attach_running(context.machine, executor, seen, starts)
    await asyncio.wait_for(workers.sweep(kept), ANSWER_S)
    creating = {create.group for create in before if isinstance(create, e.CreatePlacementGroup)}
    unowned = [pg for pg in groups.values() if pg.group not in context.machine.groups or pg.group in creating]
    await _remove(workers, unowned)
    await executor.states.collect()
    # From here on the machine gets events, and its instructions are executed at once.
    await node_monitor.step(wait=True)
    _report_lost_groups(context, groups)
    _report_dead_tasks(context, executor)
    wanted = context.machine.outstanding()
    for instruction in before:
        if instruction in wanted and instruction not in resumed:
            executor.begin(instruction)


def _attach_running(
    machine: PoolMachine,
    executor: InstructionExecutor,
    seen: Sequence[TaskWorker],
    starts: dict[tuple[str, int], e.StartTask],
) -> tuple[list[TaskWorker], set[e.StartTask]]:
    """Attach the processes of current attempts; returns them, and the starts that continue."""
    by_start: dict[tuple[str, int], list[TaskWorker]] = {}
    for member in seen:
        by_start.setdefault((member.task, member.attempt), []).append(member)
    kept: list[TaskWorker] = []
    resumed: set[e.StartTask] = set()
    for key, found in by_start.items():
        record = machine.tasks.get(key[0])
        if record is None or record.attempt != key[1] or record.state not in HOLDS_SLOTS:
            continue
        start = starts.get(key)
        if start is not None:
            if not _is_complete(record, found):
                continue
            resumed.add(start)
            executor.resume(start, found)
        else:
            executor.attach(record.id, found)
            if record.state in (TaskState.running, TaskState.parked) and _is_complete(record, found):
                executor.watch_outcome(*key)
        kept += found
    return kept, resumed


def _is_complete(record: PoolTask, found: Collection[TaskWorker]) -> bool:
    return {member.rank for member in found} == set(range(record.spec.processes))


def _report_lost_groups(context: ControllerContext, seen: dict[str, FoundPlacementGroup]) -> None:
    for group in list(context.machine.groups.values()):
        if group.state is not PgState.ready:
            continue
        found = seen.get(group.id)
        if found is None:
            context.feed(e.PlacementGroupLost(group.id, "the placement group is gone"))
        elif not found.intact or found.nodes != group.nodes:
            context.feed(e.PlacementGroupLost(group.id, "its bundles are not on their nodes any more"))


def _report_dead_tasks(context: ControllerContext, executor: InstructionExecutor) -> None:
    for record in list(context.machine.tasks.values()):
        if record.state in (TaskState.running, TaskState.parked) and not _is_complete(
            record, executor.running.get(record.id, ())
        ):
            context.feed(e.TaskDied(record.id, record.attempt, "its process ended while the controller was away"))


async def _remove(workers: TaskWorkerManager, groups: Collection[FoundPlacementGroup]) -> None:
    removed = [asyncio.wait_for(workers.remove_group(pg.group, pg.pool), ANSWER_S) for pg in groups]
    for pg, fault in zip(groups, await asyncio.gather(*removed, return_exceptions=True), strict=True):
        if fault is not None:
            log.warning("group %s could not be removed: %s", pg.group, fault)
