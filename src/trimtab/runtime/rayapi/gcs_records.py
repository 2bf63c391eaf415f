"""Translates Ray's GCS records of placement groups, actors, tasks and requests to `machines/diagnose/snapshot.py`.

Only translates. State numbers are those of `gcs.proto`. Ray reports every resource of a placement group under extra
names for the group and the bundle, which are resolved here. Called by `gcs_snapshot`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trimtab.core.frozen import Frozen
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
from trimtab.runtime.rayapi.nodes import HEAD

MAX_SHAPES = 100  # maximum that Ray reports
SETTLED_S = 3.0  # until Ray's tables agree with each other
OUR_NAMES = {"CPU": "cpu", "GPU": "gpu"}
IN_GROUP = re.compile(r"^(?P<name>.+)_group_(?:(?P<bundle>\d+)_)?(?P<group>[0-9a-f]{36})$")
PENDING, DONE = (2, 3, 4), (11, 12)  # task states: pending scheduling; ended
RUNNING, BLOCKED = (5, 8, 9, 10), (9, 10)  # task states: running; blocked in ray.get, with CPUs released


# ---- amounts and labels ---------------------------------------------------------------------------------------------


def amounts(ray_amounts: Mapping[str, float]) -> Resources:
    """Ray resources by trimtab names, without those of placement groups."""

    def hidden(name: str) -> bool:
        return name in ("object_store_memory", HEAD) or IN_GROUP.match(name) is not None

    return _resources({_our_name(name): value for name, value in ray_amounts.items() if not hidden(name)})


def _our_name(name: str) -> str:
    return f"{name} (custom)" if name in OUR_NAMES.values() else OUR_NAMES.get(name, name)


def _resources(plain: Mapping[str, float]) -> Resources:
    units = [(name, int(value * GRAIN + 0.5)) for name, value in sorted(plain.items())]
    return Resources(tuple((name, value) for name, value in units if value > 0))


class ResourceNeeds(Frozen):
    """Requested resources: of nodes, or of a placement group."""

    amounts: Resources
    group: str | None = None
    bundle: int | None = None

    @classmethod
    def of(cls, ray_amounts: Mapping[str, float]) -> ResourceNeeds:
        parts = [(match, value) for name, value in ray_amounts.items() if (match := IN_GROUP.match(name))]
        if not parts:
            return cls(amounts(ray_amounts))
        # Each resource is listed twice, for the group and for its bundle; "bundle" is a marker resource.
        plain = {_our_name(m["name"]): value for m, value in parts if m["name"] != "bundle"}
        bundles = {int(m["bundle"]) for m, _ in parts if m["bundle"] is not None}
        return cls(_resources(plain), parts[0][0]["group"], bundles.pop() if len(bundles) == 1 else None)


def _selector(key: str, text: str) -> LabelSelector:
    """Parse a selector: `a`, `!a`, `in(a,b)`, `!in(a,b)`."""
    negated, text = text.startswith("!"), text.removeprefix("!")
    if text.startswith("in(") and text.endswith(")"):
        return LabelSelector(key, tuple(part.strip() for part in text[3:-1].split(",")), negated)
    return LabelSelector(key, (text,), negated)


def _selectors(labels: Mapping[str, str]) -> LabelSelectors:
    return tuple(sorted((_selector(key, text) for key, text in labels.items()), key=str))


def _constraints(record: Any) -> LabelSelectors:
    """Selectors from a protobuf record."""
    found = (
        LabelSelector(constraint.label_key, tuple(constraint.label_values), constraint.operator == 2)
        for constraint in record.label_constraints
    )
    return tuple(sorted(found, key=str))


def _labels(actor: Any) -> tuple[LabelSelectors, ...]:
    """Label selectors of an actor, and its fallbacks."""
    if not actor.label_selector:
        return ()
    return (
        _selectors(actor.label_selector),
        *(_constraints(option.label_selector) for option in actor.fallback_strategy.options),
    )


def _hex(id: bytes) -> str | None:
    """An id as hex; None for a nil id."""
    return None if not id or id == b"\xff" * len(id) else id.hex()


def among(some: Resources, known: Resources) -> Resources:
    """The part of `some` whose resources are in `known`."""
    return Resources(tuple((name, units) for name, units in some if known.get(name)))


# ---- holders --------------------------------------------------------------------------------------------------------


def group_holders(group: Any, living: set[str]) -> list[ResourceHolder]:
    """What a placement group holds, by node."""
    if group.state not in (2, 4):  # CREATED, RESCHEDULING
        return []
    held: dict[str, list[Resources]] = {}
    for bundle in group.bundles:
        node = _hex(bundle.node_id)
        if node in living:
            held.setdefault(str(node), []).append(amounts(bundle.unit_resources))
    id, job = group.placement_group_id.hex(), group.creator_job_id.hex()
    return [
        ResourceHolder(id, WorkloadKind.group, group.name, node, total(each), job, class_name=_stem(group.name))
        for node, each in held.items()
    ]


def bundles_free(states: Iterable[Any]) -> dict[tuple[str, int], Resources]:
    """Unused part of each bundle, by group and bundle index."""
    free: dict[tuple[str, int], dict[str, float]] = {}
    for state in states:
        for name, value in state.available_resources.items():
            match = IN_GROUP.match(name)
            if match and match["bundle"] is not None and match["name"] != "bundle":
                free.setdefault((match["group"], int(match["bundle"])), {})[_our_name(match["name"])] = value
    return {key: _resources(each) for key, each in free.items()}


def group_snapshot(group: Any, free: Mapping[tuple[str, int], Resources]) -> PlacementGroupSnapshot:
    """A placement group that is created."""
    id = group.placement_group_id.hex()
    return PlacementGroupSnapshot(
        id=id,
        name=group.name,
        bundles=tuple(amounts(bundle.unit_resources) for bundle in group.bundles),
        free=tuple(free.get((id, bundle.bundle_id.bundle_index), NOTHING) for bundle in group.bundles),
        nodes=tuple(_hex(bundle.node_id) for bundle in group.bundles),
        job=group.creator_job_id.hex(),
    )


def actor_holders(actor: Any, living: set[str]) -> list[ResourceHolder]:
    """What an actor holds, if it has a process."""
    node = _hex(actor.address.node_id)
    if not _has_process(actor) or node not in living:
        return []
    held: dict[str, float] = {}
    gpus: set[int] = set()
    for entry in actor.resource_mapping:
        held[entry.name] = sum(resource.quantity for resource in entry.resource_ids)
        if entry.name == "GPU" or entry.name.startswith("GPU_group_"):
            gpus.update(resource.index for resource in entry.resource_ids if resource.quantity > 0)
    if not held and actor.state != 2:
        held = dict(actor.required_resources)
    needs = ResourceNeeds.of(held)
    if not needs.amounts:
        return []
    id, job, class_name = actor.actor_id.hex(), actor.job_id.hex(), actor.class_name
    return [
        ResourceHolder(
            id,
            WorkloadKind.actor,
            actor.name or class_name,
            str(node),
            needs.amounts,
            job,
            class_name,
            needs.group,
            needs.bundle,
            tuple(sorted(gpus)),
        )
    ]


def _has_process(actor: Any) -> bool:
    return actor.state == 2 or (actor.state in (1, 3) and _hex(actor.address.worker_id) is not None)


# ---- pending --------------------------------------------------------------------------------------------------------


def group_waiting(group: Any) -> PendingWorkload | None:
    """A placement group that is not placed, or not completely."""
    if group.state not in (0, 1, 4):  # PENDING, PREPARED, RESCHEDULING
        return None
    again = group.state == 4
    requests = tuple(
        ResourceRequest(
            amounts(bundle.unit_resources),
            (_selectors(bundle.label_selector),) if bundle.label_selector else (),
            _hex(bundle.node_id) if again else None,
        )
        for bundle in group.bundles
    )
    return PendingWorkload(
        id=group.placement_group_id.hex(),
        kind=WorkloadKind.group,
        name=group.name,
        requests=requests,
        strategy=list(PlacementStrategy)[
            group.strategy
        ],  # Ray's order is ours: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD
        since=None if again else group.stats.creation_request_received_ns / 1e9 or None,
        job=group.creator_job_id.hex(),
        class_name=_stem(group.name),
        restarted=again,
    )


def actors_waiting(
    actors: Iterable[Any],
    began: Mapping[str, float],
    requests: Counter[DemandShape],
    totals: Mapping[str, Resources],
    now: float,
) -> list[PendingWorkload]:
    """Actors that are not running.

    `began`: submission times by id; `requests`: pending requests by shape; `totals`: resources of each node.
    """
    waiting = [_actor_waiting(actor, began.get(actor.actor_id.hex())) for actor in actors if actor.state in (0, 1, 3)]
    left = Counter(requests)
    marked = []
    for actor in sorted(waiting, key=lambda actor: -(actor.since or now)):  # the oldest leave the queue first
        shape = _shape(actor)
        queued = left[shape] > 0 or len(requests) >= MAX_SHAPES or actor.stage is not PendingStage.resources
        if actor.stage is PendingStage.resources:
            left[shape] -= 1
        bound = not queued and _bound(actor, totals, now)
        marked.append(replace(actor, queued=queued, pinned=actor.node if bound else None))
    return marked[::-1]


def _bound(actor: PendingWorkload, totals: Mapping[str, Resources], now: float) -> bool:
    """Whether it can only run on one node (NodeAffinity).

    Ray does not report this, but neither counts such an actor among pending requests, and abandons it if that node is
    too small. Actors that are already placed are not counted either.
    """
    settled = actor.since is not None and now - actor.since >= SETTLED_S
    return (
        settled
        and actor.group is None
        and actor.node is not None
        and actor.requests[0].amounts.within(totals.get(actor.node, NOTHING))
    )


def _actor_waiting(actor: Any, began: float | None) -> PendingWorkload:
    again = actor.state == 3
    needs = ResourceNeeds.of(actor.required_resources)
    return PendingWorkload(
        id=actor.actor_id.hex(),
        kind=WorkloadKind.actor,
        name=actor.name or actor.class_name,
        requests=(ResourceRequest(needs.amounts, _labels(actor)),),
        stage=PendingStage.inputs
        if actor.state == 0
        else PendingStage.starting
        if _has_process(actor)
        else PendingStage.resources,
        since=actor.timestamp / 1000 or None if again else began,
        job=actor.job_id.hex(),
        class_name=actor.class_name,
        group=needs.group,
        bundle=needs.bundle,
        node=_hex(actor.address.node_id),
        restarted=again,
    )


class DemandShape(Frozen):
    """Resources and labels of pending requests, which Ray counts by shape."""

    needs: ResourceNeeds
    labels: tuple[LabelSelectors, ...] = ()


def _shape(workload: PendingWorkload) -> DemandShape:
    request = workload.requests[0]
    return DemandShape(ResourceNeeds(request.amounts, workload.group, workload.bundle), request.labels)


def requests_by_shape(demands: Iterable[Any]) -> Counter[DemandShape]:
    """Number of pending requests by shape."""
    shapes: Counter[DemandShape] = Counter()
    for demand in demands:
        conditions = tuple(_constraints(each) for each in demand.request.label_selectors if each.label_constraints)
        shapes[DemandShape(ResourceNeeds.of(demand.request.resources_bundle), conditions)] += demand.count
    return shapes


class RayTaskRecord(Frozen):
    """Ray's record of a task attempt."""

    id: str
    name: str
    job: str
    actor: str | None  # if this is its creation task
    needs: ResourceNeeds
    labels: tuple[LabelSelectors, ...]
    waits: bool
    runs_on: str | None
    blocked: bool
    since: float | None

    @classmethod
    def of(cls, event: Any) -> RayTaskRecord:
        info, states = event.task_info, event.state_updates.state_ts_ns
        making = info.type == 1  # ACTOR_CREATION_TASK
        ended = any(state in states for state in DONE)
        running = not ended and any(state in states for state in RUNNING)
        submitted = min((at for state, at in states.items() if state in (1, *PENDING)), default=0)
        last = max(states.items(), key=lambda item: item[1], default=(0, 0))[0]
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
            since=submitted / 1e9 or None,
        )

    def holders(self, living: set[str]) -> list[ResourceHolder]:
        """Resources held while it runs; actors are counted separately."""
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
    """Pending requests of tasks: by name if Ray has records of that shape, the rest by number."""
    left = Counter(requests)
    for workload in others:
        if workload.kind is WorkloadKind.actor and workload.stage is PendingStage.resources and workload.queued:
            left[_shape(workload)] -= 1
    alike: dict[tuple[DemandShape, str, str], list[RayTaskRecord]] = {}
    for task in tasks:
        if task.waits:
            alike.setdefault((DemandShape(task.needs, task.labels), task.job, task.name), []).append(task)
    waiting = []
    for (shape, job, name), each in alike.items():
        if shape in requests:
            number = min(len(each), max(0, left[shape]))
            left[shape] -= number
        else:  # bound to a node, or Ray's tables do not agree yet
            number = sum(1 for task in each if task.since and now - task.since > SETTLED_S)
        if number:
            since = min((task.since for task in each if task.since), default=None)
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
        requests=(ResourceRequest(needs.amounts, shape.labels),),
        since=since,
        job=job,
        class_name=name,
        count=number,
        group=needs.group,
        bundle=needs.bundle,
    )


# ---- others ---------------------------------------------------------------------------------------------------------


def job(record: Any) -> RayJob:
    return RayJob(record.job_id.hex(), record.entrypoint, record.driver_pid, record.driver_ip_address, record.is_dead)


def given_up(actor: Any) -> AbandonedWorkload | None:
    """An actor that Ray has stopped trying to place."""
    if actor.state != 4 or not actor.death_cause.HasField("actor_unschedulable_context"):
        return None
    why = actor.death_cause.actor_unschedulable_context.error_message
    name = actor.name or actor.class_name
    return AbandonedWorkload(actor.actor_id.hex(), WorkloadKind.actor, name, why, actor.end_time / 1000 or None)


def _stem(name: str) -> str:
    """Name without a trailing number: such groups are counted as alike."""
    return name.rstrip("0123456789").rstrip("-_:. ")
