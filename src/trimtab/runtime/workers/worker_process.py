"""What runs inside a member's process: the warm host that becomes a task's actor, and the control door beside it.

User code runs on the process's main thread, through Ray's calls; control (cancel, save, park ...) comes through a unix
socket, on threads of its own, so that it gets through while the main thread is busy. A record beside the socket says
who is in the process, also when it can no longer answer. Nothing of the user is unpickled before devices are set. A
host serves one task once. Members start hosts and bind them; the warden of the node talks to the control door.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pickle
import socket
import stat as stat_module
import struct
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trimtab.runtime.procs.background import Background, RestartPolicy
from trimtab.runtime.workers import slot_view
from trimtab.runtime.workers.environments import MARK, WarmWorkerKind
from trimtab.runtime.workers.slot_view import BundleSlot

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FRAME = struct.Struct("!IQ")  # sizes of the JSON head and of the bytes that follow


@dataclass(frozen=True)
class WorkerIdentity:
    """Who is in a process: one member of one attempt of a task."""

    task: str
    attempt: int
    rank: int
    world: int
    pool: str
    group: str = ""
    facts: str = ""  # what is known of the task, as JSON: for those who find it when the journal is lost
    wide: bool = False  # the group has further bundles, where actors that it makes may be


@dataclass(frozen=True)
class WorkerStartSpec:
    """All that a process needs to become a member."""

    identity: WorkerIdentity
    devices: tuple[str, ...]  # GPU ids; empty: none
    actor: bytes  # pickle of (class, args, kwargs)
    entry: str | None
    entry_args: bytes | None
    handlers: bytes | None  # pickle of (preserver, restorer)
    state: bytes | str | None  # to be restored: the bytes, or the path of a file
    sys_path: tuple[str, ...]
    mark: str = ""  # in the environment of all that it starts
    slot: BundleSlot | None = None  # what a host tells user code of its bundle; a plain actor is told by Ray


def run_dir(controller: str, node: str) -> Path:
    """Where the records and sockets of a controller's processes on this node lie; short, for a socket's path is.

    Process numbers mean something only in their namespace, so containers that share /tmp do not share this.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return Path(f"/tmp/trimtab-{os.getuid()}-{namespace}") / f"{node[:16]}-{zlib.crc32(controller.encode()):08x}"


def make_run_dir(controller: str, node: str) -> Path:
    """That directory, made if need be; nobody else may look into it."""
    path = run_dir(controller, node)
    for each in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()  # not what a link points to: siblings of this directory are deleted
        if not stat_module.S_ISDIR(found.st_mode):
            raise PermissionError(f"{each} is a link or a file, where a directory of ours should be: remove it")
        if found.st_uid != os.getuid():
            raise PermissionError(f"{each} belongs to user {found.st_uid}, not to {os.getuid()}: have it removed")
        if found.st_mode & 0o077:
            each.chmod(0o700)
    return path


def born(pid: int) -> float | None:
    """When the process was started, in seconds since boot; None: there is none (or only its exit status is left)."""
    found = stat(pid)
    return found[2] if found else None


def stat(pid: int) -> tuple[int, int, float] | None:
    """Parent, group and start of a process; None: there is none, or only its exit status is left."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # plainly: a warden reads hundreds in a row
    except OSError:
        return None
    try:
        fields = os.read(file, 4096).rpartition(b")")[2].split()
    except OSError:
        return None
    finally:
        os.close(file)
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[2]), int(fields[19]) / _CLOCK_TICKS_PER_S)


def said(fault: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0]}" if lines else type(fault).__name__


def user_trace(fault: BaseException) -> str:
    """The traceback of an exception, from the first line that is not of this file."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(fault), fault, trace))


def frame(head: dict[str, Any], body: bytes = b"") -> bytes:
    """A message of the control door."""
    text = json.dumps(head).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def read_frame(incoming: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """The next message; EOFError where the other side is gone."""
    sizes = incoming.read(FRAME.size)
    if len(sizes) < FRAME.size:
        raise EOFError
    size, more = FRAME.unpack(sizes)
    return json.loads(incoming.read(size)), incoming.read(more)


class HostedObject:
    """The user's object in this process, and what came of it."""

    def __init__(self) -> None:
        self.identity: WorkerIdentity | None = None
        self.phase = "warming"  # warm, constructing, ready, running, ended; or failed
        self.object: Any = None  # None until constructed
        self.spec: WorkerStartSpec | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # of an async actor: where its coroutines run
        self.outcome: tuple[bytes | None, str | None, str] | None = None  # value, error, traceback
        self.entered = False  # the call that runs the entry is here
        self.begun = threading.Event()  # all members are constructed: the entry may run
        self.ended = threading.Event()  # the outcome is there

    def restore(self) -> None:
        """Give the object its saved state back, by the way in which it was saved."""
        assert self.spec is not None
        state = self.spec.state
        if state is None:
            return
        way, saved = pickle.loads(Path(state).read_bytes() if isinstance(state, str) else state)
        if way == "own":
            self.resolve(self.object.load(saved))
        else:
            if self.spec.handlers is None:
                raise LookupError("its state was saved by a handler of the pool, which is no longer registered")
            self.resolve(pickle.loads(self.spec.handlers)[1](self.object, saved))

    def run_entry(self) -> tuple[bytes | None, str | None, str]:
        """Run the entry method, once; the outcome is kept."""
        import ray.cloudpickle as cloudpickle

        if self.outcome is None:
            assert self.spec is not None
            assert self.spec.entry is not None
            self.phase = "running"
            try:
                args, kwargs = pickle.loads(self.spec.entry_args) if self.spec.entry_args else ((), {})
                value = self.resolve(getattr(self.object, self.spec.entry)(*args, **kwargs))
                self.outcome = (cloudpickle.dumps(value), None, "")
            except BaseException as fault:
                self.outcome = (None, said(fault), traceback.format_exc())
            self.phase = "ended"
            self.ended.set()
        return self.outcome

    def resolve(self, value: Any) -> Any:
        """The value, or what a coroutine comes to: on the actor's own loop, where it has one."""
        if not inspect.iscoroutine(value):
            return value
        if self.loop is None:
            return asyncio.run(value)
        return asyncio.run_coroutine_threadsafe(value, self.loop).result()

    # ---- what the control door asks, each on a thread of its own

    def cancel_or_drain(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the task stop: `drain(seconds)` where it is given notice and has one, else `cancel()`."""
        drain = getattr(self.object, "drain", None) if request["notice"] else None
        if callable(drain):
            return self._call_hook(lambda: drain(request["seconds"]))
        cancel = getattr(self.object, "cancel", None)
        assert self.identity is not None
        return (
            self._call_hook(lambda: cancel(*self._cancel_args(cancel))) if callable(cancel) else {"word": "not called"}
        )

    def save(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Have the state saved, to a file where one is named; else the bytes go back."""
        import ray.cloudpickle as cloudpickle

        handlers = self.spec.handlers if self.spec else None
        own = getattr(self.object, "save", None)
        preserve: Callable[[], Any]
        if callable(own) and (handlers is None or callable(getattr(self.object, "load", None))):
            way, preserve = "own", own
        elif handlers is not None and self.object is not None:
            way, preserve = "pool", lambda: pickle.loads(handlers)[0](self.object)
        else:
            return {"word": "not called"}, b""
        try:
            state = cloudpickle.dumps((way, self.resolve(preserve())))
        except BaseException as fault:
            return {"word": "raised", "note": said(fault)}, b""
        if request["path"] is not None:
            with contextlib.suppress(OSError):  # no room there: the controller gets it instead, and says so
                write_whole(Path(request["path"]), state)
                return {"word": "returned"}, b""
        return {"word": "returned"}, state

    def restore_on_loop(self) -> dict[str, Any]:
        """Restore beside an async actor's loop, on which `load` may have to run."""
        restored = self._call_hook(self.restore)
        self.phase = "ready" if restored["word"] == "returned" else "failed"
        return restored

    def call_hook(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the devices given up (`park()`), or taken again (`unpark()`)."""
        method = getattr(self.object, request["do"], None)
        return self._call_hook(method) if callable(method) else {"word": "not called"}

    def _call_hook(self, call: Callable[[], Any]) -> dict[str, Any]:
        try:
            self.resolve(call())
        except BaseException as fault:
            return {"word": "raised", "note": said(fault)}
        return {"word": "returned"}

    def _cancel_args(self, cancel: Callable[..., Any]) -> tuple[str, ...]:
        """The arguments of `cancel()` or `cancel(task_id)`."""
        assert self.identity is not None
        try:
            inspect.signature(cancel).bind()
        except TypeError:
            return (self.identity.task,)
        except ValueError:
            pass
        return ()


class ControlServer:
    """Listens for the warden beside the main thread, and keeps the record of who is in this process."""

    def __init__(self, where: Path, kind: str, actor: str, namespace: str, node: str, hosted: HostedObject) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # whatever the user starts is of this group, so that it can be found and ended, too
        import ray

        self.hosted = hosted
        self._path = where / f"{os.getpid()}"
        self._facts = {
            "kind": kind, "actor": actor, "namespace": namespace, "node": node, "pid": os.getpid(),
            "born": born(os.getpid()), "devices": [], "mark": "", "id": ray.get_runtime_context().get_actor_id(),
        }  # fmt: skip
        self.write_record()
        listener = socket.socket(socket.AF_UNIX)
        self._path.with_suffix(".sock").unlink(missing_ok=True)
        listener.bind(str(self._path.with_suffix(".sock")))
        listener.listen(16)
        self._background = Background(RestartPolicy(max_failures=None, max_backoff_s=1.0))
        self._background.start_thread("control", lambda: self._accept(listener))

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of this process."""
        return dict(self._facts)

    def write_record(self) -> None:
        """Say who is in this process, for those who find it after everybody else has forgotten."""
        hosted = self.hosted
        if hosted.spec is not None:
            self._facts.update(devices=list(hosted.spec.devices), mark=hosted.spec.mark)
        identity = vars(hosted.identity) if hosted.identity else None
        write_whole(
            self._path.with_suffix(".json"),
            json.dumps({**self._facts, "phase": hosted.phase, "identity": identity}).encode(),
            durable=False,
        )

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            try:
                threading.Thread(target=self._serve, args=(connection,), name="trimtab-control", daemon=True).start()
            except RuntimeError:  # no thread to be had: who asks sees the end of the connection
                connection.close()
                raise

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection, connection.makefile("rb") as incoming:
            request, _ = read_frame(incoming)
            connection.sendall(frame(*self._answer(request)))

    def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        hosted = self.hosted
        if request["do"] == "probe":
            identity = vars(hosted.identity) if hosted.identity else None
            entered, ended = hosted.entered, hosted.outcome is not None
            return {"phase": hosted.phase, "identity": identity, "entered": entered, "outcome": ended}, b""
        if request["do"] == "begin":
            hosted.begun.set()
            return {}, b""
        if request["do"] == "restore":
            return hosted.restore_on_loop(), b""
        if request["do"] == "outcome":
            hosted.ended.wait()
            assert hosted.outcome is not None
            value, error, trace = hosted.outcome
            return {"error": error, "trace": trace}, value or b""
        if hosted.object is None:
            return {"word": "not called", "note": "not constructed yet"}, b""
        if request["do"] == "cancel":
            return hosted.cancel_or_drain(request), b""
        if request["do"] == "save":
            return hosted.save(request)
        return hosted.call_hook(request), b""


class WorkerProcess:
    """A warm process: bound to one task once, then thrown away."""

    def __init__(self, controller: str, node: str, actor: str, namespace: str, kind: WarmWorkerKind) -> None:
        self._hosted = HostedObject()
        self._control = ControlServer(make_run_dir(controller, node), "host", actor, namespace, node, self._hosted)
        self._kind = WarmWorkerKind(*kind)
        add_paths(self._kind.paths)
        self._missing = [missing for module in self._kind.preload if (missing := _import(module))]
        import ray.cloudpickle  # noqa: F401  (now rather than at the first save)

        self._hosted.phase = "warm"
        self._control.write_record()

    def ready(self) -> dict[str, Any]:
        """The facts of this process, once it is warm."""
        phase = self._hosted.phase
        return {**self._control.facts, "missing": self._missing, "kind": self._kind, "phase": phase}

    def bind(self, spec: WorkerStartSpec) -> tuple[str, str] | None:
        """Become the member: devices first, then the user's class. What went wrong in it, and the traceback."""
        if self._hosted.identity is not None:
            raise RuntimeError(f"already bound to {self._hosted.identity}")
        self._hosted.identity, self._hosted.spec, self._hosted.phase = spec.identity, spec, "constructing"
        self._control.write_record()
        drop_paths(set(self._kind.paths).difference(spec.sys_path))
        set_environment(spec)
        if spec.slot is not None:
            slot_view.show(spec.slot, spec.devices)
        slot_view.mark_children(spec.slot, spec.mark)
        stage = "its class could not be unpickled"
        try:
            kind, args, kwargs = pickle.loads(spec.actor)
            stage = "its constructor raised"
            object_ = kind(*args, **kwargs)
            self._hosted.object = object_
            stage = "its state could not be restored"
            self._hosted.restore()
        except BaseException as fault:
            self._hosted.phase = "failed"
            return f"{stage}: {said(fault)}", user_trace(fault)
        self._hosted.phase = "ready"
        return None

    def make(self, *arguments: Any) -> tuple[dict[str, Any] | None, str, bool, str]:
        """Make a plain actor, instead of becoming a member; see `plain.create_actor`."""
        from trimtab.runtime.workers import actor_worker as plain

        self._hosted.phase = "creating"
        self._control.write_record()
        drop_paths(set(self._kind.paths))
        return plain.create_actor(*arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's object."""
        return getattr(self._hosted.object, method)(*args, **kwargs)

    def run_entry(self) -> tuple[bytes | None, str | None, str]:
        """Run the entry method, or give the outcome again."""
        return self._hosted.run_entry()


def _import(module: str) -> str | None:
    """Import a module ahead; what went wrong, if anything did."""
    try:
        importlib.import_module(module)
    except Exception as fault:
        return f"{module}: {said(fault)}"
    return None


def set_environment(spec: WorkerStartSpec) -> None:
    """What the user's code finds in its environment."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    os.environ[MARK] = spec.mark
    os.environ.update(identity_variables(spec.identity))
    add_paths(spec.sys_path)


def add_paths(paths: Collection[str]) -> None:
    """Have a client's own modules found, after all others."""
    sys.path.extend(path for path in paths if path not in sys.path)


def drop_paths(paths: Collection[str]) -> None:
    """Have another client's modules not found any more, nor those of them that were imported ahead."""
    sys.path[:] = [path for path in sys.path if path not in paths]
    inside = tuple(os.path.join(path, "") for path in paths)
    for name, module in list(sys.modules.items()):
        if inside and str(getattr(module, "__file__", None) or "").startswith(inside):
            del sys.modules[name]


def identity_variables(identity: WorkerIdentity) -> dict[str, str]:
    """Who a member is, as environment variables."""
    return {
        "TRIMTAB_TASK": identity.task,
        "TRIMTAB_POOL": identity.pool,
        "TRIMTAB_RANK": str(identity.rank),
        "TRIMTAB_WORLD_SIZE": str(identity.world),
        "TRIMTAB_ATTEMPT": str(identity.attempt),
    }


def write_whole(path: Path, content: bytes, durable: bool = True) -> None:
    """A file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
