"""The Ray cluster that something runs on: the one of this process, one at an address, or one started for the purpose.

What is started here is ended here, also after a fault or Ctrl-C; a cluster that was there before is left as it was.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.core.errors import InputError, UnreachableError


@contextmanager
def connected(*, address: str | None = None, cpus: int = 2) -> Iterator[Any]:
    """The ray module, connected: to `address`, or to a local Ray of so many logical CPUs that lives as long as this."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    if address:
        answers(address)
    # Set before Ray starts its processes; what the user has set stays.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"address": address} if address else {"address": "local", "num_cpus": cpus}
    if not address:
        settings["include_dashboard"] = False
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
    except Exception as fault:
        ray.shutdown()
        where = f"at {address}" if address else "on this machine"
        raise UnreachableError(
            f"no Ray {where}: {str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__}",
            hint="`ray status` shows whether a cluster runs; without an address one is started here",
        ) from None
    except BaseException:
        ray.shutdown()
        raise
    try:
        yield ray
    finally:
        ray.shutdown()


def answers(address: str) -> None:
    """Raise unless something listens at the address: where nothing does, Ray ends the whole process."""
    if address in ("auto", "local"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        raise InputError(f"{address} is no address of a Ray cluster", hint="host:6379, ray://host:10001 or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError, UnicodeError) as fault:
        raise UnreachableError(
            f"nothing answers at {address}: {getattr(fault, 'strerror', None) or fault}",
            hint="`ray status` on the cluster's head node shows whether it runs",
        ) from None


def import_ray() -> Any:
    """The ray module, or an error that says how to get it."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "this needs Ray, which is not installed here", hint="pip install 'trimtab[ray]', or pip install ray"
        ) from None
    return ray


def node_of(ray: Any, host: str) -> str | None:
    """The id of the living node with this name or address, if there is one."""
    for node in ray.nodes():
        known = (node.get("NodeName"), node.get("NodeManagerHostname"), node.get("NodeManagerAddress"))
        if node.get("Alive") and host in known:
            return str(node["NodeID"])
    return None
