"""How pools, nodes and groups are written for people: facts, tables, stories, amounts, spans of time. Asks nobody."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape

from trimtab.core.reasons import Reason, StoryEntry
from trimtab.render.output import out, plain_table

PIPE_WIDTH = 400
Data = Mapping[str, Any]


def span(seconds: float) -> str:
    """A length of time as people say it."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def print_story(story: Sequence[Data]) -> None:
    """A story, a line for every chapter."""
    table = plain_table()
    for heading in ("when", "state", "why"):
        table.add_column(heading)
    for entry in story:
        table.add_row(clock(entry["at"]), entry["state"], why(entry))
    out.print()
    show(table)


def facts(*rows: tuple[str, str]) -> None:
    """Words and what they stand for, a line each."""
    table = plain_table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for word, sentence in rows:
        table.add_row(word, escape(sentence))
    show(table)


def show(parts: RenderableType) -> None:
    """As wide as the terminal; for a program that reads lines, a row is a line, with nothing after its last word."""
    if out.is_terminal:
        out.print(parts)
        return
    page = io.StringIO()
    Console(file=page, highlight=False, width=PIPE_WIDTH).print(parts)
    out.file.write("".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines()))


def why(reason: Data) -> str:
    """A reason as a program and a person read it."""
    return escape(": ".join(part for part in (reason["code"], reason["sentence"]) if part))


def amounts(resources: Mapping[str, float]) -> str:
    """Resources as people write them."""
    shown = []
    for name, amount in resources.items():
        if not name.startswith("node:"):
            unit, size = unit_of(name, amount)
            shown.append(f"{amount / size:.4g} {unit}")
    return escape(", ".join(shown) or "nothing")


def unit_of(name: str, amount: float) -> tuple[str, float]:
    """A resource's name with its unit, and how much one of that is."""
    if name in ("memory", "object_store_memory") and amount >= 2**20:
        return (f"GiB {name}", 2**30) if amount >= 2**30 else (f"MiB {name}", 2**20)
    return name, 1


def counts(numbers: Mapping[str, int], order: Iterable[str]) -> str:
    """Numbers with their words, in this order, without zeros."""
    return ", ".join(f"{numbers[word]} {word}" for word in order if numbers.get(word))


def of(count: int, word: str) -> str:
    """A number of things."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def print_more(there: int, shown: int) -> None:
    """Say how many were left out."""
    if there > shown:
        out.print(f"and {there - shown} more: --format json has all")


def clock(at: float) -> str:
    """The time of day here; with the date where that is another one."""
    when, today = time.localtime(at), time.localtime()
    return time.strftime("%H:%M:%S" if when[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", when)


def reason_data(reason: Reason) -> dict[str, str]:
    """A reason, for programs."""
    return {"code": reason.code.value, "sentence": reason.sentence}


def story_data(story: Iterable[StoryEntry]) -> list[dict[str, Any]]:
    """A story, for programs."""
    return [{"at": entry.at, "state": entry.state, **reason_data(entry.reason)} for entry in story]
