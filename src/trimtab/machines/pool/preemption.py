"""Preemption planning: the cheapest evictions that let a task start. Changes nothing; the machine evicts.

As few tasks as possible are evicted, and none that is not needed. Free capacity comes first, then idle slots, then
victims: as few as possible where one bundle decides it, then the lowest priorities (the highest of each set compared
first), then the least lost work. Borrowers are evicted before others. Gangs are placed bundle by bundle, then victims
that turn out not to be needed are dropped. Reserved slots of other pools are never touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.core.frozen import Frozen
from trimtab.core.reasons import ReasonCode
from trimtab.machines.pool.capacity import Vector, place, tightest
from trimtab.machines.pool.records import PgState, PlacementGroup, PlacementGroupKind, PoolTask
from trimtab.machines.pool.state import PoolState
from trimtab.model.pool import PlacementStrategy, TaskSpec

# Limits of the exact search: nodes compared after a solution is known, subsets tried on a node, and tasks of a pool
# among which subsets are tried. Beyond them the plan is still sufficient and without needless victims.
NODES_COMPARED = 16
SUBSETS_TRIED = 500
POOL_TRIED = 24

PreemptionCost = tuple[int, tuple[tuple[int, float], ...], float, tuple[int, ...]]


class PreemptionPlan(Frozen):
    """What to evict, and where the task goes then. Empty `nodes` and no `group`: nothing helps."""

    nodes: tuple[str, ...] = ()  # of the group to create
    group: str | None = None  # the slot to take over
    victims: tuple[tuple[str, ReasonCode], ...] = ()
    reclaims: tuple[str, ...] = ()  # idle groups to remove
    awaits: tuple[str, ...] = ()  # groups that are being removed anyway
    retry_at: float | None = None  # when time alone might change the plan

    @property
    def found(self) -> bool:
        return bool(self.nodes) or self.group is not None


class PoolShortage(NamedTuple):
    """What victims of the same pool must free: of its quota, and of its limit of slots."""

    quota: Vector
    slots: int


@dataclass
class _PreemptionOption:
    """One way to free capacity; victims by candidate index."""

    rows: tuple[int, ...]
    group: str | None
    indices: list[int]


class _PreemptionSearch:
    """One search, for one task."""

    def __init__(self, state: PoolState, task: PoolTask, now: float) -> None:
        capacity, candidates = state.capacity, state.candidates
        self.state, self.capacity, self.candidates = state, capacity, candidates
        self.task = task
        self.may: NDArray[np.bool_] = np.zeros(len(candidates.names), np.bool_)
        self._prices: dict[int, tuple[int, float, float, int]] = {}
        self.may_evict = False
        self.slots_left: int | None = None
        self.now = now
        spec = task.spec
        self.demands = [capacity.vector(bundle) for bundle in spec.size]
        self.demands = [capacity.vector(bundle) for bundle in spec.size]  # again: after all columns were added
        self._quota_short = np.maximum(0, capacity.sum_vector(spec.bundles) - capacity.quota_left(spec.pool))
        candidates._fit()
        self.mine = candidates.same_pool(spec.pool)

    # ---- what it costs ----

    def price(self, at: int) -> tuple[int, float, float, int]:
        """Cost of evicting one task: borrowers first, then by priority, lost work, latest submission."""
        known = self._prices.get(at)
        if known is None:
            columns = self.candidates
            known = self._prices[at] = (
                0 if columns["borrowed"][at] else 1,
                float(columns["priority"][at]),
                self.candidates.lost_by(at, self.now),
                -int(columns["seq"][at]),
            )
        return known

    def cost(self, indices: Sequence[int]) -> PreemptionCost:
        """Cost of a set: count, priorities (highest first), lost work, then latest submissions."""
        prices = [self.price(at) for at in indices]
        levels = sorted([(price[0], price[1]) for price in prices], reverse=True)
        return (
            len(indices),
            tuple(levels),
            sum(price[2] for price in prices),
            tuple(sorted(price[3] for price in prices)),
        )

    def _cheapest(self, indices: NDArray[np.int64]) -> int:
        """The index with the lowest price, found criterion by criterion."""
        columns = self.candidates
        borrowers = indices[columns["borrowed"][indices]]
        indices = borrowers if len(borrowers) else indices
        priorities = columns["priority"][indices]
        indices = indices[priorities == priorities.min()]
        lost = columns.lost(indices, self.now)
        indices = indices[lost == lost.min()]
        return int(indices[np.argmax(columns["seq"][indices])])

    # ---- slots that are there ----

    def into_slots(self, reserved: Sequence[PlacementGroup], *, owner: bool, borrow: bool) -> list[_PreemptionOption]:
        """Take over a reserved slot that is idle, or whose tenant may be evicted."""
        spec = self.task.spec
        options = []
        for group in reserved:
            if group.state is not PgState.ready or not spec.size[0].within(group.bundles[0]):
                continue
            if not self.state.usable(group):
                continue
            if group.idle and (owner or borrow):
                base: list[int] = []
            elif owner and len(group.tenants) == 1 and self._may_be_evicted_from_slot(group.tenants[0]):
                base = [self.candidates.at[group.tenants[0]]]
            else:
                continue
            indices = self._cover_pool(base, PoolShortage(self._quota_short, 0))
            if indices is not None:
                options.append(_PreemptionOption((), group.id, indices))
        return options

    def _may_be_evicted_from_slot(self, task: str) -> bool:
        """Whether the policy allows it, or it borrowed the slot."""
        at = self.candidates.at.get(task)
        if at is None:
            return False
        borrower = self.candidates["borrowed"][at] and self.candidates["evictable"][at] and self.may_evict
        return bool(self.may[at] or borrower)

    # ---- nodes ----

    def onto_nodes(self, strategy: PlacementStrategy) -> _PreemptionOption | None:
        """Create a new group where tasks are evicted."""
        capacity = self.capacity
        available = capacity.free + capacity.idle
        slots = 0 if self.slots_left is None else max(0, len(self.demands) - self.slots_left)
        short = PoolShortage(self._quota_short, slots)
        none = any(capacity.too_large(demand, with_idle=True) for demand in self.demands[:1] + self.demands[-1:])
        rows = None if none else place(available, capacity.usable, self.demands, strategy)
        if rows is not None:
            indices = self._cover_pool([], short)
            return None if indices is None else _PreemptionOption(rows, None, indices)
        if not self.may.any():
            return None
        if len(self.demands) == 1 or strategy is PlacementStrategy.strict_pack:
            demand: Vector = np.asarray(np.sum(self.demands, axis=0, dtype=np.int64))
            found = self._one_node(available, capacity.usable, demand, short, [])
            if found is None:
                return None
            row, indices = found
            return _PreemptionOption((row,) * len(self.demands), None, indices)
        return self._many_nodes(available, strategy, short)

    def _one_node(
        self, available: Vector, usable: NDArray[np.bool_], demand: Vector, short: PoolShortage, base: list[int]
    ) -> tuple[int, list[int]] | None:
        """The node with the fewest evictions for the demand, and its victims."""
        columns = self.candidates
        may = self.may.copy()
        may[base] = False
        (indices,) = np.nonzero(may & (columns["row"] >= 0))
        gangs = [at for at in columns.spread if may[at]]
        wanted = np.nonzero(demand)[0]
        rows = columns["row"][indices]
        count = len(available)
        release = columns["release"]
        if not gangs:
            alone = self._one_alone(available, usable, demand, short, base, indices)
            if alone is not None:
                return int(columns["row"][alone]), [alone]
        lack = np.maximum(0, demand[wanted] - available[:, wanted])
        gain = np.zeros((count, len(wanted)))
        largest = np.zeros((count, len(wanted)), np.int64)
        for place_at, column in enumerate(wanted):
            amounts = release[indices, column]
            gain[:, place_at] = np.bincount(rows, weights=amounts, minlength=count)
            np.maximum.at(largest[:, place_at], rows, amounts)
        lowest = np.full(count, np.inf)
        np.minimum.at(lowest, rows, columns["priority"][indices])
        for at in gangs:
            for row, vector in columns.parts[at]:
                gain[row] += vector[wanted]
                largest[row] = np.maximum(largest[row], vector[wanted])
                lowest[row] = min(lowest[row], columns["priority"][at])
        # Floating-point sums only select the nodes to solve; solving is in integers.
        open_rows = usable[:count] & (gain * (1 + 1e-9) >= lack).all(axis=1)
        (hopeful,) = np.nonzero(open_rows)
        if not len(hopeful):
            return None
        least = np.ones(len(hopeful), np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where(lack[hopeful] > 0, np.ceil(lack[hopeful] / np.maximum(largest[hopeful], 1)), 0)
        if needed.size:
            least = np.maximum(least, needed.max(axis=1).astype(np.int64))
        order = np.lexsort((hopeful, lowest[hopeful], least))
        best: tuple[PreemptionCost, int, list[int]] | None = None
        solved = 0
        by_gang: dict[int, list[int]] = {row: [] for at in gangs for row, _ in columns.parts[at]}
        for at in gangs:
            for row, _ in columns.parts[at]:
                by_gang[row].append(at)
        for at in order:
            row = int(hopeful[at])
            if best is not None:
                if least[at] > best[0][0]:
                    break
                if solved >= NODES_COMPARED and least[at] == best[0][0]:
                    break
                if (
                    least[at] == best[0][0]
                    and lowest[row] > best[0][1][0][1]
                    and best[0][1][0][0] == 1
                    and not any(columns["borrowed"][at] for at in columns.by_row.get(row, ()))
                ):
                    continue
            here = [index for index in columns.by_row.get(row, ()) if may[index]] + by_gang.get(row, [])
            chosen = self._cover_node(row, demand - available[row], here, short, base)
            solved += 1
            if chosen is None:
                continue
            cost = self.cost(chosen)
            if best is None or cost < best[0]:
                best = (cost, row, chosen)
        return None if best is None else (best[1], best[2])

    def _one_alone(
        self,
        available: Vector,
        usable: NDArray[np.bool_],
        demand: Vector,
        short: PoolShortage,
        base: list[int],
        indices: NDArray[np.int64],
    ) -> int | None:
        """The cheapest single task whose eviction is enough."""
        columns = self.candidates
        rows = columns["row"][indices]
        enough = usable[rows]
        for column in np.nonzero(demand)[0]:
            enough &= available[rows, column] + columns["release"][indices, column] >= demand[column]
        if not self._pool_covered(base, short):
            leaving = [at for at in base if self.mine[at]]
            uses, slots = columns["uses"], columns["slots"]
            quota = short.quota - (uses[leaving].sum(axis=0) if leaving else 0)
            needed = short.slots - int(sum(slots[at] for at in leaving))
            enough &= self.mine[indices] & (uses[indices] >= quota).all(axis=1) & (slots[indices] >= needed)
        return self._cheapest(indices[enough]) if enough.any() else None

    def _cover_node(
        self, row: int, lack: Vector, here: list[int], short: PoolShortage, base: list[int]
    ) -> list[int] | None:
        """The cheapest set on one node that frees what is lacking there; plus victims for the quota."""
        node_columns = [int(column) for column in np.nonzero(lack > 0)[0]]
        quota_columns = [int(column) for column in np.nonzero(short.quota > 0)[0]]
        mine = {at: bool(self.mine[at]) for at in here}
        uses, slots = self.candidates["uses"], self.candidates["slots"]
        quota_left = [
            int(short.quota[c]) - sum(int(uses[at][c]) for at in base if self.mine[at]) for c in quota_columns
        ]
        slots_left = short.slots - sum(int(slots[at]) for at in base if self.mine[at])
        node_lacks = [int(lack[c]) for c in node_columns]
        lacks = [*node_lacks, *quota_left, slots_left]
        gains = {}
        for at in here:
            part = next(vector for there, vector in self.candidates.parts[at] if there == row)
            gains[at] = (
                [int(part[c]) for c in node_columns]
                + [int(uses[at][c]) if mine[at] else 0 for c in quota_columns]
                + [int(slots[at]) if mine[at] else 0]
            )
        chosen = self._cover(lacks, gains)
        if chosen is not None:
            return chosen
        chosen = self._cover(node_lacks, {at: gain[: len(node_columns)] for at, gain in gains.items()})
        if chosen is None:
            return None
        indices = self._cover_pool(base + chosen, short)
        if indices is None:
            return None
        indices = [at for at in indices if at not in base]

        def enough(kept: list[int]) -> bool:
            node = all(
                sum(gains[at][place_at] for at in kept if at in gains) >= wanted
                for place_at, wanted in enumerate(node_lacks)
            )
            return node and self._pool_covered(base + kept, short)

        return self._minimal(indices, enough)

    def _cover(self, lacks: list[int], gains: dict[int, list[int]]) -> list[int] | None:
        """The cheapest of the smallest sets whose gains cover all lacks."""
        wanted = [at for at, lack in enumerate(lacks) if lack > 0]
        if not wanted:
            return []
        indices = [at for at, gain in gains.items() if any(gain[place_at] > 0 for place_at in wanted)]
        if any(sum(gains[at][place_at] for at in indices) < lacks[place_at] for place_at in wanted):
            return None
        least = 1
        for place_at in wanted:
            covered = 0
            for number, gain in enumerate(sorted((gains[at][place_at] for at in indices), reverse=True), start=1):
                covered += gain
                if covered >= lacks[place_at]:
                    least = max(least, number)
                    break
        indices.sort(key=self.price)

        def enough(kept: Sequence[int]) -> bool:
            return all(sum(gains[at][place_at] for at in kept) >= lacks[place_at] for place_at in wanted)

        if len({tuple(gains[at][place_at] for place_at in wanted) for at in indices}) == 1:
            return indices[:least]  # equal gains: the cheapest
        for size in range(least, len(indices) + 1):
            if math.comb(len(indices), size) > SUBSETS_TRIED:
                break
            found = [list(some) for some in itertools.combinations(indices, size) if enough(some)]
            if found:
                return min(found, key=self.cost)
        # Too many subsets: greedily by share of the lack covered, then without needless victims.
        kept: list[int] = []
        left = {place_at: lacks[place_at] for place_at in wanted}
        remaining = list(indices)
        while any(value > 0 for value in left.values()):
            best = max(
                remaining,
                key=lambda at: sum(
                    min(gains[at][place_at], lack) / lacks[place_at] for place_at, lack in left.items() if lack > 0
                ),
            )
            remaining.remove(best)
            kept.append(best)
            for place_at in wanted:
                left[place_at] -= gains[best][place_at]
        return self._minimal(kept, enough)

    def _minimal(self, indices: Sequence[int], enough: Callable[[list[int]], bool]) -> list[int]:
        """Without victims that are not needed, dearest first."""
        kept = list(indices)
        for at in sorted(indices, key=self.price, reverse=True):
            without = [index for index in kept if index != at]
            if enough(without):
                kept = without
        return kept

    # ---- the pool's quota and its limit of slots ----

    def _pool_covered(self, indices: Sequence[int], short: PoolShortage) -> bool:
        uses, slots = self.candidates["uses"], self.candidates["slots"]
        mine = [at for at in indices if self.mine[at]]
        freed = uses[mine].sum(axis=0) if mine else 0
        return bool((short.quota <= freed).all()) and int(sum(slots[at] for at in mine)) >= short.slots

    def _cover_pool(self, base: list[int], short: PoolShortage) -> list[int] | None:
        """Extend the victims by others of the pool, for the quota and the slot limit."""
        if self._pool_covered(base, short):
            return base
        columns = self.candidates
        uses, slots = columns["uses"], columns["slots"]
        may = self.may & self.mine
        may[base] = False
        leaving = [at for at in base if self.mine[at]]
        quota = short.quota - (uses[leaving].sum(axis=0) if leaving else 0)
        needed = short.slots - int(sum(slots[at] for at in leaving))
        (indices,) = np.nonzero(may)
        if not len(indices):
            return None
        alone = (uses[indices] >= quota).all(axis=1) & (slots[indices] >= needed)
        if alone.any():
            return [*base, self._cheapest(indices[alone])]
        wanted = [int(column) for column in np.nonzero(quota > 0)[0]]
        if len(indices) <= POOL_TRIED:
            lacks = [int(quota[column]) for column in wanted] + [needed]
            gains = {int(at): [int(uses[at][column]) for column in wanted] + [int(slots[at])] for at in indices}
            chosen = self._cover(lacks, gains)
            return None if chosen is None else base + chosen
        gain = np.column_stack([uses[indices][:, wanted], slots[indices]])
        lack = np.array([*(quota[column] for column in wanted), max(0, needed)], np.int64)
        if (gain.sum(axis=0) < lack).any():
            return None
        lost = columns.lost(indices, self.now)
        order = np.lexsort(
            (-columns["seq"][indices], lost, columns["priority"][indices], ~columns["borrowed"][indices])
        )
        indices, gain = indices[order], gain[order]
        more: list[int] = []
        while (lack > 0).any():
            # The task that covers most of the lack; of equals the cheapest, which is first.
            share = (np.minimum(gain, np.maximum(0, lack)) / np.maximum(1, lack)).sum(axis=1)
            best = int(np.argmax(share))
            more.append(int(indices[best]))
            lack = lack - gain[best]
            gain[best] = 0
        return base + self._minimal(more, lambda some: self._pool_covered(base + some, short))

    # ---- gangs over several nodes ----

    def _many_nodes(
        self, available: Vector, strategy: PlacementStrategy, short: PoolShortage
    ) -> _PreemptionOption | None:
        """Place bundle by bundle, largest first; then drop victims that are not needed."""
        columns = self.candidates
        begun = available.copy()
        available = available.copy()
        usable = self.capacity.usable[: len(available)].copy()
        order = sorted(
            range(len(self.demands)), key=lambda at: (-int(self.demands[at][1]), -int(self.demands[at][0]), at)
        )
        leaving: list[int] = []
        taken = np.zeros(len(usable), np.bool_)
        for at in order:
            demand = self.demands[at]
            open_rows = usable & ~taken if strategy is PlacementStrategy.strict_spread else usable
            row = None
            if strategy is PlacementStrategy.pack:
                row = tightest(available, open_rows & taken, demand)
            elif strategy is PlacementStrategy.spread:
                row = tightest(available, open_rows & ~taken, demand)
            if row is None:
                row = tightest(available, open_rows, demand)
            if row is None:
                # Quota and slot limit are covered at the end, for all bundles together.
                enough = PoolShortage(np.zeros_like(short.quota), 0)
                found = self._one_node(available, open_rows, demand, enough, leaving)
                if found is None:
                    return None
                row, more = found
                for index in more:
                    for there, vector in columns.parts[index]:
                        available[there] += vector
                leaving += more
            taken[row] = True
            available[row] -= demand
        indices = self._cover_pool(leaving, short)
        if indices is None:
            return None

        # Only nodes that could fit a bundle after all evictions matter from here on.
        after_all = begun.copy()
        for index in indices:
            for there, vector in columns.parts[index]:
                after_all[there] += vector
        fit = np.zeros(len(begun), np.bool_)
        for demand in self.demands:
            fit |= (after_all >= demand).all(axis=1)
        (few,) = np.nonzero(fit & usable)
        place_of = {int(row): at for at, row in enumerate(few)}

        def rows_without(kept: list[int]) -> tuple[int, ...] | None:
            freed = begun[few]
            for index in kept:
                for there, vector in columns.parts[index]:
                    if there in place_of:
                        freed[place_of[there]] += vector
            found = place(freed, usable[few], self.demands, strategy)
            return None if found is None else tuple(int(few[at]) for at in found)

        kept = self._minimal(indices, lambda some: self._pool_covered(some, short) and rows_without(some) is not None)
        rows = rows_without(kept)
        return None if rows is None else _PreemptionOption(rows, None, kept)

    # ---- idle groups that have to go ----

    def reclaims(self, option: _PreemptionOption, slots_left: int | None) -> tuple[str, ...]:
        """The idle groups whose capacity or slot count is needed, and no others."""
        capacity, columns = self.capacity, self.candidates
        lacks: dict[int, Vector] = {}
        for row, demand in zip(option.rows, self.demands, strict=True):
            lacks[row] = lacks.get(row, -capacity.free[row]) + demand
        slots = 0 if slots_left is None else len(self.demands) - slots_left
        for index in option.indices:
            for row, vector in columns.parts[index]:
                if row in lacks:
                    lacks[row] = lacks[row] - vector
            if self.mine[index]:
                slots -= int(columns["slots"][index])
        pool = self.task.spec.pool
        chosen: list[PlacementGroup] = []
        if slots > 0 or any((lack > 0).any() for lack in lacks.values()):
            pool_groups = self.state.pool_groups.values()
            idle = [group for owned in pool_groups for index in owned.idle.values() for group in index]
            # Groups of its own pool first: they also count against its slot limit.
            idle.sort(key=lambda group: (group.pool != pool, group.seq))
            for group in idle:
                on_rows = any(capacity.row_of.get(node) in lacks for node in group.nodes)
                if on_rows or (slots > 0 and group.pool == pool):
                    chosen.append(group)

        def enough(kept: list[PlacementGroup]) -> bool:
            left = {row: lack.copy() for row, lack in lacks.items()}
            for group in kept:
                for row, vector in capacity.parts(group.nodes, group.bundles):
                    if row in left:
                        left[row] -= vector
            room = all((lack <= 0).all() for lack in left.values())
            return room and sum(len(group.bundles) for group in kept if group.pool == pool) >= slots

        for group in reversed(list(chosen)):
            without = [other for other in chosen if other is not group]
            if enough(without):
                chosen = without
        return tuple(group.id for group in chosen)


def _on_crowded_nodes(state: PoolState, spec: TaskSpec) -> list[PlacementGroup]:
    """Dynamic slots of the task's size on nodes that hold more than they have: a new one there costs more evictions."""
    capacity = state.capacity
    crowded = {capacity.nodes[row] for row in np.nonzero((capacity.free < 0).any(axis=1))[0]}
    return [
        group
        for group in (state.groups.values() if crowded else ())
        if group.nodes[0] in crowded
        and (group.pool, group.kind, group.bundles) == (spec.pool, PlacementGroupKind.dynamic, spec.size)
    ]


def cheapest_plan(
    state: PoolState, task: PoolTask, now: float, budget_left: int | None, slots_left: int | None, ignore_policy: bool
) -> PreemptionPlan:
    """The cheapest way for the task to start.

    `ignore_policy`: as if every task were evictable, to tell what would have to end. `slots_left`: dynamic bundles the
    pool may still create; idle ones could be removed at once.
    """
    policy, candidates, may_evict = state.policy, state.candidates, state.may_evict(task)
    search = _PreemptionSearch(state, task, now)
    spec = task.spec
    pool = state.pools[spec.pool]
    owner = spec.priority >= pool.spec.reserved_priority
    retry_at: float | None = None
    search.may_evict = may_evict
    if may_evict:
        search.may, retry_at = candidates.allowed(task, now, policy)
    if ignore_policy:
        search.may = np.array([name is not None for name in candidates.names], np.bool_)
    search.slots_left = None if slots_left is None else slots_left + state.pool_groups[spec.pool].idle_bundles
    options: list[_PreemptionOption] = []
    if len(spec.bundles) == 1:
        slots = list(state.pool_groups[spec.pool].reserved.values())
        options += search.into_slots(slots, owner=owner, borrow=pool.spec.borrow and spec.evictable)
        options += search.into_slots(_on_crowded_nodes(state, spec), owner=True, borrow=False)
    if pool.spec.dynamic:
        option = search.onto_nodes(spec.strategy or pool.spec.strategy)
        if option is not None:
            options.append(option)
    if budget_left is not None:
        options = [option for option in options if len(option.indices) <= budget_left]
    if not options:
        return PreemptionPlan(retry_at=retry_at)
    best = min(options, key=lambda option: (search.cost(option.indices), option.group is None))
    tenants = state.groups[best.group].tenants if best.group else []

    def why(index: int) -> ReasonCode:
        # A borrower of this slot is evicted because its owner is back, whatever the policy says.
        here = candidates["borrowed"][index] and candidates.names[index] in tenants
        return ReasonCode.owner_returned if here else candidates.reason(index, task, policy)

    order = sorted(best.indices, key=search.price)
    victims = tuple((str(candidates.names[index]), why(index)) for index in order)
    nodes = tuple(str(state.capacity.nodes[row]) for row in best.rows)
    reclaims = () if best.group else search.reclaims(best, slots_left)
    return PreemptionPlan(nodes, best.group, victims, reclaims)
