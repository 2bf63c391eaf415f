"""Settings of a rollout component that is a pool of engines, checked before anything is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from trimtab.core.errors import InputError, nearest
from trimtab.formats.rollout.elastic_config import LONGEST_S, RANGES, check_ranges
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import Owner, Ownership, RolloutRules
from trimtab.runtime.rollout.launch.launcher import EngineCommand

T = TypeVar("T")
MIN_MONITOR_S = RANGES["monitoring_interval"][0]

RUN_RULES = (
    "min_workers",
    "max_workers",
    "capacity",
    "version",
    "ownership",
    "classes",
)  # set by the run, not by the job file


@dataclass(frozen=True)
class EngineSettings:
    """Settings of `EngineRollout`; seconds, unless stated otherwise. Either `engine` or `command` is given."""

    ask: str
    engine: str | None = None
    command: Any = None
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    ask_settings: Mapping[str, Any] = field(default_factory=dict)
    gpus_each: int = 1
    capacity: int = 64  # concurrent requests, on each
    gateway: Any = False
    priority: float = 5.0  # of engines on slots: below that of the run's components
    notice_s: float = 20.0  # for an engine's requests, when its slot is preempted
    room_s: float = 5.0  # a slot that is not free after this is waited for in the queue
    start_s: float = 120.0
    ready_s: float = 30.0  # the component is ready when an engine serves, or after this
    seeds: bool = True  # every request without a seed gets one from the run's
    elastic: Mapping[str, Any] | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.engine is None) == (self.command is None):
            raise InputError(
                "exactly one of engine and command is required",
                where="settings",
                hint="either engine: package.module:Class, or command: a command line with {port}",
            )
        for name in ("gpus_each", "capacity"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}", where=f"settings.{name}", hint="a whole number, 1 or more")
        for name in ("notice_s", "room_s", "start_s", "ready_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_S:
                hint = f"seconds, 0 or more, up to {LONGEST_S:g}"
                raise InputError(f"{name} is {value!r}", where=f"settings.{name}", hint=hint)
        for name in ("engine_settings", "ask_settings", "rules"):
            if not isinstance(getattr(self, name), Mapping):
                raise InputError(f"{name} is a section of keys", where=f"settings.{name}")
        self.gateway_settings()
        self.engine_command()
        self.rollout_rules(0, 1)
        self.elastic_config()

    def engine_command(self) -> EngineCommand | None:
        """How an engine process is started; None if engines are objects."""
        if self.command is None:
            return None
        where = "settings.command"
        written = {"command": self.command} if isinstance(self.command, str | list) else self.command
        given: dict[str, Any] = {"model": "", "start_s": float(self.start_s)}
        return EngineCommand(**{**given, **_section(written, EngineCommand, where)})

    def rollout_rules(self, min_workers: int, max_workers: int) -> RolloutRules:
        """Rules of the rollout pool."""
        given = _section(self.rules, RolloutRules, "settings.rules")
        for name, value in given.items():
            minimum: float = MIN_MONITOR_S if name == "monitor_s" else 0
            if name == "resume_every":
                continue  # RolloutRules says what it may be
            if type(value) in (int, float) and not minimum <= value <= LONGEST_S:
                hint = f"from {minimum:g} to {LONGEST_S:g}"
                raise InputError(f"{name} is {value:g}", where=f"settings.rules.{name}", hint=hint)
        for name in RUN_RULES:
            if name in given:
                raise InputError(f"{name} is set by the run", where=f"settings.rules.{name}")
        # The pool refits workers that lack the current weights, also those that join later. Only a process is started
        # with them.
        owner = Owner.trimtab if self.command is None else Owner.trainer
        usual = {"monitor_s": 1.0, "drain_s": float(self.notice_s), "back_off_s": 0.5, "retries": 20}
        return RolloutRules(
            **{**usual, **given},
            min_workers=min_workers,
            max_workers=max_workers,
            capacity=self.capacity,
            ownership=Ownership(refit=owner),
        )

    def elastic_config(self) -> ElasticConfig | None:
        """How the number of engines follows the load; None: all that the plan gives serve."""
        if self.elastic is None:
            return None
        given = _section(self.elastic, ElasticConfig, "settings.elastic")
        check_ranges(given, "settings.elastic")
        return ElasticConfig(**{"requests_per_worker_capacity": self.capacity, **given})

    def gateway_settings(self) -> dict[str, Any] | None:
        """Settings of the gateway; None without one."""
        if self.gateway is False or self.gateway is None:
            return None
        known = ("host", "port", "token", "model_name", "max_concurrent", "default_max_tokens")
        return {} if self.gateway is True else _checked(self.gateway, known, "settings.gateway")


def _section(given: Any, kind: type, where: str) -> dict[str, Any]:
    return _checked(given, tuple(setting.name for setting in fields(kind)), where)


def _checked(given: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError("a section of keys is expected", where=where)
    for key in given:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near}?" if near else f"known keys here: {', '.join(known)}"
            raise InputError(f"unknown key {key}", where=f"{where}.{key}", hint=hint)
    return dict(given)
