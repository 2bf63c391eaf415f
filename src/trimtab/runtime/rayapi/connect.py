"""Finds, joins and starts Ray.

The Ray cluster is, in this order: the one this process is connected to, the given address, RAY_ADDRESS, a cluster on
this machine ("auto"), a new local Ray. A given address must answer; one from the environment may be stale, which is
reported and skipped. A Ray that was started here ends with the connection, also after an exception or Ctrl-C; an
existing one is left running. `embedded` starts one of several nodes.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.rayapi import auth
from trimtab.runtime.rayapi.private import dashboard_address, gcs_addresses, missing_for_dashboard

NAMESPACE = "trimtab"  # of Ray. A fixed one: in an anonymous one other drivers could not find a user's named actors
MIN_CPUS = 8  # logical CPUs of a local Ray, at least
LOG_ANSWER_S = 30


class RayConnection:
    """A connection to Ray. `how` says to which cluster and why; `embedded` whether it was started here.

    With `start` false none is started: UnreachableError if there is none. `dashboard`: one that is started here has
    Ray's dashboard, at `dashboard_url`.
    """

    def __init__(
        self,
        address: str | None,
        *,
        cpus: int | None = None,
        metrics_port: int | None = None,
        dashboard: bool = False,
        start: bool = True,
    ) -> None:
        self.ray = import_ray()
        self.embedded = False
        self._ours = False
        if self.ray.is_initialized():
            self.how = "the Ray that this process was connected to already"
        elif address is not None and address != "local":
            self._join(address)
            self.how = f"the Ray at {address}, as asked"
        else:
            skipped = [] if address == "local" else self._join_existing()
            if not self._ours:
                if not start:
                    hint = "--address names a cluster; `trimtab.connect()` or `ray start --head` starts one"
                    if address == "local":
                        raise InputError("a local Ray would be a new, empty one", hint=hint)
                    raise UnreachableError(f"no Ray cluster was found: {'; '.join(skipped)}", hint=hint)
                self._start(cpus, metrics_port, dashboard)
                self.how = "a local Ray of its own" + (f": {'; '.join(skipped)}" if skipped else ", as asked")

    @property
    def dashboard_url(self) -> str | None:
        """Ray's dashboard of this cluster; None if it has none."""
        address = dashboard_address(self.ray)
        return f"http://{address}" if address else None

    def close(self) -> None:
        """Disconnect; shuts Ray down if it was started here."""
        if self._ours:
            self._ours = False
            self.ray.shutdown()

    def _join_existing(self) -> list[str]:
        """Connect to RAY_ADDRESS or a cluster on this machine; returns why these were skipped."""
        skipped: list[str] = []
        named = os.environ.get("RAY_ADDRESS")
        if named == "local":  # Ray's word for a new local instance
            return ["RAY_ADDRESS is local"]
        if named:
            try:
                self._join(named)
                self.how = f"the Ray at {named}, from RAY_ADDRESS"
                return skipped
            except (UnreachableError, InputError) as fault:
                skipped.append(f"RAY_ADDRESS: {fault.what}")
        else:
            skipped.append("RAY_ADDRESS is not set")
        try:
            found = running_here()
            self._join(found)
            self.how = f"the Ray at {found}, which runs on this machine ({'; '.join(skipped)})"
        except (UnreachableError, InputError) as fault:
            skipped.append(fault.what)
        return skipped

    def _join(self, address: str) -> None:
        answers(address)
        if address != "auto" and not address.startswith("ray://"):
            auth.match_cluster(address)
        self._init(f"no Ray at {address}", address=address)

    def _start(self, cpus: int | None, metrics_port: int | None, dashboard: bool) -> None:
        if dashboard and (missing := missing_for_dashboard()):
            raise InputError(f"Ray's dashboard needs {missing}, which is missing", hint="pip install 'ray[default]'")
        settings: dict[str, Any] = {} if metrics_port is None else {"_metrics_export_port": metrics_port}
        cpus = cpus or max(MIN_CPUS, os.cpu_count() or 1)
        self._init("no Ray on this machine", address="local", num_cpus=cpus, include_dashboard=dashboard, **settings)
        self.embedded = True

    def _init(self, failure: str, **settings: Any) -> None:
        try:
            init(self.ray, **settings)
        except BaseException as fault:
            self.ray.shutdown()
            if not isinstance(fault, Exception):
                raise
            raise UnreachableError(
                f"{failure}: {first_line(fault)}",
                hint="`ray status` shows whether a cluster runs; without an address one is started here",
            ) from None
        self._ours = True


@contextmanager
def connected(*, address: str | None = None, cpus: int = 2) -> Iterator[Any]:
    """The connected ray module: at `address`, or a local Ray of `cpus` logical CPUs for the duration of the context."""
    link = RayConnection(address or "local", cpus=cpus)
    try:
        yield link.ray
    finally:
        link.close()


def init(ray: Any, **settings: Any) -> None:
    """`ray.init` in our namespace, without Ray's messages."""
    set_defaults()
    ray.init(log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE, **settings)


def set_defaults() -> None:
    """Settings of Ray's processes, before they start; values of the user stay."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def running_here() -> str:
    """Address of the only cluster on this machine; UnreachableError without one, and for several."""
    found = gcs_addresses()
    if not found:
        raise UnreachableError("no Ray runs on this machine")
    if len(found) > 1:
        raise UnreachableError(f"several Ray clusters run on this machine ({', '.join(found)}), and none was named")
    return found[0]


def answers(address: str) -> None:
    """UnreachableError if nothing listens at the address: Ray itself would end the whole process."""
    if address in ("auto", "local"):
        return
    _, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        raise InputError(f"{address} is no address of a Ray cluster", hint="host:6379, ray://host:10001 or auto")
    if why := _refusal(address):
        raise UnreachableError(
            f"nothing answers at {address}: {why}", hint="`ray status` on the cluster's head node shows whether it runs"
        )


def listens(address: str, wait_s: float) -> bool:
    """Whether the address accepts connections, within the time."""
    deadline = time.monotonic() + wait_s
    while _refusal(address, 2.0):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _refusal(address: str, timeout_s: float = 5.0) -> str:
    """Why the address accepts no connection; empty if it does."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError, ValueError) as fault:
        return str(getattr(fault, "strerror", None) or fault or type(fault).__name__)
    return ""


def import_ray() -> Any:
    """The ray module; InputError with the install command if it is missing."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "this needs Ray, which is not installed here", hint="pip install 'trimtab[ray]', or pip install ray"
        ) from None
    return ray


def log_lines(node: str, pid: int, *, tail: int, follow: bool, errors: bool) -> Iterator[str]:
    """Pieces of a worker's log, from Ray's dashboard. Raises UnreachableError where the dashboard does not answer."""
    from ray.util.state import get_log

    try:
        yield from get_log(
            node_id=node, pid=pid, tail=tail, follow=follow, suffix="err" if errors else "out", timeout=LOG_ANSWER_S
        )
    except Exception as fault:
        raise UnreachableError(
            f"the log of process {pid} cannot be read: {first_line(fault)}",
            hint="logs are served by Ray's dashboard: `ray[default]`, not started with --dashboard-port 0",
        ) from None
