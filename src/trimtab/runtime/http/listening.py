"""A socket to listen on, and a server that keeps to itself, for every door that trimtab opens."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 1_024
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@,\[\]]+))(?::[0-9]{1,5})?")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, 0 being any port that is free; InputError where that cannot be."""
    found: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named: asyncio sends without delay only on sockets that say that they are TCP.
        found = socket.socket(family, kind, socket.IPPROTO_TCP)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
        found.listen(BACKLOG)
        found.setblocking(False)
    except (OSError, OverflowError, UnicodeError) as fault:
        if found is not None:
            found.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {getattr(fault, 'strerror', None) or fault}",
            hint="--port names another; 0 takes any that is free",
        ) from None
    return found


def quiet_server(app: Any, *, http: type[asyncio.Protocol] | None = None, **settings: Any) -> uvicorn.Server:
    """A server that logs nothing, says nothing of itself and takes no signal: whoever starts it stops it."""
    import uvicorn

    from trimtab.runtime.http.head_limits import limited

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        http=http or limited(),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        **settings,
    )
    return Quiet(config)


def host_name(header: str) -> str:
    """The name in a Host header, without its port; empty where it is none: nothing may stand after name or port."""
    found = _HOST.fullmatch(header.lower())
    return (found[1] or found[2]) if found else ""


def allow_files(wanted: int) -> int:
    """Raise this process's own limit of open files as far as it may go (most begin with 1,024); what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
