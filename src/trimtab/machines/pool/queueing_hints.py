"""What has become more since somebody found no room: so that an end looks only at those whom it could help.

A log of rows of nodes where something fell free or idle, of rows where somebody came who may have to leave, of pools
whose quota is less used, and of everything at once where it is simpler to say so. A gain that is not written here keeps
somebody waiting who could start, which must never happen; one too many costs only a look.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_ENTRIES = 256  # of them in the log; beyond that it is everything


class QueueingHints(NamedTuple):
    """All that was gained behind some point."""

    rows: frozenset[int]  # something is free or idle there, or will be in a moment
    evictable_rows: frozenset[int]  # somebody is there who may have to leave
    pools: frozenset[str]  # less of the quota is used
    anything: bool

    @property
    def room(self) -> bool:
        """Whether there is more room with nobody leaving."""
        return self.anything or bool(self.rows or self.pools)


class Unschedulable(NamedTuple):
    """Nobody of a line could start, nor have others leave for it."""

    since: int  # what had been gained by then
    quota_alone: bool  # their quota is short, and nodes might have room
    timed: bool  # time alone may change it
    kept: int  # of those who were patient then, so many had room kept for them before it was looked at


class HintLog:
    """What was gained, in order. Positions in it only grow."""

    def __init__(self, entries: Iterable[tuple[str, int | str]] = ()) -> None:
        self._entries: list[tuple[str, int | str]] = [(what, where) for what, where in entries]
        self._begin = 0
        self._summed: tuple[int, int, QueueingHints] | None = None

    @property
    def position(self) -> int:
        """What is gained from now on comes behind it."""
        return self._begin + len(self._entries)

    def row(self, row: int) -> None:
        """Something is free or idle there, or will be in a moment."""
        self._add("row", row)

    def evictable(self, row: int) -> None:
        """Somebody is there who may have to leave."""
        self._add("evictable", row)

    def pool(self, pool: str) -> None:
        """Less of its quota is used."""
        self._add("pool", pool)

    def anything(self) -> None:
        """Everybody may find room."""
        self._add("anything", "")

    def _add(self, what: str, where: int | str) -> None:
        self._entries.append((what, where))
        if len(self._entries) > MAX_ENTRIES:
            self._begin += len(self._entries) - 1
            self._entries = [("anything", "")]

    def since(self, position: int) -> QueueingHints:
        """All that was gained behind a position."""
        if self._summed is None or self._summed[:2] != (position, self.position):
            self._summed = (position, self.position, _sum(self.entries(position)))
        return self._summed[2]

    def entries(self, position: int) -> list[tuple[str, int | str]]:
        """The log from a position on."""
        at = position - self._begin
        return [("anything", "")] if at < 0 else self._entries[at:]

    def take_back(self, position: int) -> None:
        """What was written behind it was no gain."""
        del self._entries[max(0, position - self._begin) :]
        self._summed = None

    def forget(self, position: int) -> None:
        """Nobody asks for what came before any more."""
        at = max(0, position - self._begin)
        del self._entries[:at]
        self._begin += at


def _sum(entries: Iterable[tuple[str, int | str]]) -> QueueingHints:
    by_what: dict[str, set[int | str]] = {}
    for what, where in entries:
        by_what.setdefault(what, set()).add(where)
    nothing: set[int | str] = set()
    return QueueingHints(
        frozenset(int(one) for one in by_what.get("row", nothing)),
        frozenset(int(one) for one in by_what.get("evictable", nothing)),
        frozenset(str(one) for one in by_what.get("pool", nothing)),
        "anything" in by_what,
    )
