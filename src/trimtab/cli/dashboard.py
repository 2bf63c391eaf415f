"""`trimtab dashboard` and `trimtab top`: live views of a run or a cluster."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trimtab.cli.options import NameOption, not_installed
from trimtab.core.errors import InputError, TrimtabError
from trimtab.render.output import err, out, warn

if TYPE_CHECKING:
    from trimtab.render.html.dashboard.source import DashboardSource
    from trimtab.running import Beside as RunBeside
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.dashboard.server import DashboardServer

FolderArgument = Annotated[Path | None, Argument(metavar="DIR", help="Folder of a running or finished run.")]
AddressOption = Annotated[
    str | None, Option("--address", "-a", help="Ray cluster, for pools, queue, nodes and evictions.")
]


def dashboard(
    folder: FolderArgument = None,
    address: AddressOption = None,
    name: NameOption = None,
    port: Annotated[
        int | None, Option("--port", "-p", help="Port to listen on.  [default: 8270, or the next free port]")
    ] = None,
    token_file: Annotated[Path | None, Option(help="File for the token that changes require.")] = None,
) -> None:
    """Serve a local page that shows a run live: timeline per GPU, costs, workers, moves, reward.

    Viewing needs only the link; changes need the token. Ctrl-C stops the server; the run goes on. From another machine:
    `ssh -L 8270:127.0.0.1:8270 HOST`.

    Examples:

        trimtab dashboard runs/grpo-1
        trimtab dashboard runs/grpo-1 --address auto --port 9000
    """
    with _stop_event() as stopped, served(source_of(folder, address, name), port, token_file=token_file) as server:
        out.print(server.announcement, markup=False)
        err.print(f"{server.token_source}; Ctrl-C stops the dashboard", markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            while not stopped.wait(0.5):
                pass


def source_of(folder: Path | None, address: str | None, name: str | None) -> DashboardSource:
    """The data source of a dashboard. Raises InputError if neither a folder nor a cluster is named."""
    from trimtab.cli.pool import controller_session
    from trimtab.render.html.dashboard.source import DashboardSource

    if folder is None and address is None and name is None:
        raise InputError(
            "name a run or a cluster", where="command line", hint="trimtab dashboard DIR, or --address of a cluster"
        )
    opens = None
    if address is not None or name is not None:
        opens = lambda: controller_session(None if address == "auto" else address, name)  # noqa: E731
    return DashboardSource(folder, opens)


@contextmanager
def served(source: DashboardSource, port: int | None, *, token_file: Path | None = None) -> Iterator[DashboardServer]:
    """Serves a source; closes both at exit. Raises InputError if a dependency is missing."""
    try:
        from trimtab.runtime.dashboard.server import DashboardServer
    except ImportError as missing:
        raise not_installed("the dashboard", missing) from None
    with contextlib.closing(source), DashboardServer(source, port, token_file=token_file) as server:
        yield server


def beside(say: Callable[[str], None], port: int | None = None, *, changes: bool = True) -> RunBeside:
    """Serves a dashboard in the process of a run, for as long as it runs: `trimtab.Job.run(beside=...)` takes it.

    A dashboard that cannot start is a warning and never ends a run. Without `changes` the token is not printed.
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
                warn(f"the dashboard could not start: {getattr(fault, 'what', fault)}".replace("[", "\\["))
            else:
                say(f"{server.announcement}; {server.token_source}" if changes else server.announcement)
            yield

    return shown


@contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """An event that SIGTERM sets. In place before the link is printed: its reader may stop the server at once."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def top(
    folder: FolderArgument = None,
    address: AddressOption = None,
    name: NameOption = None,
    every: Annotated[float, Option(help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Show a run or cluster in the terminal: iterations, components, workers, tasks, nodes, latest events.

    On a terminal it is updated until Ctrl-C; otherwise, and with --once, it is printed once.

    Examples:

        trimtab top runs/grpo-1
        trimtab top runs/grpo-1 --once
    """
    from trimtab.render.text.top import picture, print_once

    if not 0.1 <= every <= 3600:
        raise InputError(f"--every is {every:g}", where="command line", hint="seconds, 0.1 to 3600")
    source = source_of(folder, address, name)
    with contextlib.closing(source):
        source.look()
        if once or not out.is_terminal:
            print_once(source)
            return
        from rich.live import Live

        shows = Live(picture(source, out.height), console=out, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), shows as live:
            while True:
                time.sleep(every)
                source.look()
                live.update(picture(source, out.height), refresh=True)
