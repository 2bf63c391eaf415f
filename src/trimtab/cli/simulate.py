"""`trimtab simulate`: policies on simulated clusters, or on the workload of a controller's journal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trimtab.cli.options import FormatOption, ReportOption, save
from trimtab.core import plain_data as plain
from trimtab.core.errors import InputError, check_known
from trimtab.render.output import Format, answer, err, warn

if TYPE_CHECKING:
    from trimtab.runtime.store.journal import JournalContents

POINTS = 5  # of a swept range
SWEEP = "command line: --sweep"
FIRST = 20  # lines read to identify a file
HINT = "`trimtab pool show` shows the directory of a controller's journal"


def simulate(
    file: Annotated[
        Path, Argument(help="Scenario (tasks, rollouts or a job), or the journal of a controller: `trimtab pool show`.")
    ],
    policy: Annotated[
        list[str] | None,
        Option(help="Only this policy; on a journal one to try: a YAML file, or a name such as fifo (repeatable)."),
    ] = None,
    seed: Annotated[list[int] | None, Option(help="Only this seed (repeatable).")] = None,
    jobs: Annotated[int, Option("--jobs", "-j", min=1, max=256, help="Parallel runs.")] = 1,
    sweep: Annotated[
        str | None, Option(help="Sweep a setting: starvation_timeout_s=60,600,3600 or same_pool_gap=1..5.")
    ] = None,
    report: ReportOption = None,
    csv: Annotated[Path | None, Option("--csv", metavar="FILE", help="Write a row per policy and seed.")] = None,
    form: FormatOption = Format.text,
) -> None:
    """Run policies under a virtual clock: the machines that run live, and baselines.

    A scenario describes a cluster with tasks, engines with rollouts, or a job. A journal is replayed: its instructions
    are compared with those of this release, and other policies try the same tasks.

    Examples:

        trimtab simulate scenario.yaml --policy trimtab --policy fifo --report policies.html
        trimtab simulate scenario.yaml --sweep starvation_timeout_s=60,600,3600
        trimtab simulate /tmp/ray/session_latest/trimtab/trimtab --policy fifo --policy patient.yaml
    """
    if is_journal(file):
        if seed or sweep is not None:
            raise InputError("--seed and --sweep need a scenario, not a journal", where="command line")
        _replay(file, policy or [], report, csv, form)
        return
    from trimtab.formats.yaml_text import read_mapping
    from trimtab.render.html.simulation import KINDS
    from trimtab.render.live import run_all

    content = read_mapping(file)
    kind, print_text, page = KINDS[next((section for section in KINDS if section in content), "tasks")]
    selected = _narrowed(kind.read(file), policy or [], seed or [])
    if sweep is not None:
        selected, left_out = kind.sweep.sweep(selected, *_sweep(sweep), SWEEP)
        for sentence in left_out:
            err.print(sentence, markup=False)
    runs = run_all(selected, kind.run, jobs)
    advice = None
    if sweep is not None:
        advice = kind.sweep.recommend(selected, runs, lambda other: run_all(other, kind.run, jobs))
    compared = kind.compare(selected, runs, advice)
    if report is not None:
        save(report, page(compared, f"trimtab simulate {file}"))
    _answer(compared, lambda: print_text(compared), csv, form)


def _answer(compared: Any, text: Callable[[], None], csv: Path | None, form: Format) -> None:
    if csv is not None:
        save(csv, compared.csv(), "table")
    answer(compared.data(), form, text)


def _sweep(text: str) -> tuple[str, list[float]]:
    key, equals, stated = text.partition("=")
    if not equals:
        raise InputError(f"{key} has no values", where=SWEEP, hint=f"{key}=1,2,3 or {key}=1..3")
    try:
        if ".." in stated:
            low, high = (float(word) for word in stated.split(".."))
            found = [low + (high - low) * at / (POINTS - 1) for at in range(POINTS)]
        else:
            found = [float(word) for word in stated.split(",")]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) for value in found) or len(found) > 100:
        hint = "numbers with commas, or a range: 0.5..0.95"
        raise InputError(f"{stated!r} is not a list of values", where=SWEEP, hint=hint)
    return key, found


def _narrowed(scenario: Any, policies: list[str], seeds: list[int]) -> Any:
    known = {item.name: item for item in scenario.policies}
    check_known(policies, known, "command line: --policy", "the scenario has no policy {}")
    kept = tuple(known[name] for name in dict.fromkeys(policies)) or scenario.policies
    return replace(scenario, policies=kept, seeds=tuple(dict.fromkeys(seeds)) or scenario.seeds)


# ---- journals ------------------------------------------------------------------------------------------------------


def is_journal(path: Path) -> bool:
    """Whether to read this as a journal: scenarios are YAML files."""
    return path.is_dir() or path.suffix not in (".yaml", ".yml", ".json")


def _replay(journal: Path, others: list[str], report: Path | None, csv: Path | None, form: Format) -> None:
    from trimtab.render.text import journal as replay_text
    from trimtab.replay.journal.record import read_record
    from trimtab.replay.journal.replay import read_alternatives

    policies = read_alternatives(others)
    found = read_journal_path(journal)
    if found.torn:
        warn(found.torn)
    try:
        record = read_record(found.snapshot, found.events, found.instructions, found.began)
    except InputError as error:
        error.where = error.where or str(journal)
        raise
    replayed = replay_text.replayed(journal.resolve().name or str(journal), record, policies)
    if report is not None:
        words = " ".join(f"--policy {policy}" for policy in others)
        save(report, replayed.page(f"trimtab simulate {journal} {words}".strip()))
    _answer(replayed, replayed.show, csv, form)
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
