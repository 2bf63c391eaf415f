"""Log of capacity gains since a class was unschedulable, so that only classes are tried again that could fit now.

Entries: rows where capacity became free or idle, rows where a task became evictable, pools that use less of their
quota, and "anything" for all at once. A gain that is not logged would keep a task waiting that could start, which must
never happen; a superfluous entry only costs time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_ENTRIES = 256  # more are replaced by "anything"


class QueueingHints(NamedTuple):
    """All gains since a position."""

    rows: frozenset[int]  # capacity is free or idle there, or will be soon
    evictable_rows: frozenset[int]  # with a task that became evictable
    pools: frozenset[str]  # that use less of their quota
    anything: bool

    @property
    def room(self) -> bool:
        """Whether there is more capacity without evictions."""
        return self.anything or bool(self.rows or self.pools)


class Unschedulable(NamedTuple):
    """No task of a class could start, or evict others to start."""

    since: int  # position in the log
    quota_alone: bool  # its quota is short, but nodes might fit it
    timed: bool  # time alone may change it
    kept: int  # starvation reserves that were applied when it was tried


class HintLog:
    """Gains in order. Positions only grow."""

    def __init__(self, entries: Iterable[tuple[str, int | str]] = ()) -> None:
        self._entries: list[tuple[str, int | str]] = [(what, where) for what, where in entries]
        self._begin = 0
        self._summed: tuple[int, int, QueueingHints] | None = None

    @property
    def position(self) -> int:
        return self._begin + len(self._entries)

    def row(self, row: int) -> None:
        self._add("row", row)

    def evictable(self, row: int) -> None:
        self._add("evictable", row)

    def pool(self, pool: str) -> None:
        self._add("pool", pool)

    def anything(self) -> None:
        self._add("anything", "")

    def _add(self, what: str, where: int | str) -> None:
        self._entries.append((what, where))
        if len(self._entries) > MAX_ENTRIES:
            self._begin += len(self._entries) - 1
            self._entries = [("anything", "")]

    def since(self, position: int) -> QueueingHints:
        if self._summed is None or self._summed[:2] != (position, self.position):
            self._summed = (position, self.position, _sum(self.entries(position)))
        return self._summed[2]

    def entries(self, position: int) -> list[tuple[str, int | str]]:
        at = position - self._begin
        return [("anything", "")] if at < 0 else self._entries[at:]

    def take_back(self, position: int) -> None:
        """Drop what was logged since the position: it was no gain."""
        del self._entries[max(0, position - self._begin) :]
        self._summed = None

    def forget(self, position: int) -> None:
        """Drop entries before the position: they are not read any more."""
        at = max(0, position - self._begin)
        del self._entries[:at]
        self._begin += at


def _sum(entries: Iterable[tuple[str, int | str]]) -> QueueingHints:
    by_what: dict[str, set[int | str]] = {}
    for what, where in entries:
        by_what.setdefault(what, set()).add(where)
    nothing: set[int | str] = set()
    return QueueingHints(
        frozenset(int(where) for where in by_what.get("row", nothing)),
        frozenset(int(where) for where in by_what.get("evictable", nothing)),
        frozenset(str(where) for where in by_what.get("pool", nothing)),
        "anything" in by_what,
    )
