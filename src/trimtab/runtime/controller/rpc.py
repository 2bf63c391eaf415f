"""What goes through the controller's doors: answers, with errors as values, and what is said of a task.

Ray wraps what an actor raises; errors of ours travel as values instead, so that they arrive as themselves.
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
from trimtab.runtime.workers.task_workers import TaskWorker

log = logging.getLogger("trimtab.controller")

NAMESPACE = "trimtab"  # of Ray
_ERRORS: dict[str, type[errors.TrimtabError]] = {
    one.__name__: one
    for one in (
        errors.InputError,
        errors.InfeasibleError,
        errors.UnreachableError,
        draining.UnknownNodeError,
        draining.HeadNodeError,
        draining.PastDeadlineError,
    )
}

Params = ParamSpec("Params")
Value = TypeVar("Value")


@dataclass(frozen=True)
class TaskSnapshot:
    """What the controller says of a task."""

    id: str
    pool: str
    state: TaskState
    reason: Reason
    priority: float
    labels: Labels
    attempt: int
    evictions: int
    how: str  # what it runs in, and why
    members: tuple[TaskWorker, ...] = ()
    handles: tuple[Any, ...] = ()  # Ray's, of those members; None where a client has to look it up by its name


@dataclass(frozen=True)
class ClientUpdate:
    """What changed since a client asked last: nodes, and those of its tasks that are in another state."""

    version: int  # of the nodes; to be given with the next ask
    nodes: tuple[NodeView, ...]  # that are there, in node order
    change: int  # number of the last Change that the nodes include
    tasks: tuple[TaskSnapshot, ...] = ()


def controller_name(name: str) -> str:
    """The name of a controller's actor."""
    return f"trimtab:{name}:controller"


def controllers(ray: Any) -> list[str]:
    """The names of all controllers of a Ray."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"].split(":") for one in actors if one["namespace"] == NAMESPACE]
    return sorted(parts[1] for parts in names if len(parts) == 3 and parts[2] == "controller")


def rpc_method(method: Callable[Params, Awaitable[Value]]) -> Callable[Params, Awaitable[tuple[str, Any]]]:
    """A method that clients call: its value or its error, as a value."""

    @functools.wraps(method)
    async def answer(*args: Params.args, **kwargs: Params.kwargs) -> tuple[str, Any]:
        try:
            return "value", await method(*args, **kwargs)
        except errors.TrimtabError as fault:
            names = [kind.__name__ for kind in type(fault).__mro__]
            return "error", (names, fault.what, fault.where, fault.hint)
        except Exception as fault:
            log.exception("a call failed")
            said = f"{type(fault).__name__}: {fault}"
            return "error", (["TrimtabError"], f"the controller failed: {said}", None, "its log has the traceback")

    return answer


def value_of(answer: tuple[str, Any]) -> Any:
    """The value of an answer, or its error raised."""
    word, content = answer
    if word == "value":
        return content
    names, what, where, hint = content
    kind = next((_ERRORS[name] for name in names if name in _ERRORS), errors.TrimtabError)
    raise kind(what, where=where, hint=hint)
