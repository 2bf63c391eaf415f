"""Command output: the same data as text, JSON or YAML; facts, tables, stories, amounts, durations.

Only the result goes to standard output; warnings, progress and errors go to standard error.
"""

from __future__ import annotations

import enum
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from trimtab.core.errors import InputError
from trimtab.core.reasons import Reason, StoryEntry


class Format(str, enum.Enum):
    """Output format of a command."""

    text = "text"
    json = "json"
    yaml = "yaml"


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def answer(data: Mapping[str, Any], form: Format, text: Callable[[], None]) -> None:
    """Write `data` as JSON or YAML, or call `text()` to print it as text."""
    if form is Format.text:
        text()
    elif form is Format.json:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        from trimtab.formats.yaml_text import dump

        sys.stdout.write(dump(data))


def share(text: str, option: str) -> float:
    """Parse a share: `5%` or `0.05`."""
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InputError(f"a share such as 5% or 0.05 is expected, not {text}", where=f"command line: {option}")
    return value


def text_table(
    heads: Sequence[str | Column], rows: Iterable[Sequence[Any]], *, no_wrap: bool = False, **options: Any
) -> Table:
    """A table without lines. `>` before a heading aligns its column to the right; only `Text` may be styled."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", **options)
    for head in heads:
        if isinstance(head, Column):
            table.columns.append(replace(head, _index=len(table.columns), _cells=[]))
        else:
            side: Literal["left", "right"] = "right" if head.startswith(">") else "left"
            table.add_column(head.removeprefix(">"), justify=side, no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else escape(str(cell)) for cell in row))
    return table


def print_list(heading: str, sentences: Iterable[str]) -> None:
    """A heading and its sentences; nothing without any."""
    for at, sentence in enumerate(sentences):
        if not at:
            out.print(f"\n[bold]{heading}[/]")
        out.print(f"  - {sentence}", markup=False)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        out.print(line, markup=False)


def warn(sentence: str) -> None:
    err.print(f"[yellow]warning:[/] {sentence}", markup=True)


PIPE_WIDTH = 400
Data = Mapping[str, Any]


def span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def print_story(story: Sequence[Data]) -> None:
    out.print()
    rows = ((clock(entry["at"]), entry["state"], reason_text(entry)) for entry in story)
    show(text_table(("when", "state", "why"), rows))


def facts(*rows: tuple[str, str]) -> None:
    show(facts_table(rows))


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    heads = (Column(style="dim"), Column(overflow="fold"))
    return text_table(heads, rows, show_header=False)


def show(parts: RenderableType) -> None:
    """Print at the terminal's width; into a pipe one row per line, without trailing spaces."""
    if out.is_terminal:
        out.print(parts)
        return
    out.file.write("".join(f"{line}\n" for line in text_lines(parts)))


def text_lines(parts: RenderableType) -> list[str]:
    page = io.StringIO()
    Console(file=page, highlight=False, width=PIPE_WIDTH).print(parts)
    return [line.rstrip() for line in page.getvalue().splitlines()]


def reason_text(reason: Data) -> str:
    return ": ".join(part for part in (reason["code"], reason["sentence"]) if part)


def amounts(resources: Mapping[str, float]) -> str:
    shown = []
    for name, amount in resources.items():
        if not name.startswith("node:"):
            unit, size = unit_of(name, amount)
            shown.append(f"{amount / size:.4g} {unit}")
    return ", ".join(shown) or "nothing"


def unit_of(name: str, amount: float) -> tuple[str, float]:
    """A resource's display unit, and how many raw units it is."""
    if name in ("memory", "object_store_memory") and amount >= 2**20:
        return (f"GiB {name}", 2**30) if amount >= 2**30 else (f"MiB {name}", 2**20)
    return name, 1


def counts(numbers: Mapping[str, int], order: Iterable[str]) -> str:
    """Counts with their words, in this order, without zeros."""
    return ", ".join(f"{numbers[word]} {word}" for word in order if numbers.get(word))


def print_more(total: int, shown: int) -> None:
    if total > shown:
        out.print(f"and {total - shown} more: --format json has all")


def clock(at: float) -> str:
    """Local time of day; with the date unless it is today."""
    when, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if when[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", when)


def picked(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def reason_data(reason: Reason) -> dict[str, str]:
    return {"code": reason.code.value, "sentence": reason.sentence}


def story_data(story: Iterable[StoryEntry]) -> list[dict[str, Any]]:
    return [{"at": entry.at, "state": entry.state, **reason_data(entry.reason)} for entry in story]
