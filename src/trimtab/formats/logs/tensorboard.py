"""Reads scalars from TensorBoard event files, without TensorBoard.

An event file is a sequence of records (length, checksum, bytes, checksum), each a protocol-buffer message with a step
and tagged values. Only scalars are read. A running or killed run leaves a cut-off record: what precedes it is read, and
the cut is reported. Checksums are not verified; nothing read here is ever executed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from trimtab.core.frozen import Frozen
from trimtab.formats.files import unreadable
from trimtab.formats.logs.records import LARGEST_VALUE

MAX_RECORD_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
HEAD_BYTES = 64
_EVENT_FILE = b"brain.Event:"
_HEAD, _CHECKSUM = 12, 4

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class Scalar(Frozen):
    """A logged value."""

    step: int
    tag: str
    value: float


def is_event_file(path: Path) -> bool:
    """Whether the file has TensorBoard's header; False for an unreadable file: reading it raises the error."""
    try:
        with path.open("rb") as file:
            return is_event_head(file.read(HEAD_BYTES)) is True
    except (OSError, ValueError):
        return False


def read_scalars(path: Path, keeps: Callable[[str], bool], cut_off: Callable[[], None]) -> Iterator[Scalar]:
    """The scalars with a kept tag, in order; `cut_off` is called if the file ends early."""
    events = EventBytes(keeps)
    try:
        with path.open("rb") as file:
            while not events.broken and (data := file.read(CHUNK_BYTES)):
                yield from events.take(data)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if events.end():
        cut_off()


class EventBytes:
    """Parses the scalars of a TensorBoard event file."""

    def __init__(self, keeps: Callable[[str], bool]) -> None:
        self._keeps = keeps
        self._rest = b""
        self.broken = False  # malformed bytes: nothing after them can be read

    def take(self, data: bytes) -> list[Scalar]:
        """The scalars of the records completed by these bytes."""
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
        return bool(self._rest) or self.broken


def is_event_head(data: bytes) -> bool | None:
    """Whether a file with this head is TensorBoard's; None if the head is too short."""
    if _EVENT_FILE in data[:HEAD_BYTES]:
        return True
    return False if len(data) >= HEAD_BYTES or b"\n" in data[:HEAD_BYTES] else None


def scalars_of(data: memoryview, keeps: Callable[[str], bool]) -> list[Scalar]:
    """The scalars of a record; ValueError, struct.error or IndexError if it is malformed."""
    step = 0
    found: list[tuple[str, float]] = []
    for field, kind, value, content in fields(data):
        if field == 2 and kind == VARINT:
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif field == 5 and kind == BYTES:
            for inner, inner_kind, _, summary in fields(content):
                if inner == 1 and inner_kind == BYTES:
                    tagged = _tagged_value(summary, keeps)
                    if tagged is not None:
                        found.append(tagged)
    return [Scalar(step, tag, value) for tag, value in found if abs(value) <= LARGEST_VALUE]


def _tagged_value(data: memoryview, keeps: Callable[[str], bool]) -> tuple[str, float] | None:
    tag: str | None = None
    value: float | None = None
    for field, kind, _, content in fields(data):
        if field == 1 and kind == BYTES:
            tag = bytes(content).decode("utf-8", errors="replace")
        elif field == 2 and kind == FIXED32:
            value = struct.unpack("<f", content)[0]
        elif field == 8 and kind == BYTES:
            value = _tensor_scalar(content)
    return (tag, value) if tag is not None and value is not None and keeps(tag) else None


def _tensor_scalar(data: memoryview) -> float | None:
    """The number in a scalar tensor, the newer encoding. Types: 1 is float, 2 is double."""
    form = {1: "<f", 2: "<d"}
    dtype = 0
    content: memoryview | None = None
    for field, kind, value, inside in fields(data):
        if field == 1 and kind == VARINT:
            dtype = value
        elif field in (4, 5, 6) and kind in (BYTES, FIXED32, FIXED64):
            content = inside
    if content is None or dtype not in form or len(content) != struct.calcsize(form[dtype]):
        return None
    return float(struct.unpack(form[dtype], content)[0])


def fields(data: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """(field number, wire type, number, bytes) of a message; ValueError if malformed."""
    position = 0
    empty = data[:0]
    while position < len(data):
        key, position = _varint(data, position)
        field, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _varint(data, position)
            yield field, kind, value, empty
            continue
        if kind == BYTES:
            size, position = _varint(data, position)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if position + size > len(data):
            raise ValueError("a field is longer than its message")
        yield field, kind, 0, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number is too long")
