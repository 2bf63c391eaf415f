"""Lines that a terminal or a web page broke in two: put together before anything is read out of them.

A console line of metrics, ` - ` between them, is often copied from a window of 80 or 120 columns: it then goes on in
lines of the same width without the mark of its process, broken anywhere, also inside a name or a number. What must
never happen is that a number is read in half, or that a line of something else is taken for the rest of one. So a line
that may go on is held back until the next one tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from trimtab.formats.logs.records import LogLine, clean, number, process_of, uncoloured

NARROWEST, WIDEST = 40, 320
"""Columns of windows from which logs are copied; a line that is wider was not broken."""

MAX_PIECES = 1_000
TRIMMED = 2
"""Columns by which a broken line may be short, where blanks at its end were lost."""

_WORDS = frozenset(("nan", "inf", "-inf", "True", "False", "None"))


class WrappedLines:
    """Lines in, whole lines out. `starts` finds the beginning of a line that may be broken."""

    def __init__(self, starts: re.Pattern[str] | None) -> None:
        self._starts = starts
        self._open = ""
        self._pieces = 0
        self._width = self._last = 0

    @property
    def holds(self) -> bool:
        """Whether a line is held back."""
        return self._pieces > 0

    def take(self, raw: str, whole: bool = True) -> Iterator[tuple[str, LogLine]]:
        """The lines that are whole now, each with the mark of the process that wrote it."""
        if self._pieces and self._goes_on(raw):
            self._join(raw)
            if whole and self._pieces < MAX_PIECES and self._last >= self._width - TRIMMED:
                return
            yield from self._given(whole)
            return
        yield from self._given(whole=True)
        text = uncoloured(raw)
        if whole and self._starts and NARROWEST <= len(text) <= WIDEST and self._starts.search(text):
            self._open, self._pieces, self._width, self._last = text, 1, len(text), len(text)
        else:
            yield process_of(raw), LogLine(clean(raw), whole)

    def end(self) -> Iterator[tuple[str, LogLine]]:
        """What was held back, as nothing follows."""
        yield from self._given(whole=True)

    def _given(self, whole: bool) -> Iterator[tuple[str, LogLine]]:
        if self._pieces:
            raw, self._open, self._pieces = self._open, "", 0
            yield process_of(raw), LogLine(clean(raw), whole)

    def _goes_on(self, raw: str) -> bool:
        text = uncoloured(raw)
        if not text.strip() or len(text) > self._width or process_of(raw) or self._last < self._width - TRIMMED:
            return False
        before = self._open.rpartition(" - ")[2]
        cut = not _is_item(before)
        if not cut and self._starts and (begun := self._starts.search(text)) and not begun.start():
            return False  # the next step
        if self._pieces == 1 and not cut and " - " not in f" {text} ":
            return False  # nothing but a number or a word: hardly the rest of a line
        items = _joined(before, text).split(" - ")
        if len(text) >= self._width - TRIMMED:
            items.pop()  # it may go on itself
        return all(_is_item(item) for item in items if item.strip(" -"))

    def _join(self, raw: str) -> None:
        text = uncoloured(raw)
        self._open = _joined(self._open, text)
        self._pieces += 1
        self._last = len(text)


def unwrapped(lines: Iterable[tuple[str, bool]], starts: re.Pattern[str] | None) -> Iterator[LogLine]:
    """The lines of a log, as written, with those put together that were broken."""
    wraps = WrappedLines(starts)
    for raw, whole in lines:
        for _, line in wraps.take(raw, whole):
            yield line
    for _, line in wraps.end():
        yield line


def _joined(before: str, after: str) -> str:
    """Two pieces of a line; a blank between them that was lost is put back."""
    lost = (before.endswith(" -") and not after.startswith(" ")) or (
        after.startswith("- ") and not before.endswith(" ")
    )
    return f"{before} {after}" if lost else before + after


def _is_item(text: str) -> bool:
    """Whether it is a name and a number."""
    name, colon, value = text.strip().rpartition(":")
    return (
        bool(colon and name) and not any(c.isspace() for c in name) and (number(value) is not None or value in _WORDS)
    )
