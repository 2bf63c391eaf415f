"""Ray's private API, but for what one module of this room needs alone (`embedded`, `slot_view`, ...).

No other room touches it (`tests/unit/runtime/test_rayapi.py`). Each function names the Ray releases it was seen with; a
new release of Ray is tried with this room's tests first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def gcs_addresses() -> list[str]:
    """Clusters on this machine, as Ray's "auto" finds them; Ray itself would end the process. Seen with Ray 2.60."""
    from ray._private.services import find_gcs_addresses

    return sorted(str(address) for address in find_gcs_addresses())


def missing_for_dashboard() -> str:
    """The module of `ray[default]` that is not installed; empty if the dashboard can run. Seen with Ray 2.60."""
    try:
        import ray.dashboard.optional_deps  # noqa: F401
    except ImportError as fault:
        return fault.name or str(fault)
    return ""


def dashboard_address(ray: Any) -> str:
    """Host and port of the connected cluster's dashboard; empty without one. Seen with Ray 2.60."""
    return str(ray._private.worker.get_dashboard_url() or "")


def gcs_client(address: str) -> Any:
    """Client of a cluster's GCS, for a process that is no driver. Seen with Ray 2.60."""
    from ray._raylet import GcsClient

    return GcsClient(address=address)


def own_gcs_client(ray: Any) -> Any:
    """GCS client of this driver or worker; Ray has no public API for draining. Seen with Ray 2.60."""
    return ray._private.worker.global_worker.gcs_client


def gcs_tables(address: str) -> Any:
    """GCS tables of a cluster, for a process that is no driver; raises if there are none. Seen with Ray 2.60."""
    from ray._raylet import GcsClientOptions, GlobalStateAccessor

    tables = GlobalStateAccessor(
        GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    )
    if not tables.connect():
        raise ConnectionError("it does not let us in")
    return tables


def free_resources(tables: Any) -> dict[str, dict[str, float]]:
    """Free resources by node, of `gcs_tables`. Seen with Ray 2.60."""
    from ray.core.generated.gcs_pb2 import AvailableResources

    rows = [AvailableResources.FromString(row) for row in tables.get_all_available_resources()]
    return {row.node_id.hex(): dict(row.resources_available) for row in rows}


def own_free_resources() -> dict[str, dict[str, float]]:
    """Free resources by node, for a driver or worker; the public API has only their sum. Seen with Ray 2.60."""
    from ray._private import state

    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def autoscaler_config(tables: Any) -> bytes:
    """The autoscaler's ClusterConfig message; empty without one. Seen with Ray 2.60."""
    from ray import _raylet

    names = _raylet.GCS_AUTOSCALER_STATE_NAMESPACE, _raylet.GCS_AUTOSCALER_CLUSTER_CONFIG_KEY
    return tables.get_internal_kv(*(name.encode() for name in names)) or b""


def session_dir(ray: Any) -> Path:
    """Ray's session directory on this node; a new cluster has a new one. Seen with Ray 2.60."""
    return Path(ray._private.worker._global_node.get_session_dir_path())


def logs_dir(ray: Any) -> Path:
    """Ray's log folder on this node, shown by its dashboard. Seen with Ray 2.60."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def actor_id(handle: Any) -> str:
    """Id of an actor by its handle. Seen with Ray 2.60."""
    return str(handle._actor_id.hex())


def driver_address(ray: Any) -> str:
    """Address of the cluster this process is connected to: of the client server, or of the GCS. Seen with Ray 2.60."""
    client = ray.util.client.ray
    if client.is_connected():  # the GCS address may be unreachable from here
        return f"ray://{client.get_context().client_worker._conn_str}"
    return str(ray.get_runtime_context().gcs_address)


def mute_ray_messages() -> None:
    """Suppress Ray's message for every process that ends by a signal; runs report lost ones. Seen with Ray 2.60."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
