"""Reads traces: job and request tables in CSV, plain or gzip. Values are used unchanged.

A trace that is truncated, unsorted, lacks a column or has an invalid value is refused with its line number: results
from half a trace would look like any others. Extra columns are ignored only if the kind of trace is known to have them.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from trimtab.core.errors import InputError, nearest
from trimtab.core.frozen import Frozen
from trimtab.formats.files import unreadable

MAX_ROWS = 10_000_000
TraceItem = TypeVar("TraceItem")


class JobRow(Frozen):
    """A row of a job table."""

    submit_s: float
    duration_s: float
    gpus: int
    group: str = ""  # user group: a virtual cluster, a team


class RequestRow(Frozen):
    """A row of a request trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # prefix block hashes; empty: unknown


class TraceKind(Frozen):
    """A kind of trace: required and optional columns."""

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()


JOBS = TraceKind("job table", ("submit_s", "duration_s", "gpus"), ("virtual_cluster",))
AZURE = TraceKind("Azure LLM trace", ("arrival_s", "input_tokens", "output_tokens"))
MOONCAKE = TraceKind(
    "Mooncake trace",
    ("arrival_ms", "input_tokens", "output_tokens"),
    ("blocks", "prefix_hit_blocks_infinite_cache", "hash_ids"),
)


def jobs(path: Path, limit: int | None = None) -> list[JobRow]:
    """Jobs of a Philly-style table, in order of submission."""

    def job(row: TraceRow) -> tuple[float, JobRow]:
        submit_s, gpus = row.number("submit_s"), row.whole("gpus")
        if gpus < 1:
            raise InputError(f"a job asks for {gpus} GPUs", where=row.where, hint="at least 1")
        return submit_s, JobRow(submit_s, row.number("duration_s"), gpus, row.words.get("virtual_cluster", ""))

    return _in_order(path, (JOBS,), job, "submit_s", limit)


def requests(path: Path, limit: int | None = None) -> list[RequestRow]:
    """Requests of an Azure LLM or Mooncake trace, in order of arrival; the columns tell which."""

    def request(row: TraceRow) -> tuple[float, RequestRow]:
        arrival_s = row.number("arrival_ms") / 1e3 if "arrival_ms" in row.words else row.number("arrival_s")
        blocks = tuple(row.integer("hash_ids", word) for word in row.words.get("hash_ids", "").split())
        return arrival_s, RequestRow(arrival_s, row.whole("input_tokens"), row.whole("output_tokens"), blocks)

    return _in_order(path, (AZURE, MOONCAKE), request, "arrival", limit)


def _in_order(
    path: Path,
    kinds: Sequence[TraceKind],
    parse: Callable[[TraceRow], tuple[float, TraceItem]],
    column: str,
    limit: int | None,
) -> list[TraceItem]:
    """Parsed rows, of which the time must not decrease."""
    found: list[TraceItem] = []
    before = 0.0
    for _, row in rows(path, kinds):
        at, item = parse(row)
        if at < before:
            what, hint = f"{column} is earlier than in the line before", "sort the trace by time"
            raise InputError(what, where=row.where, hint=hint)
        before = at
        found.append(item)
        if limit is not None and len(found) >= limit:
            break
    if not found:
        raise InputError("the trace has no rows", where=str(path))
    return found


class TraceRow(Frozen):
    """A row of a trace, by column."""

    words: dict[str, str]
    where: str

    def number(self, column: str) -> float:
        """A number of 0 or more."""
        text = self.words[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{column} is {text!r}, not a number of 0 or more", where=self.where)
        return value

    def whole(self, column: str) -> int:
        """A whole number of 0 or more."""
        value = self.number(column)
        if value != int(value):
            raise InputError(f"{column} is {self.words[column]!r}, not a whole number", where=self.where)
        return int(value)

    def integer(self, column: str, text: str) -> int:
        """Parses a whole number of a column that holds several."""
        try:
            return int(text)
        except ValueError:
            raise InputError(f"{column} has {text!r}, not a whole number", where=self.where) from None


def rows(path: Path, kinds: Sequence[TraceKind]) -> Iterator[tuple[int, TraceRow]]:
    """Rows of a trace of one of these kinds, with their line numbers."""
    try:
        raw = path.open("rb")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    with raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if zipped else raw, encoding="utf-8", newline="")
        reader = csv.reader(file, strict=True)
        try:
            head = next(reader, None)
            if head is None:
                raise InputError("the trace is empty", where=str(path))
            head = [name.strip().lstrip("\ufeff") for name in head]
            _known(head, kinds, path)
            for words in reader:
                line = reader.line_num
                where = f"{path}, line {line}"
                if len(words) != len(head):
                    hint = "the file may have been cut short" if len(words) < len(head) else None
                    raise InputError(f"{len(head)} columns are expected, not {len(words)}", where=where, hint=hint)
                if line > MAX_ROWS:
                    raise InputError(f"more than {MAX_ROWS:,} lines", where=str(path))
                yield line, TraceRow(dict(zip(head, words, strict=True)), where)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"the file is cut short or damaged: {error}", where=str(path), hint="fetch it again"
            ) from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"not a text table: {error}", where=str(path)) from None
        except OSError as error:
            raise unreadable(path, error) from None


def _known(head: list[str], kinds: Sequence[TraceKind], path: Path) -> None:
    where = f"{path}, line 1"
    doubled = sorted({name for name in head if head.count(name) > 1})
    if doubled:
        raise InputError(f"column {doubled[0]} appears twice", where=where)
    kind = max(kinds, key=lambda kind: len(set(kind.needs) & set(head)))
    missing = [name for name in kind.needs if name not in head]
    unknown = [name for name in head if name not in (*kind.needs, *kind.may)]
    columns = f"a {kind.name} has {', '.join(kind.needs)}" + (f", and may have {', '.join(kind.may)}" * bool(kind.may))
    if missing:
        near = nearest(missing[0], unknown)
        hint = f"did you mean {missing[0]} by {near}? {columns}" if near else columns
        raise InputError(f"column {missing[0]} is missing", where=where, hint=hint)
    if unknown:
        raise InputError(f"unknown column {unknown[0]}", where=where, hint=columns)
