"""`trimtab replay JOURNAL`: replays a controller's journal, and other policies on its workload."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trimtab.cli.options import save_report
from trimtab.cli.simulate import SimulateFormat, write_comparison
from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError
from trimtab.render.output import warn

if TYPE_CHECKING:
    from trimtab.runtime.store.journal import JournalContents

FIRST = 20  # lines read to identify a file
HINT = "`trimtab status` shows the directory of a controller's journal"


def replay(
    journal: Annotated[Path, Argument(help="Journal of a controller: the directory shown by `trimtab status`.")],
    others: Annotated[
        list[str] | None,
        Option("--with", "-w", help="Policy to try: a YAML file, or a name such as fifo (repeatable)."),
    ] = None,
    form: Annotated[SimulateFormat, Option("--format", "-f", help="text, json or csv.")] = SimulateFormat.text,
    html: Annotated[Path | None, Option(help="Write an HTML report with plots.")] = None,
) -> None:
    """Replay a journal: compare the instructions, show how tasks fared, and try other policies on the workload.

    Examples:

        trimtab replay /tmp/ray/session_latest/trimtab/trimtab
        trimtab replay journal --with fifo --with patient.yaml --html report.html
    """
    from trimtab.render.text import journal as replay_text
    from trimtab.replay.journal.record import read_record
    from trimtab.replay.journal.replay import read_alternatives

    policies = read_alternatives(others or [])
    found = read_journal_path(journal)
    if found.torn:
        warn(found.torn)
    try:
        record = read_record(found.snapshot, found.events, found.instructions, found.began)
    except InputError as error:
        error.where = error.where or str(journal)
        raise
    answer = replay_text.replayed(journal.resolve().name or str(journal), record, policies)
    if html is not None:
        words = " ".join(f"--with {policy}" for policy in others or [])
        save_report(html, answer.page(f"trimtab replay {journal} {words}".strip()))
    if form is SimulateFormat.text:
        answer.show()
    else:
        write_comparison(answer.data(), answer.csv, form)
    if not record.same:
        raise replay_text.not_the_same(record, str(journal))


def read_journal_path(path: Path) -> JournalContents:
    """Reads the journal in a directory or file. Raises InputError if it is none, or of another machine."""
    from trimtab.runtime.store.journal import read_journal, read_segment

    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.name.startswith("journal-"))
            snapshots = [file for file in path.iterdir() if file.name.startswith("snapshot-")]
            if not files and not snapshots:
                of_run = (
                    "this is the folder of a run, not of a controller; " if (path / "events.jsonl").exists() else ""
                )
                raise InputError("there is no journal here", where=str(path), hint=of_run + HINT)
            for file in files:
                _segment_number(file, torn_is_empty=True)
            return read_journal(path)
        number = _segment_number(path)
        if number:
            raise InputError(
                f"this is part {number} of a journal, which begins in the middle",
                where=str(path),
                hint="pass the directory, which has the state before it",
            )
        return read_segment(path)
    except OSError as fault:
        raise InputError(f"the journal cannot be read: {fault.strerror or fault}", where=str(path), hint=HINT) from None


def _segment_number(path: Path, *, torn_is_empty: bool = False) -> int:
    """The number of a journal segment. Raises InputError if the file is not a pool controller's journal."""
    from trimtab.runtime.store.journal import FORMAT, NODE_EVENTS, POOL_EVENTS, ROLLOUT_EVENTS

    with path.open("rb") as file:
        lines = list(islice(file, FIRST))
    if torn_is_empty and (not lines or not lines[0].endswith(b"\n")):
        return 0  # its header was not written completely: it is empty
    first = [_plain(line) for line in lines]
    head = first[0] if first else None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise InputError("not a journal", where=str(path), hint=HINT)
    kinds = [str(line[1]) for line in first if isinstance(line, list) and len(line) > 2]
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
