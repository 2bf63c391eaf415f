"""Reads a snapshot of any Ray cluster for `machines/diagnose/why.py`.

Reads the GCS directly, so it works on any Ray (without a dashboard or trimtab running there) and changes nothing: it
registers no job, starts no process and takes no resources. Without a public API, the calls of Ray's own tools are used;
what another Ray version does not answer is listed in the snapshot's faults, not raised. `gcs_records` interprets the
records.
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
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.procs.gpus import find_non_ray_gpu_users
from trimtab.runtime.procs.processes import exists
from trimtab.runtime.rayapi import auth, private
from trimtab.runtime.rayapi.connect import answers, import_ray, running_here
from trimtab.runtime.rayapi.gcs_records import (
    RayTaskRecord,
    actor_holders,
    actors_waiting,
    among,
    amounts,
    bundles_free,
    given_up,
    group_holders,
    group_snapshot,
    group_waiting,
    job,
    requests_by_shape,
    tasks_waiting,
)
from trimtab.runtime.rayapi.nodes import RayNode

ANSWER_S = 10.0
GREETING_S = 5.0
RECENT_S = 600.0  # older abandoned actors are left out
START_HINT = "`trimtab cluster start` starts one here; --address names one (host:6379)"
Answer = TypeVar("Answer")


# ---- address --------------------------------------------------------------------------------------------------------


def find(address: str | None) -> str:
    """GCS address: as given, else of this process, RAY_ADDRESS, or this machine."""
    if address not in (None, "auto"):
        return _checked(str(address))
    ray = sys.modules.get("ray")
    if address is None and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    skipped = ""
    by_environment = os.environ.get("RAY_ADDRESS", "")
    if address is None and by_environment not in ("", "auto", "local"):
        try:
            return _checked(by_environment)
        except TrimtabError as fault:
            skipped = f" (RAY_ADDRESS: {fault.what})"
    import_ray()
    try:
        return running_here()
    except UnreachableError as fault:
        raise UnreachableError(fault.what + skipped, hint=START_HINT) from None


def _checked(address: str) -> str:
    if address.startswith("ray://"):
        raise InputError(
            f"{address} is for Ray's client, which cannot read the GCS",
            hint="give the GCS address of the head node, host:6379",
        )
    if address == "local":
        raise InputError("a local Ray would be a new, empty one", hint=START_HINT)
    try:
        answers(address)
    except UnreachableError as fault:
        fault.hint = START_HINT
        raise
    return address


def _check_is_ray(address: str) -> None:
    """UnreachableError unless a Ray listens there: for another server Ray's client waits for most of a minute."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=GREETING_S) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # HTTP/2 connection preface
            frame = connection.recv(9)
    except OSError as fault:
        raise UnreachableError(f"nothing answers at {address}: {fault.strerror or fault}", hint=START_HINT) from None
    if len(frame) < 4 or frame[3] != 4:  # the first frame of a server is SETTINGS
        raise UnreachableError(f"what listens at {address} is no Ray cluster", hint=START_HINT)


# ---- reading --------------------------------------------------------------------------------------------------------


class GcsReader:
    """A connection to a cluster's GCS. Seen with Ray 2.60."""

    def __init__(self, address: str) -> None:
        import_ray()
        _check_is_ray(address)
        auth.match_cluster(address)
        self.address = address
        try:
            self._store, self._tables = private.gcs_client(address), private.gcs_tables(address)
        except Exception as fault:
            raise _unreachable(address, fault) from None

    def look(self) -> GcsSnapshot:
        """Read the cluster. UnreachableError if it is gone."""
        _check_is_ray(self.address)  # Ray's client would end the whole process if the cluster is gone
        try:
            return self._look()
        except TrimtabError:
            raise
        except Exception as fault:
            raise _unreachable(self.address, fault) from fault

    def alive(self) -> tuple[RayNode, ...]:
        """Nodes with all of their resources by Ray's names. UnreachableError if the cluster is gone."""
        _check_is_ray(self.address)
        try:
            found = tuple(RayNode.of(row) for row in self._tables.get_node_table())
        except Exception as fault:
            raise _unreachable(self.address, fault) from fault
        return tuple(node for node in found if node.alive)

    def _look(self) -> GcsSnapshot:
        from ray.core.generated import autoscaler_pb2, gcs_pb2

        now = time.time()
        faults: list[str] = []
        status = autoscaler_pb2.GetClusterStatusReply.FromString(self._store.get_cluster_status(ANSWER_S))
        state = status.cluster_resource_state
        nodes = self._nodes(state.node_states)
        living = {node.id for node in nodes}
        jobs = tuple(job(gcs_pb2.JobTableData.FromString(record)) for record in self._tables.get_job_table())
        groups = [
            gcs_pb2.PlacementGroupTableData.FromString(record) for record in self._tables.get_placement_group_table()
        ]
        actors = [gcs_pb2.ActorTableData.FromString(record) for record in self._tables.get_actor_table(None, None)]
        none: list[Any] = []
        events = _optional(faults, "when tasks began to wait", none, self._task_events)
        ended = {job.id for job in jobs if job.ended}
        tasks = [task for task in map(RayTaskRecord.of, events) if task.job not in ended]
        requests = requests_by_shape(state.pending_resource_requests)
        holders = [holder for each in groups for holder in group_holders(each, living)]
        nodes = _minus_bundles(nodes, holders)
        holders += [holder for each in actors for holder in actor_holders(each, living)]
        holders += [holder for each in tasks for holder in each.holders(living)]
        began = {task.actor: task.since for task in tasks if task.actor and task.since is not None}
        free = bundles_free(state.node_states)
        waiting = [workload for workload in map(group_waiting, groups) if workload is not None]
        waiting += actors_waiting(actors, began, requests, {node.id: node.total for node in nodes}, now)
        waiting += tasks_waiting(tasks, requests, waiting, now)
        return GcsSnapshot(
            at=now,
            nodes=nodes,
            waiting=tuple(waiting),
            holders=tuple(holders),
            groups=tuple(group_snapshot(group, free) for group in groups if group.state == 2),
            jobs=jobs,
            non_ray_gpu_users=_optional(
                faults, "which processes use the GPUs of this machine", (), lambda: _non_ray_gpu_users(nodes, holders)
            ),
            node_types=_optional(faults, "what the autoscaler can add", (), lambda: self._kinds(status)),
            abandoned=tuple(
                actor for actor in map(given_up, actors) if actor and actor.at and now - actor.at < RECENT_S
            ),
            address=self.address,
            faults=tuple(faults),
        )

    def _nodes(self, states: Iterable[Any]) -> tuple[NodeSnapshot, ...]:
        free = {state.node_id.hex(): state.available_resources for state in states}
        drains: Mapping[str, int] = self._tables.get_draining_nodes()
        nodes = []
        for node in (RayNode.of(row) for row in self._tables.get_node_table()):
            id, whole = node.node_id, amounts(node.resources)
            drain = DrainNotice(drains[id] / 1000 if drains[id] else None) if id in drains else None
            # A node that just joined has not reported its free resources yet.
            left = among(amounts(free[id]), whole) if id in free else whole
            if node.alive:
                nodes.append(
                    NodeSnapshot(id, node.given_name, whole, left, node.labels, node.address, node.head, drain)
                )
        return named(sorted(nodes, key=lambda node: (not node.head, node.id)))

    def _task_events(self) -> list[Any]:
        from ray.core.generated import gcs_pb2

        return [gcs_pb2.TaskEvents.FromString(record) for record in self._tables.get_task_events()]

    def _kinds(self, status: Any) -> tuple[NodeType, ...]:
        """Node types of the autoscaler, if the cluster has one."""
        from ray.core.generated import autoscaler_pb2

        config = private.autoscaler_config(self._tables)
        if not config:
            return ()
        coming = Counter(instance.ray_node_type_name for instance in status.autoscaling_state.pending_instances)
        for request in status.autoscaling_state.pending_instance_requests:
            coming[request.ray_node_type_name] += request.count
        present = Counter(state.ray_node_type_name for state in status.cluster_resource_state.node_states)
        return tuple(
            NodeType(
                name=type_.name,
                total=amounts(type_.resources),
                more=None
                if type_.max_count < 0
                else max(0, type_.max_count - present[type_.name] - coming[type_.name]),
                coming=coming[type_.name],
            )
            for type_ in autoscaler_pb2.ClusterConfig.FromString(config).node_group_configs
        )


def _minus_bundles(nodes: tuple[NodeSnapshot, ...], groups: list[ResourceHolder]) -> tuple[NodeSnapshot, ...]:
    """Free resources minus placed bundles: nodes report them with a delay."""
    held: dict[str, list[Resources]] = {}
    for holder in groups:
        held.setdefault(holder.node, []).append(holder.amounts)
    return tuple(
        replace(node, free=node.free.minus(node.free.minus(node.total.minus(total(held.get(node.id, []))))))
        for node in nodes
    )


def _optional(faults: list[str], what: str, otherwise: Answer, ask: Callable[[], Answer]) -> Answer:
    """Read an optional part; a failure is added to `faults`."""
    try:
        return ask()
    except TrimtabError:
        raise
    except Exception as fault:
        faults.append(f"not known is {what}: {first_line(fault)}")
        return otherwise


def _unreachable(address: str, fault: Exception) -> UnreachableError:
    text = str(fault).strip().strip("'\"")
    if "AuthToken" in text or "nauthenticated" in text:
        return UnreachableError(
            f"the Ray at {address} wants a token, and does not take ours",
            hint="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )
    first = text.splitlines()[0].partition(". ")[0] if text else type(fault).__name__
    return UnreachableError(
        f"the Ray at {address} does not answer: {first}", hint="`ray status` on its head node shows whether it runs"
    )


def _non_ray_gpu_users(nodes: Iterable[NodeSnapshot], holders: Iterable[ResourceHolder]) -> tuple[NonRayGpuUser, ...]:
    found = find_non_ray_gpu_users({node.id: node.total.get("gpu") // GRAIN for node in nodes})
    # A process in another container may belong to Ray: left out if Ray uses GPUs of that node.
    in_use = {holder.node for holder in holders if holder.gpus or holder.amounts.get("gpu")}
    return tuple(user for user in found if exists(user.pid) or user.node not in in_use)
