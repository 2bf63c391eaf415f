"""Settings of a gateway, validated on creation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from trimtab.core.errors import InputError
from trimtab.runtime.http.tokens import checked

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class GatewaySettings:
    """In seconds, unless stated otherwise."""

    token: str = field(repr=False)  # required for changes, also on loopback
    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted besides loopback and `host`
    worker_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")  # hosts of new workers; also `*.suffix` and CIDR
    open_requests: bool | None = None  # no token needed; None: on loopback only
    model_name: str = ""  # model name for clients; empty: the engines' name
    vocabulary: int | None = None  # vocabulary size; None: as the engines report
    max_head_bytes: int = 64 * 2**10
    max_body_bytes: int = 32 * 2**20
    max_concurrent: int = 16_384  # open requests; more are refused with Retry-After
    default_max_tokens: int = 1_024  # of a chat without max_tokens
    deadline_s: float | None = None  # default deadline; None: that of the class
    head_s: float = 20.0  # for a head to arrive
    body_s: float = 30.0  # for a body to arrive
    change_s: float = 60.0  # for changes of workers
    text_s: float = 30.0  # for a tokenizer to answer
    write_s: float = 60.0  # for a client to read; then it counts as disconnected

    def __post_init__(self) -> None:
        checked(self.token, "the gateway's token")
        if not 0 <= self.port <= 65_535:
            raise InputError(f"port is {self.port}", hint="1 to 65535, or 0 for any that is free")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name.endswith("_s") and value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"{setting.name} is {value}", hint="seconds, more than 0")
            if setting.name.startswith(("max_", "default_max", "vocabulary")) and value is not None and value < 1:
                raise InputError(f"{setting.name} is {value}", hint="at least 1")

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def allows_anonymous(self) -> bool:
        """Generations and queries need no token."""
        return self.on_loopback if self.open_requests is None else self.open_requests
