"""What comes out of `SimpleScheduler`: dictionaries, and handles that are called like those of Ray's actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import TrimtabError
from trimtab.runtime.client.task import TaskError
from trimtab.runtime.controller.rpc import TaskSnapshot

# The name of an agent that is not called like its task travels with the task, so that every client sees it.
AGENT_LABEL = "trimtab/agent"

Answer = dict[str, Any]


class HostHandle:
    """Calls the methods of an object in a warm host as one calls those of a Ray actor: `handle.run.remote(...)`.

    It is of one run of the task: once the task was evicted or has ended, calls end in Ray's error for a dead actor.
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
    """One method of an object in a warm host."""

    def __init__(self, host: Any, task: str, method: str, options: Mapping[str, Any] | None = None) -> None:
        self._host = host
        self._task = task
        self._method = method
        self._options = {"name": f"{task}.{method}", **(options or {})}  # the name is for Ray's dashboard

    def options(self, **options: Any) -> HostMethod:
        """The same method, called with these options of Ray."""
        return HostMethod(self._host, self._task, self._method, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; what comes back is for `ray.get`."""
        return self._host.call.options(**self._options).remote(self._method, *args, **kwargs)


def handle_of(ray: Any, seen: TaskSnapshot) -> Any:
    """What calls the task's object; None where it does not run."""
    if not seen.members:
        return None
    member = seen.members[0]
    try:
        actor = ray.get_actor(member.actor, namespace=member.namespace)
    except ValueError:  # gone since
        return None
    return HostHandle(actor, seen.id) if member.kind == "host" else actor


def name_of(seen: TaskSnapshot) -> str:
    """What a task's agent is called."""
    return dict(seen.labels).get(AGENT_LABEL, seen.id)


def refused(fault: TrimtabError, facts: Answer) -> Answer:
    """An answer that says no, and why."""
    explanation = fault.explanation if isinstance(fault, TaskError) else None
    if explanation is not None:
        reason, code = explanation.reason.sentence, explanation.reason.code.value
    else:
        reason, code = "; ".join(fault.lines()), None
    return {"success": False, **facts, "agent": None, "reason": reason, "code": code, "error": reason}


def eviction_of(one: Mapping[str, Any]) -> Answer:
    """One preemption, as the controller's books have it."""
    return {
        "task_id": one["victim"],
        "pool": one["victim_pool"],
        "by": one["by"],
        "reason": one["reason"]["sentence"],
        "code": one["reason"]["code"],
        "time": one["at"],
    }


def slot_stats(view: Mapping[str, Any]) -> Answer:
    """A pool's slots, which are placement groups."""
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
