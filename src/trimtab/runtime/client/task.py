"""A task, as a client submits it and sees it: pack, inspect, wait, call, cancel.

All that can be checked before sending is checked here: that class and arguments can be pickled, that the entry method
exists, that the Ray options are not decided by the pool. Calls go directly to the task's processes, everything else
through the controller. Every wait has a deadline, and a timeout error has the reason. Any number of clients may use the
same task.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import site
import sys
import sysconfig
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, TrimtabError, check_known, meant
from trimtab.machines.pool.events import CancelRequested, CompleteRequested, EvictRequested, TurnRequested
from trimtab.model.pool import ENDED, TaskExplanation, TaskState
from trimtab.runtime.controller.rpc import TaskPayload, TaskSnapshot, TaskWorker
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.rayapi import slot_view
from trimtab.runtime.store.blobs import unpack
from trimtab.runtime.workers import environments

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

MAX_CALL_S = 60.0  # of a single RPC, so that a hanging controller is noticed
DEATH_NOTICE_S = 5.0  # for the controller to notice a death that a caller has seen
DEFAULT_TIMEOUT_S = 3600.0


class TaskError(TrimtabError):
    """Error of a task; `explanation` is the controller's, if it answered."""

    exit_status = 4

    def __init__(self, what: str, explanation: TaskExplanation | None = None, *, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.explanation = explanation


class TaskTimeoutError(TaskError, TimeoutError):
    """The task did not reach the state in time; it continues."""


class TaskInterruptedError(TaskError):
    """The process ended during a call. If the task was evicted or has restarts left, it runs again."""


class TaskFailedError(TaskError):
    """The task failed; `trace` is the traceback of its constructor or entry method, if that raised."""

    trace: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.trace}".rstrip()


class TaskCancelledError(TaskError):
    """The task was cancelled."""


class Task:
    """A task, as seen by a client."""

    def __init__(self, session: Session, id: str) -> None:
        self._session = session
        self._handles: dict[TaskWorker, Any] = {}
        self._seen: TaskSnapshot | None = None  # snapshot of the last `begin`
        self._methods: dict[tuple[TaskWorker, str, int], Any] = {}  # Ray methods with options, cached
        self.id = id

    # ---- state

    @property
    def seen(self) -> TaskSnapshot:
        seen: TaskSnapshot = self._session.ask("see", self.id)
        return seen

    @property
    def state(self) -> TaskState:
        return self.seen.state

    @property
    def how(self) -> str:
        """What it runs in (a warm host, a plain actor), and why."""
        return self.seen.how

    @property
    def members(self) -> tuple[TaskWorker, ...]:
        """Its processes by rank; empty while it does not run."""
        return self.seen.members

    def explain(self) -> TaskExplanation:
        """Its state, and the reason for it."""
        return self._session.explain(self.id)

    # ---- waiting

    def wait(self, until: str | Collection[str] = "running", timeout: float = DEFAULT_TIMEOUT_S) -> TaskState:
        """Wait until it is in a state (or one of several; "ended": any end), and return that state.

        Raises TaskTimeoutError with the reason for the wait, and TaskFailedError or TaskCancelledError if it ended
        otherwise. A task that is done counts as having been running.
        """
        wanted = _states(until)
        seen = self._wait(wanted, timeout)
        if seen.state in wanted or (seen.state is TaskState.done and TaskState.running in wanted):
            return seen.state
        if seen.state in ENDED:
            raise self._ended_error(seen)
        words = " or ".join(state.value for state in wanted)
        raise self._late(f"task {self.id} is not {words} after {timeout:.3g} s, but {seen.state.value}")

    def result(self, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
        """Return value of the entry method (of a gang: a list by rank); raises the error of a failed task."""
        from ray import cloudpickle

        seen = self._wait(ENDED, timeout, with_result=True)
        if seen.state not in ENDED:
            raise self._late(f"task {self.id} has no result after {timeout:.3g} s, for it is {seen.state.value}")
        if seen.state is not TaskState.done:
            raise self._ended_error(seen)
        if seen.result is None:
            return None
        values = [cloudpickle.loads(part) for part in unpack(seen.result)[1] if part is not None]
        return values[0] if len(values) == 1 else values

    def call(
        self, method: str, *args: Any, rank: int | None = None, timeout: float = DEFAULT_TIMEOUT_S, **kwargs: Any
    ) -> Any:
        """Call a method of the object once it runs; of a gang, of every member (a list), or of the one with `rank`.

        Exceptions of the method are raised. TaskInterruptedError: the process ended during the call.
        """
        from ray import exceptions

        deadline = time.monotonic() + timeout
        seen = self._running(deadline, timeout)
        members = seen.members
        if rank is not None:
            if not 0 <= rank < len(members):
                raise InputError(f"task {self.id} has members 0 to {len(members) - 1}, not {rank}")
            members = (members[rank],)
        try:
            refs = [self._call(member, method, args, kwargs) for member in members]
            values = self._session._ray.get(refs, timeout=max(0.01, deadline - time.monotonic()))
        except exceptions.GetTimeoutError:
            raise self._late(f"{method} of task {self.id} has not returned after {timeout:.3g} s") from None
        except exceptions.RayActorError as fault:
            raise self._interrupted(method, seen) from fault
        return values[0] if len(seen.members) == 1 or rank is not None else values

    def begin(
        self, method: str, *args: Any, timeout: float = DEFAULT_TIMEOUT_S, returns: int = 1, **kwargs: Any
    ) -> list[Any]:
        """Call a method of every member once it runs, and return Ray references.

        With several `returns` the method returns a tuple of that length, and there is a list of references per member.
        The members are looked up once, and again after `interrupted`.
        """
        if self._seen is None:
            self._seen = self._running(time.monotonic() + timeout, timeout)
        return [self._call(member, method, args, kwargs, returns) for member in self._seen.members]

    def interrupted(self, method: str) -> TaskInterruptedError:
        """The error for a call by `begin` whose process ended during it."""
        seen, self._seen = self._seen, None
        return self._interrupted(method, seen if seen is not None else self.seen)

    # ---- requests

    def cancel(self, keep_slot: bool = True) -> None:
        """Cancel it. Returns at once: `wait("ended")` waits."""
        self._session.ask("ask", CancelRequested(self.id, keep_slot))

    def complete(self, keep_slot: bool = True) -> None:
        """Stop it as done. Returns at once."""
        self._session.ask("ask", CompleteRequested(self.id, keep_slot))

    def evict(self) -> None:
        """Evict it: it stops now and is queued again. Returns at once."""
        self._session.ask("ask", EvictRequested(self.id))

    def take_turn(self) -> None:
        """Request its turn in the slot it shares. Returns at once: `wait("running")` waits."""
        self._session.ask("ask", TurnRequested(self.id))

    def __repr__(self) -> str:
        return f"Task({self.id!r})"

    # ---- helpers

    def _wait(self, states: Collection[TaskState], timeout: float, *, with_result: bool = False) -> TaskSnapshot:
        deadline = time.monotonic() + timeout
        while True:
            left_s = deadline - time.monotonic()
            call_s = max(0.0, min(left_s, MAX_CALL_S))
            seen: TaskSnapshot = self._session.ask(
                "wait", self.id, tuple(states), call_s, with_result, timeout_s=call_s + 30.0
            )
            if seen.state in states or seen.state in ENDED or left_s <= call_s:
                return seen

    def _running(self, deadline: float, timeout: float) -> TaskSnapshot:
        while True:
            seen = self._wait((TaskState.running,), max(0.0, deadline - time.monotonic()))
            if seen.state is TaskState.running and seen.members:
                handles = zip(seen.members, seen.handles, strict=False)
                known = {member: handle for member, handle in handles if handle is not None}
                self._handles = {**known, **self._handles}
                return seen
            if seen.state in ENDED:
                raise self._ended_error(seen)
            if time.monotonic() >= deadline:
                raise self._late(f"task {self.id} does not run after {timeout:.3g} s, but is {seen.state.value}")
            time.sleep(0.01)

    def _call(
        self, member: TaskWorker, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], returns: int = 1
    ) -> Any:
        is_host = member.kind == "host"
        known = self._methods.get((member, method, returns))
        if known is None:
            handle = self._handle(member)
            named = handle.call if is_host else getattr(handle, method)
            # The name is what Ray's dashboard and task list show.
            known = named.options(name=f"{self.id}.{method}", num_returns=returns)
            self._methods = {key: method_ for key, method_ in self._methods.items() if key[0].attempt == member.attempt}
            self._methods[member, method, returns] = known
        return known.remote(method, *args, **kwargs) if is_host else known.remote(*args, **kwargs)

    def _handle(self, member: TaskWorker) -> Any:
        from ray import exceptions

        handle = self._handles.get(member)
        if handle is None:
            try:
                handle = self._session._ray.get_actor(member.actor, namespace=member.namespace)
            except ValueError:
                raise exceptions.RayActorError() from None
            self._handles = {
                other: handle for other, handle in self._handles.items() if other.attempt == member.attempt
            }
            self._handles[member] = handle
        return handle

    def _interrupted(self, method: str, seen: TaskSnapshot) -> TaskInterruptedError:
        """The error for a process that ended during a call, once the controller knows of it."""
        until = time.monotonic() + DEATH_NOTICE_S
        explanation = self._explained()
        while explanation is not None and explanation.attempts == seen.attempt and time.monotonic() < until:
            if explanation.state not in (TaskState.running, TaskState.parked):
                break
            time.sleep(0.02)
            explanation = self._explained()
        why = f" ({explanation.state.value}; {explanation.reason})" if explanation is not None else ""
        return TaskInterruptedError(f"task {self.id} was interrupted during {method}{why}", explanation)

    def _ended_error(self, seen: TaskSnapshot) -> TaskError:
        what = f"task {self.id} is {seen.state.value}: {seen.reason}"
        if seen.state is TaskState.cancelled:
            return TaskCancelledError(what, self._explained())
        if seen.state is TaskState.done:
            return TaskError(what, self._explained())
        error = TaskFailedError(what, self._explained())
        with contextlib.suppress(TrimtabError):
            data = seen.result or self._wait(ENDED, 0.0, with_result=True).result
            error.trace = "\n".join(trace for trace in unpack(data)[0]["traces"] if trace) if data is not None else ""
        return error

    def _late(self, what: str) -> TaskTimeoutError:
        explanation = self._explained()
        why = f": {explanation.reason}" if explanation is not None else ""
        return TaskTimeoutError(what + why, explanation, hint=f"`trimtab why {self.id}` says more")

    def _explained(self) -> TaskExplanation | None:
        try:
            return self.explain()
        except TrimtabError:
            return None


def _states(until: str | Collection[str]) -> tuple[TaskState, ...]:
    words = [until] if isinstance(until, str) else list(until)
    known = [state.value for state in TaskState]
    check_known(words, [*known, "ended"], what="{} is no state of a task")
    found = [ENDED if word == "ended" else (TaskState(word),) for word in words]
    return tuple(state for states in found for state in states)


_DECIDED_BY_RESOURCES = ("memory", "resources")
_DECIDED_BY_POOLS = ("scheduling_strategy", "placement_group", "placement_group_bundle_index", "get_if_exists")
_SERVED_ANYWAY = (  # every actor is detached
    "namespace", "lifetime", "runtime_env", "placement_group_capture_child_tasks",
)  # fmt: skip


def packed(
    kind: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    run: str | None = None,
    run_args: Sequence[Any] = (),
    run_kwargs: Mapping[str, Any] | None = None,
    ray_options: Mapping[str, Any] | None = None,
    plain: bool = False,
    namespace: str = "",
    runtime_env: str = "",
    where: str = "the task",
) -> TaskPayload:
    """The payload of a task; InputError if it could never run. `runtime_env` is the client's, as JSON."""
    options = _checked_options(dict(ray_options or {}), where)
    user_class = class_of(kind, where)
    if run is not None and not callable(getattr(user_class, run, None)):
        hint = meant(run, [name for name in dir(user_class) if not name.startswith("_")])
        raise InputError(f"{user_class.__name__} has no method {run}", where=where, hint=hint)
    why = why_plain(kind, user_class, options, plain)
    wanted = options.pop("runtime_env", None) or getattr(kind, "_default_options", {}).get("runtime_env")
    environment = environments.overridden(runtime_env, wanted)
    if why is not None:
        environment = _with_own_paths(environment)
    return TaskPayload(
        actor=_pickled((kind, tuple(args), dict(kwargs or {})), f"{user_class.__name__} with its arguments", where),
        entry=run,
        entry_args=_pickled((tuple(run_args), dict(run_kwargs or {})), f"the arguments of {run}", where)
        if run
        else None,
        ray_options=options,
        plain=why,
        namespace=str(options.get("namespace") or namespace),
        sys_path=own_paths(),
        runtime_env=environments.text_of(environment),
    )


def class_of(kind: Any, where: str = "the task") -> type:
    """The user's class, also of a ray.remote-decorated one."""
    if inspect.isclass(kind):
        return kind
    decorated = getattr(getattr(kind, "__ray_metadata__", None), "modified_class", None)
    if inspect.isclass(decorated):
        return decorated
    raise InputError(f"a task runs a class, not {kind!r}", where=where)


def why_plain(kind: Any, user_class: type, options: Mapping[str, Any], requested: bool) -> str | None:
    """Why a warm worker cannot serve it; None if it can."""
    if requested:
        return "a plain actor was requested"
    if not inspect.isclass(kind):
        return "its class is decorated with ray.remote"
    beyond = sorted(name for name in options if name not in _SERVED_ANYWAY)
    if beyond:
        return f"a warm host cannot honour these Ray options: {', '.join(beyond)}"
    if not slot_view.supported():
        return "this version of Ray does not let a warm host show its slot"
    waits = sorted(name for name, member in inspect.getmembers(user_class) if _is_async(member))
    if waits:
        return f"it has async methods: {', '.join(waits[:3])}"
    return None


def pickled_handlers(preserver: Any, restorer: Any, where: str) -> bytes:
    if not callable(preserver) or not callable(restorer):
        raise InputError("state handlers are two functions: preserver(actor), restorer(actor, state)", where=where)
    return _pickled((preserver, restorer), "the state handlers", where)


def own_paths() -> tuple[str, ...]:
    """Module search paths of this process besides the standard library and installed packages."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [*site.getsitepackages(), site.getusersitepackages()]
    found = [os.path.abspath(path) for path in sys.path]
    return tuple(dict.fromkeys(path for path in found if os.path.isdir(path) and not path.startswith(tuple(installed))))


def _with_own_paths(environment: dict[str, Any]) -> dict[str, Any]:
    """Adds the module paths to PYTHONPATH: a plain actor unpickles its class before its paths can be set."""
    paths = os.pathsep.join(own_paths())
    if not paths:
        return environment
    variables = dict(environment.get("env_vars") or {})
    variables["PYTHONPATH"] = os.pathsep.join((variables.get("PYTHONPATH", "${PYTHONPATH}"), paths))
    return {**environment, "env_vars": variables}


def _is_async(member: Any) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


def _checked_options(options: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in options.items():
        if name in _DECIDED_BY_RESOURCES:
            raise InputError(f"ray_options: {name} cannot be set", where=where, hint="use `resources`")
        if name in _DECIDED_BY_POOLS:
            raise InputError(f"ray_options: {name} cannot be set", where=where, hint="the pool decides it")
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise InputError(f"ray_options: {name} must be plain data, not {value!r}", where=where) from None
    return options


def _pickled(value: Any, what: str, where: str) -> bytes:
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as fault:
        raise InputError(
            f"{what} cannot be pickled: {first_line(fault)}",
            where=where,
            hint="create open files, sockets, locks and the like in the constructor",
        ) from None
