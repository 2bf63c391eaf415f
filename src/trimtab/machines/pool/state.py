"""State of the pool machine, with the sums and indexes derived from it.

Makes no decisions. A snapshot holds the records alone; sums and indexes are rebuilt from them, so that the two can
never disagree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimtab.core.codec import decode, encode
from trimtab.core.machine import Timers
from trimtab.core.reasons import STORY_KEPT, Reason, StoryEntry
from trimtab.core.resources import Resources
from trimtab.machines.pool import events as e
from trimtab.machines.pool.capacity import ClusterCapacity, Vector
from trimtab.machines.pool.preemption_candidates import PreemptionCandidates
from trimtab.machines.pool.queue import ClassQueue, HintLog, PendingQueue, Unschedulable
from trimtab.machines.pool.records import (
    Eviction,
    PgState,
    PlacementGroup,
    PlacementGroupKind,
    PoolRecord,
    PoolTask,
    ResourceClaim,
)
from trimtab.model.pool import ENDED, IN_QUEUE, PreemptionPolicy, TaskState

TimerKey = tuple[str, Any]  # "task" or "group" and its id, or "recheck" and its time


class IdleGroups:
    """Idle groups of one size, oldest first whatever the order in which they became idle."""

    def __init__(self) -> None:
        self._groups: dict[int, PlacementGroup] = {}
        self._order: list[int] = []  # a heap; may hold groups that are no longer idle

    def __contains__(self, group: PlacementGroup) -> bool:
        return group.seq in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: PlacementGroup) -> None:
        self._groups[group.seq] = group
        heapq.heappush(self._order, group.seq)

    def remove(self, group: PlacementGroup) -> None:
        del self._groups[group.seq]

    def __iter__(self) -> Iterator[PlacementGroup]:
        while self._order and self._order[0] not in self._groups:
            heapq.heappop(self._order)
        if self._order:
            first = self._order[0]
            yield self._groups[first]
            for seq in sorted(self._groups):
                if seq != first:
                    yield self._groups[seq]


@dataclass
class PoolGroups:
    """The placement groups of one pool."""

    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    reserved: dict[str, PlacementGroup] = field(default_factory=dict)
    idle: dict[tuple[Resources, ...], IdleGroups] = field(default_factory=dict)  # dynamic, by size
    dynamic_bundles: int = 0  # also of groups being created or removed
    idle_bundles: int = 0
    claimed_bundles: int = 0  # that claims will create


@dataclass
class RemainingNeed:
    """What a claim needs beyond what its victims will release; negative: they release more."""

    nodes: dict[str, Vector]
    quota: Vector
    slots: int


@dataclass
class StarvationReserve:
    """Capacity reserved for a starving task during a scan of the queue."""

    task: str
    pool: str
    nodes: list[tuple[str, Vector]]
    quota: Vector
    slots: int
    groups: list[str]  # idle

    @classmethod
    def of(cls, data: dict[str, Any]) -> StarvationReserve:
        nodes = [(node, np.array(part, np.int64)) for node, part in data["nodes"]]
        return cls(data["task"], data["pool"], nodes, np.array(data["quota"], np.int64), data["slots"], data["groups"])

    def plain(self) -> dict[str, Any]:
        nodes = [[node, part.tolist()] for node, part in self.nodes]
        return {**vars(self), "nodes": nodes, "quota": self.quota.tolist()}

    def covers(self, other: StarvationReserve) -> bool:
        """Whether it is at least as large in everything: what did not fit beside the other does not fit."""
        if not self.slots >= other.slots or not set(other.groups) <= set(self.groups):
            return False
        mine, theirs = self._by_node(), other._by_node()
        return _at_least(self.quota, other.quota) and all(
            node in mine and _at_least(mine[node], part) for node, part in theirs.items()
        )

    def _by_node(self) -> dict[str, Vector]:
        found: dict[str, Vector] = {}
        for node, part in self.nodes:
            found[node] = found[node] + part if node in found else part
        return found


def _at_least(left: Vector, right: Vector) -> bool:
    return len(left) == len(right) and bool((left >= right).all())


class PoolState:
    """Records, and what is derived from them."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolRecord] = {}
        self.tasks: dict[str, PoolTask] = {}  # ended tasks are forgotten in the order they ended
        self.groups: dict[str, PlacementGroup] = {}  # until removed
        self.claims: dict[str, ResourceClaim] = {}  # by the task they are for; such a task is not in the queue
        self.nodes: dict[str, e.NodeJoined] = {}
        self.changed_nodes: set[str] = set()  # whose resources changed: what is held there may exceed them
        self.policy: PreemptionPolicy | None = None  # None: nothing is evicted
        self.evictions: list[Eviction] = []  # the latest
        self.eviction_count = 0
        self.now = 0.0
        self.seq = 0
        self.ended: list[str] = []
        self.rechecks: set[float] = set()  # when the queue is scanned again
        self.node_stories: dict[str, list[StoryEntry]] = {}
        self.hints = HintLog()  # since the unschedulable verdicts; dumped with them
        # Derived from the above; not in a snapshot.
        self.capacity = ClusterCapacity()
        self.candidates = PreemptionCandidates(self.capacity)
        self.waiting = PendingQueue()  # tasks in the queue that neither have a claim nor share slots
        self.pool_groups: dict[str, PoolGroups] = {}
        self.short_of_turn: dict[str, None] = {}  # groups without an active tenant, where quota lacks for a turn
        self.releasing: dict[str, PlacementGroup] = {}  # being removed, or broken: their capacity is free soon
        self.needs: dict[str, RemainingNeed] = {}  # of claims
        self.node_epoch = 0  # incremented whenever a node changes
        # By size and strategy, with the node epoch or capacity shape for which they hold.
        self.never_fits_cache: dict[tuple[object, ...], tuple[int, str | None]] = {}
        self.fits_alone_cache: dict[tuple[object, ...], tuple[int, bool]] = {}
        self.timers = Timers[TimerKey](self._due)
        # Classes that neither fit nor can preempt, as long as no hint says otherwise. Dumped.
        self.unschedulable: dict[ClassQueue, Unschedulable] = {}
        self.reserves: list[StarvationReserve] = []  # during the scan that found that; dumped
        self.no_assignment: dict[tuple[object, ...], Reason] = {}  # by placement key, within one event
        # By all that decides it but priority: the highest priority that found no preemption plan.
        self.no_preemption: dict[tuple[object, ...], float] = {}
        self.scan_due = False  # something changed that may let a waiting task start

    # ---- queue ----

    def wake_all(self) -> None:
        """Any waiting task may be schedulable now: try all classes again."""
        self.hints.anything()
        self.wake()

    def wake(self) -> None:
        """Try the classes again that recorded hints could help."""
        self.no_assignment.clear()
        self.no_preemption.clear()
        self.scan_due = True

    # ---- time ----

    def recheck(self, at: float) -> None:
        """Scan the queue again at that time, whatever happens before."""
        self.rechecks.add(at)
        self.timers.arm(("recheck", at))

    def _due(self, timer: TimerKey) -> float | None:
        kind, name = timer
        if kind == "recheck":
            at: float = name
            return at if at in self.rechecks else None
        record = self.tasks.get(name) if kind == "task" else self.groups.get(name)
        return None if record is None else record.deadline

    # ---- tasks ----

    def use(self, task: PoolTask, uses: tuple[Resources, ...]) -> None:
        """Change what the task uses of its quota."""
        self.capacity.use(task.spec.pool, task.uses, -1)
        self.capacity.use(task.spec.pool, uses, 1)
        if task.uses:
            self.hints.pool(task.spec.pool)
        task.uses = uses

    def update_candidate(self, task: PoolTask) -> None:
        """Add the task to the preemption candidates, or refresh it there."""
        group = self.groups[task.places[0].group]
        before = self.candidates.may_be_evicted(task.id)
        self.candidates.drop(task.id)
        if task.state in (TaskState.starting, TaskState.running):
            self.candidates.add(task, group, len(group.tenants) == 1)
            if not before and self.candidates.may_be_evicted(task.id):
                for row in self._rows(group):
                    self.hints.evictable(row)

    def may_evict(self, task: PoolTask) -> bool:
        """Whether it may evict others: a task that was evicted usually returns only into free capacity."""
        returning = task.state is TaskState.evicted and not self.pools[task.spec.pool].spec.return_preempts
        return task.spec.may_evict and not returning

    # ---- groups ----

    def hint_released(self, group: PlacementGroup) -> None:
        """Record that capacity of the group is or will be free, on its nodes and in its pool."""
        self.hints.pool(group.pool)
        for row in self._rows(group):
            self.hints.row(row)

    def _rows(self, group: PlacementGroup) -> Iterator[int]:
        return (self.capacity.row_of[node] for node in set(group.nodes) if node in self.capacity.row_of)

    def mark_releasing(self, group: PlacementGroup) -> None:
        self.releasing[group.id] = group
        self.hint_released(group)

    def add_pool(self, pool: PoolRecord) -> None:
        self.pools[pool.spec.name] = pool
        self.pool_groups[pool.spec.name] = PoolGroups()
        self.capacity.set_pool(pool.spec.name, pool.spec.quota)

    def add_group(self, group: PlacementGroup) -> None:
        """A group is being created: its capacity is held from now on."""
        self.groups[group.id] = group
        owned = self.pool_groups[group.pool]
        owned.groups[group.id] = group
        if group.kind is PlacementGroupKind.reserved:
            owned.reserved[group.id] = group
            self.capacity.shape += 1
        else:
            owned.dynamic_bundles += len(group.bundles)
        self.capacity.hold(group.nodes, group.bundles)
        if group.state in (PgState.removing, PgState.broken):
            self.releasing[group.id] = group

    def drop_group(self, group: PlacementGroup) -> None:
        del self.groups[group.id]
        self.releasing.pop(group.id, None)
        self.short_of_turn.pop(group.id, None)
        owned = self.pool_groups[group.pool]
        del owned.groups[group.id]
        if group.kind is PlacementGroupKind.reserved:
            del owned.reserved[group.id]
            self.capacity.shape += 1
        else:
            owned.dynamic_bundles -= len(group.bundles)
        self.capacity.release(group.nodes, group.bundles)
        self.hint_released(group)

    def set_idle(self, group: PlacementGroup, idle: bool) -> None:
        """A dynamic group became idle, or is about to leave that state. Idempotent."""
        if group.kind is PlacementGroupKind.reserved:
            return
        owned = self.pool_groups[group.pool]
        idle_groups = owned.idle.setdefault(group.bundles, IdleGroups())
        if idle != (group in idle_groups):
            sign = 1 if idle else -1
            owned.idle_bundles += sign * len(group.bundles)
            self.capacity.set_idle(group.nodes, group.bundles, idle)
            if idle:
                idle_groups.add(group)
                self.hint_released(group)
            else:
                idle_groups.remove(group)
        if not idle_groups:
            del owned.idle[group.bundles]

    def usable(self, group: PlacementGroup) -> bool:
        """Whether every node of the group is up and not cordoned."""
        rows = [self.capacity.row_of.get(node) for node in group.nodes]
        return all(row is not None and self.capacity.usable[row] for row in rows)

    # ---- claims ----

    def keep(self, claim: ResourceClaim) -> None:
        """Keep for a claim the free part of what it needs: all that its victims will not release."""
        task, capacity = self.tasks[claim.task], self.capacity
        need = self.needs[claim.task] = RemainingNeed(
            {}, capacity.sum_vector(task.spec.bundles).copy(), len(claim.nodes)
        )
        if claim.nodes:
            for node, bundle in zip(claim.nodes, task.spec.size, strict=True):
                vector = capacity.vector(bundle)
                need.nodes[node] = need.nodes[node] + vector if node in need.nodes else vector.copy()
        for name in claim.groups:
            self._subtract_release(need, self.groups[name], task.spec.pool, 1)
        for name in claim.tasks:
            if self.tasks[name].spec.pool == task.spec.pool:
                need.quota = need.quota - capacity.sum_vector(self.tasks[name].uses)
        self._keep_need(need, task.spec.pool, 1)

    def keep_released(self, claim: ResourceClaim, used: tuple[Resources, ...], group: PlacementGroup | None) -> None:
        """A victim or group of the claim is gone: what it released is kept for the claim."""
        pool = self.tasks[claim.task].spec.pool
        need = self.needs[claim.task]
        self._keep_need(need, pool, -1)
        if used:
            need.quota = self.capacity.widened(need.quota) + self.capacity.sum_vector(used)
        if group is not None:
            self._subtract_release(need, group, pool, -1)
        self._keep_need(need, pool, 1)

    def stop_keeping(self, claim: ResourceClaim) -> None:
        need = self.needs.pop(claim.task, None)
        if need is not None:
            self._keep_need(need, self.tasks[claim.task].spec.pool, -1)

    def apply_reserve(self, reserve: StarvationReserve, sign: int = 1) -> None:
        """Withhold the reserve from all other tasks, until it is released."""
        for node, part in reserve.nodes:
            self.capacity.keep(node, part, sign)
        self.capacity.quota_kept[reserve.pool] += sign * reserve.quota
        self.pool_groups[reserve.pool].claimed_bundles += sign * reserve.slots
        for group in (self.groups[name] for name in reserve.groups):
            self.set_idle(group, sign < 0 and group.idle)  # it may have been claimed meanwhile

    def release_reserve(self, reserve: StarvationReserve) -> None:
        position = self.hints.position
        self.apply_reserve(reserve, -1)
        self.hints.take_back(position)  # its groups were idle all along

    def _subtract_release(self, need: RemainingNeed, group: PlacementGroup, pool: str, sign: int) -> None:
        """Reduce the need by what a group will release; or, with -1, restore it."""
        capacity = self.capacity
        if group.kind is PlacementGroupKind.dynamic and group.pool == pool:
            need.slots -= sign * len(group.bundles)
        for node, bundle in zip(group.nodes, group.bundles, strict=True):
            if node in need.nodes:
                need.nodes[node] = capacity.widened(need.nodes[node]) - sign * capacity.vector(bundle)

    def _keep_need(self, need: RemainingNeed, pool: str, sign: int) -> None:
        for node, vector in need.nodes.items():
            self.capacity.keep(node, np.maximum(0, vector), sign)
        self.capacity.quota_kept[pool] += sign * np.maximum(0, self.capacity.widened(need.quota))
        self.pool_groups[pool].claimed_bundles += sign * max(0, need.slots)

    # ---- snapshots ----

    def dump(self) -> dict[str, Any]:
        """Records and unschedulable verdicts as plain data.

        The verdicts depend on the moment of the scan and cannot be derived from the records. Without them a loaded
        machine would try other tasks, and give other reasons and deadlines, than the machine that runs on; and a
        controller's snapshots are written by another process that replays its journal.
        """
        blocked = [(queue, verdict) for queue, verdict in self.unschedulable.items() if queue.entries]
        begin = min((verdict.since for _, verdict in blocked), default=self.hints.position)
        return {
            "now": self.now,
            "seq": self.seq,
            "policy": encode(self.policy),
            **{
                name: encode([*getattr(self, name).values()])
                for name in ("pools", "tasks", "groups", "claims", "nodes")
            },
            "changed_nodes": sorted(self.changed_nodes),
            "rows": list(self.capacity.nodes),
            "cordoned": sorted(self.capacity.cordoned),
            "ended": list(self.ended),
            "evictions": encode(self.evictions),
            "eviction_count": self.eviction_count,
            "node_stories": encode(self.node_stories),
            "rechecks": sorted(self.rechecks),
            "gains": [list(entry) for entry in self.hints.entries(begin)],
            "kept": [reserve.plain() for reserve in self.reserves],
            "blocked": sorted(
                [queue.entries[0][2], list(verdict._replace(since=verdict.since - begin))] for queue, verdict in blocked
            ),
        }

    def read(self, data: dict[str, Any]) -> None:
        """Fill an empty state from a snapshot."""
        self.now, self.seq = float(data["now"]), int(data["seq"])
        self.policy = None if data["policy"] is None else decode(PreemptionPolicy, data["policy"])
        capacity = self.capacity
        self.nodes.update((node.node, node) for node in decode(list[e.NodeJoined], data["nodes"]))
        self.changed_nodes.update(data["changed_nodes"])
        capacity.cordoned.update(data["cordoned"])
        for row, name in enumerate(data["rows"]):
            capacity.set_row(row, name)
            if name is not None:
                node = self.nodes[name]
                capacity.set_node(name, node.total, node.outside, node.labels)
        for pool in decode(list[PoolRecord], data["pools"]):
            self.add_pool(pool)
        self.tasks.update((task.id, task) for task in decode(list[PoolTask], data["tasks"]))
        for group in decode(list[PlacementGroup], data["groups"]):
            self.add_group(group)
            if group.idle:
                self.set_idle(group, True)
            elif group.active is None:
                self.short_of_turn[group.id] = None
            self.timers.arm(("group", group.id))
        self.claims.update((claim.task, claim) for claim in decode(list[ResourceClaim], data["claims"]))
        for task in self.tasks.values():
            self.timers.arm(("task", task.id))
            if task.places:
                capacity.use(task.spec.pool, task.uses, 1)
                self.update_candidate(task)
            elif task.state in IN_QUEUE and task.id not in self.claims and task.shares is None:
                self.waiting.add(task, self.may_evict(task))
        for claim in self.claims.values():
            self.keep(claim)
        self.ended = list(data["ended"])
        self.evictions = decode(list[Eviction], data["evictions"])
        self.eviction_count = int(data["eviction_count"])
        self.node_stories = decode(dict[str, list[StoryEntry]], data["node_stories"])
        for at in data["rechecks"]:
            self.recheck(float(at))
        if "gains" not in data:  # of an older version: every class is tried
            self.wake_all()
            return
        self.hints = HintLog(data["gains"])
        self.reserves = [StarvationReserve.of(reserve) for reserve in data["kept"]]
        self.unschedulable = {self.waiting.queue_of(name): Unschedulable(*verdict) for name, verdict in data["blocked"]}

    # ---- invariants ----

    def check(self) -> None:
        """Verify every invariant against the records; raises AssertionError."""
        capacity = self.capacity
        held, idle = np.zeros_like(capacity.held), np.zeros_like(capacity.idle)
        for group in self.groups.values():
            assert group.pool in self.pools, f"{group.id} is of no pool"
            for node, bundle in zip(group.nodes, group.bundles, strict=True):
                assert node == "" or node in self.nodes, f"{group.id} lies on a node that is not there"
                if node:
                    held[capacity.row_of[node]] += capacity.vector(bundle)
                    if group.idle and group.kind is PlacementGroupKind.dynamic:
                        idle[capacity.row_of[node]] += capacity.vector(bundle)
            lost = "" in group.nodes
            assert not lost or group.state in (PgState.broken, PgState.removing), f"{group.id} is trusted after a loss"
            assert group.active in (None, *group.tenants), f"{group.id} has an active task that is no tenant"
            for name in group.tenants:
                self._check_tenant(group, name)
            assert group.state is not PgState.removing or not group.tenants, f"{group.id} is removed under a tenant"
        releasing = {name for name, group in self.groups.items() if group.state in (PgState.removing, PgState.broken)}
        assert releasing == self.releasing.keys(), "releasing groups are miscounted"
        assert (held == capacity.held).all(), "what groups hold is not what the accounting says"
        assert (idle == capacity.idle).all(), "what is idle is not what the accounting says"
        ours = capacity.held + capacity.kept
        for node, row in capacity.row_of.items():
            over = (ours[row] > capacity.total[row] - capacity.outside[row]).any()
            assert not over or node in self.changed_nodes, f"more is held or kept than node {node} has"
        for name, pool in self.pools.items():
            used = np.zeros_like(capacity.used[name])
            for task in self.tasks.values():
                if task.spec.pool == name and task.uses:
                    used = used + capacity.sum_vector(task.uses)
            assert (used == capacity.used[name]).all(), f"what pool {name} uses is not what the accounting says"
            assert pool.lowered or (capacity.quota_left(name) >= 0).all(), f"pool {name} is over its quota"
            owned = self.pool_groups[name]
            dynamic = [group for group in owned.groups.values() if group.kind is PlacementGroupKind.dynamic]
            there = sum(len(group.bundles) for group in dynamic)
            assert there == owned.dynamic_bundles, f"dynamic slots of pool {name} are miscounted"
            idle_names = {group.id for group in dynamic if group.idle}
            known = {group.id for groups in owned.idle.values() for group in groups}
            assert known == idle_names, f"idle slots of {name} differ"
            limit = pool.spec.dynamic_limit
            assert limit is None or there + owned.claimed_bundles <= limit, f"pool {name} is over its limit of slots"
        for task in self.tasks.values():
            self._check_task(task)
        at_work = {name for name, task in self.tasks.items() if task.state in (TaskState.starting, TaskState.running)}
        assert at_work == self.candidates.at.keys(), "preemption candidates are miscounted"
        for claim in self.claims.values():
            assert self.tasks[claim.task].state in IN_QUEUE, f"{claim.task} claims room and does not wait"
            assert claim.tasks or claim.groups, f"the room of {claim.task} is there and not taken"
            assert all(self.tasks[name].state is TaskState.cancelling for name in claim.tasks), "a victim does not stop"

    def _check_tenant(self, group: PlacementGroup, name: str) -> None:
        task = self.tasks[name]
        if task.places:
            assert task.places[0].group == group.id, f"{name} is in two groups"
            for at, slot in enumerate(group.bundles):
                uses = Resources()
                for tenant in group.tenants:
                    if self.tasks[tenant].uses:
                        uses = uses.plus(self.tasks[tenant].uses[at])
                assert uses.within(slot), f"slot {at} of {group.id} is overfull"
        else:
            assert name in self.claims or task.shares is not None, (
                f"{name} is a tenant of {group.id} without a claim or a share"
            )

    def _check_task(self, task: PoolTask) -> None:
        assert bool(task.places) == task.holds, f"{task.id} is {task.state.value} with places {task.places}"
        assert task.holds or not task.uses, f"{task.id} uses quota without a slot"
        assert task.reason.sentence, f"{task.id} has no reason"
        assert len(task.story) <= STORY_KEPT, f"the story of {task.id} grows"
        if task.places:
            group = self.groups.get(task.places[0].group)
            assert group is not None, f"{task.id} is in a group that is not there"
            assert task.id in group.tenants, f"{task.id} is in a group without being its tenant"
            if task.state in (TaskState.starting, TaskState.running):
                assert group.active == task.id, f"{task.id} runs out of turn"
        if task.state in IN_QUEUE:
            assert task.deadline is not None, f"{task.id} waits without a deadline"
            places = (task.id in self.waiting, task.id in self.claims, task.shares is not None)
            assert sum(places) == 1, f"{task.id} waits in {sum(places)} places"
        if task.state in (TaskState.starting, TaskState.cancelling):
            assert task.deadline is not None, f"{task.id} is {task.state.value} without a deadline"
        assert (task.state in ENDED) == (task.id in self.ended), f"{task.id} is {task.state.value}, ended or not"
