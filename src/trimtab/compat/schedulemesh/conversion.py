"""Input of `SimpleScheduler`, converted for the native API, and its answers: dictionaries and handles; memory in MB.

Errors raise InputError before the controller is called. Handles are called like those of Ray actors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.core.frozen import Frozen
from trimtab.core.numbers import COUNT
from trimtab.core.resources import Resources
from trimtab.formats import sections
from trimtab.formats.sections import Section, Switch, Within
from trimtab.formats.yaml_text import Source
from trimtab.runtime.client.task import TaskError, class_of
from trimtab.runtime.controller.rpc import TaskSnapshot

MB = 2**20

Amounts = Mapping[str, float]


class PgPoolSection(Section):
    """A `pg_pool_config`."""

    enable: Switch = True
    high_priority_pg_specs: list[dict[str, Any]] | None = None
    enable_dynamic_pgs: Switch = True
    max_dynamic_pgs: Annotated[int, Within(*COUNT)] | None = None
    enable_pg_reuse: Switch = True


class SimpleTaskSpec(Frozen):
    """A task for `submit_spec`: the arguments of `submit`, as one object."""

    task_id: str
    pool: str
    actor_class: Any
    resources: Amounts
    priority: float = 5.0
    labels: Mapping[str, str] | None = None
    actor_args: Sequence[Any] | None = None
    actor_kwargs: Mapping[str, Any] | None = None
    agent_name: str | None = None
    estimated_duration: float = 0.0
    auto_register: bool = True
    ray_options: Mapping[str, Any] | None = None


def slots_of(config: Any, where: str) -> dict[str, Any]:
    """A `pg_pool_config` as arguments of `Session.pool`."""
    section = sections.read(PgPoolSection, config, Source(where), "pg_pool_config")
    if not section.enable:
        return {}
    specs = section.high_priority_pg_specs or ()
    return {
        "reserved": [in_bytes(spec, f"{where}: high_priority_pg_specs") for spec in specs],
        "dynamic": section.enable_dynamic_pgs,
        "dynamic_limit": section.max_dynamic_pgs,
        "reuse": section.enable_pg_reuse,
    }


def in_bytes(resources: Any, where: str) -> dict[str, float]:
    """Amounts as pools count them: memory, given in MB, in bytes."""
    if not isinstance(resources, Mapping):
        raise InputError(f"resources are {{name: amount}}, not {resources!r}", where=where)
    Resources.of(resources, where=where)  # refuses invalid amounts before they are multiplied
    return {name: amount * MB if name == "memory" else amount for name, amount in resources.items()}


def in_mb(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount / MB if name == "memory" else amount for name, amount in resources.items()}


def arguments_of(spec: SimpleTaskSpec, agent: str, labels: dict[str, str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The constructor's arguments, with the agent's name and labels if it takes them and they are not given."""
    where = f"task {spec.task_id}"
    if isinstance(spec.actor_args, str) or not isinstance(spec.actor_args or (), Sequence):
        raise InputError(f"actor_args is a list, not {spec.actor_args!r}", where=where)
    args, kwargs = tuple(spec.actor_args or ()), dict(mapping_of("actor_kwargs", spec.actor_kwargs))
    user_class = class_of(spec.actor_class, where)
    try:
        signature = inspect.signature(user_class)
    except (TypeError, ValueError):  # a C class without a signature
        return args, kwargs
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
        for name, value in (("name", agent), ("labels", labels)):
            parameter = signature.parameters.get(name)
            by_word = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            if parameter is not None and parameter.kind in by_word and name not in given:
                kwargs[name] = value
        signature.bind(*args, **kwargs)
    except TypeError as fault:
        raise InputError(f"{user_class.__name__} cannot be made: {fault}", where=where) from None
    return args, kwargs


def mapping_of(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise InputError(f"{what} must be a dictionary, not {value!r}")
    return value or {}


def word_of(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} must be a word, not {value!r}")
    return value


def whole_of(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{what} must be a whole number, not {value!r}")
    return value


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
        return HostMethod(self._host, self._task, self._method, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
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


_NO_SLOTS: Answer = {
    "slots": dict.fromkeys(("reserved", "dynamic", "taken", "idle", "making", "removing", "wanted"), 0),
    **dict.fromkeys(("reuse_count", "made_count", "destroyed_count"), 0),
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


def total_of(stats: Iterable[Answer]) -> Answer:
    """Sums of the counts of several pools."""
    counted = [*stats]
    total: Answer = {key: sum(one[key] for one in counted) for key in slot_stats(_NO_SLOTS) if key != "by_status"}
    states = slot_stats(_NO_SLOTS)["by_status"]
    return {**total, "by_status": {state: sum(one["by_status"][state] for one in counted) for state in states}}
