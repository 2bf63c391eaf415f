"""Input of `SimpleScheduler`, checked and converted for the native API; memory is in MB.

Errors raise InputError before the controller is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.errors import InputError, nearest
from trimtab.core.resources import Resources
from trimtab.runtime.client.packing import class_of

MB = 2**20

_PG_KEYS = ("enable", "high_priority_pg_specs", "enable_dynamic_pgs", "max_dynamic_pgs", "enable_pg_reuse")

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class SimpleTaskSpec:
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
    config = mapping_of("pg_pool_config", config)
    for key in config:
        if key not in _PG_KEYS:
            near = nearest(str(key), _PG_KEYS)
            hint = f"did you mean {near}?" if near else f"keys: {', '.join(_PG_KEYS)}"
            raise InputError(f"{key} is no key of it", where=where, hint=hint)
    flags = {key: config.get(key, True) for key in ("enable", "enable_dynamic_pgs", "enable_pg_reuse")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{key} is true or false, not {value!r}", where=where)
    if not flags["enable"]:
        return {}
    specs = config.get("high_priority_pg_specs") or ()
    if isinstance(specs, (str, Mapping)) or not isinstance(specs, Sequence):
        raise InputError("high_priority_pg_specs is a list of {resource: amount}", where=where)
    limit = config.get("max_dynamic_pgs")
    return {
        "reserved": [in_bytes(spec, f"{where}: high_priority_pg_specs") for spec in specs],
        "dynamic": flags["enable_dynamic_pgs"],
        "dynamic_limit": None if limit is None else whole_of("max_dynamic_pgs", limit),
        "reuse": flags["enable_pg_reuse"],
    }


def in_bytes(resources: Any, where: str) -> dict[str, float]:
    """Amounts as pools count them: memory, given in MB, in bytes."""
    if not isinstance(resources, Mapping):
        raise InputError(f"resources are {{name: amount}}, not {resources!r}", where=where)
    Resources.of(resources, where=where)  # refuses invalid amounts before they are multiplied
    return {name: amount * MB if name == "memory" else amount for name, amount in resources.items()}


def in_mb(resources: Mapping[str, float]) -> dict[str, float]:
    """Amounts with memory in MB."""
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
