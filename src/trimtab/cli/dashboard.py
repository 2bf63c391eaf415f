"""`trimtab dashboard` and `trimtab top`: a run, or a cluster, to look at while it goes on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.core.errors import InputError, TrimtabError
from trimtab.render.output import err, out, warn

if TYPE_CHECKING:
    from trimtab.render.html.dashboard.source import DashboardSource
    from trimtab.running import Beside as RunBeside
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.dashboard.server import DashboardServer

FolderArgument = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="The folder of a run, whether it goes on or is over.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", "-a", help="A Ray cluster, for pools, queue, nodes and evictions.")
]
NameOption = Annotated[str | None, typer.Option("--name", "-n", help="The controller, where a cluster has several.")]


def dashboard(
    folder: FolderArgument = None,
    address: AddressOption = None,
    name: NameOption = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "-p", help="Where to listen, 8270 unless said; if it is in use, the next one."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Where the token is written that changes need.")
    ] = None,
) -> None:
    """One page on this machine that shows a run as it happens: timeline per GPU, costs, workers, moves, reward.

    Whoever opens the link can look, and change nothing: that needs the token. Ctrl-C ends it; the run goes on. From
    another machine: `ssh -L 8270:127.0.0.1:8270 HOST`.

    Examples:

        trimtab dashboard runs/grpo-1

        trimtab dashboard runs/grpo-1 --address auto --port 9000
    """
    with served(source_of(folder, address, name), port, token_file=token_file) as server:
        out.print(server.said, markup=False)
        err.print(f"{server.token_is}; Ctrl-C ends the dashboard", markup=False)
        _until_interrupted()


def source_of(folder: Path | None, address: str | None, name: str | None) -> DashboardSource:
    """Whatever was named to look at. InputError where nothing was."""
    from trimtab.cli.pool import controller_session
    from trimtab.render.html.dashboard.source import DashboardSource

    if folder is None and address is None and name is None:
        raise InputError(
            "what to look at is not said", where="command line", hint="trimtab dashboard DIR, or --address of a cluster"
        )
    opens = None
    if address is not None or name is not None:
        opens = lambda: controller_session(None if address == "auto" else address, name)  # noqa: E731
    return DashboardSource(folder, opens)


@contextmanager
def served(source: DashboardSource, port: int | None, *, token_file: Path | None = None) -> Iterator[DashboardServer]:
    """A server for a source; both end with it. InputError where what it needs is not installed."""
    try:
        from trimtab.runtime.dashboard.server import DashboardServer
    except ImportError as missing:
        raise InputError(
            f"the dashboard needs {missing.name}, which is not installed", hint="pip install 'trimtab[serve]'"
        ) from None
    with contextlib.closing(source), DashboardServer(source, port, token_file=token_file) as server:
        yield server


def beside(said: Callable[[str], None], port: int | None = None, *, changes: bool = True) -> RunBeside:
    """A dashboard for as long as a run goes on, in its process: `trimtab.Job.run(beside=...)` takes it.

    One that cannot start is a warning, and never the end of a run. Without `changes` nobody is told of a token.
    """

    @contextmanager
    def shown(folder: Path, session: Session | None) -> Iterator[None]:
        from trimtab.render.html.dashboard.source import DashboardSource

        with contextlib.ExitStack() as ends:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                opens = None if session is None else lambda: contextlib.nullcontext(session)
                server = ends.enter_context(served(DashboardSource(folder, opens), port))
            except (TrimtabError, OSError) as fault:
                warn(f"no dashboard: {getattr(fault, 'what', fault)}".replace("[", "\\["))
            else:
                said(f"{server.said}; {server.token_is}" if changes else server.said)
            yield

    return shown


def _until_interrupted() -> None:
    """Wait for Ctrl-C, or for being asked to end."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        while not ended.wait(0.5):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def top(
    folder: FolderArgument = None,
    address: AddressOption = None,
    name: NameOption = None,
    every: Annotated[float, typer.Option("--every", help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Say how it stands now, and end.")] = False,
) -> None:
    """The dashboard's essence in a terminal: iterations, components, workers, tasks, nodes and the latest events.

    On a terminal it is redrawn until Ctrl-C; elsewhere, and with --once, it is said once.

    Examples:

        trimtab top runs/grpo-1

        trimtab top runs/grpo-1 --once
    """
    from trimtab.render.text.top import picture, plain

    if not 0.1 <= every <= 3600:
        raise InputError(f"--every is {every:g}", where="command line", hint="seconds, 0.1 to 3600")
    source = source_of(folder, address, name)
    with contextlib.closing(source):
        source.look()
        if once or not out.is_terminal:
            plain(source)
            return
        from rich.live import Live

        shows = Live(picture(source, out.height), console=out, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), shows as live:
            while True:
                time.sleep(every)
                source.look()
                live.update(picture(source, out.height), refresh=True)
