"""From a client to Ray and to its controller: finds or starts both, and calls with a deadline.

In order: the Ray this process is connected to, the address given, RAY_ADDRESS, a cluster that runs here ("auto"), a
local Ray of its own. An address that is given must answer; what the environment names may be gone, and is then said and
passed over. A Ray that was started here ends with the link, one that was there stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.client import controller_start as founding
from trimtab.runtime.controller.rpc import NAMESPACE, controller_name, value_of
from trimtab.runtime.localcluster import auth
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rayapi.connect import answers, import_ray

MIN_CPUS = 8  # of a local Ray: logical, whatever the machine has
ANSWER_S = 30.0


class RayConnection:
    """A connection to Ray. `how` says to which one and why; `embedded` whether it was started here.

    With `start` false none is started: UnreachableError where there is none.
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
            passed = [] if address == "local" else self._join_what_is_there()
            if not self._ours:
                if not start:
                    hint = "--address names a cluster; `trimtab.connect()` or `ray start --head` starts one"
                    if address == "local":
                        raise InputError("a local Ray would be a new one, with nothing to look at", hint=hint)
                    raise UnreachableError(f"there is no Ray to look at: {'; '.join(passed)}", hint=hint)
                self._start(cpus, metrics_port)
                self.how = "a local Ray of its own" + (f": {'; '.join(passed)}" if passed else ", as asked")

    def close(self) -> None:
        """Leave Ray as it was found."""
        if self._ours:
            self._ours = False
            self.ray.shutdown()

    def _join_what_is_there(self) -> list[str]:
        """Connect to RAY_ADDRESS or to what runs here; why not, where neither answers."""
        passed: list[str] = []
        named = os.environ.get("RAY_ADDRESS")
        if named == "local":  # Ray's own word for one of one's own
            return ["RAY_ADDRESS is local"]
        if named:
            try:
                self._join(named)
                self.how = f"the Ray at {named}, from RAY_ADDRESS"
                return passed
            except (UnreachableError, InputError) as fault:
                passed.append(f"RAY_ADDRESS: {fault.what}")
        else:
            passed.append("RAY_ADDRESS is not set")
        try:
            found = self._running_here()
            self._join(found)
            self.how = f"the Ray at {found}, which runs on this machine ({'; '.join(passed)})"
        except (UnreachableError, InputError) as fault:
            passed.append(fault.what)
        return passed

    def _running_here(self) -> str:
        from ray._private.services import find_gcs_addresses  # what "auto" asks, without ending the process

        found = sorted(find_gcs_addresses())
        if not found:
            raise UnreachableError("no Ray runs on this machine")
        if len(found) > 1:
            raise UnreachableError(f"several Rays run on this machine ({', '.join(found)}), and none was named")
        return str(found[0])

    def _join(self, address: str) -> None:
        answers(address)
        if not address.startswith("ray://"):
            auth.suit(address)
        self._init(f"no Ray at {address}", address=address)

    def _start(self, cpus: int | None, metrics_port: int | None) -> None:
        settings: dict[str, Any] = {} if metrics_port is None else {"_metrics_export_port": metrics_port}
        cpus = cpus or max(MIN_CPUS, os.cpu_count() or 1)
        self._init("no Ray on this machine", address="local", num_cpus=cpus, include_dashboard=False, **settings)
        self.embedded = True

    def _init(self, failure: str, **settings: Any) -> None:
        try:
            # A namespace of our own: in an anonymous one nobody else finds a user's named actors.
            self.ray.init(log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE, **settings)
        except BaseException as fault:
            self.ray.shutdown()
            if not isinstance(fault, Exception):
                raise
            lines = str(fault).strip().splitlines()
            raise UnreachableError(
                f"{failure}: {lines[0] if lines else type(fault).__name__}",
                hint="`ray status` shows whether a cluster runs; without an address one is started here",
            ) from None
        self._ours = True


class ControllerConnection:
    """The controller of a name: found, or made on the head node; with `make` false, found or UnreachableError."""

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
        if not name or any(character in name for character in ":/\\\n\0"):
            raise InputError(f"{name!r} cannot be the name of a controller", hint="letters, digits, - . and _")
        self.ray = ray
        self.name = name
        journal_dir, state_dir = (None if path is None else os.path.abspath(path) for path in (journal_dir, state_dir))
        found = self._found()
        if found is None and not make:
            raise UnreachableError(
                f"this Ray has no controller {name}", hint="`trimtab.connect()` in Python makes one; --name names one"
            )
        more = {} if reconcile_s is None else {"reconcile_s": reconcile_s}
        self._actor = found or self._made(journal_dir, state_dir, timeout_s=timeout_s, **more)
        try:
            self.facts: dict[str, Any] = self.ask("ready", journal_dir, state_dir, timeout_s=timeout_s)
        except BaseException:
            if found is None:  # made by us, and of no use: not left behind
                self.end()
            raise

    def ask(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a door and give its value, or raise its error. Lasts over a restart of the controller."""
        from ray import exceptions

        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if not self.ray.is_initialized():  # asked now, Ray would join whatever cluster runs here
                raise UnreachableError("Ray is gone: this process has left it", hint="connect again")
            try:
                return value_of(self.ray.get(getattr(self._actor, method).remote(*args), timeout=max(0.01, left_s)))
            except exceptions.GetTimeoutError:
                raise UnreachableError(
                    f"the controller {self.name} did not answer within {timeout_s:.3g} s",
                    hint="`ray list actors` shows whether it runs; it is restarted when it dies",
                ) from None
            except exceptions.RayActorError as fault:
                # Restarting, or gone for good: only a fresh look tells.
                found = self._found()
                if found is None or deadline - time.monotonic() < 0.1:
                    raise UnreachableError(
                        f"the controller {self.name} is gone", hint="connect again: a new one reads its journal"
                    ) from fault
                self._actor = found
                time.sleep(0.05)
            except (exceptions.RaySystemError, ConnectionError) as fault:
                raise UnreachableError(f"Ray is gone: {describe(fault)}") from None
            except Exception as fault:
                if "Failed to submit task to actor" not in str(fault):  # Ray's words, in a plain Exception
                    raise
                raise UnreachableError("this process has joined another Ray since", hint="connect again") from None

    def end(self) -> None:
        """End the controller's process for good."""
        with contextlib.suppress(Exception):
            if self.ray.is_initialized():
                self.ray.kill(self._actor, no_restart=True)

    def _found(self) -> Any:
        try:
            return self.ray.get_actor(controller_name(self.name), namespace=NAMESPACE)
        except ValueError:
            return None

    def _made(self, *settings: str | None, timeout_s: float, **more: float) -> Any:
        founding.found(self._address(), self.name, *settings, timeout_s=timeout_s, **more)
        made = self._found()
        if made is None:
            raise UnreachableError(f"the controller {self.name} ended while it was made", hint="connect again")
        return made

    def _address(self) -> str:
        client = self.ray.util.client.ray
        if client.is_connected():  # through a Ray client server: the cluster's own address may be out of reach
            return f"ray://{client.get_context().client_worker._conn_str}"
        return str(self.ray.get_runtime_context().gcs_address)
