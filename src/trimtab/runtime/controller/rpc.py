"""What client, controller and workers exchange: payloads, processes and snapshots of tasks, results and errors.

Ray wraps exceptions that an actor raises; trimtab's errors are returned as values instead and raised by the client.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import field
from typing import Any, ClassVar, ParamSpec, TypeVar

from trimtab.core import errors
from trimtab.core.errors import InputError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import LONGEST_S, Ranges, check_fields
from trimtab.core.reasons import Reason
from trimtab.model.nodes import NodeView
from trimtab.model.pool import Labels, TaskState
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.store.blobs import pack, state_name, unpack
from trimtab.runtime.store.journal import JournalVersionError

ProcessKey = tuple[str, int, float]  # node, pid, start time


def check_controller_name(name: str) -> None:
    """Names of actors, placement groups and folders are made of it."""
    if not name or any(character in name for character in ":/\\\n\0"):
        raise InputError(f"{name!r} cannot be the name of a controller", hint="letters, digits, - . and _")


_PICKLES = ("actor", "entry_args", "handlers")  # of a payload


class TaskPayload(Frozen):
    """What a task runs: built by the client, stored beside the journal, unpickled only in the worker."""

    actor: bytes  # cloudpickle of (class, args, kwargs)
    entry: str | None = None  # method run after construction; its return value is the task's result
    entry_args: bytes | None = None  # cloudpickle of (args, kwargs)
    ray_options: dict[str, Any] = field(default_factory=dict)  # the user's Ray options
    plain: str | None = None  # None: a warm worker can serve it; else why a plain Ray actor is needed
    namespace: str = ""  # Ray namespace of the submitting client
    handlers: bytes | None = None  # cloudpickle of (preserver, restorer) of the pool
    sys_path: tuple[str, ...] = ()  # the client's module search path; appended before anything is unpickled
    runtime_env: str = ""  # of the client and the task, merged; JSON


class TaskWorker(Frozen):
    """A running process of a task; plain data."""

    task: str
    attempt: int
    rank: int
    world: int
    kind: str  # "host" (a WorkerProcess) or "actor" (a plain Ray actor)
    actor: str  # name of the Ray actor
    namespace: str  # Ray namespace of that name
    node: str
    pid: int
    born: float  # start time in seconds since boot, so that a reused pid is never killed
    mark: str = ""  # in the environment of its children
    wide: bool = False  # its children may be on other nodes

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> TaskWorker:
        """From the record file of a bound process."""
        identity = record["identity"]
        return cls(
            identity["task"], identity["attempt"], identity["rank"], identity["world"],
            record["kind"], record["actor"], record["namespace"], record["node"], record["pid"], record["born"],
            record["mark"], identity["wide"],
        )  # fmt: skip

    @property
    def key(self) -> ProcessKey:
        return self.node, self.pid, self.born


class EntryOutcome(Frozen):
    """Result of an entry method: a value or an error."""

    value: bytes | None = None  # cloudpickle of the return value
    error: str | None = None  # type and first line of the exception
    trace: str = ""  # traceback, for display


class WorkerStopResult(Frozen):
    """How a worker stopped; its process is gone."""

    cancel: str  # "returned", "raised", "timed out" or "not called"
    saved: bool = False
    state: bytes | None = None  # if not in a file of the controller; kept by the node agent until dropped
    note: str = ""


class TaskStartError(Exception):
    """A start failed, and nothing of it is left. `fatal`: a retry would fail the same way."""

    def __init__(self, why: str, *, fatal: bool, timed_out: bool = False, trace: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fatal = fatal
        self.timed_out = timed_out
        self.trace = trace  # traceback of the user's code, if that raised


class WorkerDiedError(Exception):
    """The process is gone."""


class ParkError(Exception):
    """The task could not be parked or unparked: no such method, an exception, or a timeout."""


def saved_state_name(member: TaskWorker) -> str:
    """Name of a process's saved state on its node. Has the pid, as a task id may be submitted again."""
    return f"{member.pid}-{member.born:g}~{state_name(member.task, member.attempt, member.rank)}"


def write_payload(payload: TaskPayload, token: str) -> bytes:
    """Serialise a payload: a JSON header, and the pickles as bytes that are not unpickled here."""
    header = {name: value for name, value in vars(payload).items() if name not in _PICKLES}
    return pack({"token": token, **header}, [getattr(payload, name) for name in _PICKLES])


def read_payload(data: bytes, handlers: bytes | None = None) -> TaskPayload:
    """Read a payload; `handlers` of the pool are used if it has none."""
    header, (actor, entry_args, own) = unpack(data)
    del header["token"]
    header["sys_path"] = tuple(header["sys_path"])
    return TaskPayload(actor=actor or b"", entry_args=entry_args, handlers=own or handlers, **header)


log = logging.getLogger("trimtab.controller")

_ERRORS: dict[str, type[errors.TrimtabError]] = {
    error.__name__: error
    for error in (
        errors.InputError,
        errors.InfeasibleError,
        errors.UnreachableError,
        JournalVersionError,
        draining.UnknownNodeError,
        draining.HeadNodeError,
        draining.PastDeadlineError,
    )
}

Params = ParamSpec("Params")
Value = TypeVar("Value")


class ControllerSettings(Frozen):
    """Periods and limits of a controller, given by the client that creates it."""

    reconcile_s: float = 30.0  # between two searches for lost instructions
    poll_nodes_s: float = 0.3  # between two polls of Ray's nodes
    worker_start_s: float = 300.0  # for a warm worker to start: preloading modules can take minutes on slow disks
    metric_alias: str = ""  # counters and histograms of tasks are exported under this prefix too

    RANGES: ClassVar[Ranges] = dict.fromkeys(("reconcile_s", "poll_nodes_s", "worker_start_s"), (0.001, LONGEST_S))

    def __post_init__(self) -> None:
        check_fields(self, "the controller's settings")


class TaskSnapshot(Frozen):
    """The state of a task, as the controller reports it."""

    id: str
    pool: str
    state: TaskState
    reason: Reason
    priority: float
    labels: Labels
    attempt: int
    evictions: int
    how: str  # what it runs in (warm host, actor), and why
    members: tuple[TaskWorker, ...] = ()
    handles: tuple[Any, ...] = ()  # Ray handles of the members; None: to be looked up by name
    result: bytes | None = None  # packed, of an ended task, if it was requested


class ClientUpdate(Frozen):
    """Changes since a client's last poll: all nodes, and its tasks that are in another state."""

    version: int  # of the nodes; passed to the next poll
    nodes: tuple[NodeView, ...]  # present ones, in node order
    change: int  # number of the last node change included
    tasks: tuple[TaskSnapshot, ...] = ()


def controller_name(name: str) -> str:
    return f"trimtab:{name}:controller"


def controllers(ray: Any) -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"].split(":") for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(parts[1] for parts in names if len(parts) == 3 and parts[2] == "controller")


def rpc_method(method: Callable[Params, Awaitable[Value]]) -> Callable[Params, Awaitable[tuple[str, Any]]]:
    """Decorator of an RPC: returns ("value", result) or ("error", details)."""

    @functools.wraps(method)
    async def answer(*args: Params.args, **kwargs: Params.kwargs) -> tuple[str, Any]:
        try:
            return "value", await method(*args, **kwargs)
        except errors.TrimtabError as fault:
            names = [kind.__name__ for kind in type(fault).__mro__]
            return "error", (names, fault.what, fault.where, fault.hint)
        except Exception as fault:
            log.exception("an RPC failed")
            text = f"{type(fault).__name__}: {fault}"
            return "error", (["TrimtabError"], f"the controller failed: {text}", None, "its log has the traceback")

    return answer


def value_of(answer: tuple[str, Any]) -> Any:
    """The result of an RPC, or its error raised."""
    word, content = answer
    if word == "value":
        return content
    names, what, where, hint = content
    kind = next((_ERRORS[name] for name in names if name in _ERRORS), errors.TrimtabError)
    raise kind(what, where=where, hint=hint)
