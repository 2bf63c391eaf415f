"""Tasks that hold slots and may be evicted, as arrays for vectorized search.

Holds facts and priority gaps; `preemption` chooses among them. One index per task that holds slots and is not stopping
already.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.pool.capacity import ClusterCapacity, Vector
from trimtab.machines.pool.records import PlacementGroup, PlacementGroupKind, PoolTask
from trimtab.model.pool import Labels, PreemptionPolicy

GAP_GRAIN = 1e-9  # tolerance: gaps are differences of decimals such as 8.5 and 9.0
NO_ROW, MANY_ROWS = -1, -2  # rows of tasks that free no node (in reserved slots), and of gangs on several


class PreemptionCandidates:
    """Columns over the tasks that hold slots."""

    def __init__(self, capacity: ClusterCapacity) -> None:
        self._capacity = capacity
        self.at: dict[str, int] = {}
        self.names: list[str | None] = []
        self.by_row: dict[int, list[int]] = {}
        self.spread: list[int] = []  # gangs
        self._holes: list[int] = []
        self._lowest: float | None = None  # priority of any evictable task
        self._pools: dict[str, int] = {}
        self._label_sets: dict[Labels, int] = {}
        self._rules_of: PreemptionPolicy | None = None
        self._rules_found: dict[Labels, list[bool]] = {}  # by the preemptor's labels, for every label set
        self.parts: dict[int, tuple[tuple[int, Vector], ...]] = {}  # what an eviction frees, by row
        width = capacity.total.shape[1]
        self._columns: dict[str, NDArray[Any]] = {
            "row": np.full(0, NO_ROW, np.int64),
            "priority": np.zeros(0),
            "since": np.zeros(0),
            "estimate": np.zeros(0),
            "saves": np.zeros(0, np.bool_),
            "pool": np.zeros(0, np.int64),
            "labels": np.zeros(0, np.int64),
            "evictable": np.zeros(0, np.bool_),
            "borrowed": np.zeros(0, np.bool_),
            "slots": np.zeros(0, np.int64),  # dynamic bundles that an eviction frees
            "seq": np.zeros(0, np.int64),
            "release": np.zeros((0, width), np.int64),  # on its node
            "uses": np.zeros((0, width), np.int64),  # of its quota
        }

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._columns[column][: len(self.names)]

    def add(self, task: PoolTask, group: PlacementGroup, alone: bool) -> None:
        """The task holds slots now; `alone`: it does not share them."""
        self._lowest = None
        capacity = self._capacity
        uses = capacity.sum_vector(task.uses)
        for bundle in group.bundles:
            capacity.vector(bundle)
        self._fit()
        at = self._holes.pop() if self._holes else self._new_index()
        self.names[at] = task.id
        self.at[task.id] = at
        dynamic = group.kind is PlacementGroupKind.dynamic and alone
        parts: dict[int, Vector] = {}
        if dynamic:
            for row, vector in capacity.parts(group.nodes, group.bundles):
                parts[row] = parts[row] + vector if row in parts else vector
        row = NO_ROW if not parts else next(iter(parts)) if len(parts) == 1 else MANY_ROWS
        self.parts[at] = tuple(parts.items())
        columns = self._columns
        columns["row"][at] = row
        columns["priority"][at] = task.spec.priority
        columns["since"][at] = task.started_at if task.started_at is not None else task.since
        columns["estimate"][at] = task.spec.estimate_s
        columns["saves"][at] = task.spec.saves
        columns["pool"][at] = self._pools.setdefault(task.spec.pool, len(self._pools))
        columns["labels"][at] = self._label_sets.setdefault(task.spec.labels, len(self._label_sets))
        columns["evictable"][at] = task.spec.evictable and alone
        columns["borrowed"][at] = task.borrowed
        columns["slots"][at] = len(group.bundles) if dynamic else 0
        columns["seq"][at] = task.seq
        columns["release"][at] = parts[row] if row >= 0 else 0
        columns["uses"][at] = uses
        if row >= 0:
            self.by_row.setdefault(row, []).append(at)
        elif row == MANY_ROWS:
            self.spread.append(at)

    def drop(self, task: str) -> None:
        at = self.at.pop(task, None)
        if at is None:
            return
        self._lowest = None
        row = int(self._columns["row"][at])
        if row >= 0:
            self.by_row[row].remove(at)
        elif row == MANY_ROWS:
            self.spread.remove(at)
        self._columns["evictable"][at] = False
        self._columns["borrowed"][at] = False
        self.names[at] = None
        del self.parts[at]
        self._holes.append(at)

    def may_be_evicted(self, task: str) -> bool:
        at = self.at.get(task)
        return at is not None and bool(self._columns["evictable"][at])

    def none_evictable(self, priority: float, policy: PreemptionPolicy | None) -> bool:
        """Whether certainly no task may be evicted for this priority; False is not conclusive."""
        if policy is None:
            return True
        if self._lowest is None:
            evictable = self["evictable"]
            self._lowest = float(self["priority"][evictable].min()) if evictable.any() else math.inf
        return priority - self._lowest + GAP_GRAIN < min_gap(policy)

    def releases(self, row: int, column: int, priority: float, policy: PreemptionPolicy | None) -> int:
        """The most of a resource that evictions for this priority could free on a row."""
        if policy is None:
            return 0
        columns, most = self._columns, priority - min_gap(policy) + GAP_GRAIN
        priorities, evictable = columns["priority"], columns["evictable"]
        freed = 0
        for at in self.by_row.get(row, ()):
            if evictable[at] and priorities[at] <= most:
                freed += int(columns["release"][at, column])
        for at in self.spread:
            if evictable[at] and priorities[at] <= most:
                freed += sum(int(vector[column]) for there, vector in self.parts[at] if there == row)
        return freed

    def allowed(
        self, task: PoolTask, now: float, policy: PreemptionPolicy | None
    ) -> tuple[NDArray[np.bool_], float | None]:
        """Which tasks the policy allows to evict; and when `min_runtime_s` stops protecting the next one.

        A task that was evicted itself may only evict lower priorities, however small a gap the policy asks for:
        otherwise two tasks could evict each other for ever, and neither would run.
        """
        if policy is None:
            return np.zeros(len(self.names), np.bool_), None
        may = self._by_policy(task, policy)
        if task.evictions:
            may &= ~self._as_high(task)
        retry_at = None
        if policy.min_runtime_s > 0:
            grown_at = self["since"] + policy.min_runtime_s
            young = may & (grown_at > now)
            if young.any():
                retry_at = float(grown_at[young].min())
                may &= ~young
        return may, retry_at

    def spared(self, task: PoolTask, policy: PreemptionPolicy | None) -> set[str]:
        """Tasks that could be evicted for the task, had it not been evicted itself."""
        if policy is None or not task.evictions:
            return set()
        return {str(self.names[at]) for at in np.flatnonzero(self._by_policy(task, policy) & self._as_high(task))}

    def _as_high(self, task: PoolTask) -> NDArray[np.bool_]:
        return np.asarray(task.spec.priority - self["priority"] <= GAP_GRAIN)

    def _by_policy(self, task: PoolTask, policy: PreemptionPolicy) -> NDArray[np.bool_]:
        """Which tasks rules and gaps allow to evict for the task."""
        spec = task.spec
        same = self.same_pool(spec.pool)
        gap = spec.priority - self["priority"] + GAP_GRAIN
        may = same & self._by_rule(spec.labels, policy)[self["labels"]] & (gap >= policy.label_gap)
        if policy.same_pool:
            may |= same & (gap >= policy.same_pool_gap)
        if policy.cross_pool:
            shielded = np.zeros(max(1, len(self._pools)), np.bool_)
            for pool in policy.protected_pools:
                if pool in self._pools:
                    shielded[self._pools[pool]] = True
            may |= ~same & (gap >= policy.cross_pool_gap) & ~shielded[self["pool"]]
        return np.asarray(may & self["evictable"])

    def add_releases(self, room: Vector, column: int, priority: float, policy: PreemptionPolicy | None) -> None:
        """Add to each row the most of a resource that evictions for this priority could free."""
        if policy is None:
            return
        may = self["evictable"] & (self["priority"] <= priority - min_gap(policy) + GAP_GRAIN)
        single = may & (self["row"] >= 0)
        np.add.at(room, self["row"][single], self["release"][single, column])
        for at in self.spread:
            if may[at]:
                for row, vector in self.parts[at]:
                    room[row] += vector[column]

    def reason(self, at: int, task: PoolTask, policy: PreemptionPolicy | None) -> ReasonCode:
        """Which rule allows this eviction."""
        spec = task.spec
        if self["pool"][at] != self._pools.get(spec.pool, -1):
            return ReasonCode.cross_pool
        gap = spec.priority - float(self["priority"][at]) + GAP_GRAIN
        if policy is not None and gap >= policy.label_gap and self._by_rule(spec.labels, policy)[self["labels"][at]]:
            return ReasonCode.label_rule
        return ReasonCode.priority

    def same_pool(self, pool: str) -> NDArray[np.bool_]:
        return np.asarray(self["pool"] == self._pools.get(pool, -1))

    def lost(self, indices: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Work that would be lost, in seconds."""
        elapsed = np.maximum(0.0, now - self["since"][indices])
        return lost_work(elapsed, self["estimate"][indices], self["saves"][indices])

    def lost_by(self, at: int, now: float) -> float:
        """Same as `lost` for a single index, without arrays."""
        columns = self._columns
        if columns["saves"][at]:
            return 0.0
        elapsed = max(0.0, now - float(columns["since"][at]))
        estimate = float(columns["estimate"][at])
        return elapsed * (min(1.0, elapsed / estimate) if estimate > 0 else 0.5)

    def _by_rule(self, labels: Labels, policy: PreemptionPolicy) -> NDArray[np.bool_]:
        """Which label sets may be evicted by a task with these labels."""
        if policy is not self._rules_of:
            self._rules_of, self._rules_found = policy, {}
        found = self._rules_found.setdefault(labels, [])
        if len(found) < len(self._label_sets):
            mine = dict(labels)
            victims = {
                label: may_evict
                for label, by_value in policy.label_rules
                for value, may_evict in by_value
                if mine.get(label) == value
            }
            for theirs in list(self._label_sets)[len(found) :]:
                found.append(any(value in victims.get(label, ()) for label, value in theirs))
        return np.array(found or [False], np.bool_)

    def _new_index(self) -> int:
        at = len(self.names)
        self.names.append(None)
        if at >= len(self._columns["seq"]):
            more = max(64, at)
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.zeros((more, *column.shape[1:]), column.dtype)])
        return at

    def _fit(self) -> None:
        """Widen the columns to the current number of resources."""
        width = self._capacity.total.shape[1]
        missing = width - self._columns["uses"].shape[1]
        if missing > 0:
            for name in ("release", "uses"):
                column = self._columns[name]
                self._columns[name] = np.concatenate([column, np.zeros((len(column), missing), np.int64)], axis=1)
            for at, parts in self.parts.items():
                self.parts[at] = tuple(
                    (row, np.concatenate([vector, np.zeros(missing, np.int64)])) for row, vector in parts
                )


def min_gap(policy: PreemptionPolicy) -> float:
    gaps = [policy.same_pool_gap] if policy.same_pool else []
    gaps += [policy.label_gap] if policy.label_rules else []
    gaps += [policy.cross_pool_gap] if policy.cross_pool else []
    return min(gaps, default=math.inf)


def lost_work(
    elapsed_s: NDArray[np.float64], estimate_s: NDArray[np.float64], saves: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Seconds of work that an eviction throws away: none where state is saved, more the nearer the end is.

    Elapsed seconds are weighted by the completed share of the estimate, and by half where there is none.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        progress = np.where(estimate_s > 0, np.minimum(1.0, elapsed_s / estimate_s), 0.5)
    return np.where(saves, 0.0, elapsed_s * progress)


def eviction_reason(code: ReasonCode, victim: PoolTask, by: PoolTask) -> Reason:
    gap = f"priority {by.spec.priority:g} against {victim.spec.priority:g}"
    why = {
        ReasonCode.label_rule: f"a label rule allows it, {gap}",
        ReasonCode.priority: f"{gap} in the same pool",
        ReasonCode.cross_pool: f"pool {by.spec.pool} may take from pool {victim.spec.pool}, {gap}",
        ReasonCode.owner_returned: "it had borrowed a reserved slot",
    }[code]
    return Reason(code, f"makes room for {by.id}: {why}")
