"""Slow, obvious answers about pools to check the real machine against: plain loops over nodes, tasks and subsets.

It shares no code with `trimtab.pool`: who may evict whom, what fits where, and which victims suffice are written a
second time. Whatever it calls room is really room; it leaves out only what needs a second guess (slots of gangs).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.core.reasons import ReasonCode
from trimtab.core.resources import Resources
from trimtab.model.pool import PlacementStrategy, PoolSpec, PreemptionPolicy, TaskSpec

Amounts = dict[str, int]


def amounts(of: Resources) -> Amounts:
    return dict(of.units)


def added(have: Mapping[str, int], more: Mapping[str, int], times: int = 1) -> Amounts:
    found = dict(have)
    for name, units in more.items():
        found[name] = found.get(name, 0) + times * units
    return found


def fits(ask: Mapping[str, int], free: Mapping[str, int]) -> bool:
    return all(units <= free.get(name, 0) for name, units in ask.items() if units > 0)


def may_evict(newcomer: TaskSpec, victim: TaskSpec, policy: PreemptionPolicy | None) -> set[ReasonCode]:
    """Every rule by which the newcomer may evict the victim; none of them looks at how long anybody waited."""
    if policy is None or not newcomer.may_evict or not victim.evictable or newcomer.id == victim.id:
        return set()
    gap = newcomer.priority - victim.priority + 1e-9  # priorities are decimals: 5.1 is 0.1 above 5
    if newcomer.pool != victim.pool:
        allowed = policy.cross_pool and victim.pool not in policy.protected_pools and gap >= policy.cross_pool_gap
        return {ReasonCode.cross_pool} if allowed else set()
    found = set()
    if policy.same_pool and gap >= policy.same_pool_gap:
        found.add(ReasonCode.priority)
    mine, theirs = dict(newcomer.labels), dict(victim.labels)
    for label, by_value in policy.label_rules:
        for value, victims in by_value:
            if mine.get(label) == value and theirs.get(label) in victims and gap >= policy.label_gap:
                found.add(ReasonCode.label_rule)
    return found


def placements(
    asks: Sequence[Mapping[str, int]], strategy: PlacementStrategy, free: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, ...]]:
    """Every way to lay the bundles on nodes, one after another."""
    if not asks:
        yield ()
        return
    for node, room in free.items():
        if not fits(asks[0], room):
            continue
        if strategy is PlacementStrategy.strict_spread:
            rest = {name: left for name, left in free.items() if name != node}
        else:
            left = added(room, asks[0], -1)
            rest = {node: left} if strategy is PlacementStrategy.strict_pack else {**free, node: left}
        for more in placements(asks[1:], strategy, rest):
            yield (node, *more)


def can_lie(asks: Sequence[Resources], strategy: PlacementStrategy, free: Mapping[str, Mapping[str, int]]) -> bool:
    return next(placements([amounts(ask) for ask in asks], strategy, free), None) is not None


@dataclass
class SlotFacts:
    """A standing group of one bundle, and who is in it."""

    pool: str
    bundle: Resources
    node: str
    reserved: bool
    tenants: tuple[str, ...] = ()


@dataclass
class Facts:
    """What is there, as somebody with a notebook would write it down."""

    free: dict[str, Amounts]  # by node that may take something; what no group holds
    slots: list[SlotFacts]
    quota_left: dict[str, Amounts]
    pools: dict[str, PoolSpec]
    specs: dict[str, TaskSpec]
    dynamic_bundles: dict[str, int] = field(default_factory=dict)

    def without(self, victims: Sequence[str]) -> Facts:
        """The same after the victims have left their slots."""
        gone = set(victims)
        quota = dict(self.quota_left)
        for task in victims:
            spec = self.specs[task]
            for bundle in spec.bundles:
                quota[spec.pool] = added(quota[spec.pool], amounts(bundle))
        slots = [
            SlotFacts(one.pool, one.bundle, one.node, one.reserved, tuple(t for t in one.tenants if t not in gone))
            for one in self.slots
        ]
        return Facts(self.free, slots, quota, self.pools, self.specs, self.dynamic_bundles)


def has_room(facts: Facts, spec: TaskSpec) -> bool:
    """Whether a task of one bundle could start without anybody leaving."""
    pool, ask = facts.pools[spec.pool], amounts(spec.bundles[0])
    room = spec.size[0]
    if not fits(ask, facts.quota_left[spec.pool]):
        return False
    idle = [slot for slot in facts.slots if not slot.tenants]
    own = [slot for slot in idle if slot.pool == spec.pool]
    entitled = spec.priority >= pool.reserved_priority or (pool.borrow and spec.evictable)
    if any(slot.bundle == room and (entitled or not slot.reserved) for slot in own):
        return True
    if not pool.dynamic:
        return False
    in_use = facts.dynamic_bundles.get(spec.pool, 0) - sum(not slot.reserved for slot in own)
    if pool.dynamic_limit is not None and in_use >= pool.dynamic_limit:
        return False
    # Idle slots that nobody reserved make way for a new one. Within the limit of its own pool, one of them has to.
    for node, left in facts.free.items():
        with_idle = dict(left)
        for slot in idle:
            if slot.node == node and not slot.reserved:
                with_idle = added(with_idle, amounts(slot.bundle))
        if fits(amounts(room), with_idle):
            return True
    return False


def sufficient_sets(facts: Facts, spec: TaskSpec, candidates: Sequence[str]) -> list[tuple[str, ...]]:
    """All sets of victims of the least size that let the task start; [()] where it needs none."""
    for size in range(len(candidates) + 1):
        found = [chosen for chosen in itertools.combinations(candidates, size) if has_room(facts.without(chosen), spec)]
        if found:
            return found
    return []


def dominated(chosen: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the other set of as many priorities is lower everywhere and somewhere strictly."""
    pairs = list(zip(sorted(chosen), sorted(other), strict=True))
    return all(there <= here for here, there in pairs) and any(there < here for here, there in pairs)
