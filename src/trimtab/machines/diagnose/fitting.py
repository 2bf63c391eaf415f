"""Decides whether resource requests fit on nodes.

Returns a placement, or that there is none. "None" is proven only where it is exact: strict strategies and identical
requests are decided exactly; mixed requests are searched, and a search that is given up returns "not found", which must
never be taken for "never". Pure arithmetic: knows neither Ray nor causes.

Also finds the workloads that block a waiting one: a small set of holders whose end makes it fit. Holders are added
largest first, and removed again where not needed. Only reports; never decides that a workload must end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from trimtab.core.frozen import Frozen
from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.diagnose.snapshot import (
    GcsSnapshot,
    PendingWorkload,
    ResourceHolder,
    ResourceRequest,
    WorkloadKind,
)
from trimtab.model.pool import Labels, PlacementStrategy

EFFORT = 20_000  # placements tried before the search is given up
MAX_TRIED = 60  # holders; of more, the largest
MAX_SEARCHED = 400  # requests; more are placed largest first without a search


class NodeSpace(Frozen):
    """Free resources of a node. Labels of a node that does not exist yet are unknown (None): any will do."""

    node: str
    free: Resources
    labels: Labels | None = ()

    def accepts(self, request: ResourceRequest) -> bool:
        return self.labels is None or request.accepts(self.labels)

    def takes(self, request: ResourceRequest) -> bool:
        return self.accepts(request) and request.amounts.within(self.free)


class FitResult(Frozen):
    """A node for each request, in order, or None; `proven` false: none was found in time."""

    nodes: tuple[str, ...] | None
    proven: bool = True

    @property
    def possible(self) -> bool:
        return self.nodes is not None or not self.proven


NO_FIT = FitResult(None)


def place(
    requests: Sequence[ResourceRequest],
    spaces: Sequence[NodeSpace],
    strategy: PlacementStrategy = PlacementStrategy.pack,
    *,
    effort: int = EFFORT,
) -> FitResult:
    """Put every request on a node by the strategy. Requests that are placed already keep their node."""
    todo = [request for request in requests if request.node is None]
    settled = {request.node for request in requests if request.node is not None}
    if strategy is PlacementStrategy.strict_pack:
        found = _on_one_node(todo, [space for space in spaces if not settled or space.node in settled])
    elif strategy is PlacementStrategy.strict_spread:
        found = _on_different(todo, [space for space in spaces if space.node not in settled])
    elif len({(request.amounts, request.labels) for request in todo}) <= 1:
        found = _alike(todo, spaces)
    else:
        found = _unlike(todo, spaces, effort)
    if found.nodes is None:
        return found
    placed = iter(found.nodes)
    return FitResult(tuple(next(placed) if request.node is None else request.node for request in requests))


def room_for(request: ResourceRequest, space: NodeSpace) -> int:
    """How many such requests fit on a node; an empty request counts as one."""
    if not space.takes(request):
        return 0
    return min((space.free.get(name) // units for name, units in request.amounts), default=1)


def size_of(amounts: Resources) -> tuple[int, int]:
    """Sort key: number of resources, then units."""
    return len(amounts.units), sum(units for _, units in amounts)


def _on_one_node(requests: list[ResourceRequest], spaces: Sequence[NodeSpace]) -> FitResult:
    together = total([request.amounts for request in requests])
    for space in spaces:
        if together.within(space.free) and all(space.accepts(request) for request in requests):
            return FitResult((space.node,) * len(requests))
    return FitResult(()) if not requests else NO_FIT


def _on_different(requests: list[ResourceRequest], spaces: Sequence[NodeSpace]) -> FitResult:
    """Bipartite matching of requests to nodes by augmenting paths."""
    if len(requests) > len(spaces):
        return NO_FIT
    nodes_by_request = {
        request: [at for at, space in enumerate(spaces) if space.takes(request)] for request in dict.fromkeys(requests)
    }
    options = [nodes_by_request[request] for request in requests]
    on: dict[int, int] = {}  # node to its request
    for request in range(len(requests)):
        end, came_from = _free_node(request, options, on)
        if end is None:
            return NO_FIT
        while end is not None:  # along the path, back to the first request
            mover = came_from[end]
            left = next((at for at, placed in on.items() if placed == mover), None)
            on[end] = mover
            end = left
    node_of = {request: spaces[at].node for at, request in on.items()}
    return FitResult(tuple(node_of[request] for request in range(len(requests))))


def _free_node(request: int, options: list[list[int]], on: dict[int, int]) -> tuple[int | None, dict[int, int]]:
    """The free node that ends an augmenting path, and for each visited node the request that would move there."""
    came_from: dict[int, int] = {}
    movers = [request]
    for mover in movers:
        for at in options[mover]:
            if at in came_from:
                continue
            came_from[at] = mover
            if at not in on:
                return at, came_from
            movers.append(on[at])
    return None, came_from


def _alike(requests: list[ResourceRequest], spaces: Sequence[NodeSpace]) -> FitResult:
    if not requests:
        return FitResult(())
    nodes: list[str] = []
    for space in spaces:
        count = (
            len(requests) if not requests[0].amounts and space.accepts(requests[0]) else room_for(requests[0], space)
        )
        nodes += [space.node] * min(count, len(requests) - len(nodes))
    return FitResult(tuple(nodes)) if len(nodes) == len(requests) else NO_FIT


def _unlike(requests: list[ResourceRequest], spaces: Sequence[NodeSpace], effort: int) -> FitResult:
    """Largest first; if that fails, exhaustive search until the effort is spent."""
    if not all(any(space.takes(request) for space in spaces) for request in requests):
        return NO_FIT
    everything = total([space.free for space in spaces])
    if not total([request.amounts for request in requests]).within(everything):
        return NO_FIT
    most = {name: max(space.free.get(name) for space in spaces) for name, _ in everything}
    sizes = [max((units / most[name] for name, units in request.amounts), default=0.0) for request in requests]
    order = sorted(range(len(requests)), key=lambda i: (-sizes[i], requests[i].amounts.units, str(requests[i].labels)))
    search = _FitSearch(
        [requests[i] for i in order], spaces, effort if len(requests) <= MAX_SEARCHED else len(requests) + 1
    )
    placed = search.run()
    if placed is None:
        return FitResult(None, proven=not search.spent)
    node_of = dict(zip(order, placed, strict=True))
    return FitResult(tuple(spaces[node_of[i]].node for i in range(len(requests))))


class _FitSearch:
    """Depth-first search over nodes for each request.

    Of identical requests a later one is never on an earlier node, so no placement is tried twice; of identical nodes
    only the first is tried.
    """

    def __init__(self, requests: list[ResourceRequest], spaces: Sequence[NodeSpace], effort: int) -> None:
        self._asks = requests
        self._spaces = spaces
        self._free = [space.free for space in spaces]
        self._left = effort
        self.spent = False

    def run(self) -> list[int] | None:
        """Node index of each request."""
        placed: list[int] = []
        choices = [self._choices(placed)]
        while choices:
            if not choices[-1]:
                choices.pop()
                if placed:
                    at = placed.pop()
                    self._free[at] = self._free[at].plus(self._asks[len(placed)].amounts)
                continue
            self._left -= 1
            if self._left < 0:
                self.spent = True
                return None
            at = choices[-1].pop()
            self._free[at] = self._free[at].minus(self._asks[len(placed)].amounts)
            placed.append(at)
            if len(placed) == len(self._asks):
                return placed
            choices.append(self._choices(placed))
        return None

    def _choices(self, placed: list[int]) -> list[int]:
        """Nodes worth trying for the next request, in reverse order."""
        request = self._asks[len(placed)]
        before = self._asks[len(placed) - 1] if placed else None
        first = (
            placed[-1]
            if before is not None and (before.amounts, before.labels) == (request.amounts, request.labels)
            else 0
        )
        seen, worth = set(), []
        for at in range(first, len(self._spaces)):
            alike = (self._free[at], self._spaces[at].labels)
            if alike not in seen and self._spaces[at].accepts(request) and request.amounts.within(self._free[at]):
                seen.add(alike)
                worth.append(at)
        return worth[::-1]


# ---- what is in the way ----------------------------------------------------------------------------------------------


class Blocker(Frozen):
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
        return _of_one_node(waiting, spaces, known)
    return _smallest(waiting, spaces, known[:MAX_TRIED])


def _of_one_node(waiting: PendingWorkload, spaces: Sequence[NodeSpace], known: list[Blocker]) -> tuple[Blocker, ...]:
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
    # The fewest of the largest that suffice.
    chosen = known[: bisect_left(range(len(known)), True, key=lambda count: fits(known[:count]))]
    for blocker in list(chosen):  # largest first: a smaller one may suffice
        rest = [other for other in chosen if other is not blocker]
        if fits(rest):
            chosen = rest
    return tuple(chosen)


def _units(blockers: tuple[Blocker, ...]) -> int:
    return sum(units for blocker in blockers for _, units in blocker.amounts)


class WorkloadHoldings(Frozen):
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
