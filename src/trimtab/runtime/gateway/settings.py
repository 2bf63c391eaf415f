"""Settings of a gateway, validated on creation."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from trimtab.core.frozen import Frozen
from trimtab.core.numbers import LONGEST_S, MAX_COUNT, Ranges, check_fields
from trimtab.runtime.http.tokens import checked

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class GatewaySettings(Frozen):
    """In seconds, unless stated otherwise."""

    token: str = field(repr=False)  # required for changes, also on loopback
    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted besides loopback and `host`
    worker_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")  # hosts of new workers; also `*.suffix` and CIDR
    processes: int = 1  # the pool's own, and those that serve the port if there are more
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
    parse_s: float = 60.0  # for a large body to be parsed
    write_s: float = 60.0  # for a client to read; then it counts as disconnected
    keep_alive_s: float = 75.0  # for the next request on an idle connection
    abort_s: float = 5.0  # at the end of a stop: to answer open requests with what they have

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(
            ("deadline_s", "head_s", "body_s", "change_s", "text_s", "parse_s", "write_s", "keep_alive_s", "abort_s"),
            (1e-9, LONGEST_S),
        ),
        **dict.fromkeys(("max_concurrent", "default_max_tokens", "vocabulary"), (1, MAX_COUNT)),
        **dict.fromkeys(("max_head_bytes", "max_body_bytes"), (1, 2**40)),
        "processes": (1, 64),
        "port": (0, 65_535),  # 0: any that is free
    }

    def __post_init__(self) -> None:
        checked(self.token, "the gateway's token")
        check_fields(self, "the gateway")

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def allows_anonymous(self) -> bool:
        """Generations and queries need no token."""
        return self.on_loopback if self.open_requests is None else self.open_requests
