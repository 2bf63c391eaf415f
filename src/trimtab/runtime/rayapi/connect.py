"""Connects to Ray: the cluster of this process, one at an address, or a new local one.

A Ray that was started here is shut down here, also after an exception or Ctrl-C; an existing cluster is left running.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.procs.background import first_line


@contextmanager
def connected(*, address: str | None = None, cpus: int = 2) -> Iterator[Any]:
    """The connected ray module: at `address`, or a local Ray of `cpus` logical CPUs for the duration of the context."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    if address:
        answers(address)
    # Before Ray starts its processes; values of the user stay.
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
            f"no Ray {where}: {first_line(fault)}",
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
    """UnreachableError if nothing listens at the address: Ray itself would end the whole process."""
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
    """The ray module; InputError with the install command if it is missing."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "this needs Ray, which is not installed here", hint="pip install 'trimtab[ray]', or pip install ray"
        ) from None
    return ray


def node_of(ray: Any, host: str) -> str | None:
    """Id of the alive node with this name or address, if any."""
    for node in ray.nodes():
        known = (node.get("NodeName"), node.get("NodeManagerHostname"), node.get("NodeManagerAddress"))
        if node.get("Alive") and host in known:
            return str(node["NodeID"])
    return None
