"""Plain Ray actors in a slot, for tasks that a warm worker cannot serve.

A warm worker on the task's node unpickles the user's class, creates the actor with the same control socket as a worker
process, and is discarded. So an actor is cancelled, saved and ended like any worker, and the controller never loads
user code. `TaskWorkerManager` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from trimtab.runtime.procs.background import describe
from trimtab.runtime.procs.processes import born
from trimtab.runtime.store.files import write_file
from trimtab.runtime.workers import environments
from trimtab.runtime.workers.worker_process import (
    ControlServer,
    HostedObject,
    WorkerIdentity,
    WorkerStartSpec,
    frame,
    identity_variables,
    make_run_dir,
    read_frame,
    set_environment,
    user_trace,
)

_NAME_WAIT_S = 10.0  # for a dying actor to release its name
_OWN_OPTIONS = (  # set by the slot and the pool
    "num_cpus", "num_gpus", "memory", "resources", "lifetime", "max_restarts", "name", "namespace", "get_if_exists",
    "scheduling_strategy", "placement_group", "placement_group_bundle_index", "placement_group_capture_child_tasks",
)  # fmt: skip

_hosted_objects: dict[int, HostedObject] = {}  # by id of the actor object; one per actor process


def actor_options(options: dict[str, Any], identity: WorkerIdentity, runtime_env: str, mark: str) -> dict[str, Any]:
    """The user's options that Ray handles, and the worker identity as environment variables."""
    user_options = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    own_env = {"env_vars": {**identity_variables(identity), environments.MARK: mark}}
    return {**user_options, "runtime_env": environments.overridden(runtime_env, own_env)}


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
    write_file(record, json.dumps(_creating_record(spec, name, namespace, node)).encode())
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


def _creating_record(spec: WorkerStartSpec, name: str, namespace: str, node: str) -> dict[str, Any]:
    return {
        "kind": "creating", "actor": name, "namespace": namespace, "node": node, "identity": vars(spec.identity),
        "creator": [os.getpid(), born(os.getpid())],
    }  # fmt: skip
