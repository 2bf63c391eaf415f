"""Errors that trimtab reports: what is wrong, where (file and key, or line), and what to do.

Each kind carries an exit status for the command line. Raised where the fault is found, never wrapped again.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

MAX_LINE_CHARS = 1_000  # of one line of an error
UNKNOWN_KEY = "unknown key {}"
MAX_KEY_CHARS = 200  # a longer word is no misspelt key


class TrimtabError(Exception):
    """A failure: a message for the user and an exit status for scripts."""

    exit_status = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Up to three printable lines: what, where, hint."""
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
    """The input is valid, but no feasible solution exists."""

    exit_status = 3


class UnreachableError(TrimtabError):
    """The cluster or an engine cannot be reached, or failed."""

    exit_status = 4


def printable(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """The text for any terminal: control characters and lone surrogates escaped, the middle of a long text cut."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known key closest to a misspelt one, if any is close enough."""
    if len(word) > MAX_KEY_CHARS:
        return None
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None


def meant(word: object, known: Iterable[str], otherwise: str = "") -> str:
    """The hint for an unknown word: the nearest known one, if any is close enough."""
    near = nearest(str(word), known)
    return f"did you mean {near}?" if near else otherwise


def unknown(word: object, known: Collection[str], where: str | None = None, what: str = UNKNOWN_KEY) -> InputError:
    """The error for a word that is none of the known ones."""
    listed = ", ".join([*known][:24]) or "none"
    return InputError(what.format(word), where=where, hint=meant(word, known, f"known: {listed}"))


def check_known(
    words: Iterable[object], known: Collection[str], where: str | None = None, what: str = UNKNOWN_KEY
) -> None:
    for word in words:
        if word not in known:
            raise unknown(word, known, where, what)
