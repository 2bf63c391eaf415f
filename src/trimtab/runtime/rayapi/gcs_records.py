"""Ray's own records of groups, actors, tasks and requests, told in the words of `machines/diagnose/snapshot.py`.

Only translates: asks nobody and decides nothing. Numbers of states are those of Ray's records (`gcs.proto`). Ray tells
each amount that belongs to a placement group under names of its own, for the group and for the bundle; those names end
here. Called by `survey.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab.core.resources import GRAIN, NOTHING, Resources, total
from trimtab.machines.diagnose.snapshot import (
    AbandonedWorkload,
    LabelSelector,
    LabelSelectors,
    PendingStage,
    PendingWorkload,
    PlacementGroupSnapshot,
    RayJob,
    ResourceHolder,
    ResourceRequest,
    WorkloadKind,
)
from trimtab.model.pool import PlacementStrategy

MAX_SHAPES = 100  # Ray tells no more of them
SETTLED_S = 3.0  # Ray's lists agree with each other after so long
OUR_NAMES = {"CPU": "cpu", "GPU": "gpu"}
HEAD = "node:__internal_head__"
IN_GROUP = re.compile(r"^(?P<name>.+)_group_(?:(?P<bundle>\d+)_)?(?P<group>[0-9a-f]{36})$")
PENDING, DONE = (2, 3, 4), (11, 12)  # states of tasks: wait for a place; have ended
RUNNING, BLOCKED = (5, 8, 9, 10), (9, 10)  # run; run, but wait for others, and give their CPUs back meanwhile


# ---- amounts and labels ---------------------------------------------------------------------------------------------


def amounts(ray_amounts: Mapping[str, float]) -> Resources:
    """Ray's amounts in our words, without what belongs to placement groups."""
    return _resources({_our_name(name): value for name, value in ray_amounts.items() if not _hidden(name)})


def _our_name(name: str) -> str:
    return f"{name} (custom)" if name in OUR_NAMES.values() else OUR_NAMES.get(name, name)


def _hidden(name: str) -> bool:
    return name in ("object_store_memory", HEAD) or IN_GROUP.match(name) is not None


def _resources(plain: Mapping[str, float]) -> Resources:
    units = [(name, int(value * GRAIN + 0.5)) for name, value in sorted(plain.items())]
    return Resources(tuple((name, value) for name, value in units if value > 0))


@dataclass(frozen=True)
class ResourceNeeds:
    """What something asks, and of whom: of nodes, or of one placement group."""

    amounts: Resources
    group: str | None = None
    bundle: int | None = None

    @classmethod
    def of(cls, ray_amounts: Mapping[str, float]) -> ResourceNeeds:
        """From Ray's amounts."""
        parts = [(match, value) for name, value in ray_amounts.items() if (match := IN_GROUP.match(name))]
        if not parts:
            return cls(amounts(ray_amounts))
        # Each amount is told twice, for the group and for its bundle; what is called "bundle" only marks the place.
        plain = {_our_name(m["name"]): value for m, value in parts if m["name"] != "bundle"}
        bundles = {int(m["bundle"]) for m, _ in parts if m["bundle"] is not None}
        return cls(_resources(plain), parts[0][0]["group"], bundles.pop() if len(bundles) == 1 else None)


def _selector(key: str, text: str) -> LabelSelector:
    """As Ray writes it: `a`, `!a`, `in(a,b)`, `!in(a,b)`."""
    negated, text = text.startswith("!"), text.removeprefix("!")
    if text.startswith("in(") and text.endswith(")"):
        return LabelSelector(key, tuple(part.strip() for part in text[3:-1].split(",")), negated)
    return LabelSelector(key, (text,), negated)


def _selectors(told: Mapping[str, str]) -> LabelSelectors:
    return tuple(sorted((_selector(key, text) for key, text in told.items()), key=str))


def _constraints(told: Any) -> LabelSelectors:
    """The same from Ray's records."""
    found = (LabelSelector(one.label_key, tuple(one.label_values), one.operator == 2) for one in told.label_constraints)
    return tuple(sorted(found, key=str))


def _labels(actor: Any) -> tuple[LabelSelectors, ...]:
    """The conditions of an actor, and those it falls back to."""
    if not actor.label_selector:
        return ()
    return (
        _selectors(actor.label_selector),
        *(_constraints(one.label_selector) for one in actor.fallback_strategy.options),
    )


def _hex(id: bytes) -> str | None:
    """An id as text; None where Ray means none."""
    return None if not id or id == b"\xff" * len(id) else id.hex()


def among(some: Resources, known: Resources) -> Resources:
    """Of some amounts, those of resources that are known."""
    return Resources(tuple((name, units) for name, units in some if known.get(name)))


# ---- who holds ------------------------------------------------------------------------------------------------------


def group_holders(group: Any, living: set[str]) -> list[ResourceHolder]:
    """What a placement group holds, node by node."""
    if group.state not in (2, 4):  # created, or created again in part
        return []
    held: dict[str, list[Resources]] = {}
    for bundle in group.bundles:
        node = _hex(bundle.node_id)
        if node in living:
            held.setdefault(str(node), []).append(amounts(bundle.unit_resources))
    id, job = group.placement_group_id.hex(), group.creator_job_id.hex()
    return [
        ResourceHolder(id, WorkloadKind.group, group.name, node, total(each), job, like=_stem(group.name))
        for node, each in held.items()
    ]


def bundles_free(states: Iterable[Any]) -> dict[tuple[str, int], Resources]:
    """What is unused of each bundle, by group and number."""
    free: dict[tuple[str, int], dict[str, float]] = {}
    for state in states:
        for name, value in state.available_resources.items():
            match = IN_GROUP.match(name)
            if match and match["bundle"] is not None and match["name"] != "bundle":
                free.setdefault((match["group"], int(match["bundle"])), {})[_our_name(match["name"])] = value
    return {key: _resources(each) for key, each in free.items()}


def seen_group(group: Any, free: Mapping[tuple[str, int], Resources]) -> PlacementGroupSnapshot:
    """A placement group that stands."""
    id = group.placement_group_id.hex()
    return PlacementGroupSnapshot(
        id=id,
        name=group.name,
        bundles=tuple(amounts(one.unit_resources) for one in group.bundles),
        free=tuple(free.get((id, one.bundle_id.bundle_index), NOTHING) for one in group.bundles),
        nodes=tuple(_hex(one.node_id) for one in group.bundles),
        job=group.creator_job_id.hex(),
    )


def actor_holders(actor: Any, living: set[str]) -> list[ResourceHolder]:
    """What an actor holds, where it has a process."""
    node = _hex(actor.address.node_id)
    if not _has_process(actor) or node not in living:
        return []
    held: dict[str, float] = {}
    gpus: set[int] = set()
    for entry in actor.resource_mapping:
        held[entry.name] = sum(one.quantity for one in entry.resource_ids)
        if entry.name == "GPU" or entry.name.startswith("GPU_group_"):
            gpus.update(one.index for one in entry.resource_ids if one.quantity > 0)
    if not held and actor.state != 2:
        held = dict(actor.required_resources)
    needs = ResourceNeeds.of(held)
    if not needs.amounts:
        return []
    id, job, like = actor.actor_id.hex(), actor.job_id.hex(), actor.class_name
    return [
        ResourceHolder(
            id,
            WorkloadKind.actor,
            actor.name or like,
            str(node),
            needs.amounts,
            job,
            like,
            needs.group,
            needs.bundle,
            tuple(sorted(gpus)),
        )
    ]


def _has_process(actor: Any) -> bool:
    return actor.state == 2 or (actor.state in (1, 3) and _hex(actor.address.worker_id) is not None)


# ---- who waits ------------------------------------------------------------------------------------------------------


def group_waiting(group: Any) -> PendingWorkload | None:
    """A placement group that has no place, or lost a part of it."""
    if group.state not in (0, 1, 4):  # pending, prepared, to be placed again
        return None
    again = group.state == 4
    asks = tuple(
        ResourceRequest(
            amounts(one.unit_resources),
            (_selectors(one.label_selector),) if one.label_selector else (),
            _hex(one.node_id) if again else None,
        )
        for one in group.bundles
    )
    return PendingWorkload(
        id=group.placement_group_id.hex(),
        kind=WorkloadKind.group,
        name=group.name,
        asks=asks,
        strategy=list(PlacementStrategy)[
            group.strategy
        ],  # Ray's order is ours: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD
        since=None if again else group.stats.creation_request_received_ns / 1e9 or None,
        job=group.creator_job_id.hex(),
        like=_stem(group.name),
        began_over=again,
    )


def actors_waiting(
    actors: Iterable[Any],
    began: Mapping[str, float],
    requests: Counter[DemandShape],
    totals: Mapping[str, Resources],
    now: float,
) -> list[PendingWorkload]:
    """Actors that do not run.

    `began`: when each was asked for, by id; `requests`: what waits for room, by shape; `totals`: what each node has.
    """
    waiting = [_actor_waiting(one, began.get(one.actor_id.hex())) for one in actors if one.state in (0, 1, 3)]
    left = Counter(requests)
    marked = []
    for one in sorted(waiting, key=lambda one: -(one.since or now)):  # the oldest are the first to leave the queue
        shape = DemandShape(ResourceNeeds(one.asks[0].amounts, one.group, one.bundle), one.asks[0].labels)
        queued = left[shape] > 0 or len(requests) >= MAX_SHAPES or one.stage is not PendingStage.room
        if one.stage is PendingStage.room:
            left[shape] -= 1
        bound = not queued and _bound(one, totals, now)
        marked.append(replace(one, queued=queued, pinned=one.node if bound else None))
    return marked[::-1]


def _bound(one: PendingWorkload, totals: Mapping[str, Resources], now: float) -> bool:
    """Whether it may run on one node alone, the one that was asked for it.

    Ray does not say so, but it does not count such an actor among what waits for room anywhere either; and where that
    node is too small for it, Ray gives it up. It does not count those either that have their room already.
    """
    settled = one.since is not None and now - one.since >= SETTLED_S
    return (
        settled
        and one.group is None
        and one.node is not None
        and one.asks[0].amounts.within(totals.get(one.node, NOTHING))
    )


def _actor_waiting(actor: Any, began: float | None) -> PendingWorkload:
    again = actor.state == 3
    needs = ResourceNeeds.of(actor.required_resources)
    return PendingWorkload(
        id=actor.actor_id.hex(),
        kind=WorkloadKind.actor,
        name=actor.name or actor.class_name,
        asks=(ResourceRequest(needs.amounts, _labels(actor)),),
        stage=PendingStage.inputs
        if actor.state == 0
        else PendingStage.starting
        if _has_process(actor)
        else PendingStage.room,
        since=actor.timestamp / 1000 or None if again else began,
        job=actor.job_id.hex(),
        like=actor.class_name,
        group=needs.group,
        bundle=needs.bundle,
        node=_hex(actor.address.node_id),
        began_over=again,
    )


@dataclass(frozen=True)
class DemandShape:
    """What Ray tells of requests that wait: amounts and labels, and how many there are of them."""

    needs: ResourceNeeds
    labels: tuple[LabelSelectors, ...] = ()


def requests_by_shape(told: Iterable[Any]) -> Counter[DemandShape]:
    """How many requests wait for room, by what they ask."""
    shapes: Counter[DemandShape] = Counter()
    for one in told:
        conditions = tuple(_constraints(each) for each in one.request.label_selectors if each.label_constraints)
        shapes[DemandShape(ResourceNeeds.of(one.request.resources_bundle), conditions)] += one.count
    return shapes


@dataclass(frozen=True)
class RayTaskRecord:
    """What Ray remembers of one attempt of a task."""

    id: str
    name: str
    job: str
    actor: str | None  # it is the making of that actor
    needs: ResourceNeeds
    labels: tuple[LabelSelectors, ...]
    waits: bool
    runs_on: str | None
    blocked: bool
    since: float | None

    @classmethod
    def of(cls, event: Any) -> RayTaskRecord:
        """From Ray's events."""
        info, states = event.task_info, event.state_updates.state_ts_ns
        making = info.type == 1  # of an actor
        ended = any(one in states for one in DONE)
        running = not ended and any(one in states for one in RUNNING)
        asked = min((at for one, at in states.items() if one in (1, *PENDING)), default=0)
        last = max(states.items(), key=lambda one: one[1], default=(0, 0))[0]
        return cls(
            id=event.task_id.hex(),
            name=info.func_or_class_name or info.name,
            job=event.job_id.hex(),
            actor=info.actor_id.hex() if making else None,
            needs=ResourceNeeds.of(info.required_resources),
            labels=(_selectors(info.label_selector),) if info.label_selector else (),
            waits=info.type == 0 and not ended and not running and 2 in states,
            runs_on=_hex(event.state_updates.node_id) if running and info.type == 0 else None,
            blocked=last in BLOCKED,
            since=asked / 1e9 or None,
        )

    def holders(self, living: set[str]) -> list[ResourceHolder]:
        """What it holds while it runs. Actors are counted as such."""
        held = self.needs.amounts
        if self.blocked:
            held = Resources(tuple((name, units) for name, units in held if name != "cpu"))
        if self.runs_on not in living or not held:
            return []
        needs = self.needs
        return [
            ResourceHolder(
                self.id,
                WorkloadKind.task,
                self.name,
                str(self.runs_on),
                held,
                self.job,
                self.name,
                needs.group,
                needs.bundle,
            )
        ]


def tasks_waiting(
    tasks: Iterable[RayTaskRecord], requests: Counter[DemandShape], others: Iterable[PendingWorkload], now: float
) -> list[PendingWorkload]:
    """Requests that are not actors': by name as far as Ray remembers tasks of that shape, the rest by number."""
    left = Counter(requests)
    for one in others:
        if one.kind is WorkloadKind.actor and one.stage is PendingStage.room and one.queued:
            left[DemandShape(ResourceNeeds(one.asks[0].amounts, one.group, one.bundle), one.asks[0].labels)] -= 1
    alike: dict[tuple[DemandShape, str, str], list[RayTaskRecord]] = {}
    for task in tasks:
        if task.waits:
            alike.setdefault((DemandShape(task.needs, task.labels), task.job, task.name), []).append(task)
    waiting = []
    for (shape, job, name), each in alike.items():
        if shape in requests:
            number = min(len(each), max(0, left[shape]))
            left[shape] -= number
        else:  # for one node alone, or Ray's lists do not agree yet
            number = sum(1 for one in each if one.since and now - one.since > SETTLED_S)
        if number:
            since = min((one.since for one in each if one.since), default=None)
            waiting.append(_task_waiting(each[0].id, name, shape, job, number, since))
    for shape, number in left.items():
        if number > 0 and (shape.needs.amounts or shape.labels):
            waiting.append(_task_waiting(f"request-{len(waiting)}", "that Ray does not name", shape, "", number, None))
    return waiting


def _task_waiting(
    id: str, name: str, shape: DemandShape, job: str, number: int, since: float | None
) -> PendingWorkload:
    needs = shape.needs
    return PendingWorkload(
        id=id,
        kind=WorkloadKind.task,
        name=name,
        asks=(ResourceRequest(needs.amounts, shape.labels),),
        since=since,
        job=job,
        like=name,
        count=number,
        group=needs.group,
        bundle=needs.bundle,
    )


# ---- the rest -------------------------------------------------------------------------------------------------------


def job(told: Any) -> RayJob:
    """Whoever submits."""
    return RayJob(told.job_id.hex(), told.entrypoint, told.driver_pid, told.driver_ip_address, told.is_dead)


def given_up(actor: Any) -> AbandonedWorkload | None:
    """An actor that Ray does not try to place any more."""
    if actor.state != 4 or not actor.death_cause.HasField("actor_unschedulable_context"):
        return None
    why = actor.death_cause.actor_unschedulable_context.error_message
    name = actor.name or actor.class_name
    return AbandonedWorkload(actor.actor_id.hex(), WorkloadKind.actor, name, why, actor.end_time / 1000 or None)


def _stem(name: str) -> str:
    """Groups whose names differ by a number alone belong together."""
    return name.rstrip("0123456789").rstrip("-_:. ")
