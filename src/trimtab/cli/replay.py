"""`trimtab replay JOURNAL`: a controller's journal, played again, and what other policies would have done with it."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.simulate import SimulateFormat
from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError
from trimtab.render.output import warn

if TYPE_CHECKING:
    from trimtab.runtime.store.journal import JournalContents

FIRST = 20  # lines of a file that tell what it is
HINT = "`trimtab status` names the directory of a controller's journal"


def replay(
    journal: Annotated[Path, typer.Argument(help="A controller's journal: the directory that `trimtab status` names.")],
    others: Annotated[
        list[str] | None,
        typer.Option("--with", "-w", help="A policy to try: a YAML file, or a name such as fifo (may be given again)."),
    ] = None,
    form: Annotated[SimulateFormat, typer.Option("--format", "-f", help="text, json or csv.")] = SimulateFormat.text,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with plots to this file.")] = None,
) -> None:
    """Play a journal again: does the machine say the same, how did tasks fare, and what would another policy have done?

    Examples:

        trimtab replay /tmp/ray/session_latest/trimtab/trimtab

        trimtab replay journal --with fifo --with patient.yaml --html report.html
    """
    from trimtab.render.text import journal as replay_text
    from trimtab.replay.journal.policies import read_others
    from trimtab.replay.journal.record import read_record

    asked = read_others(others or [])
    found = read_found(journal)
    if found.torn:
        warn(found.torn)
    try:
        record = read_record(found.snapshot, found.events, found.instructions, found.began)
    except InputError as error:
        error.where = error.where or str(journal)
        raise
    answer = replay_text.replayed(journal.resolve().name or str(journal), record, asked)
    if html is not None:
        from trimtab.formats.files import write_text
        from trimtab.render.output import err

        words = " ".join(f"--with {one}" for one in others or [])
        write_text(html, answer.page(f"trimtab replay {journal} {words}".strip()))
        err.print(f"report: {html}", markup=False)
    if form is SimulateFormat.json:
        sys.stdout.write(json.dumps(answer.data(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    elif form is SimulateFormat.csv:
        sys.stdout.write(answer.csv())
    else:
        answer.show()
    if not record.same:
        raise replay_text.not_the_same(record, str(journal))


def read_found(path: Path) -> JournalContents:
    """The journal in a directory or a file. InputError where it is none, or one of another machine."""
    from trimtab.runtime.store.journal import read_journal, read_segment

    try:
        if path.is_dir():
            files = sorted(one for one in path.iterdir() if one.name.startswith("journal-"))
            snapshots = [one for one in path.iterdir() if one.name.startswith("snapshot-")]
            if not files and not snapshots:
                raise InputError("no journal lies here", where=str(path), hint=_hint(path))
            for file in files:
                _look(file, torn_is_empty=True)
            return read_journal(path)
        number = _look(path)
        if number:
            raise InputError(
                f"this is part {number} of a journal, which begins in the middle",
                where=str(path),
                hint="give the directory, in which the state before it lies",
            )
        return read_segment(path)
    except OSError as fault:
        raise InputError(f"it cannot be read: {fault.strerror or fault}", where=str(path), hint=HINT) from None


def _hint(path: Path) -> str:
    if (path / "events.jsonl").exists():
        return f"this is the folder of a run; the journal is its cluster's: {HINT}"
    return HINT


def _look(path: Path, *, torn_is_empty: bool = False) -> int:
    """Which part of a journal a file is. InputError where it is none of a pool controller's."""
    from trimtab.runtime.store.journal import FORMAT, NODE_EVENTS, POOL_EVENTS, ROLLOUT_EVENTS

    with path.open("rb") as file:
        lines = list(islice(file, FIRST))
    if torn_is_empty and (not lines or not lines[0].endswith(b"\n")):
        return 0  # its header was half written: nothing is in it
    first = [_plain(line) for line in lines]
    head = first[0] if first else None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise InputError("this is no journal", where=str(path), hint=HINT)
    kinds = [str(one[1]) for one in first if isinstance(one, list) and len(one) > 2]
    for kind in kinds:
        for which, known in (("nodes", NODE_EVENTS), ("rollouts", ROLLOUT_EVENTS)):
            if kind not in POOL_EVENTS and kind in known:
                raise InputError(f"this is a journal of {which}, not of pools", where=str(path), hint=HINT)
    segment = head.get("segment", 0)
    return segment if isinstance(segment, int) else 0


def _plain(line: bytes) -> Any:
    try:
        return plain.loads(line)
    except ValueError:
        return None
