"""`trimtab show`: a run or a cluster in the terminal, as an HTML report, or as a dashboard."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trimtab.cli.options import (
    DashboardOption,
    EveryOption,
    FormatOption,
    NameOption,
    PortOption,
    ReportOption,
    TokenFileOption,
    TraceOption,
    WatchAddressOption,
    called,
    controller_session,
    not_installed,
    save,
)
from trimtab.core.errors import InputError, TrimtabError
from trimtab.render.output import Format, answer, err, out, warn

if TYPE_CHECKING:
    from trimtab.render.html.dashboard.source import DashboardSource
    from trimtab.running import Beside as RunBeside
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.dashboard.server import DashboardServer


def show(
    folder: Annotated[Path | None, Argument(metavar="[DIR]", help="Folder of a running or finished run.")] = None,
    live: Annotated[bool, Option("--live", help="Update until Ctrl-C.")] = False,
    every: EveryOption = 1.0,
    report: ReportOption = None,
    trace: TraceOption = None,
    metric: Annotated[
        list[str] | None,
        Option(help="Metric of the report, as component.name or name (repeatable).  [default: those named reward]"),
    ] = None,
    dashboard: DashboardOption = False,
    port: PortOption = None,
    token_file: TokenFileOption = None,
    address: WatchAddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Open a run: its state in the terminal, an HTML report, or a live dashboard.

    The run may have ended, been killed, or be running. With --address the pools, queue and nodes of a cluster are
    shown, too. A dashboard is viewed with its link alone; changes need the token; Ctrl-C stops the server, not the
    run. From another machine: `ssh -L 8270:127.0.0.1:8270 HOST`.

    Examples:

        trimtab show runs/grpo-1
        trimtab show runs/grpo-1 --live
        trimtab show runs/grpo-1 --report grpo.html --metric trainer.loss --metric reward
        trimtab show runs/grpo-1 --dashboard --address auto --port 9000
    """
    if not 0.1 <= every <= 3600:
        raise InputError(f"--every is {every:g}", where="command line", hint="seconds, 0.1 to 3600")
    if dashboard or port is not None:
        _serve(source_of(folder, address, name), port, token_file)
    elif live or (form is Format.text and report is None and trace is None):
        _terminal(source_of(folder, address, name), live, every)
    else:
        _story(folder, report, trace, metric or [], form)


def _story(folder: Path | None, report: Path | None, trace: Path | None, metrics: list[str], form: Format) -> None:
    """Writes report and trace of a run, and answers with its facts."""
    from trimtab.render.html.run.figures import all_metrics, metric_names, status_sentence, story_lines
    from trimtab.render.html.run.story import read_story
    from trimtab.render.output import print_lines

    if folder is None:
        raise InputError("DIR is missing: the folder of a run", where="command line", hint="trimtab show DIR")
    story = read_story(folder)
    missing = [name for name in metrics if not metric_names(story, [name])]
    if missing:
        there = ", ".join(all_metrics(story)) or "none"
        warn(f"no metric {', '.join(missing)} in this run; available: {there}".replace("[", "\\["))
    if report is not None:
        from trimtab.render.html.run.report import run_report

        title = folder.resolve().name or story.job or "run"
        save(report, run_report(story, title=title, command=called(), metrics=metrics))
    if trace is not None:
        from trimtab.render.chrome_trace import run_trace

        save(trace, run_trace(story), "trace")
    lines = story_lines(story, metrics)
    data = {
        "report": None if report is None else str(report),
        "state": story.state or "running",
        "standing": status_sentence(story),
        "iterations": len(story.iterations),
        "seconds": story.end_s,
        "moves": sum(move.state == "arrived" for move in story.moves),
        "lines_left_out": story.unparsed_lines,
        "words": lines,
    }
    answer(data, form, lambda: print_lines(lines))


def _terminal(source: DashboardSource, live: bool, every: float) -> None:
    from trimtab.render.text.top import picture, print_once

    with contextlib.closing(source):
        source.look()
        if not live or not out.is_terminal:
            print_once(source)
            return
        from rich.live import Live

        shows = Live(picture(source, out.height), console=out, screen=True, auto_refresh=False)
        with contextlib.suppress(KeyboardInterrupt), shows as screen:
            while True:
                time.sleep(every)
                source.look()
                screen.update(picture(source, out.height), refresh=True)


def _serve(source: DashboardSource, port: int | None, token_file: Path | None) -> None:
    with _stop_event() as stopped, served(source, port, token_file=token_file) as server:
        out.print(server.announcement, markup=False)
        err.print(f"{server.token_source}; Ctrl-C stops the dashboard", markup=False)
        with contextlib.suppress(KeyboardInterrupt):
            while not stopped.wait(0.5):
                pass


def source_of(folder: Path | None, address: str | None, name: str | None) -> DashboardSource:
    """The data source of a dashboard. Raises InputError if neither a folder nor a cluster is named."""
    from trimtab.render.html.dashboard.source import DashboardSource

    if folder is None and address is None and name is None:
        raise InputError("name a run or a cluster", where="command line", hint="trimtab show DIR, or --address auto")
    opens: Any = None
    if address is not None or name is not None:
        opens = lambda: controller_session(address, name)  # noqa: E731
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
