"""Joins log lines that a terminal or a web page wrapped.

A console line of metrics, separated by ` - `, is often copied from a window of 80 or 120 columns: it then continues in
lines of the same width without the prefix of its process, broken anywhere, also inside a name or a number. What must
never happen: half a number is read, or an unrelated line is joined. So a line that may continue is held back until the
next one decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from trimtab.formats.logs.records import LogLine, clean, number, process_of, uncoloured

NARROWEST, WIDEST = 40, 320
"""Widths of windows from which logs are copied; wider lines were not wrapped."""

MAX_PIECES = 1_000
TRIMMED = 2
"""Columns that a wrapped line may lack, where trailing blanks were lost."""

_WORDS = frozenset(("nan", "inf", "-inf", "True", "False", "None"))


class WrappedLines:
    """Joins wrapped lines. `line_start` finds the start of a line that may be wrapped."""

    def __init__(self, line_start: re.Pattern[str] | None) -> None:
        self._starts = line_start
        self._open = ""
        self._pieces = 0
        self._width = self._last = 0

    @property
    def holds(self) -> bool:
        return self._pieces > 0

    def take(self, raw: str, whole: bool = True) -> Iterator[tuple[str, LogLine]]:
        """The lines that are complete now, each with its process."""
        if self._pieces and self._continues(raw):
            self._join(raw)
            if whole and self._pieces < MAX_PIECES and self._last >= self._width - TRIMMED:
                return
            yield from self._release(whole)
            return
        yield from self._release(whole=True)
        text = uncoloured(raw)
        if whole and self._starts and NARROWEST <= len(text) <= WIDEST and self._starts.search(text):
            self._open, self._pieces, self._width, self._last = text, 1, len(text), len(text)
        else:
            yield process_of(raw), LogLine(clean(raw), whole)

    def end(self) -> Iterator[tuple[str, LogLine]]:
        """The line held back: nothing follows."""
        yield from self._release(whole=True)

    def _release(self, whole: bool) -> Iterator[tuple[str, LogLine]]:
        if self._pieces:
            raw, self._open, self._pieces = self._open, "", 0
            yield process_of(raw), LogLine(clean(raw), whole)

    def _continues(self, raw: str) -> bool:
        text = uncoloured(raw)
        if not text.strip() or len(text) > self._width or process_of(raw) or self._last < self._width - TRIMMED:
            return False
        before = self._open.rpartition(" - ")[2]
        cut = not _is_item(before)
        if not cut and self._starts and (begun := self._starts.search(text)) and not begun.start():
            return False  # the next step
        if self._pieces == 1 and not cut and " - " not in f" {text} ":
            return False  # a lone number or word: not a continuation
        items = _joined(before, text).split(" - ")
        if len(text) >= self._width - TRIMMED:
            items.pop()  # it may itself be cut
        return all(_is_item(item) for item in items if item.strip(" -"))

    def _join(self, raw: str) -> None:
        text = uncoloured(raw)
        self._open = _joined(self._open, text)
        self._pieces += 1
        self._last = len(text)


def unwrapped(lines: Iterable[tuple[str, bool]], line_start: re.Pattern[str] | None) -> Iterator[LogLine]:
    """The lines of a log with wrapped ones joined."""
    wraps = WrappedLines(line_start)
    for raw, whole in lines:
        for _, line in wraps.take(raw, whole):
            yield line
    for _, line in wraps.end():
        yield line


def _joined(before: str, after: str) -> str:
    """Two pieces of a line, with the lost blank between them restored."""
    lost = (before.endswith(" -") and not after.startswith(" ")) or (
        after.startswith("- ") and not before.endswith(" ")
    )
    return f"{before} {after}" if lost else before + after


def _is_item(text: str) -> bool:
    """Whether the text is `name:number`."""
    name, colon, value = text.strip().rpartition(":")
    return (
        bool(colon and name) and not any(c.isspace() for c in name) and (number(value) is not None or value in _WORDS)
    )
