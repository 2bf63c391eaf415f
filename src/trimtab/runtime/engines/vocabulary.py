"""Which token ids wrote given bytes: exactly, or not at all.

Used where an engine leaves ids out of its stream but tells how many they were and what they wrote. One way to write
those bytes with so many tokens is an answer; two ways are none. Tokens that write nothing are left aside: a model that
puts a control token into the middle of a character is beyond help, and those that end an answer are always told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence


class Vocabulary:
    """What each id writes, and which ids write what."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = dict(pieces)
        self._writers: dict[bytes, list[int]] = defaultdict(list)
        for one, piece in self._pieces.items():
            if piece:
                self._writers[piece].append(one)
        self._longest = max(map(len, self._writers), default=0)

    def between(
        self, before: Sequence[int], written: bytes, after: Sequence[int], tokens: int
    ) -> tuple[int, ...] | None:
        """The so many ids between two known runs that together wrote these bytes; None unless there is just one way."""
        head = b"".join(self._pieces.get(one, b"") for one in before)
        tail = b"".join(self._pieces.get(one, b"") for one in after)
        if not (written.startswith(head) and written.endswith(tail)) or len(written) < len(head) + len(tail):
            return None
        ways = self._ways(written[len(head) : len(written) - len(tail)], tokens)
        return ways[0] if len(ways) == 1 else None

    def _ways(self, rest: bytes, tokens: int) -> list[tuple[int, ...]]:
        """Up to two ways to write bytes in so many tokens: two are as good as many."""
        if tokens == 0:
            return [] if rest else [()]
        found: list[tuple[int, ...]] = []
        for cut in range(1, min(len(rest) - tokens + 1, self._longest) + 1):
            writers = self._writers.get(rest[:cut])
            if not writers:
                continue
            for way in self._ways(rest[cut:], tokens - 1):
                found.extend((one, *way) for one in writers)
                if len(found) > 1:
                    return found[:2]
        return found
