"""Command output: the same data as text, JSON or YAML.

Only the result goes to standard output; warnings, progress and errors go to standard error.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from trimtab.core.errors import InputError


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


def warn(sentence: str) -> None:
    err.print(f"[yellow]warning:[/] {sentence}", markup=True)
