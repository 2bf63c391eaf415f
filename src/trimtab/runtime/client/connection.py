"""Connects a client to its controller: creates it, calls it with a deadline, and listens to it.

An actor inherits the runtime environment and module paths of the driver that creates it, and passes them on: workers
would run every client's tasks with the code and variables of the first client. So a driver without any creates the
controller and exits: `python -m trimtab.runtime.client.connection SETTINGS_JSON`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, TrimtabError, UnreachableError
from trimtab.model.pool import TaskState
from trimtab.runtime.controller import rpc
from trimtab.runtime.procs.background import describe
from trimtab.runtime.rayapi.connect import NAMESPACE, init
from trimtab.runtime.rayapi.nodes import live_nodes
from trimtab.runtime.rayapi.private import driver_address
from trimtab.runtime.store.journal import JournalVersionError

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
        settings: rpc.ControllerSettings | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        rpc.check_controller_name(name)
        self.ray = ray
        self.name = name
        self.answer_s = answer_s
        journal_dir, state_dir = (None if path is None else os.path.abspath(path) for path in (journal_dir, state_dir))
        found = self._find()
        if found is None and not make:
            raise UnreachableError(
                f"this Ray has no controller {name}", hint="`trimtab.connect()` in Python creates one; --name names one"
            )
        self._actor = found or self._create(journal_dir, state_dir, settings or rpc.ControllerSettings(), timeout_s)
        try:
            self.facts: dict[str, Any] = self.ask("ready", journal_dir, state_dir, timeout_s=timeout_s)
        except BaseException:
            if found is None:  # created here and unusable: not left behind
                self.end()
            raise

    def ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call an RPC and return its value or raise its error. Retries across a restart of the controller."""
        from ray import exceptions

        timeout_s = self.answer_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if not self.ray.is_initialized():  # a call would join any cluster on this machine
                raise UnreachableError("Ray is gone: this process has left it", hint="connect again")
            try:
                return rpc.value_of(self.ray.get(getattr(self._actor, method).remote(*args), timeout=max(0.01, left_s)))
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
        with contextlib.suppress(Exception):
            if self.ray.is_initialized():
                self.ray.kill(self._actor, no_restart=True)

    def _find(self) -> Any:
        try:
            return self.ray.get_actor(rpc.controller_name(self.name), namespace=NAMESPACE)
        except ValueError:
            return None

    def _create(
        self, journal_dir: str | None, state_dir: str | None, settings: rpc.ControllerSettings, timeout_s: float
    ) -> Any:
        arguments = [self.name, journal_dir, state_dir, vars(settings)]
        start_controller(driver_address(self.ray), self.name, arguments, timeout_s)
        actor = self._find()
        if actor is None:
            raise UnreachableError(f"the controller {self.name} ended during its creation", hint="connect again")
        return actor


def free_controller(ray: Any, name: str, timeout_s: float = 60.0) -> Remains:
    """End what a controller left that is dead or refuses its journal; InputError if it runs. Returns what there was."""
    from trimtab.runtime.controller.recovery import free_remains

    rpc.check_controller_name(name)
    if name in rpc.controllers(ray):
        try:
            ControllerConnection(ray, name, None, None, timeout_s, make=False)
        except JournalVersionError:
            ray.kill(ray.get_actor(rpc.controller_name(name), NAMESPACE))
        else:
            raise InputError(
                f"the controller {name} is running",
                hint="`session.shutdown()` in Python ends it with all that it holds",
            )
    return asyncio.run(free_remains(ray, name, timeout_s))


log = logging.getLogger("trimtab")

KnownTasks = dict[str, tuple[TaskState, int]]
"""By task: the state and attempt that were heard of last."""


class ControllerListener:
    """Calls `on_update(update, nodes_changed)` for each answer of the long poll `poll(known(), version)` but None.

    While the controller is unreachable it retries, and says so once. An update whose callback raised is delivered
    again: the version counts only after the callback, whose exception is for `Background` to log and restart.
    """

    def __init__(
        self,
        what: str,
        poll: Callable[[KnownTasks, int], Awaitable[rpc.ClientUpdate | None]],
        known: Callable[[], KnownTasks],
        on_update: Callable[[rpc.ClientUpdate, bool], Awaitable[None]],
        retry_s: float,
    ) -> None:
        self._what = what
        self._poll, self._known, self._on_update = poll, known, on_update
        self._retry_s = retry_s
        self._version = -1  # of the nodes, as last received
        self._fault = ""

    async def run(self, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Listen until closed."""
        while not is_closed():
            try:
                update = await self._poll(self._known(), self._version)
            except TrimtabError as fault:
                if fault.what != self._fault:
                    self._fault = fault.what
                    log.warning("no updates of %s: %s; retrying", self._what, self._fault)
                await asyncio.sleep(self._retry_s)
                continue
            except Exception:  # retried, whatever it is: without updates all would be kept as it is for ever
                log.exception("no updates of %s", self._what)
                await asyncio.sleep(self._retry_s)
                continue
            if self._fault:
                self._fault = ""
                log.info("updates of %s again", self._what)
            if update is not None:
                await self._on_update(update, update.version != self._version)
                self._version = update.version


MAX_CALLS = 4_000  # concurrent; every waiting client holds one
_INHERITED = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_ID", "RAY_RUNTIME_ENV_HOOK")  # would make it part of our job


def start_controller(address: str, name: str, arguments: list[Any], timeout_s: float) -> None:
    """Create the controller with these arguments unless it exists; UnreachableError on failure."""
    settings_json = json.dumps({"address": address, "arguments": arguments})
    environment = {key: value for key, value in os.environ.items() if key not in _INHERITED}
    with _neutral_directory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, settings_json],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"the controller {name} was not created within {timeout_s:.3g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise UnreachableError(
            f"the controller {name} could not be created: {lines[-1] if lines else f'exit status {done.returncode}'}",
            hint="install trimtab on the nodes of the cluster: a client's runtime_env does not provide it",
        )


@contextlib.contextmanager
def _neutral_directory() -> Iterator[str]:
    """Working directory of the process, which Ray adds to sys.path: that of trimtab, else an empty one."""
    here = Path(__file__).parents[3]
    if str(here) not in {*site.getsitepackages(), site.getusersitepackages()}:
        yield str(here)
        return
    with tempfile.TemporaryDirectory() as empty:
        yield empty


def main(settings_json: str) -> None:
    """Connect, create the controller on the head node, and exit."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from trimtab.runtime.controller.actor import Controller

    wanted: dict[str, Any] = json.loads(settings_json)
    init(ray, address=wanted["address"])
    head = next((node.node_id for node in live_nodes(ray) if node.head), None)
    if head is None:
        raise SystemExit("Ray names no head node for the controller to run on")
    controller = (
        ray.remote(Controller)
        .options(
            name=rpc.controller_name(wanted["arguments"][0]),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,  # `ask` retries calls, knowing that they may have been executed
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
        )
        .remote(*wanted["arguments"])
    )
    ray.get(controller.__ray_ready__.remote())
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
