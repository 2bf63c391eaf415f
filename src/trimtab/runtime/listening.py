"""A socket to listen on, for every door that trimtab opens."""

from __future__ import annotations

import socket

from trimtab.model.errors import InputError

BACKLOG = 1_024


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
