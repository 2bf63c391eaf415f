"""How a gateway listens, whom it lets in, and how much it takes on. Checked where it is made: nothing listens yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from trimtab.core.errors import InputError
from trimtab.runtime.http.tokens import checked

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class GatewaySettings:
    """Seconds, unless said otherwise."""

    token: str = field(repr=False)  # whatever changes something needs it, on loopback too
    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    allowed_hosts: tuple[str, ...] = ()  # names that a Host header may have besides loopback and `host`
    worker_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")  # where new workers may be; `*.suffix`, CIDR too
    open_requests: bool | None = None  # answers without a token; None: on loopback only
    model_name: str = ""  # as clients call the model; empty: as the engines call it
    vocabulary: int | None = None  # ids that the model knows; None: as the engines say, where they do
    max_head_bytes: int = 64 * 2**10
    max_body_bytes: int = 32 * 2**20
    max_concurrent: int = 16_384  # requests that are being answered; the next one is told to come back
    default_max_tokens: int = 1_024  # of a chat that does not say
    deadline_s: float | None = None  # of a request that does not say; None: as its class has it
    head_s: float = 20.0  # for a head to arrive
    body_s: float = 30.0  # for a body to arrive
    change_s: float = 60.0  # for what is asked of workers
    text_s: float = 30.0  # for a tokenizer to answer
    write_s: float = 60.0  # for a client to take what it was sent; then it counts as gone

    def __post_init__(self) -> None:
        checked(self.token, "the gateway's token")
        if not 0 <= self.port <= 65_535:
            raise InputError(f"port is {self.port}", hint="1 to 65535, or 0 for any that is free")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name.endswith("_s") and value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"{one.name} is {value}", hint="seconds, more than 0")
            if one.name.startswith(("max_", "default_max", "vocabulary")) and value is not None and value < 1:
                raise InputError(f"{one.name} is {value}", hint="at least 1")

    @property
    def on_loopback(self) -> bool:
        """Only processes of this machine reach it."""
        return self.host in LOOPBACK

    @property
    def allows_anonymous(self) -> bool:
        """Generations and figures need no token."""
        return self.on_loopback if self.open_requests is None else self.open_requests
