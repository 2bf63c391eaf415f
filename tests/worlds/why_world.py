"""Made clusters for tests of `trimtab.machines.diagnose.why`: nodes, holders and waits in a line each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from trimtab.core.resources import NOTHING, Resources, total
from trimtab.machines.diagnose.fitting import Space
from trimtab.machines.diagnose.snapshot import Ask, Drain, Holder, Kind, SeenNode, Selector, Survey, Waiting
from trimtab.model.pool import Strategy

NOW = 1_000.0


def node(name: str, used: dict[str, float] | None = None, *, drain: float | None = None, **has: Any) -> SeenNode:
    """A node that has so much; `labels` among it; with `drain` it goes in so many seconds."""
    labels = tuple(sorted(has.pop("labels", {}).items()))
    whole = Resources.of(has)
    going = None if drain is None else Drain(NOW + drain)
    return SeenNode(name, name, whole, whole.minus(Resources.of(used or {})), labels, drain=going)


def ask(*, zone: str | None = None, **amounts: float) -> Ask:
    return Ask(Resources.of(amounts), ((Selector("zone", (zone,)),),) if zone else ())


def actor(name: str, *, like: str = "", job: str = "job", since: float | None = NOW - 60, **asked: Any) -> Waiting:
    """An actor that waits for room; fields of `Waiting` among what is asked."""
    fields = {key: asked.pop(key) for key in list(asked) if key in Waiting.__dataclass_fields__}
    return Waiting(name, Kind.actor, name, (ask(**asked),), like=like or name, job=job, since=since, **fields)


def group(name: str, *asks: Ask, strategy: Strategy = Strategy.pack, job: str = "job", **fields: Any) -> Waiting:
    """A placement group that waits."""
    return Waiting(name, Kind.group, name, asks, strategy=strategy, job=job, since=NOW - 60, like=name, **fields)


def holds(name: str, on: str, *, like: str = "", job: str = "job", kind: Kind = Kind.actor, **amounts: Any) -> Holder:
    fields = {key: amounts.pop(key) for key in ("group", "bundle", "gpus") if key in amounts}
    return Holder(name, kind, name, on, Resources.of(amounts), job, like or name, **fields)


def survey(
    nodes: Sequence[SeenNode], waiting: Sequence[Waiting] = (), holders: Sequence[Holder] = (), **more: Any
) -> Survey:
    """A look at these; what holders hold is taken from their nodes."""
    seen = []
    for one in nodes:
        taken = total([each.amounts for each in holders if each.node == one.id and each.group is None])
        seen.append(
            SeenNode(one.id, one.name, one.total, one.free.minus(taken), one.labels, one.address, one.head, one.drain)
        )
    return Survey(NOW, tuple(seen), tuple(waiting), tuple(holders), **more)


def obvious(asks: Sequence[Ask], spaces: Sequence[Space], strategy: Strategy) -> bool:
    """Whether any way of putting asks on nodes is right: tries them all."""
    for way in product(range(len(spaces)), repeat=len(asks)):
        different = len(set(way))
        if strategy is Strategy.strict_pack and different > 1:
            continue
        if strategy is Strategy.strict_spread and different < len(way):
            continue
        on_each = [[ask for ask, at in zip(asks, way, strict=True) if at == here] for here in range(len(spaces))]
        if all(
            all(ask.accepts(space.labels or ()) for ask in there) and _sum(there).within(space.free)
            for there, space in zip(on_each, spaces, strict=True)
        ):
            return True
    return False


def _sum(asks: Sequence[Ask]) -> Resources:
    return total([one.amounts for one in asks]) if asks else NOTHING
