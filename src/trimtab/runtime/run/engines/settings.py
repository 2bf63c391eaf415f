"""Settings of a rollout component that is a pool of engines, checked before anything is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from trimtab.formats import sections
from trimtab.formats.rollout.elastic_config import SETTINGS
from trimtab.formats.rollout.schema import ResumeEvery
from trimtab.formats.sections import Count, FieldsOf, Priority, Seconds, Section, Switch, Text, refused
from trimtab.formats.yaml_text import Source
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import Owner, Ownership, RolloutRules
from trimtab.runtime.gateway.settings import GatewaySettings
from trimtab.runtime.rollout.launch.launcher import EngineCommand

RUN_RULES = ("min_workers", "max_workers", "capacity", "version", "ownership", "classes")
RULES = FieldsOf(RolloutRules, dict.fromkeys(RUN_RULES, ("is set by the run", "")), {"resume_every": ResumeEvery})
GATEWAY = FieldsOf(
    GatewaySettings,
    only=("host", "port", "token", "model_name", "max_concurrent", "default_max_tokens"),
    optional=("token",),
)


class EngineSettings(Section):
    """Settings of `EngineRollout`; seconds, unless stated otherwise. Either `engine` or `command` is given."""

    ask: Text
    engine: Text | None = None
    command: str | list[str] | Annotated[dict[str, Any], FieldsOf(EngineCommand, optional=("model",))] | None = None
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    ask_settings: dict[str, Any] = Field(default_factory=dict)
    gpus_each: Count = 1
    capacity: Count = 64  # concurrent requests, on each
    gateway: Switch | Annotated[dict[str, Any], GATEWAY] | None = False
    priority: Priority = 5.0  # of engines on slots: below that of the run's components
    notice_s: Seconds = 20.0  # for an engine's requests, when its slot is preempted
    room_s: Seconds = 5.0  # a slot that is not free after this is waited for in the queue
    start_s: Seconds = 120.0
    ready_s: Seconds = 30.0  # the component is ready when an engine serves, or after this
    seeds: Switch = True  # every request without a seed gets one from the run's
    elastic: Annotated[dict[str, Any], SETTINGS] | None = None
    rules: Annotated[dict[str, Any], RULES] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> EngineSettings:
        if (self.engine is None) == (self.command is None):
            hint = "either engine: package.module:Class, or command: a command line with {port}"
            raise refused("exactly one of engine and command is required", hint)
        return self

    def engine_command(self) -> EngineCommand | None:
        """How an engine process is started; None if engines are objects."""
        if self.command is None:
            return None
        stated = self.command if isinstance(self.command, dict) else {"command": self.command}
        return EngineCommand(**{"model": "", "start_s": self.start_s, **stated})

    def rollout_rules(self, min_workers: int, max_workers: int) -> RolloutRules:
        """Rules of the rollout pool."""
        # The pool refits workers that lack the current weights, also those that join later. Only a process is started
        # with them.
        owner = Owner.trimtab if self.command is None else Owner.trainer
        usual = {"monitor_s": 1.0, "drain_s": self.notice_s, "back_off_s": 0.5, "retries": 20}
        return RolloutRules(
            **{**usual, **self.rules},
            min_workers=min_workers,
            max_workers=max_workers,
            capacity=self.capacity,
            ownership=Ownership(refit=owner),
        )

    def elastic_config(self) -> ElasticConfig | None:
        """How the number of engines follows the load; None: all that the plan gives serve."""
        if self.elastic is None:
            return None
        return ElasticConfig(**{"requests_per_worker_capacity": self.capacity, **self.elastic})

    def gateway_settings(self) -> dict[str, Any] | None:
        """Settings of the gateway; None without one."""
        return self.gateway if isinstance(self.gateway, dict) else {} if self.gateway else None


def read_settings(given: Mapping[str, Any]) -> EngineSettings:
    """Settings from plain data. InputError names the one at fault."""
    source = Source("settings")
    settings = sections.read(EngineSettings, given, source)
    with source.located():
        settings.engine_command()
        settings.rollout_rules(0, 1)
        settings.elastic_config()
    return settings
