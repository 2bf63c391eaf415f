"""Reads the history of Weights & Biases runs, without its package: the `.wandb` file that every run folder holds.

Such a file is a record log in blocks of 32 KiB, whose records are protocol-buffer messages; one of a kind is a row of
history with named values as JSON. A running or killed run leaves a cut-off record: what precedes it is read, and the
cut is reported. Checksums are not verified; nothing read here is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.formats.files import unreadable
from trimtab.formats.logs.records import LARGEST_VALUE
from trimtab.formats.logs.tensorboard import BYTES, VARINT, fields

SUMMARY = "wandb-summary.json"
HISTORY = "wandb-history.jsonl"
OUTPUT = "output.log"
MAX_RECORD_BYTES = 64 << 20
_HEAD = b":W&B"
_HEAD_BYTES = 7
_BLOCK = 32768
_RECORD_HEAD = 7  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _ITEM, _STEP, _KEY, _NESTED_KEY, _VALUE = 2, 1, 2, 1, 2, 16


def is_wandb_file(path: Path) -> bool:
    """Whether the file is a run's record log; False for an unreadable file: reading it raises the error."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except (OSError, ValueError):
        return False


def run_files(folder: Path) -> list[Path]:
    """What a run's folder, or a folder of runs, holds of the newest run: its record log, else what else it wrote."""
    for place in (folder, folder / "latest-run", folder / "wandb" / "latest-run"):
        logs = sorted(place.glob("*.wandb"))
        if logs:
            return logs[-1:]
        for name in (HISTORY, OUTPUT, SUMMARY):
            for inner in (place / "files" / name, place / name):
                if inner.is_file() and (name != OUTPUT or (place / "files").is_dir() or _is_wandb(place)):
                    return [inner]
    runs = sorted([*folder.glob("*run-*/*.wandb"), *folder.glob("wandb/*run-*/*.wandb")])
    return runs[-1:]


def _is_wandb(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def read_rows(path: Path, cut_off: Callable[[], None]) -> Iterator[tuple[int, Mapping[str, float]]]:
    """The rows of history, in order, with W&B's steps; `cut_off` is called if the file ends early."""
    try:
        with path.open("rb") as file:
            for record in _records(file.read, cut_off):
                try:
                    row = _row(memoryview(record))
                except (ValueError, IndexError):
                    cut_off()
                    return
                if row is not None:
                    yield row
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def _records(read: Callable[[int], bytes], cut_off: Callable[[], None]) -> Iterator[bytes]:
    """The records of a log; a record may lie in several blocks."""
    read(_HEAD_BYTES)
    open_record: bytearray | None = None
    first = True
    while block := read(_BLOCK - (_HEAD_BYTES if first else 0)):
        full = len(block) == _BLOCK - (_HEAD_BYTES if first else 0)
        first, at = False, 0
        while len(block) - at >= _RECORD_HEAD:
            length, kind = int.from_bytes(block[at + 4 : at + 6], "little"), block[at + 6]
            data = block[at + _RECORD_HEAD : at + _RECORD_HEAD + length]
            if kind == 0 and length == 0:
                break  # padding
            if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(data) < length:
                cut_off()
                return
            at += _RECORD_HEAD + length
            if kind in (_FULL, _FIRST):
                open_record = bytearray()
            if open_record is None or len(open_record) + length > MAX_RECORD_BYTES:
                cut_off()
                return
            open_record += data
            if kind in (_FULL, _LAST):
                yield bytes(open_record)
                open_record = None
        if not full:
            break
    if open_record is not None:
        cut_off()


def _row(record: memoryview) -> tuple[int, dict[str, float]] | None:
    """A row of history; None for every other record. ValueError or IndexError if it is malformed."""
    for field, kind, _, content in fields(record):
        if field != _HISTORY or kind != BYTES:
            continue
        step, values = 0, {}
        for inner, inner_kind, _, data in fields(content):
            if inner == _ITEM and inner_kind == BYTES:
                name, value = _item(data)
                if name and value is not None:
                    values[name] = value
            elif inner == _STEP and inner_kind == BYTES:
                step = next((found for at, how, found, _ in fields(data) if (at, how) == (1, VARINT)), 0)
        return step, values
    return None


def _item(data: memoryview) -> tuple[str, float | None]:
    key, nested, text = "", [], b""
    for field, kind, _, content in fields(data):
        if kind != BYTES:
            continue
        if field == _KEY:
            key = bytes(content).decode("utf-8", errors="replace")
        elif field == _NESTED_KEY:
            nested.append(bytes(content).decode("utf-8", errors="replace"))
        elif field == _VALUE and len(content) <= 80:  # longer ones are no numbers
            text = bytes(content)
    try:
        value: Any = json.loads(text) if text else None
    except (ValueError, RecursionError):
        value = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_VALUE
    return key or ".".join(nested), float(value) if is_number else None
