"""One look at any Ray cluster, as the facts that `machines/diagnose/why.py` judges.

Asks the cluster's control store directly, so it works on any Ray (no dashboard, nothing of trimtab's running there) and
changes nothing: it joins as no job, starts no process and takes no room. Where Ray has no public call, the one that its
own tools use is called; what an older or newer Ray does not answer is said in the survey's faults, not raised. What
Ray's records mean is known to `records.py`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.core.resources import GRAIN, Resources, total
from trimtab.machines.diagnose.snapshot import (
    DrainNotice,
    GcsSnapshot,
    NodeSnapshot,
    NodeType,
    NonRayGpuUser,
    ResourceHolder,
    named,
)
from trimtab.runtime.localcluster import auth
from trimtab.runtime.procs.non_ray_gpu_users import foreign, visible
from trimtab.runtime.rayapi.connect import answers, import_ray
from trimtab.runtime.rayapi.gcs_records import (
    HEAD,
    RayTaskRecord,
    actor_holders,
    actors_waiting,
    among,
    amounts,
    bundles_free,
    given_up,
    group_holders,
    group_waiting,
    job,
    requests_by_shape,
    seen_group,
    tasks_waiting,
)

ANSWER_S = 10.0
GREETING_S = 5.0
RECENT_S = 600.0  # what Ray gave up longer ago is not told any more
START_HINT = "`trimtab cluster start` starts one here; --address names one (host:6379)"
Answer = TypeVar("Answer")


# ---- finding it -----------------------------------------------------------------------------------------------------


def find(address: str | None) -> str:
    """Where the cluster's control store listens: as given, else of this process, RAY_ADDRESS, this machine."""
    if address not in (None, "auto"):
        return _checked(str(address))
    ray = sys.modules.get("ray")
    if address is None and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    passed = ""
    by_environment = os.environ.get("RAY_ADDRESS", "")
    if address is None and by_environment not in ("", "auto", "local"):
        try:
            return _checked(by_environment)
        except TrimtabError as fault:
            passed = f" (RAY_ADDRESS: {fault.what})"
    import_ray()
    from ray._private.services import find_gcs_addresses  # what Ray's "auto" asks

    there = sorted(find_gcs_addresses())
    if not there:
        raise UnreachableError(f"no Ray cluster runs on this machine{passed}", hint=START_HINT)
    if len(there) > 1:
        raise UnreachableError(
            f"several Ray clusters run on this machine: {', '.join(there)}{passed}", hint="--address names one of them"
        )
    return str(there[0])


def _checked(address: str) -> str:
    if address.startswith("ray://"):
        raise InputError(
            f"{address} is for Ray's client, which cannot look at everything",
            hint="give the address of the head node's control store, host:6379",
        )
    if address == "local":
        raise InputError("a local Ray would be a new one, with nothing to look at", hint=START_HINT)
    try:
        answers(address)
    except UnreachableError as fault:
        fault.hint = START_HINT
        raise
    return address


def _greets(address: str) -> None:
    """Raise unless a Ray listens there: with anything else Ray's own client waits for most of a minute."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=GREETING_S) as link:
            link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # HTTP/2's opening words
            heard = link.recv(9)
    except OSError as fault:
        raise UnreachableError(f"nothing answers at {address}: {fault.strerror or fault}", hint=START_HINT) from None
    if len(heard) < 4 or heard[3] != 4:  # its settings come first
        raise UnreachableError(f"what listens at {address} is no Ray cluster", hint=START_HINT)


# ---- looking --------------------------------------------------------------------------------------------------------


class GcsReader:
    """A connection to a cluster's control store, for one look or several."""

    def __init__(self, address: str) -> None:
        import_ray()
        _greets(address)
        auth.suit(address)
        self.address = address
        from ray._raylet import GcsClient, GcsClientOptions, GlobalStateAccessor

        try:
            self._store = GcsClient(address=address)
            self._tables = GlobalStateAccessor(
                GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
            )
            if not self._tables.connect():
                raise ConnectionError("it does not let us in")
        except Exception as fault:
            raise _unreachable(address, fault) from None

    def look(self) -> GcsSnapshot:
        """The cluster as it is now. Raises UnreachableError where it is gone."""
        _greets(self.address)  # Ray's client ends the whole process where the cluster went away
        try:
            return self._look()
        except TrimtabError:
            raise
        except Exception as fault:
            raise _unreachable(self.address, fault) from fault

    def _look(self) -> GcsSnapshot:
        from ray.core.generated import autoscaler_pb2, gcs_pb2

        now = time.time()
        faults: list[str] = []
        status = autoscaler_pb2.GetClusterStatusReply.FromString(self._store.get_cluster_status(ANSWER_S))
        state = status.cluster_resource_state
        nodes = self._nodes(state.node_states)
        living = {one.id for one in nodes}
        jobs = tuple(job(gcs_pb2.JobTableData.FromString(one)) for one in self._tables.get_job_table())
        groups = [gcs_pb2.PlacementGroupTableData.FromString(one) for one in self._tables.get_placement_group_table()]
        actors = [gcs_pb2.ActorTableData.FromString(one) for one in self._tables.get_actor_table(None, None)]
        none: list[Any] = []
        events = _tried(faults, "when tasks began to wait", none, self._task_events)
        ended = {one.id for one in jobs if one.ended}
        tasks = [one for one in map(RayTaskRecord.of, events) if one.job not in ended]
        requests = requests_by_shape(state.pending_resource_requests)
        holders = [one for each in groups for one in group_holders(each, living)]
        nodes = _less(nodes, holders)
        holders += [one for each in actors for one in actor_holders(each, living)]
        holders += [one for each in tasks for one in each.holders(living)]
        began = {one.actor: one.since for one in tasks if one.actor and one.since is not None}
        free = bundles_free(state.node_states)
        waiting = [one for one in map(group_waiting, groups) if one is not None]
        waiting += actors_waiting(actors, began, requests, {one.id: one.total for one in nodes}, now)
        waiting += tasks_waiting(tasks, requests, waiting, now)
        return GcsSnapshot(
            at=now,
            nodes=nodes,
            waiting=tuple(waiting),
            holders=tuple(holders),
            groups=tuple(seen_group(one, free) for one in groups if one.state == 2),
            jobs=jobs,
            foreign=_tried(faults, "who holds the GPUs of this machine", (), lambda: _foreign(nodes, holders)),
            kinds=_tried(faults, "what the autoscaler can add", (), lambda: self._kinds(status)),
            given_up=tuple(one for one in map(given_up, actors) if one and one.at and now - one.at < RECENT_S),
            address=self.address,
            faults=tuple(faults),
        )

    def _nodes(self, states: Iterable[Any]) -> tuple[NodeSnapshot, ...]:
        free = {one.node_id.hex(): one.available_resources for one in states}
        drains: Mapping[str, int] = self._tables.get_draining_nodes()
        nodes = []
        for one in self._tables.get_node_table():
            if not one["Alive"]:
                continue
            id, whole = str(one["NodeID"]), amounts(one["Resources"])
            given = str(one.get("NodeName") or "")
            address = str(one["NodeManagerAddress"])
            drain = DrainNotice(drains[id] / 1000 if drains[id] else None) if id in drains else None
            nodes.append(
                NodeSnapshot(
                    id=id,
                    name="" if given == address else given,
                    total=whole,
                    # A node that joined a moment ago has not told yet what is free.
                    free=among(amounts(free[id]), whole) if id in free else whole,
                    labels=tuple(sorted((str(key), str(value)) for key, value in (one.get("Labels") or {}).items())),
                    address=address,
                    head=HEAD in one["Resources"],
                    drain=drain,
                )
            )
        return named(sorted(nodes, key=lambda one: (not one.head, one.id)))

    def _task_events(self) -> list[Any]:
        from ray.core.generated import gcs_pb2

        return [gcs_pb2.TaskEvents.FromString(one) for one in self._tables.get_task_events()]

    def _kinds(self, status: Any) -> tuple[NodeType, ...]:
        """Kinds of nodes of the autoscaler, where the cluster has one that tells."""
        from ray import _raylet
        from ray.core.generated import autoscaler_pb2

        told = self._tables.get_internal_kv(
            _raylet.GCS_AUTOSCALER_STATE_NAMESPACE.encode(), _raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY.encode()
        )
        if not told:
            return ()
        coming = Counter(one.ray_node_type_name for one in status.autoscaling_state.pending_instances)
        for request in status.autoscaling_state.pending_instance_requests:
            coming[request.ray_node_type_name] += request.count
        there = Counter(one.ray_node_type_name for one in status.cluster_resource_state.node_states)
        return tuple(
            NodeType(
                name=one.name,
                total=amounts(one.resources),
                more=None if one.max_count < 0 else max(0, one.max_count - there[one.name] - coming[one.name]),
                coming=coming[one.name],
            )
            for one in autoscaler_pb2.ClusterConfig.FromString(told).node_group_configs
        )


def _less(nodes: tuple[NodeSnapshot, ...], groups: list[ResourceHolder]) -> tuple[NodeSnapshot, ...]:
    """Nodes tell what is free a moment after the control store has given bundles away there."""
    held: dict[str, list[Resources]] = {}
    for one in groups:
        held.setdefault(one.node, []).append(one.amounts)
    return tuple(
        replace(one, free=one.free.minus(one.free.minus(one.total.minus(total(held.get(one.id, [])))))) for one in nodes
    )


def _tried(faults: list[str], what: str, otherwise: Answer, ask: Callable[[], Answer]) -> Answer:
    """What can be done without: where it cannot be had, that is noted."""
    try:
        return ask()
    except TrimtabError:
        raise
    except Exception as fault:
        said = str(fault).strip().splitlines()
        faults.append(f"not known is {what}: {said[0] if said else type(fault).__name__}")
        return otherwise


def _unreachable(address: str, fault: Exception) -> UnreachableError:
    said = str(fault).strip().strip("'\"")
    if "AuthToken" in said or "nauthenticated" in said:
        return UnreachableError(
            f"the Ray at {address} wants a token, and does not take ours",
            hint="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )
    first = said.splitlines()[0].partition(". ")[0] if said else type(fault).__name__
    return UnreachableError(
        f"the Ray at {address} does not answer: {first}", hint="`ray status` on its head node shows whether it runs"
    )


def _foreign(nodes: Iterable[NodeSnapshot], holders: Iterable[ResourceHolder]) -> tuple[NonRayGpuUser, ...]:
    found = foreign({one.id: one.total.get("gpu") // GRAIN for one in nodes})
    # A process that cannot be seen from here (another container) may be Ray's own: not told where Ray has GPUs in use.
    in_use = {one.node for one in holders if one.gpus or one.amounts.get("gpu")}
    return tuple(one for one in found if visible(one.pid) or one.node not in in_use)
