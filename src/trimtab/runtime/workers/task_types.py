"""Values and errors about the processes of a task, shared by client, controller and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimtab.core.errors import InputError
from trimtab.runtime.store.blobs import pack, state_name, unpack

ProcessKey = tuple[str, int, float]  # node, pid, start time


def check_controller_name(name: str) -> None:
    """Names of actors, placement groups and folders are made of it."""
    if not name or any(character in name for character in ":/\\\n\0"):
        raise InputError(f"{name!r} cannot be the name of a controller", hint="letters, digits, - . and _")


@dataclass(frozen=True)
class TaskPayload:
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


@dataclass(frozen=True)
class TaskWorker:
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


@dataclass(frozen=True)
class EntryOutcome:
    """Result of an entry method: a value or an error."""

    value: bytes | None = None  # cloudpickle of the return value
    error: str | None = None  # type and first line of the exception
    trace: str = ""  # traceback, for display


@dataclass(frozen=True)
class WorkerStopResult:
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
    header = {
        "token": token,
        "entry": payload.entry,
        "ray_options": payload.ray_options,
        "plain": payload.plain,
        "namespace": payload.namespace,
        "sys_path": list(payload.sys_path),
        "runtime_env": payload.runtime_env,
    }
    return pack(header, [payload.actor, payload.entry_args, payload.handlers])


def read_payload(data: bytes, handlers: bytes | None = None) -> TaskPayload:
    """Read a payload; `handlers` of the pool are used if it has none."""
    header, (actor, entry_args, own) = unpack(data)
    return TaskPayload(
        actor=actor or b"",
        entry=header["entry"],
        entry_args=entry_args,
        ray_options=header["ray_options"],
        plain=header["plain"],
        namespace=header["namespace"],
        handlers=own or handlers,
        sys_path=tuple(header["sys_path"]),
        runtime_env=header.get("runtime_env", ""),
    )
