"""Ray's records in our words: amounts, labels, placement groups' own names, what is counted as waiting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from ray.core.generated import common_pb2, gcs_pb2

from trimtab.core.resources import Resources
from trimtab.machines.diagnose.snapshot import LabelSelector, PendingStage, WorkloadKind
from trimtab.runtime.rayapi import gcs_records as records

NOW = 1_000.0
GROUP = "ab" * 18
NODE, OWNER, WORKER = b"\1" * 28, b"\2" * 28, b"\3" * 28
BIG = {NODE.hex(): Resources.of(gpu=8, cpu=8)}


def actor(number: int, state: int = 1, **required: float) -> Any:
    made = gcs_pb2.ActorTableData(actor_id=bytes([number]) * 16, state=state, class_name="Worker", job_id=b"\1" * 4)
    made.address.node_id = NODE
    for name, amount in required.items():
        made.required_resources[name] = amount
    return made


def waiting(
    actors: list[Any], requests: dict[records.DemandShape, int] | None = None, began: float = NOW - 60
) -> list[Any]:
    since = {one.actor_id.hex(): began for one in actors}
    return records.actors_waiting(actors, since, Counter(requests or {}), BIG, NOW)


def shape(**amounts: float) -> records.DemandShape:
    return records.DemandShape(records.ResourceNeeds(Resources.of(amounts)))


def test_amounts_are_told_in_our_words_without_what_belongs_to_groups() -> None:
    told = {"CPU": 2.0, "GPU": 0.5, "gpu": 1.0, "object_store_memory": 9.0, f"GPU_group_0_{GROUP}": 1.0, "node:h": 1.0}
    assert records.amounts(told) == Resources.of({"cpu": 2, "gpu": 0.5, "gpu (custom)": 1, "node:h": 1})


def test_amounts_of_a_group_are_told_once_with_the_bundle_where_there_is_one() -> None:
    told = {f"GPU_group_{GROUP}": 1.0, f"GPU_group_3_{GROUP}": 1.0, f"bundle_group_{GROUP}": 0.001}
    assert records.ResourceNeeds.of(told) == records.ResourceNeeds(Resources.of(gpu=1), GROUP, 3)
    anywhere = {f"CPU_group_{GROUP}": 2.0, f"bundle_group_{GROUP}": 0.001}
    assert records.ResourceNeeds.of(anywhere) == records.ResourceNeeds(Resources.of(cpu=2), GROUP, None)


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("a", LabelSelector("zone", ("a",))),
        ("!a", LabelSelector("zone", ("a",), negated=True)),
        ("in(a, b)", LabelSelector("zone", ("a", "b"))),
        ("!in(a,b)", LabelSelector("zone", ("a", "b"), negated=True)),
    ],
)
def test_conditions_on_labels_are_read_as_ray_writes_them(text: str, selector: LabelSelector) -> None:
    made = actor(1, CPU=1)
    made.label_selector["zone"] = text
    option = made.fallback_strategy.options.add()
    option.label_selector.label_constraints.add(
        label_key="zone", operator=common_pb2.LABEL_OPERATOR_NOT_IN, label_values=["x"]
    )
    (one,) = waiting([made])
    assert one.requests[0].labels == ((selector,), (LabelSelector("zone", ("x",), negated=True),))


def test_an_actor_that_ray_does_not_count_as_waiting_is_bound_to_the_node_that_was_asked() -> None:
    (bound,) = waiting([actor(1, GPU=2)])
    assert (bound.queued, bound.pinned) == (False, NODE.hex())
    (queued,) = waiting([actor(1, GPU=2)], {shape(gpu=2): 1})
    assert (queued.queued, queued.pinned) == (True, None)
    (young,) = waiting([actor(1, GPU=2)], began=NOW - 1)
    assert young.pinned is None
    (too_big,) = waiting([actor(1, GPU=9)])
    assert too_big.pinned is None


def test_of_actors_alike_only_as_many_wait_for_room_as_ray_counts() -> None:
    told = waiting([actor(i, GPU=1) for i in range(3)], {shape(gpu=1): 2})
    assert sorted(one.queued for one in told) == [False, True, True]


def test_where_ray_tells_only_some_of_the_requests_nobody_is_said_to_be_bound() -> None:
    many = {shape(cpu=1 + i): 1 for i in range(records.MAX_SHAPES)}
    (one,) = waiting([actor(1, GPU=2)], many)
    assert (one.queued, one.pinned) == (True, None)


def test_how_far_an_actor_has_come_is_told_by_its_state_and_process() -> None:
    starting = actor(2, GPU=1)
    starting.address.worker_id = WORKER
    told = {one.id: one for one in waiting([actor(1, state=0), starting, actor(3, state=3, GPU=1), actor(4, state=2)])}
    stages = [told[(bytes([i]) * 16).hex()].stage for i in (1, 2, 3)]
    assert stages == [PendingStage.inputs, PendingStage.starting, PendingStage.resources]
    assert told[(bytes([3]) * 16).hex()].restarted
    assert len(told) == 3


def task(number: int, *states: int, kind: int = 0, **required: float) -> records.RayTaskRecord:
    made = gcs_pb2.TaskEvents(task_id=bytes([number]) * 24, job_id=b"\1" * 4)
    made.task_info.type = kind
    made.task_info.func_or_class_name = "work"
    for name, amount in required.items():
        made.task_info.required_resources[name] = amount
    for at, state in enumerate(states):
        made.state_updates.state_ts_ns[state] = int((NOW - 50 + at) * 1e9)
    made.state_updates.node_id = NODE
    return records.RayTaskRecord.of(made)


def test_tasks_are_named_as_far_as_ray_remembers_them_and_the_rest_is_counted() -> None:
    seen = [task(1, 1, 2, CPU=1), task(2, 1, 2, 5, 8, CPU=1), task(3, 1, CPU=1), task(4, 1, 2, 5, 8, 11, CPU=1)]
    told = records.tasks_waiting(seen, Counter({shape(cpu=1): 3}), [], NOW)
    assert [(one.name, one.count, one.since) for one in told] == [
        ("work", 1, NOW - 50),
        ("that Ray does not name", 2, None),
    ]
    (runs,) = [one for each in seen for one in each.holders({NODE.hex()})]
    assert (runs.kind, runs.amounts) == (WorkloadKind.task, Resources.of(cpu=1))


def test_a_task_that_waits_for_others_has_given_its_cpus_back() -> None:
    assert task(1, 2, 8, 9, CPU=1).holders({NODE.hex()}) == []
    (holds,) = task(1, 2, 8, 9, CPU=1, GPU=1).holders({NODE.hex()})
    assert holds.amounts == Resources.of(gpu=1)


def test_requests_of_actors_are_not_told_as_tasks_too() -> None:
    requests = {shape(gpu=2): 1}
    assert records.tasks_waiting([], Counter(requests), waiting([actor(1, GPU=2)], requests), NOW) == []


def test_a_group_that_lost_a_bundle_still_holds_the_others() -> None:
    made = gcs_pb2.PlacementGroupTableData(placement_group_id=b"\5" * 18, name="pair-1", state=4, strategy=3)
    for node in (NODE, b""):
        made.bundles.add(node_id=node).unit_resources["GPU"] = 1
    told = records.group_waiting(made)
    assert told is not None
    assert [request.node for request in told.requests] == [NODE.hex(), None]
    assert (told.strategy.value, told.since, told.class_name) == ("STRICT_SPREAD", None, "pair")
    (holds,) = records.group_holders(made, {NODE.hex()})
    assert holds.amounts == Resources.of(gpu=1)
    made.state = 2
    assert records.group_waiting(made) is None
