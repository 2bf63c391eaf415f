"""Connects a client to its controller, and calls the controller with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, UnreachableError
from trimtab.runtime.client.controller_start import start_controller
from trimtab.runtime.controller.rpc import controller_name, controllers, value_of
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.rayapi.private import driver_address
from trimtab.runtime.store.journal import JournalVersionError
from trimtab.runtime.workers.task_types import check_controller_name

if TYPE_CHECKING:
    from trimtab.runtime.controller.recovery import Remains

ANSWER_S = 30.0


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
        start_controller(driver_address(self.ray), self.name, *settings, timeout_s=timeout_s, **more)
        actor = self._find()
        if actor is None:
            raise UnreachableError(f"the controller {self.name} ended during its creation", hint="connect again")
        return actor


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
