"""A stop string that lies across the cut of an answer.

An engine that goes on from prompt plus partial answer looks for stop strings in what it makes itself. One that began
before the cut and ends after it is seen by nobody, and the answer runs on. So the first text after a cut is held back
until it is longer than any stop string could reach, and looked at together with the text before. Nor does anybody see
one that was complete when the cut came, before the engine could say so: the text before is looked at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.runtime.engines.engine import StreamDelta


@dataclass(frozen=True)
class StopMatch:
    """A stop string that lies across the cut: where it begins in the text before it, and where it ends after it."""

    word: str
    begins: int  # characters from the beginning of the text before the cut
    ends: int  # characters after the cut; 0 or less: it was complete


class StopStringBuffer:
    """Holds the first pieces after a cut back until they cannot belong to a stop string that began before it."""

    def __init__(self, before: str, stop: Sequence[str]) -> None:
        self.held: list[StreamDelta] = []
        self._before = before
        self._stop = stop
        self._ensure_reachable = max((len(word) for word in stop), default=0) - 1
        self._text = ""

    @property
    def open(self) -> bool:
        """Whether pieces are still held back."""
        return len(self._text) < self._ensure_reachable

    def hold(self, piece: StreamDelta) -> StopMatch | None:
        """Keep a piece; says whether a stop string is complete now."""
        self.held.append(piece)
        self._text += piece.text or ""
        return self.found(self._text)

    def before(self) -> StopMatch | None:
        """The first stop string that was complete at the cut."""
        places = [(at + len(word), at, word) for word in self._stop if (at := self._before.find(word)) >= 0]
        if not places:
            return None
        end, at, word = min(places)
        return StopMatch(word, at, end - len(self._before))

    def found(self, after: str) -> StopMatch | None:
        """The first stop string that begins before the cut and ends within this text."""
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
