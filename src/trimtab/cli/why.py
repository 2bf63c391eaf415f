"""`trimtab why`: what waits on any Ray cluster, and why. Read-only.

Exit status: 0 if nothing waits, or if what waits can start when other work ends (`status` in the output tells which); 3
if something can never start on the nodes that stay. `--would-fit` checks a job that has not been started. Heavy imports
happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from trimtab.cli.advise import check_seconds
from trimtab.cli.options import FormatOption, read_profile
from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.machines.diagnose.findings import Diagnosis
    from trimtab.machines.diagnose.snapshot import GcsSnapshot
    from trimtab.runtime.rayapi.gcs_snapshot import GcsReader

SHORTEST_S = 0.2  # between two snapshots


def why(
    address: Annotated[
        str | None,
        Option("--address", "-a", help="Ray cluster (host:6379).  [default: RAY_ADDRESS, or the local cluster]"),
    ] = None,
    would_fit: Annotated[
        Path | None, Option(metavar="JOB", help="Check whether the plan of this job file would fit.")
    ] = None,
    overrides: Annotated[
        list[str] | None, Argument(metavar="[KEY=VALUE]...", help="With --would-fit: keys of the job file to override.")
    ] = None,
    profile: Annotated[
        Path | None, Option("--profile", "-p", help="With --would-fit: measured costs for the plan.")
    ] = None,
    watch: Annotated[
        float | None, Option("--watch", "-w", metavar="S", help="Repeat every S seconds until nothing waits.")
    ] = None,
    at_most: Annotated[float, Option(metavar="S", help="With --watch: stop after this time.")] = 3600.0,
    form: FormatOption = Format.text,
) -> None:
    """Explain every actor, task and placement group of a Ray cluster that waits, and what would help.

    Works with any Ray cluster; trimtab need not run on it. Exit status 3 if something can never start.

    Examples:

        trimtab why
        trimtab why --address 10.0.0.1:6379 --format json
        trimtab why --watch 2
        trimtab why --would-fit job.yaml cluster.nodes=4
    """
    if would_fit is None and (overrides or profile is not None):
        raise InputError("overrides and --profile need --would-fit", hint="trimtab why --would-fit job.yaml KEY=VALUE")
    if watch is not None:
        check_seconds(watch, "--watch", SHORTEST_S)
        check_seconds(at_most, "--at-most", 0.0)
    if would_fit is not None:
        if watch is not None:
            raise InputError("--watch and --would-fit exclude each other", where="command line")
        never = _would_fit(would_fit, overrides or [], profile, address, form)
    else:
        never = _why(address, watch, at_most, form)
    if never:
        raise typer.Exit(InfeasibleError.exit_status)


def _why(address: str | None, watch: float | None, at_most: float, form: Format) -> bool:
    """Prints the diagnosis; returns whether something can never start."""
    from trimtab.machines.diagnose.why import diagnose
    from trimtab.render.text import why as why_text

    reader = _reader(address)
    if watch is None:
        snapshot = reader.look()
        found = diagnose(snapshot)
    elif form is Format.text:
        return _watch_text(reader, watch, at_most)
    else:  # JSON and YAML: one document, when nothing waits or the time is over
        *_, (snapshot, found) = _diagnoses(reader, watch, at_most)
    answer(why_text.as_data(snapshot, found), form, lambda: why_text.print_why(snapshot, found))
    return found.never > 0


def _reader(address: str | None) -> GcsReader:
    from trimtab.runtime.rayapi.gcs_snapshot import GcsReader, find

    return GcsReader(find(address))


def _diagnoses(reader: GcsReader, every_s: float, at_most_s: float) -> Iterator[tuple[GcsSnapshot, Diagnosis]]:
    """Repeats snapshot and diagnosis until nothing waits or the time is over.

    If Ray does not record since when something waits, the first snapshot that has it counts.
    """
    from trimtab.machines.diagnose.why import diagnose

    end = time.monotonic() + at_most_s
    first_seen: dict[str, float] = {}
    while True:
        snapshot = reader.look()
        waiting = tuple(
            item
            if item.since is not None
            else replace(item, since=first_seen.setdefault(item.id, snapshot.at), at_least=True)
            for item in snapshot.waiting
        )
        snapshot = replace(snapshot, waiting=waiting)
        found = diagnose(snapshot)
        yield snapshot, found
        left = end - time.monotonic()
        if not found.waits or left <= 0:
            return
        time.sleep(min(every_s, left))


def _watch_text(reader: GcsReader, every_s: float, at_most_s: float) -> bool:
    """A live view on a terminal, otherwise a new text whenever it changes. Ctrl-C ends it with the last result."""
    from trimtab.render.live import LiveView
    from trimtab.render.text import why as why_text

    never = False
    with (
        contextlib.suppress(KeyboardInterrupt),
        LiveView(lambda seen: why_text.live_picture(*seen, every_s), why_text.change_lines, stays=True) as view,
    ):
        for snapshot, found in _diagnoses(reader, every_s, at_most_s):
            never = found.never > 0
            view.show((snapshot, found))
    return never


def _would_fit(job: Path, overrides: list[str], profile: Path | None, address: str | None, form: Format) -> bool:
    from trimtab.formats.load import load
    from trimtab.machines.diagnose.would_fit import would_fit
    from trimtab.plan.placement.planner import best_plan
    from trimtab.plan.placement.timeline import to_plan
    from trimtab.render.text import why as why_text

    measured = read_profile(profile)
    loaded = load(job, overrides, measured)
    try:
        space, outcome = best_plan(loaded.job, loaded.rules)
    except TrimtabError as error:
        error.where = f"{job}: {error.where}" if error.where and not error.where.startswith(str(job)) else str(job)
        raise
    assert outcome.best is not None
    plan = to_plan(space, outcome.best)
    snapshot = _reader(address).look()
    found = would_fit(job.name, loaded.job, plan, snapshot)
    answer(
        why_text.would_fit_data(snapshot, str(job), plan.describe(), found),
        form,
        lambda: why_text.print_would_fit(snapshot, job.name, plan.describe(), found),
    )
    return not found.ever
