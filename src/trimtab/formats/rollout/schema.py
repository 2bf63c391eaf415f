"""The pydantic schema of the `rollout:` section of a job file: keys, types, ranges, defaults."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trimtab.formats.job import Name, Seconds
from trimtab.formats.rollout.settings import DEFAULT_PORT, GatewayFileSettings

MAX_ENGINES = 4_096
MIN_S = 0.001  # of a timeout


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


def _words(value: Any) -> Any:
    """A command as a list or as a shell line."""
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as fault:
            raise ValueError(f"this command cannot be split into words: {fault}") from None
    if isinstance(value, list):
        return [str(word) if isinstance(word, int | float) and not isinstance(word, bool) else word for word in value]
    return value


def _texts(value: Any) -> Any:
    """Environment variables may be written as numbers."""
    if isinstance(value, Mapping):
        return {
            key: str(text) if isinstance(text, int | float) and not isinstance(text, bool) else text
            for key, text in value.items()
        }
    return value


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str | Mapping) else value


Whole = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1_000_000, strict=True)]
Amount = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1e6, allow_inf_nan=False)]
Version = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=2**53, strict=True)]
Words = Annotated[list[str], BeforeValidator(_words)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_several)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EngineSection(_Section):
    """An entry of `engines`."""

    url: str | None = None
    kind: Literal["vllm", "sglang", "llamacpp"] | None = None
    model: str | None = None
    command: Annotated[Words, Field(min_length=1)] | None = None
    arguments: Words = Field(default_factory=list)
    environment: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(default_factory=dict)
    count: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=MAX_ENGINES, strict=True)] | Literal["nodes"] = 1
    per_node: Whole | None = None
    name: Name | None = None
    limit: Whole = 64
    version: Version | None = None
    size: Whole = 1
    node: str = ""
    host: str = "127.0.0.1"
    folder: str = ""
    start_s: Annotated[Seconds, Field(ge=MIN_S)] = 600.0
    stop_s: Seconds = 30.0
    devices: Words = Field(default_factory=list)
    idle: Literal["sleep", "stop"] | None = None
    pool: Name | None = None
    nodes: Whole = 1
    gpus: Amount | None = None
    cpus: Amount | None = None
    memory_gb: Amount | None = None
    priority: Annotated[float, BeforeValidator(_no_bool), Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None


class RequestClassSection(_Section):
    """An entry of `classes`."""

    priority: Annotated[int, BeforeValidator(_no_bool), Field(ge=-1_000_000, le=1_000_000, strict=True)] = 0
    queue_limit: Whole = 10_000
    deadline_s: Seconds | None = 3_600.0


class GatewaySection(_Section):
    """The `gateway` section."""

    host: Name = GatewayFileSettings.host
    port: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65_535, strict=True)] = DEFAULT_PORT
    allowed_hosts: Names = ()
    worker_hosts: Names = GatewayFileSettings.worker_hosts
    open_requests: bool | None = None
    model_name: str = ""
    max_body_bytes: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=2**32, strict=True)] = (
        GatewayFileSettings.max_body_bytes
    )
    max_concurrent: Whole = GatewayFileSettings.max_concurrent
    default_max_tokens: Whole = GatewayFileSettings.default_max_tokens
    deadline_s: Annotated[Seconds, Field(ge=MIN_S)] | None = None
    stop_s: Seconds = GatewayFileSettings.stop_s


class RolloutSection(_Section):
    """The `rollout` section."""

    engines: Annotated[list[str | EngineSection], BeforeValidator(_several), Field(max_length=MAX_ENGINES)] = Field(
        default_factory=list
    )
    version: Version = 0
    classes: dict[Name, RequestClassSection] = Field(default_factory=dict)
    ownership: dict[str, str] = Field(default_factory=dict)
    rules: dict[str, Any] = Field(default_factory=dict)
    gateway: GatewaySection = Field(default_factory=GatewaySection)
    follow_weights: Annotated[bool, Field(strict=True)] = False
    journal: str | None = None
    logs: str | None = None
    ray: Name | None = None
