"""Reads the `rollout:` section of a job file and the `elastic_config:` block beside it: engines, rules, scaling.

Both are checked before anything is started: an unknown key is refused with the nearest known one, a contradiction with
its line. Everything but the engines has a default. Other sections of a job file are ignored here.

Engines are attached by address, where they run already, or started from a command, several alike. Without
`elastic_config` all of them serve at any load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from trimtab.core.errors import InputError, nearest
from trimtab.formats import yaml_text
from trimtab.formats.job import first_fault, invalid_value
from trimtab.formats.rollout import elastic_config as elastic_config_file
from trimtab.formats.rollout.schema import (
    MAX_ENGINES,
    EngineSection,
    GatewaySection,
    RequestClassSection,
    RolloutSection,
)
from trimtab.formats.rollout.settings import AttachedEngine, GatewayFileSettings, RolloutSettings, StartedEngines, place
from trimtab.formats.run_section import unknown_key
from trimtab.machines.rollout.machine import STATIC
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import DEFAULT_CLASS, Owner, Ownership, RequestClass, RolloutRules, resume_bounds

SECTION = "rollout"
ACTION_MARGIN_S = 30.0
DEFAULT_LIMIT = 64
MAX_RULE = elastic_config_file.LONGEST_S
MINIMAL = f"{SECTION}: {{engines: ['http://127.0.0.1:8000']}}"

STATED_ELSEWHERE = {
    "min_workers": "elastic_config.min_workers",
    "max_workers": "elastic_config.max_workers",
    "capacity": "elastic_config.requests_per_worker_capacity",
    "monitor_s": "elastic_config.monitoring_interval",
    "drain_s": "elastic_config.drain_timeout",
    "version": f"{SECTION}.version",
    "classes": f"{SECTION}.classes",
    "ownership": f"{SECTION}.ownership",
}
"""Rules that have another key in the file, so that each is stated in one place."""


STARTED_ONLY = (
    "model",
    "command",
    "arguments",
    "environment",
    "count",
    "host",
    "folder",
    "start_s",
    "stop_s",
    "idle",
    "pool",
)
ATTACHED_ONLY = ("version", "node")
ON_A_POOL = ("nodes", "gpus", "cpus", "memory_gb", "priority", "per_node")


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> RolloutSettings:
    """The settings in a job file. InputError names file, line and key."""
    text = yaml_text.read_text(path)
    return from_text(text, path)


def from_text(text: str, path: Path) -> RolloutSettings:
    return from_data(yaml_text.parse(text, str(path)), text, path)


def from_data(data: Any, text: str, path: Path) -> RolloutSettings:
    """The settings in the data of a job file; the text is for the line numbers in errors."""
    name = str(path)
    if not isinstance(data, Mapping) or data.get(SECTION) is None:
        raise _no_section(data, name)
    try:
        section = RolloutSection.model_validate({SECTION: data[SECTION]}[SECTION])
    except ValidationError as error:
        raise _input_error(error, text, name) from None
    except RecursionError:
        raise InputError("the file is nested too deeply", where=name) from None
    at = _FileLocation(text, name)
    elastic = _elastic(data, at)
    engines = _engines(section, at)
    return RolloutSettings(
        path=path,
        engines=engines,
        rules=_rules(section, elastic, engines, at),
        elastic=elastic or STATIC,
        has_elastic_config=elastic is not None,
        gateway=GatewayFileSettings(**section.gateway.model_dump()),
        follow_weights=section.follow_weights,
        journal=None if section.journal is None else path.parent / section.journal,
        logs=None if section.logs is None else path.parent / section.logs,
        ray=section.ray,
        text=text,
    )


def _no_section(data: Any, name: str) -> InputError:
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        return InputError(f"a job file is a mapping of keys, this one holds {found}", where=name, hint=MINIMAL)
    near = nearest(SECTION, [str(key) for key in data if key != SECTION])
    meant = f"did you mean {SECTION} instead of {near}?" if near and SECTION not in data else f"add {MINIMAL}"
    return InputError(f"this file has no {SECTION} section", where=name, hint=meant)


@dataclass(frozen=True)
class _FileLocation:
    """File, text and name of a job file, for the locations in errors."""

    text: str
    name: str

    def error(self, what: str, *keys: str | int, hint: str | None = None) -> InputError:
        return InputError(what, where=self.place(*keys), hint=hint)

    def place(self, *keys: str | int) -> str:
        return place(self.text, self.name, keys)


def _elastic(data: Mapping[Any, Any], at: _FileLocation) -> ElasticConfig | None:
    block = elastic_config_file.BLOCK
    try:
        elastic = elastic_config_file.from_data(data, at.name)
        if elastic is not None:
            scaling.policy_of(elastic)
    except InputError as error:
        keys = [word for word in (error.where or "").rpartition(": ")[2].split(".") if word]
        error.where = at.place(*(keys or [block]))
        raise
    return elastic


def _engines(section: RolloutSection, at: _FileLocation) -> tuple[AttachedEngine | StartedEngines, ...]:
    found: list[AttachedEngine | StartedEngines] = []
    for index, item in enumerate(section.engines):
        entry = EngineSection(url=item) if isinstance(item, str) else item
        keys = (SECTION, "engines", index)
        found.append(_attached(entry, at, keys) if entry.url is not None else _started(entry, at, keys))
    _check_names(found, at)
    return tuple(found)


def _attached(entry: EngineSection, at: _FileLocation, keys: tuple[str | int, ...]) -> AttachedEngine:
    url = (entry.url or "").rstrip("/")
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path:
        meant = f"http://{parts.netloc}" if parts.netloc and not parts.scheme else "http://HOST:PORT"
        raise at.error(f"'{entry.url}' is no address of an engine", *keys, "url", hint=f"write {meant}")
    for key in (*STARTED_ONLY, *ON_A_POOL, "kind"):
        if key in entry.model_fields_set:
            raise at.error(
                f"{key} is for engines that trimtab starts, and this one has a url", *keys, key,
                hint="leave the url out, or this",
            )  # fmt: skip
    return AttachedEngine(
        url, entry.name, entry.limit, entry.version, entry.size, entry.node, tuple(entry.devices), at.place(*keys)
    )


def _started(entry: EngineSection, at: _FileLocation, keys: tuple[str | int, ...]) -> StartedEngines:
    if entry.kind is None and entry.command is None:
        raise at.error(
            "an engine has a url (it runs already), or a kind or command (trimtab starts it)",
            *keys,
            hint="url: http://127.0.0.1:8000, or kind: vllm with model: PATH",
        )
    if entry.model is None and (entry.command is None or "{model}" in " ".join(entry.command)):
        raise at.error("no model is given for the engine's command", *keys, hint="model: PATH or its name")
    for key in ATTACHED_ONLY:
        if key in entry.model_fields_set:
            raise at.error(f"{key} is for engines that run already", *keys, key, hint=f"{SECTION}.version, or leave it")
    if entry.pool is None:
        for key in ON_A_POOL:
            if key in entry.model_fields_set:
                raise at.error(
                    f"{key} applies to engines on a pool, and these are processes of this machine", *keys, key,
                    hint="add pool: NAME to start them on a pool",
                )  # fmt: skip
    follows = entry.count == "nodes"
    if follows and entry.pool is None:
        raise at.error("only engines of a pool follow its nodes", *keys, "count", hint="a number, or pool: NAME")
    if entry.per_node is not None and not follows:
        raise at.error("per_node goes with `count: nodes`", *keys, "per_node")
    if entry.pool is not None and entry.devices:
        raise at.error("devices are for processes of this machine; a pool gives its own", *keys, "devices")
    if isinstance(entry.count, int) and 0 < len(entry.devices) < entry.count:
        few = f"{entry.count} engines, and devices for {len(entry.devices)}"
        raise at.error(few, *keys, "devices", hint="one entry for each engine: ['0', '1'], or '0,1' for one with two")
    if entry.gpus is None and entry.size % entry.nodes:
        uneven = f"an engine of size {entry.size} over {entry.nodes} nodes"
        raise at.error(uneven, *keys, "nodes", hint="size: its ranks on all nodes; or gpus: on each node")
    can_sleep = entry.kind in ("vllm", "sglang") and entry.pool is None
    if entry.idle == "sleep" and not can_sleep:
        why = "a slot is only free when its engine has ended" if entry.pool is not None else "this engine cannot sleep"
        raise at.error(why, *keys, "idle", hint="idle: stop")
    return StartedEngines(
        name=entry.name or entry.kind or "engine",
        kind=entry.kind or "",
        model=entry.model or "",
        count=entry.count if isinstance(entry.count, int) else None,
        per_node=entry.per_node,
        command=tuple(entry.command or ()),
        arguments=tuple(entry.arguments),
        environment=dict(entry.environment),
        folder=entry.folder,
        host=entry.host,
        limit=entry.limit,
        size=entry.size,
        start_s=entry.start_s,
        stop_s=entry.stop_s,
        devices=tuple(entry.devices),
        sleeps=can_sleep if entry.idle is None else entry.idle == "sleep",
        pool=entry.pool,
        nodes=entry.nodes,
        gpus=entry.size / entry.nodes if entry.gpus is None else entry.gpus,
        cpus=0.0 if entry.cpus is None else entry.cpus,
        memory_gb=entry.memory_gb,
        priority=3.0 if entry.priority is None else entry.priority,
        where=at.place(*keys),
    )


def _check_names(found: Sequence[AttachedEngine | StartedEngines], at: _FileLocation) -> None:
    """Refuse duplicate worker names and duplicate engines."""
    seen: dict[str, int] = {}
    for index, engine in enumerate(found):
        names: Iterable[str] = (
            (engine.url, engine.label) if isinstance(engine, AttachedEngine) else engine.names or (engine.name,)
        )
        for name in dict.fromkeys(names):
            if name in seen:
                hint = "give one of them another name" if not name.startswith("http") else "leave one of them out"
                raise at.error(f"{name} is there twice", SECTION, "engines", index, hint=hint)
            seen[name] = index
    if sum(engine.count or 0 for engine in found) > MAX_ENGINES:
        raise at.error(f"more than {MAX_ENGINES} engines", SECTION, "engines")


def _rules(
    section: RolloutSection,
    elastic: ElasticConfig | None,
    engines: Sequence[AttachedEngine | StartedEngines],
    at: _FileLocation,
) -> RolloutRules:
    known = {field.name: field.type for field in fields(RolloutRules) if field.name not in STATED_ELSEWHERE}
    hints = get_type_hints(RolloutRules)
    for key, value in section.rules.items():
        keys = (SECTION, "rules", str(key))
        if key in STATED_ELSEWHERE:
            raise at.error(f"{key} is no key of rules", *keys, hint=f"use {STATED_ELSEWHERE[key]}")
        if key not in known:
            raise unknown_key(key, known, at.place(*keys))
        if key == "resume_every":
            _resume_every(value, at, keys)
            continue
        kind = int if hints[key] is int else float
        if isinstance(value, bool) or not isinstance(value, int | (float if kind is float else int)):
            raise at.error(f"{key} is not right: {value!r:.60}", *keys, hint="a number" if kind is float else "a count")
        if not 0 <= value <= MAX_RULE:
            raise at.error(f"{key} is {value:g}", *keys, hint=f"from 0 to {MAX_RULE:g}")
    values: dict[str, Any] = {
        **section.rules,
        "version": section.version,
        "classes": _classes(section),
        "ownership": _ownership(section, at),
    }
    if elastic is not None:
        values |= {
            "min_workers": elastic.min_workers, "max_workers": elastic.max_workers,
            "capacity": elastic.requests_per_worker_capacity, "monitor_s": elastic.monitoring_interval,
            "drain_s": elastic.drain_timeout,
        }  # fmt: skip
    else:
        values |= {
            "min_workers": 1,
            "max_workers": MAX_ENGINES,
            "capacity": min((engine.limit for engine in engines), default=DEFAULT_LIMIT),
        }
    # The machine's timeouts are longer than those of the launcher that starts and stops engines.
    for key in ("start_s", "stop_s"):
        if key not in section.rules:
            own = [getattr(item, key) + ACTION_MARGIN_S for item in engines if isinstance(item, StartedEngines)]
            values[key] = max([getattr(RolloutRules, key), *own])
    try:
        return RolloutRules(**values)
    except InputError as error:
        error.where = at.place(SECTION, "rules")
        raise


def _resume_every(value: Any, at: _FileLocation, keys: tuple[str, ...]) -> None:
    try:
        resume_bounds(value)
    except InputError as error:
        raise at.error(error.what, *keys, hint=error.hint) from None


def _classes(section: RolloutSection) -> tuple[RequestClass, ...]:
    """The classes of the file, and the default one for requests that name none."""
    stated = {name: RequestClass(name, **entry.model_dump()) for name, entry in section.classes.items()}
    return tuple({DEFAULT_CLASS: RequestClass(), **stated}.values())


def _ownership(section: RolloutSection, at: _FileLocation) -> Ownership:
    owners: dict[str, Owner] = {}
    verbs = [field.name for field in fields(Ownership)]
    for verb, owner in section.ownership.items():
        keys = (SECTION, "ownership", verb)
        if verb not in verbs:
            raise unknown_key(verb, verbs, at.place(*keys))
        if owner not in [member.value for member in Owner]:
            raise at.error(f"{verb} cannot be owned by {owner!r}", *keys, hint="trimtab or trainer")
        owners[verb] = Owner(owner)
    return Ownership(**owners)


# ---- errors ----------------------------------------------------------------------------------------------------------


def _input_error(error: ValidationError, text: str, name: str) -> InputError:
    fault, keys = first_fault(error, names=("EngineSection",))
    last = str(keys[-1]) if keys else SECTION
    where = place(text, name, (SECTION, *keys))
    if fault["type"] == "extra_forbidden":
        if last == elastic_config_file.BLOCK:
            return InputError(f"{last} does not belong here", where=where, hint=f"put it beside {SECTION}, not in it")
        return unknown_key(last, _known_keys(keys[:-1]), where)
    invalid = invalid_value(fault, last, where)
    given = fault.get("input")
    if last == "kind" and isinstance(given, str):
        near = nearest(given, ("vllm", "sglang", "llamacpp"))
        invalid.hint = f"did you mean {near}?" if near else f"{invalid.hint}; a `command` of your own needs no kind"
    return invalid


def _known_keys(keys: Sequence[str | int]) -> list[str]:
    """The known keys of a section."""
    models: dict[str, type[BaseModel]] = {
        "engines": EngineSection, "classes": RequestClassSection, "gateway": GatewaySection
    }  # fmt: skip
    model = models.get(str(keys[0]), RolloutSection) if keys else RolloutSection
    return list(model.model_fields)
