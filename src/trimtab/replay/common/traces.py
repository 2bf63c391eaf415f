"""Reads traces: tables of jobs and of requests, as CSV, plain or compressed with gzip. Nothing is changed or invented.

A trace that is cut short, out of order, without a column or with a value that makes no sense is refused with its line:
figures from half a trace would look like any others. Columns that are not needed are passed over only where the kind of
trace is known to have them.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from trimtab.core.errors import InputError, nearest
from trimtab.formats.files import unreadable

MOST_ROWS = 10_000_000


@dataclass(frozen=True)
class JobRow:
    """A job of a job table."""

    submit_s: float
    duration_s: float
    gpus: int
    group: str = ""  # of users: a virtual cluster, a team


@dataclass(frozen=True)
class RequestRow:
    """A request of a request trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # hashes of its prefix, block by block; empty: not known


@dataclass(frozen=True)
class TraceKind:
    """A kind of trace: what it must have, and what it may have besides."""

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


def jobs(path: Path, most: int | None = None) -> list[JobRow]:
    """The jobs of a table in the manner of the Philly trace, in order of submission."""
    found: list[JobRow] = []
    for line, row in rows(path, (JOBS,)):
        one = JobRow(
            row.number("submit_s"), row.number("duration_s"), row.whole("gpus"), row.words.get("virtual_cluster", "")
        )
        if one.gpus < 1:
            raise InputError(f"a job asks {one.gpus} GPUs", where=f"{path}, line {line}", hint="at least 1")
        if found and one.submit_s < found[-1].submit_s:
            raise _unordered(path, line, "submit_s")
        found.append(one)
        if most is not None and len(found) >= most:
            break
    return _some(found, path)


def requests(path: Path, most: int | None = None) -> list[RequestRow]:
    """The requests of an Azure LLM or a Mooncake trace, in order of arrival; its columns say which it is."""
    found: list[RequestRow] = []
    for line, row in rows(path, (AZURE, MOONCAKE)):
        arrival_s = row.number("arrival_ms") / 1e3 if "arrival_ms" in row.words else row.number("arrival_s")
        hashes = row.words.get("hash_ids", "")
        blocks = tuple(row.integer("hash_ids", one) for one in hashes.split()) if hashes else ()
        one = RequestRow(arrival_s, row.whole("input_tokens"), row.whole("output_tokens"), blocks)
        if found and one.arrival_s < found[-1].arrival_s:
            raise _unordered(path, line, "arrival")
        found.append(one)
        if most is not None and len(found) >= most:
            break
    return _some(found, path)


# ---- one line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceRow:
    """A line of a trace, by column."""

    words: dict[str, str]
    where: str

    def number(self, column: str) -> float:
        """An amount of 0 or more."""
        text = self.words[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{column} is {text!r}, no number of 0 or more", where=self.where)
        return value

    def whole(self, column: str) -> int:
        """A whole number of 0 or more."""
        value = self.number(column)
        if value != int(value):
            raise InputError(f"{column} is {self.words[column]!r}, no whole number", where=self.where)
        return int(value)

    def integer(self, column: str, text: str) -> int:
        """A whole number in a column that holds several."""
        try:
            return int(text)
        except ValueError:
            raise InputError(f"{column} has {text!r}, no whole number", where=self.where) from None


def rows(path: Path, kinds: Sequence[TraceKind]) -> Iterator[tuple[int, TraceRow]]:
    """The lines of a trace of one of these kinds, each with its number."""
    with _opened(path) as raw, _text(raw) as file:
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
                if line > MOST_ROWS:
                    raise InputError(f"more than {MOST_ROWS:,} lines", where=str(path))
                yield line, TraceRow(dict(zip(head, words, strict=True)), where)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"the file is cut short or damaged: {error}", where=str(path), hint="fetch it again"
            ) from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"this is no table of text: {error}", where=str(path)) from None
        except OSError as error:
            raise unreadable(path, error) from None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def _text(raw: BinaryIO) -> io.TextIOWrapper:
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if zipped else raw, encoding="utf-8", newline="")


def _known(head: list[str], kinds: Sequence[TraceKind], path: Path) -> None:
    where = f"{path}, line 1"
    doubled = sorted({name for name in head if head.count(name) > 1})
    if doubled:
        raise InputError(f"column {doubled[0]} stands there twice", where=where)
    kind = max(kinds, key=lambda one: len(set(one.needs) & set(head)))
    missing = [name for name in kind.needs if name not in head]
    unknown = [name for name in head if name not in (*kind.needs, *kind.may)]
    columns = f"a {kind.name} has {', '.join(kind.needs)}" + (f", and may have {', '.join(kind.may)}" * bool(kind.may))
    if missing:
        near = nearest(missing[0], unknown)
        hint = f"did you mean {missing[0]} by {near}? {columns}" if near else columns
        raise InputError(f"column {missing[0]} is missing", where=where, hint=hint)
    if unknown:
        raise InputError(f"column {unknown[0]} is not known", where=where, hint=columns)


def _unordered(path: Path, line: int, column: str) -> InputError:
    return InputError(
        f"{column} is earlier than in the line before", where=f"{path}, line {line}", hint="sort the trace by time"
    )


TraceItem = TypeVar("TraceItem")


def _some(found: list[TraceItem], path: Path) -> list[TraceItem]:
    if not found:
        raise InputError("the trace has no line besides its columns", where=str(path))
    return found
