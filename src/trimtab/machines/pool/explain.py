"""Explains a task, a pool, the totals; lists outstanding instructions, and writes instructions. Changes nothing."""

from __future__ import annotations

from dataclasses import field

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode, StoryEntry
from trimtab.machines.pool import events as e
from trimtab.machines.pool import feasibility
from trimtab.machines.pool.records import Eviction, PgState, PlacementGroupKind, PoolTask
from trimtab.machines.pool.state import PoolState
from trimtab.model.pool import IN_QUEUE, TaskExplanation, TaskState


class PoolView(Frozen):
    """A pool for display and for programs."""

    name: str
    quota: dict[str, float]
    used: dict[str, float]
    drained: bool
    tasks: dict[str, int]  # by state
    queue: tuple[str, ...]
    slots: dict[str, int]  # reserved, dynamic, idle, taken, making, removing, wanted (reserved and missing)
    reuse_count: int
    made_count: int
    destroyed_count: int
    evictions: dict[str, int]  # by reason
    target_hosts: int


class PoolTotals(Frozen):
    """All pools together."""

    evictions: int
    same_pool: int
    cross_pool: int
    by_state: dict[str, int] = field(default_factory=dict)
    latest: tuple[Eviction, ...] = ()


def explain(state: PoolState, name: str, now: float) -> TaskExplanation:
    """Why a task is in its state, and what would have to happen for it to start."""
    task = feasibility.known_task(state, name)
    reason = task.reason
    position = None
    needs: tuple[str, ...] = ()
    if task.id in state.waiting:
        position = list(state.waiting.in_order(task.spec.pool)).index(name) + 1
        if task.not_before <= now and not state.pools[task.spec.pool].drained:
            found = feasibility.find_assignment(state, task)
            if isinstance(found, Reason):
                reason = found
                if found.code is ReasonCode.no_room:
                    reason = Reason(found.code, feasibility.shortage(state, task.spec))
                needs = tuple(
                    victim for victim, _ in feasibility.plan_preemption(state, task, now, ignore_policy=True).victims
                )
                reason = _with_spared(state, task, needs, reason)
            else:
                reason = Reason(ReasonCode.behind, "there is room, kept for a task that has waited longer")
    elif task.id in state.claims:
        needs = tuple(state.claims[task.id].tasks)
    out_s = task.evicted_s + (now - task.since if task.state is TaskState.evicted else 0.0)
    return TaskExplanation(
        task=name,
        pool=task.spec.pool,
        state=task.state,
        reason=reason,
        priority=task.spec.priority,
        places=task.places,
        position=position,
        waiting_since=task.since if task.state in IN_QUEUE else None,
        deadline=task.deadline,
        needs=needs,
        evictions=task.evictions,
        evicted_s=out_s,
        attempts=task.attempt,
        how=task.how,
        story=tuple(task.story),
        estimate_s=task.spec.estimate_s,
    )


def _with_spared(state: PoolState, task: PoolTask, needs: tuple[str, ...], reason: Reason) -> Reason:
    """The reason, extended by the rule that an evicted task does not evict its equals."""
    if not state.may_evict(task):
        return reason
    spared = state.candidates.spared(task, state.policy)
    names = [name for name in needs if name in spared]
    if not names:
        return reason
    rule = f"it was evicted itself, so tasks leave for it only where their priority is below its {task.spec.priority:g}"
    return Reason(reason.code, f"{reason.sentence}; {rule}: that of {', '.join(names)} is not")


def story(state: PoolState, name: str) -> tuple[StoryEntry, ...]:
    if name in state.tasks:
        return tuple(state.tasks[name].story)
    if name in state.node_stories:
        return tuple(state.node_stories[name])
    raise InputError(f"nothing is known of {name}", hint="a task's id, or a node's")


def pool_view(state: PoolState, name: str) -> PoolView:
    pool = feasibility.known_pool(state, name)
    capacity, owned = state.capacity, state.pool_groups[name]
    groups = owned.groups.values()
    ready = [group for group in groups if group.state is PgState.ready]
    reserved = sum(1 for group in groups if group.kind is PlacementGroupKind.reserved)
    by_state: dict[str, int] = {}
    for task in state.tasks.values():
        if task.spec.pool == name:
            by_state[task.state.value] = by_state.get(task.state.value, 0) + 1
    return PoolView(
        name=name,
        quota=pool.spec.quota.floats(),
        used=capacity.resources(capacity.used[name]).floats(),
        drained=pool.drained,
        tasks=by_state,
        queue=tuple(state.waiting.in_order(name)),
        slots={
            "reserved": reserved,
            "dynamic": owned.dynamic_bundles,
            "idle": sum(len(group.bundles) for group in ready if not group.tenants),
            "taken": sum(len(group.bundles) for group in ready if group.tenants),
            "making": sum(len(group.bundles) for group in groups if group.state is PgState.creating),
            "removing": sum(
                len(group.bundles) for group in groups if group.state in (PgState.removing, PgState.broken)
            ),
            "wanted": len(pool.spec.reserved) - len(pool.retired) - reserved,
        },
        reuse_count=pool.reuse_count,
        made_count=pool.made_count,
        destroyed_count=pool.destroyed_count,
        evictions=dict(pool.evictions),
        target_hosts=pool.spec.target_hosts,
    )


def totals(state: PoolState) -> PoolTotals:
    by_state: dict[str, int] = {}
    for task in state.tasks.values():
        by_state[task.state.value] = by_state.get(task.state.value, 0) + 1
    across = sum(pool.evictions.get(ReasonCode.cross_pool.value, 0) for pool in state.pools.values())
    return PoolTotals(
        state.eviction_count, state.eviction_count - across, across, by_state, tuple(state.evictions[-10:])
    )


def warm_targets(state: PoolState) -> dict[str, dict[str, int]]:
    """Target number of warm processes by node and pool; `target_hosts` are spread evenly."""
    nodes = [node for node in state.nodes if node not in state.capacity.cordoned]
    targets: dict[str, dict[str, int]] = {node: {} for node in nodes}
    for pool in state.pools.values():
        if pool.dropped or not nodes:
            continue
        together = [nodes[at % len(nodes)] for at in range(pool.spec.target_hosts)]
        for node in (*together, *nodes * pool.spec.hosts_each):
            targets[node][pool.spec.name] = targets[node].get(pool.spec.name, 0) + 1
    return targets


def outstanding(state: PoolState, start_grace_s: float) -> list[e.PoolInstruction]:
    """Instructions without an outcome, to be executed again by a restarted controller."""
    found: list[e.PoolInstruction] = []
    for group in state.groups.values():
        if group.state is PgState.creating:
            spec = state.tasks[group.tenants[0]].spec if group.tenants else None
            strategy = spec.strategy if spec is not None else None
            strategy = strategy or state.pools[group.pool].spec.strategy
            deadline = group.deadline or 0.0
            found.append(e.CreatePlacementGroup(group.id, group.pool, group.bundles, group.nodes, strategy, deadline))
        elif group.state is PgState.removing:
            found.append(e.RemovePlacementGroup(group.id))
    for task in state.tasks.values():
        deadline = task.deadline or 0.0
        if task.state is TaskState.starting and task.started:
            found.append(e.StartTask(task.id, task.attempt, task.places, task.saved, deadline - start_grace_s))
        elif task.state is TaskState.cancelling:
            found.append(
                e.StopTask(
                    task.id, task.attempt, task.reason, task.cancel_grace_s, task.notice, task.checkpoint_timeout_s
                )
            )
        elif task.moving == "parking":
            found.append(e.ParkTask(task.id, task.attempt, deadline))
        elif task.moving == "unparking":
            found.append(e.UnparkTask(task.id, task.attempt, deadline))
    return found


def instruction_text(instruction: e.PoolInstruction) -> str:
    """An instruction for the journal: what is done to which task and where; deadlines follow from time and settings.

    Equal texts mean equal instructions.
    """
    if isinstance(instruction, e.CreatePlacementGroup):
        places = zip(instruction.bundles, instruction.nodes, strict=True)
        bundles = " + ".join(f"{bundle} on {node}" for bundle, node in places)
        return f"make {instruction.group} of {instruction.pool}: {bundles}"
    if isinstance(instruction, e.RemovePlacementGroup):
        return f"remove {instruction.group}"
    task = f"{instruction.task} #{instruction.attempt}"
    if isinstance(instruction, e.StartTask):
        slots = " ".join(f"{place.group}/{place.bundle}" for place in instruction.places)
        return f"start {task} in {slots}{' from its saved state' if instruction.restore else ''}"
    if isinstance(instruction, e.StopTask):
        cancel_s, save_s = instruction.cancel_grace_s, instruction.checkpoint_timeout_s
        details = [f"tell {cancel_s:g} s"] * (cancel_s != 0) + [f"save {save_s:g} s"] * (save_s != 0)
        details += ["with notice"] * instruction.notice
        return f"stop {task} for {instruction.reason.code.value}{': ' if details else ''}{', '.join(details)}"
    return f"{'park' if isinstance(instruction, e.ParkTask) else 'unpark'} {task}"
