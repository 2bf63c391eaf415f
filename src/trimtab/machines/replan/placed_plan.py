"""Plans on clusters that change: whether the GPUs of a plan still exist, and what a migration changes.

Ranks number the GPUs of one cluster and mean nothing once a node is gone; a slot (node, GPU index) does. A plan never
counts as in place on slots that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from trimtab.core.frozen import Frozen
from trimtab.model.plan import Plan
from trimtab.model.run import ChangeKind, ComponentChange
from trimtab.model.workflow import Cluster

GpuSlot = tuple[str, int]


@lru_cache(maxsize=16)
def gpu_slots(cluster: Cluster) -> tuple[GpuSlot, ...]:
    return tuple((node.name, index) for node in cluster.nodes for index in range(node.gpus))


def without(cluster: Cluster, leaving: tuple[str, ...]) -> Cluster:
    return replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name not in leaving))


class PlacedPlan(Frozen):
    """A plan, and the cluster that its ranks refer to."""

    plan: Plan
    cluster: Cluster

    def on(self, cluster: Cluster) -> PlacedPlan | None:
        """The same GPUs as ranks of another cluster; None where some are missing, or of another kind."""
        if cluster == self.cluster:
            return self
        here = gpu_slots(self.cluster)
        kinds = {node.name: node.gpu for node in self.cluster.nodes}
        same = {node.name for node in cluster.nodes if kinds.get(node.name) == node.gpu}
        there = {slot: rank for rank, slot in enumerate(gpu_slots(cluster)) if slot[0] in same}
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
        return PlacedPlan(plan, cluster)

    def uses(self, nodes: tuple[str, ...]) -> bool:
        here = gpu_slots(self.cluster)
        return any(here[rank][0] in nodes for group in self.plan.groups for rank in group.gpus)

    def slots_of(self, component: str) -> tuple[GpuSlot, ...]:
        here = gpu_slots(self.cluster)
        return tuple(here[rank] for rank in self.plan.placed(component).gpus)

    def group_of(self, component: str) -> tuple[str, ...]:
        """Components that share its GPUs, including itself."""
        return next((group.components for group in self.plan.groups if component in group.components), ())

    def same_as(self, other: PlacedPlan) -> bool:
        return not any(change.how is not ChangeKind.stays for change in changes(self, other))


def with_gpu_slots(placed_plan: PlacedPlan, where: Mapping[str, Sequence[tuple[str, int]]]) -> PlacedPlan:
    """The same plan on the nodes where its components were placed: (node, GPUs there), by any component of a group.

    Other groups keep their GPUs as far as these are free, and take others of their kind. Raises ValueError where the
    nodes do not have enough GPUs, or a group has another number of them.
    """
    free: dict[str, list[int]] = {}
    kinds = {node.name: node.gpu for node in placed_plan.cluster.nodes}
    for rank, (node, _) in enumerate(gpu_slots(placed_plan.cluster)):
        free.setdefault(node, []).append(rank)
    ranks: dict[tuple[str, ...], tuple[int, ...]] = {}
    for group in placed_plan.plan.groups:
        stated = next((where[name] for name in group.components if name in where), None)
        if stated is None:
            continue
        found: list[int] = []
        for node, count in stated:
            here = free.get(node, [])
            keep = [rank for rank in here if rank in group.gpus][:count]
            some = keep + [rank for rank in here if rank not in keep][: count - len(keep)]
            if len(some) < count:
                raise ValueError(f"{node} has no {count} GPUs for {', '.join(group.components)}")
            free[node] = [rank for rank in here if rank not in some]
            found += some
        if len(found) != len(group.gpus):
            raise ValueError(f"{', '.join(group.components)} has {len(found)} GPUs, not {len(group.gpus)}")
        ranks[group.components] = tuple(sorted(found))
    for group in placed_plan.plan.groups:
        if group.components not in ranks:
            left = [rank for node, some in free.items() if kinds[node] == group.kind for rank in some]
            kept = [rank for rank in left if rank in group.gpus]
            chosen = (kept + [rank for rank in left if rank not in kept])[: len(group.gpus)]
            if len(chosen) < len(group.gpus):
                raise ValueError(f"no {len(group.gpus)} GPUs are left for {', '.join(group.components)}")
            ranks[group.components] = tuple(sorted(chosen))
            for node in free:
                free[node] = [rank for rank in free[node] if rank not in chosen]
    return PlacedPlan(_on_ranks(placed_plan.plan, ranks), placed_plan.cluster)


def on_current_gpus(to: PlacedPlan, running: PlacedPlan) -> PlacedPlan:
    """The same plan on GPUs that its components already have, to avoid needless moves.

    A plan whose groups share GPUs stays as laid out.
    """
    if to.plan.overlaps:
        return to
    rank_of = {slot: rank for rank, slot in enumerate(gpu_slots(to.cluster))}
    kinds = [node.gpu for node in to.cluster.nodes for _ in range(node.gpus)]
    known = {(node.name, node.gpu) for node in running.cluster.nodes}
    usable = [(name, kind) in known for (name, _), kind in zip(gpu_slots(to.cluster), kinds, strict=True)]
    old: dict[str, set[int]] = {}
    for name in (component.name for component in running.plan.components):
        held = {rank_of[slot] for slot in running.slots_of(name) if slot in rank_of}
        old[name] = {rank for rank in held if usable[rank]}
    taken: set[int] = set()
    ranks: dict[tuple[str, ...], list[int]] = {}
    company = {group.components for group in running.plan.groups}
    for group in sorted(to.plan.groups, key=lambda group: group.components not in company):
        had = set().union(*(old.get(name, set()) for name in group.components))
        kept = sorted(rank for rank in had - taken if kinds[rank] == group.kind)[: len(group.gpus)]
        ranks[group.components] = kept
        taken.update(kept)
    for group in to.plan.groups:
        lacks = len(group.gpus) - len(ranks[group.components])
        free = [rank for rank, kind in enumerate(kinds) if kind == group.kind and rank not in taken]
        ranks[group.components] += free[:lacks]
        taken.update(free[:lacks])
    return PlacedPlan(_on_ranks(to.plan, {key: tuple(sorted(some)) for key, some in ranks.items()}), to.cluster)


def _on_ranks(plan: Plan, ranks: Mapping[tuple[str, ...], tuple[int, ...]]) -> Plan:
    """The plan with other GPUs for its groups; members that use fewer than their group use its first ones."""
    of = {name: ranks[group.components] for group in plan.groups for name in group.components}
    return replace(
        plan,
        groups=tuple(replace(group, gpus=ranks[group.components]) for group in plan.groups),
        components=tuple(
            replace(placed, gpus=of[placed.name][: len(placed.gpus)]) if placed.name in of else placed
            for placed in plan.components
        ),
    )


def changes(
    before: PlacedPlan, after: PlacedPlan, alive: frozenset[GpuSlot] | None = None
) -> tuple[ComponentChange, ...]:
    """What changes for each component between two plans. `alive`: slots that exist (None: all)."""
    found = []
    for placed in before.plan.components:
        name = placed.name
        old, new = before.slots_of(name), after.slots_of(name)
        how = ChangeKind.stays
        if alive is not None and not alive.issuperset(old):
            how = ChangeKind.replaced
        elif before.group_of(name) != after.group_of(name):
            how = ChangeKind.regroups
        elif placed.variant != after.plan.placed(name).variant:
            how = ChangeKind.moves  # another variant is another process
        elif set(old) < set(new):
            how = ChangeKind.grows
        elif set(new) < set(old):
            how = ChangeKind.shrinks
        elif set(old) != set(new):
            how = ChangeKind.moves
        found.append(ComponentChange(name, how, old, new))
    return tuple(found)
