"""Stop strings that span the interruption of an answer.

An engine that continues from prompt plus partial answer looks for stop strings only in its own output. A stop string
that began before the interruption and ends after it would be missed, and the answer would run on. So the first text
after an interruption is held back until it is longer than any stop string could reach, and searched together with the
text before. A stop string may also have been complete at the interruption without being reported: the text before is
searched first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.runtime.engines.engine import StreamDelta


@dataclass(frozen=True)
class StopMatch:
    """A stop string across the interruption: its begin in the text before, its end in the text after."""

    word: str
    begins: int  # characters from the beginning of the text before
    ends: int  # characters after the interruption; 0 or less: it was already complete


class StopStringBuffer:
    """Holds back the first deltas after an interruption until they cannot be part of a spanning stop string."""

    def __init__(self, before: str, stop: Sequence[str]) -> None:
        self.held: list[StreamDelta] = []
        self._before = before
        self._stop = stop
        self._ensure_reachable = max((len(word) for word in stop), default=0) - 1
        self._text = ""

    @property
    def open(self) -> bool:
        """Whether deltas are still held back."""
        return len(self._text) < self._ensure_reachable

    def hold(self, piece: StreamDelta) -> StopMatch | None:
        """Adds a delta; returns a stop string that is complete now."""
        self.held.append(piece)
        self._text += piece.text or ""
        return self.found(self._text)

    def before(self) -> StopMatch | None:
        """The first stop string that was complete at the interruption."""
        places = [(at + len(word), at, word) for word in self._stop if (at := self._before.find(word)) >= 0]
        if not places:
            return None
        end, at, word = min(places)
        return StopMatch(word, at, end - len(self._before))

    def found(self, after: str) -> StopMatch | None:
        """The first stop string that begins before the interruption and ends within this text."""
        tail = self._before[-self._ensure_reachable :] if self._ensure_reachable > 0 else ""
        joined, skipped = tail + after, len(self._before) - len(tail)
        places = []
        for word in self._stop:
            at = joined.find(word)
            if 0 <= at < len(tail) < at + len(word):
                places.append((at + len(word), at, word))
        if not places:
            return None
        end, at, word = min(places)
        return StopMatch(word, skipped + at, end - len(tail))
