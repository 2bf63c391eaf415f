"""`trimtab why`: what waits on any Ray cluster, and why; the story of a task, group, node, engine or request.

Read-only. Exit status: 0 if nothing waits, or if what waits can start when other work ends (`status` in the output
tells which); 3 if something can never start on the nodes that stay. `--would-fit` checks a job that has not been
started. Heavy imports happen inside the functions, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import (
    AddressOption,
    AtMostOption,
    EveryOption,
    FormatOption,
    NameOption,
    OverridesArgument,
    ProfileOption,
    TokenFileOption,
    UrlOption,
    at_most_of,
    check_seconds,
    controller_session,
    read_profile,
)
from trimtab.core.errors import InfeasibleError, InputError, TrimtabError
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.machines.diagnose.findings import Diagnosis
    from trimtab.machines.diagnose.snapshot import GcsSnapshot
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.rayapi.gcs_snapshot import GcsReader

SHORTEST_S = 0.2  # between two snapshots


def why(
    name: Annotated[
        str | None,
        Argument(metavar="[NAME]", help="Task, elastic group, node (prefix of its id), engine or request; else all."),
    ] = None,
    overrides: OverridesArgument = None,
    address: AddressOption = None,
    controller: NameOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    would_fit: Annotated[
        Path | None, Option(metavar="FILE", help="Check whether the plan of this job file would fit.")
    ] = None,
    profile: ProfileOption = None,
    live: Annotated[bool, Option("--live", help="Update until nothing waits.")] = False,
    every: EveryOption = 2.0,
    at_most: AtMostOption = 3600.0,
    form: FormatOption = Format.text,
) -> None:
    """Say why a task, node, engine or anything of a Ray cluster waits, and what would help.

    Without NAME: every actor, task and placement group that waits on a Ray cluster, whatever runs there. With NAME: its
    state, the reason, what must happen next, and its story, as the engines' gateway or the pools' controller tells it.
    Exit status 3 if something can never start.

    Examples:

        trimtab why
        trimtab why rollout-03
        trimtab why engine-2
        trimtab why --address 10.0.0.1:6379 --live
        trimtab why --would-fit job.yaml cluster.nodes=4
    """
    words = [word for word in (name, *(overrides or ())) if word is not None]
    if would_fit is None and (profile is not None or any("=" in word for word in words)):
        raise InputError("KEY=VALUE and --profile need --would-fit", hint="trimtab why --would-fit job.yaml KEY=VALUE")
    if live and (would_fit is not None or words):
        raise InputError("--live shows all that waits, without NAME and --would-fit", where="command line")
    check_seconds(every, "--every", SHORTEST_S)
    if would_fit is not None:
        never = _would_fit(would_fit, words, profile, address, form)
    elif len(words) > 1:
        raise InputError("one NAME at a time", where="command line")
    elif words:
        _explain(words[0], address, controller, url, token_file, form)
        return
    else:
        never = _why(address, every if live else None, at_most_of(at_most), form)
    if never:
        raise typer.Exit(InfeasibleError.exit_status)


def _explain(
    name: str, address: str | None, controller: str | None, url: str | None, token_file: Path | None, form: Format
) -> None:
    """Explains what a gateway (its address, or one of this user that knows the name) or a controller has."""
    from trimtab.cli.engine import commands as engines
    from trimtab.render.text import pool as pool_text

    if url is not None or (address is None and controller is None and engines.knows(name)):
        engines.show(name, url, token_file, form)
        return
    with controller_session(address, controller) as session:
        try:
            explanation = session.explain(name)
        except InputError as unknown:
            group = pool_text.group_data(name, session.status())
            data = group or _node_data(session, name, unknown)
            answer(data, form, lambda: (pool_text.print_group if group else pool_text.print_node)(data))
            return
        data = pool_text.explanation_data(explanation, session.status())
    answer(data, form, lambda: pool_text.print_explanation(data))


def _node_data(session: Session, name: str, unknown: InputError) -> dict[str, Any]:
    """A node's story; raises `unknown` if the name is not a node's."""
    from trimtab.render.text import pool as pool_text

    try:
        node, story = session.ask("node_story", name)
    except InputError:
        if not (unknown.hint or "").startswith("did you mean"):
            unknown.hint = "`trimtab task list` shows all tasks, `trimtab node list` the nodes"
        raise unknown from None
    return pool_text.node_data(node, story, session.status(), session.tasks())


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
