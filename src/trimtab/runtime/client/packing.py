"""Packs what a client submits: a class, its arguments, and whether a warm worker can serve it.

All that can be checked before sending is checked here: that class and arguments can be pickled, that the entry method
exists, that the Ray options are not decided by the pool.
"""

from __future__ import annotations

import inspect
import json
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.core.errors import InputError, meant
from trimtab.runtime.procs.background import first_line
from trimtab.runtime.rayapi import slot_view
from trimtab.runtime.workers import environments
from trimtab.runtime.workers.task_types import TaskPayload

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
