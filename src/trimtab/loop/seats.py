"""Plans on clusters that change: whether a plan's GPUs are still there, and what a move changes for whom.

Ranks count through the nodes of one cluster, so they say nothing once a node is gone: a seat (node, GPU of that node)
does. A plan never counts as in place on seats that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from trimtab.model.plan import Plan
from trimtab.model.run import Change, How
from trimtab.model.workflow import Cluster

Seat = tuple[str, int]


@lru_cache(maxsize=16)
def seats(cluster: Cluster) -> tuple[Seat, ...]:
    """The seat of every rank."""
    return tuple((node.name, index) for node in cluster.nodes for index in range(node.gpus))


def without(cluster: Cluster, leaving: tuple[str, ...]) -> Cluster:
    """The cluster without some of its nodes."""
    return replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name not in leaving))


@dataclass(frozen=True)
class Sited:
    """A plan, and the cluster that its ranks count through."""

    plan: Plan
    cluster: Cluster

    def on(self, cluster: Cluster) -> Sited | None:
        """The same GPUs as ranks of another cluster; None where some are not there, or are of another kind."""
        if cluster == self.cluster:
            return self
        here = seats(self.cluster)
        kinds = {node.name: node.gpu for node in self.cluster.nodes}
        same = {node.name for node in cluster.nodes if kinds.get(node.name) == node.gpu}
        there = {seat: rank for rank, seat in enumerate(seats(cluster)) if seat[0] in same}
        used = {rank for group in self.plan.groups for rank in group.gpus}
        if any(here[rank] not in there for rank in used):
            return None

        def ranks(gpus: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(there[here[rank]] for rank in gpus)

        plan = replace(
            self.plan,
            groups=tuple(replace(group, gpus=ranks(group.gpus)) for group in self.plan.groups),
            components=tuple(replace(placed, gpus=ranks(placed.gpus)) for placed in self.plan.components),
            total_gpus=cluster.gpus,
        )
        return Sited(plan, cluster)

    def uses(self, nodes: tuple[str, ...]) -> bool:
        """Whether any of its GPUs is on one of these nodes."""
        here = seats(self.cluster)
        return any(here[rank][0] in nodes for group in self.plan.groups for rank in group.gpus)

    def seats_of(self, component: str) -> tuple[Seat, ...]:
        """Where a component computes."""
        here = seats(self.cluster)
        return tuple(here[rank] for rank in self.plan.placed(component).gpus)

    def company(self, component: str) -> tuple[str, ...]:
        """Who shares its GPUs, itself among them."""
        return next((group.components for group in self.plan.groups if component in group.components), ())

    def same_as(self, other: Sited) -> bool:
        """Whether nobody has to move from one to the other."""
        return not any(change.how is not How.stays for change in changes(self, other))


def changes(before: Sited, after: Sited, alive: frozenset[Seat] | None = None) -> tuple[Change, ...]:
    """What happens to each component between two plans. `alive`: the seats that are there (None: all of them)."""
    found = []
    for placed in before.plan.components:
        name = placed.name
        old, new = before.seats_of(name), after.seats_of(name)
        how = How.stays
        if alive is not None and not alive.issuperset(old):
            how = How.replaced
        elif before.company(name) != after.company(name):
            how = How.regroups
        elif placed.variant != after.plan.placed(name).variant:
            how = How.moves  # another way to run is another process, wherever it is
        elif set(old) < set(new):
            how = How.grows
        elif set(new) < set(old):
            how = How.shrinks
        elif set(old) != set(new):
            how = How.moves
        found.append(Change(name, how, old, new))
    return tuple(found)
