"""RPCs of the controller: results and errors as values, and the snapshot of a task.

Ray wraps exceptions that an actor raises; trimtab's errors are returned as values instead and raised by the client.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from trimtab.core import errors
from trimtab.core.reasons import Reason
from trimtab.model.nodes import NodeView
from trimtab.model.pool import Labels, TaskState
from trimtab.runtime.rayapi import draining
from trimtab.runtime.rayapi.connect import NAMESPACE
from trimtab.runtime.store.journal import JournalVersionError
from trimtab.runtime.workers.task_types import TaskWorker

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


@dataclass(frozen=True)
class TaskSnapshot:
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


@dataclass(frozen=True)
class ClientUpdate:
    """Changes since a client's last poll: all nodes, and its tasks that are in another state."""

    version: int  # of the nodes; passed to the next poll
    nodes: tuple[NodeView, ...]  # present ones, in node order
    change: int  # number of the last node change included
    tasks: tuple[TaskSnapshot, ...] = ()


def controller_name(name: str) -> str:
    """Ray actor name of a controller."""
    return f"trimtab:{name}:controller"


def controllers(ray: Any) -> list[str]:
    """Names of all controllers on this Ray cluster."""
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
