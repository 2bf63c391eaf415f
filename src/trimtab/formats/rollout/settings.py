"""What a job file says about rollout, read: engines, rules, scaling, gateway. Frozen facts that `rollout_file` makes.

Every part that can still turn out wrong when it is carried out knows its place in the file, so that an error that is
found later names file and line, too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import RolloutRules

DEFAULT_PORT = 8268


@dataclass(frozen=True)
class AttachedEngine:
    """An engine that somebody else runs."""

    url: str
    name: str | None
    limit: int  # requests at once
    version: int | None  # of the weights it has, by the user's word; None: as it reports, or what engines start with
    size: int  # ranks of a collective
    node: str
    devices: tuple[str, ...]  # GPUs of this machine that it is on, where its memory is to be looked at
    where: str  # in the file

    @property
    def count(self) -> int:
        """One."""
        return 1

    @property
    def label(self) -> str:
        """What its worker is called."""
        return self.name or self.url.partition("://")[2]


@dataclass(frozen=True)
class StartedEngines:
    """Engines alike that trimtab starts and ends: as processes here, or on slots of a pool."""

    name: str
    kind: str  # empty: found out by asking
    model: str
    count: int | None  # None: as many as the nodes of the pool have places for
    per_node: int | None  # at most so many on each
    command: tuple[str, ...]  # empty: the usual one of the kind
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    host: str
    limit: int
    size: int
    start_s: float
    stop_s: float
    devices: tuple[str, ...]  # values of CUDA_VISIBLE_DEVICES, one for each engine
    sleeps: bool  # when it is given up; False: it is stopped
    pool: str | None  # None: processes of this machine
    gpus: float
    cpus: float
    memory_gb: float | None
    priority: float
    where: str

    @property
    def label(self) -> str:
        """What people call them."""
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Of its workers."""
        return tuple(f"{self.name}-{number}" for number in range(1, (self.count or 0) + 1))


@dataclass(frozen=True)
class GatewayFileSettings:
    """Where the gateway listens, whom it answers, and how much of it. Seconds, unless said otherwise."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any that is free
    allowed_hosts: tuple[str, ...] = ()  # names by which callers know this machine (Host header)
    worker_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")  # where workers that callers add may be
    open_requests: bool | None = None  # generations need no token; None: on loopback only
    model_name: str = ""  # as callers know the model; empty: as the engines call it
    max_body_bytes: int = 32 * 2**20
    max_concurrent: int = 16_384  # requests at once
    default_max_tokens: int = 1_024  # of a chat that does not say
    deadline_s: float | None = None  # of a request that does not say; None: as its class has it
    stop_s: float = 10.0  # for what runs to end when the gateway does


@dataclass(frozen=True)
class RolloutSettings:
    """All that `trimtab rollout serve` needs to know."""

    path: Path
    engines: tuple[AttachedEngine | StartedEngines, ...]
    rules: RolloutRules
    elastic: ElasticConfig
    has_elastic_config: bool  # the file has an elastic_config block
    gateway: GatewayFileSettings = GatewayFileSettings()
    follow_weights: bool = False  # a trainer refits engines by itself: what they report is followed
    journal: Path | None = None
    logs: Path | None = None  # of engines that are started; None: beside the file that says where the gateway is
    ray: str | None = None  # address of the cluster whose pools engines are started on
    text: str = field(default="", repr=False)

    @property
    def count(self) -> int | None:
        """Of all engines; None: as many as nodes have places for."""
        counts = [one.count for one in self.engines]
        return None if None in counts else sum(one or 0 for one in counts)

    def place(self, *keys: str | int) -> str:
        """File and line of a key, for errors that are found later."""
        return place(self.text, str(self.path), keys)

    def warnings(self) -> list[str]:
        """What is allowed and likely to disappoint, a sentence each."""
        said = self.elastic.warnings() if self.has_elastic_config else []
        most, least = self.rules.most, self.rules.least
        count = self.count
        if count is not None and count > most:
            said.append(f"{count} engines, but max_workers is {most}: {count - most} of them never serve")
        if count == 0:
            said.append("no engine is named: nothing is served until one is added (POST /workers)")
        elif count is not None and count < least:
            said.append(f"{count} engines, but min_workers is {least}: there will never be so many")
        for one in self.engines:
            if self.has_elastic_config and one.limit < self.rules.capacity:
                said.append(
                    f"{one.label}: limit {one.limit} is below requests_per_worker_capacity "
                    f"{self.rules.capacity}: its load never reaches what scaling looks for"
                )
        return said

    def public_addresses(self) -> list[tuple[str, str]]:
        """Engines whose address is a number that the whole world can reach, or that stands for all: worker, host."""
        found = []
        for one in self.engines:
            host = (urlsplit(one.url).hostname or "") if isinstance(one, AttachedEngine) else one.host
            try:
                numeric = ipaddress.ip_address(host)
            except ValueError:
                continue  # a name: only asking for its address would tell
            if numeric.is_global or numeric.is_unspecified:
                found.append((one.label, host))
        return found


# ---- where ---------------------------------------------------------------------------------------------------------


def place(text: str, name: str, keys: Sequence[str | int]) -> str:
    """`file:line: a.b[0].c`; the line is that of the nearest key that the file has."""
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else str(key)
    line = _line(text, keys)
    return f"{name}:{line}: {path}" if line else f"{name}: {path}"


def _line(text: str, keys: Sequence[str | int]) -> int | None:
    try:
        node: Any = YAML(typ="rt", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return None
    line = None
    for key in keys:
        marks = getattr(node, "lc", None)
        try:
            line = (marks.item(key) if isinstance(key, int) else marks.key(key))[0] + 1  # type: ignore[union-attr]
            node = node[key]
        except (AttributeError, KeyError, IndexError, TypeError):
            break
    return line
