"""The few kinds of failure that trimtab reports.

Every error says what is wrong, where (file and key, or line), and what to do, and carries the exit status of the
command line. Whoever finds the fault raises it; nobody wraps it again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
        """One to three lines: what, where, what to do."""
        lines = [self.what]
        if self.where:
            lines.append(f"at {self.where}")
        if self.hint:
            lines.append(self.hint)
        return lines


class InputError(TrimtabError):
    """The input or the call is wrong."""

    exit_status = 2


class InfeasibleError(TrimtabError):
    """The input is right, but nothing feasible exists."""

    exit_status = 3


class UnreachableError(TrimtabError):
    """The cluster or an engine cannot be reached, or failed."""

    exit_status = 4


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that the user most likely meant, if any is near enough."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None
