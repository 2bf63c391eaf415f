"""The few kinds of failure that trimtab reports.

Every error says what is wrong, where (file and key, or line), and what to do, and carries the exit status of the
command line. Whoever finds the fault raises it; nobody wraps it again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LINE_CHARS = 1_000
"""Characters of one line of an error."""

MAX_KEY_CHARS = 200
"""A longer one is no misspelt key."""


class TrimtabError(Exception):
    """A failure with a sentence for people and an exit status for programs."""

    exit_status = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """One to three lines: what, where, what to do. All of them can be printed, whatever was in the input."""
        lines = [self.what]
        if self.where:
            lines.append(f"at {self.where}")
        if self.hint:
            lines.append(self.hint)
        return [printable(line) for line in lines]


class InputError(TrimtabError):
    """The input or the call is wrong."""

    exit_status = 2


class InfeasibleError(TrimtabError):
    """The input is right, but nothing feasible exists."""

    exit_status = 3


class UnreachableError(TrimtabError):
    """The cluster or an engine cannot be reached, or failed."""

    exit_status = 4


def printable(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """A text that any terminal can show: control characters and lone surrogates escaped, a long middle left out."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that the user most likely meant, if any is near enough."""
    if len(word) > MAX_KEY_CHARS:
        return None
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None
