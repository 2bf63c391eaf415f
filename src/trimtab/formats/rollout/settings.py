"""Rollout settings of a job file: engines, rules, scaling, gateway. Frozen data made by `job_section`.

Parts that can still fail at run time know their location in the file, so that later errors name file and line too.
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
    """An engine that runs already and is attached by its address."""

    url: str
    name: str | None
    limit: int  # concurrent requests
    version: int | None  # of its weights, as stated; None: as it reports, or the initial version
    size: int  # ranks of a collective
    node: str
    devices: tuple[str, ...]  # its GPUs on this machine, if their memory is monitored
    where: str  # location in the file

    @property
    def count(self) -> int:
        return 1

    @property
    def label(self) -> str:
        """Name of its worker."""
        return self.name or self.url.partition("://")[2]


@dataclass(frozen=True)
class StartedEngines:
    """Identical engines that trimtab starts and stops: as local processes, or on slots of a pool."""

    name: str
    kind: str  # empty: detected
    model: str
    count: int | None  # None: as many as fit on the pool's nodes
    per_node: int | None  # limit per node
    command: tuple[str, ...]  # empty: the default of the kind
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    host: str
    limit: int
    size: int
    start_s: float
    stop_s: float
    devices: tuple[str, ...]  # values of CUDA_VISIBLE_DEVICES, one per engine
    sleeps: bool  # when scaled down; False: it is stopped
    pool: str | None  # None: local processes
    nodes: int  # of each engine
    gpus: float  # on each of its nodes, as the other resources
    cpus: float
    memory_gb: float | None
    priority: float
    where: str

    @property
    def label(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its workers."""
        return tuple(f"{self.name}-{number}" for number in range(1, (self.count or 0) + 1))


@dataclass(frozen=True)
class GatewayFileSettings:
    """Address, access and limits of the gateway. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free port
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers
    worker_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")  # hosts of workers that clients may add
    open_requests: bool | None = None  # generation needs no token; None: on loopback only
    model_name: str = ""  # served model name; empty: the engines' name
    max_body_bytes: int = 32 * 2**20
    max_concurrent: int = 16_384  # concurrent requests
    default_max_tokens: int = 1_024  # of a chat request that states none
    deadline_s: float | None = None  # of a request that states none; None: the deadline of its class
    stop_s: float = 10.0  # grace period for running requests when the gateway stops


@dataclass(frozen=True)
class RolloutSettings:
    """Everything that `trimtab rollout serve` needs."""

    path: Path
    engines: tuple[AttachedEngine | StartedEngines, ...]
    rules: RolloutRules
    elastic: ElasticConfig
    has_elastic_config: bool  # the file has an elastic_config block
    gateway: GatewayFileSettings = GatewayFileSettings()
    follow_weights: bool = False  # a trainer refits engines directly: follow the versions they report
    journal: Path | None = None
    logs: Path | None = None  # of started engines; None: beside the gateway's address file
    ray: str | None = None  # address of the cluster whose pools engines are started on
    text: str = field(default="", repr=False)

    @property
    def count(self) -> int | None:
        """All engines; None: as many as fit on the nodes."""
        counts = [engine.count for engine in self.engines]
        return None if None in counts else sum(count or 0 for count in counts)

    def place(self, *keys: str | int) -> str:
        """File and line of a key, for later errors."""
        return place(self.text, str(self.path), keys)

    def warnings(self) -> list[str]:
        """Sentences on settings that are valid but probably not intended."""
        warnings = self.elastic.warnings() if self.has_elastic_config else []
        highest, lowest = self.rules.max_workers, self.rules.min_workers
        count = self.count
        if count is not None and count > highest:
            warnings.append(f"{count} engines, but max_workers is {highest}: {count - highest} of them never serve")
        if count == 0:
            warnings.append("no engine is named: nothing is served until one is added (POST /workers)")
        elif count is not None and count < lowest:
            warnings.append(f"{count} engines, but min_workers is {lowest}: it is never reached")
        for engine in self.engines:
            if self.has_elastic_config and engine.limit < self.rules.capacity:
                warnings.append(
                    f"{engine.label}: limit {engine.limit} is below requests_per_worker_capacity "
                    f"{self.rules.capacity}: scaling never sees it fully loaded"
                )
        return warnings

    def public_addresses(self) -> list[tuple[str, str]]:
        """(worker, host) of engines with a global or unspecified numeric IP address."""
        found = []
        for engine in self.engines:
            host = (urlsplit(engine.url).hostname or "") if isinstance(engine, AttachedEngine) else engine.host
            try:
                numeric = ipaddress.ip_address(host)
            except ValueError:
                continue  # a host name: not resolved here
            if numeric.is_global or numeric.is_unspecified:
                found.append((engine.label, host))
        return found


# ---- location ------------------------------------------------------------------------------------------------------


def place(text: str, name: str, keys: Sequence[str | int]) -> str:
    """`file:line: a.b[0].c`; the line is that of the nearest key in the file."""
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
