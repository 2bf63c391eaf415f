"""The `rollout:` section of a job file: keys, types, ranges, defaults, and what does not go together.

Engines are attached by address, where they run already, or started from a command, several alike.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from trimtab.formats.rollout.elastic_config import SETTINGS
from trimtab.formats.sections import (
    Count,
    Elsewhere,
    FieldsOf,
    Gigabytes,
    Limit,
    Name,
    Names,
    OneOrMore,
    OpenSection,
    Priority,
    Seconds,
    Section,
    Shorthand,
    Switch,
    Within,
    checked_by,
    refused,
)
from trimtab.model.rollout import ELASTIC_RULES, Ownership, RequestClass, RolloutRules, resume_bounds

MAX_ENGINES = 4_096
DEFAULT_PORT = 8268

STATED_ELSEWHERE: Elsewhere = {
    key: ("is no key of rules", f"use {place}")
    for key, place in {
        **{rule: f"elastic_config.{name}" for rule, name in ELASTIC_RULES.items()},
        "version": "rollout.version",
        "classes": "rollout.classes",
        "ownership": "rollout.ownership",
    }.items()
}
"""Rules that have another key in the file, so that each is stated in one place."""

ON_A_POOL = ("nodes", "gpus", "cpus", "memory_gb", "priority", "per_node")


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _words(value: Any) -> Any:
    """A command as a list or as a shell line."""
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as fault:
            raise ValueError(f"this command cannot be split into words: {fault}") from None
    return value


def _address(url: str) -> str:
    stated, url = url, url.rstrip("/")
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path:
        meant = f"http://{parts.netloc}" if parts.netloc and not parts.scheme else "http://HOST:PORT"
        raise refused(f"'{stated}' is no address of an engine", f"write {meant}")
    return url


Word = Annotated[str, Shorthand(_text)]  # may be written as a number
Words = Annotated[tuple[Word, ...], Shorthand(_words)]
Version = Annotated[int, Within(0, 2**53)]
ResumeEvery = Annotated[float | str | None, checked_by(resume_bounds)]


class AttachedEngine(Section):
    """An engine that runs already and is attached by its address."""

    url: Annotated[str, AfterValidator(_address)]
    name: Name | None = None
    limit: Count = 64  # concurrent requests
    version: Version | None = None  # of its weights, as stated; None: as it reports, or the initial version
    size: Count = 1  # ranks of a collective
    node: str = ""
    devices: Words = ()  # its GPUs on this machine, if their memory is monitored

    @property
    def workers(self) -> int:
        return 1

    @property
    def label(self) -> str:
        return self.name or self.url.partition("://")[2]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.url, self.label)


class StartedEngines(Section):
    """Identical engines that trimtab starts and stops: as local processes, or on slots of a pool."""

    kind: Literal["vllm", "sglang", "llamacpp"] | None = None  # None: detected; the command is one's own
    model: str = ""
    command: Words | None = None  # None: the default of the kind
    arguments: Words = ()
    environment: dict[str, Word] = Field(default_factory=dict)
    count: Annotated[int, Within(1, MAX_ENGINES)] | Literal["nodes"] = 1  # nodes: as many as fit on the pool's nodes
    per_node: Count | None = None  # at most, with `count: nodes`
    name: Name | None = None
    limit: Count = 64  # concurrent requests
    size: Count = 1  # ranks of a collective
    host: str = "127.0.0.1"
    folder: str = ""
    start_s: Limit = 600.0
    stop_s: Seconds = 30.0
    devices: Words = ()  # values of CUDA_VISIBLE_DEVICES, one per engine
    idle: Literal["sleep", "stop"] | None = None  # when scaled down; None: asleep where the engine can sleep
    pool: Name | None = None  # None: processes of this machine
    nodes: Count = 1  # of each engine
    gpus: Gigabytes | None = None  # on each of its nodes, as the other resources; None: as many as `size` in all
    cpus: Gigabytes = 0.0
    memory_gb: Gigabytes = 0.0
    priority: Priority = 3.0

    ELSEWHERE: ClassVar[Elsewhere] = dict.fromkeys(
        ("url", "version", "node"), ("is for engines that run already", "rollout.version, or leave it")
    )

    @model_validator(mode="after")
    def _check(self) -> StartedEngines:
        if self.kind is None and not self.command:
            what = "an engine has a url (it runs already), or a kind or command (trimtab starts it)"
            raise refused(what, "url: http://127.0.0.1:8000, or kind: vllm with model: PATH")
        if not self.model and (not self.command or "{model}" in " ".join(self.command)):
            raise refused("no model is given for the engine's command", "model: PATH or its name")
        stated = [key for key in ON_A_POOL if key in self.model_fields_set and self.pool is None]
        if stated:
            what = "{key} applies to engines on a pool, and these are processes of this machine"
            raise refused(what, "add pool: NAME to start them on a pool", stated[0])
        if self.count == "nodes" and self.pool is None:
            raise refused("only engines of a pool follow its nodes", "a number, or pool: NAME", "count")
        if self.per_node is not None and self.count != "nodes":
            raise refused("per_node goes with `count: nodes`", None, "per_node")
        if self.pool is not None and self.devices:
            raise refused("devices are for processes of this machine; a pool gives its own", None, "devices")
        if 0 < len(self.devices) < (self.workers or 0):
            hint = "one entry for each engine: ['0', '1'], or '0,1' for one with two"
            raise refused(f"{self.count} engines, and devices for {len(self.devices)}", hint, "devices")
        if self.gpus is None and self.size % self.nodes:
            uneven = f"an engine of size {self.size} over {self.nodes} nodes"
            raise refused(uneven, "size: its ranks on all nodes; or gpus: on each node", "nodes")
        if self.idle == "sleep" and not self._can_sleep:
            what = "a slot is only free when its engine has ended" if self.pool else "this engine cannot sleep"
            raise refused(what, "idle: stop", "idle")
        return self

    @property
    def _can_sleep(self) -> bool:
        return self.kind in ("vllm", "sglang") and self.pool is None

    @property
    def sleeps(self) -> bool:
        """When scaled down; False: it is stopped."""
        return self._can_sleep if self.idle is None else self.idle == "sleep"

    @property
    def workers(self) -> int | None:
        """How many; None: as many as fit on the nodes."""
        return None if self.count == "nodes" else self.count

    @property
    def label(self) -> str:
        return self.name or self.kind or "engine"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its workers."""
        return tuple(f"{self.label}-{number}" for number in range(1, (self.workers or 0) + 1))

    @property
    def resources(self) -> dict[str, float]:
        """What each takes of a pool, on each of its nodes."""
        gpus = self.size / self.nodes if self.gpus is None else self.gpus
        amounts = {"gpu": gpus, "cpu": self.cpus, "memory": self.memory_gb * 1e9}
        return {name: amount for name, amount in amounts.items() if amount}


AttachedEngine.ELSEWHERE = {
    name: ("is for engines that trimtab starts, and this one has a url", "leave the url out, or this")
    for name in StartedEngines.model_fields
    if name not in AttachedEngine.model_fields
}


class GatewaySection(Section):
    """Address, access and limits of the gateway."""

    host: Name = "127.0.0.1"
    port: Annotated[int, Within(0, 65_535)] = DEFAULT_PORT  # 0: any free port
    processes: Annotated[int, Within(1, 64)] = 1  # 2 or more: the pool's own, and those that serve the port
    allowed_hosts: Names = ()  # accepted Host headers
    worker_hosts: Names = ("127.0.0.1", "localhost", "::1")  # hosts of workers that clients may add
    open_requests: Switch | None = None  # generation needs no token; None: on loopback only
    model_name: str = ""  # served model name; empty: the engines' name
    max_body_bytes: Annotated[int, Within(1, 2**32)] = 32 * 2**20
    max_concurrent: Count = 16_384  # concurrent requests
    default_max_tokens: Count = 1_024  # of a chat request that states none
    deadline_s: Limit | None = None  # of a request that states none; None: the deadline of its class
    head_s: Limit = 20.0  # for the head of a request to arrive
    body_s: Limit = 30.0  # for its body
    change_s: Limit = 60.0  # for changes of workers
    text_s: Limit = 30.0  # for a tokenizer to answer
    parse_s: Limit = 60.0  # for a large body to be parsed
    write_s: Limit = 60.0  # for a client to read
    keep_alive_s: Limit = 75.0  # for the next request on an idle connection
    stop_s: Seconds = 10.0  # grace period for running requests when the gateway stops
    abort_s: Limit = 5.0  # then, to answer them with what they have


def _form(value: Any) -> str:
    attached = isinstance(value, AttachedEngine) or (isinstance(value, Mapping) and "url" in value)
    return "<attached>" if attached else "<started>"


Engine = Annotated[
    Annotated[AttachedEngine, Tag("<attached>")] | Annotated[StartedEngines, Tag("<started>")],
    Discriminator(_form),
    Shorthand(lambda value: {"url": value} if isinstance(value, str) else value),
]
Rules = Annotated[
    dict[str, Any], FieldsOf(RolloutRules, elsewhere=STATED_ELSEWHERE, types={"resume_every": ResumeEvery})
]


class RolloutSection(Section):
    """The `rollout` section."""

    engines: Annotated[tuple[Engine, ...], Field(max_length=MAX_ENGINES), OneOrMore] = ()  # attached or started
    version: Version = 0  # of the initial weights
    classes: dict[Name, Annotated[dict[str, Any], FieldsOf(RequestClass, elsewhere={"name": ("is the key", "")})]] = (
        Field(default_factory=dict)
    )
    ownership: Annotated[dict[str, Any], FieldsOf(Ownership)] = Field(default_factory=dict)  # who acts on engines
    rules: Rules = Field(default_factory=dict)  # how workers and requests are judged
    gateway: GatewaySection = Field(default_factory=GatewaySection)  # the HTTP front
    follow_weights: Switch = False  # a trainer refits engines directly: follow the versions they report
    journal: str | None = None  # file for the pool's events
    logs: str | None = None  # of started engines; None: beside the gateway's address file
    ray: Name | None = None  # address of the cluster whose pools engines are started on

    ELSEWHERE: ClassVar[Elsewhere] = {"elastic_config": ("does not belong here", "put it beside rollout, not in it")}

    @model_validator(mode="after")
    def _check_names(self) -> RolloutSection:
        seen: set[str] = set()
        for index, engine in enumerate(self.engines):
            names: Iterable[str] = engine.names or (engine.label,)
            for name in dict.fromkeys(names):
                if name in seen:
                    hint = "give one of them another name" if not name.startswith("http") else "leave one of them out"
                    raise refused(f"{name} is there twice", hint, "engines", index)
                seen.add(name)
        if sum(engine.workers or 0 for engine in self.engines) > MAX_ENGINES:
            raise refused(f"more than {MAX_ENGINES} engines", None, "engines")
        return self


class ServedFile(OpenSection):
    """A job file as `trimtab engine serve` reads it."""

    rollout: RolloutSection
    elastic_config: Annotated[dict[str, Any], SETTINGS] | None = None  # how the number of engines follows the load
