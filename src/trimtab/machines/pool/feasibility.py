"""Feasibility: where a task fits now, what would have to be evicted for it, and whether it can ever run.

Reads the pool state and changes nothing in it but caches, so everything here can be called as a dry run. Reserves are
applied and released by the caller (`PoolState.apply_reserve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.core.errors import InputError, meant
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode, some
from trimtab.core.resources import LABEL, total
from trimtab.machines.pool.capacity import Vector, fitting, never_placeable, place
from trimtab.machines.pool.events import RecoveredTask
from trimtab.machines.pool.preemption import PreemptionPlan, cheapest_plan
from trimtab.machines.pool.queue import ClassQueue, QueueingHints, Unschedulable
from trimtab.machines.pool.records import PlacementGroup, PlacementGroupKind, PoolRecord, PoolTask, ResourceClaim
from trimtab.machines.pool.state import PoolState, StarvationReserve
from trimtab.model.pool import ENDED, PlacementStrategy, TaskSpec


class Assignment(Frozen):
    """Where a task goes: an existing group, or nodes for a new one; and why."""

    group: str | None
    nodes: tuple[str, ...]
    reason: Reason


def strategy_of(state: PoolState, spec: TaskSpec) -> PlacementStrategy:
    return spec.strategy or state.pools[spec.pool].spec.strategy


def placement_key(state: PoolState, spec: TaskSpec) -> tuple[object, ...]:
    """What `find_assignment` depends on: tasks with equal keys fit together, or not at all."""
    owner = spec.priority >= state.pools[spec.pool].spec.reserved_priority
    return spec.pool, spec.bundles, spec.size, spec.strategy, owner, spec.evictable


def preemption_key(state: PoolState, task: PoolTask) -> tuple[object, ...]:
    """What `plan_preemption` depends on, besides the priority."""
    spec = task.spec
    own = (spec.pool, spec.bundles, spec.size, spec.strategy, spec.evictable, spec.labels)
    return *own, state.may_evict(task), task.evictions > 0


def find_assignment(state: PoolState, task: PoolTask) -> Assignment | Reason:
    """Where the task fits without evictions, or why it does not."""
    spec, capacity = task.spec, state.capacity
    pool = state.pools[spec.pool].spec
    short_of = capacity.sum_vector(spec.bundles) - capacity.quota_left(spec.pool)
    if (short_of > 0).any():
        lacking = capacity.resources(short_of)
        sentence = f"the quota of pool {spec.pool} is short of {lacking} for {total(spec.bundles)}"
        return Reason(ReasonCode.quota, sentence)
    owner = spec.priority >= pool.reserved_priority
    reserved = _idle_reserved(state, spec) if owner or (pool.borrow and spec.evictable) else None
    if reserved is not None and owner:
        return Assignment(reserved.id, (), Reason(ReasonCode.reserved, "a reserved slot of its pool was free"))
    for group in state.pool_groups[spec.pool].idle.get(spec.size, ()):
        if state.usable(group) and _satisfies(group, strategy_of(state, spec)):
            return Assignment(group.id, (), Reason(ReasonCode.reused, "an idle slot of its size was there"))
    left = slots_left(state, spec.pool)
    if pool.dynamic and (left is None or left >= len(spec.size)):
        demands = _demands(state, spec)
        none = any(capacity.too_large(demand) for demand in demands[:1] + demands[-1:])
        rows = None if none else place(capacity.free, capacity.usable, demands, strategy_of(state, spec))
        if rows is None and not none:
            capacity.tighten()
        if rows is not None:
            nodes = tuple(str(capacity.nodes[row]) for row in rows)
            return Assignment(None, nodes, Reason(ReasonCode.placed, f"{_nodes_text(nodes)} had room"))
    if reserved is not None:
        return Assignment(reserved.id, (), Reason(ReasonCode.borrowed, "borrows an idle reserved slot"))
    if not pool.dynamic:
        return Reason(ReasonCode.slot_limit, f"every reserved slot of pool {spec.pool} that it may use is taken")
    if left is not None and left < len(spec.size):
        return Reason(ReasonCode.slot_limit, f"pool {spec.pool} has all of its {pool.dynamic_limit} dynamic slots")
    never = never_fits_nodes(state, spec)
    if never is not None:
        return Reason(ReasonCode.no_node, never)
    return Reason(ReasonCode.no_room, f"no node has room for {'it' if len(spec.size) == 1 else 'all of it'} now")


def assign_after_release(state: PoolState, task: PoolTask) -> PreemptionPlan:
    """Where the task fits once unclaimed groups that are being removed are gone."""
    claimed = {name for claim in state.claims.values() for name in claim.groups}
    releasing = sorted(
        (group for name, group in state.releasing.items() if name not in claimed), key=lambda group: group.seq
    )
    spec, capacity = task.spec, state.capacity
    own = [group.id for group in releasing if group.pool == spec.pool and group.kind is PlacementGroupKind.dynamic]
    left = slots_left(state, spec.pool)
    if left is not None:
        left += sum(len(state.groups[name].bundles) for name in own)
    limited = left is not None and left < len(spec.size)
    if not releasing or limited or not state.pools[spec.pool].spec.dynamic:
        return PreemptionPlan()
    demands = _demands(state, spec)
    if (capacity.sum_vector(spec.bundles) > capacity.quota_left(spec.pool)).any():
        return PreemptionPlan()
    free = capacity.free.copy()
    for group in releasing:
        for row, vector in capacity.parts(group.nodes, group.bundles):
            free[row] += vector
    rows = place(free, capacity.usable, demands, strategy_of(state, spec))
    if rows is None:
        return PreemptionPlan()
    nodes = tuple(str(capacity.nodes[row]) for row in rows)
    there = [group.id for group in releasing if set(group.nodes) & set(nodes)]
    return PreemptionPlan(nodes, awaits=tuple(dict.fromkeys([*there, *(own if left is not None else ())])))


def plan_preemption(state: PoolState, task: PoolTask, now: float, *, ignore_policy: bool = False) -> PreemptionPlan:
    """The evictions that let the task start; with `ignore_policy`, as if every task were evictable."""
    waiting_only = assign_after_release(state, task) if not ignore_policy and state.releasing else PreemptionPlan()
    if waiting_only.found:
        return waiting_only
    policy = state.policy
    owned = state.pool_groups[task.spec.pool]
    may_evict = state.may_evict(task)
    if not ignore_policy and not may_evict and not any(groups.idle for groups in state.pool_groups.values()):
        return PreemptionPlan()
    if (
        not ignore_policy
        and not owned.reserved
        and (not may_evict or state.candidates.none_evictable(task.spec.priority, policy))
    ):
        demands = _demands(state, task.spec)
        state.capacity.tighten()
        if not state.pools[task.spec.pool].spec.dynamic or any(
            state.capacity.too_large(demand, with_idle=True) for demand in demands[:1] + demands[-1:]
        ):
            return PreemptionPlan()  # nothing is evictable, and idle slots are not enough
    budget_left, recent = None, []
    if policy is not None and policy.budget is not None and not ignore_policy:
        begin = now - policy.budget_window_s
        recent = [eviction.at for eviction in state.evictions if eviction.at > begin and eviction.by is not None]
        budget_left = max(0, policy.budget - len(recent))
    plan = cheapest_plan(state, task, now, budget_left, slots_left(state, task.spec.pool), ignore_policy)
    if not plan.found and recent and policy is not None:
        window_ends = min(recent) + policy.budget_window_s
        plan = replace(plan, retry_at=min(window_ends, plan.retry_at or window_ends))
    return plan


def could_help(state: PoolState, queue: ClassQueue, verdict: Unschedulable, hints: QueueingHints) -> bool:
    """Whether the hints may make an unschedulable class schedulable; False is certain."""
    if hints.anything:
        return True
    if not hints.rows and not hints.evictable_rows and not hints.pools:
        return False
    kind, capacity = queue.kind, state.capacity
    pool = state.pools[kind.pool].spec
    if not pool.dynamic or pool.dynamic_limit is not None or pool.reserved or not queue.uniform:
        return True  # bundles of different sizes are placed by a heuristic that may succeed now
    if verdict.quota_alone:
        enough = (
            kind.pool in hints.pools and (capacity.sum_vector(kind.bundles) <= capacity.quota_left(kind.pool)).all()
        )
        return bool(enough) or _evicts(state, queue)
    if any(_could_take(state, row, queue, evicts=False) for row in hints.rows):
        return True
    return _evicts(state, queue) and any(
        _could_take(state, row, queue, evicts=True) for row in hints.rows | hints.evictable_rows
    )


def quota_alone(state: PoolState, queue: ClassQueue) -> bool:
    """For a class whose quota is short: whether nodes might fit it if all evictable tasks left; False is certain.

    Where no node could fit it, the remaining quota does not matter.
    """
    capacity, candidates = state.capacity, state.candidates
    evicts = _evicts(state, queue)
    found = capacity.usable.copy()
    for column, units in _wanted(state, queue):
        room = np.maximum(capacity.free[:, column], 0) + capacity.idle[:, column]
        for group in state.releasing.values():
            for row, vector in capacity.parts(group.nodes, group.bundles):
                room[row] += vector[column]
        if evicts:
            candidates.add_releases(room, column, queue.kind.priority, state.policy)
        found &= room >= units
    return bool(found.any())


def _evicts(state: PoolState, queue: ClassQueue) -> bool:
    return queue.kind.may_evict and not state.candidates.none_evictable(queue.kind.priority, state.policy)


def _wanted(state: PoolState, queue: ClassQueue) -> list[tuple[int, int]]:
    """What a bundle of the class requests, by column of ClusterCapacity."""
    if queue.wanted is None:
        state.capacity.vector(queue.size[0])  # adds its columns: a class short of quota was never placed
        queue.wanted = [(state.capacity.columns[name], units) for name, units in queue.size[0]]
    return queue.wanted


def _could_take(state: PoolState, row: int, queue: ClassQueue, *, evicts: bool) -> bool:
    """Whether a row might fit a bundle, counting releasing groups and, with `evicts`, evictable tasks."""
    capacity = state.capacity
    if not capacity.usable[row]:
        return False
    for column, units in _wanted(state, queue):
        # Free capacity is negative where other users of Ray took too much; existing slots are usable all the same.
        room = max(0, int(capacity.free[row, column])) + int(capacity.idle[row, column])
        if room < units and state.releasing:
            room += sum(
                int(vector[column])
                for group in state.releasing.values()
                for at, vector in capacity.parts(group.nodes, group.bundles)
                if at == row
            )
        if room < units and evicts:
            room += state.candidates.releases(row, column, queue.kind.priority, state.policy)
        if room < units:
            return False
    return True


def claim_fits(state: PoolState, claim: ResourceClaim) -> bool:
    """Whether the capacity of a claim is free, once nothing is kept for it any more."""
    if claim.group is not None:
        return state.usable(state.groups[claim.group])
    capacity = state.capacity
    free: dict[int, Vector] = {}
    for node, demand in zip(claim.nodes, _demands(state, state.tasks[claim.task].spec), strict=True):
        row = capacity.row_of.get(node)
        if row is None or not capacity.usable[row]:
            return False
        free[row] = free.get(row, capacity.free[row]) - demand
    return all((left >= 0).all() for left in free.values())


def slots_left(state: PoolState, pool: str) -> int | None:
    """Dynamic bundles that the pool may still create; those being removed count until they are gone."""
    limit = state.pools[pool].spec.dynamic_limit
    owned = state.pool_groups[pool]
    return None if limit is None else limit - owned.dynamic_bundles - owned.claimed_bundles


def would_fit_alone(state: PoolState, spec: TaskSpec) -> bool:
    """Whether it would fit if every task ended; reserved slots and other users of Ray may prevent that."""
    strategy = strategy_of(state, spec)
    known = state.fits_alone_cache.get((spec.size, strategy))
    if known is None or known[0] != state.capacity.shape:
        if len(state.fits_alone_cache) > 1_000:
            state.fits_alone_cache.clear()
        known = state.fits_alone_cache[spec.size, strategy] = (state.capacity.shape, _fits_alone(state, spec, strategy))
    return known[1]


def _fits_alone(state: PoolState, spec: TaskSpec, strategy: PlacementStrategy) -> bool:
    capacity = state.capacity
    empty = capacity.total - capacity.outside
    for owned in state.pool_groups.values():
        for group in owned.reserved.values():
            for row, vector in capacity.parts(group.nodes, group.bundles):
                empty[row] -= vector
    return place(empty, capacity.usable, _demands(state, spec), strategy) is not None


def starvation_reserve(state: PoolState, task: PoolTask) -> StarvationReserve:
    """What the task could use of the free capacity: on the nodes that lack least, in its quota and its slots."""
    spec, capacity = task.spec, state.capacity
    quota = np.minimum(capacity.sum_vector(spec.bundles), np.maximum(0, capacity.quota_left(spec.pool)))
    left = slots_left(state, spec.pool)
    reserve = StarvationReserve(
        spec.id, spec.pool, [], quota, 0 if left is None else max(0, min(left, len(spec.size))), []
    )
    rows = np.flatnonzero(capacity.usable[: len(capacity.nodes)])
    free = np.maximum(0, capacity.free)
    idle = capacity.idle.copy()
    idle_on = _idle_by_node(state)
    for demand in _demands(state, spec):
        wanted = np.flatnonzero(demand)
        fits = rows[fitting(capacity.total, demand)[rows]]
        if not len(fits):
            continue
        lack = np.zeros(len(fits))
        for column in wanted:
            short_of = demand[column] - free[fits, column] - idle[fits, column]
            np.maximum(lack, short_of / demand[column], out=lack)
        row = int(fits[np.argmin(lack)])
        name = str(capacity.nodes[row])
        part = np.minimum(demand, free[row])
        free[row] -= part
        reserve.nodes.append((name, part))
        missing = demand - part
        for group in idle_on.get(name, ()) if (missing > 0).any() else ():
            if (missing > 0).any() and group.id not in reserve.groups:
                reserve.groups.append(group.id)
                for node, bundle in zip(group.nodes, group.bundles, strict=True):
                    idle[capacity.row_of[node]] -= capacity.vector(bundle)
                    if node == name:
                        missing = missing - capacity.vector(bundle)
    return reserve


def _idle_by_node(state: PoolState) -> dict[str, list[PlacementGroup]]:
    """Idle dynamic groups by node, oldest first."""
    idle = [groups for owned in state.pool_groups.values() for groups in owned.idle.values()]
    found: dict[str, list[PlacementGroup]] = {}
    for group in sorted((group for groups in idle for group in groups), key=lambda group: group.seq):
        for node in dict.fromkeys(group.nodes):
            found.setdefault(node, []).append(group)
    return found


# ---- certain refusals ----


def never_fits(state: PoolState, spec: TaskSpec) -> str | None:
    """Why the task can never run on the current cluster, if that is certain."""
    pool = state.pools[spec.pool].spec
    whole = total(spec.bundles)
    if not whole.within(pool.quota):
        return f"it asks {whole}, more than the quota of pool {spec.pool}: {pool.quota}"
    if spec.shares is not None:
        return None
    may_reserved = len(spec.size) == 1 and (spec.priority >= pool.reserved_priority or (pool.borrow and spec.evictable))
    if may_reserved and any(spec.size[0].within(slot) for slot in pool.reserved):
        return None
    if not pool.dynamic:
        return f"pool {spec.pool} makes no dynamic slots, and none of its reserved ones may take it"
    if pool.dynamic_limit is not None and len(spec.size) > pool.dynamic_limit:
        return f"it needs {len(spec.size)} dynamic slots, and pool {spec.pool} may have {pool.dynamic_limit}"
    return never_fits_nodes(state, spec) if state.nodes and not spec.awaits_node else None


def never_fits_nodes(state: PoolState, spec: TaskSpec) -> str | None:
    """Why the nodes could not fit it even if they were empty."""
    strategy = strategy_of(state, spec)
    known = state.never_fits_cache.get((spec.size, strategy))
    if known is None or known[0] != state.node_epoch:
        capacity = state.capacity
        demands, nodes = _demands(state, spec), capacity.node_rows()
        missing = [name for name, _ in spec.size[0] if not capacity.total[nodes, capacity.columns[name]].any()]
        labels = [name for name in missing if name.startswith(LABEL)] if nodes.any() else []
        why = f"no node has {labels[0]}" if labels else never_placeable(capacity.total, nodes, demands, strategy)
        if len(state.never_fits_cache) > 1_000:
            state.never_fits_cache.clear()
        known = (state.node_epoch, None if why is None else f"it asks {total(spec.size)}, and {why}")
        state.never_fits_cache[spec.size, strategy] = known
    return known[1]


def can_recover(state: PoolState, found: RecoveredTask) -> bool:
    """Whether a running task without a record fits into the state."""
    spec = found.spec
    if spec.pool not in state.pools or spec.id in state.tasks or found.group in state.groups:
        return False
    if any(node not in state.nodes for node in found.nodes) or len(found.nodes) != len(spec.size):
        return False
    left = slots_left(state, spec.pool)
    if found.reserved is None and left is not None and left < len(spec.size):
        return False
    pool = state.pools[spec.pool].spec
    if found.reserved is not None and not 0 <= found.reserved < len(pool.reserved):
        return False
    return bool((state.capacity.sum_vector(spec.bundles) <= state.capacity.quota_left(spec.pool)).all())


def check_submission(state: PoolState, spec: TaskSpec) -> None:
    """Raise InputError for a task that cannot be accepted."""
    pool = known_pool(state, spec.pool)
    if pool.dropped:
        raise InputError(f"pool {spec.pool} is being removed")
    known = state.tasks.get(spec.id)
    if known is not None and known.state not in ENDED:
        raise InputError(f"task {spec.id} exists and is {known.state.value}", hint="give the new one another id")
    if spec.shares is not None:
        _check_sharing(state, spec)


def _check_sharing(state: PoolState, spec: TaskSpec) -> None:
    where = f"task {spec.id}"
    owner = state.tasks.get(spec.shares or "")
    if owner is None or owner.state in ENDED:
        raise InputError(f"it cannot share the slot of {spec.shares}, which is not there", where=where)
    if owner.spec.pool != spec.pool or owner.shares is not None or not owner.spec.room:
        hint = "tasks share slots with a task of the same pool that has slots of its own and states `room` for them"
        raise InputError(f"it cannot share the slot of {spec.shares}", where=where, hint=hint)
    size = owner.spec.room
    if len(size) != len(spec.bundles):
        raise InputError(f"{spec.shares} has {len(size)} slots, and it needs {len(spec.bundles)}", where=where)
    tenants = [
        tenant.spec for tenant in state.tasks.values() if tenant.shares == spec.shares and tenant.state not in ENDED
    ]
    tenants += [owner.spec, spec]
    for at, room in enumerate(size):
        for active in tenants:
            rest = total([tenant.residual[at] for tenant in tenants if tenant is not active and tenant.residual])
            if not active.bundles[at].plus(rest).within(room):
                raise InputError(
                    f"slot {at + 1} of {spec.shares} has {room}, too little for {active.id} and what others keep",
                    where=where,
                )


def known_pool(state: PoolState, name: str) -> PoolRecord:
    pool = state.pools.get(name)
    if pool is None:
        exist = "make it first; pools that exist: " + (", ".join(state.pools) or "none")
        raise InputError(f"there is no pool {name}", hint=meant(name, state.pools, exist))
    return pool


def known_task(state: PoolState, name: str) -> PoolTask:
    task = state.tasks.get(name)
    if task is None:
        raise InputError(f"there is no task {name}", hint=meant(name, state.tasks))
    return task


def short_node_id(node: str) -> str:
    return node[:8] if len(node) > 24 else node


def _demands(state: PoolState, spec: TaskSpec) -> list[Vector]:
    for bundle in spec.size:
        state.capacity.vector(bundle)
    return [state.capacity.vector(bundle) for bundle in spec.size]  # after all columns were added


def _idle_reserved(state: PoolState, spec: TaskSpec) -> PlacementGroup | None:
    """The smallest idle reserved slot that fits the task."""
    if spec.gang:
        return None
    fitting = [
        group
        for group in state.pool_groups[spec.pool].reserved.values()
        if group.idle and spec.size[0].within(group.bundles[0]) and state.usable(group)
    ]
    return min(fitting, key=lambda group: (group.bundles[0].units, group.spec_index or 0), default=None)


def _satisfies(group: PlacementGroup, strategy: PlacementStrategy) -> bool:
    distinct = len(set(group.nodes))
    if strategy is PlacementStrategy.strict_pack:
        return distinct == 1
    return strategy is not PlacementStrategy.strict_spread or distinct == len(group.nodes)


def shortage(state: PoolState, spec: TaskSpec) -> str:
    """The node that comes nearest to fitting the task, and what it lacks."""
    capacity = state.capacity
    demand = capacity.vector(max(spec.size, key=lambda bundle: (bundle.get("gpu"), bundle.get("cpu"))))
    rows = np.nonzero(capacity.usable[: len(capacity.nodes)])[0]
    if not len(rows):
        return "no node takes anything new"
    cordoned = _cordoned_text(state, spec)
    if strategy_of(state, spec) is PlacementStrategy.strict_spread and len(spec.size) > 1:
        able = int(fitting(capacity.free, demand)[rows].sum())
        each = f"its {len(spec.size)} bundles need a node each, and {able} of {len(rows)} have room for one"
        return f"no room for all of it at once: {each}{cordoned}"
    lack = np.maximum(0, demand - capacity.free[rows])
    nearest_row = int(np.argmin((lack / np.maximum(1, demand)).max(axis=1)))
    lacking = capacity.resources(lack[nearest_row])
    what = "it" if len(spec.size) == 1 else f"all {len(spec.size)} bundles of it"
    if not lacking:
        return f"no room for {what} at once: {len(rows)} nodes hold parts of it{cordoned}"
    node = short_node_id(str(capacity.nodes[int(rows[nearest_row])]))
    return f"no node has room for {what}; node {node} comes nearest and lacks {lacking}{cordoned}"


def _cordoned_text(state: PoolState, spec: TaskSpec) -> str:
    """Cordoned nodes that could hold a part of the task."""
    capacity = state.capacity
    names = [
        node
        for node in sorted(capacity.cordoned)
        if node in capacity.row_of
        and any((demand <= capacity.total[capacity.row_of[node]]).all() for demand in _demands(state, spec))
    ]
    if not names:
        return ""
    texts = [
        f"{short_node_id(node)} {'is draining' if state.node_stories[node][-1].state == 'emptied' else 'is cordoned'}"
        for node in names
    ]
    return f"; not counted: {some(texts)}"


def _nodes_text(nodes: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(nodes))
    return f"node {short_node_id(distinct[0])}" if len(distinct) == 1 else f"{len(distinct)} nodes"
