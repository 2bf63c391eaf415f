"""Plain Ray actors in a slot, for tasks that a host cannot serve.

The user's class is unpickled by a warm host on the member's node, which makes the actor, gives it the same control
door as a host has, and is thrown away. So an actor is told, saved and ended like any host, and the controller never
loads user code. Members start it.
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

from trimtab.runtime.workers import environments
from trimtab.runtime.workers.worker_process import (
    ControlServer,
    HostedObject,
    WorkerIdentity,
    WorkerStartSpec,
    born,
    frame,
    make_run_dir,
    read_frame,
    said,
    identity_variables,
    set_environment,
    user_trace,
    write_whole,
)

_NAME_WAIT_S = 10.0  # for an actor that is dying to give its name up
_OWN_OPTIONS = (  # set here, by what the slot holds and the pool decides
    "num_cpus", "num_gpus", "memory", "resources", "lifetime", "max_restarts", "name", "namespace", "get_if_exists",
    "scheduling_strategy", "placement_group", "placement_group_bundle_index", "placement_group_capture_child_tasks",
)  # fmt: skip

_hosted_objects: dict[int, HostedObject] = {}  # by the actor's object; in the actor's process there is one


def actor_options(asked: dict[str, Any], identity: WorkerIdentity, runtime_env: str, mark: str) -> dict[str, Any]:
    """What of the user's options is Ray's to honour, and who the actor is, for its constructor to read."""
    user_options = {name: value for name, value in asked.items() if name not in _OWN_OPTIONS}
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
    """Runs in a host on the member's node: its facts once it is constructed, or why not, if that is fatal, a trace."""
    import ray

    deadline = time.monotonic() + timeout_s
    where = make_run_dir(controller, node)
    note = where / f"making-{uuid.uuid4().hex[:8]}.json"
    write_whole(note, json.dumps(_creating_record(spec, name, namespace, node)).encode(), durable=False)
    actor = None
    try:
        set_environment(spec)
        try:
            class_, args, kwargs = pickle.loads(spec.actor)
        except BaseException as fault:
            return None, f"its class could not be unpickled: {said(fault)}", True, user_trace(fault)
        class_ = class_ if hasattr(class_, "options") else ray.remote(class_)
        try:
            actor = _create_named(class_.options(name=name, namespace=namespace, **options), args, kwargs, deadline)
        except Exception as fault:
            return None, f"Ray refused the actor: {said(fault)}", True, user_trace(fault)
        serve = actor.__ray_call__.options(name=f"{spec.identity.task}.start").remote(
            serve_in_actor, controller, node, spec, name, namespace
        )
        try:
            facts, fault_text, trace = ray.get(serve, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            return None, f"it was not constructed within {timeout_s:.3g} s", False, ""
        except ray.exceptions.RayActorError as fault:
            return None, *_death_reason(fault)
        fault_text = fault_text or _restore_async(where, facts, spec, deadline)
        if fault_text:
            return None, fault_text, True, trace
        if spec.entry is not None:
            actor.__ray_call__.options(name=f"{spec.identity.task}.{spec.entry}").remote(run_entry_in_actor)
            while not _request(where, facts, {"do": "probe"}, deadline)["entered"]:  # for this process ends now
                time.sleep(0.002)
        actor = None
        return facts, "", False, ""
    finally:
        if actor is not None:
            _end(actor)
        note.unlink(missing_ok=True)


def serve_in_actor(
    actor: Any, controller: str, node: str, spec: WorkerStartSpec, name: str, namespace: str
) -> tuple[dict[str, Any], str | None, str]:
    """Runs in the actor: opens its control door and restores its state; gives its facts, what went wrong, a trace."""
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
        return control.facts, f"its state could not be restored: {said(fault)}", user_trace(fault)
    return {**control.facts, "loop": hosted.loop is not None}, None, ""


def run_entry_in_actor(actor: Any) -> None:
    """Runs in the actor: the entry method, once all members are constructed; on the main thread unless it is async."""
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
    """Runs as a task: ends an actor that was never bound, by its name."""
    import ray

    with contextlib.suppress(ValueError):
        _end(ray.get_actor(name, namespace))


def _restore_async(where: Path, facts: dict[str, Any], spec: WorkerStartSpec, deadline: float) -> str | None:
    """Have an async actor restore its state, which it cannot do within a call."""
    if spec.state is None or not facts["loop"]:
        return None
    answer = _request(where, facts, {"do": "restore"}, deadline)
    return None if answer["word"] == "returned" else f"its state could not be restored: {answer.get('note', '')}"


def _request(where: Path, facts: dict[str, Any], request: dict[str, Any], deadline: float) -> dict[str, Any]:
    """One question to the actor's control door."""
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(max(0.001, deadline - time.monotonic()))
        control.connect(str(where / f"{facts['pid']}.sock"))
        control.sendall(frame(request))
        return read_frame(control.makefile("rb"))[0]


def _create_named(class_: Any, args: Any, kwargs: Any, deadline: float) -> Any:
    """The actor; its name may still be held by one that is dying."""
    until = min(deadline, time.monotonic() + _NAME_WAIT_S)
    while time.monotonic() < until:
        with contextlib.suppress(ValueError):
            return class_.remote(*args, **kwargs)
        time.sleep(0.05)
    return class_.remote(*args, **kwargs)


def _end(actor: Any) -> None:
    """Kill an actor and wait until Ray says that it is dead."""
    import ray

    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(actor.__ray_ready__.remote(), timeout=10.0)


def _death_reason(fault: Any) -> tuple[str, bool, str]:
    """What Ray tells of an actor that did not come to life, whether it would happen again, and its traceback."""
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
