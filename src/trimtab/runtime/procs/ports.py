"""Ports of this machine: free ones, blocks of them for local Ray nodes, and the process that holds a taken one.

Every node has its own block, counted up from the first (6380): node manager, object manager, agents, metrics; and its
own range for workers. A block with a taken port is skipped; a requested port that is taken is an error that names it
and, if readable, the process. No port stays bound here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection
from pathlib import Path

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.runtime.procs.processes import command, table

PORTS_PER_NODE = 8
WORKER_PORTS_PER_NODE = 600
LAST_WORKER_PORT = 32_767  # above are the kernel's ephemeral ports
LAST_PORT = 65_535
MAX_NODES = 32


class NodePorts(Frozen):
    """Ports of a node, in the order of its block."""

    node_manager: int
    object_manager: int
    agent_http: int
    agent_grpc: int
    runtime_env: int
    metrics: int
    spare: int  # for the head's client server, if the usual port is taken
    first_worker: int
    last_worker: int

    @property
    def fixed(self) -> tuple[int, ...]:
        agents = (self.agent_http, self.agent_grpc, self.runtime_env)
        return (self.node_manager, self.object_manager, *agents, self.metrics, self.spare)


def block(slot: int, first: int, first_worker: int) -> NodePorts:
    """Ports of the node in slot 0, 1, 2 ..."""
    start = first + slot * PORTS_PER_NODE
    workers = first_worker + slot * WORKER_PORTS_PER_NODE
    return NodePorts(*(*range(start, start + 7), workers, workers + WORKER_PORTS_PER_NODE - 1))


def free_block(first: int, first_worker: int, held: Collection[int], avoid: Collection[int]) -> tuple[int, NodePorts]:
    """First slot that no node holds and whose ports are all free. `avoid`: ports meant for others."""
    for value, option in ((first, "--ports-from"), (first_worker, "--worker-ports-from")):
        if not 1024 <= value <= LAST_PORT:
            raise InputError(f"{value} cannot be a port", where=f"command line: {option}", hint=f"1024 to {LAST_PORT}")
    for slot in range(MAX_NODES):
        ports = block(slot, first, first_worker)
        if ports.last_worker > LAST_WORKER_PORT or ports.spare > LAST_PORT:
            break
        if slot not in held and not set(ports.fixed) & set(avoid) and all(is_free(port) for port in ports.fixed):
            return slot, ports
    raise InfeasibleError(
        f"no {PORTS_PER_NODE} free ports in a row from {first} up for another node",
        hint="--ports-from and --worker-ports-from name other ranges",
    )


def is_free(port: int) -> bool:
    """Whether the port is free on all addresses."""
    return _binds(socket.AF_INET, "0.0.0.0", port) and (not socket.has_ipv6 or _binds(socket.AF_INET6, "::", port))


def _binds(kind: socket.AddressFamily, address: str, port: int) -> bool:
    try:
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if kind == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            trial.bind((address, port))
    except OSError as fault:
        # Without IPv6, nothing can listen there.
        return kind == socket.AF_INET6 and fault.errno != errno.EADDRINUSE
    return True


def require_free(port: int, what: str, option: str) -> None:
    """InputError, naming the process, if the port is taken."""
    if not 1024 <= port <= LAST_PORT:
        raise InputError(f"{port} cannot be the port of {what}", where=f"command line: {option}", hint="1024 to 65535")
    if is_free(port):
        return
    process = _holder(port)
    raise InputError(
        f"port {port}, for {what}, is taken" + (f" by {process}" if process else ""),
        where=f"command line: {option}",
        hint=f"end that process, or give another port: {option} {_suggest(port)}",
    )


def _suggest(port: int) -> int:
    return next((near for near in range(port + 1000, 65_000, 1000) if is_free(near)), port + 1)


def _holder(port: int) -> str | None:
    listening = listening_sockets(port)
    if not listening:
        return None
    for pid in table():
        if listening & sockets_of(pid):
            return f"process {pid} ({_name(command(pid)) or Path(f'/proc/{pid}/comm').read_text().strip()})"
    return "a process of another user"


def _name(words: list[str]) -> str:
    """Short name of a command line."""
    if not words:
        return ""
    if Path(words[0]).name == "gcs_server":
        return "gcs_server: the head of a Ray cluster"
    shown = [Path(words[0]).name, *words[1:3]]
    return " ".join(shown)[:80]


def listening_sockets(port: int) -> set[int]:
    """Inodes of the sockets that listen on a port of this machine."""
    found: set[int] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            found.update(int(row[9]) for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port)
    return found


def sockets_of(pid: int) -> set[int]:
    """Inodes of a process's sockets, as far as they are readable."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{number}")
                if link.startswith("socket:["):
                    found.add(int(link[8:-1]))
    return found


def free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now. If another process takes one first, the start is retried with others."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
            for each in sockets:
                each.bind((host, 0))
            return [int(each.getsockname()[1]) for each in sockets]
    except OSError as fault:
        raise InputError(f"nothing can listen on {host}: {fault.strerror}", hint="an address of this machine") from None
