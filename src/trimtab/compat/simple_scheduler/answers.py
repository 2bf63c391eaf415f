"""Answers of `SimpleScheduler`: dictionaries, and handles that are called like those of Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.runtime.client.task import TaskError
from trimtab.runtime.controller.rpc import TaskSnapshot

# An agent name that differs from the task id travels with the task, so that every client sees it.
AGENT_LABEL = "trimtab/agent"

Answer = dict[str, Any]


class HostHandle:
    """Calls methods of an object in a warm worker process like those of a Ray actor: `handle.run.remote(...)`.

    It belongs to one run of the task: after an eviction or the end, calls raise Ray's error for a dead actor.
    """

    def __init__(self, host: Any, task: str) -> None:
        self._host = host
        self._task = task

    def __getattr__(self, method: str) -> HostMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return HostMethod(self._host, self._task, method)

    def __repr__(self) -> str:
        return f"HostHandle({self._task!r})"


class HostMethod:
    """One method of an object in a warm worker process."""

    def __init__(self, host: Any, task: str, method: str, options: Mapping[str, Any] | None = None) -> None:
        self._host = host
        self._task = task
        self._method = method
        self._options = {"name": f"{task}.{method}", **(options or {})}  # the name is for Ray's dashboard

    def options(self, **options: Any) -> HostMethod:
        """The same method with these options of Ray."""
        return HostMethod(self._host, self._task, self._method, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; returns an object ref."""
        return self._host.call.options(**self._options).remote(self._method, *args, **kwargs)


def handle_of(ray: Any, seen: TaskSnapshot) -> Any:
    """The handle of a task's object; None if it does not run."""
    if not seen.members:
        return None
    member = seen.members[0]
    try:
        actor = ray.get_actor(member.actor, namespace=member.namespace)
    except ValueError:  # gone since
        return None
    return HostHandle(actor, seen.id) if member.kind == "host" else actor


def name_of(seen: TaskSnapshot) -> str:
    """Agent name of a task."""
    return dict(seen.labels).get(AGENT_LABEL, seen.id)


def refused(fault: TrimtabError, facts: Answer) -> Answer:
    """An answer with `success: False` and the reason."""
    explanation = fault.explanation if isinstance(fault, TaskError) else None
    if explanation is not None:
        reason, code = explanation.reason.sentence, explanation.reason.code.value
    else:
        reason, code = "; ".join(fault.lines()), None
    return {"success": False, **facts, "agent": None, "reason": reason, "code": code, "error": reason}


def eviction_of(preemption: Mapping[str, Any]) -> Answer:
    """One preemption from the controller's status."""
    return {
        "task_id": preemption["victim"],
        "pool": preemption["victim_pool"],
        "by": preemption["by"],
        "reason": preemption["reason"]["sentence"],
        "code": preemption["reason"]["code"],
        "time": preemption["at"],
    }


def slot_stats(view: Mapping[str, Any]) -> Answer:
    slots = view["slots"]
    return {
        "total_pgs": slots["reserved"] + slots["dynamic"],
        "high_priority_pgs": slots["reserved"],
        "dynamic_pgs": slots["dynamic"],
        "allocated_pgs": slots["taken"],
        "available_pgs": slots["idle"],
        "total_reuse_count": view["reuse_count"],
        "total_created_count": view["made_count"],
        "total_destroyed_count": view["destroyed_count"],
        "by_status": {
            "allocated": slots["taken"],
            "available": slots["idle"],
            "creating": slots["making"],
            "removing": slots["removing"],
            "missing": slots["wanted"],
        },
    }
