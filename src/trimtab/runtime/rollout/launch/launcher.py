"""Launcher protocol, and the command line of an engine.

The pool calls a launcher with one action at a time per worker: `start` returns an engine that was seen to serve, not
just to listen, and `stop` leaves neither a process nor a held slot behind. What must never happen: an engine reported
with weights that it was not started with. `Started.version` is what the command line named, never what was requested.
Every start and stop has a deadline.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol, runtime_checkable

from trimtab.core.errors import InfeasibleError, InputError, check_known, meant
from trimtab.core.frozen import Frozen
from trimtab.machines.rollout.policies.load import Taker
from trimtab.model.rollout import WorkerSpec, WorkerView
from trimtab.runtime.engines.engine import Engine

OF_NODES = ("rank", "nodes", "head", "dist_port")
"""Placeholders that an engine over several nodes needs."""
PLACEHOLDERS = ("model", "port", "host", "name", "version", "path", *OF_NODES)
"""Placeholders of a command line."""

TEMPLATES: dict[str, tuple[str, ...]] = {
    "vllm": (
        "vllm", "serve", "{model}", "--host", "{host}", "--port", "{port}", "--enable-server-load-tracking",
        "--shutdown-timeout", "5",
    ),
    "sglang": (
        sys.executable, "-m", "sglang.launch_server", "--model-path", "{model}", "--host", "{host}", "--port", "{port}",
        "--enable-metrics", "--weight-version", "{version}",
    ),
    "llamacpp": (
        "llama-server", "--model", "{model}", "--host", "{host}", "--port", "{port}", "--metrics", "--slots",
    ),
}  # fmt: skip
INTERVAL = ("--stream-interval", "128")
"""For vLLM: an event costs its HTTP front more than a token, most of all with log-probs. Not known before 0.12."""
NODE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "vllm": ("--nnodes", "{nodes}", "--node-rank", "{rank}", "--master-addr", "{head}", "--master-port", "{dist_port}"),
    "sglang": ("--nnodes", "{nodes}", "--node-rank", "{rank}", "--dist-init-addr", "{head}:{dist_port}"),
}
"""Of default commands, for engines over several nodes. vLLM has them since 0.11.1."""
HEADLESS = "--headless"  # for vLLM's ranks above 0, which serve nothing
NODE_ADDRESS = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}  # by which the other ranks reach this one
ENVIRONMENT: dict[str, dict[str, str]] = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}}  # for pause, sleep and refit

_BRACES = re.compile(r"\{([a-z_]+)\}")  # JSON in an argument has quotes or spaces after its braces


class Started(Frozen):
    """An engine that serves."""

    engine: Engine
    version: int | None  # of the weights it was started with; None: unknown
    url: str
    node: str = ""
    note: str = ""  # warning shown in status


class EngineProcessState(Frozen):
    """State of an engine's process while it starts."""

    ended: str = ""  # how, with the end of its log; empty while it runs
    listens: bool = False  # on its port
    port_taken: bool = False  # it ended, and another process has its port


@runtime_checkable
class Launcher(Protocol):
    """Starts and stops engines for the pool."""

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        """Returns an engine that serves, with the trainer's weights at `path` if given.

        Raises an `UnreachableError` with the end of the engine's log if it fails. After a cancellation, `stop` cleans
        up.
        """

    async def stop(self, worker: str) -> None:
        """Ends the engine, by force if needed, and returns its slot. No error if it is gone."""

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Replaces the engine, for other weights; its slot is kept."""

    async def close(self) -> None:
        """Stops everything that was started."""


class LauncherCallbacks(Protocol):
    """Calls of launchers to the pool."""

    def died(self, worker: str, why: str) -> None:
        """The engine ended unexpectedly."""

    def take(self, worker: str, deadline_s: float, why: str, *, forced: bool = False) -> None:
        """The worker is reclaimed within `deadline_s`."""

    def resume(self, worker: str) -> None:
        """The worker may be used again."""

    def takers(self, takers: tuple[Taker, ...]) -> None:
        """Tasks that wait for workers' resources."""

    def add_startable(self, spec: WorkerSpec, launcher: Launcher) -> str:
        """Adds a worker, to be started on demand."""

    async def remove(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        """Removes a worker."""

    def workers(self) -> tuple[WorkerView, ...]:
        """All workers."""


class NoRoomError(InfeasibleError):
    """Nothing was started for lack of resources; the launcher calls `resume` when there are some."""


class EngineCommand(Frozen):
    """Command that starts an engine's process.

    `kind` is vllm, sglang or llamacpp, or empty: detected. `command` is the command line with {model}, {port} and
    {host}, and optionally {name}, {version} and {path}; empty: the default of the kind. {model} is the path of the
    trainer's weights if known, else `model`; {path} is only ever the trainer's, or empty. Of an engine over several
    {nodes} each runs it with its {rank}; {head} and {dist_port} are the address of rank 0's node and a free port there.
    """

    model: str
    kind: str = ""
    command: Sequence[str] | str = ()
    arguments: Sequence[str] = ()  # appended to the command
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of this process
    host: str = "127.0.0.1"  # to listen on, for local processes
    version: int = 0  # of `model`
    start_s: float = 600.0  # to serve
    stop_s: float = 30.0  # from SIGTERM to SIGKILL
    folder: str = ""  # working directory; empty: that of this process
    interval: bool = True  # vLLM of the default command is started with `INTERVAL`

    def __post_init__(self) -> None:
        where = "engine command"
        if self.kind and self.kind not in TEMPLATES:
            hint = meant(self.kind, TEMPLATES, f"one of {', '.join(TEMPLATES)}, or a command of your own")
            raise InputError(f"unknown kind of engine '{self.kind}'", where=where, hint=hint)
        if not self.words:
            raise InputError(
                "neither a kind nor a command is given", where=where, hint=f"kind: one of {', '.join(TEMPLATES)}"
            )
        placeholders = [f"{{{name}}}" for word in self.words for name in _BRACES.findall(word)]
        check_known(placeholders, [f"{{{name}}}" for name in PLACEHOLDERS], where, "unknown placeholder {}")
        if "{port}" not in " ".join(self.words):
            raise InputError("the command has no {port}", where=where, hint="add an argument with {port}")
        if not (self.start_s > 0 and self.stop_s >= 0):
            raise InputError(f"start_s {self.start_s:g}, stop_s {self.stop_s:g}", where=where, hint="above 0 seconds")

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments with placeholders."""
        given = shlex.split(self.command) if isinstance(self.command, str) else tuple(self.command)
        own = INTERVAL if self.kind == "vllm" and not given and self.interval and not self._states_interval else ()
        return (*(given or TEMPLATES.get(self.kind, ())), *own, *self.arguments)

    @property
    def _states_interval(self) -> bool:
        return any(word.partition("=")[0] == INTERVAL[0] for word in self.arguments)

    @property
    def stream_interval(self) -> int:
        """Tokens of an event, as the command line says."""
        words = [part for word in self.words for part in word.split("=", 1)]
        stated = words[words.index(INTERVAL[0]) + 1 :][:1] if INTERVAL[0] in words else []
        return int(stated[0]) if stated and stated[0].isdecimal() else 1

    def without_interval(self, why: str) -> EngineCommand | None:
        """The command without the interval, if the engine ended because it does not know it."""
        unknown = "unrecognized arguments" in why and INTERVAL[0] in why
        return replace(self, interval=False) if unknown and INTERVAL[0] in self.words and self.interval else None

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables of the kind, and those given."""
        return {**ENVIRONMENT.get(self.kind, {}), **self.environment}

    def over(self, nodes: int) -> EngineCommand:
        """The command of engines over so many nodes: a default command gets the arguments of its kind."""
        if nodes < 1:
            raise InputError(f"an engine over {nodes} nodes", where="engine command", hint="at least 1")
        missing = [f"{{{name}}}" for name in OF_NODES if f"{{{name}}}" not in " ".join(self.words)]
        if nodes == 1 or not missing:
            return self
        if not self.command and self.kind in NODE_ARGUMENTS:
            return replace(self, arguments=(*NODE_ARGUMENTS[self.kind], *self.arguments))
        raise InputError(
            f"the command has no {', '.join(missing)}, and its engine is over {nodes} nodes", where="engine command",
            hint="it is run on every node: with its rank, their number, and the address and port where ranks meet",
        )  # fmt: skip

    def line(
        self,
        *,
        name: str,
        host: str,
        port: int,
        version: int,
        path: str | None,
        rank: int = 0,
        nodes: int = 1,
        head: str = "",
        dist_port: int = 0,
    ) -> list[str]:
        """Arguments of one engine, or of one rank of it."""
        values = {
            "model": path or self.model, "port": str(port), "host": host, "name": name,
            "version": str(self.started_version(version, path)), "path": path or "",
            "rank": str(rank), "nodes": str(nodes), "head": head or host, "dist_port": str(dist_port),
        }  # fmt: skip
        silent = (HEADLESS,) if self.kind == "vllm" and rank > 0 and HEADLESS not in self.words else ()
        return [_BRACES.sub(lambda found: values[found[1]], word) for word in (*self.words, *silent)]

    def started_version(self, version: int, path: str | None) -> int:
        """Version of an engine started so: that of `model` unless the trainer's path is used."""
        if path is None or not any(placeholder in " ".join(self.words) for placeholder in ("{model}", "{path}")):
            return self.version
        return version


def safe_name(worker: str) -> str:
    """Worker name for file names and task ids."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", worker)


def base_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
