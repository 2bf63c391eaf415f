"""Finds the workloads that block a waiting one: a small set of holders whose end makes it fit.

Holders are added largest first, and removed again where not needed. Only reports; never decides that a workload must
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.diagnose.fitting import NodeSpace, place
from trimtab.machines.diagnose.snapshot import GcsSnapshot, PendingWorkload, ResourceHolder, WorkloadKind

MAX_TRIED = 60  # holders; of more, the largest


@dataclass(frozen=True)
class Blocker:
    """All that a workload holds on nodes: an actor, a task, or a whole placement group."""

    id: str
    kind: WorkloadKind
    name: str
    job: str
    parts: tuple[ResourceHolder, ...]

    @property
    def amounts(self) -> Resources:
        return total([part.amounts for part in self.parts])


def blockers_of(holders: Iterable[ResourceHolder]) -> list[Blocker]:
    """Holders of node resources, grouped by workload."""
    parts: dict[str, list[ResourceHolder]] = {}
    for holder in holders:
        if holder.group is None and holder.amounts:
            parts.setdefault(holder.id, []).append(holder)
    return [Blocker(id, held[0].kind, held[0].name, held[0].job, tuple(held)) for id, held in parts.items()]


def without(spaces: Sequence[NodeSpace], gone: Iterable[Blocker]) -> list[NodeSpace]:
    """The spaces without these blockers."""
    freed: dict[str, Resources] = {}
    for blocker in gone:
        for part in blocker.parts:
            freed[part.node] = freed.get(part.node, NOTHING).plus(part.amounts)
    return [replace(space, free=space.free.plus(freed.get(space.node, NOTHING))) for space in spaces]


def blockers_to_remove(
    waiting: PendingWorkload, spaces: Sequence[NodeSpace], holders: Iterable[ResourceHolder]
) -> tuple[Blocker, ...]:
    """A small set of holders without which the requests fit; empty where no set of known holders will do."""
    wanted = {name for request in waiting.requests for name, _ in request.amounts}
    nodes = {space.node for space in spaces}
    known = [
        blocker
        for blocker in blockers_of(holders)
        if blocker.id != waiting.id
        and any(part.node in nodes for part in blocker.parts)
        and any(name in wanted for name, _ in blocker.amounts)
    ]
    known.sort(key=lambda blocker: (-max(units for name, units in blocker.amounts if name in wanted), blocker.id))
    if len(waiting.requests) == 1:
        return _on_one_node(waiting, spaces, known)
    return _smallest(waiting, spaces, known[:MAX_TRIED])


def _on_one_node(waiting: PendingWorkload, spaces: Sequence[NodeSpace], known: list[Blocker]) -> tuple[Blocker, ...]:
    best: tuple[Blocker, ...] = ()
    for space in spaces:
        there = [blocker for blocker in known if any(part.node == space.node for part in blocker.parts)]
        found = _smallest(waiting, [space], there[:MAX_TRIED])
        if found and (not best or (len(found), _units(found)) < (len(best), _units(best))):
            best = found
    return best


def _smallest(waiting: PendingWorkload, spaces: Sequence[NodeSpace], known: list[Blocker]) -> tuple[Blocker, ...]:
    def fits(gone: list[Blocker]) -> bool:
        return place(waiting.requests, without(spaces, gone), waiting.strategy).nodes is not None

    if not fits(known):
        return ()
    low, high = 0, len(known)  # the fewest of the largest that suffice
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(known[:middle]) else (middle + 1, high)
    chosen = known[:low]
    for blocker in list(chosen):  # largest first: a smaller one may suffice
        rest = [other for other in chosen if other is not blocker]
        if fits(rest):
            chosen = rest
    return tuple(chosen)


def _units(blockers: tuple[Blocker, ...]) -> int:
    return sum(units for blocker in blockers for _, units in blocker.amounts)


@dataclass(frozen=True)
class WorkloadHoldings:
    """What a workload and its siblings hold: actors of one class and job, or the placement groups of a job."""

    job: str
    kind: WorkloadKind
    class_name: str
    held: tuple[Blocker, ...]

    @property
    def amounts(self) -> Resources:
        return total([blocker.amounts for blocker in self.held])


def holdings_of(waiting: PendingWorkload, snapshot: GcsSnapshot) -> WorkloadHoldings:
    """What the waiting workload and its siblings hold."""
    held = [
        holder
        for holder in snapshot.holders
        if holder.kind is waiting.kind
        and holder.group is None
        and (
            holder.id == waiting.id
            or (holder.job == waiting.job and bool(waiting.job) and holder.class_name == waiting.class_name)
        )
    ]
    return WorkloadHoldings(waiting.job, waiting.kind, waiting.class_name, tuple(blockers_of(held)))


def rival(
    waiting: PendingWorkload,
    others: Iterable[PendingWorkload],
    snapshot: GcsSnapshot,
    spaces: Callable[[PendingWorkload], Sequence[NodeSpace]],
) -> tuple[PendingWorkload, WorkloadHoldings, WorkloadHoldings] | None:
    """Another waiting workload, where each of the two holds what the other needs; with the holdings of both.

    A placement group that lost a bundle blocks others by what it still holds, whether they block it or not.
    """
    mine = holdings_of(waiting, snapshot)
    distinct = {(other.job, other.kind, other.class_name, other.pinned, other.requests): other for other in others}
    for other in distinct.values():
        if (other.job, other.kind, other.class_name) == (waiting.job, waiting.kind, waiting.class_name):
            continue
        theirs = holdings_of(other, snapshot)
        broken = other.kind is WorkloadKind.group and any(request.node is not None for request in other.requests)
        if not theirs.held or not (mine.held or broken):
            continue
        if place(waiting.requests, without(spaces(waiting), theirs.held), waiting.strategy).nodes is None:
            continue
        if broken or place(other.requests, without(spaces(other), mine.held), other.strategy).nodes is not None:
            return other, mine, theirs
    return None
