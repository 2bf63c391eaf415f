"""Listening sockets and uvicorn servers for all of trimtab's HTTP endpoints."""

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
    """A listening socket; port 0 takes any free one. InputError if that fails."""
    found: socket.socket | None = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        # IPPROTO_TCP explicitly: asyncio sets TCP_NODELAY only on such sockets.
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
    """A server without logs, server header and signal handlers; its caller stops it."""
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
    """Host name in a Host header, without the port; empty if malformed (nothing may follow name or port)."""
    found = _HOST.fullmatch(header.lower())
    return (found[1] or found[2]) if found else ""


def allow_files(wanted: int) -> int:
    """Raise the soft limit of open files towards `wanted` (usual default: 1,024); returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
