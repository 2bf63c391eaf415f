"""How a node is started: the command line of `ray start` and the environment of its processes.

Sizes, ports and GPUs are stated in full, so that nodes on one machine never collide in Ray's defaults. The caller's Ray
settings in the environment stay, except those that would point the node at another cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trimtab.runtime.localcluster.ledger import ClusterRecord, NodeRecord, NodeSizes
from trimtab.runtime.procs.processes import MARK

MEMORY_SHARE, STORE_SHARE = 0.7, 0.3  # of the machine's memory, for all nodes together; Ray gives as much to each
MIN_STORE = 80 * 2**20  # Ray refuses less
# Ray notices a killed node in about 2 s instead of 14 s.
QUICK_LOSS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
_NOT_PASSED = ("RAY_ADDRESS", "RAY_NODE_ID", "RAY_RAYLET_PID", "RAY_JOB_ID")


def ray_start(cluster: ClusterRecord, node: NodeRecord, ip: str | None = None) -> list[str]:
    """The command that runs a node until it is ended."""
    ports, sizes = node.ports, node.sizes
    settings: dict[str, object] = {
        "node-name": node.name,
        "num-cpus": sizes.cpus,
        "num-gpus": len(node.gpus),
        "resources": json.dumps({"worker_unit": sizes.units} if sizes.units else {}),
        "memory": sizes.memory,
        "object-store-memory": sizes.object_store,
        "node-manager-port": ports.node_manager,
        "object-manager-port": ports.object_manager,
        "min-worker-port": ports.first_worker,
        "max-worker-port": ports.last_worker,
        "dashboard-agent-listen-port": ports.agent_http,
        "dashboard-agent-grpc-port": ports.agent_grpc,
        "runtime-env-agent-port": ports.runtime_env,
        "metrics-export-port": ports.metrics,
        "node-ip-address": ip,
        # One per node: nodes that start at once in one directory choose the same socket names.
        "temp-dir": temp_dir(cluster, node),
    }
    if node.head:
        settings |= {
            "port": cluster.port,
            "include-dashboard": "true" if cluster.dashboard_port else "false",
            "dashboard-port": cluster.dashboard_port,
            "ray-client-server-port": cluster.client_port,
        }
    else:
        settings["address"] = cluster.address
    flags = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    which = ["--head", "--disable-usage-stats"] if node.head else []
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *which, *flags]


def temp_dir(cluster: ClusterRecord, node: NodeRecord) -> str:
    return f"{cluster.temp_dir}/{node.slot}"


def environment(
    cluster: ClusterRecord, node: NodeRecord, auth: Mapping[str, str], env: Mapping[str, str]
) -> dict[str, str]:
    ours = {name: value for name, value in env.items() if name not in _NOT_PASSED}
    ours |= auth
    ours |= {
        MARK: node.mark,
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus),
        "RAY_USAGE_STATS_ENABLED": "0",
        # On SIGTERM Ray would drain for half a minute; a node is drained before it is told to end.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    ours.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ours.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # GPU numbers as in nvidia-smi
    return ours | (QUICK_LOSS if cluster.quick_loss else {})


def with_shares(sizes: NodeSizes, nodes: int) -> NodeSizes:
    """Sizes in full: what is not stated is one node's share of a machine with this many nodes."""
    machine, nodes = _memory(), max(1, nodes)
    store = max(MIN_STORE, int(min(STORE_SHARE * machine, 0.8 * _shared_memory()) / nodes))
    return dataclasses.replace(
        sizes, memory=sizes.memory or int(MEMORY_SHARE * machine / nodes), object_store=sizes.object_store or store
    )


def _memory() -> int:
    """Bytes of this machine, or of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _shared_memory() -> int:
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return MIN_STORE
    return facts.f_bavail * facts.f_frsize
