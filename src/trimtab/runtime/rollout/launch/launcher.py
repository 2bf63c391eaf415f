"""How a rollout engine's process is started and ended, whoever does it: the launchers' protocol, and the command line.

A launcher is asked by the pool, one deed at a time for each worker: `start` gives an engine that was seen to serve,
not merely one whose port is open, and `stop` leaves neither a process nor a held slot behind. What must never happen is
an engine that is said to have weights which it was not started with: `Started.version` is what the command line named,
never what was wished for. Every start and every stop has a deadline.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from trimtab.core.errors import InfeasibleError, InputError, nearest
from trimtab.machines.rollout.policies.policy import Taker
from trimtab.model.rollout import WorkerSpec, WorkerView
from trimtab.runtime.engines.engine import Engine

PLACEHOLDERS = ("model", "port", "host", "name", "version", "path")
"""What may stand in braces in a command line."""

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
ENVIRONMENT: dict[str, dict[str, str]] = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}}  # pause, sleep and refit need it

_BRACES = re.compile(r"\{([a-z_]+)\}")  # JSON in an argument has quotes or spaces after its braces


@dataclass(frozen=True)
class Started:
    """An engine that serves."""

    engine: Engine
    version: int | None  # of the weights it was started with; None: nobody knows
    url: str
    node: str = ""
    note: str = ""  # what a person should know


@dataclass(frozen=True)
class EngineProcessState:
    """An engine's process as it is now, to whoever waits until it serves."""

    ended: str = ""  # how, with its last words; empty while it runs
    listens: bool = False  # it has its port
    port_taken: bool = False  # it ended, and somebody else has its port


@runtime_checkable
class Launcher(Protocol):
    """Starts and ends engines for the pool."""

    async def start(self, worker: str, version: int, path: str | None) -> Started:
        """An engine that serves, with the trainer's weights at `path` where that is known.

        Raises an `UnreachableError` with the engine's last words where there will be none. Cancelling it leaves nothing
        behind that `stop` does not end.
        """

    async def stop(self, worker: str) -> None:
        """It is gone afterwards, in order or for certain, and its slot is given back. No error where it is gone."""

    async def restart(self, worker: str, version: int, path: str | None) -> Started:
        """Another engine in the place of the one before, which is given to nobody in between; for other weights."""

    async def close(self) -> None:
        """Ends whatever was started and not stopped."""


class LauncherCallbacks(Protocol):
    """What launchers tell the pool."""

    def died(self, worker: str, why: str) -> None:
        """Its engine is gone, unasked."""

    def take(self, worker: str, deadline_s: float, why: str, *, forced: bool = False) -> None:
        """Its place goes to others, in so many seconds at the latest."""

    def resume(self, worker: str) -> None:
        """It may be used again."""

    def takers(self, takers: tuple[Taker, ...]) -> None:
        """Who could use a worker's place now."""

    def add_startable(self, spec: WorkerSpec, launcher: Launcher) -> str:
        """A worker more, to be started when it is needed."""

    async def remove(self, worker: str, deadline_s: float | None = None, why: str = "") -> None:
        """A worker less."""

    def workers(self) -> tuple[WorkerView, ...]:
        """All of them."""


class NoRoomError(InfeasibleError):
    """Nothing was started, for there is no room; the launcher says `resume` when there is."""


@dataclass(frozen=True)
class EngineCommand:
    """How an engine's process is started.

    `kind` is vllm, sglang or llamacpp, or empty where the software is found out by asking it. `command` is the command
    line with {model}, {port} and {host} in it, and {name}, {version} and {path} where wanted; empty: the usual one of
    the kind. {model} is the trainer's weights where their path is known, and `model` where it is not; {path} is only
    ever the trainer's, or empty.
    """

    model: str
    kind: str = ""
    command: Sequence[str] | str = ()
    arguments: Sequence[str] = ()  # put after the command
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of this process
    host: str = "127.0.0.1"  # to listen on, where nobody else says
    version: int = 0  # of `model`: the trainer's number for it
    start_s: float = 600.0  # until it must have been seen to serve
    stop_s: float = 30.0  # from SIGTERM until it is killed
    folder: str = ""  # where it runs; empty: where this process does

    def __post_init__(self) -> None:
        where = "engine command"
        if self.kind and self.kind not in TEMPLATES:
            near = nearest(self.kind, TEMPLATES)
            hint = f"did you mean {near}?" if near else f"one of {', '.join(TEMPLATES)}, or a command of your own"
            raise InputError(f"'{self.kind}' is no kind of engine", where=where, hint=hint)
        if not self.words:
            raise InputError(
                "neither a kind nor a command is given", where=where, hint=f"kind: one of {', '.join(TEMPLATES)}"
            )
        for word in self.words:
            for placeholder in _BRACES.findall(word):
                if placeholder not in PLACEHOLDERS:
                    near = nearest(placeholder, PLACEHOLDERS)
                    hint = (
                        f"did you mean {{{near}}}?" if near else "one of " + ", ".join(f"{{{o}}}" for o in PLACEHOLDERS)
                    )
                    raise InputError(f"{{{placeholder}}} in '{word}' stands for nothing", where=where, hint=hint)
        if "{port}" not in " ".join(self.words):
            raise InputError("the command has no {port}", where=where, hint="engines are told where to listen")
        if not (self.start_s > 0 and self.stop_s >= 0):
            raise InputError(f"start_s {self.start_s:g}, stop_s {self.stop_s:g}", where=where, hint="above 0 seconds")

    @property
    def words(self) -> tuple[str, ...]:
        """The command line as given, braces and all."""
        given = shlex.split(self.command) if isinstance(self.command, str) else tuple(self.command)
        return (*(given or TEMPLATES.get(self.kind, ())), *self.arguments)

    @property
    def settings(self) -> dict[str, str]:
        """Environment variables to add: what the kind needs, and what was given."""
        return {**ENVIRONMENT.get(self.kind, {}), **self.environment}

    def line(self, *, name: str, host: str, port: int, version: int, path: str | None) -> list[str]:
        """The command line of one engine."""
        values = {
            "model": path or self.model, "port": str(port), "host": host, "name": name,
            "version": str(self.started_version(version, path)), "path": path or "",
        }  # fmt: skip
        return [_BRACES.sub(lambda found: values[found[1]], word) for word in self.words]

    def started_version(self, version: int, path: str | None) -> int:
        """Which version an engine has that was started so: without the trainer's path, that of `model`."""
        if path is None or not any(placeholder in " ".join(self.words) for placeholder in ("{model}", "{path}")):
            return self.version
        return version


def safe_name(worker: str) -> str:
    """A worker's name as a file or a task can bear it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", worker)


def base_url(host: str, port: int) -> str:
    """Where an engine is reached that listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
