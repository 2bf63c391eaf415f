"""`trimtab advise`: where the step time of a run goes, and how to improve it. Read-only.

Follows the log of an unmodified run until Ctrl-C, or reads a finished log with `--once`. The only command it ever runs
is the user's `--restart-hook`. Heavy imports happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trimtab.cli.options import (
    AtMostOption,
    DashboardOption,
    EveryOption,
    ExecuteOption,
    FormatOption,
    FrameworkOption,
    JobArgument,
    LaunchOption,
    OverridesArgument,
    PortOption,
    ProfileOption,
    ReportOption,
    WarmupOption,
    WatchAddressOption,
    at_most_of,
    check_seconds,
    choose_launch,
    read_profile,
)
from trimtab.core.errors import InputError
from trimtab.formats.files import write_text
from trimtab.render.output import Format, answer, err, share, warn

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from trimtab.formats.logs.follow_costs import RunConfig
    from trimtab.formats.logs.records import LogFramework
    from trimtab.runtime.advise.follower import Follower, FollowFrame
    from trimtab.runtime.advise.record import FollowRecord

    Show = Callable[[FollowFrame], None]

SHORTEST_S = 0.05  # between two reads of the log


def advise(
    config: JobArgument,
    overrides: OverridesArgument = None,
    follow: Annotated[
        list[Path] | None, Option(metavar="RUN", help="Log of the run, or folder of its event files (repeatable).")
    ] = None,
    profile: ProfileOption = None,
    once: Annotated[bool, Option("--once", help="Read a finished log to its end, print the advice, and exit.")] = False,
    report: ReportOption = None,
    folder: Annotated[
        Path | None, Option(metavar="DIR", help="Folder for the observations.  [default: runs/advise-LOG-ID]")
    ] = None,
    dashboard: DashboardOption = False,
    port: PortOption = None,
    engine: Annotated[
        list[str] | None, Option(metavar="URL", help="Rollout engine to read metrics from (repeatable).")
    ] = None,
    address: WatchAddressOption = None,
    restart_hook: Annotated[
        str | None, Option(metavar="CMD", help="Command to run at the next checkpoint, if a restart pays.")
    ] = None,
    least_gain: Annotated[str, Option(help="With --restart-hook: minimum gain.")] = "10%",
    restart_s: Annotated[float, Option(help="Cost of a restart in seconds; the gain must exceed it.")] = 300.0,
    hook_s: Annotated[float, Option(help="With --restart-hook: time limit of the command, in seconds.")] = 600.0,
    framework: FrameworkOption = None,
    warmup: WarmupOption = 2,
    every: EveryOption = 2.0,
    at_most: AtMostOption = None,
    silent: Annotated[float, Option(metavar="S", help="Stop if the log shows no step for this time.")] = 7200.0,
    launch: LaunchOption = None,
    execute: ExecuteOption = False,
    form: FormatOption = Format.text,
) -> None:
    """Show where the step time of a run goes, and which placement would be faster.

    For runs of verl, RLinf, NeMo RL and OpenRLHF. Follows the log, separates cost drift from noise, and recommends a
    better placement that the framework can run, with its gain, error band and overrides. The run is not changed.
    Observations are kept in a folder: the same advice is given once, and `trimtab show DIR` shows it.

    Examples:

        trimtab advise verl_config.yaml trainer.nnodes=4 --follow run.log
        trimtab advise config.yaml --follow run.log --dashboard
        trimtab advise config.yaml --follow run.jsonl --once --report report.html
        trimtab advise config.yaml --follow run.log --restart-hook ./restart.sh --least-gain 15%
    """
    choose_launch(launch, execute)
    shows = dashboard or port is not None
    _check_call(follow, once, restart_hook, shows, {"--every": every, "--silent": silent, "--hook-s": hook_s})
    check_seconds(restart_s, "--restart-s", 0.0)
    if warmup < 0:
        raise InputError("--warmup cannot be negative")
    gain = share(least_gain, "--least-gain")
    with _follower(
        config, overrides or [], follow or [], profile, framework, warmup, restart_s, engine or [], address
    ) as follower:
        follower.every_s, follower.silent_s, follower.least_gain = every, silent, gain
        follower.at_most_s = at_most_of(at_most)
        record = None
        if folder is not None or not once:
            record = _record(folder, follow or [], config, overrides or [], needed=restart_hook is not None or shows)
        with contextlib.nullcontext() if record is None else contextlib.closing(record):
            follower.record = record
            if restart_hook is not None and record is not None:
                from trimtab.runtime.advise.follower import RestartHook

                follower.hook = RestartHook(
                    restart_hook, str(config), hook_s, record.past.ran_for, record.record_hook_start
                )
            if once:
                _answer_once(follower, form, report)
            else:
                _follow(follower, form, report, shows, port)


# ---- follower ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _follower(
    path: Path,
    overrides: list[str],
    follow: list[Path],
    profile: Path | None,
    framework: str | None,
    warmup: int,
    restart_s: float,
    engines: list[str],
    address: str | None,
) -> Iterator[Follower]:
    from trimtab.formats.logs.follow import RunLog
    from trimtab.formats.logs.follow_costs import RunConfig
    from trimtab.model.run import ReplanMode, ReplanRules
    from trimtab.runtime.advise.analysis import AdviceTracker
    from trimtab.runtime.advise.follower import Follower, open_tail
    from trimtab.runtime.advise.samples import ClusterWatch, EngineMetricsReader

    config = RunConfig(path, tuple(overrides))
    measured = read_profile(profile)
    metrics = EngineMetricsReader(engines)
    rules = ReplanRules(mode=ReplanMode.advise, assumed_move_s=restart_s)
    with contextlib.ExitStack() as stack:
        tail = stack.enter_context(open_tail(follow))
        source = _framework(config, tail.files(), framework)
        cluster = None
        if address is not None:
            from trimtab.runtime.rayapi.gcs_snapshot import find

            cluster = ClusterWatch(find(address), every_s=10.0)
            stack.callback(cluster.close)
        yield Follower(tail, RunLog(source), AdviceTracker(source, config, measured, rules, warmup), metrics, cluster)


def _framework(config: RunConfig, files: list[Path], named: str | None) -> LogFramework:
    """The framework of the log: as named, as in the configuration, or as detected. They must agree."""
    from trimtab.formats.logs import reader as logs

    stated = config.framework()
    try:
        found: LogFramework | None = logs.detect(files)
    except InputError as error:
        if stated is None and named is None:
            raise
        if "--lengths" in (error.hint or ""):
            raise InputError(error.what, where=error.where, hint="this file has rollout answers, not timings") from None
        found = None  # no step is logged yet
    if named is not None:
        chosen = logs.framework_named(named)
    elif stated is not None:
        chosen = logs.FRAMEWORKS[stated]
    else:
        assert found is not None
        chosen = found
    if found is not None and found is not chosen:
        raise InputError(
            f"the log is from {found.name}, the configuration from {chosen.name}",
            where=f"{config.path}, {files[0]}",
            hint="pass the configuration of this run",
        )
    return chosen


def _record(
    folder: Path | None, follow: list[Path], config: Path, overrides: list[str], *, needed: bool
) -> FollowRecord | None:
    """The folder of observations; None if the default folder cannot be used and is not needed."""
    from trimtab.runtime.advise.record import FollowRecord, default_folder

    try:
        return FollowRecord(folder or default_folder(follow), follow, config, overrides)
    except InputError as fault:
        if folder is not None or needed:
            raise
        warn(f"observations are not kept: {fault.what} ({fault.where})".replace("[", "\\["))
        return None


# ---- output --------------------------------------------------------------------------------------------------------


def _answer_once(follower: Follower, form: Format, report: Path | None) -> None:
    from trimtab.render.text import advise as advise_text

    frame = follower.once()
    if follower.record is not None:
        follower.record.write_frame(frame, follower.advising, advise_text.as_data(frame, follower.history))
    _report(follower, frame, report)
    answer(advise_text.as_data(frame, follower.history), form, lambda: advise_text.print_text(frame, follower.history))


def _follow(follower: Follower, form: Format, report: Path | None, shows: bool, port: int | None) -> None:
    """Follows with a live view on a terminal, otherwise a line per event; prints the summary at the end."""
    from trimtab.cli.show import beside
    from trimtab.render.text import advise as advise_text
    from trimtab.runtime.procs.interrupts import signals_interrupt

    frame: FollowFrame | None = None
    reported = False
    record = follower.record
    fault: str | None = None

    def say(line: str) -> None:
        err.print(line, markup=False)

    try:
        with signals_interrupt(), contextlib.ExitStack() as stack:
            if record is not None:
                say(f"observations are kept in {record.path}")
                if shows:
                    stack.enter_context(beside(say, port, changes=False)(record.path, None))
            show = stack.enter_context(_shown(form))
            for frame in follower.frames():
                if record is not None:
                    record.write_frame(frame, follower.advising, advise_text.as_data(frame, follower.history))
                    if record.fault is not None and record.fault != fault:
                        say(f"{record.path}: {record.fault}")
                    fault = record.fault
                # also at first: an output that cannot be written must be reported at once
                if frame.news or not reported:
                    _report(follower, frame, report)
                    reported = True
                show(frame)
    except KeyboardInterrupt:
        pass
    if follower.hook is not None and follower.hook.runs:
        err.print("the restart hook is still running and is left running")
    if frame is None:
        return
    if record is not None:
        record.stopped(frame.ended or "interrupted")
    _report(follower, frame, report)
    if form is Format.text:
        if frame.ended is not None:
            err.print(frame.ended, markup=False)
        advise_text.print_text(frame, follower.history)
    else:
        _line(form, {"event": "end", **advise_text.as_data(frame, follower.history)})


@contextlib.contextmanager
def _shown(form: Format) -> Iterator[Show]:
    """Yields a function that shows a frame: a live view, lines of text, or JSON/YAML lines."""
    from trimtab.render.live import LiveView
    from trimtab.render.text import advise as advise_text

    if form is Format.text:
        with LiveView(advise_text.picture, lambda _, frame: advise_text.lines(frame)) as view:
            yield view.show
        return

    def events(frame: FollowFrame) -> None:
        for event in advise_text.events(frame):
            _line(form, event)

    yield events


def _line(form: Format, data: dict[str, Any]) -> None:
    if form is Format.json:
        sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        from trimtab.formats.yaml_text import dump

        sys.stdout.write("---\n" + dump(data))
    sys.stdout.flush()


def _report(follower: Follower, frame: FollowFrame, report: Path | None) -> None:
    if report is None:
        return
    from trimtab.render.html.advise_report import advise_report

    write_text(report, advise_report(follower, frame))


def _check_call(
    follow: list[Path] | None, once: bool, hook: str | None, shows: bool, seconds: dict[str, float]
) -> None:
    if not follow:
        raise InputError("--follow is missing: the log of the run", hint="trimtab advise CONFIG --follow run.log")
    if once and hook is not None:
        raise InputError("--restart-hook and --once exclude each other", where="command line")
    if once and shows:
        raise InputError(
            "--dashboard and --once exclude each other",
            where="command line",
            hint="use --once --folder DIR, then `trimtab show DIR --dashboard`",
        )
    for option, value in seconds.items():
        check_seconds(value, option, SHORTEST_S)
