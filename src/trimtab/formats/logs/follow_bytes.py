"""Logs that are still being written, as bytes in and lines or scalars out.

A run writes while it is read: the last line is half there, a progress bar has not ended its line, an event record is
cut in two. What is not whole stays here until the rest comes, and is never guessed at. No file is opened here and no
clock is read: whoever tails the file hands over what it found.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

from trimtab.formats.logs.records import MAX_LINE_BYTES, LogLine
from trimtab.formats.logs.tensorboard import MAX_RECORD_BYTES, Scalar, scalars_of
from trimtab.formats.logs.wrapped_lines import WrappedLines

HEAD_BYTES = 64
_EVENT_FILE = b"brain.Event:"
_HEAD, _CHECKSUM = 12, 4


class LineBytes:
    """The lines of one text file that hold any of the needles, each with its number and the process that wrote it."""

    def __init__(self, needles: tuple[bytes, ...], starts: re.Pattern[str] | None = None) -> None:
        self.count = 0
        self._needles = needles
        self._wraps = WrappedLines(starts)
        self._rest = b""

    def take(self, data: bytes) -> Iterator[tuple[int, str, LogLine]]:
        """The lines that end in these bytes. A carriage return ends one too: progress bars redraw themselves so."""
        # A file that was truncated under its writer begins with zeros.
        data = data.replace(b"\r", b"\n").replace(b"\0", b"")
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            # No log has such lines: it is let go, so that no file, however odd, fills the memory.
            self._rest = b""
        for one in whole:
            self.count += 1
            # What follows a line that may be broken is looked at whatever is in it.
            if self._wraps.holds or any(needle in one for needle in self._needles):
                yield from self._numbered(self._wraps.take(_text(one[:MAX_LINE_BYTES])))

    def quiet(self) -> Iterator[tuple[int, str, LogLine]]:
        """Nothing came for a while: a line that was held back as it might go on, does not."""
        yield from self._numbered(self._wraps.end())

    def end(self) -> Iterator[tuple[int, str, LogLine]]:
        """The last line, where it never ended: it may have been cut off."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self.count += 1
            yield from self._numbered(self._wraps.take(_text(rest), whole=False))
        yield from self._numbered(self._wraps.end())

    def _numbered(self, lines: Iterator[tuple[str, LogLine]]) -> Iterator[tuple[int, str, LogLine]]:
        for mark, line in lines:
            yield self.count, mark, line


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


class EventBytes:
    """The scalars of one TensorBoard event file."""

    def __init__(self, keeps: Callable[[str], bool]) -> None:
        self._keeps = keeps
        self._rest = b""
        self.broken = False  # bytes that are no record came; nothing after them can be read

    def take(self, data: bytes) -> list[Scalar]:
        """The scalars of the records that end in these bytes."""
        found: list[Scalar] = []
        rest = memoryview(self._rest + data)
        while not self.broken and len(rest) >= _HEAD:
            length = struct.unpack("<Q", rest[:8])[0]
            if length > MAX_RECORD_BYTES:
                self.broken = True
            elif len(rest) < _HEAD + length + _CHECKSUM:
                break
            else:
                try:
                    found.extend(scalars_of(rest[_HEAD : _HEAD + length], self._keeps))
                except (ValueError, struct.error, IndexError):
                    self.broken = True
                rest = rest[_HEAD + length + _CHECKSUM :]
        self._rest = b"" if self.broken else bytes(rest)
        return found

    def end(self) -> bool:
        """Whether a record was cut off at the end of the file."""
        return bool(self._rest) or self.broken


def is_event_head(data: bytes) -> bool | None:
    """Whether a file that begins so is TensorBoard's; None where too little of it is there to tell."""
    if _EVENT_FILE in data[:HEAD_BYTES]:
        return True
    return False if len(data) >= HEAD_BYTES or b"\n" in data[:HEAD_BYTES] else None
