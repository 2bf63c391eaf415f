"""`trimtab why`: what waits on any Ray cluster, and why. Looks, and changes nothing.

Exit status: 0 when nothing waits, and when what waits can start once others end (the answer says so: `status`); 3 when
something can never start on the nodes that are here and stay. With `--would-fit` the same about a job that has not been
started. What it needs is imported when it runs, so that the command line starts quickly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.render.output import Format, answer, out

if TYPE_CHECKING:
    from trimtab.machines.diagnose.findings import Diagnosis
    from trimtab.machines.diagnose.snapshot import GcsSnapshot
    from trimtab.runtime.rayapi.gcs_snapshot import GcsReader

SHORTEST_S = 0.2  # between two looks


def why(
    address: Annotated[
        str | None,
        typer.Option(
            "--address", "-a", help="The Ray cluster (host:6379); else RAY_ADDRESS, else the one that runs here."
        ),
    ] = None,
    would_fit: Annotated[
        Path | None, typer.Option("--would-fit", metavar="JOB", help="Would the plan of this job file find its room?")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="With --would-fit: keys of the job file to override."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", "-p", help="With --would-fit: measured costs for the plan.")
    ] = None,
    watch: Annotated[
        float | None, typer.Option("--watch", "-w", metavar="S", help="Look again every S seconds until nothing waits.")
    ] = None,
    at_most: Annotated[
        float, typer.Option("--at-most", metavar="S", help="With --watch: stop after so many seconds.")
    ] = 3600.0,
    form: Annotated[Format, typer.Option("--format", "-f", help="How the answer is written.")] = Format.text,
) -> None:
    """Why does it wait? Every actor, task and placement group of a Ray cluster that does not run, and what would help.

    For any Ray, with nothing else of trimtab in use. Exit status 3 when something can never start as things are.

    Examples:

        trimtab why

        trimtab why --address 10.0.0.1:6379 --format json

        trimtab why --watch 2

        trimtab why --would-fit job.yaml cluster.nodes=4
    """
    if would_fit is None and (overrides or profile is not None):
        raise InputError(
            "overrides and --profile belong to --would-fit", hint="trimtab why --would-fit job.yaml KEY=VALUE"
        )
    if watch is not None:
        _checked(watch, "--watch", SHORTEST_S)
        _checked(at_most, "--at-most", 0.0)
    if would_fit is not None:
        if watch is not None:
            raise InputError("--watch and --would-fit do not go together", where="command line")
        never = _would_fit(would_fit, overrides or [], profile, address, form)
    else:
        never = _why(address, watch, at_most, form)
    if never:
        raise typer.Exit(InfeasibleError.exit_status)


def _why(address: str | None, watch: float | None, at_most: float, form: Format) -> bool:
    """Answer; whether something can never start."""
    from trimtab.machines.diagnose.why import diagnose
    from trimtab.render.text import why as why_text

    lookout = _lookout(address)
    if watch is None:
        snapshot = lookout.look()
        found = diagnose(snapshot)
    elif form is Format.text:
        return _watch_text(lookout, watch, at_most)
    else:  # for programs: one answer, once nothing waits or the time is over
        *_, (snapshot, found) = _looks(lookout, watch, at_most)
    answer(why_text.as_data(snapshot, found), form, lambda: why_text.print_why(snapshot, found))
    return found.never > 0


def _lookout(address: str | None) -> GcsReader:
    from trimtab.runtime.rayapi.gcs_snapshot import GcsReader, find

    return GcsReader(find(address))


def _looks(lookout: GcsReader, every_s: float, at_most_s: float) -> Iterator[tuple[GcsSnapshot, Diagnosis]]:
    """Look again and again until nothing waits or the time is over.

    Where Ray does not say since when something waits, it is since it was first seen to.
    """
    from trimtab.machines.diagnose.why import diagnose

    end = time.monotonic() + at_most_s
    first_seen: dict[str, float] = {}
    while True:
        snapshot = lookout.look()
        waiting = tuple(
            one
            if one.since is not None
            else replace(one, since=first_seen.setdefault(one.id, snapshot.at), at_least=True)
            for one in snapshot.waiting
        )
        snapshot = replace(snapshot, waiting=waiting)
        found = diagnose(snapshot)
        yield snapshot, found
        left = end - time.monotonic()
        if not found.waits or left <= 0:
            return
        time.sleep(min(every_s, left))


def _watch_text(lookout: GcsReader, every_s: float, at_most_s: float) -> bool:
    """A live view on a terminal, elsewhere a new picture whenever it changes. Ctrl-C leaves with what was seen last."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from trimtab.render.text import why as why_text
    from trimtab.render.text.formatting import clock

    never, before = False, None
    try:
        if out.is_terminal:
            screen = Console(highlight=False)  # lines are folded, where `out` would have the view cut them
            with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
                for snapshot, found in _looks(lookout, every_s, at_most_s):
                    never = found.never > 0
                    line = Text(f"\n{clock(snapshot.at)}, every {every_s:g} s; Ctrl-C ends", style="dim")
                    live.update(Group(why_text.picture(snapshot, found), line), refresh=True)
        else:
            for snapshot, found in _looks(lookout, every_s, at_most_s):
                never = found.never > 0
                seen = [
                    (one.cause, one.never, one.count, [each.id for each in one.workloads]) for one in found.findings
                ]
                if seen != before:
                    out.print(f"-- {clock(snapshot.at)}", markup=False)
                    why_text.print_why(snapshot, found)
                before = seen
    except KeyboardInterrupt:
        pass
    return never


def _would_fit(job: Path, overrides: list[str], profile: Path | None, address: str | None, form: Format) -> bool:
    from trimtab.formats.load import load
    from trimtab.machines.diagnose.would_fit import would_fit
    from trimtab.plan.placement.planner import best_plan
    from trimtab.plan.placement.timeline import to_plan
    from trimtab.render.text import why as why_text

    measured = None
    if profile is not None:
        from trimtab.formats import profile_file

        measured = profile_file.read(profile)
    loaded = load(job, overrides, measured)
    try:
        space, outcome = best_plan(loaded.job, loaded.rules)
    except TrimtabError as error:
        error.where = f"{job}: {error.where}" if error.where and not error.where.startswith(str(job)) else str(job)
        raise
    assert outcome.best is not None
    plan = to_plan(space, outcome.best)
    snapshot = _lookout(address).look()
    found = would_fit(job.name, loaded.job, plan, snapshot)
    answer(
        why_text.would_fit_data(snapshot, str(job), plan.describe(), found),
        form,
        lambda: why_text.print_would_fit(snapshot, job.name, plan.describe(), found),
    )
    return not found.ever


def _checked(seconds: float, option: str, least: float) -> None:
    if not least <= seconds < float("inf"):
        raise InputError(f"{option} takes at least {least:g} s, not {seconds:g}", where=f"command line: {option}")
