"""Command output: the same data as text, JSON or YAML.

Only the result goes to standard output; warnings, progress and errors go to standard error.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

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


def plain_table(**options: Any) -> Table:
    """A table with columns and padding, without lines."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", **options)


def warn(sentence: str) -> None:
    err.print(f"[yellow]warning:[/] {sentence}", markup=True)
