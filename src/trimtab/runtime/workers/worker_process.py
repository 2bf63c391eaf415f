"""The worker process: a warm process that becomes a task's actor, with a control socket; or a plain Ray actor.

User code runs on the main thread, through Ray calls. Control requests (cancel, save, park ...) arrive on a unix socket
and run on their own threads, so that they get through while the main thread is busy. A record file beside the socket
identifies the task in the process, also when it no longer answers. No user object may be unpickled before the devices
are set. A process serves one task once. `TaskWorkerManager` starts and binds it; the node agent uses the control
socket.

For a task that a warm worker cannot serve, a warm worker on the task's node unpickles the user's class, creates a plain
Ray actor with the same control socket, and is discarded. So an actor is cancelled, saved and ended like any worker, and
the controller never loads user code.
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
import stat
import struct
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from trimtab.core.frozen import Frozen
from trimtab.runtime.procs.background import Background, RestartPolicy, describe
from trimtab.runtime.procs.processes import born, pid_namespace
from trimtab.runtime.rayapi import slot_view
from trimtab.runtime.rayapi.slot_view import BundleSlot
from trimtab.runtime.store.files import write_file
from trimtab.runtime.workers.environments import MARK, WarmWorkerKind, overridden

FRAME = struct.Struct("!IQ")  # sizes of the JSON head and of the body


class WorkerIdentity(Frozen):
    """The task, attempt and rank that a process serves."""

    task: str
    attempt: int
    rank: int
    world: int
    pool: str
    group: str = ""
    facts: str = ""  # JSON facts of the task, for recovery without a journal
    wide: bool = False  # the group has more bundles, which may hold actors it creates


class WorkerStartSpec(Frozen):
    """What a process needs to become a member of a task."""

    identity: WorkerIdentity
    devices: tuple[str, ...]  # GPU ids; empty: none
    actor: bytes  # pickle of (class, args, kwargs)
    entry: str | None
    entry_args: bytes | None
    handlers: bytes | None  # pickle of (preserver, restorer)
    state: bytes | str | None  # to restore: bytes, or a file path
    sys_path: tuple[str, ...]
    mark: str = ""  # in the environment of its children
    slot: BundleSlot | None = None  # shown to user code in a worker process; a plain actor sees it through Ray


def run_dir(controller: str, node: str) -> Path:
    """Directory of records and sockets of a controller on this node; short, as socket paths are limited.

    Includes the pid namespace, so that containers that share /tmp do not share it.
    """
    return Path(f"/tmp/trimtab-{os.getuid()}-{pid_namespace()}") / f"{node[:16]}-{zlib.crc32(controller.encode()):08x}"


def make_run_dir(controller: str, node: str) -> Path:
    """Create `run_dir`, accessible by this user only."""
    path = run_dir(controller, node)
    for each in (path.parent, path):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
        found = each.lstat()  # not following links: siblings of this directory are deleted
        if not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"{each} is a link or a file instead of a directory: remove it")
        if found.st_uid != os.getuid():
            raise PermissionError(f"{each} belongs to user {found.st_uid}, not to {os.getuid()}: remove it")
        if found.st_mode & 0o077:
            each.chmod(0o700)
    return path


def user_trace(fault: BaseException) -> str:
    """Traceback of an exception, without the leading frames of this file."""
    trace = fault.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(fault), fault, trace))


def frame(head: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return FRAME.pack(len(text), len(body)) + text + body


def read_frame(incoming: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read a message; EOFError if the peer is gone."""
    sizes = incoming.read(FRAME.size)
    if len(sizes) < FRAME.size:
        raise EOFError
    size, more = FRAME.unpack(sizes)
    return json.loads(incoming.read(size)), incoming.read(more)


class HostedObject:
    """The user's object in this process, its phase and outcome."""

    def __init__(self) -> None:
        self.identity: WorkerIdentity | None = None
        self.phase = "warming"  # warm, constructing, ready, running, ended; or failed
        self.object: Any = None  # None until constructed
        self.spec: WorkerStartSpec | None = None
        self.loop: asyncio.AbstractEventLoop | None = None  # of an async actor, for its coroutines
        self.outcome: tuple[bytes | None, str | None, str] | None = None  # value, error, traceback
        self.entered = False  # the call that runs the entry has arrived
        self.begun = threading.Event()  # all members are constructed: the entry may run
        self.ended = threading.Event()  # the outcome is set

    def restore(self) -> None:
        """Restore the saved state, by the method that saved it."""
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
        """Run the entry method once; later calls return the outcome."""
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
                self.outcome = (None, describe(fault), traceback.format_exc())
            self.phase = "ended"
            self.ended.set()
        return self.outcome

    def resolve(self, value: Any) -> Any:
        """Await a coroutine, on the actor's event loop if it has one; other values are returned."""
        if not inspect.iscoroutine(value):
            return value
        if self.loop is None:
            return asyncio.run(value)
        return asyncio.run_coroutine_threadsafe(value, self.loop).result()

    # ---- control requests, each on its own thread

    def cancel_or_drain(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call `drain(seconds)` if notice is given and the object has it, else `cancel()`."""
        drain = getattr(self.object, "drain", None) if request["notice"] else None
        if callable(drain):
            return self._call_hook(lambda: drain(request["seconds"]))
        cancel = getattr(self.object, "cancel", None)
        assert self.identity is not None
        return (
            self._call_hook(lambda: cancel(*self._cancel_args(cancel))) if callable(cancel) else {"word": "not called"}
        )

    def save(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Save the state, to `path` if given; else the bytes are returned."""
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
            return {"word": "raised", "note": describe(fault)}, b""
        if request["path"] is not None:
            with contextlib.suppress(OSError):  # disk full: the state is sent to the controller instead
                path = Path(request["path"])
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, state, sync=True)
                return {"word": "returned"}, b""
        return {"word": "returned"}, state

    def restore_on_loop(self) -> dict[str, Any]:
        """Restore from the control thread: `load` may have to run on the actor's event loop."""
        restored = self._call_hook(self.restore)
        self.phase = "ready" if restored["word"] == "returned" else "failed"
        return restored

    def call_hook(self, request: dict[str, Any]) -> dict[str, Any]:
        method = getattr(self.object, request["do"], None)
        return self._call_hook(method) if callable(method) else {"word": "not called"}

    def _call_hook(self, call: Callable[[], Any]) -> dict[str, Any]:
        try:
            self.resolve(call())
        except BaseException as fault:
            return {"word": "raised", "note": describe(fault)}
        return {"word": "returned"}

    def _cancel_args(self, cancel: Callable[..., Any]) -> tuple[str, ...]:
        """Arguments for `cancel()` or `cancel(task_id)`."""
        assert self.identity is not None
        try:
            inspect.signature(cancel).bind()
        except TypeError:
            return (self.identity.task,)
        except ValueError:
            pass
        return ()


class ControlServer:
    """Serves the control socket on threads, and writes the record of this process."""

    def __init__(self, where: Path, kind: str, actor: str, namespace: str, node: str, hosted: HostedObject) -> None:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # children are in this group, so that they can be found and ended
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
        return dict(self._facts)

    def write_record(self) -> None:
        """Write the record file, for recovery."""
        hosted = self.hosted
        if hosted.spec is not None:
            self._facts.update(devices=list(hosted.spec.devices), mark=hosted.spec.mark)
        identity = vars(hosted.identity) if hosted.identity else None
        record = json.dumps({**self._facts, "phase": hosted.phase, "identity": identity})
        write_file(self._path.with_suffix(".json"), record.encode())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            try:
                threading.Thread(target=self._serve, args=(connection,), name="trimtab-control", daemon=True).start()
            except RuntimeError:  # no thread available: the peer sees the connection closed
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
    """A warm process: bound to a task once, then discarded."""

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
        phase = self._hosted.phase
        return {**self._control.facts, "missing": self._missing, "kind": self._kind, "phase": phase}

    def bind(self, spec: WorkerStartSpec) -> tuple[str, str] | None:
        """Become a member: set devices, then construct the user's object. Returns (error, traceback) on failure."""
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
            return f"{stage}: {describe(fault)}", user_trace(fault)
        self._hosted.phase = "ready"
        return None

    def create_actor(self, *arguments: Any) -> tuple[dict[str, Any] | None, str, bool, str]:
        """Create a plain actor instead of becoming a member; see `create_actor`."""
        self._hosted.phase = "creating"
        self._control.write_record()
        drop_paths(set(self._kind.paths))
        return create_actor(*arguments)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._hosted.object, method)(*args, **kwargs)

    def run_entry(self) -> tuple[bytes | None, str | None, str]:
        return self._hosted.run_entry()


def _import(module: str) -> str | None:
    """Import a module; returns the error, if any."""
    try:
        importlib.import_module(module)
    except Exception as fault:
        return f"{module}: {describe(fault)}"
    return None


def set_environment(spec: WorkerStartSpec) -> None:
    """Set environment variables and module paths for user code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    os.environ[MARK] = spec.mark
    os.environ.update(identity_variables(spec.identity))
    add_paths(spec.sys_path)


def add_paths(paths: Collection[str]) -> None:
    sys.path.extend(path for path in paths if path not in sys.path)


def drop_paths(paths: Collection[str]) -> None:
    """Remove module search paths, and modules that were imported from them."""
    sys.path[:] = [path for path in sys.path if path not in paths]
    inside = tuple(os.path.join(path, "") for path in paths)
    for name, module in list(sys.modules.items()):
        if inside and str(getattr(module, "__file__", None) or "").startswith(inside):
            del sys.modules[name]


def identity_variables(identity: WorkerIdentity) -> dict[str, str]:
    return {
        "TRIMTAB_TASK": identity.task,
        "TRIMTAB_POOL": identity.pool,
        "TRIMTAB_RANK": str(identity.rank),
        "TRIMTAB_WORLD_SIZE": str(identity.world),
        "TRIMTAB_ATTEMPT": str(identity.attempt),
    }


_NAME_WAIT_S = 10.0  # for a dying actor to release its name
_OWN_OPTIONS = (  # set by the slot and the pool
    "num_cpus", "num_gpus", "memory", "resources", "lifetime", "max_restarts", "name", "namespace", "get_if_exists",
    "scheduling_strategy", "placement_group", "placement_group_bundle_index", "placement_group_capture_child_tasks",
)  # fmt: skip

_hosted_objects: dict[int, HostedObject] = {}  # by id of the actor object; one per actor process


def actor_options(options: dict[str, Any], identity: WorkerIdentity, runtime_env: str, mark: str) -> dict[str, Any]:
    """The user's options that Ray handles, and the worker identity as environment variables."""
    user_options = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    own_env = {"env_vars": {**identity_variables(identity), MARK: mark}}
    return {**user_options, "runtime_env": overridden(runtime_env, own_env)}


def create_actor(
    controller: str,
    node: str,
    spec: WorkerStartSpec,
    name: str,
    namespace: str,
    options: dict[str, Any],
    timeout_s: float,
) -> tuple[dict[str, Any] | None, str, bool, str]:
    """Runs in a warm worker: create the actor. Returns (facts or None, error, fatal, traceback)."""
    import ray

    deadline = time.monotonic() + timeout_s
    directory = make_run_dir(controller, node)
    record = directory / f"creating-{uuid.uuid4().hex[:8]}.json"
    creating = {
        "kind": "creating", "actor": name, "namespace": namespace, "node": node, "identity": vars(spec.identity),
        "creator": [os.getpid(), born(os.getpid())],
    }  # fmt: skip
    write_file(record, json.dumps(creating).encode())
    actor = None
    try:
        set_environment(spec)
        try:
            class_, args, kwargs = pickle.loads(spec.actor)
        except BaseException as fault:
            return None, f"its class could not be unpickled: {describe(fault)}", True, user_trace(fault)
        class_ = class_ if hasattr(class_, "options") else ray.remote(class_)
        try:
            actor = _create_named(class_.options(name=name, namespace=namespace, **options), args, kwargs, deadline)
        except Exception as fault:
            return None, f"Ray refused the actor: {describe(fault)}", True, user_trace(fault)
        serve = actor.__ray_call__.options(name=f"{spec.identity.task}.start").remote(
            serve_in_actor, controller, node, spec, name, namespace
        )
        try:
            facts, fault_text, trace = ray.get(serve, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            return None, f"it was not constructed within {timeout_s:.3g} s", False, ""
        except ray.exceptions.RayActorError as fault:
            return None, *_death_reason(fault)
        fault_text = fault_text or _restore_async(directory, facts, spec, deadline)
        if fault_text:
            return None, fault_text, True, trace
        if spec.entry is not None:
            actor.__ray_call__.options(name=f"{spec.identity.task}.{spec.entry}").remote(run_entry_in_actor)
            while not _request(directory, facts, {"do": "probe"}, deadline)["entered"]:  # before this process is ended
                time.sleep(0.002)
        actor = None
        return facts, "", False, ""
    finally:
        if actor is not None:
            _end(actor)
        record.unlink(missing_ok=True)


def serve_in_actor(
    actor: Any, controller: str, node: str, spec: WorkerStartSpec, name: str, namespace: str
) -> tuple[dict[str, Any], str | None, str]:
    """Runs in the actor: open its control socket and restore its state. Returns (facts, error, traceback)."""
    hosted = HostedObject()
    hosted.identity, hosted.spec, hosted.object = spec.identity, spec, actor
    with contextlib.suppress(RuntimeError):
        hosted.loop = asyncio.get_running_loop()
    _hosted_objects[id(actor)] = hosted
    hosted.phase = "constructing"
    control = ControlServer(make_run_dir(controller, node), "actor", name, namespace, node, hosted)
    try:
        if hosted.loop is None or spec.state is None:
            hosted.restore()
            hosted.phase = "ready"
    except BaseException as fault:
        return control.facts, f"its state could not be restored: {describe(fault)}", user_trace(fault)
    return {**control.facts, "loop": hosted.loop is not None}, None, ""


def run_entry_in_actor(actor: Any) -> None:
    """Runs in the actor: call the entry method once all members are constructed; in a thread if the actor is async."""
    hosted = _hosted_objects[id(actor)]
    hosted.entered = True

    def run() -> None:
        hosted.begun.wait()
        hosted.run_entry()

    if hosted.loop is None:
        run()
    else:
        threading.Thread(target=run, name="trimtab-entry", daemon=True).start()


def end_named(name: str, namespace: str) -> None:
    """Runs as a Ray task: end an actor by name that was never bound."""
    import ray

    with contextlib.suppress(ValueError):
        _end(ray.get_actor(name, namespace))


def _restore_async(where: Path, facts: dict[str, Any], spec: WorkerStartSpec, deadline: float) -> str | None:
    """Restore the state of an async actor, which cannot do so within a call."""
    if spec.state is None or not facts["loop"]:
        return None
    answer = _request(where, facts, {"do": "restore"}, deadline)
    return None if answer["word"] == "returned" else f"its state could not be restored: {answer.get('note', '')}"


def _request(where: Path, facts: dict[str, Any], request: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Send a request to the actor's control socket."""
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(max(0.001, deadline - time.monotonic()))
        control.connect(str(where / f"{facts['pid']}.sock"))
        control.sendall(frame(request))
        return read_frame(control.makefile("rb"))[0]


def _create_named(class_: Any, args: Any, kwargs: Any, deadline: float) -> Any:
    """Create the actor; retries while a dying actor holds its name."""
    until = min(deadline, time.monotonic() + _NAME_WAIT_S)
    while time.monotonic() < until:
        with contextlib.suppress(ValueError):
            return class_.remote(*args, **kwargs)
        time.sleep(0.05)
    return class_.remote(*args, **kwargs)


def _end(actor: Any) -> None:
    """Kill an actor and wait until Ray reports it dead."""
    import ray

    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(actor.__ray_ready__.remote(), timeout=10.0)


def _death_reason(fault: Any) -> tuple[str, bool, str]:
    """Why an actor failed to start, whether that is fatal, and its traceback."""
    lines = str(fault).strip().splitlines()
    if "creation task" not in lines[0]:
        return f"its process died while it was constructed: {lines[0]}", False, ""
    frames = [index for index, line in enumerate(lines) if line.startswith("  File ")]
    raised = [line for line in lines[frames[-1] if frames else 1 :] if line.strip() and not line.startswith(" ")]
    return f"its constructor raised: {raised[0].strip() if raised else lines[-1].strip()}", True, "\n".join(lines[1:])
