"""Made clusters for tests of `trimtab.machines.diagnose.why`: nodes, holders and waits in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.diagnose.fitting import NodeSpace
from trimtab.machines.diagnose.snapshot import (
    DrainNotice,
    GcsSnapshot,
    LabelSelector,
    NodeSnapshot,
    PendingWorkload,
    ResourceHolder,
    ResourceRequest,
    WorkloadKind,
)
from trimtab.model.pool import PlacementStrategy

NOW = 1_000.0


def node(name: str, used: dict[str, float] | None = None, *, drain: float | None = None, **has: Any) -> NodeSnapshot:
    """A node that has so much; `labels` among it; with `drain` it goes in so many seconds."""
    labels = tuple(sorted(has.pop("labels", {}).items()))
    whole = Resources.of(has)
    going = None if drain is None else DrainNotice(NOW + drain)
    return NodeSnapshot(name, name, whole, whole.minus(Resources.of(used or {})), labels, drain=going)


def request(*, zone: str | None = None, **amounts: float) -> ResourceRequest:
    return ResourceRequest(Resources.of(amounts), ((LabelSelector("zone", (zone,)),),) if zone else ())


def actor(
    name: str, *, class_name: str = "", job: str = "job", since: float | None = NOW - 60, **asked: Any
) -> PendingWorkload:
    """An actor that waits for room; fields of `PendingWorkload` among what is asked."""
    fields = {key: asked.pop(key) for key in list(asked) if key in PendingWorkload.__dataclass_fields__}
    return PendingWorkload(
        name,
        WorkloadKind.actor,
        name,
        (request(**asked),),
        class_name=class_name or name,
        job=job,
        since=since,
        **fields,
    )


def group(
    name: str,
    *requests: ResourceRequest,
    strategy: PlacementStrategy = PlacementStrategy.pack,
    job: str = "job",
    **fields: Any,
) -> PendingWorkload:
    """A placement group that waits."""
    return PendingWorkload(
        name, WorkloadKind.group, name, requests, strategy=strategy, job=job, since=NOW - 60, class_name=name, **fields
    )


def holds(
    name: str,
    on: str,
    *,
    class_name: str = "",
    job: str = "job",
    kind: WorkloadKind = WorkloadKind.actor,
    **amounts: Any,
) -> ResourceHolder:
    fields = {key: amounts.pop(key) for key in ("group", "bundle", "gpus") if key in amounts}
    return ResourceHolder(name, kind, name, on, Resources.of(amounts), job, class_name or name, **fields)


def snapshot(
    nodes: Sequence[NodeSnapshot],
    waiting: Sequence[PendingWorkload] = (),
    holders: Sequence[ResourceHolder] = (),
    **more: Any,
) -> GcsSnapshot:
    """A look at these; what holders hold is taken from their nodes."""
    seen = []
    for one in nodes:
        taken = total([each.amounts for each in holders if each.node == one.id and each.group is None])
        seen.append(
            NodeSnapshot(
                one.id, one.name, one.total, one.free.minus(taken), one.labels, one.address, one.head, one.drain
            )
        )
    return GcsSnapshot(NOW, tuple(seen), tuple(waiting), tuple(holders), **more)


def obvious(requests: Sequence[ResourceRequest], spaces: Sequence[NodeSpace], strategy: PlacementStrategy) -> bool:
    """Whether any way of putting asks on nodes is right: tries them all."""
    for way in product(range(len(spaces)), repeat=len(requests)):
        different = len(set(way))
        if strategy is PlacementStrategy.strict_pack and different > 1:
            continue
        if strategy is PlacementStrategy.strict_spread and different < len(way):
            continue
        on_each = [
            [request for request, at in zip(requests, way, strict=True) if at == here] for here in range(len(spaces))
        ]
        if all(
            all(request.accepts(space.labels or ()) for request in there) and _sum(there).within(space.free)
            for there, space in zip(on_each, spaces, strict=True)
        ):
            return True
    return False


def _sum(requests: Sequence[ResourceRequest]) -> Resources:
    return total([one.amounts for one in requests]) if requests else NOTHING
