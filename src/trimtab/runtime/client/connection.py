"""Connects a client to Ray and to its controller, and calls the controller with a deadline.

The Ray cluster is, in this order: the one this process is connected to, the given address, RAY_ADDRESS, a cluster on
this machine ("auto"), a new local Ray. A given address must answer; one from the environment may be stale, which is
reported and skipped. A Ray that was started here ends with the connection; an existing one is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.client.controller_start import start_controller
from trimtab.runtime.controller.rpc import NAMESPACE, controller_name, controllers, value_of
from trimtab.runtime.localcluster import auth
from trimtab.runtime.procs.background import describe, first_line
from trimtab.runtime.rayapi.connect import answers, import_ray
from trimtab.runtime.store.journal import JournalVersionError
from trimtab.runtime.workers.task_types import check_controller_name

if TYPE_CHECKING:
    from trimtab.runtime.controller.recovery import Remains

MIN_CPUS = 8  # logical CPUs of a local Ray, at least
ANSWER_S = 30.0


class RayConnection:
    """A connection to Ray. `how` says to which cluster and why; `embedded` whether it was started here.

    With `start` false none is started: UnreachableError if there is none.
    """

    def __init__(
        self,
        address: str | None,
        *,
        cpus: int | None = None,
        metrics_port: int | None = None,
        start: bool = True,
    ) -> None:
        self.ray = import_ray()
        self.embedded = False
        self._ours = False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
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
                self._start(cpus, metrics_port)
                self.how = "a local Ray of its own" + (f": {'; '.join(skipped)}" if skipped else ", as asked")

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
            found = self._running_here()
            self._join(found)
            self.how = f"the Ray at {found}, which runs on this machine ({'; '.join(skipped)})"
        except (UnreachableError, InputError) as fault:
            skipped.append(fault.what)
        return skipped

    def _running_here(self) -> str:
        from ray._private.services import find_gcs_addresses  # what "auto" uses, without ending the process

        found = sorted(find_gcs_addresses())
        if not found:
            raise UnreachableError("no Ray runs on this machine")
        if len(found) > 1:
            raise UnreachableError(f"several Ray clusters run on this machine ({', '.join(found)}), and none was named")
        return str(found[0])

    def _join(self, address: str) -> None:
        answers(address)
        if not address.startswith("ray://"):
            auth.match_cluster(address)
        self._init(f"no Ray at {address}", address=address)

    def _start(self, cpus: int | None, metrics_port: int | None) -> None:
        settings: dict[str, Any] = {} if metrics_port is None else {"_metrics_export_port": metrics_port}
        cpus = cpus or max(MIN_CPUS, os.cpu_count() or 1)
        self._init("no Ray on this machine", address="local", num_cpus=cpus, include_dashboard=False, **settings)
        self.embedded = True

    def _init(self, failure: str, **settings: Any) -> None:
        try:
            # A fixed namespace: in an anonymous one other drivers could not find a user's named actors.
            self.ray.init(log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE, **settings)
        except BaseException as fault:
            self.ray.shutdown()
            if not isinstance(fault, Exception):
                raise
            raise UnreachableError(
                f"{failure}: {first_line(fault)}",
                hint="`ray status` shows whether a cluster runs; without an address one is started here",
            ) from None
        self._ours = True


class ControllerConnection:
    """The controller of a name: an existing one, or a new one on the head node (not with `make` false:
    UnreachableError).
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        journal_dir: str | None,
        state_dir: str | None,
        timeout_s: float = 120.0,
        *,
        make: bool = True,
        reconcile_s: float | None = None,
    ) -> None:
        check_controller_name(name)
        self.ray = ray
        self.name = name
        journal_dir, state_dir = (None if path is None else os.path.abspath(path) for path in (journal_dir, state_dir))
        found = self._find()
        if found is None and not make:
            raise UnreachableError(
                f"this Ray has no controller {name}", hint="`trimtab.connect()` in Python creates one; --name names one"
            )
        more = {} if reconcile_s is None else {"reconcile_s": reconcile_s}
        self._actor = found or self._create(journal_dir, state_dir, timeout_s=timeout_s, **more)
        try:
            self.facts: dict[str, Any] = self.ask("ready", journal_dir, state_dir, timeout_s=timeout_s)
        except BaseException:
            if found is None:  # created here and unusable: not left behind
                self.end()
            raise

    def ask(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call an RPC and return its value or raise its error. Retries across a restart of the controller."""
        from ray import exceptions

        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if not self.ray.is_initialized():  # a call would join any cluster on this machine
                raise UnreachableError("Ray is gone: this process has left it", hint="connect again")
            try:
                return value_of(self.ray.get(getattr(self._actor, method).remote(*args), timeout=max(0.01, left_s)))
            except exceptions.GetTimeoutError:
                raise UnreachableError(
                    f"the controller {self.name} did not answer within {timeout_s:.3g} s",
                    hint="`ray list actors` shows whether it runs; it is restarted when it dies",
                ) from None
            except exceptions.RayActorError as fault:
                # Restarting or ended: look it up again.
                found = self._find()
                if found is None or deadline - time.monotonic() < 0.1:
                    raise UnreachableError(
                        f"the controller {self.name} is gone", hint="connect again: a new one reads its journal"
                    ) from fault
                self._actor = found
                time.sleep(0.05)
            except (exceptions.RaySystemError, ConnectionError) as fault:
                raise UnreachableError(f"Ray is gone: {describe(fault)}") from None
            except Exception as fault:
                if "Failed to submit task to actor" not in str(fault):  # Ray's message, in a plain Exception
                    raise
                raise UnreachableError(
                    "this process has connected to another Ray since", hint="connect again"
                ) from None

    def end(self) -> None:
        """Kill the controller for good."""
        with contextlib.suppress(Exception):
            if self.ray.is_initialized():
                self.ray.kill(self._actor, no_restart=True)

    def _find(self) -> Any:
        try:
            return self.ray.get_actor(controller_name(self.name), namespace=NAMESPACE)
        except ValueError:
            return None

    def _create(self, *settings: str | None, timeout_s: float, **more: float) -> Any:
        start_controller(self._address(), self.name, *settings, timeout_s=timeout_s, **more)
        actor = self._find()
        if actor is None:
            raise UnreachableError(f"the controller {self.name} ended during its creation", hint="connect again")
        return actor

    def _address(self) -> str:
        client = self.ray.util.client.ray
        if client.is_connected():  # through a Ray client server: the GCS address may be unreachable
            return f"ray://{client.get_context().client_worker._conn_str}"
        return str(self.ray.get_runtime_context().gcs_address)


def free_controller(ray: Any, name: str, timeout_s: float = 60.0) -> Remains:
    """End what a controller left that is dead or refuses its journal; InputError if it runs. Returns what there was."""
    from trimtab.runtime.controller.recovery import free_remains

    check_controller_name(name)
    if name in controllers(ray):
        try:
            ControllerConnection(ray, name, None, None, timeout_s, make=False)
        except JournalVersionError:
            ray.kill(ray.get_actor(controller_name(name), NAMESPACE))
        else:
            raise InputError(
                f"the controller {name} is running",
                hint="`session.shutdown()` in Python ends it with all that it holds",
            )
    return asyncio.run(free_remains(ray, name, timeout_s))
