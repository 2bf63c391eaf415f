"""Exports a job's cluster as a KubeRay RayCluster manifest (ray.io/v1): a worker group for each kind of node.

States what the job file states (nodes, GPUs, their kind, CPUs, memory); what Kubernetes needs beyond that is assumed,
with a note. It reads no cluster and applies nothing. Every worker pod is drained before it is deleted, so that its
tasks can checkpoint and move.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.formats.yaml_text import dump
from trimtab.model.workflow import Cluster, Node

LONGEST_NAME = 53
"""KubeRay derives names of pods and services, which are DNS labels, from the cluster's name."""

NOT_TEXT = frozenset({"y", "n", "yes", "no", "on", "off"})
"""Kubernetes reads YAML 1.1, in which these are true and false."""

PRODUCT_LABEL = "nvidia.com/gpu.product"  # set on nodes by NVIDIA's GPU feature discovery

PRODUCTS = {
    "A100": "NVIDIA-A100-SXM4-80GB",
    "H100": "NVIDIA-H100-80GB-HBM3",
    "H200": "NVIDIA-H200",
    "H20": "NVIDIA-H20",
    "B200": "NVIDIA-B200",
    "L40S": "NVIDIA-L40S",
    "L4": "NVIDIA-L4",
    "T4": "Tesla-T4",
}
"""The label's value for the usual board of a kind; any other kind is used as the value itself."""

CPUS_PER_GPU = 4
MEMORY_GB_PER_GPU = 32
HEAD_CPUS = 4
HEAD_MEMORY_GB = 16
STOP_MARGIN_S = 30
"""Between the end of a drain and the end of its pod, for processes to stop."""


class Manifest(Frozen):
    """A manifest as text, and the assumptions made."""

    text: str
    notes: tuple[str, ...]


class PodOptions(Frozen):
    """Options beyond the job file. `selector` replaces the one by GPU kind if it is not None."""

    name: str
    image: str
    ray_version: str
    namespace: str | None = None
    autoscale: bool = False
    min_replicas: int | None = None  # worker pods; None: 0 with autoscaling
    max_replicas: int | None = None  # None: the job's number of nodes
    idle_s: int = 300  # with autoscaling: idle time before a pod is deleted
    head_gpus: int = 0
    drain_s: int = 120  # time for a pod's tasks to checkpoint and move
    selector: Mapping[str, str] | None = None
    token: bool = False  # Ray's token authentication

    def __post_init__(self) -> None:
        where = "command line"
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > LONGEST_NAME:
            raise InputError(
                f"{self.name!r} cannot be the name of a RayCluster",
                where=where,
                hint=f"--cluster-name: small letters, digits and -, a letter first, at most {LONGEST_NAME}",
            )
        for word in (self.name, self.namespace or "", *(self.selector or {}).values()):
            if word.lower() in NOT_TEXT:
                raise InputError(f"{word!r} would be read as true or false", where=where, hint="another word")
        if not self.image or any(character.isspace() for character in self.image):
            raise InputError(f"{self.image!r} is no container image", where=where, hint="--image repository:tag")
        for name, value, lowest in (("--head-gpus", self.head_gpus, 0), ("--drain", self.drain_s, 1)):
            if value < lowest:
                raise InputError(f"{name} must be at least {lowest}, but is {value}", where=where)
        if not self.autoscale and (self.min_replicas is not None or self.max_replicas is not None):
            raise InputError("--min and --max go with --autoscale", where=where)


def manifest(cluster: Cluster, options: PodOptions) -> Manifest:
    """The RayCluster for a job's cluster. Raises InputError where it cannot be expressed."""
    if not cluster.nodes:
        raise InputError("the job's cluster has no nodes", where="cluster.nodes")
    groups = Counter(replace(node, name="") for node in cluster.nodes)
    if len(groups) > 1 and (options.min_replicas is not None or options.max_replicas is not None):
        raise InputError(
            f"the job has {len(groups)} kinds of node: --min and --max are ambiguous",
            where="command line",
            hint="leave them out and edit minReplicas and maxReplicas of each group",
        )
    notes: list[str] = []
    autoscaler = {"version": "v2", "upscalingMode": "Default", "idleTimeoutSeconds": options.idle_s}
    data: dict[str, Any] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": options.name,
            **({"namespace": options.namespace} if options.namespace else {}),
            "labels": {"app.kubernetes.io/managed-by": "trimtab"},
        },
        "spec": {
            "rayVersion": options.ray_version,
            **({"authOptions": {"mode": "token"}} if options.token else {}),
            "enableInTreeAutoscaling": options.autoscale,
            **({"autoscalerOptions": autoscaler} if options.autoscale else {}),
            "headGroupSpec": _head(options),
            "workerGroupSpecs": _worker_groups(groups, options, notes),
        },
    }
    notes.append(f"the image {options.image} must have trimtab and what the run imports")
    heading = "".join(f"# {line}\n" for line in ("Written by `trimtab cluster export kuberay`.", *notes))
    return Manifest(heading + dump(data), tuple(notes))


def _head(options: PodOptions) -> dict[str, Any]:
    start = {"dashboard-host": "0.0.0.0"}
    if not options.head_gpus:
        start["num-cpus"] = "0"  # no tasks on the head: it cannot be drained
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
    container = {
        "name": "ray-head",
        "image": options.image,
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": _resources(HEAD_CPUS, HEAD_MEMORY_GB, options.head_gpus),
    }
    return {
        "rayStartParams": start,
        "template": {"spec": {**_restarts(options), **_tolerations(options.head_gpus), "containers": [container]}},
    }


def _worker_groups(groups: Mapping[Node, int], options: PodOptions, notes: list[str]) -> list[dict[str, Any]]:
    names: Counter[str] = Counter()
    written = []
    for node, count in groups.items():
        kind = re.sub(r"[^a-z0-9]+", "-", node.gpu.lower()).strip("-")
        name = f"{kind or 'gpu'}-{node.gpus}"[:40] if node.gpus else "cpu"
        names[name] += 1
        if names[name] > 1:
            name = f"{name}-{names[name]}"
        written.append(_worker_group(name, node, count, options, notes))
    return written


def _worker_group(name: str, node: Node, count: int, options: PodOptions, notes: list[str]) -> dict[str, Any]:
    max_replicas = count if options.max_replicas is None else options.max_replicas
    min_replicas = (0 if options.autoscale else count) if options.min_replicas is None else options.min_replicas
    if not 0 <= min_replicas <= max_replicas:
        raise InputError(f"--min {min_replicas} and --max {max_replicas} do not go together", where="command line")
    spec = {
        **_restarts(options),
        "terminationGracePeriodSeconds": options.drain_s + STOP_MARGIN_S,
        **_selector(node, options, notes),
        **_tolerations(node.gpus),
        "containers": [_worker(name, node, options, notes)],
    }
    return {
        "groupName": name,
        "replicas": min(max(count, min_replicas), max_replicas),
        "minReplicas": min_replicas,
        "maxReplicas": max_replicas,
        "rayStartParams": {},
        "template": {"spec": spec},
    }


def _worker(name: str, node: Node, options: PodOptions, notes: list[str]) -> dict[str, Any]:
    shares = max(1, node.gpus)
    cpus, memory_gb = node.cpus, node.host_memory_gb
    if cpus is None:
        cpus = CPUS_PER_GPU * shares
        notes.append(f"{name}: the job file states no cpus: {cpus:g} assumed")
    if memory_gb is None:
        memory_gb = MEMORY_GB_PER_GPU * shares
        notes.append(f"{name}: the job file states no host_memory_gb: {memory_gb:g} assumed")
    return {
        "name": "ray-worker",
        "image": options.image,
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # The hook below drains the node first; a second drain by Ray would only take time.
            {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"},
        ],
        "ports": [{"name": "metrics", "containerPort": 8080}],
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", drain_hook(options.drain_s)]}}},
        "resources": _resources(cpus, memory_gb, node.gpus),
    }


def drain_hook(drain_s: int) -> str:
    """The preStop hook: drains the node, then waits until Ray has ended it, which is when it is empty."""
    return (
        f'timeout {drain_s} trimtab node drain "$POD_IP" --address "$RAY_ADDRESS" --deadline {drain_s}; '
        f"waited=0; while [ $waited -lt {drain_s} ] && grep -qsx raylet /proc/[0-9]*/comm; "
        "do sleep 1; waited=$((waited + 1)); done"
    )


def _resources(cpus: float, memory_gb: float, gpus: int) -> dict[str, Any]:
    amounts = {"cpu": f"{cpus:g}", "memory": f"{memory_gb:g}G"}
    devices = {"nvidia.com/gpu": gpus} if gpus else {}
    return {"limits": {**amounts, **devices}, "requests": {**amounts, **devices}}


def _restarts(options: PodOptions) -> dict[str, Any]:
    # Autoscaler v2 needs a new pod for a new node, never a restarted one.
    return {"restartPolicy": "Never"} if options.autoscale else {}


def _selector(node: Node, options: PodOptions, notes: list[str]) -> dict[str, Any]:
    if options.selector is not None:
        return {"nodeSelector": dict(options.selector)} if options.selector else {}
    if not node.gpus or not node.gpu:
        return {}
    product = PRODUCTS.get(node.gpu.upper(), node.gpu)
    notes.append(f"{node.gpu} is taken to be {PRODUCT_LABEL}={product}; else give --selector KEY=VALUE")
    return {"nodeSelector": {PRODUCT_LABEL: product}}


def _tolerations(gpus: int) -> dict[str, Any]:
    if not gpus:
        return {}
    return {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}
